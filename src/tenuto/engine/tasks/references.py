"""References: the tasks and agents that a new task names must be there, in its workspace."""

from collections.abc import Iterable
from uuid import UUID

from tenuto.engine.core import Core
from tenuto.model.errors import NotFound
from tenuto.model.tasks.submission import NewTask
from tenuto.store.protocol import Statement


async def check_references(
    core: Core, workspace: UUID, news: Iterable[NewTask], owner: UUID | None = None
) -> None:
    """Raise `NotFound` for a parent or target agent that the workspace does not have.

    `owner` is a task that is known to be there. Tasks that name nothing cost nothing.
    """
    tasks, agents = set(), set()
    for new in news:
        if new.parent is not None and new.parent != owner:
            tasks.add(new.parent)
        if new.target_agent is not None:
            agents.add(new.target_agent)
    if tasks or agents:
        await check_known(core, workspace, tasks, agents)


async def check_known(core: Core, workspace: UUID, tasks: set[UUID], agents: set[UUID]) -> None:
    """Raise `NotFound` unless the workspace has all these tasks and agents."""
    params = {"workspace": workspace, "tasks": sorted(tasks), "agents": sorted(agents)}
    rows = await core.store.fetch(Statement("known_ids", params))
    found = {row["id"] for row in rows}
    for what, field, named in (("task", "parentId", tasks), ("agent", "targetAgentId", agents)):
        if missing := sorted(named - found):
            raise NotFound(f"{field}: no {what} {missing[0]}", field=field)
