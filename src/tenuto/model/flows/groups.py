"""Runs of groups: their state, and how `join` decides their outcome.

Pure; `engine/flows/groups.py` writes what these rules decide. The fragment `in_turn` of
`chains.sql` repeats when a group cannot finish yet: change both together.
"""

from datetime import datetime
from enum import StrEnum
from uuid import UUID

import msgspec

from tenuto.model.flows.definition import Join, Order
from tenuto.model.tasks.task import Status


class GroupStatus(StrEnum):
    WAITING = "WAITING"
    RUNNING = "RUNNING"
    PAUSED = "PAUSED"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"
    SKIPPED = "SKIPPED"


GROUP_OPEN = frozenset({GroupStatus.WAITING, GroupStatus.RUNNING, GroupStatus.PAUSED})


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """One run of a group: its row."""

    id: UUID
    workspace: UUID
    flow: UUID
    key: str
    title: str
    activation: int
    parent: UUID | None
    slot: int
    kind: Order
    status: GroupStatus
    join_policy: Join
    depth: int
    total: int
    made: int
    open: int
    succeeded: int
    failed: int
    turn: int | None
    follows: UUID | None
    context: str | None
    version: int
    created_at: datetime
    updated_at: datetime
    finished_at: datetime | None


class SlotResult(StrEnum):
    """The outcome of a slot, as its group or flow counts it."""

    SUCCESS = "success"
    FAILURE = "failure"
    NEITHER = "neither"


def slot_result(status: Status | GroupStatus) -> SlotResult:
    """Returns the slot result of a final status; SKIPPED is neither a success nor a failure."""
    if status.value == "COMPLETED":
        return SlotResult.SUCCESS
    return SlotResult.NEITHER if status.value == "SKIPPED" else SlotResult.FAILURE


def with_ended_slots(group: Group, results: list[SlotResult]) -> Group:
    """Returns the group with its counters after some slots finished; its status is unchanged."""
    return msgspec.structs.replace(
        group,
        open=group.open - len(results),
        succeeded=group.succeeded + results.count(SlotResult.SUCCESS),
        failed=group.failed + results.count(SlotResult.FAILURE),
    )


_FINAL_STATUSES: dict[Join, tuple[GroupStatus, GroupStatus]] = {
    "all_succeeded": (GroupStatus.COMPLETED, GroupStatus.FAILED),
    "all_done": (GroupStatus.COMPLETED, GroupStatus.COMPLETED),
    "any_failed": (GroupStatus.SKIPPED, GroupStatus.COMPLETED),
    "first_succeeded": (GroupStatus.SKIPPED, GroupStatus.FAILED),
}
"""A group's final status when all its children have finished: without a failure, and with one."""


def join_status(group: Group) -> GroupStatus | None:
    """Returns the group's final status by its join policy, or `None` if it does not finish now."""
    if group.join_policy == "first_succeeded" and group.succeeded:
        return GroupStatus.COMPLETED
    if group.join_policy == "all_succeeded" and group.kind == "sequential" and group.failed:
        return GroupStatus.FAILED
    if group.open > 0:
        return None
    on_success, on_failure = _FINAL_STATUSES[group.join_policy]
    return on_failure if group.failed else on_success
