"""Secrets of a task: encrypted with it, passed to its attempts, redacted in their reports."""

import asyncio
from typing import Any
from uuid import uuid4

import pytest
from tests.contract.conftest import (
    AnyStore,
    ManualClock,
    Raw,
    claim_all,
    claim_one,
    new,
    reclaimed,
    refusal,
    status,
)
from tests.secrets.conftest import NEW, OLD, dump, stored_bytes

from tenuto.encryption_keys import KeyRing
from tenuto.engine.agents.subtasks import Question
from tenuto.engine.engine import Engine
from tenuto.model.bounds import MAX_ERROR, MAX_SECRET
from tenuto.model.errors import Invalid
from tenuto.model.limits.concurrency import Concurrency
from tenuto.model.tasks.commands import Escalation, Failure
from tenuto.model.tasks.transcript import Line
from tenuto.settings import Settings
from tenuto.worker.attempt import AttemptRunner
from tenuto.worker.leases import HeldLeases
from tenuto.worker.runtime.function import FunctionRuntime
from tenuto.worker.runtime.protocol import AttemptFailed

CANARY = 'canary-7f3a/ü"9'
INPUT: dict[str, Any] = {"url": "https://example.test", "secrets": {"token": CANARY}}
STORED = {"url": "https://example.test", "secrets": {"token": "***"}}


async def nowhere(raw: Raw) -> bool:
    """True if the canary is not stored in any of its plain encodings."""
    spellings = [CANARY, CANARY.replace('"', '\\"'), "canary-7f3a"]
    result = await dump(raw)
    stored = stored_bytes(raw)
    return not any(spelling in result or spelling.encode() in stored for spelling in spellings)


async def put(engine: Engine, name: str, value: str) -> None:
    await engine.secrets.put(name, value)


async def test_only_the_attempt_gets_the_secrets_of_its_task(engine: Engine, raw: Raw) -> None:
    task = (await engine.submit(new(input=INPUT))).id
    assert (await engine.show(task)).input == STORED
    work = await claim_one(engine)
    assert (work.input, work.secrets) == (INPUT, (CANARY,))
    assert await nowhere(raw)
    assert await raw.fetch("select key_id from task_secret") == [("old",)]


async def test_input_without_secrets_is_stored_unchanged(engine: Engine, raw: Raw) -> None:
    inputs: list[Any] = [None, [1], {"a": "***"}, {"secrets": {}}, {"$secret": 1}, "$secret"]
    await engine.submit_many([new(input=item) for item in inputs])
    claimed = await claim_all(engine)
    assert [work.input for work in claimed] == inputs
    assert {work.secrets for work in claimed} == {()}
    assert await raw.count("task_secret") == 0


async def test_claim_gives_every_task_its_own_secrets(engine: Engine) -> None:
    inputs = [{"n": n, "secrets": {"a": f"value {n}"}} if n % 2 else {"n": n} for n in range(6)]
    await engine.submit_many([new(input=item) for item in inputs])
    claimed = await claim_all(engine)
    assert [work.input for work in claimed] == inputs
    assert [work.secrets for work in claimed][1::2] == [("value 1",), ("value 3",), ("value 5",)]


@pytest.mark.parametrize(
    "secrets",
    [
        None,
        [],
        "text",
        {"a": 1},
        {"a": None},
        {"a": {"b": "c"}},
        {"": "value"},
        {"a" * 101: "value"},
        {"a": ""},
        {"a": "***"},
        {"a": "x" * (MAX_SECRET + 1)},
        {"a": "ü" * (MAX_SECRET // 2 + 1)},
        {"a": "x\n" * 1001},
        {"a": "nul \x00"},
        {f"name {n}": "value" for n in range(101)},
    ],
    ids=lambda value: str(value)[:30],
)
async def test_invalid_secrets_are_refused(engine: Engine, raw: Raw, secrets: Any) -> None:
    with pytest.raises(Invalid) as caught:
        await engine.submit(new(input={"secrets": secrets}))
    assert caught.value.details["field"] in ("input.secrets", "input")
    assert await raw.count("task") == await raw.count("task_secret") == 0


async def test_secrets_without_an_encryption_key_are_refused(store: AnyStore, raw: Raw) -> None:
    engine = Engine(store)
    assert await refusal(engine.submit(new(input=INPUT))) == "secrets_unavailable"
    assert await refusal(put(engine, "a", "value")) == "secrets_unavailable"
    assert await refusal(engine.key_rotator.rotate_once()) == "secrets_unavailable"
    assert await raw.count("task") == 0


async def test_repeated_submit_with_secrets_is_recognised(
    engine: Engine, store: AnyStore, raw: Raw
) -> None:
    def asked(**changes: Any) -> Any:
        return new(input=INPUT | changes, idempotency_key="once")

    first = await engine.submit(asked())
    again = await engine.submit(asked())
    assert (again.id, again.created) == (first.id, False)
    other = engine.submit(asked(secrets={"token": "another"}))
    assert await refusal(other) == "idempotency_conflict"
    # Not even a guess at the value can be proven right by what is stored.
    prints = {row[0] for row in await raw.fetch("select fingerprint from task_body")}
    untrusted = Engine(store, key_ring=KeyRing(NEW))
    assert await refusal(untrusted.submit(asked())) == "idempotency_conflict"
    assert len(prints) == await raw.count("task_secret") == 1


async def test_repeated_submit_with_secrets_is_recognised_after_a_key_rotation(
    engine: Engine, store: AnyStore
) -> None:
    asked = new(id=uuid4(), input=INPUT)
    await engine.submit(asked)
    later = Engine(store, key_ring=KeyRing(NEW | OLD))
    assert not (await later.submit(asked)).created


async def test_idempotency_key_with_different_secrets_in_a_bulk_is_refused(engine: Engine) -> None:
    new_tasks = [
        new(input={"secrets": {"a": item}}, idempotency_key="k") for item in ("one1", "two2")
    ]
    assert await refusal(engine.submit_many(new_tasks)) == "idempotency_conflict"
    same = [new_tasks[0], new_tasks[0]]
    assert [submitted.created for submitted in await engine.submit_many(same)] == [True, False]


async def test_every_report_is_redacted(engine: Engine, raw: Raw) -> None:
    task = (await engine.submit(new(input=INPUT))).id
    fence = (await claim_one(engine)).fence
    await engine.progress(fence, 5, f"using {CANARY}")
    await engine.checkpoint(fence, {"token": CANARY, CANARY: 1, "at": 3})
    await engine.append(fence, [Line(0, "INFO", f"got {CANARY}!")])
    await engine.record_step(fence, "login", [CANARY])
    child = await engine.spawn(fence, "child", new(f"child of {CANARY}", prompt=CANARY))
    assert await refusal(engine.record_step(fence, CANARY, 1)) == "invalid_value"
    assert await refusal(engine.spawn(fence, f"<{CANARY}>", new())) == "invalid_value"
    await engine.complete(fence, {"echo": CANARY}, f"summary {CANARY}")
    view = await engine.show(task)
    assert (view.current_step, view.output, view.summary) == (
        "using ***",
        {"echo": "***"},
        "summary ***",
    )
    assert view.checkpoint == {"token": "***", "***": 1, "at": 3}
    assert await engine.steps(task) == {"login": (["***"], None), "child": (None, child)}
    assert (await engine.show(child)).prompt == "***"
    assert await nowhere(raw)


async def test_every_outcome_is_redacted(engine: Engine, raw: Raw, clock: ManualClock) -> None:
    failure = Failure(message=f"no {CANARY}", stack=f"line 1: {CANARY}")
    receipt = {"state": "killed", "how": CANARY}
    task = (await engine.submit(new(input=INPUT, max_attempts=9))).id

    async def attempt() -> Any:
        clock.advance(3600)
        await engine.maintenance.promote_once("test")
        return (await claim_one(engine)).fence

    await engine.fail(await attempt(), failure)
    await engine.not_started(await attempt(), failure)
    await engine.time_out(await attempt(), receipt)
    await engine.park(await attempt(), CANARY, resume_at=clock.now())
    fence = await attempt()
    await engine.pause(task)
    await engine.confirm_pause(fence, receipt)
    await engine.resume(task)
    fence = await reclaimed(engine, await attempt())
    await engine.confirm_gone(fence, receipt)
    await engine.cancel(task)
    await engine.confirm_cancel(fence, receipt)
    messages = [item.message for item in await engine.attempts(task)]
    assert messages[:2] == ["no ***", "no ***"]
    assert await nowhere(raw)


async def test_server_that_did_not_claim_redacts_reports(
    engine: Engine, store: AnyStore, raw: Raw
) -> None:
    await put(engine, "shared", "named-canary-7f3a")
    asked = new(input=INPUT | {"more": {"$secret": "shared"}})
    task = (await engine.submit(asked)).id
    work = await claim_one(engine)
    server = Engine(store, actor="server", key_ring=KeyRing(OLD))
    await server.append(work.fence, [Line(0, "INFO", f"{CANARY} and named-canary-7f3a")])
    await engine.secrets.delete("shared")
    fresh = Engine(store, actor="server", key_ring=KeyRing(OLD))
    await fresh.complete(work.fence, [CANARY])
    assert (await engine.show(task)).output == ["***"]
    assert [line.text for line in await engine.logs(task) if line.source == "transcript"] == [
        "*** and ***"
    ]
    assert await nowhere(raw)


async def test_server_with_the_wrong_keys_stores_no_report(
    engine: Engine, store: AnyStore, raw: Raw
) -> None:
    task = (await engine.submit(new(input=INPUT))).id
    work = await claim_one(engine)
    server = Engine(store, key_ring=KeyRing(NEW))
    assert await refusal(server.complete(work.fence, [CANARY])) == "secret_unreadable"
    assert await status(engine, task) == "RUNNING"
    assert await nowhere(raw)
    await engine.complete(work.fence)


async def test_server_redacts_the_secrets_of_the_current_attempt(
    engine: Engine, store: AnyStore, raw: Raw
) -> None:
    await put(engine, "token", "the first value")
    task = (await engine.submit(new(input={"$secret": "token"}))).id
    server = Engine(store, actor="server", key_ring=KeyRing(OLD))
    first = await claim_one(engine)
    await server.progress(first.fence, step="the first value")
    await put(engine, "token", "the second value")
    await engine.release(first.fence)
    second = await claim_one(engine)
    assert second.secrets == ("the second value",)
    await server.complete(second.fence, ["the second value"])
    assert (await engine.show(task)).output == ["***"]
    assert " value" not in await dump(raw)


async def test_every_attempt_gets_the_secrets(engine: Engine) -> None:
    await engine.submit(new(input=INPUT))
    fence = (await claim_one(engine)).fence
    await engine.release(fence)
    assert (await claim_one(engine)).input == INPUT


async def test_rerun_has_the_same_secrets(engine: Engine, raw: Raw) -> None:
    task = (await engine.submit(new(input=INPUT))).id
    await engine.complete((await claim_one(engine)).fence)
    again = (await engine.rerun(task)).id
    work = await claim_one(engine)
    assert (work.fence.task, work.input) == (again, INPUT)
    assert await nowhere(raw)


@pytest.mark.parametrize("keys", [None, NEW])
async def test_worker_without_the_key_releases_the_task(
    engine: Engine, store: AnyStore, clock: ManualClock, keys: dict[str, bytes] | None
) -> None:
    secret, plain = await engine.submit_many([new(input=INPUT), new(input={"a": "***"})])
    poor = Engine(store, key_ring=None if keys is None else KeyRing(keys))
    assert [work.fence.task for work in await claim_all(poor)] == [plain.id]
    view = await engine.show(secret.id)
    assert (view.status, view.last_outcome, view.tries) == ("RETRY_WAIT", "NOT_STARTED", 0)
    clock.advance(60)
    await engine.maintenance.promote_once("test")
    assert (await claim_one(engine)).input == INPUT


async def test_moved_or_altered_value_is_not_decrypted(engine: Engine, raw: Raw) -> None:
    one, other = await engine.submit_many(
        [new(input={"secrets": {"a": item}}) for item in ("value one", "value two")]
    )
    await raw.execute(
        f"update task_secret set data = (select data from task_secret where task = '{one.id}')"
    )
    claimed = await claim_all(engine)
    assert [work.input for work in claimed] == [{"secrets": {"a": "value one"}}]
    assert (await engine.show(other.id)).last_outcome == "NOT_STARTED"


async def test_secrets_are_deleted_with_the_payload(
    engine: Engine, raw: Raw, clock: ManualClock
) -> None:
    task = (await engine.submit(new(input=INPUT))).id
    await engine.complete((await claim_one(engine)).fence)
    await engine.archive(task)
    clock.advance(days=31)
    await engine.maintenance.prune_once()
    assert await raw.count("task_secret") == 0


async def test_subtask_has_its_own_secret(engine: Engine, raw: Raw) -> None:
    await engine.submit(new(input=INPUT))
    fence = (await claim_one(engine)).fence
    asked = new(input={"note": CANARY, "secrets": {"mine": CANARY}}, metadata={"k": CANARY})
    child = await engine.spawn(fence, "child", asked)
    assert await engine.spawn(fence, "child", asked) == child
    work = await claim_one(engine)
    assert work.input == {"note": "***", "secrets": {"mine": CANARY}}
    assert (work.metadata, work.secrets) == ({"k": "***"}, (CANARY,))
    assert await nowhere(raw)


async def test_spawn_request_is_redacted(engine: Engine, raw: Raw) -> None:
    await engine.submit(new(input=INPUT))
    fence = (await claim_one(engine)).fence
    help_ = Escalation(reason=f"no {CANARY}", prompt=f"ask for {CANARY}")
    await engine.spawn(fence, "child", new(tags=(CANARY, "a"), escalation=help_))
    failure = Failure(message="over", retryable=False)
    await engine.fail((await claim_one(engine)).fence, failure)
    [item] = await engine.inbox.list()
    assert (item.body["reason"], item.body["prompt"]) == ("no ***", "ask for ***")
    keyed = new(concurrency=Concurrency(CANARY))
    assert await refusal(engine.spawn(fence, "keyed", keyed)) == "invalid_value"
    assert await nowhere(raw)


async def test_escalation_is_redacted(engine: Engine, raw: Raw) -> None:
    await engine.submit(new(input=INPUT, max_attempts=1))
    fence = (await claim_one(engine)).fence
    reported = Escalation(reason=f"no {CANARY}", prompt=f"ask for {CANARY}")
    await engine.fail(fence, Failure(message=f"401 for {CANARY}", escalation=reported))
    [item] = await engine.inbox.list()
    assert (item.body["reason"], item.body["prompt"]) == ("no ***", "ask for ***")
    assert await nowhere(raw)


async def test_questions_and_waits_are_redacted(engine: Engine, raw: Raw) -> None:
    await engine.submit(new(input=INPUT))
    fence = (await claim_one(engine)).fence
    question = Question(
        kind="question", title=f"use {CANARY}?", body=[CANARY], timeout_s=60, default=CANARY
    )
    assert await refusal(engine.ask(fence, CANARY, question)) == "invalid_value"
    await engine.spawn(fence, "child", new("child", agent_type="nobody"))
    assert not (await engine.wait(fence, ["child"], 0, CANARY)).parked
    assert (await engine.ask(fence, "q", question)).parked
    [item] = await engine.inbox.list()
    assert (item.title, item.body) == ("use ***?", ["***"])
    assert await nowhere(raw)


async def test_too_long_error_is_not_cut_inside_a_secret(engine: Engine, raw: Raw) -> None:
    async def handler(_ctx: Any) -> None:
        raise AttemptFailed(Failure(message="x" * (MAX_ERROR - 12) + CANARY, stack=CANARY))

    task = (await engine.submit(new(input=INPUT, max_attempts=1))).id
    runtime = FunctionRuntime({None: handler})
    attempt = AttemptRunner(engine, await claim_one(engine), runtime, HeldLeases(), Settings())
    await attempt.start(asyncio.get_running_loop())
    assert (await engine.show(task)).last_error == "x" * (MAX_ERROR - 12) + "***"
    assert await nowhere(raw)
