"""`orchestrate event` and `orchestrate trigger`: publishes events; starts definitions on events."""

from typing import Any

import click

from tenuto.cli.base import GlobalOptions, command, group
from tenuto.cli.connection import call_client
from tenuto.cli.output import Columns, print_one
from tenuto.cli.shared_commands import add_shared_commands

_FIELDS: Columns = {
    "id": lambda trigger: trigger.id,
    "name": lambda trigger: trigger.name,
    "event": lambda trigger: trigger.event,
    "filter": lambda trigger: trigger.filter,
    "target": lambda trigger: trigger.target,
    "status": lambda trigger: trigger.status,
    "fired": lambda trigger: trigger.fired,
    "last fired": lambda trigger: trigger.fired_at,
    "last flow": lambda trigger: trigger.last_flow_id,
    "last error": lambda trigger: trigger.last_error,
    "created": lambda trigger: trigger.created_at,
}
_COLUMNS: Columns = {
    "NAME": lambda trigger: trigger.name,
    "STATUS": lambda trigger: trigger.status,
    "FIRED": lambda trigger: trigger.fired,
    "EVENT": lambda trigger: trigger.event,
    "TARGET": lambda trigger: trigger.target,
    "ERROR": lambda trigger: trigger.last_error,
    "FILTER": lambda trigger: trigger.filter,
}


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
    if options.json:
        from tenuto.cli.render import print_json

        print_json(published)
    else:
        print(published.id)


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
    created = call_client(
        options, lambda client: client.triggers.create(name, event_, target, filter_)
    )
    print_one(options, created, _FIELDS)


event.add_command(publish)
trigger.add_command(create)
add_shared_commands(
    trigger,
    lambda client: client.triggers,
    "tests",
    _FIELDS,
    _COLUMNS,
    pause_help="Ignore events until the trigger is resumed.",
    resume_help="Match events again, from now on.",
)
