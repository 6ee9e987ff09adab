"""The examples of the design, as written."""

from uuid import uuid4

import httpx2
from tests.api.conftest import V1, Api, problem

TASK = {
    "title": "Fix TypeScript strict errors in U-Connect",
    "description": "Run tsc --noEmit, fix all errors, commit changes",
    "taskType": "development",
    "priority": 8,
    "inputContext": {
        "repository": "u-connect",
        "branch": "main",
        "commands": ["pnpm install", "pnpm tsc:check"],
    },
    "dependsOn": [],
    "maxRetries": 2,
    "estimatedDurationMinutes": 30,
}


async def test_task_runs_from_submit_to_result(api: Api, owner: httpx2.AsyncClient) -> None:
    created = await owner.post(f"{V1}/agent-tasks", json=TASK)
    assert created.status_code == 201
    task = created.json()["id"]
    assert created.json()["maxAttempts"] == 3

    matches = await owner.get(f"{V1}/agent-tasks?status=PENDING&priority>=8")
    assert [item["id"] for item in matches.json()["tasks"]] == [task]
    assert (await owner.get(f"{V1}/agent-tasks?priority>=9")).json()["tasks"] == []

    agent = uuid4()
    put = await owner.put(
        f"{V1}/agents/{agent}",
        json={
            "name": "Dev Agent #1",
            "model": "claude-sonnet-4",
            "capabilities": ["typescript", "nestjs", "prisma"],
            "maxConcurrentTasks": 2,
            "heartbeatIntervalSeconds": 30,
        },
    )
    assert put.status_code == 200
    claimed = (await owner.post(f"{V1}/agents/{agent}/claim", json={"limit": 1})).json()["tasks"]
    assert [item["id"] for item in claimed] == [task]
    assert claimed[0]["inputContext"] == TASK["inputContext"]

    session = await api.client(claimed[0]["token"])
    heartbeat = await session.post(
        f"{V1}/agents/{agent}/heartbeat",
        json={
            "status": "healthy",
            "currentTaskId": task,
            "progressPercent": 45,
            "currentStep": "Running tsc --noEmit",
            "memoryMb": 512,
            "cpuPercent": 35,
        },
    )
    assert heartbeat.status_code == 200
    assert heartbeat.json()["cancel"] is False
    session = await api.client(heartbeat.json()["token"])
    reported = await session.patch(
        f"{V1}/agent-tasks/{task}/progress",
        json={
            "progressPercent": 70,
            "currentStep": "Fixing type errors in packages/shared",
            "checkpointData": {"filesProcessed": 15, "errorsFixed": 8, "remainingFiles": 5},
        },
    )
    assert reported.status_code == 200
    shown = (await owner.get(f"{V1}/agent-tasks/{task}")).json()
    assert (shown["status"], shown["progressPercent"]) == ("RUNNING", 70)
    assert shown["checkpointData"]["filesProcessed"] == 15
    working = await owner.get(f"{V1}/agents?status=WORKING&coordinatorEnabled=true")
    assert [item["id"] for item in working.json()["agents"]] == [str(agent)]

    result = {"filesModified": 20, "commitHash": "abc123", "buildStatus": "passing"}
    ended = await session.post(
        f"{V1}/agent-tasks/{task}/complete",
        json={"outputResult": result, "summary": "All TypeScript strict errors resolved."},
    )
    assert ended.json() == {"id": task, "status": "COMPLETED"}
    shown = (await owner.get(f"{V1}/agent-tasks/{task}")).json()
    assert (shown["status"], shown["outputResult"]) == ("COMPLETED", result)
    late = await session.patch(f"{V1}/agent-tasks/{task}/progress", json={"progressPercent": 1})
    assert problem(late) == (409, "lease_lost")
    logs = await owner.get(f"{V1}/agent-tasks/{task}/logs?level=ERROR&limit=100")
    assert logs.json()["lines"] == []


async def test_task_is_edited_cancelled_and_retried(owner: httpx2.AsyncClient) -> None:
    task = (await owner.post(f"{V1}/agent-tasks", json=TASK)).json()["id"]
    held = await owner.patch(f"{V1}/agent-tasks/{task}", json={"priority": 10, "status": "PAUSED"})
    assert (held.json()["priority"], held.json()["status"]) == (10, "PAUSED")
    ended = await owner.post(
        f"{V1}/agent-tasks/{task}/cancel", json={"reason": "Requirements changed"}
    )
    assert ended.json()["status"] == "CANCELLED"
    again = await owner.post(f"{V1}/agent-tasks/{task}/retry")
    assert again.json()["status"] == "PENDING"


async def test_scheduled_task_is_started_early(owner: httpx2.AsyncClient) -> None:
    later = {"title": "t", "runAt": "2100-01-01T00:00:00Z"}
    created = (await owner.post(f"{V1}/agent-tasks", json=later)).json()
    assert (created["status"], created["waitingFor"]) == ("WAITING", "schedule")
    assert created == (await owner.get(f"{V1}/agent-tasks/{created['id']}")).json()
    begun = await owner.post(f"{V1}/agent-tasks/{created['id']}/start")
    assert begun.json()["status"] == "PENDING"
    again = await owner.post(f"{V1}/agent-tasks/{created['id']}/start")
    assert problem(again) == (409, "out_of_turn")


async def test_submit_response_equals_the_stored_task(owner: httpx2.AsyncClient) -> None:
    body = TASK | {
        "tags": ["b", "a", "b"],
        "taskTags": ["z", "y"],
        "metadata": {"requiredCapabilities": ["gpu"]},
        "retryBackoffSeconds": 7,
        "timeoutSeconds": 60,
        "model": "m",
        "command": None,
    }
    created = await owner.post(f"{V1}/agent-tasks", json=body)
    shown = await owner.get(f"{V1}/agent-tasks/{created.json()['id']}")
    assert created.json() == shown.json()
    assert created.headers["etag"] == shown.headers["etag"]


async def test_submit_response_has_no_secrets(owner: httpx2.AsyncClient) -> None:
    body = {"title": "t", "input": {"secrets": {"key": "s3cret-value"}}}
    created = (await owner.post(f"{V1}/agent-tasks", json=body)).json()
    assert created["inputContext"] == {"secrets": {"key": "***"}}
    assert created == (await owner.get(f"{V1}/agent-tasks/{created['id']}")).json()


async def test_agent_reports_health_and_is_terminated(owner: httpx2.AsyncClient) -> None:
    agent = uuid4()
    await owner.put(f"{V1}/agents/{agent}", json={"name": "a"})
    assert (await owner.get(f"{V1}/agents/{agent}/health")).json()["healthy"] is True
    assert (await owner.get(f"{V1}/agents/{agent}/tasks?status=RUNNING")).json()["tasks"] == []
    gone = await owner.post(
        f"{V1}/agents/{agent}/terminate", json={"reason": "Manual shutdown", "graceful": True}
    )
    assert gone.json()["status"] == "TERMINATED"
    refused = await owner.post(f"{V1}/agents/{agent}/claim", json={})
    assert problem(refused) == (403, "agent_terminated")


async def test_coordinator_and_health_are_shown(owner: httpx2.AsyncClient) -> None:
    status = (await owner.get(f"{V1}/coordinator/status")).json()
    assert set(status["stats"]) == {"pendingTasks", "runningTasks", "healthyAgents", "staleAgents"}
    assert {"active", "instanceId", "workspaces", "lastHeartbeat"} <= set(status)
    assert (await owner.post(f"{V1}/coordinator/recover", json={})).status_code == 200
    assert (await owner.get(f"{V1}/coordinator/logs?level=ERROR")).json()["lines"] == []
    health = (await owner.get("/health/coordinator")).json()
    assert {"status", "coordinator", "database", "valkey", "gateway"} <= set(health)
    assert {"active", "lastCycle", "cycleCount"} == set(health["coordinator"])
    assert (await owner.get("/health/live")).json() == {"status": "healthy"}
