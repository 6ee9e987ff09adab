"""Prints results of commands: a table or fields for people, or one JSON document."""

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import click

from tenuto.cli.base import GlobalOptions

if TYPE_CHECKING:
    from datetime import datetime

Columns = dict[str, Callable[[Any], Any]]
"""Column headings, from left to right, each with a function from an item to its value."""


def columns(text: str) -> Columns:
    """Parses `HEADING: attribute, ...` into columns that show attributes of an item.

    Without `: attribute` the attribute's name is the heading in lower case, with `_` for spaces.
    """
    parts = [part.partition(":") for part in text.split(",")]
    return {
        heading.strip(): attrgetter(path.strip() or heading.strip().lower().replace(" ", "_"))
        for heading, _, path in parts
    }


def print_list(
    options: GlobalOptions, name: str, items: Sequence[Any], columns: Columns, wide: str
) -> None:
    """Prints items as a table, or as JSON `{name: items}`. Only column `wide` is shortened."""
    from tenuto.cli.render import print_json, print_table

    if options.json:
        print_json({name: items})
        return
    rows = [[format_value(show(item)) for show in columns.values()] for item in items]
    print_table(list(columns), rows, wide=wide)


def print_page(
    options: GlobalOptions, page: Any, items: Sequence[Any], columns: Columns, wide: str
) -> None:
    """Prints a page as a table, or the whole page as JSON, and how to see the next page."""
    from tenuto.cli.render import print_json

    if options.json:
        print_json(page)
        return
    print_list(options, "", items, columns, wide)
    print_next_cursor(page.next_cursor)


def print_next_cursor(cursor: Any) -> None:
    """Prints to standard error how to see the next page, if there is one."""
    if cursor is not None:
        click.echo(f"more: --cursor {cursor}", err=True)


def print_one(options: GlobalOptions, item: Any, fields: Columns) -> None:
    """Prints one item as named fields, or as JSON."""
    from tenuto.cli.render import print_fields, print_json

    if options.json:
        print_json(item)
        return
    print_fields((name, format_value(show(item))) for name, show in fields.items())


def print_value(options: GlobalOptions, item: Any, value: Any) -> None:
    """Prints one value of an item, or the whole item as JSON."""
    from tenuto.cli.render import print_json
    from tenuto.model.printable import printable

    if options.json:
        print_json(item)
    else:
        print(printable(str(value)))


def print_done(options: GlobalOptions, text: str, **fields: Any) -> None:
    """Prints a confirmation, or JSON `{"ok": true}` with the fields."""
    from tenuto.cli.render import print_json
    from tenuto.model.printable import printable

    if options.json:
        print_json({"ok": True, **fields})
    else:
        print(printable(text))


def format_value(value: Any) -> str:
    """Formats a value for people; `None` as an empty text."""
    from datetime import datetime

    from tenuto.cli.render import format_time

    if value is None:
        return ""
    if isinstance(value, datetime):
        return format_time(value) or ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return ", ".join(str(part) for part in value)
    return str(value)


def split_commas(values: Sequence[str]) -> list[str]:
    """Splits values at commas and returns all names; empty names are dropped."""
    return [name for value in values for name in value.split(",") if name]


def require_confirmation(question: str, *, yes: bool) -> None:
    """Unless `yes`, asks for confirmation on a terminal; a no exits with code 1."""
    from tenuto.cli.tasks.control import confirm, should_confirm

    if should_confirm(yes=yes):
        confirm(question)


def parse_future_time(text: str) -> "datetime":
    """Parses a time option: `+DURATION` from now, or an ISO 8601 time, which may be past."""
    from datetime import timedelta

    from tenuto.cli.parse import parse_time_or_delay, time_after
    from tenuto.clock import Clock

    when = parse_time_or_delay(text)
    at = time_after(Clock().now(), when) if isinstance(when, timedelta) else when
    if at is None:
        raise click.BadParameter(f"{text!r} is not a time like +2h or 2030-01-31T09:00")
    return at
