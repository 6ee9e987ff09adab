"""Draining workers: they claim nothing more, finish or release their tasks, and exit."""

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tests.proof.crash.inside import WAIT_S, working
from tests.proof.crash.system import System, frozen, system
from tests.services.postgres import PostgresServer
from tests.waiting import eventually

from tenuto import app
from tenuto.engine.engine import Engine
from tenuto.model.tasks.submission import NewTask
from tenuto.settings import Settings
from tenuto.worker.heartbeat import STUCK_EXIT
from tenuto.worker.worker import MAX_CLAIM, Worker


@pytest.fixture
async def world(database_url: str, tmp_path: Path) -> AsyncIterator[System]:
    async with system(database_url, tmp_path) as created:
        yield created


async def test_drained_worker_releases_its_tasks_and_exits_0(world: System) -> None:
    process = world.worker("--slots", "2")
    [task] = await world.submit(world.task("sleep 100"))
    await world.in_status([task], "RUNNING")
    [worker] = await eventually(world.engine.workers, WAIT_S)
    await world.engine.drain_worker(worker.id)
    assert await process.ended(WAIT_S + 20) == 0
    output = process.text()
    assert (
        0 < output.find("no more claims; 1 running tasks") < output.find("stopping 1 tasks within")
    )
    await world.in_status([task], "PENDING")
    assert await world.outcomes(task) == ["RELEASED"]
    assert (await world.engine.show(task)).tries == 0
    [worker] = await world.engine.workers()
    assert worker.status == "STOPPED"


async def test_terminated_agent_is_dropped_and_its_worker_continues(database_url: str) -> None:
    async def work(ctx: Any) -> Any:
        return ctx.input

    async with working(database_url, {None: work}) as inside:
        first = await inside.submit(input=1)
        await inside.ended(first)
        [worker] = await eventually(inside.engine.workers)
        agents = await inside.engine.query.agents(inside.engine.workspace)
        own = agents[worker.agents[0]]
        await inside.engine.terminate_agent(own.id)
        second = await inside.submit(input=2)
        # Another look of the worker's that could have taken it has passed.
        before = (await inside.engine.workers())[0].last_heartbeat

        async def beaten() -> bool:
            return (await inside.engine.workers())[0].last_heartbeat > before

        await eventually(beaten, WAIT_S, 0.05)
        assert (await inside.engine.show(second)).status == "PENDING"


async def test_worker_drained_while_starting_many_tasks_releases_the_rest(
    sqlite_url: str,
) -> None:
    stop = asyncio.Event()
    begun: list[Any] = []

    async def work(ctx: Any) -> None:
        begun.append(ctx.input)
        stop.set()

    settings = Settings(database=sqlite_url, slots=MAX_CLAIM)
    async with app.connect(settings) as engine:
        worker = Worker(engine, settings)
        await worker.host_functions("agent", {None: work})
        await engine.submit_many([NewTask(title="one", input=n) for n in range(MAX_CLAIM)])
        await worker.run(stop)
        counts = await engine.query.counts(engine.workspace)
    assert 0 < len(begun) < MAX_CLAIM
    assert (counts["COMPLETED"], counts["RUNNING"]) == (len(begun), 0)
    assert counts["PENDING"] == MAX_CLAIM - len(begun)


async def test_worker_drains_despite_a_handler_that_blocks_its_loop(world: System) -> None:
    worker = world.worker("--app", "tests.proof.crash.handlers", drain_s=0.1)
    tasks = []
    for handler in ("calm", "busy"):
        tasks += await world.submit(world.handled(handler))
        await world.logged(tasks[-1], "up")
    worker.signal(signal.SIGTERM)
    assert await worker.ended(20) == STUCK_EXIT, worker.text()
    for task in tasks:
        view = await world.engine.show(task)
        assert (view.status, view.tries, view.last_outcome) == ("PENDING", 0, "RELEASED")


async def test_worker_exits_despite_a_database_that_hangs(
    postgres_url: str, postgres: PostgresServer, tmp_path: Path
) -> None:
    async with system(postgres_url, tmp_path) as world:
        worker = world.worker(drain_s=0.1)
        await eventually(world.engine.workers, WAIT_S)
        with frozen(postgres.pid):
            worker.signal(signal.SIGTERM)
            assert await worker.ended(WAIT_S + 20) == 0, worker.text()


async def test_task_claimed_during_a_drain_is_released_first(
    sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim, asked, go_on, stop = Engine.claim, asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def slow(self: Engine, *args: Any) -> Any:
        asked.set()
        await go_on.wait()
        return await claim(self, *args)

    async def work(_ctx: Any) -> None:
        raise AssertionError("it is given back")

    monkeypatch.setattr(Engine, "claim", slow)
    settings = Settings(database=sqlite_url, drain_s=0)
    async with app.connect(settings) as engine:
        worker = Worker(engine, settings)
        await worker.host_functions("agent", {None: work})
        task = (await engine.submit(NewTask(title="one"))).id
        running = asyncio.create_task(worker.run(stop))
        await asked.wait()
        stop.set()
        done, _ = await asyncio.wait([running], timeout=0.2)
        assert not done
        go_on.set()
        await running
        view = await engine.show(task)
        assert (view.status, view.tries, view.last_outcome) == ("PENDING", 0, "RELEASED")
