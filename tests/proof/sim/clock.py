"""A process's clock: the loop's virtual time, and chance that follows from the seed."""

import asyncio
import random
from datetime import UTC, datetime, timedelta

from tenuto.clock import Clock

START = datetime(2030, 1, 1, tzinfo=UTC)


class SimClock(Clock):
    """Wall clock and monotonic clock are the loop's; ids, tokens and rolls are drawn by name."""

    def __init__(self, loop: asyncio.AbstractEventLoop, name: str) -> None:
        super().__init__()
        self._random = random.Random(name)
        self._loop = loop

    def now(self) -> datetime:
        return START + timedelta(seconds=self._loop.time())

    def elapsed(self) -> float:
        return self._loop.time()

    def new_token(self) -> str:
        return f"{self._random.getrandbits(128):032x}"
