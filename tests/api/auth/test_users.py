"""Users: rights of their tokens, actions on other users, and names across workspaces."""

import asyncio
import subprocess
import sys
from datetime import timedelta
from typing import Any
from uuid import UUID, uuid4

import asyncpg
import httpx2
import pytest
from tests.api.conftest import V1, Api, problem, replaced, running
from tests.contract.conftest import Raw
from tests.waiting import eventually

from tenuto.engine.engine import DEFAULT_WORKSPACE
from tenuto.model.tenancy.access import Role
from tenuto.settings import Settings

PASSWORD = "correct horse battery"
FORBIDDEN, GONE = (403, "forbidden"), (401, "unauthenticated")


async def created(client: httpx2.AsyncClient, path: str, **body: Any) -> dict[str, Any]:
    """Creates something by a POST request and returns the response body."""
    answer = await client.post(f"{V1}/{path}", json=body)
    assert answer.status_code == 201, answer.text
    result: dict[str, Any] = answer.json()
    return result


async def person(
    api: Api, owner: httpx2.AsyncClient, name: str, role: str
) -> tuple[str, httpx2.AsyncClient]:
    """A user of the owner's workspace, by id, and a client that is logged in."""
    user = await created(owner, "users", name=name, password=PASSWORD, role=role)
    workspace = (await owner.get(f"{V1}/me")).json()["workspaceId"]
    return user["id"], await logged_in(api, name, workspace)


async def logged_in(api: Api, name: str, workspace: str | None = None) -> httpx2.AsyncClient:
    anonymous = await api.client()
    body = {"name": name, "password": PASSWORD, "workspace": workspace}
    answer = await anonymous.post(f"{V1}/login", json=body)
    assert answer.status_code == 200, answer.text
    return await api.client(answer.json()["token"])


async def key_of(client: httpx2.AsyncClient, api: Api, **fields: Any) -> httpx2.AsyncClient:
    return await api.client((await created(client, "tokens", name="key", **fields))["token"])


WRITES = ["read", "write", "work", "admin"]


async def test_user_token_has_the_users_current_role(api: Api, owner: httpx2.AsyncClient) -> None:
    user, ann = await person(api, owner, "ann", "ADMIN")
    key = await key_of(ann, api, role="ADMIN", scopes=WRITES)
    below = await key_of(key, api, role="MEMBER", scopes=WRITES)
    agent = str(uuid4())
    await owner.put(f"{V1}/agents/{agent}", json={"name": "a"})
    worker = await api.client((await created(ann, f"agents/{agent}/token"))["token"])
    assert (await key.put(f"{V1}/secrets/s", json={"value": "v"})).status_code == 204
    assert (await worker.post(f"{V1}/agents/{agent}/heartbeat", json={})).status_code == 200

    await owner.patch(f"{V1}/users/{user}", json={"role": "VIEWER"})
    assert problem(await key.put(f"{V1}/secrets/s", json={"value": "v"})) == FORBIDDEN
    assert (await key.get(f"{V1}/me")).json()["role"] == "VIEWER"
    assert problem(await below.post(f"{V1}/agent-tasks", json={"title": "t"})) == FORBIDDEN
    assert problem(await worker.post(f"{V1}/agents/{agent}/heartbeat", json={})) == FORBIDDEN

    await owner.delete(f"{V1}/users/{user}")
    for client in (key, below, worker):
        assert problem(await client.get(f"{V1}/me")) == GONE
    worth = {item["effectiveRole"] for item in (await owner.get(f"{V1}/tokens")).json()}
    assert worth == {"OWNER", None}


async def test_token_of_a_disabled_user_is_refused(
    api: Api, owner: httpx2.AsyncClient, database_url: str
) -> None:
    user, ann = await person(api, owner, "ann", "OWNER")
    key = await key_of(ann, api, role="OWNER")
    assert (await key.get(f"{V1}/me")).status_code == 200
    await Raw(database_url).execute(
        f"update app_user set disabled_at = created_at where id = '{user}'"
    )
    api.service.token_cache.clear()
    assert problem(await key.get(f"{V1}/me")) == GONE
    assert problem(await ann.get(f"{V1}/me")) == GONE


async def test_token_expires_no_later_than_its_creators_token(api: Api) -> None:
    end = api.service.clock.now() + timedelta(hours=1)
    maker = await api.acting(Role.ADMIN, expires_at=end)
    plain = await created(maker, "tokens", name="plain")
    assert plain["expiresAt"] == end.isoformat().replace("+00:00", "Z")
    sooner = (end - timedelta(minutes=1)).isoformat()
    assert (await created(maker, "tokens", name="sooner", expiresAt=sooner))["expiresAt"] < plain[
        "expiresAt"
    ]
    later = {"name": "later", "expiresAt": (end + timedelta(seconds=1)).isoformat()}
    refused = await maker.post(f"{V1}/tokens", json=later)
    assert problem(refused) == (422, "invalid_value")
    assert end.isoformat() in refused.json()["detail"]
    agent = str(uuid4())
    await maker.put(f"{V1}/agents/{agent}", json={"name": "a"})
    assert (await created(maker, f"agents/{agent}/token"))["expiresAt"] == plain["expiresAt"]


async def test_login_does_not_limit_the_tokens_it_creates(
    api: Api, owner: httpx2.AsyncClient
) -> None:
    _, ann = await person(api, owner, "ann", "ADMIN")
    assert (await created(ann, "tokens", name="key"))["expiresAt"] is None


async def test_revoked_token_revokes_the_tokens_it_created(
    api: Api, owner: httpx2.AsyncClient
) -> None:
    top = await created(owner, "tokens", name="top", role="ADMIN", scopes=WRITES)
    child = await created(
        await api.client(top["token"]), "tokens", name="child", role="ADMIN", scopes=WRITES
    )
    middle = await api.client(child["token"])
    leaf = await api.client((await created(middle, "tokens", name="leaf"))["token"])
    agent = str(uuid4())
    await middle.put(f"{V1}/agents/{agent}", json={"name": "a"})
    worker = await api.client((await created(middle, f"agents/{agent}/token"))["token"])
    beside = await key_of(owner, api)
    listed = {item["name"]: item for item in (await owner.get(f"{V1}/tokens")).json()}
    assert [listed[name]["below"] for name in ("bootstrap", "top", "child", "leaf")] == [5, 3, 2, 0]
    assert listed["leaf"]["createdByToken"] == child["id"]
    assert listed["child"]["createdByToken"] == top["id"]
    assert listed["leaf"]["createdBy"] == "token:child"

    assert (await owner.delete(f"{V1}/tokens/{top['id']}")).status_code == 204
    for client in (middle, leaf, worker):
        assert problem(await client.get(f"{V1}/me")) == GONE
    assert (await beside.get(f"{V1}/me")).status_code == 200


async def test_token_revoked_by_another_server_creates_no_token(
    api: Api, owner: httpx2.AsyncClient, settings: Settings
) -> None:
    top = await created(owner, "tokens", name="top", role="ADMIN", scopes=WRITES)
    async with running(settings) as elsewhere:
        held = await elsewhere.client(top["token"])
        api.service.token_cache.clear()
        assert (await held.get(f"{V1}/me")).status_code == 200
        await owner.delete(f"{V1}/tokens/{top['id']}")
        # The other process may believe in it for a moment; what it makes would last.
        answer = await held.post(f"{V1}/tokens", json={"name": "late"})
    assert problem(answer) == GONE
    assert "late" not in {item["name"] for item in (await owner.get(f"{V1}/tokens")).json()}


async def test_caller_cannot_act_on_a_higher_role(api: Api, owner: httpx2.AsyncClient) -> None:
    boss, _ = await person(api, owner, "boss", "OWNER")
    keys = {item["name"]: item["id"] for item in (await owner.get(f"{V1}/tokens")).json()}
    admin = await api.acting(Role.ADMIN)
    assert problem(await admin.delete(f"{V1}/tokens/{keys['bootstrap']}")) == FORBIDDEN
    assert problem(await admin.delete(f"{V1}/users/{boss}")) == FORBIDDEN
    assert problem(await admin.patch(f"{V1}/users/{boss}", json={"role": "VIEWER"})) == FORBIDDEN
    more = {"name": "eve", "password": PASSWORD, "role": "OWNER"}
    assert problem(await admin.post(f"{V1}/users", json=more)) == FORBIDDEN
    assert (await owner.get(f"{V1}/me")).status_code == 200


async def test_restricted_token_cannot_create_a_wider_user(
    api: Api, owner: httpx2.AsyncClient
) -> None:
    narrow = await api.acting(Role.ADMIN, scopes=("admin",))
    user, _ = await person(api, owner, "ann", "VIEWER")
    body = {"name": "eve", "password": PASSWORD, "role": "ADMIN"}
    assert problem(await narrow.post(f"{V1}/users", json=body)) == FORBIDDEN
    assert problem(await narrow.patch(f"{V1}/users/{user}", json={"role": "ADMIN"})) == FORBIDDEN
    agent = str(uuid4())
    await owner.put(f"{V1}/agents/{agent}", json={"name": "a"})
    assert problem(await narrow.post(f"{V1}/agents/{agent}/token")) == FORBIDDEN


async def owners_token(owner: httpx2.AsyncClient) -> str:
    [key] = [item for item in (await owner.get(f"{V1}/tokens")).json() if item["role"] == "OWNER"]
    result: str = key["id"]
    return result


async def test_last_owner_access_cannot_be_removed(api: Api, owner: httpx2.AsyncClient) -> None:
    last = (409, "last_owner")
    bootstrap = await owners_token(owner)
    assert problem(await owner.delete(f"{V1}/tokens/{bootstrap}")) == last
    # One that ends, one of a user's, and one below it are no way in.
    soon = (api.service.clock.now() + timedelta(hours=1)).isoformat()
    await created(owner, "tokens", name="ends", role="OWNER", scopes=WRITES, expiresAt=soon)
    await created(owner, "tokens", name="below", role="OWNER", scopes=WRITES)
    assert problem(await owner.delete(f"{V1}/tokens/{bootstrap}")) == last

    user, eve = await person(api, owner, "eve", "OWNER")
    assert (await owner.delete(f"{V1}/tokens/{bootstrap}")).status_code == 204
    await created(eve, "tokens", name="hers", role="OWNER", scopes=WRITES)
    assert problem(await eve.patch(f"{V1}/users/{user}", json={"role": "ADMIN"})) == last
    assert problem(await eve.delete(f"{V1}/users/{user}")) == last
    await person(api, eve, "adam", "OWNER")
    assert (await eve.delete(f"{V1}/users/{user}")).status_code == 204


async def test_disabled_user_does_not_count_as_last_owner(api: Api, database_url: str) -> None:
    workspace, identity = await api.workspace("w"), api.service.identity
    ann, _ = [
        await identity.create_user(name, PASSWORD, workspace, Role.OWNER) for name in ("ann", "bob")
    ]
    await Raw(database_url).execute(
        "update app_user set disabled_at = created_at where name = 'bob'"
    )
    client = await logged_in(api, "ann", "w")
    refused = await client.patch(f"{V1}/users/{ann}", json={"role": "ADMIN"})
    assert problem(refused) == (409, "last_owner")


async def test_concurrent_removal_of_two_owner_tokens_keeps_one(
    postgres_url: str, settings: Settings
) -> None:
    async with running(replaced(settings, database=postgres_url)) as api:
        workspace = await api.workspace("w")
        first = await api.service.identity.create_token(workspace, "first", Role.OWNER)
        second = await api.client(await api.token(Role.OWNER, workspace))
        own = (await second.get(f"{V1}/tokens")).json()[0]["id"]
        other = await asyncpg.connect(postgres_url)
        try:
            async with other.transaction():
                # Somebody else ends the first token and has not committed yet.
                await other.execute("select from workspace where id = $1 for update", workspace)
                ended = "update token set revoked_at = now() where id = $1"
                await other.execute(ended, first.id)
                late = asyncio.create_task(second.delete(f"{V1}/tokens/{own}"))
                raw = Raw(postgres_url)
                waits = "select count(*) from pg_stat_activity where wait_event_type = 'Lock'"

                async def blocked() -> bool:
                    return bool(await raw.value(waits))

                await eventually(blocked)
            assert problem(await late) == (409, "last_owner")
        finally:
            await other.close()


async def test_mutual_removal_of_two_owners_keeps_one(api: Api) -> None:
    workspace = await api.workspace("w")
    clients = [await api.acting(Role.OWNER, workspace) for _ in range(2)]
    ids = [item["id"] for item in (await clients[0].get(f"{V1}/tokens")).json()]
    answers = await asyncio.gather(
        *(client.delete(f"{V1}/tokens/{token}") for client, token in zip(clients, ids, strict=True))
    )
    assert sorted(answer.status_code for answer in answers) in ([204, 409], [204, 401])


async def test_user_name_reveals_nothing_of_other_workspaces(
    api: Api, owner: httpx2.AsyncClient
) -> None:
    theirs = await api.acting(Role.OWNER, await api.workspace("theirs"))
    for client in (owner, theirs):
        await created(client, "users", name="ann", password=PASSWORD)
        await created(client, "workspaces", name="default")
    twice = {"name": "ann", "password": PASSWORD}
    assert problem(await theirs.post(f"{V1}/users", json=twice)) == (409, "name_taken")


async def test_login_uses_the_user_of_the_named_workspace(
    api: Api, owner: httpx2.AsyncClient
) -> None:
    workspace = await api.workspace("theirs")
    theirs = await api.acting(Role.OWNER, workspace)
    hers = {"name": "ann", "password": "another long password"}
    own = await created(owner, "users", name="ann", password=PASSWORD)
    other = await created(theirs, "users", **hers)
    anonymous = await api.client()

    async def login(**more: Any) -> httpx2.Response:
        return await anonymous.post(f"{V1}/login", json=hers | more)

    assert problem(await login()) == (401, "login_refused")  # the first workspace has another
    for named in ("theirs", str(workspace)):
        answer = (await login(workspace=named)).json()
        assert answer["workspaceId"] == str(workspace)
        ann = await api.client(answer["token"])
        assert (await ann.get(f"{V1}/me")).json()["userId"] == other["id"]
    plain = await logged_in(api, "ann")
    assert (await plain.get(f"{V1}/me")).json()["userId"] == own["id"]


async def test_login_reveals_nothing_of_other_workspaces(
    api: Api, owner: httpx2.AsyncClient
) -> None:
    """A tenant who makes a user of some name learns nothing by how that user may log in."""
    theirs = await api.acting(Role.OWNER, await api.workspace("theirs"))
    elsewhere = await api.acting(Role.OWNER, await api.workspace("elsewhere"))
    await created(elsewhere, "users", name="ann", password="a third password")
    anonymous, seen = await api.client(), set()
    for name in ("ann", "bob"):
        await created(theirs, "users", name=name, password=PASSWORD)
        inner = await created(
            theirs, "workspaces", name="elsewhere" if name == "ann" else "nowhere"
        )
        owned = await api.client(inner["token"])
        await created(owned, "users", name=name, password=PASSWORD)
        hers = {"name": name, "password": PASSWORD}
        wheres: list[dict[str, str]] = [
            {},
            {"workspace": inner["workspace"]["name"]},
            {"workspace": inner["workspace"]["id"]},
        ]
        answers = [await anonymous.post(f"{V1}/login", json=hers | where) for where in wheres]
        seen.add(tuple(answer.status_code for answer in answers))
    assert seen == {(401, 401, 200)}


async def test_failed_login_of_a_namesake_does_not_count_as_success(
    api: Api, owner: httpx2.AsyncClient
) -> None:
    workspace = await api.workspace("theirs")
    theirs = await api.acting(Role.OWNER, workspace)
    await created(theirs, "users", name="ann", password=PASSWORD)
    await created(owner, "users", name="ann", password="another long password")
    anonymous = await api.client()
    own = {"name": "ann", "password": PASSWORD, "workspace": str(workspace)}
    assert (await anonymous.post(f"{V1}/login", json=own)).status_code == 200
    wrong = {"name": "ann", "password": "wrong password"}
    codes = [(await anonymous.post(f"{V1}/login", json=wrong)).status_code for _ in range(6)]
    assert codes == [401] * 5 + [429]


@pytest.mark.parametrize("name", ["ann", "nobody"])
async def test_login_tries_count_together_for_every_workspace_name(
    api: Api, owner: httpx2.AsyncClient, name: str
) -> None:
    await created(owner, "users", name="ann", password=PASSWORD)
    [first] = (await owner.get(f"{V1}/workspaces")).json()
    spellings = (None, first["name"], first["id"], first["id"].upper())
    anonymous, codes = await api.client(), []
    for n in range(6):
        wrong = {"name": name, "password": "wrong password", "workspace": spellings[n % 4]}
        answer = await anonymous.post(f"{V1}/login", json=wrong)
        codes.append(answer.status_code)
    assert codes == [401] * 5 + [429]


async def test_expiring_token_creates_nothing_that_lasts_longer(
    api: Api, owner: httpx2.AsyncClient
) -> None:
    ann = await created(owner, "users", name="ann", password=PASSWORD)
    later = (api.service.store.clock.now() + timedelta(hours=1)).isoformat()
    brief = await created(
        owner, "tokens", name="brief", role="OWNER", scopes=WRITES, expiresAt=later
    )
    client = await api.client(brief["token"])
    for answer in (
        await client.post(f"{V1}/users", json={"name": "bob", "password": PASSWORD}),
        await client.post(f"{V1}/workspaces", json={"name": "more"}),
        await client.patch(f"{V1}/users/{ann['id']}", json={"role": "OWNER"}),
    ):
        assert problem(answer) == FORBIDDEN
        assert "a token that expires" in answer.json()["detail"]
    assert (await client.delete(f"{V1}/users/{ann['id']}")).status_code == 204


async def test_password_change_ends_every_login(api: Api, owner: httpx2.AsyncClient) -> None:
    await created(owner, "users", name="ann", password=PASSWORD, role="ADMIN")
    ann, elsewhere = await logged_in(api, "ann"), await logged_in(api, "ann")
    key = await key_of(ann, api)

    async def change(client: httpx2.AsyncClient, password: str, new: str) -> httpx2.Response:
        body = {"password": password, "newPassword": new}
        return await client.put(f"{V1}/me/password", json=body)

    assert problem(await change(ann, "wrong password", "another password")) == FORBIDDEN
    assert problem(await change(ann, PASSWORD, "short"))[0] == 422
    assert problem(await change(key, PASSWORD, "another password"))[0] == 409
    assert (await elsewhere.get(f"{V1}/me")).status_code == 200
    assert (await change(ann, PASSWORD, "another password")).status_code == 204
    for client in (ann, elsewhere):
        assert problem(await client.get(f"{V1}/me")) == GONE
    assert (await key.get(f"{V1}/me")).status_code == 200
    anonymous = await api.client()
    for password, status in ((PASSWORD, 401), ("another password", 200)):
        answer = await anonymous.post(f"{V1}/login", json={"name": "ann", "password": password})
        assert answer.status_code == status


async def test_password_change_slows_guesses_of_the_current_password(
    api: Api, owner: httpx2.AsyncClient
) -> None:
    await created(owner, "users", name="ann", password=PASSWORD)
    ann = await logged_in(api, "ann")
    body = {"password": "wrong password", "newPassword": "another password"}
    codes = [(await ann.put(f"{V1}/me/password", json=body)).status_code for _ in range(6)]
    assert codes == [403] * 5 + [429]


async def test_name_of_a_removed_user_is_free(api: Api, owner: httpx2.AsyncClient) -> None:
    first = await created(owner, "users", name="ann", password=PASSWORD)
    ann = await logged_in(api, "ann")
    assert (await owner.delete(f"{V1}/users/{first['id']}")).status_code == 204
    assert (await ann.get(f"{V1}/me")).status_code == 401
    again = await created(owner, "users", name="ann", password="another long password")
    assert again["id"] != first["id"]
    refused = {"name": "ann", "password": PASSWORD}
    assert (await (await api.client()).post(f"{V1}/login", json=refused)).status_code == 401


async def test_name_of_a_user_who_stays_in_another_workspace_is_free(
    api: Api, owner: httpx2.AsyncClient
) -> None:
    first = await created(owner, "users", name="ann", password=PASSWORD, role="OWNER")
    own = await created(await logged_in(api, "ann"), "workspaces", name="hers")
    assert (await owner.delete(f"{V1}/users/{first['id']}")).status_code == 204
    again = await created(owner, "users", name="ann", password="another long password")
    anonymous, old = await api.client(), {"name": "ann", "password": PASSWORD}
    assert problem(await anonymous.post(f"{V1}/login", json=old)) == (401, "login_refused")
    for named in ("hers", own["workspace"]["id"]):
        stored = await anonymous.post(f"{V1}/login", json=old | {"workspace": named})
        ann = await api.client(stored.json()["token"])
        assert (await ann.get(f"{V1}/me")).json()["userId"] == first["id"]
    new = {"name": "ann", "password": "another long password"}
    ann = await api.client((await anonymous.post(f"{V1}/login", json=new)).json()["token"])
    assert (await ann.get(f"{V1}/me")).json()["userId"] == again["id"]


async def test_member_beyond_the_first_page_can_be_removed(
    api: Api, owner: httpx2.AsyncClient, database_url: str
) -> None:
    last = await created(owner, "users", name="zoe", password=PASSWORD)
    raw = Raw(database_url)
    ids = [uuid4() for _ in range(1001)]
    at = "(select min(created_at) from workspace)"
    people = ", ".join(f"('{user}', 'a{n}', 'x', {at})" for n, user in enumerate(ids))
    await raw.execute(f"insert into app_user (id, name, password, created_at) values {people}")
    members = ", ".join(f"('{DEFAULT_WORKSPACE}', '{item}', 'MEMBER', {at})" for item in ids)
    await raw.execute(f"insert into member (workspace, user_id, role, created_at) values {members}")
    changed = await owner.patch(f"{V1}/users/{last['id']}", json={"role": "VIEWER"})
    assert changed.json()["role"] == "VIEWER"
    assert (await owner.delete(f"{V1}/users/{last['id']}")).status_code == 204


async def test_every_refused_login_looks_the_same_after_equal_work(
    api: Api, owner: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tenuto.engine.tenancy import passwords

    await created(owner, "users", name="ann", password=PASSWORD)
    await api.service.identity.login("ann", PASSWORD)  # the decoy is made once
    verified: list[str] = []
    verify = passwords._verify

    def counted(stored: str, password: str) -> bool:
        verified.append(stored)
        return verify(stored, password)

    monkeypatch.setattr(passwords, "_verify", counted)
    anonymous, output = await api.client(), set()
    for number, body in enumerate(
        [
            {"name": "ann", "password": "wrong password"},
            {"name": "bob", "password": PASSWORD},
            {"name": "ann", "password": PASSWORD, "workspace": "nowhere"},
            {"name": "ann", "password": PASSWORD, "workspace": str(uuid4())},
            {"name": "bob", "password": PASSWORD, "workspace": str(DEFAULT_WORKSPACE)},
            {"name": "ann", "password": PASSWORD, "workspace": "a\x00b"},
        ],
        1,
    ):
        answer = await anonymous.post(f"{V1}/login", json=body)
        assert problem(answer) == (401, "login_refused")
        output.add(answer.content)
        assert len(verified) == number
    assert len(output) == 1


async def test_user_of_an_older_version_keeps_the_bare_name(
    api: Api, owner: httpx2.AsyncClient, database_url: str
) -> None:
    first = await created(owner, "users", name="ann", password=PASSWORD)
    await Raw(database_url).execute("update app_user set home = null")
    again = {"name": "ann", "password": PASSWORD}
    assert problem(await owner.post(f"{V1}/users", json=again)) == (409, "name_taken")
    theirs = await api.acting(Role.OWNER, await api.workspace("theirs"))
    await created(theirs, "users", name="ann", password="another long password")
    ann = await logged_in(api, "ann")
    assert (await ann.get(f"{V1}/me")).json()["userId"] == first["id"]


async def test_user_of_an_older_version_does_not_shadow_the_first_workspace(
    api: Api, owner: httpx2.AsyncClient, database_url: str
) -> None:
    theirs = await api.acting(Role.OWNER, await api.workspace("theirs"))
    for name in ("ann", "bob"):
        await created(theirs, "users", name=name, password="another long password")
    await Raw(database_url).execute("update app_user set home = null")
    own = await created(owner, "users", name="ann", password=PASSWORD)
    ann = await logged_in(api, "ann")
    assert (await ann.get(f"{V1}/me")).json()["userId"] == own["id"]
    bob = {"name": "bob", "password": "another long password"}  # nobody else is called so
    assert (await (await api.client()).post(f"{V1}/login", json=bob)).status_code == 200


async def test_workspaces_created_from_a_workspace_are_counted(settings: Settings) -> None:
    async with running(replaced(settings, workspaces_per_owner=2)) as api:
        tenant = await api.acting(Role.OWNER, UUID((await of_operator(api))["workspace"]["id"]))
        child = (await created(tenant, "workspaces", name="child"))["token"]
        inside = await api.client(child)
        await created(inside, "workspaces", name="grandchild")
        for client in (inside, tenant):
            more = await client.post(f"{V1}/workspaces", json={"name": "more"})
            assert problem(more) == (409, "too_many_workspaces")
        await of_operator(api)  # the operator's own are counted apart
        operator = await api.acting()
        more = await operator.post(f"{V1}/workspaces", json={"name": "third"})
        assert problem(more) == (409, "too_many_workspaces")


async def of_operator(api: Api) -> dict[str, Any]:
    return await created(await api.acting(), "workspaces", name="tenant")


def test_password_hash_is_expensive() -> None:
    """As a program has it: the tests of this folder pay less."""
    code = "from tenuto.engine.tenancy import passwords; print(passwords._hash('x' * 10))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("$argon2id$v=19$m=65536,t=3,p=4$")
