"""`orchestrate event` and `orchestrate trigger`: what is started after events."""

from typing import Any

import click

from tenuto.cli.base import Globals, command, group
from tenuto.cli.connection import ask
from tenuto.cli.output import Columns, print_one
from tenuto.cli.shared_commands import add_shared

_FIELDS: Columns = {
    "id": lambda each: each.id,
    "name": lambda each: each.name,
    "event": lambda each: each.event,
    "filter": lambda each: each.filter,
    "target": lambda each: each.target,
    "status": lambda each: each.status,
    "fired": lambda each: each.fired,
    "last fired": lambda each: each.fired_at,
    "last flow": lambda each: each.last_flow_id,
    "last error": lambda each: each.last_error,
    "created": lambda each: each.created_at,
}
_COLUMNS: Columns = {
    "NAME": lambda each: each.name,
    "STATUS": lambda each: each.status,
    "FIRED": lambda each: each.fired,
    "EVENT": lambda each: each.event,
    "TARGET": lambda each: each.target,
    "ERROR": lambda each: each.last_error,
    "FILTER": lambda each: each.filter,
}


@group("event", "orchestrate event publish deploy.finished")
def event() -> None:
    """Tell the workspace, and its triggers, that something happened."""


@command(
    "publish",
    "orchestrate event publish deploy.finished",
    """orchestrate event publish deploy.finished --data '{"env": "live"}'""",
)
@click.argument("name")
@click.option("--data", metavar="JSON", help="What there is to say; @file reads it from one.")
@click.option(
    "--task",
    type=click.UUID,
    envvar="TENUTO_TASK_ID",
    metavar="ID",
    help="The task that says so, if any; within a command's attempt its own.",
)
@click.pass_obj
def publish(given: Globals, name: str, data: str | None, task: Any) -> None:
    """Tell the workspace that something happened; prints the event's id.

    The folder of the embedded database, elsewhere --data, is named before `event` here.
    """
    from tenuto.cli.parse import read_json

    value = None if data is None else read_json("data", data)
    told = ask(given, lambda client: client.events.publish(name, value, task))
    if given.json:
        from tenuto.cli.render import print_json

        print_json(told)
    else:
        print(told.id)


@group(
    "trigger",
    "orchestrate trigger list",
    "orchestrate trigger create --name tests --event deploy.finished --target smoke-tests",
)
def trigger() -> None:
    """Start definitions after events."""


@command(
    "create",
    "orchestrate trigger create --name tests --event deploy.finished --target smoke-tests",
    "orchestrate trigger create --name live --event 'deploy.*' --target smoke-tests "
    """--filter 'event.data.env == "live"'""",
    "orchestrate trigger create --name care --event task.dead --target look-into-it",
)
@click.option("--name", required=True, help="What it is called from now on.")
@click.option("--event", "event_", required=True, metavar="NAME", help="Its name, or NAME*.")
@click.option("--target", required=True, metavar="KEY", help="The definition to start.")
@click.option("--filter", "filter_", metavar="CEL", help="What has to be true of `event`.")
@click.pass_obj
def create(given: Globals, name: str, event_: str, target: str, filter_: str | None) -> None:
    """Start a definition after each of these events from now on, with the event as input."""
    made = ask(given, lambda client: client.triggers.create(name, event_, target, filter_))
    print_one(given, made, _FIELDS)


event.add_command(publish)
trigger.add_command(create)
add_shared(
    trigger,
    lambda client: client.triggers,
    "tests",
    _FIELDS,
    _COLUMNS,
    paused="Let events pass until it is resumed.",
    resumed="Look at the events from now on.",
)
