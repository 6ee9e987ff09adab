"""Agents, mailboxes and drained remote workers, by the library and by the command line."""

import asyncio
from typing import Any

from tests.waiting import eventually

from tenuto import AsyncClient
from tenuto.client.remote.engine import RemoteEngine
from tenuto.engine.engine import Engine
from tenuto.settings import Settings
from tenuto.worker.worker import Worker

WAIT_S = 20.0


async def test_mailbox_is_equal_direct_and_remote(far: RemoteEngine, near: Engine) -> None:
    for engine in (far, near):
        async with AsyncClient(engine=engine) as client:
            name = f"agent-{type(engine).__name__}"
            created = await client.agents.put(name, choose_rules=["all"])
            assert (created.managed, created.choose_rules) == (True, ("superset",))
            await client.agents.message(name, "one")
            await client.agents.message(name, {"x": 1}, kind="config", coalescable=True)
            await client.agents.message(name, {"x": 2}, kind="config", coalescable=True)
            waiting = (await client.agents.messages(name)).messages
            assert [item.body for item in waiting] == ["one", {"x": 2}]
            taken = await client.agents.dequeue(name, 1)
            again = await client.agents.dequeue(name, 1, taken.batch_id)
            assert again == taken
            assert [message.body for message in taken.messages] == ["one"]
            result = await client.agents.explain(name)
            assert (result.name, result.gates) == (name, [])
            assert (await client.agents.health(name)).history == []
            assert (await client.agents.terminate(name)).status == "TERMINATED"


async def test_remote_worker_is_drained(far: RemoteEngine, settings: Settings) -> None:
    async def work(ctx: Any) -> Any:
        return ctx.input

    quick = {"heartbeat_s": 0.1, "drain_s": 1.0, "grace_s": 0.5}
    short = Settings(**{name: getattr(settings, name) for name in ("database", "data")} | quick)
    worker = Worker(far, short)
    await worker.host_functions("remote", {None: work})
    running = asyncio.create_task(worker.run(asyncio.Event()))
    await eventually(far.workers, WAIT_S)
    await far.drain_worker(worker.id)
    async with asyncio.timeout(WAIT_S):
        await running
    [existing] = await far.workers()
    assert (existing.status, existing.drain_requested_at is not None) == ("STOPPED", True)
