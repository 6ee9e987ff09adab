"""What every client of a gateway does. A new one gets a line in `CLIENTS`."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from tests.coordinator.stub_gateway import StubGateway, always, session, stub_gateway

from tenuto.coordinator.gateway import Gateway, GatewayError, SpawnRejected
from tenuto.registry import GATEWAYS, scheme_of

TOKEN = "the-gateway-token"
BODY = {"idempotencyKey": "key-001", "label": "a task"}
CLIENTS = {"http": stub_gateway}
"""By scheme: what opens a gateway that does as a test tells it."""


@pytest.fixture(params=CLIENTS)
async def stub(request: pytest.FixtureRequest) -> AsyncIterator[StubGateway]:
    async with CLIENTS[request.param]() as gateway:
        yield gateway


@pytest.fixture
async def client(stub: StubGateway) -> AsyncIterator[Gateway]:
    created: Gateway = GATEWAYS.load(scheme_of(stub.url))("g", stub.url, TOKEN, deadline_s=5.0)
    assert (created.name, created.deadline_s) == ("g", 5.0)
    yield created
    await created.close()


async def test_a_spawn_passes_body_and_token_and_returns_the_session(
    stub: StubGateway, client: Gateway
) -> None:
    assert await client.spawn(BODY) == "session-001-1"
    assert stub.spawned == [BODY]
    assert TOKEN in stub.headers[0]


@pytest.mark.parametrize("status", [400, 404, 409, 422])
async def test_a_refused_spawn_is_about_the_task(
    stub: StubGateway, client: Gateway, status: int
) -> None:
    stub.answer = always(status, b"no such agent")
    with pytest.raises(SpawnRejected, match=f"HTTP {status}: no such agent"):
        await client.spawn(BODY)


NO_SESSION = {
    "nothing": b"",
    "no JSON": b"<html>",
    "no session": b"{}",
    "empty key": session("")[1],
    "long key": session("k" * 10_000)[1],
    "a number": json.dumps({"session": {"sessionKey": 7}}).encode(),
    "far too much": b" " * 100_000,
}


@pytest.mark.parametrize("status", [302, 401, 403, 408, 425, 429, 500, 503])
async def test_a_gateway_that_does_not_work_is_not_about_the_task(
    stub: StubGateway, client: Gateway, status: int
) -> None:
    stub.answer = always(status)
    with pytest.raises(GatewayError, match=f"HTTP {status}"):
        await client.spawn(BODY)


@pytest.mark.parametrize("answer", NO_SESSION)
async def test_an_answer_without_a_session_is_an_error(
    stub: StubGateway, client: Gateway, answer: str
) -> None:
    stub.answer = always(200, NO_SESSION[answer])
    with pytest.raises(GatewayError):
        await client.spawn(BODY)


async def test_an_error_text_has_no_secrets(stub: StubGateway, client: Gateway) -> None:
    stub.answer = always(500, f"cannot use s3cr3t-value with {TOKEN}".encode())
    with pytest.raises(GatewayError) as caught:
        await client.spawn(BODY, ["s3cr3t-value"])
    assert str(caught.value) == "HTTP 500: cannot use *** with ***"


async def test_kill_reports_the_outcome_of_the_session(stub: StubGateway, client: Gateway) -> None:
    assert await client.kill("a/b ü") == "killed"
    assert stub.killed == ["a/b ü"]
    for status in (404, 410):
        stub.kill_status = status
        assert await client.kill("k") == "gone"
    stub.kill_status = 500
    with pytest.raises(GatewayError, match="HTTP 500"):
        await client.kill("k")


async def test_a_gateway_that_is_away_is_an_error(stub: StubGateway, client: Gateway) -> None:
    await stub.close()
    calls: list[Callable[[], Awaitable[str]]] = [
        lambda: client.spawn(BODY),
        lambda: client.kill("k"),
    ]
    for call in calls:
        with pytest.raises(GatewayError, match="cannot be reached"):
            await call()
    await stub.open()
    assert await client.kill("k") == "killed"


async def test_a_spawn_has_a_deadline(stub: StubGateway, client: Gateway) -> None:
    async def never() -> tuple[int, bytes]:
        await asyncio.Event().wait()
        raise AssertionError

    stub.answer = never
    client.deadline_s = 0.05
    with pytest.raises(GatewayError, match=r"no answer within 0\.05 s"):
        await client.spawn(BODY)
