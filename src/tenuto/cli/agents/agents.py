"""`orchestrate agent`: registers and manages agents."""

from typing import TYPE_CHECKING, Any

import click

from tenuto.cli.base import (
    GlobalOptions,
    add_options,
    command,
    group,
    limit_option,
    reason_option,
)
from tenuto.cli.connection import call_client
from tenuto.cli.output import (
    Columns,
    columns,
    format_value,
    print_list,
    print_one,
    print_value,
    split_commas,
)
from tenuto.cli.shared_commands import Resource, print_result

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from tenuto.client.client import AsyncClient
    from tenuto.engine.agents.mailbox import Message
    from tenuto.engine.agents.registry import AgentView
    from tenuto.engine.views import TaskSummary

_STATUSES = ("IDLE", "WORKING", "DRAINING", "STALE", "ERROR", "TERMINATED")
_FIELDS: Columns = {
    **columns(
        "id, name, status, type: agent_type, model, account, running: running_tasks,"
        " max. tasks: max_concurrent_tasks, task types, task tags, capabilities, skills, runtimes,"
        " gateway, accepts commands: accept_commands, rules: choose_rules"
    ),
    "stale after": lambda agent: f"{agent.stale_threshold_seconds} s",
    **columns("managed, last heartbeat, created: created_at"),
}
_LIST_COLUMNS = columns(
    "NAME, STATUS, RUNNING: running_tasks, MAX: max_concurrent_tasks, RUNTIMES, TAGS: task_tags, ID"
)
_HEALTH_COLUMNS = columns(
    "AT, STATUS, PROGRESS: progress_percent, MEMORY MB, CPU %: cpu_percent, STEP: current_step"
)
_MESSAGE_COLUMNS = columns(
    "AT: created_at, KIND, SCOPE: scope_key, FROM: sender, RECEIVED: taken_at, BODY"
)
_AGENTS = Resource("agent", lambda client: client.agents, _FIELDS, "dev-1")
_LIST_OPTIONS = (
    "task_types",
    "task_tags",
    "capabilities",
    "skills",
    "tags",
    "runtimes",
    "choose_rules",
)


@group(
    "agent", "orchestrate agent list", "orchestrate agent create --name dev-1 --task-tags python"
)
def agent() -> None:
    """Register and manage agents, which claim tasks."""


_profile_options = add_options(
    click.option("--agent-type", metavar="T", help="Agent type; tasks can require it."),
    click.option("--model", help="Model that it uses."),
    click.option("--account", help="Provider account, for rate limits."),
    click.option(
        "--task-type", "task_types", multiple=True, help="Task type it runs; default: all."
    ),
    click.option(
        "--task-tags",
        "--task-tag",
        "task_tags",
        multiple=True,
        help="Task tags that tasks can require.",
    ),
    click.option(
        "--capabilities",
        "--capability",
        "capabilities",
        multiple=True,
        help="Capabilities that tasks can require.",
    ),
    click.option("--skills", "--skill", "skills", multiple=True, help="Description for people."),
    click.option(
        "--runtime", "runtimes", multiple=True, help="Runtime of its tasks; default: http."
    ),
    click.option(
        "--accept-commands/--no-accept-commands",
        default=None,
        help="Allow tasks that contain a command.",
    ),
    click.option("--gateway", metavar="NAME", help="Gateway that starts its sessions (push)."),
    click.option(
        "--max-concurrent",
        type=click.IntRange(1),
        metavar="N",
        help="Maximum number of tasks at once.",
    ),
    click.option("--tags", "--tag", "tags", multiple=True, help="Labels for people."),
    click.option(
        "--choose-rule",
        "choose_rules",
        multiple=True,
        metavar="RULE",
        help="Rule for task tags: superset (or all), single, exact; one match is enough.",
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
        help="Seconds without a heartbeat after which it is stale.",
    ),
)
"""Adds the options that describe an agent; `_parse_profile` reads them."""


def _parse_profile(fields: dict[str, Any]) -> dict[str, Any]:
    """Returns the options that were given, as fields of the agent."""
    values = {name: value for name, value in fields.items() if value not in (None, ())}
    return {
        name: split_commas(value) if name in _LIST_OPTIONS else value
        for name, value in values.items()
    }


@command(
    "create", "orchestrate agent create --name dev-1 --task-tags python,sql --max-concurrent 2"
)
@click.option("--name", required=True, help="Name of the agent.")
@_profile_options
@click.pass_obj
def create(options: GlobalOptions, /, name: str, **fields: Any) -> None:
    """Register an agent that claims tasks over HTTP. Workers register their agents themselves."""
    profile = _parse_profile(fields)
    print_result(options, lambda client: client.agents.put(name, **profile), _FIELDS)


@command("update", "orchestrate agent update dev-1 --max-concurrent 4")
@click.argument("name")
@_profile_options
@click.pass_obj
def update(options: GlobalOptions, /, name: str, **fields: Any) -> None:
    """Change an agent; options you leave out keep their value."""

    async def put_agent(client: "AsyncClient") -> "AgentView":
        existing = await client.agents.get(name)
        return await client.agents.put(existing.name, **_parse_profile(fields))

    print_result(options, put_agent, _FIELDS)


@command("list", "orchestrate agent list", "orchestrate agent list --status WORKING --json")
@click.option("--status", help="Filter by status.")
@click.pass_obj
def list_(options: GlobalOptions, status: str | None) -> None:
    """List agents by name."""
    from tenuto.model.errors import Invalid

    status_filter = None if status is None else status.upper()
    if status_filter is not None and status_filter not in _STATUSES:
        statuses = ", ".join(_STATUSES)
        raise Invalid(
            f"unknown status {status_filter[:40]!r}; use one of {statuses}", "invalid_filter"
        )

    async def read_agents(client: "AsyncClient") -> "list[AgentView]":
        return [
            agent async for agent in client.agents.list() if status_filter in (None, agent.status)
        ]

    print_list(options, "agents", call_client(options, read_agents), _LIST_COLUMNS, wide="TAGS")


@command("health", "orchestrate agent health dev-1", "orchestrate agent health dev-1 --limit 6")
@click.argument("name")
@limit_option(10)
@click.pass_obj
def health(options: GlobalOptions, name: str, limit: int) -> int:
    """Show an agent's health and last reports; exits with 1 if it is not healthy."""
    report = call_client(options, lambda client: client.agents.health(name, limit))
    fields: Columns = {
        **columns("status, healthy, last heartbeat"),
        "stale after": lambda report: f"{report.stale_threshold_seconds} s",
        **columns("running: running_tasks"),
    }
    print_one(options, report, fields)
    if report.history and not options.json:
        print_list(options, "history", report.history, _HEALTH_COLUMNS, wide="STEP")
    return 0 if report.healthy else 1


@command("explain", "orchestrate agent explain dev-1", "orchestrate agent explain dev-1 --json")
@click.argument("name")
@click.pass_obj
def explain(options: GlobalOptions, name: str) -> None:
    """Show the tasks an agent can claim, how many are pending, and why it cannot claim others."""
    from tenuto.cli.render import format_time, print_json
    from tenuto.model.printable import printable

    explanation = call_client(options, lambda client: client.agents.explain(name))
    if options.json:
        print_json(explanation)
        return
    print(printable(f"{explanation.status}: {explanation.summary}"))
    capacity, maximum = explanation.capacity, explanation.capacity.most
    print(f"running {capacity.running}, maximum {'unlimited' if maximum is None else maximum}")
    for gate in explanation.gates:
        clears = "" if gate.clears_at is None else f" (until {format_time(gate.clears_at)})"
        print(f"  {printable(gate.gate)}: {printable(gate.detail)}{clears}")
    for lane in explanation.lanes:
        needs = ", ".join(f"{key}={format_value(value)}" for key, value in lane.requires.items())
        detail = "; ".join(lane.obstacles) or "can claim it"
        for gate in lane.gates:
            until = "" if gate.clears_at is None else f" until {format_time(gate.clears_at)}"
            detail += f"; {gate.detail}{until}"
        print(f"  {lane.pending:>5} pending  {printable(needs)}: {printable(detail)}")
    if explanation.more:
        print(f"  and {explanation.more:,} more lanes")


@command(
    "message",
    "orchestrate agent message dev-1 'The deploy waits for you'",
    'orchestrate agent message dev-1 --kind config --scope models --coalesce \'{"model": "x"}\'',
)
@click.argument("name")
@click.argument("text")
@click.option("--kind", default="note", show_default=True, help="Kind of message.")
@click.option("--scope", metavar="KEY", help="Subject of the message.")
@click.option("--coalesce", is_flag=True, help="Replace waiting messages of this kind and scope.")
@click.option("--message-id", metavar="ID", help="Your id: sent twice, the message is stored once.")
@click.pass_obj
def message(
    options: GlobalOptions,
    name: str,
    text: str,
    kind: str,
    scope: str | None,
    coalesce: bool,
    message_id: str | None,
) -> None:
    """Send a message to an agent's mailbox: text, or JSON that starts with { or [."""
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

    print_result(options, send, columns("id"))


@command("messages", "orchestrate agent messages dev-1", "orchestrate agent messages dev-1 --all")
@click.argument("name")
@click.option("--all", "all_", is_flag=True, help="Also messages received within the last days.")
@limit_option()
@click.pass_obj
def messages(options: GlobalOptions, name: str, all_: bool, limit: int) -> None:
    """List the waiting messages in an agent's mailbox, oldest first."""

    async def read_messages(client: "AsyncClient") -> "list[Message]":
        return (await client.agents.messages(name, limit, waiting=not all_)).messages

    print_list(
        options, "messages", call_client(options, read_messages), _MESSAGE_COLUMNS, wide="BODY"
    )


@command("tasks", "orchestrate agent tasks dev-1 --status RUNNING")
@click.argument("name")
@click.option("--status", multiple=True, help="Filter by status; repeat for several (any matches).")
@limit_option()
@click.pass_obj
def tasks(options: GlobalOptions, name: str, status: tuple[str, ...], limit: int) -> None:
    """List the tasks whose latest attempt was by this agent, newest first."""
    from tenuto.cli.render import print_json
    from tenuto.cli.tasks.read import print_tasks

    async def read_tasks(client: "AsyncClient") -> "tuple[Sequence[TaskSummary], datetime]":
        summaries = await client.agents.tasks(name, split_commas(status), limit)
        return summaries, client.engine.clock.now()

    summaries, now = call_client(options, read_tasks)
    if options.json:
        print_json({"tasks": summaries})
    else:
        print_tasks(summaries, now)


@command(
    "terminate", "orchestrate agent terminate dev-1", "orchestrate agent terminate dev-1 --now"
)
@click.argument("name")
@click.option("--now", "at_once", is_flag=True, help="Cancel its running tasks.")
@reason_option
@click.pass_obj
def terminate(options: GlobalOptions, name: str, at_once: bool, reason: str | None) -> None:
    """Stop an agent: it claims no more tasks and terminates when its running tasks finish."""
    print_result(
        options,
        lambda client: client.agents.terminate(name, reason, graceful=not at_once),
        _FIELDS,
    )


@command("token", "orchestrate agent token dev-1")
@click.argument("name")
@click.pass_obj
def token(options: GlobalOptions, name: str) -> None:
    """Create a token to work as the agent, and print it; it is shown only once."""
    created = call_client(options, lambda client: client.agents.token(name))
    print_value(options, created, created.token)


agent.add_commands(
    create,
    list_,
    _AGENTS.item_command("show", "Show everything about an agent.", method="get"),
    update,
    health,
    explain,
    tasks,
    message,
    messages,
    terminate,
    _AGENTS.delete_command("Delete an agent that has no running tasks."),
    token,
)
