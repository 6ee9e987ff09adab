"""Escalation: reports tasks that failed for good, with the facts that are needed to act.

The agent of the parent task gets a message in its mailbox. If there is no such agent, an inbox
item is created for people.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from tenuto.clock import Clock
from tenuto.engine.rows import decode_json
from tenuto.model.agents.messages import MAX_WAITING, NewMessage, message_row
from tenuto.model.tasks.commands import Command, Escalation
from tenuto.model.tasks.task import Status, TaskChange
from tenuto.store.protocol import Row, Script, Statement

MAX_OPEN = 200
"""Open escalations in a workspace's inbox; further failures appear only as dead letters."""
KIND = "escalation"
_FAILED_FOR_GOOD = frozenset({Status.DEAD, Status.FAILED})


def failed_for_good(
    decided: Sequence[tuple[TaskChange, Command]],
) -> list[tuple[TaskChange, Command]]:
    """Returns the changes in which an attempt ended and its task became FAILED or DEAD."""
    return [
        (change, command)
        for change, command in decided
        if change.end is not None and change.task.status in _FAILED_FOR_GOOD
    ]


def escalate(clock: Clock, failed: Sequence[tuple[TaskChange, Command]]) -> Script[None]:
    """Reports each failed task: a message to the parent's agent, else an inbox item, if not full.

    Runs in the transaction that finishes the tasks.
    """
    ids = [(change.task.id, change.task.workspace) for change, _ in failed]
    rows = yield Statement("escalation_requests", {"room": MAX_WAITING}, {"wanted": ids})
    rows_by_task = {row["id"]: row for row in rows}
    items = []
    messages = []
    for change, command in failed:
        row = rows_by_task.get(change.task.id)
        if row is None:
            continue
        body = _body(change, command, row)
        if row["agent"] is not None:
            messages.append(_message_row(clock, change, row, body))
            continue
        text = msgspec.json.encode(body).decode()
        title = f"{row['title']}: {change.task.status}"
        items.append((clock.new_id(), change.task.workspace, change.task.id, title, text))
    if items:
        params = {"now": clock.now(), "most": MAX_OPEN}
        yield Statement("escalate", params, {"lost": items})
    if messages:
        yield Statement("messages_add", {"now": clock.now()}, {"sent": messages})


def _message_row(
    clock: Clock, change: TaskChange, row: Row, body: dict[str, Any]
) -> tuple[Any, ...]:
    """Returns the row of a message to the agent of the task's parent."""
    task = change.task
    facts = {"taskId": task.id, "title": row["title"], "status": task.status}
    text = msgspec.json.encode(facts | {"parentId": row["parent"]} | body).decode()
    new = NewMessage(kind=KIND, scope_key=str(task.id))
    first_columns = (clock.new_id(), task.workspace, row["agent"], new, text)
    return message_row(*first_columns, sender="engine", task=task.id, attempt=task.attempt)


def _body(change: TaskChange, command: Command, row: Row) -> dict[str, Any]:
    """Returns what the message and the inbox item share: why, and how the last attempt ended."""
    task, end = change.task, change.end
    assert end is not None
    escalation = _declared_escalation(command, row) or _default_escalation(change, row)
    return {
        "reason": escalation.reason,
        "prompt": escalation.prompt,
        "error": task.last_error,
        "errorClass": task.error_class,
        "outcome": end.outcome,
        "attempt": end.attempt,
        "tries": task.tries,
        "agent": end.agent,
        "worker": end.worker,
        "lastStep": task.current_step,
        "flow": row["flow"],
        "key": row["key"],
    }


def _declared_escalation(command: Command, row: Row) -> Escalation | None:
    """Returns the escalation in the agent's report, else that of the submission, else `None`."""
    failure = getattr(command, "failure", None)
    if failure is not None and failure.escalation is not None:
        escalation: Escalation = failure.escalation
        return escalation
    if row["escalation"] is None:
        return None
    return msgspec.convert(decode_json(row["escalation"]), Escalation)


def _default_escalation(change: TaskChange, row: Row) -> Escalation:
    """Returns a default escalation, from the task's error and its last step."""
    task = change.task
    reason = task.last_error or str(task.status)
    where = f" Its last step was: {task.current_step}." if task.current_step else ""
    return Escalation(
        reason=reason,
        prompt=f"{row['title']!r} ended {task.status} after {task.tries} tries: {reason}.{where}"
        " Read its log, fix the cause, then retry or cancel it.",
    )
