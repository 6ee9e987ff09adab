"""What is sent: the engine's words under the names of the REST contract."""

from typing import Any

import msgspec

from tenuto.engine.tasks.edit import TaskChanges
from tenuto.engine.tasks.query import Filter
from tenuto.model.agents.matching import AgentProfile, SupportedWork
from tenuto.model.tasks.commands import Failure
from tenuto.model.tasks.submission import NewTask
from tenuto.model.tasks.task import Fence

_TASK = {"target_agent": "targetAgentId", "parent": "parentId"}
_FILTER = {"agent": "agentId", "parent": "parentId"}
_PLAIN = NewTask(title="")
_NOT_SENT = frozenset({"id", "workspace", "version", "containers", "means"})


def camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(word.capitalize() for word in rest)


def task_body(new: NewTask) -> dict[str, Any]:
    """A task to be; what is as it would be anyway is left out."""
    body: dict[str, Any] = {"title": new.title}
    for name in NewTask.__struct_fields__:
        value = getattr(new, name)
        if value != getattr(_PLAIN, name):
            body[_TASK.get(name, camel(name))] = value
    if new.retry is not None:
        fields = msgspec.structs.asdict(new.retry)
        body["retry"] = {camel(name): value for name, value in fields.items()}
    if new.control is not None:
        said = msgspec.to_builtins(new.control)
        body["control"] = {camel(name): value for name, value in said.items() if value is not None}
    return body


def filter_words(where: Filter) -> dict[str, Any]:
    """A filter as the query of a list."""
    words = {
        _FILTER.get(name, camel(name)): getattr(where, name) for name in Filter.__struct_fields__
    }
    for name in ("status", "tags"):
        words[name] = ",".join(words[name]) or None
    return words


def filter_body(where: Filter) -> dict[str, Any]:
    """A filter as the body of an action."""
    given = {name: getattr(where, name) for name in Filter.__struct_fields__}
    return {
        _FILTER.get(name, camel(name)): value
        for name, value in given.items()
        if value not in (None, ())
    }


def change_body(changes: TaskChanges) -> dict[str, Any]:
    return {name: getattr(changes, name) for name in changes.named()}


def agent_body(profile: AgentProfile) -> dict[str, Any]:
    fields = msgspec.structs.asdict(profile)
    return {
        camel(name): value
        for name, value in fields.items()
        if name not in _NOT_SENT and value is not None
    }


def means_body(means: SupportedWork) -> dict[str, Any]:
    """What a worker can run, as its claims say it."""
    return {camel(name): value for name, value in msgspec.structs.asdict(means).items()}


def fence_body(fence: Fence, **more: Any) -> dict[str, Any]:
    """What every write of an attempt carries, and what it says."""
    return {"attempt": fence.attempt, "leaseToken": fence.token, **more}


def failure_body(fence: Fence, failure: Failure, **more: Any) -> dict[str, Any]:
    return fence_body(
        fence,
        error=failure.message,
        errorClass=failure.error_class,
        retryable=failure.retryable,
        stack=failure.stack,
        exitCode=failure.exit_code,
        escalation=failure.escalation,
        **more,
    )
