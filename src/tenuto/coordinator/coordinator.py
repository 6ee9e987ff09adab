"""The coordinator: its duties, each a bounded `*_once`, and the cycle that calls them."""

import asyncio
import logging
from collections.abc import Sequence
from functools import partial

import msgspec

from tenuto.crash import crash_point
from tenuto.engine.core import FLOW_WORK
from tenuto.engine.engine import Engine
from tenuto.engine.firing import BATCH as TIMED
from tenuto.engine.firing import Firing
from tenuto.engine.flow_upkeep import FlowUpkeep
from tenuto.engine.flows import Flows
from tenuto.engine.triggering import BATCH as HEARD
from tenuto.engine.triggering import CURSOR as TRIGGERS
from tenuto.engine.triggering import Triggering
from tenuto.engine.upkeep import BATCH, Sink
from tenuto.loop import repeat
from tenuto.metrics import HERE
from tenuto.model.errors import TenutoError
from tenuto.settings import Settings
from tenuto.store.protocol import Row

log = logging.getLogger("tenuto.coordinator")

NAME = "coordinator"
ALERTS = "tenuto.alerts"
ROUNDS = 20
"""How often one cycle repeats a duty that still finds full batches."""
SLOW_EVERY = 30
"""Cycles between looks at what is only a matter of age."""


class Counts(msgspec.Struct):
    """What one cycle did."""

    leading: bool = False
    expired: int = 0
    promoted: int = 0
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
        self._last_good: float | None = None
        self._reap_from = 0.0

    async def run(self, stop: asyncio.Event) -> None:
        """Cycle until `stop`, then let somebody else lead at once."""
        left = asyncio.Event()
        silence = self.engine.subscribe(lambda topic: left.set() if topic == FLOW_WORK else None)
        try:
            await repeat(self._guarded, lambda: self.settings.tick_s, stop, self.engine.clock, left)
        finally:
            silence()
        crash_point("coordinator.before_resign")
        try:
            await self.engine.upkeep.resign(NAME, self.name)
        except TenutoError as error:
            log.warning("cannot resign: %s", error)

    async def _guarded(self) -> None:
        begun = self.engine.clock.elapsed()
        try:
            if (await self.cycle_once()).leading:
                took = self.engine.clock.elapsed() - begun
                HERE.observe("tenuto_coordinator_cycle_seconds", took)
        except TenutoError as error:
            log.warning("cycle failed: %s", error)
        except Exception:
            log.exception("a fault in the cycle; the next one goes on")

    async def _flow(self, counts: Counts) -> None:
        """Do what cascades left, whoever leads: each piece is done once, by whoever takes it."""
        flows = Flows(self.engine.system, self.engine.workspace, self.name)
        for _ in range(ROUNDS):
            done = await flows.work_once()
            counts.flowed += done
            if not done:
                break

    async def cycle_once(self) -> Counts:
        """All duties once, if this coordinator leads."""
        counts = Counts()
        await self._flow(counts)
        if self.settings.leader:
            seconds = max(3 * self.settings.tick_s, 1.0)
            leadership = await self.engine.upkeep.lead(NAME, self.name, seconds)
            self._answered()
            if leadership is None:
                self.cycles += 1
                return counts
        else:
            self._notice_gap()
        counts.leading = True
        crash_point("coordinator.leading")
        await self._repair(counts)
        await self._fire(counts)
        await self._relay(counts)
        if self.cycles % SLOW_EVERY == 0:
            counts.archived = await self.engine.upkeep.archive_once(self.name)
            counts.pruned = await self.engine.upkeep.prune_once()
            mending = FlowUpkeep(self.engine.system)
            counts.mended = await mending.cycles_once(self.name)
            counts.mended += await mending.recount_once(self.name)
        self.cycles += 1
        self._answered()
        return counts

    def _answered(self) -> None:
        """The store answered; if it took long, or nobody asked for long, that was a pause."""
        self._notice_gap()
        self._last_good = self.engine.clock.elapsed()

    def _notice_gap(self) -> None:
        """After a pause of the whole system nobody could beat: give everyone one interval first."""
        now = self.engine.clock.elapsed()
        beat = max(self.settings.heartbeat_s, 2 * self.settings.tick_s)
        if self._last_good is None or now - self._last_good > beat:
            jitter = 1 + 0.2 * self.engine.clock.random()
            self._reap_from = now + self.settings.heartbeat_s * jitter

    async def _repair(self, counts: Counts) -> None:
        upkeep = self.engine.upkeep
        for _ in range(ROUNDS):
            if self.engine.clock.elapsed() < self._reap_from:
                break
            done = await upkeep.expire_once(self.name)
            self._answered()
            counts.expired += done
            if done < BATCH:
                break
        if counts.expired:
            crash_point("coordinator.expired")
        for _ in range(ROUNDS):
            done = await upkeep.promote_once(self.name)
            counts.promoted += done
            if done < BATCH:
                break
        if counts.promoted:
            crash_point("coordinator.promoted")

    async def _fire(self, counts: Counts) -> None:
        """Start what schedules call for."""
        firing = Firing(self.engine.system)
        for _ in range(ROUNDS):
            done = await firing.fire_once()
            counts.fired += done
            if done < TIMED:
                break

    async def _relay(self, counts: Counts) -> None:
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
        triggering = Triggering(self.engine.system)
        relayed = 0
        for _ in range(ROUNDS):
            done = await triggering.trigger_once()
            relayed += done
            if done < HEARD:
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
