"""What becomes of a task when an attempt begins, ends, or is taken to be gone."""

from datetime import datetime, timedelta
from typing import Any

import msgspec

from tenuto.model.errors import Conflict
from tenuto.model.tasks import commands as c
from tenuto.model.tasks.changes import (
    DISOWNED,
    UNLEASED,
    again,
    altered,
    cancelled,
    change,
    dead,
    ended,
    has_no_try_left,
    is_parked,
    paused,
    unheld,
    without_counting_try,
)
from tenuto.model.tasks.commands import DecisionContext, Failure
from tenuto.model.tasks.retry import (
    ALERTING,
    FREE_ENDS,
    PERMANENT,
    RATE_LIMIT,
    ErrorClass,
    backoff,
    longer_timeout,
)
from tenuto.model.tasks.task import (
    AGING_MS,
    GATEWAY,
    AttemptRecord,
    Outcome,
    Status,
    Task,
    TaskChange,
    is_ready,
    watch_seconds,
)


def begin(task: Task, command: c.Begin, moment: DecisionContext) -> TaskChange:
    changes: dict[str, Any] = {"session_key": command.session_key, "status": Status.RUNNING}
    if command.lease_s is not None:
        seconds = max(command.lease_s, task.lease_s or 0)
        changes["lease_until"] = moment.now + timedelta(seconds=seconds)
    return change(task, moment, "started", started_at=moment.now, **changes)


def complete(task: Task, command: c.Complete, moment: DecisionContext) -> TaskChange:
    del command
    return change(
        task,
        moment,
        "completed",
        end=ended(task, moment, Outcome.COMPLETED),
        status=Status.COMPLETED,
        finished_at=moment.now,
        last_outcome=Outcome.COMPLETED,
        **UNLEASED,
    )


def fail(task: Task, command: c.Fail, moment: DecisionContext) -> TaskChange:
    failure = command.failure
    permanent = failure.error_class in PERMANENT and failure.retryable is None
    if failure.retryable is False or permanent:
        return _failed(task, moment, ended(task, moment, Outcome.FAILED, failure), failure)
    if failure.error_class is ErrorClass.TIMEOUT:
        return _timed_out(task, moment, failure, None)
    if failure.error_class is ErrorClass.RATE_LIMIT:
        return _rate_limited(task, command, moment)
    delay = backoff(task.policy, task.tries, moment.roll)
    end = ended(task, moment, Outcome.FAILED, failure)
    return again(task, moment, end, delay, "retry_scheduled")


def _failed(
    task: Task, moment: DecisionContext, end: AttemptRecord, failure: Failure
) -> TaskChange:
    return change(
        task,
        moment,
        "failed",
        level="CRITICAL" if failure.error_class in ALERTING else "ERROR",
        message=failure.message,
        data={"error_class": failure.error_class, "outcome": end.outcome},
        stack=failure.stack,
        end=end,
        **{
            **UNLEASED,
            "status": Status.FAILED,
            "finished_at": moment.now,
            "last_outcome": end.outcome,
            "last_error": failure.message,
            "error_class": failure.error_class,
        },
    )


def _rate_limited(task: Task, command: c.Fail, moment: DecisionContext) -> TaskChange:
    """A provider's limit costs no try: parked until a known reset, else its own backoff."""
    back = without_counting_try(task)
    if command.resume_at is not None:
        end = ended(task, moment, Outcome.PARKED, command.failure)
        if has_no_try_left(task, back["tries"]):
            return dead(task, moment, end, command.failure.message, **back)
        return _parked(task, moment, end, "quota", command.resume_at, None, back)
    end = ended(task, moment, Outcome.FAILED, command.failure)
    delay = backoff(RATE_LIMIT, back["free_ends"], moment.roll)
    return again(task, moment, end, delay, "retry_scheduled", **back)


def _timed_out(
    task: Task, moment: DecisionContext, failure: Failure, receipt: dict[str, Any] | None
) -> TaskChange:
    silent = receipt is not None and receipt.get("state") == "unconfirmed"
    lost = silent and _may_outlive_attempt(task)
    end = ended(task, moment, Outcome.TIMED_OUT, failure, receipt, unconfirmed=lost)
    timeout_s = longer_timeout(task.timeout_s)
    return again(
        task,
        moment,
        end,
        backoff(task.policy, task.tries, moment.roll),
        "timed_out",
        timeout_s=timeout_s,
        watch_s=watch_seconds(timeout_s, task.estimate_minutes),
    )


def _may_outlive_attempt(task: Task) -> bool:
    """Whether a gateway may go on running a session that nobody waits for: it is to be killed."""
    return task.session_key is not None and (task.worker or "").startswith(GATEWAY)


def _timeout_failure(task: Task) -> Failure:
    return Failure(
        message=f"ran longer than its timeout of {task.timeout_s} s",
        error_class=ErrorClass.TIMEOUT,
    )


def timed_out(task: Task, command: c.TimedOut, moment: DecisionContext) -> TaskChange:
    return _timed_out(task, moment, _timeout_failure(task), command.receipt)


def overrun(task: Task, command: c.ForceTimeOut, moment: DecisionContext) -> TaskChange:
    del command
    return _timed_out(task, moment, _timeout_failure(task), {"state": "unconfirmed"})


def not_started(task: Task, command: c.NotStarted, moment: DecisionContext) -> TaskChange:
    failure = command.failure
    end = ended(task, moment, Outcome.NOT_STARTED, failure)
    back = without_counting_try(task)
    if failure.retryable is False:
        return _failed(task, moment, end, failure)
    if _consecutive_outcomes(task, Outcome.NOT_STARTED) >= FREE_ENDS:
        why = f"could not be started {FREE_ENDS} times in a row: {failure.message}"
        final = msgspec.structs.replace(failure, message=why, error_class=ErrorClass.OUT_OF_MEMORY)
        made = _failed(task, moment, end, final)
        data = {"error_class": "cannot_start", "outcome": end.outcome}
        return TaskChange(
            altered(made.task, error_class="cannot_start"),
            msgspec.structs.replace(made.event, data=data),
            end,
        )
    losses = _consecutive_outcomes(task, Outcome.NOT_STARTED)
    delay = backoff(task.policy, losses, moment.roll)
    return again(task, moment, end, delay, "not_started", losses=losses, **back)


def _consecutive_outcomes(task: Task, outcome: Outcome) -> int:
    """How many attempts, this one included, ended in the same way without another in between."""
    return task.losses + 1 if task.last_outcome == outcome else 1


def expire(task: Task, command: c.Expire, moment: DecisionContext) -> TaskChange:
    receipt = command.receipt or {"state": "unconfirmed"}
    if task.cancel_requested_at is not None:
        return cancelled(task, moment, receipt)
    if task.pause_requested_at is not None:
        return paused(task, moment, receipt)
    why = "the worker was seen to die" if command.seen_dead else "the lease expired"
    failure = Failure(message=why, error_class=ErrorClass.CRASH)
    end = ended(task, moment, Outcome.STALLED, failure, unconfirmed=_may_outlive_attempt(task))
    losses = _consecutive_outcomes(task, Outcome.STALLED)
    delay = 0.0 if losses == 1 else backoff(task.policy, losses - 1, moment.roll)
    return again(task, moment, end, delay, "lease_expired", losses=losses)


HUNG = "runs far past its estimate; aborted unless it reports progress"
"""What a session is told, once, before it is given up."""


def warn_hung(task: Task, command: c.WarnHung, moment: DecisionContext) -> TaskChange:
    del command
    return change(
        task,
        moment,
        "hung_warned",
        level="WARN",
        message=HUNG,
        hung_warned_at=moment.now,
    )


def abort(task: Task, command: c.Abort, moment: DecisionContext) -> TaskChange:
    del command
    failure = Failure(message="hung: no progress after the warning", error_class=ErrorClass.TIMEOUT)
    end = ended(task, moment, Outcome.ABORTED, failure, unconfirmed=_may_outlive_attempt(task))
    return again(task, moment, end, 0.0, "aborted", rank=task.rank - AGING_MS)


def _parked(
    task: Task,
    moment: DecisionContext,
    end: AttemptRecord,
    hold: str,
    resume_at: datetime | None,
    wait_until: datetime | None,
    counters: dict[str, Any],
) -> TaskChange:
    return change(
        task,
        moment,
        "parked",
        message=f"waits for {hold}",
        data={"hold": hold, "resume_at": resume_at, "wait_until": wait_until},
        end=end,
        **{
            **DISOWNED,
            "status": Status.WAITING,
            "hold": hold,
            "resume_at": resume_at,
            "wait_until": wait_until,
            "last_outcome": Outcome.PARKED,
            "losses": 0,
            **counters,
        },
    )


def park(task: Task, command: c.Park, moment: DecisionContext) -> TaskChange:
    end = ended(task, moment, Outcome.PARKED)
    back = without_counting_try(task)
    if has_no_try_left(task, back["tries"]):
        return dead(task, moment, end, "parked too often without a new checkpoint", **back)
    return _parked(task, moment, end, command.hold, command.resume_at, command.wait_until, back)


def wake(task: Task, command: c.Unpark, moment: DecisionContext) -> TaskChange:
    if not is_parked(task):
        raise Conflict("no handler of the task waits")
    cleared: dict[str, Any] = {"hold": None, "resume_at": None, "wait_until": None}
    if command.progress:
        cleared["free_ends"] = 0
    ready = task.status is Status.WAITING and is_ready(altered(task, **cleared), moment.now)
    return change(
        task,
        moment,
        "ready" if ready else "unblocked",
        message=None if command.progress else f"waited long enough for {task.hold}",
        status=Status.PENDING if ready else task.status,
        **cleared,
    )


def release(task: Task, command: c.Release, moment: DecisionContext) -> TaskChange:
    del command
    end = ended(task, moment, Outcome.RELEASED)
    back = without_counting_try(task)
    if has_no_try_left(task, back["tries"]):
        return dead(task, moment, end, "released too often without a new checkpoint", **back)
    return change(
        task,
        moment,
        "released",
        end=end,
        status=Status.PENDING,
        last_outcome=Outcome.RELEASED,
        losses=0,
        **DISOWNED,
        **back,
    )


def ready(task: Task, command: c.Ready, moment: DecisionContext) -> TaskChange:
    del command
    free = unheld(task, moment)
    if not is_ready(free, moment.now):
        raise Conflict("the task still waits")
    cleared: dict[str, Any] = {"hold": None, "resume_at": None, "wait_until": None}
    return change(task, moment, "ready", status=Status.PENDING, **cleared)


def due(task: Task, command: c.RetryDue, moment: DecisionContext) -> TaskChange:
    del command
    if task.next_attempt_at is not None and task.next_attempt_at > moment.now:
        raise Conflict("the retry is not due yet")
    return change(task, moment, "due", status=Status.PENDING, next_attempt_at=None)
