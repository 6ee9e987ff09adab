"""Helpers that build a change: the next version of a row, its event and its ended attempt."""

from datetime import timedelta
from typing import Any

import msgspec

from tenuto.model.limits.budgets import HOLD as BUDGET
from tenuto.model.tasks.commands import DecisionContext, Failure
from tenuto.model.tasks.retry import ATTEMPT_CAP, FREE_ENDS
from tenuto.model.tasks.task import (
    TERMINAL,
    AttemptRecord,
    AuditEvent,
    Outcome,
    Status,
    Task,
    TaskChange,
    next_due_at,
)


def replace_fields(task: Task, **changes: Any) -> Task:
    return msgspec.structs.replace(task, **changes)


def build_change(
    task: Task,
    context: DecisionContext,
    kind: str,
    *,
    level: str = "INFO",
    message: str | None = None,
    data: dict[str, Any] | None = None,
    stack: str | None = None,
    record: AttemptRecord | None = None,
    **changes: Any,
) -> TaskChange:
    """Returns the change to the task's next version with an audit event of the given `kind`.

    `changes` are the fields to replace. The timer `due_at` is computed from the new row.
    """
    after = replace_fields(task, version=task.version + 1, updated_at=context.now, **changes)
    after = replace_fields(after, due_at=next_due_at(after))
    if after.status in TERMINAL:
        after = replace_fields(after, watched=False)  # the same transaction runs its follow-ups
    event = AuditEvent(
        kind=kind,
        level=level,
        message=message,
        previous=task.status,
        new=after.status,
        attempt=task.attempt,
        agent=task.agent,
        actor=context.actor,
        session_key=task.session_key,
        stack_trace=stack,
        data=data,
    )
    return TaskChange(after, event, record)


def attempt_record(
    task: Task,
    context: DecisionContext,
    outcome: Outcome,
    failure: Failure | None = None,
    receipt: dict[str, Any] | None = None,
    *,
    unconfirmed: bool = False,
) -> AttemptRecord:
    """Returns the record of the task's attempt, which ends now with this outcome."""
    return AttemptRecord(
        outcome=outcome,
        attempt=task.attempt,
        agent=task.agent,
        worker=task.worker,
        session_key=task.session_key,
        started_at=task.started_at,
        ended_at=context.now,
        error_class=failure.error_class if failure else None,
        message=failure.message if failure else None,
        stack=failure.stack if failure else None,
        exit_code=failure.exit_code if failure else None,
        receipt=receipt,
        unconfirmed=unconfirmed,
    )


# Fields that are reset whenever an attempt ends. `lease_token` stays until the next claim, so that
# a repeated message of the same attempt is recognised.
LEASE_CLEARED: dict[str, Any] = {
    "lease_until": None,
    "cancel_requested_at": None,
    "pause_requested_at": None,
    "hung_warned_at": None,
}
OWNER_CLEARED: dict[str, Any] = {
    **LEASE_CLEARED,
    "agent": None,
    "worker": None,
    "session_key": None,
    "started_at": None,
}


ENGINE_HOLDS = frozenset({"act", "turn", "paused", "budget", "concurrency"})
"""Holds that only the engine sets and clears: an attempt cannot park its task with them."""
HANDLER_HOLDS = frozenset({"children", "approval", "input"})
"""Holds that handlers set by parking; the next attempt receives the outcome of the wait."""


def is_parked(task: Task) -> bool:
    """True if a handler parked the task and it still waits; not for a park at a rate limit."""
    return task.attempt > 0 and (task.hold or "").partition(":")[0] in HANDLER_HOLDS


def without_counting_try(task: Task) -> dict[str, Any]:
    """Returns the counters after an uncounted end; beyond `FREE_ENDS` in a row, they count.

    A new checkpoint restarts the count.
    """
    consecutive = 1 if task.checkpoint_seq > task.free_mark else task.free_ends + 1
    tries = task.tries - 1 if consecutive <= FREE_ENDS else task.tries
    return {"tries": tries, "free_ends": consecutive, "free_mark": task.checkpoint_seq}


def has_no_try_left(task: Task, tries: int) -> bool:
    """True if no further attempt may start: all tries or all attempt numbers are used up."""
    return tries >= task.max_attempts or task.attempt >= ATTEMPT_CAP


def mark_dead(
    task: Task, context: DecisionContext, record: AttemptRecord, reason: str, **changes: Any
) -> TaskChange:
    """Returns the change to DEAD and the end of the attempt; `changes` override other fields."""
    return build_change(
        task,
        context,
        "dead",
        level="ERROR",
        message=reason,
        data={"outcome": record.outcome, "tries": changes.get("tries", task.tries)},
        stack=record.stack,
        record=record,
        **{
            **LEASE_CLEARED,
            "status": Status.DEAD,
            "finished_at": context.now,
            "last_outcome": record.outcome,
            "last_error": reason,
            "error_class": record.error_class or "lost",
            "free_ends": 0,
            **changes,
        },
    )


def schedule_retry(
    task: Task,
    context: DecisionContext,
    record: AttemptRecord,
    delay_s: float,
    kind: str,
    **changes: Any,
) -> TaskChange:
    """Returns the change to RETRY_WAIT for `delay_s` seconds, or to DEAD if no try is left."""
    reason = record.message or kind.replace("_", " ")
    tries = changes.get("tries", task.tries)
    if has_no_try_left(task, tries):
        return mark_dead(task, context, record, reason, **changes)
    next_attempt_at = context.now + timedelta(seconds=delay_s)
    return build_change(
        task,
        context,
        kind,
        level="WARN",
        message=reason,
        data={
            "outcome": record.outcome,
            "next_attempt_at": next_attempt_at,
            "backoff_ms": round(delay_s * 1000),
            "error_class": record.error_class,
        },
        stack=record.stack,
        record=record,
        **{
            **OWNER_CLEARED,
            "status": Status.RETRY_WAIT,
            "next_attempt_at": next_attempt_at,
            "last_outcome": record.outcome,
            "last_error": reason,
            "error_class": record.error_class,
            "free_ends": 0,
            "losses": 0,
            **changes,
        },
    )


def without_elapsed_hold(task: Task, context: DecisionContext) -> Task:
    """Returns the task without its hold if `resume_at` has passed, else the task unchanged."""
    if task.hold is not None and task.resume_at is not None and task.resume_at <= context.now:
        return replace_fields(task, hold=None, resume_at=None)
    return task


def is_over_budget(task: Task) -> bool:
    """True if the task stops or waits because a budget is used up."""
    return (task.hold or "").partition(":")[0] == BUDGET


def finish_pause(task: Task, context: DecisionContext, receipt: dict[str, Any]) -> TaskChange:
    """Returns the change to PAUSED, or WAITING for a budget; the ended attempt counts no try."""
    return build_change(
        task,
        context,
        "paused",
        data={"receipt": receipt},
        record=attempt_record(
            task,
            context,
            Outcome.PAUSED,
            receipt=receipt,
            unconfirmed=receipt.get("state") == "unconfirmed",
        ),
        status=Status.WAITING if is_over_budget(task) else Status.PAUSED,
        last_outcome=Outcome.PAUSED,
        tries=task.tries - 1,
        **OWNER_CLEARED,
    )


def finish_cancel(task: Task, context: DecisionContext, receipt: dict[str, Any]) -> TaskChange:
    """Returns the change to CANCELLED after the attempt was killed or lost."""
    is_unconfirmed = receipt.get("state") == "unconfirmed"
    record = attempt_record(
        task, context, Outcome.CANCELLED, receipt=receipt, unconfirmed=is_unconfirmed
    )
    return build_change(
        task,
        context,
        "cancelled",
        level="WARN" if is_unconfirmed else "INFO",
        data={"receipt": receipt},
        record=record,
        status=Status.CANCELLED,
        finished_at=context.now,
        last_outcome=Outcome.CANCELLED,
        **LEASE_CLEARED,
    )
