"""Requests sent before the response to an earlier one, on both event loops.

The server runs on uvloop, and without it on asyncio: the two end connections differently.
"""

import asyncio
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec
import pytest
import uvloop
from tests.api.conftest import V1, Api, running
from tests.api.edge.test_connection import CHUNKED, LIVE, raw, unread
from tests.waiting import eventually

from tenuto.engine.engine import DEFAULT_WORKSPACE
from tenuto.model.tenancy.access import Role
from tenuto.settings import Settings


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def runner(request: pytest.FixtureRequest) -> Iterator[asyncio.Runner]:
    with asyncio.Runner(loop_factory=request.param) as runner:
        yield runner


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """These tests do not depend on the database."""
    return Settings(database=f"sqlite:///{tmp_path}/t.db", data=str(tmp_path), port=0)


def get(path: str, token: str) -> bytes:
    return f"GET {V1}{path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\n\r\n".encode()


def post(path: str, token: str, data: dict[str, Any]) -> bytes:
    body = msgspec.json.encode(data)
    head = f"POST {V1}{path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\n"
    kind = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return f"{head}{kind}".encode() + body


REFUSED = {"a bad chunk": CHUNKED + b"zz\r\n", "no request": b"hello there\r\n\r\n"}


@pytest.mark.parametrize("kind", REFUSED)
def test_refusal_does_not_answer_the_previous_request(
    settings: Settings, kind: str, runner: asyncio.Runner, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with running(settings) as api, raw(api) as client:
            await client.send(LIVE + LIVE + REFUSED[kind])
            assert [(await client.answer())[0] for _ in range(2)] == [200, 200]
            assert await client.is_closed()

    runner.run(main())
    assert [message for message in caplog.messages if "Exception" in message] == []


@pytest.mark.parametrize("kind", REFUSED)
def test_refusal_is_not_written_into_a_stream(
    settings: Settings, kind: str, runner: asyncio.Runner
) -> None:
    async def main() -> None:
        async with running(settings) as api, raw(api) as client:
            owner = await api.acting()
            await client.send(get("/events", await api.token()))
            await client.until(b": open\n\n")
            await client.send(REFUSED[kind])
            await owner.post(f"{V1}/agent-tasks", json={"title": "a"})
            assert b"HTTP/1.1" not in await client.until(b"newStatus")

    runner.run(main())


@pytest.mark.parametrize("behind", [b"", LIVE, LIVE * 3], ids=["none", "one", "three"])
def test_stream_ends_with_its_connection(
    settings: Settings, runner: asyncio.Runner, behind: bytes
) -> None:
    async def main() -> None:
        async with running(settings) as api:
            request = get("/events", await api.token(Role.VIEWER))
            for _ in range(3):
                async with raw(api) as client:
                    await client.send(request + behind)
                    await client.until(b": open\n\n")
            await eventually(lambda: api.service.hub.stream_count == 0)
            await eventually(lambda: api.service.open_streams.count(DEFAULT_WORKSPACE) == 0)

    runner.run(main())


def test_waiting_claim_ends_with_its_connection(settings: Settings, runner: asyncio.Runner) -> None:
    async def main() -> None:
        async with running(settings) as api:
            owner, token, agent = await api.acting(), await api.token(), uuid4()
            await owner.put(f"{V1}/agents/{agent}", json={"name": "a"})
            async with raw(api) as client:
                await client.send(post(f"/agents/{agent}/claim", token, {"waitSeconds": 20}) + LIVE)
                await eventually(lambda: api.service.waiting_claims._counts.total() == 1)
            await eventually(lambda: api.service.waiting_claims._counts.total() == 0)
            task = (await owner.post(f"{V1}/agent-tasks", json={"title": "a"})).json()["id"]
            shown = (await owner.get(f"{V1}/agent-tasks/{task}")).json()
            assert shown["status"] == "PENDING"

    runner.run(main())


def test_disconnected_reader_is_removed_at_once(settings: Settings, runner: asyncio.Runner) -> None:
    async def main() -> None:
        async with running(settings) as api, unread(api) as client:
            owner = await api.acting()
            await client.send(get("/events", await api.token()))
            await client.until(b": open\n\n")
            gc.disable()
            try:
                while api.service.hub.stream_count and not behind(api):
                    await owner.post(f"{V1}/events", json={"name": "a", "data": "x" * 60_000})
                await eventually(lambda: api.service.hub.stream_count == 0)
            finally:
                gc.enable()

    runner.run(main())


def behind(api: Api) -> bool:
    """True if the hub has disconnected a reader."""
    return any(
        reader.is_too_slow
        for workspace_reader in api.service.hub._workspace_readers.values()
        for reader in workspace_reader
    )
