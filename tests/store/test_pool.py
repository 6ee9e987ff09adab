"""The connections of a store: how many, whose turn it is, and what becomes of a broken one."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from tenuto.store.pool import Pool


@pytest.fixture
async def pool(postgres_url: str) -> AsyncIterator[Pool]:
    pool = Pool(postgres_url, 2, {"application_name": "tenuto"})
    yield pool
    await pool.close()


async def backend(connection: object) -> int:
    return int(await connection.fetchval("select pg_backend_pid()"))  # type: ignore[attr-defined]


async def test_a_connection_is_used_again(pool: Pool) -> None:
    first = await pool.take(1)
    pid = await backend(first)
    pool.give(first, broken=False)
    second = await pool.take(1)
    assert await backend(second) == pid
    pool.give(second, broken=False)


async def test_no_more_than_its_size(pool: Pool) -> None:
    held = [await pool.take(1), await pool.take(1)]
    with pytest.raises(TimeoutError):
        await pool.take(0.05)
    for connection in held:
        pool.give(connection, broken=False)


async def test_the_first_who_waited_is_next(pool: Pool) -> None:
    held = [await pool.take(1), await pool.take(1)]
    order: list[str] = []

    async def wait(name: str) -> None:
        connection = await pool.take(5)
        order.append(name)
        await backend(connection)
        pool.give(connection, broken=False)

    waiting = []
    for name in ("first", "second", "third"):
        waiting.append(asyncio.create_task(wait(name)))
        await asyncio.sleep(0)
    pool.give(held[0], broken=False)
    await asyncio.gather(*waiting)
    assert order == ["first", "second", "third"]
    pool.give(held[1], broken=False)


async def test_a_turn_that_nobody_takes_goes_to_the_next(pool: Pool) -> None:
    held = [await pool.take(1), await pool.take(1)]
    gone = asyncio.create_task(pool.take(5))
    next_one = asyncio.create_task(pool.take(5))
    await asyncio.sleep(0)
    pool.give(held[0], broken=False)
    gone.cancel()
    taken = await next_one
    assert taken is held[0]
    for connection in (taken, held[1]):
        pool.give(connection, broken=False)


async def test_a_broken_connection_is_replaced(pool: Pool) -> None:
    first = await pool.take(1)
    pid = await backend(first)
    pool.give(first, broken=True)
    second = await pool.take(1)
    assert await backend(second) != pid
    pool.give(second, broken=False)


async def test_a_connection_that_ended_while_idle_is_not_handed_out(pool: Pool) -> None:
    first = await pool.take(1)
    pool.give(first, broken=False)
    await first.close()
    second = await pool.take(1)
    assert second is not first
    pool.give(second, broken=False)


async def test_who_cannot_connect_lets_the_next_one_try() -> None:
    pool = Pool("postgresql://nobody@127.0.0.1:1/nothing", 1, {})
    answers = await asyncio.gather(pool.take(5), pool.take(5), return_exceptions=True)
    assert [type(answer) for answer in answers] == [ConnectionRefusedError] * 2
