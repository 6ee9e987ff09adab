"""Time, randomness and ids enter the program here and nowhere else.

Everything that needs them takes a `Clock`; tests and the simulator pass their own.
"""

import asyncio
import os
import random
import time
from datetime import UTC, datetime, timedelta
from uuid import UUID

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
MICROSECOND = timedelta(microseconds=1)
_BOOT: int | None = getattr(time, "CLOCK_BOOTTIME", None)


def from_micros(micros: int) -> datetime:
    """The instant that many microseconds after 1970 in UTC; `OverflowError` beyond the calendar."""
    return EPOCH + timedelta(microseconds=micros)


def to_micros(at: datetime) -> int:
    """Whole microseconds from 1970 in UTC to that instant."""
    return (at - EPOCH) // MICROSECOND


def boot_time() -> float:
    """Seconds since the machine started, suspended time included where the system counts it.

    A closed lid must not make a process believe that less time has passed than has.
    """
    return time.monotonic() if _BOOT is None else time.clock_gettime(_BOOT)


class Clock:
    """The machine's clock and entropy."""

    def __init__(self) -> None:
        self._random = random.Random(os.urandom(16))  # noqa: S311  ids and jitter, never keys
        self._last_id = 0

    def now(self) -> datetime:
        return datetime.now(UTC)

    def elapsed(self) -> float:
        """Seconds on a scale that never runs backwards."""
        return boot_time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def random(self) -> float:
        return self._random.random()

    def new_id(self) -> UUID:
        """A UUIDv7 above every other that this clock made: ids sort by creation."""
        return self.new_ids(1)[0]

    def new_ids(self, count: int, at: datetime | None = None) -> list[UUID]:
        """As many of them, in order, for things made at that instant or now."""
        base = int((at or self.now()).timestamp() * 1000) << 80 | 7 << 76 | 2 << 62
        getrandbits, last, ids = self._random.getrandbits, self._last_id, []
        for _ in range(count):
            high, low = divmod(getrandbits(74), 1 << 62)
            value = base | high << 64 | low
            if value <= last:
                # Within one millisecond: step by a random amount that stays inside the low field.
                value = last + 1 + (low & 0xFFFFFFFF)
            last = value
            ids.append(self._as_id(value))
        self._last_id = last
        return ids

    def _as_id(self, value: int) -> UUID:
        return UUID(int=value)

    def new_token(self) -> str:
        """128 bits nobody can guess."""
        return os.urandom(16).hex()
