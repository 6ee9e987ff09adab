"""`orchestrate schedule`: what is started by time."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from tenuto.cli.base import Globals, command, group
from tenuto.cli.connection import ask
from tenuto.cli.output import Columns, print_one
from tenuto.cli.shared_commands import add_shared

if TYPE_CHECKING:
    from datetime import datetime

    from tenuto.model.schedules.schedule import ScheduleSpec

F = TypeVar("F", bound=Callable[..., Any])

_FIELDS: Columns = {
    "id": lambda each: each.id,
    "name": lambda each: each.name,
    "target": lambda each: each.target,
    "times": lambda each: times(each.schedule),
    "timezone": lambda each: each.schedule.timezone,
    "overlap": lambda each: each.schedule.overlap,
    "catch up": lambda each: each.schedule.catch_up,
    "status": lambda each: each.status,
    "next": lambda each: each.next_at,
    "fired": lambda each: each.fired,
    "missed": lambda each: each.missed,
    "queued": lambda each: len(each.queued),
    "last time": lambda each: each.fired_at,
    "last flow": lambda each: each.last_flow_id,
    "last error": lambda each: each.last_error,
    "created": lambda each: each.created_at,
}
_COLUMNS: Columns = {
    "NAME": lambda each: each.name,
    "STATUS": lambda each: each.status,
    "NEXT": lambda each: each.next_at,
    "FIRED": lambda each: each.fired,
    "MISSED": lambda each: each.missed,
    "TARGET": lambda each: each.target,
    "TIMES": lambda each: times(each.schedule),
}
_WAYS = ("cron", "iso", "at", "immediate")


def when_options(function: F) -> F:
    """Adds the options that say when; `read_spec` reads them."""
    options = (
        click.option("--cron", metavar="LINE", help="Again and again: five fields, or @daily."),
        click.option("--iso", metavar="R/START/PERIOD", help="Again and again: a repetition."),
        click.option("--at", type=wall, metavar="TIME", help="Once, at an ISO 8601 time."),
        click.option("--immediate", is_flag=True, help="Once, as soon as it is created."),
        click.option("--until", type=wall, metavar="TIME", help="The last moment to start."),
        click.option(
            "--timezone",
            default="UTC",
            show_default=True,
            metavar="ZONE",
            help="Whose wall clock is meant, as Europe/Berlin.",
        ),
        click.option(
            "--overlap",
            type=click.Choice(["skip", "queue", "cancel_previous"]),
            default="skip",
            show_default=True,
            help="What happens while the start before has not ended.",
        ),
        click.option(
            "--catch-up",
            type=click.Choice(["none", "last", "all"]),
            default="none",
            show_default=True,
            help="Which of the times start that nobody saw in time.",
        ),
        click.option(
            "--catch-up-limit",
            type=click.IntRange(1, 1000),
            default=100,
            show_default=True,
            help="How many times at once at most.",
        ),
        click.option("--jitter", type=float, default=0.0, help="Seconds of random delay at most."),
    )
    for option in reversed(options):
        function = option(function)
    return function


def wall(text: str) -> "datetime":
    """A time; without an offset it is one on the wall clock of the schedule's zone."""
    from datetime import datetime

    try:
        return datetime.fromisoformat(text)
    except ValueError:
        raise click.BadParameter(f"{text!r} is no time like 2030-01-31T09:00") from None


def read_spec(given: dict[str, Any]) -> "ScheduleSpec":
    """When to start, as the options say."""
    from tenuto.model.schedules.schedule import ScheduleSpec

    ways = [way for way in _WAYS if given[way]]
    if len(ways) != 1:
        raise click.UsageError("say when, by one of --cron, --iso, --at or --immediate")
    kinds = {"cron": "cron", "iso": "iso", "at": "datetime-event", "immediate": "immediate"}
    return ScheduleSpec(
        type=kinds[ways[0]],  # type: ignore[arg-type]
        expression=given["cron"] or given["iso"],
        timezone=given["timezone"],
        at=given["at"],
        until=given["until"],
        overlap=given["overlap"],
        catch_up=given["catch_up"],
        catch_up_limit=given["catch_up_limit"],
        jitter_s=given["jitter"],
    )


def times(spec: Any) -> str:
    """When to start, in a few words."""
    if spec.expression is not None:
        return str(spec.expression)
    return spec.type if spec.at is None else f"at {spec.at.isoformat()}"


@group(
    "schedule",
    "orchestrate schedule list",
    'orchestrate schedule create --name nightly --target report --cron "0 2 * * *"',
)
def schedule() -> None:
    """Start definitions by time."""


@command(
    "create",
    'orchestrate schedule create --name nightly --target report --cron "0 2 * * *"',
    'orchestrate schedule create --name w --target report --cron "0 9 * * MON" '
    "--timezone Europe/Berlin --overlap queue --catch-up last",
    "orchestrate schedule create --name once --target report --at 2030-01-31T09:00 --input 7",
)
@click.option("--name", required=True, help="What it is called from now on.")
@click.option("--target", required=True, metavar="KEY", help="The definition to start.")
@click.option(
    "--input", "given_input", metavar="JSON", help="What it starts with; @file reads one."
)
@when_options
@click.pass_obj
def create(
    given: Globals, /, name: str, target: str, given_input: str | None, **fields: Any
) -> None:
    """Start a definition by time from now on."""
    from tenuto.cli.parse import read_json

    value = None if given_input is None else read_json("input", given_input)
    spec = read_spec(fields)
    made = ask(given, lambda client: client.schedules.create(name, target, spec, value))
    print_one(given, made, _FIELDS)


@command(
    "next",
    "orchestrate schedule next nightly -n 10",
    'orchestrate schedule next --cron "30 2 * * *" --timezone Europe/Berlin',
)
@click.argument("schedule_name", required=False, metavar="[NAME]")
@click.option(
    "-n", "count", type=click.IntRange(1, 1000), default=5, show_default=True, help="How many."
)
@when_options
@click.pass_obj
def next_(given: Globals, /, schedule_name: str | None, count: int, **fields: Any) -> None:
    """Print the next times of a schedule, or of one to be: that needs neither server nor database.

    Times are in UTC, and in the schedule's zone where that is another.
    """
    from tenuto.cli.render import print_json

    if schedule_name is None:
        zone, found = fields["timezone"], _following(read_spec(fields), count)
    elif any(fields[way] for way in _WAYS):
        raise click.UsageError("name a schedule, or say when; not both")
    else:
        view, found = ask(given, lambda client: _asked(client, schedule_name, count))
        zone = view.schedule.timezone
    if given.json:
        print_json({"times": found})
        return
    for time in found:
        print(_line(time, zone))


def _following(spec: "ScheduleSpec", count: int) -> "list[datetime]":
    from tenuto.clock import Clock
    from tenuto.model.schedules.schedule import check, following

    check(spec)
    return following(spec, Clock().now(), count)


async def _asked(client: Any, name: str, count: int) -> Any:
    view = await client.schedules.get(name)
    return view, await client.schedules.next(view.id, count)


def _line(time: "datetime", zone: str) -> str:
    from zoneinfo import ZoneInfo

    text = f"{time:%Y-%m-%dT%H:%M:%SZ}"
    return text if zone == "UTC" else f"{text}  {time.astimezone(ZoneInfo(zone)).isoformat()}"


schedule.add_command(create)
add_shared(
    schedule,
    lambda client: client.schedules,
    "nightly",
    _FIELDS,
    _COLUMNS,
    paused="Start nothing until it is resumed; what runs goes on.",
    resumed="Go on with the times from now on.",
)
schedule.add_command(next_)
