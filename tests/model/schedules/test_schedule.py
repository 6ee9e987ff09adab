"""Schedules: cron lines, repetitions, clock changes, and missed times."""

from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any
from zoneinfo import ZoneInfo

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tenuto.model.errors import Invalid
from tenuto.model.schedules.schedule import (
    GRACE,
    MAX_CATCH_UP,
    MAX_COUNTED_MISSED,
    CatchUp,
    DueTimes,
    Overlap,
    ScheduleSpec,
    add_jitter,
    check,
    due_times,
    next_times,
    overlap_action,
)

BERLIN = "Europe/Berlin"
NEW_YORK = "America/New_York"
LORD_HOWE = "Australia/Lord_Howe"
SANTIAGO = "America/Santiago"
APIA = "Pacific/Apia"
MINUTE = timedelta(minutes=1)
PROPERTY = settings(deadline=None)


def utc(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


def wall(text: str) -> datetime:
    return datetime.fromisoformat(text)


# Moments around which clocks are set forward or back; by half an hour on Lord Howe, at midnight in
# Santiago, by a day in Apia, by seven hours in Vostok.
CHANGES = [
    (BERLIN, datetime(2026, 3, 29, 1, tzinfo=UTC)),
    (BERLIN, datetime(2026, 10, 25, 1, tzinfo=UTC)),
    (NEW_YORK, datetime(2026, 3, 8, 7, tzinfo=UTC)),
    (NEW_YORK, datetime(2026, 11, 1, 6, tzinfo=UTC)),
    (LORD_HOWE, datetime(2026, 10, 3, 15, 30, tzinfo=UTC)),
    (LORD_HOWE, datetime(2026, 4, 4, 15, tzinfo=UTC)),
    (SANTIAGO, datetime(2026, 9, 6, 4, tzinfo=UTC)),
    (SANTIAGO, datetime(2026, 4, 5, 3, tzinfo=UTC)),
    (APIA, datetime(2011, 12, 30, 10, tzinfo=UTC)),
    ("Antarctica/Vostok", datetime(1994, 1, 31, 17, tzinfo=UTC)),
]
LINES = ["* * * * *", "*/15 * * * *", "7 * * * *", "30 2 * * *", "0,30 1-3 * * *", "0 0 29 2 *"]
LINES += ["0 */2 * * *", "*/20 2 * * *", "15 0 * * 0", "0 9 1 * *", "0 12 L * *", "@weekly"]
REPEATS = [
    f"{repeat}/{start}/{period}"
    for repeat in ("R", "R7")
    for start in ("2026-03-28T02:30:00", "2025-01-31T09:00:00Z", "2011-12-20T00:00:00")
    for period in ("PT15M", "P1D", "P1M", "P1W", "P1DT6H", "P1Y", "PT3H20M")
]
SPECS = st.builds(
    ScheduleSpec,
    type=st.just("time-based"),
    expression=st.sampled_from([*LINES, *REPEATS]),
    timezone=st.sampled_from(sorted({zone for zone, _ in CHANGES} | {"UTC"})),
    catch_up=st.just("all"),
    catch_up_limit=st.just(MAX_CATCH_UP),
)
MOMENTS = st.one_of(
    st.datetimes(wall("1970-01-02"), wall("2099-01-01"), timezones=st.just(UTC)),
    st.builds(
        lambda change, away: change[1] + away,
        st.sampled_from(CHANGES),
        st.timedeltas(timedelta(hours=-30), timedelta(hours=30)),
    ),
)
ANY_TEXT = st.text(st.characters(exclude_categories=[]), max_size=30)
LIKE_CRON = st.text("0123456789*/,-LW# @dailyJANMO", max_size=30)
LIKE_ISO = st.from_regex(
    r"\AR[0-9]{0,3}/[0-9]{4}-[0-9]{2}-[0-9]{2}(T[0-9]{2}:[0-9]{2}(Z|[+-][0-9]{2}:[0-9]{2})?)?"
    r"/(P([0-9]{1,9}[YMWD])?(T[0-9]{1,9}[HMS])?|[0-9]{4}-[0-9]{2}-[0-9]{2})\Z"
)


def spec(expression: str, zone: str = "UTC", **fields: Any) -> ScheduleSpec:
    created = ScheduleSpec(type="time-based", expression=expression, timezone=zone, **fields)
    check(created)
    return created


def walls(times: list[datetime], zone: str) -> list[str]:
    """Day, hour, minute and offset, as clocks of the zone show them."""
    return [f"{time.astimezone(ZoneInfo(zone)):%d %H:%M%z}"[:-2] for time in times]


@pytest.mark.parametrize(
    ("expression", "after", "expected"),
    [
        ("*/15 * * * *", "2026-01-01T00:00", "2026-01-01T00:15, 2026-01-01T00:30"),
        ("* * * * *", "2026-01-01T00:00:00.000001", "2026-01-01T00:01, 2026-01-01T00:02"),
        ("0 9 * * MON-FRI", "2026-11-13T09:00", "2026-11-16T09:00, 2026-11-17T09:00"),
        ("0 0 1,15 * *", "2026-01-31T00:00", "2026-02-01T00:00, 2026-02-15T00:00"),
        ("0 0 13 * 5", "2026-02-01T00:00", "2026-02-06T00:00, 2026-02-13T00:00"),
        ("0 0 29 2 *", "2096-03-01T00:00", "2104-02-29T00:00, 2108-02-29T00:00"),
        ("0 0 * 2 MON#5", "2026-01-01T00:00", "2044-02-29T00:00, 2072-02-29T00:00"),
        ("0 0 L * *", "2028-02-01T00:00", "2028-02-29T00:00, 2028-03-31T00:00"),
        ("@hourly", "2026-01-01T23:30", "2026-01-02T00:00, 2026-01-02T01:00"),
        ("@daily", "2026-01-31T12:00", "2026-02-01T00:00, 2026-02-02T00:00"),
        (" @Weekly ", "2026-01-01T00:00", "2026-01-04T00:00, 2026-01-11T00:00"),
        ("@monthly", "2026-01-01T00:00", "2026-02-01T00:00, 2026-03-01T00:00"),
        ("@yearly", "2026-01-01T00:00", "2027-01-01T00:00, 2028-01-01T00:00"),
        ("R/2026-01-01T09:00:00Z/P1D", "2025-01-01T00:00", "2026-01-01T09:00, 2026-01-02T09:00"),
        ("R/2026-01-01T09:00:00Z/P1D", "2026-01-01T09:00", "2026-01-02T09:00, 2026-01-03T09:00"),
        ("R/2026-01-01T09:00+02:00/P1W", "2026-01-01T09:00", "2026-01-08T07:00, 2026-01-15T07:00"),
        (
            "R/2026-01-01/PT1.5S",
            "2026-01-01T00:00:01",
            "2026-01-01T00:00:01.5, 2026-01-01T00:00:03",
        ),
        ("R/2000-01-01T00:00:00Z/PT1S", "2026-05-05", "2026-05-05T00:00:01, 2026-05-05T00:00:02"),
        ("R/2024-02-29/P1Y", "2026-01-01T00:00", "2026-02-28T00:00, 2027-02-28T00:00"),
        ("R/2024-02-29/P1Y", "2027-03-01T00:00", "2028-02-29T00:00, 2029-02-28T00:00"),
        (
            "R/2026-01-01T09:00Z/2026-01-01T10:30Z",
            "2026-01-02",
            "2026-01-02T01:30, 2026-01-02T03:00",
        ),
        ("R3/2026-01-01/P1D", "2026-01-02T00:00", "2026-01-03T00:00"),
        ("R1/2026-01-01/P1D", "2025-01-02T00:00", "2026-01-01T00:00"),
        ("R1/2026-01-01/P999999999Y", "2025-01-02T00:00", "2026-01-01T00:00"),
        ("R/2026-01-01/P999999999W", "2025-01-02T00:00", "2026-01-01T00:00"),
        ("R/9000-12-31/P1D", "2026-01-02T00:00", "9000-12-31T00:00, 9001-01-01T00:00"),
    ],
)
def test_cron_lines_and_repetitions_list_the_next_times(
    expression: str, after: str, expected: str
) -> None:
    assert next_times(spec(expression), utc(after), 2) == [utc(t) for t in expected.split(", ")]


@pytest.mark.parametrize(
    ("expression", "zone", "after", "expected"),
    [
        # Clocks go from 02:00 to 03:00: once, right after the gap, and as ever on the next day.
        ("30 2 * * *", BERLIN, "2026-03-28T12:00", "29 03:00+02, 30 02:30+02, 31 02:30+02"),
        ("0,30 2,3 * * *", BERLIN, "2026-03-29T00:30", "29 03:00+02, 29 03:30+02, 30 02:00+02"),
        ("*/30 * * * *", BERLIN, "2026-03-29T00:00", "29 01:30+01, 29 03:00+02, 29 03:30+02"),
        ("0 * * * *", BERLIN, "2026-03-29T00:00", "29 03:00+02, 29 04:00+02, 29 05:00+02"),
        ("*/30 2 * * *", BERLIN, "2026-03-28T02:00", "30 02:00+02, 30 02:30+02, 31 02:00+02"),
        ("30 2 * * *", NEW_YORK, "2026-03-07T12:00", "08 03:00-04, 09 02:30-04, 10 02:30-04"),
        ("15 2 * * *", LORD_HOWE, "2026-10-03T00:00", "04 02:30+11, 05 02:15+11, 06 02:15+11"),
        ("0 3 * * *", LORD_HOWE, "2026-10-03T00:00", "04 03:00+11, 05 03:00+11, 06 03:00+11"),
        ("*/20 3 * * *", LORD_HOWE, "2026-10-03T00:00", "04 03:00+11, 04 03:20+11, 04 03:40+11"),
        ("0 0 * * *", SANTIAGO, "2026-09-05T12:00", "06 01:00-03, 07 00:00-03, 08 00:00-03"),
        # Clocks go from 03:00 to 02:00: the first time only, but real time goes on.
        ("30 2 * * *", BERLIN, "2026-10-24T12:00", "25 02:30+02, 26 02:30+01, 27 02:30+01"),
        ("30 2 * * *", BERLIN, "2026-10-25T01:15", "26 02:30+01, 27 02:30+01, 28 02:30+01"),
        ("*/30 * * * *", BERLIN, "2026-10-25T00:00", "25 02:30+02, 25 02:00+01, 25 02:30+01"),
        ("0 * * * *", BERLIN, "2026-10-25T00:00", "25 02:00+01, 25 03:00+01, 25 04:00+01"),
        ("*/30 2 * * *", BERLIN, "2026-10-25T00:10", "25 02:30+02, 25 02:00+01, 25 02:30+01"),
        ("30 1 * * *", NEW_YORK, "2026-10-31T12:00", "01 01:30-04, 02 01:30-05, 03 01:30-05"),
        ("45 1 * * *", LORD_HOWE, "2026-04-04T12:00", "05 01:45+11, 06 01:45+10, 07 01:45+10"),
        # Days keep the time on the wall, hours are hours.
        ("R/2026-03-28T02:30/P1D", BERLIN, "2026-03-28", "28 02:30+01, 29 03:00+02, 30 02:30+02"),
        ("R/2026-03-29T02:30/P1D", BERLIN, "2026-03-28", "29 03:00+02, 30 02:30+02, 31 02:30+02"),
        ("R/2026-03-28T09:00/P1D", BERLIN, "2026-03-28", "28 09:00+01, 29 09:00+02, 30 09:00+02"),
        ("R/2026-03-28T09:00/PT24H", BERLIN, "2026-03-28", "28 09:00+01, 29 10:00+02, 30 10:00+02"),
        ("R/2026-10-24T02:30/P1D", BERLIN, "2026-10-24", "24 02:30+02, 25 02:30+02, 26 02:30+01"),
        ("R/2026-10-25T01:30Z/P1D", BERLIN, "2026-10-24", "25 02:30+01, 26 02:30+01, 27 02:30+01"),
        ("R/2026-10-25T02:00/PT45M", BERLIN, "2026-10-25", "25 02:45+02, 25 02:30+01, 25 03:15+01"),
        ("R/2026-01-31T09:00/P1M", NEW_YORK, "2026-02-01", "28 09:00-05, 31 09:00-04, 30 09:00-04"),
        ("R/2026-10-31/P1DT12H", NEW_YORK, "2026-10-31", "31 00:00-04, 01 11:00-05, 03 00:00-05"),
        # The 30th of December was left out: its midnight and the next are one moment.
        ("R/2011-12-29/P1D", APIA, "2011-12-28T00:00", "29 00:00-10, 31 00:00+14, 01 00:00+14"),
    ],
)
def test_times_follow_daylight_saving_changes(
    expression: str, zone: str, after: str, expected: str
) -> None:
    result = next_times(spec(expression, zone), utc(after), 3)
    assert walls(result, zone) == expected.split(", ")


def field(value: set[int] | int) -> str:
    """A field of a cron line: these values, or every so many."""
    return f"*/{value}" if isinstance(value, int) else ",".join(map(str, value))


def values(value: set[int] | int, end: int) -> set[int]:
    return set(range(0, end, value)) if isinstance(value, int) else value


def minutes_by_the_clock(
    minutes: set[int], hours: set[int], zone: str, start: datetime, count: int, *, real_time: bool
) -> list[datetime]:
    """Times of a cron line found by looking at the clock each minute."""
    matches = []
    reached = (start - MINUTE).astimezone(ZoneInfo(zone)).replace(tzinfo=None)
    for moment in (start + n * MINUTE for n in range(count)):
        shown = moment.astimezone(ZoneInfo(zone)).replace(tzinfo=None)
        new = [reached + n * MINUTE for n in range(1, (shown - reached) // MINUTE + 1)]
        reached = max(reached, shown)
        if any(t.minute in minutes and t.hour in hours for t in ([shown] if real_time else new)):
            matches.append(moment)
    return matches


@PROPERTY
@given(
    change=st.sampled_from(CHANGES),
    minutes=st.sets(st.integers(0, 59), min_size=1, max_size=4) | st.integers(5, 40),
    hours=st.sets(st.integers(0, 23), min_size=1) | st.integers(1, 12),
    begin=st.integers(0, 40 * 60),
)
def test_cron_line_follows_the_local_clock(
    change: tuple[str, datetime], minutes: set[int] | int, hours: set[int] | int, begin: int
) -> None:
    zone, moment = change
    start, count = moment - timedelta(hours=30), 60 * 60
    expected = minutes_by_the_clock(
        values(minutes, 60),
        values(hours, 24),
        zone,
        start,
        count,
        real_time=isinstance(minutes, int) or isinstance(hours, int),
    )
    created = spec(
        f"{field(minutes)} {field(hours)} * * *", zone, catch_up="all", catch_up_limit=1_000
    )
    after = start + begin * MINUTE
    result = due_times(created, after, start + (count - 1) * MINUTE).fire
    assert list(result) == [time for time in expected if time > after]
    assert next_times(created, after, len(result)) == list(result)


def test_month_ends_return_after_short_months() -> None:
    result = next_times(spec("R5/2026-01-31T12:00:00Z/P1M"), utc("2026-01-01"), 9)
    assert [f"{time:%m-%d}" for time in result] == ["01-31", "02-28", "03-31", "04-30", "05-31"]


def test_schedule_has_no_time_after_its_end() -> None:
    result = next_times(spec("@daily", until=utc("2026-01-03")), utc("2026-01-01"), 9)
    assert result == [utc("2026-01-02"), utc("2026-01-03")]
    assert next_times(spec("@daily", end=utc("2026-01-03")), utc("2026-01-01"), 9) == result
    # Without an offset the end is on the zone's clocks.
    in_berlin = spec("0 * * * *", BERLIN, until=wall("2026-07-01T12:00"))
    assert next_times(in_berlin, utc("2026-07-01T08:30"), 9) == [
        utc("2026-07-01T09:00"),
        utc("2026-07-01T10:00"),
    ]


def test_fixed_time_comes_once() -> None:
    once = ScheduleSpec(type="datetime-event", at=wall("2026-04-01T09:00"), timezone=BERLIN)
    check(once)
    assert next_times(once, utc("2026-01-01"), 5) == [utc("2026-04-01T07:00")]
    assert next_times(once, utc("2026-04-01T07:00"), 5) == []
    left_out = ScheduleSpec(type="datetime", at=wall("2026-03-29T02:30"), timezone=BERLIN)
    assert next_times(left_out, utc("2026-01-01")) == [utc("2026-03-29T01:00")]


def test_immediate_schedule_has_no_times() -> None:
    now = ScheduleSpec(type="immediate")
    check(now)
    assert next_times(now, utc("2026-01-01"), 5) == []
    assert due_times(now, utc("2026-01-01"), utc("2026-02-01")) == DueTimes(last=utc("2026-02-01"))


def test_number_of_times_is_limited() -> None:
    assert next_times(spec("@daily"), utc("2026-01-01"), 0) == []
    assert len(next_times(spec("@daily"), utc("2026-01-01"), 1_000)) == 1_000
    for n in (-1, 1_001):
        with pytest.raises(Invalid):
            next_times(spec("@daily"), utc("2026-01-01"), n)
    with pytest.raises(Invalid, match="time zone"):
        next_times(spec("@daily"), wall("2026-01-01"))


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"type": "time-based"}, "expression"),
        ({"type": "time-based", "at": utc("2026-01-01")}, "expression"),
        ({"type": "time-based", "expression": "@daily", "at": utc("2026-01-01")}, "at"),
        ({"type": "datetime-event"}, "at"),
        ({"type": "datetime", "at": utc("2026-01-01"), "expression": "@daily"}, "expression"),
        ({"type": "range", "at": utc("2026-01-01")}, "until"),
        ({"type": "range", "at": utc("2026-01-02"), "until": utc("2026-01-01")}, "until"),
        ({"type": "range", "at": utc("2026-01-02"), "end": utc("2026-01-02")}, "until"),
        ({"type": "immediate", "at": utc("2026-01-01")}, "at"),
        ({"type": "immediate", "expression": "@daily"}, "expression"),
        ({"type": "immediate", "until": utc("2026-01-01")}, "until"),
        ({"type": "datetime", "at": wall("9999-12-31T23:00")}, "at"),
        ({"type": "datetime", "at": wall("0001-01-01")}, "at"),
        ({"type": "datetime", "at": utc("2026-01-01"), "until": wall("9999-01-01")}, "until"),
        ({"expression": "@daily", "until": utc("2026-01-01"), "end": utc("2026-01-01")}, "end"),
        ({"expression": "@daily", "catch_up_limit": 0}, "catch_up_limit"),
        ({"expression": "@daily", "catch_up_limit": MAX_CATCH_UP + 1}, "catch_up_limit"),
        ({"expression": "@daily", "jitter_s": -1}, "jitter_s"),
        ({"expression": "@daily", "jitter_s": float("nan")}, "jitter_s"),
        ({"expression": "@daily", "jitter_s": 1e9}, "jitter_s"),
        ({"type": "cron", "expression": "R/2026-01-01/P1D"}, "expression"),
        ({"type": "iso", "expression": "@daily"}, "expression"),
        ({"expression": "R/2026-01-01/P1D", "until": utc("2025-01-01")}, "expression"),
    ],
)
def test_invalid_schedule_is_refused_with_its_field(fields: dict[str, Any], field: str) -> None:
    created = ScheduleSpec(**({"type": "time-based"} | fields))
    with pytest.raises(Invalid) as caught:
        check(created)
    assert (caught.value.code, caught.value.details["field"]) == ("schedule_invalid", field)


BAD_CRON = """|0 0 * *|0 0 0 * * *|61 * * * *|* 24 * * *|* * 0 * *|* * * 13 *|* * * * 8|*/0 * * * *
5-1 * * * *|a * * * *|@reboot|@|0 0 31 2 *|0 0 30 2 *|0 0 31 4,6 *|0 0 */20 * 1L|² * * * *|é|- - - -
2026-01-01T09:00:00Z|1,,2 * * * *|* * * * MON-|* * L-1 * *""".replace("\n", "|").split("|")
BAD_ISO = (
    """R|R/|R/P1D|R//|R/2026-01-01|R/2026-01-01/|R/2026-01-01/P|R/2026-01-01/PT|R/2026-01-01/P1DT
R/2026-01-01/P0D|R/2026-01-01/PT0S|R/2026-01-01/PT0.9S|R/2026-01-01/-P1D|R/2026-01-01/P-1D
R/2026-01-01/2026-01-01|R/2026-01-02/2026-01-01|R0/2026-01-01/P1D|R-1/2026-01-01/P1D|P1D
R/2026-02-31/P1D|R/2026-01-01T25:00/P1D|R/10000-01-01/P1D|R/9999-12-31/P1D|R/1066-01-01/P1D
R/2026-01-01/10000-01-01|R/2026-01-01T09:00+99:00/P1D|R/P1D/2026-01-01|R/2026-01-01/P1D/P1D
R1000000000/2026-01-01/P1D|R/2026-01-01x09:00/P1D|R/2026-01-01/P1.5D|R/٢026-01-01/P1D
""".strip()
    .replace("\n", "|")
    .split("|")
)


@pytest.mark.parametrize("expression", [*BAD_CRON, *BAD_ISO, "1," * 5_000 + "1 * * * *"])
def test_invalid_cron_expression_is_refused(expression: str) -> None:
    with pytest.raises(Invalid, match=r"^expression ") as caught:
        spec(expression)
    assert caught.value.code == "schedule_invalid"
    assert len(caught.value.message) < 400


@pytest.mark.parametrize(
    "zone",
    [
        "",
        "Mars/Olympus",
        "Europe",
        "europe/berlin",
        "../Europe/Berlin",
        "/etc/passwd",
        "localtime",
        "right/UTC",
        "posixrules",
        "Europe/Berlin\x00",
        "\ud800",
        "A" * 1_000,
        "+01:00",
        "UTC/",
    ],
)
def test_unknown_time_zone_is_refused(zone: str) -> None:
    with pytest.raises(Invalid, match=r"^timezone ") as caught:
        spec("@daily", zone)
    assert caught.value.details["field"] == "timezone"


def test_schedule_is_decoded_from_plain_values() -> None:
    plain = {"type": "range", "at": "2026-04-01T09:00:00Z", "until": "2026-04-01T12:00:00+02:00"}
    decoded = msgspec.convert(plain, ScheduleSpec)
    check(decoded)
    assert (decoded.kind, decoded.at) == ("datetime-event", utc("2026-04-01T09:00"))
    assert msgspec.json.decode(msgspec.json.encode(decoded), type=ScheduleSpec) == decoded
    for wrong in ({"type": "never"}, {"type": "immediate", "when": 1}, {"expression": "@daily"}):
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert(wrong, ScheduleSpec)


@pytest.mark.parametrize(
    ("catch_up", "now", "fire", "missed"),
    [
        ("none", "2026-01-01T00:59:59", "", 0),
        ("none", "2026-01-01T01:00:00", "01", 0),
        ("none", "2026-01-01T01:01:00", "01", 0),
        ("none", "2026-01-01T01:01:01", "", 1),
        ("none", "2026-01-01T03:00:30", "03", 2),
        ("none", "2026-01-01T03:30:00", "", 3),
        ("last", "2026-01-01T01:00:00", "01", 0),
        ("last", "2026-01-01T03:00:30", "03", 2),
        ("last", "2026-01-01T03:30:00", "03", 2),
        ("all", "2026-01-01T00:30:00", "", 0),
        ("all", "2026-01-01T02:30:00", "01 02", 0),
        ("all", "2026-01-01T06:00:00", "04 05 06", 3),
    ],
)
def test_missed_times_are_caught_up_by_the_policy(
    catch_up: CatchUp, now: str, fire: str, missed: int
) -> None:
    hourly = spec("@hourly", catch_up=catch_up, catch_up_limit=3)
    result = due_times(hourly, utc("2026-01-01"), utc(now))
    assert [f"{time:%H}" for time in result.fire] == fire.split()
    assert (result.missed, result.last) == (missed, utc(now))
    assert [result.next] == next_times(hourly, utc(now))


def test_grace_is_chosen_by_the_caller() -> None:
    now = utc("2026-01-01T01:30")
    assert due_times(spec("@hourly"), utc("2026-01-01"), now).fire == ()
    assert due_times(spec("@hourly"), utc("2026-01-01"), now, now - utc("2026-01-01")).fire == (
        utc("2026-01-01T01:00"),
    )
    seconds = due_times(spec("R/2026-01-01/PT1S"), utc("2026-01-01"), utc("2026-01-01T00:02"))
    assert (len(seconds.fire), seconds.missed) == (GRACE.seconds + 1, 59)


@pytest.mark.parametrize("catch_up", ["none", "last", "all"])
@pytest.mark.parametrize("expression", ["* * * * *", "R/2000-01-01/PT1S"])
def test_years_of_missed_times_are_skipped_quickly(expression: str, catch_up: CatchUp) -> None:
    result = due_times(spec(expression, catch_up=catch_up), utc("2006-01-01"), utc("2026-01-01"))
    assert result.missed == MAX_COUNTED_MISSED
    assert result.fire[-1] == utc("2026-01-01")
    assert len(result.fire) <= 100


def test_clock_set_back_repeats_no_time() -> None:
    late, early = utc("2026-01-01T02:00"), utc("2026-01-01T00:30")
    result = due_times(spec("@hourly", catch_up="all"), late, early)
    assert result == DueTimes(last=late, next=utc("2026-01-01T03:00"))


def test_times_with_any_offset_are_accepted() -> None:
    last, now = utc("2026-01-01T00:30"), utc("2026-01-01T03:30")
    hourly = spec("@hourly", BERLIN, catch_up="all")
    elsewhere = [moment.astimezone(ZoneInfo(NEW_YORK)) for moment in (last, now)]
    assert due_times(hourly, elsewhere[0], elsewhere[1]) == due_times(hourly, last, now)
    assert next_times(hourly, elsewhere[0], 3) == list(due_times(hourly, last, now).fire)


@pytest.mark.parametrize(
    ("until", "now", "fires", "missed"),
    [
        (None, "2026-04-01T08:59", False, 0),
        (None, "2026-04-01T09:00", True, 0),
        (None, "2026-05-01T09:00", True, 0),
        ("2026-04-01T12:00", "2026-04-01T12:00", True, 0),
        ("2026-04-01T12:00", "2026-04-01T12:01", False, 1),
    ],
)
def test_fixed_time_starts_late_but_never_after_its_range(
    until: str | None, now: str, fires: bool, missed: int
) -> None:
    at = utc("2026-04-01T09:00")
    once = ScheduleSpec(type="datetime-event", at=at, until=utc(until) if until else None)
    check(once)
    result = due_times(once, utc("2026-01-01"), utc(now))
    assert (result.fire, result.missed) == ((at,) if fires else (), missed)
    assert result.next == (at if utc(now) < at else None)
    assert due_times(once, utc(now), utc("2027-01-01")).next is None


def test_last_time_before_the_end_starts_after_it() -> None:
    ending = spec("@hourly", until=utc("2026-01-01T02:00"))
    result = due_times(ending, utc("2026-01-01T01:00"), utc("2026-01-01T02:00:30"))
    assert (result.fire, result.next) == ((utc("2026-01-01T02:00"),), None)


@pytest.mark.parametrize("policy", ["skip", "queue", "cancel_previous"])
def test_overlap_policy_applies_only_while_a_start_runs(policy: Overlap) -> None:
    assert overlap_action(policy, 0) == "start"
    assert overlap_action(policy, 1) == overlap_action(policy, 7) == policy


def test_jitter_only_delays() -> None:
    at = utc("2026-01-01")
    assert add_jitter(spec("@daily"), at, 0.9) == at
    assert add_jitter(spec("@daily", jitter_s=60), at, 0.0) == at
    assert add_jitter(spec("@daily", jitter_s=60), at, 0.5) == at + timedelta(seconds=30)


@PROPERTY
@given(schedule=SPECS, after=MOMENTS, n=st.integers(1, 40))
def test_times_increase_and_lie_in_the_future(
    schedule: ScheduleSpec, after: datetime, n: int
) -> None:
    result = next_times(schedule, after, n)
    assert all(time.tzinfo is UTC for time in result)
    assert all(a < b for a, b in pairwise([after, *result]))


@PROPERTY
@given(schedule=SPECS, after=MOMENTS, n=st.integers(1, 20))
def test_times_one_by_one_equal_times_in_bulk(
    schedule: ScheduleSpec, after: datetime, n: int
) -> None:
    matches: list[datetime] = []
    while len(matches) < n and (step := next_times(schedule, max([after, *matches]))):
        matches += step
    assert matches == next_times(schedule, after, n)


@PROPERTY
@given(
    schedule=SPECS,
    last=MOMENTS,
    span=st.timedeltas(timedelta(0), timedelta(hours=16)),
    cuts=st.lists(st.floats(0, 1), max_size=5),
)
def test_polls_at_any_interval_fire_every_time_once(
    schedule: ScheduleSpec, last: datetime, span: timedelta, cuts: list[float]
) -> None:
    end = last + span
    whole = due_times(schedule, last, end)
    fired: list[datetime] = []
    at = last
    for now in [*(last + cut * span for cut in sorted(cuts)), end]:
        step = due_times(schedule, at, now)
        fired += step.fire
        assert step.missed == 0
        at = step.last
    assert tuple(fired) == whole.fire
    ahead = next_times(schedule, last, len(fired) + 1)
    assert fired == [time for time in ahead if time <= end]


@PROPERTY
@given(
    kind=st.sampled_from(["time-based", "cron", "iso"]),
    expression=ANY_TEXT | LIKE_CRON | LIKE_ISO,
    zone=st.sampled_from(["UTC", BERLIN, APIA]) | ANY_TEXT,
    at=st.none() | st.datetimes(),
    until=st.none() | st.datetimes() | st.datetimes(timezones=st.just(UTC)),
    now=MOMENTS,
)
@example("iso", "R/9000-12-31T23:59-23:59/P999999999M", "UTC", None, None, utc("2026-01-01"))
@example("iso", "R999/2026-01-01/PT999999999H", "UTC", None, None, utc("2026-01-01"))
def test_any_text_parses_or_is_invalid(
    kind: Any,
    expression: str,
    zone: str,
    at: datetime | None,
    until: datetime | None,
    now: datetime,
) -> None:
    created = ScheduleSpec(type=kind, expression=expression, timezone=zone, at=at, until=until)
    try:
        check(created)
    except Invalid:
        return
    assert len(next_times(created, now, 3)) <= 3
    assert due_times(created, now, now + timedelta(days=1)).last > now
