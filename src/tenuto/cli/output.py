"""How commands answer that manage things: a table or fields for people, or one document."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import click

from tenuto.cli.base import Globals

if TYPE_CHECKING:
    from datetime import datetime

Columns = dict[str, Callable[[Any], Any]]
"""A heading and what stands under it, from left to right."""


def tell_list(given: Globals, name: str, found: Sequence[Any], columns: Columns, wide: str) -> None:
    """Print what was found, under `name` as JSON."""
    from tenuto.cli.render import print_json, print_table

    if given.json:
        print_json({name: found})
        return
    rows = [[word(show(each)) for show in columns.values()] for each in found]
    print_table(list(columns), rows, wide=wide)


def tell_page(given: Globals, page: Any, found: Sequence[Any], columns: Columns, wide: str) -> None:
    """Print a page of things, as JSON whole, and how to see the next one."""
    from tenuto.cli.render import print_json

    if given.json:
        print_json(page)
        return
    tell_list(given, "", found, columns, wide)
    tell_more(page.next_cursor)


def tell_more(cursor: Any) -> None:
    """Say how to see what comes after, if anything does."""
    if cursor is not None:
        click.echo(f"more: --cursor {cursor}", err=True)


def print_one(given: Globals, found: Any, fields: Columns) -> None:
    """Print one thing."""
    from tenuto.cli.render import print_fields, print_json

    if given.json:
        print_json(found)
        return
    print_fields((name, word(show(found))) for name, show in fields.items())


def print_done(given: Globals, text: str, **said: Any) -> None:
    """Print that something was done."""
    from tenuto.cli.render import print_json
    from tenuto.model.printable import printable

    if given.json:
        print_json({"ok": True, **said})
    else:
        print(printable(text))


def word(value: Any) -> str:
    """A value as people read it."""
    from datetime import datetime

    from tenuto.cli.render import moment

    if value is None:
        return ""
    if isinstance(value, datetime):
        return moment(value) or ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return ", ".join(str(each) for each in value)
    return str(value)


def words(given: Sequence[str]) -> list[str]:
    """Names that were given one by one or with commas between them."""
    return [name for each in given for name in each.split(",") if name]


def confirmed(question: str, *, yes: bool) -> None:
    """Go on unless a person who can be asked says no."""
    from tenuto.cli.tasks.control import confirm, should_confirm

    if should_confirm(yes=yes):
        confirm(question)


def in_future(text: str) -> "datetime":
    """The instant that an option means."""
    from datetime import timedelta

    from tenuto.cli.parse import after, ahead
    from tenuto.clock import Clock

    when = ahead(text)
    found = after(Clock().now(), when) if isinstance(when, timedelta) else when
    if found is None:
        raise click.BadParameter(f"{text!r} is no time")
    return found
