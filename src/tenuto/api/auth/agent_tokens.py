"""Limits an agent's token to its agent, the tasks it runs or ran, and the workers it registered.

All other objects look missing (`NotFound`). Tokens of users and programs are not limited here.
"""

from collections.abc import Sequence
from uuid import UUID

from tenuto.api.service import RequestContext
from tenuto.model.errors import NotFound
from tenuto.model.tasks.task import Fence
from tenuto.store.protocol import Statement


async def check_task(ctx: RequestContext, task: UUID) -> None:
    """Raises `NotFound` if the caller is an agent that neither runs nor ran the task."""
    if ctx.caller.agent is not None and not await _tasks_of_agent(ctx, ctx.caller.agent, [task]):
        raise NotFound(f"no task {task}")


async def check_worker(ctx: RequestContext, worker: str) -> None:
    """Raises `NotFound` if the caller is an agent and another caller registered the worker."""
    if ctx.caller.agent is None:
        return
    params = {"workspace": ctx.workspace, "id": worker}
    rows = await ctx.engine.core.store.fetch(Statement("worker_registered_by", params))
    if rows and rows[0]["registered_by"] != ctx.caller.agent:
        raise NotFound(f"no worker {worker!r}")


async def check_agent_names(ctx: RequestContext, names: Sequence[str]) -> None:
    """Raises `NotFound` if the caller is an agent and a name is not its own."""
    if ctx.caller.agent is None or not names:
        return
    own_name = (await ctx.agents.show(ctx.caller.agent)).name
    for name in names:
        if name != own_name:
            raise NotFound(f"no agent {name!r}")


async def filter_own_fences(ctx: RequestContext, fences: Sequence[Fence]) -> list[Fence]:
    """Returns the fences whose tasks the caller's agent runs or ran; all for other callers."""
    if ctx.caller.agent is None or not fences:
        return list(fences)
    own_tasks = await _tasks_of_agent(ctx, ctx.caller.agent, [fence.task for fence in fences])
    return [fence for fence in fences if fence.task in own_tasks]


async def _tasks_of_agent(ctx: RequestContext, agent: UUID, tasks: Sequence[UUID]) -> set[UUID]:
    """Returns those of the tasks that the agent runs or ran."""
    params = {"workspace": ctx.workspace, "agent": agent, "ids": list(tasks)}
    rows = await ctx.engine.core.store.fetch(Statement("tasks_of_agent", params))
    return {row["id"] for row in rows}
