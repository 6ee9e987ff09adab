"""Reading secrets over the API: tokens of users, programs and agents."""

from typing import Any

import httpx2
import pytest
from tests.api.conftest import V1, Api, problem

from tenuto.model.tenancy.access import Role

TASKS = f"{V1}/agent-tasks"
VALUE = "payroll-canary-19e4"
NAMED = {"x": {"$secret": "payroll"}}


async def keep(owner: httpx2.AsyncClient, **use: Any) -> None:
    body = {"value": VALUE} | ({"use": use} if use else {})
    answer = await owner.put(f"{V1}/secrets/payroll", json=body)
    assert answer.status_code == 204, answer.text


async def agent_of(client: httpx2.AsyncClient, name: str) -> str:
    created = await client.post(f"{V1}/agents", json={"name": name, "runtimes": ["http"]})
    return str(created.json()["id"])


async def claim(client: httpx2.AsyncClient, agent: str) -> list[dict[str, Any]]:
    answer = await client.post(f"{V1}/agents/{agent}/claim", json={})
    assert answer.status_code == 200, answer.text
    result: list[dict[str, Any]] = answer.json()["tasks"]
    return result


async def as_worker(client: httpx2.AsyncClient, agent: str, token: str) -> list[dict[str, Any]]:
    body = {"agentId": agent, "claimToken": token, "limit": 1}
    answer = await client.post(f"{V1}/workers/w/claim", json=body)
    assert answer.status_code == 200, answer.text
    result: list[dict[str, Any]] = answer.json()["tasks"]
    return result


async def submitted(client: httpx2.AsyncClient) -> str:
    created = await client.post(TASKS, json={"title": "x", "input": NAMED})
    assert created.status_code == 201, created.text
    return str(created.json()["id"])


async def refusal_reason(client: httpx2.AsyncClient, task: str) -> str:
    view = (await client.get(f"{TASKS}/{task}")).json()
    assert VALUE not in str(view)
    return str(view["lastError"])


async def test_member_cannot_read_a_secret_of_a_higher_role(
    api: Api, owner: httpx2.AsyncClient
) -> None:
    member = await api.acting(Role.MEMBER)
    await keep(owner, role="ADMIN")
    agent = await agent_of(member, "mine")
    refused = await member.post(TASKS, json={"title": "x", "input": NAMED})
    assert problem(refused) == (403, "secret_forbidden")
    task = await submitted(owner)
    assert await claim(member, agent) == []
    assert "requires the role ADMIN" in await refusal_reason(member, task)
    again = await member.post(f"{TASKS}/{task}/rerun")
    assert problem(again) == (403, "secret_forbidden")
    await owner.post(f"{TASKS}/{task}/cancel")
    await submitted(owner)
    assert await as_worker(member, agent, "t" * 40) == []
    assert await as_worker(member, agent, "t" * 40) == []
    admin = await api.acting(Role.ADMIN)
    await submitted(admin)
    [work] = await claim(admin, agent)
    assert (work["inputContext"], work["secrets"]) == ({"x": VALUE}, [VALUE])


async def test_agent_secret_is_read_only_with_the_listed_agents_token(
    api: Api, owner: httpx2.AsyncClient
) -> None:
    member = await api.acting(Role.MEMBER)
    await keep(owner, agents=["payer"], role="OWNER")
    payer, other = await agent_of(owner, "payer"), await agent_of(owner, "other")
    tokens = {
        item: (await owner.post(f"{V1}/agents/{item}/token")).json()["token"]
        for item in (payer, other)
    }
    for client, agent in ((member, payer), (await api.client(tokens[other]), other)):
        task = await submitted(owner)
        assert await claim(client, agent) == []
        assert "is for agents payer" in await refusal_reason(owner, task)
        await owner.post(f"{TASKS}/{task}/cancel")
    await submitted(owner)
    [work] = await claim(await api.client(tokens[payer]), payer)
    assert work["inputContext"] == {"x": VALUE}


@pytest.mark.parametrize("role", [Role.MEMBER, Role.ADMIN])
async def test_reference_to_a_secret_above_the_callers_role_is_refused_everywhere(
    api: Api, owner: httpx2.AsyncClient, role: Role
) -> None:
    caller = await api.acting(role)
    await keep(owner, role="OWNER")
    spec = {"id": "d", "name": "d", "prompt": "p"}
    await owner.post(f"{V1}/definitions", json={"spec": spec})
    named = {"spec": {"id": "e", "name": "e", "prompt": "p", "input": NAMED}}
    schedule = {"name": "s", "target": "d", "schedule": {"type": "cron", "expression": "0 3 * * *"}}
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("agent-tasks", {"title": "x", "input": NAMED}),
        ("agent-tasks", {"title": "x", "env": {"A": {"$secret": "payroll"}}, "prompt": "p"}),
        ("agent-tasks/bulk", {"tasks": [{"title": "x"}, {"title": "y", "input": NAMED}]}),
        ("definitions", named),
        ("definitions/apply", {"manifest": "id: e\nname: e\ninput: {a: {$secret: payroll}}\n"}),
        ("flows", {"key": "d", "input": NAMED}),
        ("schedules", schedule | {"input": NAMED}),
    ]
    for path, body in bodies:
        answer = await caller.post(f"{V1}/{path}", json=body)
        assert problem(answer) == (403, "secret_forbidden"), (path, answer.text)


async def test_attempt_cannot_name_a_secret_above_the_member_role(
    api: Api, owner: httpx2.AsyncClient
) -> None:
    await keep(owner, role="ADMIN")
    agent = await agent_of(owner, "a")
    created = (await owner.post(TASKS, json={"title": "x"})).json()["id"]
    [work] = await claim(owner, agent)
    attempt = await api.client(work["token"])
    body = {"key": "k", "task": {"title": "child", "input": NAMED}}
    answer = await attempt.post(f"{TASKS}/{created}/children", json=body)
    assert problem(answer) == (403, "secret_forbidden")


async def test_secret_rule_is_stored_shown_and_changed_without_the_value(
    api: Api, owner: httpx2.AsyncClient
) -> None:
    await keep(owner)
    plain = {"role": "MEMBER", "agents": [], "definitions": []}
    [shown] = (await owner.get(f"{V1}/secrets")).json()
    assert shown["use"] == plain
    rule = {"role": "ADMIN", "agents": ["payer"], "definitions": ["pay"]}
    path = f"{V1}/secrets/payroll"
    assert (await owner.put(path, json={"use": rule})).status_code == 204
    assert (await owner.put(path, json={"value": "another"})).status_code == 204
    [shown] = (await owner.get(f"{V1}/secrets")).json()
    assert shown["use"] == rule
    assert problem(await owner.put(path, json={})) == (422, "invalid_value")
    assert problem(await owner.put(path, json={"use": {"role": "VIEWER"}}))[0] == 422
    assert problem(await owner.put(f"{V1}/secrets/no", json={"use": rule})) == (404, "not_found")
    admin = await api.acting(Role.ADMIN)
    higher = {"use": {"role": "OWNER"}}
    assert problem(await admin.put(path, json=higher)) == (403, "secret_forbidden")
    assert (await owner.put(path, json=higher)).status_code == 204
    for asked in (
        await admin.put(path, json={"use": {}}),
        await admin.put(path, json={"value": "mine"}),
        await admin.delete(path),
    ):
        assert problem(asked) == (403, "secret_forbidden")
