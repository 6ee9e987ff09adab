"""Commands that the resources of the client share: list, show, pause, resume, delete, ..."""

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from tenuto.cli.base import Command, GlobalOptions, add_options, command, limit_option
from tenuto.cli.connection import call_client
from tenuto.cli.output import Columns, print_done, print_list, print_one, print_page

if TYPE_CHECKING:
    from uuid import UUID

    from tenuto.client.client import AsyncClient

Option = Callable[[Any], Any]
"""A decorator that adds an argument or an option to a command."""


def print_result(
    options: GlobalOptions, operation: Callable[["AsyncClient"], Awaitable[Any]], fields: Columns
) -> None:
    """Runs an operation with a client and prints the item that it returns."""
    print_one(options, call_client(options, operation), fields)


class Resource(NamedTuple):
    """A resource of the client. Its methods return the commands that many resources have.

    An item is named by one argument, which `metavar` shows in the help.
    """

    noun: str
    part: Callable[[Any], Any]
    """Returns the part of a client that manages the items, for example `client.schedules`."""
    fields: Columns
    """What `show` and other commands print of an item."""
    example: str
    """An item's name, for the examples."""
    metavar: str = "NAME"
    item_type: Any = None

    def item_command(
        self,
        verb: str,
        help_text: str,
        *more: Option,
        method: str | None = None,
        fields: Columns | None = None,
        examples: tuple[str, ...] | None = None,
    ) -> Command:
        """Returns a command that passes an item and `more` to a method, and prints the result.

        The method has the name of the command if no other is given.
        """
        examples = examples or (f"orchestrate {self.noun} {verb} {self.example}",)

        @command(verb, *examples, help=help_text)
        @add_options(self._argument, *more)
        @click.pass_obj
        def run(options: GlobalOptions, /, item: Any, **values: Any) -> None:
            print_result(
                options,
                lambda client: getattr(self.part(client), method or verb)(item, **values),
                self.fields if fields is None else fields,
            )

        return run

    def delete_command(self, help_text: str, *, json_name: str | None = None) -> Command:
        """Returns the command `delete`; with `json_name`, its JSON output has the item's name."""

        @command("delete", f"orchestrate {self.noun} delete {self.example}", help=help_text)
        @self._argument
        @click.pass_obj
        def delete(options: GlobalOptions, item: Any) -> None:
            call_client(options, lambda client: self.part(client).delete(item))
            print_done(options, f"deleted {item}", **({json_name: item} if json_name else {}))

        return delete

    def list_command(
        self,
        help_text: str,
        name: str,
        columns: Columns,
        *,
        wide: str | None = None,
        example: str | None = None,
    ) -> Command:
        """Returns the command `list` of all items; `name` is their name in JSON.

        Column `wide`, by default the last one, is shortened.
        """

        @command("list", example or f"orchestrate {self.noun} list", help=help_text)
        @click.pass_obj
        def list_(options: GlobalOptions) -> None:
            items = call_client(options, lambda client: self.part(client).list())
            print_list(options, name, items, columns, wide or list(columns)[-1])

        return list_

    def page_command(
        self, columns: Columns, limit: int, cursor: Option, *, example: str | None = None
    ) -> Command:
        """Returns the command `list` of one page of items; the last column is shortened."""
        noun = self.noun

        @command(
            "list", example or f"orchestrate {noun} list", help=f"List the {noun}s, newest first."
        )
        @add_options(limit_option(limit), cursor)
        @click.pass_obj
        def list_(options: GlobalOptions, limit: int, cursor: "UUID | None") -> None:
            page = call_client(options, lambda client: self.part(client).page(limit, cursor))
            print_page(options, page, getattr(page, f"{noun}s"), columns, list(columns)[-1])

        return list_

    @property
    def _argument(self) -> Option:
        return click.argument("item", metavar=self.metavar, type=self.item_type)


def add_rule_commands(
    group: Any, resource: Resource, columns: Columns, pause_help: str, resume_help: str
) -> None:
    """Adds the commands that schedules and triggers share to a group."""
    noun = resource.noun
    cursor = click.option(
        "--cursor", type=click.UUID, metavar="ID", help="Only rows older than this id."
    )
    group.add_commands(
        resource.page_command(columns, 100, cursor),
        resource.item_command("show", f"Show a {noun} and its last run.", method="get"),
        resource.item_command("pause", pause_help),
        resource.item_command("resume", resume_help),
        resource.delete_command(f"Delete a {noun}; flows that it started continue."),
    )
