"""Edits fields of tasks and deletes the payload of finished tasks."""

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
    """Changes of a task's fields; unset fields stay unchanged."""

    title: str | msgspec.UnsetType = msgspec.UNSET
    description: str | msgspec.UnsetType | None = msgspec.UNSET
    metadata: dict[str, Any] | msgspec.UnsetType | None = msgspec.UNSET
    tags: tuple[str, ...] | msgspec.UnsetType = msgspec.UNSET
    priority: int | msgspec.UnsetType = msgspec.UNSET
    status: Literal["PAUSED", "PENDING"] | msgspec.UnsetType = msgspec.UNSET
    """PAUSED pauses the task, PENDING resumes it."""

    def changed_fields(self) -> list[str]:
        """Returns the names of the fields to change."""
        return [name for name in self.__struct_fields__ if getattr(self, name) is not msgspec.UNSET]


class _EditResult(msgspec.Struct, frozen=True):
    """The changes that were written, and the cascades of their follow-ups."""

    changed: list[TaskChange]
    cascades: list[Cascade]


class TaskEditor:
    """Edits tasks and deletes their payloads."""

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
        """Applies all changes or none; `Conflict` if the task does not have the given `version`."""
        _check_changes(changes)
        fields = changes.changed_fields()
        edits: list[commands.Command] = []
        if "priority" in fields:
            assert isinstance(changes.priority, int)
            edits.append(commands.SetPriority(priority=changes.priority))
            fields.remove("priority")
        statements = _edit_statements(task, workspace, changes)
        if column_fields := [name for name in fields if name != "status"]:
            edits.append(commands.Edit(fields=tuple(column_fields)))
        if "status" in fields:
            edits.append(commands.Pause() if changes.status == "PAUSED" else commands.Resume())

        def script() -> Script[_EditResult]:
            result = yield from self._apply_commands(task, workspace, edits, actor, version)
            for statement in statements:  # noqa: UP028  a list cannot receive the rows
                yield statement
            return result

        applied = await self._core.store.transact(script)
        self._core.send_hints(applied.changed)
        for cascade in applied.cascades:
            self._core.send_cascade_hints(cascade)

    async def erase(self, task: UUID, workspace: UUID, actor: str | None) -> None:
        """Archives a finished task, deletes its payload; `Conflict` if a task needs the result."""
        params = {"id": task, "workspace": workspace}

        def script() -> Script[None]:
            yield from self._apply_commands(
                task, workspace, [commands.DeletePayload()], actor, None
            )
            if (yield Statement("output_still_needed", params)):
                raise Conflict(
                    f"task {task} cannot be deleted: an unfinished task still needs its output"
                )
            yield Statement("payload_delete", params)

        await self._core.store.transact(script)

    def _apply_commands(
        self,
        task: UUID,
        workspace: UUID,
        edits: list[commands.Command],
        actor: str | None,
        version: int | None,
    ) -> Script[_EditResult]:
        """Locks the task, checks its version, applies the commands in order; raises a refusal."""
        result = _EditResult([], [])
        if version is not None:
            row = yield from _lock_task(task, workspace)
            if row["version"] != version:
                text = f"task {task} has version {row['version']}, not {version}; read it again"
                raise Conflict(text, "version_conflict")
        for command in edits:
            row = yield from _lock_task(task, workspace)
            try:
                decided = self._core.try_decide(row, command, actor)
            except CorruptRow as error:
                raise Conflict(f"task {task} has an invalid row", "corrupt") from error
            if isinstance(decided, TenutoError):
                raise decided
            if decided is not None:
                result.changed.append(decided)
                cascade = yield from self._core.write_with_cascade([(decided, command)], [], actor)
                if cascade is not None:
                    result.cascades.append(cascade)
        return result


def _lock_task(task: UUID, workspace: UUID) -> Script[Row]:
    """Locks and returns the task's row; raises `NotFound` outside the workspace."""
    rows = yield Statement("tasks_locked", {"ids": [task]})
    if not rows or rows[0]["workspace"] != workspace:
        raise NotFound(f"no task {task}")
    return rows[0]


def _check_changes(changes: TaskChanges) -> None:
    """Raises `Invalid` if a value is out of its bounds."""
    if isinstance(changes.title, str):
        bounds.check_text("title", changes.title, bounds.MAX_TITLE, empty=False)
    if isinstance(changes.description, str):
        bounds.check_text("description", changes.description, bounds.MAX_TEXT)
    if isinstance(changes.priority, int):
        bounds.check_number("priority", changes.priority, 1, 10)
    if changes.status not in (msgspec.UNSET, "PAUSED", "PENDING"):
        raise Invalid("status can only be changed to PAUSED or PENDING", field="status")
    if isinstance(changes.tags, tuple):
        bounds.check_number("the number of tags", len(changes.tags), 0, bounds.MAX_TAGS)
        for tag in changes.tags:
            bounds.check_text("tags", tag, bounds.MAX_NAME, empty=False)


def _edit_statements(task: UUID, workspace: UUID, changes: TaskChanges) -> list[Statement]:
    """Returns the statements that write title, description, metadata and tags."""
    key = {"id": task, "workspace": workspace}
    statements = []
    params: dict[str, Any] = {}
    if isinstance(changes.title, str):
        params |= {"set_title": True, "title": changes.title}
    if changes.description is not msgspec.UNSET:
        params |= {"set_description": True, "description": changes.description}
    if changes.metadata is not msgspec.UNSET:
        encoded = bounds.to_json_text("metadata", changes.metadata)
        params |= {"set_metadata": True, "metadata": encoded}
    if params:
        statements.append(Statement("edit", key | params))
    if isinstance(changes.tags, tuple):
        statements.append(Statement("relabel", key | {"labels": list(dict.fromkeys(changes.tags))}))
    return statements
