"""Base classes of commands: global options, examples in help, subcommands imported on demand."""

import importlib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import click

F = TypeVar("F", bound=Callable[..., Any])


class GlobalOptions:
    """Values of the global options, which every command accepts."""

    def __init__(self) -> None:
        self.database: str | None = None
        self.data: str | None = None
        self.url: str | None = None
        self.token: str | None = None
        self.workspace: str | None = None
        self.json = False


def _store_option(ctx: click.Context, param: click.Parameter, value: Any) -> None:
    """Stores a global option; the last one wins if it is given before and after the command."""
    if value == "":  # probably an unset variable in a script
        raise click.BadParameter("must not be empty", ctx, param)
    if value and param.name is not None:
        setattr(ctx.ensure_object(GlobalOptions), param.name, value)


_SHARED = {
    "--url": ("URL", "Server to use, e.g. http://host:8484 (TENUTO_URL, or the login)."),
    "--token": ("TOKEN", "API token for the server (TENUTO_TOKEN, or the login)."),
    "--workspace": (
        "ID",
        "Workspace on the server; default: the token's first (TENUTO_WORKSPACE).",
    ),
    "--database": (
        "URL",
        "Database, without a server: sqlite:///path or postgresql:... (TENUTO_DATABASE).",
    ),
    "--data": ("DIR", "Folder of the embedded database, without a server (TENUTO_DATA)."),
}


def _global_options() -> list[click.Parameter]:
    options: list[click.Parameter] = [
        click.Option([name], metavar=metavar, expose_value=False, callback=_store_option, help=text)
        for name, (metavar, text) in _SHARED.items()
    ]
    return [
        *options,
        click.Option(
            ["--json"],
            is_flag=True,
            expose_value=False,
            callback=_store_option,
            help="Print one JSON document and nothing else on standard output.",
        ),
    ]


def _write_examples(formatter: click.HelpFormatter, examples: tuple[str, ...]) -> None:
    if examples:
        with formatter.section("Examples"):
            for example in examples:
                formatter.write(f"{'':>{formatter.current_indent}}{example}\n")


class Command(click.Command):
    """A command that accepts the global options and shows examples at the end of its help."""

    def __init__(self, *args: Any, examples: tuple[str, ...] = (), **attrs: Any) -> None:
        super().__init__(*args, **attrs)
        # A command's own option replaces the global option of the same name. The global option
        # can still be given before the command's name.
        own = {name for param in self.params for name in param.opts}
        self.params += [param for param in _global_options() if own.isdisjoint(param.opts)]
        self.examples = examples

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        del ctx
        _write_examples(formatter, self.examples)


class Group(click.Group):
    """A group whose subcommands are imported when they are called.

    `lazy` maps a subcommand's name to its location (`module:name`) and its line in the help.
    """

    def __init__(
        self,
        *args: Any,
        lazy: Mapping[str, tuple[str, str]] | None = None,
        examples: tuple[str, ...] = (),
        **attrs: Any,
    ) -> None:
        super().__init__(*args, **attrs)
        self.params += _global_options()
        self.lazy = dict(lazy or {})
        self.examples = examples

    def add_commands(self, *commands: click.Command) -> None:
        """Adds subcommands, in the order of the help."""
        for subcommand in commands:
            self.add_command(subcommand)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Prints the help and exits with code 2 if a required subcommand is missing."""
        if not args and self.no_args_is_help and not ctx.resilient_parsing:
            print(ctx.get_help())
            ctx.exit(2)
        return super().parse_args(ctx, args)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*self.lazy, *super().list_commands(ctx)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Returns a subcommand, importing a lazy one; `None` if the name is unknown."""
        if cmd_name not in self.lazy:
            return super().get_command(ctx, cmd_name)
        module, _, name = self.lazy[cmd_name][0].partition(":")
        return cast("click.Command", getattr(importlib.import_module(module), name))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Returns a subcommand; the error for an unknown name proposes a similar one."""
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            from difflib import get_close_matches

            matches = get_close_matches(args[0], self.list_commands(ctx), 1)
            if not matches:
                raise
            message = f"No such command {args[0]!r}. Did you mean {matches[0]!r}?"
            raise click.UsageError(message, error.ctx) from None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the subcommands, without hidden ones, and imports no lazy ones."""
        rows = [(name, line) for name, (_, line) in self.lazy.items()]
        for name in super().list_commands(ctx):
            subcommand = super().get_command(ctx, name)
            if subcommand is not None and not subcommand.hidden:
                rows.append((name, subcommand.get_short_help_str(100)))
        with formatter.section("Commands"):
            formatter.write_dl(rows)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        del ctx
        _write_examples(formatter, self.examples)


def command(name: str, *examples: str, **attrs: Any) -> Callable[[F], Command]:
    """Returns a decorator that makes a function a command; its docstring is the help text."""
    return click.command(name, cls=Command, examples=examples, **attrs)


def group(name: str, *examples: str, **attrs: Any) -> Callable[[F], Group]:
    """Returns a decorator that makes a function a group; its docstring is the help text."""
    return click.group(name, cls=Group, examples=examples, **attrs)


def add_options(*options: Callable[[Any], Any]) -> Callable[[F], F]:
    """Returns a decorator that adds arguments and options to a command, in this order."""

    def add(function: F) -> F:
        for option in reversed(options):
            function = option(function)
        return function

    return add


def limit_option(default: int = 50, *, maximum: int = 1000) -> Callable[[F], F]:
    """Returns a decorator that adds the option `--limit` of commands that list rows."""
    return click.option(
        "--limit",
        type=click.IntRange(1, maximum),
        default=default,
        show_default=True,
        help="Maximum number of rows.",
    )


def cursor_option(items: str) -> Callable[[F], F]:
    """Returns a decorator that adds `--cursor` to commands that list `items`, newest first."""
    text = f"Only {items} older than this one."
    return click.option("--cursor", type=click.UUID, metavar="ID", help=text)


def reason_option(function: F) -> F:
    """Adds the option `--reason`."""
    text = "Reason for the audit trail."
    return click.option("--reason", metavar="TEXT", help=text)(function)


def task_id_options(function: F) -> F:
    """Adds the argument `ID` and the option `--id ID`; `task_argument` reads them."""
    function = click.option(
        "--id", "named", metavar="ID", help="The task's id, instead of the argument."
    )(function)
    return click.argument("task", required=False, metavar="[ID]")(function)


def task_argument(task: str | None, id_option: str | None) -> str:
    """Returns the id, or its first characters, of the argument or `--id`; else `UsageError`.

    `UsageError` if both are missing, or if they differ.
    """
    if task is not None and id_option is not None and task != id_option:
        raise click.UsageError("the argument and --id name different tasks; give one of them")
    task_id = task if task is not None else id_option
    if task_id is None:
        raise click.UsageError("a task id is required: as argument or with --id")
    return task_id
