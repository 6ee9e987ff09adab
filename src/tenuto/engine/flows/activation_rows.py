"""What begins in a flow, and how it is spelled out: the pure part of births."""

from datetime import datetime
from typing import Any
from uuid import UUID

import msgspec

from tenuto.model.errors import Invalid
from tenuto.model.flows.definition import Foreach, Order
from tenuto.model.flows.plan import Plan
from tenuto.model.flows.progress import ActivationContext, Flow, Group, GroupStatus, with_item
from tenuto.model.tasks.submission import NewTask


class ActivationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Something that is to begin in a slot: a key's task or group, or the run of a foreach."""

    flow: UUID
    group: UUID | None
    slot: int
    key: str
    of: str | None = None
    """The key of what it follows; the run of a foreach goes by it."""
    follows: UUID | None = None
    groups: tuple[str, ...] = ()
    prompt: str | None = None
    jump: bool = False
    foreach: Foreach | None = None
    items: list[Any] | None = None
    id: UUID | None = None
    """The task's id where somebody has been told of it already."""


def new_group(
    id_: UUID,
    flow: Flow,
    plan: Plan,
    birth: ActivationRequest,
    key: str,
    activation: int,
    now: datetime,
    status: GroupStatus = GroupStatus.RUNNING,
) -> tuple[Group, tuple[Any, ...]]:
    """A run of a group, or of a foreach's items, and its row."""
    if birth.foreach is not None:
        order: Order = birth.foreach.order
        join, title = birth.foreach.join, f"{plan.tasks[key].title} (items)"
        total, items = len(birth.items or []), msgspec.json.encode(birth.items).decode()
    else:
        spec = plan.groups[key]
        order, join, title = spec.order, spec.join, spec.title
        total, items = len(spec.children), None
    context = ActivationContext(groups=birth.groups)
    group = Group(
        id=id_,
        workspace=flow.workspace,
        flow=flow.id,
        key=key,
        title=title,
        activation=activation,
        parent=birth.group,
        slot=birth.slot,
        kind=order,
        status=status,
        join_policy=join,
        depth=len(birth.groups) + 1,
        total=total,
        made=0,
        open=total,
        succeeded=0,
        failed=0,
        turn=None,
        follows=birth.follows,
        context=context_text(context),
        version=1,
        created_at=now,
        updated_at=now,
        finished_at=None,
    )
    return group, _row(group, items)


def _row(group: Group, items: str | None) -> tuple[Any, ...]:
    return (
        group.id,
        group.workspace,
        group.flow,
        group.key,
        group.title,
        group.activation,
        group.parent,
        group.slot,
        group.kind,
        group.status,
        group.join_policy,
        group.depth,
        items,
        group.total,
        group.follows,
        group.context,
        msgspec.json.encode({"flow": group.flow}).decode(),
    )


def for_item(template: NewTask, item: Any, index: int) -> NewTask:
    value = {"item": item, "index": index} if template.input is None else template.input
    try:
        return msgspec.structs.replace(
            template,
            title=with_item(template.title, item, index)[:255],
            prompt=with_item(template.prompt, item, index),
            description=with_item(template.description, item, index),
            input=value if template.input is None else with_item(value, item, index),
        )
    except Invalid as error:
        # Seen by whoever runs the item: the others are not to suffer for one.
        return msgspec.structs.replace(template, input={"item": item, "error": error.message})


def named(new: NewTask, key: str, flow: Flow) -> NewTask:
    """A definition as the flow runs it: under its key, with the flow's priority if it has one."""
    changes: dict[str, Any] = {"key": key, "blocks": []}
    if flow.priority is not None:
        changes["priority"] = flow.priority
    return msgspec.structs.replace(new, **changes)


def hold_of(new: NewTask, first: str | None) -> str | None:
    """What a new task waits for before anything of its own; the engine acts where no agent does."""
    acts = new.kind == "approval" or (new.control is not None and new.prompt is None)
    if not acts:
        return first
    return "act" if first is None else f"{first}:act"


def context_text(context: ActivationContext) -> str | None:
    return None if context == ActivationContext() else msgspec.json.encode(context).decode()
