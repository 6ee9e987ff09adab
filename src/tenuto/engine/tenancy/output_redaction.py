"""Validates what attempts report, and redacts the task's secrets in it, before it is stored."""

from datetime import datetime
from typing import TypeVar

import msgspec

from tenuto.model import bounds
from tenuto.model.errors import Invalid
from tenuto.model.tasks import commands
from tenuto.model.tasks.changes import ENGINE_HOLDS
from tenuto.model.tasks.task import PRUNED, check_fence
from tenuto.model.tenancy.redact import Redactor

ENGINE_PREFIX = "$"
"""Prefix of the keys of steps that the engine stores for itself."""
REPORTED_TEXT_FIELDS = ("failure", "receipt", "hold", "session_key")
"""Fields of commands with text from the attempt."""
F = TypeVar("F", bound=commands.AttemptCommand)


def check_key(key: str, redactor: Redactor) -> None:
    """Raises `Invalid` if a step's key is invalid, reserved, or contains a secret.

    A redacted key could equal another one, and one step would get the value of another.
    """
    bounds.check_text("key", key, bounds.MAX_TITLE, empty=False)
    if key.startswith(ENGINE_PREFIX):
        raise Invalid(
            f"keys that begin with {ENGINE_PREFIX} are reserved; choose another", field="key"
        )
    if redactor.redact_text(key) != key:
        raise Invalid("the key of a step must not contain a secret", field="key")


def redact_command(command: F, redactor: Redactor) -> F:
    """Returns the command with the secrets in its texts redacted."""
    fields = {
        field: redactor.redact_value(getattr(command, field, None))
        for field in REPORTED_TEXT_FIELDS
    }
    failure = fields["failure"]
    if failure is not None:
        stack = None if failure.stack is None else redactor.redact_text(failure.stack)
        escalation = failure.escalation
        if escalation is not None:
            escalation = commands.Escalation(
                redactor.redact_text(escalation.reason), redactor.redact_text(escalation.prompt)
            )
        fields["failure"] = msgspec.structs.replace(
            failure,
            message=redactor.redact_text(failure.message),
            stack=stack,
            escalation=escalation,
        )
    present = {field: value for field, value in fields.items() if value is not None}
    return msgspec.structs.replace(command, **present)


def check_progress(percent: float | None, step: str | None, finish_at: datetime | None) -> None:
    """Raises `Invalid` if the reported progress cannot be stored."""
    bounds.check_instant("finish_at", finish_at)
    if percent is not None:
        if isinstance(percent, bool) or not isinstance(percent, int | float):
            raise Invalid("progress_percent must be a number", field="progress_percent")
        bounds.check_number("progress_percent", percent, 0, 100)
    if step is not None:
        if not isinstance(step, str):
            raise Invalid("current_step must be text", field="current_step")
        bounds.check_text("current_step", step, bounds.MAX_ERROR)
        if step == PRUNED:
            text = f"current_step {PRUNED} is reserved for tasks whose payload was pruned"
            raise Invalid(text, field="current_step")


def check_report(command: commands.AttemptCommand) -> None:
    """Raises `Invalid` if a report of an attempt cannot be stored."""
    check_fence(command.fence)
    failure = getattr(command, "failure", None)
    if failure is not None:
        bounds.check_text("message", failure.message, bounds.MAX_ERROR)
        bounds.check_text("stack", failure.stack or "", bounds.MAX_STACK)
        bounds.check_number("exit_code", failure.exit_code or 0, -(2**31), 2**32)
        if failure.escalation is not None:
            bounds.check_text("reason", failure.escalation.reason, bounds.MAX_ERROR, empty=False)
            bounds.check_text("prompt", failure.escalation.prompt, bounds.MAX_TEXT, empty=False)
    for field, max_length in (("hold", bounds.MAX_NAME), ("session_key", bounds.MAX_TITLE)):
        if (value := getattr(command, field, None)) is not None:
            bounds.check_text(field, value, max_length, empty=False)
    if isinstance(command, commands.Park):
        _check_park(command)
    bounds.to_json_text("receipt", getattr(command, "receipt", None))
    for field in ("resume_at", "wait_until"):
        bounds.check_instant(field, getattr(command, field, None))


def _check_park(command: commands.Park) -> None:
    """Raises `Invalid` if the hold is reserved, or if no time would end the wait."""
    if command.hold.partition(":")[0] in ENGINE_HOLDS:
        raise Invalid(f"hold {command.hold!r} is reserved; choose another name", field="hold")
    if command.resume_at is None and command.wait_until is None:
        raise Invalid("a parked task needs resume_at or wait_until", field="resume_at")
