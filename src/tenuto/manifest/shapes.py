"""The fields of YAML files: names and types of tasks, groups, schedules and triggers.

The decoder uses these classes, and the published JSON Schema is generated from them. A field of
the model can have several names here; `tasks.py` lists them.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from tenuto.model import bounds
from tenuto.model.flows.definition import Join
from tenuto.model.schedules.schedule import ScheduleSpec
from tenuto.model.tasks.submission import Complexity, OnFailure

_TEXT = {"maxLength": bounds.MAX_TEXT}
_NAME = {"minLength": 1, "maxLength": bounds.MAX_NAME}
_KEY = _NAME | {"pattern": "^[A-Za-z0-9][A-Za-z0-9._:/-]*$"}
_SECONDS = {"minimum": 1, "maximum": bounds.MAX_SECONDS}

Key = Annotated[str, Meta(extra_json_schema=_KEY)]
Name = Annotated[str, Meta(extra_json_schema=_NAME)]
Title = Annotated[str, Meta(extra_json_schema={"minLength": 1, "maxLength": bounds.MAX_TITLE})]
Text = Annotated[str, Meta(extra_json_schema=_TEXT)]
Seconds = Annotated[int, Meta(extra_json_schema=_SECONDS)]
Names = Annotated[list[Name], Meta(extra_json_schema={"maxItems": bounds.MAX_TAGS})]
Attempts = Annotated[int, Meta(extra_json_schema={"minimum": 1, "maximum": bounds.MAX_ATTEMPTS})]
Retries = Annotated[int, Meta(extra_json_schema={"minimum": 0, "maximum": bounds.MAX_ATTEMPTS - 1})]
Minutes = Annotated[
    int, Meta(extra_json_schema={"minimum": 1, "maximum": bounds.MAX_SECONDS // 60})
]
Priority = Annotated[int, Meta(extra_json_schema={"minimum": 1, "maximum": 10})]


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


class TaskShape(Shape):
    """A task definition. It can be started by its `id` any number of times."""

    id: Key | None = None
    key: Key | None = None
    name: Title | None = None
    title: Title | None = None
    description: Text | None = None
    prompt: Text | None = None
    system_prompt: Text | None = None
    model: Name | None = None
    max_turns: int | None = None
    conversation: Name | None = None
    task_type: Name | None = None
    agent_type: Name | None = None
    target_agent: str | None = None
    agent_id: str | None = None
    runtime: Name | None = None
    command: list[str] | None = None
    cwd: Text | None = None
    env: dict[str, str | dict[str, str]] | None = None
    priority: Priority | None = None
    tags: Names | None = None
    task_tags: Names | None = None
    capabilities: Names | None = None
    container: Name | None = None
    tools: Names | None = None
    region: Name | None = None
    resolve_time_estimate: Minutes | None = None
    estimate_minutes: Minutes | None = None
    estimated_duration_minutes: Minutes | None = None
    complexity_level: Complexity | None = None
    complexity: Complexity | None = None
    max_attempts: Attempts | None = None
    attempts: Attempts | None = None
    max_retries: Retries | None = None
    retry: RetryShape | None = None
    retry_backoff_seconds: float | None = None
    timeout_s: Seconds | None = None
    timeout_seconds: Seconds | None = None
    queue_ttl_s: Seconds | None = None
    lease_s: Seconds | None = None
    input: Any = None
    input_context: Any = None
    metadata: dict[str, Any] | None = None
    source: Name | None = None
    escalation: EscalationShape | None = None
    budget: BudgetShape | None = None
    schedule: ScheduleSpec | None = None
    group_id: Key | None = None
    group: Key | None = None
    depends_on: list[Key] | None = None
    on_dependency_failure: OnFailure | None = None
    next_task: Key | ChildRef | None = None
    next: Key | ChildRef | None = None
    previous_task: Key | ChildRef | None = None
    previous: Key | ChildRef | None = None
    foreach_items: Any = None
    foreach_template_task_id: Key | None = None
    foreach_order: Literal["sequential", "parallel"] | None = None
    foreach_join: Join | None = None
    goto_target_task_id: Key | None = None
    goto_prompt: Text | None = None
    condition: Text | None = None
    true_next_task_id: Key | None = None
    false_next_task_id: Key | None = None
    approval: ApprovalShape | None = None


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
