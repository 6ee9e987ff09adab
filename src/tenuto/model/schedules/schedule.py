"""Schedules: computes the times at which a flow starts. Pure: the current time is an argument.

A time-based schedule is a cron line or an ISO 8601 repetition on the wall clock of a time zone.
Outside of this module, times are instants in UTC. A wall-clock time that a clock change skips means
the moment of the change. A wall-clock time that occurs twice means the first occurrence.

Call `check` on schedules from outside; all other functions expect a schedule that passed it.
"""

import re
from bisect import bisect_left, bisect_right
from calendar import monthrange
from collections import deque
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from itertools import islice, takewhile
from typing import Literal, Protocol
from zoneinfo import ZoneInfo

import msgspec
from cronsim import CronSim, CronSimError

from tenuto.model import bounds
from tenuto.model.errors import Invalid

Kind = Literal["immediate", "time-based", "datetime-event"]
ScheduleType = Literal[
    "immediate", "time-based", "datetime-event", "cron", "iso", "datetime", "range"
]
Overlap = Literal["skip", "queue", "cancel_previous"]
CatchUp = Literal["none", "last", "all"]
Action = Literal["start", "skip", "queue", "cancel_previous"]

GRACE = timedelta(seconds=60)
"""A due time handled at most this late counts as on time: a coordinator may have been replaced."""
MAX_EXPRESSION = 200
MAX_ZONE = 64
MAX_CATCH_UP = 1_000
MAX_COUNTED_MISSED = 1_000
"""Missed times beyond this number are not counted, because counting iterates the cron line."""
MAX_JITTER_S = 24 * 3600
MIN_PERIOD = timedelta(seconds=1)

MIN_TIME = datetime(1969, 12, 30, tzinfo=UTC)
"""Earlier than every accepted time: in some time zones 1970 begins up to a day earlier in UTC."""
MAX_TIME = datetime(9001, 1, 2, tzinfo=UTC)
"""Later than every accepted time; far enough from the end of the calendar to add years to it."""
NEVER = datetime(9999, 1, 1, tzinfo=UTC)
YEARS = range(1970, 9001)
MAX_SET_BACK = timedelta(hours=12)
"""Longer than any clock was ever set back: since 1970 the longest was seven hours."""

_KINDS: dict[ScheduleType, Kind] = {
    "immediate": "immediate",
    "time-based": "time-based",
    "datetime-event": "datetime-event",
    "cron": "time-based",
    "iso": "time-based",
    "datetime": "datetime-event",
    "range": "datetime-event",
}
_MACROS = {
    "@hourly": "0 * * * *",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@weekly": "0 0 * * 0",
    "@monthly": "0 0 1 * *",
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
}
# The time zone database also has files that are no zones, and zones that count leap seconds. All of
# their names begin with a small letter.
_ZONE = re.compile(r"[A-Z][A-Za-z0-9_+-]*(/[A-Za-z0-9_+-]+)*")
_REPETITION = re.compile(r"R([0-9]{0,9})/([^/]+)/([^/]+)")
_DATE_TIME = re.compile(
    r"[0-9]{4}-[0-9]{2}-[0-9]{2}"
    r"(T[0-9]{2}:[0-9]{2}(:[0-9]{2}(\.[0-9]{1,6})?)?(Z|[+-][0-9]{2}(:?[0-9]{2})?)?)?"
)
_PERIOD = re.compile(
    r"P(?=.)(?:(?P<years>[0-9]{1,9})Y)?(?:(?P<months>[0-9]{1,9})M)?"
    r"(?:(?P<weeks>[0-9]{1,9})W)?(?:(?P<days>[0-9]{1,9})D)?"
    r"(?:T(?=.)(?:(?P<hours>[0-9]{1,9})H)?(?:(?P<minutes>[0-9]{1,9})M)?"
    r"(?:(?P<seconds>[0-9]{1,9}(?:[.,][0-9]{1,6})?)S)?)?"
)


class ScheduleSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When a schedule starts, and what happens to starts that overlap or were missed."""

    type: ScheduleType
    expression: str | None = None
    timezone: str = "UTC"
    at: datetime | None = None
    """A fixed time. Without an offset it is on the zone's wall clock, as are `until` and `end`."""
    until: datetime | None = None
    end: datetime | None = None
    """Alias of `until`."""
    overlap: Overlap = "skip"
    catch_up: CatchUp = "none"
    catch_up_limit: int = 100
    jitter_s: float = 0.0

    @property
    def kind(self) -> Kind:
        """The kind that `type` is an alias of."""
        return _KINDS[self.type]


class DueTimes(msgspec.Struct, frozen=True, kw_only=True):
    """The due times of a schedule at one moment."""

    fire: tuple[datetime, ...] = ()
    """Times to start, earliest first, each once."""
    missed: int = 0
    """Number of times that do not start, counted up to `MAX_COUNTED_MISSED`."""
    last: datetime
    """All times up to this one are handled."""
    next: datetime | None = None


class _TimeSource(Protocol):
    """Iterates the times of a schedule, each once."""

    def after(self, moment: datetime) -> Iterator[datetime]:
        """Yields the times after the moment, earliest first."""

    def up_to(self, moment: datetime) -> Iterator[datetime]:
        """Yields the times up to and including the moment, latest first."""


def check(spec: ScheduleSpec) -> None:
    """Raises `Invalid` with the field's name unless the schedule is valid and has a time."""
    _check_fields_fit_type(spec)
    _check_number("catch_up_limit", spec.catch_up_limit, 1, MAX_CATCH_UP)
    _check_number("jitter_s", spec.jitter_s, 0, MAX_JITTER_S)
    end = _last_time(spec)
    if spec.at is not None and end <= _to_utc("at", spec.at, _load_zone(spec.timezone)):
        raise _schedule_error("until", "is not after at: the range is empty")
    if next(_times_until_end(spec, MIN_TIME), None) is None and spec.kind != "immediate":
        raise _schedule_error(
            "expression", "never comes due" + (" before its end" if end < MAX_TIME else "")
        )


def next_times(spec: ScheduleSpec, after: datetime, n: int = 1) -> list[datetime]:
    """Returns the next `n` times after `after`, in UTC; fewer if the schedule ends earlier."""
    bounds.check_instant("after", after)
    bounds.check_number("n", n, 0, bounds.MAX_PAGE)
    return list(islice(_times_until_end(spec, after), n))


def due_times(
    spec: ScheduleSpec, last: datetime, now: datetime, grace: timedelta = GRACE
) -> DueTimes:
    """Returns the due times after `last`, up to and including `now`.

    A time is on time if it is at most `grace` ago. An older time is missed. `catch_up` decides
    about missed times: `none` starts none of them; `last` starts the latest one, unless a time that
    is on time starts; `all` starts the latest `catch_up_limit` times. A fixed time starts however
    late it is, until its range ends.
    """
    bounds.check_instant("last", last)
    bounds.check_instant("now", now)
    handled_until = max(last, now).astimezone(UTC)
    first = next(_times_until_end(spec, last), None)
    if first is None or first > now:
        return DueTimes(last=handled_until, next=first)
    latest = min(now, _last_time(spec)).astimezone(UTC)
    latest_first = takewhile(lambda time: time > last, _time_source(spec).up_to(latest))
    times = [*islice(latest_first, spec.catch_up_limit + MAX_COUNTED_MISSED)][::-1]
    fire = _select_times(spec, times, now, grace)
    return DueTimes(
        fire=tuple(fire),
        missed=min(len(times) - len(fire), MAX_COUNTED_MISSED),
        last=handled_until,
        next=next(_times_until_end(spec, handled_until), None),
    )


def add_jitter(spec: ScheduleSpec, time: datetime, roll: float) -> datetime:
    """Returns when to start what is due at `time`; `roll` in [0, 1) spreads it over the jitter."""
    return time + timedelta(seconds=spec.jitter_s * roll)


def overlap_action(policy: Overlap, running: int) -> Action:
    """Returns `start` if no earlier start is running, else the policy's action."""
    return policy if running > 0 else "start"


def _select_times(
    spec: ScheduleSpec, times: list[datetime], now: datetime, grace: timedelta
) -> list[datetime]:
    """Returns those of the times since the last poll that start, by `catch_up` and `grace`."""
    if spec.kind == "datetime-event":
        return times if now <= _last_time(spec) else []
    if spec.catch_up == "all":
        return times[-spec.catch_up_limit :]
    on_time = [time for time in times if now - time <= grace][-spec.catch_up_limit :]
    return times[-1:] if spec.catch_up == "last" and not on_time else on_time


def _times_until_end(spec: ScheduleSpec, after: datetime) -> Iterator[datetime]:
    """Yields the schedule's times after `after` and up to its end."""
    end = _last_time(spec)
    return takewhile(lambda time: time <= end, _time_source(spec).after(after.astimezone(UTC)))


def _last_time(spec: ScheduleSpec) -> datetime:
    """Returns the last moment for a time of the schedule, or for the start of a fixed time."""
    if spec.until is not None:
        return _to_utc("until", spec.until, _load_zone(spec.timezone))
    return MAX_TIME if spec.end is None else _to_utc("end", spec.end, _load_zone(spec.timezone))


def _time_source(spec: ScheduleSpec) -> _TimeSource:
    """Returns the schedule's times without its end; raises `Invalid` if it cannot be parsed."""
    zone = _load_zone(spec.timezone)
    if spec.expression is None:
        return _FixedTimes([] if spec.at is None else [_to_utc("at", spec.at, zone)])
    if len(spec.expression) > MAX_EXPRESSION or not spec.expression.isascii():
        raise _schedule_error(
            "expression", f"is longer than {MAX_EXPRESSION} characters, or not ASCII"
        )
    text = spec.expression.strip()
    if spec.type == "iso" or (spec.type != "cron" and text.startswith(("R", "P"))):
        return _parse_repetition(text, zone)
    return _parse_cron(text, zone)


class _FixedTimes:
    """Times given one by one."""

    def __init__(self, times: list[datetime]) -> None:
        self._times = times

    def after(self, moment: datetime) -> Iterator[datetime]:
        return (time for time in self._times if time > moment)

    def up_to(self, moment: datetime) -> Iterator[datetime]:
        return (time for time in reversed(self._times) if time <= moment)


class _CronTimes:
    """A cron line on the wall clock of a time zone.

    As in Debian's cron, a line whose minute or hour begins with `*` follows real time: it has a
    time whenever the wall clock shows one of its minutes. Any other line means times of the day.
    CronSim is used without a time zone. With one, it skips minutes where clocks change by half an
    hour, and it goes back in time if it starts in an hour that occurs twice.
    """

    def __init__(self, line: str, zone: ZoneInfo) -> None:
        self._line = line
        self._zone = zone
        minute, hour = line.split()[:2]
        self._real_time = minute.startswith("*") or hour.startswith("*")

    def after(self, moment: datetime) -> Iterator[datetime]:
        # If the clock is about to be set back, earlier wall-clock times come after the moment.
        offset = min(
            _utc_offset(moment, self._zone), _utc_offset(moment + MAX_SET_BACK, self._zone)
        )
        wall_times = CronSim(self._line, moment.replace(tzinfo=None) + offset)
        return (time for time in self._sorted_instants(wall_times, 1) if time > moment)

    def up_to(self, moment: datetime) -> Iterator[datetime]:
        offset = max(
            _utc_offset(moment, self._zone), _utc_offset(moment - MAX_SET_BACK, self._zone)
        )
        search_from = moment.replace(tzinfo=None, microsecond=0) + offset + timedelta(seconds=1)
        wall_times = CronSim(self._line, search_from, reverse=True)
        return (time for time in self._sorted_instants(wall_times, -1) if time <= moment)

    def _sorted_instants(self, wall_times: Iterator[datetime], step: int) -> Iterator[datetime]:
        """Yields the instants of wall-clock times in order of time.

        The second instant of a wall-clock time that occurs twice is delayed to its position.
        """
        delayed: deque[datetime] = deque()
        previous: datetime | None = None
        for wall in wall_times:
            instants = self._instants_of(wall)[::step]
            if not instants or instants[0] == previous:
                continue
            previous = instants[0]
            while delayed and (previous - delayed[0]) * step > timedelta(0):
                yield delayed.popleft()
            yield previous
            delayed.extend(instants[1:])
        yield from delayed

    def _instants_of(self, wall: datetime) -> list[datetime]:
        """Returns when a wall-clock time occurs: each time on a real-time line, else once.

        A time that the clocks skip occurs once, too.
        """
        return (
            _instants_at(wall, self._zone)
            if self._real_time
            else [_first_instant_at(wall, self._zone)]
        )


class _IsoRepetition:
    """A start, repeated with a period: `months` and `days` on the wall clock, then `elapsed` time.

    Each time is computed from the start, so that a short month does not shift later times.
    """

    def __init__(
        self, start: datetime, zone: ZoneInfo, count: int | None, period: "_Period"
    ) -> None:
        self._start = _to_utc("expression", start, zone)
        # A start without an offset is a wall-clock time, even if a clock change skips it that day.
        local = start.astimezone(zone) if start.tzinfo else start
        self._wall = local.replace(tzinfo=None, fold=0)
        self._zone = zone
        self._period = period
        self._numbers = range((MAX_TIME - self._start) // MIN_PERIOD if count is None else count)

    def after(self, moment: datetime) -> Iterator[datetime]:
        return self._distinct_times(self._numbers[self._count_up_to(moment) :])

    def up_to(self, moment: datetime) -> Iterator[datetime]:
        return self._distinct_times(self._numbers[: self._count_up_to(moment)][::-1])

    def _count_up_to(self, moment: datetime) -> int:
        """Returns how many repetitions are up to and including the moment, by binary search."""
        return bisect_right(self._numbers, moment, key=self._time_of)

    def _distinct_times(self, numbers: range) -> Iterator[datetime]:
        """Yields the times of repetitions, equal neighbours once."""
        previous: datetime | None = None
        for number in numbers:
            # If a time zone skipped a whole day, two repetitions have the same instant.
            if (time := self._time_of(number)) != previous:
                yield time
            previous = time

    def _time_of(self, number: int) -> datetime:
        """Returns the time of a repetition, or `NEVER` beyond the calendar; the start is 0."""
        period, base = self._period, self._start
        try:
            if number and (period.months or period.days):
                wall = _add_months(self._wall, period.months * number)
                base = _first_instant_at(wall + timedelta(days=period.days * number), self._zone)
            return min(base + period.elapsed * number, NEVER)
        except (OverflowError, ValueError):
            return NEVER


class _Period(msgspec.Struct, frozen=True, kw_only=True):
    months: int = 0
    days: int = 0
    elapsed: timedelta = timedelta(0)


def _parse_cron(text: str, zone: ZoneInfo) -> _CronTimes:
    """Parses five cron fields or a macro such as `@daily`; raises `Invalid`."""
    line = _MACROS.get(text.lower(), text)
    if len(line.split()) != 5:
        known = ", ".join(sorted(_MACROS))
        raise _schedule_error(
            "expression",
            f"is {text!r}: use five cron fields, one of {known}, "
            "or a repetition such as R/2026-01-01T09:00:00Z/P1D",
        )
    try:
        CronSim(line, MIN_TIME)
    except CronSimError as error:
        raise _schedule_error("expression", f"is {text!r}: {str(error).lower()}") from error
    return _CronTimes(line, zone)


def _parse_repetition(text: str, zone: ZoneInfo) -> _IsoRepetition:
    """Parses a repetition such as `R5/START/P1D`; raises `Invalid`."""
    match = _REPETITION.fullmatch(text)
    if match is None:
        raise _schedule_error(
            "expression",
            f"is {text!r}: a repetition is R/START/PERIOD or Rn/START/PERIOD,"
            " for example R5/2026-01-01T09:00:00Z/P1D",
        )
    count = int(match[1]) if match[1] else None
    if count == 0:
        raise _schedule_error("expression", "repeats 0 times, so it is never due")
    start = _parse_date_time(match[2])
    if match[3].startswith("P"):
        period = _parse_period(match[3])
    else:
        first, second = (_to_utc("expression", _parse_date_time(match[n]), zone) for n in (2, 3))
        period = _Period(elapsed=second - first)
    if not (period.months or period.days or period.elapsed >= MIN_PERIOD):
        raise _schedule_error(
            "expression", f"has the period {match[3]}: at least one second is needed"
        )
    return _IsoRepetition(start, zone, count, period)


def _parse_date_time(text: str) -> datetime:
    """Parses a time, perhaps without an offset; raises `Invalid`."""
    if _DATE_TIME.fullmatch(text):
        try:
            return datetime.fromisoformat(text)
        except ValueError:
            pass  # not in the calendar, such as 31 February or hour 25
    raise _schedule_error(
        "expression", f"has {text!r} where a time such as 2026-01-01T09:00:00Z is meant"
    )


def _parse_period(text: str) -> _Period:
    """Parses a period such as `P1M` or `PT15M`; raises `Invalid`."""
    match = _PERIOD.fullmatch(text)
    if match is None:
        raise _schedule_error(
            "expression", f"has {text!r} where a period such as P1D or PT15M is meant"
        )
    parts = {
        name: float((value or "0").replace(",", ".")) for name, value in match.groupdict().items()
    }
    try:
        elapsed = timedelta(
            hours=parts["hours"], minutes=parts["minutes"], seconds=parts["seconds"]
        )
    except OverflowError as error:
        raise _schedule_error("expression", f"has the period {text}, which is too long") from error
    return _Period(
        months=int(parts["years"] * 12 + parts["months"]),
        days=int(parts["weeks"] * 7 + parts["days"]),
        elapsed=elapsed,
    )


def _add_months(wall: datetime, months: int) -> datetime:
    """Returns the same day of a later month, or its last day; `ValueError` beyond the calendar."""
    years, month = divmod(wall.month - 1 + months, 12)
    year = wall.year + years
    if year > MAX_TIME.year:
        raise ValueError(year)
    return wall.replace(
        year=year, month=month + 1, day=min(wall.day, monthrange(year, month + 1)[1])
    )


def _utc_offset(moment: datetime, zone: ZoneInfo) -> timedelta:
    """Returns the zone's offset from UTC at the moment."""
    offset = moment.astimezone(zone).utcoffset()
    assert offset is not None
    return offset


def _instants_at(wall: datetime, zone: ZoneInfo) -> list[datetime]:
    """Returns the instants at which the zone's clocks show that time: none, one or two."""
    first, second = (wall.replace(tzinfo=zone, fold=fold).astimezone(UTC) for fold in (0, 1))
    if first == second:
        return [first]
    # By PEP 495, the two readings of a skipped time are in reverse order.
    return [first, second] if first < second else []


def _first_instant_at(wall: datetime, zone: ZoneInfo) -> datetime:
    """Returns the first instant at which the zone's clocks show that time, or just skipped it."""
    if instants := _instants_at(wall, zone):
        return instants[0]
    early, late = (wall.replace(tzinfo=zone, fold=fold).astimezone(UTC) for fold in (1, 0))
    early = early.replace(microsecond=0)
    old_offset = _utc_offset(early, zone)
    seconds = range((late - early) // MIN_PERIOD + 1)
    change_second = bisect_left(
        seconds,
        True,
        key=lambda second: _utc_offset(early + second * MIN_PERIOD, zone) != old_offset,
    )
    return early + change_second * MIN_PERIOD


def _to_utc(field: str, value: datetime, zone: ZoneInfo) -> datetime:
    """Returns the value in UTC, by default from the zone's wall clock; checks its year."""
    if value.year not in YEARS:
        raise _schedule_error(
            field, f"must be in the years {YEARS[0]} to {YEARS[-1]}, not {value.year}"
        )
    return _first_instant_at(value, zone) if value.tzinfo is None else value.astimezone(UTC)


def _load_zone(name: str) -> ZoneInfo:
    """Returns the time zone; raises `Invalid` if there is none of that name."""
    if len(name) <= MAX_ZONE and _ZONE.fullmatch(name):
        try:
            return ZoneInfo(name)
        except (KeyError, ValueError, OSError):
            pass  # the file does not exist, is no time zone, or is a folder
    raise _schedule_error(
        "timezone", f"is {name[:MAX_ZONE]!r}: no such zone, try Europe/Berlin or UTC"
    )


def _check_fields_fit_type(spec: ScheduleSpec) -> None:
    """Raises `Invalid` unless the schedule has exactly the fields that its type needs."""
    needed = {"time-based": "expression", "datetime-event": "at"}.get(spec.kind)
    for field in ("expression", "at"):
        if (getattr(spec, field) is not None) != (field == needed):
            verb = "is required" if field == needed else "is not allowed"
            raise _schedule_error(field, f"{verb} in a schedule of type {spec.type}")
    if spec.until is not None and spec.end is not None:
        raise _schedule_error("end", "is an alias of until; give only one of them")
    has_end = spec.until is not None or spec.end is not None
    if spec.type == "range" and not has_end:
        raise _schedule_error("until", "is required in a schedule of type range")
    if spec.type == "immediate" and has_end:
        raise _schedule_error("until", "is not allowed in a schedule of type immediate")


def _check_number(field: str, value: float, minimum: float, maximum: float) -> None:
    """Raises `Invalid` unless the value is within the limits."""
    if not minimum <= value <= maximum:
        raise _schedule_error(field, f"must be between {minimum:,} and {maximum:,}, not {value:,}")


def _schedule_error(field: str, reason: str) -> Invalid:
    """Returns the error for a field of a schedule."""
    return Invalid(f"{field} {reason}", "schedule_invalid", field=field)
