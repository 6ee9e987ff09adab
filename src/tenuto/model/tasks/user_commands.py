"""What becomes of a task when a person or a rule asks something of it."""

from typing import Any

import msgspec

from tenuto.model.errors import Conflict
from tenuto.model.tasks import commands as c
from tenuto.model.tasks.changes import ENGINES_OWN, cancelled, change, is_parked, paused, unheld
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


def pause(task: Task, command: c.Pause, moment: DecisionContext) -> TaskChange:
    if task.status in LEASED:
        if task.cancel_requested_at is not None:
            raise Conflict("the task is being cancelled", "cancel_requested")
        requested = task.pause_requested_at or moment.now
        return change(
            task, moment, "pause_requested", message=command.reason, pause_requested_at=requested
        )
    return change(task, moment, "paused", message=command.reason, status=Status.PAUSED)


def exceed(task: Task, command: c.PauseForBudget, moment: DecisionContext) -> TaskChange:
    if task.status not in LEASED:
        raise Conflict("no attempt of the task runs")
    if task.cancel_requested_at is not None:
        raise Conflict("the task is being cancelled", "cancel_requested")
    return change(
        task,
        moment,
        "pause_requested",
        level="WARN",
        message=command.reason,
        hold=command.hold,
        pause_requested_at=task.pause_requested_at or moment.now,
    )


def confirm_pause(task: Task, command: c.ConfirmPause, moment: DecisionContext) -> TaskChange:
    return paused(task, moment, command.receipt)


def resume(task: Task, command: c.Resume, moment: DecisionContext) -> TaskChange:
    del command
    if task.attempt >= ATTEMPT_CAP:
        raise Conflict(f"the task had {ATTEMPT_CAP} attempts; rerun it instead", "attempts_used_up")
    status = Status.PENDING if is_ready(unheld(task, moment), moment.now) else Status.WAITING
    if status is Status.PENDING and task.next_attempt_at and task.next_attempt_at > moment.now:
        status = Status.RETRY_WAIT
    cleared: dict[str, Any] = {}
    if status is Status.PENDING:
        cleared = {"hold": None, "resume_at": None, "wait_until": None, "next_attempt_at": None}
    return change(task, moment, "resumed", status=status, **cleared)


def start(task: Task, command: c.StartNow, moment: DecisionContext) -> TaskChange:
    del command
    if task.run_at is None or task.run_at <= moment.now:
        raise Conflict("the task does not wait for its time")
    early = msgspec.structs.replace(task, run_at=moment.now)
    if not is_ready(early, moment.now):
        raise Conflict(f"the task waits for {task.hold or 'others'} as well")
    place = rank(task.priority, moment.now, task.estimate_minutes)
    return change(
        task, moment, "started_early", status=Status.PENDING, run_at=moment.now, rank=place
    )


def cancel(task: Task, command: c.Cancel, moment: DecisionContext) -> TaskChange:
    if task.status in LEASED:
        requested = task.cancel_requested_at or moment.now
        return change(
            task, moment, "cancel_requested", message=command.reason, cancel_requested_at=requested
        )
    return change(
        task,
        moment,
        "cancelled",
        message=command.reason,
        status=Status.CANCELLED,
        finished_at=moment.now,
    )


def confirm_cancel(task: Task, command: c.ConfirmCancel, moment: DecisionContext) -> TaskChange:
    return cancelled(task, moment, command.receipt)


def skip(task: Task, command: c.Skip, moment: DecisionContext) -> TaskChange:
    return change(
        task,
        moment,
        "skipped",
        message=command.reason,
        status=Status.SKIPPED,
        finished_at=moment.now,
    )


def fail_without_attempt(
    task: Task, command: c.FailWithoutAttempt, moment: DecisionContext
) -> TaskChange:
    return change(
        task,
        moment,
        # A circle is a fault of somebody's plan, not of the task: it has a name of its own.
        "dependency_cycle" if command.code == "dependency_cycle" else "failed",
        level="ERROR",
        message=command.message,
        data={"error_class": command.code},
        status=Status.FAILED,
        finished_at=moment.now,
        last_error=command.message,
        error_class=command.code,
    )


def check_payload_present(current_step: str | None) -> None:
    """Raise `Conflict` unless it is still known what the task asked for."""
    if current_step == PRUNED:
        raise Conflict("what the task asked for is gone; it cannot be run again", "payload_pruned")


def revive(task: Task, command: c.Reopen, moment: DecisionContext) -> TaskChange:
    check_payload_present(task.current_step)
    again = msgspec.structs.replace(task, hold=command.hold, unmet=command.unmet)
    status = Status.PENDING if is_ready(again, moment.now) else Status.WAITING
    return change(
        task,
        moment,
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


def met(task: Task, command: c.DependenciesMet, moment: DecisionContext) -> TaskChange:
    return _unblocked(msgspec.structs.replace(task, unmet=task.unmet - command.n), task, moment)


def turn(task: Task, command: c.ClearHold, moment: DecisionContext) -> TaskChange:
    free = msgspec.structs.replace(task, hold=command.hold, wait_until=None)
    return _unblocked(free, task, moment)


def ask(task: Task, command: c.AwaitAnswer, moment: DecisionContext) -> TaskChange:
    return change(
        task,
        moment,
        "asked",
        message=command.message,
        hold=command.hold,
        wait_until=command.until(moment.now),
    )


def _unblocked(free: Task, task: Task, moment: DecisionContext) -> TaskChange:
    ready = task.status is Status.WAITING and is_ready(free, moment.now)
    return change(
        task,
        moment,
        "ready" if ready else "unblocked",
        status=Status.PENDING if ready else task.status,
        unmet=free.unmet,
        hold=free.hold,
        wait_until=free.wait_until,
    )


def block(task: Task, command: c.AddDependency, moment: DecisionContext) -> TaskChange:
    del command
    status = Status.WAITING if task.status is Status.PENDING else task.status
    return change(task, moment, "blocked", status=status, unmet=task.unmet + 1)


def decided(task: Task, command: c.Resolve, moment: DecisionContext) -> TaskChange:
    failed = command.status is Status.FAILED
    ends: dict[str, Any] = {"hold": None, "wait_until": None, "finished_at": moment.now}
    if failed:
        ends |= {"last_error": command.message, "error_class": command.code}
    return change(
        task,
        moment,
        {Status.COMPLETED: "completed", Status.SKIPPED: "skipped"}.get(command.status, "failed"),
        level="ERROR" if failed else "INFO",
        message=command.message,
        data={"error_class": command.code} if failed else None,
        status=command.status,
        **ends,
    )


_OVER = ENGINES_OWN - {"act"}
"""Holds that a task had when it ended and that hold no longer when it is tried again."""


def retry(task: Task, command: c.Retry, moment: DecisionContext) -> TaskChange:
    check_payload_present(task.current_step)
    if task.attempt >= ATTEMPT_CAP:
        raise Conflict(f"the task had {ATTEMPT_CAP} attempts; rerun it instead", "attempts_used_up")
    # A wait that was too long ended the task: kept, it would end it again.
    late = task.wait_until is not None and task.wait_until <= moment.now
    over = late or (task.hold or "").partition(":")[0] in _OVER
    parked = is_parked(task)  # its handler starts anew, and may wait again
    hold = command.hold or (None if over or parked else task.hold)
    # Only its own times may end a wait.
    kept = hold is not None and hold == task.hold and not late
    again = msgspec.structs.replace(task, unmet=command.unmet, hold=hold)
    status = Status.PENDING if is_ready(again, moment.now) else Status.WAITING
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
        "resume_at": task.resume_at if kept else None,
        "wait_until": task.wait_until if kept else None,
    }
    if task.queue_ttl_s is not None and status is Status.PENDING:
        reset["run_at"] = moment.now  # a retry waits anew
    return change(task, moment, "retried", status=status, **reset)


def archive(task: Task, command: c.Archive, moment: DecisionContext) -> TaskChange:
    del command
    if task.status not in TERMINAL:
        raise Conflict(f"cannot archive a task that is {task.status}")
    if task.archived_at is not None:
        raise Conflict("the task is archived already")
    return change(task, moment, "archived", archived_at=moment.now)


def reprioritise(task: Task, command: c.SetPriority, moment: DecisionContext) -> TaskChange:
    if task.status in TERMINAL:
        raise Conflict(f"cannot change the priority of a task that is {task.status}")
    base = max(task.created_at, task.run_at or task.created_at)
    return change(
        task,
        moment,
        "priority_changed",
        data={"from": task.priority, "to": command.priority},
        priority=command.priority,
        rank=rank(command.priority, base, task.estimate_minutes),
    )


def assign(task: Task, command: c.Assign, moment: DecisionContext) -> TaskChange:
    if task.status in TERMINAL:
        raise Conflict(f"cannot assign a task that is {task.status}")
    data = {"agent": None if command.agent is None else str(command.agent)}
    return change(task, moment, "assigned", data=data, lane=command.lane)


def edit(task: Task, command: c.Edit, moment: DecisionContext) -> TaskChange:
    return change(task, moment, "edited", data={"fields": list(command.fields)})


def erase(task: Task, command: c.DeletePayload, moment: DecisionContext) -> TaskChange:
    del command
    if task.status not in TERMINAL:
        raise Conflict(f"cannot delete a task that is {task.status}; cancel it first")
    return change(task, moment, "deleted", archived_at=task.archived_at or moment.now)
