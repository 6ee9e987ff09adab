"""Live streams: their events, continuation after a cut, and end with the access."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx2
from tests.api.auth.test_access import claimed
from tests.api.conftest import V1, Api, problem
from tests.moved_time import MovedTime
from tests.waiting import eventually

from tenuto.api.edge.event_hub import MAX_BUFFERED
from tenuto.api.routes.streams import RECHECK_S

WAIT_S = 20


class Events:
    """The events of an open stream."""

    def __init__(self, lines: AsyncIterator[str]) -> None:
        self._lines = lines
        self.last = ""

    async def next(self) -> tuple[str, Any]:
        """The next event's name and data; `("closed", None)` when there is none."""
        name, data = "", ""
        async with asyncio.timeout(WAIT_S):
            async for line in self._lines:
                field, _, value = line.partition(": ")
                if field == "id":
                    self.last = value
                elif field == "event":
                    name = value
                elif field == "data":
                    data = value
                elif not line and name:
                    return name, json.loads(data)
        return "closed", None

    async def until(self, name: str) -> list[Any]:
        """All data until an event of that name, its own last."""
        seen = []
        while True:
            result, data = await self.next()
            assert result != "closed", f"no {name} before the end"
            seen.append(data)
            if result == name:
                return seen


@asynccontextmanager
async def stream(
    client: httpx2.AsyncClient, path: str, last: str | None = None
) -> AsyncIterator[Events]:
    headers = {} if last is None else {"Last-Event-ID": last}
    async with client.stream("GET", f"{V1}{path}", headers=headers) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        yield Events(answer.aiter_lines())


async def test_task_stream_reports_events_until_the_task_finished(
    api: Api, owner: httpx2.AsyncClient
) -> None:
    work = await claimed(owner)
    session = await api.client(work["token"])
    path = f"{V1}/agent-tasks/{work['id']}"
    async with stream(owner, f"/agent-tasks/{work['id']}/events") as events:
        first = [await events.next() for _ in range(2)]
        assert [data["newStatus"] for _, data in first] == ["PENDING", "RUNNING"]
        await session.patch(f"{path}/progress", json={"progressPercent": 40, "currentStep": "s"})
        assert (await events.until("progress"))[-1] == {"progressPercent": 40, "currentStep": "s"}
        lines = {"lines": [{"number": 0, "text": "hello"}, {"number": 1, "text": "world"}]}
        assert (await session.post(f"{path}/transcript", json=lines)).status_code == 204
        assert (await events.until("log"))[-1]["text"] == "hello"
        position = events.last
        await session.post(f"{path}/complete", json={})
        reported = await events.until("end")
        assert reported[-2]["newStatus"] == "COMPLETED"
    async with stream(owner, f"/agent-tasks/{work['id']}/events", position) as events:
        rest = await events.until("end")
        texts = [item.get("text") for item in rest if item.get("source") == "transcript"]
        assert texts == ["world"]


async def test_workspace_stream_reports_only_its_own_tasks(
    api: Api, owner: httpx2.AsyncClient
) -> None:
    other = await api.acting(workspace=await api.workspace("other"))
    async with stream(owner, "/events") as events:
        await other.post(f"{V1}/agent-tasks", json={"title": "a"})
        created = await owner.post(f"{V1}/agent-tasks", json={"title": "b"})
        name, data = await events.next()
        assert (name, data["taskId"], data["newStatus"]) == (
            "task",
            created.json()["id"],
            "PENDING",
        )


async def test_stream_ends_when_its_token_loses_access(
    moved_time: MovedTime, api: Api, owner: httpx2.AsyncClient
) -> None:
    created = (await owner.post(f"{V1}/tokens", json={"name": "t", "scopes": ["read"]})).json()
    reader = await api.client(created["token"])
    async with stream(reader, "/events") as events:
        assert (await owner.delete(f"{V1}/tokens/{created['id']}")).status_code == 204
        moved_time.advance(RECHECK_S)
        assert await events.next() == ("closed", None)
    await eventually(lambda: api.service.hub.stream_count == 0)


async def test_reading_subscriber_gets_events_of_many_tasks(owner: httpx2.AsyncClient) -> None:
    async with stream(owner, "/events") as events:
        body = {"tasks": [{"title": str(n)} for n in range(5 * MAX_BUFFERED)]}
        created = (await owner.post(f"{V1}/agent-tasks/bulk", json=body)).json()["tasks"]
        reports = [await events.next() for _ in created]
    assert {data["taskId"] for _, data in reports} == {item["id"] for item in created}


async def test_subscriber_that_does_not_read_is_dropped(
    api: Api, owner: httpx2.AsyncClient
) -> None:
    host, _, port = api.url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=1024)
    token = owner.headers["authorization"]
    writer.write(f"GET {V1}/events HTTP/1.1\r\nHost: x\r\nAuthorization: {token}\r\n\r\n".encode())
    await writer.drain()
    assert b"200" in await reader.readline()
    await reader.readuntil(b": open")
    body = {"tasks": [{"title": str(n)} for n in range(5000)]}
    async with asyncio.timeout(60):
        while api.service.hub.stream_count:
            assert (await owner.post(f"{V1}/agent-tasks/bulk", json=body)).status_code == 201
    writer.close()


async def test_unknown_stream_cursor_is_refused(owner: httpx2.AsyncClient) -> None:
    created = (await owner.post(f"{V1}/agent-tasks", json={"title": "a"})).json()["id"]
    path = f"{V1}/agent-tasks/{created}/events"
    for bad in ("x", "1.2", "1.2.3.4", "-1.0.0", "1.2." + "9" * 40):
        answer = await owner.get(path, headers={"Last-Event-ID": bad})
        assert problem(answer) == (422, "invalid_value")
