"""`decide` returns the change that a command makes to a task. Pure; the store applies the result.

`None` means that the same attempt already had the same command accepted. The message is a repeat
and gets the same response as the first one.
"""

from collections.abc import Callable
from datetime import datetime
from typing import Any, cast

from tenuto.model.errors import Conflict
from tenuto.model.tasks import attempts, user_commands
from tenuto.model.tasks import commands as c
from tenuto.model.tasks.changes import is_parked, without_elapsed_hold
from tenuto.model.tasks.commands import AttemptCommand, Command, DecisionContext
from tenuto.model.tasks.retry import RULES
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
    is_stop_overdue,
    queue_expires_at,
    run_deadline,
    token_hash,
)


def decide(task: Task, command: Command, context: DecisionContext) -> TaskChange | None:
    """Returns the change by `command`, `None` for a repeat; `Conflict` if it is not allowed now."""
    if isinstance(command, AttemptCommand):
        if _is_repeat(task, command):
            return None
        _check_fence(task, command)
    elif command.name in TRANSITIONS:
        _check_status(task, command)
    change = _DECIDERS[type(command)](task, command, context)
    _assert_legal(task, command, change)
    return change


def due_command(task: Task, context: DecisionContext) -> Command | None:
    """Returns the command for the task's earliest timer if it is due now, else `None`."""
    now = context.now
    expires_at = queue_expires_at(task)
    if task.status in LEASED:
        return _due_command_leased(task, context)
    if task.status in TERMINAL or task.status is Status.PAUSED:
        return None
    if expires_at is not None and expires_at <= now:
        return c.FailWithoutAttempt(code="queue_ttl", message="waited longer than its queue TTL")
    if task.status is Status.RETRY_WAIT:
        is_due = task.next_attempt_at is None or task.next_attempt_at <= now
        return c.RetryDue() if is_due else None
    return _due_command_waiting(task, context)


def _due_command_waiting(task: Task, context: DecisionContext) -> Command | None:
    now = context.now
    if is_ready(without_elapsed_hold(task, context), now):
        return c.Ready() if task.status is Status.WAITING else None
    if task.hold is not None and task.wait_until is not None and task.wait_until <= now:
        return _command_for_expired_wait(task)
    return None


def _command_for_expired_wait(task: Task) -> Command:
    """Returns the command for a task whose wait is longer than allowed.

    Words after a colon in the hold choose the outcome: `approval:approve` completes the task,
    `approval:skip` skips it; otherwise it fails. A parked task continues instead.
    """
    hold, *actions = (task.hold or "").split(":")
    if is_parked(task):
        # An unanswered question is answered once, by the timeout: that is progress. Children that
        # did not finish in time made none.
        return c.Unpark(progress=hold != "children")
    message = f"no answer in time: {actions[0] if actions else 'rejected'}"
    if "approve" in actions:
        output = '{"decision": "approved", "by": "timeout"}'
        return c.Resolve(status=Status.COMPLETED, output=output, message=message)
    if "skip" in actions:
        return c.Resolve(status=Status.SKIPPED, message=message)
    return c.FailWithoutAttempt(code="wait_expired", message=f"waited too long for {hold}")


def _due_command_leased(task: Task, context: DecisionContext) -> Command | None:
    now = context.now
    for requested_at in (task.cancel_requested_at, task.pause_requested_at):
        if requested_at is not None:
            return c.Expire() if is_stop_overdue(task, requested_at, now) else None
    if task.status is not Status.RUNNING or task.started_at is None:
        return None
    if task.timeout_s is not None and run_deadline(task) <= now:
        return c.ForceTimeOut()
    if task.estimate_minutes is not None and hung_deadline(task) <= now:
        return c.WarnHung() if task.hung_warned_at is None else c.Abort()
    return None


_OUTCOMES_OF: dict[type[AttemptCommand], frozenset[Outcome]] = {
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
    """True if the command's fence belongs to the task's latest attempt."""
    fence = command.fence
    return task.attempt == fence.attempt and task.lease_token == token_hash(fence.token)


def _is_repeat(task: Task, command: AttemptCommand) -> bool:
    """True if this attempt had the same command accepted before."""
    if not is_current_fence(task, command):
        return False
    if isinstance(command, c.Begin):
        return task.status is Status.RUNNING and task.session_key == command.session_key
    if task.status in LEASED or task.last_outcome not in _OUTCOMES_OF[type(command)]:
        return False
    if task.last_outcome == Outcome.PARKED:
        hold = command.hold if isinstance(command, c.Park) else "quota"
        return task.hold == hold and _is_same_resume_time(task, command)
    return True


def _is_same_resume_time(task: Task, command: AttemptCommand) -> bool:
    """True if the task waits until the command's time, or until a time that the rule chose."""
    resume_at = getattr(command, "resume_at", None)
    if resume_at is None and isinstance(command, c.Fail):
        return RULES[command.failure.error_class].reset_time is not None
    return task.resume_at == resume_at


def _check_fence(task: Task, command: AttemptCommand) -> None:
    """Raises `Conflict` unless the attempt owns the task and may send this command now."""
    if task.status not in LEASED or not is_current_fence(task, command):
        raise Conflict(f"attempt {command.fence.attempt} no longer owns the task", "lease_lost")
    if isinstance(command, c.ConfirmCancel):
        _check_requested(command, task.cancel_requested_at)
        return
    if task.cancel_requested_at is not None:
        raise Conflict(f"task {task.id} is being cancelled", "cancel_requested")
    if isinstance(command, c.ConfirmPause):
        _check_requested(command, task.pause_requested_at)
        return
    if task.pause_requested_at is not None:
        raise Conflict(f"task {task.id} is being paused", "pause_requested")
    _check_status(task, command)


def _check_requested(command: AttemptCommand, requested_at: datetime | None) -> None:
    if requested_at is None:
        raise Conflict(f"no {command.name} of the task is requested")


def _check_status(task: Task, command: Command) -> None:
    """Raises `Conflict` unless the command is allowed in the task's status."""
    if not any(source is task.status for source, _ in TRANSITIONS[command.name]):
        name = command.name.replace("_", " ")
        raise Conflict(f"cannot {name} task {task.id}: it is {task.status}")


def _assert_legal(task: Task, command: Command, change: TaskChange) -> None:
    after = change.task
    assert after.version == task.version + 1
    if after.status is not task.status:
        assert (task.status, after.status) in TRANSITIONS[command.name], (command, after.status)
    assert (change.end is not None) == (task.status in LEASED and after.status not in LEASED)


_Decider = Callable[[Task, Any, DecisionContext], TaskChange]
_DECIDERS = cast(
    dict[type[Command], _Decider],
    {
        c.Begin: attempts.begin,
        c.Complete: attempts.complete,
        c.Fail: attempts.fail,
        c.NotStarted: attempts.fail_to_start,
        c.TimedOut: attempts.confirm_time_out,
        c.ForceTimeOut: attempts.force_time_out,
        c.Park: attempts.park,
        c.Release: attempts.release,
        c.ConfirmCancel: user_commands.confirm_cancel,
        c.ConfirmPause: user_commands.confirm_pause,
        c.Expire: attempts.expire,
        c.WarnHung: attempts.warn_hung,
        c.Abort: attempts.abort,
        c.Ready: attempts.make_ready,
        c.RetryDue: attempts.make_retry_pending,
        c.Pause: user_commands.pause,
        c.PauseForBudget: user_commands.pause_for_budget,
        c.Resume: user_commands.resume,
        c.Cancel: user_commands.cancel,
        c.Skip: user_commands.skip,
        c.FailWithoutAttempt: user_commands.fail_without_attempt,
        c.Retry: user_commands.retry,
        c.Reopen: user_commands.reopen,
        c.DependenciesMet: user_commands.meet_dependencies,
        c.ClearHold: user_commands.clear_hold,
        c.Unpark: attempts.unpark,
        c.AwaitAnswer: user_commands.await_answer,
        c.AddDependency: user_commands.add_dependency,
        c.Resolve: user_commands.resolve,
        c.Archive: user_commands.archive,
        c.SetPriority: user_commands.set_priority,
        c.Assign: user_commands.assign,
        c.Edit: user_commands.edit,
        c.StartNow: user_commands.start_now,
        c.DeletePayload: user_commands.delete_payload,
    },
)
