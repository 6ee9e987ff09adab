"""What passes between a task and the tasks that its attempts made: ends upwards, cancels down."""

from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING
from uuid import UUID

import msgspec

from tenuto.engine.limits.pending_quota import check_pending
from tenuto.model.errors import Conflict
from tenuto.model.flows.progress import CASCADE
from tenuto.model.limits.budgets import HOLD as BUDGET
from tenuto.model.limits.quota import Quota, effective, quota_of
from tenuto.model.tasks.changes import PARKED_FOR
from tenuto.model.tasks.commands import Cancel, Command, Unpark
from tenuto.model.tasks.task import TERMINAL, Status, Task, TaskChange
from tenuto.store.protocol import Row, Rows, Script, Statement

if TYPE_CHECKING:
    from tenuto.engine.flows.advance import Cascade

BELOW = "below"
"""The kind of work that is left of a cancel: the children of one task."""
_ASKED = PARKED_FOR - {"children"} | {BUDGET}
_WITH_IT = Cancel(reason="the task that it is part of was cancelled")


class SpawnLimits(msgspec.Struct, frozen=True):
    """How far tasks may make tasks."""

    deepest: int = 16
    widest: int = 1000

    def check_limits_and_place(self, parent: Task, child: UUID, ceiling: Quota) -> Script[None]:
        """Place a new child, or refuse it. The caller holds the parent, and has made the child.

        `ceiling` is what the operator allows any workspace.
        """
        where = {"id": parent.id, "workspace": parent.workspace}
        [room] = yield Statement("child_room", where)
        depth = room["depth"] + 1
        if depth > self.deepest:
            raise Conflict(
                f"the child would stand {depth} levels deep, of {self.deepest} allowed",
                "tree_too_deep",
            )
        if room["children"] > self.widest:
            raise Conflict(f"the task has {self.widest:,} children already", "too_many_children")
        yield Statement("child_place", where | {"id": child, "depth": depth})
        if effective(quota_of(room["quota"]), ceiling).pending is not None:
            yield from check_pending(parent.workspace, ceiling)


def wake_parents(cascade: "Cascade", ended: list[UUID]) -> Script[None]:
    """Wake the tasks whose handlers waited for the last of these children.

    Whoever starts to wait holds the children, so each of them is seen by one of the two.
    """
    rows = yield Statement("parents_waiting", {"ids": ended})
    yield Statement("child_settle", {"ids": ended})
    waiting = {row["id"] for row in rows}
    if not waiting:
        return
    still = yield Statement("parents_still", {"ids": sorted(waiting)})
    over = sorted(waiting - {row["id"] for row in still})
    if over:
        yield from cascade.apply_to_each(over, _woken)


def cancel_subtasks(cascade: "Cascade", parents: Sequence[tuple[UUID, UUID]]) -> Script[None]:
    """Cancel the children of cancelled tasks, given by id and workspace; theirs follow."""
    found: Rows = []
    if cascade.spent < CASCADE:
        found = yield Statement("children_live", {"most": CASCADE}, {"parent": sorted(parents)})
    if cascade.spent >= CASCADE or len(found) == CASCADE:
        for task, workspace in parents:
            cascade.defer(BELOW, task, workspace)
    if found:
        yield from cascade.apply_to_each([row["id"] for row in found], lambda _: _WITH_IT)


def go_on(cascade: "Cascade", work: Row) -> Script[None]:
    """Cancel more children of a task, unless somebody tries the task again meanwhile."""
    rows = yield Statement("tasks_locked", {"ids": [work["subject"]]})
    for row in rows:
        if row["status"] == Status.CANCELLED or row["cancel_requested_at"] is not None:
            cascade.cancel_subtasks([(row["id"], row["workspace"])])


def is_cancel(change: TaskChange) -> bool:
    """Whether the change cancelled a task, or asked its owner to end it."""
    return change.event.kind in ("cancel_requested", "cancelled")


def tasks_with_open_questions(changes: Sequence[TaskChange]) -> list[UUID]:
    """The tasks that ended though they waited for people's answers."""
    return [
        change.task.id
        for change in changes
        if change.task.status in TERMINAL and (change.task.hold or "").partition(":")[0] in _ASKED
    ]


def close_forsaken(changes: Sequence[TaskChange], now: datetime, actor: str | None) -> Script[None]:
    """Close what was put to people for tasks that ended though they waited for the answers."""
    for asker in tasks_with_open_questions(changes):
        yield closed(asker, now, actor)


def closed(task: UUID, now: datetime, actor: str | None, kept: str | None = None) -> Statement:
    """The statement that closes what was put to people for a task, but for one kind of question.

    Others below a task may wait for an answer about its budget, whatever becomes of itself.
    """
    params = {"task": task, "kept": kept, "now": now, "actor": actor}
    return Statement("inbox_close", params)


def _woken(task: Task) -> Command:
    del task
    return Unpark()
