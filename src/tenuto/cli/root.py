"""The tree of commands, by name. Each is imported when it is called."""

import click

from tenuto.cli.base import Group


def _version(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    del param
    if value:
        from tenuto import __version__

        print(f"tenuto {__version__}")
        ctx.exit()


LAZY = {
    "up": ("tenuto.cli.system.serve:up", "Run everything in one process."),
    "serve": ("tenuto.cli.system.serve:serve", "Serve the HTTP API."),
    "run": ("tenuto.cli.tasks.run:run", "Submit a command or a prompt."),
    "task": ("tenuto.cli.tasks.group:task", "Create, watch and control tasks."),
    "apply": ("tenuto.cli.flows.manifest:apply", "Make definitions what YAML files say."),
    "validate": ("tenuto.cli.flows.manifest:validate", "Check YAML files."),
    "export": ("tenuto.cli.flows.manifest:export", "Print definitions as YAML."),
    "definition": ("tenuto.cli.flows.manifest:definition", "Look at definitions."),
    "complexity": ("tenuto.cli.complexity:complexity", "Say what makes a task hard."),
    "flow": ("tenuto.cli.flows.flows:flow", "Start and watch flows."),
    "group": ("tenuto.cli.flows.groups:group_", "Define, start and watch groups."),
    "inbox": ("tenuto.cli.flows.inbox:inbox", "Answer what waits for a person."),
    "schedule": ("tenuto.cli.flows.schedules:schedule", "Start definitions by time."),
    "event": ("tenuto.cli.flows.triggers:event", "Tell the workspace that something happened."),
    "trigger": ("tenuto.cli.flows.triggers:trigger", "Start definitions after events."),
    "explain": ("tenuto.cli.tasks.read:explain", "Say why a task is not running."),
    "pause": ("tenuto.cli.limits:pause", "Let nobody claim some tasks."),
    "resume": ("tenuto.cli.limits:resume", "Let what was paused go on."),
    "limit": ("tenuto.cli.limits:limit", "Limit requests and tokens a minute."),
    "dlq": ("tenuto.cli.tasks.dlq:dlq", "Look after tasks that used up their tries."),
    "top": ("tenuto.cli.system.top:top", "Watch what is going on."),
    "agent": ("tenuto.cli.agents.agents:agent", "Register and look after agents."),
    "worker": ("tenuto.cli.system.serve:worker", "Run tasks for an agent."),
    "coordinator": ("tenuto.cli.system.serve:coordinator", "Repair and promote tasks."),
    "login": ("tenuto.cli.tenancy.login:login", "Remember a server."),
    "logout": ("tenuto.cli.tenancy.login:logout", "Forget the remembered server."),
    "workspace": ("tenuto.cli.tenancy.accounts:workspace", "Make and limit workspaces."),
    "user": ("tenuto.cli.tenancy.accounts:user", "Make users and say what they may do."),
    "token": ("tenuto.cli.tenancy.accounts:token", "Make and end the keys of programs."),
    "webhook": ("tenuto.cli.webhooks:webhook", "Tell endpoints of events."),
    "secret": ("tenuto.cli.tenancy.secrets:secret", "Keep values that only attempts see."),
    "db": ("tenuto.cli.system.db:db", "Migrate and check the database."),
    "doctor": ("tenuto.cli.system.doctor:doctor", "Say what is right and wrong with this machine."),
    "bench": ("tenuto.cli.system.bench:bench", "Measure throughput and latency on this machine."),
    "chaos": (
        "tenuto.cli.system.chaos:chaos",
        "Break a deployment on purpose and check what is left.",
    ),
    "completion": ("tenuto.cli.completion:completion", "Complete commands in a shell."),
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
    callback=_version,
    help="Print the version.",
)
def cli() -> None:
    """Durable orchestration for AI agents.

    Exit codes: 0 done, 1 failed task or refused request, 2 wrong usage, 3 not reachable.
    """
