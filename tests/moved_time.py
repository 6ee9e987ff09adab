"""Time that a test moves: that of event loops and of clocks which measure how much of it passes.

Timers and deadlines of the program come due at once, while sockets, files and processes are real.
The time of day, databases and other processes stay as they are.
"""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tenuto import clock


class MovedTime:
    """How far time has been moved on."""

    def __init__(self) -> None:
        self.by_s = 0.0

    def advance(self, seconds: float) -> None:
        """Let everything that is due within this time come due."""
        self.by_s += seconds


@contextmanager
def movable() -> Iterator[MovedTime]:
    """Time that can be moved until the block ends."""
    moved, boot_time = MovedTime(), clock.boot_time
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(asyncio.BaseEventLoop, "time", lambda _: time.monotonic() + moved.by_s)
        patch.setattr(clock, "boot_time", lambda: boot_time() + moved.by_s)
        yield moved
