"""How fast sessions may be asked for: at most so many in any second, in small bursts."""

from collections import deque
from datetime import datetime, timedelta


class RateLimiter:
    """Counts what was granted lately. Time is the caller's.

    A quarter of the cap at once, and then a part of a second of rest: however many tasks come due
    in one moment, no second sees more claims than the cap.
    """

    def __init__(self, per_s: float) -> None:
        assert per_s > 0
        self.burst = max(1, int(per_s // 4))
        bursts = per_s if per_s < 1 else per_s // self.burst
        self._window = timedelta(seconds=1 / bursts)
        self._granted: deque[datetime] = deque()

    def left(self, now: datetime) -> int:
        """How many may be granted now."""
        # What lies ahead by more was granted before the clock was set back.
        while self._granted and abs(now - self._granted[0]) >= self._window:
            self._granted.popleft()
        return max(0, self.burst - len(self._granted))

    def grant(self, n: int, now: datetime) -> None:
        """Count what was taken, at a moment when it was over."""
        self._granted.extend([now] * n)

    def wait_s(self, now: datetime) -> float:
        """Seconds until something may be granted again."""
        if self.left(now):
            return 0.0
        return (self._granted[0] + self._window - now).total_seconds()
