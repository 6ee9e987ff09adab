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

MAX_BUFFERED = 256
"""Maximum events that wait in the buffer of one stream."""
POLL_S = 0.25
PROGRESS_POLL_S = 1.0
"""Seconds between reads of streamed tasks' progress and transcript, which are not events."""
BATCH = 500


class StreamSubscriber:
    """One open stream, with its events that are not sent yet.

    `task` is `None` for a stream of the whole workspace.
    """

    def __init__(self, workspace: UUID, task: UUID | None) -> None:
        self.workspace = workspace
        self.task = task
        self.events: deque[Row] = deque()
        self.ready = asyncio.Event()
        self.has_space = asyncio.Event()
        """Set when the buffer was emptied."""
        self.is_too_slow = False
        self.sending: asyncio.Task[Any] | None = None
        """The asyncio task that is blocked in sending to the client, if any."""

    @property
    def is_full(self) -> bool:
        """True if the buffer is full because the client reads too slowly."""
        return len(self.events) >= MAX_BUFFERED

    def take_events(self) -> list[Row]:
        """Returns the buffered events and empties the buffer."""
        events = list(self.events)
        self.events.clear()
        self.has_space.set()
        return events

    def push(self, event: Row) -> None:
        """Buffers an event; if the buffer is full, drops the event and ends the slow stream."""
        if not self.is_full:
            self.events.append(event)
            self.has_space.clear()
            self.ready.set()
        elif not self.is_too_slow:
            self.is_too_slow = True
            self.ready.set()
            if self.sending is not None:
                self.sending.cancel()


class EventHub:
    """Reads the events of all workspaces once and distributes them to all streams and sinks."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._workspace_readers: defaultdict[UUID, set[StreamSubscriber]] = defaultdict(set)
        self._task_readers: defaultdict[UUID, set[StreamSubscriber]] = defaultdict(set)
        self._progress: dict[UUID, Any] = {}
        self._sinks: list[Sink] = []
        self._cursor: tuple[int, int] | None = None
        self._progress_polled_at = 0.0
        self.poll_now = asyncio.Event()

    @property
    def stream_count(self) -> int:
        """Returns how many streams are open."""
        return sum(
            len(readers)
            for readers in (*self._workspace_readers.values(), *self._task_readers.values())
        )

    async def subscribe(self, reader: StreamSubscriber) -> None:
        """Adds a stream, which gets the events of its task or workspace from now on."""
        if self._cursor is None:
            self._cursor = await self._latest_cursor()
        if reader.task is None:
            self._workspace_readers[reader.workspace].add(reader)
        else:
            self._task_readers[reader.task].add(reader)

    async def add_sink(self, sink: Sink) -> None:
        """Adds a sink for the events of all workspaces from now on. The sink must not raise."""
        if self._cursor is None:
            self._cursor = await self._latest_cursor()
        self._sinks.append(sink)

    def wake_all(self) -> None:
        """Wakes all streams, so that they see that the server stops."""
        for readers in (*self._workspace_readers.values(), *self._task_readers.values()):
            for reader in readers:
                reader.ready.set()

    def unsubscribe(self, reader: StreamSubscriber) -> None:
        """Removes a stream; without streams and sinks the hub stops reading."""
        for readers, key in (
            (self._workspace_readers, reader.workspace),
            (self._task_readers, reader.task),
        ):
            if key is not None and key in readers:
                readers[key].discard(reader)
                if not readers[key]:
                    del readers[key]
                    self._progress.pop(key, None)
        if not self.stream_count and not self._sinks:
            self._cursor = None

    async def run(self, stop: asyncio.Event, clock: Clock) -> None:
        """Reads and distributes events until `stop` is set."""
        await run_periodically(self._poll_logged, lambda: POLL_S, stop, clock, self.poll_now)

    async def _poll_logged(self) -> None:
        """Reads new events and progress if there are readers; logs errors, raises none."""
        if self._cursor is None:
            return
        try:
            await self._read_new_events()
            await self._poll_progress()
        except TenutoError as error:
            log.warning("live streams are delayed, the store is unavailable: %s", error)
        except Exception:
            log.exception("internal error while reading events for streams; the next cycle retries")

    async def _latest_cursor(self) -> tuple[int, int]:
        """Returns the (transaction id, position) of the newest event; (0, 0) if there is none."""
        rows = await self._store.fetch(Statement("events_end"))
        return (rows[0]["xid"], rows[0]["position"]) if rows else (0, 0)

    async def _read_new_events(self) -> None:
        """Reads all events after the cursor, in batches, and passes them to streams and sinks."""
        while self._cursor is not None:
            xid, position = self._cursor
            params = {"xid": xid, "position": position, "most": BATCH}
            rows = await self._store.fetch(Statement("events_after", params))
            await self._distribute(rows)
            if rows:
                self._cursor = (rows[-1]["xid"], rows[-1]["position"])
                for sink in self._sinks:
                    await sink(rows)
            if len(rows) < BATCH:
                return

    async def _distribute(self, rows: Rows) -> None:
        """Passes events to their streams; waits up to `POLL_S` in total for full buffers.

        A stream that is still full is ended, so that slow readers do not delay the others.
        """
        deadline = self._store.clock.elapsed() + POLL_S
        for row in rows:
            for reader in (
                *self._workspace_readers.get(row["workspace"], ()),
                *self._task_readers.get(row["task"], ()),
            ):
                if reader.is_full and not reader.is_too_slow:
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(deadline - self._store.clock.elapsed()):
                            await reader.has_space.wait()
                reader.push(row)

    async def _poll_progress(self) -> None:
        """Once a second, wakes streams of tasks with new progress, step, attempt or transcript."""
        now = self._store.clock.elapsed()
        if not self._task_readers or now - self._progress_polled_at < PROGRESS_POLL_S:
            return
        self._progress_polled_at = now
        ids = list(self._task_readers)
        for start in range(0, len(ids), BATCH):
            batch = ids[start : start + BATCH]
            for row in await self._store.fetch(Statement("followed_tasks", {"ids": batch})):
                state = (row["progress_percent"], row["current_step"], row["attempt"], row["said"])
                if self._progress.get(row["id"]) != state:
                    self._progress[row["id"]] = state
                    for reader in self._task_readers.get(row["id"], ()):
                        reader.ready.set()
