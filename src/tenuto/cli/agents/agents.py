"""`orchestrate agent`: who takes tasks."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import click

from tenuto.cli.base import F, Globals, command, group
from tenuto.cli.connection import ask
from tenuto.cli.output import Columns, print_done, print_one, tell_list, word, words

if TYPE_CHECKING:
    from datetime import datetime

    from tenuto.client.client import AsyncClient
    from tenuto.engine.agents.mailbox import Message
    from tenuto.engine.agents.registry import AgentView
    from tenuto.engine.views import TaskSummary

_STATUSES = ("IDLE", "WORKING", "DRAINING", "STALE", "ERROR", "TERMINATED")
_FIELDS: Columns = {
    "id": lambda agent: agent.id,
    "name": lambda agent: agent.name,
    "status": lambda agent: agent.status,
    "type": lambda agent: agent.agent_type,
    "model": lambda agent: agent.model,
    "account": lambda agent: agent.account,
    "running": lambda agent: agent.running_tasks,
    "at most": lambda agent: agent.max_concurrent_tasks,
    "task types": lambda agent: agent.task_types,
    "task tags": lambda agent: agent.task_tags,
    "capabilities": lambda agent: agent.capabilities,
    "skills": lambda agent: agent.skills,
    "runtimes": lambda agent: agent.runtimes,
    "gateway": lambda agent: agent.gateway,
    "accepts commands": lambda agent: agent.accept_commands,
    "rules": lambda agent: agent.choose_rules,
    "stale after": lambda agent: f"{agent.stale_threshold_seconds} s",
    "managed": lambda agent: agent.managed,
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
_FELT: Columns = {
    "AT": lambda each: each.at,
    "SAID": lambda each: each.status,
    "PROGRESS": lambda each: each.progress_percent,
    "MEMORY MB": lambda each: each.memory_mb,
    "CPU %": lambda each: each.cpu_percent,
    "STEP": lambda each: each.current_step,
}
_SAID: Columns = {
    "AT": lambda each: each.created_at,
    "KIND": lambda each: each.kind,
    "SCOPE": lambda each: each.scope_key,
    "FROM": lambda each: each.sender,
    "TAKEN": lambda each: each.taken_at,
    "BODY": lambda each: each.body,
}
_LISTS = ("task_types", "task_tags", "capabilities", "skills", "tags", "runtimes", "choose_rules")


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
        click.option("--account", help="The account it uses, for rate limits."),
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
            "--gateway", metavar="NAME", help="The gateway that spawns its sessions, by push."
        ),
        click.option(
            "--max-concurrent", type=click.IntRange(1), metavar="N", help="Tasks at once."
        ),
        click.option("--tags", "--tag", "tags", multiple=True, help="Labels, for people to see."),
        click.option(
            "--choose-rule",
            "choose_rules",
            multiple=True,
            metavar="RULE",
            help="Which task tags it accepts: superset (or all), single, exact; any that does.",
        ),
        click.option(
            "--heartbeat-interval",
            "heartbeat_interval_s",
            type=click.IntRange(1),
            metavar="S",
            help="Seconds between its heartbeats.",
        ),
        click.option(
            "--stale-threshold",
            "stale_threshold_s",
            type=click.IntRange(1),
            metavar="S",
            help="Seconds of silence after which it is stale.",
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
    print_one(given, ask(given, lambda client: client.agents.put(name, **_told(fields))), _FIELDS)


@command("update", "orchestrate agent update dev-1 --max-concurrent 4")
@click.argument("name")
@_profile
@click.pass_obj
def update(given: Globals, /, name: str, **fields: Any) -> None:
    """Change what an agent takes; what is not said stays."""

    async def change(client: "AsyncClient") -> "AgentView":
        known = await client.agents.get(name)
        return await client.agents.put(known.name, **_told(fields))

    print_one(given, ask(given, change), _FIELDS)


@command("list", "orchestrate agent list", "orchestrate agent list --status WORKING --json")
@click.option("--status", help="Only with this status.")
@click.pass_obj
def list_(given: Globals, status: str | None) -> None:
    """List agents by name."""
    from tenuto.model.errors import Invalid

    wanted = None if status is None else status.upper()
    if wanted is not None and wanted not in _STATUSES:
        known = ", ".join(_STATUSES)
        raise Invalid(f"no status {wanted[:40]!r}; known are {known}", "invalid_filter")

    async def read(client: "AsyncClient") -> "list[AgentView]":
        return [each async for each in client.agents.list() if wanted in (None, each.status)]

    tell_list(given, "agents", ask(given, read), _LISTED, wide="TAGS")


@command("show", "orchestrate agent show dev-1")
@click.argument("name")
@click.pass_obj
def show(given: Globals, name: str) -> None:
    """Show everything about an agent."""
    print_one(given, ask(given, lambda client: client.agents.get(name)), _FIELDS)


@command("health", "orchestrate agent health dev-1", "orchestrate agent health dev-1 --limit 6")
@click.argument("name")
@click.option("--limit", type=click.IntRange(1, 1000), default=10, show_default=True, help="Most.")
@click.pass_obj
def health(given: Globals, name: str, limit: int) -> int:
    """Say whether an agent lives, and how it said it was; exit code 1 if it does not."""
    from tenuto.cli.render import print_table

    found = ask(given, lambda client: client.agents.health(name, limit))
    fields: Columns = {
        "status": lambda each: each.status,
        "healthy": lambda each: each.healthy,
        "last heartbeat": lambda each: each.last_heartbeat,
        "stale after": lambda each: f"{each.stale_threshold_seconds} s",
        "running": lambda each: each.running_tasks,
    }
    print_one(given, found, fields)
    if found.history and not given.json:
        rows = [[word(show(each)) for show in _FELT.values()] for each in found.history]
        print_table(list(_FELT), rows, wide="STEP")
    return 0 if found.healthy else 1


@command("explain", "orchestrate agent explain dev-1", "orchestrate agent explain dev-1 --json")
@click.argument("name")
@click.pass_obj
def explain(given: Globals, name: str) -> None:
    """Say what an agent may take, how much of it waits, and why it takes nothing else."""
    from tenuto.cli.render import moment, print_json
    from tenuto.model.printable import printable

    found = ask(given, lambda client: client.agents.explain(name))
    if given.json:
        print_json(found)
        return
    print(printable(f"{found.status}: {found.summary}"))
    held, most = found.capacity, found.capacity.most
    print(f"runs {held.running} of {'any number' if most is None else f'at most {most}'}")
    for gate in found.gates:
        clears = "" if gate.clears_at is None else f" (until {moment(gate.clears_at)})"
        print(f"  {printable(gate.gate)}: {printable(gate.detail)}{clears}")
    for lane in found.lanes:
        needs = ", ".join(f"{key}={word(value)}" for key, value in lane.requires.items())
        why = "; ".join(lane.obstacles) or "may take it"
        for gate in lane.gates:
            until = "" if gate.clears_at is None else f" until {moment(gate.clears_at)}"
            why += f"; {gate.detail}{until}"
        print(f"  {lane.pending:>5} waiting  {printable(needs)}: {printable(why)}")
    if found.more:
        print(f"  and {found.more:,} more lanes")


@command(
    "message",
    "orchestrate agent message dev-1 'The deploy waits for you'",
    'orchestrate agent message dev-1 --kind config --scope models --coalesce \'{"model": "x"}\'',
)
@click.argument("name")
@click.argument("text")
@click.option("--kind", default="note", show_default=True, help="What kind of message it is.")
@click.option("--scope", metavar="KEY", help="What it is about.")
@click.option("--coalesce", is_flag=True, help="Replace what waits of the kind and scope.")
@click.option("--message-id", metavar="ID", help="Your own name for it: repeated, it is one.")
@click.pass_obj
def message(
    given: Globals,
    name: str,
    text: str,
    kind: str,
    scope: str | None,
    coalesce: bool,
    message_id: str | None,
) -> None:
    """Put a message into an agent's mailbox: a text, or JSON that begins with { or [."""
    from tenuto.model.bounds import parse_json

    body = parse_json("TEXT", text) if text.lstrip()[:1] in ("{", "[") else text

    async def send(client: "AsyncClient") -> "Message":
        return await client.agents.message(
            name,
            body,
            kind=kind,
            scope_key=scope,
            coalescable=coalesce,
            client_message_id=message_id,
        )

    print_one(given, ask(given, send), {"id": lambda each: each.id})


@command("messages", "orchestrate agent messages dev-1", "orchestrate agent messages dev-1 --all")
@click.argument("name")
@click.option("--all", "all_", is_flag=True, help="Also what it took within the last days.")
@click.option("--limit", type=click.IntRange(1, 1000), default=50, show_default=True, help="Most.")
@click.pass_obj
def messages(given: Globals, name: str, all_: bool, limit: int) -> None:
    """List what waits in an agent's mailbox, oldest first."""

    async def read(client: "AsyncClient") -> "list[Message]":
        return (await client.agents.messages(name, limit, waiting=not all_)).messages

    tell_list(given, "messages", ask(given, read), _SAID, wide="BODY")


@command("tasks", "orchestrate agent tasks dev-1 --status RUNNING")
@click.argument("name")
@click.option("--status", multiple=True, help="Only with this status; of several, any.")
@click.option("--limit", type=click.IntRange(1, 1000), default=50, show_default=True, help="Most.")
@click.pass_obj
def tasks(given: Globals, name: str, status: tuple[str, ...], limit: int) -> None:
    """List the tasks whose latest attempt was the agent's, newest first."""
    from tenuto.cli.render import print_json
    from tenuto.cli.tasks.read import print_tasks

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
    """Let an agent take no more tasks; it ends when what it runs has finished."""

    async def order(client: "AsyncClient") -> "AgentView":
        return await client.agents.terminate(name, reason, graceful=not at_once)

    print_one(given, ask(given, order), _FIELDS)


@command("delete", "orchestrate agent delete dev-1")
@click.argument("name")
@click.pass_obj
def delete(given: Globals, name: str) -> None:
    """Forget an agent that runs nothing."""
    ask(given, lambda client: client.agents.delete(name))
    print_done(given, f"deleted {name}")


@command("token", "orchestrate agent token dev-1")
@click.argument("name")
@click.pass_obj
def token(given: Globals, name: str) -> None:
    """Make a key with which to work as the agent, and print it; it is shown once."""
    from tenuto.cli.render import print_json
    from tenuto.model.printable import printable

    made = ask(given, lambda client: client.agents.token(name))
    if given.json:
        print_json(made)
    else:
        print(printable(made.token))


_COMMANDS = (create, list_, show, update, health, explain, tasks, message, messages)
for _each in (*_COMMANDS, terminate, delete, token):
    agent.add_command(_each)
