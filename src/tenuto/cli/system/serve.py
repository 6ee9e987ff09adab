"""`orchestrate up`, `worker` and `coordinator`: what runs until it is told to stop."""

import shlex
from typing import TYPE_CHECKING, Any

import click

from tenuto.cli.base import F, Globals, command, group
from tenuto.cli.connection import settings, target

if TYPE_CHECKING:
    from tenuto.client.target import Target
    from tenuto.worker.worker import Connect


def _listening(function: F) -> F:
    """Adds where the API listens."""
    function = click.option("--host", metavar="ADDRESS", help="Where the API listens.")(function)
    return click.option(
        "--port", type=click.IntRange(0, 65535), metavar="N", help="Its port; 0: any free one."
    )(function)


def _allowing(function: F) -> F:
    """Adds what tasks may set for the commands of workers."""
    function = click.option(
        "--allow-folder",
        multiple=True,
        metavar="DIR",
        help="A folder that tasks may work in, and below; repeatable. This one if not given.",
    )(function)
    return click.option(
        "--allow-env",
        multiple=True,
        metavar="NAME",
        help="A variable that tasks may set, or a pattern such as 'BUILD_*'; repeatable.",
    )(function)


def _allowed(env: tuple[str, ...], folders: tuple[str, ...]) -> dict[str, str | None]:
    """The settings that the options stand for; nothing where none is given."""
    for option, values in (("--allow-env", env), ("--allow-folder", folders)):
        for value in values:
            if "," in value or not value.strip():
                raise click.UsageError(f"{option} wants one value without commas, not {value!r}")
    return {"task_env": ",".join(env) or None, "task_folders": ",".join(folders) or None}


COORDINATOR = {
    "status": ("tenuto.cli.agents.workers:coordinator_status", "Say which coordinator leads."),
    "recover": ("tenuto.cli.agents.workers:coordinator_recover", "Look after what is due now."),
    "logs": ("tenuto.cli.agents.workers:coordinator_logs", "Print grave events of all tasks."),
}
METRICS_PORT = click.option(
    "--metrics-port",
    type=click.IntRange(1, 65535),
    metavar="PORT",
    help="Tell Prometheus this process's metrics there, on the setting `host`.",
)


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
@click.option(
    "--demo",
    is_flag=True,
    help="Half a minute of examples in a temporary folder, and nothing else; takes no options.",
)
@_allowing
@_listening
@click.pass_context
def up(
    ctx: click.Context,
    /,
    workers: int,
    demo: bool,
    allow_env: tuple[str, ...],
    allow_folder: tuple[str, ...],
    **listening: Any,
) -> int:
    """Run API, coordinator and workers on an embedded database until Ctrl-C, which drains.

    With --demo, six tasks on two workers of their own show a retry, a kill and a cancel instead.
    """
    from tenuto import app

    given = ctx.ensure_object(Globals)
    if demo:
        _check_alone(ctx, given)
        from tenuto.cli.system import demo as performance

        return performance.demo()
    chosen = settings(given, **listening, **_allowed(allow_env, allow_folder))
    return app.serve_up(chosen, workers)


def _check_alone(ctx: click.Context, given: Globals) -> None:
    """Refuse what the demo would not heed: it has its own folder, workers and output."""
    said = [f"--{name}" for name, value in vars(given).items() if value]
    for name in ("workers", "host", "port", "allow_env", "allow_folder"):
        if ctx.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE:
            said.append(f"--{name.replace('_', '-')}")
    if said:
        raise click.UsageError(f"--demo does not go with {', '.join(said)}")


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
    "orchestrate worker --allow-env 'BUILD_*' --allow-folder /srv/work",
    "orchestrate worker --app myproject.agents:handlers",
    "orchestrate worker --url http://tenuto.example:8484 --agent builder",
    "orchestrate worker list",
    lazy={
        "list": ("tenuto.cli.agents.workers:worker_list", "List the workers."),
        "drain": ("tenuto.cli.agents.drain:worker_drain", "Let workers finish and end."),
    },
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
@_allowing
@METRICS_PORT
@click.pass_context
def worker(
    ctx: click.Context,
    /,
    command_: str | None,
    app_: str | None,
    allow_env: tuple[str, ...],
    allow_folder: tuple[str, ...],
    **options: Any,
) -> int:
    """Take tasks for an agent and run them, until Ctrl-C, which drains."""
    if ctx.invoked_subcommand is not None:
        return 0
    from tenuto import app
    from tenuto.model import bounds

    one = (options["agent"], options["agent_type"])
    for name in (*one, *options["task_tags"], *options["capabilities"]):
        if name is not None:
            bounds.text("a name", name, bounds.MAX_NAME, empty=False)
    if command_ is not None and app_ is not None:
        raise click.UsageError("--command and --app are two ways to say what a task runs")
    argv = None if command_ is None else tuple(_split(command_))
    chosen = app.WorkerOptions(command=argv, app=app_, **options)
    where = target(ctx.ensure_object(Globals), **_allowed(allow_env, allow_folder))
    return app.serve_worker(where.settings, chosen, _reach(where))


def _reach(where: "Target") -> "Connect | None":
    """How a worker reaches a server; nothing when it works on the database itself."""
    from tenuto.client.target import opened

    return None if where.url is None else lambda: opened(where)


def _split(text: str) -> list[str]:
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise click.UsageError(f"--command is not a command line: {error}") from error
    if not words:
        raise click.UsageError("--command must not be empty")
    return words


@group(
    "coordinator",
    "orchestrate coordinator",
    "orchestrate coordinator status --json",
    lazy=COORDINATOR,
    invoke_without_command=True,
)
@METRICS_PORT
@click.pass_context
def coordinator(ctx: click.Context, metrics_port: int | None) -> int:
    """Expire lost leases and promote what is due, until Ctrl-C. Any number may run."""
    if ctx.invoked_subcommand is not None:
        return 0
    return _coordinate(ctx.ensure_object(Globals), metrics_port)


def _coordinate(given: Globals, metrics_port: int | None) -> int:
    from tenuto import app

    return app.serve_coordinator(settings(given), metrics_port)


@command("run", "orchestrate coordinator run --database postgresql://localhost/tenuto")
@METRICS_PORT
@click.pass_obj
def coordinator_run(given: Globals, metrics_port: int | None) -> int:
    """Run a coordinator; the same as `orchestrate coordinator`."""
    return _coordinate(given, metrics_port)


coordinator.add_command(coordinator_run)
