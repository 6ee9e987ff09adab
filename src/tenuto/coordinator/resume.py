"""Pauses of the whole system, after which the living get time to speak."""

from datetime import datetime, timedelta

from tenuto.clock import Clock
from tenuto.engine.tasks.maintenance import EVERY_LEASE, LeaseExemption
from tenuto.settings import Settings

SLOWEST_BEAT_S = 60.0
"""Seconds after a pause at most that an owner which beats seldom is waited for."""


class SuspensionDetector:
    """Notices when nobody could beat, and says which leases are spared because of that.

    The machine slept, the store stood still or was away, or its clock was set: leases ran out whose
    owners live. After it all leases are spared for a heartbeat of this coordinator, and each that
    runs out for half of what was left of it when the pause began. A row does not tell how often its
    owner beats, but a lease is three beats long at least: two were left, and half of that is one.
    """

    def __init__(self, clock: Clock, settings: Settings) -> None:
        self._clock = clock
        self._settings = settings
        self._answered: tuple[float, datetime] | None = None
        """When the store answered last, by elapsed time and by the clock."""
        self._lost = clock.now()
        """Before when a lease must have ended, as the store answered last, to be lost."""
        self._lost_before = self._lost
        """The same as the last pause began."""
        self._over = 0.0
        self._none_before = 0.0

    def answered(self) -> None:
        """The store answered; if it took long, or nobody asked for long, that was a pause."""
        elapsed, now = self._look()
        self._answered = elapsed, now
        self._lost = self._ran_out(elapsed, now)

    def exempt_leases(self) -> LeaseExemption:
        """The leases that say nothing about their owners as of now."""
        elapsed, now = self._look()
        if elapsed < self._none_before:
            return EVERY_LEASE
        return LeaseExemption(self._ran_out(elapsed, now), now)

    def _look(self) -> tuple[float, datetime]:
        elapsed, now = self._clock.elapsed(), self._clock.now()
        if self._was_suspended(elapsed, now):
            self._lost_before, self._over = self._lost, elapsed
            jitter = 1 + 0.2 * self._clock.random()
            self._none_before = elapsed + self._settings.heartbeat_s * jitter
        return elapsed, now

    def _was_suspended(self, elapsed: float, now: datetime) -> bool:
        """Whether more than a beat passed since the last answer, or the clock was set by more."""
        if self._answered is None:
            return True
        beat = max(self._settings.heartbeat_s, 2 * self._settings.tick_s)
        passed = elapsed - self._answered[0]
        moved = (now - self._answered[1]).total_seconds()
        return passed > beat or abs(moved - passed) > beat

    def _ran_out(self, elapsed: float, now: datetime) -> datetime:
        """Before when a lease must have ended to be lost: goes twice as fast as time, up to now."""
        since = elapsed - self._over
        if since > SLOWEST_BEAT_S:
            return now
        return min(now, self._lost_before + timedelta(seconds=2 * since))
