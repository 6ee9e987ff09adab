"""Signals that end a command which leaves something behind unless it may clean up."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def as_ctrl_c() -> Iterator[None]:
    """SIGTERM and SIGHUP end the block as Ctrl-C does; one that is ignored stays so."""
    heeded = [
        number
        for number in (signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) is not signal.SIG_IGN
    ]
    before = {number: signal.signal(number, _interrupt) for number in heeded}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Do what is done now on SIGINT, which a loop that runs has changed to cancel its work."""
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler):  # in the background of a script, where nobody can press it
        handler = signal.default_int_handler
    handler(number, frame)
