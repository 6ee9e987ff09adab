"""Agents over HTTP: limits of their tokens, life cycle, explain and messages."""

from typing import Any
from uuid import uuid4

import httpx2
import pytest
from tests.api.conftest import V1, Api, problem

Agent = dict[str, Any]


@pytest.fixture
async def agent(owner: httpx2.AsyncClient) -> str:
    """An agent that people have made, by its id."""
    created = str(uuid4())
    body = {"name": "a", "maxConcurrentTasks": 1, "chooseRules": ["all"]}
    answer = await owner.put(f"{V1}/agents/{created}", json=body)
    assert (answer.status_code, answer.json()["chooseRules"]) == (200, ["superset"])
    return created


@pytest.fixture
async def itself(api: Api, owner: httpx2.AsyncClient, agent: str) -> httpx2.AsyncClient:
    """A client with the agent's own token."""
    return await api.client((await owner.post(f"{V1}/agents/{agent}/token")).json()["token"])


async def test_agent_cannot_raise_its_own_limits(
    owner: httpx2.AsyncClient, itself: httpx2.AsyncClient, agent: str
) -> None:
    more = {"name": "a", "maxConcurrentTasks": 100, "acceptCommands": True}
    assert problem(await itself.put(f"{V1}/agents/{agent}", json=more)) == (403, "forbidden")
    answered = (await itself.post(f"{V1}/agents", json=more)).json()
    assert (answered["maxConcurrentTasks"], answered["acceptCommands"]) == (1, False)
    # A worker with a person's token brings the same: it is not what a person says of the agent.
    answered = (await owner.post(f"{V1}/agents", json=more)).json()
    assert (answered["maxConcurrentTasks"], answered["acceptCommands"]) == (1, False)
    assert (answered["id"], answered["managed"]) == (agent, True)


async def test_heartbeats_are_stored_as_health(
    owner: httpx2.AsyncClient, itself: httpx2.AsyncClient, agent: str
) -> None:
    body = {"status": "degraded", "progressPercent": 40.5, "memoryMb": 12.5}
    answer = await itself.post(
        f"{V1}/agents/{agent}/heartbeat", json=body | {"cpuPercent": 7, "unheardOf": 1}
    )
    assert answer.json()["messages"] == 0
    await itself.post(f"{V1}/agents/{agent}/heartbeat", json={"memoryMb": 99})
    health = (await owner.get(f"{V1}/agents/{agent}/health?limit=5")).json()
    [sample] = health["history"]
    assert health["current"] == sample
    assert {name: sample[name] for name in body} == body
    assert (health["healthy"], sample["cpuPercent"]) == (True, 7)
    assert (await owner.get(f"{V1}/agents/{agent}/health?limit=0")).status_code in (400, 422)


async def test_heartbeat_with_an_agent_token_stores_no_texts(
    owner: httpx2.AsyncClient, itself: httpx2.AsyncClient, agent: str
) -> None:
    secret = "canary-0123456789"
    values = {"secrets": {"key": secret}}
    await owner.post(f"{V1}/agent-tasks", json={"title": "t", "input": values})
    assert (await itself.post(f"{V1}/agents/{agent}/claim", json={})).json()["tasks"]
    body = {"status": secret, "currentStep": f"with {secret}"}
    heartbeat = await itself.post(f"{V1}/agents/{agent}/heartbeat", json=body)
    assert heartbeat.status_code == 200
    current = (await owner.get(f"{V1}/agents/{agent}/health")).json()["current"]
    assert (current["status"], current["currentStep"]) == ("unknown", None)


async def test_terminated_agent_claims_nothing_and_gets_the_kill_request(
    owner: httpx2.AsyncClient, itself: httpx2.AsyncClient, agent: str
) -> None:
    await owner.post(f"{V1}/agent-tasks", json={"title": "t"})
    [task] = (await itself.post(f"{V1}/agents/{agent}/claim", json={})).json()["tasks"]
    ended = await owner.post(f"{V1}/agents/{agent}/terminate", json={"graceful": False})
    assert ended.json()["status"] == "DRAINING"
    refused = await itself.post(f"{V1}/agents/{agent}/claim", json={})
    assert problem(refused) == (403, "agent_draining")
    fence = {"attempt": task["attempt"], "leaseToken": task["leaseToken"]}
    heartbeat = {"currentTaskId": task["id"]} | fence
    assert (await itself.post(f"{V1}/agents/{agent}/heartbeat", json=heartbeat)).json()[
        "cancel"
    ] is True
    gone = await itself.post(f"{V1}/agent-tasks/{task['id']}/confirm-cancel", json=fence)
    assert gone.json()["status"] == "CANCELLED"
    again = await owner.post(f"{V1}/agents/{agent}/terminate", json={})
    assert again.json()["status"] == "TERMINATED"
    refused = await itself.post(f"{V1}/agents/{agent}/heartbeat", json={})
    assert problem(refused) == (403, "agent_terminated")


async def test_explain_of_an_agent_is_returned(owner: httpx2.AsyncClient, agent: str) -> None:
    await owner.post(f"{V1}/agent-tasks", json={"title": "t"})
    await owner.post(f"{V1}/agent-tasks", json={"title": "t", "capabilities": ["git"]})
    result = (await owner.get(f"{V1}/agents/{agent}/explain")).json()
    assert (result["gates"], result["capacity"]["free"], result["more"]) == ([], 1, 0)
    own, other = result["lanes"]
    assert (own["pending"], own["obstacles"]) == (1, [])
    assert (other["pending"], other["obstacles"]) == (1, ["needs capabilities git"])
    assert other["requires"] == {"task_type": "default", "capabilities": ["git"]}


async def test_messages_are_sent_listed_and_dequeued(
    owner: httpx2.AsyncClient, itself: httpx2.AsyncClient, agent: str
) -> None:
    path = f"{V1}/agents/{agent}/messages"
    body = {"kind": "note", "body": {"n": 1}, "clientMessageId": "m"}
    first = await owner.post(path, json=body)
    assert (first.status_code, first.json()["body"]) == (201, {"n": 1})
    assert (await owner.post(path, json=body)).json()["id"] == first.json()["id"]
    assert problem(await owner.post(path, json=body | {"x": 1}))[0] in (400, 422)
    assert problem(await itself.post(path, json=body)) == (403, "forbidden")
    heartbeat = await itself.post(f"{V1}/agents/{agent}/heartbeat", json={})
    assert heartbeat.json()["messages"] == 1
    batch = {"batchId": str(uuid4())}
    taken = (await itself.post(f"{path}/dequeue", json=batch)).json()
    assert [message["id"] for message in taken["messages"]] == [first.json()["id"]]
    assert (await itself.post(f"{path}/dequeue", json=batch)).json() == taken
    assert (await itself.post(f"{path}/dequeue")).json()["messages"] == []
    assert (await owner.get(path)).json() == {"messages": [], "nextCursor": None}
    assert len((await owner.get(f"{path}?waiting=false")).json()["messages"]) == 1
    others = f"{V1}/agents/{uuid4()}/messages/dequeue"
    assert problem(await itself.post(others)) == (404, "not_found")


async def test_worker_heartbeat_returns_the_request_to_stop(owner: httpx2.AsyncClient) -> None:
    assert problem(await owner.post(f"{V1}/workers/w/drain")) == (404, "not_found")
    heartbeat = {"host": "h", "pid": 1, "agents": []}
    assert (await owner.post(f"{V1}/workers/w/heartbeat", json=heartbeat)).json()["drain"] is False
    agent = (await owner.post(f"{V1}/agents", json={"name": "hosted"})).json()["id"]
    await owner.post(f"{V1}/agents/{agent}/messages", json={"kind": "note"})
    hosting = heartbeat | {"agents": ["hosted", "unknown"]}
    assert (await owner.post(f"{V1}/workers/w/heartbeat", json=hosting)).json()["messages"] == 1
    asked = (await owner.post(f"{V1}/workers/w/drain")).json()
    assert (asked["id"], asked["drainRequestedAt"] is None) == ("w", False)
    assert (await owner.post(f"{V1}/workers/w/heartbeat", json=heartbeat)).json()["drain"] is True


async def test_registration_under_a_used_name_changes_nothing(owner: httpx2.AsyncClient) -> None:
    own, other = str(uuid4()), str(uuid4())
    body = {"name": "dev-1", "maxConcurrentTasks": 3, "taskTags": ["a"]}
    created = (await owner.put(f"{V1}/agents/{own}", json=body)).json()
    refused = await owner.put(f"{V1}/agents/{other}", json={"name": "dev-1", "taskTags": ["b"]})
    assert problem(refused) == (409, "name_taken")
    assert (await owner.get(f"{V1}/agents/{own}")).json() == created
    changed = await owner.put(f"{V1}/agents/{own}", json=body | {"taskTags": ["c"]})
    assert changed.json()["taskTags"] == ["c"]
