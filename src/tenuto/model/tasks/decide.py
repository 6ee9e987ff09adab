"""`decide`: what a command makes of a task. Pure; the store applies the answer or nothing.

`None` means that the very same attempt already had this very command accepted: a repeated
message, to be answered like the first.
"""

import hashlib
from collections.abc import Callable
from datetime import datetime
from functools import lru_cache
from typing import Any, cast

from tenuto.model.errors import Conflict
from tenuto.model.tasks import attempts, user_commands
from tenuto.model.tasks import commands as c
from tenuto.model.tasks.changes import is_parked, unheld
from tenuto.model.tasks.commands import AttemptCommand, Command, DecisionContext
from tenuto.model.tasks.task import (
    LEASED,
    TERMINAL,
    TRANSITIONS,
    Outcome,
    Status,
    Task,
    TaskChange,
    hung_deadline,
    is_ready,
    is_silent,
    queue_expiry,
    run_deadline,
)


@lru_cache(maxsize=4096)
def token_hash(token: str) -> str:
    """What the store keeps of a lease token; of what can be none, something that no token has."""
    return hashlib.sha256(token.encode(errors="surrogatepass")).hexdigest()[:32]


def decide(task: Task, command: Command, moment: DecisionContext) -> TaskChange | None:
    """The change that `command` makes to `task` now; raises `Conflict` when it may not."""
    if isinstance(command, AttemptCommand):
        if _is_repeat(task, command):
            return None
        _check_fence(task, command)
    elif command.name in TRANSITIONS:
        _check_source(task, command)
    made = _DECIDERS[type(command)](task, command, moment)
    _assert_legal(task, command, made)
    return made


def on_due(task: Task, moment: DecisionContext) -> Command | None:
    """The command that a task's earliest timer calls for now, if any."""
    now = moment.now
    expiry = queue_expiry(task)
    if task.status in LEASED:
        return _on_due_leased(task, moment)
    if task.status in TERMINAL or task.status is Status.PAUSED:
        return None
    if expiry is not None and expiry <= now:
        return c.FailWithoutAttempt(code="queue_ttl", message="waited longer than its queue TTL")
    if task.status is Status.RETRY_WAIT:
        due = task.next_attempt_at is None or task.next_attempt_at <= now
        return c.RetryDue() if due else None
    return _on_due_waiting(task, moment)


def _on_due_waiting(task: Task, moment: DecisionContext) -> Command | None:
    now = moment.now
    if is_ready(unheld(task, moment), now):
        return c.Ready() if task.status is Status.WAITING else None
    if task.hold is not None and task.wait_until is not None and task.wait_until <= now:
        return _on_wait_over(task)
    return None


def _on_wait_over(task: Task) -> Command:
    """What comes of a wait that was too long; a hold may say after a colon what is to."""
    what, *then = (task.hold or "").split(":")
    if is_parked(task):
        # A question that nobody answered is answered for them, once: only children did nothing.
        return c.Unpark(progress=what != "children")
    message = f"nobody answered in time: {then[0] if then else 'rejected'}"
    if "approve" in then:
        output = '{"decision": "approved", "by": "timeout"}'
        return c.Resolve(status=Status.COMPLETED, output=output, message=message)
    if "skip" in then:
        return c.Resolve(status=Status.SKIPPED, message=message)
    return c.FailWithoutAttempt(code="wait_expired", message=f"waited too long for {what}")


def _on_due_leased(task: Task, moment: DecisionContext) -> Command | None:
    now = moment.now
    for requested in (task.cancel_requested_at, task.pause_requested_at):
        if requested is not None:
            return c.Expire() if is_silent(task, requested, now) else None
    if task.status is not Status.RUNNING or task.started_at is None:
        return None
    if task.timeout_s is not None and run_deadline(task) <= now:
        return c.ForceTimeOut()
    if task.estimate_minutes is not None and hung_deadline(task) <= now:
        return c.WarnHung() if task.hung_warned_at is None else c.Abort()
    return None


_ENDS_WITH: dict[type[AttemptCommand], frozenset[Outcome]] = {
    c.Complete: frozenset({Outcome.COMPLETED}),
    c.Fail: frozenset({Outcome.FAILED, Outcome.PARKED, Outcome.TIMED_OUT}),
    c.NotStarted: frozenset({Outcome.NOT_STARTED}),
    c.TimedOut: frozenset({Outcome.TIMED_OUT}),
    c.Park: frozenset({Outcome.PARKED}),
    c.Release: frozenset({Outcome.RELEASED}),
    c.ConfirmCancel: frozenset({Outcome.CANCELLED}),
    c.ConfirmPause: frozenset({Outcome.PAUSED}),
}


def is_current_fence(task: Task, command: AttemptCommand) -> bool:
    """Whether the fence is that of the task's latest attempt."""
    fence = command.fence
    return task.attempt == fence.attempt and task.lease_token == token_hash(fence.token)


def _is_repeat(task: Task, command: AttemptCommand) -> bool:
    if not is_current_fence(task, command):
        return False
    if isinstance(command, c.Begin):
        return task.status is Status.RUNNING and task.session_key == command.session_key
    if task.status in LEASED or task.last_outcome not in _ENDS_WITH[type(command)]:
        return False
    if task.last_outcome == Outcome.PARKED:
        hold = command.hold if isinstance(command, c.Park) else "quota"
        return task.hold == hold and task.resume_at == getattr(command, "resume_at", None)
    return True


def _check_fence(task: Task, command: AttemptCommand) -> None:
    if task.status not in LEASED or not is_current_fence(task, command):
        raise Conflict(f"attempt {command.fence.attempt} no longer owns the task", "lease_lost")
    if isinstance(command, c.ConfirmCancel):
        _check_requested(command, task.cancel_requested_at)
        return
    if task.cancel_requested_at is not None:
        raise Conflict("the task is being cancelled", "cancel_requested")
    if isinstance(command, c.ConfirmPause):
        _check_requested(command, task.pause_requested_at)
        return
    if task.pause_requested_at is not None:
        raise Conflict("the task is being paused", "pause_requested")
    _check_source(task, command)


def _check_requested(command: AttemptCommand, requested: datetime | None) -> None:
    if requested is None:
        raise Conflict(f"nobody asked to {command.name} the task")


def _check_source(task: Task, command: Command) -> None:
    if not any(source is task.status for source, _ in TRANSITIONS[command.name]):
        raise Conflict(f"cannot {command.name.replace('_', ' ')} a task that is {task.status}")


def _assert_legal(task: Task, command: Command, made: TaskChange) -> None:
    after = made.task
    assert after.version == task.version + 1
    if after.status is not task.status:
        assert (task.status, after.status) in TRANSITIONS[command.name], (command, after.status)
    assert (made.end is not None) == (task.status in LEASED and after.status not in LEASED)


_Decider = Callable[[Task, Any, DecisionContext], TaskChange]
_DECIDERS = cast(
    dict[type[Command], _Decider],
    {
        c.Begin: attempts.begin,
        c.Complete: attempts.complete,
        c.Fail: attempts.fail,
        c.NotStarted: attempts.not_started,
        c.TimedOut: attempts.timed_out,
        c.ForceTimeOut: attempts.overrun,
        c.Park: attempts.park,
        c.Release: attempts.release,
        c.ConfirmCancel: user_commands.confirm_cancel,
        c.ConfirmPause: user_commands.confirm_pause,
        c.Expire: attempts.expire,
        c.WarnHung: attempts.warn_hung,
        c.Abort: attempts.abort,
        c.Ready: attempts.ready,
        c.RetryDue: attempts.due,
        c.Pause: user_commands.pause,
        c.PauseForBudget: user_commands.exceed,
        c.Resume: user_commands.resume,
        c.Cancel: user_commands.cancel,
        c.Skip: user_commands.skip,
        c.FailWithoutAttempt: user_commands.fail_without_attempt,
        c.Retry: user_commands.retry,
        c.Reopen: user_commands.revive,
        c.DependenciesMet: user_commands.met,
        c.ClearHold: user_commands.turn,
        c.Unpark: attempts.wake,
        c.AwaitAnswer: user_commands.ask,
        c.AddDependency: user_commands.block,
        c.Resolve: user_commands.decided,
        c.Archive: user_commands.archive,
        c.SetPriority: user_commands.reprioritise,
        c.Assign: user_commands.assign,
        c.Edit: user_commands.edit,
        c.StartNow: user_commands.start,
        c.DeletePayload: user_commands.erase,
    },
)
