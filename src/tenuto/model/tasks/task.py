"""The task: its row, its statuses, and the one table of legal transitions.

`decide.py` holds what each command makes of a task.
"""

from datetime import UTC, datetime, timedelta
from enum import StrEnum
from itertools import product
from typing import Any
from uuid import UUID

import msgspec

from tenuto.model.tasks.retry import RetryPolicy

DEFAULT_LEASE_S = 20
GATEWAY = "gateway:"
"""How the name of a worker begins that is a gateway."""
KILL_GRACE_S = 10
LONGEST_STOP_S = 300
"""However it beats: an owner that takes longer than this to stop is given up."""
HUNG_AFTER_S = 30 * 60
HUNG_QUIET_S = 10 * 60
TIMEOUT_SLACK_S = 30
"""The worker enforces a run timeout; the coordinator steps in this much later."""
AGING_MS = 3_600_000
"""One step of priority is worth this much waiting, so nothing starves."""
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MS = timedelta(milliseconds=1)
SJF_MS = 6_000
"""A minute of the estimate is worth this much waiting: a tenth of it."""


class Status(StrEnum):
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
    return frozenset(product(map(Status, sources.split()), map(Status, targets.split())))


def _stays(sources: str) -> frozenset[tuple[Status, Status]]:
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
"""Which status each command may lead from and to. Nothing else is ever written."""


PRUNED = "(pruned)"
"""The current step of a task whose payload is gone."""


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """The hot half of a task: what decides and what changes. Field order is column order."""

    id: UUID
    workspace: UUID
    lane: int
    status: Status
    hold: str | None = None
    unmet: int = 0
    watched: bool = False
    rank: int = 0
    priority: int = 5
    version: int = 1
    attempt: int = 0
    tries: int = 0
    free_ends: int = 0
    free_mark: int = 0
    losses: int = 0
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
        if self.retry is None:
            return RetryPolicy()
        return msgspec.json.decode(self.retry, type=RetryPolicy)


class Fence(msgspec.Struct, frozen=True):
    """What every write of an attempt must present."""

    task: UUID
    attempt: int
    token: str


class AuditEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One audit row: what happened to a task. Its `seq` is the version it led to."""

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
    """The row of an attempt, written when it ends."""

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
    """What one command makes of a task: the row after, its audit event, the attempt it ended."""

    task: Task
    event: AuditEvent
    end: AttemptRecord | None = None


def rank(priority: int, base: datetime, estimate_minutes: int | None = None) -> int:
    """Where a task stands in its lane, lower first; short jobs go a little before long ones."""
    place = (base - _EPOCH) // _MS - priority * AGING_MS
    return place if estimate_minutes is None else place + estimate_minutes * SJF_MS


def is_ready(task: Task, now: datetime) -> bool:
    return task.unmet == 0 and task.hold is None and (task.run_at is None or task.run_at <= now)


def watch_seconds(timeout_s: int | None, estimate_minutes: int | None) -> int | None:
    """Seconds after the start at which a running task wants looking at, if ever."""
    limits = []
    if timeout_s is not None:
        limits.append(timeout_s + TIMEOUT_SLACK_S)
    if estimate_minutes is not None:
        limits.append(estimate_minutes * 60 + HUNG_AFTER_S)
    return min(limits, default=None)


def due_at(task: Task) -> datetime | None:
    """When a coordinator must next look at the task, if ever: the earliest of its timers."""
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
    expiry = queue_expiry(task)
    return timers if expiry is None else [*timers, expiry]


def queue_expiry(task: Task) -> datetime | None:
    """When a task that never started has waited too long, counted from when it could start."""
    if task.queue_ttl_s is None or task.attempt > 0:
        return None
    since = max(task.created_at, task.run_at or task.created_at)
    return since + timedelta(seconds=task.queue_ttl_s)


def _leased_timers(task: Task) -> list[datetime]:
    requests = (task.cancel_requested_at, task.pause_requested_at)
    timers = [answer_deadline(task, at) for at in requests if at is not None]
    if timers:
        return timers  # it has to stop: how long it may run no longer matters
    if task.started_at is not None and task.timeout_s is not None:
        timers.append(run_deadline(task))
    if task.started_at is not None and task.estimate_minutes is not None:
        timers.append(hung_deadline(task))
    return timers


def answer_deadline(task: Task, requested: datetime) -> datetime:
    """When an owner that was asked to stop, and is silent, is taken to be gone."""
    return requested + timedelta(seconds=KILL_GRACE_S + (task.lease_s or DEFAULT_LEASE_S))


def is_silent(task: Task, requested: datetime, now: datetime) -> bool:
    """Whether an owner that was asked to stop can no longer be expected to answer.

    One that still beats is at it, within reason: its kill may take longer than ours would.
    """
    beats = task.lease_until is not None and task.lease_until > now
    late = answer_deadline(task, requested) <= now
    return late and (not beats or requested + timedelta(seconds=LONGEST_STOP_S) <= now)


def run_deadline(task: Task) -> datetime:
    assert task.started_at is not None
    assert task.timeout_s is not None
    return task.started_at + timedelta(seconds=task.timeout_s + TIMEOUT_SLACK_S)


def hung_deadline(task: Task) -> datetime:
    """When a task past its estimate is warned, or, once warned, aborted for want of progress."""
    assert task.started_at is not None
    assert task.estimate_minutes is not None
    if task.hung_warned_at is None:
        return task.started_at + timedelta(seconds=task.estimate_minutes * 60 + HUNG_AFTER_S)
    heard = max(task.hung_warned_at, task.progress_at or task.hung_warned_at)
    return heard + timedelta(seconds=HUNG_QUIET_S)
