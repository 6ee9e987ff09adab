"""Relay: every event at least once, in order per task."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any
from uuid import UUID

import asyncpg
import pytest
from tests.contract.conftest import Another, ManualClock, Raw, claim_all, new, opened, running
from tests.waiting import eventually

from tenuto.engine.engine import Engine
from tenuto.store.protocol import Row


class Inbox:
    """A subscriber that remembers what it was handed, and may fail."""

    def __init__(self) -> None:
        self.got: list[tuple[UUID, int]] = []
        self.fails = False

    async def __call__(self, events: Sequence[Row]) -> None:
        if self.fails:
            raise ConnectionError("the subscriber is down")
        self.got += [(UUID(str(event["task"])), event["seq"]) for event in events]

    def by_task(self) -> dict[UUID, list[int]]:
        result = defaultdict(list)
        for task, seq in self.got:
            result[task].append(seq)
        return dict(result)


async def drain(engine: Engine, inbox: Inbox, limit: int = 500) -> int:
    total = 0
    while n := await engine.maintenance.relay_once("inbox", inbox, limit):
        assert n <= limit
        total += n
    return total


async def test_relay_delivers_every_event_once_and_in_order(engine: Engine) -> None:
    inbox = Inbox()
    assert await drain(engine, inbox) == 0
    first = await running(engine)
    assert await drain(engine, inbox) == 2
    await engine.submit_many([new() for _ in range(10)])
    await engine.complete(first)
    assert await drain(engine, inbox, limit=3) == 11
    assert await drain(engine, inbox) == 0
    assert inbox.by_task()[first.task] == [1, 2, 3]
    assert len(set(inbox.got)) == len(inbox.got) == 13


async def test_event_has_the_fields_that_a_subscriber_needs(engine: Engine) -> None:
    fence = await running(engine)
    seen: list[Row] = []

    async def sink(events: Sequence[Row]) -> None:
        seen.extend(events)

    await engine.maintenance.relay_once("sink", sink)
    claimed = seen[-1]
    assert (claimed["kind"], claimed["previous"], claimed["new"]) == (
        "claimed",
        "PENDING",
        "RUNNING",
    )
    assert (claimed["task"], claimed["attempt"]) == (fence.task, 1)
    assert claimed["at"] == engine.clock.now()


async def test_event_refused_by_a_subscriber_is_delivered_again(engine: Engine) -> None:
    inbox = Inbox()
    await engine.submit_many([new() for _ in range(4)])
    inbox.fails = True
    for _ in range(2):
        with pytest.raises(ConnectionError):
            await engine.maintenance.relay_once("inbox", inbox)
    inbox.fails = False
    assert await drain(engine, inbox) == 4


async def test_subscribers_have_separate_cursors(engine: Engine) -> None:
    await engine.submit_many([new() for _ in range(4)])
    one, two = Inbox(), Inbox()
    await engine.maintenance.relay_once("one", one, 2)
    await engine.maintenance.relay_once("two", two)
    await engine.maintenance.relay_once("one", one)
    assert sorted(one.got) == sorted(two.got)


async def test_two_relays_of_one_subscriber_lose_no_event(engine: Engine, another: Another) -> None:
    await engine.submit_many([new() for _ in range(60)])
    inbox = Inbox()
    async with another() as second:
        await asyncio.gather(*(drain(item, inbox, 7) for item in (engine, second) * 2))
    assert len(set(inbox.got)) == 60


async def test_slower_of_two_relays_moves_no_cursor_back(engine: Engine, another: Another) -> None:
    """Else what was handed over between the two is handed over once more."""
    await engine.submit_many([new() for _ in range(10)])
    inbox, late = Inbox(), asyncio.Event()
    begun = asyncio.Event()

    async def slowly(events: Sequence[Row]) -> int:
        begun.set()
        await late.wait()
        await inbox(events)
        return len(events)

    async with another() as second:
        slow = asyncio.create_task(second.maintenance.relay_once("inbox", slowly, 3))
        await begun.wait()
        await drain(engine, inbox)
        late.set()
        await slow
        again = await drain(engine, inbox)
    assert again == 0
    assert len(inbox.got) == 13


async def test_relay_loses_no_event_while_writers_are_busy(
    engine: Engine, raw: Raw, another: Another
) -> None:
    inbox = Inbox()
    busy = True

    async def write(caller: Engine) -> None:
        for _ in range(5):
            await caller.submit_many([new() for _ in range(4)])
            claimed = await claim_all(caller, 3)
            await asyncio.gather(*(caller.complete(work.fence) for work in claimed))

    async def relay() -> None:
        while busy:
            await engine.maintenance.relay_once("inbox", inbox, 5)

    async with another() as second, another() as third:
        reading = asyncio.ensure_future(relay())
        await asyncio.gather(*(write(item) for item in (engine, second, third)))
        busy = False
        await reading
    await drain(engine, inbox)
    assert len(inbox.got) == len(set(inbox.got)) == await raw.count("event")
    for seqs in inbox.by_task().values():
        assert seqs == sorted(seqs)


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[Any]:
    connection = await asyncpg.connect(url)
    try:
        yield connection
    finally:
        await connection.close()


async def insert_event(connection: Any, engine: Engine, task: UUID) -> None:
    await connection.execute(
        "insert into event (task, seq, workspace, xid, kind, level, new, attempt, at)"
        " values ($1, 1, $2, pg_current_xact_id()::text::bigint, 'submitted', 'INFO', 'PENDING',"
        " 0, $3)",
        task,
        engine.workspace,
        engine.clock.now(),
    )


async def test_relay_waits_for_an_open_transaction(
    postgres_engine: Engine, postgres_url: str
) -> None:
    engine, inbox, slow = postgres_engine, Inbox(), UUID(int=1)
    before = await engine.submit(new("before"))
    async with connected(postgres_url) as connection:
        transaction = connection.transaction()
        await transaction.start()
        await insert_event(connection, engine, slow)
        after = await engine.submit(new("after"))
        await drain(engine, inbox)
        assert inbox.got == [(before.id, 1)]
        await transaction.commit()
    await drain(engine, inbox)
    assert inbox.got == [(before.id, 1), (slow, 1), (after.id, 1)]


async def test_relay_does_not_wait_for_a_rolled_back_transaction(
    postgres_engine: Engine, postgres_url: str
) -> None:
    engine, inbox = postgres_engine, Inbox()
    async with connected(postgres_url) as connection:
        transaction = connection.transaction()
        await transaction.start()
        await insert_event(connection, engine, UUID(int=1))
        after = await engine.submit(new("after"))
        await transaction.rollback()
    await drain(engine, inbox)
    assert inbox.got == [(after.id, 1)]


async def test_events_of_a_task_keep_their_order_after_a_lock_wait(
    postgres_engine: Engine, postgres_url: str
) -> None:
    """The batch has its transaction id from the first row it locks, before it waits for another.

    Whatever commits in between has a later id and, on the last task of the batch, the earlier
    event.
    """
    engine, inbox = postgres_engine, Inbox()
    first, held, last = [(await engine.submit(new(f"t{n}"))).id for n in range(3)]
    waiting = "select count(*) from pg_locks where not granted"
    async with (
        opened(postgres_url, ManualClock(2)) as store,
        connected(postgres_url) as locker,
        connected(postgres_url) as watcher,
    ):
        second = Engine(store, actor="second")
        transaction = locker.transaction()
        await transaction.start()
        await locker.execute("select 1 from task where id = $1 for update", held)
        pauses = asyncio.gather(*(engine.pause(task) for task in (first, held, last)))
        await eventually(lambda: watcher.fetchval(waiting))
        await second.reprioritise(last, 9)
        await transaction.commit()
        await pauses
    await drain(engine, inbox)
    assert (await engine.show(last)).status == "PAUSED"
    assert inbox.by_task()[last] == [1, 2, 3]


async def test_relay_continues_after_a_restore_from_a_server_with_larger_transaction_ids(
    engine: Engine, raw: Raw
) -> None:
    read, unread = Inbox(), Inbox()
    first = await running(engine)
    assert await drain(engine, read) == 2
    await engine.complete(first)
    if raw.path:
        assert not await engine.maintenance.renumber_events()  # SQLite has no transaction numbers
    else:
        for table, column in (("event", "xid"), ("task", "event_xid"), ("cursor", "xid")):
            await raw.execute(f"update {table} set {column} = {column} + 1000000000")
        assert await drain(engine, unread) == 0
        assert await engine.maintenance.renumber_events()
        assert not await engine.maintenance.renumber_events()
    second = await running(engine)
    await drain(engine, unread)
    assert unread.by_task() == {first.task: [3], second.task: [1, 2]}
    assert await engine.maintenance.audit() == []
