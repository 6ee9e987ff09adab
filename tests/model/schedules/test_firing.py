"""Firing decisions: no due time twice, none lost, at any poll interval."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.model.schedules.test_schedule import BERLIN, spec, utc, walls

from tenuto.model.schedules.firing import ScheduleState, decide_firing, initial_cursor, next_poll_at
from tenuto.model.schedules.schedule import CatchUp, ScheduleSpec, due_times, next_times

START = datetime(2030, 1, 1, tzinfo=UTC)
LOOKS = st.lists(st.tuples(st.integers(1, 40_000), st.booleans(), st.floats(0, 0.999)), max_size=30)
SPECS = st.builds(
    ScheduleSpec,
    type=st.just("cron"),
    expression=st.sampled_from(["*/10 * * * *", "0 * * * *", "30 2 * * *"]),
    timezone=st.sampled_from(["UTC", "Europe/Berlin"]),
    overlap=st.sampled_from(["skip", "queue", "cancel_previous"]),
    catch_up=st.sampled_from(["none", "last", "all"]),
    catch_up_limit=st.sampled_from([1, 7, 100]),
    jitter_s=st.sampled_from([0.0, 30.0, 1200.0]),
    until=st.sampled_from([None, START + timedelta(days=1)]),
)


@settings(deadline=None)
@given(spec=SPECS, looks=LOOKS)
def test_every_due_time_is_handled_once(spec: ScheduleSpec, looks: list[Any]) -> None:
    now, running = START, 0
    standing = ScheduleState(last=initial_cursor(spec, now))
    started: list[datetime] = []
    out = 0
    for seconds, ends, roll in looks:
        now += timedelta(seconds=seconds)
        running = 0 if ends else running
        before = standing
        done = decide_firing(
            spec, ScheduleState(last=before.last, queued=before.queued, running=running), now, roll
        )
        if done.start is not None:
            assert done.cancel == (running > 0)
            assert running == 0 or spec.overlap == "cancel_previous"
            started.append(done.start)
            running = 1
        out += done.missed + len(done.skipped)
        assert done.next is None or done.next > now
        assert spec.overlap == "queue" or done.queued == ()
        assert set(done.waiting) <= set(done.queued)
        standing = ScheduleState(last=done.last, queued=done.queued)
    times = [time for time in next_times(spec, START, 1000) if time <= now]
    if len(times) < 1000:
        assert started == sorted(set(started))
        assert set(started) | set(standing.queued) <= set(times)
        assert len(started) + len(standing.queued) + out == len(times)


@settings(deadline=None)
@given(spec=SPECS, roll=st.floats(0, 0.999))
def test_poll_finds_the_due_time_it_was_set_for(spec: ScheduleSpec, roll: float) -> None:
    at = next_poll_at(spec, START, roll)
    assert at is not None
    first = next_times(spec, START, 1)[0]
    assert first <= at <= first + timedelta(seconds=spec.jitter_s)
    assert decide_firing(spec, ScheduleState(last=START), at, roll).start is not None


def test_jitter_ends_with_the_range() -> None:
    at = START + timedelta(hours=1)
    spec = ScheduleSpec(type="range", at=at, until=at + timedelta(minutes=1), jitter_s=600)
    assert next_poll_at(spec, START, 0.05) == at + timedelta(seconds=30)
    assert next_poll_at(spec, START, 0.5) == at
    assert next_poll_at(spec, at, 0.5) is None


@pytest.mark.parametrize(
    ("catch_up", "now", "fire", "missed"),
    [
        ("all", "2026-10-25T00:40", "24 23:30+02, 25 00:30+02, 25 01:30+02, 25 02:30+02", 0),
        ("all", "2026-10-25T01:10", "24 23:30+02, 25 00:30+02, 25 01:30+02, 25 02:30+02", 0),
        ("all", "2026-10-25T02:40", "25 01:30+02, 25 02:30+02, 25 02:30+01, 25 03:30+01", 2),
        ("last", "2026-10-25T00:40", "25 02:30+02", 3),
        ("last", "2026-10-25T01:10", "25 02:30+02", 3),
        ("last", "2026-10-25T01:40", "25 02:30+01", 4),
    ],
)
def test_missed_times_of_a_repeated_hour_are_caught_up(
    catch_up: CatchUp, now: str, fire: str, missed: int
) -> None:
    """Soon after clocks were set back, what they showed before lies ahead of what they show."""
    line = spec("30 * * * *", BERLIN, catch_up=catch_up, catch_up_limit=4)
    result = due_times(line, utc("2026-10-24T21:00"), utc(now))
    assert (walls(list(result.fire), BERLIN), result.missed) == (fire.split(", "), missed)
