"""`orchestrate run`: one task from the command line, watched to its end if wanted."""

import shlex
from typing import TYPE_CHECKING, Any

import click

from tenuto.cli.base import Command, Globals
from tenuto.cli.connection import call, target
from tenuto.cli.parse import folder, place_options, read_environment, read_place, seconds
from tenuto.cli.tasks.create import agent_id, print_submitted

if TYPE_CHECKING:
    from tenuto.client.remote.engine import AnyEngine
    from tenuto.engine.views import TaskView
    from tenuto.model.tasks.submission import NewTask

TITLE = 80


class _Run(Command):
    """Keeps what follows `--` apart: it is a command with its own options, not a prompt."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if "--" in args:
            at = args.index("--")
            ctx.meta["tenuto.argv"] = args[at + 1 :]
            args = args[:at]
        return super().parse_args(ctx, args)

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        del ctx
        return ["[OPTIONS]", '"PROMPT" | -- CMD [ARGS]...']


@click.command(
    "run",
    cls=_Run,
    examples=(
        "orchestrate run --follow -- make test",
        "orchestrate run --name backup --timeout 10m --env DEPTH=2 -- ./backup.sh --all",
        'orchestrate run --agent claude --follow "Fix the failing test in tests/test_api.py"',
    ),
)
@click.argument("words", nargs=-1, metavar="PROMPT")
@click.option("--follow", is_flag=True, help="Watch it to its end; the exit code tells.")
@click.option("--name", metavar="TITLE", help="What the task is called.")
@click.option("--priority", type=int, metavar="N", help="1 (low) to 10 (urgent); 5 if not given.")
@click.option(
    "--timeout", "timeout_s", type=seconds, metavar="TIME", help="Longest run: 90, 10m, 1h30m."
)
@click.option("--tag", "tags", multiple=True, help="A label to filter by; repeatable.")
@click.option("--cwd", metavar="DIR", help="The folder to work in.")
@click.option("--env", "env", multiple=True, metavar="K=V", help="A variable for the command.")
@click.option("--max-attempts", type=int, metavar="N", help="Tries in all; 3 if not given.")
@click.option("--agent", metavar="NAME", help="The one agent that must take it.")
@place_options
@click.pass_context
def run(
    ctx: click.Context, /, words: tuple[str, ...], agent: str | None, follow: bool, **fields: Any
) -> int:
    """Submit a command or a prompt as a task and print its id.

    Everything after `--` is the command; options of `run` stand before it. The command runs in
    this folder, on a worker that accepts commands; through a server in the worker's folder. Ctrl-C
    stops the watching, not the task.
    """
    given = ctx.ensure_object(Globals)
    argv = ctx.meta.get("tenuto.argv")
    if target(given).url is None:  # a worker behind a server may be on another machine
        fields["cwd"] = folder(fields["cwd"])
    new = _new_task(words, argv, fields)
    if argv and argv[-1] == "--follow" and not given.json:
        click.echo("note: --follow stands after -- and so goes to the command", err=True)

    async def submit(engine: "AnyEngine") -> int:
        new.target_agent = await agent_id(engine, agent)
        place = {"depends_on": new.depends_on, "blocks": new.blocks}
        await read_place(engine, place)
        new.depends_on, new.blocks = place["depends_on"], place["blocks"]
        submitted = await engine.submit(new)
        if not follow:
            print_submitted(given, submitted)
            return 0
        return await _follow(given, engine, str(submitted.id))

    return call(given, submit)


def _new_task(words: tuple[str, ...], argv: list[str] | None, fields: dict[str, Any]) -> "NewTask":
    from tenuto.cli.render import cut
    from tenuto.model.tasks.submission import NewTask

    if len(words) > 1 or (words and argv is not None):
        raise click.UsageError("a prompt is one argument: quote it, or write -- before a command")
    if argv and not argv[0].strip():
        raise click.UsageError("the command after -- begins with an empty word")
    if not words and not argv:
        raise click.UsageError("give a prompt, or a command after --")
    told = {name: value for name, value in fields.items() if value is not None}
    title = told.pop("name", None)
    told["tags"] = list(told["tags"])
    told["env"] = read_environment(told["env"])
    if argv:
        return NewTask(
            title=cut(shlex.join(argv), TITLE) if title is None else title,
            command=argv,
            runtime="command",
            **told,
        )
    if told["env"]:
        raise click.UsageError("--env is for commands")
    return NewTask(title=cut(words[0], TITLE) if title is None else title, prompt=words[0], **told)


async def _follow(given: Globals, engine: "AnyEngine", task: str) -> int:
    import asyncio

    from tenuto.cli.render import print_json, print_note
    from tenuto.cli.tasks.follow import ending, quiet, screen, watch

    found = await engine.find(task)
    if not given.json:
        print_note(f"task {task}")
    try:
        with quiet() if given.json else screen() as shown:
            view: TaskView = await watch(engine, found, shown, output=True)
    except asyncio.CancelledError:
        print_note(f"the task goes on; `orchestrate task cancel {task}` ends it")
        raise
    if given.json:
        print_json(view)
    else:
        print_note(ending(view))
    return 0 if view.status == "COMPLETED" else 1
