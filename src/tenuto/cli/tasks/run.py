"""`orchestrate run`: submits one task and, with `--follow`, shows it until it finishes."""

import shlex
from typing import TYPE_CHECKING, Any

import click

from tenuto.cli.base import Command, GlobalOptions
from tenuto.cli.connection import call_engine, target
from tenuto.cli.parse import (
    absolute_folder,
    parse_seconds,
    read_environment,
    resolve_task_ids,
)
from tenuto.cli.tasks.create import find_agent_id, print_submitted
from tenuto.cli.tasks.fields import request_options

if TYPE_CHECKING:
    from tenuto.client.remote.engine import AnyEngine
    from tenuto.engine.views import TaskView
    from tenuto.model.tasks.submission import NewTask

MAX_TITLE = 80


class _RunCommand(Command):
    """Keeps the arguments after `--` apart: they are a command with its own options."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parses the arguments before `--`; stores those after it in the context."""
        if "--" in args:
            separator = args.index("--")
            ctx.meta["tenuto.argv"] = args[separator + 1 :]
            args = args[:separator]
        return super().parse_args(ctx, args)

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        del ctx
        return ["[OPTIONS]", '"PROMPT" | -- CMD [ARGS]...']


@click.command(
    "run",
    cls=_RunCommand,
    examples=(
        "orchestrate run --follow -- make test",
        "orchestrate run --name backup --timeout 10m --env DEPTH=2 -- ./backup.sh --all",
        'orchestrate run --agent claude --follow "Fix the failing test in tests/test_api.py"',
    ),
)
@click.argument("words", nargs=-1, metavar="PROMPT")
@click.option(
    "--follow", is_flag=True, help="Show it live until it finishes; exit code 1 unless COMPLETED."
)
@click.option("--name", metavar="TITLE", help="Title of the task.")
@click.option("--priority", type=int, metavar="N", help="1 (low) to 10 (urgent); default: 5.")
@click.option(
    "--timeout",
    "timeout_s",
    type=parse_seconds,
    metavar="TIME",
    help="Maximum run time: 90, 10m, 1h30m.",
)
@click.option("--tag", "tags", multiple=True, help="A label to filter by; repeatable.")
@click.option("--cwd", metavar="DIR", help="Working folder.")
@click.option(
    "--env",
    "env",
    multiple=True,
    metavar="K=V",
    help="Environment variable for the command; repeatable.",
)
@click.option("--max-attempts", type=int, metavar="N", help="Maximum number of tries; default: 3.")
@click.option("--agent", metavar="NAME", help="Only this agent may run it.")
@request_options
@click.pass_context
def run(
    ctx: click.Context, /, words: tuple[str, ...], agent: str | None, follow: bool, **fields: Any
) -> int:
    """Submit a command or a prompt as a task and print its id.

    Everything after `--` is the command; options of `run` go before it. The command runs in the
    current folder, on a worker that accepts commands; through a server, in the worker's folder.
    Ctrl-C stops --follow, not the task.
    """
    options = ctx.ensure_object(GlobalOptions)
    argv = ctx.meta.get("tenuto.argv")
    if target(options).url is None:  # a worker behind a server may be on another machine
        fields["cwd"] = absolute_folder(fields["cwd"])
    new_task = _build_new_task(words, argv, fields)
    if argv and argv[-1] == "--follow" and not options.json:
        click.echo("note: --follow after -- is an argument of the command, not of run", err=True)

    async def submit(engine: "AnyEngine") -> int:
        new_task.target_agent = await find_agent_id(engine, agent)
        references = {"depends_on": new_task.depends_on, "blocks": new_task.blocks}
        await resolve_task_ids(engine, references)
        new_task.depends_on, new_task.blocks = references["depends_on"], references["blocks"]
        submitted = await engine.submit(new_task)
        if not follow:
            print_submitted(options, submitted)
            return 0
        return await _follow_submitted(options, engine, str(submitted.id))

    return call_engine(options, submit)


def _build_new_task(
    prompts: tuple[str, ...], argv: list[str] | None, fields: dict[str, Any]
) -> "NewTask":
    """Returns the task for one prompt or for a command; `UsageError` for both or neither."""
    from tenuto.cli.render import shorten_line
    from tenuto.model.tasks.submission import NewTask

    if len(prompts) > 1 or (prompts and argv is not None):
        raise click.UsageError(
            "the prompt must be one argument: quote it, or put -- before a command"
        )
    if argv and not argv[0].strip():
        raise click.UsageError("the command after -- starts with an empty argument")
    if not prompts and not argv:
        raise click.UsageError("a prompt, or a command after --, is required")
    values = {name: value for name, value in fields.items() if value is not None}
    title = values.pop("name", None)
    values["tags"] = list(values["tags"])
    values["env"] = read_environment(values["env"])
    if argv:
        return NewTask(
            title=shorten_line(shlex.join(argv), MAX_TITLE) if title is None else title,
            command=argv,
            runtime="command",
            **values,
        )
    if values["env"]:
        raise click.UsageError("--env requires a command after --; a prompt has no environment")
    return NewTask(
        title=shorten_line(prompts[0], MAX_TITLE) if title is None else title,
        prompt=prompts[0],
        **values,
    )


async def _follow_submitted(options: GlobalOptions, engine: "AnyEngine", task: str) -> int:
    """Shows a task until it finishes; returns 0 if it is COMPLETED, else 1."""
    import asyncio

    from tenuto.cli.render import print_json, print_note
    from tenuto.cli.tasks.follow import follow_task, format_outcome, open_view, silent_view

    task_id = await engine.find(task)
    if not options.json:
        print_note(f"task {task}")
    try:
        with silent_view() if options.json else open_view() as display:
            view: TaskView = await follow_task(engine, task_id, display, output=True)
    except asyncio.CancelledError:
        print_note(f"the task continues; `orchestrate task cancel {task}` cancels it")
        raise
    if options.json:
        print_json(view)
    else:
        print_note(format_outcome(view))
    return 0 if view.status == "COMPLETED" else 1
