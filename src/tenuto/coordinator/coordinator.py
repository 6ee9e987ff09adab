"""The coordinator: its duties, each a bounded `*_once`, and the cycle that calls them."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial

import msgspec

from tenuto.coordinator.outage import AlertSender, OutageMonitor
from tenuto.coordinator.resume import SuspensionDetector
from tenuto.crash_points import crash_point
from tenuto.engine.agents.registry import BATCH as AGENTS
from tenuto.engine.agents.registry import AgentMaintenance
from tenuto.engine.core import FLOW_WORK
from tenuto.engine.engine import Engine
from tenuto.engine.flows.repair import FlowRepair
from tenuto.engine.flows.start import Flows
from tenuto.engine.limits.concurrency import PermitRepair
from tenuto.engine.schedules.event_matching import BATCH as HEARD
from tenuto.engine.schedules.event_matching import CURSOR as TRIGGERS
from tenuto.engine.schedules.event_matching import TriggerRunner
from tenuto.engine.schedules.firing import BATCH as TIMED
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
"""How often one cycle repeats a duty that still finds full batches."""
SLOW_EVERY = 30
"""Cycles between looks at what is only a matter of age."""
RESIGN_S = 1.0
"""Seconds that a store which failed gets to hear of a resignation."""


class CycleCounts(msgspec.Struct):
    """What one cycle did."""

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
    """Runs the duties of one engine's store."""

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
        self._pauses = SuspensionDetector(engine.clock, self.settings)
        self._alarm = AlertSender(self.settings.alert_url, engine.clock)
        self.outage = OutageMonitor(self._alarm, engine.clock, name)
        self.epoch: int | None = None
        """The epoch that this coordinator led by when it last heard, if it has not given up."""
        self._duties: dict[str, float] = {}
        self._last: CycleReport | None = None
        self._stood_by: float | None = None

    async def run(self, stop: asyncio.Event) -> None:
        """Cycle until `stop`, then let somebody else lead at once."""
        left = asyncio.Event()
        silence = self.engine.subscribe(lambda topic: left.set() if topic == FLOW_WORK else None)
        try:
            await run_periodically(self._guarded, self._pause, stop, self.engine.clock, left)
        finally:
            silence()
        crash_point("coordinator.before_resign")
        try:
            await self.engine.upkeep.resign(NAME, self.name)
        except TenutoError as error:
            log.warning("cannot resign: %s", error)
        await self._alarm.close()

    def _pause(self) -> float:
        return self.outage.pause(self.settings.tick_s)

    async def _guarded(self) -> None:
        begun = self.engine.clock.elapsed()
        self._duties = {}
        counts, error = CycleCounts(), None
        try:
            counts = await self.cycle_once()
        except Unavailable as away:
            error = str(away)
            log.warning("cycle failed: %s", error)
            await self._handle_outage(error)
        except TenutoError as refused:
            error = str(refused)
            log.warning("cycle failed: %s", error)
        except Exception as fault:
            error = type(fault).__name__
            log.exception("a fault in the cycle; the next one goes on")
        took = self.engine.clock.elapsed() - begun
        if counts.leading:
            PROCESS_METRICS.observe("tenuto_coordinator_cycle_seconds", took)
        done = {name: n for name, n in msgspec.structs.asdict(counts).items() if name != "leading"}
        self._last = CycleReport(seconds=took, duties=self._duties, counts=done, error=error)

    async def _handle_outage(self, why: str) -> None:
        """The store does not answer: another may lead, and the next look waits longer each time."""
        self.outage.failed(why)
        led, self.epoch = self.epoch is not None, None
        if led:
            # If only a part of the store failed it hears this; else the leadership lapses.
            with suppress(TenutoError, TimeoutError):
                async with asyncio.timeout(RESIGN_S):
                    await self.engine.upkeep.resign(NAME, self.name)

    async def _run_deferred_work(self, counts: CycleCounts) -> None:
        """Do what cascades left, whoever leads: each piece is done once, by whoever takes it."""
        flows = Flows(self.engine.system, self.engine.workspace, self.name)
        for _ in range(ROUNDS):
            done = await flows.run_deferred_once()
            counts.flowed += done
            if not done:
                break

    async def cycle_once(self) -> CycleCounts:
        """All duties once, if this coordinator leads."""
        counts = CycleCounts()
        await self._duty("flow", self._run_deferred_work, counts)
        if self.settings.leader and not await self._lead():
            self.cycles += 1
            return counts
        counts.leading = True
        crash_point("coordinator.leading")
        await self._duty("expire", self._expire, counts)
        await self._duty("promote", self._promote, counts)
        await self._duty("agents", self._agents, counts)
        await self._duty("fire", self._fire, counts)
        await self._duty("relay", self._relay, counts)
        if self.cycles % SLOW_EVERY == 0:
            await self._duty("tidy", self._tidy_and_lead, counts)
        self.cycles += 1
        self._answered()
        return counts

    async def _duty(
        self, name: str, work: Callable[[CycleCounts], Awaitable[None]], counts: CycleCounts
    ) -> None:
        """Do a duty and note how long it took."""
        begun = self.engine.clock.elapsed()
        await work(counts)
        if counts.leading:
            # Before that only reading was tried, which a store may do that takes no heartbeat.
            self._pauses.answered()
        self._duties[name] = took = self.engine.clock.elapsed() - begun
        PROCESS_METRICS.observe("tenuto_coordinator_duty_seconds", took, name)

    async def _lead(self) -> bool:
        """Become or stay the leader; whoever is not says now and then that it stands by."""
        seconds = max(3 * self.settings.tick_s, 1.0)
        upkeep = self.engine.upkeep
        leadership = await upkeep.acquire_leadership(NAME, self.name, seconds, self._last)
        away = self._answered()
        await self._compare(leadership)
        if away is not None:
            message = f"the database did not answer this coordinator for {away:.0f} s"
            await upkeep.note("coordinator.outage", "WARN", message, self.name)
        if leadership is None:
            now = self.engine.clock.elapsed()
            if self._stood_by is None or now - self._stood_by > STANDBY_S / 3:
                await upkeep.record_standby(self.name)
                self._stood_by = now
        return leadership is not None

    async def _compare(self, leadership: Leadership | None) -> None:
        """Tell when another has led though this coordinator did not give up, as after a stop.

        Two may have worked at the same time then. Nothing is done twice: every duty decides on rows
        that it locked. But somebody should know why it happened.
        """
        before, self.epoch = self.epoch, leadership.epoch if leadership else None
        if before == self.epoch:
            return
        if before is None:
            log.info("leads, epoch %d", self.epoch)
            return
        found = leadership or await self.engine.upkeep.leader(NAME)
        epoch = found.epoch if found else before
        who = "another" if leadership or found is None else found.holder
        message = f"lost the lead to {who}, epoch {epoch - 1 if leadership else epoch}"
        log.warning("%s", message)
        PROCESS_METRICS.count("tenuto_coordinator_conflicts_total")
        data = {"before": before, "epoch": epoch}
        await self.engine.upkeep.note("coordinator.conflict", "WARN", message, self.name, data)

    async def _tidy_and_lead(self, counts: CycleCounts) -> None:
        """Tidy, and renew the lead every tick meanwhile: whole tables may take minutes.

        A renewal without an answer gives a frozen server up, which ends the tidying there.
        """
        tidying = asyncio.ensure_future(self._try_to_tidy(counts))
        try:
            while not (await asyncio.wait([tidying], timeout=self.settings.tick_s))[0]:
                with suppress(Unavailable):  # the tidying says so itself, or goes on
                    if self.settings.leader:
                        await self._lead()
        finally:
            tidying.cancel()
        if (error := await tidying) is not None:
            raise error

    async def _try_to_tidy(self, counts: CycleCounts) -> TenutoError | None:
        """Tidies up; returns the error that stopped it, or `None`."""
        try:
            await self._archive_and_prune(counts)
        except TenutoError as error:
            return error
        return None

    async def _archive_and_prune(self, counts: CycleCounts) -> None:
        """Put away and remove what is old, and look after flows that something was lost of."""
        counts.archived = await self.engine.upkeep.archive_once(self.name)
        counts.pruned = await self.engine.upkeep.prune_once()
        counts.pruned += await AgentMaintenance(self.engine.system).prune_once()
        mending = FlowRepair(self.engine.system)
        counts.mended = await mending.cycles_once(self.name)
        counts.mended += await mending.recount_once(self.name)
        counts.mended += await PermitRepair(self.engine.system).recount_once(self.name)

    def _answered(self) -> float | None:
        """The store answered; says how long it was away, if this is the end of an outage."""
        self._pauses.answered()
        return self.outage.answered()

    # A full batch means that more waits than one batch holds, perhaps all of it in one workspace.
    # From the second batch on workspaces take turns, so that nobody waits for another's backlog.
    # Before each of them it is asked anew what is spared: anything may have stood still meanwhile.

    async def _expire(self, counts: CycleCounts) -> None:
        upkeep = self.engine.upkeep
        for turn in range(ROUNDS):
            spared = self._pauses.exempt_leases()
            if spared == EVERY_LEASE:
                break
            if turn == 0:
                done = await upkeep.expire_once(self.name, spared=spared)
            else:
                done = await upkeep.expire_fairly(self.name, spared=spared)
            self._pauses.answered()
            counts.expired += done
            if done < BATCH:
                break
        if counts.expired:
            crash_point("coordinator.expired")

    async def _promote(self, counts: CycleCounts) -> None:
        upkeep = self.engine.upkeep
        counts.promoted = await upkeep.promote_once(self.name, spared=self._pauses.exempt_leases())
        for _ in range(ROUNDS - 1 if counts.promoted == BATCH else 0):
            self._pauses.answered()
            done = await upkeep.promote_in_turns(self.name, spared=self._pauses.exempt_leases())
            counts.promoted += done
            if not done:
                break
        if counts.promoted:
            crash_point("coordinator.promoted")

    async def _agents(self, counts: CycleCounts) -> None:
        """Note which agents fell silent and which have ended, unless nobody could beat lately."""
        if self._pauses.exempt_leases() == EVERY_LEASE:
            return
        upkeep = AgentMaintenance(self.engine.system)
        for _ in range(ROUNDS):
            done = await upkeep.stale_once(self.name)
            counts.agents += done
            if done < AGENTS:
                break

    async def _fire(self, counts: CycleCounts) -> None:
        """Start what schedules call for."""
        firing = ScheduleRunner(self.engine.system)
        for _ in range(ROUNDS):
            done = await firing.fire_once()
            counts.fired += done
            if done < TIMED:
                break

    async def _relay(self, counts: CycleCounts) -> None:
        counts.relayed += await self.engine.upkeep.relay_once(ALERTS, _alert, errors=True)
        relays = {TRIGGERS: self._trigger}
        relays |= {
            name: partial(self._relay_to, name, sink) for name, sink in self._subscribers.items()
        }
        for name, relay in relays.items():
            try:
                counts.relayed += await relay()
            except TenutoError as error:
                log.warning("subscriber %s failed: %s", name, error)
            except Exception:
                # Its cursor stays, so it misses nothing; the others must not wait for it.
                log.exception("subscriber %s failed; it gets the same events again", name)

    async def _trigger(self) -> int:
        """Start what events call for."""
        triggering = TriggerRunner(self.engine.system)
        relayed = 0
        for _ in range(ROUNDS):
            done = await triggering.trigger_once()
            relayed += done
            if done < HEARD or triggering.is_over_limit:
                break
        return relayed

    async def _relay_to(self, name: str, sink: Sink) -> int:
        relayed = 0
        for _ in range(ROUNDS):
            done = await self.engine.upkeep.relay_once(name, sink)
            relayed += done
            if done < BATCH:
                break
        return relayed


async def _alert(events: Sequence[Row]) -> None:
    """The subscriber that tells the log what somebody should look at."""
    for event in events:
        if event["level"] == "CRITICAL":
            log.critical("%s %s: %s", event["kind"], event["task"], event["message"])
        elif event["level"] == "ERROR":
            log.error("%s %s: %s", event["kind"], event["task"], event["message"])
