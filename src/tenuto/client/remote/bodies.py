"""Builds request bodies and query parameters: model objects under the names of the REST API."""

from typing import Any

import msgspec

from tenuto.engine.tasks.edit import TaskChanges
from tenuto.model.agents.matching import AgentProfile, SupportedWork
from tenuto.model.tasks.commands import Failure
from tenuto.model.tasks.submission import FIELDS, FILTER_FIELDS, Filter, NewTask
from tenuto.model.tasks.task import Fence

_DEFAULT_TASK = NewTask(title="")
_UNSENT_FIELDS = frozenset({"id", "workspace", "version", "containers", "means"})


def to_camel(name: str) -> str:
    """Returns a snake_case name in camelCase."""
    first, *rest = name.split("_")
    return first + "".join(word.capitalize() for word in rest)


def task_body(new: NewTask) -> dict[str, Any]:
    """Returns the JSON body of a new task; fields with their default value are omitted."""
    body: dict[str, Any] = {"title": new.title}
    for name, field in FIELDS.items():
        value = getattr(new, name)
        if value != getattr(_DEFAULT_TASK, name):
            body[to_camel(field.names[0])] = value
    if new.retry is not None:
        fields = msgspec.structs.asdict(new.retry)
        body["retry"] = {to_camel(name): value for name, value in fields.items()}
    if new.control is not None:
        control = msgspec.to_builtins(new.control)
        body["control"] = {
            to_camel(name): value for name, value in control.items() if value is not None
        }
    return body


def filter_params(where: Filter) -> dict[str, Any]:
    """Returns a filter as query parameters."""
    return {
        name: ",".join(value) or None if isinstance(value, tuple) else value
        for name, value in _filter_values(where).items()
    }


def filter_body(where: Filter) -> dict[str, Any]:
    """Returns a filter as the JSON body of a bulk action."""
    values = _filter_values(where)
    return {name: value for name, value in values.items() if value not in (None, ())}


def _filter_values(where: Filter) -> dict[str, Any]:
    """Returns the values of a filter under their REST names."""
    fields = FILTER_FIELDS.items()
    return {to_camel(field.names[0]): getattr(where, name) for name, field in fields}


def change_body(changes: TaskChanges) -> dict[str, Any]:
    """Returns the JSON body of a task edit: only the changed fields."""
    return {name: getattr(changes, name) for name in changes.changed_fields()}


def agent_body(profile: AgentProfile) -> dict[str, Any]:
    """Returns the JSON body that registers or changes an agent, without `None` fields."""
    fields = msgspec.structs.asdict(profile)
    return {
        to_camel(name): value
        for name, value in fields.items()
        if name not in _UNSENT_FIELDS and value is not None
    }


def supported_work_body(work: SupportedWork) -> dict[str, Any]:
    """Returns the work that a worker supports, for the body of a claim."""
    return {to_camel(name): value for name, value in msgspec.structs.asdict(work).items()}


def fence_body(fence: Fence, **extra: Any) -> dict[str, Any]:
    """Returns the body of an attempt's write: its fence and the `extra` fields."""
    return {"attempt": fence.attempt, "leaseToken": fence.token, **extra}


def failure_body(fence: Fence, failure: Failure, **extra: Any) -> dict[str, Any]:
    """Returns the body of a failed attempt's report."""
    return fence_body(
        fence,
        error=failure.message,
        errorClass=failure.error_class,
        retryable=failure.retryable,
        stack=failure.stack,
        exitCode=failure.exit_code,
        escalation=failure.escalation,
        **extra,
    )
