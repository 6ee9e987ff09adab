"""The inbox: approvals, questions and escalations for people, and their answers."""

from collections.abc import Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

import msgspec

from tenuto.engine.agents.subtasks import answer_step_statement
from tenuto.engine.core import Core
from tenuto.engine.flows.advance import Cascade
from tenuto.engine.limits import budgets
from tenuto.engine.rows import decode_json
from tenuto.model import bounds
from tenuto.model.errors import Conflict, Invalid, NotFound
from tenuto.model.limits.budgets import HOLD as BUDGET
from tenuto.model.limits.budgets import Budget
from tenuto.model.tasks import commands
from tenuto.model.tasks.changes import is_parked
from tenuto.model.tasks.commands import Command
from tenuto.model.tasks.task import Status, Task, TaskChange
from tenuto.store.protocol import Row, Script, Statement


def _json_name(name: str) -> str:
    """Returns the JSON name of a field, in camel case; `task` becomes `taskId`."""
    first, *rest = name.split("_")
    return "taskId" if name == "task" else first + "".join(part.capitalize() for part in rest)


class InboxItem(msgspec.Struct, frozen=True, kw_only=True, rename=_json_name):
    """An approval, question, budget request or escalation for a person, with its answer."""

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
    """The name that a handler gave to its question."""


class Inbox:
    """The inbox of one workspace, on behalf of one actor."""

    def __init__(self, core: Core, workspace: UUID, actor: str | None) -> None:
        self._core = core
        self._workspace = workspace
        self._actor = actor

    async def list(
        self, status: str | None = "OPEN", limit: int = 100, cursor: UUID | None = None
    ) -> list[InboxItem]:
        """Returns items of the status (`None`: any) before the item `cursor`, newest first."""
        bounds.check_number("limit", limit, 1, bounds.MAX_PAGE)
        params = {
            "workspace": self._workspace,
            "status": status,
            "before": cursor,
            "most": limit,
        }
        rows = await self._core.store.fetch(Statement("inbox_page", params))
        return [_item(row) for row in rows]

    async def show(self, item: UUID) -> InboxItem:
        """Returns one item; raises `NotFound`."""
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
        """Approves or rejects an approval or budget item, then its task goes on; raises `Conflict`.

        `Conflict`: the item is already answered, is of another kind, or its task no longer waits.
        `NotFound`: there is no such item. A rejected budget cancels the waiting tasks. `budget`
        is for an item about a used up budget: the task's new budget. The default is twice the old
        budget.
        """
        bounds.check_text("comment", comment or "", bounds.MAX_TEXT)
        decision = {
            "decision": "approved" if approve else "rejected",
            "by": self._actor,
            "comment": comment,
            "at": self._core.now(),
        }
        text = msgspec.json.encode(decision).decode()

        def script(cascade: Cascade) -> Script[None]:
            row = yield from self._lock_open_item(item)
            if row["kind"] not in ("approval", BUDGET):
                text_ = f"inbox item {item} is of kind {row['kind']}: answer it with a text"
                raise Conflict(f"{text_}, it cannot be approved or rejected")
            if budget is not None and row["kind"] != BUDGET:
                text_ = f"inbox item {item} is of kind {row['kind']}, only {BUDGET} items take one"
                raise Invalid(text_, field="budget")
            if row["kind"] == BUDGET:
                yield from budgets.apply_answer(
                    cascade, self._workspace, row["task"], approve=approve, requested=budget
                )
            elif row["key"] is not None:
                yield from self._store_answer(cascade, row, text)
            else:
                changed = yield from cascade.apply_to_each(
                    [row["task"]], lambda task: _approval_command(task, text, approve=approve)
                )
                _check_task_waited(changed)
            yield self._decide_statement(item, "APPROVED" if approve else "REJECTED", text)

        await self._core.run_with_cascade(script, self._actor)

    async def dismiss(self, item: UUID, comment: str) -> None:
        """Answers a question, which wakes its task, or an escalation. Other items: `Conflict`."""
        bounds.check_text("comment", comment, bounds.MAX_TEXT)
        decision = {"comment": comment, "by": self._actor}
        text = msgspec.json.encode(decision).decode()

        def script(cascade: Cascade) -> Script[None]:
            row = yield from self._lock_open_item(item)
            if row["kind"] in ("approval", BUDGET):
                text_ = f"inbox item {item} is of kind {row['kind']}: approve or reject it"
                raise Conflict(text_)
            if row["key"] is not None:
                answer = {"answer": comment, "by": self._actor, "at": self._core.now()}
                yield from self._store_answer(cascade, row, msgspec.json.encode(answer).decode())
            yield self._decide_statement(item, "ANSWERED", text)

        await self._core.run_with_cascade(script, self._actor)

    def _lock_open_item(self, item: UUID) -> Script[Row]:
        """Locks the task, then the open item; returns its row. Raises `NotFound` or `Conflict`."""
        item_key = {"id": item, "workspace": self._workspace}
        rows = yield Statement("inbox_item", item_key)
        if rows and rows[0]["task"] is not None:
            yield Statement("tasks_locked", {"ids": [rows[0]["task"]]})
        rows = yield Statement("inbox_locked", item_key)
        if not rows:
            raise NotFound(f"no inbox item {item}")
        if rows[0]["status"] != "OPEN":
            raise Conflict(f"inbox item {item} is already {rows[0]['status']}")
        return rows[0]

    def _store_answer(self, cascade: Cascade, item: Row, text: str) -> Script[None]:
        """Wakes the task that asked and stores the answer; `Conflict` if the task does not wait."""
        changed = yield from cascade.apply_to_each([item["task"]], _wake_command)
        _check_task_waited(changed)
        step_key = {"task": item["task"], "key": item["key"], "workspace": self._workspace}
        yield answer_step_statement(step_key, changed[0].task.attempt, text, self._core.now())

    def _decide_statement(self, item: UUID, status: str, text: str) -> Statement:
        """Returns the statement that stores a locked item's new status and its decision (JSON)."""
        params = {
            "id": item,
            "status": status,
            "decision": text,
            "actor": self._actor,
            "now": self._core.now(),
        }
        return Statement("inbox_answer", params)


def _item(row: Row) -> InboxItem:
    """Returns the inbox item in a row."""
    fields = {name: row[name] for name in InboxItem.__struct_fields__}
    return InboxItem(
        **fields | {"body": decode_json(row["body"]), "decision": decode_json(row["decision"])}
    )


def _check_task_waited(changed: Sequence[TaskChange]) -> None:
    """Raises `Conflict` if the answer changed no task."""
    if not changed:
        raise Conflict("the task no longer waits for an answer")


def _wake_command(task: Task) -> Command | None:
    """Returns the command that wakes a task parked for an answer; `None` for other tasks."""
    return commands.Unpark() if is_parked(task) and task.hold != "children" else None


def _approval_command(task: Task, text: str, *, approve: bool) -> Command | None:
    """Returns the command that completes, skips or fails an approval; `None`: not waiting."""
    if task.hold is None or not task.hold.startswith("approval"):
        return None
    if approve:
        return commands.Resolve(status=Status.COMPLETED, output=text)
    if task.hold.endswith(":skip"):
        return commands.Resolve(status=Status.SKIPPED, message="rejected", output=text)
    return commands.Resolve(status=Status.FAILED, message="rejected", code="rejected", output=text)
