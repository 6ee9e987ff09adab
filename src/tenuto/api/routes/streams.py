"""Live streams: server-sent events of one task or of a workspace.

One loop reads the events for all streams. A stream whose buffer is full is closed. The client of a
task's stream can reconnect with the id of the last event it received, and misses nothing.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Annotated, Any
from uuid import UUID

import msgspec
from litestar import Request
from litestar.params import FromPath, HeaderParameter, JSONBody
from litestar.response import Stream

from tenuto.api.edge.concurrent import Holder
from tenuto.api.edge.event_hub import StreamSubscriber
from tenuto.api.edge.request_body import on_request_end
from tenuto.api.operation import READ, WRITE, operation
from tenuto.api.routes.flow_bodies import StrictBody
from tenuto.api.routes.tasks import IdempotencyKey
from tenuto.api.service import InjectedContext
from tenuto.engine.engine import Engine
from tenuto.engine.rows import decode_json
from tenuto.engine.schedules.events import EventView
from tenuto.engine.views import LogLine
from tenuto.model.errors import Invalid
from tenuto.model.schedules.event_names import event_names
from tenuto.model.tasks.task import TERMINAL
from tenuto.store.protocol import Row

KEEPALIVE_S = 15.0
"""Seconds without an event after which a comment is sent."""
RECHECK_S = 5.0
"""Seconds between checks that the caller may still read."""

LastEventId = Annotated[
    str | None, HeaderParameter(name="Last-Event-ID", required=False, max_length=60)
]


class EventBody(StrictBody):
    """An event to publish; `taskId` is the task on whose behalf it is sent, if any."""

    name: str
    data: Any = None
    task_id: UUID | None = None


@operation("POST", "/events", WRITE, idempotent=True, remote=Engine.publish)
async def publish_event(
    ctx: InjectedContext, data: JSONBody[EventBody], key: IdempotencyKey = None
) -> EventView:
    """Publishes an event in the workspace; it can start flows through triggers.

    A request repeated with the same `Idempotency-Key` publishes it once.
    """
    del key  # the guard handles it
    return await ctx.engine.publish(data.name, data.data, data.task_id)


@operation("GET", "/events", READ, media_type="text/event-stream")
async def stream_workspace_events(ctx: InjectedContext, request: Request[Any, Any, Any]) -> Stream:
    """Streams the events of the workspace from now on."""
    reader = StreamSubscriber(ctx.workspace, None)
    _count_stream(ctx, request, reader)
    return Stream(
        _stream_bytes(ctx, reader, _workspace_reader(reader)), media_type="text/event-stream"
    )


@operation("GET", "/agent-tasks/{task_id:uuid}/events", READ, media_type="text/event-stream")
async def stream_task_events(
    ctx: InjectedContext,
    request: Request[Any, Any, Any],
    task_id: FromPath[UUID],
    last_event_id: LastEventId = None,
) -> Stream:
    """Streams a task's status changes, progress and log lines.

    With the header `Last-Event-ID` the stream continues after that event. It ends with the task.
    """
    cursor = _parse_cursor(last_event_id)
    await ctx.engine.show(task_id)
    reader = StreamSubscriber(ctx.workspace, task_id)
    _count_stream(ctx, request, reader)
    task_stream = _TaskStream(ctx, task_id, cursor)
    return Stream(_stream_bytes(ctx, reader, task_stream.read_new), media_type="text/event-stream")


def _count_stream(
    ctx: InjectedContext, request: Request[Any, Any, Any], reader: StreamSubscriber
) -> None:
    """Counts a stream for its token and workspace until the request ends; raises `TooMany`.

    The subscriber is removed at the same time. A `finally` in the generator would not do: if the
    generator is cancelled in a `yield` or never started, it runs only at garbage collection.
    """
    service, settings = ctx.service, ctx.service.settings
    limits: dict[Holder, int] = {
        ctx.caller.key: settings.streams_per_token,
        ctx.workspace: settings.streams_per_workspace,
    }
    release = service.open_streams.acquire(limits)

    def release_stream() -> None:
        release()
        service.hub.unsubscribe(reader)

    on_request_end(request.scope, release_stream)


def _parse_cursor(text: str | None) -> tuple[int, int, int]:
    """Returns (version, attempt, line) to continue after; `None`: the start. Raises `Invalid`."""
    if text is None:
        return (0, 0, -1)
    parts = text.split(".")
    if len(parts) != 3 or not all(
        part.isascii() and part.isdigit() and len(part) < 16 for part in parts
    ):
        raise Invalid(
            "Last-Event-ID must be the id of an event of this stream", field="Last-Event-ID"
        )
    version, attempt, line = (int(part) for part in parts)
    return (version, attempt, line - 1)


class _TaskStream:
    """Position of a stream of one task, and its new messages."""

    def __init__(self, ctx: InjectedContext, task: UUID, cursor: tuple[int, int, int]) -> None:
        self._ctx = ctx
        self._task = task
        self._version, self._attempt, self._line = cursor
        self._progress: Any = (None, None)

    async def read_new(self) -> tuple[list[bytes], bool]:
        """Returns the messages since the last call, and True if they are the task's last ones."""
        ctx, messages = self._ctx, []
        view = await ctx.engine.show(self._task)
        while events := await ctx.engine.events(self._task, self._version):
            for event in events:
                self._version = event.seq
                messages.append(self._format("status", _status_data(event)))
        while lines := await self._new_lines():
            for line in lines:
                self._attempt, self._line = line.attempt, line.seq
                messages.append(self._format("log", line))
        progress = (view.progress_percent, view.current_step)
        if progress != self._progress:
            self._progress = progress
            data = {"progressPercent": progress[0], "currentStep": progress[1]}
            messages.append(self._format("progress", data))
        return messages, view.status in TERMINAL and self._version >= view.version

    async def _new_lines(self) -> Sequence[LogLine]:
        """Returns the transcript lines after the last one sent."""
        after = (self._attempt, self._line)
        return await self._ctx.engine.query.transcript(self._task, self._ctx.workspace, after)

    def _format(self, name: str, data: Any) -> bytes:
        """Returns a message whose id is the stream's position: version, attempt and next line."""
        return _format_sse(name, data, f"{self._version}.{self._attempt}.{self._line + 1}")


def _workspace_reader(reader: StreamSubscriber) -> "ReadNew":
    """Returns a `ReadNew` that empties the buffer of a workspace stream and formats its events."""

    async def read_new() -> tuple[list[bytes], bool]:
        messages = []
        for row in reader.take_events():
            name, data = _workspace_event(row)
            messages.append(_format_sse(name, data, f"{row['xid']}.{row['position']}"))
        return messages, False

    return read_new


def _workspace_event(row: Row) -> tuple[str, dict[str, Any]]:
    """Returns the event name and data of an audit trail row: a task change, or another event."""
    if row["new"] is not None:
        return "task", {
            "event": "task.status_changed",
            "kind": row["kind"],
            "taskId": row["task"],
            "previousStatus": row["previous"],
            "newStatus": row["new"],
            "workspaceId": row["workspace"],
            "timestamp": row["at"],
        }
    names = event_names(row["kind"], message=row["message"])
    return "event", {
        "event": names[0] if names else row["kind"].replace("_", ".", 1),
        "kind": row["kind"],
        "id": row["task"],
        "level": row["level"],
        "message": row["message"],
        "data": decode_json(row["data"]),
        "workspaceId": row["workspace"],
        "timestamp": row["at"],
    }


ReadNew = Callable[[], Awaitable[tuple[list[bytes], bool]]]
"""Returns the new messages of a stream, and True if they are the last ones."""


async def _stream_bytes(
    ctx: InjectedContext, reader: StreamSubscriber, read_new: ReadNew
) -> AsyncIterator[bytes]:
    """Subscribes, then yields the stream's bytes with keep-alive comments until it must end.

    It ends with the task's last message, when the client is too slow or may not read any more, or
    when the server stops.
    """
    service = ctx.service
    sent_at = service.clock.elapsed()
    await service.hub.subscribe(reader)
    yield b": open\n\n"
    async for pending in _new_messages(ctx, reader, read_new):
        now = service.clock.elapsed()
        if not pending and now - sent_at >= KEEPALIVE_S:
            pending = [b": alive\n\n"]  # noqa: PLW2901
        for message in pending:
            reader.sending = asyncio.current_task()
            yield message
            reader.sending = None
            sent_at = now


async def _new_messages(
    ctx: InjectedContext, reader: StreamSubscriber, read_new: ReadNew
) -> AsyncIterator[list[bytes]]:
    """Yields new messages, or an empty list when idle; ends as `_stream_bytes` says."""
    service = ctx.service
    checked_at = service.clock.elapsed()
    reader.ready.set()
    while not reader.is_too_slow and not service.stopping.is_set():
        messages: list[bytes] = []
        if reader.ready.is_set():  # otherwise only time has passed: idle streams read nothing
            reader.ready.clear()
            if reader.task is not None:
                reader.take_events()
            messages, is_end = await read_new()
            if is_end:
                yield [*messages, b"event: end\ndata: {}\n\n"]
                return
        yield messages
        with contextlib.suppress(TimeoutError):  # the hub wakes streams when the server stops
            async with asyncio.timeout(RECHECK_S):
                await reader.ready.wait()
        if service.clock.elapsed() - checked_at >= RECHECK_S:
            checked_at = service.clock.elapsed()
            if not await service.is_still_allowed(ctx):
                return


def _status_data(event: LogLine) -> dict[str, Any]:
    return {
        "event": event.event,
        "previousStatus": event.previous_status,
        "newStatus": event.new_status,
        "attempt": event.attempt,
        "version": event.seq,
        "level": event.level,
        "message": event.text,
        "actor": event.actor,
        "timestamp": event.at,
    }


def _format_sse(name: str, data: Any, event_id: str) -> bytes:
    """Returns one message of an event stream (SSE) as bytes."""
    return b"id: %s\nevent: %s\ndata: %s\n\n" % (
        event_id.encode(),
        name.encode(),
        msgspec.json.encode(data),
    )
