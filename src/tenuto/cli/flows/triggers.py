"""`orchestrate event` and `orchestrate trigger`: publishes events; starts definitions on events."""

from typing import Any

import click

from tenuto.cli.base import GlobalOptions, command, group
from tenuto.cli.connection import call_client
from tenuto.cli.output import columns, print_value
from tenuto.cli.shared_commands import Resource, add_rule_commands, print_result

_FIELDS = columns(
    "id, name, event, filter, target, status, fired, last fired: fired_at,"
    " last flow: last_flow_id, last error, created: created_at"
)
_COLUMNS = columns("NAME, STATUS, FIRED, EVENT, TARGET, ERROR: last_error, FILTER")
_TRIGGERS = Resource("trigger", lambda client: client.triggers, _FIELDS, "tests")


@group("event", "orchestrate event publish deploy.finished")
def event() -> None:
    """Publish events to the workspace and its triggers."""


@command(
    "publish",
    "orchestrate event publish deploy.finished",
    """orchestrate event publish deploy.finished --data '{"env": "live"}'""",
)
@click.argument("name")
@click.option("--data", metavar="JSON", help="Event data; @file reads it from a file.")
@click.option(
    "--task",
    type=click.UUID,
    envvar="TENUTO_TASK_ID",
    metavar="ID",
    help="Task that publishes the event; in a command's attempt, default: that task.",
)
@click.pass_obj
def publish(options: GlobalOptions, name: str, data: str | None, task: Any) -> None:
    """Publish an event to the workspace and print its id.

    --data means the event's data here; for the folder of the embedded database, give --data before
    `event`.
    """
    from tenuto.cli.parse import read_json

    value = None if data is None else read_json("data", data)
    published = call_client(options, lambda client: client.events.publish(name, value, task))
    print_value(options, published, published.id)


@group(
    "trigger",
    "orchestrate trigger list",
    "orchestrate trigger create --name tests --event deploy.finished --target smoke-tests",
)
def trigger() -> None:
    """Start definitions when events occur."""


@command(
    "create",
    "orchestrate trigger create --name tests --event deploy.finished --target smoke-tests",
    "orchestrate trigger create --name live --event 'deploy.*' --target smoke-tests "
    """--filter 'event.data.env == "live"'""",
    "orchestrate trigger create --name care --event task.dead --target look-into-it",
)
@click.option("--name", required=True, help="Name of the trigger.")
@click.option("--event", "event_", required=True, metavar="NAME", help="Event name, or NAME*.")
@click.option("--target", required=True, metavar="KEY", help="Definition to start.")
@click.option("--filter", "filter_", metavar="CEL", help="CEL condition on `event`.")
@click.pass_obj
def create(
    options: GlobalOptions, name: str, event_: str, target: str, filter_: str | None
) -> None:
    """Create a trigger: each matching event starts the definition, with the event as input."""
    print_result(
        options, lambda client: client.triggers.create(name, event_, target, filter_), _FIELDS
    )


event.add_command(publish)
trigger.add_command(create)
add_rule_commands(
    trigger,
    _TRIGGERS,
    _COLUMNS,
    pause_help="Ignore events until the trigger is resumed.",
    resume_help="Match events again, from now on.",
)
