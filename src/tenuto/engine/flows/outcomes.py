"""What follows from single ends: the pure part of a cascade."""

from typing import Any
from uuid import UUID

import msgspec

from tenuto.engine.flows.activation_rows import ActivationRequest
from tenuto.engine.flows.rows import context_of
from tenuto.model.flows.plan import Plan
from tenuto.model.flows.progress import (
    Group,
    GroupStatus,
    NextStep,
    SlotResult,
    end_of,
    is_next_child,
)
from tenuto.model.tasks import commands
from tenuto.model.tasks.commands import Command
from tenuto.model.tasks.task import LEASED, Status, Task
from tenuto.store.protocol import Row


class FinishedTask(msgspec.Struct, frozen=True):
    """A task that has just ended, and whose end is watched."""

    id: UUID
    workspace: UUID
    status: Status
    place: Row | None = None
    """Where it stands in its flow, and how many wait for it, if that was read already."""

    @property
    def awaited(self) -> bool:
        """Whether somebody may wait for it."""
        return self.place is None or self.place["awaited"] > 0


class SlotOutcome(msgspec.Struct, frozen=True):
    """The end of a slot, in a group or at the top of a flow."""

    flow: UUID
    group: UUID | None
    slot: int
    end: SlotResult
    last: UUID | None
    """The task whose result is handed on: to the next in turn, or to what follows the group."""


def end_of_group(group: Group, status: GroupStatus) -> SlotOutcome:
    """The end of the slot that a group stood in."""
    return SlotOutcome(group.flow, group.parent, group.slot, end_of(status), group.follows)


def is_plain_success(row: Row, ends: dict[UUID, FinishedTask]) -> bool:
    return bool(row["plain"]) and ends[row["needs"]].status is Status.COMPLETED


def is_met(row: Row, ends: dict[UUID, FinishedTask]) -> bool:
    done = ends[row["needs"]].status is Status.COMPLETED
    return done or row["on_dependency_failure"] == "run"


def command_for_dependent(task: Task, waits: list[Row], ends: dict[UUID, FinishedTask]) -> Command:
    for row in waits:
        if not is_met(row, ends):
            return failed_need(
                row["needs"], ends[row["needs"]].status, row["on_dependency_failure"]
            )
    del task
    return commands.DependenciesMet(n=len(waits))


def failed_need(needs: UUID, status: Status, policy: str | None) -> Command:
    """What becomes of a task when something that it waits for did not end well."""
    why = f"waited for task {needs}, which is {status}"
    if policy == "skip" or status is Status.SKIPPED:
        return commands.Skip(reason=why)
    return commands.FailWithoutAttempt(code="dependency_failed", message=why)


def start_on_turn(task: Task) -> Command | None:
    return commands.ClearHold(hold="act") if task.hold == "turn:act" else commands.ClearHold()


def skipped(task: Task) -> Command | None:
    if task.status in LEASED or task.attempt > 0:
        return commands.Cancel(reason="its group has ended")
    return commands.Skip(reason="its group ended before its turn")


def cancelled(task: Task) -> Command | None:
    del task
    return commands.Cancel(reason="its group has ended")


def hold_if_paused(task: Task) -> Command | None:
    """For what waits in a flow or group that is paused, unless it waits for that alone.

    What has its turn to come would run with it, whatever its flow is by then.
    """
    if (task.hold or "").partition(":")[0] == "paused":
        return None
    return commands.Pause(reason="its flow was paused")


def birth(row: Row, step: NextStep) -> ActivationRequest:
    context = context_of(row["context"])
    return ActivationRequest(
        flow=row["flow"],
        group=row["group_id"],
        slot=row["slot"],
        key=step.key,
        of=row["key"],
        follows=handed_on(row),
        groups=context.groups,
        prompt=step.prompt,
        jump=step.jump,
        foreach=step.foreach,
        items=step.items,
    )


def handed_on(row: Row) -> UUID | None:
    """The task whose result a successor is handed: what the engine did has none of its own."""
    by_engine = row["kind"] in ("condition", "goto", "foreach") and row["prompt"] is None
    task: UUID | None = row["follows"] if by_engine else row["id"]
    return task


def group_next(plan: Plan, group: Group) -> str | None:
    spec = plan.groups.get(group.key) or plan.tasks[group.key]
    key: str | None = spec.next
    context = context_of(group.context)
    around = context.groups[-1] if context.groups else None
    return None if key is None or is_next_child(plan, around, group.key, key) else key


def group_birth(group: Group, key: str) -> ActivationRequest:
    context = context_of(group.context)
    return ActivationRequest(
        flow=group.flow,
        group=group.parent,
        slot=group.slot,
        key=key,
        of=group.key,
        follows=group.follows,
        groups=context.groups,
    )


def place_of_turn(group: Group) -> dict[str, Any]:
    """Where to look for the next child of a sequence: after the one that has the turn."""
    slot = -1 if group.turn is None else group.turn
    return {"parent": group.id, "workspace": group.workspace, "slot": slot}
