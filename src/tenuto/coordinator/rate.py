"""Limits how many sessions are requested per second, in small bursts."""

from collections import deque
from datetime import datetime, timedelta


class RateLimiter:
    """Counts recently granted sessions. The caller passes the time.

    A burst is a quarter of the cap; after it comes a part of a second without grants. So no second
    has more claims than the cap, however many tasks become due at one moment.
    """

    def __init__(self, per_s: float) -> None:
        assert per_s > 0
        self.burst = max(1, int(per_s // 4))
        bursts = per_s if per_s < 1 else per_s // self.burst
        self._window = timedelta(seconds=1 / bursts)
        self._granted: deque[datetime] = deque()

    def available(self, now: datetime) -> int:
        """Returns how many sessions may be granted now."""
        # A grant further in the future was made before the clock was set back.
        while self._granted and abs(now - self._granted[0]) >= self._window:
            self._granted.popleft()
        return max(0, self.burst - len(self._granted))

    def grant(self, n: int, now: datetime) -> None:
        """Counts `n` sessions as granted; `now` is a time after their claim ended."""
        self._granted.extend([now] * n)

    def wait_s(self, now: datetime) -> float:
        """Returns the seconds until a session may be granted; 0 if one may be granted now."""
        if self.available(now):
            return 0.0
        return (self._granted[0] + self._window - now).total_seconds()
