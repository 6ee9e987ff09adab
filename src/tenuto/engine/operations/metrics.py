"""Metrics of tasks, for the whole deployment: counted from events, and sampled."""

import logging
from collections.abc import Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

from tenuto.engine.core import Core
from tenuto.engine.rows import decode_json
from tenuto.metrics import Metrics
from tenuto.model.errors import TenutoError
from tenuto.model.tasks.task import LEASED, TERMINAL, Outcome, Status
from tenuto.store.protocol import Row, Statement

log = logging.getLogger("tenuto.metrics")

BATCH_SIZE = 500
MAX_UNMEASURED = 20_000
"""Events kept for measuring while the store is unavailable; the oldest are dropped."""
MAX_COUNTED = 100_000
"""Rows that a sample counts at most."""
TASKS_PER_LANE = 100
"""Tasks per lane, from its head, among which a sample searches the oldest."""
_NOT_FAILED = (Outcome.PARKED, Outcome.RELEASED)
"""Outcomes after which a DEAD task was parked or released too often, and did not fail."""


class MetricsRecorder:
    """Counts every event passed to it, once."""

    def __init__(self, core: Core, metrics: Metrics) -> None:
        self._core = core
        self._metrics = metrics
        self._unmeasured: list[Row] = []

    async def process_events(self, events: Sequence[Row]) -> None:
        """Counts the events and measures durations; later calls measure what the store refused."""
        for event in events:
            if self._count(event):
                self._unmeasured.append(event)
        try:
            await self._measure_waiting()
        except TenutoError as error:
            log.warning("cannot measure task durations now, the next events retry: %s", error)
            del self._unmeasured[:-MAX_UNMEASURED]
        except Exception:
            log.exception("internal error while measuring durations; they are not counted")
            self._unmeasured.clear()

    def _count(self, event: Row) -> bool:
        """Counts one event; returns true if a duration must be measured, too."""
        count, before, after = self._metrics.count, event["previous"], event["new"]
        if event["kind"] == "submitted":
            count("tenuto_tasks_submitted_total")
        if before == after:
            return False
        if event["kind"] == "claimed":
            count("tenuto_claims_total", "claimed")
        if before in LEASED and after == Status.RETRY_WAIT:
            count("tenuto_retries_total", str(_event_data(event).get("error_class")))
        if after == Status.DEAD:
            self._count_dead(_event_data(event).get("outcome"))
        elif event["kind"] == "lease_expired":
            count("tenuto_lease_expirations_total")
        if after in TERMINAL:
            count("tenuto_tasks_completed_total", after)
            self._metrics.observe("tenuto_task_attempts", event["attempt"])
        return before in LEASED or after in TERMINAL or after == Status.RUNNING

    def _count_dead(self, outcome: str | None) -> None:
        """Counts a DEAD task; `outcome` is that of its last attempt."""
        self._metrics.count("tenuto_dead_total")
        if outcome not in _NOT_FAILED:
            self._metrics.count("tenuto_retry_exhausted_total")
        if outcome == Outcome.STALLED:
            self._metrics.count("tenuto_lease_expirations_total")

    async def _measure_waiting(self) -> None:
        """Measures the durations of the waiting events, in batches, and drops the events."""
        while batch := self._unmeasured[:BATCH_SIZE]:
            marks = [(event["task"], event["seq"], event["attempt"]) for event in batch]
            statement = Statement("event_history", rows={"mark": marks})
            rows = await self._core.store.fetch(statement)
            histories: dict[tuple[UUID, int], Row] = {
                (row["task"], row["seq"]): row for row in rows
            }
            del self._unmeasured[: len(batch)]
            for event in batch:
                self._measure(event, histories[event["task"], event["seq"]])

    def _measure(self, event: Row, history: Row) -> None:
        """Observes the durations that end with the event; `history` has their starts."""
        before, after, at = event["previous"], event["new"], event["at"]
        if after == Status.RUNNING:
            self._observe("tenuto_task_wait_seconds", history["pending_at"], at)
        if before in LEASED and after not in LEASED:
            ran_s = self._observe("tenuto_task_duration_seconds", history["running_at"], at)
            self._metrics.count("tenuto_compute_seconds_total", by=ran_s)
        if after in TERMINAL:
            self._observe("tenuto_task_e2e_seconds", history["asked_at"], at)

    def _observe(self, name: str, since: datetime | None, until: datetime) -> float:
        """Observes the duration if its start is known; returns it in seconds, otherwise 0."""
        if since is None:
            return 0.0
        seconds = _seconds_between(since, until)
        self._metrics.observe(name, seconds)
        return seconds


def _event_data(event: Row) -> dict[str, Any]:
    """Returns the event's data; an empty dict if it has none."""
    return decode_json(event["data"]) or {}


def _seconds_between(since: datetime, until: datetime) -> float:
    """Returns the seconds between two times; 0 if the clock was set back."""
    return max(0.0, (until - since).total_seconds())


async def sample_once(core: Core, metrics: Metrics, leader: str, excluded: str) -> None:
    """Reads the current numbers of all workspaces, and sets the gauges.

    The subscriber `excluded` is left out of the lag: it skips events, so its cursor says nothing.
    """
    now = core.now()
    limits = {"most": MAX_COUNTED, "heads": TASKS_PER_LANE}
    params = {"now": now, "leader": leader, "apart": excluded, **limits}
    rows = await core.store.fetch(Statement("metrics_sample", params))
    samples: dict[str, dict[str, float]] = {"tasks": {}, "workers": {}, "agents": {}}
    for row in rows:
        samples.setdefault(row["what"], {})[row["which"]] = row["n"]
    oldest = next(row["oldest_at"] for row in rows if row["what"] == "oldest")
    for name in ("tasks", "workers", "agents"):
        metrics.put(f"tenuto_{name}", samples[name])
    age = 0.0 if oldest is None else _seconds_between(oldest, now)
    metrics.put("tenuto_tasks_pending_oldest_seconds", age)
    metrics.put("tenuto_retries_due", samples["retries_due"][""])
    stale = sum(samples["agents"].get(status, 0) for status in ("STALE", "ERROR"))
    metrics.put("tenuto_stale_agents", stale)
    metrics.put("tenuto_coordinator_leader", samples["leader"][""])
    metrics.put("tenuto_outbox_lag", samples["outbox"][""])
    metrics.put("tenuto_broker_lag", {"none": 0})
