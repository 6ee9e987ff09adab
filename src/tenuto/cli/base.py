"""What every command shares: options accepted everywhere, examples in help, groups loaded late."""

import importlib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import click

F = TypeVar("F", bound=Callable[..., Any])


class Globals:
    """What the options that every command takes were set to."""

    def __init__(self) -> None:
        self.database: str | None = None
        self.data: str | None = None
        self.url: str | None = None
        self.token: str | None = None
        self.workspace: str | None = None
        self.json = False


def _keep(ctx: click.Context, param: click.Parameter, value: Any) -> None:
    """Of the same option before and after a command's name, the later one holds."""
    if value == "":  # an unset variable of a script, perhaps, and then not what was meant
        raise click.BadParameter("must not be empty", ctx, param)
    if value and param.name is not None:
        setattr(ctx.ensure_object(Globals), param.name, value)


_SHARED = {
    "--url": ("URL", "The server, as http://host:8484 (TENUTO_URL, or the login)."),
    "--token": ("TOKEN", "The key to the server (TENUTO_TOKEN, or the login)."),
    "--workspace": ("ID", "The workspace there, if not the token's first (TENUTO_WORKSPACE)."),
    "--database": ("URL", "No server: sqlite:///path or postgresql://... (TENUTO_DATABASE)."),
    "--data": ("DIR", "No server: the folder of the embedded database (TENUTO_DATA)."),
}


def _everywhere() -> list[click.Parameter]:
    named: list[click.Parameter] = [
        click.Option([name], metavar=what, expose_value=False, callback=_keep, help=text)
        for name, (what, text) in _SHARED.items()
    ]
    return [
        *named,
        click.Option(
            ["--json"],
            is_flag=True,
            expose_value=False,
            callback=_keep,
            help="Print one JSON document and nothing else.",
        ),
    ]


def _write_examples(formatter: click.HelpFormatter, examples: tuple[str, ...]) -> None:
    if examples:
        with formatter.section("Examples"):
            for example in examples:
                formatter.write(f"{'':>{formatter.current_indent}}{example}\n")


class Command(click.Command):
    """A command whose help ends with examples."""

    def __init__(self, *args: Any, examples: tuple[str, ...] = (), **attrs: Any) -> None:
        super().__init__(*args, **attrs)
        # An option of its own takes the place of one that is accepted everywhere; before the
        # command's name that one still means what it always does.
        own = {name for each in self.params for name in each.opts}
        self.params += [each for each in _everywhere() if own.isdisjoint(each.opts)]
        self.examples = examples

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        del ctx
        _write_examples(formatter, self.examples)


class Group(click.Group):
    """Commands that are imported when they are called.

    `lazy` maps a name to where the command is (`module:name`) and its line in the group's help.
    """

    def __init__(
        self,
        *args: Any,
        lazy: Mapping[str, tuple[str, str]] | None = None,
        examples: tuple[str, ...] = (),
        **attrs: Any,
    ) -> None:
        super().__init__(*args, **attrs)
        self.params += _everywhere()
        self.lazy = dict(lazy or {})
        self.examples = examples

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args and self.no_args_is_help and not ctx.resilient_parsing:
            print(ctx.get_help())
            ctx.exit(2)
        return super().parse_args(ctx, args)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*self.lazy, *super().list_commands(ctx)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.lazy:
            return super().get_command(ctx, cmd_name)
        module, _, name = self.lazy[cmd_name][0].partition(":")
        return cast("click.Command", getattr(importlib.import_module(module), name))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            from difflib import get_close_matches

            near = get_close_matches(args[0], self.list_commands(ctx), 1)
            if not near:
                raise
            guess = f"No such command {args[0]!r}. Did you mean {near[0]!r}?"
            raise click.UsageError(guess, error.ctx) from None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows = [(name, line) for name, (_, line) in self.lazy.items()]
        for name in super().list_commands(ctx):
            found = super().get_command(ctx, name)
            if found is not None and not found.hidden:
                rows.append((name, found.get_short_help_str(100)))
        with formatter.section("Commands"):
            formatter.write_dl(rows)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        del ctx
        _write_examples(formatter, self.examples)


def command(name: str, *examples: str, **attrs: Any) -> Callable[[F], Command]:
    """Makes a function a command with examples; its docstring is the help."""
    return click.command(name, cls=Command, examples=examples, **attrs)


def group(name: str, *examples: str, **attrs: Any) -> Callable[[F], Group]:
    """Makes a function a group with examples; its docstring is the help."""
    return click.group(name, cls=Group, examples=examples, **attrs)


def one_task(function: F) -> F:
    """Adds the two ways of naming a task: `ID` and `--id ID`; `the_task` reads them."""
    function = click.option(
        "--id", "named", metavar="ID", help="The task, if it is not given as argument."
    )(function)
    return click.argument("task", required=False, metavar="[ID]")(function)


def task_argument(task: str | None, named: str | None) -> str:
    """The id or beginning of an id that was given, in one way or the other."""
    if task is not None and named is not None and task != named:
        raise click.UsageError("the argument and --id name different tasks")
    found = task if task is not None else named
    if found is None:
        raise click.UsageError("name a task: its id as argument or with --id")
    return found
