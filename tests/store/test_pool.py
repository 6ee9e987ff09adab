"""The connections of a store: how many, whose turn it is, and what becomes of a broken one."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator

import asyncpg
import pytest

from tenuto.store import pool as pool_module
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


async def test_a_statement_that_takes_too_long_is_given_up(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "_ANSWER_S", 0.2)
    connection = await pool.take(1)
    with pytest.raises(asyncpg.QueryCanceledError):
        await connection.execute("select pg_sleep(60)")
    pool.give(connection, broken=True)


async def test_a_server_that_answers_no_more_is_not_waited_for(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent = await pool.take(1)
    pid = await backend(silent)
    pool.give(silent, broken=False)
    monkeypatch.setattr(pool_module, "_ANSWER_S", 0.2)
    other = await pool.take(1)  # the same one, and a look from now on every so often
    pool._look()
    assert other is silent
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(asyncpg.ConnectionDoesNotExistError):
            await other.execute("select 1")
    finally:
        os.kill(pid, signal.SIGCONT)
    pool.give(other, broken=True)


async def test_a_use_that_ends_between_two_looks_goes_on(pool: Pool) -> None:
    connection = await pool.take(1)
    pool._look()
    pool.give(connection, broken=False)
    again = await pool.take(1)
    assert again is connection
    pool._look()
    assert await backend(again)
    pool.give(again, broken=False)
