"""Commands that schedules and triggers share: list, show, pause, resume, delete."""

from collections.abc import Callable
from typing import Any

import click

from tenuto.cli.base import GlobalOptions, Group, command
from tenuto.cli.connection import call_client
from tenuto.cli.output import Columns, print_done, print_one, print_page

ClientPart = Callable[[Any], Any]
"""Returns the part of a client that manages the items, for example `client.schedules`."""


def add_shared_commands(
    group: Group,
    part: ClientPart,
    example: str,
    fields: Columns,
    columns: Columns,
    pause_help: str,
    resume_help: str,
) -> None:
    """Adds the shared commands to a group."""
    noun = group.name
    name = click.argument("name", metavar="NAME")

    @command("list", f"orchestrate {noun} list", help=f"List the {noun}s, newest first.")
    @click.option(
        "--limit",
        type=click.IntRange(1, 1000),
        default=100,
        show_default=True,
        help="Maximum number of rows.",
    )
    @click.option("--cursor", type=click.UUID, metavar="ID", help="Only rows older than this id.")
    @click.pass_obj
    def list_(options: GlobalOptions, limit: int, cursor: Any) -> None:
        page = call_client(options, lambda client: part(client).page(limit, cursor))
        *_, wide = columns
        print_page(options, page, getattr(page, f"{noun}s"), columns, wide)

    def add_item_command(verb: str, method: str, help_text: str) -> None:
        """Adds a command that calls a method of the client part and prints the item."""

        @command(verb, f"orchestrate {noun} {verb} {example}", help=help_text)
        @name
        @click.pass_obj
        def run(options: GlobalOptions, name: str) -> None:
            item = call_client(options, lambda client: getattr(part(client), method)(name))
            print_one(options, item, fields)

        group.add_command(run)

    @command(
        "delete",
        f"orchestrate {noun} delete {example}",
        help=f"Delete a {noun}; flows that it started continue.",
    )
    @name
    @click.pass_obj
    def delete(options: GlobalOptions, name: str) -> None:
        call_client(options, lambda client: part(client).delete(name))
        print_done(options, f"deleted {name}")

    group.add_command(list_)
    add_item_command("show", "get", f"Show a {noun} and its last run.")
    add_item_command("pause", "pause", pause_help)
    add_item_command("resume", "resume", resume_help)
    group.add_command(delete)
