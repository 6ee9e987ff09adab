"""Makes termination signals stop a command like Ctrl-C, so that it can clean up."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def terminate_like_ctrl_c() -> Iterator[None]:
    """Context in which SIGTERM and SIGHUP act like Ctrl-C; ignored signals stay ignored."""
    handled = [
        number
        for number in (signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) is not signal.SIG_IGN
    ]
    previous = {number: signal.signal(number, _interrupt) for number in handled}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Calls the current SIGINT handler; a running event loop sets one that cancels its work."""
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler):  # SIGINT is ignored, for example in a background job of a script
        handler = signal.default_int_handler
    handler(number, frame)
