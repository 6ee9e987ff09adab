"""What follows when a part of a flow ends. Pure; `engine/flows/advance.py` reads and writes.

A flow runs in slots: each child of a group has one, and so has the flow's own root. What runs in a
slot may be followed there by something else (its `next`, the branch of a condition, the target of a
goto, the run of a foreach); the slot ends when the last of them ends without a successor.
"""

from datetime import datetime
from enum import StrEnum
from typing import Any
from uuid import UUID

import msgspec

from tenuto.model.errors import Invalid
from tenuto.model.flows.definition import (
    MAX_ITEMS,
    Condition,
    Control,
    Foreach,
    Goto,
    Join,
    Order,
    ResultReference,
    at_path,
    check_data,
    reference,
)
from tenuto.model.flows.expressions.parser import compile_expression
from tenuto.model.flows.plan import Plan
from tenuto.model.tasks.task import Status

CASCADE = 500
"""Rows that one transaction changes beyond those it was asked for; the rest is done later."""


class GroupStatus(StrEnum):
    WAITING = "WAITING"
    RUNNING = "RUNNING"
    PAUSED = "PAUSED"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"
    SKIPPED = "SKIPPED"


class FlowStatus(StrEnum):
    RUNNING = "RUNNING"
    PAUSED = "PAUSED"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"


GROUP_OPEN = frozenset({GroupStatus.WAITING, GroupStatus.RUNNING, GroupStatus.PAUSED})
FLOW_OPEN = frozenset({FlowStatus.RUNNING, FlowStatus.PAUSED})


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """One run of a group, as its row has it."""

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


class Flow(msgspec.Struct, frozen=True, kw_only=True):
    """One execution of a plan, as its row has it."""

    id: UUID
    workspace: UUID
    key: str
    title: str
    status: FlowStatus
    steps_left: int
    open: int
    failed: int
    priority: int | None
    source: str | None
    rerun_of: UUID | None
    trace_id: str | None
    created_by: str | None
    version: int
    created_at: datetime
    updated_at: datetime
    finished_at: datetime | None


class SlotResult(StrEnum):
    """How a slot ended, as far as its group or flow cares."""

    SUCCESS = "success"
    FAILURE = "failure"
    NEITHER = "neither"


def end_of(status: Status | GroupStatus) -> SlotResult:
    """SKIPPED is done, and neither a success nor a failure."""
    if status.value == "COMPLETED":
        return SlotResult.SUCCESS
    return SlotResult.NEITHER if status.value == "SKIPPED" else SlotResult.FAILURE


def with_ended_slots(group: Group, ends: list[SlotResult]) -> Group:
    """The group after some of its slots ended, its status as yet the same."""
    return msgspec.structs.replace(
        group,
        open=group.open - len(ends),
        succeeded=group.succeeded + ends.count(SlotResult.SUCCESS),
        failed=group.failed + ends.count(SlotResult.FAILURE),
    )


_AT_LAST: dict[Join, tuple[GroupStatus, GroupStatus]] = {
    "all_succeeded": (GroupStatus.COMPLETED, GroupStatus.FAILED),
    "all_done": (GroupStatus.COMPLETED, GroupStatus.COMPLETED),
    "any_failed": (GroupStatus.SKIPPED, GroupStatus.COMPLETED),
    "first_succeeded": (GroupStatus.SKIPPED, GroupStatus.FAILED),
}
"""How a group ends when all its children have: without a failure, and with one."""


def join_status(group: Group) -> GroupStatus | None:
    """How the group ends by its join policy, if it does now."""
    if group.join_policy == "first_succeeded" and group.succeeded:
        return GroupStatus.COMPLETED
    if group.join_policy == "all_succeeded" and group.kind == "sequential" and group.failed:
        return GroupStatus.FAILED
    if group.open > 0:
        return None
    good, bad = _AT_LAST[group.join_policy]
    return bad if group.failed else good


def flow_end(flow: Flow) -> FlowStatus | None:
    """How the flow ends, if nothing of it is open."""
    if flow.open > 0:
        return None
    return FlowStatus.FAILED if flow.failed else FlowStatus.COMPLETED


class ControlTaskFailed(Exception):
    """A control task cannot do what it is for; its task fails with this, for good."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.message = message
        self.code = code


class NextStep(msgspec.Struct, frozen=True, kw_only=True):
    """What takes the place of something that ended well: a key, or a template per item."""

    key: str
    prompt: str | None = None
    jump: bool = False
    foreach: Foreach | None = None
    items: list[Any] | None = None


class ControlInput(msgspec.Struct, frozen=True, kw_only=True):
    """What a control task may look at."""

    result: Any
    task: dict[str, Any]
    input: Any
    results: dict[str, Any]


def step_after(
    control: Control | None, next_key: str | None, seen: ControlInput
) -> NextStep | None:
    """What runs next in the slot of a task that ended well, if anything; raises `Unfit`."""
    match control:
        case Goto():
            return NextStep(key=control.target, prompt=control.prompt, jump=True)
        case Condition():
            branch = control.on_true if _holds(control, seen) else control.on_false
            next_key = branch or next_key
        case Foreach():
            return NextStep(
                key=control.template, foreach=control, items=items_of(control, seen.results)
            )
    return None if next_key is None else NextStep(key=next_key)


def _holds(control: Condition, seen: ControlInput) -> bool:
    names = {"result": seen.result, "task": seen.task, "input": seen.input}
    try:
        return compile_expression(control.expression, frozenset(names)).holds(names)
    except Invalid as error:
        raise ControlTaskFailed(error.message, error.code) from error


def items_of(control: Foreach, results: dict[str, Any]) -> list[Any]:
    """The items of a foreach; raises `Unfit` when there is no such list."""
    found = control.items
    try:
        if (known := reference(found)) is not None:
            found = _referred(known, results)
            check_data("the list of items", found)
    except Invalid as error:
        raise ControlTaskFailed(error.message, error.code) from error
    if not isinstance(found, list):
        raise ControlTaskFailed("the items of the foreach are not a list", "invalid_value")
    if len(found) > MAX_ITEMS:
        raise ControlTaskFailed(
            f"{len(found):,} items; a foreach takes at most {MAX_ITEMS:,}", "too_large"
        )
    return found


def _referred(known: ResultReference, results: dict[str, Any]) -> Any:
    if known.key not in results:
        raise Invalid(f"{known.key!r} has no result in this flow", "result_missing")
    return at_path(results[known.key], known.path)


def is_next_child(plan: Plan, group_key: str | None, key: str, next_key: str) -> bool:
    """Whether `next_key` would run anyway after `key`, as the following child of a sequence."""
    group = plan.groups.get(group_key) if group_key is not None else None
    if group is None or group.order != "sequential" or key not in group.children:
        return False
    return next_key in group.children[group.children.index(key) + 1 :][:1]


class ActivationContext(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What an activation adds to what its definition says."""

    groups: tuple[str, ...] = ()
    """The keys of the groups around it, outermost first."""
    prompts: tuple[str, ...] = ()
    """What gotos on the way here appended."""
    item: Any = None
    index: int | None = None


def with_item(value: Any, item: Any, index: int) -> Any:
    """A template's value with `{{item}}`, `{{index}}` and `{"$item": PATH}` filled in."""
    if isinstance(value, str):
        if "{{" not in value:
            return value
        said = item if isinstance(item, str) else msgspec.json.encode(item).decode()
        return value.replace("{{item}}", said).replace("{{index}}", str(index))
    if isinstance(value, dict):
        if set(value) == {"$item"}:
            path = value["$item"]
            return at_path(item, path if isinstance(path, str) else None)
        return {key: with_item(each, item, index) for key, each in value.items()}
    if isinstance(value, list):
        return [with_item(each, item, index) for each in value]
    return value


def effective_prompt(plan: Plan, context: ActivationContext, own: str | None) -> str | None:
    """The prompts of the groups around, the task's own, and what gotos appended."""
    above = (plan.groups[key].prompt for key in context.groups if key in plan.groups)
    parts = [part for part in (*above, own, *context.prompts) if part]
    return "\n\n".join(parts) if parts else None
