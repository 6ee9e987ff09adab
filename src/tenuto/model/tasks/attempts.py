"""Changes of a task by its attempts and timers. One function per command."""

from datetime import datetime, timedelta
from typing import Any

import msgspec

from tenuto.model.errors import Conflict
from tenuto.model.tasks import commands as c
from tenuto.model.tasks.changes import (
    LEASE_CLEARED,
    OWNER_CLEARED,
    attempt_record,
    build_change,
    finish_cancel,
    finish_pause,
    has_no_try_left,
    is_parked,
    mark_dead,
    replace_fields,
    schedule_retry,
    without_counting_try,
    without_elapsed_hold,
)
from tenuto.model.tasks.commands import DecisionContext, Failure
from tenuto.model.tasks.retry import FREE_ENDS, RULES, ErrorClass, backoff, increase_timeout
from tenuto.model.tasks.task import (
    AGING_MS,
    GATEWAY_PREFIX,
    AttemptRecord,
    Outcome,
    Status,
    Task,
    TaskChange,
    is_ready,
    watch_seconds,
)


def begin(task: Task, command: c.Begin, context: DecisionContext) -> TaskChange:
    """Returns the change to RUNNING; `command.lease_s` extends the lease to the first heartbeat."""
    changes: dict[str, Any] = {"session_key": command.session_key, "status": Status.RUNNING}
    if command.lease_s is not None:
        seconds = max(command.lease_s, task.lease_s or 0)
        changes["lease_until"] = context.now + timedelta(seconds=seconds)
    return build_change(task, context, "started", started_at=context.now, **changes)


def complete(task: Task, command: c.Complete, context: DecisionContext) -> TaskChange:
    """Returns the change to COMPLETED; the engine stores the command's output."""
    del command
    return build_change(
        task,
        context,
        "completed",
        record=attempt_record(task, context, Outcome.COMPLETED),
        status=Status.COMPLETED,
        finished_at=context.now,
        last_outcome=Outcome.COMPLETED,
        **LEASE_CLEARED,
    )


def fail(task: Task, command: c.Fail, context: DecisionContext) -> TaskChange:
    """Returns the change to FAILED, DEAD, a park or a retry, by error class and `retryable`."""
    failure = command.failure
    rule = RULES[failure.error_class]
    record = attempt_record(task, context, Outcome.FAILED, failure)
    if failure.retryable is False or (rule.permanent and failure.retryable is None):
        return _fail_for_good(task, context, record, failure)
    if rule.longer_timeout:
        return _time_out(task, context, failure, None)
    counters = {"free_ends": 0} if rule.counts else without_counting_try(task)
    if rule.parks:
        resume_at = command.resume_at
        if resume_at is None and rule.reset_time is not None:
            resume_at = rule.reset_time(context.now)
        if resume_at is not None:
            return _park_until_reset(task, context, failure, resume_at, counters)
    failures = task.tries if rule.counts else counters["free_ends"]
    delay_s = backoff(rule.policy or task.policy, failures, context.roll)
    return schedule_retry(task, context, record, delay_s, "retry_scheduled", **counters)


def _fail_for_good(
    task: Task, context: DecisionContext, record: AttemptRecord, failure: Failure
) -> TaskChange:
    """Returns the change to FAILED, with an event of the level ERROR or CRITICAL."""
    return build_change(
        task,
        context,
        "failed",
        level="CRITICAL" if RULES[failure.error_class].alerting else "ERROR",
        message=failure.message,
        data={"error_class": failure.error_class, "outcome": record.outcome},
        stack=failure.stack,
        record=record,
        **{
            **LEASE_CLEARED,
            "status": Status.FAILED,
            "finished_at": context.now,
            "last_outcome": record.outcome,
            "last_error": failure.message,
            "error_class": failure.error_class,
        },
    )


def _park_until_reset(
    task: Task,
    context: DecisionContext,
    failure: Failure,
    resume_at: datetime,
    counters: dict[str, Any],
) -> TaskChange:
    """Returns the change to WAITING until the provider's limit resets, or DEAD without a try."""
    record = attempt_record(task, context, Outcome.PARKED, failure)
    if has_no_try_left(task, counters.get("tries", task.tries)):
        return mark_dead(task, context, record, failure.message, **counters)
    return _park(task, context, record, "quota", resume_at, None, counters)


def _time_out(
    task: Task, context: DecisionContext, failure: Failure, receipt: dict[str, Any] | None
) -> TaskChange:
    """Returns the change to a retry with a longer timeout; to DEAD if no try is left."""
    is_unconfirmed = receipt is not None and receipt.get("state") == "unconfirmed"
    may_still_run = is_unconfirmed and _may_outlive_attempt(task)
    record = attempt_record(
        task, context, Outcome.TIMED_OUT, failure, receipt, unconfirmed=may_still_run
    )
    timeout_s = increase_timeout(task.timeout_s)
    return schedule_retry(
        task,
        context,
        record,
        backoff(task.policy, task.tries, context.roll),
        "timed_out",
        timeout_s=timeout_s,
        watch_s=watch_seconds(timeout_s, task.estimate_minutes),
    )


def _may_outlive_attempt(task: Task) -> bool:
    """True if a gateway may still run the session, so that the session has to be killed."""
    return task.session_key is not None and (task.worker or "").startswith(GATEWAY_PREFIX)


def _timeout_failure(task: Task) -> Failure:
    return Failure(
        message=f"ran longer than its timeout of {task.timeout_s} s",
        error_class=ErrorClass.TIMEOUT,
    )


def confirm_time_out(task: Task, command: c.TimedOut, context: DecisionContext) -> TaskChange:
    """Returns the change after a timeout whose session the worker ended."""
    return _time_out(task, context, _timeout_failure(task), command.receipt)


def force_time_out(task: Task, command: c.ForceTimeOut, context: DecisionContext) -> TaskChange:
    """Returns the change after a timeout whose session may still be running."""
    del command
    return _time_out(task, context, _timeout_failure(task), {"state": "unconfirmed"})


def fail_to_start(task: Task, command: c.NotStarted, context: DecisionContext) -> TaskChange:
    """Returns the change to a retry, not counted as a try; to FAILED after `FREE_ENDS` in a row."""
    failure = command.failure
    record = attempt_record(task, context, Outcome.NOT_STARTED, failure)
    counters = without_counting_try(task)
    if failure.retryable is False:
        return _fail_for_good(task, context, record, failure)
    if _consecutive_outcomes(task, Outcome.NOT_STARTED) >= FREE_ENDS:
        message = f"could not be started {FREE_ENDS} times in a row: {failure.message}"
        final_failure = msgspec.structs.replace(
            failure, message=message, error_class=ErrorClass.OUT_OF_MEMORY
        )
        change = _fail_for_good(task, context, record, final_failure)
        data = {"error_class": "cannot_start", "outcome": record.outcome}
        return TaskChange(
            replace_fields(change.task, error_class="cannot_start"),
            msgspec.structs.replace(change.event, data=data),
            record,
        )
    losses = _consecutive_outcomes(task, Outcome.NOT_STARTED)
    delay_s = backoff(task.policy, losses, context.roll)
    return schedule_retry(task, context, record, delay_s, "not_started", losses=losses, **counters)


def _consecutive_outcomes(task: Task, outcome: Outcome) -> int:
    """Returns how many attempts in a row, including this one, ended with `outcome`."""
    return task.losses + 1 if task.last_outcome == outcome else 1


def expire(task: Task, command: c.Expire, context: DecisionContext) -> TaskChange:
    """Returns the change after a lost lease: a retry or DEAD, or the requested cancel or pause."""
    receipt = command.receipt or {"state": "unconfirmed"}
    if task.cancel_requested_at is not None:
        return finish_cancel(task, context, receipt)
    if task.pause_requested_at is not None:
        return finish_pause(task, context, receipt)
    reason = "the worker died" if command.seen_dead else "the lease expired"
    failure = Failure(message=reason, error_class=ErrorClass.CRASH)
    record = attempt_record(
        task, context, Outcome.STALLED, failure, unconfirmed=_may_outlive_attempt(task)
    )
    losses = _consecutive_outcomes(task, Outcome.STALLED)
    delay_s = 0.0 if losses == 1 else backoff(task.policy, losses - 1, context.roll)
    return schedule_retry(task, context, record, delay_s, "lease_expired", losses=losses)


HUNG_WARNING = "runs far past its estimate; aborted unless it reports progress"
"""The warning that a session receives once before it is aborted."""


def warn_hung(task: Task, command: c.WarnHung, context: DecisionContext) -> TaskChange:
    """Returns the change that records the warning; the status stays RUNNING."""
    del command
    return build_change(
        task,
        context,
        "hung_warned",
        level="WARN",
        message=HUNG_WARNING,
        hung_warned_at=context.now,
    )


def abort(task: Task, command: c.Abort, context: DecisionContext) -> TaskChange:
    """Returns the change to an immediate retry with a better rank; to DEAD if no try is left."""
    del command
    failure = Failure(message="hung: no progress after the warning", error_class=ErrorClass.TIMEOUT)
    record = attempt_record(
        task, context, Outcome.ABORTED, failure, unconfirmed=_may_outlive_attempt(task)
    )
    return schedule_retry(task, context, record, 0.0, "aborted", rank=task.rank - AGING_MS)


def _park(
    task: Task,
    context: DecisionContext,
    record: AttemptRecord,
    hold: str,
    resume_at: datetime | None,
    wait_until: datetime | None,
    counters: dict[str, Any],
) -> TaskChange:
    """Returns the change to WAITING with this hold, owned by no agent or worker."""
    return build_change(
        task,
        context,
        "parked",
        message=f"waits for {hold}",
        data={"hold": hold, "resume_at": resume_at, "wait_until": wait_until},
        record=record,
        **{
            **OWNER_CLEARED,
            "status": Status.WAITING,
            "hold": hold,
            "resume_at": resume_at,
            "wait_until": wait_until,
            "last_outcome": Outcome.PARKED,
            "losses": 0,
            **counters,
        },
    )


def park(task: Task, command: c.Park, context: DecisionContext) -> TaskChange:
    """Returns the change to WAITING; to DEAD after too many parks without a new checkpoint."""
    record = attempt_record(task, context, Outcome.PARKED)
    counters = without_counting_try(task)
    if has_no_try_left(task, counters["tries"]):
        return mark_dead(
            task, context, record, "parked too often without a new checkpoint", **counters
        )
    return _park(
        task, context, record, command.hold, command.resume_at, command.wait_until, counters
    )


def unpark(task: Task, command: c.Unpark, context: DecisionContext) -> TaskChange:
    """Returns the change without hold, to PENDING if ready; `Conflict` if it is not parked."""
    if not is_parked(task):
        raise Conflict(f"task {task.id} is not parked by its handler")
    cleared: dict[str, Any] = {"hold": None, "resume_at": None, "wait_until": None}
    if command.progress:
        cleared["free_ends"] = 0
    becomes_ready = task.status is Status.WAITING and is_ready(
        replace_fields(task, **cleared), context.now
    )
    return build_change(
        task,
        context,
        "ready" if becomes_ready else "unblocked",
        message=None if command.progress else f"waited long enough for {task.hold}",
        status=Status.PENDING if becomes_ready else task.status,
        **cleared,
    )


def release(task: Task, command: c.Release, context: DecisionContext) -> TaskChange:
    """Returns the change to PENDING; to DEAD after too many releases without a new checkpoint."""
    del command
    record = attempt_record(task, context, Outcome.RELEASED)
    counters = without_counting_try(task)
    if has_no_try_left(task, counters["tries"]):
        return mark_dead(
            task, context, record, "released too often without a new checkpoint", **counters
        )
    return build_change(
        task,
        context,
        "released",
        record=record,
        status=Status.PENDING,
        last_outcome=Outcome.RELEASED,
        losses=0,
        **OWNER_CLEARED,
        **counters,
    )


def make_ready(task: Task, command: c.Ready, context: DecisionContext) -> TaskChange:
    """Returns the change to PENDING; raises `Conflict` if the task still waits."""
    del command
    unblocked = without_elapsed_hold(task, context)
    if not is_ready(unblocked, context.now):
        raise Conflict(
            f"task {task.id} still waits for {task.hold or 'other tasks or its start time'}"
        )
    cleared: dict[str, Any] = {"hold": None, "resume_at": None, "wait_until": None}
    return build_change(task, context, "ready", status=Status.PENDING, **cleared)


def make_retry_pending(task: Task, command: c.RetryDue, context: DecisionContext) -> TaskChange:
    """Returns the change to PENDING; raises `Conflict` if the retry is not due yet."""
    del command
    if task.next_attempt_at is not None and task.next_attempt_at > context.now:
        raise Conflict(f"the retry of task {task.id} is not due yet")
    return build_change(task, context, "due", status=Status.PENDING, next_attempt_at=None)
