"""The coordinator: its duties, which call bounded `*_once` functions, and the cycle of duties."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial

import msgspec

from tenuto.coordinator.outage import AlertSender, OutageMonitor
from tenuto.coordinator.resume import SuspensionDetector
from tenuto.crash_points import crash_point
from tenuto.engine.agents.registry import MAX_BATCH as AGENT_BATCH
from tenuto.engine.agents.registry import AgentMaintenance
from tenuto.engine.core import FLOW_WORK_TOPIC
from tenuto.engine.engine import Engine
from tenuto.engine.flows.repair import FlowRepair
from tenuto.engine.flows.start import Flows
from tenuto.engine.limits.concurrency import PermitRepair
from tenuto.engine.schedules.event_matching import CURSOR as TRIGGER_CURSOR
from tenuto.engine.schedules.event_matching import MAX_BATCH as TRIGGER_BATCH
from tenuto.engine.schedules.event_matching import TriggerRunner
from tenuto.engine.schedules.firing import MAX_BATCH as SCHEDULE_BATCH
from tenuto.engine.schedules.firing import ScheduleRunner
from tenuto.engine.tasks.maintenance import (
    BATCH,
    EVERY_LEASE,
    STANDBY_S,
    CycleReport,
    Leadership,
    Sink,
)
from tenuto.metrics import PROCESS_METRICS
from tenuto.model.errors import TenutoError, Unavailable
from tenuto.periodic import run_periodically
from tenuto.settings import Settings
from tenuto.store.protocol import Row

log = logging.getLogger("tenuto.coordinator")

NAME = "coordinator"
ALERTS = "tenuto.alerts"
ROUNDS = 20
"""How often one cycle repeats a duty that finds full batches."""
MAINTENANCE_EVERY = 30
"""Cycles between two runs of archiving, pruning and repair."""
RESIGN_TIMEOUT_S = 1.0
"""Timeout of a resignation after the store failed, in seconds."""


class CycleCounts(msgspec.Struct):
    """Counts of what one cycle did."""

    leading: bool = False
    expired: int = 0
    promoted: int = 0
    agents: int = 0
    fired: int = 0
    relayed: int = 0
    flowed: int = 0
    mended: int = 0
    archived: int = 0
    pruned: int = 0


class Coordinator:
    """Runs the duties for the store of one engine."""

    def __init__(
        self,
        engine: Engine,
        settings: Settings | None = None,
        subscribers: dict[str, Sink] | None = None,
        name: str = "coordinator-1",
    ) -> None:
        self.engine = engine
        self.settings = settings or Settings()
        self.name = name
        self.cycles = 0
        self._subscribers = subscribers or {}
        self._suspensions = SuspensionDetector(engine.clock, self.settings)
        self._alerts = AlertSender(self.settings.alert_url, engine.clock)
        self.outage = OutageMonitor(self._alerts, engine.clock, name)
        self.epoch: int | None = None
        """The epoch of its leadership as last confirmed, if it has not resigned."""
        self._duties: dict[str, float] = {}
        self._last_report: CycleReport | None = None
        self._standby_reported_at: float | None = None

    async def run(self, stop: asyncio.Event) -> None:
        """Runs cycles until `stop`, then resigns so that another coordinator leads at once."""
        has_work = asyncio.Event()
        unsubscribe = self.engine.subscribe(
            lambda topic: has_work.set() if topic == FLOW_WORK_TOPIC else None
        )
        try:
            await run_periodically(
                self._run_cycle_logged, self._next_delay, stop, self.engine.clock, has_work
            )
        finally:
            unsubscribe()
        crash_point("coordinator.before_resign")
        try:
            await self.engine.maintenance.resign(NAME, self.name)
        except TenutoError as error:
            log.warning("cannot resign: %s", error)
        await self._alerts.close()

    def _next_delay(self) -> float:
        return self.outage.next_delay(self.settings.tick_s)

    async def _run_cycle_logged(self) -> None:
        """Runs one cycle; logs and records its errors instead of raising them."""
        started = self.engine.clock.elapsed()
        self._duties = {}
        counts, error = CycleCounts(), None
        try:
            counts = await self.cycle_once()
        except Unavailable as outage:
            error = str(outage)
            log.warning("cycle failed: %s", error)
            await self._handle_outage(error)
        except TenutoError as failure:
            error = str(failure)
            log.warning("cycle failed: %s", error)
        except Exception as internal:
            error = type(internal).__name__
            log.exception("internal error in the cycle; the next cycle retries")
        seconds = self.engine.clock.elapsed() - started
        if counts.leading:
            PROCESS_METRICS.observe("tenuto_coordinator_cycle_seconds", seconds)
        done = {name: n for name, n in msgspec.structs.asdict(counts).items() if name != "leading"}
        self._last_report = CycleReport(
            seconds=seconds, duties=self._duties, counts=done, error=error
        )

    async def _handle_outage(self, reason: str) -> None:
        """Records an outage and resigns; the next cycle waits longer each time."""
        self.outage.record_failure(reason)
        led, self.epoch = self.epoch is not None, None
        if led:
            # If only a part of the store failed, this succeeds; else the leadership expires.
            with suppress(TenutoError, TimeoutError):
                async with asyncio.timeout(RESIGN_TIMEOUT_S):
                    await self.engine.maintenance.resign(NAME, self.name)

    async def _run_deferred_work(self, counts: CycleCounts) -> None:
        """Runs deferred work of cascades, also without the lead; each row is done once."""
        flows = Flows(self.engine.system, self.engine.workspace, self.name)
        for _ in range(ROUNDS):
            done = await flows.run_deferred_once()
            counts.flowed += done
            if not done:
                break

    async def cycle_once(self) -> CycleCounts:
        """Runs deferred work and, as the leader, all duties once; returns the counts."""
        counts = CycleCounts()
        await self._run_duty("flow", self._run_deferred_work, counts)
        if self.settings.leader and not await self._try_to_lead():
            self.cycles += 1
            return counts
        counts.leading = True
        crash_point("coordinator.leading")
        await self._run_duty("expire", self._expire, counts)
        await self._run_duty("promote", self._promote, counts)
        await self._run_duty("agents", self._mark_stale_agents, counts)
        await self._run_duty("fire", self._run_schedules, counts)
        await self._run_duty("relay", self._relay, counts)
        if self.cycles % MAINTENANCE_EVERY == 0:
            await self._run_duty("tidy", self._maintain_and_lead, counts)
        self.cycles += 1
        self._record_answer()
        return counts

    async def _run_duty(
        self, name: str, work: Callable[[CycleCounts], Awaitable[None]], counts: CycleCounts
    ) -> None:
        """Runs a duty and records its duration."""
        started = self.engine.clock.elapsed()
        await work(counts)
        if counts.leading:
            # Not before: a store that answers reads may still refuse heartbeats.
            self._suspensions.record_answer()
        self._duties[name] = seconds = self.engine.clock.elapsed() - started
        PROCESS_METRICS.observe("tenuto_coordinator_duty_seconds", seconds, name)

    async def _try_to_lead(self) -> bool:
        """Acquires or renews the leadership, or reports standby; true if it leads."""
        seconds = max(3 * self.settings.tick_s, 1.0)
        maintenance = self.engine.maintenance
        leadership = await maintenance.acquire_leadership(
            NAME, self.name, seconds, self._last_report
        )
        away_s = self._record_answer()
        await self._record_lost_leadership(leadership)
        if away_s is not None:
            message = f"the database did not answer this coordinator for {away_s:.0f} s"
            await maintenance.record_event("coordinator.outage", "WARN", message, self.name)
        if leadership is None:
            now = self.engine.clock.elapsed()
            if self._standby_reported_at is None or now - self._standby_reported_at > STANDBY_S / 3:
                await maintenance.record_standby(self.name)
                self._standby_reported_at = now
        return leadership is not None

    async def _record_lost_leadership(self, leadership: Leadership | None) -> None:
        """Records an event if another coordinator led although this one did not resign.

        This happens after a suspension, for example. Two may have worked at the same time then.
        Nothing is done twice, because every duty decides on locked rows, but operators should know.
        """
        before, self.epoch = self.epoch, leadership.epoch if leadership else None
        if before == self.epoch:
            return
        if before is None:
            log.info("became leader, epoch %d", self.epoch)
            return
        current = leadership or await self.engine.maintenance.leader(NAME)
        epoch = current.epoch if current else before
        holder = "another" if leadership or current is None else current.holder
        message = f"lost the lead to {holder}, epoch {epoch - 1 if leadership else epoch}"
        log.warning("%s", message)
        PROCESS_METRICS.count("tenuto_coordinator_conflicts_total")
        data = {"before": before, "epoch": epoch}
        await self.engine.maintenance.record_event(
            "coordinator.conflict", "WARN", message, self.name, data
        )

    async def _maintain_and_lead(self, counts: CycleCounts) -> None:
        """Archives, prunes and repairs, and renews the leadership every tick: it may take minutes.

        A renewal without an answer abandons a frozen server, which ends the maintenance there.
        """
        maintenance = asyncio.ensure_future(self._try_maintenance(counts))
        try:
            while not (await asyncio.wait([maintenance], timeout=self.settings.tick_s))[0]:
                with suppress(Unavailable):  # the maintenance reports the error or continues
                    if self.settings.leader:
                        await self._try_to_lead()
        finally:
            maintenance.cancel()
        if (error := await maintenance) is not None:
            raise error

    async def _try_maintenance(self, counts: CycleCounts) -> TenutoError | None:
        """Runs the maintenance; returns the error that stopped it, or `None`."""
        try:
            await self._archive_and_prune(counts)
        except TenutoError as error:
            return error
        return None

    async def _archive_and_prune(self, counts: CycleCounts) -> None:
        """Archives and prunes old rows; repairs dependency cycles and wrong counters."""
        counts.archived = await self.engine.maintenance.archive_once(self.name)
        counts.pruned = await self.engine.maintenance.prune_once()
        counts.pruned += await AgentMaintenance(self.engine.system).prune_once()
        repair = FlowRepair(self.engine.system)
        counts.mended = await repair.fail_cycles_once(self.name)
        counts.mended += await repair.recount_once(self.name)
        counts.mended += await PermitRepair(self.engine.system).recount_once(self.name)

    def _record_answer(self) -> float | None:
        """Records an answer of the store; returns the seconds of an outage that ended."""
        self._suspensions.record_answer()
        return self.outage.record_answer()

    # A full batch means that more rows are due, perhaps all of them in one workspace. From the
    # second batch on workspaces take turns, so that none waits for the backlog of another. The
    # exempt leases are computed again before each batch: the system may have been suspended.

    async def _expire(self, counts: CycleCounts) -> None:
        """Expires leases, except exempt ones."""
        maintenance = self.engine.maintenance
        for number in range(ROUNDS):
            exempt = self._suspensions.exempt_leases()
            if exempt == EVERY_LEASE:
                break
            if number == 0:
                done = await maintenance.expire_once(self.name, exempt=exempt)
            else:
                done = await maintenance.expire_shared(self.name, exempt=exempt)
            self._suspensions.record_answer()
            counts.expired += done
            if done < BATCH:
                break
        if counts.expired:
            crash_point("coordinator.expired")

    async def _promote(self, counts: CycleCounts) -> None:
        """Promotes tasks with a due timer, except those with exempt leases."""
        maintenance = self.engine.maintenance
        counts.promoted = await maintenance.promote_once(
            self.name, exempt=self._suspensions.exempt_leases()
        )
        for _ in range(ROUNDS - 1 if counts.promoted == BATCH else 0):
            self._suspensions.record_answer()
            done = await maintenance.promote_shared(
                self.name, exempt=self._suspensions.exempt_leases()
            )
            counts.promoted += done
            if not done:
                break
        if counts.promoted:
            crash_point("coordinator.promoted")

    async def _mark_stale_agents(self, counts: CycleCounts) -> None:
        """Marks stale and terminated agents, unless heartbeats were impossible recently."""
        if self._suspensions.exempt_leases() == EVERY_LEASE:
            return
        agents = AgentMaintenance(self.engine.system)
        for _ in range(ROUNDS):
            done = await agents.mark_stale_once(self.name)
            counts.agents += done
            if done < AGENT_BATCH:
                break

    async def _run_schedules(self, counts: CycleCounts) -> None:
        """Starts flows of due schedules."""
        schedules = ScheduleRunner(self.engine.system)
        for _ in range(ROUNDS):
            done = await schedules.fire_once()
            counts.fired += done
            if done < SCHEDULE_BATCH:
                break

    async def _relay(self, counts: CycleCounts) -> None:
        """Passes new events to all subscribers: alerts, triggers and the configured ones."""
        counts.relayed += await self.engine.maintenance.relay_once(
            ALERTS, _log_severe_events, errors=True
        )
        relays = {TRIGGER_CURSOR: self._run_triggers}
        relays |= {
            subscriber: partial(self._relay_to, subscriber, sink)
            for subscriber, sink in self._subscribers.items()
        }
        for subscriber, relay in relays.items():
            try:
                counts.relayed += await relay()
            except TenutoError as error:
                log.warning("subscriber %s failed: %s", subscriber, error)
            except Exception:
                # Its cursor does not move, so it misses nothing; the others must not wait for it.
                log.exception(
                    "internal error in subscriber %s; it gets the same events again", subscriber
                )

    async def _run_triggers(self) -> int:
        """Starts flows of matching triggers; returns the number of relayed events."""
        triggers = TriggerRunner(self.engine.system)
        relayed = 0
        for _ in range(ROUNDS):
            done = await triggers.trigger_once()
            relayed += done
            if done < TRIGGER_BATCH or triggers.is_over_limit:
                break
        return relayed

    async def _relay_to(self, name: str, sink: Sink) -> int:
        """Passes new events to one subscriber; returns their number."""
        relayed = 0
        for _ in range(ROUNDS):
            done = await self.engine.maintenance.relay_once(name, sink)
            relayed += done
            if done < BATCH:
                break
        return relayed


async def _log_severe_events(events: Sequence[Row]) -> None:
    """Logs events at level ERROR and CRITICAL, for operators; this is a subscriber."""
    for event in events:
        if event["level"] == "CRITICAL":
            log.critical("%s %s: %s", event["kind"], event["task"], event["message"])
        elif event["level"] == "ERROR":
            log.error("%s %s: %s", event["kind"], event["task"], event["message"])
