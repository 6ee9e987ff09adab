"""`decide`: what a command makes of a task. Pure; the store applies the answer or nothing.

`None` means that the very same attempt already had this very command accepted: a repeated
message, to be answered like the first.
"""

import hashlib
from collections.abc import Callable
from datetime import timedelta
from functools import lru_cache
from typing import Any, cast

import msgspec

from tenuto.model import commands as c
from tenuto.model.commands import Command, Failure, Fenced, Moment
from tenuto.model.errors import Conflict
from tenuto.model.retry import (
    ALERTING,
    ATTEMPT_CAP,
    FREE_ENDS,
    PERMANENT,
    RATE_LIMIT,
    ErrorClass,
    backoff,
    longer_timeout,
)
from tenuto.model.task import (
    AGING_MS,
    LEASED,
    TERMINAL,
    TRANSITIONS,
    AttemptEnd,
    Change,
    Event,
    Outcome,
    Status,
    Task,
    answer_deadline,
    due_at,
    hung_deadline,
    is_ready,
    queue_expiry,
    rank,
    run_deadline,
    watch_seconds,
)


@lru_cache(maxsize=4096)
def token_hash(token: str) -> str:
    """What the store keeps of a lease token."""
    return hashlib.sha256(token.encode()).hexdigest()[:32]


def decide(task: Task, command: Command, moment: Moment) -> Change | None:
    """The change that `command` makes to `task` now; raises `Conflict` when it may not."""
    if isinstance(command, Fenced):
        if _repeats(task, command):
            return None
        _check_fence(task, command)
    elif command.name in TRANSITIONS:
        _check_source(task, command)
    change = _DECIDERS[type(command)](task, command, moment)
    _assert_legal(task, command, change)
    return change


def on_due(task: Task, moment: Moment) -> Command | None:
    """The command that a task's earliest timer calls for now, if any."""
    now = moment.now
    expiry = queue_expiry(task)
    if task.status in LEASED:
        return _on_due_leased(task, moment)
    if task.status in TERMINAL or task.status is Status.PAUSED:
        return None
    if expiry is not None and expiry <= now:
        return c.Refuse(code="queue_ttl", message="waited longer than its queue TTL")
    if task.status is Status.RETRY_WAIT:
        due = task.next_attempt_at is None or task.next_attempt_at <= now
        return c.Due() if due else None
    if task.status is Status.WAITING and is_ready(_unheld(task, moment), now):
        return c.Ready()
    return None


def _on_due_leased(task: Task, moment: Moment) -> Command | None:
    now = moment.now
    for requested in (task.cancel_requested_at, task.pause_requested_at):
        if requested is not None:
            return c.Expire() if answer_deadline(task, requested) <= now else None
    if task.status is not Status.RUNNING or task.started_at is None:
        return None
    if task.timeout_s is not None and run_deadline(task) <= now:
        return c.Overrun()
    if task.estimate_minutes is not None and hung_deadline(task) <= now:
        return c.WarnHung() if task.hung_warned_at is None else c.Abort()
    return None


def _unheld(task: Task, moment: Moment) -> Task:
    """The task with a hold dropped whose time has come."""
    if task.hold is not None and task.resume_at is not None and task.resume_at <= moment.now:
        return _with(task, hold=None, resume_at=None)
    return task


_ENDS_WITH: dict[type[Fenced], frozenset[Outcome]] = {
    c.Complete: frozenset({Outcome.COMPLETED}),
    c.Fail: frozenset({Outcome.FAILED, Outcome.PARKED}),
    c.NotStarted: frozenset({Outcome.NOT_STARTED}),
    c.TimedOut: frozenset({Outcome.TIMED_OUT}),
    c.Park: frozenset({Outcome.PARKED}),
    c.Release: frozenset({Outcome.RELEASED}),
    c.ConfirmCancel: frozenset({Outcome.CANCELLED}),
    c.ConfirmPause: frozenset({Outcome.PAUSED}),
}


def holds(task: Task, command: Fenced) -> bool:
    """Whether the fence is that of the task's latest attempt."""
    fence = command.fence
    return task.attempt == fence.attempt and task.lease_token == token_hash(fence.token)


def _repeats(task: Task, command: Fenced) -> bool:
    if not holds(task, command):
        return False
    if isinstance(command, c.Begin):
        return task.status is Status.RUNNING and task.session_key == command.session_key
    return task.status not in LEASED and task.last_outcome in _ENDS_WITH[type(command)]


def _check_fence(task: Task, command: Fenced) -> None:
    if task.status not in LEASED or not holds(task, command):
        raise Conflict(f"attempt {command.fence.attempt} no longer owns the task", "lease_lost")
    if isinstance(command, c.ConfirmCancel | c.ConfirmPause):
        asked = isinstance(command, c.ConfirmCancel)
        if (task.cancel_requested_at if asked else task.pause_requested_at) is None:
            raise Conflict(f"nobody asked to {command.name} the task")
        return
    if task.cancel_requested_at is not None:
        raise Conflict("the task is being cancelled", "cancel_requested")
    if task.pause_requested_at is not None:
        raise Conflict("the task is being paused", "pause_requested")
    _check_source(task, command)


def _check_source(task: Task, command: Command) -> None:
    if not any(source is task.status for source, _ in TRANSITIONS[command.name]):
        raise Conflict(f"cannot {command.name.replace('_', ' ')} a task that is {task.status}")


def _assert_legal(task: Task, command: Command, change: Change) -> None:
    after = change.task
    assert after.version == task.version + 1
    if after.status is not task.status:
        assert (task.status, after.status) in TRANSITIONS[command.name], (command, after.status)
    assert (change.end is not None) == (task.status in LEASED and after.status not in LEASED)


def _with(task: Task, **changes: Any) -> Task:
    return msgspec.structs.replace(task, **changes)


def _change(
    task: Task,
    moment: Moment,
    kind: str,
    *,
    level: str = "INFO",
    message: str | None = None,
    data: dict[str, Any] | None = None,
    stack: str | None = None,
    end: AttemptEnd | None = None,
    **changes: Any,
) -> Change:
    """The next version of the task with its event; timers follow from the new row."""
    after = _with(task, version=task.version + 1, updated_at=moment.now, **changes)
    after = _with(after, due_at=due_at(after))
    event = Event(
        kind=kind,
        level=level,
        message=message,
        previous=task.status,
        new=after.status,
        attempt=task.attempt,
        agent=task.agent,
        actor=moment.actor,
        session_key=task.session_key,
        stack_trace=stack,
        data=data,
    )
    return Change(after, event, end)


def _end(
    task: Task,
    moment: Moment,
    outcome: Outcome,
    failure: Failure | None = None,
    receipt: dict[str, Any] | None = None,
    *,
    unconfirmed: bool = False,
) -> AttemptEnd:
    return AttemptEnd(
        outcome=outcome,
        attempt=task.attempt,
        agent=task.agent,
        worker=task.worker,
        session_key=task.session_key,
        started_at=task.started_at,
        ended_at=moment.now,
        error_class=failure.error_class if failure else None,
        message=failure.message if failure else None,
        stack=failure.stack if failure else None,
        exit_code=failure.exit_code if failure else None,
        receipt=receipt,
        unconfirmed=unconfirmed,
    )


# What ending an attempt does to the row, whatever the command. `lease_token` stays until the next
# claim, so that a repeated message of the same attempt is recognised.
_UNLEASED: dict[str, Any] = {
    "lease_until": None,
    "cancel_requested_at": None,
    "pause_requested_at": None,
    "hung_warned_at": None,
}
_DISOWNED: dict[str, Any] = {
    **_UNLEASED,
    "agent": None,
    "worker": None,
    "session_key": None,
    "started_at": None,
}


def _given_back(task: Task) -> dict[str, Any]:
    """Counters after an end that should not cost a try, while such ends are still free."""
    in_a_row = 1 if task.checkpoint_seq > task.free_mark else task.free_ends + 1
    tries = task.tries - 1 if in_a_row <= FREE_ENDS else task.tries
    return {"tries": tries, "free_ends": in_a_row, "free_mark": task.checkpoint_seq}


def _spent(task: Task, tries: int) -> bool:
    """No further attempt may start: tries used up, or the fence's numbers are."""
    return tries >= task.max_attempts or task.attempt >= ATTEMPT_CAP


def _dead(task: Task, moment: Moment, end: AttemptEnd, why: str, **changes: Any) -> Change:
    return _change(
        task,
        moment,
        "dead",
        level="ERROR",
        message=why,
        data={"outcome": end.outcome, "tries": changes.get("tries", task.tries)},
        stack=end.stack,
        end=end,
        **{
            **_UNLEASED,
            "status": Status.DEAD,
            "finished_at": moment.now,
            "last_outcome": end.outcome,
            "last_error": why,
            "error_class": end.error_class or "lost",
            "free_ends": 0,
            **changes,
        },
    )


def _again(
    task: Task, moment: Moment, end: AttemptEnd, delay_s: float, kind: str, **changes: Any
) -> Change:
    """Back to the queue after `delay_s`, or DEAD when no try is left."""
    why = end.message or kind.replace("_", " ")
    tries = changes.get("tries", task.tries)
    if _spent(task, tries):
        return _dead(task, moment, end, why, **changes)
    at = moment.now + timedelta(seconds=delay_s)
    return _change(
        task,
        moment,
        kind,
        level="WARN",
        message=why,
        data={
            "outcome": end.outcome,
            "next_attempt_at": at,
            "backoff_ms": round(delay_s * 1000),
            "error_class": end.error_class,
        },
        stack=end.stack,
        end=end,
        **{
            **_DISOWNED,
            "status": Status.RETRY_WAIT,
            "next_attempt_at": at,
            "last_outcome": end.outcome,
            "last_error": why,
            "error_class": end.error_class,
            "free_ends": 0,
            "losses": 0,
            **changes,
        },
    )


def _begin(task: Task, command: c.Begin, moment: Moment) -> Change:
    changes: dict[str, Any] = {"session_key": command.session_key, "status": Status.RUNNING}
    return _change(task, moment, "started", started_at=moment.now, **changes)


def _complete(task: Task, command: c.Complete, moment: Moment) -> Change:
    del command
    return _change(
        task,
        moment,
        "completed",
        end=_end(task, moment, Outcome.COMPLETED),
        status=Status.COMPLETED,
        finished_at=moment.now,
        last_outcome=Outcome.COMPLETED,
        **_UNLEASED,
    )


def _fail(task: Task, command: c.Fail, moment: Moment) -> Change:
    failure = command.failure
    if failure.error_class is ErrorClass.TIMEOUT:
        return _too_long(task, moment, failure, None)
    if failure.error_class is ErrorClass.RATE_LIMIT and failure.retryable is not False:
        return _rate_limited(task, command, moment)
    end = _end(task, moment, Outcome.FAILED, failure)
    permanent = failure.error_class in PERMANENT
    if failure.retryable is False or (permanent and failure.retryable is None):
        return _failed(task, moment, end, failure)
    delay = backoff(task.policy, task.tries, moment.roll)
    return _again(task, moment, end, delay, "retry_scheduled")


def _failed(task: Task, moment: Moment, end: AttemptEnd, failure: Failure) -> Change:
    return _change(
        task,
        moment,
        "failed",
        level="CRITICAL" if failure.error_class in ALERTING else "ERROR",
        message=failure.message,
        data={"error_class": failure.error_class, "outcome": end.outcome},
        stack=failure.stack,
        end=end,
        **{
            **_UNLEASED,
            "status": Status.FAILED,
            "finished_at": moment.now,
            "last_outcome": end.outcome,
            "last_error": failure.message,
            "error_class": failure.error_class,
        },
    )


def _rate_limited(task: Task, command: c.Fail, moment: Moment) -> Change:
    """A provider's limit costs no try: parked until a known reset, else its own backoff."""
    back = _given_back(task)
    if command.resume_at is not None:
        end = _end(task, moment, Outcome.PARKED, command.failure)
        if _spent(task, back["tries"]):
            return _dead(task, moment, end, command.failure.message, **back)
        return _parked(task, moment, end, "quota", command.resume_at, None, back)
    end = _end(task, moment, Outcome.FAILED, command.failure)
    delay = backoff(RATE_LIMIT, back["free_ends"], moment.roll)
    return _again(task, moment, end, delay, "retry_scheduled", **back)


def _too_long(
    task: Task, moment: Moment, failure: Failure, receipt: dict[str, Any] | None
) -> Change:
    end = _end(task, moment, Outcome.TIMED_OUT, failure, receipt)
    timeout_s = longer_timeout(task.timeout_s)
    return _again(
        task,
        moment,
        end,
        backoff(task.policy, task.tries, moment.roll),
        "timed_out",
        timeout_s=timeout_s,
        watch_s=watch_seconds(timeout_s, task.estimate_minutes),
    )


def _timeout_failure(task: Task) -> Failure:
    return Failure(
        message=f"ran longer than its timeout of {task.timeout_s} s",
        error_class=ErrorClass.TIMEOUT,
    )


def _timed_out(task: Task, command: c.TimedOut, moment: Moment) -> Change:
    return _too_long(task, moment, _timeout_failure(task), command.receipt)


def _overrun(task: Task, command: c.Overrun, moment: Moment) -> Change:
    del command
    return _too_long(task, moment, _timeout_failure(task), {"state": "unconfirmed"})


def _not_started(task: Task, command: c.NotStarted, moment: Moment) -> Change:
    failure = command.failure
    end = _end(task, moment, Outcome.NOT_STARTED, failure)
    back = _given_back(task)
    if failure.retryable is False:
        return _failed(task, moment, end, failure)
    if back["free_ends"] >= FREE_ENDS:
        why = f"could not be started {FREE_ENDS} times in a row: {failure.message}"
        final = msgspec.structs.replace(failure, message=why, error_class=ErrorClass.OUT_OF_MEMORY)
        change = _failed(task, moment, end, final)
        data = {"error_class": "cannot_start", "outcome": end.outcome}
        return Change(
            _with(change.task, error_class="cannot_start"),
            msgspec.structs.replace(change.event, data=data),
            end,
        )
    delay = backoff(task.policy, back["free_ends"], moment.roll)
    return _again(task, moment, end, delay, "not_started", **back)


def _expire(task: Task, command: c.Expire, moment: Moment) -> Change:
    unconfirmed = {"state": "unconfirmed"}
    if task.cancel_requested_at is not None:
        return _cancelled(task, moment, unconfirmed)
    if task.pause_requested_at is not None:
        return _paused(task, moment, unconfirmed)
    why = "the worker was seen to die" if command.seen_dead else "the lease expired"
    failure = Failure(message=why, error_class=ErrorClass.CRASH)
    end = _end(task, moment, Outcome.STALLED, failure)
    losses = task.losses + 1
    delay = 0.0 if losses == 1 else backoff(task.policy, losses - 1, moment.roll)
    return _again(task, moment, end, delay, "lease_expired", losses=losses)


def _warn_hung(task: Task, command: c.WarnHung, moment: Moment) -> Change:
    del command
    return _change(
        task,
        moment,
        "hung_warned",
        level="WARN",
        message="runs far past its estimate; aborted unless it reports progress",
        hung_warned_at=moment.now,
    )


def _abort(task: Task, command: c.Abort, moment: Moment) -> Change:
    del command
    failure = Failure(message="hung: no progress after the warning", error_class=ErrorClass.TIMEOUT)
    end = _end(task, moment, Outcome.ABORTED, failure)
    return _again(task, moment, end, 0.0, "aborted", rank=task.rank - AGING_MS)


def _parked(
    task: Task,
    moment: Moment,
    end: AttemptEnd,
    hold: str,
    resume_at: Any,
    wait_until: Any,
    counters: dict[str, Any],
) -> Change:
    return _change(
        task,
        moment,
        "parked",
        message=f"waits for {hold}",
        data={"hold": hold, "resume_at": resume_at, "wait_until": wait_until},
        end=end,
        **{
            **_DISOWNED,
            "status": Status.WAITING,
            "hold": hold,
            "resume_at": resume_at,
            "wait_until": wait_until,
            "last_outcome": Outcome.PARKED,
            "losses": 0,
            **counters,
        },
    )


def _park(task: Task, command: c.Park, moment: Moment) -> Change:
    end = _end(task, moment, Outcome.PARKED)
    back = _given_back(task)
    if _spent(task, back["tries"]):
        return _dead(task, moment, end, "parked too often without a new checkpoint", **back)
    return _parked(task, moment, end, command.hold, command.resume_at, command.wait_until, back)


def _release(task: Task, command: c.Release, moment: Moment) -> Change:
    del command
    end = _end(task, moment, Outcome.RELEASED)
    back = _given_back(task)
    if _spent(task, back["tries"]):
        return _dead(task, moment, end, "released too often without a new checkpoint", **back)
    return _change(
        task,
        moment,
        "released",
        end=end,
        status=Status.PENDING,
        last_outcome=Outcome.RELEASED,
        **_DISOWNED,
        **back,
    )


def _ready(task: Task, command: c.Ready, moment: Moment) -> Change:
    del command
    free = _unheld(task, moment)
    if not is_ready(free, moment.now):
        raise Conflict("the task still waits")
    cleared: dict[str, Any] = {"hold": None, "resume_at": None, "wait_until": None}
    return _change(task, moment, "ready", status=Status.PENDING, **cleared)


def _due(task: Task, command: c.Due, moment: Moment) -> Change:
    del command
    if task.next_attempt_at is not None and task.next_attempt_at > moment.now:
        raise Conflict("the retry is not due yet")
    return _change(task, moment, "due", status=Status.PENDING, next_attempt_at=None)


def _pause(task: Task, command: c.Pause, moment: Moment) -> Change:
    if task.status in LEASED:
        if task.cancel_requested_at is not None:
            raise Conflict("the task is being cancelled", "cancel_requested")
        requested = task.pause_requested_at or moment.now
        return _change(
            task, moment, "pause_requested", message=command.reason, pause_requested_at=requested
        )
    return _change(task, moment, "paused", message=command.reason, status=Status.PAUSED)


def _paused(task: Task, moment: Moment, receipt: dict[str, Any]) -> Change:
    # A person may pause as often as they like: the try always comes back.
    tries = task.tries - 1
    return _change(
        task,
        moment,
        "paused",
        data={"receipt": receipt},
        end=_end(
            task,
            moment,
            Outcome.PAUSED,
            receipt=receipt,
            unconfirmed=receipt.get("state") == "unconfirmed",
        ),
        status=Status.PAUSED,
        last_outcome=Outcome.PAUSED,
        tries=tries,
        **_DISOWNED,
    )


def _confirm_pause(task: Task, command: c.ConfirmPause, moment: Moment) -> Change:
    return _paused(task, moment, command.receipt)


def _resume(task: Task, command: c.Resume, moment: Moment) -> Change:
    del command
    status = Status.PENDING if is_ready(_unheld(task, moment), moment.now) else Status.WAITING
    if status is Status.PENDING and task.next_attempt_at and task.next_attempt_at > moment.now:
        status = Status.RETRY_WAIT
    cleared: dict[str, Any] = {}
    if status is Status.PENDING:
        cleared = {"hold": None, "resume_at": None, "wait_until": None, "next_attempt_at": None}
    return _change(task, moment, "resumed", status=status, **cleared)


def _cancel(task: Task, command: c.Cancel, moment: Moment) -> Change:
    if task.status in LEASED:
        requested = task.cancel_requested_at or moment.now
        return _change(
            task, moment, "cancel_requested", message=command.reason, cancel_requested_at=requested
        )
    return _change(
        task,
        moment,
        "cancelled",
        message=command.reason,
        status=Status.CANCELLED,
        finished_at=moment.now,
    )


def _cancelled(task: Task, moment: Moment, receipt: dict[str, Any]) -> Change:
    unconfirmed = receipt.get("state") == "unconfirmed"
    end = _end(task, moment, Outcome.CANCELLED, receipt=receipt, unconfirmed=unconfirmed)
    return _change(
        task,
        moment,
        "cancelled",
        level="WARN" if unconfirmed else "INFO",
        data={"receipt": receipt},
        end=end,
        status=Status.CANCELLED,
        finished_at=moment.now,
        last_outcome=Outcome.CANCELLED,
        **_UNLEASED,
    )


def _confirm_cancel(task: Task, command: c.ConfirmCancel, moment: Moment) -> Change:
    return _cancelled(task, moment, command.receipt)


def _skip(task: Task, command: c.Skip, moment: Moment) -> Change:
    return _change(
        task,
        moment,
        "skipped",
        message=command.reason,
        status=Status.SKIPPED,
        finished_at=moment.now,
    )


def _refuse(task: Task, command: c.Refuse, moment: Moment) -> Change:
    return _change(
        task,
        moment,
        "failed",
        level="ERROR",
        message=command.message,
        data={"error_class": command.code},
        status=Status.FAILED,
        finished_at=moment.now,
        last_error=command.message,
        error_class=command.code,
    )


def _retry(task: Task, command: c.Retry, moment: Moment) -> Change:
    del command
    if task.attempt >= ATTEMPT_CAP:
        raise Conflict(f"the task had {ATTEMPT_CAP} attempts; rerun it instead", "attempts_used_up")
    status = Status.PENDING if is_ready(task, moment.now) else Status.WAITING
    reset: dict[str, Any] = {
        "tries": 0,
        "free_ends": 0,
        "losses": 0,
        "finished_at": None,
        "archived_at": None,
        "next_attempt_at": None,
        "error_class": None,
        "agent": None,
        "worker": None,
        "session_key": None,
        "started_at": None,
    }
    return _change(task, moment, "retried", status=status, **reset)


def _archive(task: Task, command: c.Archive, moment: Moment) -> Change:
    del command
    if task.status not in TERMINAL:
        raise Conflict(f"cannot archive a task that is {task.status}")
    if task.archived_at is not None:
        raise Conflict("the task is archived already")
    return _change(task, moment, "archived", archived_at=moment.now)


def _reprioritise(task: Task, command: c.Reprioritise, moment: Moment) -> Change:
    if task.status in TERMINAL:
        raise Conflict(f"cannot change the priority of a task that is {task.status}")
    base = max(task.created_at, task.run_at or task.created_at)
    return _change(
        task,
        moment,
        "priority_changed",
        data={"from": task.priority, "to": command.priority},
        priority=command.priority,
        rank=rank(command.priority, base, task.estimate_minutes),
    )


_Decider = Callable[[Task, Any, Moment], Change]
_DECIDERS = cast(
    dict[type[Command], _Decider],
    {
        c.Begin: _begin,
        c.Complete: _complete,
        c.Fail: _fail,
        c.NotStarted: _not_started,
        c.TimedOut: _timed_out,
        c.Overrun: _overrun,
        c.Park: _park,
        c.Release: _release,
        c.ConfirmCancel: _confirm_cancel,
        c.ConfirmPause: _confirm_pause,
        c.Expire: _expire,
        c.WarnHung: _warn_hung,
        c.Abort: _abort,
        c.Ready: _ready,
        c.Due: _due,
        c.Pause: _pause,
        c.Resume: _resume,
        c.Cancel: _cancel,
        c.Skip: _skip,
        c.Refuse: _refuse,
        c.Retry: _retry,
        c.Archive: _archive,
        c.Reprioritise: _reprioritise,
    },
)
