"""The request for a new task and its validation, and the filter that selects tasks."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from operator import attrgetter
from typing import Annotated, Any, Literal
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
)
from tenuto.model.limits.budgets import Budget, check_budget
from tenuto.model.limits.concurrency import Concurrency
from tenuto.model.limits.concurrency import check as check_turns
from tenuto.model.tasks.commands import Escalation
from tenuto.model.tasks.environment import check_variable_names
from tenuto.model.tasks.fields import (
    ATTEMPTS,
    INSTANT,
    KEY,
    KEYS,
    LABELS,
    MINUTES,
    NAME,
    PRIORITY,
    PRIORITY_FILTER,
    SECONDS,
    TAG_FILTER,
    TEXT,
    TEXT_FILTER,
    TITLE,
    TURNS,
    Field,
    fields_of,
)
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
    """The request for a new task. Only `title` is required.

    `Field` beside each field is all that the program knows of it; see `fields.py`.
    """

    title: Annotated[
        str, Field(TITLE, names=("title", "name"), yaml=("name", "title"), column="body")
    ]
    id: Annotated[UUID | None, Field(definition=False, rerun=False, column=None)] = None
    description: Annotated[str | None, Field(TEXT, payload=True)] = None
    prompt: Annotated[str | None, Field(TEXT, column="body", payload=True)] = None
    system_prompt: Annotated[str | None, Field(TEXT, payload=True)] = None
    model: Annotated[str | None, Field(NAME)] = None
    max_turns: Annotated[int | None, Field(TURNS)] = None
    conversation: Annotated[str | None, Field(NAME)] = None
    task_type: Annotated[str, Field(NAME, column="body", filter=True)] = "default"
    agent_type: Annotated[str | None, Field(NAME)] = None
    target_agent: Annotated[
        UUID | None, Field(names=("target_agent_id", "agent_id"), yaml=("target_agent", "agent_id"))
    ] = None
    runtime: Annotated[str | None, Field(NAME)] = None
    command: Annotated[list[str] | None, Field(payload=True)] = None
    cwd: Annotated[str | None, Field(TEXT)] = None
    env: Annotated[Mapping[str, str | Mapping[str, str]] | None, Field(payload=True)] = None
    """Environment variables: texts, or references to stored secrets."""
    priority: Annotated[int, Field(PRIORITY, column="hot", sql="smallint", filter=True)] = 5
    tags: Annotated[Sequence[str], Field(LABELS, column=None)] = ()
    task_tags: Annotated[Sequence[str], Field(LABELS, column=None)] = ()
    capabilities: Annotated[Sequence[str], Field(LABELS, column=None)] = ()
    container: Annotated[str | None, Field(NAME)] = None
    region: Annotated[str | None, Field(NAME)] = None
    estimate_minutes: Annotated[
        int | None,
        Field(
            MINUTES,
            names=("estimate_minutes", "estimated_duration_minutes"),
            yaml=("resolve_time_estimate", "estimate_minutes", "estimated_duration_minutes"),
            column="hot.timed",
        ),
    ] = None
    max_attempts: Annotated[int, Field(ATTEMPTS, column="hot")] = 3
    retry: Annotated[RetryPolicy | None, Field(column="hot.timed")] = None
    timeout_s: Annotated[
        int | None, Field(SECONDS, names=("timeout_s", "timeout_seconds"), column="hot.timed")
    ] = None
    queue_ttl_s: Annotated[int | None, Field(SECONDS, column="hot.timed")] = None
    lease_s: Annotated[int | None, Field(SECONDS, column="hot.timed")] = None
    run_at: Annotated[
        datetime | None,
        Field(INSTANT, definition=False, rerun=False, column="hot.timed"),
    ] = None
    parent: Annotated[
        UUID | None,
        Field(names=("parent_id",), definition=False, filter=True),
    ] = None
    key: Annotated[
        str | None, Field(KEY, yaml=("id", "key"), rerun=False, column="body.placed")
    ] = None
    depends_on: Annotated[Sequence[str], Field(KEYS, rerun=False, column=None)] = ()
    """Ids of tasks, or keys of tasks that are submitted together."""
    blocks: Annotated[Sequence[str], Field(KEYS, definition=False, rerun=False, column=None)] = ()
    """Ids of tasks that will wait for this one."""
    on_dependency_failure: Annotated[OnFailure, Field(rerun=False, column="body.placed")] = "fail"
    next: Annotated[
        str | None,
        Field(
            KEY,
            names=("next", "next_task"),
            yaml=("next_task", "next"),
            rerun=False,
            column="body.placed",
        ),
    ] = None
    """The key of the task or group that runs after this task succeeded."""
    group: Annotated[
        str | None,
        Field(
            KEY,
            names=("group", "group_id"),
            yaml=("group_id", "group"),
            definition=False,
            rerun=False,
            column=None,
        ),
    ] = None
    control: Annotated[Control | None, Field(rerun=False, column="body.placed")] = None
    complexity: Annotated[
        Complexity | None,
        Field(
            names=("complexity", "complexity_level"),
            yaml=("complexity_level", "complexity"),
            column="body.placed",
        ),
    ] = None
    escalation: Annotated[Escalation | None, Field(column="body.placed", payload=True)] = None
    concurrency: Annotated[Concurrency | None, Field(definition=False, column="body.placed")] = None
    budget: Annotated[Budget | None, Field(column="body.placed")] = None
    input: Annotated[Any, Field(names=("input", "input_context"), column="body", payload=True)] = (
        None
    )
    metadata: Annotated[dict[str, Any] | None, Field(column="body", payload=True)] = None
    idempotency_key: Annotated[str | None, Field(NAME, definition=False, rerun=False)] = None
    trace_id: Annotated[str | None, Field(NAME, definition=False)] = None
    source: Annotated[str | None, Field(NAME, column="body")] = None

    @property
    def kind(self) -> Kind:
        """`agent` for a task that an agent runs, else the kind of the control task."""
        return "agent" if self.control is None else KIND_OF[type(self.control)]


class Filter(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Selects tasks. All given fields must match; a task matches any of several statuses."""

    status: tuple[str, ...] = ()
    tags: Annotated[tuple[str, ...], Field(TAG_FILTER)] = ()
    priority: Annotated[int | None, Field(PRIORITY_FILTER)] = None
    min_priority: Annotated[int | None, Field(PRIORITY_FILTER)] = None
    task_type: Annotated[str | None, Field(TEXT_FILTER)] = None
    agent: Annotated[UUID | None, Field(names=("agent_id",))] = None
    parent: Annotated[UUID | None, Field(names=("parent_id",))] = None
    since: Annotated[datetime | None, Field(INSTANT)] = None
    until: Annotated[datetime | None, Field(INSTANT)] = None
    text: Annotated[str | None, Field(TEXT_FILTER)] = None


FIELDS = fields_of(NewTask)
FILTER_FIELDS = fields_of(Filter)
"""The field tables of tasks and filters, by name."""
_COMMON_FIELDS = ("title", "prompt", "input", "metadata", "task_type", "priority", "max_attempts")
_SEQUENCE_FIELDS = ("tags", "task_tags", "capabilities", "depends_on", "blocks")
_SEQUENCE_VALUES = attrgetter(*_SEQUENCE_FIELDS)
_RARE_VALUES = attrgetter(
    *(name for name in FIELDS if name not in _COMMON_FIELDS + _SEQUENCE_FIELDS)
)
_RARE_DEFAULTS = _RARE_VALUES(NewTask(title="-"))
_RARE_LIMITS = tuple(
    (name, field.limit)
    for name, field in FIELDS.items()
    if field.limit is not None and name not in _COMMON_FIELDS
)


def check(new: NewTask) -> bool:
    """Raises `Invalid` if a field is invalid; returns `True` if the task is plain.

    A plain task sets only fields that most tasks set. The contents of `input` and `metadata` are
    checked when they are encoded.
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


def check_filter(where: Filter) -> None:
    """Raises `Invalid` if a value of the filter is out of its bounds."""
    for name, field in FILTER_FIELDS.items():
        if field.limit is not None and (value := getattr(where, name)) is not None:
            field.limit.check(name, value)


def _check_rare_fields(new: NewTask) -> None:
    for name, limit in _RARE_LIMITS:
        if (value := getattr(new, name)) is not None:
            limit.check(name, value)
    if new.retry is not None:
        _check_retry(new.retry)
    _check_command(new)
    if new.control is not None:
        check_control(new.control)
    if new.escalation is not None:
        bounds.check_text("escalation.reason", new.escalation.reason, bounds.MAX_ERROR, empty=False)
        bounds.check_text("escalation.prompt", new.escalation.prompt, bounds.MAX_TEXT, empty=False)
    _check_limits(new)


def _check_limits(new: NewTask) -> None:
    """Raises `Invalid` for an invalid budget, or a concurrency key that does not fit the task."""
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


def _check_command(new: NewTask) -> None:
    """Raises `Invalid` unless `command`, `runtime` and `env` are valid together."""
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
