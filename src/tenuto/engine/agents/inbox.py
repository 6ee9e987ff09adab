"""The inbox: what waits for a person, and the answers."""

from collections.abc import Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

import msgspec

from tenuto.engine.agents.subtasks import answer_step
from tenuto.engine.core import Core
from tenuto.engine.flows.advance import Cascade
from tenuto.engine.limits import budgets
from tenuto.engine.rows import decode
from tenuto.model import bounds
from tenuto.model.errors import Conflict, Invalid, NotFound
from tenuto.model.limits.budgets import HOLD as BUDGET
from tenuto.model.limits.budgets import Budget
from tenuto.model.tasks import commands
from tenuto.model.tasks.changes import is_parked
from tenuto.model.tasks.commands import Command
from tenuto.model.tasks.task import Status, Task, TaskChange
from tenuto.store.protocol import Row, Script, Statement


def _rename(name: str) -> str:
    first, *rest = name.split("_")
    return "taskId" if name == "task" else first + "".join(part.capitalize() for part in rest)


class InboxItem(msgspec.Struct, frozen=True, kw_only=True, rename=_rename):
    """Something that a person was asked."""

    id: UUID
    task: UUID | None
    kind: str
    title: str
    body: Any
    status: str
    decision: Any
    decided_by: str | None
    decided_at: datetime | None
    expires_at: datetime | None
    created_at: datetime
    key: str | None = None
    """The name that a handler gave its question."""


class Inbox:
    """The inbox of one workspace, on behalf of one actor."""

    def __init__(self, core: Core, workspace: UUID, actor: str | None) -> None:
        self._core = core
        self._workspace = workspace
        self._actor = actor

    async def list(
        self, status: str | None = "OPEN", limit: int = 100, cursor: UUID | None = None
    ) -> list[InboxItem]:
        """Items newest first; with no status, those that were answered as well."""
        bounds.number("limit", limit, 1, bounds.MAX_PAGE)
        params = {
            "workspace": self._workspace,
            "status": status,
            "before": cursor,
            "most": limit,
        }
        rows = await self._core.store.fetch(Statement("inbox_page", params))
        return [_item(row) for row in rows]

    async def show(self, item: UUID) -> InboxItem:
        """One item."""
        params = {"id": item, "workspace": self._workspace}
        rows = await self._core.store.fetch(Statement("inbox_item", params))
        if not rows:
            raise NotFound(f"no inbox item {item}")
        return _item(rows[0])

    async def answer(
        self,
        item: UUID,
        *,
        approve: bool,
        comment: str | None = None,
        budget: Budget | None = None,
    ) -> None:
        """Approve or reject; the first answer counts, and the task goes on by it.

        `budget` is what a task may use from now on whose budget is used up; else twice as much.
        """
        bounds.text("comment", comment or "", bounds.MAX_TEXT)
        said = {
            "decision": "approved" if approve else "rejected",
            "by": self._actor,
            "comment": comment,
            "at": self._core.now(),
        }
        text = msgspec.json.encode(said).decode()

        def script(cascade: Cascade) -> Script[None]:
            row = yield from self._open(item)
            if row["kind"] not in ("approval", BUDGET):
                raise Conflict(f"an item of kind {row['kind']} is not approved or rejected")
            if budget is not None and row["kind"] != BUDGET:
                raise Invalid("the item asks for no budget", field="budget")
            if row["kind"] == BUDGET:
                yield from budgets.answer(
                    cascade, self._workspace, row["task"], approve=approve, wanted=budget
                )
            elif row["key"] is not None:
                yield from self._told(cascade, row, text)
            else:
                changed = yield from cascade.apply_to_each(
                    [row["task"]], lambda task: _verdict(task, text, approve=approve)
                )
                _check_heard(changed)
            yield self._decided(item, "APPROVED" if approve else "REJECTED", text)

        await self._core.run_with_cascade(script, self._actor)

    async def dismiss(self, item: UUID, comment: str) -> None:
        """Answer an item that is no approval; a handler that asked goes on by it."""
        bounds.text("comment", comment, bounds.MAX_TEXT)
        said = {"comment": comment, "by": self._actor}
        text = msgspec.json.encode(said).decode()

        def script(cascade: Cascade) -> Script[None]:
            row = yield from self._open(item)
            if row["kind"] in ("approval", BUDGET):
                raise Conflict(f"an item of kind {row['kind']} is approved or rejected")
            if row["key"] is not None:
                answer = {"answer": comment, "by": self._actor, "at": self._core.now()}
                yield from self._told(cascade, row, msgspec.json.encode(answer).decode())
            yield self._decided(item, "ANSWERED", text)

        await self._core.run_with_cascade(script, self._actor)

    def _open(self, item: UUID) -> Script[Row]:
        """An item that nobody has answered, locked after its task."""
        named = {"id": item, "workspace": self._workspace}
        rows = yield Statement("inbox_item", named)
        if rows and rows[0]["task"] is not None:
            yield Statement("tasks_locked", {"ids": [rows[0]["task"]]})
        rows = yield Statement("inbox_locked", named)
        if not rows:
            raise NotFound(f"no inbox item {item}")
        if rows[0]["status"] != "OPEN":
            raise Conflict(f"the item is {rows[0]['status']} already")
        return rows[0]

    def _told(self, cascade: Cascade, item: Row, text: str) -> Script[None]:
        """Record the answer for the handler that asked, and let its task go on."""
        changed = yield from cascade.apply_to_each([item["task"]], _asker)
        _check_heard(changed)
        where = {"task": item["task"], "key": item["key"], "workspace": self._workspace}
        yield answer_step(where, changed[0].task.attempt, text, self._core.now())

    def _decided(self, item: UUID, status: str, text: str) -> Statement:
        params = {
            "id": item,
            "status": status,
            "decision": text,
            "actor": self._actor,
            "now": self._core.now(),
        }
        return Statement("inbox_decide", params)


def _item(row: Row) -> InboxItem:
    fields = {name: row[name] for name in InboxItem.__struct_fields__}
    return InboxItem(**fields | {"body": decode(row["body"]), "decision": decode(row["decision"])})


def _check_heard(changed: Sequence[TaskChange]) -> None:
    if not changed:
        raise Conflict("the task no longer waits for an answer")


def _asker(task: Task) -> Command | None:
    return commands.Unpark() if is_parked(task) and task.hold != "children" else None


def _verdict(task: Task, text: str, *, approve: bool) -> Command | None:
    if task.hold is None or not task.hold.startswith("approval"):
        return None
    if approve:
        return commands.Resolve(status=Status.COMPLETED, output=text)
    if task.hold.endswith(":skip"):
        return commands.Resolve(status=Status.SKIPPED, message="rejected", output=text)
    return commands.Resolve(status=Status.FAILED, message="rejected", code="rejected", output=text)
