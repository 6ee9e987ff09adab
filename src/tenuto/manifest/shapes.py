"""The fields of YAML files: names and types of tasks, groups, schedules and triggers.

The decoder uses these classes, and the published JSON Schema is generated from them. A field of
the model can have several names here.
"""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta

from tenuto.model import bounds
from tenuto.model.flows.definition import Join
from tenuto.model.schedules.schedule import ScheduleSpec
from tenuto.model.tasks.fields import (
    ATTEMPTS,
    KEY,
    LABELS,
    NAME,
    SECONDS,
    TEXT,
    TITLE,
    Field,
    Limit,
    value_type,
    whole_limit,
)
from tenuto.model.tasks.submission import FIELDS


def _meta(limit: Limit) -> Meta:
    """Returns the annotation that publishes the limit in the JSON Schema."""
    return Meta(extra_json_schema=dict(limit.json_schema))


Key = Annotated[str, _meta(KEY)]
Name = Annotated[str, _meta(NAME)]
Title = Annotated[str, _meta(TITLE)]
Text = Annotated[str, _meta(TEXT)]
Seconds = Annotated[int, _meta(SECONDS)]
Names = Annotated[list[Name], _meta(LABELS)]
Attempts = Annotated[int, _meta(ATTEMPTS)]
Retries = Annotated[int, _meta(whole_limit(0, bounds.MAX_ATTEMPTS - 1))]


class Shape(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A mapping in a file. A field without a value counts as absent."""


class ChildRef(Shape):
    """A reference to a task or group by its key, with its kind."""

    child_id: Key
    kind: Literal["Task", "Group", "task", "group"] | None = None


class RetryShape(Shape):
    """Retry settings: the number of tries and the delays between them."""

    attempts: Attempts | None = None
    max_retries: Retries | None = None
    backoff: Literal["fixed", "exponential"] | None = None
    base_s: float | None = None
    multiplier: float | None = None
    cap_s: float | None = None
    jitter: float | None = None


class EscalationShape(Shape):
    """The reason and the prompt of an escalation: a request for help from a person."""

    reason: Annotated[str, Meta(extra_json_schema={"maxLength": bounds.MAX_ERROR})]
    prompt: Text


class BudgetShape(Shape):
    """The limits on the tokens and cost of a task and all its subtasks."""

    tokens: int | None = None
    cost_usd: float | None = None


class ApprovalShape(Shape):
    """An approval: the flow waits until a person approves or rejects."""

    message: Text | None = None
    timeout_s: Seconds | None = None
    on_timeout: Literal["reject", "approve"] | None = None
    on_reject: Literal["fail", "skip"] | None = None


_CONVERTED = ("max_attempts", "retry", "escalation", "budget", "control")
"""Fields that `tasks.py` converts from several fields or another form."""
_OWN_FIELDS: dict[str, dict[str, Any]] = {
    "target_agent": {"target_agent": str, "agent_id": str},
    "tools": {"tools": Names},
    "max_attempts": {"max_attempts": Attempts, "attempts": Attempts, "max_retries": Retries},
    "retry": {"retry": RetryShape, "retry_backoff_seconds": float},
    "escalation": {"escalation": EscalationShape},
    "budget": {"budget": BudgetShape},
    "schedule": {"schedule": ScheduleSpec},
    "next": {"next_task": Key | ChildRef, "next": Key | ChildRef},
    "previous": {"previous_task": Key | ChildRef, "previous": Key | ChildRef},
    "control": {
        "foreach_items": Any,
        "foreach_template_task_id": Key,
        "foreach_order": Literal["sequential", "parallel"],
        "foreach_join": Join,
        "goto_target_task_id": Key,
        "goto_prompt": Text,
        "condition": Text,
        "true_next_task_id": Key,
        "false_next_task_id": Key,
        "approval": ApprovalShape,
    },
}
"""Fields whose types in files differ from those in `NewTask`, or that only files have."""
FIELD_NAMES: Mapping[str, tuple[str, ...]] = {
    name: field.yaml
    for name, field in FIELDS.items()
    if (field.definition or name == "group") and name not in _CONVERTED
}
"""The other fields of `NewTask` and their names in files; exports use the first one.

A definition cannot have a `group`, but a file can say it: the group then has the task as a child.
"""
_ORDER = (
    "key title description prompt system_prompt model max_turns conversation task_type agent_type"
    " target_agent runtime command cwd env priority tags task_tags capabilities container tools"
    " region estimate_minutes complexity max_attempts retry timeout_s queue_ttl_s lease_s input"
    " metadata source escalation budget schedule group depends_on on_dependency_failure next"
    " previous control"
).split()
"""The order of the fields in the published schema; fields that are not named follow."""


def _field_type(field: Field) -> Any:
    """Returns the type of a field's values, with the limits of the value and of its items."""
    type_, limit = value_type(field), field.limit
    if limit is None:
        return type_
    if limit.items is not None:
        type_ = list[Annotated[str, _meta(limit.items)]]
    return Annotated[type_, _meta(limit)]


def _task_fields() -> Iterator[tuple[str, Any, None]]:
    """Yields name, type and default of the fields of a task in a file."""
    others = (name for name in FIELD_NAMES if name not in _ORDER)
    for name in [*_ORDER, *others]:
        types = _OWN_FIELDS.get(name)
        if types is None:
            types = dict.fromkeys(FIELD_NAMES[name], _field_type(FIELDS[name]))
        for yaml_name, type_ in types.items():
            yield yaml_name, type_ if type_ is Any else type_ | None, None


if TYPE_CHECKING:
    _TaskFields = Shape
else:
    _TaskFields = msgspec.defstruct("_TaskFields", list(_task_fields()), bases=(Shape,))


class TaskShape(_TaskFields):
    """A task definition. It can be started by its `id` any number of times."""


class GroupShape(Shape):
    """A group of tasks and groups that run sequentially or in parallel."""

    id: Key | None = None
    key: Key | None = None
    name: Title | None = None
    title: Title | None = None
    type: Literal["Sequential", "Parallel", "sequential", "parallel"] | None = None
    children: list[Key | ChildRef] | None = None
    next: Key | ChildRef | None = None
    previous: Key | ChildRef | None = None
    join: Join | None = None
    prompt: Text | None = None
    metadata: dict[str, Any] | None = None


class ScheduleShape(Shape):
    """A named schedule: when to start the target."""

    name: Key
    target: Key
    schedule: ScheduleSpec
    input: Any = None


class TriggerShape(Shape):
    """A trigger: after which events to start the target."""

    name: Key
    event: Name
    target: Key
    filter: Text | None = None


class Lists(Shape):
    """A document with lists of tasks, groups, schedules and triggers."""

    tasks: list[TaskShape] | None = None
    groups: list[GroupShape] | None = None
    schedules: list[ScheduleShape] | None = None
    triggers: list[TriggerShape] | None = None


LIST_NAMES = tuple(Lists.__struct_fields__)
UNSUPPORTED_LISTS = ("agents", "containers", "tools", "webhooks")
"""Lists that documents do not support yet. A task has its own field `tools`."""
