"""Group commit: callers that arrive while a transaction is running share the next one.

A single caller does not wait. Every kind of batched write is repeatable (callers create ids,
completions are recognised by their fence), so after a lost connection the batch runs again.
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
"""One result per item, in order; an exception instance is raised to that item's caller."""


_SOLO_LIMIT = 8
"""After this many callers in a row without a batch, only one in as many waits for a batch."""


class WriteKind(msgspec.Struct, frozen=True, eq=False):
    """A kind of write that many callers can share: a script over all their items."""

    name: str
    script: Callable[[list[Any]], Script[Answers]]
    one_statement: bool = False
    """True if the script yields exactly once, so that it needs no transaction around it."""
    alone: bool = False
    """True if items share no statement; where kinds do not mix, each gets its own transaction."""
    at_once: bool = False
    """True if a caller starts at once when no write is running: most calls come alone.

    Where kinds mix, all wait: there a single write delays the callers that could have shared it.
    """
    leads: bool = False
    """True if a claim usually follows and needs what this writes: one claim joins its batch."""
    single: Callable[[Any], Callable[[], Script[Any]] | None] | None = None
    """Returns a script that writes one item in one statement, or `None` if that is not possible.

    The script returns `None` if the one statement could not do it.
    """


class _QueuedWrite(msgspec.Struct, eq=False):
    """One item that waits for its batch."""

    kind: WriteKind
    item: Any
    key: int | None
    future: "asyncio.Future[Any]"


class Batcher:
    """Queues writes and runs as many batches at once as the store has writers."""

    def __init__(self, store: Store, max_batch: int = 1000) -> None:
        self._store = store
        self._max_batch = max_batch
        self._queue: deque[_QueuedWrite] = deque()
        self._running: set[object] = set()
        """Running batches, and callers that write without a batch."""
        self._starting = False
        self._solo_callers = 0
        """Callers in a row that shared no batch."""

    def submit(self, kind: WriteKind, item: Any, key: int | None = None) -> Awaitable[Any]:
        """Queues a write; returns an awaitable of its durable result. A batch has each `key` once.

        Keys are hashed often, so ids are integers.
        """
        if self._queue or not (self._skips_batch(kind) or self._can_wait_for_batch(kind)):
            return self._enqueue(kind, item, key)
        return self._submit_first(kind, item, key)

    def _enqueue(self, kind: WriteKind, item: Any, key: int | None) -> "asyncio.Future[Any]":
        """Queues an item, starts a batch if a writer is free, and returns the item's future."""
        self._solo_callers = 0
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        self._queue.append(_QueuedWrite(kind, item, key, future))
        if kind.leads:  # the claim for a slot comes one tick after the completion that freed it
            loop.call_soon(self._start_next_batch)
        else:
            self._start_next_batch()
        return future

    async def _submit_first(self, kind: WriteKind, item: Any, key: int | None) -> Any:
        """Writes an item without a batch, unless other writes arrive first; returns its result."""
        if self._queue:
            return await self._enqueue(kind, item, key)
        if self._skips_batch(kind):
            return await self._run_single(kind, item)
        if self._can_wait_for_batch(kind):
            self._solo_callers += 1
            if self._solo_callers > _SOLO_LIMIT and self._solo_callers % _SOLO_LIMIT:
                return await self._run_single(kind, item)
            await self._wait_one_tick()
            if not self._running:
                return await self._run_single(kind, item)
        return await self._enqueue(kind, item, key)

    async def _wait_one_tick(self) -> None:
        """Waits one event-loop tick, then starts a batch of the writes that arrived meanwhile."""
        self._starting = True
        try:
            await NextTick()
        except asyncio.CancelledError:
            self._starting = False
            self._start_next_batch()  # the others run without this caller
            raise
        self._starting = False
        self._start_next_batch()

    def _skips_batch(self, kind: WriteKind) -> bool:
        """True if kinds do not mix and an item can be written now, which needs no batch."""
        if kind.alone and not self._store.mixes:
            return len(self._running) < self._store.writers
        return kind.at_once and not self._store.mixes and not self._running

    def _can_wait_for_batch(self, kind: WriteKind) -> bool:
        """True if a write may wait a tick for others: kinds mix, none runs, this does not lead."""
        idle = not (self._starting or self._running)
        return idle and self._store.mixes and not kind.leads

    async def _run_single(self, kind: WriteKind, item: Any) -> Any:
        """Writes one item without a batch, in the caller's task; returns or raises its result."""
        caller = object()
        self._running.add(caller)
        try:
            [[answer]] = await self._run_transaction([(kind, [item])])
        except (Exception, asyncio.CancelledError):
            # Not on GeneratorExit: the loop is closed, and no other write can start.
            self._finish_single(caller)
            raise
        self._finish_single(caller)
        crash_point("engine.committed")
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def _finish_single(self, caller: object) -> None:
        """Removes a caller that wrote without a batch; starts the next batch, if writes wait."""
        self._running.discard(caller)
        self._start_next_batch()

    def _start_next_batch(self) -> None:
        """Starts a task for the next batch, if writes wait and a writer is free."""
        if self._queue and not self._starting and len(self._running) < self._store.writers:
            self._starting = True
            task = asyncio.get_running_loop().create_task(self._run_next_batch())
            self._running.add(task)
            task.add_done_callback(self._on_task_done)

    async def _run_next_batch(self) -> None:
        """Writes the next batch; first starts the one after it, if a writer is free."""
        # One tick after the first caller: writes that arrived by now join the batch.
        self._starting = False
        batch = self._dequeue_batch()
        self._start_next_batch()
        if batch:
            await self._run_batch(batch)

    def _on_task_done(self, task: "asyncio.Task[None]") -> None:
        """Removes an ended batch, raises its internal error if it had one, and starts the next."""
        self._running.discard(task)
        if not task.cancelled():
            task.result()
        self._start_next_batch()

    def _dequeue_batch(self) -> list[_QueuedWrite]:
        """Removes and returns the next writes that can share a batch; drops cancelled ones."""
        batch: list[_QueuedWrite] = []
        postponed: list[_QueuedWrite] = []
        keys: set[int | None] = set()
        while self._queue and len(batch) < self._max_batch:
            write = self._queue.popleft()
            if write.future.cancelled():
                continue
            has_duplicate_key = write.key is not None and write.key in keys
            if has_duplicate_key or (batch and not self._can_join(write, batch)):
                postponed.append(write)
                continue
            keys.add(write.key)
            batch.append(write)
        self._queue.extendleft(reversed(postponed))
        return batch

    def _can_join(self, write: _QueuedWrite, batch: list[_QueuedWrite]) -> bool:
        """True if the kinds of a write and of a (non-empty) batch may share a transaction."""
        if self._store.mixes:
            return True
        first = batch[0].kind
        if write.kind is first:
            return not first.alone
        return first.leads and write.kind.alone and len(batch) == 1

    async def _run_batch(self, batch: list[_QueuedWrite]) -> None:
        """Commits a batch or fails its callers; after an internal error, runs each write alone."""
        try:
            await self._commit_batch(batch)
        except Unavailable as error:
            _fail_all(batch, error)
        except Exception as error:  # noqa: BLE001  belongs to one caller: find out which
            if len(batch) == 1:
                _fail_all(batch, error)
                return
            for write in batch:
                await self._run_batch([write])
        except asyncio.CancelledError:
            _fail_all(batch, asyncio.CancelledError())
            raise

    async def _commit_batch(self, batch: list[_QueuedWrite]) -> None:
        """Commits a batch, starts the next one, then passes results or errors to the callers."""
        if not self._store.mixes and await self._try_single_statement(batch[0], batch[1:]):
            return
        groups: dict[WriteKind, list[_QueuedWrite]] = {}
        for write in batch:
            groups.setdefault(write.kind, []).append(write)
        items = [(kind, [write.item for write in group]) for kind, group in groups.items()]
        results = await self._run_transaction(items)
        crash_point("engine.committed")
        # The next batch first: the store writes it while callers receive their results.
        self._running.discard(asyncio.current_task())
        self._start_next_batch()
        for group, answers in zip(groups.values(), results, strict=True):
            for write, answer in zip(group, answers, strict=True):
                _set_result(write.future, answer)

    async def _try_single_statement(self, first: _QueuedWrite, others: list[_QueuedWrite]) -> bool:
        """Writes the first item in one statement, then the others; False if nothing was written."""
        create_script = first.kind.single
        if create_script is None or (others and others[0].kind is first.kind):
            return False
        script = create_script(first.item)
        if script is None:
            return False
        crash_point("engine.before_commit")
        try:
            answer = await self._store.transact_one(script)
        except Conflict:
            return False  # another process wrote the same at that moment
        if answer is None:
            return False
        crash_point("engine.committed")
        _set_result(first.future, answer)
        if others:
            await self._run_batch(others)
        return True

    def _run_transaction(
        self, items: list[tuple[WriteKind, list[Any]]]
    ) -> Awaitable[list[Answers]]:
        """Runs the items in one transaction; the result has one list of results per kind."""
        crash_point("engine.before_commit")
        plain = len(items) == 1 and items[0][0].one_statement
        run = self._store.transact_one if plain else self._store.transact
        return run(lambda: _combine_scripts(items, single=self._store.mixes))


def _combine_scripts(
    items: list[tuple[WriteKind, list[Any]]], *, single: bool
) -> Script[list[Answers]]:
    """Returns a script of all kinds, with a result list per kind. `single`: uses `kind.single`."""
    answers: list[Answers] = []
    for kind, group in items:
        answer = None
        if single and kind.single is not None and len(group) == 1:
            script = kind.single(group[0])
            answer = None if script is None else (yield from script())
        answers.append((yield from kind.script(group)) if answer is None else [answer])
    return answers


def _set_result(future: "asyncio.Future[Any]", answer: Any) -> None:
    """Sets a result or an exception, unless the caller was cancelled."""
    if future.done():
        return
    if isinstance(answer, BaseException):
        future.set_exception(answer)
    else:
        future.set_result(answer)


def _fail_all(batch: list[_QueuedWrite], error: BaseException) -> None:
    """Fails all writes of a batch with one error."""
    for write in batch:
        if isinstance(error, asyncio.CancelledError):
            write.future.cancel()
        else:
            _set_result(write.future, error)
