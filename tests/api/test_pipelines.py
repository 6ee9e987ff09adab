"""Requests that come before the ones ahead of them are answered, on both event loops.

The server runs on uvloop, and without it on asyncio: the two end connections differently.
"""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvloop
from tests.api.conftest import V1, running
from tests.api.test_connection import CHUNKED, LIVE, raw

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


REFUSED = {"a bad chunk": CHUNKED + b"zz\r\n", "no request": b"hello there\r\n\r\n"}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_refusal_does_not_answer_the_request_before(
    settings: Settings, kind: str, runner: asyncio.Runner, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with running(settings) as api, raw(api) as client:
            await client.send(LIVE + LIVE + REFUSED[kind])
            assert [(await client.answer())[0] for _ in range(2)] == [200, 200]
            assert await client.is_closed()

    runner.run(main())
    assert [each for each in caplog.messages if "Exception" in each] == []


@pytest.mark.parametrize("kind", REFUSED)
def test_a_refusal_does_not_go_into_a_stream(
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
