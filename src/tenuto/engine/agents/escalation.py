"""Escalation: a task that ended badly for good is put to somebody, with what they need to act.

The agent of its parent hears of it, in its mailbox; if there is none, people do, in the inbox.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from tenuto.clock import Clock
from tenuto.engine.rows import decode
from tenuto.model.agents.messages import MOST_WAITING, NewMessage, message_row
from tenuto.model.tasks.commands import Command, Escalation
from tenuto.model.tasks.task import Status, TaskChange
from tenuto.store.protocol import Row, Script, Statement

MOST = 200
"""Escalations that wait in a workspace's inbox at once; the dead letters have the rest."""
KIND = "escalation"
_LOST = frozenset({Status.DEAD, Status.FAILED})


def lost(decided: Sequence[tuple[TaskChange, Command]]) -> list[tuple[TaskChange, Command]]:
    """Those of the changes that ended a task badly, and with it an attempt."""
    return [
        (change, command)
        for change, command in decided
        if change.end is not None and change.task.status in _LOST
    ]


def escalate(clock: Clock, ended: Sequence[tuple[TaskChange, Command]]) -> Script[None]:
    """Put the tasks to their parents' agents or to people, in the transaction that ended them."""
    wanted = [(change.task.id, change.task.workspace) for change, _ in ended]
    rows = yield Statement("escalations_declared", {"room": MOST_WAITING}, {"wanted": wanted})
    known = {row["id"]: row for row in rows}
    items = []
    messages = []
    for change, command in ended:
        row = known.get(change.task.id)
        if row is None:
            continue
        body = _body(change, command, row)
        if row["agent"] is not None:
            messages.append(_letter(clock, change, row, body))
            continue
        text = msgspec.json.encode(body).decode()
        title = f"{row['title']}: {change.task.status}"
        items.append((clock.new_id(), change.task.workspace, change.task.id, title, text))
    if items:
        params = {"now": clock.now(), "most": MOST}
        yield Statement("escalate", params, {"lost": items})
    if messages:
        yield Statement("messages_add", {"now": clock.now()}, {"sent": messages})


def _letter(clock: Clock, change: TaskChange, row: Row, body: dict[str, Any]) -> tuple[Any, ...]:
    """The message to the agent of the task's parent."""
    task = change.task
    said = {"taskId": task.id, "title": row["title"], "status": task.status}
    text = msgspec.json.encode(said | {"parentId": row["parent"]} | body).decode()
    new = NewMessage(kind=KIND, scope_key=str(task.id))
    where = (clock.new_id(), task.workspace, row["agent"], new, text)
    return message_row(*where, sender="engine", task=task.id, attempt=task.attempt)


def _body(change: TaskChange, command: Command, row: Row) -> dict[str, Any]:
    task, end = change.task, change.end
    assert end is not None
    said = _said(command, row) or _made(change, row)
    return {
        "reason": said.reason,
        "prompt": said.prompt,
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


def _said(command: Command, row: Row) -> Escalation | None:
    """What the agent said of it, else what the task was submitted with."""
    failure = getattr(command, "failure", None)
    if failure is not None and failure.escalation is not None:
        escalation: Escalation = failure.escalation
        return escalation
    if row["escalation"] is None:
        return None
    return msgspec.convert(decode(row["escalation"]), Escalation)


def _made(change: TaskChange, row: Row) -> Escalation:
    task = change.task
    why = task.last_error or str(task.status)
    where = f" It was at: {task.current_step}." if task.current_step else ""
    return Escalation(
        reason=why,
        prompt=f"{row['title']!r} ended {task.status} after {task.tries} tries: {why}.{where}"
        " See its log, mend the cause, then retry or cancel it.",
    )
