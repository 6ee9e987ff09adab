"""Access: the table of routes, roles and scopes, and the expiry of tokens."""

import json
from datetime import timedelta
from typing import Any
from uuid import UUID, uuid4

import httpx2
import jwt
import pytest
from tests.api.conftest import V1, Api, problem, replaced, running

from tenuto.api.app import litestar_app
from tenuto.api.auth.attempt_tokens import AUDIENCE, ISSUER, JWT_TYPE, PURPOSE, AttemptTokens
from tenuto.api.edge.openapi import openapi_document
from tenuto.api.operation import OPERATIONS, PUBLIC, RouteAccess
from tenuto.app import key_folder
from tenuto.encryption_keys import add_key
from tenuto.engine.engine import DEFAULT_WORKSPACE
from tenuto.engine.tenancy import accounts
from tenuto.model.errors import Unauthenticated, Unavailable
from tenuto.model.tasks.task import Fence
from tenuto.model.tenancy.access import Role
from tenuto.settings import Settings

NOT_IN_THE_CONTRACT = {"GET /openapi.json", "GET /docs"}


def test_access_table_lists_every_route_and_no_other() -> None:
    paths = openapi_document(litestar_app())["paths"]
    served = {f"{method.upper()} {path}" for path, methods in paths.items() for method in methods}
    assert served | NOT_IN_THE_CONTRACT == set(OPERATIONS)


def call(route: str) -> tuple[str, str]:
    """A request for a route, with ids of nothing."""
    method, path = route.split()
    for name in (
        "task agent webhook delivery workspace user token flow group item schedule trigger"
    ).split():
        path = path.replace(f"{{{name}_id}}", str(uuid4()))
    path = path.replace("{kind}", "type").replace("{subject}", "t")
    return method, path.replace("{worker_id}", "w").replace("{name}", "n").replace("{key}", "k")


GUARDED = sorted(route for route, operation in OPERATIONS.items() if operation.access is not PUBLIC)


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
async def test_route_without_a_token_is_refused_unless_public(api: Api) -> None:
    anonymous = await api.client()
    for route in GUARDED:
        answer = await anonymous.request(*call(route))
        assert problem(answer) == (401, "unauthenticated"), route
        assert answer.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
async def test_every_path_lists_its_methods_for_options(api: Api) -> None:
    anonymous = await api.client()
    for route in OPERATIONS:
        method, path = call(route)
        answer = await anonymous.options(path)
        assert problem(answer) == (405, "method_not_allowed"), route
        assert method in answer.headers["allow"].split(", ")


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
@pytest.mark.parametrize("role", list(Role))
async def test_role_decides_about_access(api: Api, role: Role) -> None:
    client = await api.acting(role)
    for route in GUARDED:
        access = OPERATIONS[route].access
        assert isinstance(access, RouteAccess)
        if route.endswith("/events"):
            continue
        answer = await client.request(*call(route))
        refused = answer.status_code == 403 and answer.json()["code"] == "forbidden"
        assert refused == (role < access.role), route


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
@pytest.mark.parametrize("scope", ["read", "write", "work", "admin"])
async def test_scope_decides_about_access(api: Api, scope: str) -> None:
    client = await api.acting(Role.OWNER, scopes=(scope,))
    for route in GUARDED:
        access = OPERATIONS[route].access
        assert isinstance(access, RouteAccess)
        if route.endswith("/events"):
            continue
        answer = await client.request(*call(route))
        refused = answer.status_code == 403 and answer.json()["code"] == "forbidden"
        assert refused == (scope != access.scope), route


async def test_revoked_token_is_refused_at_once(api: Api, owner: httpx2.AsyncClient) -> None:
    created = (await owner.post(f"{V1}/tokens", json={"name": "t"})).json()
    client = await api.client(created["token"])
    assert (await client.get(f"{V1}/me")).status_code == 200
    listed = (await owner.get(f"{V1}/tokens")).json()
    assert created["id"] in [item["id"] for item in listed]
    assert created["token"] not in str(listed)
    assert (await owner.delete(f"{V1}/tokens/{created['id']}")).status_code == 204
    assert problem(await client.get(f"{V1}/me")) == (401, "unauthenticated")


async def test_expired_token_is_refused(api: Api) -> None:
    soon = api.service.clock.now() + timedelta(milliseconds=300)
    client = await api.acting(expires_at=soon)
    assert (await client.get(f"{V1}/me")).status_code == 200
    while api.service.clock.now() <= soon:
        await api.service.clock.sleep(0.05)
    api.service.token_cache.clear()
    assert problem(await client.get(f"{V1}/me")) == (401, "unauthenticated")


async def test_caller_cannot_grant_more_than_they_have(api: Api) -> None:
    admin = await api.acting(Role.ADMIN, scopes=("read", "admin"))
    more = await admin.post(f"{V1}/tokens", json={"name": "t", "role": "OWNER"})
    assert problem(more) == (403, "forbidden")
    wider = await admin.post(f"{V1}/tokens", json={"name": "t", "scopes": ["write"]})
    assert problem(wider) == (403, "forbidden")


async def test_user_logs_in_and_out(api: Api, owner: httpx2.AsyncClient) -> None:
    user = {"name": "ada", "password": "correct horse battery", "role": "ADMIN"}
    created = await owner.post(f"{V1}/users", json=user)
    assert created.status_code == 201
    anonymous = await api.client()
    wrong = await anonymous.post(f"{V1}/login", json={"name": "ada", "password": "wrong password"})
    unknown = await anonymous.post(
        f"{V1}/login", json={"name": "bob", "password": "wrong password"}
    )
    assert wrong.content == unknown.content
    assert problem(wrong) == (401, "login_refused")
    right = {name: user[name] for name in ("name", "password")}
    login = (await anonymous.post(f"{V1}/login", json=right)).json()
    ada = await api.client(login["token"])
    assert (await ada.get(f"{V1}/me")).json()["actor"] == "user:ada"
    demoted = await owner.patch(f"{V1}/users/{created.json()['id']}", json={"role": "VIEWER"})
    assert demoted.json()["role"] == "VIEWER"
    assert problem(await ada.get(f"{V1}/tokens")) == (403, "forbidden")
    assert (await ada.post(f"{V1}/logout")).status_code == 204
    assert problem(await ada.get(f"{V1}/me")) == (401, "unauthenticated")


@pytest.mark.parametrize(
    ("path", "half", "body"),
    [
        ("users", "_membership_statement", {"name": "ada", "password": "correct horse battery"}),
        ("workspaces", "_token_row", {"name": "hers"}),
    ],
)
async def test_creation_in_two_steps_is_whole_or_nothing(
    owner: httpx2.AsyncClient,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    half: str,
    body: dict[str, str],
) -> None:
    def away(*args: object) -> None:
        raise Unavailable("the database went away", "database_unreachable")

    with monkeypatch.context() as broken:
        broken.setattr(accounts, half, away)
        lost = await owner.post(f"{V1}/{path}", json=body)
    assert problem(lost) == (503, "database_unreachable")
    again = await owner.post(f"{V1}/{path}", json=body)
    assert again.status_code == 201, again.text


@pytest.mark.parametrize("name", ["", "a\x00b", "x" * 10_000])
async def test_invalid_name_is_refused(api: Api, name: str) -> None:
    anonymous = await api.client()
    body = {"name": name, "password": "not the password"}
    assert problem(await anonymous.post(f"{V1}/login", json=body)) == (401, "login_refused")


async def test_password_guessing_is_slowed_down(api: Api) -> None:
    anonymous = await api.client()
    body = {"name": "ada", "password": "not the password"}
    codes = [(await anonymous.post(f"{V1}/login", json=body)).status_code for _ in range(14)]
    assert codes[0] == 401
    assert codes[-1] == 429


async def test_wrong_passwords_lock_out_no_other_address(
    api: Api, owner: httpx2.AsyncClient
) -> None:
    right = {"name": "ada", "password": "correct horse battery"}
    assert (await owner.post(f"{V1}/users", json=right | {"role": "ADMIN"})).status_code == 201
    existing = httpx2.AsyncHTTPTransport(local_address="127.0.0.2")
    elsewhere = httpx2.AsyncHTTPTransport(local_address="127.0.0.3")
    anonymous = await api.client()
    async with (
        httpx2.AsyncClient(base_url=api.url, transport=existing) as hers,
        httpx2.AsyncClient(base_url=api.url, transport=elsewhere) as new,
    ):
        assert (await hers.post(f"{V1}/login", json=right)).status_code == 200
        wrong = right | {"password": "not the password"}
        for _ in range(12):
            await anonymous.post(f"{V1}/login", json=wrong)
        assert problem(await anonymous.post(f"{V1}/login", json=right)) == (429, "rate_limited")
        for _ in range(8):
            last = await hers.post(f"{V1}/login", json=wrong)
        assert problem(last) == (401, "login_refused")
        assert (await hers.post(f"{V1}/login", json=right)).status_code == 200
        assert (await new.post(f"{V1}/login", json=right)).status_code == 200


async def test_forwarded_address_of_an_untrusted_client_is_ignored(api: Api) -> None:
    anonymous = await api.client()
    body = {"name": "ada", "password": "not the password"}
    for n in range(8):
        forwarded = {"X-Forwarded-For": f"203.0.113.{n}"}
        last = await anonymous.post(f"{V1}/login", json=body, headers=forwarded)
    assert problem(last) == (429, "rate_limited")


async def test_forwarded_address_of_a_trusted_proxy_is_used(settings: Settings) -> None:
    async with running(replaced(settings, proxies="127.0.0.0/8")) as api:
        anonymous = await api.client()
        body = {"name": "ada", "password": "not the password"}
        for n in range(8):
            forwarded = {"X-Forwarded-For": f"203.0.113.{n}"}
            last = await anonymous.post(f"{V1}/login", json=body, headers=forwarded)
            assert problem(last) == (401, "login_refused")


async def claimed(owner: httpx2.AsyncClient, title: str = "t") -> dict[str, Any]:
    """A task that an agent has claimed, with what the claim answered."""
    agent = str(uuid4())
    task_type = f"type-{agent}"
    await owner.put(f"{V1}/agents/{agent}", json={"name": agent, "taskTypes": [task_type]})
    await owner.post(f"{V1}/agent-tasks", json={"title": title, "taskType": task_type})
    [work] = (await owner.post(f"{V1}/agents/{agent}/claim", json={})).json()["tasks"]
    return {"agent": agent, **work}


async def test_attempt_token_works_only_for_its_attempt(
    api: Api, owner: httpx2.AsyncClient
) -> None:
    own, other = await claimed(owner), await claimed(owner)
    session = await api.client(own["token"])
    others = await session.post(f"{V1}/agent-tasks/{other['id']}/complete", json={})
    missing = await session.post(f"{V1}/agent-tasks/{uuid4()}/complete", json={})
    assert problem(others) == problem(missing) == (404, "not_found")
    assert problem(await session.get(f"{V1}/agent-tasks/{own['id']}")) == (403, "forbidden")
    assert problem(await session.post(f"{V1}/agents/{other['agent']}/heartbeat", json={})) == (
        404,
        "not_found",
    )
    await owner.post(f"{V1}/agent-tasks/{own['id']}/cancel", json={})
    late = await session.post(f"{V1}/agent-tasks/{own['id']}/complete", json={})
    assert problem(late) == (409, "cancel_requested")


async def test_attempt_token_has_no_other_access_and_expires_with_its_attempt(
    api: Api, owner: httpx2.AsyncClient
) -> None:
    own = await claimed(owner)
    agent, steps = f"{V1}/agents/{own['agent']}", f"{V1}/agent-tasks/{own['id']}/steps"
    await owner.post(f"{V1}/agent-tasks", json={"title": "next", "taskType": own["taskType"]})
    await owner.post(f"{agent}/messages", json={"kind": "note", "body": "for the agent"})
    session = await api.client(own["token"])
    claim = {"agentId": own["agent"], "claimToken": "x" * 40}
    for path, body in (
        (f"{agent}/claim", {}),
        (f"{V1}/workers/w/claim", claim),
        (f"{V1}/workers/w/heartbeat", {}),
        (f"{V1}/workers/w/sweep", {"host": "h"}),
        (f"{V1}/agents", {"name": "a"}),
    ):
        assert problem(await session.post(path, json=body)) == (403, "forbidden"), path
    assert (await session.get(steps)).status_code == 200
    assert len((await session.post(f"{agent}/messages/dequeue")).json()["messages"]) == 1
    end = f"{V1}/agent-tasks/{own['id']}/complete"
    assert (await session.post(end)).status_code == 200
    assert (await session.post(end)).status_code == 200  # told again, because the answer was lost
    assert problem(await session.get(steps)) == (409, "lease_lost")
    assert problem(await session.post(f"{agent}/messages/dequeue")) == (409, "lease_lost")


async def test_agent_reads_only_the_steps_of_its_tasks(api: Api, owner: httpx2.AsyncClient) -> None:
    own, other = await claimed(owner), await claimed(owner)
    token = (await owner.post(f"{V1}/agents/{own['agent']}/token")).json()["token"]
    agent = await api.client(token)
    assert (await agent.get(f"{V1}/agent-tasks/{own['id']}/steps")).status_code == 200
    others = await agent.get(f"{V1}/agent-tasks/{other['id']}/steps")
    missing = await agent.get(f"{V1}/agent-tasks/{uuid4()}/steps")
    assert problem(others) == problem(missing) == (404, "not_found")


async def test_forged_token_is_refused(api: Api, owner: httpx2.AsyncClient) -> None:
    own = await claimed(owner)
    path = f"{V1}/agent-tasks/{own['id']}/complete"
    claims = jwt.decode(own["token"], options={"verify_signature": False})
    key = api.service.vault.derive(PURPOSE)
    kid = api.service.vault.current
    good = {"kid": kid, "typ": JWT_TYPE}
    forged = [
        jwt.encode(claims, "x" * 32, algorithm="HS256", headers=good),
        jwt.encode(claims, "", algorithm="none", headers=good),
        jwt.encode(claims, key * 2, algorithm="HS512", headers=good),
        jwt.encode(claims, key, algorithm="HS256", headers={"kid": "other", "typ": JWT_TYPE}),
        jwt.encode(claims, key, algorithm="HS256", headers={"kid": kid, "typ": "JWT"}),
        jwt.encode(claims | {"aud": "else"}, key, algorithm="HS256", headers=good),
        jwt.encode(claims | {"iss": "else"}, key, algorithm="HS256", headers=good),
        jwt.encode(claims | {"exp": 1}, key, algorithm="HS256", headers=good),
        jwt.encode({"iss": ISSUER, "aud": AUDIENCE}, key, algorithm="HS256", headers=good),
        own["token"][:-4] + "AAAA",
        "a.b.c",
        "x" * 10_000,
    ]
    for token in forged:
        session = await api.client(token)
        assert problem(await session.post(path, json={})) == (401, "unauthenticated")
    session = await api.client(own["token"])
    assert (await session.post(path, json={})).status_code == 200


async def test_server_accepts_tokens_of_a_newer_key(
    api: Api, owner: httpx2.AsyncClient, settings: Settings
) -> None:
    own = await claimed(owner)
    added = add_key(key_folder(settings))
    assert added.current != api.service.vault.current
    fence = Fence(UUID(own["id"]), own["attempt"], own["leaseToken"])
    elsewhere = AttemptTokens(added, api.service.clock)
    token, _ = elsewhere.issue(UUID(own["agent"]), DEFAULT_WORKSPACE, fence)
    session = await api.client(token)
    done = await session.post(f"{V1}/agent-tasks/{own['id']}/complete", json={})
    assert done.status_code == 200, done.text


WRONG: list[Any] = ["x", [], {}, None, True, 1.5, -1, 10**30, "\ud800", "a\nb"]
CLAIMS = "iss aud exp iat sub ws task att tok".split()
RIGHT = [("exp", 10**30), ("iat", 10**30), ("iat", -1), ("tok", "x")]


async def test_signed_token_with_a_claim_of_the_wrong_type_is_refused(api: Api) -> None:
    """A caller that has the key still causes no internal error."""
    tokens = api.service.attempt_tokens
    good, _ = tokens.issue(uuid4(), DEFAULT_WORKSPACE, Fence(uuid4(), 1, "t" * 32))
    claims = jwt.decode(good, options={"verify_signature": False})
    key = api.service.vault.derive(PURPOSE)
    headers: dict[str, Any] = {"kid": api.service.vault.current, "typ": JWT_TYPE}
    for claim in CLAIMS:
        for value in WRONG:
            if (claim, value) in RIGHT:
                continue
            raw = jwt.api_jws.encode(
                json.dumps(claims | {claim: value}).encode(), key, "HS256", headers
            )
            with pytest.raises(Unauthenticated):
                tokens.caller_of(raw, None)
    assert tokens.caller_of(good, None).workspace == DEFAULT_WORKSPACE
