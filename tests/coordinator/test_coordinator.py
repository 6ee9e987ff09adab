"""The coordinator: who leads, what it repairs, and what it leaves alone after a pause."""

import asyncio
import logging
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from uuid import UUID

import pytest
from tests.contract.conftest import ManualClock, Raw, check_attempts, check_trail, opened
from tests.proof.crash.inside import migrated
from tests.proof.crash.system import PATIENCE, SHORT, Process, System, system
from tests.services.postgres import PostgresServer
from tests.waiting import eventually

from tenuto import app
from tenuto.coordinator.coordinator import NAME, Coordinator
from tenuto.engine.engine import Engine
from tenuto.engine.upkeep import Leadership
from tenuto.model.errors import Unavailable
from tenuto.model.matching import AgentProfile
from tenuto.model.submission import NewTask
from tenuto.settings import Settings
from tenuto.store.protocol import Row

LEASE_S = 20
SETTINGS = Settings(heartbeat_s=5, tick_s=2)


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
        works = await self.engine.claim(agent, "host:1:worker", n, LEASE_S)
        assert len(works) == n
        return [work.fence.task for work in works]

    async def status(self, task: UUID) -> str:
        return (await self.engine.show(task)).status


@pytest.fixture
async def stage(database_url: str) -> AsyncIterator[Stage]:
    clock = ManualClock()
    raw = Raw(database_url)
    async with opened(database_url, clock) as store:
        made = Stage(Engine(store, actor="test"), clock, raw)
        yield made
        assert await made.engine.upkeep.audit() == []
        await check_trail(raw)
        await check_attempts(raw)


async def cycle(coordinator: Coordinator, stage: Stage, seconds: float) -> int:
    """Cycle at the usual pace for so long; answers what was expired."""
    done = 0
    for _ in range(int(seconds // coordinator.settings.tick_s)):
        done += (await coordinator.cycle_once()).expired
        stage.clock.advance(coordinator.settings.tick_s)
    return done


async def test_a_new_coordinator_lets_everyone_beat_before_it_reaps(stage: Stage) -> None:
    [task] = await stage.lease()
    stage.clock.advance(LEASE_S + 1)
    coordinator = stage.coordinator()
    assert (await coordinator.cycle_once()).expired == 0
    stage.clock.advance(SETTINGS.tick_s)
    assert (await coordinator.cycle_once()).expired == 0
    assert await cycle(coordinator, stage, 2 * SETTINGS.heartbeat_s) == 1
    assert await stage.status(task) == "PENDING"


async def test_after_a_pause_of_everything_nothing_runs_again(stage: Stage) -> None:
    coordinator = stage.coordinator()
    await cycle(coordinator, stage, 20)
    [task] = await stage.lease()
    stage.clock.advance(hours=1)
    assert (await coordinator.cycle_once()).expired == 0
    held = await stage.engine.show(task)
    assert held.status == "RUNNING"
    stage.clock.advance(SETTINGS.heartbeat_s - 1)
    assert (await coordinator.cycle_once()).expired == 0


async def test_without_a_pause_a_lost_lease_ends_at_the_next_tick(stage: Stage) -> None:
    coordinator = stage.coordinator()
    await cycle(coordinator, stage, 20)
    [task] = await stage.lease()
    assert await cycle(coordinator, stage, LEASE_S) == 0
    assert await cycle(coordinator, stage, 2 * SETTINGS.tick_s) == 1
    assert await stage.status(task) == "PENDING"


async def test_a_pause_in_the_middle_of_a_cycle_counts_too(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A database that stood still holds up the first statement of the cycle under way."""
    coordinator = stage.coordinator()
    await cycle(coordinator, stage, 20)
    [task] = await stage.lease()
    lead = stage.engine.upkeep.lead

    async def slow(name: str, holder: str, seconds: float) -> Leadership | None:
        stage.clock.advance(hours=1)
        return await lead(name, holder, seconds)

    monkeypatch.setattr(stage.engine.upkeep, "lead", slow)
    assert (await coordinator.cycle_once()).expired == 0
    assert await stage.status(task) == "RUNNING"


async def test_an_outage_is_a_pause(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    coordinator = stage.coordinator()
    await cycle(coordinator, stage, 20)
    await stage.lease()

    async def away(*_: object) -> None:
        raise Unavailable("away")

    with monkeypatch.context() as patch:
        patch.setattr(stage.engine.upkeep, "lead", away)
        for _ in range(LEASE_S):
            with pytest.raises(Unavailable):
                await coordinator.cycle_once()
            stage.clock.advance(SETTINGS.tick_s)
    assert (await coordinator.cycle_once()).expired == 0
    assert await cycle(coordinator, stage, 2 * SETTINGS.heartbeat_s) == 1


async def test_one_leads_and_the_other_takes_over_ready_to_reap(stage: Stage) -> None:
    one, two = stage.coordinator("one"), stage.coordinator("two")
    for _ in range(10):
        assert (await one.cycle_once()).leading
        assert not (await two.cycle_once()).leading
        stage.clock.advance(SETTINGS.tick_s)
    await stage.lease()
    # The first is gone; the second has been awake all the time.
    assert await cycle(two, stage, LEASE_S + 2 * SETTINGS.tick_s) == 1
    leader = await stage.engine.upkeep.leader(NAME)
    assert leader is not None
    assert (leader.holder, leader.epoch) == ("two", 2)
    assert not (await one.cycle_once()).leading


async def test_who_resigns_hands_over_at_once(stage: Stage) -> None:
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


async def test_coordinators_that_do_not_elect_do_no_harm(database_url: str, stage: Stage) -> None:
    settings = Settings(heartbeat_s=5, tick_s=2, leader=False)
    tasks = await stage.lease(100)

    @asynccontextmanager
    async def another(seed: int) -> AsyncIterator[Coordinator]:
        clock = ManualClock(seed)
        clock.advance(stage.clock.elapsed())
        async with opened(database_url, clock) as store:
            made = Coordinator(Engine(store), settings, {}, f"coordinator-{seed}")
            await made.cycle_once()
            clock.advance(LEASE_S + 1)
            made._last_good = clock.elapsed()
            yield made

    async with another(11) as one, another(12) as two, another(13) as three:
        counts = await asyncio.gather(*(each.cycle_once() for each in (one, two, three)))
        counts += await asyncio.gather(*(each.cycle_once() for each in (one, two, three)))
    assert all(each.leading for each in counts)
    assert sum(each.expired for each in counts) == sum(each.promoted for each in counts) == 100
    for task in tasks:
        assert [each.outcome for each in await stage.engine.attempts(task)] == ["STALLED"]
        assert await stage.status(task) == "PENDING"


async def test_a_corrupt_row_is_put_aside_and_the_cycle_goes_on(stage: Stage) -> None:
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


async def test_a_subscriber_that_fails_holds_up_nobody(stage: Stage) -> None:
    told: list[int] = []

    async def broken(events: Sequence[Row]) -> None:
        raise OSError("nobody there")

    async def whole(events: Sequence[Row]) -> None:
        told.extend(event["seq"] for event in events)

    [task] = await stage.lease()
    coordinator = Coordinator(stage.engine, SETTINGS, {"broken": broken, "whole": whole}, "one")
    for _ in range(20):
        await coordinator._guarded()
        stage.clock.advance(SETTINGS.tick_s)
    assert await stage.status(task) == "PENDING"
    assert told[:2] == [1, 2]


async def test_a_duty_that_fails_every_time_does_not_keep_the_reaper_waiting(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def away(*_: object, **__: object) -> None:
        raise Unavailable("no room left", "storage_full")

    monkeypatch.setattr(stage.engine.upkeep, "relay_once", away)
    monkeypatch.setattr(stage.engine.upkeep, "archive_once", away)
    [task] = await stage.lease()
    coordinator = stage.coordinator()
    for _ in range(20):
        await coordinator._guarded()
        stage.clock.advance(SETTINGS.tick_s)
    assert await stage.status(task) == "PENDING"


@pytest.fixture
async def world(database_url: str, tmp_path: Path) -> AsyncIterator[System]:
    async with system(database_url, tmp_path) as made:
        yield made


async def leader(world: System, *among: Process) -> Process | None:
    """The process that leads now."""
    found = await world.engine.upkeep.leader(NAME)
    if found is None or found.until < world.engine.clock.now():
        return None
    return next((each for each in among if f":{each.pid}:" in found.holder), None)


async def test_another_takes_over_when_the_leader_is_killed(world: System) -> None:
    both = world.coordinator(), world.coordinator()
    first = await eventually(lambda: leader(world, *both), PATIENCE)
    second = both[1] if first is both[0] else both[0]
    [task] = await world.submit(world.task("[ $TENUTO_ATTEMPT -gt 1 ] && exit 0; sleep 100"))
    victim = world.worker()
    await eventually(world.sessions, PATIENCE)
    first.signal(signal.SIGKILL)
    victim.signal(signal.SIGKILL)
    await eventually(lambda: leader(world, second), PATIENCE)
    world.worker()
    await world.check([task])


async def test_another_takes_over_when_the_leader_ends(world: System) -> None:
    first = world.coordinator(tick_s=30)
    await eventually(lambda: leader(world, first), PATIENCE)
    second = world.coordinator()
    await eventually(lambda: "coordinator" in second.text(), PATIENCE)
    first.signal(signal.SIGTERM)
    assert await first.ended() == 0
    await eventually(lambda: leader(world, second), 20)


async def test_cycles_go_on_after_an_outage(caplog: pytest.LogCaptureFixture) -> None:
    with PostgresServer(fast=True) as server:
        url = server.create_database()
        await migrated(url)
        settings = Settings(database=url, **SHORT)
        async with app.connect(settings) as engine:
            coordinator = Coordinator(engine, settings)
            stop = asyncio.Event()
            running = asyncio.create_task(coordinator.run(stop))
            await eventually(lambda: coordinator.cycles > 2)
            with caplog.at_level(logging.WARNING, "tenuto.coordinator"):
                await asyncio.to_thread(server.stop, "immediate")
                await eventually(lambda: caplog.text.count("cycle failed") > 2, PATIENCE)
                await asyncio.to_thread(server.start)
            before = coordinator.cycles
            await eventually(lambda: coordinator.cycles > before + 2, PATIENCE)
            stop.set()
            await running
            assert await engine.upkeep.audit() == []
