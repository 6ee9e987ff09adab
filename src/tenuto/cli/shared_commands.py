"""The commands that schedules and triggers share: list, show, pause, resume, delete."""

from collections.abc import Callable
from typing import Any

import click

from tenuto.cli.base import Globals, Group, command
from tenuto.cli.connection import ask
from tenuto.cli.output import Columns, print_done, print_one, tell_page

Part = Callable[[Any], Any]
"""The part of a client that manages the things."""


def add_shared(
    group: Group,
    part: Part,
    example: str,
    fields: Columns,
    columns: Columns,
    paused: str,
    resumed: str,
) -> None:
    """Add the commands to a group; `paused` and `resumed` are the help of the two."""
    noun = group.name
    name = click.argument("name", metavar="NAME")

    @command("list", f"orchestrate {noun} list", help=f"List the {noun}s, newest first.")
    @click.option(
        "--limit", type=click.IntRange(1, 1000), default=100, show_default=True, help="Most."
    )
    @click.option("--cursor", type=click.UUID, metavar="ID", help="Only older than this one.")
    @click.pass_obj
    def list_(given: Globals, limit: int, cursor: Any) -> None:
        page = ask(given, lambda client: part(client).page(limit, cursor))
        *_, wide = columns
        tell_page(given, page, getattr(page, f"{noun}s"), columns, wide)

    def telling(verb: str, method: str, about: str) -> None:
        @command(verb, f"orchestrate {noun} {verb} {example}", help=about)
        @name
        @click.pass_obj
        def tell(given: Globals, name: str) -> None:
            found = ask(given, lambda client: getattr(part(client), method)(name))
            print_one(given, found, fields)

        group.add_command(tell)

    @command(
        "delete",
        f"orchestrate {noun} delete {example}",
        help=f"Forget a {noun}; what it started goes on.",
    )
    @name
    @click.pass_obj
    def delete(given: Globals, name: str) -> None:
        ask(given, lambda client: part(client).delete(name))
        print_done(given, f"deleted {name}")

    group.add_command(list_)
    telling("show", "get", f"Show a {noun} and what it did.")
    telling("pause", "pause", paused)
    telling("resume", "resume", resumed)
    group.add_command(delete)
