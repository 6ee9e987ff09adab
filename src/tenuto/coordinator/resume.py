"""Detects that the machine or store was suspended, and gives live workers time to renew leases."""

from datetime import datetime, timedelta

from tenuto.clock import Clock
from tenuto.engine.tasks.maintenance import EVERY_LEASE, LeaseExemption
from tenuto.settings import Settings

MAX_GRACE_S = 60.0
"""Longest time after a suspension for which expired leases are exempt, in seconds."""


class SuspensionDetector:
    """Detects when no worker could send heartbeats, and exempts leases that expired then.

    If the machine slept, the store hung or was unavailable, or its clock was set, then leases
    expire although their workers are alive. Afterwards all leases are exempt for one heartbeat
    interval of this coordinator. Then each expired lease is exempt for half of the time that it
    still had when the suspension began. A row does not tell how often its worker sends heartbeats,
    but a lease is at least three intervals long: two were left, and half of that is one.
    """

    def __init__(self, clock: Clock, settings: Settings) -> None:
        self._clock = clock
        self._settings = settings
        self._last_answer: tuple[float, datetime] | None = None
        """The last answer of the store, in elapsed seconds and by the clock."""
        self._cutoff = clock.now()
        """The expiry cutoff at the last answer: leases that ended earlier are lost."""
        self._cutoff_at_suspension = self._cutoff
        """The expiry cutoff when the last suspension began."""
        self._resumed_at = 0.0
        self._exempt_all_until = 0.0

    def record_answer(self) -> None:
        """Records an answer of the store; a long time since the last one was a suspension."""
        elapsed, now = self._detect_suspension()
        self._last_answer = elapsed, now
        self._cutoff = self._expiry_cutoff(elapsed, now)

    def lease_exemption(self) -> LeaseExemption:
        """Returns the time range in which expired leases are kept: all just after a suspension."""
        elapsed, now = self._detect_suspension()
        if elapsed < self._exempt_all_until:
            return EVERY_LEASE
        return LeaseExemption(self._expiry_cutoff(elapsed, now), now)

    def _detect_suspension(self) -> tuple[float, datetime]:
        """Starts an exemption if a suspension ended now; returns elapsed time and clock time."""
        elapsed, now = self._clock.elapsed(), self._clock.now()
        if self._was_suspended(elapsed, now):
            self._cutoff_at_suspension, self._resumed_at = self._cutoff, elapsed
            jitter = 1 + 0.2 * self._clock.random()
            self._exempt_all_until = elapsed + self._settings.heartbeat_s * jitter
        return elapsed, now

    def _was_suspended(self, elapsed: float, now: datetime) -> bool:
        """True before the first answer, an interval after the last, or if the clock was set."""
        if self._last_answer is None:
            return True
        heartbeat_s = max(self._settings.heartbeat_s, 2 * self._settings.tick_s)
        passed = elapsed - self._last_answer[0]
        clock_passed = (now - self._last_answer[1]).total_seconds()
        return passed > heartbeat_s or abs(clock_passed - passed) > heartbeat_s

    def _expiry_cutoff(self, elapsed: float, now: datetime) -> datetime:
        """Returns the cutoff: leases that ended before it are lost.

        It moves twice as fast as time until it reaches the present.
        """
        since = elapsed - self._resumed_at
        if since > MAX_GRACE_S:
            return now
        return min(now, self._cutoff_at_suspension + timedelta(seconds=2 * since))
