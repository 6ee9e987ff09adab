"""Claim: the best tasks by rank, at most n, each once, within capacity, under a lease."""

import asyncio
from collections import Counter
from datetime import timedelta
from itertools import count
from typing import Any
from uuid import UUID

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.contract.conftest import (
    AGENT,
    LEASE_S,
    START,
    WORKER,
    Another,
    AnyStore,
    ManualClock,
    Raw,
    assigned,
    claim_all,
    claim_one,
    in_status,
    new,
    profile,
    refusal,
    row_of,
    running,
)

from tenuto.engine.engine import Engine
from tenuto.engine.tasks.claim import ClaimedTask
from tenuto.model.errors import Unavailable
from tenuto.model.tasks.task import Status, rank
from tenuto.store.protocol import Script, Statement

PROPERTY = settings(
    deadline=None,
    max_examples=25,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
WORKSPACES = count(1000)


def ids(claimed: list[ClaimedTask]) -> list[UUID]:
    return [work.fence.task for work in claimed]


async def test_claim_makes_the_task_running_under_a_lease(
    engine: Engine, clock: ManualClock
) -> None:
    submitted = await engine.submit(new(timeout_s=60))
    clock.advance(5)
    (work,) = await engine.claim(profile(), WORKER, 3, 40)
    assert (work.fence.task, work.fence.attempt, work.tries) == (submitted.id, 1, 1)
    assert work.lease_until == clock.now() + timedelta(seconds=40)
    view = await engine.show(submitted.id)
    assert (view.status, view.agent, view.worker) == ("RUNNING", AGENT, WORKER)
    assert (view.attempt, view.tries, view.version) == (1, 1, 2)
    assert view.started_at == clock.now()
    event = (await engine.events(submitted.id))[-1]
    assert (event.event, event.previous_status, event.new_status) == (
        "claimed",
        "PENDING",
        "RUNNING",
    )
    assert event.actor == WORKER


async def test_lease_is_the_longer_of_task_and_claim(engine: Engine) -> None:
    await engine.submit_many([new("long", lease_s=100), new("short", lease_s=5)])
    claimed = {work.title: work for work in await engine.claim(profile(), WORKER, 2, 30)}
    assert claimed["long"].lease_until == START + timedelta(seconds=100)
    assert claimed["short"].lease_until == START + timedelta(seconds=30)


async def test_lease_token_is_stored_only_as_a_hash(engine: Engine, raw: Raw) -> None:
    fence = await running(engine)
    assert await raw.value("select lease_token from task") != fence.token


@pytest.mark.parametrize("n", [0, -1])
async def test_claim_of_zero_tasks_claims_none(engine: Engine, n: int) -> None:
    await engine.submit(new())
    assert await engine.claim(profile(), WORKER, n) == []


async def test_claim_from_an_empty_queue_returns_nothing(engine: Engine) -> None:
    assert await claim_all(engine) == []
    await running(engine)
    assert await claim_all(engine) == []


Queue = list[tuple[int, int, int]]
"""Lane, priority and seconds after the task before it."""
QUEUES = st.lists(
    st.tuples(st.integers(0, 4), st.integers(1, 10), st.sampled_from([0, 0, 1, 3599, 3600, 7200])),
    min_size=1,
    max_size=40,
)


async def queued(engine: Engine, clock: ManualClock, queue: Queue) -> list[tuple[int, UUID, int]]:
    """Submit the queue; answers (rank, id, lane) of its tasks, best first, by brute force."""
    matches = []
    for lane, priority, gap in queue:
        clock.advance(gap)
        task = new(task_type=f"lane{lane}", priority=priority)
        matches.append((rank(priority, clock.now()), (await engine.submit(task)).id, lane))
    return sorted(matches)


@PROPERTY
@given(queue=QUEUES, limits=st.lists(st.integers(1, 9), min_size=1, max_size=6))
async def test_claim_takes_the_best_tasks_by_rank(
    store: AnyStore, raw: Raw, clock: ManualClock, queue: Queue, limits: list[int]
) -> None:
    engine = Engine(store, workspace=await raw.workspace(next(WORKSPACES)))
    model = [task for _, task, _ in await queued(engine, clock, queue)]
    for limit in limits:
        claimed = await engine.claim(profile(workspace=engine.workspace), WORKER, limit)
        assert sorted(ids(claimed)) == sorted(model[:limit])
        model = model[limit:]


@PROPERTY
@given(queue=QUEUES, matching=st.sets(st.integers(0, 4), min_size=1), limit=st.integers(1, 12))
async def test_claim_takes_the_best_tasks_of_all_matching_lanes(
    store: AnyStore, raw: Raw, clock: ManualClock, queue: Queue, matching: set[int], limit: int
) -> None:
    engine = Engine(store, workspace=await raw.workspace(next(WORKSPACES)))
    model = [t for _, t, lane in await queued(engine, clock, queue) if lane in matching]
    types = tuple(f"lane{lane}" for lane in matching)
    agent = profile(workspace=engine.workspace, task_types=types)
    assert sorted(ids(await engine.claim(agent, WORKER, limit))) == sorted(model[:limit])


@pytest.mark.parametrize("lanes", [1, 3])
async def test_claimed_tasks_are_returned_in_order_of_rank(
    engine: Engine, clock: ManualClock, lanes: int
) -> None:
    queue = [(n % lanes, (n * 7) % 10 + 1, 13) for n in range(30)]
    model = [task for _, task, _ in await queued(engine, clock, queue)]
    assert ids(await claim_all(engine, 12)) == model[:12]
    assert ids(await claim_all(engine, 100)) == model[12:]


async def test_retried_task_keeps_its_rank(engine: Engine, clock: ManualClock) -> None:
    fence = await running(engine)
    clock.advance(LEASE_S + 1)
    await engine.submit_many([new(), new()])
    await engine.maintenance.expire_once("reaper")
    await engine.maintenance.promote_once("promoter")
    assert (await claim_one(engine)).fence.task == fence.task


async def test_age_outranks_priority_in_time(engine: Engine, clock: ManualClock) -> None:
    old = await engine.submit(new(priority=1))
    clock.advance(hours=9, seconds=1)
    urgent = await engine.submit(new(priority=10))
    assert ids(await claim_all(engine)) == [old.id, urgent.id]


async def test_claim_takes_pending_tasks_only(engine: Engine) -> None:
    others = [s for s in Status if s is not Status.PENDING]
    fences = [await in_status(engine, s) for s in others]
    before = [await row_of(engine, fence.task) for fence in fences]
    assert await claim_all(engine) == []
    assert [await row_of(engine, fence.task) for fence in fences] == before
    free = await in_status(engine, Status.PENDING)
    (work,) = await claim_all(engine)
    assert (work.fence.task, work.fence.attempt, work.tries) == (free.task, 2, 1)


async def drain(engine: Engine, agent: Any, n: int, taken: list[UUID]) -> None:
    while claimed := await engine.claim(agent, WORKER, n):
        assert len(claimed) <= n
        taken += ids(claimed)


@pytest.mark.parametrize("lanes", [1, 4])
async def test_eight_concurrent_claimers_never_claim_a_task_twice(
    engine: Engine, another: Another, lanes: int
) -> None:
    submitted = await engine.submit_many([new(task_type=f"t{n % lanes}") for n in range(200)])
    taken: list[UUID] = []
    agents = [profile(id=UUID(int=n), name=f"a{n}") for n in range(1, 9)]
    async with another() as second, another() as third, another() as fourth:
        engines = [engine, second, third, fourth] * 2
        pairs = zip(engines, agents, strict=True)
        await asyncio.gather(*(drain(caller, agent, 3, taken) for caller, agent in pairs))
        await drain(engine, profile(), 50, taken)
    assert max(Counter(taken).values()) == 1
    assert set(taken) == {item.id for item in submitted}


async def test_agent_in_many_processes_claims_no_task_twice(
    engine: Engine, another: Another
) -> None:
    await engine.submit_many([new() for _ in range(60)])
    taken: list[UUID] = []
    async with another() as second:
        calls = [drain(item, profile(), 2, taken) for item in (engine, second) * 4]
        await asyncio.gather(*calls)
    assert sorted(Counter(taken).values()) == [1] * 60


async def test_agent_capacity_holds_under_concurrent_claims(
    engine: Engine, another: Another, raw: Raw
) -> None:
    await engine.submit_many([new(task_type=f"t{n % 2}") for n in range(40)])
    agent = await engine.register_agent(profile(max_concurrent=5))
    running_now = f"select count(*) from task where agent = '{agent.id}' and status = 'RUNNING'"
    async with another() as second, another() as third:
        for _ in range(4):
            calls = [e.claim(agent, WORKER, 2) for e in (engine, second, third) * 3]
            claimed = [work for result in await asyncio.gather(*calls) for work in result]
            assert len(claimed) == await raw.value(running_now) == 5
            await asyncio.gather(*(engine.complete(work.fence) for work in claimed))


async def test_claim_uses_the_registered_capacity(engine: Engine) -> None:
    await engine.submit_many([new() for _ in range(9)])
    agent = await engine.register_agent(profile(max_concurrent=2))
    assert len(await engine.claim(profile(max_concurrent=9), WORKER, 9)) == 2
    agent = await engine.register_agent(profile(max_concurrent=4))
    assert len(await engine.claim(agent, WORKER, 9)) == 2
    assert await engine.claim(agent, WORKER, 9) == []


async def test_unconfirmed_kill_occupies_a_slot(engine: Engine, clock: ManualClock) -> None:
    agent = await engine.register_agent(profile(max_concurrent=1))
    await engine.submit_many([new(), new()])
    (work,) = await engine.claim(agent, WORKER, 1)
    await engine.cancel(work.fence.task)
    clock.advance(LEASE_S + 11)
    assert await engine.maintenance.expire_once("reaper") == 1
    assert (await engine.show(work.fence.task)).status == "CANCELLED"
    assert await engine.claim(agent, WORKER, 1) == []


async def test_assigned_task_occupies_a_slot(engine: Engine) -> None:
    agent = await engine.register_agent(profile(max_concurrent=1))
    fence = await assigned(engine)
    await engine.submit(new())
    assert await engine.claim(agent, WORKER, 1) == []
    await engine.release(fence)
    assert len(await engine.claim(agent, WORKER, 2)) == 1


async def test_unregistered_agent_with_a_capacity_claims_nothing(engine: Engine) -> None:
    await engine.submit(new())
    call = engine.claim(profile(max_concurrent=1), WORKER, 1)
    assert await refusal(call) == "agent_terminated"


async def test_terminated_agent_claims_nothing(engine: Engine, raw: Raw) -> None:
    agent = await engine.register_agent(profile(max_concurrent=1))
    await raw.execute("update agent set status = 'TERMINATED'")
    await engine.submit(new())
    assert await refusal(engine.claim(agent, WORKER, 1)) == "agent_terminated"
    again = await engine.register_agent(profile(max_concurrent=1))
    assert await refusal(engine.claim(again, WORKER, 1)) == "agent_terminated"


async def close_lane(engine: Engine, lane: int, until: Any) -> None:
    def script() -> Script[None]:
        yield Statement("lane_close", {"lane": lane, "until": until, "why": "quota"})

    await engine.core.store.transact(script)


async def test_paused_lane_is_not_claimed_from(
    engine: Engine, clock: ManualClock, another: Another
) -> None:
    closed = await engine.submit(new(task_type="closed", priority=10))
    free = await engine.submit(new(task_type="free"))
    lane = (await row_of(engine, closed.id)).lane
    await close_lane(engine, lane, clock.now() + timedelta(seconds=60))
    async with another() as second:
        assert ids(await claim_all(second)) == [free.id]
        assert await claim_all(second) == []
        tick(second, 59)
        assert await claim_all(second) == []
        tick(second, 1)
        assert ids(await claim_all(second)) == [closed.id]


def tick(engine: Engine, seconds: float) -> None:
    assert isinstance(engine.clock, ManualClock)
    engine.clock.advance(seconds)


async def test_lane_cache_of_a_busy_engine_sees_a_new_pause(
    engine: Engine, another: Another
) -> None:
    submitted = await engine.submit_many([new() for _ in range(30)])
    async with another() as second:
        await claim_one(second)
        lane = (await row_of(engine, submitted[0].id)).lane
        await close_lane(engine, lane, START + timedelta(hours=1))
        late = []
        for _ in range(20):
            tick(second, 1)
            late.append(len(await claim_all(second, 1)))
    assert late[-1] == 0, f"still claims from the closed lane: {late}"


async def test_lane_cache_of_a_busy_engine_sees_a_new_lane(
    engine: Engine, another: Another
) -> None:
    await engine.submit_many([new(task_type="old", priority=1) for _ in range(30)])
    async with another() as second:
        await claim_one(second)
        urgent = await engine.submit(new(task_type="fresh", priority=10))
        taken = []
        for _ in range(20):
            tick(second, 1)
            taken += ids(await claim_all(second, 1))
    assert urgent.id in taken, "20 claims in 20 s passed over a better task in a new lane"


async def test_lane_cache_of_an_idle_engine_sees_a_new_lane(
    engine: Engine, another: Another
) -> None:
    async with another() as second:
        assert await claim_all(second) == []
        submitted = await engine.submit(new(task_type="fresh"))
        assert ids(await claim_all(second)) == [submitted.id]


async def test_claim_in_a_missing_workspace_returns_nothing(engine: Engine) -> None:
    elsewhere = Engine(engine.store, workspace=UUID(int=5))
    assert await refusal(elsewhere.submit(new())) == "not_found"
    agent = profile(workspace=elsewhere.workspace)
    async with asyncio.timeout(3):
        assert await elsewhere.claim(agent, WORKER, 2) == []


async def test_claim_with_a_lost_response_is_found_by_its_token(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitted = await engine.submit(new())
    store: Any = engine.core.store
    commit = store.transact_one

    async def commit_and_lose(script: Any) -> Any:
        await commit(script)
        raise Unavailable("the connection was lost")

    monkeypatch.setattr(store, "transact_one", commit_and_lose)
    (work,) = await claim_all(engine, 1)
    monkeypatch.undo()
    assert work.fence.task == submitted.id
    await engine.complete(work.fence)


async def test_assigned_task_is_found_by_its_claim_token(engine: Engine) -> None:
    fence = await assigned(engine)
    assert ids(await engine.claimed(AGENT, fence.token)) == [fence.task]
    await engine.release(fence)
    assert await engine.claimed(AGENT, fence.token) == []


async def test_claim_that_cannot_be_written_raises(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    await engine.submit(new())
    store: Any = engine.core.store

    async def only_read(_script: Any) -> Any:
        raise Unavailable("the database only reads")

    monkeypatch.setattr(store, "transact_one", only_read)
    assert await refusal(claim_all(engine, 1)) == "database_unreachable"
    monkeypatch.undo()
    assert len(await claim_all(engine, 1)) == 1


MATCHES: list[tuple[dict[str, Any], dict[str, Any], bool]] = [
    ({}, {}, True),
    ({"task_type": "a"}, {"task_types": ("b",)}, False),
    ({"task_type": "a"}, {"task_types": ("a", "b")}, True),
    ({"agent_type": "coder"}, {}, False),
    ({"agent_type": "coder"}, {"agent_type": "coder"}, True),
    ({}, {"agent_type": "coder"}, True),
    ({"target_agent": AGENT}, {}, True),
    ({"target_agent": UUID(int=1)}, {}, False),
    ({"runtime": "preset"}, {}, False),
    ({"runtime": "preset"}, {"runtimes": ("preset",)}, True),
    ({"command": ["true"]}, {}, False),
    ({"command": ["true"]}, {"accept_commands": True, "runtimes": ()}, True),
    ({}, {"accept_commands": True, "runtimes": ()}, False),
    ({"capabilities": ["x", "y"]}, {"capabilities": ("x",)}, False),
    ({"capabilities": ["x"]}, {"capabilities": ("x", "y")}, True),
    ({"container": "box"}, {}, False),
    ({"container": "box"}, {"containers": ("box",)}, True),
    ({"region": "eu"}, {"region": "us"}, False),
    ({"region": "eu"}, {"region": "eu"}, True),
    ({"model": "m"}, {"models": ("n",)}, False),
    ({"model": "m"}, {}, True),
    ({"task_tags": ["a"]}, {}, False),
    ({"task_tags": ["a"]}, {"task_tags": ("a", "b")}, True),
    ({"task_tags": ["a", "b"]}, {"task_tags": ("a", "b"), "choose_rules": ("single",)}, False),
    ({"task_tags": ["a"]}, {"task_tags": ("a", "b"), "choose_rules": ("single",)}, True),
    ({"task_tags": ["a"]}, {"task_tags": ("a", "b"), "choose_rules": ("exact",)}, False),
    ({"task_tags": ["b", "a"]}, {"task_tags": ("a", "b"), "choose_rules": ("exact",)}, True),
    ({"task_tags": ["a"]}, {"task_tags": ("a", "b"), "choose_rules": ("exact", "single")}, True),
    ({"tags": ["label"]}, {}, True),
]


async def test_claim_returns_only_tasks_that_the_agent_matches(engine: Engine, raw: Raw) -> None:
    for number, (task, agent, fits) in enumerate(MATCHES):
        there = Engine(engine.store, workspace=await raw.workspace(next(WORKSPACES)))
        if target := task.get("target_agent"):
            await there.register_agent(profile(id=target, workspace=there.workspace))
        await there.submit(new(**task))
        claimed = await there.claim(profile(workspace=there.workspace, **agent), WORKER, 1)
        assert bool(claimed) is fits, f"case {number}: {task} against {agent}"


async def test_agent_of_another_workspace_claims_nothing(engine: Engine, raw: Raw) -> None:
    await engine.submit(new())
    other_agent = profile(workspace=await raw.workspace(next(WORKSPACES)))
    assert await engine.claim(other_agent, WORKER, 1) == []


async def test_next_attempt_starts_without_state_of_the_last(
    engine: Engine, clock: ManualClock
) -> None:
    fence = await running(engine)
    await engine.progress(fence, 50, "half way")
    await engine.checkpoint(fence, {"at": 50})
    await engine.release(fence)
    work = await claim_one(engine)
    assert (work.checkpoint, work.checkpoint_seq) == ({"at": 50}, 1)
    assert work.fence.token != fence.token
    view = await engine.show(fence.task)
    assert (view.progress_percent, view.current_step) == (None, None)


async def test_claim_token_used_by_several_processes_claims_once(
    engine: Engine, another: Another
) -> None:
    await engine.submit_many([new() for _ in range(20)])
    for number in range(5):
        token = f"the token of claim {number}"
        async with another() as second, another() as third:
            claims = [
                item.claim(profile(), WORKER, 1, LEASE_S, token)
                for item in (engine, second, third)
                for _ in range(3)
            ]
            taken = [work.fence for claimed in await asyncio.gather(*claims) for work in claimed]
        assert len(taken) == len(claims)
        assert len(set(taken)) == 1
