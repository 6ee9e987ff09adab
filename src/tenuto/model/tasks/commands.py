"""What can be asked of a task. `name` is the row of `TRANSITIONS` that a command uses."""

from datetime import datetime, timedelta
from typing import Any, ClassVar
from uuid import UUID

import msgspec

from tenuto.model.tasks.retry import ErrorClass
from tenuto.model.tasks.task import Fence, Status


class DecisionContext(msgspec.Struct, frozen=True):
    """Everything a decision may know besides the task and the command."""

    now: datetime
    roll: float = 0.5
    actor: str | None = None


class Escalation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What somebody is told who has to help."""

    reason: str
    prompt: str


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """Why an attempt did not finish its task."""

    message: str
    error_class: ErrorClass = ErrorClass.ERROR
    retryable: bool | None = None
    stack: str | None = None
    exit_code: int | None = None
    escalation: Escalation | None = None


class Command(msgspec.Struct, frozen=True, kw_only=True):
    name: ClassVar[str]


class AttemptCommand(Command, frozen=True, kw_only=True):
    """A command of an attempt: worth nothing unless its fence is the current one."""

    fence: Fence


class Begin(AttemptCommand, frozen=True, kw_only=True):
    name = "begin"
    session_key: str | None = None
    lease_s: int | None = None
    """Seconds that the session has until its first heartbeat; else the lease stays as it is."""


class Complete(AttemptCommand, frozen=True, kw_only=True):
    name = "complete"
    output: str | None = None
    summary: str | None = None


class Fail(AttemptCommand, frozen=True, kw_only=True):
    name = "fail"
    failure: Failure
    resume_at: datetime | None = None


class NotStarted(AttemptCommand, frozen=True, kw_only=True):
    name = "not_started"
    failure: Failure


class TimedOut(AttemptCommand, frozen=True, kw_only=True):
    """The owner ended a session that ran too long."""

    name = "time_out"
    receipt: dict[str, Any] | None = None


class Park(AttemptCommand, frozen=True, kw_only=True):
    name = "park"
    hold: str
    resume_at: datetime | None = None
    wait_until: datetime | None = None


class Release(AttemptCommand, frozen=True, kw_only=True):
    name = "release"


class ConfirmCancel(AttemptCommand, frozen=True, kw_only=True):
    """The owner killed the session."""

    name = "cancel"
    receipt: dict[str, Any]


class ConfirmPause(AttemptCommand, frozen=True, kw_only=True):
    name = "pause"
    receipt: dict[str, Any]


class Expire(Command, frozen=True, kw_only=True):
    """The lease ran out, or its owner was seen to die."""

    name = "expire"
    seen_dead: bool = False
    receipt: dict[str, Any] | None = None
    """How the session ended, where somebody ended it for the owner."""


class ForceTimeOut(Command, frozen=True, kw_only=True):
    """A run far past its timeout whose owner did not end it."""

    name = "time_out"


class WarnHung(Command, frozen=True, kw_only=True):
    name = "abort"


class Abort(Command, frozen=True, kw_only=True):
    name = "abort"


class Ready(Command, frozen=True, kw_only=True):
    name = "ready"


class StartNow(Command, frozen=True, kw_only=True):
    """Do not wait for the time that the task was meant for."""

    name = "ready"


class RetryDue(Command, frozen=True, kw_only=True):
    name = "due"


class Pause(Command, frozen=True, kw_only=True):
    name = "pause"
    reason: str | None = None


class PauseForBudget(Command, frozen=True, kw_only=True):
    """A budget is used up: the attempt is to stop, and the task waits for more."""

    name = "pause"
    hold: str
    reason: str | None = None


class Resume(Command, frozen=True, kw_only=True):
    name = "resume"


class Cancel(Command, frozen=True, kw_only=True):
    name = "cancel"
    reason: str | None = None


class Skip(Command, frozen=True, kw_only=True):
    name = "skip"
    reason: str | None = None


class FailWithoutAttempt(Command, frozen=True, kw_only=True):
    """End a task that can never run."""

    name = "refuse"
    code: str
    message: str


class Retry(Command, frozen=True, kw_only=True):
    name = "retry"
    watched: bool = True
    """Whether something may wait for how it ends this time."""
    unmet: int = 0
    """How much of what it waits for has not ended."""
    hold: str | None = None
    """What it has to wait for anew: a place, its turn, or the end of a pause."""


class Reopen(Command, frozen=True, kw_only=True):
    """Undo an end that followed from another task's, which is tried again."""

    name = "revive"
    hold: str | None = None
    unmet: int = 0


class DependenciesMet(Command, frozen=True, kw_only=True):
    """Some of what the task waits for has happened."""

    name = "unblock"
    n: int = 1


class ClearHold(Command, frozen=True, kw_only=True):
    """What held the task is over; `hold` is what holds it next, if anything."""

    name = "unblock"
    hold: str | None = None


class Unpark(Command, frozen=True, kw_only=True):
    """What an attempt gave its slot up for has happened, or took longer than it wanted to wait."""

    name = "unblock"
    progress: bool = True
    """Whether something happened: then the free ends before it no longer count."""


class AwaitAnswer(Command, frozen=True, kw_only=True):
    """The task waits for a person's answer."""

    name = "unblock"
    hold: str
    timeout_s: int | None = None
    message: str | None = None

    def until(self, now: datetime) -> datetime | None:
        """When the answer comes too late, if ever."""
        return None if self.timeout_s is None else now + timedelta(seconds=self.timeout_s)


class AddDependency(Command, frozen=True, kw_only=True):
    """The task is to wait for one more."""

    name = "block"


class Resolve(Command, frozen=True, kw_only=True):
    """The engine or a person ends a task that no agent runs."""

    name = "decide"
    status: Status
    output: str | None = None
    summary: str | None = None
    message: str | None = None
    code: str | None = None


class Archive(Command, frozen=True, kw_only=True):
    """Put an ended task away; its status stays."""

    name = "archive"


class SetPriority(Command, frozen=True, kw_only=True):
    name = "reprioritise"
    priority: int


class Assign(Command, frozen=True, kw_only=True):
    """Only this agent may take the task, or, without one, whoever fits."""

    name = "assign"
    lane: int
    agent: UUID | None


class Edit(Command, frozen=True, kw_only=True):
    """Change what a task says about itself; never what decides where and when it runs."""

    name = "edit"
    fields: tuple[str, ...]


class DeletePayload(Command, frozen=True, kw_only=True):
    """Remove what an ended task carried; its row and its trail stay."""

    name = "erase"
