"""Group commit: callers share transactions, and an error reaches only its own caller."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar
from uuid import UUID

import pytest
from tests.contract.conftest import (
    WORKER,
    AnyStore,
    ManualClock,
    Raw,
    claim_all,
    claim_one,
    new,
    profile,
    refusal,
    running,
)

from tenuto.engine.engine import Engine
from tenuto.model.errors import Conflict, Invalid, Unavailable
from tenuto.store.batching import Answers, Batcher, WriteKind
from tenuto.store.protocol import Row, SchemaState, Script, Statement, collect_script
from tenuto.store.sqlite.store import SqliteStore

T = TypeVar("T")


class Counting:
    """A store that counts its transactions and can be told to fail."""

    def __init__(self, inner: AnyStore) -> None:
        self.inner = inner
        self.writers = inner.writers
        self.mixes = inner.mixes
        self.clock = inner.clock
        self.transactions = 0
        self.running = 0
        self.begun = asyncio.Event()
        self.most = 0
        self.lose: list[str] = []
        self._waiting: list[Callable[[], Any]] = []
        """Writes that are committed when the next one is."""

    def for_workspace(self, workspace: UUID) -> "Counting":
        del workspace  # the store within is that workspace's already
        return self

    def for_maintenance(self) -> "Counting":
        return self

    async def open(self) -> None:
        await self.inner.open()

    async def close(self) -> None:
        await self.inner.close()

    async def migrate(self) -> list[int]:
        return await self.inner.migrate()

    async def schema(self) -> SchemaState:
        return await self.inner.schema()

    async def describe(self) -> dict[str, str]:
        return await self.inner.describe()

    async def fetch(self, statement: Statement) -> list[Row]:
        return await self.inner.fetch(statement)

    async def transact(self, script: Callable[[], Script[T]]) -> T:
        return await self._counted(self.inner.transact, script)

    async def transact_one(self, script: Callable[[], Script[T]]) -> T:
        return await self._counted(self.inner.transact_one, script)

    async def stream(self, statements: AsyncIterator[Statement]) -> None:
        await self.transact(await collect_script(statements))

    async def _counted(self, run: Any, script: Callable[[], Script[T]]) -> T:
        self.transactions += 1
        self.running += 1
        self.begun.set()
        self.most = max(self.most, self.running)
        mode = self.lose.pop(0) if self.lose else ""
        try:
            if mode == "before":
                raise Unavailable("lost before the commit")
            if mode == "late":  # its commit waits for a standby
                self._waiting.append(script)
                raise Unavailable("no standby")
            while self._waiting:
                await run(self._waiting.pop(0))
            result: T = await run(script)
            if mode == "after":
                raise Unavailable("lost after the commit")
            return result
        finally:
            self.running -= 1


@pytest.fixture
async def counting(engine: Engine) -> Counting:
    assert not isinstance(engine.core.store, Counting)
    return Counting(engine.core.store)  # type: ignore[arg-type]  # the fixture's own store


@pytest.fixture
async def busy(counting: Counting) -> Engine:
    """An engine on the counting store that knows its lane already."""
    busy = Engine(counting, actor="busy")
    await busy.submit(new("first"))
    await claim_one(busy)
    counting.transactions = 0
    counting.most = 0
    return busy


async def test_lone_caller_does_not_wait(busy: Engine, counting: Counting) -> None:
    await busy.submit(new())
    assert counting.transactions == 1


async def test_64_submits_share_transactions(busy: Engine, counting: Counting, raw: Raw) -> None:
    answers = await asyncio.gather(*(busy.submit(new(f"t{n}")) for n in range(64)))
    assert counting.transactions <= 1 + counting.writers  # the first waits for nobody
    assert len({item.id for item in answers}) == 64
    for answer, n in zip(answers, range(64), strict=True):
        assert (await busy.show(answer.id)).title == f"t{n}"


async def test_64_first_submits_share_the_creation_of_their_lane(
    counting: Counting, raw: Raw
) -> None:
    fresh = Engine(counting)
    await asyncio.gather(*(fresh.submit(new(f"t{n}")) for n in range(64)))
    assert await raw.count("task") == 64
    assert counting.transactions <= 2 + counting.writers  # the lane, then the first on its own


async def test_64_completes_share_transactions(busy: Engine, counting: Counting) -> None:
    await busy.submit_many([new() for _ in range(64)])
    claimed = await claim_all(busy)
    counting.transactions = 0
    await asyncio.gather(*(busy.complete(work.fence, n) for n, work in enumerate(claimed)))
    assert counting.transactions <= counting.writers
    views = [await busy.show(work.fence.task) for work in claimed]
    assert [view.output for view in views] == list(range(64))


async def test_callers_during_a_transaction_share_the_next_one(
    busy: Engine, counting: Counting
) -> None:
    counting.begun.clear()
    first = asyncio.ensure_future(busy.submit(new()))
    await counting.begun.wait()
    rest = [busy.submit(new()) for _ in range(50)]
    await asyncio.gather(first, *rest)
    assert counting.transactions <= 1 + counting.writers


async def test_caller_gets_its_own_response(busy: Engine) -> None:
    fences = [await running(busy) for _ in range(6)]
    stale = fences[::2]
    for fence in stale:
        await busy.cancel(fence.task)
    answers = await asyncio.gather(*(busy.complete(f) for f in fences), return_exceptions=True)
    assert [getattr(answer, "code", None) for answer in answers] == ["cancel_requested", None] * 3


async def test_concurrent_commands_of_one_task_are_decided_one_by_one(busy: Engine) -> None:
    submitted = await busy.submit(new())
    calls: list[Any] = [busy.reprioritise(submitted.id, n % 10 + 1) for n in range(20)]
    for _ in range(3):
        calls += [busy.pause(submitted.id), busy.resume(submitted.id)]
    answers = await asyncio.gather(*calls, return_exceptions=True)
    assert {type(answer) for answer in answers} <= {type(None), Conflict}
    view = await busy.show(submitted.id)
    assert view.version == 1 + answers.count(None)
    assert answers[:20] == [None] * 20


async def test_writers_run_concurrently(busy: Engine, counting: Counting) -> None:
    await busy.submit_many([new() for _ in range(40)])
    agents = [profile(id=UUID(int=n), name=f"a{n}") for n in range(1, 9)]
    counting.most = 0
    claimed = await asyncio.gather(*(busy.claim(agent, WORKER, 1) for agent in agents))
    assert [len(work) for work in claimed] == [1] * 8
    assert counting.most == counting.writers


@pytest.mark.parametrize("when", ["before", "after"])
async def test_submit_with_a_lost_response_is_repeated(
    busy: Engine, counting: Counting, raw: Raw, when: str
) -> None:
    before = await raw.count("task")
    counting.lose = [when]
    answers = await asyncio.gather(*(busy.submit(new(f"t{n}")) for n in range(5)))
    assert await raw.count("task") == before + 5
    for answer in answers:
        assert (await busy.show(answer.id)).version == 1


@pytest.mark.parametrize("when", ["before", "after"])
async def test_complete_with_a_lost_response_can_be_repeated(
    busy: Engine, counting: Counting, when: str
) -> None:
    fence = await running(busy)
    counting.lose = [when]
    assert await refusal(busy.complete(fence, 1)) == "database_unreachable"
    await busy.complete(fence, 1)
    view = await busy.show(fence.task)
    assert (view.status, view.output, view.version) == ("COMPLETED", 1, 3)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("expected", [1, 3])
async def test_claim_of_unknown_outcome_is_found_by_the_next_claim(
    busy: Engine, counting: Counting, monkeypatch: pytest.MonkeyPatch, when: str, expected: int
) -> None:
    tasks = [(await busy.submit(new(max_attempts=1))).id for _ in range(3)]
    away = ["claimed_by_token"] * 2

    async def fetch(statement: Statement) -> list[Row]:
        if away and statement.query == away[-1]:
            away.pop()
            raise Unavailable("away")
        return await counting.inner.fetch(statement)

    monkeypatch.setattr(counting, "fetch", fetch)
    counting.lose = [when]
    for _ in range(2):
        assert await refusal(busy.claim(profile(), WORKER, 2, 20)) == "database_unreachable"
    claimed = await busy.claim(profile(), WORKER, expected, 20)
    rest = await busy.claim(profile(), WORKER, 3, 20)
    assert [work.fence.task for work in claimed] == tasks[: len(claimed)]
    assert len(claimed) == (2 if (when, expected) == ("after", 3) else expected)
    assert sorted(work.fence.task for work in (*claimed, *rest)) == tasks
    for work in (*claimed, *rest):
        await busy.complete(work.fence)


async def test_claim_committed_late_is_found_before_another_claim(
    busy: Engine, counting: Counting
) -> None:
    tasks = [(await busy.submit(new(max_attempts=1))).id for _ in range(4)]
    counting.lose = ["late"]
    assert await refusal(busy.claim(profile(), WORKER, 2, 20)) == "database_unreachable"
    counting.lose = ["before"]
    assert await refusal(busy.claim(profile(), WORKER, 2, 20)) == "database_unreachable"
    claims = [busy.claim(profile(), WORKER, 2, 20) for _ in range(2)]
    claimed = [work for result in await asyncio.gather(*claims) for work in result]
    assert [(work.fence.task, work.tries) for work in claimed] == [(task, 1) for task in tasks]
    for work in claimed:
        await busy.complete(work.fence)


async def test_claim_that_was_never_committed_delays_no_other(
    busy: Engine, counting: Counting
) -> None:
    task = (await busy.submit(new())).id
    counting.lose = ["before"]
    assert await refusal(busy.claim(profile(), WORKER, 1, 20)) == "database_unreachable"
    counting.transactions = 0
    [work] = await busy.claim(profile(), WORKER, 1, 20)
    assert (work.fence.task, work.tries, counting.transactions) == (task, 1, 2)


async def test_cancelled_caller_does_not_affect_its_batch(busy: Engine, raw: Raw) -> None:
    calls = [asyncio.ensure_future(busy.submit(new(f"t{n}"))) for n in range(10)]
    await asyncio.sleep(0)
    for call in calls[::2]:
        call.cancel()
    answers = await asyncio.gather(*calls, return_exceptions=True)
    assert [isinstance(answer, asyncio.CancelledError) for answer in answers] == [True, False] * 5
    for stored in answers[1::2]:
        assert not isinstance(stored, BaseException)
        assert (await busy.show(stored.id)).status == "PENDING"


async def memory_batcher() -> tuple[Batcher, SqliteStore]:
    store = SqliteStore(":memory:", ManualClock())
    await store.migrate()
    return Batcher(store), store


def numbers(items: list[Any]) -> Script[Answers]:
    """Refuses 3 as an answer, breaks on 7."""
    yield Statement("leader", {"name": "x"})
    if 7 in items:
        raise ValueError("seven")
    return [Invalid("three") if item == 3 else item * 10 for item in items]


async def test_error_reaches_only_its_own_caller() -> None:
    batcher, store = await memory_batcher()
    kind = WriteKind("numbers", numbers)
    calls = [batcher.submit(kind, n) for n in range(10)]
    answers = await asyncio.gather(*calls, return_exceptions=True)
    await store.close()
    assert isinstance(answers[3], Invalid)
    assert isinstance(answers[7], ValueError)
    rest = [answer for n, answer in enumerate(answers) if n not in (3, 7)]
    assert rest == [0, 10, 20, 40, 50, 60, 80, 90]


async def test_batch_size_is_bounded() -> None:
    _, store = await memory_batcher()
    batcher = Batcher(store, max_batch=4)
    sizes: list[int] = []

    def script(items: list[Any]) -> Script[Answers]:
        sizes.append(len(items))
        yield Statement("leader", {"name": "x"})
        return items

    kind = WriteKind("sized", script)
    answers = await asyncio.gather(*(batcher.submit(kind, n) for n in range(10)))
    await store.close()
    assert answers == list(range(10))
    assert sizes == [4, 4, 2]


def noting(batches: list[list[Any]]) -> WriteKind:
    """A write that notes which items it was handed together."""

    def script(items: list[Any]) -> Script[Answers]:
        batches.append(items)
        yield Statement("leader", {"name": "x"})
        return items

    return WriteKind("noting", script)


async def test_items_of_a_later_batch_keep_their_order() -> None:
    """Items with one key never share a batch."""
    batcher, store = await memory_batcher()
    batches: list[list[Any]] = []
    kind = noting(batches)
    first = asyncio.ensure_future(batcher.submit(kind, "first"))
    await asyncio.sleep(0)
    calls = [batcher.submit(kind, n, key) for n, key in enumerate([1, 1, 1, 2, 2, 3])]
    assert await asyncio.gather(*calls) == list(range(6))
    await first
    await store.close()
    assert batches == [[0, 3, 5, "first"], [1, 4], [2]]


async def test_items_of_a_later_batch_precede_newer_ones() -> None:
    _, store = await memory_batcher()
    batcher = Batcher(store, max_batch=2)
    batches: list[list[Any]] = []
    kind = noting(batches)
    first = asyncio.ensure_future(batcher.submit(kind, "first"))
    await asyncio.sleep(0)
    calls = [batcher.submit(kind, n, key) for n, key in enumerate([1, 1, 2, 3, 1])]
    await asyncio.gather(*calls, first)
    await store.close()
    assert batches == [[0, 2], [1, 3], [4, "first"]]


async def test_item_of_a_cancelled_caller_is_not_written() -> None:
    batcher, store = await memory_batcher()
    batches: list[list[Any]] = []
    kind = noting(batches)
    first = asyncio.ensure_future(batcher.submit(kind, "first"))
    await asyncio.sleep(0)
    calls = [asyncio.ensure_future(batcher.submit(kind, n, 1)) for n in range(4)]
    await asyncio.sleep(0)
    calls[2].cancel()
    done = await asyncio.gather(first, *calls, return_exceptions=True)
    await store.close()
    assert isinstance(done[3], asyncio.CancelledError)
    assert batches == [[0, "first"], [1], [3]]


async def test_next_batch_starts_before_callers_get_the_last_response() -> None:
    _, store = await memory_batcher()
    batcher = Batcher(store, max_batch=1)
    seen: list[str] = []

    def script(items: list[Any]) -> Script[Answers]:
        seen.append(f"writes {items[0]}")
        yield Statement("leader", {"name": "x"})
        return items

    async def call(number: int) -> None:
        seen.append(f"hears {await batcher.submit(kind, number)}")

    kind = WriteKind("told", script)
    await asyncio.gather(call(1), call(2), call(3))
    await store.close()
    assert seen.index("writes 3") < seen.index("hears 2")


async def test_batch_mixes_kinds_if_the_store_can() -> None:
    batcher, store = await memory_batcher()
    mixed = Counting(store)
    batcher = Batcher(mixed)
    one, two = WriteKind("one", numbers), WriteKind("two", numbers, alone=True)
    calls = [batcher.submit(kind, n) for n, kind in enumerate([one, two, one, two])]
    answers = await asyncio.gather(*calls, return_exceptions=True)
    await store.close()
    assert answers[:3] == [0, 10, 20]
    assert mixed.transactions == 1


async def test_cancelled_first_caller_does_not_affect_the_next() -> None:
    batcher, store = await memory_batcher()
    kind = WriteKind("numbers", numbers)

    async def second() -> Any:
        first.cancel()
        return await batcher.submit(kind, 2)

    first = asyncio.ensure_future(batcher.submit(kind, 1))
    answers = await asyncio.gather(first, second(), return_exceptions=True)
    await store.close()
    assert isinstance(answers[0], asyncio.CancelledError)
    assert answers[1] == 20


async def test_lone_callers_share_a_batch_again_when_concurrent() -> None:
    _, store = await memory_batcher()
    mixed = Counting(store)
    batcher = Batcher(mixed)
    kind = WriteKind("numbers", lambda items: numbers([0] * len(items)))

    async def all_at_once() -> int:
        """The transactions that 64 callers take."""
        before = mixed.transactions
        await asyncio.gather(*(batcher.submit(kind, n) for n in range(64)))
        return mixed.transactions - before

    for _ in range(50):
        await batcher.submit(kind, 0)
    assert mixed.transactions == 50
    assert await all_at_once() <= 10
    assert await all_at_once() <= 2
    await store.close()


async def test_caller_during_the_wait_of_the_first_joins_its_batch() -> None:
    _, store = await memory_batcher()
    mixed = Counting(store)
    batcher = Batcher(mixed)
    kind = WriteKind("numbers", numbers)

    async def call(number: int) -> Any:
        return await batcher.submit(kind, number)

    assert await asyncio.gather(*(call(n) for n in range(3))) == [0, 10, 20]
    assert mixed.transactions == 1
    assert await call(4) == 40
    await store.close()
    assert mixed.transactions == 2
