"""Lines of an attempt's transcript, and the rule that limits its size."""

from collections.abc import Sequence

import msgspec

MAX_KB = 1024
LINE_COST = 32
"""Bytes that each line counts besides its text: an empty line is stored as a row, too."""


class Line(msgspec.Struct, frozen=True):
    """One line of a transcript."""

    number: int
    level: str
    text: str

    @property
    def size(self) -> int:
        """Bytes that the line counts against the cap."""
        content = self.level + self.text
        return len(content.encode(errors="replace")) + LINE_COST


def truncation_notice(max_kb: int) -> str:
    """Returns the last line of a transcript that was truncated."""
    return f"(transcript is full: {max_kb:,} KB kept)"


def fit_lines(lines: Sequence[Line], stored_bytes: int, max_kb: int) -> list[Line]:
    """Returns the lines that still fit after `stored_bytes`.

    If some do not fit, a truncation notice follows.
    """
    fitting: list[Line] = []
    used_bytes = stored_bytes
    for line in lines:
        used_bytes += line.size
        if used_bytes > max_kb * 1024:
            return [*fitting, Line(line.number, "WARN", truncation_notice(max_kb))]
        fitting.append(line)
    return fitting
