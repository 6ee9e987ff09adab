"""Watching a task: what is new about it, again and again, until it has ended."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager, suppress
from datetime import datetime
from typing import Any, Literal
from uuid import UUID

import httpx2
import msgspec

from tenuto.client.remote.engine import AnyEngine, RemoteEngine
from tenuto.client.remote.worker import V1
from tenuto.engine.views import LogLine, TaskView
from tenuto.model.errors import TenutoError, TooMany, Unavailable
from tenuto.model.tasks.task import TERMINAL
from tenuto.periodic import wait_first_event

EVERY = 0.2
LOOK_S = 2.0
"""Seconds between looks at a server that says nothing by itself."""
PAGE = 1000
OUTAGE_S = 60
"""How long a database or server that does not answer is waited for."""


class TaskSnapshot(msgspec.Struct, frozen=True):
    """A task at one moment, with the log lines since the look before."""

    view: TaskView
    lines: list[LogLine]


class TaskEvent(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Something new about a task: a status or a line of its log (`line`), or its progress."""

    kind: Literal["status", "log", "progress"]
    line: LogLine | None = None
    progress_percent: int | None = None
    current_step: str | None = None


class _Status(msgspec.Struct, rename="camel"):
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
    progress_percent: int | None
    current_step: str | None


async def history(
    engine: AnyEngine, task: UUID, seq: int = 0, place: tuple[int, int] = (0, -1)
) -> tuple[list[LogLine], int, tuple[int, int]]:
    """Log lines after a place, by time, and where the next ones will be."""
    lines: list[LogLine] = []
    while events := await engine.events(task, seq, PAGE):
        lines += events
        seq = events[-1].seq
    while said := await engine.transcript(task, place, PAGE):
        lines += said
        place = (said[-1].attempt, said[-1].seq)
    return sorted(lines, key=lambda line: line.at), seq, place


async def poll_task(engine: AnyEngine, task: UUID) -> AsyncGenerator[TaskSnapshot, None]:
    """The task as it is now, then whenever it may have changed, the last time when it has ended.

    The row is read before its history, so the last look holds everything said before the end.
    A database or server that restarts meanwhile is waited for.
    """
    seq, place = 0, (0, -1)
    heard = engine.clock.elapsed()
    async with _change_signal(engine, task) as news:
        while True:
            try:
                view = await engine.show(task)
                lines, seq, place = await history(engine, task, seq, place)
            except Unavailable:
                if engine.clock.elapsed() - heard > OUTAGE_S:
                    raise
            else:
                heard = engine.clock.elapsed()
                yield TaskSnapshot(view, lines)
                if view.status in TERMINAL:
                    return
            await news()


@asynccontextmanager
async def _change_signal(
    engine: AnyEngine, task: UUID
) -> AsyncIterator[Callable[[], Awaitable[None]]]:
    """What returns when there may be something new."""
    if not isinstance(engine, RemoteEngine):
        yield lambda: engine.clock.sleep(EVERY)
        return
    heard = asyncio.Event()

    async def listen() -> None:
        with suppress(TenutoError):
            async for _ in _streamed(engine, task):
                heard.set()
        heard.set()

    async def wait() -> None:
        await engine.clock.sleep(EVERY)
        await wait_first_event([heard], LOOK_S, engine.clock)
        heard.clear()

    listening = asyncio.create_task(listen())
    try:
        yield wait
    finally:
        listening.cancel()
        await asyncio.gather(listening, return_exceptions=True)


async def follow(engine: AnyEngine, task: UUID) -> AsyncGenerator[TaskEvent, None]:
    """Everything that was said of a task and is said until its end, in order."""
    last: TaskEvent | None = None
    found = _streamed(engine, task) if isinstance(engine, RemoteEngine) else _seen(engine, task)
    async with aclosing(found) as events:
        async for event in events:
            if event.kind == "progress":
                if event == last:
                    continue
                last = event
            yield event


async def _seen(engine: AnyEngine, task: UUID) -> AsyncGenerator[TaskEvent, None]:
    async with aclosing(poll_task(engine, task)) as found:
        async for look in found:
            for line in look.lines:
                yield TaskEvent(kind="status" if line.source == "event" else "log", line=line)
            view = look.view
            if (view.progress_percent, view.current_step) != (None, None):
                yield TaskEvent(
                    kind="progress",
                    progress_percent=view.progress_percent,
                    current_step=view.current_step,
                )


async def _streamed(engine: RemoteEngine, task: UUID) -> AsyncGenerator[TaskEvent, None]:
    """The same as the server tells it; after a break on from the last event that arrived."""
    last: str | None = None
    heard = engine.clock.elapsed()
    path = f"{V1}/agent-tasks/{task}/events"
    while True:
        answered = False
        try:
            async with engine.link.events(path, last) as source:
                answered = True
                async for message in source:
                    if message.event == "end":
                        return
                    last = message.id or last
                    if event := _event(message):
                        yield event
        except (Unavailable, TooMany):
            if not answered and engine.clock.elapsed() - heard > OUTAGE_S:
                raise
        if answered:  # until now, however long there was nothing to tell
            heard = engine.clock.elapsed()
        await engine.clock.sleep(EVERY * (1 + engine.clock.random()))


def _event(message: httpx2.ServerSentEvent) -> TaskEvent | None:
    """A message as an event; one of a kind that nobody knows yet is none."""
    read: Any = msgspec.json.decode
    if message.event == "status":
        told: _Status = read(message.data, type=_Status)
        line = LogLine(
            at=told.timestamp,
            level=told.level,
            source="event",
            attempt=told.attempt,
            text=told.message,
            seq=told.version,
            event=told.event,
            previous_status=told.previous_status,
            new_status=told.new_status,
            actor=told.actor,
        )
        return TaskEvent(kind="status", line=line)
    if message.event == "log":
        return TaskEvent(kind="log", line=read(message.data, type=LogLine))
    if message.event == "progress":
        progress: _Progress = read(message.data, type=_Progress)
        return TaskEvent(
            kind="progress",
            progress_percent=progress.progress_percent,
            current_step=progress.current_step,
        )
    return None
