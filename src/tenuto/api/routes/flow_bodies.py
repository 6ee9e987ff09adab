"""What callers send about flows: what controls them, groups, starts and answers."""

from typing import Any, Literal

import msgspec

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

KINDS: dict[str, type] = {
    "foreach": Foreach,
    "goto": Goto,
    "condition": Condition,
    "approval": Approval,
}
FLAT: dict[str, dict[str, str]] = {
    "foreach": {
        "foreach_items": "items",
        "foreach_template_task_id": "template",
        "foreach_order": "order",
        "foreach_join": "join",
    },
    "goto": {"goto_target_task_id": "target", "goto_prompt": "prompt"},
    "condition": {
        "condition": "expression",
        "true_next_task_id": "on_true",
        "false_next_task_id": "on_false",
    },
}
"""Fields of a task that say what it controls, by kind, and what the model calls them."""


class Strict(msgspec.Struct, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """What people write of flows: a name nobody knows is refused."""


class ControlBody(Strict):
    """What a task does for its flow; which fields it has depends on `kind`."""

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
        """What the model calls it."""
        given = {name: getattr(self, name) for name in self.__struct_fields__ if name != "kind"}
        return made(self.kind, {name: each for name, each in given.items() if each is not None})


class ApprovalBody(Strict):
    """A person's yes or no that is waited for."""

    message: str | None = None
    timeout_s: int | None = None
    on_timeout: Literal["reject", "approve"] = "reject"
    on_reject: Literal["fail", "skip"] = "fail"


class EscalationBody(Strict):
    """What somebody is told who has to help."""

    reason: str
    prompt: str


class ChildRef(Strict):
    """A task or group by its key, with what it is."""

    child_id: str
    kind: Literal["Task", "Group", "task", "group"] | None = None


class GroupBody(Strict):
    """A group to be: its children by key, in order."""

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
    """What its flow is started with, if it is."""

    def spec(self) -> GroupSpec:
        """The definition of the group."""
        key = one("key", key=self.key, id=self.id)
        if key is None:
            raise Invalid("key is missing", field="key")
        if self.input is not None and not self.start:
            raise Invalid("input is for a group that starts", field="input")
        said = None if self.type is None else self.type.lower()
        return GroupSpec(
            key=key,
            title=one("title", title=self.title, name=self.name) or key,
            order=one("type", type=said, order=self.order) or "sequential",
            children=tuple(key_of(child) for child in self.children),
            next=None if self.next is None else key_of(self.next),
            join=self.join,
            prompt=self.prompt,
            metadata=self.metadata,
        )


class StartBody(Strict):
    """What to start a definition with."""

    input: Any = None
    steps: int | None = None
    """How many jumps the flow may make."""
    priority: int | None = None


class FlowBody(StartBody, kw_only=True):
    """A definition to run."""

    key: str


class RerunBody(Strict):
    """How to run a flow again: from its beginning, or itself from what failed in it."""

    from_failed: bool = False
    steps: int | None = None


class CommentBody(Strict):
    """What a person says to it."""

    comment: str | None = None


class ApproveBody(CommentBody):
    """The same, with what a task may use from now on whose budget is used up."""

    budget: Budget | None = None


class AnswerBody(Strict):
    """A person's answer."""

    comment: str


def key_of(said: str | ChildRef) -> str:
    """The key that a reference has."""
    return said if isinstance(said, str) else said.child_id


def one(field: str, **names: Any) -> Any:
    """The value that was given under one of several names; two that differ are refused."""
    given = {name: value for name, value in names.items() if value is not None}
    values = list(given.values())
    if any(value != values[0] for value in values[1:]):
        raise Invalid(f"{' and '.join(given)} differ", field=field)
    return values[0] if values else None


def made(kind: str, given: dict[str, Any]) -> Control:
    """The control of a kind from its fields; `Invalid` for one that is missing or not its own."""
    known = KINDS[kind].__struct_fields__  # type: ignore[attr-defined]
    for name in given:
        if name not in known:
            raise Invalid(f"a {kind} has no {camel(name)}", field=f"control.{camel(name)}")
    try:
        control: Control = msgspec.convert({"kind": kind, **given}, Control)
    except msgspec.ValidationError as error:
        raise Invalid(f"the {kind} of the task: {error}", field="control") from error
    return control


def control_of(
    nested: ControlBody | None,
    approval: ApprovalBody | None,
    flat: dict[str, Any],
    kind: Kind | None,
) -> Control | None:
    """What a task controls, however that was said; `Invalid` when it was said in two ways."""
    found: list[Control] = [] if nested is None else [nested.control()]
    if approval is not None:
        found.append(Approval(**msgspec.structs.asdict(approval)))
    for name, names in FLAT.items():
        given = {own: flat[said] for said, own in names.items() if flat[said] is not None}
        if given:
            found.append(made(name, given))
    if len(found) > 1:
        raise Invalid("a task controls its flow in one way only", field="control")
    control = found[0] if found else None
    there = "agent" if control is None else str(type(control).__struct_config__.tag)
    if kind not in (None, there):
        raise Invalid(f"kind is {kind}, but what is given makes it {there}", field="kind")
    return control


def camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(word.capitalize() for word in rest)
