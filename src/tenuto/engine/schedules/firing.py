"""Starts the flows of due schedules, in all workspaces. Several processes can run it at once."""

import logging
from datetime import datetime
from typing import Any
from uuid import UUID

import msgspec

from tenuto.engine.core import Core
from tenuto.engine.flows.advance import Cascade
from tenuto.engine.flows.deferred import cancel_flow
from tenuto.engine.flows.rows import flow_of
from tenuto.engine.flows.start import Flows
from tenuto.engine.rows import decode_json
from tenuto.engine.schedules.rows import (
    ScheduleAuditNote,
    ScheduleRow,
    queue_json,
    schedule_of,
    update_statement,
    with_derived_status,
)
from tenuto.engine.schedules.schedules import fire_key, fired_note
from tenuto.model import bounds
from tenuto.model.errors import Incompatible, TenutoError, TooMany, Unavailable
from tenuto.model.flows.progress import FLOW_OPEN
from tenuto.model.schedules.firing import FiringDecision, ScheduleState, decide_firing
from tenuto.store.protocol import Row, Script, Statement

log = logging.getLogger("tenuto.engine")

MAX_BATCH = 100
"""Schedules read in one poll."""
MAX_OPEN_FLOWS = 100


class _PreparedFlow(msgspec.Struct, frozen=True):
    """A flow prepared before the transaction: its parameters, or why it cannot start."""

    flows: Flows
    params: dict[str, Any] | None = None
    error: str | None = None


class ScheduleRunner:
    """Starts the targets of due schedules. Each due time starts at most one flow."""

    def __init__(self, core: Core) -> None:
        self._core = core

    async def fire_once(self, limit: int = MAX_BATCH) -> int:
        """Fires due schedules, also queued times, one per transaction; returns how many."""
        now = self._core.now()
        due_rows: dict[UUID, Row] = {}
        for statement in (
            Statement("schedules_due", {"now": now, "most": limit}),
            Statement("schedules_unblocked", {"most": limit}),
        ):
            due_rows |= {row["id"]: row for row in await self._core.store.fetch(statement)}
        return sum([await self._fire(row) for row in due_rows.values()])

    async def _fire(self, row: Row) -> int:
        """Fires one schedule; returns 1 if it was due, else 0. An internal error pauses it."""
        actor = f"schedule:{row['name']}"
        try:
            prepared = await self._prepare(row, actor)
            try:
                return await self._run_decision(row, prepared, actor)
            except TooMany as too_many:
                return await self._run_decision(
                    row, _PreparedFlow(prepared.flows, error=too_many.message), actor
                )
        except (Unavailable, Incompatible):
            raise
        except Exception as error:
            log.exception("internal error in schedule %s; it is paused", row["id"])
            return await self._pause_failed(row["id"], f"paused: {error}", actor)

    async def _run_decision(self, row: Row, prepared: _PreparedFlow, actor: str) -> int:
        """Runs `_decide_and_start` in a transaction; returns 1 if the schedule was due, else 0."""
        return await self._core.run_with_cascade(
            lambda cascade: self._decide_and_start(cascade, row, prepared), actor
        )

    async def _prepare(self, row: Row, actor: str) -> _PreparedFlow:
        """Returns the schedule's prepared next flow, or the error why it cannot start."""
        flows = Flows(self._core, row["workspace"], actor)
        try:
            plan = await flows.build_plan(row["target"])
            source = f"schedule:{row['id']}"
            params = await flows.prepare(plan, decode_json(row["input"]), source=source)
        except (Unavailable, Incompatible):
            raise
        except TenutoError as error:
            return _PreparedFlow(flows, error=error.message)
        return _PreparedFlow(flows, params)

    def _decide_and_start(
        self, cascade: Cascade, read_row: Row, prepared: _PreparedFlow
    ) -> Script[int]:
        """Locks the schedule, starts its flow, stores the decision; 0 if changed or not due."""
        rows = yield Statement("schedule_lock_active", {"id": read_row["id"]})
        if not rows or any(rows[0][name] != read_row[name] for name in ("target", "input")):
            return 0  # another process has locked it, or its target or input was changed
        schedule, now = schedule_of(rows[0]), self._core.now()
        params = {
            "workspace": schedule.workspace,
            "source": schedule.source,
            "most": MAX_OPEN_FLOWS,
        }
        open_flows = [row["id"] for row in (yield Statement("schedule_flows", params))]
        is_due = schedule.next_at is not None and schedule.next_at <= now
        if not is_due and (open_flows or not schedule.queued_times):
            return 0
        state = ScheduleState(
            last=schedule.last_at, queued=schedule.queued_times, running=len(open_flows)
        )
        decision = decide_firing(schedule.times, state, now, self._core.clock.random())
        started = None
        if decision.start is not None and prepared.params is not None:
            if decision.cancel:
                yield from self._cancel_flows(cascade, open_flows, now)
            started = prepared.params | {
                "fire_key": fire_key(schedule.id, decision.start),
                "now": now,
            }
            if not (yield from prepared.flows.start_prepared(cascade, started)):
                started = None
        after, notes = _after_decision(schedule, decision, started, prepared.error)
        yield update_statement(after, notes, now, f"schedule:{schedule.name}")
        return 1

    def _cancel_flows(self, cascade: Cascade, flows: list[UUID], now: datetime) -> Script[None]:
        """Cancels those of the flows that are still open."""
        for row in (yield Statement("flows_locked", {"ids": flows})):
            flow = flow_of(row)
            if flow.status in FLOW_OPEN:
                reason = "its schedule started the next flow"
                yield from cancel_flow(cascade, flow, reason, now)

    async def _pause_failed(self, schedule: UUID, reason: str, actor: str) -> int:
        """Pauses an active schedule and records the error; returns 1, or 0 if it is not active."""

        def script() -> Script[int]:
            rows = yield Statement("schedule_lock_active", {"id": schedule})
            for row in rows:
                error = bounds.make_storable(reason, bounds.MAX_ERROR)
                after = msgspec.structs.replace(
                    schedule_of(row), status="PAUSED", next_at=None, last_error=error
                )
                note = ScheduleAuditNote("schedule_failed", level="ERROR", message=error)
                yield update_statement(after, [note], self._core.now(), actor)
            return len(rows)

        return await self._core.store.transact(script)


def _after_decision(
    schedule: ScheduleRow,
    decision: FiringDecision,
    started: dict[str, Any] | None,
    error: str | None,
) -> tuple[ScheduleRow, list[ScheduleAuditNote]]:
    """Returns the schedule after a firing decision, and the audit notes of this decision.

    `started` has the parameters of the started flow; `error` says why no flow could be prepared.
    """
    notes = []
    has_failed = started is None and decision.start is not None and error is not None
    if decision.missed:
        notes.append(ScheduleAuditNote("schedule_missed", {"times": decision.missed}, "WARN"))
    for kind, times in (
        ("schedule_skipped", decision.skipped),
        ("schedule_queued", decision.waiting),
    ):
        if times:
            span = {"times": len(times), "first": times[0], "last": times[-1]}
            notes.append(ScheduleAuditNote(kind, span))
    if has_failed:
        notes.append(ScheduleAuditNote("schedule_failed", {"time": decision.start}, "ERROR", error))
    after = with_derived_status(
        msgspec.structs.replace(
            schedule,
            last_at=decision.last,
            next_at=decision.next,
            queued=queue_json(decision.queued),
            missed=schedule.missed + decision.missed + len(decision.skipped) + has_failed,
            last_error=error if has_failed else schedule.last_error,
        )
    )
    if started is not None and decision.start is not None:
        notes.append(fired_note(decision.start, started["id"]))
        after = msgspec.structs.replace(
            after,
            fired=after.fired + 1,
            fired_at=decision.start,
            last_flow=started["id"],
            last_error=None,
        )
    if after.status == "ENDED":
        notes.append(ScheduleAuditNote("schedule_ended"))
    return after, notes
