"""Reads the events once for all live streams of this process."""

import asyncio
import contextlib
import logging
from collections import defaultdict, deque
from typing import Any
from uuid import UUID

from tenuto.clock import Clock
from tenuto.engine.tasks.maintenance import Sink
from tenuto.model.errors import TenutoError
from tenuto.periodic import run_periodically
from tenuto.store.protocol import Row, Rows, Statement, Store

log = logging.getLogger("tenuto.api")

BUFFER = 256
"""Events that a slow reader may be behind."""
TICK_S = 0.25
LOOK_S = 1.0
"""Seconds between looks at what watched tasks say: progress and lines are not events."""
BATCH = 500


class StreamSubscriber:
    """One open stream: what it has not been sent yet."""

    def __init__(self, workspace: UUID, task: UUID | None) -> None:
        self.workspace = workspace
        self.task = task
        self.events: deque[Row] = deque()
        self.ready = asyncio.Event()
        self.room = asyncio.Event()
        """Set when a full buffer was emptied."""
        self.behind = False
        self.sending: asyncio.Task[Any] | None = None
        """Whoever waits for the reader to read on."""

    @property
    def full(self) -> bool:
        return len(self.events) >= BUFFER

    def take(self) -> list[Row]:
        """What was kept for the reader; there is room for more."""
        found = list(self.events)
        self.events.clear()
        self.room.set()
        return found

    def offer(self, event: Row) -> None:
        """Keep an event for the reader, or cut one off that is too far behind."""
        if not self.full:
            self.events.append(event)
            self.room.clear()
            self.ready.set()
        elif not self.behind:
            self.behind = True
            self.ready.set()
            if self.sending is not None:
                self.sending.cancel()


class EventHub:
    """Reads the events of all workspaces for all readers of this process."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._readers: defaultdict[UUID, set[StreamSubscriber]] = defaultdict(set)
        self._watched: defaultdict[UUID, set[StreamSubscriber]] = defaultdict(set)
        self._seen: dict[UUID, Any] = {}
        self._sinks: list[Sink] = []
        self._place: tuple[int, int] | None = None
        self._looked = 0.0
        self.poke = asyncio.Event()

    @property
    def readers(self) -> int:
        """How many streams are open."""
        return sum(len(each) for each in (*self._readers.values(), *self._watched.values()))

    async def add(self, reader: StreamSubscriber) -> None:
        """Let a reader hear what happens from now on."""
        if self._place is None:
            self._place = await self._end()
        if reader.task is None:
            self._readers[reader.workspace].add(reader)
        else:
            self._watched[reader.task].add(reader)

    async def listen(self, sink: Sink) -> None:
        """Hand a sink every event from now on, for as long as the hub runs. It must not raise."""
        if self._place is None:
            self._place = await self._end()
        self._sinks.append(sink)

    def wake(self) -> None:
        """Let every reader look up: the server ends."""
        for each in (*self._readers.values(), *self._watched.values()):
            for reader in each:
                reader.ready.set()

    def drop(self, reader: StreamSubscriber) -> None:
        """Forget a reader."""
        for kept, key in ((self._readers, reader.workspace), (self._watched, reader.task)):
            if key is not None and key in kept:
                kept[key].discard(reader)
                if not kept[key]:
                    del kept[key]
                    self._seen.pop(key, None)
        if not self.readers and not self._sinks:
            self._place = None

    async def run(self, stop: asyncio.Event, clock: Clock) -> None:
        """Read for the readers until `stop`."""
        await run_periodically(self._guarded, lambda: TICK_S, stop, clock, self.poke)

    async def _guarded(self) -> None:
        if self._place is None:
            return
        try:
            await self._events()
            await self._look()
        except TenutoError as error:
            log.warning("streams wait: %s", error)
        except Exception:
            log.exception("a fault while reading for streams; the next look goes on")

    async def _end(self) -> tuple[int, int]:
        rows = await self._store.fetch(Statement("events_end"))
        return (rows[0]["xid"], rows[0]["position"]) if rows else (0, 0)

    async def _events(self) -> None:
        while self._place is not None:
            xid, position = self._place
            params = {"xid": xid, "position": position, "most": BATCH}
            rows = await self._store.fetch(Statement("events_after", params))
            await self._offer(rows)
            if rows:
                self._place = (rows[-1]["xid"], rows[-1]["position"])
                for sink in self._sinks:
                    await sink(rows)
            if len(rows) < BATCH:
                return

    async def _offer(self, rows: Rows) -> None:
        """Hand events to their readers; one whose buffer is full is let take what it holds first.

        For a tick at most, however many they are: nobody who does not read holds up the others.
        """
        until = self._store.clock.elapsed() + TICK_S
        for row in rows:
            for reader in (
                *self._readers.get(row["workspace"], ()),
                *self._watched.get(row["task"], ()),
            ):
                if reader.full and not reader.behind:
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(until - self._store.clock.elapsed()):
                            await reader.room.wait()
                reader.offer(row)

    async def _look(self) -> None:
        now = self._store.clock.elapsed()
        if not self._watched or now - self._looked < LOOK_S:
            return
        self._looked = now
        ids = list(self._watched)
        for start in range(0, len(ids), BATCH):
            part = ids[start : start + BATCH]
            for row in await self._store.fetch(Statement("watched", {"ids": part})):
                state = (row["progress_percent"], row["current_step"], row["attempt"], row["said"])
                if self._seen.get(row["id"]) != state:
                    self._seen[row["id"]] = state
                    for reader in self._watched.get(row["id"], ()):
                        reader.ready.set()
