"""Submit: one, many, repeated, refused; all or nothing, and never lost."""

import asyncio
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any
from uuid import UUID

import msgspec
import pytest
from tests.contract.conftest import (
    START,
    WORKER,
    Another,
    ManualClock,
    Raw,
    claim_all,
    new,
    profile,
    refusal,
    row_of,
)

from tenuto.engine.engine import Engine
from tenuto.engine.rows import Rows, merge_rows
from tenuto.engine.tasks.submit import Submitted
from tenuto.model.errors import Conflict, Invalid, Unavailable
from tenuto.model.tasks.fingerprint import fingerprints
from tenuto.model.tasks.retry import RetryPolicy
from tenuto.model.tasks.submission import NewTask
from tenuto.model.tasks.task import AGING_MS
from tenuto.store.protocol import Statement

PARENT = UUID("00000000-0000-7000-8000-0000000000aa")
GIVEN = UUID("00000000-0000-7000-8000-0000000000bb")
EVERYTHING: dict[str, Any] = {
    "title": "everything — ünïcode 🦆",
    "description": "d",
    "prompt": "p\nq\tr",
    "system_prompt": "s",
    "model": "m",
    "max_turns": 7,
    "conversation": "c",
    "task_type": "build",
    "agent_type": "coder",
    "command": ["echo", "", "a b"],
    "cwd": "/somewhere",
    "env": {"A": "1", "B": ""},
    "priority": 9,
    "tags": ["x", "y", "x"],
    "task_tags": ["t"],
    "capabilities": ["gpu"],
    "container": "box",
    "region": "eu",
    "estimate_minutes": 5,
    "max_attempts": 4,
    "retry": RetryPolicy(base_s=1.5, jitter=0.0),
    "timeout_s": 60,
    "queue_ttl_s": 3600,
    "lease_s": 30,
    "parent": PARENT,
    "input": {"deep": [{"n": None}, 1.25, "é", 2**64 - 1, True]},
    "metadata": {"k": ["v"]},
    "idempotency_key": "key",
    "trace_id": "trace",
    "source": "test",
}


async def everything(engine: Engine) -> Submitted:
    """A task that asks for everything, below another one."""
    await engine.submit(new("its parent", id=PARENT))
    await engine.cancel(PARENT)
    return await engine.submit(NewTask(**EVERYTHING))


async def test_submitted_task_is_pending_and_shown_whole(engine: Engine) -> None:
    submitted = await everything(engine)
    assert submitted.created
    view = await engine.show(submitted.id)
    shown = {name for name in EVERYTHING if hasattr(view, name)} - {"tags", "retry"}
    assert {name: getattr(view, name) for name in shown} == {n: EVERYTHING[n] for n in shown}
    assert len(shown) > 20
    assert view.tags == ["x", "y"]
    assert view.retry == msgspec.to_builtins(EVERYTHING["retry"])
    assert (view.status, view.version, view.attempt, view.tries) == ("PENDING", 1, 0, 0)
    assert (view.created_by, view.created_at, view.updated_at) == ("tester", START, START)
    assert [(line.event, line.actor) for line in await engine.events(submitted.id)] == [
        ("submitted", "tester")
    ]


async def test_claimed_task_has_the_submitted_fields(engine: Engine) -> None:
    await everything(engine)
    able = profile(
        agent_type="coder",
        accept_commands=True,
        task_tags=("t",),
        capabilities=("gpu",),
        containers=("box",),
        region="eu",
    )
    (work,) = await engine.claim(able, WORKER, 5)
    seen = (
        "title prompt system_prompt model task_type command cwd env input metadata parent".split()
    )
    seen += ["trace_id", "timeout_s", "max_attempts"]
    assert {name: getattr(work, name) for name in seen} == {n: EVERYTHING[n] for n in seen}


async def test_rank_is_age_less_an_hour_per_priority_step(
    engine: Engine, clock: ManualClock
) -> None:
    base = int(START.timestamp() * 1000)
    plain = await engine.submit(new(priority=3))
    later = await engine.submit(new(priority=3, run_at=START + timedelta(hours=2)))
    past = await engine.submit(new(priority=3, run_at=START - timedelta(hours=2)))
    assert (await row_of(engine, plain.id)).rank == base - 3 * AGING_MS
    assert (await row_of(engine, later.id)).rank == base + 2 * 3_600_000 - 3 * AGING_MS
    assert (await row_of(engine, past.id)).rank == base - 3 * AGING_MS
    assert (await engine.show(past.id)).status == "PENDING"
    assert (await engine.show(later.id)).status == "WAITING"


async def test_bulk_mixes_plain_and_full_tasks(engine: Engine) -> None:
    lines: list[dict[str, Any]] = [
        {"prompt": "do it", "metadata": {"a": 1}},
        {"description": "long", "timeout_s": 5},
        {"input": [1, 2], "priority": 9},
        {"tags": ["red"], "max_attempts": 7, "lease_s": 30},
    ]
    await engine.submit(new())  # the lanes are known: what follows is one batch
    created = await asyncio.gather(*(engine.submit(new(f"t{n}", **s)) for n, s in enumerate(lines)))
    for number, (task, fields) in enumerate(zip(created, lines, strict=True)):
        view = await engine.show(task.id)
        plain = new(f"t{number}", **fields)
        for name in ("title", "prompt", "metadata", "description", "timeout_s", "input"):
            assert getattr(view, name) == getattr(plain, name), name
        assert view.tags == list(plain.tags)
        assert (view.priority, view.max_attempts) == (plain.priority, plain.max_attempts)


def test_joined_row_sets_have_equal_widths() -> None:
    one: Rows = {"body": [(1, 2)], "hot": [(1,)], "tag": []}
    other: Rows = {"body": [(3, 4, 5)], "hot": [(3,)], "tag": [(3, "red")]}
    assert merge_rows([one, other]) == {
        "body": [(1, 2, None), (3, 4, 5)],
        "hot": [(1,), (3,)],
        "tag": [(3, "red")],
    }


async def test_empty_bulk_submits_nothing(engine: Engine, raw: Raw) -> None:
    assert await engine.submit_many([]) == []
    assert await raw.count("task") == 0


async def test_bulk_keeps_its_order(engine: Engine) -> None:
    submitted = await engine.submit_many([new(f"t{n}") for n in range(500)])
    assert len({item.id for item in submitted}) == 500
    assert [item.id for item in submitted] == sorted(item.id for item in submitted)
    page = await engine.list(limit=500)
    assert [task.title for task in page.tasks] == [f"t{n}" for n in reversed(range(500))]


async def test_large_bulk_is_written_whole(engine: Engine, raw: Raw) -> None:
    created = [new(f"t{n}", tags=[f"{n % 7}"], task_type=f"type-{n % 3}") for n in range(1100)]
    submitted = await engine.submit_many(created)
    assert [item.created for item in submitted] == [True] * 1100
    titles = dict(await raw.fetch("select task, title from task_body"))
    assert [titles[_stored(item.id, raw)] for item in submitted] == [item.title for item in created]
    assert await raw.count("task_label") == await raw.count("event") == 1100
    assert len(await engine.claim(profile(), WORKER, 100)) == 100


def _stored(task: UUID, raw: Raw) -> UUID | str:
    return task if raw.path is None else str(task)


@pytest.mark.parametrize("after", [False, True], ids=["before the commit", "after the commit"])
async def test_large_bulk_with_a_lost_response_is_stored_once(
    engine: Engine, raw: Raw, monkeypatch: pytest.MonkeyPatch, after: bool
) -> None:
    whole, lost = engine.core.store.stream, iter([True])

    async def stream(statements: AsyncIterator[Statement]) -> None:
        if after:
            await whole(statements)
        else:
            await anext(statements)
        assert next(lost)
        raise Unavailable("the connection was lost")

    monkeypatch.setattr(engine.core.store, "stream", stream)
    monkeypatch.setattr(engine.core.store, "mixes", False)
    submitted = await engine.submit_many([new(f"t{n}") for n in range(600)])
    assert len({item.id for item in submitted}) == await raw.count("task") == 600
    assert await raw.count("event") == 600


async def test_large_bulk_that_cannot_be_serialized_writes_nothing(
    engine: Engine, raw: Raw, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The database goes while the lanes of a later part are looked up."""
    whole, calls = engine.core.lanes.ensure, iter([True, False])

    async def ensure(expected: Any) -> Any:
        if next(calls):
            return await whole(expected)
        raise Unavailable("the database does not answer")

    await engine.submit(new())
    before = await raw.counts()
    monkeypatch.setattr(engine.core.lanes, "ensure", ensure)
    monkeypatch.setattr(engine.core.store, "mixes", False)
    with pytest.raises(Unavailable):
        await engine.submit_many([new(f"t{n}") for n in range(600)])
    assert await raw.counts() == before


@pytest.mark.parametrize("wrong", [{"priority": 11}, {"input": {"$from": "x"}}])
async def test_large_bulk_with_one_invalid_task_writes_nothing(
    engine: Engine, raw: Raw, wrong: dict[str, Any]
) -> None:
    await engine.submit(new())
    before = await raw.counts()
    with pytest.raises(Invalid):
        await engine.submit_many([*(new() for _ in range(700)), new(**wrong)])
    assert await raw.counts() == before


async def test_same_key_and_body_return_the_same_task(engine: Engine, raw: Raw) -> None:
    first = await engine.submit(new(idempotency_key="k", input={"a": 1, "b": 2}))
    again = await engine.submit(new(idempotency_key="k", input={"b": 2, "a": 1}))
    assert (again.id, again.created) == (first.id, False)
    assert (await raw.count("task"), await raw.count("event")) == (1, 1)


async def test_same_key_returns_the_task_after_it_finished(engine: Engine) -> None:
    first = await engine.submit(new(idempotency_key="k"))
    (work,) = await claim_all(engine)
    await engine.complete(work.fence, {"done": True})
    assert await engine.submit(new(idempotency_key="k")) == type(first)(first.id, created=False)
    assert (await engine.show(first.id)).status == "COMPLETED"


@pytest.mark.parametrize("other", [{"title": "other"}, {"priority": 6}, {"input": 1}])
async def test_same_key_with_another_body_is_a_conflict(
    engine: Engine, raw: Raw, other: dict[str, Any]
) -> None:
    first = await engine.submit(new(idempotency_key="k"))
    with pytest.raises(Conflict) as caught:
        await engine.submit(NewTask(**{"title": "a task", "idempotency_key": "k"} | other))
    assert caught.value.code == "idempotency_conflict"
    assert caught.value.details["task"] == str(first.id)
    assert await raw.count("task") == 1


async def test_conflict_in_a_bulk_writes_nothing(engine: Engine, raw: Raw) -> None:
    await engine.submit(new(idempotency_key="k"))
    before = await raw.counts()
    bulk = [new(f"t{n}", tags=["x"], task_tags=["y"], capabilities=["z"]) for n in range(20)]
    lane = await refusal(engine.submit_many([bulk[0], new(tags=["n"] * 51)]))
    assert lane == "too_large"
    bulk.insert(10, new("other body", idempotency_key="k"))
    assert await refusal(engine.submit_many(bulk)) == "idempotency_conflict"
    after = await raw.counts()
    assert after == before | {"lane": after["lane"]}


async def test_bulk_can_repeat_stored_tasks(engine: Engine) -> None:
    first = await engine.submit(new("one", idempotency_key="one"))
    both = await engine.submit_many(
        [new("one", idempotency_key="one"), new("two", idempotency_key="two"), new("three")]
    )
    assert [item.created for item in both] == [False, True, True]
    assert both[0].id == first.id


async def test_explicit_default_is_the_same_body(engine: Engine, raw: Raw) -> None:
    output = b'{"title": "a task", "task_type": "default", "idempotency_key": "k"}'
    first = await engine.submit(msgspec.json.decode(output, type=NewTask))
    again = await engine.submit(new(idempotency_key="k"))
    assert (again.id, again.created) == (first.id, False)
    assert await raw.count("lane") == 1


async def test_key_twice_in_a_bulk_creates_one_task(engine: Engine, raw: Raw) -> None:
    both = await engine.submit_many([new(idempotency_key="k"), new(idempotency_key="k")])
    assert [item.created for item in both] == [True, False]
    assert both[0].id == both[1].id
    bodies = [new("one", idempotency_key="q"), new("two", idempotency_key="q")]
    assert await refusal(engine.submit_many(bodies)) == "idempotency_conflict"
    assert await raw.count("task") == 1


async def test_id_chosen_by_the_caller_is_kept_and_repeatable(engine: Engine, raw: Raw) -> None:
    first = await engine.submit(new(id=GIVEN))
    assert (first.id, first.created) == (GIVEN, True)
    again = await engine.submit(new(id=GIVEN))
    assert (again.id, again.created) == (GIVEN, False)
    assert await refusal(engine.submit(new("other", id=GIVEN))) == "idempotency_conflict"
    assert await raw.count("task") == 1


async def test_id_twice_in_a_bulk_creates_one_task(engine: Engine, raw: Raw) -> None:
    both = await engine.submit_many([new(id=GIVEN), new(id=GIVEN)])
    assert [(item.id, item.created) for item in both] == [(GIVEN, True), (GIVEN, False)]
    assert await raw.count("task") == 1


async def test_id_with_two_bodies_in_a_bulk_is_a_conflict(engine: Engine, raw: Raw) -> None:
    bodies = [new("one", id=GIVEN), new("two", id=GIVEN)]
    assert await refusal(engine.submit_many(bodies)) == "idempotency_conflict"
    assert await raw.count("task") == 0


async def test_id_of_one_task_with_the_key_of_another_is_a_conflict(
    engine: Engine, raw: Raw
) -> None:
    bodies = [new(idempotency_key="k"), new(id=GIVEN), new(id=GIVEN, idempotency_key="k")]
    assert await refusal(engine.submit_many(bodies)) == "idempotency_conflict"
    assert await raw.count("task") == 0


async def test_id_of_another_workspace_is_refused(engine: Engine, raw: Raw) -> None:
    elsewhere = Engine(engine.store, workspace=await raw.workspace(9))
    await elsewhere.submit(new(id=GIVEN))
    assert await refusal(engine.submit(new(id=GIVEN))) == "idempotency_conflict"
    assert await raw.count("task") == 1


async def test_idempotency_key_belongs_to_its_workspace(engine: Engine, raw: Raw) -> None:
    elsewhere = Engine(engine.store, workspace=await raw.workspace(9))
    first = await elsewhere.submit(new("one", idempotency_key="k"))
    second = await engine.submit(new("two", idempotency_key="k"))
    assert first.id != second.id
    assert await refusal(engine.show(first.id)) == "not_found"


async def test_same_key_from_many_engines_at_once_creates_one_task(
    engine: Engine, another: Another
) -> None:
    async with another() as second, another() as third:
        engines = [engine, second, third] * 8
        answers = await asyncio.gather(*(e.submit(new(idempotency_key="k")) for e in engines))
    assert len({answer.id for answer in answers}) == 1
    assert [answer.created for answer in answers].count(True) == 1


async def test_different_bodies_under_one_key_at_once_create_one_task(
    engine: Engine, another: Another
) -> None:
    async with another() as second:
        calls = [
            item.submit(new(f"body {n}", idempotency_key="k"))
            for n in range(8)
            for item in (engine, second)
        ]
        answers = await asyncio.gather(*calls, return_exceptions=True)
    refused = [answer for answer in answers if isinstance(answer, Conflict)]
    accepted = [answer for answer in answers if not isinstance(answer, BaseException)]
    assert len(refused) == 14
    assert {item.code for item in refused} == {"idempotency_conflict"}
    assert sorted(item.created for item in accepted) == [False, True]


async def test_bulk_over_the_limit_is_refused(engine: Engine, raw: Raw) -> None:
    before = await raw.counts()
    assert await refusal(engine.submit_many([new()] * 10_001)) == "bulk_too_large"
    assert await raw.counts() == before


async def test_invalid_task_in_a_bulk_refuses_the_bulk(engine: Engine, raw: Raw) -> None:
    before = await raw.counts()
    with pytest.raises(Invalid, match="priority"):
        await engine.submit_many([new(), new(priority=11), new()])
    assert await raw.counts() == before


async def test_lanes_of_a_workspace_are_limited(
    engine: Engine, raw: Raw, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tenuto.engine.agents.lanes.MAX_LANES", 3)
    for kind in ("a", "b", "c"):
        await engine.submit(new(task_type=kind))
    assert await refusal(engine.submit(new(task_type="d"))) == "too_many_lanes"
    await engine.submit(new(task_type="a"))
    assert (await raw.count("task"), await raw.count("lane")) == (4, 3)


async def test_lanes_of_one_bulk_are_limited(
    engine: Engine, raw: Raw, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tenuto.engine.agents.lanes.MAX_LANES", 3)
    bulk = [new(task_type=f"type{n}") for n in range(5)]
    assert await refusal(engine.submit_many(bulk)) == "too_many_lanes"
    assert await raw.count("task") == 0
    assert await raw.count("lane") <= 3


async def test_large_bulk_keeps_shared_and_separate_fields(engine: Engine, raw: Raw) -> None:
    fields: tuple[tuple[str, Any, Any], ...] = (
        ("prompt", "p", None),
        ("priority", 3, 9),
        ("max_attempts", 2, 5),
        ("source", None, "s"),
        ("input", 1, None),
        ("timeout_s", 60, None),
    )
    for shared in range(2 ** len(fields)):
        sent = []
        for index in range(70):
            values = {
                name: one if shared >> position & 1 or index % 2 else other
                for position, (name, one, other) in enumerate(fields)
            }
            sent.append(new(title=f"{shared}.{index}", **values))
        await engine.submit_many(sent)
        stored = await raw.fetch(
            "select title, prompt, source, input, priority, max_attempts, timeout_s"
            f" from task_body join task on id = task where title like '{shared}.%' order by id"
        )
        assert stored == [
            (
                item.title,
                item.prompt,
                item.source,
                None if item.input is None else str(item.input),
                item.priority,
                item.max_attempts,
                item.timeout_s,
            )
            for item in sent
        ]


@pytest.mark.parametrize(
    ("values", "code"),
    [
        ({"$from": "b"}, "reference_invalid"),
        ({"p": {"$secret": "nobody-knows"}}, "secret_unknown"),
        ({"n": float("nan")}, "invalid_json"),
        ({"secrets": {"key": 1}}, "invalid_value"),
    ],
)
async def test_task_of_a_cached_lane_is_refused_like_the_first(
    engine: Engine, values: Any, code: str
) -> None:
    assert await refusal(engine.submit(new(input=values))) == code
    await engine.submit(new())
    assert await refusal(engine.submit(new(input=values))) == code
    counts = await engine.query.counts(engine.workspace)
    assert (counts["PENDING"], sum(counts.values())) == (1, 1)


async def test_task_of_a_cached_lane_is_stored_like_the_first(engine: Engine) -> None:
    expected = new(prompt="p", input={"a": [1]}, metadata={"m": 1}, priority=7, max_attempts=2)
    first, again = [(await engine.submit(expected)).id for _ in range(2)]
    one, two = [await row_of(engine, item) for item in (first, again)]
    assert msgspec.structs.replace(two, id=first) == one
    seen, last = [await engine.show(item) for item in (first, again)]
    assert msgspec.structs.replace(last, id=first) == seen


@pytest.mark.parametrize("existing", [{"id": GIVEN}, {"idempotency_key": "known"}])
async def test_repeated_submit_writes_no_body_again(
    engine: Engine, raw: Raw, existing: dict[str, Any]
) -> None:
    awaited = await engine.submit(new("awaited"))
    first = new("first", tags=["a"], depends_on=[str(awaited.id)], **existing)
    submitted = await engine.submit(first)
    again, fresh = await engine.submit_many([first, new("new", idempotency_key="new")])
    assert (again.id, again.created, fresh.created) == (submitted.id, False, True)
    assert await raw.fetch("select count(*) from task_label") == [(1,)]
    assert await raw.fetch("select count(*) from task_dependency") == [(1,)]


async def test_concurrent_large_submits_with_separate_lanes_are_stored(
    engine: Engine, raw: Raw
) -> None:
    large = [[new(task_type=f"type {i}")] * 400 for i in range(engine.store.writers)]
    created = await asyncio.gather(*map(engine.submit_many, large))
    assert sum(map(len, created)) == await raw.count("task")


async def test_task_submitted_by_the_previous_version_is_recognised(
    engine: Engine, raw: Raw
) -> None:
    """The previous fingerprint covered all fields, with their defaults."""
    first = await engine.submit(new(idempotency_key="k"))
    _, before = fingerprints(new(idempotency_key="k"))
    await raw.execute(f"update task_body set fingerprint = '{before}'")
    assert (await engine.submit(new(idempotency_key="k"))).id == first.id
    bulk = [new(idempotency_key="k"), new("another", idempotency_key="l")]
    submitted = await engine.submit_many(bulk)
    assert submitted[0] == Submitted(first.id, created=False)
    assert submitted[1].created
    with pytest.raises(Conflict):
        await engine.submit(new("other", idempotency_key="k"))
