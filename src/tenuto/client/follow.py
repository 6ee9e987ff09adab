"""Follows a task: yields its changes until it has finished."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager, suppress
from datetime import datetime
from typing import Any, Literal
from uuid import UUID

import httpx2
import msgspec

from tenuto.client.remote.engine import AnyEngine, RemoteEngine
from tenuto.client.remote.resource import V1
from tenuto.engine.views import LogLine, TaskView
from tenuto.model.errors import TenutoError, TooMany, Unavailable
from tenuto.model.tasks.task import TERMINAL
from tenuto.periodic import wait_first_event

POLL_S = 0.2
IDLE_POLL_S = 2.0
"""Seconds between two reads from a server whose stream sends no event."""
PAGE_SIZE = 1000
OUTAGE_S = 60
"""Seconds to retry while the database or server is unavailable."""


class TaskSnapshot(msgspec.Struct, frozen=True):
    """A task at one moment, with the log lines since the previous snapshot."""

    view: TaskView
    lines: list[LogLine]


class TaskEvent(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """An event of a task: a status change or log line (in `line`), or its progress."""

    kind: Literal["status", "log", "progress"]
    line: LogLine | None = None
    progress_percent: int | None = None
    current_step: str | None = None


class _Status(msgspec.Struct, rename="camel"):
    """The data of a stream message of kind status."""

    event: str
    previous_status: str | None
    new_status: str
    attempt: int
    version: int
    level: str
    message: str
    actor: str | None
    timestamp: datetime


class _Progress(msgspec.Struct, rename="camel"):
    """The data of a stream message of kind progress."""

    progress_percent: int | None
    current_step: str | None


async def load_new_lines(
    engine: AnyEngine, task: UUID, seq: int = 0, position: tuple[int, int] = (0, -1)
) -> tuple[list[LogLine], int, tuple[int, int]]:
    """Returns the log lines after two positions, by time, and the two new positions.

    `seq` is the position in the audit trail, `position` that in the transcript (attempt, line).
    """
    lines: list[LogLine] = []
    while events := await engine.events(task, seq, PAGE_SIZE):
        lines += events
        seq = events[-1].seq
    while page := await engine.transcript(task, position, PAGE_SIZE):
        lines += page
        position = (page[-1].attempt, page[-1].seq)
    return sorted(lines, key=lambda line: line.at), seq, position


async def poll_task(engine: AnyEngine, task: UUID) -> AsyncGenerator[TaskSnapshot, None]:
    """Yields the task and its new log lines, now and after each possible change, until it ends.

    The task is read before its log, so the last snapshot has all log lines written before the end.
    During an outage of the database or server, reads are retried for OUTAGE_S seconds.
    """
    seq, position = 0, (0, -1)
    last_answer_at = engine.clock.elapsed()
    async with _watch_changes(engine, task) as wait_for_change:
        while True:
            try:
                view = await engine.show(task)
                lines, seq, position = await load_new_lines(engine, task, seq, position)
            except Unavailable:
                if engine.clock.elapsed() - last_answer_at > OUTAGE_S:
                    raise
            else:
                last_answer_at = engine.clock.elapsed()
                yield TaskSnapshot(view, lines)
                if view.status in TERMINAL:
                    return
            await wait_for_change()


@asynccontextmanager
async def _watch_changes(
    engine: AnyEngine, task: UUID
) -> AsyncIterator[Callable[[], Awaitable[None]]]:
    """Context with a function that waits until the task may have changed."""
    if not isinstance(engine, RemoteEngine):
        yield lambda: engine.clock.sleep(POLL_S)
        return
    changed = asyncio.Event()

    async def listen() -> None:
        with suppress(TenutoError):
            async for _ in _stream_events(engine, task):
                changed.set()
        changed.set()

    async def wait() -> None:
        await engine.clock.sleep(POLL_S)
        await wait_first_event([changed], IDLE_POLL_S, engine.clock)
        changed.clear()

    listener = asyncio.create_task(listen())
    try:
        yield wait
    finally:
        listener.cancel()
        await asyncio.gather(listener, return_exceptions=True)


async def follow(engine: AnyEngine, task: UUID) -> AsyncGenerator[TaskEvent, None]:
    """Yields all past and future events of a task in order, until it has finished.

    Progress is yielded only if it has changed.
    """
    last_progress: TaskEvent | None = None
    source = (
        _stream_events(engine, task)
        if isinstance(engine, RemoteEngine)
        else _poll_events(engine, task)
    )
    async with aclosing(source) as events:
        async for event in events:
            if event.kind == "progress":
                if event == last_progress:
                    continue
                last_progress = event
            yield event


async def _poll_events(engine: AnyEngine, task: UUID) -> AsyncGenerator[TaskEvent, None]:
    """Yields the events of a task by polling; progress also when it has not changed."""
    async with aclosing(poll_task(engine, task)) as snapshots:
        async for snapshot in snapshots:
            for line in snapshot.lines:
                yield TaskEvent(kind="status" if line.source == "event" else "log", line=line)
            view = snapshot.view
            if (view.progress_percent, view.current_step) != (None, None):
                yield TaskEvent(
                    kind="progress",
                    progress_percent=view.progress_percent,
                    current_step=view.current_step,
                )


async def _stream_events(engine: RemoteEngine, task: UUID) -> AsyncGenerator[TaskEvent, None]:
    """Yields the events of the server's stream to the task's end; reconnects after the last one.

    Raises `Unavailable` after an outage of OUTAGE_S seconds.
    """
    last_event_id: str | None = None
    last_answer_at = engine.clock.elapsed()
    path = f"{V1}/agent-tasks/{task}/events"
    while True:
        connected = False
        try:
            async with engine.connection.events(path, last_event_id) as source:
                connected = True
                async for message in source:
                    if message.event == "end":
                        return
                    last_event_id = message.id or last_event_id
                    if event := _parse_event(message):
                        yield event
        except (Unavailable, TooMany):
            if not connected and engine.clock.elapsed() - last_answer_at > OUTAGE_S:
                raise
        if connected:  # the connection was alive until now, even if no event came
            last_answer_at = engine.clock.elapsed()
        await engine.clock.sleep(POLL_S * (1 + engine.clock.random()))


def _parse_event(message: httpx2.ServerSentEvent) -> TaskEvent | None:
    """Returns a stream message as an event, or `None` if its kind is unknown."""
    decode: Any = msgspec.json.decode
    if message.event == "status":
        status: _Status = decode(message.data, type=_Status)
        line = LogLine(
            at=status.timestamp,
            level=status.level,
            source="event",
            attempt=status.attempt,
            text=status.message,
            seq=status.version,
            event=status.event,
            previous_status=status.previous_status,
            new_status=status.new_status,
            actor=status.actor,
        )
        return TaskEvent(kind="status", line=line)
    if message.event == "log":
        return TaskEvent(kind="log", line=decode(message.data, type=LogLine))
    if message.event == "progress":
        progress: _Progress = decode(message.data, type=_Progress)
        return TaskEvent(
            kind="progress",
            progress_percent=progress.progress_percent,
            current_step=progress.current_step,
        )
    return None
