"""What decisions are built from: the next version of a row, with its event and ended attempt."""

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
    due_at,
)


def altered(task: Task, **changes: Any) -> Task:
    return msgspec.structs.replace(task, **changes)


def change(
    task: Task,
    moment: DecisionContext,
    kind: str,
    *,
    level: str = "INFO",
    message: str | None = None,
    data: dict[str, Any] | None = None,
    stack: str | None = None,
    end: AttemptRecord | None = None,
    **changes: Any,
) -> TaskChange:
    """The next version of the task with its event; timers follow from the new row."""
    after = altered(task, version=task.version + 1, updated_at=moment.now, **changes)
    after = altered(after, due_at=due_at(after))
    if after.status in TERMINAL:
        after = altered(after, watched=False)  # who watched is told in the same transaction
    event = AuditEvent(
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
    return TaskChange(after, event, end)


def ended(
    task: Task,
    moment: DecisionContext,
    outcome: Outcome,
    failure: Failure | None = None,
    receipt: dict[str, Any] | None = None,
    *,
    unconfirmed: bool = False,
) -> AttemptRecord:
    return AttemptRecord(
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
UNLEASED: dict[str, Any] = {
    "lease_until": None,
    "cancel_requested_at": None,
    "pause_requested_at": None,
    "hung_warned_at": None,
}
DISOWNED: dict[str, Any] = {
    **UNLEASED,
    "agent": None,
    "worker": None,
    "session_key": None,
    "started_at": None,
}


ENGINES_OWN = frozenset({"act", "turn", "paused", "budget", "concurrency"})
"""Holds that the engine takes away when their time has come: no attempt says them."""
PARKED_FOR = frozenset({"children", "approval", "input"})
"""Holds that handlers take upon their tasks; what comes of them is told to the next attempt."""


def is_parked(task: Task) -> bool:
    """Whether a handler of the task waits: no task that never ran was parked by one."""
    return task.attempt > 0 and (task.hold or "").partition(":")[0] in PARKED_FOR


def without_counting_try(task: Task) -> dict[str, Any]:
    """Counters after an end that should not cost a try, while such ends are still free."""
    in_a_row = 1 if task.checkpoint_seq > task.free_mark else task.free_ends + 1
    tries = task.tries - 1 if in_a_row <= FREE_ENDS else task.tries
    return {"tries": tries, "free_ends": in_a_row, "free_mark": task.checkpoint_seq}


def has_no_try_left(task: Task, tries: int) -> bool:
    """No further attempt may start: tries used up, or the fence's numbers are."""
    return tries >= task.max_attempts or task.attempt >= ATTEMPT_CAP


def dead(
    task: Task, moment: DecisionContext, end: AttemptRecord, why: str, **changes: Any
) -> TaskChange:
    return change(
        task,
        moment,
        "dead",
        level="ERROR",
        message=why,
        data={"outcome": end.outcome, "tries": changes.get("tries", task.tries)},
        stack=end.stack,
        end=end,
        **{
            **UNLEASED,
            "status": Status.DEAD,
            "finished_at": moment.now,
            "last_outcome": end.outcome,
            "last_error": why,
            "error_class": end.error_class or "lost",
            "free_ends": 0,
            **changes,
        },
    )


def again(
    task: Task,
    moment: DecisionContext,
    end: AttemptRecord,
    delay_s: float,
    kind: str,
    **changes: Any,
) -> TaskChange:
    """Back to the queue after `delay_s`, or DEAD when no try is left."""
    why = end.message or kind.replace("_", " ")
    tries = changes.get("tries", task.tries)
    if has_no_try_left(task, tries):
        return dead(task, moment, end, why, **changes)
    at = moment.now + timedelta(seconds=delay_s)
    return change(
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
            **DISOWNED,
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


def unheld(task: Task, moment: DecisionContext) -> Task:
    """The task with a hold dropped whose time has come."""
    if task.hold is not None and task.resume_at is not None and task.resume_at <= moment.now:
        return altered(task, hold=None, resume_at=None)
    return task


def is_over_budget(task: Task) -> bool:
    """Whether the task stops, or waits, because a budget is used up."""
    return (task.hold or "").partition(":")[0] == BUDGET


def paused(task: Task, moment: DecisionContext, receipt: dict[str, Any]) -> TaskChange:
    # A person may pause as often as they like: the try always comes back.
    tries = task.tries - 1
    return change(
        task,
        moment,
        "paused",
        data={"receipt": receipt},
        end=ended(
            task,
            moment,
            Outcome.PAUSED,
            receipt=receipt,
            unconfirmed=receipt.get("state") == "unconfirmed",
        ),
        status=Status.WAITING if is_over_budget(task) else Status.PAUSED,
        last_outcome=Outcome.PAUSED,
        tries=tries,
        **DISOWNED,
    )


def cancelled(task: Task, moment: DecisionContext, receipt: dict[str, Any]) -> TaskChange:
    unconfirmed = receipt.get("state") == "unconfirmed"
    end = ended(task, moment, Outcome.CANCELLED, receipt=receipt, unconfirmed=unconfirmed)
    return change(
        task,
        moment,
        "cancelled",
        level="WARN" if unconfirmed else "INFO",
        data={"receipt": receipt},
        end=end,
        status=Status.CANCELLED,
        finished_at=moment.now,
        last_outcome=Outcome.CANCELLED,
        **UNLEASED,
    )
