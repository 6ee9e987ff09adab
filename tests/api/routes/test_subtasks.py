"""Subtasks over HTTP: an agent with an attempt's token spawns, waits and asks."""

from typing import Any
from uuid import uuid4

import httpx2
from tests.api.conftest import V1, Api, problem

from tenuto.model.tenancy.access import Role

TASKS = f"{V1}/agent-tasks"


class Agent:
    """An HTTP agent: it claims with its own token and reports with its attempts'."""

    def __init__(self, api: Api, agent: str, client: httpx2.AsyncClient) -> None:
        self._api = api
        self._agent = agent
        self.client = client

    async def claim(self) -> tuple[str, httpx2.AsyncClient]:
        """The one task that there is, and a client that bears its attempt's token."""
        answer = await self.client.post(f"{V1}/agents/{self._agent}/claim", json={"limit": 9})
        [work] = answer.json()["tasks"]
        return work["id"], await self._api.client(work["token"])


async def an_agent(api: Api, owner: httpx2.AsyncClient, name: str) -> Agent:
    agent = str(uuid4())
    body = {"name": name, "agentType": name, "runtimes": ["function"]}
    assert (await owner.put(f"{V1}/agents/{agent}", json=body)).status_code < 300
    token = (await owner.post(f"{V1}/agents/{agent}/token", json={})).json()["token"]
    return Agent(api, agent, await api.client(token))


async def submitted(owner: httpx2.AsyncClient) -> str:
    created = await owner.post(TASKS, json={"title": "root", "agentType": "parent"})
    task: str = created.json()["id"]
    return task


async def spawned(own: httpx2.AsyncClient, task: str, key: str) -> httpx2.Response:
    body = {"key": key, "task": {"title": key, "agentType": "child"}}
    return await own.post(f"{TASKS}/{task}/children", json=body)


async def parked(own: httpx2.AsyncClient, task: str, **output: Any) -> dict[str, Any]:
    answer = await own.post(f"{TASKS}/{task}/park", json=output)
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


async def test_agent_spawns_subtasks_and_waits_for_them(
    api: Api, owner: httpx2.AsyncClient
) -> None:
    parent = await an_agent(api, owner, "parent")
    worker = await an_agent(api, owner, "child")
    task = await submitted(owner)
    _, own = await parent.claim()
    child = (await spawned(own, task, "a")).json()["id"]
    assert (await spawned(own, task, "a")).json()["id"] == child
    reported = await parked(own, task, children=["a"])
    assert reported == {"id": task, "status": "WAITING", "parked": True, "children": []}
    assert await parked(own, task, hold="children") == reported
    assert problem(await spawned(own, task, "b")) == (409, "lease_lost")
    _, its = await worker.claim()
    await its.post(f"{TASKS}/{child}/complete", json={"outputResult": {"n": 1}})
    _, own = await parent.claim()
    reported = await parked(own, task, children=[child, "a"], timeoutSeconds=5)
    assert (reported["parked"], reported["status"]) == (False, "RUNNING")
    ended = {"id": child, "key": "a", "status": "COMPLETED", "output": {"n": 1}, "error": None}
    assert reported["children"] == [ended]
    [listed] = (await owner.get(f"{TASKS}/{task}/children")).json()["tasks"]
    assert (listed["id"], listed["status"]) == (child, "COMPLETED")
    assert problem(await owner.get(f"{TASKS}/{uuid4()}/children")) == (404, "not_found")


async def test_invalid_wait_is_refused(api: Api, owner: httpx2.AsyncClient) -> None:
    parent = await an_agent(api, owner, "parent")
    task = await submitted(owner)
    _, own = await parent.claim()
    bad: list[tuple[dict[str, Any], int, str]] = [
        ({"children": ["nobody"]}, 404, "not_found"),
        ({"children": [task]}, 404, "not_found"),
        ({"children": [], "timeoutSeconds": -1}, 422, "invalid_value"),
        ({"children": ["x"] * 1001}, 422, "invalid_value"),
        ({"children": [1]}, 422, "invalid_value"),
        ({"hold": "children", "key": "k" * 256}, 422, "too_large"),
        ({"hold": "children", "waitUntil": "2030-01-01T00:00:00"}, 422, "invalid_value"),
    ]
    for body, status, code in bad:
        answer = await own.post(f"{TASKS}/{task}/park", json=body)
        assert problem(answer) == (status, code), body
    assert (await parked(own, task, hold="children"))["parked"] is False


async def test_agent_asks_and_only_a_user_answers(api: Api, owner: httpx2.AsyncClient) -> None:
    parent = await an_agent(api, owner, "parent")
    task = await submitted(owner)
    _, own = await parent.claim()
    question = {"key": "go", "title": "shall I?", "body": {"cost": 3}}
    reported = (await own.post(f"{TASKS}/{task}/ask", json=question)).json()
    assert reported == {"id": task, "status": "WAITING", "parked": True, "answer": None}
    [item] = (await owner.get(f"{V1}/inbox?status=OPEN")).json()["items"]
    assert (item["kind"], item["key"], item["body"]) == ("approval", "go", {"cost": 3})
    path = f"{V1}/inbox/{item['id']}"
    for client in (own, parent.client):
        assert problem(await client.post(f"{path}/approve", json={}))[0] in (401, 403)
    viewer = await api.acting(Role.VIEWER)
    assert problem(await viewer.post(f"{path}/approve", json={})) == (403, "forbidden")
    assert (await owner.post(f"{path}/approve", json={"comment": "ok"})).status_code == 200
    assert problem(await owner.post(f"{path}/reject", json={})) == (409, "out_of_turn")
    _, own = await parent.claim()
    reported = (await own.post(f"{TASKS}/{task}/ask", json=question)).json()
    assert (reported["parked"], reported["answer"]["decision"]) == (False, "approved")
    which = {"key": "which", "kind": "question", "title": "which?", "timeoutSeconds": 1000}
    assert (await own.post(f"{TASKS}/{task}/ask", json=which)).json()["parked"]
    [item] = (await owner.get(f"{V1}/inbox?status=OPEN")).json()["items"]
    path = f"{V1}/inbox/{item['id']}"
    assert problem(await owner.post(f"{path}/approve", json={})) == (409, "out_of_turn")
    assert (await owner.post(f"{path}/answer", json={"comment": "left"})).status_code == 200
    _, own = await parent.claim()
    reported = (await own.post(f"{TASKS}/{task}/ask", json=which)).json()
    assert reported["answer"]["answer"] == "left"


async def test_invalid_question_is_refused(api: Api, owner: httpx2.AsyncClient) -> None:
    parent = await an_agent(api, owner, "parent")
    task = await submitted(owner)
    _, own = await parent.claim()
    good: dict[str, Any] = {"key": "k", "title": "t"}
    for wrong in (
        {"key": ""},
        {"key": "$k"},
        {"title": ""},
        {"title": "t" * 256},
        {"kind": "order"},
        {"timeoutSeconds": -1},
        {"timeoutSeconds": 1e12},
    ):
        answer = await own.post(f"{TASKS}/{task}/ask", json=good | wrong)
        assert problem(answer)[0] == 422, wrong
    assert (await owner.get(f"{V1}/inbox")).json()["items"] == []
