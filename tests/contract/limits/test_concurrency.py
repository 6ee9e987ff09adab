"""Concurrency keys: at most `limit` tasks at once, first in first out."""

import asyncio
import random
from contextlib import suppress
from typing import Any
from uuid import UUID

import pytest
from tests.contract.conftest import (
    LEASE_S,
    WORKER,
    Another,
    ManualClock,
    Raw,
    claim_all,
    claim_one,
    failure,
    new,
    profile,
    refusal,
    status,
)

from tenuto.engine.engine import Engine
from tenuto.engine.limits import concurrency as turns
from tenuto.engine.limits.concurrency import PermitRepair
from tenuto.model.errors import Conflict, Invalid, TenutoError
from tenuto.model.limits.concurrency import Concurrency, grant_order, tasks_to_cancel
from tenuto.model.tasks.task import TERMINAL

KILLED = {"state": "killed"}


async def submit(engine: Engine, title: str = "a task", **options: Any) -> UUID:
    """A task with the key `deploy`, or with what is said of it."""
    key_options = {
        name: options.pop(name) for name in ("key", "limit", "policy") if name in options
    }
    concurrency = Concurrency(**{"key": "deploy", **key_options})
    return (await engine.submit(new(title, concurrency=concurrency, **options))).id


async def work_off(engine: Engine) -> int:
    """Do what cascades left to do, until nothing is left."""
    done = 0
    while more := await engine.flows.run_deferred_once():
        done += more
    return done


async def test_key_runs_one_task_at_a_time_in_submit_order(engine: Engine, raw: Raw) -> None:
    tasks = [await submit(engine, f"task {n}") for n in range(5)]
    other = await submit(engine, key="another")
    assert [await status(engine, task) for task in tasks] == ["PENDING", *["WAITING"] * 4]
    assert await status(engine, other) == "PENDING"
    order = []
    while claimed := await claim_all(engine):
        own = [work for work in claimed if work.fence.task != other]
        assert len(own) == 1
        for work in claimed:
            await engine.complete(work.fence)
        order += [work.fence.task for work in own]
    assert order == tasks
    assert await raw.count("task_turn") == 0
    assert await raw.count("turn_key") == 0


async def test_key_runs_as_many_tasks_as_its_limit(engine: Engine) -> None:
    tasks = [await submit(engine, limit=2) for _ in range(5)]
    first = await claim_all(engine)
    assert [work.fence.task for work in first] == tasks[:2]
    await engine.complete(first[1].fence)
    assert [work.fence.task for work in await claim_all(engine)] == [tasks[2]]


async def test_bulk_is_queued_in_its_order(engine: Engine) -> None:
    concurrency = Concurrency("deploy")
    submitted = await engine.submit_many(
        [new(f"task {n}", concurrency=concurrency) for n in range(4)]
    )
    order = []
    while claimed := await claim_all(engine):
        assert len(claimed) == 1
        order.append(claimed[0].fence.task)
        await engine.complete(claimed[0].fence)
    assert order == [item.id for item in submitted]


async def test_first_task_of_a_large_bulk_runs_at_once(engine: Engine) -> None:
    concurrency = Concurrency("deploy")
    submitted = await engine.submit_many(
        [new(f"task {n}", concurrency=concurrency) for n in range(301)]
    )
    assert [work.fence.task for work in await claim_all(engine)] == [submitted[0].id]


async def test_workspaces_have_separate_concurrency_keys(engine: Engine, raw: Raw) -> None:
    elsewhere = Engine(engine.store, workspace=await raw.workspace(7), actor="tester")
    await submit(engine)
    assert await status(elsewhere, await submit(elsewhere)) == "PENDING"


async def test_repeated_submit_requests_one_permit(engine: Engine, raw: Raw) -> None:
    one = await submit(engine, idempotency_key="once")
    assert await submit(engine, idempotency_key="once") == one
    assert await raw.count("task_turn") == 1


@pytest.mark.parametrize("end", ["fail", "dead", "lost", "cancel", "release_then_complete"])
async def test_every_outcome_releases_the_permit(
    engine: Engine, clock: ManualClock, end: str
) -> None:
    first = await submit(engine, max_attempts=1)
    second = await submit(engine)
    fence = (await claim_one(engine)).fence
    assert fence.task == first
    match end:
        case "fail":
            await engine.fail(fence, failure("syntax"))
        case "dead":
            await engine.fail(fence, failure())
        case "lost":
            clock.advance(LEASE_S + 1)
            assert await engine.maintenance.expire_once("reaper") == 1
        case "cancel":
            await engine.cancel(first)
            assert await status(engine, second) == "WAITING"
            await engine.confirm_cancel(fence, KILLED)
        case "release_then_complete":
            await engine.release(fence)
            assert await status(engine, second) == "WAITING"
            await engine.complete((await claim_one(engine)).fence)
    assert await status(engine, second) == "PENDING"


async def test_retry_wait_keeps_its_permit(engine: Engine, clock: ManualClock) -> None:
    first = await submit(engine)
    second = await submit(engine)
    await engine.fail((await claim_one(engine)).fence, failure())
    assert await status(engine, first) == "RETRY_WAIT"
    assert await status(engine, second) == "WAITING"
    clock.advance(3600)
    await engine.maintenance.promote_once("promoter")
    assert (await claim_one(engine)).fence.task == first


async def test_queued_task_can_be_cancelled(engine: Engine) -> None:
    first, second, third = [await submit(engine) for _ in range(3)]
    await engine.cancel(second)
    assert await status(engine, second) == "CANCELLED"
    assert await status(engine, third) == "WAITING"
    await engine.complete((await claim_one(engine)).fence)
    assert await status(engine, third) == "PENDING"
    assert await status(engine, first) == "COMPLETED"


async def test_queued_task_past_its_deadline_leaves_the_queue(
    engine: Engine, clock: ManualClock
) -> None:
    await submit(engine)
    second = await submit(engine, queue_ttl_s=60)
    third = await submit(engine)
    clock.advance(61)
    await engine.maintenance.promote_once("promoter")
    assert (await engine.show(second)).error_class == "queue_ttl"
    await engine.complete((await claim_one(engine)).fence)
    assert await status(engine, third) == "PENDING"


async def test_paused_task_is_passed_by_and_queues_again(engine: Engine) -> None:
    await submit(engine)
    second, third = await submit(engine), await submit(engine)
    await engine.pause(second)
    await engine.complete((await claim_one(engine)).fence)
    assert await status(engine, third) == "PENDING"
    await engine.resume(second)
    assert await status(engine, second) == "WAITING"
    await engine.complete((await claim_one(engine)).fence)
    assert await status(engine, second) == "PENDING"


@pytest.mark.parametrize("mode", ["paused", "blocked"])
async def test_resumed_task_keeps_its_queue_position(engine: Engine, mode: str) -> None:
    await submit(engine)
    second, third = await submit(engine), await submit(engine)
    holder = await claim_one(engine)
    if mode == "paused":
        await engine.pause(second)
        await engine.resume(second)
    else:
        await engine.submit(new("need", blocks=[str(second)]))
        assert await status(engine, second) == "WAITING"
        await engine.complete((await claim_one(engine)).fence)
    await engine.complete(holder.fence)
    assert await status(engine, second) == "PENDING"
    assert await status(engine, third) == "WAITING"


@pytest.mark.parametrize("over", [0, 1])
async def test_freed_permits_of_one_transaction_are_all_granted(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, over: int
) -> None:
    """All are given without waiting for the duty that repairs."""
    monkeypatch.setattr(turns, "MAX_GRANTS", 4)
    first = [await submit(engine, limit=4 + over) for _ in range(4 + over)]
    waiting = [await submit(engine, limit=4 + over) for _ in range(4 + over)]
    claimed = await claim_all(engine)
    assert len(claimed) == len(first)
    await asyncio.gather(*(engine.complete(work.fence) for work in claimed))
    await work_off(engine)
    assert {await status(engine, item) for item in waiting} == {"PENDING"}


async def test_resumed_task_gets_a_free_permit(engine: Engine) -> None:
    await submit(engine)
    second = await submit(engine)
    await engine.pause(second)
    await engine.complete((await claim_one(engine)).fence)
    assert await status(engine, second) == "PAUSED"
    await engine.resume(second)
    assert await status(engine, second) == "PENDING"


async def test_retry_by_an_operator_requests_a_permit_again(engine: Engine, raw: Raw) -> None:
    first = await submit(engine)
    await engine.fail((await claim_one(engine)).fence, failure("syntax"))
    second = await submit(engine)
    await engine.retry(first)
    view = await engine.show(first)
    assert (view.status, view.hold, view.waiting_for) == ("WAITING", "concurrency", "concurrency")
    await engine.complete((await claim_one(engine)).fence)
    assert await status(engine, second) == "COMPLETED"
    assert await status(engine, first) == "PENDING"
    third = await submit(engine)
    await engine.complete((await claim_one(engine)).fence)
    assert await status(engine, third) == "PENDING"
    assert await raw.count("task_turn") == 1


async def test_cancel_new_task_without_a_free_permit_is_cancelled(engine: Engine, raw: Raw) -> None:
    first = await submit(engine, policy="cancel_new")
    second = await submit(engine, policy="cancel_new")
    assert await status(engine, first) == "PENDING"
    assert await status(engine, second) == "CANCELLED"
    reports = [line.text for line in await engine.events(second)]
    assert "no permit is free for the concurrency key 'deploy'" in reports[-1]
    await engine.complete((await claim_one(engine)).fence)
    await work_off(engine)
    assert await status(engine, await submit(engine, policy="cancel_new")) == "PENDING"
    assert await raw.count("task_turn") == 1


async def test_dependent_of_a_cancel_new_task_follows_its_outcome(engine: Engine) -> None:
    await submit(engine)
    concurrency = Concurrency("deploy", policy="cancel_new")
    submitted = await engine.submit_many(
        [new(key="build", concurrency=concurrency), new(depends_on=["build"])]
    )
    await work_off(engine)
    assert [await status(engine, item.id) for item in submitted] == ["CANCELLED", "FAILED"]


async def test_cancel_old_task_replaces_queued_tasks(engine: Engine) -> None:
    first, second = await submit(engine), await submit(engine)
    third = await submit(engine, policy="cancel_old")
    assert [await status(engine, task) for task in (first, second, third)] == [
        "CANCELLED",
        "CANCELLED",
        "PENDING",
    ]


async def test_cancel_old_task_waits_until_the_running_one_stopped(engine: Engine) -> None:
    first = await submit(engine)
    fence = (await claim_one(engine)).fence
    second = await submit(engine, policy="cancel_old")
    assert (await engine.show(first)).cancel_requested_at is not None
    assert await status(engine, second) == "WAITING"
    third = await submit(engine, policy="cancel_old")
    assert await status(engine, second) == "CANCELLED"
    await engine.confirm_cancel(fence, KILLED)
    assert await status(engine, first) == "CANCELLED"
    assert await status(engine, third) == "PENDING"


async def test_cancel_old_task_leaves_as_many_as_the_limit(engine: Engine) -> None:
    tasks = [await submit(engine, limit=3, policy="cancel_old") for _ in range(5)]
    assert [await status(engine, task) for task in tasks] == [*["CANCELLED"] * 2, *["PENDING"] * 3]


async def test_last_task_of_a_cancel_old_bulk_runs(engine: Engine) -> None:
    concurrency = Concurrency("deploy", policy="cancel_old")
    submitted = await engine.submit_many(
        [new(f"task {n}", concurrency=concurrency) for n in range(3)]
    )
    await work_off(engine)
    ends = [await status(engine, item.id) for item in submitted]
    assert ends == ["CANCELLED", "CANCELLED", "PENDING"]


async def test_dependent_task_requests_its_permit_after_its_dependencies(engine: Engine) -> None:
    build = (await engine.submit(new("build"))).id
    first = await submit(engine, depends_on=[str(build)])
    second = await submit(engine)
    assert await status(engine, second) == "PENDING"  # the first one does not hold up the line
    claimed = {work.fence.task: work.fence for work in await claim_all(engine)}
    await engine.complete(claimed[build])
    view = await engine.show(first)
    assert (view.status, view.hold) == ("WAITING", "concurrency")
    await engine.complete(claimed[second])
    assert await status(engine, first) == "PENDING"


async def test_reopened_dependent_requests_a_permit_again(engine: Engine) -> None:
    build = (await engine.submit(new("build"))).id
    first = await submit(engine, depends_on=[str(build)])
    await engine.fail((await claim_one(engine)).fence, failure("syntax"))
    assert await status(engine, first) == "FAILED"
    second = await submit(engine)
    await engine.retry(build, cascade=True)
    claimed = {work.fence.task: work.fence for work in await claim_all(engine)}
    assert sorted(claimed) == sorted([build, second])
    await engine.complete(claimed[build])
    assert await status(engine, first) == "WAITING"
    await engine.complete(claimed[second])
    assert await status(engine, first) == "PENDING"


async def test_subtask_requests_a_permit(engine: Engine) -> None:
    await submit(engine)
    parent = (await engine.submit(new("parent"))).id
    claimed = {work.fence.task: work.fence for work in await claim_all(engine)}
    child = await engine.spawn(claimed[parent], "one", new("c", concurrency=Concurrency("deploy")))
    assert await status(engine, child) == "WAITING"
    holder = next(fence for task, fence in claimed.items() if task != parent)
    await engine.complete(holder)
    assert await status(engine, child) == "PENDING"


async def test_subtask_with_the_key_of_its_parent_is_refused(engine: Engine) -> None:
    await submit(engine)
    parent = await claim_one(engine)
    same = new("same", concurrency=Concurrency("deploy"))
    assert await refusal(engine.spawn(parent.fence, "one", same)) == "invalid_value"
    child = await engine.spawn(parent.fence, "two", new("child"))
    work = await claim_one(engine)
    assert work.fence.task == child
    assert await refusal(engine.spawn(work.fence, "one", same)) == "invalid_value"


async def test_rerun_has_the_same_concurrency_key(engine: Engine) -> None:
    first = await submit(engine, limit=2, policy="cancel_new")
    await engine.complete((await claim_one(engine)).fence)
    again = await engine.rerun(first)
    assert (await engine.show(again.id)).concurrency == {
        "key": "deploy",
        "limit": 2,
        "policy": "cancel_new",
    }


async def test_explain_names_the_key_and_the_tasks_ahead(engine: Engine) -> None:
    await submit(engine)
    await submit(engine)
    third = await submit(engine)
    [gate] = [item for item in (await engine.explain(third)).gates if item.gate == "concurrency"]
    assert gate.detail == (
        "waits for a permit of the concurrency key 'deploy':"
        " 1 of 1 in use, 1 before it in the queue"
    )


async def test_task_with_a_permit_cannot_be_blocked(engine: Engine) -> None:
    first = await submit(engine)
    with pytest.raises(Conflict, match="concurrency key"):
        await engine.submit(new(blocks=[str(first)]))


async def test_invalid_concurrency_is_refused(engine: Engine, clock: ManualClock) -> None:
    for concurrency in ({"key": ""}, {"key": "x" * 101}, {"limit": 0}, {"limit": 1001}):
        with pytest.raises(Invalid):
            await submit(engine, **concurrency)
    assert await refusal(submit(engine, run_at=clock.now())) == "invalid_value"
    assert await refusal(submit(engine, next="more")) == "invalid_value"


async def test_lost_permit_is_repaired_and_reported(
    engine: Engine, raw: Raw, clock: ManualClock
) -> None:
    await submit(engine)
    second, third = await submit(engine), await submit(engine)
    await raw.execute("delete from task_turn where held = true")
    await raw.execute(f"delete from task_turn where task = '{third}'")
    mending = PermitRepair(engine.system)
    assert await mending.recount_once("mender") == 0  # it may still be on its way
    clock.advance(120)
    assert await mending.recount_once("mender") == 2
    line = (await engine.events(second))[-1]
    assert (line.new_status, line.level) == ("PENDING", "ERROR")
    assert await status(engine, third) == "WAITING"
    assert await raw.count("task_turn") == 2
    assert await mending.recount_once("mender") == 0


async def test_permit_of_a_finished_task_is_granted_to_the_next(
    engine: Engine, raw: Raw, clock: ManualClock
) -> None:
    first, second = await submit(engine), await submit(engine)
    await raw.execute(f"update task set watched = false where id = '{first}'")
    claimed = await claim_all(engine)
    engine.core.known_attempts.pop_snapshot(first)
    await engine.complete(claimed[0].fence)
    assert await status(engine, second) == "WAITING"
    clock.advance(120)
    assert await PermitRepair(engine.system).recount_once("mender") >= 1
    assert await status(engine, second) == "PENDING"


async def test_concurrent_submits_of_several_engines_keep_the_limit(
    engine: Engine, another: Another, raw: Raw
) -> None:
    """50 submits by three engines, while all of them complete: one at a time, in order."""
    left = [50]

    async def complete(caller: Engine) -> None:
        while left[0] > 0:
            for work in await caller.claim(profile(), WORKER, 10, LEASE_S):
                await caller.complete(work.fence)
                left[0] -= 1
            await caller.flows.run_deferred_once()

    async with another() as second, another() as third:
        engines = (engine, second, third)
        early = await asyncio.gather(*(submit(engines[n % 3], f"task {n}") for n in range(25)))
        rows = await raw.fetch("select task from task_turn order by number")
        async with asyncio.timeout(120):
            working = [asyncio.ensure_future(complete(item)) for item in engines]
            later = (submit(engines[n % 3], f"later {n}") for n in range(25))
            late = await asyncio.gather(*later)
            await asyncio.gather(*working)
    events = await raw.fetch(
        "select task, kind from event where kind in ('claimed', 'completed') order by position"
    )
    assert [kind for _, kind in events] == ["claimed", "completed"] * 50
    claimed = [task for task, kind in events if kind == "claimed"]
    assert claimed[:25] == [row[0] for row in rows]
    assert {UUID(str(task)) for task in claimed} == {*early, *late}
    assert await raw.count("task_turn") == 0


async def meddle(caller: Engine, tasks: list[UUID], chance: random.Random) -> None:
    """Applies random user commands to tasks; refused ones have no effect."""
    for _ in range(40):
        task = chance.choice(tasks)
        with suppress(TenutoError):
            match chance.choice(["cancel", "pause", "resume", "resume", "retry", "urgent"]):
                case "cancel":
                    await caller.cancel(task)
                case "pause":
                    await caller.pause(task)
                case "resume":
                    await caller.resume(task)
                case "retry":
                    await caller.retry(task)
                case "urgent":
                    await caller.reprioritise(task, chance.randint(1, 10))


async def labour(caller: Engine, chance: random.Random) -> bool:
    """Claim what there is and end it in one way or another; answers whether there was anything."""
    claimed = await caller.claim(profile(), WORKER, 3, LEASE_S)
    for work in claimed:
        try:
            if chance.random() < 0.6:
                await caller.complete(work.fence)
            elif chance.random() < 0.5:
                await caller.fail(work.fence, failure("syntax"))
            else:
                await caller.release(work.fence)
        except Conflict as error:
            asked = {
                "cancel_requested": caller.confirm_cancel,
                "pause_requested": caller.confirm_pause,
            }
            await asked[error.code](work.fence, KILLED)
    return bool(claimed) or await caller.flows.run_deferred_once() > 0


@pytest.mark.parametrize("seed", range(3))
async def test_random_commands_never_exceed_the_limit(
    engine: Engine, another: Another, raw: Raw, seed: int
) -> None:
    chance = random.Random(seed)
    async with another() as second, another() as third:
        engines = (engine, second, third)
        tasks = [await submit(engines[n % 3], limit=2, max_attempts=50) for n in range(30)]

        async def shift(caller: Engine) -> None:
            for _ in range(25):
                await labour(caller, chance)

        async with asyncio.timeout(120):
            await asyncio.gather(
                *(shift(item) for item in engines),
                *(meddle(item, tasks, chance) for item in engines),
            )
            for task in tasks:
                with suppress(TenutoError):
                    await engine.resume(task)
            while await labour(engine, chance):
                pass
    assert [await status(engine, task) in TERMINAL for task in tasks] == [True] * 30
    assert await raw.count("task_turn") == 0
    assert await most_at_once(raw) == 2
    assert await PermitRepair(engine.system).recount_once("mender") == 0


async def most_at_once(raw: Raw) -> int:
    """Returns how many tasks had a permit at once, by the audit trail from `ready` to the end."""
    holders: set[Any] = set()
    maximum = 0
    rows = await raw.fetch("select task, kind, new from event order by position")
    for task, kind, after in rows:
        if kind == "ready":
            holders.add(task)
        elif after in TERMINAL:
            holders.discard(task)
        maximum = max(maximum, len(holders))
    return maximum


async def test_last_of_many_cancel_old_tasks_runs(
    engine: Engine, another: Another, raw: Raw
) -> None:
    async with another() as second, another() as third:
        engines = (engine, second, third)
        tasks = await asyncio.gather(
            *(submit(engines[n % 3], policy="cancel_old") for n in range(30))
        )
        await work_off(engine)
    ends = sorted([await status(engine, task) for task in tasks])
    assert ends == [*["CANCELLED"] * 29, "PENDING"]
    [(left,)] = await raw.fetch("select count(*) from task_turn")
    assert left == 1


def test_granted_permits_skip_no_queued_task() -> None:
    one, two, three = (UUID(int=n) for n in range(3))
    assert grant_order([(one, 1), (two, 1)], 0) == [one]
    assert grant_order([(one, 2), (two, 2), (three, 3)], 0) == [one, two, three]
    assert grant_order([(one, 1), (two, 5)], 1) == []
    assert grant_order([], 0) == []


def test_superseded_tasks_are_the_oldest_over_the_limit() -> None:
    ids = [UUID(int=n) for n in range(4)]
    assert tasks_to_cancel(ids, 1) == ids
    assert tasks_to_cancel(ids, 3) == ids[:2]
    assert tasks_to_cancel(ids, 9) == []
