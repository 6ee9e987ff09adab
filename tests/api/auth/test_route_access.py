"""Access of every kind of caller to every route: accepted, refused or not found.

What a route takes is written down here once more, on purpose not read from the program's own table:
whoever adds a route says here, too, who may call it.
"""

import re
import shutil
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx2
import jwt
import msgspec
import pytest
from tests.api.conftest import V1, Api, running

from tenuto.api.app import litestar_app
from tenuto.api.auth.attempt_tokens import JWT_TYPE, PURPOSE
from tenuto.model.tenancy.access import Role
from tenuto.settings import Settings

PUBLIC = """
GET /health/live            GET /health/ready      GET /health/coordinator
GET /metrics                GET /openapi.json      GET /docs
POST /api/v1/login
"""
VIEWER = """
POST logout                 GET me                 PUT me/password
GET agent-tasks
GET agent-tasks/{task_id}   GET agent-tasks/{task_id}/logs
GET agent-tasks/{task_id}/attempts                 GET agent-tasks/{task_id}/transcript
GET agent-tasks/{task_id}/explain                  GET agent-tasks/{task_id}/events
GET agent-tasks/find        GET agent-tasks/{task_id}/trail
GET agent-tasks/{task_id}/children                 GET agents
GET agents/{agent_id}       GET agents/{agent_id}/health
GET agents/{agent_id}/explain                      GET agents/{agent_id}/tasks
GET agents/{agent_id}/messages                     GET workers
GET definitions             GET definitions/{key}  GET flows
GET flows/{flow_id}         GET flows/{flow_id}/tasks
GET flows/{flow_id}/graph   GET groups             GET groups/{group_id}
GET groups/{group_id}/graph                        GET inbox
GET inbox/{item_id}         GET gates              GET rate-limits
GET complexity-levels       GET schedules          GET schedules/{schedule_id}
GET schedules/{schedule_id}/next                   GET triggers
GET triggers/{trigger_id}   GET stats              GET events
GET dead-letters            GET webhooks           GET webhooks/{webhook_id}
GET webhooks/{webhook_id}/deliveries               GET workspaces
GET workspaces/{workspace_id}
"""
MEMBER = """
POST agent-tasks            POST agent-tasks/bulk  POST agent-tasks/actions
PATCH agent-tasks/{task_id}                        DELETE agent-tasks/{task_id}
POST agent-tasks/{task_id}/cancel                  POST agent-tasks/{task_id}/retry
POST agent-tasks/{task_id}/pause                   POST agent-tasks/{task_id}/resume
POST agent-tasks/{task_id}/start                   POST agent-tasks/{task_id}/rerun
POST agent-tasks/{task_id}/assign                  POST agent-tasks/{task_id}/reassign
POST agent-tasks/{task_id}/archive                 PUT agents/{agent_id}
POST agents/{agent_id}/messages                    POST agents/{agent_id}/terminate
POST definitions            POST definitions/apply PUT definitions/{key}
DELETE definitions/{key}    POST flows             POST flows/{flow_id}/cancel
POST flows/{flow_id}/pause  POST flows/{flow_id}/resume
POST flows/{flow_id}/rerun  POST groups            POST groups/{group_id}/start
POST groups/{group_id}/cancel                      POST groups/{group_id}/pause
POST groups/{group_id}/resume                      POST inbox/{item_id}/approve
POST inbox/{item_id}/reject                        POST inbox/{item_id}/answer
POST schedules              PATCH schedules/{schedule_id}
DELETE schedules/{schedule_id}                     POST schedules/{schedule_id}/pause
POST schedules/{schedule_id}/resume                POST triggers
PATCH triggers/{trigger_id}                        DELETE triggers/{trigger_id}
POST triggers/{trigger_id}/pause                   POST triggers/{trigger_id}/resume
POST events                 POST dead-letters/{task_id}/requeue
"""
ATTEMPT = """
PATCH agent-tasks/{task_id}/progress               POST agent-tasks/{task_id}/complete
POST agent-tasks/{task_id}/fail                    POST agent-tasks/{task_id}/park
POST agent-tasks/{task_id}/release                 POST agent-tasks/{task_id}/transcript
POST agent-tasks/{task_id}/checkpoint              GET agent-tasks/{task_id}/steps
POST agent-tasks/{task_id}/steps                   POST agent-tasks/{task_id}/children
POST agent-tasks/{task_id}/ask                     POST agent-tasks/{task_id}/not-started
POST agent-tasks/{task_id}/timed-out               POST agent-tasks/{task_id}/confirm-cancel
POST agent-tasks/{task_id}/confirm-pause           POST agent-tasks/{task_id}/confirm-gone
POST agents/{agent_id}/messages/dequeue            POST agents/{agent_id}/heartbeat
"""
AGENT = """
POST agents                 POST agents/{agent_id}/claim
POST workers/{worker_id}/heartbeat                 POST workers/{worker_id}/claim
POST workers/{worker_id}/sweep
"""
ADMIN = """
DELETE agents/{agent_id}    POST agents/{agent_id}/token
POST workers/{worker_id}/drain                     POST gates
DELETE gates/{kind}/{subject}                      PUT rate-limits/{name}
DELETE rate-limits/{name}   PUT complexity-levels  GET coordinator/status
POST coordinator/recover    GET coordinator/logs   POST webhooks
PATCH webhooks/{webhook_id} DELETE webhooks/{webhook_id}
POST webhooks/{webhook_id}/rotate-secret           POST webhooks/deliveries/{delivery_id}/redeliver
GET secrets                 PUT secrets/{name}     DELETE secrets/{name}
GET users                   POST users             PATCH users/{user_id}
DELETE users/{user_id}      GET tokens             POST tokens
DELETE tokens/{token_id}
"""
OWNER = "POST workspaces  PUT workspaces/{workspace_id}/quota"


class Needs(msgspec.Struct, frozen=True):
    """What a route takes: a role and a scope, or the token of an agent or an attempt of its own."""

    role: Role
    scope: str
    agent: bool = False
    attempt: bool = False


def listed(text: str) -> list[str]:
    """The routes that a block names, with their full paths."""
    pairs = re.findall(r"([A-Z]+) (\S+)", text)
    return [f"{method} {path if path[0] == '/' else f'{V1}/{path}'}" for method, path in pairs]


TABLE: dict[str, Needs | None] = {
    **dict.fromkeys(listed(PUBLIC)),
    **dict.fromkeys(listed(VIEWER), Needs(Role.VIEWER, "read")),
    **dict.fromkeys(listed(MEMBER), Needs(Role.MEMBER, "write")),
    **dict.fromkeys(listed(AGENT), Needs(Role.MEMBER, "work", agent=True)),
    **dict.fromkeys(listed(ATTEMPT), Needs(Role.MEMBER, "work", agent=True, attempt=True)),
    **dict.fromkeys(listed(ADMIN), Needs(Role.ADMIN, "admin")),
    **dict.fromkeys(listed(OWNER), Needs(Role.OWNER, "admin")),
}
STREAMS = {f"GET {V1}/events", f"GET {V1}/agent-tasks/{{task_id}}/events"}


class Hosted(msgspec.Struct):
    """An agent's and an attempt's token, with what they are good for."""

    ids: dict[str, str]
    agent: httpx2.AsyncClient
    attempt: httpx2.AsyncClient
    token: str


async def hosted(api: Api, owner: httpx2.AsyncClient, name: str) -> Hosted:
    agent = str(uuid4())
    at = f"{V1}/agents/{agent}"
    await owner.put(at, json={"name": name, "taskTypes": [name]})
    client = await api.client((await owner.post(f"{at}/token")).json()["token"])
    await owner.post(f"{V1}/agent-tasks", json={"title": name, "taskType": name})
    worker = f"worker-{name}"
    heartbeat = await client.post(f"{V1}/workers/{worker}/heartbeat", json={"agents": [name]})
    assert heartbeat.status_code == 200, heartbeat.text
    [work] = (await client.post(f"{at}/claim", json={"worker": worker})).json()["tasks"]
    ids = {"agent_id": agent, "task_id": work["id"], "worker_id": worker}
    return Hosted(ids, client, await api.client(work["token"]), work["token"])


@pytest.fixture
async def served(sqlite_template: Path, tmp_path: Path) -> AsyncIterator[Api]:
    """A server on SQLite: what is refused is decided before a database matters."""
    path = tmp_path / "t.db"
    shutil.copy(sqlite_template, path)
    settings = Settings(database=f"sqlite:///{path}", data=str(tmp_path), port=0, rate_per_s=0)
    async with running(settings) as api:
        yield api


def known_routes() -> set[str]:
    """All routes of the app itself."""
    result = set()
    for route in litestar_app().routes:
        template = re.sub(r"\{(\w+):\w+\}", r"{\1}", route.path)
        result |= {f"{method} {template}" for method in getattr(route, "methods", ())}
    return {route for route in result if not route.startswith("OPTIONS ")}


async def call(client: httpx2.AsyncClient, route: str, ids: dict[str, str]) -> int:
    """The status of a route's answer, with these ids or else those of nothing."""
    method, path = route.split()
    for name in re.findall(r"\{(\w+)\}", path):
        unknown = "type" if name == "kind" else str(uuid4())
        path = path.replace(f"{{{name}}}", ids.get(name, unknown))
    more = {"json": body_of(ids)[route]} if route in body_of(ids) else {}
    async with client.stream(method, path, **more) as answer:
        if route not in STREAMS or answer.status_code >= 400:
            await answer.aread()
        return answer.status_code


def body_of(ids: dict[str, str]) -> dict[str, Any]:
    """Returns the body with which the route's handler is reached."""
    claim = {"agentId": ids.get("claimant", str(uuid4())), "claimToken": "x" * 40, "limit": 0}
    return {
        f"POST {V1}/workers/{{worker_id}}/claim": claim,
        f"POST {V1}/workers/{{worker_id}}/sweep": {"host": "h"},
        f"POST {V1}/workers/{{worker_id}}/heartbeat": {},
    }


async def check(
    name: str, client: httpx2.AsyncClient, expected: dict[str, int], ids: dict[str, str]
) -> None:
    """Each route answers 401, 403 or 404 as expected; 200 stands for "let in", whatever comes.

    Where ids are given they are of things that there are, so 404 is not "let in".
    """
    wrong = {}
    for route, desired in expected.items():
        status = await call(client, route, ids)
        assert status < 500, (name, route, status)
        let_in = status not in ((401, 403, 404) if ids else (401, 403))
        if (desired == 200 and not let_in) or desired not in (200, status):
            wrong[route] = (status, desired)
    assert wrong == {}, name


GUARDED: dict[str, Needs] = {
    # Logging out ends the caller, so it comes last.
    route: needs
    for route, needs in sorted(TABLE.items(), key=lambda row: row[0].endswith("logout"))
    if needs is not None
}


def refused(status: int) -> dict[str, int]:
    return dict.fromkeys(GUARDED, status)


def of_role(role: Role, scopes: str = "read write work admin") -> dict[str, int]:
    """Returns the expected status for a caller with that role and those scopes."""
    return {
        route: 200 if role >= needs.role and needs.scope in scopes.split() else 403
        for route, needs in GUARDED.items()
    }


def of_host(own: Hosted, ids: dict[str, str], *, attempt: bool) -> dict[str, int]:
    """Returns the expected status for an agent's or attempt's token with these ids."""
    result = {}
    for route, needs in GUARDED.items():
        names = re.findall(r"\{(\w+)\}", route)
        others = any(name in own.ids and ids[name] != own.ids[name] for name in names)
        allowed = needs.attempt if attempt else needs.agent
        result[route] = 403 if not allowed else 404 if others else 200
    return result


async def test_route_table_is_complete(served: Api) -> None:
    result = known_routes()
    unused = {route for route in result if "/_schema" in route}  # the framework's own: switched off
    for route in unused:
        assert await call(await served.acting(), route, {}) in (404, 405)
    assert result - unused == set(TABLE)


async def test_route_without_a_valid_token_is_refused(served: Api) -> None:
    owner = await served.acting()
    revoked = await served.acting(Role.MEMBER)
    for key in (await owner.get(f"{V1}/tokens")).json():
        if key["role"] == "MEMBER":
            assert (await owner.delete(f"{V1}/tokens/{key['id']}")).status_code == 204
    soon = served.service.clock.now() + timedelta(milliseconds=200)
    expired = await served.acting(expires_at=soon)
    while served.service.clock.now() <= soon:
        await served.service.clock.sleep(0.05)
    callers = {"nobody": await served.client(), "revoked": revoked, "expired": expired}
    for name, token in (await forged(served)).items():
        callers[name] = await served.client(token)
    for name, client in callers.items():
        await check(name, client, refused(401), {})


async def forged(api: Api) -> dict[str, str]:
    """An attempt's tokens that are wrong in one thing each."""
    owner = await api.acting()
    claims = jwt.decode(
        (await hosted(api, owner, "forged")).token, options={"verify_signature": False}
    )
    key, kid = api.service.vault.derive(PURPOSE), api.service.vault.current
    headers = {"kid": kid, "typ": JWT_TYPE}
    return {
        "wrong aud": jwt.encode(claims | {"aud": "tenuto-gateway"}, key, "HS256", headers),
        "wrong exp": jwt.encode(claims | {"exp": 1}, key, "HS256", headers),
        "wrong typ": jwt.encode(claims, key, "HS256", headers | {"typ": "JWT"}),
        "wrong key": jwt.encode(claims, "x" * 32, "HS256", headers),
    }


@pytest.mark.parametrize("role", list(Role))
async def test_role_opens_its_routes_only(served: Api, role: Role) -> None:
    await check(role.name, await served.acting(role), of_role(role), {})


@pytest.mark.parametrize("missing", ["read", "write", "work", "admin"])
async def test_missing_scope_closes_its_routes_only(served: Api, missing: str) -> None:
    scopes = tuple(item for item in ("read", "write", "work", "admin") if item != missing)
    client = await served.acting(Role.OWNER, scopes=scopes)
    await check(missing, client, of_role(Role.OWNER, " ".join(scopes)), {})


async def person(api: Api) -> tuple[str, httpx2.AsyncClient]:
    """A user's id who is OWNER, and a client that is logged in."""
    named = {"name": "ann", "password": "correct horse battery"}
    created = await (await api.acting()).post(f"{V1}/users", json=named | {"role": "OWNER"})
    login = await (await api.client()).post(f"{V1}/login", json=named)
    user: str = created.json()["id"]
    return user, await api.client(login.json()["token"])


async def test_user_rights_follow_the_current_role(served: Api) -> None:
    operator = await served.acting()
    user, ann = await person(served)
    whole = {"name": "key", "role": "OWNER", "scopes": ["read", "write", "work", "admin"]}
    created = (await ann.post(f"{V1}/tokens", json=whole)).json()
    key = await served.client(created["token"])
    await check("an owner's key", key, of_role(Role.OWNER), {})
    demoted = await operator.patch(f"{V1}/users/{user}", json={"role": "VIEWER"})
    assert demoted.status_code == 200
    await check("a demoted owner's key", key, of_role(Role.VIEWER), {})
    back = await operator.patch(f"{V1}/users/{user}", json={"role": "OWNER"})
    assert back.status_code == 200
    removed = await operator.delete(f"{V1}/users/{user}")
    assert removed.status_code == 204
    await check("a removed member's key", key, refused(401), {})
    await check("a removed member's login", ann, refused(401), {})


async def test_logged_in_owner_can_use_every_route(served: Api) -> None:
    _, ann = await person(served)
    await check("login", ann, of_role(Role.OWNER), {})
    assert await call(ann, f"GET {V1}/me", {}) == 401  # the last one was to log out


async def test_agent_and_attempt_tokens_open_their_own_routes(served: Api) -> None:
    owner = await served.acting()
    own, other = await hosted(served, owner, "mine"), await hosted(served, owner, "other")
    for name, ids in (("foreign", other.ids), ("own", own.ids)):
        ids = {**ids, "claimant": own.ids["agent_id"]}  # noqa: PLW2901  who claims is the caller
        for kind, client in (("agent", own.agent), ("attempt", own.attempt)):
            expected = of_host(own, ids, attempt=kind == "attempt")
            await check(f"{name} {kind}", client, expected, ids)


async def test_owner_of_another_workspace_finds_nothing(served: Api) -> None:
    owner = await served.acting()
    own = await hosted(served, owner, "mine")
    user, _ = await person(served)
    [key, *_] = (await owner.get(f"{V1}/tokens")).json()
    workspace = (await owner.get(f"{V1}/me")).json()["workspaceId"]
    ids = {**own.ids, "user_id": user, "token_id": key["id"], "workspace_id": workspace}
    untrusted = await served.acting(Role.OWNER, await served.workspace("elsewhere"))
    before = (await owner.get(f"{V1}/agent-tasks/{own.ids['task_id']}")).json()
    for route in GUARDED:
        status = await call(untrusted, route, ids)
        assert status not in (401, 403), route
        if any(f"{{{name}}}" in route for name in ids if name != "worker_id"):
            assert status >= 400 or route.endswith("/steps"), (route, status)
    assert (await owner.get(f"{V1}/agent-tasks/{own.ids['task_id']}")).json() == before
