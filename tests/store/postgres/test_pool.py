"""The connection pool: size, order of waiters, and broken connections."""

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from datetime import timedelta

import asyncpg
import pytest
from tests.contract.conftest import START, new, profile, refusal
from tests.services.postgres import PostgresServer
from tests.waiting import eventually

from tenuto import app
from tenuto.engine.engine import Engine
from tenuto.model.errors import Unavailable
from tenuto.store.postgres import connector as connector_module
from tenuto.store.postgres import pool as pool_module
from tenuto.store.postgres import store as postgres_module
from tenuto.store.postgres.clock import DatabaseClock
from tenuto.store.postgres.connector import Connector
from tenuto.store.postgres.pool import Pool
from tenuto.store.postgres.sessions import DIRECT_SETTINGS, MAINTENANCE_S, statement_timeout
from tenuto.store.postgres.store import PostgresStore


@pytest.fixture
async def pool(postgres_url: str) -> AsyncIterator[Pool]:
    pool = Pool(Connector(postgres_url), 2, {"application_name": "tenuto"})
    yield pool
    await pool.close()


async def backend(connection: object) -> int:
    return int(await connection.fetchval("select pg_backend_pid()"))  # type: ignore[attr-defined]


async def test_connection_is_reused(pool: Pool) -> None:
    first = await pool.acquire(1)
    pid = await backend(first)
    pool.release(first, broken=False)
    second = await pool.acquire(1)
    assert await backend(second) == pid
    pool.release(second, broken=False)


async def test_pool_never_exceeds_its_size(pool: Pool) -> None:
    held = [await pool.acquire(1), await pool.acquire(1)]
    with pytest.raises(TimeoutError):
        await pool.acquire(0.05)
    for connection in held:
        pool.release(connection, broken=False)


async def test_pool_serves_waiters_in_order(pool: Pool) -> None:
    held = [await pool.acquire(1), await pool.acquire(1)]
    order: list[str] = []

    async def wait(name: str) -> None:
        connection = await pool.acquire(5)
        order.append(name)
        await backend(connection)
        pool.release(connection, broken=False)

    waiting = []
    for name in ("first", "second", "third"):
        waiting.append(asyncio.create_task(wait(name)))
        await asyncio.sleep(0)
    pool.release(held[0], broken=False)
    await asyncio.gather(*waiting)
    assert order == ["first", "second", "third"]
    pool.release(held[1], broken=False)


async def test_turn_of_a_cancelled_waiter_goes_to_the_next(pool: Pool) -> None:
    held = [await pool.acquire(1), await pool.acquire(1)]
    gone = asyncio.create_task(pool.acquire(5))
    next_one = asyncio.create_task(pool.acquire(5))
    await asyncio.sleep(0)
    pool.release(held[0], broken=False)
    gone.cancel()
    taken = await next_one
    assert taken is held[0]
    for connection in (taken, held[1]):
        pool.release(connection, broken=False)


async def test_broken_connection_is_replaced(pool: Pool) -> None:
    first = await pool.acquire(1)
    pid = await backend(first)
    pool.release(first, broken=True)
    second = await pool.acquire(1)
    assert await backend(second) != pid
    pool.release(second, broken=False)


@pytest.mark.parametrize("kind", ["read", "write"])
async def test_connection_with_an_open_transaction_is_replaced(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    store = app.create_store(postgres_url, many_tenants=True)
    await store.migrate()
    await store.open()
    engine = Engine(store)
    tenant = engine.core.store
    assert isinstance(tenant, PostgresStore)
    await engine.submit(new())
    with monkeypatch.context() as patch:
        patch.setattr(tenant, f"_{kind}_opening", "begin; select 1 / 0")  # as one that is cancelled
        for _ in range(8):
            with pytest.raises(asyncpg.DivisionByZeroError):
                await (engine.list() if kind == "read" else engine.submit(new()))
    for _ in range(8):
        await engine.submit(new())
        await engine.list()
    await store.close()


async def test_connection_closed_while_idle_is_not_lent(pool: Pool) -> None:
    first = await pool.acquire(1)
    pool.release(first, broken=False)
    await first.close()
    second = await pool.acquire(1)
    assert second is not first
    pool.release(second, broken=False)


async def test_failed_connect_lets_the_next_waiter_try() -> None:
    pool = Pool(Connector("postgresql://nobody@127.0.0.1:1/nothing"), 1, {})
    answers = await asyncio.gather(pool.acquire(5), pool.acquire(5), return_exceptions=True)
    assert [type(answer) for answer in answers] == [ConnectionRefusedError] * 2


@pytest.fixture
async def hurried(postgres_url: str) -> AsyncIterator[Pool]:
    """A pool whose server has little time to answer."""
    pool = Pool(Connector(postgres_url), 2, statement_timeout(0.6), timeout_s=0.6)
    yield pool
    await pool.close()


async def test_slow_statement_is_given_up(hurried: Pool) -> None:
    connection = await hurried.acquire(1)
    with pytest.raises(asyncpg.QueryCanceledError):
        await connection.execute("select pg_sleep(60)")
    hurried.release(connection, broken=True)


async def test_silent_server_is_not_waited_for(hurried: Pool) -> None:
    silent = await hurried.acquire(1)
    pid = await backend(silent)
    other = await hurried.acquire(1)
    hurried.release(other, broken=False)
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(asyncpg.ConnectionDoesNotExistError):
            await silent.execute("select 1")
    finally:
        os.kill(pid, signal.SIGCONT)
    hurried.release(silent, broken=True)
    again = await hurried.acquire(1)
    assert again is not other, "the others lead to the same silent server"
    hurried.release(again, broken=False)


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """A process that does nothing for a while."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


async def next_look(pool: Pool) -> None:
    """Return when the timer of the pool's watch was set again."""
    watch = pool._watchdog
    await eventually(lambda: pool._watchdog is not watch)


async def test_watch_continues_while_a_cut_connection_is_in_use(hurried: Pool) -> None:
    cut = await hurried.acquire(1)
    with stopped(await backend(cut)), pytest.raises(asyncpg.ConnectionDoesNotExistError):
        await cut.execute("select 1")
    for _ in range(2):
        await next_look(hurried)
    hurried.release(cut, broken=True)
    again = await hurried.acquire(1)
    with stopped(await backend(again)), pytest.raises(asyncpg.ConnectionDoesNotExistError):
        await asyncio.wait_for(again.execute("select 1"), 10)
    hurried.release(again, broken=True)


async def test_connections_are_retried_one_at_a_time_after_a_cut(hurried: Pool) -> None:
    cut = await hurried.acquire(1)
    with stopped(await backend(cut)), pytest.raises(asyncpg.ConnectionDoesNotExistError):
        await cut.execute("select 1")
    hurried.release(cut, broken=True)
    for broken in (True, False):
        tried = await hurried.acquire(1)
        with pytest.raises(TimeoutError):
            await hurried.acquire(0.05)
        hurried.release(tried, broken=broken)
    tried = await hurried.acquire(1)
    waiting = asyncio.create_task(hurried.acquire(5))
    await asyncio.sleep(0)
    hurried.mark_healthy()
    hurried.release(await asyncio.wait_for(waiting, 1), broken=False)
    hurried.release(tried, broken=False)


async def test_successful_use_wakes_as_many_waiters_as_fit(postgres_url: str) -> None:
    pool = Pool(Connector(postgres_url), 3, {})
    first = await pool.acquire(1)
    pool._is_suspect = True
    waiting = [asyncio.create_task(pool.acquire(5)) for _ in range(2)]
    await asyncio.sleep(0)
    pool.mark_healthy()
    others = await asyncio.wait_for(asyncio.gather(*waiting), 2)
    for connection in (first, *others):
        pool.release(connection, broken=False)
    await pool.close()


@asynccontextmanager
async def no_standby(server: PostgresServer) -> AsyncIterator[asyncpg.Connection]:
    """A time in which commits on the server wait for a standby; an operator's connection."""
    admin = await asyncpg.connect(server.url("postgres"))

    async def commit_waits() -> bool:
        probe = await asyncpg.connect(server.url("postgres"))
        pid = probe.get_server_pid()
        commit = asyncio.ensure_future(
            probe.execute("select pg_logical_emit_message(true, 'a', '')")
        )
        await asyncio.wait([commit], timeout=0.2)
        waits = not commit.done()
        await admin.fetchval("select pg_terminate_backend($1, 5000)", pid)
        await asyncio.gather(commit, return_exceptions=True)
        probe.terminate()
        return waits

    await admin.execute("alter system set synchronous_standby_names = 'nobody'")
    await admin.execute("select pg_reload_conf()")
    await eventually(commit_waits)  # each process of the server reads its settings for itself
    assert await sessions_without_standby(admin) == 0
    yield admin
    await admin.execute("alter system reset synchronous_standby_names")
    await admin.execute("select pg_reload_conf()")
    await admin.close()


async def sessions_without_standby(admin: asyncpg.Connection) -> int:
    """Returns how many sessions wait for a standby."""
    return int(
        await admin.fetchval("select count(*) from pg_stat_activity where wait_event = 'SyncRep'")
    )


@asynccontextmanager
async def hurried_engine(server: PostgresServer) -> AsyncIterator[Engine]:
    """An engine on a new schema; its limits are those at the time of the call."""
    store = app.create_store(server.url("postgres"))
    await store.migrate()
    await store.open()
    yield Engine(store)
    await store.close()


async def test_commits_waiting_for_a_standby_leave_one_session_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(postgres_module, "STATEMENT_S", 0.9)
    monkeypatch.setattr(postgres_module, "_ACQUIRE_S", 0.5)
    with PostgresServer() as server:
        async with hurried_engine(server) as engine:
            await engine.submit(new())
            async with no_standby(server) as admin:
                for sessions, callers in ((1, 1), (2, 6)):
                    # Each submit with a key is a transaction of its own.
                    calls = [
                        engine.submit(new(idempotency_key=f"k{callers}-{n}"))
                        for n in range(callers)
                    ]
                    answers = await asyncio.gather(*calls, return_exceptions=True)
                    assert {type(answer) for answer in answers} == {Unavailable}
                    assert await sessions_without_standby(admin) == sessions
            await engine.submit(new())


async def test_claim_whose_commit_waits_for_a_standby_is_found_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(postgres_module, "STATEMENT_S", 0.9)
    with PostgresServer() as server:
        async with hurried_engine(server) as engine:
            agent = await engine.register_agent(profile())
            tasks = [(await engine.submit(new(max_attempts=1))).id for _ in range(4)]
            async with no_standby(server) as admin:
                for _ in range(2):
                    assert await refusal(engine.claim(agent, "w", 2)) == "database_unreachable"
                assert await sessions_without_standby(admin) == 2
                assert {(await engine.show(task)).status for task in tasks} == {"PENDING"}
            claimed = [*await engine.claim(agent, "w", 2), *await engine.claim(agent, "w", 4)]
            assert [work.fence.task for work in claimed] == tasks
            for work in claimed:
                assert work.tries == 1
                await engine.complete(work.fence)


async def test_claims_continue_when_a_read_only_server_is_writable_again(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connector_module, "_ABANDON_INTERVAL_S", 0)
    store = app.create_store(postgres_url)
    assert isinstance(store, PostgresStore)
    await store.migrate()
    await store.open()
    engine = Engine(store)
    agent = await engine.register_agent(profile())
    task = (await engine.submit(new(max_attempts=1))).id
    admin = await asyncpg.connect(postgres_url)
    name = await admin.fetchval("select quote_ident(current_database())")
    await admin.execute(f"alter database {name} set default_transaction_read_only = on")
    store.connector.abandon_server()
    for _ in range(3):
        assert await refusal(engine.claim(agent, "w", 2)) == "database_switching"
    await admin.execute(f"alter database {name} reset default_transaction_read_only")
    await admin.close()
    store.connector.abandon_server()
    [work] = await engine.claim(agent, "w", 2)
    assert (work.fence.task, work.tries) == (task, 1)
    await store.close()


class Carried(DatabaseClock):
    """A database's clock that is carried forward by a time that tests set."""

    at = 0.0

    def elapsed(self) -> float:
        return self.at


def test_slow_clock_reading_is_used_without_a_better_one() -> None:
    clock = Carried()
    clock.store_reading(START, 0.0, 10.0)
    clock.at = 10.0
    assert clock.now() == START + timedelta(seconds=5)
    assert not clock.is_stale()
    clock.at = 30.0
    assert clock.is_stale()
    clock.store_reading(START, 29.5, 30.0)
    for before in (20.0, 29.0):
        clock.store_reading(START + timedelta(hours=1), before, 30.0)
    assert clock.now() == START + timedelta(seconds=0.25)
    clock.at = 60.0
    assert clock.now() == START + timedelta(seconds=30.25)


async def test_bulk_submit_after_a_cut_gets_its_second_connection(
    postgres_url: str,
) -> None:
    store = app.create_store(postgres_url)
    await store.migrate()
    await store.open()
    engine = Engine(store)
    pool = engine.core.store._connections.write  # type: ignore[attr-defined]
    pool._is_suspect = True
    new_tasks = [new(task_type=f"type-{number // 100}") for number in range(1000)]
    assert len(await asyncio.wait_for(engine.submit_many(new_tasks), 8)) == 1000
    assert not pool._is_suspect
    await store.close()


async def test_use_that_makes_progress_is_not_given_up(pool: Pool) -> None:
    connection = await pool.acquire(1)
    for _ in range(20):
        pool._check_progress()
        assert await backend(connection)
    pool.release(connection, broken=False)


async def test_connections_of_a_given_up_server_are_not_lent_again(
    pool: Pool,
) -> None:
    used, idle = await pool.acquire(1), await pool.acquire(1)
    pool.release(idle, broken=False)
    pool.abandon_server()
    assert idle.is_closed()
    assert await backend(used)
    pool.release(used, broken=False)
    assert used.is_closed()
    fresh = await pool.acquire(1)
    pool.release(fresh, broken=False)
    assert await pool.acquire(1) is fresh
    pool.release(fresh, broken=False)


async def test_call_on_a_connection_ended_by_the_server_reports_the_loss(
    postgres_url: str,
) -> None:
    store = app.create_store(postgres_url)
    await store.migrate()
    await store.open()
    engine = Engine(store)
    task = await engine.submit(new())
    admin = await asyncpg.connect(postgres_url)
    await admin.execute("begin; lock table task in access exclusive mode")
    called = asyncio.ensure_future(engine.cancel(task.id))

    async def ended() -> bool:
        return bool(
            await admin.fetchval(
                "select pg_terminate_backend(pid) from pg_stat_activity"
                " where datname = current_database() and wait_event_type = 'Lock'"
            )
        )

    await eventually(ended)
    assert await refusal(called) == "database_unreachable"
    await admin.close()
    assert (await engine.show(task.id)).status == "PENDING"
    await engine.cancel(task.id)
    await store.close()


async def test_repeatable_uses_are_cut_when_their_server_is_given_up(
    pool: Pool, postgres_url: str
) -> None:
    slow = Pool(
        pool._connector, 1, statement_timeout(MAINTENANCE_S), MAINTENANCE_S, repeatable=True
    )
    used = await slow.acquire(1)
    statement = asyncio.ensure_future(used.execute("select pg_sleep(60)"))
    await asyncio.sleep(0)
    pool.abandon_server()
    with pytest.raises(asyncpg.ConnectionDoesNotExistError):
        await asyncio.wait_for(statement, 5)
    slow.release(used, broken=True)
    again = await slow.acquire(1)
    assert await backend(again)
    slow.release(again, broken=False)
    await slow.close()


async def test_tcp_keepalive_detects_a_lost_machine(postgres: PostgresServer) -> None:
    pool = Pool(Connector(postgres.tcp_url("postgres")), 1, DIRECT_SETTINGS)
    connection = await pool.acquire(1)
    result = connection._transport.get_extra_info("socket")
    assert result.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    assert result.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 5
    assert result.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 10_000
    assert await connection.fetchval("select current_setting('tcp_user_timeout')") == "10000"
    pool.release(connection, broken=False)
    await pool.close()


async def test_use_marked_as_slow_has_a_longer_deadline(postgres_url: str) -> None:
    pool = Pool(Connector(postgres_url), 1, statement_timeout(MAINTENANCE_S), MAINTENANCE_S)
    connection = await pool.acquire(1)
    assert await connection.fetchval("select current_setting('statement_timeout')") == "8min"
    pool.release(connection, broken=False)
    await pool.close()


async def test_new_connection_has_a_short_deadline(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "_ROLE_CHECK_S", 0.2)
    created = []

    async def prove(connection: asyncpg.Connection) -> None:
        created.append(connection)
        await connection.execute("begin; select pg_sleep(60)")

    pool = Pool(Connector(postgres_url), 1, {}, check_role=prove)
    with pytest.raises(
        Unavailable, match=r"the role check of a new connection took longer than 0\.2 s"
    ):
        await asyncio.wait_for(pool.acquire(1), 10)
    assert [item.is_closed() for item in created] == [True]
    await pool.close()


class Gate:
    """A proof that new connections pass when it is opened."""

    def __init__(self) -> None:
        self.asked: list[asyncpg.Connection] = []
        self.open = asyncio.Event()

    async def prove(self, connection: asyncpg.Connection) -> None:
        self.asked.append(connection)
        await self.open.wait()


async def test_connecting_attempt_is_dropped_when_its_server_is_given_up(
    postgres_url: str,
) -> None:
    gate = Gate()
    pool = Pool(Connector(postgres_url), 1, {}, check_role=gate.prove)
    taking = asyncio.create_task(pool.acquire(1))
    await eventually(lambda: gate.asked)
    pool.abandon_server()
    gate.open.set()
    taken = await taking
    assert gate.asked[0].is_closed()
    assert taken is gate.asked[1]
    pool.release(taken, broken=False)
    assert pool.take_idle() is taken
    await pool.close()


async def test_closed_pool_keeps_no_connecting_attempt(postgres_url: str) -> None:
    gate = Gate()
    pool = Pool(Connector(postgres_url), 1, {}, check_role=gate.prove)
    taking = asyncio.create_task(pool.acquire(1))
    await eventually(lambda: gate.asked)
    await pool.close()
    gate.open.set()
    with pytest.raises(asyncpg.InterfaceError, match="closed"):
        await taking
    assert gate.asked[0].is_closed()
    assert pool._watchdog is None


async def test_connection_returned_to_a_closed_pool_is_closed(postgres_url: str) -> None:
    pool = Pool(Connector(postgres_url), 1, {})
    taken = await pool.acquire(1)
    await pool.close()
    pool.release(taken, broken=False)
    assert taken.is_closed()
    with pytest.raises(asyncpg.InterfaceError, match="closed"):
        await pool.acquire(1)
    assert pool._watchdog is None
