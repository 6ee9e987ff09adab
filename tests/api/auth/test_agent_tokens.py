"""Agent tokens: access to the own agent only; objects of other agents are not found."""

from typing import Any
from uuid import uuid4

import httpx2
import msgspec
import pytest
from tests.api.conftest import V1, Api, problem

MISSING = (404, "not_found")


class Hosted(msgspec.Struct):
    """An agent, a client with its own token, and a task that it has claimed."""

    id: str
    name: str
    client: httpx2.AsyncClient
    worker: str
    work: dict[str, Any]

    @property
    def fence(self) -> dict[str, Any]:
        return {"attempt": self.work["attempt"], "leaseToken": self.work["leaseToken"]}

    @property
    def lease(self) -> dict[str, Any]:
        return {"taskId": self.work["id"], **self.fence}


async def hosted(api: Api, owner: httpx2.AsyncClient, name: str) -> Hosted:
    agent, kind = str(uuid4()), f"type-{name}"
    await owner.put(f"{V1}/agents/{agent}", json={"name": name, "taskTypes": [kind]})
    token = (await owner.post(f"{V1}/agents/{agent}/token")).json()["token"]
    client = await api.client(token)
    await owner.post(f"{V1}/agent-tasks", json={"title": name, "taskType": kind})
    worker = f"host:1:{name}"
    heartbeat = await client.post(
        f"{V1}/workers/{worker}/heartbeat", json={"agents": [name], "slots": 3, "status": "RUNNING"}
    )
    assert heartbeat.status_code == 200, heartbeat.text
    claim = {"agentId": agent, "claimToken": uuid4().hex + uuid4().hex}
    claimed = await client.post(f"{V1}/workers/{worker}/claim", json=claim)
    [work] = claimed.json()["tasks"]
    return Hosted(agent, name, client, worker, work)


@pytest.fixture
async def own(api: Api, owner: httpx2.AsyncClient) -> Hosted:
    return await hosted(api, owner, "mine")


@pytest.fixture
async def other(api: Api, owner: httpx2.AsyncClient) -> Hosted:
    return await hosted(api, owner, "other")


async def test_worker_of_another_agent_is_not_found(
    owner: httpx2.AsyncClient, own: Hosted, other: Hosted
) -> None:
    await owner.post(f"{V1}/workers/members/heartbeat", json={"agents": ["mine"], "slots": 2})
    before = (await owner.get(f"{V1}/workers")).json()["workers"]
    bye = {"status": "STOPPED", "slots": 1, "agents": ["mine"]}
    claim = {"agentId": own.id, "claimToken": "x" * 40}
    for worker in (other.worker, "members"):
        for path, body in (("heartbeat", bye), ("claim", claim), ("sweep", {"host": "host"})):
            answer = await own.client.post(f"{V1}/workers/{worker}/{path}", json=body)
            assert problem(answer) == MISSING, (worker, path)
        answer = await own.client.post(f"{V1}/agents/{own.id}/claim", json={"worker": worker})
        assert problem(answer) == MISSING
    assert (await owner.get(f"{V1}/workers")).json()["workers"] == before


async def test_heartbeat_for_another_agent_is_refused(
    owner: httpx2.AsyncClient, own: Hosted, other: Hosted
) -> None:
    await owner.post(f"{V1}/agents/{other.id}/messages", json={"kind": "note", "body": "b"})
    seen = (await owner.get(f"{V1}/agents/{other.id}")).json()["lastHeartbeat"]
    path = f"{V1}/workers/{own.worker}/heartbeat"
    for names in (["other"], ["mine", "other"], ["nobody"]):
        assert problem(await own.client.post(path, json={"agents": names})) == MISSING
    assert (await own.client.post(path, json={"agents": ["mine"]})).json()["messages"] == 0
    assert (await owner.get(f"{V1}/agents/{other.id}")).json()["lastHeartbeat"] == seen
    assert (
        await other.client.post(
            f"{V1}/workers/{other.worker}/heartbeat", json={"agents": ["other"]}
        )
    ).json()["messages"] == 1


async def test_lease_of_another_agent_is_reported_lost(
    owner: httpx2.AsyncClient, own: Hosted, other: Hosted
) -> None:
    until = (await owner.get(f"{V1}/agent-tasks/{other.work['id']}")).json()["leaseUntil"]
    body = {"agents": ["mine"], "leases": [own.lease, other.lease], "leaseSeconds": 500}
    held = (await own.client.post(f"{V1}/workers/{own.worker}/heartbeat", json=body)).json()
    assert held["lost"] == [other.work["id"]]
    assert (await owner.get(f"{V1}/agent-tasks/{other.work['id']}")).json()["leaseUntil"] == until
    fields = {"currentTaskId": other.work["id"], **other.fence}
    heartbeat = await own.client.post(f"{V1}/agents/{own.id}/heartbeat", json=fields)
    assert problem(heartbeat) == MISSING


REPORTS: dict[str, Any] = {
    "progress": {"progressPercent": 5},
    "complete": {},
    "fail": {"error": "e"},
    "park": {"resumeAt": "2100-01-01T00:00:00Z"},
    "release": {},
    "transcript": {"lines": [{"number": 0, "text": "t"}]},
    "checkpoint": {"data": 1},
    "steps": {"key": "k"},
    "children": {"key": "k", "task": {"title": "t"}},
    "ask": {"key": "k", "title": "t"},
    "not-started": {"error": "e"},
    "timed-out": {},
    "confirm-cancel": {},
    "confirm-pause": {},
    "confirm-gone": {},
}


async def test_task_of_another_agent_is_not_found_even_with_its_lease(
    owner: httpx2.AsyncClient, own: Hosted, other: Hosted
) -> None:
    task = f"{V1}/agent-tasks/{other.work['id']}"
    before = (await owner.get(task)).json()
    for name, body in REPORTS.items():
        method = "PATCH" if name == "progress" else "POST"
        answer = await own.client.request(method, f"{task}/{name}", json=other.fence | body)
        assert problem(answer) == MISSING, name
    assert problem(await own.client.get(f"{task}/steps")) == MISSING
    assert (await owner.get(task)).json() == before
    done = await own.client.post(f"{V1}/agent-tasks/{own.work['id']}/complete", json=own.fence)
    assert done.status_code == 200
    again = await own.client.post(f"{V1}/agent-tasks/{own.work['id']}/complete", json=own.fence)
    assert again.status_code == 200  # told again, because the answer was lost


async def test_agent_with_an_outdated_lease_gets_lease_lost(
    owner: httpx2.AsyncClient, own: Hosted
) -> None:
    task = f"{V1}/agent-tasks/{own.work['id']}"
    assert (await own.client.post(f"{task}/release", json=own.fence)).status_code == 200
    late = await own.client.post(f"{task}/complete", json=own.fence)
    assert problem(late) == (409, "lease_lost")


async def test_member_token_acts_for_every_worker(owner: httpx2.AsyncClient, own: Hosted) -> None:
    body = {"status": "STOPPED", "agents": ["mine"], "slots": 1}
    assert (await owner.post(f"{V1}/workers/{own.worker}/heartbeat", json=body)).status_code == 200
    back = {"status": "RUNNING", "agents": ["mine"], "slots": 1}
    again = await own.client.post(f"{V1}/workers/{own.worker}/heartbeat", json=back)
    assert again.status_code == 200  # it is still the one that this agent registered
