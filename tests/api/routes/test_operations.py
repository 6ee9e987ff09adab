"""The coordinator over HTTP: status, recovery of one workspace, logs, warnings in heartbeats."""

from uuid import UUID, uuid4

import httpx2
import pytest
from tests.api.conftest import V1, Api, problem
from tests.contract.conftest import Raw, profile

from tenuto.client.remote.engine import connect_to_server
from tenuto.coordinator.coordinator import Coordinator
from tenuto.engine.engine import DEFAULT_WORKSPACE, Engine
from tenuto.engine.tasks.report import WorkerInfo
from tenuto.model.errors import Unavailable
from tenuto.model.tasks.attempts import HUNG_WARNING
from tenuto.model.tasks.submission import NewTask
from tenuto.model.tasks.task import Fence
from tenuto.model.tenancy.access import Role
from tenuto.settings import Settings
from tenuto.store.protocol import Script, Statement


async def expired(api: Api, raw: Raw, workspace: UUID) -> UUID:
    """A task of the workspace whose lease has run out."""
    engine = api.service.engine_for(workspace)
    task = (await engine.submit(NewTask(title="held"))).id
    agent = await engine.register_agent(profile(id=engine.clock.new_id(), workspace=workspace))
    [work] = await engine.claim(agent, "host:1:gone", 1, 20)
    assert work.fence.task == task
    long_ago = "1" if raw.path is not None else "to_timestamp(1)"
    await raw.execute(f"update task set lease_until = {long_ago} where id = '{task}'")
    return task


async def status_of(api: Api, workspace: UUID, task: UUID) -> str:
    return (await api.service.engine_for(workspace).show(task)).status


async def test_recover_covers_one_workspace_only(
    api: Api, settings: Settings, database_url: str
) -> None:
    raw = Raw(database_url)
    other = await api.workspace("other")
    own_item = await expired(api, raw, DEFAULT_WORKSPACE)
    theirs = await expired(api, raw, other)
    client = await api.acting(Role.ADMIN)
    done = (await client.post(f"{V1}/coordinator/recover", json={})).json()
    assert done == {"ok": True, "expired": 1, "promoted": 1, "flowed": 0}
    assert await status_of(api, DEFAULT_WORKSPACE, own_item) == "PENDING"
    assert await status_of(api, other, theirs) == "RUNNING"
    refused = await client.post(f"{V1}/coordinator/recover", json={"workspaceId": str(other)})
    unknown = await client.post(f"{V1}/coordinator/recover", json={"workspaceId": str(uuid4())})
    assert problem(refused) == problem(unknown) == (403, "forbidden")
    details = {answer.json()["detail"].rpartition(" ")[0] for answer in (refused, unknown)}
    assert details == {"the token has no access to workspace"}
    assert await status_of(api, other, theirs) == "RUNNING"
    nothing = (await client.post(f"{V1}/coordinator/recover")).json()
    assert nothing == {"ok": True, "expired": 0, "promoted": 0, "flowed": 0}
    own = {"workspaceId": str(DEFAULT_WORKSPACE)}
    assert (await client.post(f"{V1}/coordinator/recover", json=own)).status_code == 200
    del settings


async def belongs(api: Api, workspace: UUID, user: UUID, role: Role) -> None:
    """Make a user of one workspace a member of another."""
    member = {"workspace": workspace, "user_id": user, "role": role.name}

    def script() -> Script[None]:
        yield Statement("member_put", member | {"now": api.service.clock.now()})

    await api.service.store.transact_one(script)


async def test_member_of_two_workspaces_recovers_the_named_one(api: Api, database_url: str) -> None:
    raw = Raw(database_url)
    identity = api.service.identity
    other, third = await api.workspace("other"), await api.workspace("third")
    theirs, others = await expired(api, raw, other), await expired(api, raw, third)
    user = await identity.create_user("ann", "a long password", DEFAULT_WORKSPACE, Role.OWNER)
    await belongs(api, other, user, Role.ADMIN)
    await belongs(api, third, user, Role.MEMBER)
    client = await api.client((await identity.login("ann", "a long password")).token)
    asked = await client.post(f"{V1}/coordinator/recover", json={"workspaceId": str(other)})
    assert asked.json()["expired"] == 1
    assert await status_of(api, other, theirs) == "PENDING"
    refused = await client.post(f"{V1}/coordinator/recover", json={"workspaceId": str(third)})
    assert problem(refused) == (403, "forbidden")
    assert await status_of(api, third, others) == "RUNNING"
    lines = (await client.get(f"{V1}/coordinator/logs?workspace={other}&level=INFO")).json()
    assert any("lease_expired" in line["text"] for line in lines["lines"])
    refused = await client.get(f"{V1}/coordinator/logs?workspace={third}")
    assert problem(refused) == (403, "forbidden")


async def test_status_and_logs_show_the_leader(api: Api, owner: httpx2.AsyncClient) -> None:
    engine = Engine(api.service.store, actor="here")
    one, two = (Coordinator(engine, Settings(), {}, name) for name in ("one", "two"))
    for item in (one, two, one):
        await item._run_cycle_logged()
    status = (await owner.get(f"{V1}/coordinator/status")).json()
    assert (status["active"], status["instanceId"], status["epoch"]) == (True, "one", 1)
    assert status["standby"] == ["two"]
    assert status["since"] <= status["lastHeartbeat"] < status["until"]
    assert status["lastCycle"]["seconds"] >= 0
    assert status["lastCycle"]["counts"]["expired"] == 0
    assert set(status["lastCycle"]["duties"]) >= {"flow", "expire", "promote", "fire", "relay"}
    await engine.maintenance.record_event(
        "coordinator.conflict", "WARN", "lost the lead to two, epoch 2", "one"
    )
    lines = (await owner.get(f"{V1}/coordinator/logs?level=INFO")).json()["lines"]
    reported = {line["event"]: line["text"] for line in lines if line["event"].startswith("coord")}
    assert reported["coordinator.led"] == "coordinator.led: became leader, epoch 1"
    assert reported["coordinator.conflict"].endswith("lost the lead to two, epoch 2")
    warned = (await owner.get(f"{V1}/coordinator/logs")).json()["lines"]
    assert "coordinator.led" not in [line["event"] for line in warned]
    member = await api.acting(Role.MEMBER)
    assert problem(await member.get(f"{V1}/coordinator/logs")) == (403, "forbidden")
    assert problem(await owner.get(f"{V1}/coordinator/logs?level=LOUD"))[0] == 422


async def test_health_reports_since_when_the_database_is_unavailable(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    anybody = await api.client()

    async def away(_name: str) -> None:
        raise Unavailable("away")

    with monkeypatch.context() as patch:
        patch.setattr(api.service.maintenance, "leader", away)
        first = await anybody.get("/health/coordinator")
        again = await anybody.get("/health/coordinator")
    assert (first.status_code, first.json()["database"]) == (503, "unreachable")
    assert first.json()["downSince"] == again.json()["downSince"] is not None
    back = await anybody.get("/health/coordinator")
    assert (back.status_code, back.json()["downSince"]) == (200, None)


async def test_coordinator_log_entries_are_not_tasks(api: Api, owner: httpx2.AsyncClient) -> None:
    """Other readers of events, such as streams and webhooks, see nothing of it."""
    engine = Engine(api.service.store, actor="here")
    await engine.maintenance.record_event("coordinator.conflict", "ERROR", "m", "one")
    assert (await owner.get(f"{V1}/agent-tasks")).json()["tasks"] == []
    assert await engine.maintenance.audit() == []
    coordinator = Coordinator(engine, Settings(), {}, "one")
    await coordinator.cycle_once()
    assert (await coordinator.cycle_once()).leading


async def test_heartbeat_returns_the_warning(
    api: Api, owner: httpx2.AsyncClient, database_url: str
) -> None:
    raw = Raw(database_url)
    body = {"title": "slow", "estimateMinutes": 10}
    task = (await owner.post(f"{V1}/agent-tasks", json=body)).json()["id"]
    agent = uuid4()
    await owner.put(f"{V1}/agents/{agent}", json={"name": "a"})
    claims = (await owner.post(f"{V1}/agents/{agent}/claim", json={})).json()
    [claimed] = claims["tasks"]
    heartbeat = {
        "currentTaskId": task,
        "attempt": claimed["attempt"],
        "leaseToken": claimed["leaseToken"],
    }
    reported = (await owner.post(f"{V1}/agents/{agent}/heartbeat", json=heartbeat)).json()
    assert reported["warning"] is None
    lease = {"taskId": task, "attempt": claimed["attempt"], "leaseToken": claimed["leaseToken"]}
    held = (await owner.post(f"{V1}/workers/w/heartbeat", json={"leases": [lease]})).json()
    assert held["hung"] == []
    started = "1" if raw.path is not None else "to_timestamp(1)"
    await raw.execute(f"update task set started_at = {started}, due_at = {started}")
    assert await api.service.maintenance.promote_once("test") == 1
    reported = (await owner.post(f"{V1}/agents/{agent}/heartbeat", json=heartbeat)).json()
    assert reported["warning"] == HUNG_WARNING
    held = (await owner.post(f"{V1}/workers/w/heartbeat", json={"leases": [lease]})).json()
    assert (held["hung"], held["lost"]) == ([task], [])
    fence = Fence(UUID(task), claimed["attempt"], claimed["leaseToken"])
    async with connect_to_server(api.url, await api.token(), None) as far:
        renewed = await far.worker_heartbeat(WorkerInfo("w", "h", 1), [fence], 20)
    assert renewed.held[fence.task].hung
