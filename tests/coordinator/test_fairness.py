"""One workspace's backlog does not delay another's."""

from collections.abc import Sequence
from functools import partialmethod
from uuid import UUID

import pytest
from tests.contract.conftest import LEASE_S, ManualClock, Raw, opened, profile
from tests.contract.schedules.helpers import cron, defined

from tenuto.coordinator import duties
from tenuto.coordinator.coordinator import Coordinator
from tenuto.engine.engine import DEFAULT_WORKSPACE, Engine
from tenuto.engine.schedules.firing import ScheduleRunner
from tenuto.engine.tasks.claim import ClaimedTask
from tenuto.engine.tasks.maintenance import BATCH, LeaseExemption, Sink, TaskMaintenance
from tenuto.model.tasks.submission import NewTask
from tenuto.settings import Settings
from tenuto.store.protocol import Row, Store

BACKLOG = 20_000
SETTINGS = Settings(heartbeat_s=5, tick_s=2)


async def due(engine: Engine, clock: ManualClock, n: int) -> UUID:
    """Creates that many tasks that are due in a second; returns the last one's id."""
    when = clock.now().replace(microsecond=0)
    last = None
    for start in range(0, n, 1000):
        new_tasks = [
            NewTask(title="later", run_at=when.replace(second=when.second + 1))
            for _ in range(min(1000, n - start))
        ]
        last = (await engine.submit_many(new_tasks))[-1].id
    assert last is not None
    return last


async def test_small_workspace_is_promoted_in_the_same_cycle(
    database_url: str, clock: ManualClock, raw: Raw
) -> None:
    async with opened(database_url, clock) as store:
        big, small = Engine(store), Engine(store, workspace=await raw.workspace(2))
        await due(big, clock, BACKLOG)
        clock.advance(2)
        own = await due(small, clock, 1)
        clock.advance(60)
        coordinator = Coordinator(big, SETTINGS, {}, "one")
        promoted = (await coordinator.cycle_once()).counts["promoted"]
        assert (await small.show(own)).status == "PENDING"
        assert BATCH < promoted < BACKLOG, "the cycle is bounded, and not one batch only"
        left = await raw.value("select count(*) from task where due_at is not null")
        assert left == BACKLOG + 1 - promoted


async def test_small_workspace_waits_without_rotation(
    database_url: str, clock: ManualClock, raw: Raw
) -> None:
    async with opened(database_url, clock) as store:
        big, small = Engine(store), Engine(store, workspace=await raw.workspace(2))
        await due(big, clock, BATCH + 1)
        clock.advance(2)
        own = await due(small, clock, 1)
        clock.advance(60)
        assert await big.maintenance.promote_once("promoter") == BATCH
        assert (await small.show(own)).status == "WAITING"
        assert await big.maintenance.promote_shared("promoter") == 2
        assert (await small.show(own)).status == "PENDING"
        assert await big.maintenance.promote_shared("promoter") == 0


async def test_promotion_gives_every_workspace_its_share(
    database_url: str, clock: ManualClock, raw: Raw, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tenuto.engine.tasks.maintenance.BATCH", 10)
    async with opened(database_url, clock) as store:
        numbers = (3, 4, 5)
        engines = [Engine(store, workspace=await raw.workspace(number)) for number in numbers]
        for engine, n in zip(engines, (30, 3, 2), strict=True):
            await due(engine, clock, n)
        clock.advance(60)
        rounds = []
        while await engines[0].maintenance.promote_shared("promoter"):
            rounds.append(
                [(await engine.query.counts(engine.workspace))["PENDING"] for engine in engines]
            )
        assert rounds[0] == [3, 3, 2]
        assert rounds[-1] == [30, 3, 2]


async def test_workspaces_beyond_one_batch_are_all_promoted(
    database_url: str, clock: ManualClock, raw: Raw, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tenuto.engine.tasks.maintenance.BATCH", 2)
    async with opened(database_url, clock) as store:
        engines = [Engine(store, workspace=await raw.workspace(number)) for number in range(2, 7)]
        for engine in engines:
            await due(engine, clock, 2)
        clock.advance(60)
        seen = []
        for _ in range(3):
            await engines[0].maintenance.promote_shared("promoter")
            seen.append([(await item.query.counts(item.workspace))["PENDING"] for item in engines])
        assert seen == [[1, 1, 0, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 1, 2]], (
            "the last has the batch alone"
        )


async def held(store: Store, workspace: UUID, n: int) -> UUID:
    """Creates that many leased tasks of a workspace; returns the last one's id."""
    engine = Engine(store, workspace=workspace)
    await engine.submit_many([NewTask(title="held") for _ in range(n)])
    agent = await engine.register_agent(profile(id=engine.clock.new_id(), workspace=workspace))
    claimed: list[ClaimedTask] = []
    while len(claimed) < n:
        claimed += await engine.claim(
            agent, f"host:{workspace}:w", min(200, n - len(claimed)), LEASE_S
        )
    return max(work.fence.task for work in claimed)


async def test_leases_expire_in_rotation_between_workspaces(
    database_url: str, clock: ManualClock, raw: Raw, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tenuto.engine.tasks.maintenance.BATCH", 10)
    async with opened(database_url, clock) as store:
        other = await raw.workspace(2)
        await held(store, DEFAULT_WORKSPACE, 50)
        clock.advance(0.01)
        own = await held(store, other, 2)
        clock.advance(LEASE_S + 1)
        big, small = Engine(store), Engine(store, workspace=other)
        assert await big.maintenance.expire_once("reaper") == 10
        assert (await small.show(own)).status == "RUNNING"
        assert await big.maintenance.expire_shared("reaper") == 10
        assert (await small.show(own)).status == "RETRY_WAIT"
        done = [await big.maintenance.expire_shared("reaper") for _ in range(5)]
        assert done == [10, 10, 10, 2, 0]
        assert await big.maintenance.audit() == []


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def raw(database_url: str) -> Raw:
    return Raw(database_url)


class Batches:
    """A coordinator whose batches are of two, and four of everything for it to do."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.engine = engine
        self.clock = engine.clock
        self.seen: list[Row] = []
        coordinator = Coordinator(engine, SETTINGS)
        self.context = coordinator.duty_context
        now = self.clock.now
        monkeypatch.setattr(
            self.context.suspensions, "lease_exemption", lambda: LeaseExemption(now(), now())
        )
        for name in ("BATCH", "AGENT_BATCH", "SCHEDULE_BATCH", "TRIGGER_BATCH"):
            monkeypatch.setattr(f"tenuto.coordinator.duties.{name}", 2)
        for name in ("tasks.maintenance.BATCH", "agents.registry.MAX_BATCH"):
            monkeypatch.setattr(f"tenuto.engine.{name}", 2)
        relay = TaskMaintenance.relay_once

        async def relay_once(of: TaskMaintenance, name: str, sink: Sink, _: int = 2) -> int:
            return await relay(of, name, sink, 2)

        monkeypatch.setattr(TaskMaintenance, "relay_once", relay_once)
        monkeypatch.setattr(ScheduleRunner, "fire_once", partialmethod(ScheduleRunner.fire_once, 2))

    async def expire(self) -> int:
        await held(self.engine.store, self.engine.workspace, 4)
        self._later(LEASE_S + 1)
        return await duties.expire(self.context)

    async def promote(self) -> int:
        assert isinstance(self.clock, ManualClock)
        await due(self.engine, self.clock, 4)
        self._later(60)
        return await duties.promote(self.context)

    async def look_at_agents(self) -> int:
        for n in range(4):
            await self.engine.register_agent(profile(id=self.clock.new_id(), name=f"a{n}"))
        self._later(3600)
        return await duties.mark_stale_agents(self.context)

    async def fire(self) -> int:
        await defined(self.engine)
        for n in range(4):
            await self.engine.schedules.create(f"s{n}", "job", cron())
        self._later(3600)
        return await duties.run_schedules(self.context)

    async def trigger(self) -> int:
        await defined(self.engine)
        created = await self.engine.triggers.create("t", "go", "job")
        await duties.run_triggers(self.context)
        for _ in range(4):
            await self.engine.publish("go")
        await duties.run_triggers(self.context)
        return (await self.engine.triggers.get(created.id)).fired

    async def relay(self) -> int:
        await self.engine.submit_many([NewTask(title="t") for _ in range(4)])

        async def sink(events: Sequence[Row]) -> None:
            self.seen += events

        assert await duties.relay_to(self.context, "inbox", sink) == len(self.seen)
        return len(self.seen)

    def _later(self, seconds: float) -> None:
        assert isinstance(self.clock, ManualClock)
        self.clock.advance(seconds)


DUTIES = ["expire", "promote", "look_at_agents", "fire", "trigger", "relay"]


@pytest.mark.parametrize("duty", DUTIES)
async def test_duty_with_exactly_a_batch_runs_again_in_the_same_cycle(
    database_url: str, clock: ManualClock, monkeypatch: pytest.MonkeyPatch, duty: str
) -> None:
    async with opened(database_url, clock) as store:
        batches = Batches(Engine(store), monkeypatch)
        assert await getattr(batches, duty)() == 4
