"""Runs recovery duties on request, and reads recent logs of coordinators and a workspace."""

from uuid import UUID

import msgspec

from tenuto.engine.core import Core
from tenuto.engine.engine import DEFAULT_WORKSPACE, Engine
from tenuto.engine.flows.start import Flows
from tenuto.engine.tasks.maintenance import BATCH, TaskMaintenance
from tenuto.engine.tasks.query import TaskQueries
from tenuto.engine.views import LogLine
from tenuto.periodic import repeat_while_full


class RecoverResult(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers of expired leases, of tasks promoted by timers, and of deferred work done."""

    ok: bool = True
    expired: int = 0
    promoted: int = 0
    flowed: int = 0


async def recover(core: Core, actor: str, workspace: UUID | None = None) -> RecoverResult:
    """Expires leases, promotes due tasks, runs deferred work; some batches. `None`: all workspaces.

    The number of batches is limited; the coordinator continues with the rest.
    """
    maintenance, flows = TaskMaintenance(core), Flows(core, workspace or DEFAULT_WORKSPACE, actor)
    return RecoverResult(
        expired=await repeat_while_full(lambda: maintenance.expire_once(actor, workspace), BATCH),
        promoted=await repeat_while_full(lambda: maintenance.promote_once(actor, workspace), BATCH),
        flowed=await repeat_while_full(lambda: flows.run_deferred_once(workspace=workspace), 1),
    )


async def recent_logs(
    engine: Engine, level: str, limit: int, workspace: UUID | None = None
) -> list[LogLine]:
    """Returns the newest events from `level` upwards, oldest first, of workspace and coordinators.

    The default workspace is that of `engine`.
    """
    system_queries = TaskQueries(engine.system)
    if workspace in (None, engine.workspace):
        lines = await engine.query.severe_events(engine.workspace, level, limit)
    else:
        lines = await system_queries.severe_events(workspace, level, limit)
    lines += await system_queries.coordinator_events(level, limit)
    return sorted(lines, key=lambda line: line.at)[-limit:]
