"""Rules for what runs next when a part of a flow finishes; `groups.py` has those of joins.

Pure; `engine/flows/advance.py` reads and writes the rows. A flow runs in group slots: each child of
a group has one, and the flow's root has one. A task or group in a slot may have a successor in the
same slot: its `next`, the branch of a condition, the target of a goto, or the group of a foreach.
The slot finishes when the last of them finishes without a successor.
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
    check_no_references,
    get_at_path,
    parse_reference,
    resolve_references,
)
from tenuto.model.flows.expressions.parser import compile_expression
from tenuto.model.flows.plan import Plan

MAX_CASCADE_ROWS = 500
"""Rows that one transaction changes as follow-ups; the rest is deferred."""


class FlowStatus(StrEnum):
    RUNNING = "RUNNING"
    PAUSED = "PAUSED"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"


FLOW_OPEN = frozenset({FlowStatus.RUNNING, FlowStatus.PAUSED})


class Flow(msgspec.Struct, frozen=True, kw_only=True):
    """One execution of a plan: its row."""

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


def flow_end_status(flow: Flow) -> FlowStatus | None:
    """Returns FAILED or COMPLETED by the flow's slots; `None` while one of them is open."""
    if flow.open > 0:
        return None
    return FlowStatus.FAILED if flow.failed else FlowStatus.COMPLETED


class ControlTaskFailed(Exception):
    """A control task cannot be carried out; it fails with this message and code, without retry."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.message = message
        self.code = code


class NextStep(msgspec.Struct, frozen=True, kw_only=True):
    """What runs next in the slot of a successful task: a key, or a template once per item."""

    key: str
    prompt: str | None = None
    jump: bool = False
    foreach: Foreach | None = None
    items: list[Any] | None = None


class ControlInput(msgspec.Struct, frozen=True, kw_only=True):
    """The values that a control task may read."""

    result: Any
    task: dict[str, Any]
    input: Any
    results: dict[str, Any]


def choose_next_step(
    control: Control | None, next_key: str | None, inputs: ControlInput
) -> NextStep | None:
    """Returns what runs next in a successful task's slot, or `None`; raises `ControlTaskFailed`."""
    match control:
        case Goto():
            return NextStep(key=control.target, prompt=control.prompt, jump=True)
        case Condition():
            branch = control.on_true if _is_true(control, inputs) else control.on_false
            next_key = branch or next_key
        case Foreach():
            return NextStep(
                key=control.template, foreach=control, items=foreach_items(control, inputs.results)
            )
    return None if next_key is None else NextStep(key=next_key)


def _is_true(control: Condition, inputs: ControlInput) -> bool:
    """True if the condition holds; raises `ControlTaskFailed` if it cannot be evaluated."""
    names = {"result": inputs.result, "task": inputs.task, "input": inputs.input}
    try:
        return compile_expression(control.expression, frozenset(names)).holds(names)
    except Invalid as error:
        raise ControlTaskFailed(error.message, error.code) from error


def foreach_items(control: Foreach, results: dict[str, Any]) -> list[Any]:
    """Returns the items of a foreach; raises `ControlTaskFailed` if there is no valid list."""
    items = control.items
    try:
        if parse_reference(items) is not None:
            items = resolve_references(items, results)
            check_no_references("the list of items", items)
    except Invalid as error:
        raise ControlTaskFailed(error.message, error.code) from error
    if not isinstance(items, list):
        raise ControlTaskFailed("the items of the foreach must be a list", "invalid_value")
    if len(items) > MAX_ITEMS:
        raise ControlTaskFailed(
            f"{len(items):,} items; a foreach takes at most {MAX_ITEMS:,}", "too_large"
        )
    return items


def is_next_child(plan: Plan, group_key: str | None, key: str, next_key: str) -> bool:
    """True if `next_key` is the child after `key` in a sequential group, so it runs next anyway."""
    group = plan.groups.get(group_key) if group_key is not None else None
    if group is None or group.order != "sequential" or key not in group.children:
        return False
    return next_key in group.children[group.children.index(key) + 1 :][:1]


class ActivationContext(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What an activation adds to its definition."""

    groups: tuple[str, ...] = ()
    """Keys of the enclosing groups, outermost first."""
    prompts: tuple[str, ...] = ()
    """Prompts that gotos on the way to this activation appended."""
    item: Any = None
    index: int | None = None


def fill_template(value: Any, item: Any, index: int) -> Any:
    """Fills in `{{item}}`, `{{index}}`, `{"$item": PATH}`; `Invalid` if the path is missing."""
    if isinstance(value, str):
        if "{{" not in value:
            return value
        text = item if isinstance(item, str) else msgspec.json.encode(item).decode()
        return value.replace("{{item}}", text).replace("{{index}}", str(index))
    if isinstance(value, dict):
        if set(value) == {"$item"}:
            path = value["$item"]
            return get_at_path(item, path if isinstance(path, str) else None)
        return {key: fill_template(part, item, index) for key, part in value.items()}
    if isinstance(value, list):
        return [fill_template(part, item, index) for part in value]
    return value


def build_prompt(plan: Plan, context: ActivationContext, own: str | None) -> str | None:
    """Returns the prompts of groups, outermost first, task and gotos, joined; `None`: no prompt."""
    group_prompts = (plan.groups[key].prompt for key in context.groups if key in plan.groups)
    parts = [part for part in (*group_prompts, own, *context.prompts) if part]
    return "\n\n".join(parts) if parts else None
