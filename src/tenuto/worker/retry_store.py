"""Retry delays while the store is unavailable."""

from collections.abc import Iterator

from tenuto.model.errors import TooMany, Unavailable

RETRYABLE_ERRORS = (Unavailable, TooMany)
"""Errors after which the same call may succeed later."""
_MAX_PAUSE_S = 5.0


def retry_delays() -> Iterator[float]:
    """Yields seconds to wait before each retry, without end: 0.1, then doubled up to 5."""
    pause = 0.1
    while True:
        yield pause
        pause = min(pause * 2, _MAX_PAUSE_S)
