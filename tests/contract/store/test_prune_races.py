"""Pruning on PostgreSQL beside a write that locked the row first: the write stays."""

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import Any

import asyncpg
from tests.contract.conftest import ManualClock, Raw, claim_one, failure, new, running, status
from tests.waiting import eventually

from tenuto.engine.engine import Engine


@asynccontextmanager
async def in_line(url: str, rows: str, *calls: Awaitable[Any]) -> AsyncIterator[None]:
    """Calls that wait for rows, one behind the other; with the block they go on."""
    holder, raw = await asyncpg.connect(url), Raw(url)
    started: list[asyncio.Future[Any]] = []
    try:
        async with holder.transaction():
            await holder.execute(f"{rows} for update")
            for call in calls:
                started.append(asyncio.ensure_future(call))
                await eventually(lambda: waiting(raw, len(started)))
        await asyncio.gather(*started)
        yield
    finally:
        await holder.close()


async def waiting(raw: Raw, n: int) -> bool:
    """True if at least that many statements wait for a lock."""
    result = await raw.value(
        "select count(*) from pg_stat_activity"
        " where datname = current_database() and wait_event_type = 'Lock'"
    )
    return bool(result == n)


def aged(engine: Engine, **parts: float) -> None:
    assert isinstance(engine.clock, ManualClock)
    engine.clock.advance(**parts)


async def test_lane_used_during_the_prune_stays(postgres_engine: Engine, postgres_url: str) -> None:
    await postgres_engine.complete(await running(postgres_engine))
    aged(postgres_engine, days=2)
    again = Engine(postgres_engine.store, actor="submitter").submit(new())
    pruned = postgres_engine.maintenance.prune_once()
    async with in_line(postgres_url, "select 1 from lane", again, pruned):
        assert await claim_one(postgres_engine)


async def test_task_retried_during_the_prune_keeps_its_payload(
    postgres_engine: Engine, postgres_url: str
) -> None:
    fence = await running(postgres_engine, prompt="important")
    await postgres_engine.fail(fence, failure(retryable=False))
    aged(postgres_engine, days=8)
    await postgres_engine.maintenance.archive_once("archiver")
    aged(postgres_engine, days=23)
    again, pruned = postgres_engine.retry(fence.task), postgres_engine.maintenance.prune_once()
    async with in_line(postgres_url, "select 1 from task", again, pruned):
        assert await status(postgres_engine, fence.task) == "PENDING"
        assert (await postgres_engine.show(fence.task)).prompt == "important"
