"""Usage, budgets and concurrency keys over HTTP."""

from typing import Any
from uuid import uuid4

import httpx2
import pytest
from tests.api.conftest import V1, Api, problem


async def _claimed(api: Api, owner: httpx2.AsyncClient, **task: Any) -> tuple[str, Any]:
    """A running task, and the client of its attempt."""
    created = await owner.post(f"{V1}/agent-tasks", json={"title": "t", **task})
    assert created.status_code == 201
    agent = uuid4()
    await owner.put(f"{V1}/agents/{agent}", json={"name": f"agent {agent}"})
    [work] = (await owner.post(f"{V1}/agents/{agent}/claim")).json()["tasks"]
    assert work["id"] == created.json()["id"]
    return work["id"], await api.client(work["token"])


async def test_usage_of_attempts_is_counted_and_shown(api: Api, owner: httpx2.AsyncClient) -> None:
    task, session = await _claimed(api, owner)
    used = {"model": "m", "inputTokens": 100, "outputTokens": 20, "costUsd": 0.25, "new": "ignored"}
    path = f"{V1}/agent-tasks/{task}"
    reported = await session.patch(f"{path}/progress", json={"progressPercent": 5, "usage": used})
    assert reported.status_code == 200
    bad = await session.patch(f"{path}/progress", json={"usage": {"inputTokens": -1}})
    assert problem(bad) == (422, "invalid_value")
    await session.post(f"{path}/complete", json={"usage": used})
    shown = (await owner.get(path)).json()
    assert (shown["status"], shown["progressPercent"]) == ("COMPLETED", 5)
    assert (shown["inputTokens"], shown["outputTokens"], shown["costUsd"]) == (200, 40, 0.5)
    [attempt] = (await owner.get(f"{path}/attempts")).json()
    assert (attempt["inputTokens"], attempt["costUsd"]) == (200, 0.5)
    spending = (await owner.get(f"{V1}/stats")).json()["spending"]
    assert spending == {
        "tokensToday": 240,
        "costUsdToday": 0.5,
        "inputTokens": 200,
        "outputTokens": 40,
        "costUsd": 0.5,
    }


async def test_usage_of_a_failed_attempt_is_counted(api: Api, owner: httpx2.AsyncClient) -> None:
    task, session = await _claimed(api, owner)
    body = {"error": "boom", "usage": {"outputTokens": 3}}
    await session.post(f"{V1}/agent-tasks/{task}/fail", json=body)
    assert (await owner.get(f"{V1}/agent-tasks/{task}")).json()["outputTokens"] == 3


async def test_exceeded_budget_pauses_and_a_user_raises_it(
    api: Api, owner: httpx2.AsyncClient
) -> None:
    task, session = await _claimed(api, owner, budget={"costUsd": 1})
    path = f"{V1}/agent-tasks/{task}"
    await session.patch(f"{path}/progress", json={"usage": {"costUsd": 1.5}})
    shown = (await owner.get(path)).json()
    assert shown["pauseRequestedAt"] is not None
    assert shown["budget"] == {"tokens": None, "costUsd": 1}
    await session.post(f"{path}/confirm-pause", json={"receipt": {"state": "killed"}})
    assert (await owner.get(path)).json()["waitingFor"] == "budget"
    [item] = (await owner.get(f"{V1}/inbox?status=OPEN")).json()["items"]
    assert (item["kind"], item["taskId"]) == ("budget", task)
    answer = f"{V1}/inbox/{item['id']}/approve"
    small = await owner.post(answer, json={"budget": {"costUsd": 1.2}})
    assert problem(small) == (422, "budget_too_small")
    assert problem(await owner.post(answer, json={"budget": {"dollars": 2}}))[0] in (400, 422)
    assert (await owner.post(answer, json={"budget": {"costUsd": 9}})).status_code == 200
    shown = (await owner.get(path)).json()
    assert (shown["status"], shown["budget"]["costUsd"]) == ("PENDING", 9)


async def test_concurrency_key_limits_running_tasks(owner: httpx2.AsyncClient) -> None:
    task = {"title": "t", "concurrency": {"key": "deploy"}}
    first = (await owner.post(f"{V1}/agent-tasks", json=task)).json()
    assert first["concurrency"] == {"key": "deploy", "limit": 1, "policy": "queue"}
    second = (await owner.post(f"{V1}/agent-tasks", json=task)).json()
    assert (first["status"], second["status"]) == ("PENDING", "WAITING")
    assert second["waitingFor"] == "concurrency"
    reason = (await owner.get(f"{V1}/agent-tasks/{second['id']}/explain")).json()
    assert "'deploy'" in reason["summary"]
    task["concurrency"] = {"key": "deploy", "policy": "cancel_new"}
    third = (await owner.post(f"{V1}/agent-tasks", json=task)).json()
    assert third["status"] == "CANCELLED"
    for bad in ({"key": "k", "policy": "hope"}, {"key": "k", "limit": 0}, {"limit": 1}, {"k": 1}):
        refused = await owner.post(f"{V1}/agent-tasks", json={"title": "t", "concurrency": bad})
        assert problem(refused)[0] in (400, 422)


@pytest.mark.parametrize("wrong", [{"progressPercent": 101}, {"currentStep": "a\x00b"}])
async def test_refused_report_counts_no_usage(
    api: Api, owner: httpx2.AsyncClient, wrong: dict[str, Any]
) -> None:
    task, session = await _claimed(api, owner)
    path = f"{V1}/agent-tasks/{task}"
    body: dict[str, Any] = {"checkpointData": 1, "usage": {"inputTokens": 7}}
    refused = await session.patch(f"{path}/progress", json=body | wrong)
    assert refused.status_code == 422
    right = await session.patch(f"{path}/progress", json=body | {"progressPercent": 99})
    assert right.json()["checkpointSeq"] == 1
    assert (await owner.get(path)).json()["inputTokens"] == 7
