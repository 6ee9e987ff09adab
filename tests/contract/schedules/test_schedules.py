"""Schedules on both databases: each due time starts once, despite delays and failures."""

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest
from tests.contract.conftest import START, Another, ManualClock, Raw, refusal
from tests.contract.flows.helpers import group, task, worked
from tests.contract.schedules.helpers import cron, defined, faults, fire, flows, trail

from tenuto.coordinator.coordinator import Coordinator
from tenuto.engine.engine import Engine
from tenuto.engine.flows.start import Flows
from tenuto.engine.schedules import rows as schedule_rows
from tenuto.engine.schedules.schedules import (
    DesiredSchedule,
    ScheduleChange,
    Schedules,
    ScheduleTimes,
    ScheduleView,
)
from tenuto.engine.tasks.claim import ClaimedTask
from tenuto.model.agents.matching import AgentProfile
from tenuto.model.errors import Conflict, Unavailable
from tenuto.model.schedules.firing import MAX_QUEUED
from tenuto.model.schedules.schedule import ScheduleSpec, next_times

HOUR = 3600


async def hourly(engine: Engine, name: str = "s", target: str = "job", **fields: Any) -> UUID:
    return (await engine.schedules.create(name, target, cron(**fields))).id


async def seen(engine: Engine, schedule: UUID) -> tuple[str, int, int, int]:
    view = await engine.schedules.get(schedule)
    return view.status, view.fired, view.missed, len(view.queued)


async def test_schedule_is_created_shown_changed_and_deleted(
    engine: Engine, clock: ManualClock, raw: Raw
) -> None:
    await defined(engine)
    schedules = engine.schedules
    created = await schedules.create("nightly", "job", cron("0 2 * * *"), {"n": 1})
    assert (created.name, created.target, created.input, created.status) == (
        "nightly",
        "job",
        {"n": 1},
        "ACTIVE",
    )
    assert created.schedule == ScheduleTimes(type="time-based", expression="0 2 * * *")
    assert created.next_at == START + timedelta(hours=2)
    assert (created.version, created.created_by, created.created_at) == (1, "tester", START)
    assert await schedules.get("nightly") == await schedules.get(str(created.id)) == created
    other = await schedules.create("other", "job", cron())
    assert (await schedules.page()).schedules == [other, created]
    first = await schedules.page(1)
    assert (first.schedules, first.next_cursor) == ([other], other.id)
    assert (await schedules.page(1, first.next_cursor)).schedules == [created]
    assert (await schedules.page(name="nightly")).schedules == [created]
    assert [time.hour for time in await schedules.next("nightly", 2)] == [2, 2]
    clock.advance(5)
    paused = await schedules.pause("nightly")
    assert (paused.status, paused.next_at, paused.version) == ("PAUSED", None, 2)
    assert await refusal(schedules.pause("nightly")) == "out_of_turn"
    resumed = await schedules.resume(created.id)
    assert (resumed.status, resumed.next_at) == ("ACTIVE", created.next_at)
    assert await refusal(schedules.resume(created.id)) == "out_of_turn"
    change = ScheduleChange(schedule=cron("0 3 * * *"), input=None)
    assert await refusal(schedules.update("nightly", change, 1)) == "version_conflict"
    changed = await schedules.update("nightly", change, 3)
    assert (changed.input, changed.next_at) == (None, START + timedelta(hours=3))
    assert await schedules.update("nightly", change) == changed
    await schedules.delete("nightly")
    assert await refusal(schedules.get("nightly")) == "not_found"
    assert await refusal(schedules.delete(created.id)) == "not_found"
    assert await trail(raw, created.id) == ["created", "paused", "resumed", "changed", "deleted"]


@pytest.mark.parametrize(
    ("name", "target", "spec", "values", "code"),
    [
        ("with space", "job", cron(), None, "invalid_value"),
        ("s", "nothing", cron(), None, "target_unknown"),
        ("s", "job", cron("0 * * *"), None, "schedule_invalid"),
        ("s", "job", cron(until=START - timedelta(hours=1)), None, "schedule_invalid"),
        ("s", "job", cron(), {"secrets": {"a": "hush-hush"}}, "secret_in_definition"),
        ("s", "job", cron(), "x" * 2_000_000, "too_large"),
        ("taken", "job", cron(), None, "name_taken"),
        ("taken", "job", ScheduleSpec(type="immediate"), None, "name_taken"),
    ],
)
async def test_invalid_schedule_is_refused_and_not_stored(
    engine: Engine, raw: Raw, name: str, target: str, spec: ScheduleSpec, values: Any, code: str
) -> None:
    await defined(engine)
    await hourly(engine, "taken")
    before = await raw.counts()
    before.pop("lane")
    assert await refusal(engine.schedules.create(name, target, spec, values)) == code
    after = await raw.counts()
    after.pop("lane")
    assert after == before


async def test_due_time_starts_one_flow(
    engine: Engine, clock: ManualClock, raw: Raw, agent: AgentProfile
) -> None:
    await defined(engine, group("all", "a", "b"), task("a"), task("b"))
    created = await engine.schedules.create("s", "all", cron(), {"why": "time"})
    assert await fire(engine) == 0
    for number in range(1, 4):
        clock.advance(HOUR)
        assert [await fire(engine) for _ in range(3)] == [1, 0, 0]
        assert await worked(engine, agent) == ["a", "b"]
        view = await engine.schedules.get(created.id)
        assert (view.fired, view.missed, view.fired_at) == (number, 0, clock.now())
        assert view.next_at == clock.now() + timedelta(hours=1)
    rows = await flows(raw, "key, status, source, fire_key, input")
    assert [row[:3] for row in rows] == [("all", "COMPLETED", f"schedule:{created.id}")] * 3
    assert rows[0][3] == f"schedule:{created.id}:2030-01-01T01:00:00+00:00"
    assert rows[0][4] == '{"why":"time"}'
    assert await trail(raw, created.id) == ["created", "fired", "fired", "fired"]


async def test_concurrent_coordinators_start_a_due_time_once(
    engine: Engine, clock: ManualClock, raw: Raw, another: Another
) -> None:
    await defined(engine)
    ids = [await hourly(engine, f"s{number}") for number in range(5)]
    clock.advance(HOUR)
    async with another() as second, another() as third:
        done = await asyncio.gather(*(fire(item) for item in (engine, second, third) * 2))
    assert sum(done) == 5
    assert len(await flows(raw)) == 5
    assert [await seen(engine, item) for item in ids] == [("ACTIVE", 1, 0, 0)] * 5


async def test_uncommitted_start_leaves_nothing(
    engine: Engine, clock: ManualClock, raw: Raw, monkeypatch: pytest.MonkeyPatch
) -> None:
    await defined(engine)
    created = await hourly(engine)
    clock.advance(HOUR)
    begin = Flows.start_prepared

    def dies(*args: Any) -> Any:
        yield from begin(*args)
        raise Unavailable("the connection is gone")

    with monkeypatch.context() as patched:
        patched.setattr(Flows, "start_prepared", dies)
        with pytest.raises(Unavailable):
            await fire(engine)
    assert await flows(raw) == []
    assert await seen(engine, created) == ("ACTIVE", 0, 0, 0)
    assert await fire(engine) == 1
    assert await seen(engine, created) == ("ACTIVE", 1, 0, 0)


async def test_due_time_is_skipped_while_the_last_start_runs(
    engine: Engine, clock: ManualClock, raw: Raw, agent: AgentProfile
) -> None:
    await defined(engine)
    created = await hourly(engine)
    for _ in range(3):
        clock.advance(HOUR)
        await fire(engine)
    assert await flows(raw) == [("job", "RUNNING")]
    assert await seen(engine, created) == ("ACTIVE", 1, 2, 0)
    await worked(engine, agent)
    clock.advance(HOUR)
    await fire(engine)
    assert await flows(raw) == [("job", "COMPLETED"), ("job", "RUNNING")]
    assert await trail(raw, created) == ["created", "fired", "skipped", "skipped", "fired"]


async def test_due_time_is_skipped_while_the_last_start_is_paused(
    engine: Engine, clock: ManualClock, raw: Raw
) -> None:
    await defined(engine)
    await hourly(engine)
    clock.advance(HOUR)
    await fire(engine)
    [(flow,)] = await raw.fetch("select id from flow")
    await engine.flows.pause(UUID(str(flow)))
    clock.advance(HOUR)
    await fire(engine)
    assert await flows(raw) == [("job", "PAUSED")]


async def test_due_times_queue_until_the_last_start_finishes(
    engine: Engine, clock: ManualClock, raw: Raw, agent: AgentProfile
) -> None:
    await defined(engine)
    created = await hourly(engine, overlap="queue", until=START + timedelta(hours=3))
    for _ in range(3):
        clock.advance(HOUR)
        await fire(engine)
    assert await seen(engine, created) == ("ACTIVE", 1, 0, 2)
    clock.advance(HOUR)
    assert await fire(engine) == 0  # the last time has passed, and the first still runs
    for left in (1, 0):
        await worked(engine, agent)
        assert [await fire(engine), await fire(engine)] == [1, 0]
        assert (await seen(engine, created))[3] == left
    assert await seen(engine, created) == ("ENDED", 3, 0, 0)
    keys = [row[0].rpartition("T")[2] for row in await flows(raw, "fire_key")]
    assert keys == ["01:00:00+00:00", "02:00:00+00:00", "03:00:00+00:00"]
    assert (await trail(raw, created))[-1] == "ended"


async def test_queue_of_due_times_is_bounded(engine: Engine, clock: ManualClock) -> None:
    await defined(engine)
    created = await hourly(engine, overlap="queue", catch_up="all", catch_up_limit=1000)
    for _ in range(2):
        clock.advance(hours=900)
        await fire(engine)
    view = await engine.schedules.get(created)
    assert (view.fired, len(view.queued), view.missed) == (1, MAX_QUEUED, 1800 - 1 - MAX_QUEUED)


async def test_due_time_cancels_the_last_start(
    engine: Engine, clock: ManualClock, raw: Raw, agent: AgentProfile
) -> None:
    await defined(engine)
    created = await hourly(engine, overlap="cancel_previous", catch_up="all")
    clock.advance(HOUR)
    await fire(engine)
    [work] = await engine.claim(agent, "host:1:worker", 1)
    clock.advance(HOUR)
    await fire(engine)
    assert await flows(raw) == [("job", "CANCELLED"), ("job", "RUNNING")]
    assert (await engine.show(work.fence.task)).cancel_requested_at is not None
    clock.advance(5 * HOUR)
    await fire(engine)
    assert [status for _, status in await flows(raw)] == ["CANCELLED", "CANCELLED", "RUNNING"]
    assert await seen(engine, created) == ("ACTIVE", 3, 4, 0)
    await engine.confirm_cancel(work.fence, {"state": "killed"})


async def test_concurrent_cancel_of_the_last_start_and_its_completion_agree(
    engine: Engine, clock: ManualClock, raw: Raw, another: Another, agent: AgentProfile
) -> None:
    await defined(engine)
    ids = [await hourly(engine, f"s{n}", overlap="cancel_previous") for n in range(10)]
    clock.advance(HOUR)
    await fire(engine)
    claimed = await engine.claim(agent, "host:1:worker", 10)

    async def finish(work: ClaimedTask) -> None:
        try:
            await engine.complete(work.fence)
        except Conflict:
            await engine.confirm_cancel(work.fence, {"state": "killed"})

    clock.advance(HOUR)
    async with another() as second:
        await asyncio.gather(fire(engine), *(finish(work) for work in claimed), fire(second))
    assert [await seen(engine, item) for item in ids] == [("ACTIVE", 2, 0, 0)] * 10
    ended = [status for _, status in await flows(raw) if status != "RUNNING"]
    assert len(ended) == 10
    assert set(ended) <= {"COMPLETED", "CANCELLED"}


@pytest.mark.parametrize(
    ("catch_up", "overlap", "limit", "fired", "missed", "queued"),
    [
        ("none", "skip", 100, 0, 47, 0),
        ("last", "skip", 100, 1, 46, 0),
        ("all", "skip", 100, 1, 46, 0),
        ("all", "queue", 100, 1, 0, 46),
        ("all", "queue", 10, 1, 37, 9),
        ("all", "cancel_previous", 10, 1, 46, 0),
        ("last", "queue", 100, 1, 46, 0),
    ],
)
async def test_due_times_after_a_long_outage_follow_the_policy(
    engine: Engine,
    clock: ManualClock,
    raw: Raw,
    catch_up: Any,
    overlap: Any,
    limit: int,
    fired: int,
    missed: int,
    queued: int,
) -> None:
    await defined(engine)
    created = await hourly(engine, catch_up=catch_up, overlap=overlap, catch_up_limit=limit)
    clock.advance(hours=47, minutes=30)
    assert [await fire(engine), await fire(engine)] == [1, 0]
    assert await seen(engine, created) == ("ACTIVE", fired, missed, queued)
    assert len(await flows(raw)) == fired
    assert ("missed" in await trail(raw, created)) == (catch_up != "all" or limit == 10)


@pytest.mark.parametrize(
    ("line", "date", "hours"),
    [
        ("30 2 * * *", datetime(2030, 3, 30, tzinfo=UTC), 72),
        ("30 2 * * *", datetime(2030, 10, 26, tzinfo=UTC), 72),
        ("*/15 2 * * *", datetime(2030, 3, 30, 20, tzinfo=UTC), 12),
        ("*/15 2 * * *", datetime(2030, 10, 26, 20, tzinfo=UTC), 12),
    ],
)
async def test_due_times_follow_daylight_saving_changes(
    engine: Engine, clock: ManualClock, raw: Raw, line: str, date: datetime, hours: int
) -> None:
    await defined(engine, group("nothing"))
    clock.advance((date - START).total_seconds())
    spec = cron(line, timezone="Europe/Berlin")
    created = await engine.schedules.create("s", "nothing", spec)
    for _ in range(hours * 12):
        clock.advance(minutes=5)
        await fire(engine)
    want = [time for time in next_times(spec, date, 100) if time <= clock.now()]
    keys = [row[0].rpartition(f"{created.id}:")[2] for row in await flows(raw, "fire_key")]
    assert [datetime.fromisoformat(key) for key in keys] == want
    assert len(want) == {"*/15 2 * * *": 0 if date.month == 3 else 8}.get(line, 3)
    assert (await engine.schedules.get(created.id)).missed == 0


async def test_missing_target_stops_no_other_schedule(
    engine: Engine, clock: ManualClock, raw: Raw, agent: AgentProfile
) -> None:
    await defined(engine, task("job"), task("gone"))
    bad, good = await hourly(engine, "bad", "gone"), await hourly(engine, "good")
    await engine.definitions.delete("gone")
    clock.advance(HOUR)
    assert await fire(engine) == 2
    assert await flows(raw) == [("job", "RUNNING")]
    assert await seen(engine, bad) == ("ACTIVE", 0, 1, 0)
    assert await seen(engine, good) == ("ACTIVE", 1, 0, 0)
    [(kind, message)] = await faults(raw)
    assert kind == "schedule_failed"
    assert (await engine.schedules.get(bad)).last_error == message
    await worked(engine, agent)
    await defined(engine, task("gone"))
    clock.advance(HOUR)
    assert await fire(engine) == 2
    view = await engine.schedules.get(bad)
    assert (view.fired, view.last_error) == (1, None)


async def test_unreadable_schedule_row_is_paused(
    engine: Engine, clock: ManualClock, raw: Raw
) -> None:
    await defined(engine)
    bad, good = await hourly(engine, "bad"), await hourly(engine, "good")
    await raw.execute(f"""update schedule set spec = '{{"type": 7}}' where id = '{bad}'""")
    clock.advance(HOUR)
    assert [await fire(engine), await fire(engine)] == [2, 0]
    assert await seen(engine, good) == ("ACTIVE", 1, 0, 0)
    assert await raw.value(f"select status from schedule where id = '{bad}'") == "PAUSED"
    assert [kind for kind, _ in await faults(raw)] == ["schedule_failed"]


async def test_immediate_schedule_starts_with_its_creation(
    engine: Engine, raw: Raw, agent: AgentProfile
) -> None:
    await defined(engine)
    created = await engine.schedules.create("now", "job", ScheduleSpec(type="immediate"), 7)
    assert (created.status, created.fired, created.next_at) == ("ENDED", 1, None)
    assert await flows(raw, "id, key, input") == [
        (str(created.last_flow_id) if raw.path else created.last_flow_id, "job", "7")
    ]
    assert await trail(raw, created.id) == ["created", "fired", "ended"]
    assert await worked(engine, agent) == ["job"]
    assert await engine.schedules.next("now") == []


async def test_fixed_time_starts_once_however_late(
    engine: Engine, clock: ManualClock, raw: Raw
) -> None:
    await defined(engine)
    at = START + timedelta(hours=1)
    later = await engine.schedules.create("later", "job", ScheduleSpec(type="datetime", at=at))
    assert later.next_at == at
    assert await engine.schedules.next("later") == [at]
    past = ScheduleSpec(type="datetime-event", at=START - timedelta(days=1))
    assert (await engine.schedules.create("past", "job", past)).status == "ACTIVE"
    assert await fire(engine) == 1
    assert await seen(engine, (await engine.schedules.get("past")).id) == ("ENDED", 1, 0, 0)
    await engine.schedules.pause("later")
    clock.advance(hours=5)
    assert await fire(engine) == 0
    await engine.schedules.resume("later")
    assert await fire(engine) == 1
    assert await seen(engine, later.id) == ("ENDED", 1, 0, 0)
    # Only another time is another start.
    again = ScheduleSpec(type="datetime", at=at, catch_up="all")
    view = await engine.schedules.update("later", ScheduleChange(schedule=again))
    assert view.status == "ENDED"
    moved = ScheduleSpec(type="datetime", at=clock.now())
    view = await engine.schedules.update("later", ScheduleChange(schedule=moved))
    assert view.status == "ACTIVE"
    assert len(await flows(raw)) == 2


async def test_schedule_with_a_past_range_starts_nothing(
    engine: Engine, clock: ManualClock, raw: Raw
) -> None:
    await defined(engine)
    spec = ScheduleSpec(
        type="range", at=START + timedelta(hours=1), until=START + timedelta(hours=2)
    )
    created = await engine.schedules.create("s", "job", spec)
    clock.advance(hours=2, seconds=1)
    assert await fire(engine) == 1
    assert await seen(engine, created.id) == ("ENDED", 0, 1, 0)
    assert await flows(raw) == []
    assert await trail(raw, created.id) == ["created", "missed", "ended"]


async def test_schedule_ends_with_its_last_time(engine: Engine, clock: ManualClock) -> None:
    await defined(engine, group("nothing"))
    twice = ScheduleSpec(type="iso", expression="R2/2030-01-01T01:00Z/PT1H")
    created = await engine.schedules.create("s", "nothing", twice)
    for _ in range(4):
        clock.advance(HOUR)
        await fire(engine)
    assert await seen(engine, created.id) == ("ENDED", 2, 0, 0)
    assert await refusal(engine.schedules.resume("s")) == "out_of_turn"


async def test_due_times_during_a_pause_are_skipped(
    engine: Engine, clock: ManualClock, raw: Raw
) -> None:
    await defined(engine)
    created = await hourly(engine, catch_up="all", overlap="queue")
    await engine.schedules.pause(created)
    clock.advance(hours=5, minutes=30)
    assert await fire(engine) == 0
    await engine.schedules.resume(created)
    assert await fire(engine) == 0
    clock.advance(minutes=30)
    assert await fire(engine) == 1
    assert await seen(engine, created) == ("ACTIVE", 1, 0, 0)


async def test_jitter_delays_a_start_within_the_range(engine: Engine, clock: ManualClock) -> None:
    await defined(engine)
    clock.roll = 0.5
    created = await hourly(engine, jitter_s=600, until=START + timedelta(hours=1))
    at = START + timedelta(hours=1)
    fixed = ScheduleSpec(type="range", at=at, until=at + timedelta(minutes=2), jitter_s=600)
    await engine.schedules.create("fixed", "job", fixed)
    assert (await engine.schedules.get(created)).next_at == at + timedelta(minutes=5)
    assert (await engine.schedules.get("fixed")).next_at == at
    clock.advance(hours=1)
    assert await fire(engine) == 1
    clock.advance(minutes=5)
    assert await fire(engine) == 1
    view = await engine.schedules.get(created)
    assert (view.status, view.fired, view.fired_at) == ("ENDED", 1, at)


async def test_apply_updates_schedules_by_name(
    engine: Engine, clock: ManualClock, raw: Raw
) -> None:
    await defined(engine)
    schedules = engine.schedules

    async def put(*expected: DesiredSchedule, dry: bool = False) -> dict[str, str]:
        return await engine.core.store.transact(lambda: schedules.put(expected, dry_run=dry))

    times = DesiredSchedule(name="times", target="job", schedule=cron(), input={"n": 1})
    now = DesiredSchedule(name="now", target="job", schedule=ScheduleSpec(type="immediate"))
    over = DesiredSchedule(
        name="over", target="job", schedule=cron(until=START - timedelta(days=1))
    )
    assert set((await put(times, now, over, dry=True)).values()) == {"created"}
    assert await raw.count("schedule") == 0
    assert set((await put(times, now, over)).values()) == {"created"}
    assert set((await put(times, now, over)).values()) == {"unchanged"}
    assert (await schedules.get("over")).status == "ENDED"
    assert await fire(engine) == 1
    assert (await schedules.get("now")).status == "ENDED"
    other = DesiredSchedule(name="times", target="job", schedule=cron("0 5 * * *"), input={"n": 1})
    assert await put(other, dry=True) == {"times": "updated"}
    assert await put(other) == {"times": "updated"}
    assert (await schedules.get("times")).next_at == START + timedelta(hours=5)
    assert len(await flows(raw)) == 1


async def test_schedules_of_all_workspaces_fire_separately(
    engine: Engine, clock: ManualClock, raw: Raw
) -> None:
    await defined(engine)
    created = await hourly(engine)
    other = Engine(engine.store, workspace=await raw.workspace(2), actor="other")
    await defined(other)
    hers = await hourly(other)
    for call in _calls(engine.schedules):
        assert await refusal(call(hers)) == "not_found"
    assert [schedule.id for schedule in (await engine.schedules.page()).schedules] == [created]
    clock.advance(HOUR)
    assert await fire(engine) == 2
    rows = {(str(row[0]), row[1]) for row in await flows(raw, "workspace, source")}
    assert rows == {
        (str(engine.workspace), f"schedule:{created}"),
        (str(other.workspace), f"schedule:{hers}"),
    }


def _calls(schedules: Schedules) -> list[Callable[[UUID], Awaitable[Any]]]:
    return [
        schedules.get,
        schedules.next,
        schedules.pause,
        schedules.resume,
        schedules.delete,
        lambda item: schedules.update(item, ScheduleChange(input=1)),
    ]


async def test_coordinator_fires_schedules(engine: Engine, clock: ManualClock, raw: Raw) -> None:
    await defined(engine)
    await hourly(engine)
    coordinator = Coordinator(engine, name="one")
    assert (await coordinator.cycle_once()).counts["fired"] == 0
    clock.advance(HOUR)
    assert (await coordinator.cycle_once()).counts["fired"] == 1
    assert await flows(raw) == [("job", "RUNNING")]


def test_rest_body_has_all_fields_of_a_schedule() -> None:
    assert ScheduleTimes.__struct_fields__ == ScheduleSpec.__struct_fields__
    assert {"next_at", "queued", "last_flow_id"} <= set(ScheduleView.__struct_fields__)


async def test_schedules_of_a_workspace_are_limited(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schedule_rows, "MAX_SCHEDULES", 2)
    await defined(engine)
    await hourly(engine, "a")
    await hourly(engine, "b")
    assert await refusal(engine.schedules.create("c", "job", cron())) == "too_large"
    immediate = ScheduleSpec(type="immediate")
    assert await refusal(engine.schedules.create("c", "job", immediate)) == "too_large"
