"""Waiting claims: a caller that disconnects or loses its access claims nothing."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from typing import Any
from uuid import uuid4

import httpx2
import pytest
from tests.api.auth.test_users import GONE, person
from tests.api.conftest import V1, Api, problem
from tests.waiting import eventually

from tenuto.engine.engine import Engine
from tenuto.engine.tasks.claim import ClaimedTask

TASKS = f"{V1}/agent-tasks"
SOON = 10
"""Seconds: less than the claim would wait."""


class Agent:
    """An agent whose claim waits at the server, on a connection that the test can end."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self.looks = 0
        self.taken: list[ClaimedTask] = []
        self.leaves_with_a_task = False

    def ask(self, path: str, token: str) -> None:
        body = json.dumps({"waitSeconds": 60, "limit": 2})
        self._writer.write(
            f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: {token}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()
        )

    async def leave(self) -> None:
        """Hang up; returns when the server has hung up too, without an answer."""
        self._writer.write_eof()
        assert await self._reader.read() == b""

    async def close(self) -> None:
        self._writer.close()
        await self._writer.wait_closed()

    async def saw(self, claimed: list[ClaimedTask]) -> None:
        """The server has looked for tasks and found these."""
        self.looks += 1
        self.taken += claimed
        if claimed and self.leaves_with_a_task:
            await self.leave()


@pytest.fixture
async def agent(
    api: Api, owner: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Agent]:
    """An agent that waits for a task."""
    existing = uuid4()
    await owner.put(f"{V1}/agents/{existing}", json={"name": "a"})
    host, _, port = api.url.removeprefix("http://").partition(":")
    agent = Agent(*await asyncio.open_connection(host, int(port)))
    claim = Engine.claim

    async def watched(*args: Any) -> list[ClaimedTask]:
        claimed = await claim(*args)
        await agent.saw(claimed)
        return claimed

    monkeypatch.setattr(Engine, "claim", watched)
    agent.ask(f"{V1}/agents/{existing}/claim", owner.headers["authorization"])
    await eventually(lambda: agent.looks > 0)
    yield agent
    await agent.close()


async def over(caplog: pytest.LogCaptureFixture) -> None:
    """Wait for the end of the claim."""
    await eventually(lambda: f"{V1}/agents/{{agent_id}}/claim" in caplog.text, SOON)


async def test_waiting_claim_of_a_disconnected_agent_claims_nothing(
    owner: httpx2.AsyncClient, agent: Agent, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "tenuto.access"):
        await agent.leave()
        await over(caplog)
    created = (await owner.post(TASKS, json={"title": "a"})).json()["id"]
    assert (await owner.get(f"{TASKS}/{created}")).json()["status"] == "PENDING"
    assert agent.taken == []


async def test_task_claimed_during_a_disconnect_is_released(
    owner: httpx2.AsyncClient, agent: Agent, caplog: pytest.LogCaptureFixture
) -> None:
    agent.leaves_with_a_task = True
    with caplog.at_level(logging.INFO, "tenuto.access"):
        created = (await owner.post(TASKS, json={"title": "a"})).json()["id"]
        await over(caplog)
    assert [str(work.fence.task) for work in agent.taken] == [created]
    view = (await owner.get(f"{TASKS}/{created}")).json()
    assert (view["status"], view["tries"]) == ("PENDING", 0)
    [attempt] = (await owner.get(f"{TASKS}/{created}/attempts")).json()
    assert attempt["outcome"] == "RELEASED"


@pytest.mark.parametrize("ended", ["token", "agent"])
@pytest.mark.parametrize("far", [False, True])
async def test_waiting_claim_ends_when_its_token_is_revoked(
    api: Api, owner: httpx2.AsyncClient, ended: str, far: bool
) -> None:
    agent = f"{V1}/agents/{uuid4()}"
    existing = (await owner.put(agent, json={"name": "a"})).json()["id"]
    created = (await owner.post(f"{agent}/token")).json()
    itself = await api.client(created["token"])
    path = f"{V1}/workers/w/claim" if far else f"{agent}/claim"
    body = {"waitSeconds": 60} | ({"agentId": existing, "claimToken": "x" * 40} if far else {})
    waiting = asyncio.create_task(itself.post(path, json=body))

    async def waits() -> bool:
        return (await owner.get(agent)).json()["lastHeartbeat"] is not None

    await eventually(waits, SOON)
    gone = f"{V1}/tokens/{created['id']}" if ended == "token" else agent
    assert (await owner.delete(gone)).status_code == 204
    answer = await asyncio.wait_for(waiting, SOON)
    refused = (401, "unauthenticated") if ended == "token" else (404, "not_found")
    assert problem(answer) == refused


async def test_waiting_claim_ends_when_its_caller_becomes_a_viewer(
    api: Api, owner: httpx2.AsyncClient
) -> None:
    user, ann = await person(api, owner, "ann", "MEMBER")
    agent = f"{V1}/agents/{uuid4()}"
    await owner.put(agent, json={"name": "a"})
    waiting = asyncio.create_task(ann.post(f"{agent}/claim", json={"waitSeconds": 60}))

    async def waits() -> bool:
        return (await owner.get(agent)).json()["lastHeartbeat"] is not None

    await eventually(waits, SOON)
    await owner.patch(f"{V1}/users/{user}", json={"role": "VIEWER"})
    assert problem(await asyncio.wait_for(waiting, SOON)) == GONE
