"""Starts, finishes and stops runs of groups within a cascade; gives turns to their children.

A group finishes when its join decides so: `join_status` in `model/flows/groups.py`.
"""

from typing import TYPE_CHECKING
from uuid import UUID

import msgspec

from tenuto.engine.flows.added_children import start_added_children
from tenuto.engine.flows.outcomes import (
    SlotOutcome,
    group_activation_request,
    group_outcome,
    group_successor,
    next_child_params,
    turn_command,
)
from tenuto.engine.flows.rows import group_of
from tenuto.model.flows.groups import GROUP_OPEN, Group, GroupStatus, join_status, with_ended_slots
from tenuto.store.protocol import Script, Statement

if TYPE_CHECKING:
    from tenuto.engine.flows.advance import Cascade


def count_ended_slots(
    cascade: "Cascade", group: Group, outcomes: list[SlotOutcome]
) -> Script[None]:
    """Counts ended slots in a locked group, if open; finishes it, or gives its turn to the next."""
    if group.status not in GROUP_OPEN:
        return
    after = with_ended_slots(group, [outcome.result for outcome in outcomes])
    if after.kind == "sequential":
        after = msgspec.structs.replace(after, follows=outcomes[-1].result_task)
    status = join_status(after)
    if status is not None:
        yield from finish_group(cascade, after, status)
        return
    if after.kind == "sequential" and after.turn in {outcome.slot for outcome in outcomes}:
        if (yield from _try_pass_turn(cascade, after)):
            return
        after = yield from give_turn_to_next(cascade, after)
    yield from cascade.write_group(after)


def _try_pass_turn(cascade: "Cascade", group: Group) -> Script[bool]:
    """Gives the turn to a task that waits only for it, writes the group; `False`: did neither."""
    params = next_child_params(group) | {
        "open": group.open,
        "succeeded": group.succeeded,
        "failed": group.failed,
        "follows": group.follows,
        "now": cascade.now,
        "actor": cascade.actor,
    }
    rows = yield Statement("give_turn_to_next", params)
    cascade.lanes |= {row["lane"] for row in rows}
    cascade.rows_written += len(rows)
    return bool(rows)


def give_turn_to_next(cascade: "Cascade", group: Group) -> Script[Group]:
    """Starts a sequence's next child; returns the group with its `turn`, `None` if none exists yet.

    The caller writes the returned group.
    """
    rows = yield Statement("next_in_turn", next_child_params(group))
    if not rows:
        return msgspec.structs.replace(group, turn=None)
    row = rows[0]
    if row["is_group"]:
        child_rows = yield Statement("groups_locked", {"ids": [row["id"]]})
        child = group_of(child_rows[0])
        if child.status is GroupStatus.WAITING:
            child = msgspec.structs.replace(child, follows=group.follows)
            yield from _start_group(cascade, child)
    else:
        params = {"id": row["id"], "workspace": group.workspace, "follows": group.follows}
        yield Statement("set_predecessor", params)
        yield from _give_turn(cascade, row["id"])
    return msgspec.structs.replace(group, turn=row["slot"])


def _give_turn(cascade: "Cascade", task: UUID) -> Script[None]:
    """Ends a task's wait for its turn; queues the task if the engine itself runs it."""
    yield from cascade.apply_to_each([task], turn_command)
    cascade.queue_control_tasks(
        (change.task.id, change.task.workspace)
        for change in cascade.changes
        if change.task.id == task and change.task.hold == "act" and change.task.unmet == 0
    )


def _start_group(cascade: "Cascade", group: Group) -> Script[None]:
    """Sets a waiting group RUNNING: starts added children, queues the creation of its own."""
    running = msgspec.structs.replace(group, status=GroupStatus.RUNNING)
    has_added_children = group.open != group.total
    if has_added_children and group.kind == "parallel":
        yield from start_added_children(cascade, running)
    elif has_added_children and group.total == 0:
        running = yield from give_turn_to_next(cascade, running)
    yield from cascade.write_group(running, "group_started")
    cascade.queue_group_children(msgspec.structs.replace(running, version=group.version + 1))


def finish_group(cascade: "Cascade", group: Group, status: GroupStatus) -> Script[None]:
    """Writes a group's terminal status; queues its successor and the stop of its open children.

    Only a COMPLETED group has a successor; any other ends its slot.
    """
    done = msgspec.structs.replace(group, status=status, finished_at=cascade.now, turn=None)
    level = "ERROR" if status is GroupStatus.FAILED else "INFO"
    yield from cascade.write_group(done, f"group_{status.lower()}", level)
    if done.open > 0:
        cascade.queue_stop_of_children(done, cancel=group.join_policy == "first_succeeded")
    successor = None
    if status is GroupStatus.COMPLETED:
        plan = yield from cascade.plans.load_plan(group.flow)
        successor = group_successor(plan, group)
    if successor is None:
        cascade.queue_outcome(group_outcome(group, status))
    else:
        cascade.request_activation(group_activation_request(group, successor))


def stop_groups(cascade: "Cascade", ids: list[UUID], *, cancel: bool) -> Script[None]:
    """Locks the groups and stops the open ones: CANCELLED if `cancel`, else SKIPPED."""
    if not ids:
        return
    rows = yield Statement("groups_locked", {"ids": sorted(ids)})
    for row in rows:
        group = group_of(row)
        if group.status in GROUP_OPEN:
            status = GroupStatus.CANCELLED if cancel else GroupStatus.SKIPPED
            yield from stop_group(cascade, group, status)


def stop_group(
    cascade: "Cascade", group: Group, status: GroupStatus, reason: str | None = None
) -> Script[None]:
    """Writes CANCELLED or SKIPPED to a locked group; queues its outcome and children's stop."""
    done = msgspec.structs.replace(group, status=status, finished_at=cascade.now, turn=None)
    yield from cascade.write_group(done, f"group_{status.lower()}", message=reason)
    cascade.queue_stop_of_children(done, cancel=status is GroupStatus.CANCELLED)
    cascade.queue_outcome(group_outcome(group, status))
