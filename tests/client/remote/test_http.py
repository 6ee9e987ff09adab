"""Lost responses, busy servers and long outages: safe requests are repeated, and applied once."""

import asyncio
import ssl
from typing import Any

import httpx2
import pytest
from tests.api.conftest import Api
from tests.client.remote.lossy_connection import Line, line_to
from tests.client.remote.test_engine import an_agent
from tests.contract.conftest import ManualClock
from tests.waiting import eventually

from tenuto.api.routes import worker_protocol
from tenuto.client.follow import OUTAGE_S, follow
from tenuto.client.remote.engine import RemoteEngine, connect_to_server
from tenuto.client.remote.http import ApiRequest, ServerConnection
from tenuto.engine.engine import Engine
from tenuto.model.errors import Invalid, TooMany, Unavailable
from tenuto.model.tasks.submission import Filter, NewTask
from tenuto.tls import verify_option

WORKER = "host:1:worker"
SOON = 10
"""Seconds: less than a claim would wait."""


@pytest.fixture
async def line(api: Api) -> Any:
    async with line_to(api.url) as line:
        yield line


@pytest.fixture
async def over(line: Line, token: str) -> Any:
    async with connect_to_server(line.url, token) as engine:
        yield engine


async def test_submit_with_a_lost_response_creates_one_task(
    line: Line, over: RemoteEngine, near: Engine
) -> None:
    line.swallow = 2
    submitted = await over.submit(NewTask(title="x"))
    assert line.swallowed == 2
    assert submitted.created
    assert [task.id for task in (await near.list()).tasks] == [submitted.id]
    line.swallow = 1
    many = await over.submit_many([NewTask(title=f"{number}") for number in range(3)])
    assert len((await near.list()).tasks) == 4
    assert all(item.created for item in many)


async def test_rerun_with_a_lost_response_creates_one_task(
    line: Line, over: RemoteEngine, near: Engine
) -> None:
    first = (await near.submit(NewTask(title="x"))).id
    line.swallow = 2
    created = await over.rerun(first)
    assert line.swallowed == 2
    assert [task.id for task in (await near.list()).tasks] == [created.id, first]


async def test_claim_with_a_lost_response_is_returned_again(
    line: Line, over: RemoteEngine, near: Engine
) -> None:
    await near.submit_many([NewTask(title="a"), NewTask(title="b")])
    agent = await over.register_agent(an_agent(over))
    line.swallow = 1
    claimed = await over.claim(agent, WORKER, 2)
    assert len(claimed) == 2
    assert line.swallowed == 1
    line.swallow = 1
    await over.complete(claimed[0].fence, {"r": 1})
    line.swallow = 1
    assert await over.checkpoint(claimed[1].fence, "c", 1) == 1
    line.swallow = 1
    child = await over.spawn(claimed[1].fence, "k", NewTask(title="child"))
    assert (await near.show(claimed[0].fence.task)).output == {"r": 1}
    assert (await near.show(child)).parent == claimed[1].fence.task
    assert len((await near.list()).tasks) == 3


async def test_waiting_claim_of_a_stopping_worker_returns_nothing(
    over: RemoteEngine, near: Engine
) -> None:
    agent = await over.register_agent(an_agent(over))
    quiet = over.subscribe(lambda _topic: None)
    waiting = asyncio.create_task(over.claim(agent, WORKER, 1))
    await eventually(lambda: bool(worker_protocol._claim_locks))
    quiet()
    async with asyncio.timeout(SOON):
        assert await waiting == []
    task = (await near.submit(NewTask(title="x"))).id
    assert (await near.show(task)).status == "PENDING"
    again = over.subscribe(lambda _topic: None)
    [work] = await over.claim(agent, WORKER, 1)
    again()
    assert work.fence.task == task


async def test_broken_connection_claims_nothing(
    line: Line, over: RemoteEngine, near: Engine
) -> None:
    agent = await over.register_agent(an_agent(over))
    over.subscribe(lambda _topic: None)
    waiting = asyncio.create_task(over.claim(agent, WORKER, 1))
    await eventually(lambda: bool(worker_protocol._claim_locks))
    line.down = True
    line.cut()
    await eventually(lambda: not worker_protocol._claim_locks, SOON)
    task = (await near.submit(NewTask(title="x"))).id
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert (await near.show(task)).status == "PENDING"


async def test_waiting_claim_ends_with_the_first_task(over: RemoteEngine, near: Engine) -> None:
    agent = await over.register_agent(an_agent(over))
    quiet = over.subscribe(lambda _topic: None)
    waiting = asyncio.create_task(over.claim(agent, WORKER, 3))
    task = (await near.submit(NewTask(title="x"))).id
    [work] = await waiting
    assert work.fence.task == task
    quiet()


async def test_read_waits_for_the_end_of_an_outage(line: Line, over: RemoteEngine) -> None:
    line.down = True
    line.cut()
    counting = asyncio.create_task(over.counts())
    await eventually(lambda: not line._writers)
    line.down = False
    assert (await counting)["PENDING"] == 0


async def test_command_is_not_sent_twice(line: Line, over: RemoteEngine, near: Engine) -> None:
    task = (await near.submit(NewTask(title="x"))).id
    line.swallow = 1
    with pytest.raises(Unavailable) as lost:
        await over.cancel(task)
    assert lost.value.code == "server_unreachable"
    assert (await near.show(task)).status == "CANCELLED"


async def test_bulk_action_is_not_sent_twice(line: Line, over: RemoteEngine, near: Engine) -> None:
    task = (await near.submit(NewTask(title="x"))).id
    line.swallow = 1
    with pytest.raises(Unavailable):
        await over.act("cancel", Filter())
    assert (await near.show(task)).status == "CANCELLED"


async def test_task_claimed_for_a_stopping_worker_is_returned(
    line: Line, over: RemoteEngine, near: Engine
) -> None:
    agent = await over.register_agent(an_agent(over))
    quiet = over.subscribe(lambda _topic: None)
    waiting = asyncio.create_task(over.claim(agent, WORKER, 1))
    await eventually(lambda: bool(worker_protocol._claim_locks))
    line.swallow = 1
    task = (await near.submit(NewTask(title="x"))).id
    await eventually(lambda: line.swallowed, every=0.001)
    quiet()
    [work] = await waiting
    assert work.fence.task == task


async def test_idle_stream_that_breaks_is_continued(
    line: Line, over: RemoteEngine, near: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = (await near.submit(NewTask(title="x"))).id
    events = follow(over, task)
    seen = [await anext(events)]
    following = asyncio.ensure_future(anext(events))
    elapsed = over.clock.elapsed
    monkeypatch.setattr(over.clock, "elapsed", lambda: elapsed() + 2 * OUTAGE_S)
    line.cut()
    await near.cancel(task)
    seen.append(await following)
    await events.aclose()
    assert [item.line.event for item in seen if item.line] == ["submitted", "cancelled"]


async def test_unreachable_server_is_reported_within_the_deadline() -> None:
    async with connect_to_server("http://127.0.0.1:1", deadline_s=0.5) as nowhere:
        with pytest.raises(Unavailable, match=r"no response from http://127\.0\.0\.1:1: "):
            await nowhere.counts()


class Reported:
    """A server that answers from a list."""

    def __init__(self, *answers: httpx2.Response) -> None:
        self.answers = list(answers)
        self.asked = 0
        self.slept: list[float] = []

    def link(self, monkeypatch: pytest.MonkeyPatch) -> ServerConnection:
        link = ServerConnection("http://server", "tnt_x")

        async def send(_ask: ApiRequest) -> httpx2.Response:
            self.asked += 1
            answer = self.answers.pop(0)
            answer.request = httpx2.Request("GET", "http://server/")
            return answer

        async def sleep(seconds: float) -> None:
            self.slept.append(seconds)

        monkeypatch.setattr(link, "_send", send)
        monkeypatch.setattr(link.clock, "sleep", sleep)
        return link


def busy(status: int, **headers: str) -> httpx2.Response:
    body = b'{"code": "rate_limited", "detail": "later"}'
    return httpx2.Response(
        status, content=body, headers={"content-type": "application/problem+json", **headers}
    )


@pytest.mark.parametrize("status", [502, 503, 504])
async def test_read_is_repeated(status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    reported = Reported(
        *(httpx2.Response(status) for _ in range(3)), httpx2.Response(200, content=b"[1]")
    )
    link = reported.link(monkeypatch)
    assert await link.request(list[int], ApiRequest(method="GET", path="/", repeatable=True)) == [1]
    assert reported.asked == 4
    assert reported.slept == sorted(reported.slept) or len(reported.slept) == 3
    await link.close()


async def test_write_is_repeated_only_if_it_was_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reported = Reported(busy(429, **{"Retry-After": "2"}), httpx2.Response(200, content=b"[1]"))
    link = reported.link(monkeypatch)
    assert await link.request(list[int], ApiRequest(method="POST", path="/")) == [1]
    assert reported.slept[0] >= 2
    reported.answers = [httpx2.Response(503)]
    with pytest.raises(Unavailable):
        await link.request(list[int], ApiRequest(method="POST", path="/"))
    reported.answers = [busy(429, **{"Retry-After": "900"})]
    with pytest.raises(TooMany) as refused:
        await link.request(list[int], ApiRequest(method="POST", path="/"))
    assert refused.value.retry_after == 900
    await link.close()


async def test_interrupted_long_poll_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time for which a server was asked to wait is no part of the time for its answer."""
    clock, cuts = ManualClock(), iter(range(1))
    link = ServerConnection("http://server", "tnt_x", deadline_s=10, clock=clock)
    timeout_s: list[float] = []

    async def request(*_: Any, **asked: Any) -> httpx2.Response:
        timeout_s.append(asked["timeout"].read)
        clock.advance(25)
        if next(cuts, None) is not None:
            raise httpx2.ReadError("cut")
        return httpx2.Response(200, content=b"[1]")

    monkeypatch.setattr(link._http, "request", request)
    wait = ApiRequest(method="GET", path="/", repeatable=True, wait_s=20)
    assert await link.request(list[int], wait) == [1]
    assert timeout_s == [30, 30]
    cuts = iter(range(3))
    with pytest.raises(Unavailable):
        await link.request(list[int], wait)
    assert len(timeout_s) == 4
    await link.close()


@pytest.mark.parametrize("body", [b"<html>", b"{}", b""])
async def test_invalid_response_is_an_error(body: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    link = Reported(httpx2.Response(200, content=body)).link(monkeypatch)
    with pytest.raises(Unavailable, match="unexpected response"):
        await link.request(list[int], ApiRequest(method="GET", path="/"))
    await link.close()


@pytest.mark.parametrize(
    "url", ["", "server", "ftp://x", "http://", "http://a:b", "http://me@x", "http://x:99999999"]
)
def test_invalid_server_address_is_refused(url: str) -> None:
    with pytest.raises(Invalid):
        ServerConnection(url)
    with pytest.raises(Invalid):
        ServerConnection("http://x", "a\nb")


def test_certificates_are_loaded_only_for_tls() -> None:
    assert verify_option("http://host:8484") is False
    result = verify_option("https://host")
    assert isinstance(result, ssl.SSLContext)
    assert (result.verify_mode, result.check_hostname) == (ssl.CERT_REQUIRED, True)
    assert verify_option("https://other") is result
