"""How an attempt waits for a store that is away."""

from collections.abc import Iterator

from tenuto.model.errors import TooMany, Unavailable

LATER = (Unavailable, TooMany)
"""What the same call may get over by waiting."""
_LONGEST_PAUSE_S = 5.0


def retry_delays() -> Iterator[float]:
    """How long to wait before each time that something is said again."""
    pause = 0.1
    while True:
        yield pause
        pause = min(pause * 2, _LONGEST_PAUSE_S)
