"""`orchestrate agent`: who takes tasks."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import click

from tenuto.cli.base import F, Globals, command, group
from tenuto.cli.embedded import ask
from tenuto.cli.tell import Columns, tell_done, tell_list, tell_one, words

if TYPE_CHECKING:
    from datetime import datetime

    from tenuto.client.client import AsyncClient
    from tenuto.engine.registry import AgentView
    from tenuto.engine.views import TaskSummary

_FIELDS: Columns = {
    "id": lambda agent: agent.id,
    "name": lambda agent: agent.name,
    "status": lambda agent: agent.status,
    "type": lambda agent: agent.agent_type,
    "model": lambda agent: agent.model,
    "running": lambda agent: agent.running_tasks,
    "at most": lambda agent: agent.max_concurrent_tasks,
    "task types": lambda agent: agent.task_types,
    "task tags": lambda agent: agent.task_tags,
    "capabilities": lambda agent: agent.capabilities,
    "skills": lambda agent: agent.skills,
    "runtimes": lambda agent: agent.runtimes,
    "accepts commands": lambda agent: agent.accept_commands,
    "last heartbeat": lambda agent: agent.last_heartbeat,
    "created": lambda agent: agent.created_at,
}
_LISTED: Columns = {
    "NAME": lambda agent: agent.name,
    "STATUS": lambda agent: agent.status,
    "RUNNING": lambda agent: agent.running_tasks,
    "MOST": lambda agent: agent.max_concurrent_tasks,
    "RUNTIMES": lambda agent: agent.runtimes,
    "TAGS": lambda agent: agent.task_tags,
    "ID": lambda agent: agent.id,
}
_LISTS = ("task_types", "task_tags", "capabilities", "skills", "runtimes")


@group(
    "agent", "orchestrate agent list", "orchestrate agent create --name dev-1 --task-tags python"
)
def agent() -> None:
    """Register and look after agents: who takes tasks, and which."""


def _profile(function: F) -> F:
    """Adds what an agent may be told to be."""
    options: Sequence[Callable[[F], F]] = (
        click.option("--agent-type", metavar="T", help="The kind of agent it is."),
        click.option("--model", help="The model it uses."),
        click.option("--task-type", "task_types", multiple=True, help="A type it takes; else all."),
        click.option(
            "--task-tags", "--task-tag", "task_tags", multiple=True, help="Tags tasks may ask for."
        ),
        click.option(
            "--capabilities", "--capability", "capabilities", multiple=True, help="What it can do."
        ),
        click.option("--skills", "--skill", "skills", multiple=True, help="For people to see."),
        click.option(
            "--runtime", "runtimes", multiple=True, help="How it runs tasks; http if not given."
        ),
        click.option(
            "--accept-commands/--no-accept-commands",
            default=None,
            help="Whether tasks may bring commands.",
        ),
        click.option(
            "--max-concurrent", type=click.IntRange(1), metavar="N", help="Tasks at once."
        ),
    )
    for option in reversed(options):
        function = option(function)
    return function


def _told(fields: dict[str, Any]) -> dict[str, Any]:
    """What was said of an agent; what was not stays as it is."""
    told = {name: value for name, value in fields.items() if value not in (None, ())}
    return {name: words(value) if name in _LISTS else value for name, value in told.items()}


@command(
    "create", "orchestrate agent create --name dev-1 --task-tags python,sql --max-concurrent 2"
)
@click.option("--name", required=True, help="What it is called.")
@_profile
@click.pass_obj
def create(given: Globals, /, name: str, **fields: Any) -> None:
    """Register an agent that fetches its tasks over HTTP; workers register theirs themselves."""
    tell_one(given, ask(given, lambda client: client.agents.put(name, **_told(fields))), _FIELDS)


@command("update", "orchestrate agent update dev-1 --max-concurrent 4")
@click.argument("name")
@_profile
@click.pass_obj
def update(given: Globals, /, name: str, **fields: Any) -> None:
    """Change what an agent takes; what is not said stays."""

    async def change(client: "AsyncClient") -> "AgentView":
        known = await client.agents.get(name)
        return await client.agents.put(known.name, **_told(fields))

    tell_one(given, ask(given, change), _FIELDS)


@command("list", "orchestrate agent list", "orchestrate agent list --status WORKING --json")
@click.option("--status", help="Only with this status.")
@click.pass_obj
def list_(given: Globals, status: str | None) -> None:
    """List agents by name."""

    async def read(client: "AsyncClient") -> "list[AgentView]":
        wanted = None if status is None else status.upper()
        return [each async for each in client.agents.list() if wanted in (None, each.status)]

    tell_list(given, "agents", ask(given, read), _LISTED, wide="TAGS")


@command("show", "orchestrate agent show dev-1")
@click.argument("name")
@click.pass_obj
def show(given: Globals, name: str) -> None:
    """Show everything about an agent."""
    tell_one(given, ask(given, lambda client: client.agents.get(name)), _FIELDS)


@command("health", "orchestrate agent health dev-1")
@click.argument("name")
@click.pass_obj
def health(given: Globals, name: str) -> int:
    """Say whether an agent lives; exit code 1 if it does not."""
    found = ask(given, lambda client: client.agents.health(name))
    fields: Columns = {
        "status": lambda each: each.status,
        "healthy": lambda each: each.healthy,
        "last heartbeat": lambda each: each.last_heartbeat,
        "running": lambda each: each.running_tasks,
    }
    tell_one(given, found, fields)
    return 0 if found.healthy else 1


@command("tasks", "orchestrate agent tasks dev-1 --status RUNNING")
@click.argument("name")
@click.option("--status", multiple=True, help="Only with this status; of several, any.")
@click.option("--limit", type=click.IntRange(1, 1000), default=50, show_default=True, help="Most.")
@click.pass_obj
def tasks(given: Globals, name: str, status: tuple[str, ...], limit: int) -> None:
    """List the tasks whose latest attempt was the agent's, newest first."""
    from tenuto.cli.read import print_tasks
    from tenuto.cli.render import print_json

    async def read(client: "AsyncClient") -> "tuple[Sequence[TaskSummary], datetime]":
        found = await client.agents.tasks(name, words(status), limit)
        return found, client.engine.clock.now()

    found, now = ask(given, read)
    if given.json:
        print_json({"tasks": found})
    else:
        print_tasks(found, now)


@command(
    "terminate", "orchestrate agent terminate dev-1", "orchestrate agent terminate dev-1 --now"
)
@click.argument("name")
@click.option("--now", "at_once", is_flag=True, help="Cancel what it runs.")
@click.option("--reason", metavar="TEXT", help="Why, for the audit trail.")
@click.pass_obj
def terminate(given: Globals, name: str, at_once: bool, reason: str | None) -> None:
    """Let an agent take no more tasks; what it runs may finish."""

    async def order(client: "AsyncClient") -> "AgentView":
        return await client.agents.terminate(name, reason, graceful=not at_once)

    tell_one(given, ask(given, order), _FIELDS)


@command("delete", "orchestrate agent delete dev-1")
@click.argument("name")
@click.pass_obj
def delete(given: Globals, name: str) -> None:
    """Forget an agent that runs nothing."""
    ask(given, lambda client: client.agents.delete(name))
    tell_done(given, f"deleted {name}")


@command("token", "orchestrate agent token dev-1")
@click.argument("name")
@click.pass_obj
def token(given: Globals, name: str) -> None:
    """Make a key with which to work as the agent, and print it; it is shown once."""
    from tenuto.cli.render import print_json

    made = ask(given, lambda client: client.agents.token(name))
    if given.json:
        print_json(made)
    else:
        print(made.token)


for _each in (create, list_, show, update, health, tasks, terminate, delete, token):
    agent.add_command(_each)
