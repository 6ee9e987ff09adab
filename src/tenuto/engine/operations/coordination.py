"""What people ask of coordinators: to look now, and what happened."""

from collections.abc import Awaitable, Callable
from uuid import UUID

import msgspec

from tenuto.engine.core import Core
from tenuto.engine.engine import DEFAULT_WORKSPACE, Engine
from tenuto.engine.flows.start import Flows
from tenuto.engine.tasks.maintenance import BATCH, TaskMaintenance
from tenuto.engine.tasks.query import TaskQueries
from tenuto.engine.views import LogLine

ROUNDS = 20
"""Batches of each duty in one request; the coordinator goes on with the rest."""


class RecoverResult(msgspec.Struct, frozen=True, kw_only=True):
    """How many leases were ended, timers followed, and pieces of flows done."""

    ok: bool = True
    expired: int = 0
    promoted: int = 0
    flowed: int = 0


async def recover(core: Core, actor: str, workspace: UUID | None = None) -> RecoverResult:
    """End expired leases, follow due timers and do what flows left, in one workspace or in all."""
    upkeep, flows = TaskMaintenance(core), Flows(core, workspace or DEFAULT_WORKSPACE, actor)
    return RecoverResult(
        expired=await _all(lambda: upkeep.expire_once(actor, workspace), BATCH),
        promoted=await _all(lambda: upkeep.promote_once(actor, workspace), BATCH),
        flowed=await _all(lambda: flows.run_deferred_once(workspace=workspace), 1),
    )


async def _all(once: Callable[[], Awaitable[int]], full: int) -> int:
    """Repeat a duty while it finds full batches; answers what was done."""
    done = 0
    for _ in range(ROUNDS):
        found = await once()
        done += found
        if found < full:
            break
    return done


async def happened(
    engine: Engine, level: str, limit: int, workspace: UUID | None = None
) -> list[LogLine]:
    """The newest events of at least that level, of a workspace and of coordinators themselves."""
    every = TaskQueries(engine.system)
    if workspace in (None, engine.workspace):
        lines = await engine.query.notable(engine.workspace, level, limit)
    else:
        lines = await every.notable(workspace, level, limit)
    lines += await every.coordinators(level, limit)
    return sorted(lines, key=lambda line: line.at)[-limit:]
