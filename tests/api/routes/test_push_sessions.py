"""Sessions spawned by a gateway: their callbacks before and after the gateway's response."""

from datetime import timedelta
from typing import Any
from uuid import UUID, uuid4

import httpx2
import pytest
from tests.api.conftest import V1, Api, problem

from tenuto.engine.agents.push import PushSessions
from tenuto.engine.core import Core
from tenuto.engine.engine import DEFAULT_WORKSPACE
from tenuto.model.tasks.task import Fence


class Pushed:
    """A task that was claimed for an agent with a gateway, and a client of its attempt."""

    def __init__(self, agent: UUID, fence: Fence, client: httpx2.AsyncClient) -> None:
        self.agent = agent
        self.fence = fence
        self.client = client

    async def heartbeat(self) -> httpx2.Response:
        return await self.client.post(f"{V1}/agents/{self.agent}/heartbeat", json={})

    async def post(self, subject: str, **body: Any) -> httpx2.Response:
        return await self.client.post(f"{V1}/agent-tasks/{self.fence.task}/{subject}", json=body)


@pytest.fixture
def dispatching(api: Api) -> PushSessions:
    service = api.service
    return PushSessions(Core(service.store, service.wakeups, service.vault))


@pytest.fixture
async def pushed(api: Api, owner: httpx2.AsyncClient, dispatching: PushSessions) -> Pushed:
    agent = uuid4()
    body = {"name": "dev-1", "gateway": "default", "staleThresholdSeconds": 300}
    answer = await owner.put(f"{V1}/agents/{agent}", json=body)
    assert answer.json()["gateway"] == "default", answer.text
    assert answer.json()["runtimes"] == ["gateway"]
    await owner.post(f"{V1}/agent-tasks", json={"title": "pushed"})
    [target] = await dispatching.targets(["default"])
    [work] = await dispatching.claim(target.agent, 1, 60)
    token, _ = api.service.attempt_tokens.issue(agent, DEFAULT_WORKSPACE, work.fence)
    return Pushed(agent, work.fence, await api.client(token))


async def test_heartbeat_begins_the_session(
    api: Api, owner: httpx2.AsyncClient, pushed: Pushed, dispatching: PushSessions
) -> None:
    path = f"{V1}/agent-tasks/{pushed.fence.task}"
    assert (await owner.get(path)).json()["status"] == "ASSIGNED"
    reported = (await pushed.heartbeat()).json()
    lease = api.service.clock.now() + timedelta(seconds=290)
    assert reported["leaseUntil"] > lease.isoformat()
    assert (await owner.get(path)).json()["status"] == "RUNNING"
    assert await dispatching.record_session(pushed.fence, "the key", 300, "test")
    view = (await owner.get(path)).json()
    assert (view["status"], view["sessionKey"]) == ("RUNNING", "the key")
    await owner.post(f"{path}/cancel", json={})
    assert (await pushed.heartbeat()).json()["cancel"] is True
    [left] = await dispatching.sessions_to_stop(["default"], 0)
    await dispatching.confirm_killed(left, {"state": "killed"}, "test")
    assert problem(await pushed.heartbeat()) == (409, "lease_lost")
    assert (await owner.get(path)).json()["status"] == "CANCELLED"


@pytest.mark.parametrize(
    ("subject", "body", "status"),
    [
        ("complete", {"outputResult": {"a": 1}}, "COMPLETED"),
        ("fail", {"error": "no"}, "RETRY_WAIT"),
        ("park", {"hold": "input", "waitUntil": "2100-01-01T00:00:00Z"}, "WAITING"),
        ("release", {}, "PENDING"),
    ],
)
async def test_session_can_finish_before_its_gateway_reported_it(
    pushed: Pushed, dispatching: PushSessions, subject: str, body: dict[str, Any], status: str
) -> None:
    answer = await pushed.post(subject, **body)
    assert (answer.status_code, answer.json()["status"]) == (200, status), answer.text
    assert not await dispatching.record_session(pushed.fence, "late", 300, "test")
    assert await dispatching.has_reported_end(pushed.fence)
    again = await pushed.post("progress")
    assert again.status_code == 405
    if subject == "fail":
        assert problem(await pushed.post("complete")) == (409, "lease_lost")


async def test_outdated_fence_is_refused_in_any_status(
    api: Api, pushed: Pushed, dispatching: PushSessions
) -> None:
    stale = Fence(pushed.fence.task, pushed.fence.attempt, "0" * 32)
    token, _ = api.service.attempt_tokens.issue(pushed.agent, DEFAULT_WORKSPACE, stale)
    other = Pushed(pushed.agent, stale, await api.client(token))
    for answer in (await other.post("complete"), await other.heartbeat()):
        assert problem(answer) == (409, "lease_lost")
    assert not await dispatching.record_session(stale, "wrong", 300, "test")
    assert await dispatching.record_session(pushed.fence, "right", 300, "test")


async def test_health_shows_the_worst_gateway(api: Api, dispatching: PushSessions) -> None:
    client, gateways = await api.client(), dispatching.gateways

    async def seen() -> str:
        word: str = (await client.get("/health/coordinator")).json()["gateway"]
        return word

    assert await seen() == "not configured"
    await gateways.record_served(["a", "b"])
    assert await seen() == "unused"
    await gateways.record_success("a")
    await gateways.record_success("b")
    assert await seen() == "connected"
    await gateways.record_failure("b", "HTTP 500", probe=False)
    assert await seen() == "failing"
    for _ in range(9):
        await gateways.record_failure("b", "HTTP 500", probe=True)
    assert await seen() == "unreachable"
    assert "HTTP 500" not in (await client.get("/health/coordinator")).text


@pytest.mark.parametrize(("subject", "body"), [("complete", {}), ("fail", {"error": "no"})])
async def test_usage_of_a_session_that_finishes_unreported_counts_once(
    owner: httpx2.AsyncClient, pushed: Pushed, subject: str, body: dict[str, Any]
) -> None:
    used = {"inputTokens": 7, "costUsd": 0.5}
    assert (await pushed.post(subject, **body, usage=used)).status_code == 200
    view = (await owner.get(f"{V1}/agent-tasks/{pushed.fence.task}")).json()
    assert (view["inputTokens"], view["costUsd"]) == (7, 0.5)
