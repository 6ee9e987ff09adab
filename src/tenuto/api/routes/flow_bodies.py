"""Request bodies about flows: control tasks, groups, starts and inbox answers."""

from typing import Any, Literal

import msgspec

from tenuto.manifest.tasks import CONTROL_FIELDS
from tenuto.model.errors import Invalid
from tenuto.model.flows.definition import (
    Approval,
    Condition,
    Control,
    Foreach,
    Goto,
    GroupSpec,
    Join,
    Kind,
    Order,
)
from tenuto.model.limits.budgets import Budget
from tenuto.model.tasks.fields import Field

KINDS: dict[str, type] = {
    "foreach": Foreach,
    "goto": Goto,
    "condition": Condition,
    "approval": Approval,
}
FLAT_FIELDS = {
    name: {flat: field for field, flat in CONTROL_FIELDS[kind].items()}
    for name, kind in KINDS.items()
    if kind in CONTROL_FIELDS
}
"""Flat fields of `TaskBody` for control tasks, by kind, with their names in the model."""


class StrictBody(msgspec.Struct, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """Body from a user or program: unknown fields are refused."""


def optional(type_: Any) -> Any:
    """Returns the type with `None` added; `Any` is returned as it is."""
    return type_ if type_ is Any else type_ | None


def body_fields(field: Field) -> list[tuple[str, Any, Any]]:
    """Returns name, type and default of a field of the model under each of its REST names."""
    if len(field.names) > 1:
        return [(name, optional(field.type), None) for name in field.names]
    if field.default == ():
        return [(field.names[0], list[str], [])]
    return [(field.names[0], field.type, field.default)]


class ControlBody(StrictBody):
    """A control task; which fields are allowed depends on `kind`."""

    kind: Literal["foreach", "goto", "condition", "approval"]
    items: Any = None
    template: str | None = None
    order: Order | None = None
    join: Join | None = None
    target: str | None = None
    prompt: str | None = None
    expression: str | None = None
    on_true: str | None = None
    on_false: str | None = None
    message: str | None = None
    timeout_s: int | None = None
    on_timeout: Literal["reject", "approve"] | None = None
    on_reject: Literal["fail", "skip"] | None = None

    def control(self) -> Control:
        """Returns the control of the model; raises `Invalid` for a missing or extra field."""
        fields = {name: getattr(self, name) for name in self.__struct_fields__ if name != "kind"}
        return build_control(
            self.kind, {name: value for name, value in fields.items() if value is not None}
        )


class ApprovalBody(StrictBody):
    """An approval by a person."""

    message: str | None = None
    timeout_s: int | None = None
    on_timeout: Literal["reject", "approve"] = "reject"
    on_reject: Literal["fail", "skip"] = "fail"


class EscalationBody(StrictBody):
    """Reason and advice for the person or agent that handles a failure."""

    reason: str
    prompt: str


class ChildRef(StrictBody):
    """A reference to a task or group by its key, with its kind."""

    child_id: str
    kind: Literal["Task", "Group", "task", "group"] | None = None


class GroupBody(StrictBody):
    """A group to define: its children by key, in order."""

    key: str | None = None
    id: str | None = None
    title: str | None = None
    name: str | None = None
    type: Literal["Sequential", "Parallel", "sequential", "parallel"] | None = None
    order: Order | None = None
    children: list[str | ChildRef] = []
    next: str | ChildRef | None = None
    join: Join = "all_succeeded"
    prompt: str | None = None
    metadata: dict[str, Any] | None = None
    start: bool = False
    input: Any = None
    """The input of its flow; only with `start`."""

    def spec(self) -> GroupSpec:
        """Returns the group's definition; `Invalid` without a key or for contradicting fields."""
        key = single_value("key", key=self.key, id=self.id)
        if key is None:
            raise Invalid("key is required", field="key")
        if self.input is not None and not self.start:
            raise Invalid("input is allowed only with start: true", field="input")
        order = None if self.type is None else self.type.lower()
        return GroupSpec(
            key=key,
            title=single_value("title", title=self.title, name=self.name) or key,
            order=single_value("type", type=order, order=self.order) or "sequential",
            children=tuple(key_of(child) for child in self.children),
            next=None if self.next is None else key_of(self.next),
            join=self.join,
            prompt=self.prompt,
            metadata=self.metadata,
        )


class StartBody(StrictBody):
    """Options to start a flow."""

    input: Any = None
    steps: int | None = None
    """Maximum jumps (goto) of the flow."""
    priority: int | None = None


class FlowBody(StartBody, kw_only=True):
    """A flow to start: the key of its definition."""

    key: str


class RerunBody(StrictBody):
    """How to run a flow again: as a new flow, or the same one from its failed tasks."""

    from_failed: bool = False
    steps: int | None = None


class CommentBody(StrictBody):
    """A person's comment."""

    comment: str | None = None


class ApproveBody(CommentBody):
    """A comment, and the new budget of a task whose budget is used up."""

    budget: Budget | None = None


class AnswerBody(StrictBody):
    """A person's answer to an inbox item."""

    comment: str


def key_of(reference: str | ChildRef) -> str:
    """Returns the key of a reference."""
    return reference if isinstance(reference, str) else reference.child_id


def single_value(field: str, **values_by_name: Any) -> Any:
    """Returns the value set under one of several names, or `None`; `Invalid` if two differ."""
    present = {name: value for name, value in values_by_name.items() if value is not None}
    values = list(present.values())
    if any(value != values[0] for value in values[1:]):
        raise Invalid(f"{' and '.join(present)} differ", field=field)
    return values[0] if values else None


def build_control(kind: str, fields: dict[str, Any]) -> Control:
    """Returns the control of a kind from its fields; raises `Invalid` for missing or extra ones."""
    allowed = KINDS[kind].__struct_fields__  # type: ignore[attr-defined]
    for name in fields:
        if name not in allowed:
            raise Invalid(
                f"a {kind} task has no field {to_camel(name)}", field=f"control.{to_camel(name)}"
            )
    try:
        control: Control = msgspec.convert({"kind": kind, **fields}, Control)
    except msgspec.ValidationError as error:
        raise Invalid(f"invalid {kind} task: {error}", field="control") from error
    return control


def control_of(
    nested: ControlBody | None,
    approval: ApprovalBody | None,
    flat: dict[str, Any],
    kind: Kind | None,
) -> Control | None:
    """Returns the control from nested or flat fields; `None` for a task that is no control task.

    Raises `Invalid` if there are several, or if `kind` does not match.
    """
    controls: list[Control] = [] if nested is None else [nested.control()]
    if approval is not None:
        controls.append(Approval(**msgspec.structs.asdict(approval)))
    for name, names in FLAT_FIELDS.items():
        fields = {
            field: flat[body_name]
            for body_name, field in names.items()
            if flat[body_name] is not None
        }
        if fields:
            controls.append(build_control(name, fields))
    if len(controls) > 1:
        raise Invalid(
            "a task can be only one kind of control task; remove the fields of the others",
            field="control",
        )
    control = controls[0] if controls else None
    actual_kind = "agent" if control is None else str(type(control).__struct_config__.tag)
    if kind not in (None, actual_kind):
        raise Invalid(
            f"kind is {kind}, but the other fields are of kind {actual_kind}", field="kind"
        )
    return control


def to_camel(name: str) -> str:
    """Returns a snake_case name in camelCase."""
    first, *rest = name.split("_")
    return first + "".join(word.capitalize() for word in rest)
