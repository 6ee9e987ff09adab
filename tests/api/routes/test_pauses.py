"""Pauses and rate limits over HTTP, and a provider's rate limit that pauses a lane."""

from datetime import timedelta
from typing import Any
from uuid import uuid4

import httpx2
import pytest
from tests.api.conftest import V1, Api, problem

from tenuto.model.tenancy.access import Role


async def agent_of(owner: httpx2.AsyncClient, **fields: Any) -> str:
    created = str(uuid4())
    name = f"agent-{created}"
    answer = await owner.put(f"{V1}/agents/{created}", json={"name": name, **fields})
    assert answer.status_code == 200, answer.text
    return created


async def submit(owner: httpx2.AsyncClient, **fields: Any) -> str:
    created = await owner.post(f"{V1}/agent-tasks", json={"title": "t", **fields})
    return str(created.json()["id"])


async def claim(owner: httpx2.AsyncClient, agent: str, limit: int = 10) -> list[Any]:
    answer = await owner.post(f"{V1}/agents/{agent}/claim", json={"limit": limit})
    assert answer.status_code == 200, answer.text
    return list(answer.json()["tasks"])


async def test_pause_is_created_listed_and_removed(api: Api) -> None:
    admin = await api.acting(Role.ADMIN)
    agent = await agent_of(admin)
    task = await submit(admin, taskType="a/b c")
    until = (api.service.clock.now() + timedelta(hours=1)).isoformat()
    body = {"kind": "type", "subject": "a/b c", "reason": "freeze", "until": until}
    created = await admin.post(f"{V1}/gates", json=body)
    assert created.status_code == 201
    assert (created.json()["reason"], created.json()["createdBy"]) == ("freeze", "token:test")
    assert (await admin.get(f"{V1}/gates")).json() == {"gates": [created.json()]}
    assert await claim(admin, agent) == []
    gates = (await admin.get(f"{V1}/agent-tasks/{task}/explain")).json()["gates"]
    assert (gates[0]["gate"], gates[0]["clearsAt"]) == ("pause", created.json()["until"])
    assert (await admin.delete(f"{V1}/gates/type/a%2Fb%20c")).status_code == 204
    assert [work["id"] for work in await claim(admin, agent)] == [task]
    again = await admin.delete(f"{V1}/gates/type/a%2Fb%20c")
    assert problem(again) == (404, "not_found")


async def test_workspace_pause_needs_no_subject(api: Api) -> None:
    owner = await api.acting()
    created = await owner.post(f"{V1}/gates", json={"kind": "workspace"})
    assert (created.status_code, created.json()["subject"]) == (201, "all")
    assert (await owner.delete(f"{V1}/gates/workspace/all")).status_code == 204


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({"kind": "type"}, 422, "invalid_value"),
        ({"kind": "planet", "subject": "x"}, 422, "invalid_value"),
        ({"kind": "agent", "subject": "nobody"}, 404, "not_found"),
        ({"kind": "lane", "subject": "99"}, 404, "not_found"),
        ({"kind": "type", "subject": "x", "why": "?"}, 422, "invalid_value"),
        ({"kind": "type", "subject": "x", "until": "2001-01-01T00:00:00Z"}, 422, "invalid_value"),
        ({"kind": "type", "subject": "x\x00"}, 422, "text_invalid"),
    ],
)
async def test_invalid_pause_is_refused(
    owner: httpx2.AsyncClient, body: Any, status: int, code: str
) -> None:
    assert problem(await owner.post(f"{V1}/gates", json=body)) == (status, code)
    assert (await owner.get(f"{V1}/gates")).json() == {"gates": []}


async def test_member_can_read_but_not_change_pauses(api: Api) -> None:
    member = await api.acting(Role.MEMBER)
    assert (await member.get(f"{V1}/gates")).status_code == 200
    body = {"kind": "workspace"}
    assert problem(await member.post(f"{V1}/gates", json=body)) == (403, "forbidden")
    limit = {"provider": "p", "requestsPerMinute": 1}
    answer = await member.put(f"{V1}/rate-limits/x", json=limit)
    assert problem(answer) == (403, "forbidden")


async def test_rate_limit_is_created_listed_and_deleted(owner: httpx2.AsyncClient) -> None:
    agent = await agent_of(owner, model="anthropic/opus", account="team-a")
    path = f"{V1}/rate-limits/team%20a"
    body = {"provider": "anthropic", "account": "team-a", "requestsPerMinute": 2}
    created = await owner.put(path, json=body)
    assert created.status_code == 200, created.text
    assert (created.json()["name"], created.json()["requestsLeft"]) == ("team a", 2)
    for _ in range(3):
        await submit(owner)
    assert len(await claim(owner, agent)) == 2
    assert await claim(owner, agent) == []
    [view] = (await owner.get(f"{V1}/rate-limits")).json()["rateLimits"]
    assert (view["requestsLeft"], view["tokensLeft"]) == (0, None)
    assert view["nextAt"] is not None
    assert (await owner.delete(path)).status_code == 204
    assert len(await claim(owner, agent)) == 1
    assert problem(await owner.delete(path)) == (404, "not_found")


@pytest.mark.parametrize(
    "body",
    [
        {"provider": "p"},
        {"requestsPerMinute": 5},
        {"provider": "p", "requestsPerMinute": 0},
        {"provider": "p", "tokensPerMinute": 2**60},
        {"provider": "p", "requestsPerMinute": 1, "burst": 2},
        {"provider": "\x00", "requestsPerMinute": 1},
    ],
)
async def test_invalid_rate_limit_body_is_refused(owner: httpx2.AsyncClient, body: Any) -> None:
    answer = await owner.put(f"{V1}/rate-limits/x", json=body)
    assert answer.status_code == 422, answer.text
    assert (await owner.get(f"{V1}/rate-limits")).json() == {"rateLimits": []}


@pytest.mark.parametrize("mode", ["park", "fail"])
async def test_provider_reset_time_parks_the_task_and_pauses_its_lane(
    api: Api, owner: httpx2.AsyncClient, mode: str
) -> None:
    agent = await agent_of(owner)
    first, second = await submit(owner), await submit(owner)
    [work] = await claim(owner, agent, 1)
    assert work["id"] == first
    reset = api.service.clock.now() + timedelta(hours=1)
    reported = {"attempt": work["attempt"], "leaseToken": work["leaseToken"]}
    reported |= {"resumeAt": reset.isoformat()}
    if mode == "fail":
        reported |= {"error": "429 from the provider", "errorClass": "rate_limit"}
    answer = await owner.post(f"{V1}/agent-tasks/{first}/{mode}", json=reported)
    assert (answer.status_code, answer.json()["status"]) == (200, "WAITING")
    assert await claim(owner, agent) == []
    parked = (await owner.get(f"{V1}/agent-tasks/{first}/explain")).json()
    [gate] = [item for item in parked["gates"] if item["gate"] == "quota"]
    waiting = (await owner.get(f"{V1}/agent-tasks/{second}/explain")).json()
    [lane] = [item for item in waiting["gates"] if item["gate"] == "lane"]
    assert "provider limit" in lane["detail"]
    assert "None" not in lane["detail"]
    assert lane["clearsAt"] == gate["clearsAt"] == reset.isoformat().replace("+00:00", "Z")
