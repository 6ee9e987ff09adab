"""Named secrets: stored per workspace, referred to by tasks, encrypted again at a rotation."""

from typing import Any
from uuid import UUID

import pytest
from tests.contract.conftest import (
    AnyStore,
    ManualClock,
    Raw,
    claim_all,
    claim_one,
    new,
    refusal,
)
from tests.contract.flows.helpers import group, start, task
from tests.secrets.conftest import NEW, OLD, dump, stored_bytes

from tenuto.encryption_keys import KeyRing
from tenuto.engine.engine import Engine
from tenuto.model.bounds import MAX_SECRET
from tenuto.model.errors import Invalid

CANARY = "named-canary-7f3a"


async def put(engine: Engine, name: str, value: str = CANARY) -> None:
    await engine.secrets.put(name, value)


async def names(engine: Engine) -> list[str]:
    return [item.name for item in await engine.secrets.list()]


async def test_secret_is_stored_shown_replaced_and_deleted(
    engine: Engine, raw: Raw, clock: ManualClock
) -> None:
    await put(engine, "b.token-1")
    created = clock.now()
    clock.advance(5)
    await put(engine, "a_key")
    await put(engine, "b.token-1", "another")
    first, second = await engine.secrets.list()
    assert (first.name, second.name) == ("a_key", "b.token-1")
    assert (second.created_at, second.updated_at) == (created, clock.now())
    assert (second.key_id, second.created_by) == ("old", "tester")
    await engine.secrets.delete("a_key")
    assert await names(engine) == ["b.token-1"]
    assert await refusal(engine.secrets.delete("a_key")) == "not_found"
    assert CANARY not in await dump(raw)
    assert CANARY.encode() not in stored_bytes(raw)


@pytest.mark.parametrize("name", ["", "a b", "a/b", "ü", "a" * 101, "a\n"])
async def test_invalid_secret_name_is_refused(engine: Engine, name: str) -> None:
    assert await refusal(put(engine, name)) == "invalid_value"


@pytest.mark.parametrize("value", ["", "x" * (MAX_SECRET + 1), "a\x00b", "\ud800"])
async def test_invalid_secret_value_is_refused_and_not_repeated(engine: Engine, value: str) -> None:
    with pytest.raises(Invalid) as caught:
        await put(engine, "name", value)
    assert len(str(caught.value)) < 100
    await put(engine, "name", "x" * MAX_SECRET)


async def test_secrets_of_a_workspace_are_limited(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tenuto.model.bounds.MAX_NAMED_SECRETS", 2)
    await put(engine, "one")
    await put(engine, "two")
    assert await refusal(put(engine, "three")) == "too_large"
    await put(engine, "two", "again")


async def test_secret_belongs_to_its_workspace(engine: Engine, store: AnyStore, raw: Raw) -> None:
    await put(engine, "mine")
    there = Engine(store, workspace=await raw.workspace(7), key_ring=KeyRing(OLD))
    assert await names(there) == []
    assert await refusal(there.secrets.delete("mine")) == "not_found"
    refers = there.submit(new(input={"$secret": "mine"}))
    assert await refusal(refers) == "secret_unknown"
    await put(there, "mine", "theirs")
    assert await names(engine) == ["mine"]


async def test_references_are_resolved_at_the_claim(engine: Engine, raw: Raw) -> None:
    await put(engine, "token", "before")
    asked = {"auth": [{"$secret": "token"}], "not": {"$secret": "token", "more": 1}}
    env = {"PLAIN": "x", "TOKEN": {"$secret": "token"}}
    task = (await engine.submit(new(input=asked, env=env, command=["env"]))).id
    await put(engine, "token", CANARY)
    work = await claim_one(engine, accept_commands=True)
    assert work.input == {"auth": [CANARY], "not": {"$secret": CANARY, "more": 1}} | {
        "not": asked["not"]
    }
    assert work.env == {"PLAIN": "x", "TOKEN": CANARY}
    assert work.secrets == (CANARY,)
    assert (await engine.show(task)).input == asked
    await engine.complete(work.fence, work.input)
    assert CANARY not in await dump(raw)


async def test_whole_input_can_be_a_secret(engine: Engine) -> None:
    await put(engine, "all")
    await engine.submit(new(input={"$secret": "all"}))
    assert (await claim_one(engine)).input == CANARY


@pytest.mark.parametrize(
    "options",
    [
        {"input": {"a": [{"$secret": "gone"}]}},
        {"env": {"A": {"$secret": "gone"}}, "command": ["env"]},
        {"input": {"$secret": "no name at all!"}},
    ],
)
async def test_unknown_secret_name_is_refused(
    engine: Engine, raw: Raw, options: dict[str, Any]
) -> None:
    assert await refusal(engine.submit(new(**options))) == "secret_unknown"
    assert await raw.count("task") == 0


@pytest.mark.parametrize("value", [1, None, {}, {"$secret": 1}, {"$secret": "a", "b": "c"}])
async def test_variable_is_text_or_a_reference(engine: Engine, value: Any) -> None:
    refused = engine.submit(new(env={"A": value}, command=["env"]))
    assert await refusal(refused) == "invalid_value"


async def test_too_many_secret_references_are_refused(engine: Engine) -> None:
    asked = [{"$secret": f"name-{n}"} for n in range(101)]
    assert await refusal(engine.submit(new(input=asked))) == "too_large"


async def test_task_waits_for_a_deleted_secret(engine: Engine, clock: ManualClock) -> None:
    await put(engine, "token")
    task = (await engine.submit(new(input={"$secret": "token"}))).id
    await engine.secrets.delete("token")
    assert await claim_all(engine) == []
    view = await engine.show(task)
    assert (view.status, view.tries) == ("RETRY_WAIT", 0)
    assert "token" in (view.last_error or "")
    await put(engine, "token")
    clock.advance(60)
    await engine.maintenance.promote_once("test")
    assert (await claim_one(engine)).input == CANARY


async def test_submit_with_references_needs_no_key(engine: Engine, store: AnyStore) -> None:
    await put(engine, "token")
    await Engine(store).submit(new(input={"$secret": "token"}))
    assert (await claim_one(engine)).input == CANARY


async def key_ids(raw: Raw) -> list[str]:
    rows = await raw.fetch(
        "select key_id from secret union all select key_id from task_secret"
        " union all select key_id from webhook"
    )
    return [row[0] for row in rows]


async def put_webhook(engine: Engine, raw: Raw, webhook: UUID) -> None:
    position = {"workspace": engine.workspace, "table": "webhook", "row": str(webhook)}
    sealed = KeyRing(OLD).encrypt(CANARY, **position, column="secret")  # type: ignore[arg-type]
    at, yes = ("0", "1") if raw.path is not None else ("to_timestamp(0)", "true")
    await raw.execute(
        "insert into webhook (id, workspace, url, events, key_id, secret, enabled, created_at,"
        f" updated_at) values ('{webhook}', '{engine.workspace}', 'https://x.test', '[]',"
        f" '{sealed.key_id}', '{sealed.data}', {yes}, {at}, {at})"
    )


async def test_rotation_encrypts_a_bounded_number_at_a_time(
    engine: Engine, store: AnyStore, raw: Raw
) -> None:
    there = Engine(store, workspace=await raw.workspace(8), key_ring=KeyRing(OLD))
    for item in (engine, there):
        await put(item, "one")
        await put(item, "two")
    await engine.submit_many([new(input={"secrets": {"a": f"value {n}"}}) for n in range(3)])
    await put_webhook(engine, raw, UUID(int=1))
    assert await engine.key_rotator.rotate_once() == 0
    later = Engine(store, key_ring=KeyRing(NEW | OLD))
    done = []
    while (n := await later.key_rotator.rotate_once(3)) > 0:
        done.append(n)
    assert done == [3, 3, 2]
    assert set(await key_ids(raw)) == {"new"}
    only_new = Engine(store, key_ring=KeyRing(NEW))
    await only_new.submit(new(input={"$secret": "one"}))
    claimed = await claim_all(only_new)
    assert claimed[-1].input == CANARY
    assert [work.secrets for work in claimed[:3]] == [(f"value {n}",) for n in range(3)]


async def test_value_that_cannot_be_decrypted_keeps_its_key(
    engine: Engine, store: AnyStore, raw: Raw
) -> None:
    await put(engine, "damaged")
    await raw.execute("update secret set data = 'AAAA'")
    await put(engine, "sound")
    later = Engine(store, key_ring=KeyRing(NEW | OLD))
    assert await later.key_rotator.rotate_once() == 1
    assert await later.key_rotator.rotate_once() == 0
    assert sorted(await key_ids(raw)) == ["new", "old"]


async def test_flow_task_has_results_and_secrets_in_one_input(engine: Engine) -> None:
    await put(engine, "db")
    refers = {"n": {"$from": "one"}, "password": {"$secret": "db"}}
    await start(engine, "all", group("all", "one", "two"), task("one"), task("two", input=refers))
    # A result that looks like a reference is a result.
    await engine.complete((await claim_one(engine)).fence, {"$secret": "db"})
    assert (await claim_one(engine)).input == {"n": {"$secret": "db"}, "password": CANARY}
