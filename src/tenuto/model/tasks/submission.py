"""The request for a new task, and its validation."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from operator import attrgetter
from typing import Any, Literal
from uuid import UUID

import msgspec

from tenuto.model import bounds
from tenuto.model.agents.matching import COMMAND, Requirements
from tenuto.model.errors import Invalid
from tenuto.model.flows.definition import (
    Approval,
    Condition,
    Control,
    Foreach,
    Goto,
    Kind,
    check_control,
    check_key,
)
from tenuto.model.limits.budgets import Budget, check_budget
from tenuto.model.limits.concurrency import Concurrency
from tenuto.model.limits.concurrency import check as check_turns
from tenuto.model.tasks.commands import Escalation
from tenuto.model.tasks.environment import check_variable_names
from tenuto.model.tasks.retry import RetryPolicy
from tenuto.model.tenancy.secrets import referenced_name

OnFailure = Literal["fail", "skip", "run"]
Complexity = Literal["Low", "Middle", "Hard", "ExtremHard"]
KIND_OF: dict[type, Kind] = {
    Foreach: "foreach",
    Goto: "goto",
    Condition: "condition",
    Approval: "approval",
}


class NewTask(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, gc=False):
    """The request for a new task. Only `title` is required."""

    title: str
    id: UUID | None = None
    description: str | None = None
    prompt: str | None = None
    system_prompt: str | None = None
    model: str | None = None
    max_turns: int | None = None
    conversation: str | None = None
    task_type: str = "default"
    agent_type: str | None = None
    target_agent: UUID | None = None
    runtime: str | None = None
    command: list[str] | None = None
    cwd: str | None = None
    env: Mapping[str, str | Mapping[str, str]] | None = None
    """Environment variables: texts, or references to stored secrets."""
    priority: int = 5
    tags: Sequence[str] = ()
    task_tags: Sequence[str] = ()
    capabilities: Sequence[str] = ()
    container: str | None = None
    region: str | None = None
    estimate_minutes: int | None = None
    max_attempts: int = 3
    retry: RetryPolicy | None = None
    timeout_s: int | None = None
    queue_ttl_s: int | None = None
    lease_s: int | None = None
    run_at: datetime | None = None
    parent: UUID | None = None
    input: Any = None
    metadata: dict[str, Any] | None = None
    idempotency_key: str | None = None
    trace_id: str | None = None
    source: str | None = None
    key: str | None = None
    depends_on: Sequence[str] = ()
    """Ids of tasks, or keys of tasks that are submitted together."""
    blocks: Sequence[str] = ()
    """Ids of tasks that will wait for this one."""
    on_dependency_failure: OnFailure = "fail"
    next: str | None = None
    """The key of the task or group that runs after this task succeeded."""
    group: str | None = None
    control: Control | None = None
    complexity: Complexity | None = None
    escalation: Escalation | None = None
    concurrency: Concurrency | None = None
    budget: Budget | None = None

    @property
    def kind(self) -> Kind:
        """`agent` for a task that an agent runs, else the kind of the control task."""
        return "agent" if self.control is None else KIND_OF[type(self.control)]


_NAME_FIELDS = (
    "model",
    "agent_type",
    "runtime",
    "container",
    "region",
    "source",
    "idempotency_key",
    "trace_id",
    "conversation",
)
_TEXT_FIELDS = ("description", "system_prompt", "cwd")
_SECONDS_FIELDS = ("timeout_s", "queue_ttl_s", "lease_s")
_LABEL_FIELDS = ("tags", "task_tags", "capabilities")


_COMMON_FIELDS = ("title", "prompt", "input", "metadata", "task_type", "priority", "max_attempts")
_SEQUENCE_FIELDS = (*_LABEL_FIELDS, "depends_on", "blocks")
_SEQUENCE_VALUES = attrgetter(*_SEQUENCE_FIELDS)
_RARE_VALUES = attrgetter(
    *(name for name in NewTask.__struct_fields__ if name not in _COMMON_FIELDS + _SEQUENCE_FIELDS)
)
_RARE_DEFAULTS = _RARE_VALUES(NewTask(title="-"))


def check(new: NewTask) -> bool:
    """Raises `Invalid` unless every field is in range and can be stored.

    The contents of `input` and `metadata` are checked when they are encoded. Returns `True` if the
    task is plain: it sets only fields that most tasks set.
    """
    bounds.check_text("title", new.title, bounds.MAX_TITLE, empty=False)
    bounds.check_text("task_type", new.task_type, bounds.MAX_NAME, empty=False)
    bounds.check_whole("priority", new.priority, 1, 10)
    bounds.check_whole("max_attempts", new.max_attempts, 1, bounds.MAX_ATTEMPTS)
    if new.prompt is not None:
        bounds.check_text("prompt", new.prompt, bounds.MAX_TEXT)
    if _RARE_VALUES(new) == _RARE_DEFAULTS and not any(_SEQUENCE_VALUES(new)):
        return True
    _check_rare_fields(new)
    return False


def _check_rare_fields(new: NewTask) -> None:
    for field in _SEQUENCE_FIELDS:
        if isinstance(getattr(new, field), str):  # a text is a sequence of texts, too
            raise Invalid(f"{field} must be a list of texts, not one text", field=field)
    for field in _NAME_FIELDS:
        if (value := getattr(new, field)) is not None:
            bounds.check_text(field, value, bounds.MAX_NAME, empty=False)
    for field in _TEXT_FIELDS:
        if (value := getattr(new, field)) is not None:
            bounds.check_text(field, value, bounds.MAX_TEXT)
    for field in _LABEL_FIELDS:
        if items := getattr(new, field):
            _check_labels(field, items)
    _check_numbers(new)
    _check_command(new)
    _check_flow_fields(new)
    _check_limits(new)
    bounds.check_instant("run_at", new.run_at)


def _check_flow_fields(new: NewTask) -> None:
    """Checks the fields that connect the task with other tasks and with flows."""
    for field in ("key", "next", "group"):
        if (key := getattr(new, field)) is not None:
            check_key(field, key)
    for field in ("depends_on", "blocks"):
        if len(getattr(new, field)) > bounds.MAX_DEPENDENCIES:
            raise Invalid(
                f"{field} has more than {bounds.MAX_DEPENDENCIES:,} entries",
                "too_large",
                field=field,
            )
        for key in getattr(new, field):
            check_key(field, key)
    if new.control is not None:
        check_control(new.control)
    if new.escalation is not None:
        bounds.check_text("escalation.reason", new.escalation.reason, bounds.MAX_ERROR, empty=False)
        bounds.check_text("escalation.prompt", new.escalation.prompt, bounds.MAX_TEXT, empty=False)


def _check_limits(new: NewTask) -> None:
    """Checks the task's budget and its concurrency key."""
    if new.budget is not None:
        check_budget(new.budget)
    if new.concurrency is None:
        return
    check_turns(new.concurrency)
    for field in ("next", "group", "control"):
        if getattr(new, field) is not None:
            raise Invalid(
                f"a task with {field} is part of a flow and cannot have a concurrency key",
                field="concurrency",
            )
    if new.run_at is not None:
        raise Invalid(
            "a task cannot have both a concurrency key and run_at: it starts when it gets a permit",
            field="concurrency",
        )


def _check_numbers(new: NewTask) -> None:
    for field in _SECONDS_FIELDS:
        if (seconds := getattr(new, field)) is not None:
            bounds.check_whole(field, seconds, 1, bounds.MAX_SECONDS)
    if new.estimate_minutes is not None:
        bounds.check_whole("estimate_minutes", new.estimate_minutes, 1, bounds.MAX_SECONDS // 60)
    if new.max_turns is not None:
        bounds.check_whole("max_turns", new.max_turns, 1, 1_000_000)
    if new.retry is not None:
        _check_retry(new.retry)


def _check_labels(field: str, items: Sequence[str]) -> None:
    if len(items) > bounds.MAX_TAGS:
        raise Invalid(f"{field} has more than {bounds.MAX_TAGS} entries", "too_large", field=field)
    for item in items:
        bounds.check_text(field, item, bounds.MAX_NAME, empty=False)


def _check_command(new: NewTask) -> None:
    for name, value in (new.env or {}).items():
        bounds.check_text("env", name, bounds.MAX_NAME, empty=False)
        if isinstance(value, str):
            bounds.check_text("env", value, bounds.MAX_TEXT)
        elif referenced_name(value) is None:
            raise Invalid(
                f'the value of env {name} must be text or {{"$secret": NAME}}', field="env"
            )
        if "=" in name:
            raise Invalid(f"the env name {name[:100]!r} must not contain '='", field="env")
    check_variable_names(new.env or ())
    if new.command is None:
        if new.runtime == COMMAND:
            raise Invalid("command is required with runtime 'command'", field="command")
        return
    if not new.command:
        raise Invalid("command must not be empty", field="command")
    if new.runtime not in (None, COMMAND):
        raise Invalid(
            f"runtime must be {COMMAND!r} or empty for a task with a command, not {new.runtime!r}",
            field="runtime",
        )
    for argument in new.command:
        bounds.check_text("command", argument, bounds.MAX_TEXT)


def _check_retry(retry: RetryPolicy) -> None:
    bounds.check_number("retry.base_s", retry.base_s, 0, bounds.MAX_SECONDS)
    bounds.check_number("retry.cap_s", retry.cap_s, 0, bounds.MAX_SECONDS)
    bounds.check_number("retry.multiplier", retry.multiplier, 1, 100)
    bounds.check_number("retry.jitter", retry.jitter, 0, 1)


def requirements(new: NewTask, workspace: UUID) -> Requirements:
    """Returns the requirements of the task, which determine its lane."""
    return Requirements(
        workspace=workspace,
        task_type=new.task_type,
        agent_type=new.agent_type,
        target_agent=new.target_agent,
        runtime=COMMAND if new.command is not None else new.runtime,
        task_tags=tuple(new.task_tags),
        capabilities=tuple(new.capabilities),
        container=new.container,
        region=new.region,
        model=new.model,
    )


_LANE_FIELDS = attrgetter(
    "task_type",
    "agent_type",
    "target_agent",
    "runtime",
    "command",
    "task_tags",
    "capabilities",
    "container",
    "region",
    "model",
)


def is_same_lane(first: NewTask, second: NewTask) -> bool:
    """True if two tasks of a workspace have equal requirements as written.

    A quick check: it may return `False` for tasks of one lane, for example with reordered tags.
    """
    is_same: bool = _LANE_FIELDS(first) == _LANE_FIELDS(second)
    return is_same
