"""The tree of subtasks: finished subtasks wake parents, cancelled parents cancel subtasks."""

from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING
from uuid import UUID

import msgspec

from tenuto.engine.limits.pending_quota import check_pending
from tenuto.model.errors import Conflict
from tenuto.model.flows.progress import MAX_CASCADE_ROWS
from tenuto.model.limits.budgets import HOLD as BUDGET
from tenuto.model.limits.quota import Quota, effective_quota, parse_quota
from tenuto.model.tasks.changes import HANDLER_HOLDS
from tenuto.model.tasks.commands import Cancel, Command, Unpark
from tenuto.model.tasks.task import TERMINAL, Status, Task, TaskChange
from tenuto.store.protocol import Row, Rows, Script, Statement

if TYPE_CHECKING:
    from tenuto.engine.flows.advance import Cascade

CANCEL_BELOW = "below"
"""Kind of deferred work: cancels the remaining children of one task."""
_PERSON_HOLDS = HANDLER_HOLDS - {"children"} | {BUDGET}
_CANCEL_WITH_PARENT = Cancel(reason="the parent task was cancelled")


class SpawnLimits(msgspec.Struct, frozen=True):
    """Limits of spawned subtasks."""

    max_depth: int = 16
    """Levels of subtasks below a task."""
    max_children: int = 1000
    """Children of one task."""

    def check_and_store_depth(self, parent: Task, child: UUID, ceiling: Quota) -> Script[None]:
        """Stores a new child's depth; `Conflict` if too deep or too many, `TooMany` by quota.

        The caller has locked the parent and has inserted the child. `ceiling` is the operator's
        quota for every workspace.
        """
        parent_key = {"id": parent.id, "workspace": parent.workspace}
        [tree] = yield Statement("child_limits", parent_key)
        depth = tree["depth"] + 1
        if depth > self.max_depth:
            raise Conflict(
                f"subtask depth {depth} exceeds the limit of {self.max_depth} (setting max_depth)",
                "tree_too_deep",
            )
        if tree["children"] > self.max_children:
            text = (
                f"task {parent.id} has {self.max_children:,} subtasks,"
                " the limit (setting max_children)"
            )
            raise Conflict(text, "too_many_children")
        yield Statement("child_depth_set", parent_key | {"id": child, "depth": depth})
        if effective_quota(parse_quota(tree["quota"]), ceiling).pending is not None:
            yield from check_pending(parent.workspace, ceiling)


def wake_parents(cascade: "Cascade", finished: list[UUID]) -> Script[None]:
    """Wakes parents that waited for these finished children and wait for no other child.

    A parent that starts to wait locks its children. So every finished child is seen either by the
    parent or by this function.
    """
    rows = yield Statement("parents_waiting", {"ids": finished})
    yield Statement("child_wait_resolve", {"ids": finished})
    waiting = {row["id"] for row in rows}
    if not waiting:
        return
    still_waiting = yield Statement("parents_still_waiting", {"ids": sorted(waiting)})
    ready = sorted(waiting - {row["id"] for row in still_waiting})
    if ready:
        yield from cascade.apply_to_each(ready, _unpark_command)


def cancel_subtasks(cascade: "Cascade", parents: Sequence[tuple[UUID, UUID]]) -> Script[None]:
    """Cancels children of cancelled tasks, given as (id, workspace) pairs; defers a large rest.

    The children of these children are cancelled in turn.
    """
    children: Rows = []
    if cascade.rows_written < MAX_CASCADE_ROWS:
        children = yield Statement(
            "children_live", {"most": MAX_CASCADE_ROWS}, {"parent": sorted(parents)}
        )
    if cascade.rows_written >= MAX_CASCADE_ROWS or len(children) == MAX_CASCADE_ROWS:
        for task, workspace in parents:
            cascade.defer(CANCEL_BELOW, task, workspace)
    if children:
        yield from cascade.apply_to_each(
            [row["id"] for row in children], lambda _: _CANCEL_WITH_PARENT
        )


def continue_cancel(cascade: "Cascade", work: Row) -> Script[None]:
    """Runs deferred work: queues more children to cancel, unless the task was retried meanwhile."""
    rows = yield Statement("tasks_locked", {"ids": [work["subject"]]})
    for row in rows:
        if row["status"] == Status.CANCELLED or row["cancel_requested_at"] is not None:
            cascade.queue_cancel_of_subtasks([(row["id"], row["workspace"])])


def is_cancel(change: TaskChange) -> bool:
    """True if the change cancelled a task, or requested its running attempt to stop."""
    return change.event.kind in ("cancel_requested", "cancelled")


def tasks_with_open_questions(changes: Sequence[TaskChange]) -> list[UUID]:
    """Returns the ids of tasks that finished while they waited for an answer of a person."""
    return [
        change.task.id
        for change in changes
        if change.task.status in TERMINAL
        and (change.task.hold or "").partition(":")[0] in _PERSON_HOLDS
    ]


def close_open_questions(
    changes: Sequence[TaskChange], now: datetime, actor: str | None
) -> Script[None]:
    """Closes inbox items and messages of tasks that finished while they waited for an answer."""
    for task in tasks_with_open_questions(changes):
        yield close_inbox_statement(task, now, actor)


def close_inbox_statement(
    task: UUID, now: datetime, actor: str | None, kept: str | None = None
) -> Statement:
    """Returns the statement that closes a task's messages and inbox items (not of kind `kept`).

    A budget item is kept: subtasks can wait for its answer even after the task has finished.
    """
    params = {"task": task, "kept": kept, "now": now, "actor": actor}
    return Statement("inbox_close", params)


def _unpark_command(task: Task) -> Command:
    """Returns the command that wakes any parked task."""
    del task
    return Unpark()
