"""The task: its row, its statuses and the table of all legal transitions.

`decide.py` applies one command to a task.
"""

import hashlib
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from functools import lru_cache
from itertools import product
from typing import Any
from uuid import UUID

import msgspec

from tenuto.model.errors import Conflict
from tenuto.model.tasks.retry import ATTEMPT_CAP, RetryPolicy

DEFAULT_LEASE_S = 20
LEASE_LOST = "lease_lost"
"""Code of the error for an attempt that does not own its task."""
GATEWAY_PREFIX = "gateway:"
"""Prefix of `Task.worker` if a gateway runs the task."""
KILL_GRACE_S = 10
MAX_STOP_S = 300
"""Longest time a worker may take to stop an attempt, even if it still sends heartbeats."""
HUNG_AFTER_S = 30 * 60
"""A running task gets the hung warning this long after the end of its estimate."""
HUNG_QUIET_S = 10 * 60
"""After the warning, the attempt is aborted when it reports no progress for this long."""
TIMEOUT_SLACK_S = 30
"""The worker enforces the run timeout; the coordinator enforces it this much later."""
AGING_MS = 3_600_000
"""One priority step equals this much waiting time, so that no task starves."""
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MS = timedelta(milliseconds=1)
SJF_MS = 6_000
"""One estimated minute equals this much waiting time: a tenth of a minute (shortest job first)."""


class Status(StrEnum):
    """The status of a task; `TERMINAL` holds the final ones."""

    WAITING = "WAITING"
    PENDING = "PENDING"
    ASSIGNED = "ASSIGNED"
    RUNNING = "RUNNING"
    PAUSED = "PAUSED"
    RETRY_WAIT = "RETRY_WAIT"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    DEAD = "DEAD"
    CANCELLED = "CANCELLED"
    SKIPPED = "SKIPPED"


LEASED = frozenset({Status.ASSIGNED, Status.RUNNING})
TERMINAL = frozenset(
    {Status.COMPLETED, Status.FAILED, Status.DEAD, Status.CANCELLED, Status.SKIPPED}
)


class Outcome(StrEnum):
    """How one attempt ended."""

    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    STALLED = "STALLED"
    ABORTED = "ABORTED"
    TIMED_OUT = "TIMED_OUT"
    CANCELLED = "CANCELLED"
    PARKED = "PARKED"
    PAUSED = "PAUSED"
    RELEASED = "RELEASED"
    NOT_STARTED = "NOT_STARTED"


def _moves(sources: str, targets: str) -> frozenset[tuple[Status, Status]]:
    """Returns every pair of a source and a target; both are status names with spaces between."""
    return frozenset(product(map(Status, sources.split()), map(Status, targets.split())))


def _stays(sources: str) -> frozenset[tuple[Status, Status]]:
    """Returns each status paired with itself: the command does not change the status."""
    return frozenset((Status(name), Status(name)) for name in sources.split())


TRANSITIONS: dict[str, frozenset[tuple[Status, Status]]] = {
    "ready": _moves("WAITING", "PENDING"),
    "unblock": _moves("WAITING", "PENDING") | _stays("WAITING PAUSED RETRY_WAIT"),
    "block": _moves("PENDING", "WAITING") | _stays("WAITING PAUSED"),
    "claim": _moves("PENDING", "ASSIGNED RUNNING"),
    "begin": _moves("ASSIGNED", "RUNNING"),
    "complete": _moves("RUNNING", "COMPLETED"),
    "fail": _moves("RUNNING", "RETRY_WAIT FAILED DEAD WAITING"),
    "expire": _moves("ASSIGNED RUNNING", "RETRY_WAIT DEAD CANCELLED PAUSED WAITING"),
    "not_started": _moves("ASSIGNED RUNNING", "RETRY_WAIT FAILED DEAD"),
    "abort": _moves("RUNNING", "RETRY_WAIT DEAD"),
    "time_out": _moves("RUNNING", "RETRY_WAIT DEAD"),
    "park": _moves("RUNNING", "WAITING DEAD"),
    "release": _moves("ASSIGNED RUNNING", "PENDING DEAD"),
    "due": _moves("RETRY_WAIT", "PENDING"),
    "pause": _moves("WAITING PENDING RETRY_WAIT ASSIGNED RUNNING", "PAUSED")
    | _moves("ASSIGNED RUNNING", "WAITING"),
    "resume": _moves("PAUSED", "PENDING WAITING RETRY_WAIT"),
    "cancel": _moves("WAITING PENDING RETRY_WAIT PAUSED ASSIGNED RUNNING", "CANCELLED"),
    "decide": _moves("WAITING PENDING", "COMPLETED FAILED SKIPPED"),
    "skip": _moves("WAITING PENDING RETRY_WAIT PAUSED", "SKIPPED"),
    "refuse": _moves("WAITING PENDING RETRY_WAIT PAUSED", "FAILED"),
    "retry": _moves("FAILED DEAD CANCELLED", "PENDING WAITING"),
    "revive": _moves("FAILED SKIPPED CANCELLED", "PENDING WAITING"),
}
"""For each command name: the allowed pairs of old and new status. No other pair is ever stored."""


PRUNED = "(pruned)"
"""Value of `current_step` after the task's payload was deleted."""


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """The row of table `task`: fields that decisions read or change. Field order is column order.

    The payload (prompt, input, ...) is stored in another table.
    """

    id: UUID
    workspace: UUID
    lane: int
    status: Status
    hold: str | None = None
    unmet: int = 0
    """Number of dependencies that have not finished."""
    watched: bool = False
    """True if the end of the task has follow-up work."""
    rank: int = 0
    priority: int = 5
    version: int = 1
    attempt: int = 0
    tries: int = 0
    free_ends: int = 0
    """Attempts in a row that ended without counting as a try."""
    free_mark: int = 0
    """The `checkpoint_seq` when `free_ends` was counted last."""
    losses: int = 0
    """Attempts in a row with `last_outcome`, if that is STALLED or NOT_STARTED."""
    max_attempts: int = 3
    retry: str | None = None
    agent: UUID | None = None
    worker: str | None = None
    session_key: str | None = None
    lease_token: str | None = None
    lease_s: int | None = None
    lease_until: datetime | None = None
    timeout_s: int | None = None
    watch_s: int | None = None
    queue_ttl_s: int | None = None
    estimate_minutes: int | None = None
    cancel_requested_at: datetime | None = None
    pause_requested_at: datetime | None = None
    hung_warned_at: datetime | None = None
    progress_percent: int | None = None
    current_step: str | None = None
    progress_at: datetime | None = None
    estimated_completion_at: datetime | None = None
    checkpoint_seq: int = 0
    event_xid: int = 0
    run_at: datetime | None = None
    resume_at: datetime | None = None
    wait_until: datetime | None = None
    next_attempt_at: datetime | None = None
    due_at: datetime | None = None
    last_error: str | None = None
    error_class: str | None = None
    last_outcome: str | None = None
    created_at: datetime
    updated_at: datetime
    assigned_at: datetime | None = None
    started_at: datetime | None = None
    finished_at: datetime | None = None
    archived_at: datetime | None = None

    @property
    def policy(self) -> RetryPolicy:
        """The retry policy of the task, or the default policy."""
        if self.retry is None:
            return RetryPolicy()
        return msgspec.json.decode(self.retry, type=RetryPolicy)


class Fence(msgspec.Struct, frozen=True):
    """Identifies one attempt; every write of an attempt must present its fence."""

    task: UUID
    attempt: int
    token: str

    def is_possible(self) -> bool:
        """True if a task can have an attempt with this number."""
        return 0 < self.attempt <= ATTEMPT_CAP


def check_fence(fence: Fence) -> None:
    """Raises `Conflict` (`lease_lost`) if no task can have an attempt with the fence's number."""
    if not fence.is_possible():
        raise Conflict(f"no attempt {fence.attempt} owns task {fence.task}", LEASE_LOST)


@lru_cache(maxsize=4096)
def token_hash(token: str) -> str:
    """Returns the hash of a lease token, as stored.

    Text that cannot be a token (a lone surrogate) gets a hash that no token has.
    """
    return hashlib.sha256(token.encode(errors="surrogatepass")).hexdigest()[:32]


class AuditEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One audit row of a task. Its `seq` is the task's version after the change."""

    kind: str
    level: str = "INFO"
    message: str | None = None
    previous: Status | None = None
    new: Status | None = None
    attempt: int = 0
    agent: UUID | None = None
    actor: str | None = None
    session_key: str | None = None
    stack_trace: str | None = None
    data: dict[str, Any] | None = None


class AttemptRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The row of an attempt, written when the attempt ends."""

    outcome: Outcome
    attempt: int
    agent: UUID | None
    worker: str | None
    session_key: str | None
    started_at: datetime | None
    ended_at: datetime
    error_class: str | None = None
    message: str | None = None
    stack: str | None = None
    exit_code: int | None = None
    receipt: dict[str, Any] | None = None
    unconfirmed: bool = False


class TaskChange(msgspec.Struct, frozen=True):
    """Result of one command: the new row, its audit event and the record of an ended attempt."""

    task: Task
    event: AuditEvent
    end: AttemptRecord | None = None


def rank(priority: int, base: datetime, estimate_minutes: int | None = None) -> int:
    """Returns the sort key of a task in its lane, in milliseconds; the lowest is claimed first.

    A higher `priority` and a shorter estimate lower the rank. `base` is when waiting began.
    """
    rank_ms = (base - _EPOCH) // _MS - priority * AGING_MS
    return rank_ms if estimate_minutes is None else rank_ms + estimate_minutes * SJF_MS


def is_ready(task: Task, now: datetime) -> bool:
    """True if the task has no open dependency and no hold, and its `run_at` has passed."""
    return task.unmet == 0 and task.hold is None and (task.run_at is None or task.run_at <= now)


def watch_seconds(timeout_s: int | None, estimate_minutes: int | None) -> int | None:
    """Returns the seconds from start to the first timer of a run; `None` without a limit."""
    limits = []
    if timeout_s is not None:
        limits.append(timeout_s + TIMEOUT_SLACK_S)
    if estimate_minutes is not None:
        limits.append(estimate_minutes * 60 + HUNG_AFTER_S)
    return min(limits, default=None)


def next_due_at(task: Task) -> datetime | None:
    """Returns when a coordinator must check the task: its earliest timer, or `None`."""
    if task.status in TERMINAL or task.status is Status.PAUSED:
        return None
    if task.status in LEASED:
        return min(_leased_timers(task), default=None)
    return min(_queued_timers(task), default=None)


def _queued_timers(task: Task) -> list[datetime]:
    timers = []
    if task.status is Status.RETRY_WAIT and task.next_attempt_at is not None:
        timers.append(task.next_attempt_at)
    if task.status is Status.WAITING:
        timers += [at for at in (task.resume_at, task.wait_until) if at is not None]
        if task.run_at is not None and task.unmet == 0 and task.hold is None:
            timers.append(task.run_at)
    expiry = queue_expires_at(task)
    return timers if expiry is None else [*timers, expiry]


def queue_expires_at(task: Task) -> datetime | None:
    """Returns when the queue TTL of a task that never started ends, or `None` without a TTL.

    The TTL counts from `created_at` or, if later, `run_at`.
    """
    if task.queue_ttl_s is None or task.attempt > 0:
        return None
    startable_at = max(task.created_at, task.run_at or task.created_at)
    return startable_at + timedelta(seconds=task.queue_ttl_s)


def _leased_timers(task: Task) -> list[datetime]:
    """Returns the deadline of each requested stop; without one, those of timeout and estimate."""
    requests = (task.cancel_requested_at, task.pause_requested_at)
    timers = [stop_deadline(task, at) for at in requests if at is not None]
    if timers:
        return timers  # the attempt has to stop, so the timeout and the estimate do not matter
    if task.started_at is not None and task.timeout_s is not None:
        timers.append(run_deadline(task))
    if task.started_at is not None and task.estimate_minutes is not None:
        timers.append(hung_deadline(task))
    return timers


def stop_deadline(task: Task, requested_at: datetime) -> datetime:
    """Returns when a worker that was asked to stop, and sends no heartbeats, counts as gone."""
    return requested_at + timedelta(seconds=KILL_GRACE_S + (task.lease_s or DEFAULT_LEASE_S))


def is_stop_overdue(task: Task, requested_at: datetime, now: datetime) -> bool:
    """True if a worker that was asked to stop an attempt is not expected to report any more.

    A worker whose lease is still renewed gets up to `MAX_STOP_S`: its kill may take longer than
    `KILL_GRACE_S`.
    """
    sends_heartbeats = task.lease_until is not None and task.lease_until > now
    is_late = stop_deadline(task, requested_at) <= now
    return is_late and (not sends_heartbeats or requested_at + timedelta(seconds=MAX_STOP_S) <= now)


def run_deadline(task: Task) -> datetime:
    """Returns when the coordinator ends a run that is past its timeout."""
    assert task.started_at is not None
    assert task.timeout_s is not None
    return task.started_at + timedelta(seconds=task.timeout_s + TIMEOUT_SLACK_S)


def hung_deadline(task: Task) -> datetime:
    """Returns when a task far past its estimate is warned or, after the warning, aborted.

    Progress reported after the warning postpones the abort.
    """
    assert task.started_at is not None
    assert task.estimate_minutes is not None
    if task.hung_warned_at is None:
        return task.started_at + timedelta(seconds=task.estimate_minutes * 60 + HUNG_AFTER_S)
    last_sign = max(task.hung_warned_at, task.progress_at or task.hung_warned_at)
    return last_sign + timedelta(seconds=HUNG_QUIET_S)
