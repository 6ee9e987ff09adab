"""SQLite writes on the loop if no other process writes, and never blocks it."""

import asyncio
import fcntl
import sqlite3
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.contract.conftest import ManualClock
from tests.waiting import eventually

from tenuto.broker.local import LocalWakeups, _socket_folder
from tenuto.clock import Clock
from tenuto.model.errors import Unavailable
from tenuto.store.protocol import Script, Statement
from tenuto.store.sqlite.store import SqliteStore

HERE = threading.main_thread().name


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
async def store(tmp_path: Path, clock: ManualClock) -> AsyncIterator[SqliteStore]:
    created = SqliteStore(str(tmp_path / "t.db"), clock)
    await created.migrate()
    yield created
    await created.close()


def where(clock: ManualClock | None = None, seconds: float = 0) -> Script[str]:
    """The thread that runs the transaction, which takes so long."""
    yield Statement("lanes_version", {"workspace": Clock().new_id()})
    if clock is not None:
        clock.advance(seconds)
    return threading.current_thread().name


async def test_lone_transaction_runs_in_place(store: SqliteStore) -> None:
    assert await store.transact(where) == HERE


async def test_long_transaction_moves_writes_to_the_thread(
    store: SqliteStore, clock: ManualClock
) -> None:
    assert await store.transact(lambda: where(clock, 2)) == HERE
    assert await store.transact(where) != HERE
    clock.advance(5.9)
    assert await store.transact(where) != HERE
    clock.advance(0.2)
    assert await store.transact(where) == HERE


async def test_slow_transactions_stay_in_the_thread(store: SqliteStore, clock: ManualClock) -> None:
    assert await store.transact(lambda: where(clock, 2)) == HERE
    for _ in range(3):
        clock.advance(5.9)
        assert await store.transact(lambda: where(clock, 2)) != HERE


async def test_concurrent_transactions_do_not_block_the_loop(
    store: SqliteStore, clock: ManualClock
) -> None:
    await store.transact(lambda: where(clock, 2))
    first, second = await asyncio.gather(store.transact(where), store.transact(where))
    assert HERE not in (first, second)


async def test_cancelled_write_excludes_other_writers_until_it_ends(
    store: SqliteStore, clock: ManualClock
) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def slow() -> Script[None]:
        yield Statement("lanes_version", {"workspace": Clock().new_id()})
        begun.set()
        go_on.wait(30)

    await store.transact(lambda: where(clock, 2))
    leaving = asyncio.ensure_future(store.transact(slow))
    await asyncio.to_thread(begun.wait, 30)
    leaving.cancel()
    await asyncio.wait([leaving])
    clock.advance(60)
    writing = asyncio.ensure_future(store.transact(where))
    done, _ = await asyncio.wait([writing], timeout=0.1)
    assert not done
    go_on.set()
    assert await writing != HERE


async def test_wait_for_another_process_happens_in_the_thread(
    store: SqliteStore, tmp_path: Path
) -> None:
    with (tmp_path / "t.db-lock").open("a") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        writing = asyncio.ensure_future(store.transact(where))
        done, _ = await asyncio.wait([writing], timeout=0.1)
        assert not done
        fcntl.flock(other, fcntl.LOCK_UN)
    assert await writing != HERE


async def test_wait_for_another_program_happens_in_the_thread(
    store: SqliteStore, tmp_path: Path
) -> None:
    untrusted = sqlite3.connect(tmp_path / "t.db", isolation_level=None)
    untrusted.execute("begin immediate")
    writing = asyncio.ensure_future(store.transact(where))
    done, _ = await asyncio.wait([writing], timeout=0.1)
    assert not done
    untrusted.execute("rollback")
    untrusted.close()
    assert await writing != HERE
    assert await store.transact(where) == HERE


def has_folder(database: str) -> bool:
    return _socket_folder(database).is_dir()


async def test_the_last_listener_takes_the_folder(tmp_path: Path) -> None:
    database = str(tmp_path / "t.db")
    speaker = LocalWakeups(database, "speaker", Clock())
    speaker.notify(["nobody"])
    listeners = [LocalWakeups(database, f"listener{number}", Clock()) for number in range(3)]
    for listener in listeners:
        await listener.open()
    assert has_folder(database)
    for listener in listeners:
        await listener.close()
    await speaker.close()
    assert not has_folder(database)


async def test_call_during_close_is_refused(store: SqliteStore, clock: ManualClock) -> None:
    hold = threading.Event()

    def slow() -> Script[None]:
        yield Statement("lanes_version", {"workspace": Clock().new_id()})
        hold.wait(10)

    await store.transact(lambda: where(clock, 2))
    written = asyncio.create_task(store.transact(slow))
    await eventually(store._writing.locked)
    closed = asyncio.create_task(store.close())
    await eventually(lambda: store._closing)
    with pytest.raises(Unavailable):
        await store.transact(where)
    hold.set()
    await asyncio.gather(written, closed)
