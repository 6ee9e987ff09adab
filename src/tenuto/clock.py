"""The program's only source of time, randomness and ids.

Code that needs them takes a `Clock`; tests and the simulator pass their own.
"""

import asyncio
import os
import random
import time
from datetime import UTC, datetime, timedelta
from uuid import UUID

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
MICROSECOND = timedelta(microseconds=1)
_BOOT_CLOCK: int | None = getattr(time, "CLOCK_BOOTTIME", None)


def from_micros(micros: int) -> datetime:
    """Returns the UTC time `micros` µs after 1970; `OverflowError` beyond the calendar."""
    return EPOCH + timedelta(microseconds=micros)


def to_micros(at: datetime) -> int:
    """Returns the whole microseconds from 1970 in UTC to `at`."""
    return (at - EPOCH) // MICROSECOND


def boot_time() -> float:
    """Returns the seconds since the machine started.

    They include the time that the machine was suspended, where the system counts it: a process
    must not believe that less time has passed than has, because a laptop slept.
    """
    return time.monotonic() if _BOOT_CLOCK is None else time.clock_gettime(_BOOT_CLOCK)


class Clock:
    """The machine's clock and source of randomness."""

    def __init__(self) -> None:
        self._random = random.Random(os.urandom(16))  # noqa: S311  ids and jitter, never keys
        self._last_id = 0

    def now(self) -> datetime:
        """Returns the current time in UTC."""
        return datetime.now(UTC)

    def elapsed(self) -> float:
        """Returns seconds on a scale that never runs backwards; only differences have a meaning."""
        return boot_time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def random(self) -> float:
        """Returns a random number from 0 up to, but not including, 1."""
        return self._random.random()

    def new_id(self) -> UUID:
        """Returns a UUIDv7 above all that this clock created before: ids sort by creation."""
        return self.new_ids(1)[0]

    def new_ids(self, count: int, at: datetime | None = None) -> list[UUID]:
        """Returns `count` ids in ascending order, for objects created at `at`, by default now."""
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
        """Returns 128 random bits, as hexadecimal text, that nobody can guess."""
        return os.urandom(16).hex()
