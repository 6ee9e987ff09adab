"""`orchestrate up`, `worker` and `coordinator`: what runs until it is told to stop."""

import shlex
from typing import TYPE_CHECKING, Any

import click

from tenuto.cli.base import F, Globals, command, group
from tenuto.cli.embedded import call, settings

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from tenuto.engine.engine import Engine
    from tenuto.engine.upkeep import Leadership
    from tenuto.store.protocol import Row


def _listening(function: F) -> F:
    """Adds where the API listens."""
    function = click.option("--host", metavar="ADDRESS", help="Where the API listens.")(function)
    return click.option(
        "--port", type=click.IntRange(0, 65535), metavar="N", help="Its port; 0: any free one."
    )(function)


@command(
    "up", "orchestrate up", "orchestrate up --data ./state --workers 2", "orchestrate up --demo"
)
@click.option(
    "--workers",
    type=click.IntRange(0, 256),
    default=1,
    show_default=True,
    metavar="N",
    help="Worker processes.",
)
@click.option("--demo", is_flag=True, help="With example agents and tasks.")
@_listening
@click.pass_obj
def up(given: Globals, workers: int, demo: bool, host: str | None, port: int | None) -> int:
    """Run API, coordinator and workers on an embedded database until Ctrl-C, which drains."""
    from tenuto import app

    chosen = settings(given, host=host, port=port)
    if demo:
        from tenuto.cli import demo as performance

        return performance.demo()
    return app.serve_up(chosen, workers)


@command(
    "serve",
    "orchestrate serve --database postgresql://localhost/tenuto",
    "orchestrate serve --host 0.0.0.0 --port 8484",
)
@_listening
@click.pass_obj
def serve(given: Globals, host: str | None, port: int | None) -> int:
    """Serve the HTTP API until Ctrl-C. Any number may run on one database."""
    from tenuto import app

    return app.serve_api(settings(given, host=host, port=port))


@group(
    "worker",
    "orchestrate worker --agent builder --slots 4 --accept-commands",
    "orchestrate worker --agent claude --task-tag python --command 'claude -p'",
    "orchestrate worker --app myproject.agents:handlers",
    "orchestrate worker list",
    invoke_without_command=True,
)
@click.option(
    "--agent", default="local", show_default=True, metavar="NAME", help="The agent it works as."
)
@click.option("--slots", type=click.IntRange(1, 10_000), metavar="N", help="Tasks at once.")
@click.option(
    "--accept-commands/--no-accept-commands",
    default=True,
    show_default=True,
    help="Whether tasks may bring commands to run here.",
)
@click.option("--task-tag", "task_tags", multiple=True, help="A tag that tasks may ask for.")
@click.option("--capability", "capabilities", multiple=True, help="What the agent is able to.")
@click.option("--agent-type", metavar="T", help="The kind of agent it is.")
@click.option("--command", "command_", metavar="'CMD...'", help="Run this for each task.")
@click.option("--app", "app_", metavar="MODULE:HANDLERS", help="Python handlers by task type.")
@click.pass_context
def worker(ctx: click.Context, /, command_: str | None, app_: str | None, **options: Any) -> int:
    """Take tasks for an agent and run them, until Ctrl-C, which drains."""
    if ctx.invoked_subcommand is not None:
        return 0
    from tenuto import app
    from tenuto.model import limits

    one = (options["agent"], options["agent_type"])
    for name in (*one, *options["task_tags"], *options["capabilities"]):
        if name is not None:
            limits.text("a name", name, limits.MAX_NAME, empty=False)
    argv = None if command_ is None else tuple(_split(command_))
    chosen = app.WorkerOptions(command=argv, app=app_, **options)
    return app.serve_worker(settings(ctx.ensure_object(Globals)), chosen)


def _split(text: str) -> list[str]:
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise click.UsageError(f"--command is not a command line: {error}") from error
    if not words:
        raise click.UsageError("--command must not be empty")
    return words


@command("list", "orchestrate worker list", "orchestrate worker list --json")
@click.pass_obj
def worker_list(given: Globals) -> None:
    """List the workers that were heard of lately."""
    import msgspec

    from tenuto.cli.render import print_json, print_table, span

    async def read(engine: "Engine") -> "tuple[Sequence[Row], datetime]":
        return await engine.query.workers(engine.workspace), engine.clock.now()

    rows, now = call(given, read)
    found = [
        {
            "id": row["worker_id"],
            "status": row["status"],
            "agents": msgspec.json.decode(row["agents"], type=list[str]),
            "slots": row["slots"],
            "running": row["running"],
            "host": row["host"],
            "pid": row["pid"],
            "startedAt": row["started_at"],
            "seenAt": row["seen_at"],
        }
        for row in rows
    ]
    if given.json:
        print_json({"workers": found})
        return
    cells = [
        [
            each["id"],
            each["status"],
            f"{each['running']}/{each['slots']}",
            span(now - each["seenAt"]),
            ", ".join(each["agents"]),
        ]
        for each in found
    ]
    print_table(["ID", "STATUS", "BUSY", "SEEN", "AGENTS"], cells, wide="AGENTS")


worker.add_command(worker_list)


@group(
    "coordinator",
    "orchestrate coordinator",
    "orchestrate coordinator status --json",
    invoke_without_command=True,
)
@click.pass_context
def coordinator(ctx: click.Context) -> int:
    """Expire lost leases and promote what is due, until Ctrl-C. Any number may run."""
    if ctx.invoked_subcommand is not None:
        return 0
    return _coordinate(ctx.ensure_object(Globals))


def _coordinate(given: Globals) -> int:
    from tenuto import app

    return app.serve_coordinator(settings(given))


@command("run", "orchestrate coordinator run --database postgresql://localhost/tenuto")
@click.pass_obj
def coordinator_run(given: Globals) -> int:
    """Run a coordinator; the same as `orchestrate coordinator`."""
    return _coordinate(given)


@command("status", "orchestrate coordinator status", "orchestrate coordinator status --json")
@click.pass_obj
def coordinator_status(given: Globals) -> None:
    """Say which coordinator leads and how many tasks are in each status."""
    from tenuto.cli.render import moment, print_fields, print_json

    async def read(engine: "Engine") -> "tuple[Leadership | None, dict[str, int], datetime]":
        leader = await engine.upkeep.leader("coordinator")
        return leader, await engine.query.counts(engine.workspace), engine.clock.now()

    leader, counts, now = call(given, read)
    active = leader is not None and leader.until > now
    if given.json:
        print_json(
            {
                "active": active,
                "holder": None if leader is None else leader.holder,
                "epoch": None if leader is None else leader.epoch,
                "until": None if leader is None else leader.until,
                "tasks": counts,
            }
        )
        return
    held = [] if leader is None else [("epoch", str(leader.epoch)), ("until", moment(leader.until))]
    who = leader.holder if leader is not None and active else "nobody; `orchestrate up` starts one"
    print_fields([("leads", who), *held, *((name, str(n)) for name, n in counts.items() if n)])


for _each in (coordinator_run, coordinator_status):
    coordinator.add_command(_each)
