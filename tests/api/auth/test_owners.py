"""Owners: the last owner of a workspace stays, and former owners have no special rights."""

import asyncio
from typing import Any
from uuid import UUID, uuid4

import asyncpg
import httpx2
import pytest
from tests.api.auth.test_users import GONE, PASSWORD, created, logged_in, owners_token, person
from tests.api.conftest import V1, Api, problem, replaced, running
from tests.api.routes.test_operations import belongs
from tests.contract.conftest import Raw
from tests.waiting import eventually

from tenuto.engine.engine import DEFAULT_WORKSPACE
from tenuto.model.errors import Conflict
from tenuto.model.tenancy.access import SCOPES, Caller, Role
from tenuto.settings import Settings

LAST = (409, "last_owner")


async def disabled(database_url: str, user: str) -> None:
    await Raw(database_url).execute(
        f"update app_user set disabled_at = created_at where id = '{user}'"
    )


async def test_disabled_owner_does_not_count_as_owner(
    api: Api, owner: httpx2.AsyncClient, database_url: str
) -> None:
    ann, hers = await person(api, owner, "ann", "OWNER")
    bob, _ = await person(api, owner, "bob", "OWNER")
    assert (await owner.delete(f"{V1}/tokens/{await owners_token(owner)}")).status_code == 204
    await disabled(database_url, bob)
    assert problem(await hers.delete(f"{V1}/users/{ann}")) == LAST
    assert problem(await hers.patch(f"{V1}/users/{ann}", json={"role": "ADMIN"})) == LAST


async def test_restricted_owner_token_does_not_count_as_owner(api: Api) -> None:
    workspace = await api.workspace("w")
    ruling = await api.acting(Role.OWNER, workspace)
    await api.acting(Role.OWNER, workspace, scopes=("read", "write", "work"))
    tokens = (await ruling.get(f"{V1}/tokens")).json()
    [own] = [token["id"] for token in tokens if "admin" in token["scopes"]]
    assert problem(await ruling.delete(f"{V1}/tokens/{own}")) == LAST


async def test_admin_revokes_the_token_of_a_former_owner(
    api: Api, owner: httpx2.AsyncClient
) -> None:
    user, ann = await person(api, owner, "ann", "OWNER")
    whole = {"role": "OWNER", "scopes": list(SCOPES)}
    key = (await created(ann, "tokens", name="hers", **whole))["id"]
    admin = await api.acting(Role.ADMIN)
    assert problem(await admin.delete(f"{V1}/tokens/{key}")) == (403, "forbidden")
    await owner.patch(f"{V1}/users/{user}", json={"role": "VIEWER"})
    assert (await admin.delete(f"{V1}/tokens/{key}")).status_code == 204


async def test_concurrent_demotion_of_two_owners_keeps_one(
    postgres_url: str, settings: Settings
) -> None:
    async with running(replaced(settings, database=postgres_url)) as api:
        identity, workspace = api.service.identity, await api.workspace("w")
        ann, bob = [
            await identity.create_user(name, PASSWORD, workspace, Role.OWNER)
            for name in ("ann", "bob")
        ]
        acting = Caller(
            workspace=workspace,
            role=Role.OWNER,
            scopes=frozenset(SCOPES),
            actor="user:ann",
            key=str(ann),
            user=ann,
        )
        other = await asyncpg.connect(postgres_url)
        try:
            async with other.transaction():
                # Bob lowers Ann and has not committed yet.
                await other.execute("select from workspace where id = $1 for update", workspace)
                lowered = "update member set role = 'ADMIN' where user_id = $1"
                await other.execute(lowered, ann)
                late = asyncio.create_task(identity.set_member_role(acting, bob, Role.ADMIN))
                waits = "select count(*) from pg_stat_activity where wait_event_type = 'Lock'"

                async def blocked() -> bool:
                    return late.done() or bool(await Raw(postgres_url).value(waits))

                await eventually(blocked)
            with pytest.raises(Conflict, match="would have no owner"):
                await late
        finally:
            await other.close()


async def test_removed_guest_keeps_the_name_in_the_home_workspace(
    api: Api, owner: httpx2.AsyncClient
) -> None:
    user = (await created(owner, "users", name="ann", password=PASSWORD))["id"]
    workspace = await api.workspace("elsewhere")
    await belongs(api, workspace, UUID(user), Role.MEMBER)
    host = await api.acting(Role.OWNER, workspace)
    assert (await host.delete(f"{V1}/users/{user}")).status_code == 204
    ann = await logged_in(api, "ann")
    assert (await ann.get(f"{V1}/me")).json()["userId"] == user
    again = {"name": "ann", "password": PASSWORD}
    assert problem(await owner.post(f"{V1}/users", json=again)) == (409, "name_taken")


async def test_member_of_two_workspaces_acts_in_the_named_one(
    api: Api, owner: httpx2.AsyncClient
) -> None:
    user, ann = await person(api, owner, "ann", "ADMIN")
    workspace = await api.workspace("elsewhere")
    await belongs(api, workspace, UUID(user), Role.VIEWER)

    async def acts(**headers: str) -> Any:
        me = (await ann.get(f"{V1}/me", headers=headers)).json()
        return me["workspaceId"], me["role"]

    for _ in range(2):
        assert await acts() == (str(DEFAULT_WORKSPACE), "ADMIN")
        named = await acts(**{"X-Workspace-Id": str(workspace)})
        assert named == (str(workspace), "VIEWER")
    key = await created(ann, "tokens", name="k", role="VIEWER", scopes=["read"])
    program = await api.client(key["token"])
    assert len((await program.get(f"{V1}/workspaces")).json()) == 1
    assert len((await ann.get(f"{V1}/workspaces")).json()) == 2
    nowhere = await ann.get(f"{V1}/me", headers={"X-Workspace-Id": str(uuid4())})
    assert problem(nowhere) == (403, "forbidden")


async def test_login_expires(api: Api, owner: httpx2.AsyncClient, database_url: str) -> None:
    _, ann = await person(api, owner, "ann", "ADMIN")
    assert (await ann.get(f"{V1}/me")).status_code == 200
    await Raw(database_url).execute("update session set expires_at = created_at")
    api.service.token_cache.clear()
    assert problem(await ann.get(f"{V1}/me")) == GONE
