"""What an attempt says: checked, and struck of its task's secrets, before anything is stored."""

from datetime import datetime
from typing import TypeVar

import msgspec

from tenuto.model import bounds
from tenuto.model.errors import Conflict, Invalid
from tenuto.model.tasks import commands
from tenuto.model.tasks.changes import ENGINES_OWN
from tenuto.model.tasks.retry import ATTEMPT_CAP
from tenuto.model.tasks.task import PRUNED, Fence
from tenuto.model.tenancy.redact import Redactor

LOST = "lease_lost"
OWN = "$"
"""How the keys of steps begin that the engine records for itself."""
IN_ITS_WORDS = ("failure", "receipt", "hold", "session_key")
"""What an attempt may put into a command in its own words."""
F = TypeVar("F", bound=commands.AttemptCommand)


def is_valid_fence(fence: Fence) -> bool:
    """Whether an attempt can have that number."""
    return 0 < fence.attempt <= ATTEMPT_CAP


def check_fence(fence: Fence) -> None:
    """A number that no attempt can have is that of an attempt which owns nothing."""
    if not is_valid_fence(fence):
        raise Conflict("no such attempt owns the task", LOST)


def check_key(key: str, redactor: Redactor) -> None:
    """Struck out, two keys could become one, and a step's value be taken for another's."""
    bounds.text("key", key, bounds.MAX_TITLE, empty=False)
    if key.startswith(OWN):
        raise Invalid(f"keys that begin with {OWN} are the engine's own", field="key")
    if redactor.text(key) != key:
        raise Invalid("a step's key must not hold a secret", field="key")


def redacted(command: F, redactor: Redactor) -> F:
    """What an attempt says as it may be stored."""
    said = {field: redactor.value(getattr(command, field, None)) for field in IN_ITS_WORDS}
    failure = said["failure"]
    if failure is not None:
        stack = None if failure.stack is None else redactor.text(failure.stack)
        told = failure.escalation
        if told is not None:
            told = commands.Escalation(redactor.text(told.reason), redactor.text(told.prompt))
        said["failure"] = msgspec.structs.replace(
            failure, message=redactor.text(failure.message), stack=stack, escalation=told
        )
    there = {field: value for field, value in said.items() if value is not None}
    return msgspec.structs.replace(command, **there)


def check_progress(percent: float | None, step: str | None, finish_at: datetime | None) -> None:
    """Raise `Invalid` unless how far an attempt is can be stored."""
    bounds.instant("finish_at", finish_at)
    if percent is not None:
        if isinstance(percent, bool) or not isinstance(percent, int | float):
            raise Invalid("progress_percent must be a number", field="progress_percent")
        bounds.number("progress_percent", percent, 0, 100)
    if step is not None:
        if not isinstance(step, str):
            raise Invalid("current_step must be text", field="current_step")
        bounds.text("current_step", step, bounds.MAX_ERROR)
        if step == PRUNED:
            raise Invalid(f"{PRUNED} says that a task's payload is gone", field="current_step")


def check_report(command: commands.AttemptCommand) -> None:
    """Raise `Invalid` unless what an attempt says can be stored."""
    check_fence(command.fence)
    failure = getattr(command, "failure", None)
    if failure is not None:
        bounds.text("message", failure.message, bounds.MAX_ERROR)
        bounds.text("stack", failure.stack or "", bounds.MAX_STACK)
        bounds.number("exit_code", failure.exit_code or 0, -(2**31), 2**32)
        if failure.escalation is not None:
            bounds.text("reason", failure.escalation.reason, bounds.MAX_ERROR, empty=False)
            bounds.text("prompt", failure.escalation.prompt, bounds.MAX_TEXT, empty=False)
    for field, longest in (("hold", bounds.MAX_NAME), ("session_key", bounds.MAX_TITLE)):
        if (value := getattr(command, field, None)) is not None:
            bounds.text(field, value, longest, empty=False)
    if isinstance(command, commands.Park):
        _check_park(command)
    bounds.json_text("receipt", getattr(command, "receipt", None))
    for field in ("resume_at", "wait_until"):
        bounds.instant(field, getattr(command, field, None))


def _check_park(command: commands.Park) -> None:
    """Raise `Invalid` for what nothing would ever end."""
    if command.hold.partition(":")[0] in ENGINES_OWN:
        raise Invalid(f"{command.hold!r} is what the engine holds tasks for", field="hold")
    if command.resume_at is None and command.wait_until is None:
        raise Invalid("a parked task needs resume_at or wait_until", field="resume_at")
