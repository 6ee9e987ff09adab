"""Completions written by one statement with all follow-ups, compared with a cascade."""

import asyncio
from collections.abc import Callable
from typing import Any
from uuid import UUID

import asyncpg
import pytest
from tests.contract.conftest import Another, Raw, claim_one, failure, new, refusal, status
from tests.contract.flows.helpers import flow_status, group, plan, start, statuses, task, worked
from tests.waiting import eventually

from tenuto.engine.engine import Engine
from tenuto.engine.tasks.finish import AttemptFinisher
from tenuto.model.agents.matching import AgentProfile
from tenuto.model.flows.plan import Plan
from tenuto.model.limits.budgets import Usage
from tenuto.store.protocol import Script


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    """The statements of links that were tried, and whether each wrote something."""
    seen: list[tuple[str, bool]] = []
    whole = AttemptFinisher._chained_script

    def noted(self: AttemptFinisher, result: Any, link: Any) -> Script[Any]:
        answer = yield from whole(self, result, link)
        seen.append((link.query, answer is not None))
        return answer

    monkeypatch.setattr(AttemptFinisher, "_chained_script", noted)
    return seen


async def row(engine: Engine, n: int = 3, **fields: Any) -> list[UUID]:
    """Tasks of which each waits for the one before."""
    new_tasks = [
        new(key=f"t{i}", depends_on=[f"t{i - 1}"] if i else [], **fields) for i in range(n)
    ]
    return [submitted.id for submitted in await engine.submit_many(new_tasks)]


def sequence(n: int = 3, **fields: Any) -> Plan:
    keys = [f"t{i}" for i in range(n)]
    around = group("all", *keys, order="sequential", **fields)
    return plan("all", around, *(task(key) for key in keys))


def named(n: int = 3) -> Plan:
    nexts = [f"t{i + 1}" for i in range(n - 1)]
    return plan("t0", *(task(f"t{i}", next=key) for i, key in enumerate(nexts)), task(f"t{n - 1}"))


TABLES = {
    "task": "id, status, hold, unmet, watched, version, attempt, tries, awaited, last_outcome,"
    " lease_until, finished_at, updated_at, lane, rank",
    "task_body": "task, key, kind, flow, activation, group_id, slot, follows, next, title",
    "task_output": "task, output, summary",
    "attempt": "task, attempt, outcome, started_at, ended_at",
    "event": "task, seq, kind, level, previous, new, attempt, agent, actor, at",
    "task_dependency": "task, needs, met, failed",
    "task_group": "id, key, status, open, succeeded, failed, turn, follows, version, updated_at",
    "flow": "id, key, status, open, failed, version, updated_at",
}


async def rows_of(raw: Raw) -> dict[str, list[str]]:
    """Every row that an end may touch, with ids by the order in which they were made."""
    result: dict[str, list[str]] = {}
    names: dict[str, str] = {}
    for (key,) in await raw.fetch("select task from task_body order by flow, group_id, key"):
        names[str(key)] = f"task-{len(names)}"
    for table, columns in TABLES.items():
        text = [str(row) for row in await raw.fetch(f"select {columns} from {table}")]
        for created in ("task_group", "flow"):
            for (key,) in await raw.fetch(f"select id from {created} order by id"):
                names.setdefault(str(key), f"{created}-{len(names)}")
        for key, name in names.items():
            text = [item.replace(key, name) for item in text]
        result[table] = sorted(text)
    return result


SHAPES: dict[str, Callable[[Engine], Any]] = {
    "complete_and_unblock": row,
    "complete_and_pass_turn": lambda engine: engine.flows.start_plan(sequence()),
    "complete_and_activate": lambda engine: engine.flows.start_plan(named()),
}


@pytest.mark.parametrize("query", SHAPES)
async def test_chained_completion_writes_what_a_cascade_writes(
    engine: Engine,
    agent: AgentProfile,
    raw: Raw,
    tried: list[tuple[str, bool]],
    monkeypatch: pytest.MonkeyPatch,
    query: str,
) -> None:
    matches = []
    for linked in (True, False):
        if not linked:
            monkeypatch.setattr(
                AttemptFinisher, "_chained_script_factory", lambda _self, _result: None
            )
        await SHAPES[query](engine)
        await worked(engine, agent, maximum=2)
        matches.append(await rows_of(raw))
        await worked(engine, agent)
        for table in (*TABLES, "agent_health", "cursor"):
            await raw.execute(f"delete from {table}")
    assert tried[:2] == [(query, True)] * 2
    assert matches[0] == matches[1]


@pytest.mark.parametrize("query", SHAPES)
async def test_chain_runs_to_its_last_task(
    engine: Engine, agent: AgentProfile, raw: Raw, tried: list[tuple[str, bool]], query: str
) -> None:
    await SHAPES[query](engine)
    assert await worked(engine, agent) == ["t0", "t1", "t2"]
    assert tried[:2] == [(query, True)] * 2
    assert await raw.value("select count(*) from task where status <> 'COMPLETED'") == 0
    assert await raw.value("select count(*) from flow where status <> 'COMPLETED'") == 0


async def _paused_waiter(engine: Engine) -> None:
    ids = await row(engine)
    await engine.pause(ids[1])


async def _nine_waiters(engine: Engine) -> None:
    waiting = [new(key=f"w{i}", depends_on=["t0"]) for i in range(9)]
    await engine.submit_many([new(key="t0"), *waiting])


async def _next_is_a_group(engine: Engine) -> None:
    await start(engine, "t0", task("t0", next="g"), group("g", "a"), task("a"))


async def _came_before(engine: Engine) -> None:
    """Two tasks name the same one after them."""
    both = group("all", "t0", "t1", order="parallel")
    await start(engine, "all", both, task("t0", next="t2"), task("t1", next="t2"), task("t2"))


async def _last_of_a_sequence(engine: Engine) -> None:
    await engine.flows.start_plan(sequence(1))


async def _awaited_in_a_sequence(engine: Engine) -> None:
    children = [task("t0"), task("t1"), task("t2", depends_on=["t0"])]
    await start(engine, "all", group("all", "t0", "t1", "t2", order="sequential"), *children)


@pytest.mark.parametrize(
    "shape",
    [
        _paused_waiter,
        _nine_waiters,
        _next_is_a_group,
        _came_before,
        _last_of_a_sequence,
        _awaited_in_a_sequence,
    ],
)
async def test_completion_of_a_special_task_uses_a_cascade(
    engine: Engine, agent: AgentProfile, tried: list[tuple[str, bool]], shape: Any
) -> None:
    await shape(engine)
    await worked(engine, agent, maximum=1)
    assert not any(wrote for _, wrote in tried)
    await worked(engine, agent)


async def test_chain_of_a_flow_paused_meanwhile_continues_after_resume(
    engine: Engine, agent: AgentProfile, tried: list[tuple[str, bool]]
) -> None:
    flow = await engine.flows.start_plan(named())
    work = await claim_one(engine)
    await engine.flows.pause(flow)
    with pytest.raises(Exception, match="pause"):
        await engine.complete(work.fence, None)
    assert tried == [("complete_and_activate", False)]
    await engine.confirm_pause(work.fence, {"state": "killed"})
    await engine.flows.resume(flow)
    assert await worked(engine, agent) == ["t0", "t1", "t2"]
    assert await flow_status(engine, flow) == "COMPLETED"


async def test_second_activation_of_a_key_uses_a_cascade(
    engine: Engine, agent: AgentProfile, tried: list[tuple[str, bool]]
) -> None:
    both = group("all", "a", "b", order="parallel")
    specs = [task("a", next="same"), task("b", next="same"), task("same", next="last")]
    flow = await start(engine, "all", both, *specs, task("last"))
    await worked(engine, agent)
    assert await statuses(engine, flow) == {
        "all": ["COMPLETED"],
        "a": ["COMPLETED"],
        "b": ["COMPLETED"],
        "same": ["COMPLETED"] * 2,
        "last": ["COMPLETED"] * 2,
    }
    assert tried == []  # in a group, what takes a place is counted with it


async def test_chained_completion_of_an_older_attempt_writes_nothing(
    engine: Engine, agent: AgentProfile, tried: list[tuple[str, bool]]
) -> None:
    ids = await row(engine)
    work = await claim_one(engine)
    attempt = engine.core.known_attempts.find(work.fence)
    assert attempt is not None
    await engine.fail(work.fence, failure())
    # As in a process that claimed the task, while another one ended the attempt.
    engine.core.known_attempts.add(work.fence.task, attempt)
    at = await engine.show(ids[0])
    assert await refusal(engine.complete(work.fence, {"late": True})) == "lease_lost"
    assert await engine.show(ids[0]) == at
    assert await status(engine, ids[1]) == "WAITING"
    assert [wrote for _, wrote in tried] == [False]


async def test_completion_with_usage_uses_a_cascade(
    engine: Engine, tried: list[tuple[str, bool]]
) -> None:
    ids = await row(engine)
    work = await claim_one(engine)
    await engine.complete(work.fence, None, usage=Usage(input_tokens=5, output_tokens=7))
    assert tried == []
    assert await status(engine, ids[1]) == "PENDING"


async def test_completion_by_an_engine_that_did_not_claim_uses_a_cascade(
    engine: Engine, another: Another, tried: list[tuple[str, bool]]
) -> None:
    ids = await row(engine)
    work = await claim_one(engine)
    async with another() as other:
        await other.complete(work.fence, None)
    assert tried == []
    assert await status(engine, ids[1]) == "PENDING"


async def test_dependent_added_during_a_chained_completion_is_released(
    engine: Engine, another: Another, agent: AgentProfile
) -> None:
    """A task that is being finished gets one more who waits for it: he is never forgotten."""
    async with another() as other:
        for number in range(60):
            ids = await row(engine, 2)
            work = await claim_one(engine)
            late = new(f"late {number}", depends_on=[str(work.fence.task)])
            _, created = await asyncio.gather(
                engine.complete(work.fence, None), other.submit_many([late])
            )
            assert await status(engine, ids[1]) == "PENDING"
            assert await status(engine, created[0].id) == "PENDING"
            await worked(engine, agent)


async def test_dependent_added_during_a_childs_completion_is_released(
    engine: Engine, another: Another, agent: AgentProfile
) -> None:
    async with another() as other:
        for number in range(40):
            await engine.flows.start_plan(sequence(2))
            work = await claim_one(engine)
            late = new(f"late {number}", depends_on=[str(work.fence.task)])
            _, created = await asyncio.gather(
                engine.complete(work.fence, None), other.submit_many([late])
            )
            assert await status(engine, created[0].id) == "PENDING"
            assert len(await worked(engine, agent)) == 2


async def test_child_retried_during_a_chained_completion_keeps_its_turn(
    engine: Engine, another: Another, agent: AgentProfile, raw: Raw
) -> None:
    """The next child is cancelled and tried again while the one before it ends."""
    async with another() as other:
        for _ in range(25):
            flow = await engine.flows.start_plan(sequence(3, join="all_done"))
            work = await claim_one(engine)
            rows = await raw.fetch(f"select task from task_body where flow = '{flow}' and slot = 1")
            second = UUID(str(rows[0][0]))
            await engine.cancel(second)
            await asyncio.gather(engine.complete(work.fence, None), other.retry(second))
            assert sorted(await worked(engine, agent)) == ["t1", "t2"]
            assert await flow_status(engine, flow) == "COMPLETED"


async def test_concurrent_first_activations_of_a_key_are_numbered(
    postgres_url: str,
    postgres_engine: Engine,
    agent: AgentProfile,
    tried: list[tuple[str, bool]],
) -> None:
    engine = postgres_engine
    flow = await engine.flows.start_plan(named(2))
    work = await claim_one(engine)
    rival = await asyncpg.connect(postgres_url)
    try:
        await rival.execute("begin")
        await rival.execute(
            "insert into task_body (task, workspace, title, task_type, key, flow, activation)"
            f" values (gen_random_uuid(), '{engine.workspace}', 't1', 'x', 't1', '{flow}', 1)"
        )
        ending = asyncio.create_task(engine.complete(work.fence, None))
        blocked = "select count(*) from pg_locks where not granted"
        await eventually(lambda: rival.fetchval(blocked))
        await rival.execute("commit")
        await ending
    finally:
        await rival.close()
    assert tried == []
    assert await worked(engine, agent) == ["t1"]
    rows = await Raw(postgres_url).fetch(
        f"select activation from task_body where flow = '{flow}' and key = 't1' order by 1"
    )
    assert rows == [(1,), (2,)]


async def test_turn_follows_the_current_state_of_the_group(
    postgres_url: str, postgres_engine: Engine, agent: AgentProfile, tried: list[tuple[str, bool]]
) -> None:
    """A child is tried again after the end of the one before it has looked and before it writes."""
    engine, raw = postgres_engine, Raw(postgres_url)
    flow = await engine.flows.start_plan(sequence(3))
    work = await claim_one(engine)
    rows = await raw.fetch(f"select task from task_body where flow = '{flow}' and slot = 1")
    first = await engine.submit(new("first"))
    between = new(
        depends_on=[str(first.id)], on_dependency_failure="skip", blocks=[str(rows[0][0])]
    )
    await engine.submit(between)
    await engine.fail((await claim_one(engine)).fence, failure("syntax"))
    assert await status(engine, rows[0][0]) == "SKIPPED"
    holder = await asyncpg.connect(postgres_url)
    try:
        await holder.execute("begin")
        await holder.execute(f"select 1 from task_group where flow = '{flow}' for update")
        blocked = "select count(*) >= {} from pg_locks where not granted"
        retrying = asyncio.create_task(engine.retry(first.id, cascade=True))
        await eventually(lambda: holder.fetchval(blocked.format(1)))
        ending = asyncio.create_task(engine.complete(work.fence, None))
        await eventually(lambda: holder.fetchval(blocked.format(2)))
        await holder.execute("rollback")
        await asyncio.gather(retrying, ending)
    finally:
        await holder.close()
    assert tried == [("complete_and_pass_turn", False)]
    assert await worked(engine, agent) == ["first", "a task", "t1", "t2"]
    assert await flow_status(engine, flow) == "COMPLETED"
