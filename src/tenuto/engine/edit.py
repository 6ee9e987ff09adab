"""Edit: what a task says about itself, and taking away what an ended one carried."""

from typing import Any
from uuid import UUID

import msgspec

from tenuto.engine.core import Core
from tenuto.engine.rows import CorruptRow, write_changes
from tenuto.model import commands, limits
from tenuto.model.errors import Conflict, NotFound, TenutoError
from tenuto.model.task import Change
from tenuto.store.protocol import Row, Rows, Script, Statement


class Changes(msgspec.Struct, frozen=True, kw_only=True):
    """What to change of a task; what is unset stays."""

    title: str | msgspec.UnsetType = msgspec.UNSET
    description: str | msgspec.UnsetType | None = msgspec.UNSET
    metadata: dict[str, Any] | msgspec.UnsetType | None = msgspec.UNSET
    tags: tuple[str, ...] | msgspec.UnsetType = msgspec.UNSET
    priority: int | msgspec.UnsetType = msgspec.UNSET

    def named(self) -> list[str]:
        """The fields that are set."""
        return [name for name in self.__struct_fields__ if getattr(self, name) is not msgspec.UNSET]


class Editing:
    """The edit family."""

    def __init__(self, core: Core) -> None:
        self._core = core

    async def edit(
        self,
        task: UUID,
        workspace: UUID,
        changes: Changes,
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
            orders.append(commands.Reprioritise(priority=changes.priority))
            named.remove("priority")
        statements = _statements(task, workspace, changes)
        if named:
            orders.append(commands.Edit(fields=tuple(named)))

        def script() -> Script[list[Change]]:
            changed = yield from self._applied(task, workspace, orders, actor, version)
            for statement in statements:  # noqa: UP028  a list cannot be sent the answers
                yield statement
            return changed

        self._core.announce(await self._core.store.transact(script))

    async def erase(self, task: UUID, workspace: UUID, actor: str | None) -> None:
        """Remove what an ended task carried, unless somebody alive may ask for it."""
        own = {"id": task, "workspace": workspace}

        def script() -> Script[None]:
            yield from self._applied(task, workspace, [commands.Erase()], actor, None)
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
    ) -> Script[list[Change]]:
        changed: list[Change] = []
        for order in orders:
            rows = yield Statement("tasks_locked", {"ids": [task]})
            row = _own(rows, task, workspace)
            if not changed and version is not None and row["version"] != version:
                raise Conflict("somebody changed the task since", "version_conflict")
            try:
                decided = self._core.consider(row, order, actor)
            except CorruptRow as error:
                raise Conflict(f"the row of task {task} is unreadable", "corrupt") from error
            if isinstance(decided, TenutoError):
                raise decided
            if decided is not None:
                yield write_changes([(decided, order)])
                changed.append(decided)
        return changed


def _own(rows: Rows, task: UUID, workspace: UUID) -> Row:
    if not rows or rows[0]["workspace"] != workspace:
        raise NotFound(f"no task {task}")
    return rows[0]


def _check(changes: Changes) -> None:
    if isinstance(changes.title, str):
        limits.text("title", changes.title, limits.MAX_TITLE, empty=False)
    if isinstance(changes.description, str):
        limits.text("description", changes.description, limits.MAX_TEXT)
    if isinstance(changes.priority, int):
        limits.number("priority", changes.priority, 1, 10)
    if isinstance(changes.tags, tuple):
        limits.number("the number of tags", len(changes.tags), 0, limits.MAX_TAGS)
        for tag in changes.tags:
            limits.text("tags", tag, limits.MAX_NAME, empty=False)


def _statements(task: UUID, workspace: UUID, changes: Changes) -> list[Statement]:
    own = {"id": task, "workspace": workspace}
    found = []
    params: dict[str, Any] = {}
    if isinstance(changes.title, str):
        params |= {"set_title": True, "title": changes.title}
    if changes.description is not msgspec.UNSET:
        params |= {"set_description": True, "description": changes.description}
    if changes.metadata is not msgspec.UNSET:
        encoded = limits.json_text("metadata", changes.metadata)
        params |= {"set_metadata": True, "metadata": encoded}
    if params:
        found.append(Statement("edit", own | params))
    if isinstance(changes.tags, tuple):
        found.append(Statement("relabel", own | {"labels": list(dict.fromkeys(changes.tags))}))
    return found
