"""Runs recovery duties on request, and reads recent logs of coordinators and a workspace."""

from collections.abc import Awaitable, Callable
from uuid import UUID

import msgspec

from tenuto.engine.core import Core
from tenuto.engine.engine import DEFAULT_WORKSPACE, Engine
from tenuto.engine.flows.start import Flows
from tenuto.engine.tasks.maintenance import BATCH, TaskMaintenance
from tenuto.engine.tasks.query import TaskQueries
from tenuto.engine.views import LogLine

MAX_BATCHES = 20
"""Batches of each duty in one request; the coordinator continues with the rest."""


class RecoverResult(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers of expired leases, of tasks promoted by timers, and of deferred work done."""

    ok: bool = True
    expired: int = 0
    promoted: int = 0
    flowed: int = 0


async def recover(core: Core, actor: str, workspace: UUID | None = None) -> RecoverResult:
    """Expires leases, promotes due tasks and runs deferred work; returns how many of each."""
    maintenance, flows = TaskMaintenance(core), Flows(core, workspace or DEFAULT_WORKSPACE, actor)
    return RecoverResult(
        expired=await _repeat_while_full(lambda: maintenance.expire_once(actor, workspace), BATCH),
        promoted=await _repeat_while_full(
            lambda: maintenance.promote_once(actor, workspace), BATCH
        ),
        flowed=await _repeat_while_full(lambda: flows.run_deferred_once(workspace=workspace), 1),
    )


async def _repeat_while_full(duty: Callable[[], Awaitable[int]], batch_size: int) -> int:
    """Repeats a duty while it returns full batches; returns the sum of the results."""
    total = 0
    for _ in range(MAX_BATCHES):
        done = await duty()
        total += done
        if done < batch_size:
            break
    return total


async def recent_logs(
    engine: Engine, level: str, limit: int, workspace: UUID | None = None
) -> list[LogLine]:
    """Returns the newest events of at least this level, of one workspace and of coordinators."""
    system_queries = TaskQueries(engine.system)
    if workspace in (None, engine.workspace):
        lines = await engine.query.severe_events(engine.workspace, level, limit)
    else:
        lines = await system_queries.severe_events(workspace, level, limit)
    lines += await system_queries.coordinator_events(level, limit)
    return sorted(lines, key=lambda line: line.at)[-limit:]
