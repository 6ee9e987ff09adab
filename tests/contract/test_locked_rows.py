"""PostgreSQL: what passes over rows that another transaction holds, and answers at once."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from uuid import UUID

import asyncpg
import pytest
from tests.contract.conftest import WORKER, claim_all, claim_one, new, profile, status

from tenuto.engine.engine import Engine
from tenuto.model.turns import Concurrency

PATIENCE_S = 10


@asynccontextmanager
async def holding(url: str, task: UUID) -> AsyncIterator[None]:
    """Another transaction holds the task's row until the block ends."""
    holder = await asyncpg.connect(url)
    try:
        async with holder.transaction():
            await holder.execute("select 1 from task where id = $1 for update", task)
            yield
    finally:
        await holder.close()


@pytest.mark.parametrize("lanes", [1, 3])
async def test_a_claim_passes_over_held_rows(
    postgres_engine: Engine, postgres_url: str, lanes: int
) -> None:
    engine = postgres_engine
    tasks = [(await engine.submit(new(task_type=f"lane{n % lanes}"))).id for n in range(6)]
    async with holding(postgres_url, tasks[0]), asyncio.timeout(PATIENCE_S):
        works = await engine.claim(profile(), WORKER, 3)
        assert [work.fence.task for work in works] == tasks[1:4]
    assert {work.fence.task for work in await claim_all(engine)} == {tasks[0], *tasks[4:]}


async def test_a_place_is_given_past_a_held_task_and_to_it_a_little_later(
    postgres_engine: Engine, postgres_url: str
) -> None:
    """Whoever gives places waits for no task's row, or two would wait for each other."""
    engine = postgres_engine
    keyed = Concurrency(key="deploy", limit=1)
    _, second, third = [(await engine.submit(new(concurrency=keyed))).id for _ in range(3)]
    work = await claim_one(engine)
    async with holding(postgres_url, second), asyncio.timeout(PATIENCE_S):
        await engine.complete(work.fence)
        await engine.flows.work_once()
        assert await status(engine, second) == await status(engine, third) == "WAITING"
    assert isinstance(engine.clock, object)
    await engine.flows.work_once()
    assert await status(engine, second) == "PENDING"
    assert await status(engine, third) == "WAITING"
