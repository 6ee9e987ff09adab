"""After a suspension or clock change, live workers renew their leases before any expires."""

import os
import socket
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import timedelta
from typing import Any

import pytest
from tests.contract.conftest import (
    LEASE_S,
    START,
    WORKER,
    ManualClock,
    Raw,
    check_attempts,
    check_trail,
    failure,
    new,
    opened,
    profile,
    status,
)

from tenuto.coordinator.coordinator import Coordinator
from tenuto.coordinator.resume import MAX_GRACE_S
from tenuto.engine.engine import Engine
from tenuto.engine.tasks.report import WorkerInfo
from tenuto.model.tasks.task import Fence
from tenuto.settings import Settings
from tenuto.worker.process_pool import WorkerPool

SETTINGS = Settings(heartbeat_s=5, tick_s=2)
SLOW_HEARTBEAT_S = 12
SLOW_LEASE_S = 3 * SLOW_HEARTBEAT_S


class SetClock(ManualClock):
    """A clock that can be set: the time of day moves, and no time passes."""

    def __init__(self) -> None:
        super().__init__()
        self._set = timedelta()

    def elapsed(self) -> float:
        return (self._now - START - self._set).total_seconds()

    def set(self, seconds: float) -> None:
        self._set += timedelta(seconds=seconds)
        self._now += timedelta(seconds=seconds)


class Stage:
    """A coordinator that has worked for a while, on an engine whose clock a test moves."""

    def __init__(self, engine: Engine, clock: SetClock) -> None:
        self.engine = engine
        self.clock = clock
        self.coordinator = Coordinator(engine, SETTINGS, {}, "one")

    async def held(self, lease_s: int = LEASE_S, **options: Any) -> Fence:
        await self.engine.submit(new(**options))
        [work] = await self.engine.claim(profile(), WORKER, 1, lease_s)
        return work.fence

    async def cycle(self, seconds: float) -> Counter[str]:
        """Cycle at the usual pace for so long; what was expired and promoted in all."""
        total = Counter[str]()
        for _ in range(int(seconds // SETTINGS.tick_s)):
            counts = (await self.coordinator.cycle_once()).counts
            total.update(counts)
            self.clock.advance(SETTINGS.tick_s)
        return total

    async def status(self, fence: Fence) -> str:
        return await status(self.engine, fence.task)


@pytest.fixture
async def stage(database_url: str) -> AsyncIterator[Stage]:
    clock, raw = SetClock(), Raw(database_url)
    async with opened(database_url, clock) as store:
        created = Stage(Engine(store, actor="test"), clock)
        await created.cycle(20)
        yield created
        assert await created.engine.maintenance.audit() == []
        await check_trail(raw)
        await check_attempts(raw)


Make = Callable[[Stage], Awaitable[Fence]]


async def overdue(stage: Stage) -> Fence:
    return await stage.held(timeout_s=4)


async def hung(stage: Stage) -> Fence:
    fence = await stage.held(estimate_minutes=1)
    stage.clock.advance(minutes=31)
    await stage.engine.maintenance.promote_once("promoter")
    for _ in range(2):
        assert (await stage.engine.heartbeat([fence])).held[fence.task].hung
        await stage.cycle(LEASE_S / 2)
    return fence


async def cancelled(stage: Stage) -> Fence:
    fence = await stage.held()
    await stage.engine.cancel(fence.task)
    return fence


@pytest.mark.parametrize("make", [overdue, hung])
async def test_result_finished_before_a_suspension_is_stored_after_it(
    stage: Stage, make: Make
) -> None:
    fence = await make(stage)
    stage.clock.advance(minutes=20)
    await stage.cycle(SETTINGS.heartbeat_s)
    await stage.engine.complete(fence, "in time")
    assert await stage.status(fence) == "COMPLETED"


async def test_cancel_confirmed_after_a_suspension_is_stored(stage: Stage) -> None:
    fence = await cancelled(stage)
    stage.clock.advance(minutes=20)
    await stage.cycle(SETTINGS.heartbeat_s)
    assert await stage.status(fence) == "RUNNING"
    await stage.engine.confirm_cancel(fence, {"state": "killed"})
    [attempt] = await stage.engine.attempts(fence.task)
    assert attempt.receipt == {"state": "killed"}


@pytest.mark.parametrize("make", [overdue, hung, cancelled])
async def test_worker_without_heartbeats_after_a_suspension_loses_its_leases(
    stage: Stage, make: Make
) -> None:
    fence = await make(stage)
    stage.clock.advance(minutes=20)
    await stage.cycle(LEASE_S)
    assert len(await stage.engine.attempts(fence.task)) == 1


async def test_suspension_makes_no_agent_stale(stage: Stage) -> None:
    await stage.engine.register_agent(profile())
    heartbeat = WorkerInfo(WORKER, "host", 1, ["agent"], 1)
    await stage.engine.record_worker(heartbeat)
    await stage.cycle(4)
    stage.clock.advance(hours=1)
    assert (await stage.coordinator.cycle_once()).counts["agents"] == 0
    await stage.engine.record_worker(heartbeat)
    for _ in range(10):
        stage.clock.advance(SETTINGS.tick_s)
        assert (await stage.coordinator.cycle_once()).counts["agents"] == 0


async def test_timers_without_a_lease_do_not_wait_after_a_suspension(stage: Stage) -> None:
    fence = await stage.held()
    await stage.engine.fail(fence, failure())
    stage.clock.advance(hours=1)
    assert (await stage.coordinator.cycle_once()).counts["promoted"] == 1
    assert await stage.status(fence) == "PENDING"


async def test_clock_set_forward_expires_no_lease(stage: Stage) -> None:
    fence = await stage.held(timeout_s=4)
    stage.clock.set(3600)
    assert (await stage.cycle(SETTINGS.heartbeat_s))["expired"] == 0
    await stage.engine.heartbeat([fence])
    assert await stage.status(fence) == "RUNNING"


async def test_clock_set_forward_does_not_exempt_a_dead_owner(stage: Stage) -> None:
    await stage.held()
    stage.clock.set(3600)
    assert (await stage.cycle(LEASE_S))["expired"] == 1


async def test_clock_set_back_and_corrected_expires_no_lease(stage: Stage) -> None:
    fence = await stage.held()
    stage.clock.set(-600)
    await stage.cycle(SETTINGS.heartbeat_s)
    await stage.engine.heartbeat([fence])
    await stage.cycle(SETTINGS.heartbeat_s)
    stage.clock.set(600)
    assert (await stage.cycle(SETTINGS.heartbeat_s))["expired"] == 0
    assert await stage.status(fence) == "RUNNING"


@pytest.mark.parametrize("pause_s", [SLOW_LEASE_S - 1, SLOW_LEASE_S + 2, 3600])
async def test_worker_with_slow_heartbeats_is_waited_for(stage: Stage, pause_s: float) -> None:
    fence = await stage.held(SLOW_LEASE_S, timeout_s=4)
    stage.clock.advance(pause_s)
    if pause_s > SLOW_LEASE_S:
        done = await stage.cycle(SLOW_HEARTBEAT_S + SETTINGS.tick_s)
        assert (done["expired"], done["promoted"]) == (0, 0)
    else:
        assert (await stage.cycle(SLOW_HEARTBEAT_S))["expired"] == 0
    await stage.engine.complete(fence, "in time")
    assert await stage.status(fence) == "COMPLETED"


async def test_heartbeat_just_before_its_deadline_is_enough(stage: Stage) -> None:
    """Least is left of a lease when the pause begins as its owner is about to beat."""
    fence = await stage.held(SLOW_LEASE_S)
    await stage.cycle(SLOW_HEARTBEAT_S)
    stage.clock.advance(hours=1)
    assert (await stage.cycle(SLOW_HEARTBEAT_S))["expired"] == 0
    await stage.engine.heartbeat([fence], SLOW_LEASE_S)
    assert await stage.status(fence) == "RUNNING"
    assert (await stage.cycle(SLOW_LEASE_S))["expired"] == 0


async def test_second_suspension_keeps_the_exemptions_of_the_first(stage: Stage) -> None:
    await stage.held(SLOW_LEASE_S)
    for _ in range(3):
        stage.clock.advance(hours=1)
        assert (await stage.cycle(4 * SETTINGS.tick_s))["expired"] == 0
    assert (await stage.cycle(SLOW_LEASE_S))["expired"] == 1


async def test_worker_dead_after_a_long_suspension_is_not_waited_for_as_long(stage: Stage) -> None:
    fence = await stage.held()
    stage.clock.advance(hours=8)
    await stage.cycle(SETTINGS.heartbeat_s)
    await stage.engine.heartbeat([fence])
    assert (await stage.cycle(LEASE_S))["expired"] == 0
    assert (await stage.cycle(MAX_GRACE_S))["expired"] == 1


async def test_stop_between_leading_and_reaping_is_a_suspension(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    fence = await stage.held(timeout_s=4)

    async def stopped(*_: object) -> None:
        stage.clock.advance(hours=1)

    monkeypatch.setattr(stage.coordinator, "_record_lost_leadership", stopped)
    counts = (await stage.coordinator.cycle_once()).counts
    assert (counts["expired"], counts["promoted"]) == (0, 0)
    assert await stage.status(fence) == "RUNNING"


@pytest.mark.parametrize("duty", ["expire_once", "promote_once"])
async def test_stop_right_before_a_statement_expires_no_lease(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, duty: str
) -> None:
    fence = await stage.held(timeout_s=4)
    once = getattr(stage.engine.maintenance, duty)

    async def stopped(*args: Any, **kwargs: Any) -> int:
        stage.clock.advance(hours=1)
        done: int = await once(*args, **kwargs)
        return done

    monkeypatch.setattr(stage.engine.maintenance, duty, stopped)
    counts = (await stage.coordinator.cycle_once()).counts
    assert (counts["expired"], counts["promoted"]) == (0, 0)
    assert await stage.status(fence) == "RUNNING"


async def test_stop_between_two_batches_is_a_suspension(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("engine.tasks.maintenance", "coordinator.duties"):
        monkeypatch.setattr(f"tenuto.{name}.BATCH", 1)
    await stage.held()
    await stage.cycle(LEASE_S)
    living = await stage.held()
    answered = stage.coordinator._suspensions.record_answer
    stops: list[int] = []
    once = stage.engine.maintenance.expire_once

    async def first(*args: Any, **kwargs: Any) -> int:
        done = await once(*args, **kwargs)
        stops.append(done)
        return done

    def stopped() -> None:
        answered()
        if stops == [1]:
            stops.append(0)
            stage.clock.advance(hours=1)

    monkeypatch.setattr(stage.engine.maintenance, "expire_once", first)
    monkeypatch.setattr(stage.coordinator._suspensions, "record_answer", stopped)
    stage.clock.advance(1)
    assert (await stage.coordinator.cycle_once()).counts["expired"] == 1
    assert stops == [1, 0]
    assert await stage.status(living) == "RUNNING"


async def test_only_tasks_of_a_crashed_worker_are_queued_again(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("engine.tasks.maintenance", "worker.process_pool"):
        monkeypatch.setattr(f"tenuto.{name}.BATCH", 4)
    engine, host, pid = stage.engine, socket.gethostname(), os.getpid()
    living = await stage.held(timeout_s=4)
    stage.clock.advance(hours=1)
    dead = f"{host}:{pid}:dead"
    await engine.submit_many([new() for _ in range(10)])
    assert len(await engine.claim(profile(), dead, 10)) == 10
    await engine.record_worker(WorkerInfo(dead, host, pid, ["agent"], 10))
    await WorkerPool(engine, SETTINGS, 1)._expire_leases_of(pid)
    assert (await engine.query.counts(engine.workspace))["PENDING"] == 10
    assert await stage.status(living) == "RUNNING"
