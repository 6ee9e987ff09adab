"""Edit: what a task says about itself, and taking away what an ended one carried."""

from typing import Any, Literal
from uuid import UUID

import msgspec

from tenuto.engine.core import Core
from tenuto.engine.flows.advance import Cascade
from tenuto.engine.rows import CorruptRow
from tenuto.model import bounds
from tenuto.model.errors import Conflict, Invalid, NotFound, TenutoError
from tenuto.model.tasks import commands
from tenuto.model.tasks.task import TaskChange
from tenuto.store.protocol import Row, Script, Statement


class TaskChanges(msgspec.Struct, frozen=True, kw_only=True):
    """What to change of a task; what is unset stays."""

    title: str | msgspec.UnsetType = msgspec.UNSET
    description: str | msgspec.UnsetType | None = msgspec.UNSET
    metadata: dict[str, Any] | msgspec.UnsetType | None = msgspec.UNSET
    tags: tuple[str, ...] | msgspec.UnsetType = msgspec.UNSET
    priority: int | msgspec.UnsetType = msgspec.UNSET
    status: Literal["PAUSED", "PENDING"] | msgspec.UnsetType = msgspec.UNSET
    """PAUSED holds the task, PENDING lets it go on."""

    def named(self) -> list[str]:
        """The fields that are set."""
        return [name for name in self.__struct_fields__ if getattr(self, name) is not msgspec.UNSET]


class _EditResult(msgspec.Struct, frozen=True):
    """What orders have changed, and what followed."""

    changed: list[TaskChange]
    cascades: list[Cascade]


class TaskEditor:
    """The edit family."""

    def __init__(self, core: Core) -> None:
        self._core = core

    async def edit(
        self,
        task: UUID,
        workspace: UUID,
        changes: TaskChanges,
        actor: str | None,
        *,
        version: int | None = None,
    ) -> None:
        """Change a task, all or nothing; `version` is the one that the caller has seen."""
        _check(changes)
        named = changes.named()
        orders: list[commands.Command] = []
        if "priority" in named:
            assert isinstance(changes.priority, int)
            orders.append(commands.SetPriority(priority=changes.priority))
            named.remove("priority")
        statements = _statements(task, workspace, changes)
        if said := [name for name in named if name != "status"]:
            orders.append(commands.Edit(fields=tuple(said)))
        if "status" in named:
            orders.append(commands.Pause() if changes.status == "PAUSED" else commands.Resume())

        def script() -> Script[_EditResult]:
            applied = yield from self._applied(task, workspace, orders, actor, version)
            for statement in statements:  # noqa: UP028  a list cannot be sent the answers
                yield statement
            return applied

        applied = await self._core.store.transact(script)
        self._core.send_hints(applied.changed)
        for cascade in applied.cascades:
            self._core.announce_cascade(cascade)

    async def erase(self, task: UUID, workspace: UUID, actor: str | None) -> None:
        """Remove what an ended task carried, unless somebody alive may ask for it."""
        own = {"id": task, "workspace": workspace}

        def script() -> Script[None]:
            yield from self._applied(task, workspace, [commands.DeletePayload()], actor, None)
            if (yield Statement("needed_still", own)):
                raise Conflict("something that has not ended may still ask what the task has made")
            yield Statement("erase", own)

        await self._core.store.transact(script)

    def _applied(
        self,
        task: UUID,
        workspace: UUID,
        orders: list[commands.Command],
        actor: str | None,
        version: int | None,
    ) -> Script[_EditResult]:
        applied = _EditResult([], [])
        if version is not None:
            row = yield from _own(task, workspace)
            if row["version"] != version:
                raise Conflict("somebody changed the task since", "version_conflict")
        for order in orders:
            row = yield from _own(task, workspace)
            try:
                decided = self._core.try_decide(row, order, actor)
            except CorruptRow as error:
                raise Conflict(f"the row of task {task} is unreadable", "corrupt") from error
            if isinstance(decided, TenutoError):
                raise decided
            if decided is not None:
                applied.changed.append(decided)
                cascade = yield from self._core.write_with_cascade([(decided, order)], [], actor)
                if cascade is not None:
                    applied.cascades.append(cascade)
        return applied


def _own(task: UUID, workspace: UUID) -> Script[Row]:
    """The task's row, locked."""
    rows = yield Statement("tasks_locked", {"ids": [task]})
    if not rows or rows[0]["workspace"] != workspace:
        raise NotFound(f"no task {task}")
    return rows[0]


def _check(changes: TaskChanges) -> None:
    if isinstance(changes.title, str):
        bounds.text("title", changes.title, bounds.MAX_TITLE, empty=False)
    if isinstance(changes.description, str):
        bounds.text("description", changes.description, bounds.MAX_TEXT)
    if isinstance(changes.priority, int):
        bounds.number("priority", changes.priority, 1, 10)
    if changes.status not in (msgspec.UNSET, "PAUSED", "PENDING"):
        raise Invalid("status can be changed to PAUSED and PENDING", field="status")
    if isinstance(changes.tags, tuple):
        bounds.number("the number of tags", len(changes.tags), 0, bounds.MAX_TAGS)
        for tag in changes.tags:
            bounds.text("tags", tag, bounds.MAX_NAME, empty=False)


def _statements(task: UUID, workspace: UUID, changes: TaskChanges) -> list[Statement]:
    own = {"id": task, "workspace": workspace}
    found = []
    params: dict[str, Any] = {}
    if isinstance(changes.title, str):
        params |= {"set_title": True, "title": changes.title}
    if changes.description is not msgspec.UNSET:
        params |= {"set_description": True, "description": changes.description}
    if changes.metadata is not msgspec.UNSET:
        encoded = bounds.json_text("metadata", changes.metadata)
        params |= {"set_metadata": True, "metadata": encoded}
    if params:
        found.append(Statement("edit", own | params))
    if isinstance(changes.tags, tuple):
        found.append(Statement("relabel", own | {"labels": list(dict.fromkeys(changes.tags))}))
    return found
