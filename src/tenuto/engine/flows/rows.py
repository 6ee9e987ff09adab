"""Maps rows to flows and groups; builds the statements that write them."""

from collections import Counter
from datetime import datetime
from typing import Any
from uuid import UUID

import msgspec

from tenuto.model.flows.definition import Control
from tenuto.model.flows.groups import Group, GroupStatus
from tenuto.model.flows.progress import ActivationContext, Flow, FlowStatus
from tenuto.model.tasks.task import TERMINAL, Status
from tenuto.store.protocol import Row, Script, Statement

MAX_RANK_STEPS = 64
"""How many levels of dependencies receive the rank of a task that depends on them."""


class AuditNote(msgspec.Struct, frozen=True):
    """The audit event of a change; without a kind, no event is recorded."""

    kind: str | None
    level: str = "INFO"
    message: str | None = None


def group_statement(group: Group, note: AuditNote, now: datetime, actor: str | None) -> Statement:
    """Returns the statement that writes a group, and an audit event if the note has a kind."""
    version = group.version + (note.kind is not None)
    changed = (
        group.id,
        group.workspace,
        version,
        group.status,
        group.made,
        group.open,
        group.succeeded,
        group.failed,
        group.turn,
        group.follows,
        group.finished_at,
    )
    data = {"status": group.status, "flow": group.flow}
    rows = {"changed": [changed], "noted": _event_rows(group, version, note, data)}
    return Statement("group_update", {"now": now, "actor": actor}, rows)


def flow_statement(flow: Flow, note: AuditNote, now: datetime, actor: str | None) -> Statement:
    """Returns the statement that writes a flow, and an audit event if the note has a kind."""
    version = flow.version + (note.kind is not None)
    changed = (
        flow.id,
        flow.workspace,
        version,
        flow.status,
        flow.steps_left,
        flow.open,
        flow.failed,
        flow.finished_at,
    )
    rows = {
        "changed": [changed],
        "noted": _event_rows(flow, version, note, {"status": flow.status}),
    }
    return Statement("flow_update", {"now": now, "actor": actor}, rows)


def _event_rows(
    subject: Flow | Group, version: int, note: AuditNote, data: dict[str, Any]
) -> list[tuple[Any, ...]]:
    """Returns a list with the row of the note's audit event; empty if the note has no kind."""
    if note.kind is None:
        return []
    text = msgspec.json.encode(data).decode()
    message = note.message or subject.key
    return [(subject.id, subject.workspace, version, note.kind, note.level, message, text)]


def control_of(row: Row) -> Control | None:
    """Returns the control settings in a task's row; `None` for a task of an agent."""
    text = row["control"]
    return None if text is None else msgspec.json.decode(text, type=Control)


def is_by_engine(row: Row) -> bool:
    """True if the engine itself runs the task: an approval, or a control task without a prompt."""
    kind = row["kind"]
    return kind == "approval" or (kind != "agent" and row["prompt"] is None)


def context_of(text: str | None) -> ActivationContext:
    """Returns the stored activation context; an empty one for `None`."""
    return (
        ActivationContext() if text is None else msgspec.json.decode(text, type=ActivationContext)
    )


def group_of(row: Row) -> Group:
    """Returns the group in a row."""
    fields = {name: row[name] for name in Group.__struct_fields__}
    return Group(**fields | {"status": GroupStatus(row["status"])})


def flow_of(row: Row) -> Flow:
    """Returns the flow in a row."""
    fields = {name: row[name] for name in Flow.__struct_fields__}
    return Flow(**fields | {"status": FlowStatus(row["status"])})


def is_paused(group: Group) -> Script[bool]:
    """True if a locked group, an ancestor group or its flow is paused; locks those it reads."""
    while group.status is not GroupStatus.PAUSED:
        if group.parent is None:
            rows = yield Statement("flows_locked", {"ids": [group.flow]})
            return bool(rows[0]["status"] == FlowStatus.PAUSED)
        rows = yield Statement("groups_locked", {"ids": [group.parent]})
        group = group_of(rows[0])
    return True


def add_waiters_statement(counts: Counter[UUID], existing: dict[UUID, Row]) -> Statement:
    """Returns the statement that counts new dependents of tasks and marks unfinished ones watched.

    The caller has locked the existing tasks.
    """
    needed = [
        (dependency, waiters, Status(existing[dependency]["status"]) not in TERMINAL)
        for dependency, waiters in sorted(counts.items())
    ]
    return Statement("add_waiters", rows={"needed": needed})
