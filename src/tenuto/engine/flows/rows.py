"""Between rows and the model of flows: flows and groups read, and their changes spelled out."""

from collections import Counter
from datetime import datetime
from typing import Any
from uuid import UUID

import msgspec

from tenuto.model.flows.definition import Control
from tenuto.model.flows.progress import ActivationContext, Flow, FlowStatus, Group, GroupStatus
from tenuto.model.tasks.task import TERMINAL, Status
from tenuto.store.protocol import Row, Script, Statement

RANKS_FAR = 64
"""How many steps away a rank is passed on to what a task waits for."""


class AuditNote(msgspec.Struct, frozen=True):
    """What the trail says of a change; without a kind, nothing."""

    kind: str | None
    level: str = "INFO"
    message: str | None = None


def group_statement(group: Group, told: AuditNote, now: datetime, actor: str | None) -> Statement:
    """Write a group, and tell of it."""
    version = group.version + (told.kind is not None)
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
    rows = {"changed": [changed], "noted": _noted(group, version, told, data)}
    return Statement("group_change", {"now": now, "actor": actor}, rows)


def flow_statement(flow: Flow, told: AuditNote, now: datetime, actor: str | None) -> Statement:
    """Write a flow, and tell of it."""
    version = flow.version + (told.kind is not None)
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
    rows = {"changed": [changed], "noted": _noted(flow, version, told, {"status": flow.status})}
    return Statement("flow_change", {"now": now, "actor": actor}, rows)


def _noted(
    of: Flow | Group, version: int, told: AuditNote, data: dict[str, Any]
) -> list[tuple[Any, ...]]:
    if told.kind is None:
        return []
    text = msgspec.json.encode(data).decode()
    message = told.message or of.key
    return [(of.id, of.workspace, version, told.kind, told.level, message, text)]


def control_of(row: Row) -> Control | None:
    """What a task's row says that it controls."""
    text = row["control"]
    return None if text is None else msgspec.json.decode(text, type=Control)


def is_by_engine(row: Row) -> bool:
    """Whether a task is the engine's own: it controls a flow and has nothing to ask of an agent."""
    kind = row["kind"]
    return kind == "approval" or (kind != "agent" and row["prompt"] is None)


def context_of(text: str | None) -> ActivationContext:
    """What an activation added to its definition."""
    return (
        ActivationContext() if text is None else msgspec.json.decode(text, type=ActivationContext)
    )


def group_of(row: Row) -> Group:
    """The group in a row."""
    fields = {name: row[name] for name in Group.__struct_fields__}
    return Group(**fields | {"status": GroupStatus(row["status"])})


def flow_of(row: Row) -> Flow:
    """The flow in a row."""
    fields = {name: row[name] for name in Flow.__struct_fields__}
    return Flow(**fields | {"status": FlowStatus(row["status"])})


def is_paused(group: Group) -> Script[bool]:
    """Whether a group, one around it, or its flow is paused. The caller holds the group."""
    while group.status is not GroupStatus.PAUSED:
        if group.parent is None:
            rows = yield Statement("flows_locked", {"ids": [group.flow]})
            return bool(rows[0]["status"] == FlowStatus.PAUSED)
        rows = yield Statement("groups_locked", {"ids": [group.parent]})
        group = group_of(rows[0])
    return True


def awaiting(counts: Counter[UUID], found: dict[UUID, Row]) -> Statement:
    """The statement that counts who waits for tasks which exist. The caller holds them."""
    needed = [
        (need, n, Status(found[need]["status"]) not in TERMINAL)
        for need, n in sorted(counts.items())
    ]
    return Statement("await", rows={"needed": needed})
