"""Periodic work continues after an internal error."""

import asyncio
import socket
from typing import Any
from uuid import UUID

import pytest
from tests.contract.conftest import LEASE_S, ManualClock, new, profile, status
from tests.proof.crash.inside import working
from tests.waiting import eventually

from tenuto.api.edge.event_hub import EventHub, StreamSubscriber
from tenuto.clock import Clock
from tenuto.engine.engine import Engine
from tenuto.engine.tasks.report import WorkerInfo
from tenuto.model.errors import Conflict
from tenuto.settings import Settings
from tenuto.store.sqlite.store import SqliteStore
from tenuto.worker.process_pool import WorkerPool


@pytest.mark.parametrize("fault", [RuntimeError("a fault"), Conflict("an answer")])
async def test_heartbeat_loop_continues_after_an_error(
    sqlite_url: str, monkeypatch: pytest.MonkeyPatch, fault: Exception
) -> None:
    heartbeats: list[str] = []
    heartbeat = Engine.worker_heartbeat

    async def faulty(self: Engine, *args: Any) -> Any:
        heartbeats.append("beat")
        if len(heartbeats) == 2:
            raise fault
        return await heartbeat(self, *args)

    monkeypatch.setattr(Engine, "worker_heartbeat", faulty)
    unexpected = not isinstance(fault, Conflict)
    async with working(sqlite_url, {}, own_loop=False, faulty=unexpected):
        await eventually(lambda: len(heartbeats) > 4)


async def test_failed_worker_start_does_not_stop_the_other_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = SqliteStore(":memory:", ManualClock())
    await store.migrate()
    children = WorkerPool(Engine(store), Settings(), 1)
    tried = asyncio.Event()

    async def poor(_self: WorkerPool) -> asyncio.subprocess.Process:
        tried.set()
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(WorkerPool, "_start", poor)
    stop = asyncio.Event()
    keeping = asyncio.create_task(children.run(stop))
    await tried.wait()
    stop.set()
    await keeping
    await store.close()


async def test_crashed_worker_expires_no_lease_of_another_host() -> None:
    store = SqliteStore(":memory:", ManualClock())
    await store.migrate()
    engine = Engine(store)
    tasks: list[UUID] = []
    for host in ("elsewhere", socket.gethostname()):
        await engine.record_worker(WorkerInfo(host, host, 4711, ["agent"], 1, "RUNNING"))
        await engine.submit(new())
        [work] = await engine.claim(profile(), host, 1, LEASE_S)
        tasks.append(work.fence.task)
    await WorkerPool(engine, Settings(), 1)._expire_leases_of(4711)
    assert [await status(engine, task) for task in tasks] == ["RUNNING", "PENDING"]
    await store.close()


async def test_streams_continue_after_an_error(
    sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with working(sqlite_url, {}, faulty=True) as inside:
        hub, stop = EventHub(inside.engine.core.store), asyncio.Event()
        reader = StreamSubscriber(inside.engine.workspace, None)
        await hub.subscribe(reader)
        looks = hub._read_new_events
        faults = [ValueError("a fault")]

        async def faulty() -> None:
            if faults:
                raise faults.pop()
            await looks()

        monkeypatch.setattr(hub, "_read_new_events", faulty)
        running = asyncio.create_task(hub.run(stop, Clock()))
        await inside.submit()
        await eventually(lambda: len(reader.events) > 0)
        stop.set()
        await running
