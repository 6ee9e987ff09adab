"""Firing: the times of schedules that have come, all workspaces. Safe in any number."""

import logging
from datetime import datetime
from typing import Any
from uuid import UUID

import msgspec

from tenuto.engine.core import Core
from tenuto.engine.flows.advance import Cascade
from tenuto.engine.flows.deferred import end_flow
from tenuto.engine.flows.rows import flow_of
from tenuto.engine.flows.start import Flows
from tenuto.engine.rows import decode
from tenuto.engine.schedules.rows import (
    ScheduleAuditNote,
    ScheduleRow,
    changed,
    queue_text,
    schedule_of,
    settled,
)
from tenuto.engine.schedules.schedules import fire_key, fired
from tenuto.model import bounds
from tenuto.model.errors import Incompatible, TenutoError, TooMany, Unavailable
from tenuto.model.flows.progress import FLOW_OPEN
from tenuto.model.schedules.firing import FiringDecision, ScheduleState, decide_firing
from tenuto.store.protocol import Row, Script, Statement

log = logging.getLogger("tenuto.engine")

BATCH = 100
"""Schedules that are looked at together."""
MOST_LIVE = 100


class _PreparedFlow(msgspec.Struct, frozen=True):
    """What is known before the transaction: the flow to begin, or why there can be none."""

    flows: Flows
    params: dict[str, Any] | None = None
    error: str | None = None


class ScheduleRunner:
    """The system's side of schedules. A time starts one flow, whoever looks and how often."""

    def __init__(self, core: Core) -> None:
        self._core = core

    async def fire_once(self, most: int = BATCH) -> int:
        """Start what is due, each schedule in a transaction; answers how many had a time."""
        now = self._core.now()
        found: dict[UUID, Row] = {}
        for wanted in (
            Statement("schedules_due", {"now": now, "most": most}),
            Statement("schedules_free", {"most": most}),
        ):
            found |= {row["id"]: row for row in await self._core.store.fetch(wanted)}
        return sum([await self._fire(row) for row in found.values()])

    async def _fire(self, row: Row) -> int:
        """Let one schedule have its turn; one that cannot is paused, and holds up no other."""
        actor = f"schedule:{row['name']}"
        try:
            ready = await self._ready(row, actor)
            try:
                return await self._take_turn(row, ready, actor)
            except TooMany as full:
                return await self._take_turn(
                    row, _PreparedFlow(ready.flows, error=full.message), actor
                )
        except (Unavailable, Incompatible):
            raise
        except Exception as error:
            log.exception("schedule %s is paused: it cannot be understood", row["id"])
            return await self._stop(row["id"], f"paused: {error}", actor)

    async def _take_turn(self, row: Row, ready: _PreparedFlow, actor: str) -> int:
        return await self._core.run_with_cascade(
            lambda cascade: self._turn(cascade, row, ready), actor
        )

    async def _ready(self, row: Row, actor: str) -> _PreparedFlow:
        flows = Flows(self._core, row["workspace"], actor)
        try:
            plan = await flows.plan(row["target"])
            source = f"schedule:{row['id']}"
            params = await flows.prepare(plan, decode(row["input"]), source=source)
        except (Unavailable, Incompatible):
            raise
        except TenutoError as error:
            return _PreparedFlow(flows, error=error.message)
        return _PreparedFlow(flows, params)

    def _turn(self, cascade: Cascade, seen: Row, ready: _PreparedFlow) -> Script[int]:
        rows = yield Statement("schedule_take", {"id": seen["id"]})
        if not rows or any(rows[0][name] != seen[name] for name in ("target", "input")):
            return 0  # somebody is at it, or has changed what was prepared
        found, now = schedule_of(rows[0]), self._core.now()
        params = {"workspace": found.workspace, "source": found.source, "most": MOST_LIVE}
        live = [row["id"] for row in (yield Statement("schedule_flows", params))]
        due = found.next_at is not None and found.next_at <= now
        if not due and (live or not found.line):
            return 0
        standing = ScheduleState(last=found.last_at, queued=found.line, running=len(live))
        chosen = decide_firing(found.times, standing, now, self._core.clock.random())
        begun = None
        if chosen.start is not None and ready.params is not None:
            if chosen.cancel:
                yield from self._cancel(cascade, live, now)
            begun = ready.params | {"fire_key": fire_key(found.id, chosen.start), "now": now}
            if not (yield from ready.flows.begin(cascade, begun)):
                begun = None
        after, noted = _told(found, chosen, begun, ready.error)
        yield changed(after, noted, now, f"schedule:{found.name}")
        return 1

    def _cancel(self, cascade: Cascade, flows: list[UUID], now: datetime) -> Script[None]:
        for row in (yield Statement("flows_locked", {"ids": flows})):
            flow = flow_of(row)
            if flow.status in FLOW_OPEN:
                why = "its schedule has started the next one"
                yield from end_flow(cascade, flow, why, now)

    async def _stop(self, schedule: UUID, why: str, actor: str) -> int:
        def script() -> Script[int]:
            rows = yield Statement("schedule_take", {"id": schedule})
            for row in rows:
                error = bounds.clean(why, bounds.MAX_ERROR)
                after = msgspec.structs.replace(
                    schedule_of(row), status="PAUSED", next_at=None, last_error=error
                )
                noted = ScheduleAuditNote("schedule_failed", level="ERROR", message=error)
                yield changed(after, [noted], self._core.now(), actor)
            return len(rows)

        return await self._core.store.transact(script)


def _told(
    found: ScheduleRow, chosen: FiringDecision, begun: dict[str, Any] | None, error: str | None
) -> tuple[ScheduleRow, list[ScheduleAuditNote]]:
    """The schedule after its turn, and what the trail says of it."""
    noted = []
    failed = begun is None and chosen.start is not None and error is not None
    if chosen.missed:
        noted.append(ScheduleAuditNote("schedule_missed", {"times": chosen.missed}, "WARN"))
    for kind, times in (("schedule_skipped", chosen.skipped), ("schedule_queued", chosen.waiting)):
        if times:
            span = {"times": len(times), "first": times[0], "last": times[-1]}
            noted.append(ScheduleAuditNote(kind, span))
    if failed:
        noted.append(ScheduleAuditNote("schedule_failed", {"time": chosen.start}, "ERROR", error))
    after = settled(
        msgspec.structs.replace(
            found,
            last_at=chosen.last,
            next_at=chosen.next,
            queued=queue_text(chosen.queued),
            missed=found.missed + chosen.missed + len(chosen.skipped) + failed,
            last_error=error if failed else found.last_error,
        )
    )
    if begun is not None and chosen.start is not None:
        noted.append(fired(chosen.start, begun["id"]))
        after = msgspec.structs.replace(
            after,
            fired=after.fired + 1,
            fired_at=chosen.start,
            last_flow=begun["id"],
            last_error=None,
        )
    if after.status == "ENDED":
        noted.append(ScheduleAuditNote("schedule_ended"))
    return after, noted
