"""Group commit: callers that arrive while a transaction is under way share the next one.

A lone caller waits for nobody. Every kind of batched write is repeatable (ids are made by the
caller, ends are recognised by their fence), so after a lost connection the batch just runs again.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec

from tenuto.crash_points import crash_point
from tenuto.model.errors import Conflict, Unavailable
from tenuto.periodic import NextTick
from tenuto.store.protocol import Script, Store

Answers = Sequence[Any]
"""One per item, in order; an exception instance is raised to that item's caller."""


_LONELY = 8
"""After so many callers without company only one of as many looks for it."""


class WriteKind(msgspec.Struct, frozen=True, eq=False):
    """A write that many callers can share: a script over all their items."""

    name: str
    script: Callable[[list[Any]], Script[Answers]]
    one_statement: bool = False
    """The script yields exactly once, so it needs no transaction around it."""
    alone: bool = False
    """Items share no statement; where kinds do not mix, each gets its own transaction."""
    at_once: bool = False
    """A caller who finds nobody writing does not wait a turn for company: most come alone.

    Where kinds mix, all wait: there a lone write holds up whoever might have shared it.
    """
    leads: bool = False
    """What it writes is what a claim right after it looks for: one claim goes along behind it."""
    single: Callable[[Any], Callable[[], Script[Any]] | None] | None = None
    """The same for one item in one statement, where that may do; `None` if it did not."""


class _QueuedWrite(msgspec.Struct, eq=False):
    kind: WriteKind
    item: Any
    key: int | None
    future: "asyncio.Future[Any]"


class Batcher:
    """Gathers writes and runs as many batches at once as the store has writers."""

    def __init__(self, store: Store, most: int = 1000) -> None:
        self._store = store
        self._most = most
        self._queue: deque[_QueuedWrite] = deque()
        self._running: set[object] = set()
        """Batches under way, and callers that write without one."""
        self._starting = False
        self._lonely = 0
        """Callers in a row that had no company."""

    def submit(self, kind: WriteKind, item: Any, key: int | None = None) -> Awaitable[Any]:
        """The answer to the item once its transaction is durable.

        Two items with one key never share a statement. Keys are hashed a lot: ids come as numbers.
        """
        if self._queue or not (self._skips_batch(kind) or self._can_wait_for_batch(kind)):
            return self._queued(kind, item, key)
        return self._first(kind, item, key)

    def _queued(self, kind: WriteKind, item: Any, key: int | None) -> "asyncio.Future[Any]":
        """The answer to an item that waits for its batch."""
        self._lonely = 0
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        self._queue.append(_QueuedWrite(kind, item, key, future))
        if kind.leads:  # the claim for a slot comes a turn after the end of what had the slot
            loop.call_soon(self._start)
        else:
            self._start()
        return future

    async def _first(self, kind: WriteKind, item: Any, key: int | None) -> Any:
        """The answer to an item that came first: without a batch, unless others come, too."""
        if self._queue:
            return await self._queued(kind, item, key)
        if self._skips_batch(kind):
            return await self._run_single(kind, item)
        if self._can_wait_for_batch(kind):
            self._lonely += 1
            if self._lonely > _LONELY and self._lonely % _LONELY:
                return await self._run_single(kind, item)
            await self._wait_one_tick()
            if not self._running:
                return await self._run_single(kind, item)
        return await self._queued(kind, item, key)

    async def _wait_one_tick(self) -> None:
        """Over after a turn of the loop; whoever came meanwhile is under way by then."""
        self._starting = True
        try:
            await NextTick()
        except asyncio.CancelledError:
            self._starting = False
            self._start()  # they go without us
            raise
        self._starting = False
        self._start()

    def _skips_batch(self, kind: WriteKind) -> bool:
        """Whether an item had better not wait a turn for company."""
        if kind.alone and not self._store.mixes:
            return len(self._running) < self._store.writers
        return kind.at_once and not self._store.mixes and not self._running

    def _can_wait_for_batch(self, kind: WriteKind) -> bool:
        """Whether a caller may look for company by itself: where kinds mix and nobody writes."""
        idle = not (self._starting or self._running)
        return idle and self._store.mixes and not kind.leads

    async def _run_single(self, kind: WriteKind, item: Any) -> Any:
        """The answer to an item that shares nothing: without a batch, in the caller's own task."""
        caller = object()
        self._running.add(caller)
        try:
            [[answer]] = await self._begun([(kind, [item])])
        except (Exception, asyncio.CancelledError):
            # Not for a task that is dropped: the loop is gone, and nobody can go on.
            self._go_on_after(caller)
            raise
        self._go_on_after(caller)
        crash_point("engine.committed")
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def _go_on_after(self, caller: object) -> None:
        self._running.discard(caller)
        self._start()

    def _start(self) -> None:
        if self._queue and not self._starting and len(self._running) < self._store.writers:
            self._starting = True
            task = asyncio.get_running_loop().create_task(self._go())
            self._running.add(task)
            task.add_done_callback(self._ended)

    async def _go(self) -> None:
        # One turn of the loop after the first caller: whatever is ready by now joins the batch.
        self._starting = False
        batch = self._take()
        self._start()
        if batch:
            await self._run(batch)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.result()
        self._start()

    def _take(self) -> list[_QueuedWrite]:
        batch: list[_QueuedWrite] = []
        later: list[_QueuedWrite] = []
        keys: set[int | None] = set()
        while self._queue and len(batch) < self._most:
            waiting = self._queue.popleft()
            if waiting.future.cancelled():
                continue
            twice = waiting.key is not None and waiting.key in keys
            if twice or (batch and not self._joins(waiting, batch)):
                later.append(waiting)
                continue
            keys.add(waiting.key)
            batch.append(waiting)
        self._queue.extendleft(reversed(later))
        return batch

    def _joins(self, waiting: _QueuedWrite, batch: list[_QueuedWrite]) -> bool:
        if self._store.mixes:
            return True
        first = batch[0].kind
        if waiting.kind is first:
            return not first.alone
        return first.leads and waiting.kind.alone and len(batch) == 1

    async def _run(self, batch: list[_QueuedWrite]) -> None:
        try:
            await self._commit(batch)
        except Unavailable as error:
            _refuse(batch, error)
        except Exception as error:  # noqa: BLE001  belongs to some caller: find out whose
            if len(batch) == 1:
                _refuse(batch, error)
                return
            for waiting in batch:
                await self._run([waiting])
        except asyncio.CancelledError:
            _refuse(batch, asyncio.CancelledError())
            raise

    async def _commit(self, batch: list[_QueuedWrite]) -> None:
        if not self._store.mixes and await self._singly(batch[0], batch[1:]):
            return
        groups: dict[WriteKind, list[_QueuedWrite]] = {}
        for waiting in batch:
            groups.setdefault(waiting.kind, []).append(waiting)
        items = [(kind, [waiting.item for waiting in group]) for kind, group in groups.items()]
        results = await self._begun(items)
        crash_point("engine.committed")
        # The next batch first: the store writes it while callers are told of this one.
        self._running.discard(asyncio.current_task())
        self._start()
        for group, answers in zip(groups.values(), results, strict=True):
            for waiting, answer in zip(group, answers, strict=True):
                _settle(waiting.future, answer)

    async def _singly(self, first: _QueuedWrite, others: list[_QueuedWrite]) -> bool:
        """Whether the first could be written in one statement; then the others are written, too."""
        make = first.kind.single
        if make is None or (others and others[0].kind is first.kind):
            return False
        script = make(first.item)
        if script is None:
            return False
        crash_point("engine.before_commit")
        try:
            answer = await self._store.once(script)
        except Conflict:
            return False  # somebody wrote the same at that moment
        if answer is None:
            return False
        crash_point("engine.committed")
        _settle(first.future, answer)
        if others:
            await self._run(others)
        return True

    def _begun(self, items: list[tuple[WriteKind, list[Any]]]) -> Awaitable[list[Answers]]:
        """The transaction of the items, about to run."""
        crash_point("engine.before_commit")
        plain = len(items) == 1 and items[0][0].one_statement
        run = self._store.once if plain else self._store.transact
        return run(lambda: _scripts(items, single=self._store.mixes))


def _scripts(items: list[tuple[WriteKind, list[Any]]], *, single: bool) -> Script[list[Answers]]:
    answers: list[Answers] = []
    for kind, group in items:
        answer = None
        if single and kind.single is not None and len(group) == 1:
            script = kind.single(group[0])
            answer = None if script is None else (yield from script())
        answers.append((yield from kind.script(group)) if answer is None else [answer])
    return answers


def _settle(future: "asyncio.Future[Any]", answer: Any) -> None:
    if future.done():
        return
    if isinstance(answer, BaseException):
        future.set_exception(answer)
    else:
        future.set_result(answer)


def _refuse(batch: list[_QueuedWrite], error: BaseException) -> None:
    for waiting in batch:
        if isinstance(error, asyncio.CancelledError):
            waiting.future.cancel()
        else:
            _settle(waiting.future, error)
