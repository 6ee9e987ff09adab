"""Two workspaces: ids of the other reveal nothing, by query conditions and by database roles."""

import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch
from uuid import UUID, uuid4

import asyncpg
import httpx2
import msgspec
import pytest
from tests.api.conftest import V1, Api, running
from tests.contract.conftest import Raw

from tenuto.api.operation import OPERATIONS, PUBLIC, WORK
from tenuto.model.tenancy.access import Role
from tenuto.settings import Settings
from tenuto.store import sql
from tenuto.store.dialects import POSTGRES

SECRET = "hers-alone"
FENCE = {"attempt": 1, "leaseToken": "x"}
BODIES: dict[str, Any] = {
    "PATCH /agent-tasks/{task_id}": {"title": "mine now"},
    "POST /agent-tasks/{task_id}/fail": {"error": "e"},
    "POST /agent-tasks/{task_id}/not-started": {"error": "e"},
    "POST /agent-tasks/{task_id}/transcript": {"lines": [{"number": 0, "text": "t"}]},
    "POST /agent-tasks/{task_id}/steps": {"key": "k"},
    "POST /agent-tasks/{task_id}/children": {"key": "k", "task": {"title": "t"}},
    "POST /agent-tasks/{task_id}/ask": {"key": "k", "title": "t"},
    "POST /agent-tasks/{task_id}/park": {"resumeAt": "2100-01-01T00:00:00Z"},
    "POST /inbox/{item_id}/answer": {"comment": "c"},
    "PATCH /webhooks/{webhook_id}": {"enabled": False},
    "PATCH /schedules/{schedule_id}": {"input": 1},
    "PATCH /triggers/{trigger_id}": {"event": "mine"},
    "PATCH /users/{user_id}": {"role": "VIEWER"},
    "PUT /workspaces/{workspace_id}/quota": {"pending": 0},
    "POST /agents/{agent_id}/messages": {"kind": "note", "body": "b"},
    "POST /agent-tasks/{task_id}/assign": {"agentId": None},
    "POST /agent-tasks/{task_id}/reassign": {"agentId": None},
}
SILENT = {
    "POST /agent-tasks/{task_id}/transcript",  # lines of an attempt that lost its task are dropped
    "GET /agent-tasks/{task_id}/steps",  # nothing was recorded
}
SKIPPED = {
    "PUT /agents/{agent_id}",  # makes what is not there: its own test
}


async def furnished(api: Api) -> tuple[httpx2.AsyncClient, dict[str, str]]:
    """Another workspace's owner, and the ids of what is there."""
    workspace = await api.workspace("hers")
    token = await api.token(Role.OWNER, workspace)
    client = await api.client(token)
    agent = str(uuid4())
    await client.put(f"{V1}/agents/{agent}", json={"name": "hers"})
    task = (await client.post(f"{V1}/agent-tasks", json={"title": SECRET})).json()["id"]
    dead = (await client.post(f"{V1}/agent-tasks", json={"title": SECRET})).json()["id"]
    await client.post(f"{V1}/agent-tasks/{dead}/cancel", json={})
    user = {"name": "her", "password": "a long password"}
    created = await client.post(f"{V1}/users", json=user)
    key = (await client.post(f"{V1}/tokens", json={"name": SECRET})).json()["id"]
    await client.put(f"{V1}/secrets/{SECRET}", json={"value": "v" * 20})
    await client.put(f"{V1}/definitions/{SECRET}", json={"spec": {"prompt": SECRET}})
    await client.put(f"{V1}/definitions/{SECRET}-ask", json={"spec": {"approval": {}}})
    both = {"key": f"{SECRET}-all", "children": [SECRET, f"{SECRET}-ask"], "type": "Parallel"}
    flow = (await client.post(f"{V1}/groups", json=both | {"start": True})).json()["flow"]
    [item] = (await client.get(f"{V1}/inbox")).json()["items"]
    timed = {"name": SECRET, "target": SECRET, "schedule": {"type": "cron", "expression": "@daily"}}
    schedule = (await client.post(f"{V1}/schedules", json=timed)).json()
    rule = {"name": SECRET, "target": SECRET, "event": "x"}
    trigger = (await client.post(f"{V1}/triggers", json=rule)).json()
    await client.post(f"{V1}/gates", json={"kind": "type", "subject": SECRET})
    limit = {"provider": SECRET, "requestsPerMinute": 1}
    await client.put(f"{V1}/rate-limits/{SECRET}", json=limit)
    expected = {"url": "https://1.1.1.1/x", "events": ["*"]}
    hook = (await client.post(f"{V1}/webhooks", json=expected)).json()
    return client, {
        "task_id": task,
        "agent_id": agent,
        "user_id": created.json()["id"],
        "token_id": key,
        "webhook_id": hook["webhook"]["id"],
        "schedule_id": schedule["id"],
        "trigger_id": trigger["id"],
        "workspace_id": str(workspace),
        "delivery_id": str(uuid4()),
        "flow_id": flow["id"],
        "group_id": flow["openGroups"][0]["id"],
        "item_id": item["id"],
        "worker_id": "hers",
        "name": SECRET,
        "key": SECRET,
        "kind": "type",
        "subject": SECRET,
    }


WITH_IDS = sorted(
    route
    for route, operation in OPERATIONS.items()
    if operation.access is not PUBLIC and "{" in route
)


async def compare(api: Api, own: httpx2.AsyncClient, ids: dict[str, str]) -> None:
    """Each route with each of her ids answers like one with an id of nothing."""
    for route in WITH_IDS:
        method, path = route.split()
        short = f"{method} {path.removeprefix(V1)}"
        if short in SKIPPED or "{worker_id}" in path:
            continue
        names = re.findall(r"\{(\w+)\}", path)
        random = {name: str(uuid4()) for name in names}
        body = BODIES.get(short)
        if OPERATIONS[route].access == WORK and method != "GET":
            body = FENCE | (body or {})
        if method == "PUT" and ("{name}" in path or "{key}" in path):
            continue  # a secret or definition of mine with the name of hers: no id
        answers = []
        for chosen in (ids, random):
            url = path
            for name in names:
                url = url.replace(f"{{{name}}}", chosen[name])
            more = {} if body is None else {"json": body}
            answer = await own.request(method, url, **more)
            output = answer.content
            for name in names:
                output = output.replace(chosen[name].encode(), b"<id>")
            stored = {k: v for k, v in answer.headers.items() if k not in ("date", "x-request-id")}
            answers.append((answer.status_code, output, {**stored, "content-length": ""}))
        assert answers[0] == answers[1], route
        if short not in SILENT:
            assert answers[0][0] in (404, 409), (route, answers[0])


async def untouched(hers: httpx2.AsyncClient, ids: dict[str, str]) -> None:
    """Asserts that nothing of the other workspace has changed."""
    task = (await hers.get(f"{V1}/agent-tasks/{ids['task_id']}")).json()
    assert (task["title"], task["status"], task["version"]) == (SECRET, "PENDING", 1)
    assert (await hers.get(f"{V1}/agents/{ids['agent_id']}")).json()["status"] == "IDLE"
    assert ids["token_id"] in [item["id"] for item in (await hers.get(f"{V1}/tokens")).json()]
    assert [item["name"] for item in (await hers.get(f"{V1}/secrets")).json()] == [SECRET]
    assert (await hers.get(f"{V1}/definitions/{SECRET}")).json()["version"] == 1
    for name, path in (("flow_id", "flows"), ("group_id", "groups")):
        assert (await hers.get(f"{V1}/{path}/{ids[name]}")).json()["status"] == "RUNNING"
    assert (await hers.get(f"{V1}/inbox/{ids['item_id']}")).json()["status"] == "OPEN"
    assert (await hers.get(f"{V1}/webhooks/{ids['webhook_id']}")).json()["enabled"] is True
    for path in (f"schedules/{ids['schedule_id']}", f"triggers/{ids['trigger_id']}"):
        stored = (await hers.get(f"{V1}/{path}")).json()
        assert (stored["status"], stored["version"]) == ("ACTIVE", 1)
    gates = (await hers.get(f"{V1}/gates")).json()["gates"]
    assert [(gate["kind"], gate["subject"]) for gate in gates] == [("type", SECRET)]
    assert len((await hers.get(f"{V1}/rate-limits")).json()["rateLimits"]) == 1


LISTS = (
    "agent-tasks",
    "agents",
    "workers",
    "tokens",
    "secrets",
    "users",
    "webhooks",
    "workspaces",
    "stats",
    "dead-letters",
    "definitions",
    "schedules",
    "triggers",
    "flows",
    "groups",
    "inbox",
    "gates",
    "rate-limits",
    "coordinator/status",
    "coordinator/logs",
    "me",
)


async def test_id_of_another_workspace_is_not_found(api: Api, owner: httpx2.AsyncClient) -> None:
    hers, ids = await furnished(api)
    await compare(api, owner, ids)
    await untouched(hers, ids)
    taken = await owner.put(f"{V1}/agents/{ids['agent_id']}", json={"name": "mine"})
    assert taken.status_code == 409
    for path in LISTS:
        text = (await owner.get(f"{V1}/{path}")).text
        assert SECRET not in text, path
        assert not any(item in text for item in ids.values() if len(item) == 36), path
    elsewhere = {"X-Workspace-Id": ids["workspace_id"]}
    nowhere = {"X-Workspace-Id": str(uuid4())}
    answers = [await owner.get(f"{V1}/me", headers=item) for item in (elsewhere, nowhere)]
    assert answers[0].status_code == 403
    texts = [
        answer.text.replace(missing_id["X-Workspace-Id"], "<id>")
        for answer, missing_id in zip(answers, (elsewhere, nowhere), strict=True)
    ]
    assert texts[0] == texts[1]


async def test_worker_with_an_equal_name_runs_tasks_of_its_workspace_only(
    api: Api, owner: httpx2.AsyncClient
) -> None:
    hers, ids = await furnished(api)
    body = {"worker": "host:1", "limit": 1}
    [_] = (await hers.post(f"{V1}/agents/{ids['agent_id']}/claim", json=body)).json()["tasks"]
    for client, count in ((hers, 1), (owner, 0)):
        await client.post(f"{V1}/workers/host:1/heartbeat", json={})
        [worker] = (await client.get(f"{V1}/workers")).json()["workers"]
        assert worker["running"] == count


async def test_sweep_of_a_host_skips_sessions_of_other_workspaces(
    api: Api, owner: httpx2.AsyncClient, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hers = await api.client(await api.token(Role.OWNER, await api.workspace("hers")))
    tasks = []
    for client in (hers, owner):
        agent = f"{V1}/agents/{uuid4()}"
        await client.put(agent, json={"name": "a"})
        await client.post(f"{V1}/agent-tasks", json={"title": "x"})
        [work] = (await client.post(f"{agent}/claim", json={"worker": "h:1"})).json()["tasks"]
        fence = {"attempt": work["attempt"], "leaseToken": work["leaseToken"]}
        await client.post(f"{V1}/agent-tasks/{work['id']}/complete", json=fence)
        tasks.append(work["id"])
    await Raw(database_url).execute("update attempt set unconfirmed = true")
    monkeypatch.setattr("tenuto.api.routes.worker_protocol.MAX_SWEPT", 1)
    for client, task in zip((hers, owner), tasks, strict=True):
        result = await client.post(f"{V1}/workers/h:1/sweep", json={"host": "h"})
        assert [item["taskId"] for item in result.json()["unconfirmed"]] == [task]


@pytest.fixture
def careless() -> Iterator[None]:
    """Queries that forget whose rows they are about, as if their author had."""
    queries = sql.load(POSTGRES)
    pattern = re.compile(r"(?:\b[a-z_]+\.)?\bworkspace = :workspace\b")
    changed = {}
    for name, query in queries.items():
        steps = tuple(
            msgspec.structs.replace(step, text=pattern.sub("(:workspace is not null)", step.text))
            for step in query.steps
        )
        if steps != query.steps:
            changed[name] = msgspec.structs.replace(query, steps=steps)
    assert len(changed) > 20
    with patch.dict(queries, changed):
        yield


@pytest.fixture
async def roles_alone(
    postgres_url: str, tmp_path: Path, careless: None
) -> AsyncIterator[tuple[Api, httpx2.AsyncClient]]:
    settings = Settings(database=postgres_url, data=str(tmp_path), port=0)
    async with running(settings) as api:
        yield api, await api.acting()


async def test_database_roles_alone_isolate_workspaces(
    roles_alone: tuple[Api, httpx2.AsyncClient],
) -> None:
    api, own = roles_alone
    hers, ids = await furnished(api)
    for path in (
        "agent-tasks agents secrets webhooks stats dead-letters definitions flows groups inbox"
    ).split():
        assert SECRET not in (await own.get(f"{V1}/{path}")).text, path
    for name, path in (
        ("task_id", "agent-tasks"),
        ("agent_id", "agents"),
        ("webhook_id", "webhooks"),
        ("flow_id", "flows"),
        ("group_id", "groups"),
        ("item_id", "inbox"),
    ):
        assert (await own.get(f"{V1}/{path}/{ids[name]}")).status_code == 404
    for position in (f"agent-tasks/{ids['task_id']}", f"flows/{ids['flow_id']}"):
        cancelled = await own.post(f"{V1}/{position}/cancel", json={})
        assert cancelled.status_code == 404, position
    approved = await own.post(f"{V1}/inbox/{ids['item_id']}/approve", json={})
    assert approved.status_code == 404
    assert (await own.delete(f"{V1}/secrets/{SECRET}")).status_code == 404
    assert (await own.delete(f"{V1}/definitions/{SECRET}")).status_code == 404
    await untouched(hers, ids)


async def test_every_workspace_table_has_forced_row_security(postgres_url: str) -> None:
    from tenuto import app

    store = app.create_store(postgres_url)
    await store.migrate()
    await store.close()
    connection = await asyncpg.connect(postgres_url)
    try:
        rows = await connection.fetch(
            "select relname, relrowsecurity and relforcerowsecurity as forced from pg_class"
            " where relnamespace = 'public'::regnamespace and relkind in ('r', 'p')"
        )
        loose = {row["relname"] for row in rows if not row["forced"]}
        assert loose == {"schema_migration"}
        kinds = await connection.fetch(
            "select rolname, rolsuper, rolbypassrls, rolcanlogin from pg_roles"
            " where rolname in ('tenuto_runtime', 'tenuto_system')"
        )
        assert [tuple(row)[1:] for row in kinds] == [(False, False, False)] * 2
        owned = await connection.fetchval(
            "select count(*) from pg_class where relowner in"
            " ('tenuto_runtime'::regrole, 'tenuto_system'::regrole)"
        )
        assert owned == 0
        views = await connection.fetchval(
            "select count(*) from pg_class where relkind in ('v', 'm')"
            " and relnamespace = 'public'::regnamespace"
        )
        assert views == 0  # one would need security_invoker
    finally:
        await connection.close()


async def test_connection_of_a_workspace_sees_and_writes_only_its_rows(
    postgres_url: str, tmp_path: Path
) -> None:
    settings = Settings(database=postgres_url, data=str(tmp_path), port=0)
    async with running(settings) as api:
        await furnished(api)
        own = UUID(int=0)
        connection = await asyncpg.connect(
            postgres_url,
            server_settings={"role": "tenuto_runtime", "app.workspace": str(own)},
        )
        anonymous = await asyncpg.connect(postgres_url, server_settings={"role": "tenuto_runtime"})
        try:
            tables = await connection.fetch(
                "select table_name from information_schema.columns"
                " where column_name = 'workspace' and table_schema = 'public'"
            )
            assert len(tables) > 20
            for (table,) in tables:
                for item in (connection, anonymous):
                    assert await item.fetchval(f"select count(*) from {table}") == 0, table
                    assert await item.execute(f"delete from {table}") == "DELETE 0"
            with pytest.raises(asyncpg.InsufficientPrivilegeError):
                await connection.execute(
                    "insert into task_label (task, workspace, label)"
                    " select gen_random_uuid(), gen_random_uuid(), 'x'"
                )
            for hidden in ("app_user", "session", "leader", "cursor", "gateway"):
                with pytest.raises(asyncpg.InsufficientPrivilegeError):
                    await connection.fetch(f"select * from {hidden}")
        finally:
            await connection.close()
            await anonymous.close()
