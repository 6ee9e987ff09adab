"""One SQLite file, several connections and processes."""

import subprocess
import sys

from tenuto.app import connect, create_store
from tenuto.engine.engine import Engine
from tenuto.model.agents.matching import AgentProfile
from tenuto.model.tasks.submission import NewTask
from tenuto.settings import Settings

OTHER = """
import asyncio, sys
from tenuto.app import connect
from tenuto.settings import Settings
async def main():
    async with connect(Settings(database=sys.argv[1])) as engine:
        print([task.title for task in (await engine.list()).tasks])
asyncio.run(main())
"""


def other_process(url: str) -> str:
    """Returns the rows that a process sees which opens and closes the database."""
    result = subprocess.run(
        [sys.executable, "-c", OTHER, url], capture_output=True, text=True, check=True, timeout=60
    )
    return result.stdout.strip()


async def test_two_stores_of_one_process_keep_their_locks(sqlite_url: str) -> None:
    settings = Settings(database=sqlite_url)
    async with connect(settings) as first, connect(settings) as second:
        await first.submit(NewTask(title="one"))
        await second.submit(NewTask(title="two"))
        assert other_process(sqlite_url) == "['two', 'one']"
        await first.submit(NewTask(title="three"))
        assert other_process(sqlite_url) == "['three', 'two', 'one']"


async def unconfirmed(engine: Engine, worker: str) -> AgentProfile:
    """An agent with room for one, whose only task was cancelled and never heard of again."""
    profile = AgentProfile(
        id=engine.clock.new_id(),
        workspace=engine.workspace,
        name="a",
        runtimes=("function",),
        max_concurrent=1,
    )
    agent = await engine.register_agent(profile)
    task = (await engine.submit(NewTask(title="lost"))).id
    assert len(await engine.claim(agent, worker, 1)) == 1
    await engine.cancel(task)
    assert await engine.maintenance.expire_worker(worker, "test") == 1
    return agent


async def test_sweep_restores_the_capacity(database_url: str) -> None:
    settings = Settings(database=database_url)
    store = create_store(database_url)
    await store.migrate()
    await store.close()
    async with connect(settings) as engine:
        agent = await unconfirmed(engine, "host:4242:x")
        await engine.submit(NewTask(title="next"))
        assert await engine.claim(agent, "w", 1) == []
        sweep = engine.maintenance.confirm_gone_on_host
        assert await sweep("host:1:y", "host", lambda _worker, _task: True) == 0
        assert await sweep("other:1:y", "other", lambda _worker, _task: False) == 0
        assert await sweep("host:1:y", "host", lambda _worker, _task: False) == 1
        assert len(await engine.claim(agent, "w", 1)) == 1
        assert await engine.maintenance.audit() == []
