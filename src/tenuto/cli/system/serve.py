"""`orchestrate up`, `serve`, `worker` and `coordinator`: run until they are stopped."""

import shlex
from typing import TYPE_CHECKING, Any

import click

from tenuto.cli.base import F, GlobalOptions, command, group
from tenuto.cli.connection import settings, target

if TYPE_CHECKING:
    from tenuto.client.target import Target
    from tenuto.worker.worker import Connect


def _listen_options(function: F) -> F:
    """Adds the options for the API's address and port."""
    function = click.option("--host", metavar="ADDRESS", help="Address that the API listens on.")(
        function
    )
    return click.option(
        "--port",
        type=click.IntRange(0, 65535),
        metavar="N",
        help="Port of the API; 0: any free port.",
    )(function)


def _permission_options(function: F) -> F:
    """Adds the options for folders and variables that tasks may set for commands."""
    function = click.option(
        "--allow-folder",
        multiple=True,
        metavar="DIR",
        help="Folder, with subfolders, that tasks may work in; repeatable. Default: this folder.",
    )(function)
    return click.option(
        "--allow-env",
        multiple=True,
        metavar="NAME",
        help="Variable that tasks may set, or a pattern such as 'BUILD_*'; repeatable.",
    )(function)


def _parse_permissions(env: tuple[str, ...], folders: tuple[str, ...]) -> dict[str, str | None]:
    """Returns the settings for the permission options; `None` for options not given."""
    for option, values in (("--allow-env", env), ("--allow-folder", folders)):
        for value in values:
            if "," in value or not value.strip():
                raise click.UsageError(f"{option} must be one value without commas, not {value!r}")
    return {"task_env": ",".join(env) or None, "task_folders": ",".join(folders) or None}


COORDINATOR = {
    "status": ("tenuto.cli.agents.workers:coordinator_status", "Show the leading coordinator."),
    "recover": (
        "tenuto.cli.agents.workers:coordinator_recover",
        "Run the repairs that are due now.",
    ),
    "logs": (
        "tenuto.cli.agents.workers:coordinator_logs",
        "Print warnings and errors of all tasks.",
    ),
}
METRICS_PORT = click.option(
    "--metrics-port",
    type=click.IntRange(1, 65535),
    metavar="PORT",
    help="Serve Prometheus metrics on this port, at the address of the setting `host`.",
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
    help="Number of worker processes.",
)
@click.option(
    "--demo",
    is_flag=True,
    help="Run examples for half a minute in a temporary folder, then exit; takes no options.",
)
@_permission_options
@_listen_options
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
    """Run API, coordinator and workers on an embedded database. Ctrl-C drains and stops.

    With --demo, six tasks on two separate workers show a retry, a kill and a cancel instead.
    """
    from tenuto import app

    options = ctx.ensure_object(GlobalOptions)
    if demo:
        _refuse_other_options(ctx, options)
        from tenuto.cli.system import demo as performance

        return performance.demo()
    chosen_settings = settings(options, **listening, **_parse_permissions(allow_env, allow_folder))
    return app.serve_up(chosen_settings, workers)


def _refuse_other_options(ctx: click.Context, options: GlobalOptions) -> None:
    """Refuses options that the demo would ignore; it has its own folder, workers and output."""
    refused = [f"--{name}" for name, value in vars(options).items() if value]
    for name in ("workers", "host", "port", "allow_env", "allow_folder"):
        if ctx.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE:
            refused.append(f"--{name.replace('_', '-')}")
    if refused:
        raise click.UsageError(f"--demo cannot be combined with {', '.join(refused)}")


@command(
    "serve",
    "orchestrate serve --database postgresql://localhost/tenuto",
    "orchestrate serve --host 0.0.0.0 --port 8484",
)
@_listen_options
@click.pass_obj
def serve(options: GlobalOptions, host: str | None, port: int | None) -> int:
    """Serve the HTTP API until Ctrl-C. Several servers can share one database."""
    from tenuto import app

    return app.serve_api(settings(options, host=host, port=port))


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
        "drain": ("tenuto.cli.agents.drain:worker_drain", "Let workers finish and stop."),
    },
    invoke_without_command=True,
)
@click.option(
    "--agent", default="local", show_default=True, metavar="NAME", help="Name of its agent."
)
@click.option("--slots", type=click.IntRange(1, 10_000), metavar="N", help="Maximum tasks at once.")
@click.option(
    "--accept-commands/--no-accept-commands",
    default=True,
    show_default=True,
    help="Allow tasks that contain a command.",
)
@click.option("--task-tag", "task_tags", multiple=True, help="Task tag that tasks can require.")
@click.option(
    "--capability", "capabilities", multiple=True, help="Capability that tasks can require."
)
@click.option("--agent-type", metavar="T", help="Agent type; tasks can require it.")
@click.option("--command", "command_", metavar="'CMD...'", help="Command that runs each task.")
@click.option("--app", "app_", metavar="MODULE:HANDLERS", help="Dictionary of Python handlers.")
@click.option("--runtime", metavar="NAME", help="Runtime of an installed package for each task.")
@_permission_options
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
    """Claim and run tasks for an agent. Ctrl-C drains and stops."""
    if ctx.invoked_subcommand is not None:
        return 0
    from tenuto import app
    from tenuto.model import bounds

    names = (options["agent"], options["agent_type"])
    for name in (*names, *options["task_tags"], *options["capabilities"]):
        if name is not None:
            bounds.check_text("name", name, bounds.MAX_NAME, empty=False)
    if command_ is not None and app_ is not None:
        raise click.UsageError("give either --command or --app, not both")
    argv = None if command_ is None else tuple(_split_command(command_))
    worker_options = app.WorkerOptions(command=argv, app=app_, **options)
    worker_target = target(
        ctx.ensure_object(GlobalOptions), **_parse_permissions(allow_env, allow_folder)
    )
    return app.serve_worker(worker_target.settings, worker_options, _connector(worker_target))


def _connector(worker_target: "Target") -> "Connect | None":
    """Returns a function that connects to the server; `None` for a direct database connection."""
    from tenuto.client.target import open_engine

    return None if worker_target.url is None else lambda: open_engine(worker_target)


def _split_command(text: str) -> list[str]:
    """Splits a command line like a shell; refuses an empty one."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise click.UsageError(f"--command is not a valid command line: {error}") from error
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
    """Expire lost leases and promote due tasks, until Ctrl-C. Any number can run."""
    if ctx.invoked_subcommand is not None:
        return 0
    return _run_coordinator(ctx.ensure_object(GlobalOptions), metrics_port)


def _run_coordinator(options: GlobalOptions, metrics_port: int | None) -> int:
    """Runs a coordinator until it is stopped; returns the exit code."""
    from tenuto import app

    return app.serve_coordinator(settings(options), metrics_port)


@command("run", "orchestrate coordinator run --database postgresql://localhost/tenuto")
@METRICS_PORT
@click.pass_obj
def coordinator_run(options: GlobalOptions, metrics_port: int | None) -> int:
    """Run a coordinator; the same as `orchestrate coordinator`."""
    return _run_coordinator(options, metrics_port)


coordinator.add_command(coordinator_run)
