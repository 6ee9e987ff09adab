"""Maps rows of schedules, and builds their writes with the audit notes."""

from collections.abc import Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

import msgspec

from tenuto.model.schedules.firing import initial_cursor, next_poll_at
from tenuto.model.schedules.schedule import ScheduleSpec
from tenuto.store.protocol import Row, Statement

MAX_SCHEDULES = 1_000
"""Schedules in one workspace."""


class ScheduleRow(msgspec.Struct, frozen=True, kw_only=True):
    """A schedule as stored in its row; `spec`, `input` and `queued` are JSON text."""

    id: UUID
    workspace: UUID
    name: str
    target: str
    spec: str
    input: str | None
    status: str = "ACTIVE"
    last_at: datetime
    """All due times up to this one are handled."""
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
        """Returns the decoded `spec`: the times at which it starts its target."""
        return msgspec.json.decode(self.spec, type=ScheduleSpec)

    @property
    def queued_times(self) -> tuple[datetime, ...]:
        """Returns the due times that wait until the running flow finishes."""
        if self.queued is None:
            return ()
        return msgspec.json.decode(self.queued, type=tuple[datetime, ...])

    @property
    def source(self) -> str:
        """Returns the `source` of flows that this schedule starts."""
        return f"schedule:{self.id}"


class ScheduleAuditNote(msgspec.Struct, frozen=True):
    """An event of a schedule, to be stored in the audit trail."""

    kind: str
    data: Any = None
    level: str = "INFO"
    message: str | None = None


def schedule_of(row: Row) -> ScheduleRow:
    """Returns the schedule of a row."""
    return ScheduleRow(**{name: row[name] for name in ScheduleRow.__struct_fields__})


def spec_json(spec: ScheduleSpec) -> str:
    """Returns the schedule's times as JSON, for its row."""
    return msgspec.json.encode(spec).decode()


def queue_json(times: Sequence[datetime]) -> str | None:
    """Returns queued times as JSON, for a row; `None` if there are none."""
    return msgspec.json.encode(list(times)).decode() if times else None


def with_new_times(
    schedule: ScheduleRow, spec: ScheduleSpec, now: datetime, roll: float
) -> ScheduleRow:
    """Returns the schedule with new times, from now on; a paused one stays paused.

    A fixed time in the past only starts the target if it changed. `roll` in [0, 1) sets the jitter.
    """
    is_unchanged = spec.kind == "datetime-event" and schedule.times.at == spec.at
    last = schedule.last_at if is_unchanged else initial_cursor(spec, now)
    queued = schedule.queued_times if spec.overlap == "queue" else ()
    after = msgspec.structs.replace(
        schedule,
        spec=spec_json(spec),
        last_at=last,
        next_at=next_poll_at(spec, last, roll),
        queued=queue_json((now,) if spec.kind == "immediate" else queued),
    )
    if schedule.status == "PAUSED":
        return msgspec.structs.replace(after, next_at=None)
    return with_derived_status(after)


def with_derived_status(schedule: ScheduleRow) -> ScheduleRow:
    """Returns the schedule as ENDED if no time is left, otherwise as ACTIVE."""
    has_ended = schedule.next_at is None and schedule.queued is None
    return msgspec.structs.replace(schedule, status="ENDED" if has_ended else "ACTIVE")


def insert_statement(
    schedule: ScheduleRow, notes: Sequence[ScheduleAuditNote], now: datetime, actor: str | None
) -> Statement:
    """Returns the insert statement, which returns no row if the name is taken or too many exist."""
    params = _statement_params(schedule, len(notes), now, actor) | {
        "name": schedule.name,
        "most": MAX_SCHEDULES,
    }
    return Statement("schedule_add", params, _note_rows(schedule, notes))


def update_statement(
    schedule: ScheduleRow, notes: Sequence[ScheduleAuditNote], now: datetime, actor: str | None
) -> Statement:
    """Returns the statement that updates a schedule; each audit note adds 1 to its version."""
    params = _statement_params(schedule, schedule.version + len(notes), now, actor)
    return Statement("schedule_update", params, _note_rows(schedule, notes))


def _statement_params(
    schedule: ScheduleRow, version: int, now: datetime, actor: str | None
) -> dict[str, Any]:
    excluded = {"name", "version", "created_by", "created_at", "updated_at"}
    names = [name for name in ScheduleRow.__struct_fields__ if name not in excluded]
    fields = {name: getattr(schedule, name) for name in names}
    return fields | {"version": version, "now": now, "actor": actor}


def _note_rows(
    schedule: ScheduleRow, notes: Sequence[ScheduleAuditNote]
) -> dict[str, list[tuple[Any, ...]]]:
    """Returns the notes as the rows `noted`, numbered from the version after the schedule's on."""
    rows = []
    for seq, note in enumerate(notes, schedule.version + 1):
        data = None if note.data is None else msgspec.json.encode(note.data).decode()
        message = note.message or schedule.name
        rows.append((schedule.id, seq, note.kind, note.level, message, data))
    return {"noted": rows}
