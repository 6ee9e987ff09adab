"""A workspace's quota of running tasks, as those see it who ask why something waits."""

from uuid import UUID

from tenuto.engine.core import Core
from tenuto.engine.views import Gate
from tenuto.store.protocol import Statement


async def quota_gates(core: Core, workspace: UUID) -> list[Gate]:
    """That the workspace runs as many tasks as it may, if it does."""
    most = core.lanes.running(workspace)
    if most is None:
        return []
    rows = await core.store.fetch(Statement("workspace_load", {"workspace": workspace}))
    load = rows[0]["load"]
    if load < most:
        return []
    detail = f"the workspace runs {load:,} tasks and may run {most:,} at once"
    return [Gate(gate="quota", detail=detail)]
