"""What people see: tables, statuses in colour, times, and text that cannot harm a terminal.

Names, logs and errors come from tasks and so from strangers. Whatever of them is printed goes
through `printable` of `tenuto.model.printable` or, as JSON, through `print_json`.
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


def cut(text: str, longest: int) -> str:
    """The text's first line, shortened with an ellipsis."""
    lines = text.strip().splitlines()
    first = lines[0].rstrip() if lines else ""
    short = first if len(first) <= longest else first[: longest - 1].rstrip() + "…"
    return short if len(lines) < 2 or short.endswith("…") else short[: longest - 1] + "…"


def print_json(value: Any) -> None:
    """Print the one JSON document of a command."""
    print(printable_json(value))


def is_terminal(stream: TextIO | None = None) -> bool:
    stream = stream or sys.stdout
    return stream is not None and stream.isatty()


def style_of(status: str) -> str:
    """The colour of a status, for rich; nothing where colours are not wanted."""
    return "" if os.environ.get("NO_COLOR") else _STYLES.get(status, "")


def print_table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], *, wide: str, fold: bool = False
) -> None:
    """Print a table, on a terminal without its empty columns.

    Only the column named `wide` gives way when the terminal is narrow: it is cut, or folded.
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
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    filled = [at for at, name in enumerate(columns) if name == wide or any(r[at] for r in cells)]
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
    """Print names and values below each other; what is not there is left out."""
    given = [(name, value) for name, value in pairs if value not in (None, "")]
    width = max((len(name) for name, _ in given), default=0) + 2
    for name, value in given:
        print(f"{name + ':':<{width}}{indented(value or '', ' ' * width)}")


def print_note(text: str) -> None:
    """Print a remark that belongs to no result; its further lines are set in."""
    print(indented(text, "  "), file=sys.stderr, flush=True)


def moment(at: datetime | None) -> str | None:
    """An instant in the reader's own time zone."""
    return None if at is None else at.astimezone().strftime("%Y-%m-%d %H:%M:%S %Z")


def span(time: timedelta) -> str:
    """A length of time in its two largest units."""
    seconds = time.total_seconds()
    if seconds < 10:
        return f"{max(seconds, 0):.1f}s"
    whole = int(seconds)
    for size, unit, below, smaller in (
        (86400, "d", 3600, "h"),
        (3600, "h", 60, "m"),
        (60, "m", 1, "s"),
    ):
        if whole >= size:
            rest = whole % size // below
            return f"{whole // size}{unit}{rest}{smaller}" if rest else f"{whole // size}{unit}"
    return f"{whole}s"


def json_line(value: Any) -> str | None:
    """A JSON value as text for people."""
    if value is None:
        return None
    if isinstance(value, str):
        return value
    return msgspec.json.format(msgspec.json.encode(value), indent=2).decode()
