"""The body of a new task. Its fields follow from the field table of `NewTask`."""

from collections.abc import Callable, Iterator
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any
from uuid import UUID

import msgspec

from tenuto.api.routes.flow_bodies import (
    FLAT_FIELDS,
    ApprovalBody,
    ChildRef,
    ControlBody,
    EscalationBody,
    StrictBody,
    body_fields,
    control_of,
    key_of,
    optional,
    single_value,
    to_camel,
)
from tenuto.manifest.tasks import KIND_TASK_TYPES
from tenuto.model.errors import Invalid
from tenuto.model.flows.definition import Control, Kind
from tenuto.model.tasks.commands import Escalation
from tenuto.model.tasks.retry import RetryPolicy
from tenuto.model.tasks.submission import FIELDS, NewTask


class RetryPolicyBody(StrictBody):
    """Delays between retries; fields that are not set have the defaults."""

    base_s: float | None = None
    multiplier: float | None = None
    cap_s: float | None = None
    jitter: float | None = None


_OWN_FIELDS: dict[str, dict[str, Any]] = {
    "task_type": {"task_type": str},
    "max_attempts": {"max_attempts": int, "max_retries": int, "attempts": int},
    "retry": {"retry": RetryPolicyBody, "retry_backoff_seconds": float},
    "next": {"next": str | ChildRef, "next_task": str | ChildRef},
    "control": {
        "kind": Kind,
        "control": ControlBody,
        **{
            flat: ControlBody.__annotations__[field]
            for fields in FLAT_FIELDS.values()
            for flat, field in fields.items()
        },
        "approval": ApprovalBody,
    },
    "escalation": {"escalation": EscalationBody},
}
"""Fields of `NewTask` that a request writes in another form: the request's fields and types."""


def _task_fields() -> Iterator[tuple[str, Any, Any]]:
    """Yields the fields of a task in a request: name, type and default."""
    for name, field in FIELDS.items():
        if name in _OWN_FIELDS:
            yield from ((own, optional(type_), None) for own, type_ in _OWN_FIELDS[name].items())
        else:
            yield from body_fields(field)


def _read_single(names: tuple[str, ...], body: Any) -> Any:
    """Returns the value set under one of several names, or `None`; `Invalid` if two differ."""
    present = {name: value for name in names if (value := getattr(body, name)) is not None}
    if len(present) > 1:
        camel = {to_camel(name): value for name, value in present.items()}
        return single_value(to_camel(names[0]), **camel)
    return next(iter(present.values()), None)


def _read_target_agent(body: Any) -> UUID | None:
    """Returns the agent that the task is for, or `None`; raises `Invalid` if two differ."""
    agent: UUID | None = single_value(
        "agentId", agentId=body.agent_id, targetAgentId=body.target_agent_id
    )
    return agent


def _read_task_type(body: Any) -> str:
    """Returns the task type, or "default" if it is missing or names a control task.

    Other fields define the control task, so a name such as `GotoTask` adds nothing.
    """
    task_type: str | None = body.task_type
    return "default" if task_type is None or task_type.lower() in KIND_TASK_TYPES else task_type


def _read_capabilities(body: Any) -> list[str]:
    """Returns the capabilities, with those that the metadata requires."""
    required = (body.metadata or {}).get("requiredCapabilities")
    names = required if isinstance(required, list) else []
    return [*body.capabilities, *(name for name in names if isinstance(name, str))]


def _read_max_attempts(body: Any) -> int:
    """Returns the maximum attempts: as given, or `maxRetries` plus one; 3 if nothing is set."""
    retries = None if body.max_retries is None else body.max_retries + 1
    max_attempts = single_value(
        "maxAttempts",
        maxAttempts=body.max_attempts,
        attempts=body.attempts,
        maxRetries=retries,
    )
    return 3 if max_attempts is None else max_attempts


def _read_retry(body: Any) -> RetryPolicy | None:
    """Returns the delays between retries, or `None` if nothing is set."""
    retry = body.retry or RetryPolicyBody()
    base = single_value(
        "retry.baseS", baseS=retry.base_s, retryBackoffSeconds=body.retry_backoff_seconds
    )
    fields = {**msgspec.structs.asdict(retry), "base_s": base}
    values = {name: value for name, value in fields.items() if value is not None}
    return RetryPolicy(**values) if values else None


def _read_next(body: Any) -> str | None:
    """Returns the key in `next` or `nextTask`, or `None`; raises `Invalid` if the two differ."""
    keys = [None if item is None else key_of(item) for item in (body.next, body.next_task)]
    key: str | None = single_value("next", next=keys[0], nextTask=keys[1])
    return key


def _read_control(body: Any) -> Control | None:
    """Returns the task's control, or `None`; raises `Invalid` if there are several."""
    flat = {name: getattr(body, name) for names in FLAT_FIELDS.values() for name in names}
    return control_of(body.control, body.approval, flat, body.kind)


def _read_escalation(body: Any) -> Escalation | None:
    escalation = body.escalation
    return None if escalation is None else Escalation(escalation.reason, escalation.prompt)


_READERS: dict[str, Callable[[Any], Any]] = {
    name: partial(_read_single, field.names)
    for name, field in FIELDS.items()
    if len(field.names) > 1
} | {
    "target_agent": _read_target_agent,
    "task_type": _read_task_type,
    "capabilities": _read_capabilities,
    "max_attempts": _read_max_attempts,
    "retry": _read_retry,
    "next": _read_next,
    "control": _read_control,
    "escalation": _read_escalation,
}
"""Functions that read a field of `NewTask` from a request; all other fields are copied."""
_COPIED_FIELDS = tuple(name for name in FIELDS if name not in _READERS)
_copied_values = attrgetter(*(FIELDS[name].names[0] for name in _COPIED_FIELDS))

if TYPE_CHECKING:
    _TaskFields = StrictBody
else:
    _TaskFields = msgspec.defstruct("_TaskFields", list(_task_fields()), bases=(StrictBody,))


class TaskBody(_TaskFields):
    """A task to submit. Only `title` is required."""

    def new_task(self, key: str | None = None) -> NewTask:
        """Returns the task to submit, or `Invalid`; `key` is the header `Idempotency-Key`."""
        values = dict(zip(_COPIED_FIELDS, _copied_values(self), strict=True))
        for name, read in _READERS.items():
            values[name] = read(self)
        if values["title"] is None:
            raise Invalid("title is required", field="title")
        values["idempotency_key"] = single_value(
            "idempotencyKey", idempotencyKey=values["idempotency_key"], header=key
        )
        return NewTask(**values)


class BulkBody(StrictBody):
    """Tasks to submit, all or none."""

    tasks: list[TaskBody]
