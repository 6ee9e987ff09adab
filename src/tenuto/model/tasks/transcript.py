"""How much of what an attempt says is kept, wherever it is counted."""

from collections.abc import Sequence

import msgspec

MOST_KB = 1024
LINE_COST = 32
"""Bytes of the cap that a line takes besides its words: an empty line is a row too."""


class Line(msgspec.Struct, frozen=True):
    """One line of a transcript."""

    number: int
    level: str
    text: str

    @property
    def size(self) -> int:
        """Bytes of the cap that it takes."""
        said = self.level + self.text
        return len(said.encode(errors="replace")) + LINE_COST


def full_text(most_kb: int) -> str:
    """What the last line of a transcript says that was cut off."""
    return f"(transcript is full: {most_kb:,} KB kept)"


def fitting(lines: Sequence[Line], before: int, most_kb: int) -> list[Line]:
    """The first of the lines that fit after so many bytes; one more says that others did not."""
    kept: list[Line] = []
    taken = before
    for line in lines:
        taken += line.size
        if taken > most_kb * 1024:
            return [*kept, Line(line.number, "WARN", full_text(most_kb))]
        kept.append(line)
    return kept
