"""The commands of tasks. A command's `name` is its row in `TRANSITIONS`."""

from datetime import datetime, timedelta
from typing import Any, ClassVar
from uuid import UUID

import msgspec

from tenuto.model.tasks.retry import ErrorClass
from tenuto.model.tasks.task import Fence, Status


class DecisionContext(msgspec.Struct, frozen=True):
    """Inputs of a decision besides the task and the command: time, random number and actor.

    `roll` in [0, 1) spreads retry delays by the jitter.
    """

    now: datetime
    roll: float = 0.5
    actor: str | None = None


class Escalation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Asks for help with a failure: the reason, and the advice what to do."""

    reason: str
    prompt: str


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """Why an attempt failed.

    `retryable` overrides the error class: `True` always retries, `False` never does.
    """

    message: str
    error_class: ErrorClass = ErrorClass.ERROR
    retryable: bool | None = None
    stack: str | None = None
    exit_code: int | None = None
    escalation: Escalation | None = None


class Command(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all commands."""

    name: ClassVar[str]


class AttemptCommand(Command, frozen=True, kw_only=True):
    """A command from an attempt: refused unless its fence is the current one."""

    fence: Fence


class Begin(AttemptCommand, frozen=True, kw_only=True):
    name = "begin"
    session_key: str | None = None
    lease_s: int | None = None
    """Seconds until the session's first heartbeat is due; `None` leaves the lease unchanged."""


class Complete(AttemptCommand, frozen=True, kw_only=True):
    name = "complete"
    output: str | None = None
    summary: str | None = None


class Fail(AttemptCommand, frozen=True, kw_only=True):
    name = "fail"
    failure: Failure
    resume_at: datetime | None = None


class NotStarted(AttemptCommand, frozen=True, kw_only=True):
    """The session could not be started."""

    name = "not_started"
    failure: Failure


class TimedOut(AttemptCommand, frozen=True, kw_only=True):
    """The worker ended a session that ran longer than its timeout."""

    name = "time_out"
    receipt: dict[str, Any] | None = None


class Park(AttemptCommand, frozen=True, kw_only=True):
    """Ends the attempt; the task waits for `hold`, or until a time, without a worker."""

    name = "park"
    hold: str
    resume_at: datetime | None = None
    wait_until: datetime | None = None


class Release(AttemptCommand, frozen=True, kw_only=True):
    """Ends the attempt early; the task is PENDING again."""

    name = "release"


class ConfirmCancel(AttemptCommand, frozen=True, kw_only=True):
    """The worker killed the session after a cancel request."""

    name = "cancel"
    receipt: dict[str, Any]


class ConfirmPause(AttemptCommand, frozen=True, kw_only=True):
    name = "pause"
    receipt: dict[str, Any]


class Expire(Command, frozen=True, kw_only=True):
    """The lease expired, or the worker is known to be dead."""

    name = "expire"
    seen_dead: bool = False
    receipt: dict[str, Any] | None = None
    """The kill receipt, if another process ended the session for the worker."""


class ForceTimeOut(Command, frozen=True, kw_only=True):
    """Ends a run far past its timeout that its worker did not end."""

    name = "time_out"


class WarnHung(Command, frozen=True, kw_only=True):
    """Warns a session that runs far past its estimate, before it is aborted."""

    name = "abort"


class Abort(Command, frozen=True, kw_only=True):
    """Ends an attempt without progress after the warning."""

    name = "abort"


class Ready(Command, frozen=True, kw_only=True):
    """The task's wait is over."""

    name = "ready"


class StartNow(Command, frozen=True, kw_only=True):
    """Starts a task now instead of at its `run_at`."""

    name = "ready"


class RetryDue(Command, frozen=True, kw_only=True):
    """The delay before the next try is over."""

    name = "due"


class Pause(Command, frozen=True, kw_only=True):
    name = "pause"
    reason: str | None = None


class PauseForBudget(Command, frozen=True, kw_only=True):
    """A budget is used up: the attempt must stop, and the task waits for a higher budget."""

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
    """Fails a task that can never run, without an attempt."""

    name = "refuse"
    code: str
    message: str


class Retry(Command, frozen=True, kw_only=True):
    name = "retry"
    watched: bool = True
    """True if the task's next outcome may have follow-ups."""
    unmet: int = 0
    """Number of dependencies that have not finished."""
    hold: str | None = None
    """What the task must wait for again: a permit, its turn, or the end of a pause."""


class Reopen(Command, frozen=True, kw_only=True):
    """Reopens a task that finished because of another task, which is now retried."""

    name = "revive"
    hold: str | None = None
    unmet: int = 0


class DependenciesMet(Command, frozen=True, kw_only=True):
    """`n` of the task's dependencies are met."""

    name = "unblock"
    n: int = 1


class ClearHold(Command, frozen=True, kw_only=True):
    """Ends the task's hold; `hold` is the next one, or `None`."""

    name = "unblock"
    hold: str | None = None


class Unpark(Command, frozen=True, kw_only=True):
    """Ends a park: what the handler waits for has happened, or the wait took too long."""

    name = "unblock"
    progress: bool = True
    """True if what the handler waits for has happened: the count of free ends is reset."""


class AwaitAnswer(Command, frozen=True, kw_only=True):
    """Makes the task wait for a person's answer."""

    name = "unblock"
    hold: str
    timeout_s: int | None = None
    message: str | None = None

    def until(self, now: datetime) -> datetime | None:
        """Returns the deadline of the answer, or `None` without a timeout."""
        return None if self.timeout_s is None else now + timedelta(seconds=self.timeout_s)


class AddDependency(Command, frozen=True, kw_only=True):
    """Adds one dependency to the task."""

    name = "block"


class Resolve(Command, frozen=True, kw_only=True):
    """Finishes a task that no agent runs: by the engine or by a person's answer."""

    name = "decide"
    status: Status
    output: str | None = None
    summary: str | None = None
    message: str | None = None
    code: str | None = None


class Archive(Command, frozen=True, kw_only=True):
    """Archives a finished task; its status stays."""

    name = "archive"


class SetPriority(Command, frozen=True, kw_only=True):
    name = "reprioritise"
    priority: int


class Assign(Command, frozen=True, kw_only=True):
    """Moves the task to `lane`: for `agent` only or, without one, for every eligible agent."""

    name = "assign"
    lane: int
    agent: UUID | None


class Edit(Command, frozen=True, kw_only=True):
    """Records an edit of descriptive fields; never of fields that decide where or when it runs."""

    name = "edit"
    fields: tuple[str, ...]


class DeletePayload(Command, frozen=True, kw_only=True):
    """Deletes the payload of a finished task; its row and its audit trail stay."""

    name = "erase"
