"""The coordinator: leadership, repairs, and exemptions after a suspension."""

import asyncio
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from tests.contract.conftest import ManualClock, Raw, check_attempts, check_trail, opened
from tests.proof.crash.system import WAIT_S, Process, System, stopped, system
from tests.waiting import eventually
from tests.worker.test_worker_process import without_writers

from tenuto.coordinator.coordinator import NAME, Coordinator
from tenuto.coordinator.duties import DUTIES, Duty, DutyContext, Work
from tenuto.engine.engine import Engine
from tenuto.engine.operations.coordination import recent_logs
from tenuto.engine.tasks.maintenance import STANDBY_S, CycleReport, Leadership
from tenuto.metrics import PROCESS_METRICS
from tenuto.model.agents.matching import AgentProfile
from tenuto.model.errors import Invalid, Unavailable
from tenuto.model.tasks.submission import NewTask
from tenuto.settings import Settings
from tenuto.store.protocol import Row

LEASE_S = 20
SETTINGS = Settings(heartbeat_s=5, tick_s=2)
CONFLICTS = "tenuto_coordinator_conflicts_total"


class Stage:
    """An engine whose clock a test moves, and coordinators on it."""

    def __init__(self, engine: Engine, clock: ManualClock, raw: Raw) -> None:
        self.engine = engine
        self.clock = clock
        self.raw = raw

    def coordinator(self, name: str = "one", settings: Settings = SETTINGS) -> Coordinator:
        return Coordinator(self.engine, settings, {}, name)

    async def lease(self, n: int = 1) -> list[UUID]:
        """Tasks that somebody holds."""
        await self.engine.submit_many([NewTask(title=f"task {number}") for number in range(n)])
        profile = AgentProfile(
            id=self.engine.clock.new_id(),
            workspace=self.engine.workspace,
            name="agent",
            runtimes=("function",),
        )
        agent = await self.engine.register_agent(profile)
        claimed = await self.engine.claim(agent, "host:1:worker", n, LEASE_S)
        assert len(claimed) == n
        return [work.fence.task for work in claimed]

    async def status(self, task: UUID) -> str:
        return (await self.engine.show(task)).status


@pytest.fixture
async def stage(database_url: str) -> AsyncIterator[Stage]:
    clock = ManualClock()
    raw = Raw(database_url)
    async with opened(database_url, clock) as store:
        created = Stage(Engine(store, actor="test"), clock, raw)
        yield created
        assert await created.engine.maintenance.audit() == []
        await check_trail(raw)
        await check_attempts(raw)


async def test_leader_in_a_long_cleanup_keeps_leading(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator = stage.coordinator(settings=Settings(tick_s=0.05))
    upkeep = stage.engine.maintenance
    renewed = asyncio.Event()
    lead = upkeep.acquire_leadership

    async def count(*args: Any) -> Leadership | None:
        if coordinator._cycle.seconds.keys() >= {"relay"}:  # the cycle is at its last duty
            renewed.set()
            raise Unavailable("away")
        return await lead(*args)

    async def prune() -> int:
        await asyncio.wait_for(renewed.wait(), WAIT_S)
        return 7

    monkeypatch.setattr(upkeep, "acquire_leadership", count)
    monkeypatch.setattr(upkeep, "prune_once", prune)
    assert (await coordinator.cycle_once()).counts["pruned"] == 7


async def cycle(coordinator: Coordinator, stage: Stage, seconds: float) -> int:
    """Cycle at the usual pace for so long; answers what was expired."""
    done = 0
    for _ in range(int(seconds // coordinator.settings.tick_s)):
        done += (await coordinator.cycle_once()).counts["expired"]
        stage.clock.advance(coordinator.settings.tick_s)
    return done


async def test_new_coordinator_waits_for_heartbeats_before_it_reaps(stage: Stage) -> None:
    [task] = await stage.lease()
    stage.clock.advance(LEASE_S + 1)
    coordinator = stage.coordinator()
    assert (await coordinator.cycle_once()).counts["expired"] == 0
    stage.clock.advance(SETTINGS.tick_s)
    assert (await coordinator.cycle_once()).counts["expired"] == 0
    assert await cycle(coordinator, stage, 2 * SETTINGS.heartbeat_s) == 1
    assert await stage.status(task) == "PENDING"


async def test_suspension_of_everything_runs_no_task_again(stage: Stage) -> None:
    coordinator = stage.coordinator()
    await cycle(coordinator, stage, 20)
    [task] = await stage.lease()
    stage.clock.advance(hours=1)
    assert (await coordinator.cycle_once()).counts["expired"] == 0
    held = await stage.engine.show(task)
    assert held.status == "RUNNING"
    stage.clock.advance(SETTINGS.heartbeat_s - 1)
    assert (await coordinator.cycle_once()).counts["expired"] == 0


async def test_lost_lease_without_a_suspension_expires_at_the_next_cycle(stage: Stage) -> None:
    coordinator = stage.coordinator()
    await cycle(coordinator, stage, 20)
    [task] = await stage.lease()
    assert await cycle(coordinator, stage, LEASE_S) == 0
    assert await cycle(coordinator, stage, 2 * SETTINGS.tick_s) == 1
    assert await stage.status(task) == "PENDING"


async def test_suspension_during_a_cycle_is_detected(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A database that stood still holds up the first statement of the cycle under way."""
    coordinator = stage.coordinator()
    await cycle(coordinator, stage, 20)
    [task] = await stage.lease()
    lead = stage.engine.maintenance.acquire_leadership

    async def slow(
        name: str, holder: str, seconds: float, cycle: CycleReport | None = None
    ) -> Leadership | None:
        stage.clock.advance(hours=1)
        return await lead(name, holder, seconds, cycle)

    monkeypatch.setattr(stage.engine.maintenance, "acquire_leadership", slow)
    assert (await coordinator.cycle_once()).counts["expired"] == 0
    assert await stage.status(task) == "RUNNING"


async def test_outage_counts_as_a_suspension(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    coordinator = stage.coordinator()
    await cycle(coordinator, stage, 20)
    await stage.lease()

    async def away(*_: object) -> None:
        raise Unavailable("away")

    with monkeypatch.context() as patch:
        patch.setattr(stage.engine.maintenance, "acquire_leadership", away)
        for _ in range(LEASE_S):
            with pytest.raises(Unavailable):
                await coordinator.cycle_once()
            stage.clock.advance(SETTINGS.tick_s)
    assert (await coordinator.cycle_once()).counts["expired"] == 0
    assert await cycle(coordinator, stage, LEASE_S) == 1


async def test_standby_takes_over_ready_to_reap(stage: Stage) -> None:
    one, two = stage.coordinator("one"), stage.coordinator("two")
    for _ in range(10):
        assert (await one.cycle_once()).leading
        assert not (await two.cycle_once()).leading
        stage.clock.advance(SETTINGS.tick_s)
    await stage.lease()
    # The first is gone; the second has been awake all the time.
    assert await cycle(two, stage, LEASE_S + 2 * SETTINGS.tick_s) == 1
    leader = await stage.engine.maintenance.leader(NAME)
    assert leader is not None
    assert (leader.holder, leader.epoch) == ("two", 2)
    assert not (await one.cycle_once()).leading


async def test_resigned_leader_is_replaced_at_once(stage: Stage) -> None:
    settings = Settings(heartbeat_s=5, tick_s=600)
    one, two = stage.coordinator("one", settings), stage.coordinator("two", settings)
    stop = asyncio.Event()
    running = asyncio.create_task(one.run(stop))
    await eventually(lambda: one.cycles >= 1)
    assert not (await two.cycle_once()).leading
    stop.set()
    await running
    stage.clock.advance(0.001)
    assert (await two.cycle_once()).leading


async def test_coordinators_without_an_election_do_no_harm(database_url: str, stage: Stage) -> None:
    settings = Settings(heartbeat_s=5, tick_s=2, leader=False)
    tasks = await stage.lease(100)

    @asynccontextmanager
    async def another(seed: int) -> AsyncIterator[Coordinator]:
        clock = ManualClock(seed)
        clock.advance(stage.clock.elapsed())
        async with opened(database_url, clock) as store:
            created = Coordinator(Engine(store), settings, {}, f"coordinator-{seed}")
            await created.cycle_once()
            for _ in range(LEASE_S + 1):
                clock.advance(1)
                created._suspensions.record_answer()
            yield created

    async with another(11) as one, another(12) as two, another(13) as three:
        cycles = await asyncio.gather(*(item.cycle_once() for item in (one, two, three)))
        cycles += await asyncio.gather(*(item.cycle_once() for item in (one, two, three)))
    assert all(cycle.leading for cycle in cycles)
    for name in ("expired", "promoted"):
        assert sum(cycle.counts[name] for cycle in cycles) == 100
    for task in tasks:
        assert [attempt.outcome for attempt in await stage.engine.attempts(task)] == ["STALLED"]
        assert await stage.status(task) == "PENDING"


async def test_corrupt_row_is_quarantined_and_the_cycle_continues(stage: Stage) -> None:
    coordinator = stage.coordinator()
    await cycle(coordinator, stage, 20)
    bad, good = await stage.lease(2)
    await stage.raw.execute(f"update task set retry = '[1, 2]' where id = '{bad}'")
    assert await cycle(coordinator, stage, LEASE_S + 2 * SETTINGS.tick_s) == 1
    assert await stage.status(good) == "PENDING"
    view = await stage.engine.show(bad)
    assert (view.status, view.error_class) == ("FAILED", "corrupt")
    assert (await stage.engine.events(bad))[-1].level == "CRITICAL"
    await stage.lease(1)
    assert await cycle(coordinator, stage, LEASE_S + 2 * SETTINGS.tick_s) == 1


async def test_failing_subscriber_does_not_delay_other_duties(stage: Stage) -> None:
    reports: list[int] = []

    async def broken(events: Sequence[Row]) -> None:
        raise OSError("nobody there")

    async def whole(events: Sequence[Row]) -> None:
        reports.extend(event["seq"] for event in events)

    [task] = await stage.lease()
    coordinator = Coordinator(stage.engine, SETTINGS, {"broken": broken, "whole": whole}, "one")
    for _ in range(20):
        await coordinator._run_cycle_logged()
        stage.clock.advance(SETTINGS.tick_s)
    assert await stage.status(task) == "PENDING"
    assert reports[:2] == [1, 2]


async def test_duty_that_always_fails_does_not_delay_the_reaper(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def away(*_: object, **__: object) -> None:
        raise Unavailable("no room left", "storage_full")

    monkeypatch.setattr(stage.engine.maintenance, "relay_once", away)
    monkeypatch.setattr(stage.engine.maintenance, "archive_once", away)
    [task] = await stage.lease()
    coordinator = stage.coordinator()
    for _ in range(20):
        await coordinator._run_cycle_logged()
        stage.clock.advance(SETTINGS.tick_s)
    assert await stage.status(task) == "PENDING"


async def test_leader_suspended_past_its_lease_reports_the_conflict(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    one, two = stage.coordinator("one"), stage.coordinator("two")
    await one.cycle_once()
    await two.cycle_once()
    stage.clock.advance(SETTINGS.tick_s * 3 + 1)
    assert (await two.cycle_once()).leading
    before = PROCESS_METRICS.value(CONFLICTS)
    assert not (await one.cycle_once()).leading
    assert not (await one.cycle_once()).leading
    assert PROCESS_METRICS.value(CONFLICTS) == before + 1
    assert caplog.text.count("lost the lead to two, epoch 2") == 1
    [line] = await recent_logs(stage.engine, "WARN", 10)
    assert (line.event, line.level, line.actor) == ("coordinator.conflict", "WARN", "one")
    assert line.data == {"before": 1, "epoch": 2}
    # The other way round, when nobody leads any more as it wakes.
    stage.clock.advance(SETTINGS.tick_s * 3 + 1)
    assert (await one.cycle_once()).leading
    stage.clock.advance(SETTINGS.tick_s * 3 + 1)
    assert (await two.cycle_once()).leading
    assert (PROCESS_METRICS.value(CONFLICTS), two.epoch) == (before + 2, 4)
    assert "lost the lead to another, epoch 3" in caplog.text


async def test_sole_or_resigned_leader_reports_no_conflict(stage: Stage) -> None:
    before = PROCESS_METRICS.value(CONFLICTS)
    one = stage.coordinator("one")
    for _ in range(3):
        await one.cycle_once()
        stage.clock.advance(3600)
    assert (PROCESS_METRICS.value(CONFLICTS), one.epoch) == (before, 1)
    lines = await recent_logs(stage.engine, "INFO", 10)
    assert [line.event for line in lines] == ["coordinator.led"]


async def test_leader_status_shows_its_last_cycle(stage: Stage) -> None:
    coordinator = stage.coordinator()
    await cycle(coordinator, stage, 20)
    await stage.lease(3)
    for _ in range(int(LEASE_S / SETTINGS.tick_s) + 2):
        stage.clock.advance(SETTINGS.tick_s)
        await coordinator._run_cycle_logged()
        if coordinator._last_report and coordinator._last_report.counts["expired"]:
            break
    led = stage.clock.now()
    await coordinator._run_cycle_logged()
    leader = await stage.engine.maintenance.leader(NAME)
    assert leader is not None
    assert leader.cycle is not None
    assert (leader.cycle.counts["expired"], leader.cycle.counts["promoted"]) == (3, 3)
    assert {"flow", "expire", "promote", "fire", "relay"} <= set(leader.cycle.duties)
    assert (leader.cycle.error, leader.seen_at) == (None, led)
    assert leader.since is not None
    assert leader.since < led
    assert PROCESS_METRICS.value("tenuto_coordinator_duty_seconds_count", duty="expire") > 0


async def test_each_duty_runs_at_its_own_interval_and_is_counted(stage: Stage) -> None:
    runs: list[tuple[float, str, str]] = []

    def work(duty: str) -> Work:
        async def run(ctx: DutyContext) -> int:
            runs.append((stage.clock.elapsed() - started, ctx.name, duty))
            return 3

        return run

    one, two = stage.coordinator("one"), stage.coordinator("two")
    for coordinator in (one, two):
        coordinator.duties = (
            Duty("each", {"seen": work("each")}),
            Duty("slow", {"swept": work("slow"), "washed": work("slow")}, every_s=60),
            Duty("all", {"looked": work("all")}, every_s=30, leader_only=False),
        )
    started = stage.clock.elapsed()
    first = await one.cycle_once()
    assert first.counts == {"seen": 3, "swept": 3, "washed": 3, "looked": 3}
    assert first.seconds.keys() == {"each", "slow", "all"}
    assert (await two.cycle_once()).counts == {"seen": 0, "swept": 0, "washed": 0, "looked": 3}
    for _ in range(int(60 / SETTINGS.tick_s)):
        stage.clock.advance(SETTINGS.tick_s)
        await one.cycle_once()
    assert [at for at, _, duty in runs if duty == "slow"] == [0, 0, 60, 60]
    assert [at for at, name, duty in runs if (name, duty) == ("one", "all")] == [0, 30, 60]
    assert len([duty for _, _, duty in runs if duty == "each"]) == 1 + 60 / SETTINGS.tick_s


async def test_a_duty_that_failed_runs_again_in_the_next_cycle(stage: Stage) -> None:
    coordinator = stage.coordinator()
    outcomes: list[Exception | int] = [Unavailable("away"), 7]

    async def work(_: DutyContext) -> int:
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    coordinator.duties = (Duty("slow", {"swept": work}, every_s=60, is_long=True),)
    with pytest.raises(Unavailable):
        await coordinator.cycle_once()
    assert [(await coordinator.cycle_once()).counts["swept"] for _ in range(2)] == [7, 0]


def test_maintenance_runs_every_thirty_cycles_by_default() -> None:
    tidy = next(duty for duty in DUTIES if duty.name == "tidy")
    assert tidy.every_s / Settings().tick_s == 30


async def test_failed_cycle_is_reported_by_the_next(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator = stage.coordinator()

    async def broken(*_: object, **__: object) -> int:
        raise Invalid("a duty that does not work")

    with monkeypatch.context() as patch:
        patch.setattr(stage.engine.maintenance, "promote_once", broken)
        await coordinator._run_cycle_logged()
    await coordinator._run_cycle_logged()
    leader = await stage.engine.maintenance.leader(NAME)
    assert leader is not None
    assert leader.cycle is not None
    assert leader.cycle.error == "a duty that does not work"
    await coordinator._run_cycle_logged()
    leader = await stage.engine.maintenance.leader(NAME)
    assert leader is not None
    assert leader.cycle is not None
    assert leader.cycle.error is None


async def test_standby_is_listed_until_it_is_stale(stage: Stage) -> None:
    one, two, three = (stage.coordinator(name) for name in ("one", "two", "three"))
    upkeep = stage.engine.maintenance
    for item in (one, two, three):
        await item.cycle_once()
    assert await upkeep.standbys(NAME) == ["three", "two"]
    for _ in range(int(STANDBY_S / SETTINGS.tick_s)):
        stage.clock.advance(SETTINGS.tick_s)
        await one.cycle_once()
        await two.cycle_once()
    stage.clock.advance(1)
    assert await upkeep.standbys(NAME) == ["two"]
    await upkeep.resign(NAME, "one")
    stage.clock.advance(0.001)
    await two.cycle_once()
    assert await upkeep.standbys(NAME) == [], "who leads does not stand by"
    await upkeep.resign(NAME, "two")
    assert await stage.raw.count("leader") == 1 + 1, "the silent one is forgotten by the next"


@pytest.fixture
async def world(database_url: str, tmp_path: Path) -> AsyncIterator[System]:
    async with system(database_url, tmp_path) as created:
        yield created


async def leader(world: System, *among: Process) -> Process | None:
    """The process that leads now."""
    result = await world.engine.maintenance.leader(NAME)
    if result is None or result.until < world.engine.clock.now():
        return None
    return next((item for item in among if f":{item.pid}:" in result.holder), None)


async def leads(world: System) -> Leadership:
    result = await world.engine.maintenance.leader(NAME)
    assert result is not None
    return result


async def log_entries(world: System, kind: str) -> list[str]:
    """Returns the log entries of coordinators, of one kind."""
    lines = await recent_logs(world.engine, "INFO", 100)
    return [line.text for line in lines if line.event == kind]


async def test_standby_takes_over_when_the_leader_is_killed(world: System) -> None:
    both = world.coordinator(), world.coordinator()
    first = await eventually(lambda: leader(world, *both), WAIT_S)
    second = both[1] if first is both[0] else both[0]
    assert (await leads(world)).epoch == 1
    [task] = await world.submit(world.task("[ $TENUTO_ATTEMPT -gt 1 ] && exit 0; sleep 100"))
    worker = world.worker()
    await eventually(world.sessions, WAIT_S)
    first.signal(signal.SIGKILL)
    await first.ended()
    until = (await leads(world)).until
    worker.signal(signal.SIGKILL)
    await eventually(lambda: leader(world, second), WAIT_S)
    result = await leads(world)
    assert result.epoch == 2
    assert result.since is not None
    assert result.since >= until, "the lease of the dead ended first"
    assert len(await log_entries(world, "coordinator.led")) == 2
    world.worker()
    await world.check([task])


async def test_standby_takes_over_when_the_leader_exits(world: System) -> None:
    first = world.coordinator(tick_s=30)
    await eventually(lambda: leader(world, first), WAIT_S)
    second = world.coordinator()
    await eventually(lambda: "coordinator" in second.text(), WAIT_S)
    before = await leads(world)
    first.signal(signal.SIGTERM)
    assert await first.ended() == 0
    await eventually(lambda: leader(world, second), 20)
    after = await leads(world)
    assert after.epoch == 2
    assert after.since is not None
    assert after.since < before.until, "nobody waited for the end of the lease"


async def test_leader_stopped_past_its_lease_reports_it(world: System) -> None:
    both = world.coordinator(), world.coordinator()
    first = await eventually(lambda: leader(world, *both), WAIT_S)
    second = both[1] if first is both[0] else both[0]
    with stopped(first, free=without_writers(world)):
        await eventually(lambda: leader(world, second), WAIT_S)
        [task] = await world.submit(world.task("exit 0"))
        world.worker()
        await world.in_status([task], "COMPLETED")
    await eventually(lambda: "lost the lead to" in first.text(), WAIT_S)
    holder = (await leads(world)).holder
    assert f":{second.pid}:" in holder
    assert f"lost the lead to {holder}, epoch 2" in first.text()
    [note] = await eventually(lambda: log_entries(world, "coordinator.conflict"), WAIT_S)
    assert note == f"coordinator.conflict: lost the lead to {holder}, epoch 2"
    assert "lost the lead" not in second.text()
    await world.check([task])
