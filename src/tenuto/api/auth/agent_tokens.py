"""What an agent's own token reaches: its agent, the tasks it had, the workers it registered.

Whatever else there is looks missing. A person's or program's token is not asked.
"""

from collections.abc import Sequence
from uuid import UUID

from tenuto.api.service import RequestContext
from tenuto.model.errors import NotFound
from tenuto.model.tasks.task import Fence
from tenuto.store.protocol import Statement


async def check_task(desk: RequestContext, task: UUID) -> None:
    """Raise `NotFound` for a task that the caller's agent neither runs nor ran."""
    if desk.caller.agent is not None and not await _tasks(desk, desk.caller.agent, [task]):
        raise NotFound(f"no task {task}")


async def check_worker(desk: RequestContext, worker: str) -> None:
    """Raise `NotFound` for a worker that the caller's agent did not register; a new one is fine."""
    if desk.caller.agent is None:
        return
    params = {"workspace": desk.workspace, "id": worker}
    rows = await desk.engine.core.store.fetch(Statement("worker_registered_by", params))
    if rows and rows[0]["registered_by"] != desk.caller.agent:
        raise NotFound(f"no worker {worker!r}")


async def check_names(desk: RequestContext, names: Sequence[str]) -> None:
    """Raise `NotFound` for a name that is not the caller's agent's."""
    if desk.caller.agent is None or not names:
        return
    own = (await desk.registry.show(desk.caller.agent)).name
    for name in names:
        if name != own:
            raise NotFound(f"no agent {name!r}")


async def own_fences(desk: RequestContext, fences: Sequence[Fence]) -> list[Fence]:
    """Those fences that are of tasks which the caller's agent runs or ran."""
    if desk.caller.agent is None or not fences:
        return list(fences)
    mine = await _tasks(desk, desk.caller.agent, [fence.task for fence in fences])
    return [fence for fence in fences if fence.task in mine]


async def _tasks(desk: RequestContext, agent: UUID, tasks: Sequence[UUID]) -> set[UUID]:
    params = {"workspace": desk.workspace, "agent": agent, "ids": list(tasks)}
    rows = await desk.engine.core.store.fetch(Statement("tasks_of_agent", params))
    return {row["id"] for row in rows}
