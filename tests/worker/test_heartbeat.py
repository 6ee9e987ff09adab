"""The heartbeat loop, and attempts that do not stop."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NoReturn

import pytest
from tests.contract.conftest import ManualClock, claim_one, new, opened

from tenuto.clock import Clock
from tenuto.engine.engine import Engine
from tenuto.engine.tasks.claim import ClaimedTask
from tenuto.engine.tasks.report import WorkerInfo
from tenuto.model.tasks.task import TIMEOUT_SLACK_S, Fence
from tenuto.settings import Settings
from tenuto.worker.attempt import AttemptRunner
from tenuto.worker.heartbeat import HeartbeatLoop
from tenuto.worker.leases import HeldLease, HeldLeases, StopReason, lease_seconds
from tenuto.worker.runtime.function import FunctionRuntime


class Ended(Exception):
    """The worker ended itself."""


def end() -> None:
    raise Ended


def nothing(*args: Any) -> None:
    del args


async def beating(heartbeat_loop: HeartbeatLoop, clock: ManualClock) -> NoReturn:
    while True:
        clock.advance(1)
        await heartbeat_loop.heartbeat_once()


@pytest.mark.parametrize(("reason", "limit_s"), [("timeout", TIMEOUT_SLACK_S), ("pause", 600)])
async def test_handler_that_does_not_stop_ends_its_worker_within_the_grace(
    sqlite_url: str, reason: StopReason, limit_s: float
) -> None:
    """After a timeout that is before the task is given to somebody else, however long the grace."""
    clock, leases, settings = ManualClock(), HeldLeases(), Settings(grace_s=590)
    async with opened(sqlite_url, clock) as store:
        engine = Engine(store)
        await engine.submit(new())
        runtime = FunctionRuntime({})
        attempt = AttemptRunner(
            engine, await claim_one(engine), runtime, leases, settings, nothing, nothing
        )
        leases.add(attempt._lease)
        attempt.stop(reason)
        caller = WorkerInfo(worker="w", host="h", pid=1, agents=[], slots=2, status="RUNNING")
        heartbeat_loop = HeartbeatLoop(engine, leases, caller, settings, nothing, end)
        since = clock.elapsed()
        with pytest.raises(Ended):
            await beating(heartbeat_loop, clock)
        assert limit_s - 10 < clock.elapsed() - since < limit_s


class World:
    """A worker with one attempt that stops for nobody, a real engine, and a clock to move."""

    def __init__(self, engine: Engine, work: ClaimedTask, **settings: Any) -> None:
        self.engine = engine
        self.settings = Settings(**settings)
        self.told: list[StopReason] = []
        self.leases = HeldLeases()
        self.held = HeldLease(work.fence, stop=lambda _: None)
        self.leases.add(self.held)
        caller = WorkerInfo(worker="w", host="h", pid=1, agents=[], slots=2, status="RUNNING")
        self.heart = HeartbeatLoop(engine, self.leases, caller, self.settings, self._notify, end)

    def _notify(self, held: HeldLease, reason: StopReason) -> None:
        assert held is self.held
        self.told.append(reason)

    @property
    def clock(self) -> ManualClock:
        clock = self.engine.clock
        assert isinstance(clock, ManualClock)
        return clock

    async def lose(self) -> None:
        """Let the lease end and be taken away."""
        self.clock.advance(3600)
        await self.engine.maintenance.expire_once("tester")


@asynccontextmanager
async def world(url: str, **settings: Any) -> AsyncIterator[World]:
    async with opened(url, ManualClock()) as store:
        engine = Engine(store)
        await engine.submit(new())
        yield World(engine, await claim_one(engine), **settings)


@pytest.mark.parametrize(
    ("lease_s", "heartbeat_s", "lasts"), [(20, 5, 20), (20, 8, 24), (5, 1.7, 6), (5, 1.6, 5)]
)
def test_lease_lasts_at_least_three_heartbeats(
    lease_s: int, heartbeat_s: float, lasts: int
) -> None:
    assert lease_seconds(Settings(lease_s=lease_s, heartbeat_s=heartbeat_s)) == lasts


@pytest.mark.parametrize(("stopping", "heartbeats"), [(False, 3), (True, 12)])
async def test_heartbeat_loop_polls_every_second_while_an_attempt_must_stop(
    sqlite_url: str, stopping: bool, heartbeats: int
) -> None:
    async with world(sqlite_url, heartbeat_s=5.0, lease_s=3600, grace_s=600) as here:
        stop = asyncio.Event()
        if stopping:
            here.heart._request_stop(here.held, "cancel")
        until = here.clock.elapsed() + 11
        seen = 0

        async def heartbeat_once() -> None:
            nonlocal seen
            seen += 1
            if here.clock.elapsed() >= until - (0 if stopping else 4):
                stop.set()

        here.heart.heartbeat_once = heartbeat_once  # type: ignore[method-assign]
        await here.heart.run(stop)
        assert seen == heartbeats


async def test_lost_lease_overrides_an_earlier_stop_request(sqlite_url: str) -> None:
    """There is nothing left to confirm: the end of the session is told at once."""
    async with world(sqlite_url, grace_s=600) as here:
        await here.engine.cancel(here.held.fence.task)
        await here.heart.heartbeat_once()
        await here.heart.heartbeat_once()
        assert here.told == ["cancel"]
        await here.lose()
        await here.heart.heartbeat_once()
        await here.heart.heartbeat_once()
        assert (here.told, here.held.reason) == (["cancel", "lost"], "lost")


async def test_handlers_get_some_polls_after_the_machine_slept(sqlite_url: str) -> None:
    async with world(sqlite_url, grace_s=3, heartbeat_s=5.0) as here:
        here.heart._request_stop(here.held, "timeout")
        here.clock.advance(3600)
        for _ in range(5):
            await here.heart.heartbeat_once()
        with pytest.raises(Ended):
            await here.heart.heartbeat_once()


async def test_second_stop_reason_gives_no_more_time(sqlite_url: str) -> None:
    async with world(sqlite_url, grace_s=10, lease_s=20) as here:
        here.heart._request_stop(here.held, "cancel")
        asked = here.held.stop_requested_at
        here.clock.advance(9)
        here.heart._request_stop(here.held, "lost")
        assert here.held.stop_requested_at == asked
        since = here.clock.elapsed()
        with pytest.raises(Ended):
            await beating(here.heart, here.clock)
        assert here.clock.elapsed() - since < 5 + 12


def test_end_of_an_older_attempt_keeps_the_lease_of_the_newer() -> None:
    leases, reported = HeldLeases(), list[StopReason]()
    task = Clock().new_id()
    older = HeldLease(Fence(task, 1, "a"), stop=reported.append)
    newer = HeldLease(Fence(task, 2, "b"), stop=reported.append)
    leases.add(older)
    leases.add(newer)
    assert reported == ["lost"]
    leases.remove(older)
    assert leases.all() == [newer]
    leases.remove(newer)
    assert not leases.is_running(task)
