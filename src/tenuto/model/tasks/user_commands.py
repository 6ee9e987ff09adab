"""Changes of a task by commands from users, flows and rules. One function per command."""

from typing import Any

import msgspec

from tenuto.model.errors import Conflict
from tenuto.model.tasks import commands as c
from tenuto.model.tasks.changes import (
    ENGINE_HOLDS,
    build_change,
    finish_cancel,
    finish_pause,
    is_parked,
    without_elapsed_hold,
)
from tenuto.model.tasks.commands import DecisionContext
from tenuto.model.tasks.retry import ATTEMPT_CAP
from tenuto.model.tasks.task import (
    LEASED,
    PRUNED,
    TERMINAL,
    Status,
    Task,
    TaskChange,
    is_ready,
    rank,
)


def pause(task: Task, command: c.Pause, context: DecisionContext) -> TaskChange:
    """Returns the change to PAUSED; for an attempt only the request, `Conflict` during a cancel."""
    if task.status in LEASED:
        if task.cancel_requested_at is not None:
            raise Conflict(f"task {task.id} is being cancelled", "cancel_requested")
        requested_at = task.pause_requested_at or context.now
        return build_change(
            task,
            context,
            "pause_requested",
            message=command.reason,
            pause_requested_at=requested_at,
        )
    return build_change(task, context, "paused", message=command.reason, status=Status.PAUSED)


def pause_for_budget(task: Task, command: c.PauseForBudget, context: DecisionContext) -> TaskChange:
    """Records a pause request and the hold; `Conflict` without an attempt or during a cancel."""
    if task.status not in LEASED:
        raise Conflict(f"task {task.id} is {task.status}: no attempt is running")
    if task.cancel_requested_at is not None:
        raise Conflict(f"task {task.id} is being cancelled", "cancel_requested")
    return build_change(
        task,
        context,
        "pause_requested",
        level="WARN",
        message=command.reason,
        hold=command.hold,
        pause_requested_at=task.pause_requested_at or context.now,
    )


def confirm_pause(task: Task, command: c.ConfirmPause, context: DecisionContext) -> TaskChange:
    """Returns the change after the worker stopped the session for a pause."""
    return finish_pause(task, context, command.receipt)


def resume(task: Task, command: c.Resume, context: DecisionContext) -> TaskChange:
    """Returns the change to PENDING, WAITING or RETRY_WAIT; `Conflict` if no attempt is left."""
    del command
    if task.attempt >= ATTEMPT_CAP:
        raise Conflict(
            f"task {task.id} had {ATTEMPT_CAP} attempts; rerun it instead", "attempts_used_up"
        )
    status = (
        Status.PENDING
        if is_ready(without_elapsed_hold(task, context), context.now)
        else Status.WAITING
    )
    if status is Status.PENDING and task.next_attempt_at and task.next_attempt_at > context.now:
        status = Status.RETRY_WAIT
    cleared: dict[str, Any] = {}
    if status is Status.PENDING:
        cleared = {"hold": None, "resume_at": None, "wait_until": None, "next_attempt_at": None}
    return build_change(task, context, "resumed", status=status, **cleared)


def start_now(task: Task, command: c.StartNow, context: DecisionContext) -> TaskChange:
    """Returns the change to PENDING; raises `Conflict` unless only `run_at` blocks the task."""
    del command
    if task.run_at is None or task.run_at <= context.now:
        raise Conflict(f"task {task.id} does not wait for a start time (run_at)")
    started = msgspec.structs.replace(task, run_at=context.now)
    if not is_ready(started, context.now):
        raise Conflict(f"task {task.id} also waits for {task.hold or 'other tasks'}")
    new_rank = rank(task.priority, context.now, task.estimate_minutes)
    return build_change(
        task, context, "started_early", status=Status.PENDING, run_at=context.now, rank=new_rank
    )


def cancel(task: Task, command: c.Cancel, context: DecisionContext) -> TaskChange:
    """Returns the change to CANCELLED; while an attempt owns the task, only records the request."""
    if task.status in LEASED:
        requested_at = task.cancel_requested_at or context.now
        return build_change(
            task,
            context,
            "cancel_requested",
            message=command.reason,
            cancel_requested_at=requested_at,
        )
    return build_change(
        task,
        context,
        "cancelled",
        message=command.reason,
        status=Status.CANCELLED,
        finished_at=context.now,
    )


def confirm_cancel(task: Task, command: c.ConfirmCancel, context: DecisionContext) -> TaskChange:
    """Returns the change after the worker killed the session for a cancel."""
    return finish_cancel(task, context, command.receipt)


def skip(task: Task, command: c.Skip, context: DecisionContext) -> TaskChange:
    return build_change(
        task,
        context,
        "skipped",
        message=command.reason,
        status=Status.SKIPPED,
        finished_at=context.now,
    )


def fail_without_attempt(
    task: Task, command: c.FailWithoutAttempt, context: DecisionContext
) -> TaskChange:
    """Returns the change to FAILED with the command's code and message."""
    return build_change(
        task,
        context,
        # A cycle is an error in the dependencies, not in the task, so its event has its own kind.
        "dependency_cycle" if command.code == "dependency_cycle" else "failed",
        level="ERROR",
        message=command.message,
        data={"error_class": command.code},
        status=Status.FAILED,
        finished_at=context.now,
        last_error=command.message,
        error_class=command.code,
    )


def check_payload_present(current_step: str | None) -> None:
    """Raises `Conflict` if the task's payload was deleted."""
    if current_step == PRUNED:
        raise Conflict("the task's payload was deleted; it cannot be run again", "payload_pruned")


def reopen(task: Task, command: c.Reopen, context: DecisionContext) -> TaskChange:
    """Returns the change to PENDING or WAITING; unlike `retry`, the tries stay counted."""
    check_payload_present(task.current_step)
    reopened = msgspec.structs.replace(task, hold=command.hold, unmet=command.unmet)
    status = Status.PENDING if is_ready(reopened, context.now) else Status.WAITING
    return build_change(
        task,
        context,
        "revived",
        status=status,
        hold=command.hold,
        unmet=command.unmet,
        resume_at=None,
        wait_until=None,
        watched=True,
        finished_at=None,
        archived_at=None,
        error_class=None,
        last_error=None,
    )


def meet_dependencies(
    task: Task, command: c.DependenciesMet, context: DecisionContext
) -> TaskChange:
    """Returns the change with `command.n` fewer unmet dependencies, to PENDING if ready."""
    return _unblock(msgspec.structs.replace(task, unmet=task.unmet - command.n), task, context)


def clear_hold(task: Task, command: c.ClearHold, context: DecisionContext) -> TaskChange:
    """Returns the change to the hold `command.hold`, which may be `None`; to PENDING if ready."""
    after = msgspec.structs.replace(task, hold=command.hold, wait_until=None)
    return _unblock(after, task, context)


def await_answer(task: Task, command: c.AwaitAnswer, context: DecisionContext) -> TaskChange:
    """Returns the change that sets the hold and the deadline of the answer; the status stays."""
    return build_change(
        task,
        context,
        "asked",
        message=command.message,
        hold=command.hold,
        wait_until=command.until(context.now),
    )


def _unblock(after: Task, task: Task, context: DecisionContext) -> TaskChange:
    """Returns the change to `after`; a WAITING task becomes PENDING if it is ready."""
    becomes_ready = task.status is Status.WAITING and is_ready(after, context.now)
    return build_change(
        task,
        context,
        "ready" if becomes_ready else "unblocked",
        status=Status.PENDING if becomes_ready else task.status,
        unmet=after.unmet,
        hold=after.hold,
        wait_until=after.wait_until,
    )


def add_dependency(task: Task, command: c.AddDependency, context: DecisionContext) -> TaskChange:
    """Returns the change with one more unmet dependency; a PENDING task becomes WAITING."""
    del command
    status = Status.WAITING if task.status is Status.PENDING else task.status
    return build_change(task, context, "blocked", status=status, unmet=task.unmet + 1)


def resolve(task: Task, command: c.Resolve, context: DecisionContext) -> TaskChange:
    """Returns the change to the command's terminal status."""
    is_failure = command.status is Status.FAILED
    changes: dict[str, Any] = {"hold": None, "wait_until": None, "finished_at": context.now}
    if is_failure:
        changes |= {"last_error": command.message, "error_class": command.code}
    return build_change(
        task,
        context,
        {Status.COMPLETED: "completed", Status.SKIPPED: "skipped"}.get(command.status, "failed"),
        level="ERROR" if is_failure else "INFO",
        message=command.message,
        data={"error_class": command.code} if is_failure else None,
        status=command.status,
        **changes,
    )


_HOLDS_RESET_BY_RETRY = ENGINE_HOLDS - {"act"}
"""Holds of the finished task that no longer apply when the task is retried."""


def retry(task: Task, command: c.Retry, context: DecisionContext) -> TaskChange:
    """Returns the change to PENDING or WAITING with `tries` 0; `Conflict` if it cannot run."""
    check_payload_present(task.current_step)
    if task.attempt >= ATTEMPT_CAP:
        raise Conflict(
            f"task {task.id} had {ATTEMPT_CAP} attempts; rerun it instead", "attempts_used_up"
        )
    # The task may have failed because its wait expired; the same wait would fail it again.
    wait_expired = task.wait_until is not None and task.wait_until <= context.now
    drops_hold = wait_expired or (task.hold or "").partition(":")[0] in _HOLDS_RESET_BY_RETRY
    was_parked = is_parked(task)  # its handler starts again, and may park again
    hold = command.hold or (None if drops_hold or was_parked else task.hold)
    # The times stay only if the task keeps the hold they belong to.
    keeps_wait = hold is not None and hold == task.hold and not wait_expired
    retried = msgspec.structs.replace(task, unmet=command.unmet, hold=hold)
    status = Status.PENDING if is_ready(retried, context.now) else Status.WAITING
    reset: dict[str, Any] = {
        "unmet": command.unmet,
        "hold": hold,
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
        "watched": command.watched,
        "resume_at": task.resume_at if keeps_wait else None,
        "wait_until": task.wait_until if keeps_wait else None,
    }
    if task.queue_ttl_s is not None and status is Status.PENDING:
        reset["run_at"] = context.now  # the queue TTL starts again
    return build_change(task, context, "retried", status=status, **reset)


def archive(task: Task, command: c.Archive, context: DecisionContext) -> TaskChange:
    """Returns the change of `archived_at`; `Conflict` if the task is unfinished or archived."""
    del command
    if task.status not in TERMINAL:
        raise Conflict(f"cannot archive task {task.id}: it is {task.status}")
    if task.archived_at is not None:
        raise Conflict(f"task {task.id} is already archived")
    return build_change(task, context, "archived", archived_at=context.now)


def set_priority(task: Task, command: c.SetPriority, context: DecisionContext) -> TaskChange:
    """Returns the change of priority and rank; raises `Conflict` if the task is finished."""
    if task.status in TERMINAL:
        raise Conflict(f"cannot change the priority of task {task.id}: it is {task.status}")
    startable_at = max(task.created_at, task.run_at or task.created_at)
    return build_change(
        task,
        context,
        "priority_changed",
        data={"from": task.priority, "to": command.priority},
        priority=command.priority,
        rank=rank(command.priority, startable_at, task.estimate_minutes),
    )


def assign(task: Task, command: c.Assign, context: DecisionContext) -> TaskChange:
    """Returns the change to the command's lane; `Conflict` if finished. Only notes the agent."""
    if task.status in TERMINAL:
        raise Conflict(f"cannot assign task {task.id}: it is {task.status}")
    data = {"agent": None if command.agent is None else str(command.agent)}
    return build_change(task, context, "assigned", data=data, lane=command.lane)


def edit(task: Task, command: c.Edit, context: DecisionContext) -> TaskChange:
    """Returns only the event and the new version; the engine writes the edited fields."""
    return build_change(task, context, "edited", data={"fields": list(command.fields)})


def delete_payload(task: Task, command: c.DeletePayload, context: DecisionContext) -> TaskChange:
    """Returns the change that archives the task, `Conflict` if unfinished; the engine deletes."""
    del command
    if task.status not in TERMINAL:
        raise Conflict(f"cannot delete task {task.id}: it is {task.status}; cancel it first")
    return build_change(task, context, "deleted", archived_at=task.archived_at or context.now)
