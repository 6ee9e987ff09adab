"""Builds the tasks and group rows of activations. Pure: reads and writes nothing."""

from datetime import datetime
from typing import Any
from uuid import UUID

import msgspec

from tenuto.engine.rows import FlowPosition
from tenuto.model.errors import Invalid
from tenuto.model.flows.definition import Foreach, Order
from tenuto.model.flows.groups import Group, GroupStatus
from tenuto.model.flows.plan import Plan
from tenuto.model.flows.progress import ActivationContext, Flow, fill_template
from tenuto.model.tasks.submission import NewTask
from tenuto.store.protocol import Row


class ActivationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request to start the task or group with a key, or a foreach run, in a slot."""

    flow: UUID
    group: UUID | None
    slot: int
    key: str
    predecessor_key: str | None = None
    """The key of the task or group before it in the slot; the run of a foreach has this key."""
    follows: UUID | None = None
    """The task whose result is the `previous` input of the new task."""
    groups: tuple[str, ...] = ()
    """The keys of the groups that contain it, the outermost first."""
    prompt: str | None = None
    jump: bool = False
    foreach: Foreach | None = None
    items: list[Any] | None = None
    id: UUID | None = None
    """The id of the new task, if it was returned to a caller already; `None` creates one."""

    @property
    def run_key(self) -> str:
        """The key of the new task or group run; for a foreach's run, that of its control task."""
        return self.key if self.foreach is None else self.predecessor_key or self.key


class ActivationResult(msgspec.Struct):
    """The outcome of an activation batch."""

    lanes: set[int]
    """Ids of lanes in which a task became claimable."""
    control_tasks: list[tuple[UUID, UUID]]
    """Control tasks that the engine itself runs, with their workspaces."""
    refused: list[ActivationRequest]
    """Jumps beyond the flow's step budget."""
    empty_groups: list[Group]
    """Groups without children of their own."""


class AddedChild(msgspec.Struct, frozen=True):
    """A task that was added to an open group."""

    id: UUID
    slot: int
    has_turn: bool
    """True if no other child has to run before it."""
    lanes: set[int]
    control_tasks: list[tuple[UUID, UUID]]


class NewChild(msgspec.Struct, frozen=True, kw_only=True):
    """A task of a flow to insert."""

    new: NewTask
    id: UUID
    position: FlowPosition
    hold: str | None
    dependencies: tuple[tuple[UUID, bool], ...] = ()
    """The tasks it depends on, each with True if it is COMPLETED already."""
    fingerprint: str | None = None
    """Identifies a repeated submit of the same task."""


class Siblings(msgspec.Struct, frozen=True):
    """The ids of a group's new children, and the tasks of the group that they can depend on."""

    ids: dict[int, UUID]
    """By slot."""
    dependencies: dict[str, tuple[UUID, bool]] = {}
    """By key: the task's id, and True if it is COMPLETED already."""
    existing: dict[UUID, Row] = {}
    """By id: the tasks that were created earlier."""


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
    """Returns a new run of a group or of a foreach's items with this key, and its row to insert."""
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
    """Returns the columns of a group in the order of `group_insert`; `items` is JSON."""
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
    """Returns a foreach's template filled in for an item; if that fails, the error is its input."""
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
        return msgspec.structs.replace(template, input={"item": item, "error": error.message})


def with_flow_settings(new: NewTask, key: str, flow: Flow) -> NewTask:
    """Returns the definition with this key and the flow's priority, if set; drops `blocks`."""
    changes: dict[str, Any] = {"key": key, "blocks": []}
    if flow.priority is not None:
        changes["priority"] = flow.priority
    return msgspec.structs.replace(new, **changes)


def initial_hold(new: NewTask, base_hold: str | None) -> str | None:
    """Returns the hold of a new task: `base_hold`, with `act` added if the engine runs the task."""
    is_by_engine = new.kind == "approval" or (new.control is not None and new.prompt is None)
    if not is_by_engine:
        return base_hold
    return "act" if base_hold is None else f"{base_hold}:act"


def encode_context(context: ActivationContext) -> str | None:
    """Returns the context as JSON; `None` if it is empty."""
    return None if context == ActivationContext() else msgspec.json.encode(context).decode()
