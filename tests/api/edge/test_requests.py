"""Invalid, repeated, too frequent or too large requests: a clear error, no internal error."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any
from uuid import uuid4

import asyncpg
import httpx2
import pytest
from tests.api.conftest import V1, Api, problem, replaced, running

from tenuto.api.edge import idempotency
from tenuto.api.operation import OPERATIONS
from tenuto.api.server import listen
from tenuto.app import key_folder
from tenuto.encryption_keys import add_key
from tenuto.engine.engine import DEFAULT_WORKSPACE, Engine
from tenuto.model.errors import Conflict, Unavailable
from tenuto.settings import Settings
from tenuto.store.protocol import Script

TASKS = f"{V1}/agent-tasks"
JSON = {"content-type": "application/json"}
DEEP = b'{"title": "t", "input": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"

BODIES: dict[str, tuple[bytes, int, str]] = {
    "not json": (b"{", 422, "invalid_json"),
    "a list": (b"[]", 422, "invalid_value"),
    "twice": (b'{"title": "a", "title": "b"}', 422, "invalid_json"),
    "twice inside": (b'{"title": "a", "input": {"x": {"y": 1, "y": 2}}}', 422, "invalid_json"),
    "unknown": (b'{"title": "a", "titel": "b"}', 422, "invalid_value"),
    "deep": (DEEP, 422, "too_deep"),
    "rather deep": (b'{"title": "t", "input": ' + b"[" * 80 + b"]" * 80 + b"}", 422, "too_deep"),
    "nan": (b'{"title": "a", "input": NaN}', 422, "invalid_json"),
    "infinite": (b'{"title": "a", "input": 1e999}', 422, "invalid_json"),
    "huge number": (b'{"title": "a", "input": ' + b"9" * 5000 + b"}", 422, "invalid_json"),
    "large number": (b'{"title": "a", "priority": 99999999999999999999}', 422, "invalid_value"),
    "nul": (b'{"title": "a\\u0000b"}', 422, "text_invalid"),
    "nul inside": (b'{"title": "a", "input": ["\\u0000"]}', 422, "text_invalid"),
    "surrogate": (b'{"title": "a", "prompt": "\\ud800"}', 422, "invalid_json"),
    "not utf-8": (b'{"title": "\xff\xfe"}', 422, "invalid_json"),
    "empty title": (b'{"title": " "}', 422, "invalid_value"),
    "no title": (b"{}", 422, "invalid_value"),
    "priority": (b'{"title": "a", "priority": 11}', 422, "invalid_value"),
    "two names": (b'{"title": "a", "name": "b"}', 422, "invalid_value"),
    "attempts": (b'{"title": "a", "maxAttempts": 0}', 422, "invalid_value"),
    "retries": (b'{"title": "a", "maxRetries": 1000000}', 422, "invalid_value"),
    "nobody": (
        b'{"title": "a", "dependsOn": ["%b"]}' % str(uuid4()).encode(),
        422,
        "dependency_unknown",
    ),
    "no zone": (b'{"title": "a", "runAt": "2030-01-01T00:00:00"}', 422, "invalid_value"),
}


@pytest.mark.parametrize("body", BODIES)
async def test_invalid_task_body_is_refused(owner: httpx2.AsyncClient, body: str) -> None:
    content, status, code = BODIES[body]
    answer = await owner.post(TASKS, content=content, headers=JSON)
    assert problem(answer) == (status, code)
    assert (await owner.get(TASKS)).json()["tasks"] == []


async def test_body_that_is_too_large_or_not_json_is_refused(settings: Settings) -> None:
    async with running(replaced(settings, body_kb=1)) as api:
        client = await api.acting()
        large = await client.post(TASKS, json={"title": "a", "prompt": "x" * 2000})
        assert problem(large) == (413, "body_too_large")

        async def drip() -> AsyncIterator[bytes]:
            for _ in range(10):
                yield b"x" * 200

        chunked = await client.post(TASKS, content=drip(), headers=JSON)
        assert problem(chunked) == (413, "body_too_large")
        form = await client.post(TASKS, data={"title": "a"})
        assert problem(form) == (415, "unsupported_media_type")


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
async def test_duplicate_json_name_among_many_is_found_quickly(api: Api) -> None:
    client = await api.acting()
    names = [f'"{n}": 1' for n in range(50_000)]
    body = "{" + ", ".join([*names, names[-1]]) + "}"
    async with asyncio.timeout(5):
        answer = await client.post(TASKS, content=body, headers=JSON)
    assert problem(answer) == (422, "invalid_json")
    assert "duplicate name '49999'" in answer.json()["detail"]


async def test_unknown_paths_methods_and_parameters_are_refused(owner: httpx2.AsyncClient) -> None:
    assert problem(await owner.get(f"{V1}/nothing")) == (404, "not_found")
    assert problem(await owner.get(f"{TASKS}/not-an-id")) == (404, "not_found")
    assert problem(await owner.put(TASKS)) == (405, "method_not_allowed")
    assert problem(await owner.get(f"{TASKS}?statsu=DEAD")) == (422, "invalid_value")
    assert problem(await owner.get(f"{TASKS}?status=NOPE")) == (422, "invalid_filter")
    assert problem(await owner.get(f"{TASKS}?limit=0")) == (422, "invalid_value")
    assert problem(await owner.get(f"{TASKS}?priority>=x")) == (422, "invalid_value")


async def test_idempotency_key_creates_one_task(owner: httpx2.AsyncClient) -> None:
    headers = {"Idempotency-Key": "k1"}
    answers = await asyncio.gather(
        *(owner.post(TASKS, json={"title": "a"}, headers=headers) for _ in range(8))
    )
    assert len({answer.json()["id"] for answer in answers}) == 1
    assert sorted(answer.status_code for answer in answers) == [200] * 7 + [201]
    other = await owner.post(TASKS, json={"title": "b"}, headers=headers)
    assert problem(other) == (409, "idempotency_conflict")


async def test_idempotency_key_creates_one_bulk(owner: httpx2.AsyncClient) -> None:
    headers = {"Idempotency-Key": "k2"}
    body = {"tasks": [{"title": "a"}, {"title": "b"}]}
    first = await owner.post(f"{TASKS}/bulk", json=body, headers=headers)
    again = await owner.post(f"{TASKS}/bulk", json=body, headers=headers)
    assert first.status_code == again.status_code == 201
    assert first.content == again.content
    assert again.headers["idempotency-replayed"] == "true"
    assert len((await owner.get(TASKS)).json()["tasks"]) == 2
    other = await owner.post(f"{TASKS}/bulk", json={"tasks": [{"title": "c"}]}, headers=headers)
    assert problem(other) == (409, "idempotency_conflict")
    bad = {"tasks": [{"title": ""}]}
    key = {"Idempotency-Key": "k3"}
    refused = await owner.post(f"{TASKS}/bulk", json=bad, headers=key)
    assert problem(refused) == (422, "invalid_value")
    right = await owner.post(f"{TASKS}/bulk", json=body, headers=key)
    assert right.status_code == 201


async def test_idempotency_key_creates_one_rerun(owner: httpx2.AsyncClient) -> None:
    created = [(await owner.post(TASKS, json={"title": "a"})).json()["id"] for _ in range(2)]
    headers = {"Idempotency-Key": "k4"}
    first = await owner.post(f"{TASKS}/{created[0]}/rerun", headers=headers)
    again = await owner.post(f"{TASKS}/{created[0]}/rerun", headers=headers)
    assert first.status_code == again.status_code == 201
    assert first.content == again.content
    assert first.json()["rerunOf"] == created[0]
    assert again.headers["idempotency-replayed"] == "true"
    assert len((await owner.get(TASKS)).json()["tasks"]) == 3
    other = await owner.post(f"{TASKS}/{created[1]}/rerun", headers=headers)
    assert problem(other) == (409, "idempotency_conflict")
    fresh = await owner.post(f"{TASKS}/{created[0]}/rerun", headers={"Idempotency-Key": "k5"})
    assert fresh.json()["id"] != first.json()["id"]


async def test_response_too_long_to_store_is_not_repeated(
    owner: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idempotency, "MAX_STORED_BYTES", 100)
    headers = {"Idempotency-Key": "k6"}
    body = {"tasks": [{"title": "a"}, {"title": "b"}]}
    first = await owner.post(f"{TASKS}/bulk", json=body, headers=headers)
    assert first.status_code == 201
    again = await owner.post(f"{TASKS}/bulk", json=body, headers=headers)
    assert problem(again) == (409, "idempotency_conflict")
    assert len((await owner.get(TASKS)).json()["tasks"]) == 2


async def pruned_later(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few minutes pass, and a coordinator removes what is past its age."""
    clock = type(api.service.store.clock)
    now = clock.now
    monkeypatch.setattr(clock, "now", lambda self: now(self) + timedelta(minutes=5))
    await api.service.engine_for(DEFAULT_WORKSPACE).maintenance.prune_once()


async def test_request_with_an_unknown_outcome_is_not_executed_again(
    api: Api, owner: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    created = (await owner.post(TASKS, json={"title": "a"})).json()["id"]
    rerun, headers = f"{TASKS}/{created}/rerun", {"Idempotency-Key": "k7"}

    async def away(*args: object) -> None:
        raise Unavailable("the database went away", "database_unreachable")

    with monkeypatch.context() as broken:
        broken.setattr(Engine, "show", away)  # the task is made, and cannot be shown
        lost = await owner.post(rerun, headers=headers)
    assert problem(lost) == (503, "database_unreachable")
    for _ in range(2):
        again = await owner.post(rerun, headers=headers)
        assert problem(again) == (409, "idempotency_conflict")
        assert "its outcome is unknown" in again.json()["detail"]
        await pruned_later(api, monkeypatch)
    assert len((await owner.get(TASKS)).json()["tasks"]) == 2


async def test_response_that_cannot_be_stored_is_returned(
    api: Api, owner: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    created = (await owner.post(TASKS, json={"title": "a"})).json()["id"]
    rerun, headers = f"{TASKS}/{created}/rerun", {"Idempotency-Key": "k8"}
    store = type(api.service.store.for_workspace(DEFAULT_WORKSPACE))
    once = store.transact_one

    async def away(self: Any, script: Any) -> Any:
        if "idempotency_finish" in str(next(script())):
            raise Unavailable("the database went away", "database_unreachable")
        return await once(self, script)

    with monkeypatch.context() as broken:
        broken.setattr(store, "transact_one", away)
        first = await owner.post(rerun, headers=headers)
    assert (first.status_code, first.json()["rerunOf"]) == (201, created)
    assert problem(await owner.post(rerun, headers=headers)) == (409, "in_progress")
    await pruned_later(api, monkeypatch)
    assert problem(await owner.post(rerun, headers=headers)) == (409, "idempotency_conflict")
    assert len((await owner.get(TASKS)).json()["tasks"]) == 2


@pytest.mark.parametrize("database_url", ["postgres"], indirect=True)
async def test_idempotency_key_deleted_meanwhile_is_used_by_one_request(
    api: Api, settings: Settings
) -> None:
    store = api.service.engine_for(DEFAULT_WORKSPACE).core.store
    asked = ("k9", f"POST {V1}/events", f"{V1}/events", b"{}")

    async def forget() -> None:
        connection = await asyncpg.connect(settings.database)
        await connection.execute("delete from idempotency")
        await connection.close()

    def late(script: Callable[[], Script[Any]]) -> Script[Any]:
        """The script, while whoever has the key lets go of it after the first look."""
        steps = script()
        rows = yield next(steps)
        with ThreadPoolExecutor(1) as elsewhere:
            elsewhere.submit(asyncio.run, forget()).result()
        while True:
            try:
                rows = yield steps.send(rows)
            except StopIteration as end:
                return end.value

    class Late:
        clock = store.clock

        async def transact(self, script: Callable[[], Script[Any]]) -> Any:
            return await store.transact(lambda: late(script))

    def answers(chosen: Any) -> idempotency.IdempotencyStore:
        return idempotency.IdempotencyStore(chosen, api.service.vault, DEFAULT_WORKSPACE)

    await answers(store).begin(*asked)
    await answers(Late()).begin(*asked)
    with pytest.raises(Conflict) as refused:
        await answers(store).begin(*asked)
    assert refused.value.code == "in_progress"


async def test_api_contract_lists_the_idempotency_key_where_it_applies(
    owner: httpx2.AsyncClient,
) -> None:
    paths = (await owner.get("/openapi.json")).json()["paths"]
    named = {
        f"{method.upper()} {path}"
        for path, methods in paths.items()
        for method, operation in methods.items()
        if any(item["name"] == "Idempotency-Key" for item in operation.get("parameters", ()))
    }
    replayed = {route for route, operation in OPERATIONS.items() if operation.is_replayed}
    assert named == replayed | {f"POST {TASKS}"}


async def test_variable_is_a_text_or_a_secret_reference(owner: httpx2.AsyncClient) -> None:
    await owner.put(f"{V1}/secrets/db", json={"value": "s3cret-value"})
    agent = uuid4()
    await owner.put(f"{V1}/agents/{agent}", json={"name": "a"})
    env = {"PLAIN": "x", "PASSWORD": {"$secret": "db"}}
    created = await owner.post(TASKS, json={"title": "a", "env": env})
    assert created.status_code == 201
    assert "s3cret-value" not in created.text
    [work] = (await owner.post(f"{V1}/agents/{agent}/claim", json={})).json()["tasks"]
    assert work["env"] == {"PLAIN": "x", "PASSWORD": "s3cret-value"}
    for wrong, code in (
        ({"$secret": "nobody"}, "secret_unknown"),
        ({"$secret": "db", "more": "x"}, "invalid_value"),
        ({"secret": "db"}, "invalid_value"),
        ({"$secret": 1}, "invalid_value"),
        (1, "invalid_value"),
    ):
        answer = await owner.post(TASKS, json={"title": "a", "env": {"A": wrong}})
        assert problem(answer) == (422, code), wrong


async def test_edit_with_an_outdated_version_is_refused(owner: httpx2.AsyncClient) -> None:
    created = await owner.post(TASKS, json={"title": "a", "tags": ["x"]})
    path, seen = f"{TASKS}/{created.json()['id']}", created.headers["etag"]
    first = await owner.patch(path, json={"title": "b"}, headers={"If-Match": seen})
    assert (first.status_code, first.json()["title"]) == (200, "b")
    late = await owner.patch(path, json={"title": "c"}, headers={"If-Match": seen})
    assert problem(late) == (412, "version_conflict")
    body = {"tags": ["y", "z"], "metadata": {"k": 1}, "description": None, "priority": 9}
    last = await owner.patch(path, json=body, headers={"If-Match": first.headers["etag"]})
    shown = last.json()
    assert (shown["tags"], shown["metadata"], shown["priority"]) == (["y", "z"], {"k": 1}, 9)
    kinds = [line["event"] for line in (await owner.get(f"{path}/logs")).json()["lines"]]
    assert kinds == ["submitted", "edited", "priority_changed", "edited"]


@pytest.mark.parametrize("body", [{"status": "PAUSED"}, {}])
async def test_pause_with_an_outdated_version_is_refused(
    owner: httpx2.AsyncClient, body: dict[str, str]
) -> None:
    created = await owner.post(TASKS, json={"title": "a"})
    path, seen = f"{TASKS}/{created.json()['id']}", created.headers["etag"]
    await owner.patch(path, json={"title": "b"})
    late = await owner.patch(path, json=body, headers={"If-Match": seen})
    assert problem(late) == (412, "version_conflict")
    assert (await owner.get(path)).json()["status"] == "PENDING"


async def test_refused_pause_changes_nothing_else(owner: httpx2.AsyncClient) -> None:
    path = f"{TASKS}/{(await owner.post(TASKS, json={'title': 'a'})).json()['id']}"
    change = {"title": "b", "priority": 9, "tags": ["x"]}
    refused = await owner.patch(path, json=change | {"status": "PENDING"})
    assert problem(refused) == (409, "out_of_turn")
    shown = (await owner.get(path)).json()
    assert (shown["title"], shown["priority"], shown["tags"]) == ("a", 5, [])
    held = (await owner.patch(path, json=change | {"status": "PAUSED"})).json()
    assert (held["title"], held["priority"], held["status"]) == ("b", 9, "PAUSED")
    assert (await owner.patch(path, json={"status": "PENDING"})).json()["status"] == "PENDING"


async def test_deletion_leaves_the_audit_trail(owner: httpx2.AsyncClient) -> None:
    created = await owner.post(TASKS, json={"title": "a", "prompt": "p", "input": {"x": 1}})
    path = f"{TASKS}/{created.json()['id']}"
    assert problem(await owner.delete(path)) == (409, "out_of_turn")
    await owner.post(f"{path}/cancel", json={})
    assert (await owner.delete(path)).status_code == 204
    shown = (await owner.get(path)).json()
    assert (shown["title"], shown["prompt"], shown["inputContext"]) == ("(deleted)", None, None)
    kinds = [line["event"] for line in (await owner.get(f"{path}/logs")).json()["lines"]]
    assert kinds == ["submitted", "cancelled", "deleted"]


async def test_task_pages_show_every_task_once(owner: httpx2.AsyncClient) -> None:
    body = {"tasks": [{"title": str(n)} for n in range(25)]}
    created = [
        task["id"] for task in (await owner.post(f"{TASKS}/bulk", json=body)).json()["tasks"]
    ]
    seen: list[str] = []
    cursor: str | None = ""
    while cursor is not None:
        page = (await owner.get(f"{TASKS}?limit=10{cursor}")).json()
        seen += [task["id"] for task in page["tasks"]]
        cursor = f"&cursor={page['nextCursor']}" if page["nextCursor"] else None
    assert seen == created[::-1]


async def test_rate_limited_token_delays_no_other(settings: Settings) -> None:
    async with running(replaced(settings, rate_per_s=5)) as api:
        busy, calm = await api.acting(), await api.acting()
        answers = [await busy.get(f"{V1}/me") for _ in range(60)]
        assert problem(answers[-1]) == (429, "rate_limited")
        assert int(answers[-1].headers["retry-after"]) >= 1
        assert (await calm.get(f"{V1}/me")).status_code == 200


async def test_workspace_beyond_its_quota_delays_no_other(
    api: Api, owner: httpx2.AsyncClient
) -> None:
    other = await api.acting(workspace=await api.workspace("other"))
    own = (await owner.get(f"{V1}/me")).json()["workspaceId"]
    quota = await owner.put(f"{V1}/workspaces/{own}/quota", json={"pending": 3})
    assert quota.json()["quota"]["pending"] == 3
    codes = [(await owner.post(TASKS, json={"title": "a"})).status_code for _ in range(4)]
    assert codes == [201, 201, 201, 429]
    bulk = await owner.post(f"{TASKS}/bulk", json={"tasks": [{"title": "a"}] * 4})
    assert problem(bulk) == (429, "quota_exceeded")
    assert (await other.post(TASKS, json={"title": "a"})).status_code == 201
    await owner.put(f"{V1}/workspaces/{own}/quota", json={"tasksPerMinute": 1})
    codes = [(await owner.post(TASKS, json={"title": "a"})).status_code for _ in range(2)]
    assert codes == [201, 429]


async def test_concurrent_submits_stay_within_the_quota(owner: httpx2.AsyncClient) -> None:
    own = (await owner.get(f"{V1}/me")).json()["workspaceId"]
    await owner.put(f"{V1}/workspaces/{own}/quota", json={"pending": 3})
    answers = await asyncio.gather(*(owner.post(TASKS, json={"title": "a"}) for _ in range(20)))
    assert sorted(answer.status_code for answer in answers) == [201] * 3 + [429] * 17


async def test_running_tasks_stay_within_the_quota(owner: httpx2.AsyncClient) -> None:
    own = (await owner.get(f"{V1}/me")).json()["workspaceId"]
    agents = [str(uuid4()), str(uuid4())]
    for agent in agents:
        await owner.put(f"{V1}/agents/{agent}", json={"name": agent})
    await owner.post(f"{TASKS}/bulk", json={"tasks": [{"title": "a"}] * 10})
    await owner.put(f"{V1}/workspaces/{own}/quota", json={"running": 3})

    async def claims() -> int:
        requests_ = [
            owner.post(f"{V1}/agents/{agent}/claim", json={"limit": 2}) for agent in agents * 3
        ]
        return sum(len(result.json()["tasks"]) for result in await asyncio.gather(*requests_))

    assert await claims() + await claims() == 3
    assert await claims() == 0
    waiting = (await owner.get(f"{TASKS}?status=PENDING")).json()["tasks"][0]["id"]
    for where in (f"agents/{agents[0]}", f"agent-tasks/{waiting}"):
        reported = (await owner.get(f"{V1}/{where}/explain")).json()
        [gate] = [item for item in reported["gates"] if item["gate"] == "quota"]
        assert gate["detail"] == "the workspace runs 3 tasks; its quota is 3 at once"
        assert gate["detail"] in reported["summary"]
    await owner.put(f"{V1}/workspaces/{own}/quota", json={})
    assert await claims() + await claims() + await claims() == 7


async def test_bulk_actions_work_by_filter(owner: httpx2.AsyncClient) -> None:
    for tag in ("x", "x", "y"):
        await owner.post(TASKS, json={"title": "a", "tags": [tag]})
    body = {"filter": {"tags": ["x"]}, "action": "cancel", "reason": "r", "dryRun": True}
    assert len((await owner.post(f"{TASKS}/actions", json=body)).json()["done"]) == 2
    assert (await owner.get(f"{TASKS}?status=CANCELLED")).json()["tasks"] == []
    done = await owner.post(f"{TASKS}/actions", json=body | {"dryRun": False})
    assert len(done.json()["done"]) == 2
    assert len((await owner.get(f"{TASKS}?status=CANCELLED")).json()["tasks"]) == 2


@pytest.mark.parametrize(
    ("picks", "chosen"), [({"minPriority": 7}, [7, 9]), ({"priority": 7}, [7]), ({}, [3, 7, 9])]
)
async def test_bulk_actions_work_by_priority(
    owner: httpx2.AsyncClient, picks: dict[str, int], chosen: list[int]
) -> None:
    for priority in (3, 7, 9):
        await owner.post(TASKS, json={"title": "a", "priority": priority})
    body = {"filter": picks, "action": "cancel"}
    done = (await owner.post(f"{TASKS}/actions", json=body)).json()["done"]
    result = (await owner.get(f"{TASKS}?status=CANCELLED")).json()["tasks"]
    assert sorted(item["id"] for item in result) == sorted(done)
    assert sorted(item["priority"] for item in result) == chosen


async def test_list_filters_work_for_bulk_actions(owner: httpx2.AsyncClient) -> None:
    document = (await owner.get("/openapi.json")).json()
    listed = {parameter["name"] for parameter in document["paths"][TASKS]["get"]["parameters"]}
    picking = set(document["components"]["schemas"]["FilterBody"]["properties"])
    assert picking == listed - {"limit", "cursor"}


async def test_claim_waits_for_a_task(owner: httpx2.AsyncClient) -> None:
    agent = uuid4()
    await owner.put(f"{V1}/agents/{agent}", json={"name": "a"})
    waiting = asyncio.create_task(
        owner.post(f"{V1}/agents/{agent}/claim", json={"waitSeconds": 20})
    )
    created = await owner.post(TASKS, json={"title": "a"})
    [work] = (await waiting).json()["tasks"]
    assert work["id"] == created.json()["id"]


def test_responses_do_not_wait_for_tcp_acknowledgements() -> None:
    with listen(Settings(host="127.0.0.1", port=0)) as bound:
        assert bound.proto == socket.IPPROTO_TCP


async def test_repeated_request_is_recognised_after_a_key_rotation(
    api: Api, owner: httpx2.AsyncClient, settings: Settings
) -> None:
    headers = {"Idempotency-Key": "k2b"}
    first = await owner.post(f"{TASKS}/bulk", json={"tasks": [{"title": "a"}]}, headers=headers)
    api.service.vault = add_key(key_folder(settings))
    again = await owner.post(f"{TASKS}/bulk", json={"tasks": [{"title": "a"}]}, headers=headers)
    assert again.headers.get("idempotency-replayed") == "true", again.text
    assert first.content == again.content
    other = await owner.post(f"{TASKS}/bulk", json={"tasks": [{"title": "b"}]}, headers=headers)
    assert problem(other) == (409, "idempotency_conflict")
