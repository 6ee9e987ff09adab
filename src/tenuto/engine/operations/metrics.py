"""Metrics of tasks, for the whole deployment: from the events as they come, and by sampling."""

import logging
from collections.abc import Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

from tenuto.engine.core import Core
from tenuto.engine.rows import decode
from tenuto.metrics import Metrics
from tenuto.model.errors import TenutoError
from tenuto.model.tasks.task import LEASED, TERMINAL, Outcome, Status
from tenuto.store.protocol import Row, Statement

log = logging.getLogger("tenuto.metrics")

BATCH = 500
MOST_MARKS = 20_000
"""Events whose times may wait for a store that does not answer; the oldest are given up."""
MOST = 100_000
"""Where a sample stops to count."""
HEADS = 100
"""Tasks of each lane among which a sample looks for the oldest."""
_UNFORCED = (Outcome.PARKED, Outcome.RELEASED)
"""Ends after which a task is DEAD for coming back too often, not for failing."""


class MetricsRecorder:
    """Counts every event that it is handed, once."""

    def __init__(self, core: Core, metrics: Metrics) -> None:
        self._core = core
        self._metrics = metrics
        self._marks: list[Row] = []

    async def process_events(self, events: Sequence[Row]) -> None:
        """Count the events; times that need what came before are read for all of them at once."""
        for event in events:
            if self._count(event):
                self._marks.append(event)
        try:
            await self._measure_all()
        except TenutoError as error:
            log.warning("times wait to be counted: %s", error)
            del self._marks[:-MOST_MARKS]
        except Exception:
            log.exception("a fault while measuring; these times are not counted")
            self._marks.clear()

    def _count(self, event: Row) -> bool:
        """Count what the event itself says; answers whether there is time to measure."""
        count, before, after = self._metrics.count, event["previous"], event["new"]
        if event["kind"] == "submitted":
            count("tenuto_tasks_submitted_total")
        if before == after:
            return False
        if event["kind"] == "claimed":
            count("tenuto_claims_total", "claimed")
        if before in LEASED and after == Status.RETRY_WAIT:
            count("tenuto_retries_total", str(_data(event).get("error_class")))
        if after == Status.DEAD:
            self._count_dead(_data(event).get("outcome"))
        elif event["kind"] == "lease_expired":
            count("tenuto_lease_expirations_total")
        if after in TERMINAL:
            count("tenuto_tasks_completed_total", after)
            self._metrics.observe("tenuto_task_attempts", event["attempt"])
        return before in LEASED or after in TERMINAL or after == Status.RUNNING

    def _count_dead(self, outcome: str | None) -> None:
        self._metrics.count("tenuto_dead_total")
        if outcome not in _UNFORCED:
            self._metrics.count("tenuto_retry_exhausted_total")
        if outcome == Outcome.STALLED:
            self._metrics.count("tenuto_lease_expirations_total")

    async def _measure_all(self) -> None:
        while part := self._marks[:BATCH]:
            marks = [(each["task"], each["seq"], each["attempt"]) for each in part]
            wanted = Statement("event_pasts", rows={"mark": marks})
            rows = await self._core.store.fetch(wanted)
            pasts: dict[tuple[UUID, int], Row] = {(row["task"], row["seq"]): row for row in rows}
            del self._marks[: len(part)]
            for each in part:
                self._measure(each, pasts[each["task"], each["seq"]])

    def _measure(self, event: Row, past: Row) -> None:
        before, after, at = event["previous"], event["new"], event["at"]
        if after == Status.RUNNING:
            self._observe("tenuto_task_wait_seconds", past["pending_at"], at)
        if before in LEASED and after not in LEASED:
            ran = self._observe("tenuto_task_duration_seconds", past["running_at"], at)
            self._metrics.count("tenuto_compute_seconds_total", by=ran)
        if after in TERMINAL:
            self._observe("tenuto_task_e2e_seconds", past["asked_at"], at)

    def _observe(self, name: str, since: datetime | None, until: datetime) -> float:
        """Note the time between, if its beginning is known; answers it."""
        if since is None:
            return 0.0
        seconds = _seconds(since, until)
        self._metrics.observe(name, seconds)
        return seconds


def _data(event: Row) -> dict[str, Any]:
    return decode(event["data"]) or {}


def _seconds(since: datetime, until: datetime) -> float:
    """The time between; nothing where a clock was put back."""
    return max(0.0, (until - since).total_seconds())


async def sample_once(core: Core, metrics: Metrics, leader: str, apart: str) -> None:
    """Set the gauges to how everything stands, over all workspaces.

    The subscriber `apart` skips events, so its place says nothing about a lag.
    """
    now = core.now()
    limits = {"most": MOST, "heads": HEADS}
    params = {"now": now, "leader": leader, "apart": apart, **limits}
    rows = await core.store.fetch(Statement("sample", params))
    found: dict[str, dict[str, float]] = {"tasks": {}, "workers": {}, "agents": {}}
    for row in rows:
        found.setdefault(row["what"], {})[row["which"]] = row["n"]
    oldest = next(row["oldest_at"] for row in rows if row["what"] == "oldest")
    for name in ("tasks", "workers", "agents"):
        metrics.put(f"tenuto_{name}", found[name])
    age = 0.0 if oldest is None else _seconds(oldest, now)
    metrics.put("tenuto_tasks_pending_oldest_seconds", age)
    metrics.put("tenuto_retries_due", found["retries_due"][""])
    silent = sum(found["agents"].get(status, 0) for status in ("STALE", "ERROR"))
    metrics.put("tenuto_stale_agents", silent)
    metrics.put("tenuto_coordinator_leader", found["leader"][""])
    metrics.put("tenuto_outbox_lag", found["outbox"][""])
    metrics.put("tenuto_broker_lag", {"none": 0})
