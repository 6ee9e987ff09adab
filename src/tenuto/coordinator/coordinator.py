"""The coordinator: election of the leader, and the cycle that runs the duties."""

import asyncio
import logging
from contextlib import suppress

import msgspec

from tenuto.coordinator.duties import DUTIES, Duty, DutyContext
from tenuto.coordinator.outage import AlertSender, OutageMonitor
from tenuto.coordinator.resume import SuspensionDetector
from tenuto.crash_points import crash_point
from tenuto.engine.core import FLOW_WORK_TOPIC
from tenuto.engine.engine import Engine
from tenuto.engine.tasks.maintenance import STANDBY_S, CycleReport, Leadership, Sink
from tenuto.metrics import PROCESS_METRICS
from tenuto.model.errors import TenutoError, Unavailable
from tenuto.periodic import run_periodically
from tenuto.settings import Settings

log = logging.getLogger("tenuto.coordinator")

NAME = "coordinator"
RESIGN_TIMEOUT_S = 1.0
"""Timeout of a resignation after the store failed, in seconds."""


class Cycle(msgspec.Struct):
    """What one cycle did: a count per function of the duties, and the seconds of each duty."""

    counts: dict[str, int]
    leading: bool = False
    seconds: dict[str, float] = {}


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
        self.duties: tuple[Duty, ...] = DUTIES
        self.cycles = 0
        """Completed cycles."""
        self._suspensions = SuspensionDetector(engine.clock, self.settings)
        self.duty_context = DutyContext(engine, name, self._suspensions, subscribers or {})
        self._alerts = AlertSender(self.settings.alert_url, engine.clock)
        self.outage = OutageMonitor(self._alerts, engine.clock, name)
        self.epoch: int | None = None
        """The epoch of its leadership as last confirmed, if it has not resigned."""
        self._cycle = self._empty_cycle()
        self._done_at: dict[str, float] = {}
        """When each duty ended last, in elapsed seconds."""
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
        """Returns the seconds until the next cycle; more after each outage in a row."""
        return self.outage.next_delay(self.settings.tick_s)

    async def _run_cycle_logged(self) -> None:
        """Runs one cycle and keeps its report; logs errors, resigns in an outage, never raises."""
        started = self.engine.clock.elapsed()
        completed, error = self._empty_cycle(), None
        try:
            completed = await self.cycle_once()
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
        if completed.leading:
            PROCESS_METRICS.observe("tenuto_coordinator_cycle_seconds", seconds)
        self._last_report = CycleReport(
            seconds=seconds, duties=self._cycle.seconds, counts=completed.counts, error=error
        )

    async def _handle_outage(self, reason: str) -> None:
        """Records an outage, which delays the next cycle; tries to resign if it led."""
        self.outage.record_failure(reason)
        led, self.epoch = self.epoch is not None, None
        if led:
            # If only a part of the store failed, this succeeds; else the leadership expires.
            with suppress(TenutoError, TimeoutError):
                async with asyncio.timeout(RESIGN_TIMEOUT_S):
                    await self.engine.maintenance.resign(NAME, self.name)

    def _empty_cycle(self) -> Cycle:
        return Cycle({count: 0 for duty in self.duties for count in duty.work})

    async def cycle_once(self) -> Cycle:
        """Runs due duties once, the leader's only if it now leads; returns counts and durations."""
        self._cycle = cycle = self._empty_cycle()
        due = [duty for duty in self.duties if self._is_due(duty)]
        for duty in due:
            if not duty.leader_only:
                await self._run_duty(duty)
        cycle.leading = not self.settings.leader or await self._try_to_lead()
        if cycle.leading:
            crash_point("coordinator.leading")
            for duty in due:
                if duty.leader_only:
                    await self._run_duty(duty)
            self._record_answer()
        self.cycles += 1
        return cycle

    def _is_due(self, duty: Duty) -> bool:
        """True if the duty never ended here, or if its interval has passed since it did."""
        done_at = self._done_at.get(duty.name)
        return done_at is None or self.engine.clock.elapsed() - done_at >= duty.every_s

    async def _run_duty(self, duty: Duty) -> None:
        """Runs a duty and records its end and duration; renews the leadership during a long one."""
        started = self.engine.clock.elapsed()
        await (self._run_and_lead(duty) if duty.is_long else self._run_work(duty))
        if self._cycle.leading:
            # Not before: a store that answers reads may still refuse heartbeats.
            self._suspensions.record_answer()
        self._done_at[duty.name] = ended = self.engine.clock.elapsed()
        self._cycle.seconds[duty.name] = ended - started
        PROCESS_METRICS.observe("tenuto_coordinator_duty_seconds", ended - started, duty.name)

    async def _run_work(self, duty: Duty) -> None:
        """Runs the functions of a duty in order and records their counts."""
        for count, work in duty.work.items():
            self._cycle.counts[count] = await work(self.duty_context)

    async def _try_to_lead(self) -> bool:
        """Acquires or renews the leadership, or reports standby and outages; true if it leads."""
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
        """Stores this coordinator's epoch (`None`: not leading); records an unexpected loss.

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

    async def _run_and_lead(self, duty: Duty) -> None:
        """Runs a long duty and renews the leadership every tick; then raises the duty's error.

        A renewal without an answer abandons a frozen server, which ends the duty there.
        """
        work = asyncio.ensure_future(self._try_work(duty))
        try:
            while not (await asyncio.wait([work], timeout=self.settings.tick_s))[0]:
                with suppress(Unavailable):  # the duty reports the error or continues
                    if self.settings.leader:
                        await self._try_to_lead()
        finally:
            work.cancel()
        if (error := await work) is not None:
            raise error

    async def _try_work(self, duty: Duty) -> TenutoError | None:
        """Runs a duty; returns the error that stopped it, or `None`."""
        try:
            await self._run_work(duty)
        except TenutoError as error:
            return error
        return None

    def _record_answer(self) -> float | None:
        """Records an answer; returns the seconds of an ended outage of 2+ cycles, else `None`."""
        self._suspensions.record_answer()
        return self.outage.record_answer()
