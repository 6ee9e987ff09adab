"""Formats output for people: tables, coloured statuses, times, and text safe for a terminal.

Names, logs and errors come from tasks and are untrusted. They are printed only through `printable`
of `tenuto.model.printable` or, as JSON, through `print_json`.
"""

import os
import sys
from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from typing import Any, Literal, TextIO

import msgspec

from tenuto.model.printable import indented, printable, printable_json

_STYLES = {
    "COMPLETED": "green",
    "RUNNING": "cyan",
    "ASSIGNED": "cyan",
    "WAITING": "blue",
    "PENDING": "blue",
    "RETRY_WAIT": "yellow",
    "PAUSED": "yellow",
    "FAILED": "red",
    "DEAD": "bold red",
    "CANCELLED": "magenta",
    "SKIPPED": "dim",
    "PLANNED": "dim",
    "OPEN": "blue",
    "APPROVED": "green",
    "ANSWERED": "green",
    "REJECTED": "red",
    "EXPIRED": "dim",
    "ok": "green",
    "warn": "yellow",
    "fail": "bold red",
}


def shorten_line(text: str, max_chars: int) -> str:
    """Returns the first line of the text, at most `max_chars` long; `…` marks a cut."""
    lines = text.strip().splitlines()
    first = lines[0].rstrip() if lines else ""
    short = first if len(first) <= max_chars else first[: max_chars - 1].rstrip() + "…"
    return short if len(lines) < 2 or short.endswith("…") else short[: max_chars - 1] + "…"


def print_json(value: Any) -> None:
    """Prints a value as the one JSON document of a command."""
    print(printable_json(value))


def is_terminal(stream: TextIO | None = None) -> bool:
    """True if the stream, by default standard output, is a terminal."""
    stream = stream or sys.stdout
    return stream is not None and stream.isatty()


def style_of(status: str) -> str:
    """Returns the rich style of a status; empty if it has none or NO_COLOR is set."""
    return "" if os.environ.get("NO_COLOR") else _STYLES.get(status, "")


def print_table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], *, wide: str, fold: bool = False
) -> None:
    """Prints a table; on a terminal, empty columns are left out.

    If the terminal is narrow, only the column `wide` is cut, or folded if `fold` is set.
    """
    cells = [[printable(cell) for cell in row] for row in rows]
    if is_terminal():
        _print_rich(columns, cells, wide, fold=fold)
        return
    widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
    for row in [list(columns), *cells]:
        padded = (f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True))
        print("  ".join(padded).rstrip())


def _print_rich(
    columns: Sequence[str], cells: Sequence[Sequence[str]], wide: str, *, fold: bool
) -> None:
    """Prints a table on a terminal without empty columns."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    filled = [
        index for index, name in enumerate(columns) if name == wide or any(r[index] for r in cells)
    ]
    for at in filled:
        table.add_column(columns[at], no_wrap=columns[at] != wide)
    overflow: Literal["fold", "ellipsis"] = "fold" if fold else "ellipsis"
    for row in cells:
        texts = (
            Text(row[at], style=style_of(row[at]), no_wrap=not fold, overflow=overflow)
            for at in filled
        )
        table.add_row(*texts)
    plain = bool(os.environ.get("NO_COLOR"))
    console = Console(color_system=None if plain else "auto", highlight=False, markup=False)
    console.print(table)


def print_fields(pairs: Iterable[tuple[str, str | None]]) -> None:
    """Prints one name and value per line; empty values are left out."""
    present = [(name, value) for name, value in pairs if value not in (None, "")]
    width = max((len(name) for name, _ in present), default=0) + 2
    for name, value in present:
        print(f"{name + ':':<{width}}{indented(value or '', ' ' * width)}")


def print_note(text: str) -> None:
    """Prints a note to standard error; lines after the first are indented."""
    print(indented(text, "  "), file=sys.stderr, flush=True)


def format_time(at: datetime | None) -> str | None:
    """Formats a time in the local time zone; `None` stays `None`."""
    return None if at is None else at.astimezone().strftime("%Y-%m-%d %H:%M:%S %Z")


def format_duration(duration: timedelta) -> str:
    """Formats a duration in its two largest units, for example `2h5m`."""
    seconds = duration.total_seconds()
    if seconds < 10:
        return f"{max(seconds, 0):.1f}s"
    whole = int(seconds)
    for size, unit, smaller_size, smaller_unit in (
        (86400, "d", 3600, "h"),
        (3600, "h", 60, "m"),
        (60, "m", 1, "s"),
    ):
        if whole >= size:
            rest = whole % size // smaller_size
            return (
                f"{whole // size}{unit}{rest}{smaller_unit}" if rest else f"{whole // size}{unit}"
            )
    return f"{whole}s"


def format_json(value: Any) -> str | None:
    """Formats a JSON value for people: a string or `None` as it is, other values indented."""
    if value is None:
        return None
    if isinstance(value, str):
        return value
    return msgspec.json.format(msgspec.json.encode(value), indent=2).decode()
