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
    "up": ("tenuto.cli.serve:up", "Run everything in one process."),
    "serve": ("tenuto.cli.serve:serve", "Serve the HTTP API."),
    "run": ("tenuto.cli.run:run", "Submit a command or a prompt."),
    "task": ("tenuto.cli.task:task", "Create, watch and control tasks."),
    "apply": ("tenuto.cli.manifest:apply", "Make definitions what YAML files say."),
    "validate": ("tenuto.cli.manifest:validate", "Check YAML files."),
    "export": ("tenuto.cli.manifest:export", "Print definitions as YAML."),
    "definition": ("tenuto.cli.manifest:definition", "Look at definitions."),
    "complexity": ("tenuto.cli.complexity:complexity", "Say what makes a task hard."),
    "flow": ("tenuto.cli.flow:flow", "Start and watch flows."),
    "group": ("tenuto.cli.groups:group_", "Define, start and watch groups."),
    "inbox": ("tenuto.cli.inbox:inbox", "Answer what waits for a person."),
    "schedule": ("tenuto.cli.schedule:schedule", "Start definitions by time."),
    "event": ("tenuto.cli.trigger:event", "Tell the workspace that something happened."),
    "trigger": ("tenuto.cli.trigger:trigger", "Start definitions after events."),
    "explain": ("tenuto.cli.read:explain", "Say why a task is not running."),
    "pause": ("tenuto.cli.gates:pause", "Let nobody claim some tasks."),
    "resume": ("tenuto.cli.gates:resume", "Let what was paused go on."),
    "limit": ("tenuto.cli.gates:limit", "Limit requests and tokens a minute."),
    "dlq": ("tenuto.cli.dlq:dlq", "Look after tasks that used up their tries."),
    "top": ("tenuto.cli.top:top", "Watch what is going on."),
    "agent": ("tenuto.cli.agent:agent", "Register and look after agents."),
    "worker": ("tenuto.cli.serve:worker", "Run tasks for an agent."),
    "coordinator": ("tenuto.cli.serve:coordinator", "Repair and promote tasks."),
    "login": ("tenuto.cli.login:login", "Remember a server."),
    "logout": ("tenuto.cli.login:logout", "Forget the remembered server."),
    "workspace": ("tenuto.cli.admin:workspace", "Make and limit workspaces."),
    "user": ("tenuto.cli.admin:user", "Make users and say what they may do."),
    "token": ("tenuto.cli.admin:token", "Make and end the keys of programs."),
    "webhook": ("tenuto.cli.webhook:webhook", "Tell endpoints of events."),
    "secret": ("tenuto.cli.secret:secret", "Keep values that only attempts see."),
    "db": ("tenuto.cli.db:db", "Migrate and check the database."),
    "doctor": ("tenuto.cli.doctor:doctor", "Say what is right and wrong with this machine."),
    "bench": ("tenuto.cli.bench:bench", "Measure throughput and latency on this machine."),
    "chaos": ("tenuto.cli.chaos:chaos", "Break a deployment on purpose and check what is left."),
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
