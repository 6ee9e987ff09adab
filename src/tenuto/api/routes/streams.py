"""Live streams: server-sent events of one task, or of a workspace.

One loop reads the events for everybody. A reader who does not keep up is dropped when its buffer is
full; it comes back with the id of the last event it got, and misses nothing.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Annotated, Any
from uuid import UUID

import msgspec
from litestar import Request, get, post
from litestar.params import FromPath, HeaderParameter, JSONBody
from litestar.response import Stream

from tenuto.api.edge.concurrent import Holder
from tenuto.api.edge.event_hub import StreamSubscriber
from tenuto.api.edge.request_body import at_end
from tenuto.api.routes.bodies import Written
from tenuto.api.routes.tasks import Key
from tenuto.api.service import InjectedContext
from tenuto.engine.rows import decode
from tenuto.engine.schedules.events import EventView
from tenuto.engine.views import LogLine
from tenuto.model.errors import Invalid
from tenuto.model.schedules.event_names import names_of
from tenuto.model.tasks.task import TERMINAL
from tenuto.store.protocol import Row

ALIVE_S = 15.0
RECHECK_S = 5.0
"""Seconds between looks whether a reader may still read."""

LastEventId = Annotated[
    str | None, HeaderParameter(name="Last-Event-ID", required=False, max_length=60)
]


class EventBody(Written):
    """An event to tell the workspace of; `task_id` is the task on whose behalf, if any."""

    name: str
    data: Any = None
    task_id: UUID | None = None


@post("/events")
async def publish(desk: InjectedContext, data: JSONBody[EventBody], key: Key = None) -> EventView:
    """Tell the workspace, and its triggers, that something happened; with one key, once."""
    del key  # the guard has seen to it
    return await desk.engine.publish(data.name, data.data, data.task_id)


@get("/events", media_type="text/event-stream")
async def workspace_events(desk: InjectedContext, request: Request[Any, Any, Any]) -> Stream:
    """What happens in the workspace, as it happens."""
    reader = StreamSubscriber(desk.workspace, None)
    _count(desk, request, reader)
    return Stream(_live(desk, reader, _workspace_parts(reader)), media_type="text/event-stream")


@get("/agent-tasks/{task_id:uuid}/events", media_type="text/event-stream")
async def task_events(
    desk: InjectedContext,
    request: Request[Any, Any, Any],
    task_id: FromPath[UUID],
    last_event_id: LastEventId = None,
) -> Stream:
    """A task's status, progress and lines, as they come; goes on after `Last-Event-ID`."""
    place = _place(last_event_id)
    await desk.engine.show(task_id)
    reader = StreamSubscriber(desk.workspace, task_id)
    _count(desk, request, reader)
    watch = _TaskStream(desk, task_id, place)
    return Stream(_live(desk, reader, watch.parts), media_type="text/event-stream")


def _count(
    desk: InjectedContext, request: Request[Any, Any, Any], reader: StreamSubscriber
) -> None:
    """Count a stream for its token and workspace until the request is over, however it ends.

    The reader is dropped then, too: of a generator that was cancelled in a `yield`, or never begun,
    no `finally` runs before it is collected.
    """
    service, settings = desk.service, desk.service.settings
    bounds: dict[Holder, int] = {
        desk.caller.key: settings.streams_per_token,
        desk.workspace: settings.streams_per_workspace,
    }
    give_back = service.streams.take(bounds)

    def end() -> None:
        give_back()
        service.hub.drop(reader)

    at_end(request.scope, end)


def _place(text: str | None) -> tuple[int, int, int]:
    """(version, attempt, line) of the last event that a reader got."""
    if text is None:
        return (0, 0, -1)
    parts = text.split(".")
    if len(parts) != 3 or not all(
        part.isascii() and part.isdigit() and len(part) < 16 for part in parts
    ):
        raise Invalid("Last-Event-ID is not one that we gave", field="Last-Event-ID")
    version, attempt, line = (int(part) for part in parts)
    return (version, attempt, line - 1)


class _TaskStream:
    """What a reader of one task has got."""

    def __init__(self, desk: InjectedContext, task: UUID, place: tuple[int, int, int]) -> None:
        self._desk = desk
        self._task = task
        self._version, self._attempt, self._line = place
        self._progress: Any = (None, None)

    async def parts(self) -> tuple[list[bytes], bool]:
        """What is new, and whether it is the end."""
        desk, found = self._desk, []
        view = await desk.engine.show(self._task)
        while events := await desk.engine.events(self._task, self._version):
            for event in events:
                self._version = event.seq
                found.append(self._message("status", _status(event)))
        while lines := await self._lines():
            for line in lines:
                self._attempt, self._line = line.attempt, line.seq
                found.append(self._message("log", line))
        progress = (view.progress_percent, view.current_step)
        if progress != self._progress:
            self._progress = progress
            said = {"progressPercent": progress[0], "currentStep": progress[1]}
            found.append(self._message("progress", said))
        return found, view.status in TERMINAL and self._version >= view.version

    async def _lines(self) -> Sequence[LogLine]:
        after = (self._attempt, self._line)
        return await self._desk.engine.query.transcript(self._task, self._desk.workspace, after)

    def _message(self, name: str, data: Any) -> bytes:
        return _message(name, data, f"{self._version}.{self._attempt}.{self._line + 1}")


def _workspace_parts(reader: StreamSubscriber) -> "Parts":
    async def parts() -> tuple[list[bytes], bool]:
        found = []
        for row in reader.take():
            name, data = _happened(row)
            found.append(_message(name, data, f"{row['xid']}.{row['position']}"))
        return found, False

    return parts


def _happened(row: Row) -> tuple[str, dict[str, Any]]:
    """A row of the trail as its readers get it: of a task, or of anything else."""
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
    names = names_of(row["kind"], message=row["message"])
    return "event", {
        "event": names[0] if names else row["kind"].replace("_", ".", 1),
        "kind": row["kind"],
        "id": row["task"],
        "level": row["level"],
        "message": row["message"],
        "data": decode(row["data"]),
        "workspaceId": row["workspace"],
        "timestamp": row["at"],
    }


Parts = Callable[[], Awaitable[tuple[list[bytes], bool]]]
"""Asks for what is new, and whether it is the end."""


async def _live(
    desk: InjectedContext, reader: StreamSubscriber, parts: Parts
) -> AsyncIterator[bytes]:
    """The stream's bytes until its end, the reader's, the right to read, or the server's."""
    service = desk.service
    told = service.clock.elapsed()
    await service.hub.add(reader)
    yield b": open\n\n"
    async for pending in _turns(desk, reader, parts):
        now = service.clock.elapsed()
        if not pending and now - told >= ALIVE_S:
            pending = [b": alive\n\n"]  # noqa: PLW2901
        for message in pending:
            reader.sending = asyncio.current_task()
            yield message
            reader.sending = None
            told = now


async def _turns(
    desk: InjectedContext, reader: StreamSubscriber, parts: Parts
) -> AsyncIterator[list[bytes]]:
    """What is new, whenever there may be something, for as long as the reader may have it."""
    service = desk.service
    checked = service.clock.elapsed()
    reader.ready.set()
    while not reader.behind and not service.stopping.is_set():
        found: list[bytes] = []
        if reader.ready.is_set():  # else only time has passed: nothing is read for an idle stream
            reader.ready.clear()
            if reader.task is not None:
                reader.take()
            found, over = await parts()
            if over:
                yield [*found, b"event: end\ndata: {}\n\n"]
                return
        yield found
        with contextlib.suppress(TimeoutError):  # the hub wakes readers when the server ends
            async with asyncio.timeout(RECHECK_S):
                await reader.ready.wait()
        if service.clock.elapsed() - checked >= RECHECK_S:
            checked = service.clock.elapsed()
            if not await service.is_still_allowed(desk):
                return


def _status(event: LogLine) -> dict[str, Any]:
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


def _message(name: str, data: Any, place: str) -> bytes:
    return b"id: %s\nevent: %s\ndata: %s\n\n" % (
        place.encode(),
        name.encode(),
        msgspec.json.encode(data),
    )


HANDLERS = [publish, workspace_events, task_events]
