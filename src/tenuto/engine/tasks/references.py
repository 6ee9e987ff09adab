"""Checks that the parent and the target agent of a new task exist in its workspace."""

from collections.abc import Iterable
from uuid import UUID

from tenuto.engine.core import Core
from tenuto.model.errors import NotFound
from tenuto.model.tasks.submission import NewTask
from tenuto.store.protocol import Statement


async def check_references(
    core: Core, workspace: UUID, new_tasks: Iterable[NewTask], owner: UUID | None = None
) -> None:
    """Raises `NotFound` for a parent or target agent that the workspace does not have.

    `owner` is a task that is known to exist. Without references to check, nothing is queried.
    """
    tasks, agents = set(), set()
    for new in new_tasks:
        if new.parent is not None and new.parent != owner:
            tasks.add(new.parent)
        if new.target_agent is not None:
            agents.add(new.target_agent)
    if tasks or agents:
        await _require_existing(core, workspace, tasks, agents)


async def _require_existing(
    core: Core, workspace: UUID, tasks: set[UUID], agents: set[UUID]
) -> None:
    """Raises `NotFound` unless the workspace has all these tasks and agents."""
    params = {"workspace": workspace, "tasks": sorted(tasks), "agents": sorted(agents)}
    rows = await core.store.fetch(Statement("existing_ids", params))
    existing = {row["id"] for row in rows}
    for noun, field, ids in (("task", "parentId", tasks), ("agent", "targetAgentId", agents)):
        if missing := sorted(ids - existing):
            raise NotFound(f"{field}: no {noun} {missing[0]}", field=field)
