"""The root command and its subcommands by name. A subcommand is imported when it is called."""

import click

from tenuto.cli.base import Group


def _print_version(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    del param
    if value:
        from tenuto import __version__

        print(f"tenuto {__version__}")
        ctx.exit()


LAZY = {
    "up": ("tenuto.cli.system.serve:up", "Run everything in one process."),
    "serve": ("tenuto.cli.system.serve:serve", "Serve the HTTP API."),
    "run": ("tenuto.cli.tasks.run:run", "Submit a command or a prompt as a task."),
    "task": ("tenuto.cli.tasks.group:task", "Create, watch and control tasks."),
    "apply": ("tenuto.cli.flows.manifest:apply", "Create or update definitions from YAML files."),
    "validate": ("tenuto.cli.flows.manifest:validate", "Check YAML files."),
    "export": ("tenuto.cli.flows.manifest:export", "Print definitions as YAML."),
    "definition": ("tenuto.cli.flows.manifest:definition", "List, show and delete definitions."),
    "complexity": ("tenuto.cli.complexity:complexity", "Show or set complexity levels."),
    "flow": ("tenuto.cli.flows.flows:flow", "Start, show and control flows."),
    "group": ("tenuto.cli.flows.groups:group_", "Define, start and control groups."),
    "inbox": ("tenuto.cli.flows.inbox:inbox", "List and answer approvals and questions."),
    "schedule": ("tenuto.cli.flows.schedules:schedule", "Start definitions at given times."),
    "event": ("tenuto.cli.flows.triggers:event", "Publish events."),
    "trigger": ("tenuto.cli.flows.triggers:trigger", "Start definitions when events occur."),
    "explain": ("tenuto.cli.tasks.read:explain", "Show why a task is not running."),
    "pause": ("tenuto.cli.limits:pause", "Stop new tasks from starting; list pauses."),
    "resume": ("tenuto.cli.limits:resume", "End a pause."),
    "limit": ("tenuto.cli.limits:limit", "Limit requests and tokens per minute."),
    "dlq": ("tenuto.cli.tasks.dlq:dlq", "List, requeue or purge dead-letter tasks."),
    "top": ("tenuto.cli.system.top:top", "Show running tasks and workers live."),
    "agent": ("tenuto.cli.agents.agents:agent", "Register and manage agents."),
    "worker": ("tenuto.cli.system.serve:worker", "Run tasks for an agent."),
    "coordinator": ("tenuto.cli.system.serve:coordinator", "Repair and promote tasks."),
    "login": ("tenuto.cli.tenancy.login:login", "Log in to a server and store the token."),
    "logout": ("tenuto.cli.tenancy.login:logout", "Log out and delete the stored token."),
    "workspace": ("tenuto.cli.tenancy.accounts:workspace", "Create workspaces and set quotas."),
    "user": ("tenuto.cli.tenancy.accounts:user", "Manage users and their roles."),
    "token": ("tenuto.cli.tenancy.accounts:token", "Create and revoke API tokens."),
    "webhook": ("tenuto.cli.webhooks:webhook", "Send events to HTTP endpoints."),
    "secret": ("tenuto.cli.tenancy.secrets:secret", "Store encrypted values for tasks."),
    "db": ("tenuto.cli.system.db:db", "Migrate and check the database."),
    "doctor": ("tenuto.cli.system.doctor:doctor", "Check this machine and the database."),
    "bench": ("tenuto.cli.system.bench:bench", "Measure throughput and latency on this machine."),
    "chaos": (
        "tenuto.cli.system.chaos:chaos",
        "Inject faults into a test deployment and check it.",
    ),
    "completion": ("tenuto.cli.completion:completion", "Print the shell completion script."),
}


@click.group(
    "orchestrate",
    cls=Group,
    lazy=LAZY,
    examples=(
        "orchestrate up",
        "orchestrate run --follow -- make test",
        "orchestrate task list --status RUNNING",
    ),
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_version,
    help="Print the version.",
)
def cli() -> None:
    """Durable orchestration for AI agents.

    Exit codes: 0 success, 1 failed task or refused request, 2 wrong usage, 3 server or database
    not reachable.
    """
