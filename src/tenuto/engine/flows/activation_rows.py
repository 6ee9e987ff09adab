"""Builds the tasks and group rows of activations. Pure: reads and writes nothing."""

from datetime import datetime
from typing import Any
from uuid import UUID

import msgspec

from tenuto.model.errors import Invalid
from tenuto.model.flows.definition import Foreach, Order
from tenuto.model.flows.plan import Plan
from tenuto.model.flows.progress import ActivationContext, Flow, Group, GroupStatus, fill_template
from tenuto.model.tasks.submission import NewTask


class ActivationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request to start the task or group with a key, or a foreach run, in a slot."""

    flow: UUID
    group: UUID | None
    slot: int
    key: str
    of: str | None = None
    """The key of the predecessor; the run of a foreach has this key."""
    follows: UUID | None = None
    """The task whose result is the `previous` input of the new task."""
    groups: tuple[str, ...] = ()
    prompt: str | None = None
    jump: bool = False
    foreach: Foreach | None = None
    items: list[Any] | None = None
    id: UUID | None = None
    """The id of the new task, if it was returned to a caller already; `None` creates one."""


class ActivationResult(msgspec.Struct):
    """The outcome of an activation batch."""

    lanes: set[int]
    """Ids of lanes in which a task became claimable."""
    acts: list[tuple[UUID, UUID]]
    """Control tasks that the engine itself runs, with their workspaces."""
    refused: list[ActivationRequest]
    """Jumps beyond the flow's step budget."""
    empty: list[Group]
    """Groups without children of their own."""


class AddedChild(msgspec.Struct, frozen=True):
    """A task that was added to an open group."""

    id: UUID
    slot: int
    mine: bool
    """True if it has its turn: no other child has to run before it."""
    lanes: set[int]
    acts: list[tuple[UUID, UUID]]


def new_group(
    id_: UUID,
    flow: Flow,
    plan: Plan,
    request: ActivationRequest,
    key: str,
    activation: int,
    now: datetime,
    status: GroupStatus = GroupStatus.RUNNING,
) -> tuple[Group, tuple[Any, ...]]:
    """Returns a new run of a group or of a foreach's items, and its row to insert."""
    if request.foreach is not None:
        order: Order = request.foreach.order
        join, title = request.foreach.join, f"{plan.tasks[key].title} (items)"
        total, items = len(request.items or []), msgspec.json.encode(request.items).decode()
    else:
        spec = plan.groups[key]
        order, join, title = spec.order, spec.join, spec.title
        total, items = len(spec.children), None
    context = ActivationContext(groups=request.groups)
    group = Group(
        id=id_,
        workspace=flow.workspace,
        flow=flow.id,
        key=key,
        title=title,
        activation=activation,
        parent=request.group,
        slot=request.slot,
        kind=order,
        status=status,
        join_policy=join,
        depth=len(request.groups) + 1,
        total=total,
        made=0,
        open=total,
        succeeded=0,
        failed=0,
        turn=None,
        follows=request.follows,
        context=encode_context(context),
        version=1,
        created_at=now,
        updated_at=now,
        finished_at=None,
    )
    return group, _group_row(group, items)


def _group_row(group: Group, items: str | None) -> tuple[Any, ...]:
    """Returns the columns of `group_insert`, in its order."""
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


def task_for_item(template: NewTask, item: Any, index: int) -> NewTask:
    """Returns the template's task for one item of a foreach, with placeholders replaced."""
    value = {"item": item, "index": index} if template.input is None else template.input
    try:
        return msgspec.structs.replace(
            template,
            title=fill_template(template.title, item, index)[:255],
            prompt=fill_template(template.prompt, item, index),
            description=fill_template(template.description, item, index),
            input=value if template.input is None else fill_template(value, item, index),
        )
    except Invalid as error:
        # The error goes to the handler of this item; the other items run as usual.
        return msgspec.structs.replace(template, input={"item": item, "error": error.message})


def with_flow_settings(new: NewTask, key: str, flow: Flow) -> NewTask:
    """Returns a task definition with its key and, if the flow has one, the flow's priority."""
    changes: dict[str, Any] = {"key": key, "blocks": []}
    if flow.priority is not None:
        changes["priority"] = flow.priority
    return msgspec.structs.replace(new, **changes)


def initial_hold(new: NewTask, base_hold: str | None) -> str | None:
    """Returns the hold of a new task; adds `act` if the engine runs it instead of an agent."""
    by_engine = new.kind == "approval" or (new.control is not None and new.prompt is None)
    if not by_engine:
        return base_hold
    return "act" if base_hold is None else f"{base_hold}:act"


def encode_context(context: ActivationContext) -> str | None:
    """Returns the context as JSON; `None` if it is empty."""
    return None if context == ActivationContext() else msgspec.json.encode(context).decode()
