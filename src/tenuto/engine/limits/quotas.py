"""Explains when a workspace's quota of running tasks is used up."""

from uuid import UUID

from tenuto.engine.core import Core
from tenuto.engine.views import Gate
from tenuto.store.protocol import Statement


async def quota_gates(core: Core, workspace: UUID) -> list[Gate]:
    """Returns one gate if the workspace runs as many tasks as its quota allows, else none."""
    limit = core.lanes.max_running(workspace)
    if limit is None:
        return []
    rows = await core.store.fetch(Statement("workspace_load", {"workspace": workspace}))
    load = rows[0]["load"]
    if load < limit:
        return []
    detail = f"the workspace runs {load:,} tasks; its quota is {limit:,} at once"
    return [Gate(gate="quota", detail=detail)]
