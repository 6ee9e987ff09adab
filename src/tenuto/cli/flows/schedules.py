"""`orchestrate schedule`: starts definitions at given times."""

from typing import TYPE_CHECKING, Any

import click

from tenuto.cli.base import GlobalOptions, add_options, command, group
from tenuto.cli.connection import call_client
from tenuto.cli.output import Columns, columns
from tenuto.cli.shared_commands import Resource, add_rule_commands, print_result

if TYPE_CHECKING:
    from datetime import datetime

    from tenuto.model.schedules.schedule import ScheduleSpec

_FIELDS: Columns = {
    **columns("id, name, target"),
    "times": lambda schedule: format_times(schedule.schedule),
    **columns(
        "timezone: schedule.timezone, overlap: schedule.overlap, catch up: schedule.catch_up,"
        " status, next: next_at, fired, missed"
    ),
    "queued": lambda schedule: len(schedule.queued),
    **columns("last time: fired_at, last flow: last_flow_id, last error, created: created_at"),
}
_COLUMNS: Columns = {
    **columns("NAME, STATUS, NEXT: next_at, FIRED, MISSED, TARGET"),
    "TIMES": lambda schedule: format_times(schedule.schedule),
}
_SCHEDULES = Resource("schedule", lambda client: client.schedules, _FIELDS, "nightly")
_TIME_OPTIONS = ("cron", "iso", "at", "immediate")


def parse_wall_time(text: str) -> "datetime":
    """Parses an ISO 8601 time; without an offset it is in the schedule's time zone."""
    from datetime import datetime

    try:
        return datetime.fromisoformat(text)
    except ValueError:
        raise click.BadParameter(f"{text!r} is not a time like 2030-01-31T09:00") from None


time_options = add_options(
    click.option("--cron", metavar="LINE", help="Cron expression: five fields, or @daily."),
    click.option("--iso", metavar="R/START/PERIOD", help="ISO 8601 repetition."),
    click.option("--at", type=parse_wall_time, metavar="TIME", help="Once, at this ISO 8601 time."),
    click.option("--immediate", is_flag=True, help="Once, immediately."),
    click.option("--until", type=parse_wall_time, metavar="TIME", help="Last possible start."),
    click.option(
        "--timezone",
        default="UTC",
        show_default=True,
        metavar="ZONE",
        help="Time zone of the times, e.g. Europe/Berlin.",
    ),
    click.option(
        "--overlap",
        type=click.Choice(["skip", "queue", "cancel_previous"]),
        default="skip",
        show_default=True,
        help="What to do if the previous flow has not finished.",
    ),
    click.option(
        "--catch-up",
        type=click.Choice(["none", "last", "all"]),
        default="none",
        show_default=True,
        help="Which missed times to start later.",
    ),
    click.option(
        "--catch-up-limit",
        type=click.IntRange(1, 1000),
        default=100,
        show_default=True,
        help="Maximum number of missed times to start.",
    ),
    click.option("--jitter", type=float, default=0.0, help="Maximum random delay in seconds."),
)
"""Adds the options of a schedule's times; `build_spec` reads them."""


def build_spec(values: dict[str, Any]) -> "ScheduleSpec":
    """Builds the schedule from the options of `time_options`; `UsageError` unless one is given."""
    from tenuto.model.schedules.schedule import ScheduleSpec

    chosen = [name for name in _TIME_OPTIONS if values[name]]
    if len(chosen) != 1:
        raise click.UsageError("give exactly one of --cron, --iso, --at and --immediate")
    kinds = {"cron": "cron", "iso": "iso", "at": "datetime-event", "immediate": "immediate"}
    return ScheduleSpec(
        type=kinds[chosen[0]],  # type: ignore[arg-type]
        expression=values["cron"] or values["iso"],
        timezone=values["timezone"],
        at=values["at"],
        until=values["until"],
        overlap=values["overlap"],
        catch_up=values["catch_up"],
        catch_up_limit=values["catch_up_limit"],
        jitter_s=values["jitter"],
    )


def format_times(spec: Any) -> str:
    """Formats the times of a schedule: its expression, `at TIME`, or its type."""
    if spec.expression is not None:
        return str(spec.expression)
    return spec.type if spec.at is None else f"at {spec.at.isoformat()}"


@group(
    "schedule",
    "orchestrate schedule list",
    'orchestrate schedule create --name nightly --target report --cron "0 2 * * *"',
)
def schedule() -> None:
    """Start definitions at given times."""


@command(
    "create",
    'orchestrate schedule create --name nightly --target report --cron "0 2 * * *"',
    'orchestrate schedule create --name w --target report --cron "0 9 * * MON" '
    "--timezone Europe/Berlin --overlap queue --catch-up last",
    "orchestrate schedule create --name once --target report --at 2030-01-31T09:00 --input 7",
)
@click.option("--name", required=True, help="Name of the schedule.")
@click.option("--target", required=True, metavar="KEY", help="Definition to start.")
@click.option(
    "--input", "given_input", metavar="JSON", help="Input of the flows; @file reads it from a file."
)
@time_options
@click.pass_obj
def create(
    options: GlobalOptions, /, name: str, target: str, given_input: str | None, **fields: Any
) -> None:
    """Create a schedule that starts a definition."""
    from tenuto.cli.parse import read_json

    value = None if given_input is None else read_json("input", given_input)
    spec = build_spec(fields)
    print_result(
        options, lambda client: client.schedules.create(name, target, spec, value), _FIELDS
    )


@command(
    "next",
    "orchestrate schedule next nightly -n 10",
    'orchestrate schedule next --cron "30 2 * * *" --timezone Europe/Berlin',
)
@click.argument("schedule_name", required=False, metavar="[NAME]")
@click.option(
    "-n",
    "count",
    type=click.IntRange(1, 1000),
    default=5,
    show_default=True,
    help="Number of times.",
)
@time_options
@click.pass_obj
def next_(options: GlobalOptions, /, schedule_name: str | None, count: int, **fields: Any) -> None:
    """Print the next times of a schedule, or of the options, without server or database.

    Times are in UTC and, if different, in the schedule's time zone.
    """
    from tenuto.cli.render import print_json

    if schedule_name is None:
        zone, next_times = fields["timezone"], _compute_next_times(build_spec(fields), count)
    elif any(fields[name] for name in _TIME_OPTIONS):
        raise click.UsageError("give either a schedule's name or time options, not both")
    else:
        view, next_times = call_client(
            options, lambda client: _read_next_times(client, schedule_name, count)
        )
        zone = view.schedule.timezone
    if options.json:
        print_json({"times": next_times})
        return
    for time in next_times:
        print(_format_time(time, zone))


def _compute_next_times(spec: "ScheduleSpec", count: int) -> "list[datetime]":
    """Returns at most `count` times from now on; raises `Invalid` for an invalid schedule."""
    from tenuto.clock import Clock
    from tenuto.model.schedules.schedule import check, next_times

    check(spec)
    return next_times(spec, Clock().now(), count)


async def _read_next_times(client: Any, name: str, count: int) -> Any:
    """Returns the schedule and its next `count` times."""
    view = await client.schedules.get(name)
    return view, await client.schedules.next(view.id, count)


def _format_time(time: "datetime", zone: str) -> str:
    """Formats a time in UTC and, if different, in the schedule's time zone."""
    from zoneinfo import ZoneInfo

    text = f"{time:%Y-%m-%dT%H:%M:%SZ}"
    return text if zone == "UTC" else f"{text}  {time.astimezone(ZoneInfo(zone)).isoformat()}"


schedule.add_command(create)
add_rule_commands(
    schedule,
    _SCHEDULES,
    _COLUMNS,
    pause_help="Start nothing until the schedule is resumed; running flows continue.",
    resume_help="Start definitions again, from the next time on.",
)
schedule.add_command(next_)
