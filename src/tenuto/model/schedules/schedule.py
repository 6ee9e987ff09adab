"""Schedules: at which times something is started. Pure: the present is an argument.

A time-based schedule is a cron line or an ISO 8601 repetition, read on the wall clock of a zone.
Times outside of this module are instants in UTC. A wall-clock time that a change of the clock
leaves out stands for the moment of the change; one that comes twice stands for the first.

`check` what comes from outside; everything else takes a schedule that passed it.
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
"""A time that is seen no later than this is on time: a coordinator may be replaced meanwhile."""
MAX_EXPRESSION = 200
MAX_ZONE = 64
MAX_CATCH_UP = 1_000
MAX_COUNTED = 1_000
"""Missed times beyond these are not counted: a cron line has to be walked through for it."""
MAX_JITTER_S = 24 * 3600
SHORTEST = timedelta(seconds=1)

FIRST = datetime(1969, 12, 30, tzinfo=UTC)
"""Before every time there is: 1970 begins a day earlier in some zones."""
LAST = datetime(9001, 1, 2, tzinfo=UTC)
"""No time is later: far enough from the end of the calendar to look years ahead."""
NEVER = datetime(9999, 1, 1, tzinfo=UTC)
YEARS = range(1970, 9001)
SET_BACK = timedelta(hours=12)
"""More than any clock is set back: since 1970 the most was seven hours."""

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
# The database of zones also has files that are none, and zones that count leap seconds. All of
# these begin with a small letter.
_ZONE = re.compile(r"[A-Z][A-Za-z0-9_+-]*(/[A-Za-z0-9_+-]+)*")
_REPEAT = re.compile(r"R([0-9]{0,9})/([^/]+)/([^/]+)")
_WHEN = re.compile(
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
    """When to start, and what to do about starts that overlap or were missed."""

    type: ScheduleType
    expression: str | None = None
    timezone: str = "UTC"
    at: datetime | None = None
    """Without an offset it is a time on the zone's wall clock, as `until` and `end` are."""
    until: datetime | None = None
    end: datetime | None = None
    """Another name of `until`."""
    overlap: Overlap = "skip"
    catch_up: CatchUp = "none"
    catch_up_limit: int = 100
    jitter_s: float = 0.0

    @property
    def kind(self) -> Kind:
        """What the type is another name of."""
        return _KINDS[self.type]


class DueTimes(msgspec.Struct, frozen=True, kw_only=True):
    """What a schedule asks for now."""

    fire: tuple[datetime, ...] = ()
    """In order, each to be started once."""
    missed: int = 0
    """Times that are left out, counted up to `MAX_COUNTED`."""
    last: datetime
    """Up to here everything is handled."""
    next: datetime | None = None


class _TimeSource(Protocol):
    """The times of a schedule, each once."""

    def after(self, moment: datetime) -> Iterator[datetime]:
        """Those after the moment, earliest first."""

    def up_to(self, moment: datetime) -> Iterator[datetime]:
        """Those not after the moment, latest first."""


def check(spec: ScheduleSpec) -> None:
    """Raise `Invalid` with the field's name unless the schedule is understood and has a time."""
    _check_presence(spec)
    _check_number("catch_up_limit", spec.catch_up_limit, 1, MAX_CATCH_UP)
    _check_number("jitter_s", spec.jitter_s, 0, MAX_JITTER_S)
    end = _end(spec)
    if spec.at is not None and end <= _instant("at", spec.at, _zone(spec.timezone)):
        raise _invalid("until", "is not after at: the range is empty")
    if next(_within(spec, FIRST), None) is None and spec.kind != "immediate":
        raise _invalid("expression", "never comes due" + (" before its end" if end < LAST else ""))


def following(spec: ScheduleSpec, after: datetime, n: int = 1) -> list[datetime]:
    """The next `n` times after that one, in UTC; fewer when the schedule ends before."""
    bounds.instant("after", after)
    bounds.number("n", n, 0, bounds.MAX_PAGE)
    return list(islice(_within(spec, after), n))


def due(spec: ScheduleSpec, last: datetime, now: datetime, grace: timedelta = GRACE) -> DueTimes:
    """What to start for the times after `last`, up to and including `now`.

    A time is on time when it is at most `grace` ago. What is older is missed, and `catch_up` says
    what becomes of it: nothing; the latest starts, unless one that is on time does; or all start,
    the latest `catch_up_limit` of them. A fixed time starts however late, until its range ends.
    """
    bounds.instant("last", last)
    bounds.instant("now", now)
    handled = max(last, now).astimezone(UTC)
    upcoming = next(_within(spec, last), None)
    if upcoming is None or upcoming > now:
        return DueTimes(last=handled, next=upcoming)
    latest = min(now, _end(spec)).astimezone(UTC)
    newest = takewhile(lambda time: time > last, _times(spec).up_to(latest))
    times = [*islice(newest, spec.catch_up_limit + MAX_COUNTED)][::-1]
    fire = _chosen(spec, times, now, grace)
    return DueTimes(
        fire=tuple(fire),
        missed=min(len(times) - len(fire), MAX_COUNTED),
        last=handled,
        next=next(_within(spec, handled), None),
    )


def jittered(spec: ScheduleSpec, time: datetime, roll: float) -> datetime:
    """When to start what is due at that time; `roll` in [0, 1) spreads it over the jitter."""
    return time + timedelta(seconds=spec.jitter_s * roll)


def overlap_action(policy: Overlap, running: int) -> Action:
    """What to do at a time of the schedule while that many of its earlier starts have not ended."""
    return policy if running > 0 else "start"


def _chosen(
    spec: ScheduleSpec, times: list[datetime], now: datetime, grace: timedelta
) -> list[datetime]:
    """Which of the times start."""
    if spec.kind == "datetime-event":
        return times if now <= _end(spec) else []
    if spec.catch_up == "all":
        return times[-spec.catch_up_limit :]
    on_time = [time for time in times if now - time <= grace][-spec.catch_up_limit :]
    return times[-1:] if spec.catch_up == "last" and not on_time else on_time


def _within(spec: ScheduleSpec, after: datetime) -> Iterator[datetime]:
    """The schedule's times after that one and up to its end."""
    end = _end(spec)
    return takewhile(lambda time: time <= end, _times(spec).after(after.astimezone(UTC)))


def _end(spec: ScheduleSpec) -> datetime:
    """The last moment at which the schedule may have a time, or a fixed time may start."""
    if spec.until is not None:
        return _instant("until", spec.until, _zone(spec.timezone))
    return LAST if spec.end is None else _instant("end", spec.end, _zone(spec.timezone))


def _times(spec: ScheduleSpec) -> _TimeSource:
    zone = _zone(spec.timezone)
    if spec.expression is None:
        return _FixedTimes([] if spec.at is None else [_instant("at", spec.at, zone)])
    if len(spec.expression) > MAX_EXPRESSION or not spec.expression.isascii():
        raise _invalid("expression", f"is longer than {MAX_EXPRESSION} characters, or not ASCII")
    text = spec.expression.strip()
    if spec.type == "iso" or (spec.type != "cron" and text.startswith(("R", "P"))):
        return _repetition(text, zone)
    return _cron(text, zone)


class _FixedTimes:
    """Times known one by one."""

    def __init__(self, times: list[datetime]) -> None:
        self._times = times

    def after(self, moment: datetime) -> Iterator[datetime]:
        return (time for time in self._times if time > moment)

    def up_to(self, moment: datetime) -> Iterator[datetime]:
        return (time for time in reversed(self._times) if time <= moment)


class _CronTimes:
    """A cron line on the wall clock of a zone.

    As in Debian's cron, a line whose minute or hour begins with `*` follows real time: it has a
    time whenever the wall clock shows one of its minutes. Any other line means times of the day.
    CronSim only walks through the calendar here: with a zone it leaves out minutes where clocks
    move by half an hour, and goes back in time when it begins in an hour that comes twice.
    """

    def __init__(self, line: str, zone: ZoneInfo) -> None:
        self._line = line
        self._zone = zone
        minute, hour = line.split()[:2]
        self._real_time = minute.startswith("*") or hour.startswith("*")

    def after(self, moment: datetime) -> Iterator[datetime]:
        # Where the clock is about to be set back, earlier walls come after the moment.
        offset = min(_offset(moment, self._zone), _offset(moment + SET_BACK, self._zone))
        walls = CronSim(self._line, moment.replace(tzinfo=None) + offset)
        return (time for time in self._in_order(walls, 1) if time > moment)

    def up_to(self, moment: datetime) -> Iterator[datetime]:
        offset = max(_offset(moment, self._zone), _offset(moment - SET_BACK, self._zone))
        beyond = moment.replace(tzinfo=None, microsecond=0) + offset + timedelta(seconds=1)
        walls = CronSim(self._line, beyond, reverse=True)
        return (time for time in self._in_order(walls, -1) if time <= moment)

    def _in_order(self, walls: Iterator[datetime], step: int) -> Iterator[datetime]:
        """The instants of walls in the order of time; the other pass of a wall has to wait."""
        held: deque[datetime] = deque()
        told: datetime | None = None
        for wall in walls:
            instants = self._instants(wall)[::step]
            if not instants or instants[0] == told:
                continue
            told = instants[0]
            while held and (told - held[0]) * step > timedelta(0):
                yield held.popleft()
            yield told
            held.extend(instants[1:])
        yield from held

    def _instants(self, wall: datetime) -> list[datetime]:
        return _instants_at(wall, self._zone) if self._real_time else [_moment(wall, self._zone)]


class _IsoRepetition:
    """A start and what follows it: `months` and `days` on the wall clock, then `elapsed` time.

    Each time is counted from the start, so that the end of a short month changes no later one.
    """

    def __init__(
        self, start: datetime, zone: ZoneInfo, count: int | None, period: "_Period"
    ) -> None:
        self._start = _instant("expression", start, zone)
        # Written without an offset it is the wall clock's time, though that day may leave it out.
        local = start.astimezone(zone) if start.tzinfo else start
        self._wall = local.replace(tzinfo=None, fold=0)
        self._zone = zone
        self._period = period
        self._turns = range((LAST - self._start) // SHORTEST if count is None else count)

    def after(self, moment: datetime) -> Iterator[datetime]:
        return self._times(self._turns[self._passed(moment) :])

    def up_to(self, moment: datetime) -> Iterator[datetime]:
        return self._times(self._turns[: self._passed(moment)][::-1])

    def _passed(self, moment: datetime) -> int:
        """How many turns are not after the moment, found by halving."""
        return bisect_right(self._turns, moment, key=self._time)

    def _times(self, turns: range) -> Iterator[datetime]:
        told: datetime | None = None
        for turn in turns:
            # Where a whole day was left out, two turns fall on one moment.
            if (time := self._time(turn)) != told:
                yield time
            told = time

    def _time(self, turn: int) -> datetime:
        period, base = self._period, self._start
        try:
            if turn and (period.months or period.days):
                wall = _months_later(self._wall, period.months * turn)
                base = _moment(wall + timedelta(days=period.days * turn), self._zone)
            return min(base + period.elapsed * turn, NEVER)
        except (OverflowError, ValueError):
            return NEVER


class _Period(msgspec.Struct, frozen=True, kw_only=True):
    months: int = 0
    days: int = 0
    elapsed: timedelta = timedelta(0)


def _cron(text: str, zone: ZoneInfo) -> _CronTimes:
    line = _MACROS.get(text.lower(), text)
    if len(line.split()) != 5:
        known = ", ".join(sorted(_MACROS))
        raise _invalid(
            "expression",
            f"is {text!r}: neither five cron fields, nor one of {known}, "
            "nor a repetition such as R/2026-01-01T09:00:00Z/P1D",
        )
    try:
        CronSim(line, FIRST)
    except CronSimError as error:
        raise _invalid("expression", f"is {text!r}: {str(error).lower()}") from error
    return _CronTimes(line, zone)


def _repetition(text: str, zone: ZoneInfo) -> _IsoRepetition:
    found = _REPEAT.fullmatch(text)
    if found is None:
        raise _invalid(
            "expression", f"is {text!r}: not R, R5 or so, start and period with / between"
        )
    count = int(found[1]) if found[1] else None
    if count == 0:
        raise _invalid("expression", "repeats 0 times, so it never comes due")
    start = _parse_when(found[2])
    if found[3].startswith("P"):
        period = _parse_period(found[3])
    else:
        first, second = (_instant("expression", _parse_when(found[n]), zone) for n in (2, 3))
        period = _Period(elapsed=second - first)
    if not (period.months or period.days or period.elapsed >= SHORTEST):
        raise _invalid("expression", f"has the period {found[3]}: at least one second is needed")
    return _IsoRepetition(start, zone, count, period)


def _parse_when(text: str) -> datetime:
    if _WHEN.fullmatch(text):
        try:
            return datetime.fromisoformat(text)
        except ValueError:
            pass  # the 31st of February, the 25th hour
    raise _invalid("expression", f"has {text!r} where a time such as 2026-01-01T09:00:00Z is meant")


def _parse_period(text: str) -> _Period:
    found = _PERIOD.fullmatch(text)
    if found is None:
        raise _invalid("expression", f"has {text!r} where a period such as P1D or PT15M is meant")
    part = {
        name: float((value or "0").replace(",", ".")) for name, value in found.groupdict().items()
    }
    try:
        elapsed = timedelta(hours=part["hours"], minutes=part["minutes"], seconds=part["seconds"])
    except OverflowError as error:
        raise _invalid("expression", f"has the period {text}, which is too long") from error
    return _Period(
        months=int(part["years"] * 12 + part["months"]),
        days=int(part["weeks"] * 7 + part["days"]),
        elapsed=elapsed,
    )


def _months_later(wall: datetime, months: int) -> datetime:
    """The same day of a later month, or that month's last; `ValueError` beyond the calendar."""
    years, month = divmod(wall.month - 1 + months, 12)
    year = wall.year + years
    if year > LAST.year:
        raise ValueError(year)
    return wall.replace(
        year=year, month=month + 1, day=min(wall.day, monthrange(year, month + 1)[1])
    )


def _offset(moment: datetime, zone: ZoneInfo) -> timedelta:
    offset = moment.astimezone(zone).utcoffset()
    assert offset is not None
    return offset


def _instants_at(wall: datetime, zone: ZoneInfo) -> list[datetime]:
    """The moments at which the zone's clocks show that time: none, one or two."""
    first, second = (wall.replace(tzinfo=zone, fold=fold).astimezone(UTC) for fold in (0, 1))
    if first == second:
        return [first]
    # By PEP 495 a time that is left out has its two readings the wrong way round.
    return [first, second] if first < second else []


def _moment(wall: datetime, zone: ZoneInfo) -> datetime:
    """The first moment at which the zone's clocks show that time, or have just left it out."""
    if shown := _instants_at(wall, zone):
        return shown[0]
    early, late = (wall.replace(tzinfo=zone, fold=fold).astimezone(UTC) for fold in (1, 0))
    early = early.replace(microsecond=0)
    before = _offset(early, zone)
    seconds = range((late - early) // SHORTEST + 1)
    changed = bisect_left(
        seconds, True, key=lambda second: _offset(early + second * SHORTEST, zone) != before
    )
    return early + changed * SHORTEST


def _instant(field: str, value: datetime, zone: ZoneInfo) -> datetime:
    """The value in UTC, on the zone's wall clock if it has no offset."""
    if value.year not in YEARS:
        raise _invalid(field, f"must be in the years {YEARS[0]} to {YEARS[-1]}, not {value.year}")
    return _moment(value, zone) if value.tzinfo is None else value.astimezone(UTC)


def _zone(name: str) -> ZoneInfo:
    if len(name) <= MAX_ZONE and _ZONE.fullmatch(name):
        try:
            return ZoneInfo(name)
        except (KeyError, ValueError, OSError):
            pass  # no such file, no file of a zone, a folder
    raise _invalid("timezone", f"is {name[:MAX_ZONE]!r}: no such zone, try Europe/Berlin or UTC")


def _check_presence(spec: ScheduleSpec) -> None:
    """Raise `Invalid` unless exactly the fields are there that the type has a use for."""
    needed = {"time-based": "expression", "datetime-event": "at"}.get(spec.kind)
    for field in ("expression", "at"):
        if (getattr(spec, field) is not None) != (field == needed):
            verb = "is needed" if field == needed else "has no meaning"
            raise _invalid(field, f"{verb} in a schedule of type {spec.type}")
    if spec.until is not None and spec.end is not None:
        raise _invalid("end", "is another name of until; only one of them can be given")
    has_end = spec.until is not None or spec.end is not None
    if spec.type == "range" and not has_end:
        raise _invalid("until", "is needed in a schedule of type range")
    if spec.type == "immediate" and has_end:
        raise _invalid("until", "has no meaning in a schedule of type immediate")


def _check_number(field: str, value: float, least: float, most: float) -> None:
    if not least <= value <= most:
        raise _invalid(field, f"must be between {least:,} and {most:,}, not {value:,}")


def _invalid(field: str, why: str) -> Invalid:
    return Invalid(f"{field} {why}", "schedule_invalid", field=field)
