"""Between rows and schedules: read, changed, and spelled out with what the trail says."""

from collections.abc import Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

import msgspec

from tenuto.model.schedules.firing import initial_cursor, next_poll_at
from tenuto.model.schedules.schedule import ScheduleSpec
from tenuto.store.protocol import Row, Statement

MAX_SCHEDULES = 1_000
"""Of a workspace."""


class ScheduleRow(msgspec.Struct, frozen=True, kw_only=True):
    """A schedule as its row has it; `spec`, `input` and `queued` are JSON text."""

    id: UUID
    workspace: UUID
    name: str
    target: str
    spec: str
    input: str | None
    status: str = "ACTIVE"
    last_at: datetime
    """Up to here every time is handled."""
    next_at: datetime | None = None
    fired: int = 0
    missed: int = 0
    queued: str | None = None
    fired_at: datetime | None = None
    last_flow: UUID | None = None
    last_error: str | None = None
    version: int = 0
    created_by: str | None = None
    created_at: datetime
    updated_at: datetime

    @property
    def times(self) -> ScheduleSpec:
        """When it starts its target."""
        return msgspec.json.decode(self.spec, type=ScheduleSpec)

    @property
    def line(self) -> tuple[datetime, ...]:
        """The times that wait for a start before to end."""
        if self.queued is None:
            return ()
        return msgspec.json.decode(self.queued, type=tuple[datetime, ...])

    @property
    def source(self) -> str:
        """What its flows say of where they come from."""
        return f"schedule:{self.id}"


class ScheduleAuditNote(msgspec.Struct, frozen=True):
    """Something that the trail says of a schedule."""

    kind: str
    data: Any = None
    level: str = "INFO"
    message: str | None = None


def schedule_of(row: Row) -> ScheduleRow:
    """The schedule in a row."""
    return ScheduleRow(**{name: row[name] for name in ScheduleRow.__struct_fields__})


def encoded(spec: ScheduleSpec) -> str:
    """When to start, as a row keeps it."""
    return msgspec.json.encode(spec).decode()


def queue_text(times: Sequence[datetime]) -> str | None:
    """Times that wait, as a row keeps them."""
    return msgspec.json.encode(list(times)).decode() if times else None


def retimed(schedule: ScheduleRow, spec: ScheduleSpec, now: datetime, roll: float) -> ScheduleRow:
    """The schedule with other times: those from now on, and an old fixed time only if it moved."""
    same = spec.kind == "datetime-event" and schedule.times.at == spec.at
    last = schedule.last_at if same else initial_cursor(spec, now)
    line = schedule.line if spec.overlap == "queue" else ()
    after = msgspec.structs.replace(
        schedule,
        spec=encoded(spec),
        last_at=last,
        next_at=next_poll_at(spec, last, roll),
        queued=queue_text((now,) if spec.kind == "immediate" else line),
    )
    if schedule.status == "PAUSED":
        return msgspec.structs.replace(after, next_at=None)
    return settled(after)


def settled(schedule: ScheduleRow) -> ScheduleRow:
    """The schedule with the status that follows from what is still to come."""
    over = schedule.next_at is None and schedule.queued is None
    return msgspec.structs.replace(schedule, status="ENDED" if over else "ACTIVE")


def added(
    schedule: ScheduleRow, noted: Sequence[ScheduleAuditNote], now: datetime, actor: str | None
) -> Statement:
    """Write a new schedule, and tell of it."""
    params = _params(schedule, len(noted), now, actor) | {
        "name": schedule.name,
        "most": MAX_SCHEDULES,
    }
    return Statement("schedule_add", params, _rows(schedule, noted))


def changed(
    schedule: ScheduleRow, noted: Sequence[ScheduleAuditNote], now: datetime, actor: str | None
) -> Statement:
    """Write a schedule, and tell of it."""
    params = _params(schedule, schedule.version + len(noted), now, actor)
    return Statement("schedule_change", params, _rows(schedule, noted))


def _params(
    schedule: ScheduleRow, version: int, now: datetime, actor: str | None
) -> dict[str, Any]:
    left_out = {"name", "version", "created_by", "created_at", "updated_at"}
    names = [name for name in ScheduleRow.__struct_fields__ if name not in left_out]
    fields = {name: getattr(schedule, name) for name in names}
    return fields | {"version": version, "now": now, "actor": actor}


def _rows(
    schedule: ScheduleRow, noted: Sequence[ScheduleAuditNote]
) -> dict[str, list[tuple[Any, ...]]]:
    rows = []
    for seq, each in enumerate(noted, schedule.version + 1):
        data = None if each.data is None else msgspec.json.encode(each.data).decode()
        message = each.message or schedule.name
        rows.append((schedule.id, seq, each.kind, each.level, message, data))
    return {"noted": rows}
