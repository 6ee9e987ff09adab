"""Logs: one line each on standard error, control characters escaped."""

import logging
import sys


class _OneLine(logging.Formatter):
    """A record as one printable line; a stack trace keeps its line breaks."""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        return "".join(
            char if char.isprintable() or char == "\n" else repr(char)[1:-1] for char in text
        )


def set_up(level: str = "INFO") -> None:
    """Send this program's log to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_OneLine("%(asctime)s %(levelname)-8s %(name)s: %(message)s", "%H:%M:%S"))
    root = logging.getLogger("tenuto")
    root.handlers[:] = [handler]
    root.setLevel(level)
    root.propagate = False
