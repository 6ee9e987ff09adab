"""Pure rules of a cascade: what one finished task or group leads to."""

from typing import Any
from uuid import UUID

import msgspec

from tenuto.engine.flows.activation_rows import ActivationRequest
from tenuto.engine.flows.rows import context_of
from tenuto.model.flows.groups import Group, GroupStatus, SlotResult, slot_result
from tenuto.model.flows.plan import Plan
from tenuto.model.flows.progress import NextStep, is_next_child
from tenuto.model.tasks import commands
from tenuto.model.tasks.commands import Command
from tenuto.model.tasks.task import LEASED, Status, Task
from tenuto.store.protocol import Row


class FinishedTask(msgspec.Struct, frozen=True):
    """A watched task that has just finished: its end has follow-up work."""

    id: UUID
    workspace: UUID
    status: Status
    position: Row | None = None
    """Its flow position and its number of dependents, if read already."""

    @property
    def awaited(self) -> bool:
        """True if other tasks depend on the task, or if that was not read yet."""
        return self.position is None or self.position["awaited"] > 0


class SlotOutcome(msgspec.Struct, frozen=True):
    """The result of a slot, in a group or at the top of a flow."""

    flow: UUID
    group: UUID | None
    slot: int
    result: SlotResult
    result_task: UUID | None
    """The task whose result is passed to the next child or to the group's successor."""


def group_outcome(group: Group, status: GroupStatus) -> SlotOutcome:
    """Returns the outcome of the slot that a finished group is in."""
    return SlotOutcome(group.flow, group.parent, group.slot, slot_result(status), group.follows)


def is_plain_success(row: Row, finished: dict[UUID, FinishedTask]) -> bool:
    """True if the dependency in the row completed and its dependent waits for tasks alone."""
    return bool(row["plain"]) and finished[row["needs"]].status is Status.COMPLETED


def is_met(row: Row, finished: dict[UUID, FinishedTask]) -> bool:
    """True if the dependency in the row completed, or its dependent runs in any case."""
    succeeded = finished[row["needs"]].status is Status.COMPLETED
    return succeeded or row["on_dependency_failure"] == "run"


def command_for_dependent(
    task: Task, dependencies: list[Row], finished: dict[UUID, FinishedTask]
) -> Command:
    """Returns the command for a dependent: fail or skip if a dependency is unmet, else count."""
    for row in dependencies:
        if not is_met(row, finished):
            return command_for_failed_dependency(
                row["needs"], finished[row["needs"]].status, row["on_dependency_failure"]
            )
    del task
    return commands.DependenciesMet(n=len(dependencies))


def command_for_failed_dependency(dependency: UUID, status: Status, policy: str | None) -> Command:
    """Returns the skip of a dependent if `policy` or `status` is a skip; otherwise its failure."""
    reason = f"its dependency, task {dependency}, is {status}"
    if policy == "skip" or status is Status.SKIPPED:
        return commands.Skip(reason=reason)
    return commands.FailWithoutAttempt(code="dependency_failed", message=reason)


def turn_command(task: Task) -> Command | None:
    """Returns the command that ends a wait for the turn; after `turn:act`, the hold is `act`."""
    return commands.ClearHold(hold="act") if task.hold == "turn:act" else commands.ClearHold()


def skip_command(task: Task) -> Command | None:
    """Returns the command for an open child of a finished group: skip, or cancel if it ran."""
    if task.status in LEASED or task.attempt > 0:
        return commands.Cancel(reason="its group has ended")
    return commands.Skip(reason="its group ended before its turn")


def cancel_command(task: Task) -> Command | None:
    """Returns the command that cancels an open child of a finished group."""
    del task
    return commands.Cancel(reason="its group has ended")


def pause_command(task: Task) -> Command | None:
    """Returns the pause of a new task in a paused flow or group; `None` if its hold is `paused`.

    Without the command, a task that waits for its turn would run with its turn even while the flow
    is paused.
    """
    if (task.hold or "").partition(":")[0] == "paused":
        return None
    return commands.Pause(reason="its flow was paused")


def activation_request(row: Row, step: NextStep) -> ActivationRequest:
    """Returns the request to activate a task's successor in its slot."""
    context = context_of(row["context"])
    return ActivationRequest(
        flow=row["flow"],
        group=row["group_id"],
        slot=row["slot"],
        key=step.key,
        predecessor_key=row["key"],
        follows=result_source(row),
        groups=context.groups,
        prompt=step.prompt,
        jump=step.jump,
        foreach=step.foreach,
        items=step.items,
    )


def result_source(row: Row) -> UUID | None:
    """Returns the task's id, or its predecessor's if the engine ran it; `None` without one.

    A control task that the engine ran has no result of its own; it passes on its predecessor's.
    """
    by_engine = row["kind"] in ("condition", "goto", "foreach") and row["prompt"] is None
    task: UUID | None = row["follows"] if by_engine else row["id"]
    return task


def group_successor(plan: Plan, group: Group) -> str | None:
    """Returns the key to run after a completed group; `None` if it is the next child anyway.

    Also `None` without a `next`.
    """
    spec = plan.groups.get(group.key) or plan.tasks[group.key]
    key: str | None = spec.next
    context = context_of(group.context)
    parent_key = context.groups[-1] if context.groups else None
    return None if key is None or is_next_child(plan, parent_key, group.key, key) else key


def group_activation_request(group: Group, key: str) -> ActivationRequest:
    """Returns the request to activate a group's successor in its slot."""
    context = context_of(group.context)
    return ActivationRequest(
        flow=group.flow,
        group=group.parent,
        slot=group.slot,
        key=key,
        predecessor_key=group.key,
        follows=group.follows,
        groups=context.groups,
    )


def next_child_params(group: Group) -> dict[str, Any]:
    """Returns the query parameters that find the child after the one that has the turn."""
    slot = -1 if group.turn is None else group.turn
    return {"parent": group.id, "workspace": group.workspace, "slot": slot}
