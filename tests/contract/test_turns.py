"""Concurrency keys: as many at once as there are places, in order, and nobody forgotten."""

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
    wish = {name: options.pop(name) for name in ("key", "limit", "policy") if name in options}
    concurrency = Concurrency(**{"key": "deploy", **wish})
    return (await engine.submit(new(title, concurrency=concurrency, **options))).id


async def work_off(engine: Engine) -> int:
    """Do what cascades left to do, until nothing is left."""
    done = 0
    while more := await engine.flows.run_deferred_once():
        done += more
    return done


async def test_one_at_a_time_in_submit_order(engine: Engine, raw: Raw) -> None:
    tasks = [await submit(engine, f"task {n}") for n in range(5)]
    other = await submit(engine, key="another")
    assert [await status(engine, task) for task in tasks] == ["PENDING", *["WAITING"] * 4]
    assert await status(engine, other) == "PENDING"
    order = []
    while works := await claim_all(engine):
        mine = [work for work in works if work.fence.task != other]
        assert len(mine) == 1
        for work in works:
            await engine.complete(work.fence)
        order += [work.fence.task for work in mine]
    assert order == tasks
    assert await raw.count("task_turn") == 0
    assert await raw.count("turn_key") == 0


async def test_as_many_as_the_limit_says(engine: Engine) -> None:
    tasks = [await submit(engine, limit=2) for _ in range(5)]
    first = await claim_all(engine)
    assert [work.fence.task for work in first] == tasks[:2]
    await engine.complete(first[1].fence)
    assert [work.fence.task for work in await claim_all(engine)] == [tasks[2]]


async def test_a_bulk_keeps_its_order(engine: Engine) -> None:
    wish = Concurrency("deploy")
    made = await engine.submit_many([new(f"task {n}", concurrency=wish) for n in range(4)])
    order = []
    while works := await claim_all(engine):
        assert len(works) == 1
        order.append(works[0].fence.task)
        await engine.complete(works[0].fence)
    assert order == [each.id for each in made]


async def test_of_a_large_bulk_the_first_runs_at_once(engine: Engine) -> None:
    wish = Concurrency("deploy")
    made = await engine.submit_many([new(f"task {n}", concurrency=wish) for n in range(301)])
    assert [work.fence.task for work in await claim_all(engine)] == [made[0].id]


async def test_workspaces_do_not_share_keys(engine: Engine, raw: Raw) -> None:
    elsewhere = Engine(engine.store, workspace=await raw.workspace(7), actor="tester")
    await submit(engine)
    assert await status(elsewhere, await submit(elsewhere)) == "PENDING"


async def test_a_repeated_submit_asks_once(engine: Engine, raw: Raw) -> None:
    one = await submit(engine, idempotency_key="once")
    assert await submit(engine, idempotency_key="once") == one
    assert await raw.count("task_turn") == 1


@pytest.mark.parametrize("end", ["fail", "dead", "lost", "cancel", "release_then_complete"])
async def test_whatever_the_end_the_next_one_runs(
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


async def test_a_retry_keeps_its_place(engine: Engine, clock: ManualClock) -> None:
    first = await submit(engine)
    second = await submit(engine)
    await engine.fail((await claim_one(engine)).fence, failure())
    assert await status(engine, first) == "RETRY_WAIT"
    assert await status(engine, second) == "WAITING"
    clock.advance(3600)
    await engine.maintenance.promote_once("promoter")
    assert (await claim_one(engine)).fence.task == first


async def test_one_that_waits_can_be_cancelled(engine: Engine) -> None:
    first, second, third = [await submit(engine) for _ in range(3)]
    await engine.cancel(second)
    assert await status(engine, second) == "CANCELLED"
    assert await status(engine, third) == "WAITING"
    await engine.complete((await claim_one(engine)).fence)
    assert await status(engine, third) == "PENDING"
    assert await status(engine, first) == "COMPLETED"


async def test_one_that_waits_longer_than_it_may_leaves_the_line(
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


async def test_a_paused_one_lets_others_pass_and_asks_again(engine: Engine) -> None:
    await submit(engine)
    second, third = await submit(engine), await submit(engine)
    await engine.pause(second)
    await engine.complete((await claim_one(engine)).fence)
    assert await status(engine, third) == "PENDING"
    await engine.resume(second)
    assert await status(engine, second) == "WAITING"
    await engine.complete((await claim_one(engine)).fence)
    assert await status(engine, second) == "PENDING"


@pytest.mark.parametrize("how", ["paused", "blocked"])
async def test_one_that_asks_again_keeps_its_number(engine: Engine, how: str) -> None:
    await submit(engine)
    second, third = await submit(engine), await submit(engine)
    holder = await claim_one(engine)
    if how == "paused":
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
async def test_as_many_places_come_free_as_one_transaction_gives(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, over: int
) -> None:
    """All are given without waiting for the duty that repairs."""
    monkeypatch.setattr(turns, "MAX_GRANTS", 4)
    first = [await submit(engine, limit=4 + over) for _ in range(4 + over)]
    waiting = [await submit(engine, limit=4 + over) for _ in range(4 + over)]
    works = await claim_all(engine)
    assert len(works) == len(first)
    await asyncio.gather(*(engine.complete(work.fence) for work in works))
    await work_off(engine)
    assert {await status(engine, each) for each in waiting} == {"PENDING"}


async def test_one_resumed_while_a_place_is_free_runs(engine: Engine) -> None:
    await submit(engine)
    second = await submit(engine)
    await engine.pause(second)
    await engine.complete((await claim_one(engine)).fence)
    assert await status(engine, second) == "PAUSED"
    await engine.resume(second)
    assert await status(engine, second) == "PENDING"


async def test_a_retry_by_hand_asks_for_a_place_again(engine: Engine, raw: Raw) -> None:
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


async def test_cancel_new_ends_at_once_when_no_place_is_free(engine: Engine, raw: Raw) -> None:
    first = await submit(engine, policy="cancel_new")
    second = await submit(engine, policy="cancel_new")
    assert await status(engine, first) == "PENDING"
    assert await status(engine, second) == "CANCELLED"
    told = [line.text for line in await engine.events(second)]
    assert "no permit is free for the concurrency key 'deploy'" in told[-1]
    await engine.complete((await claim_one(engine)).fence)
    await work_off(engine)
    assert await status(engine, await submit(engine, policy="cancel_new")) == "PENDING"
    assert await raw.count("task_turn") == 1


async def test_who_waits_for_one_that_was_turned_away_hears_of_it(engine: Engine) -> None:
    await submit(engine)
    wish = Concurrency("deploy", policy="cancel_new")
    made = await engine.submit_many([new(key="build", concurrency=wish), new(depends_on=["build"])])
    await work_off(engine)
    assert [await status(engine, each.id) for each in made] == ["CANCELLED", "FAILED"]


async def test_cancel_old_takes_the_place_of_what_waits(engine: Engine) -> None:
    first, second = await submit(engine), await submit(engine)
    third = await submit(engine, policy="cancel_old")
    assert [await status(engine, task) for task in (first, second, third)] == [
        "CANCELLED",
        "CANCELLED",
        "PENDING",
    ]


async def test_cancel_old_waits_until_what_runs_has_stopped(engine: Engine) -> None:
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


async def test_cancel_old_leaves_as_many_as_fit(engine: Engine) -> None:
    tasks = [await submit(engine, limit=3, policy="cancel_old") for _ in range(5)]
    assert [await status(engine, task) for task in tasks] == [*["CANCELLED"] * 2, *["PENDING"] * 3]


async def test_of_a_bulk_that_cancels_the_old_the_last_one_runs(engine: Engine) -> None:
    wish = Concurrency("deploy", policy="cancel_old")
    made = await engine.submit_many([new(f"task {n}", concurrency=wish) for n in range(3)])
    await work_off(engine)
    ends = [await status(engine, each.id) for each in made]
    assert ends == ["CANCELLED", "CANCELLED", "PENDING"]


async def test_one_that_waits_for_others_asks_when_they_have_ended(engine: Engine) -> None:
    build = (await engine.submit(new("build"))).id
    first = await submit(engine, depends_on=[str(build)])
    second = await submit(engine)
    assert await status(engine, second) == "PENDING"  # the first one does not hold up the line
    works = {work.fence.task: work.fence for work in await claim_all(engine)}
    await engine.complete(works[build])
    view = await engine.show(first)
    assert (view.status, view.hold) == ("WAITING", "concurrency")
    await engine.complete(works[second])
    assert await status(engine, first) == "PENDING"


async def test_one_that_failed_for_another_asks_again_when_revived(engine: Engine) -> None:
    build = (await engine.submit(new("build"))).id
    first = await submit(engine, depends_on=[str(build)])
    await engine.fail((await claim_one(engine)).fence, failure("syntax"))
    assert await status(engine, first) == "FAILED"
    second = await submit(engine)
    await engine.retry(build, cascade=True)
    works = {work.fence.task: work.fence for work in await claim_all(engine)}
    assert sorted(works) == sorted([build, second])
    await engine.complete(works[build])
    assert await status(engine, first) == "WAITING"
    await engine.complete(works[second])
    assert await status(engine, first) == "PENDING"


async def test_a_child_takes_its_turn_too(engine: Engine) -> None:
    await submit(engine)
    parent = (await engine.submit(new("parent"))).id
    works = {work.fence.task: work.fence for work in await claim_all(engine)}
    child = await engine.spawn(works[parent], "one", new("c", concurrency=Concurrency("deploy")))
    assert await status(engine, child) == "WAITING"
    holder = next(fence for task, fence in works.items() if task != parent)
    await engine.complete(holder)
    assert await status(engine, child) == "PENDING"


async def test_a_child_cannot_have_the_key_of_one_above_it(engine: Engine) -> None:
    await submit(engine)
    parent = await claim_one(engine)
    same = new("same", concurrency=Concurrency("deploy"))
    assert await refusal(engine.spawn(parent.fence, "one", same)) == "invalid_value"
    child = await engine.spawn(parent.fence, "two", new("child"))
    work = await claim_one(engine)
    assert work.fence.task == child
    assert await refusal(engine.spawn(work.fence, "one", same)) == "invalid_value"


async def test_a_rerun_has_the_same_key(engine: Engine) -> None:
    first = await submit(engine, limit=2, policy="cancel_new")
    await engine.complete((await claim_one(engine)).fence)
    again = await engine.rerun(first)
    assert (await engine.show(again.id)).concurrency == {
        "key": "deploy",
        "limit": 2,
        "policy": "cancel_new",
    }


async def test_explain_names_the_key_and_who_is_before(engine: Engine) -> None:
    await submit(engine)
    await submit(engine)
    third = await submit(engine)
    [gate] = [each for each in (await engine.explain(third)).gates if each.gate == "concurrency"]
    assert gate.detail == (
        "waits for a permit of the concurrency key 'deploy':"
        " 1 of 1 in use, 1 before it in the queue"
    )


async def test_what_has_a_place_cannot_be_made_to_wait(engine: Engine) -> None:
    first = await submit(engine)
    with pytest.raises(Conflict, match="concurrency key"):
        await engine.submit(new(blocks=[str(first)]))


async def test_what_makes_no_sense_is_refused(engine: Engine, clock: ManualClock) -> None:
    for wish in ({"key": ""}, {"key": "x" * 101}, {"limit": 0}, {"limit": 1001}):
        with pytest.raises(Invalid):
            await submit(engine, **wish)
    assert await refusal(submit(engine, run_at=clock.now())) == "invalid_value"
    assert await refusal(submit(engine, next="more")) == "invalid_value"


async def test_a_forgotten_place_is_found_and_told(
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


async def test_a_place_of_one_that_has_ended_is_given_on(
    engine: Engine, raw: Raw, clock: ManualClock
) -> None:
    first, second = await submit(engine), await submit(engine)
    await raw.execute(f"update task set watched = false where id = '{first}'")
    works = await claim_all(engine)
    engine.core.known_attempts.pop_snapshot(first)
    await engine.complete(works[0].fence)
    assert await status(engine, second) == "WAITING"
    clock.advance(120)
    assert await PermitRepair(engine.system).recount_once("mender") >= 1
    assert await status(engine, second) == "PENDING"


async def test_many_at_once_by_several_engines(engine: Engine, another: Another, raw: Raw) -> None:
    """50 submits by three engines, while all of them complete: one at a time, in order."""
    left = [50]

    async def complete(who: Engine) -> None:
        while left[0] > 0:
            for work in await who.claim(profile(), WORKER, 10, LEASE_S):
                await who.complete(work.fence)
                left[0] -= 1
            await who.flows.run_deferred_once()

    async with another() as second, another() as third:
        engines = (engine, second, third)
        early = await asyncio.gather(*(submit(engines[n % 3], f"task {n}") for n in range(25)))
        rows = await raw.fetch("select task from task_turn order by number")
        async with asyncio.timeout(120):
            working = [asyncio.ensure_future(complete(each)) for each in engines]
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


async def meddle(who: Engine, tasks: list[UUID], chance: random.Random) -> None:
    """What people do to tasks, at any moment; whatever is refused is refused."""
    for _ in range(40):
        task = chance.choice(tasks)
        with suppress(TenutoError):
            match chance.choice(["cancel", "pause", "resume", "resume", "retry", "urgent"]):
                case "cancel":
                    await who.cancel(task)
                case "pause":
                    await who.pause(task)
                case "resume":
                    await who.resume(task)
                case "retry":
                    await who.retry(task)
                case "urgent":
                    await who.reprioritise(task, chance.randint(1, 10))


async def labour(who: Engine, chance: random.Random) -> bool:
    """Claim what there is and end it in one way or another; answers whether there was anything."""
    works = await who.claim(profile(), WORKER, 3, LEASE_S)
    for work in works:
        try:
            if chance.random() < 0.6:
                await who.complete(work.fence)
            elif chance.random() < 0.5:
                await who.fail(work.fence, failure("syntax"))
            else:
                await who.release(work.fence)
        except Conflict as error:
            asked = {"cancel_requested": who.confirm_cancel, "pause_requested": who.confirm_pause}
            await asked[error.code](work.fence, KILLED)
    return bool(works) or await who.flows.run_deferred_once() > 0


@pytest.mark.parametrize("seed", range(3))
async def test_never_too_many_whatever_people_do(
    engine: Engine, another: Another, raw: Raw, seed: int
) -> None:
    chance = random.Random(seed)
    async with another() as second, another() as third:
        engines = (engine, second, third)
        tasks = [await submit(engines[n % 3], limit=2, max_attempts=50) for n in range(30)]

        async def shift(who: Engine) -> None:
            for _ in range(25):
                await labour(who, chance)

        async with asyncio.timeout(120):
            await asyncio.gather(
                *(shift(each) for each in engines),
                *(meddle(each, tasks, chance) for each in engines),
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
    """How many tasks had a place at the same time, by the trail: from `ready` until the end."""
    holders: set[Any] = set()
    most = 0
    rows = await raw.fetch("select task, kind, new from event order by position")
    for task, kind, after in rows:
        if kind == "ready":
            holders.add(task)
        elif after in TERMINAL:
            holders.discard(task)
        most = max(most, len(holders))
    return most


async def test_the_last_of_many_that_cancel_the_old_runs(
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


def test_given_passes_nobody() -> None:
    one, two, three = (UUID(int=n) for n in range(3))
    assert grant_order([(one, 1), (two, 1)], 0) == [one]
    assert grant_order([(one, 2), (two, 2), (three, 3)], 0) == [one, two, three]
    assert grant_order([(one, 1), (two, 5)], 1) == []
    assert grant_order([], 0) == []


def test_superseded_are_the_oldest_that_do_not_fit() -> None:
    ids = [UUID(int=n) for n in range(4)]
    assert tasks_to_cancel(ids, 1) == ids
    assert tasks_to_cancel(ids, 3) == ids[:2]
    assert tasks_to_cancel(ids, 9) == []
