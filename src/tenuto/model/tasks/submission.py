"""What a caller may ask for when submitting a task, and the checks on it."""

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
from tenuto.model.tasks.environment import check_names
from tenuto.model.tasks.retry import RetryPolicy
from tenuto.model.tenancy.secrets import referred

OnFailure = Literal["fail", "skip", "run"]
Complexity = Literal["Low", "Middle", "Hard", "ExtremHard"]
KIND_OF: dict[type, Kind] = {
    Foreach: "foreach",
    Goto: "goto",
    Condition: "condition",
    Approval: "approval",
}


class NewTask(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, gc=False):
    """A task to be. Only `title` is required."""

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
    """Texts, and references to stored secrets."""
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
    """Ids of tasks that are to wait for this one."""
    on_dependency_failure: OnFailure = "fail"
    next: str | None = None
    """The key of what to run when this one has succeeded."""
    group: str | None = None
    control: Control | None = None
    complexity: Complexity | None = None
    escalation: Escalation | None = None
    concurrency: Concurrency | None = None
    budget: Budget | None = None

    @property
    def kind(self) -> Kind:
        """What the task is for: work of an agent, or control of a flow."""
        return "agent" if self.control is None else KIND_OF[type(self.control)]


_NAMES = (
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
_TEXTS = ("description", "system_prompt", "cwd")
_SECONDS = ("timeout_s", "queue_ttl_s", "lease_s")
_LISTS = ("tags", "task_tags", "capabilities")


_USUAL = ("title", "prompt", "input", "metadata", "task_type", "priority", "max_attempts")
_MANY = (*_LISTS, "depends_on", "blocks")
_SEVERAL = attrgetter(*_MANY)
_RARE = attrgetter(*(name for name in NewTask.__struct_fields__ if name not in _USUAL + _MANY))
_NOTHING_RARE = _RARE(NewTask(title="-"))


def check(new: NewTask) -> bool:
    """Raise `Invalid` unless every field is in range and can be stored.

    What `input` and `metadata` hold is looked at when they are encoded. Answers whether the task
    is plain: says nothing but what most tasks say.
    """
    bounds.text("title", new.title, bounds.MAX_TITLE, empty=False)
    bounds.text("task_type", new.task_type, bounds.MAX_NAME, empty=False)
    bounds.whole("priority", new.priority, 1, 10)
    bounds.whole("max_attempts", new.max_attempts, 1, bounds.MAX_ATTEMPTS)
    if new.prompt is not None:
        bounds.text("prompt", new.prompt, bounds.MAX_TEXT)
    if _RARE(new) == _NOTHING_RARE and not any(_SEVERAL(new)):
        return True
    _check_rare(new)
    return False


def _check_rare(new: NewTask) -> None:
    for field in _MANY:
        if isinstance(getattr(new, field), str):  # which is a sequence of texts, too
            raise Invalid(f"{field} is a list of texts, not one text", field=field)
    for field in _NAMES:
        if (value := getattr(new, field)) is not None:
            bounds.text(field, value, bounds.MAX_NAME, empty=False)
    for field in _TEXTS:
        if (value := getattr(new, field)) is not None:
            bounds.text(field, value, bounds.MAX_TEXT)
    for field in _LISTS:
        if items := getattr(new, field):
            _check_names(field, items)
    _check_numbers(new)
    _check_command(new)
    _check_place(new)
    _check_bounds(new)
    bounds.instant("run_at", new.run_at)


def _check_place(new: NewTask) -> None:
    """What a task says about others and about what follows."""
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
        bounds.text("escalation.reason", new.escalation.reason, bounds.MAX_ERROR, empty=False)
        bounds.text("escalation.prompt", new.escalation.prompt, bounds.MAX_TEXT, empty=False)


def _check_bounds(new: NewTask) -> None:
    """What a task may use, and with whom it shares its places."""
    if new.budget is not None:
        check_budget(new.budget)
    if new.concurrency is None:
        return
    check_turns(new.concurrency)
    for field in ("next", "group", "control"):
        if getattr(new, field) is not None:
            raise Invalid(
                f"a task with {field} is part of a flow, and shares no concurrency key",
                field="concurrency",
            )
    if new.run_at is not None:
        raise Invalid(
            "a task with a concurrency key starts when it has a place, not at a time",
            field="concurrency",
        )


def _check_numbers(new: NewTask) -> None:
    for field in _SECONDS:
        if (seconds := getattr(new, field)) is not None:
            bounds.whole(field, seconds, 1, bounds.MAX_SECONDS)
    if new.estimate_minutes is not None:
        bounds.whole("estimate_minutes", new.estimate_minutes, 1, bounds.MAX_SECONDS // 60)
    if new.max_turns is not None:
        bounds.whole("max_turns", new.max_turns, 1, 1_000_000)
    if new.retry is not None:
        _check_retry(new.retry)


def _check_names(field: str, items: Sequence[str]) -> None:
    if len(items) > bounds.MAX_TAGS:
        raise Invalid(f"{field} has more than {bounds.MAX_TAGS} entries", "too_large", field=field)
    for item in items:
        bounds.text(field, item, bounds.MAX_NAME, empty=False)


def _check_command(new: NewTask) -> None:
    for name, value in (new.env or {}).items():
        bounds.text("env", name, bounds.MAX_NAME, empty=False)
        if isinstance(value, str):
            bounds.text("env", value, bounds.MAX_TEXT)
        elif referred(value) is None:
            raise Invalid("env has a value that is neither text nor a secret's name", field="env")
        if "=" in name:
            raise Invalid("env has a name with '=' in it", field="env")
    check_names(new.env or ())
    if new.command is None:
        if new.runtime == COMMAND:
            raise Invalid("runtime 'command' needs a command", field="command")
        return
    if not new.command:
        raise Invalid("command must not be empty", field="command")
    if new.runtime not in (None, COMMAND):
        raise Invalid(f"a command cannot run in runtime {new.runtime!r}", field="runtime")
    for word in new.command:
        bounds.text("command", word, bounds.MAX_TEXT)


def _check_retry(retry: RetryPolicy) -> None:
    bounds.number("retry.base_s", retry.base_s, 0, bounds.MAX_SECONDS)
    bounds.number("retry.cap_s", retry.cap_s, 0, bounds.MAX_SECONDS)
    bounds.number("retry.multiplier", retry.multiplier, 1, 100)
    bounds.number("retry.jitter", retry.jitter, 0, 1)


def requirements(new: NewTask, workspace: UUID) -> Requirements:
    """The lane the task belongs to."""
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


def same_lane(one: NewTask, other: NewTask) -> bool:
    """Whether two tasks of a workspace require the same, seen at a glance."""
    same: bool = _LANE_FIELDS(one) == _LANE_FIELDS(other)
    return same
