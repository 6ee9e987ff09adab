"""What attempts use: counted once, shown everywhere, and bounded by budgets."""

import asyncio
from contextlib import suppress
from typing import Any
from uuid import UUID, uuid4

import pytest
from tests.contract.conftest import (
    LEASE_S,
    ManualClock,
    Raw,
    claim_all,
    claim_one,
    failure,
    new,
    profile,
    reclaimed,
    refusal,
    row_of,
    running,
    status,
)
from tests.contract.flowing import group, start, task
from tests.contract.test_prune_races import in_line

from tenuto.engine import spending
from tenuto.engine.engine import Engine
from tenuto.metrics import HERE
from tenuto.model.definition import Condition, Foreach
from tenuto.model.errors import Conflict, Invalid
from tenuto.model.rates import RateLimit
from tenuto.model.spending import Budget, Spent, Usage, is_over, raised
from tenuto.model.task import Fence
from tenuto.store.protocol import Script, Statement

KILLED = {"state": "killed"}


def usage(tokens: int = 100, cost: float = 0.5, **more: Any) -> Usage:
    return Usage(**{"model": "m1", "input_tokens": tokens, "cost_usd": cost, **more})


async def spent(engine: Engine, task: UUID) -> tuple[int, int, float]:
    view = await engine.show(task)
    return view.input_tokens, view.output_tokens, view.cost_usd


async def stopped(engine: Engine, fence: Fence) -> None:
    """What a worker does that is asked to stop."""
    assert (await engine.heartbeat([fence])).held[fence.task].pause
    await engine.confirm_pause(fence, KILLED)


async def asked(engine: Engine) -> UUID:
    """The one question about a budget that is open."""
    [item] = [each for each in await engine.inbox.list() if each.kind == "budget"]
    return item.id


async def test_reports_add_up(engine: Engine, raw: Raw) -> None:
    fence = await running(engine)
    before = HERE.value("tenuto_tokens_total", model="m1"), HERE.value("tenuto_cost_usd_total")
    await engine.used(fence, usage(100, 0.5, output_tokens=10))
    await engine.used(fence, usage(200, 0.25))
    await engine.used(fence, Usage(model="m2", output_tokens=7))
    assert await spent(engine, fence.task) == (300, 17, 0.75)
    [attempt] = await engine.attempts(fence.task)
    assert (attempt.input_tokens, attempt.output_tokens, attempt.cost_usd) == (300, 17, 0.75)
    assert await raw.count("spending") == 2
    assert HERE.value("tenuto_tokens_total", model="m1") - before[0] == 310
    assert HERE.value("tenuto_cost_usd_total") - before[1] == pytest.approx(0.75)


async def test_each_attempt_has_its_own(engine: Engine) -> None:
    first = await running(engine)
    await engine.used(first, usage(100, 1))
    second = await reclaimed(engine, first)
    await engine.used(second, usage(10, 0.5))
    attempts = await engine.attempts(first.task)
    assert [(each.input_tokens, each.cost_usd) for each in attempts] == [(100, 1), (10, 0.5)]
    assert await spent(engine, first.task) == (110, 0, 1.5)


async def below(raw: Raw, task: UUID, parent: UUID) -> None:
    """Have a stored task name a parent that no submit could."""
    await raw.execute(f"update task_body set parent = '{parent}' where task = '{task}'")


async def test_another_tenant_cannot_use_up_a_budget(engine: Engine, raw: Raw) -> None:
    mine = await running(engine, budget=Budget(tokens=1000))
    other = Engine(engine.system.store, workspace=await raw.workspace(7))
    agent = profile(id=uuid4(), workspace=other.workspace)
    await other.register_agent(agent)
    await other.submit(new())
    [foreign] = await other.claim(agent, "theirs", 1)
    await below(raw, foreign.fence.task, mine.task)
    await other.used(foreign.fence, usage(5000))
    await engine.used(mine, usage(10))
    assert not (await engine.heartbeat([mine])).held[mine.task].pause
    assert await engine.inbox.list() == []


async def test_a_stale_attempt_cannot_spend(engine: Engine, clock: ManualClock, raw: Raw) -> None:
    first = await running(engine)
    clock.advance(LEASE_S + 1)
    await engine.upkeep.expire_once("reaper")
    assert await refusal(engine.used(first, usage())) == "lease_lost"
    await engine.upkeep.promote_once("promoter")
    second = (await claim_one(engine)).fence
    assert await refusal(engine.used(first, usage())) == "lease_lost"
    assert await refusal(engine.used(Fence(second.task, second.attempt, "x"), usage())) == (
        "lease_lost"
    )
    await engine.complete(second)
    assert await refusal(engine.used(second, usage())) == "lease_lost"
    assert await raw.count("spending") == 0


async def test_a_numbered_report_counts_once(engine: Engine) -> None:
    fence = await running(engine)
    for number in (1, 1, 2, 2, 1):
        await engine.used(fence, usage(10, 1, number=number))
    assert await spent(engine, fence.task) == (20, 0, 2)


async def test_a_numbered_report_counts_once_whatever_comes_between(engine: Engine) -> None:
    fence = await running(engine)
    for number in (3, None, 3):
        await engine.used(fence, usage(10, 1, number=number))
    assert await spent(engine, fence.task) == (20, 0, 2)


async def test_many_reports_at_once_are_all_counted(engine: Engine) -> None:
    fence = await running(engine)
    await asyncio.gather(*(engine.used(fence, usage(1, 0.5)) for _ in range(20)))
    assert await spent(engine, fence.task) == (20, 0, 10)


@pytest.mark.parametrize("watched", [False, True])
async def test_what_is_told_with_the_result_counts_once(engine: Engine, watched: bool) -> None:
    fence = await running(engine)
    if watched:
        await engine.submit(new(depends_on=[str(fence.task)]))
    await engine.complete(fence, {"ok": 1}, usage=usage(5, 1))
    await engine.complete(fence, {"ok": 1}, usage=usage(5, 1))
    assert await status(engine, fence.task) == "COMPLETED"
    assert await spent(engine, fence.task) == (5, 0, 1)
    assert len(await claim_all(engine)) == int(watched)


async def test_what_is_told_with_a_refused_result_counts_once(engine: Engine) -> None:
    fence = await running(engine)
    await engine.used(fence, usage(1, 1, number=1))
    await engine.cancel(fence.task)
    for _ in range(2):
        assert await refusal(engine.complete(fence, usage=usage(5, 1))) == "cancel_requested"
    assert await spent(engine, fence.task) == (6, 0, 2)


@pytest.mark.parametrize(
    "control",
    [
        Condition(expression="result.a.b.c > 1"),
        Foreach(items={"$from": "w", "path": "a"}, template="t"),
    ],
    ids=["condition", "foreach"],
)
async def test_what_is_told_with_a_result_that_its_control_cannot_use_counts_once(
    engine: Engine, control: Any
) -> None:
    decides = task("c", prompt="Decide.", control=control)
    await start(engine, "w", task("w", next="c"), decides, task("t"))
    await engine.complete((await claim_one(engine)).fence, {"a": "no list"})
    fence = (await claim_one(engine)).fence
    for _ in range(2):
        with suppress(Conflict):
            await engine.complete(fence, {"a": "no list"}, usage=usage(5, 1))
    assert await status(engine, fence.task) == "FAILED"
    assert await spent(engine, fence.task) == (5, 0, 1)


@pytest.mark.parametrize(
    "control", [Condition(expression="result.a.b.c > 1"), Foreach(items="result.a", template="t")]
)
async def test_what_is_told_with_a_result_that_the_tasks_own_control_cannot_use_counts_once(
    engine: Engine, control: Any
) -> None:
    await start(engine, "c", task("c", prompt="choose", control=control), task("t"))
    fence = (await claim_one(engine)).fence
    await engine.complete(fence, {"a": "no list"}, usage=usage(5, 1))
    assert await status(engine, fence.task) == "FAILED"
    assert await spent(engine, fence.task) == (5, 0, 1)
    again = engine.complete(fence, {"a": "no list"}, usage=usage(5, 1))
    assert await refusal(again) == "lease_lost"
    assert await spent(engine, fence.task) == (5, 0, 1)


async def test_what_is_told_with_a_failure_counts_once(engine: Engine) -> None:
    fence = await running(engine)
    await engine.fail(fence, failure(), usage=usage(5, 1))
    await engine.fail(fence, failure(), usage=usage(5, 1))
    assert await status(engine, fence.task) == "RETRY_WAIT"
    assert await spent(engine, fence.task) == (5, 0, 1)


async def test_what_a_cancelled_attempt_used_counts(engine: Engine) -> None:
    fence = await running(engine)
    await engine.cancel(fence.task)
    await engine.used(fence, usage(5, 1))
    assert await refusal(engine.complete(fence, usage=usage(6, 1))) == "cancel_requested"
    assert await spent(engine, fence.task) == (11, 0, 2)


async def test_nonsense_is_refused(engine: Engine) -> None:
    fence = await running(engine)
    for bad in (
        Usage(input_tokens=-1),
        Usage(input_tokens=True),
        Usage(output_tokens=10**13),
        Usage(cost_usd=-0.01),
        Usage(cost_usd=float("nan")),
        Usage(cost_usd=float("inf")),
        Usage(model="x" * 101),
        Usage(model="\x00"),
        Usage(number=0),
    ):
        with pytest.raises(Invalid):
            await engine.used(fence, bad)
        with pytest.raises(Invalid):
            await engine.complete(fence, usage=bad)
        with pytest.raises(Invalid):
            await engine.fail(fence, failure(), usage=bad)
    assert await status(engine, fence.task) == "RUNNING"
    for budget in (Budget(), Budget(tokens=0), Budget(cost_usd=-1.0), Budget(tokens=2**60)):
        with pytest.raises(Invalid):
            await engine.submit(new(budget=budget))


async def test_the_workspace_sums_up(engine: Engine, clock: ManualClock, raw: Raw) -> None:
    elsewhere = Engine(engine.store, workspace=await raw.workspace(7), actor="tester")
    fence = await running(engine)
    await engine.used(fence, usage(100, 1))
    await engine.complete(fence)
    clock.advance(days=1)
    fence = await running(engine)
    await engine.used(fence, usage(10, 0.5, output_tokens=5))
    stats = await engine.spending()
    assert (stats.tokens_today, stats.cost_usd_today) == (15, 0.5)
    assert (stats.input_tokens, stats.output_tokens, stats.cost_usd) == (110, 5, 1.5)
    assert (await elsewhere.spending()).cost_usd == 0


async def test_flows_and_groups_sum_up(engine: Engine) -> None:
    budget = Budget(cost_usd=1.5)
    flow = await start(engine, "g", group("g", "a", "b"), task("a", budget=budget), task("b"))
    first = await claim_one(engine)
    await engine.used(first.fence, usage(cost=1.0))
    await engine.complete(first.fence, usage=usage(cost=0.25))
    await engine.used((await claim_one(engine)).fence, usage(cost=0.5))
    assert (await engine.flow_views.show(flow)).cost_usd == 1.75
    run = (await engine.show(first.fence.task)).group_id
    assert run is not None
    assert (await engine.flow_views.group(run)).cost_usd == 1.75


async def test_tokens_count_against_rate_limits(engine: Engine) -> None:
    await engine.rate_limits.put(RateLimit(name="m1", model="m1", tokens_per_minute=1000))
    fence = await running(engine, model="m1")
    await engine.used(fence, usage(300, number=1))
    await engine.used(fence, usage(300, number=1))
    await engine.complete(fence, usage=usage(100, number=2))
    [limit] = await engine.rate_limits.list()
    assert limit.tokens_left == 600


# Budgets.


async def test_over_the_budget_the_task_stops_and_a_person_is_asked(engine: Engine) -> None:
    fence = await running(engine, title="research", budget=Budget(tokens=100))
    await engine.used(fence, usage(100))
    assert not (await engine.heartbeat([fence])).held[fence.task].pause
    await engine.checkpoint(fence, {"page": 7})
    await engine.used(fence, usage(1))
    await engine.used(fence, usage(1))
    await stopped(engine, fence)
    task = await row_of(engine, fence.task)
    assert (task.status, task.tries) == ("WAITING", 0)
    view = await engine.show(fence.task)
    assert (view.waiting_for, view.checkpoint) == ("budget", {"page": 7})
    assert await claim_all(engine) == []
    item = await engine.inbox.show(await asked(engine))
    assert item.task == fence.task
    assert item.body["budget"] == {"tokens": 100, "costUsd": None}
    assert "used up" in (await engine.explain(fence.task)).summary


async def test_who_has_used_up_the_budget_makes_nothing_more(engine: Engine, raw: Raw) -> None:
    """Only the last checkpoint is kept, for when somebody gives more."""
    fence = await running(engine, budget=Budget(tokens=100))
    await engine.used(fence, usage(101))
    assert await refusal(engine.spawn(fence, "child", new())) == "pause_requested"
    assert await refusal(engine.record_step(fence, "step", 1)) == "pause_requested"
    await engine.checkpoint(fence, {"page": 7})
    assert await raw.count("task") == 1
    assert await engine.steps(fence.task) == {}


async def test_a_yes_doubles_the_budget_and_the_task_goes_on(engine: Engine) -> None:
    fence = await running(engine, budget=Budget(cost_usd=1.0))
    await engine.used(fence, usage(cost=1.5))
    await stopped(engine, fence)
    await engine.inbox.answer(await asked(engine), approve=True)
    assert (await engine.show(fence.task)).budget == {"tokens": None, "costUsd": 3.0}
    again = (await claim_one(engine)).fence
    await engine.used(again, usage(cost=1.5))
    assert not (await engine.heartbeat([again])).held[fence.task].pause
    await engine.used(again, usage(cost=0.1))
    await stopped(engine, again)
    item = await asked(engine)
    assert await refusal(engine.inbox.answer(item, approve=True, budget=Budget(cost_usd=2.0))) == (
        "budget_too_small"
    )
    await engine.inbox.answer(item, approve=True, budget=Budget(cost_usd=20.0))
    assert (await engine.show(fence.task)).budget == {"tokens": None, "costUsd": 20.0}
    await engine.complete((await claim_one(engine)).fence)


async def test_a_no_cancels(engine: Engine) -> None:
    fence = await running(engine, budget=Budget(tokens=1))
    await engine.used(fence, usage())
    await stopped(engine, fence)
    item = await asked(engine)
    assert await refusal(engine.inbox.dismiss(item, "seen")) == "out_of_turn"
    await engine.inbox.answer(item, approve=False)
    assert await status(engine, fence.task) == "CANCELLED"
    assert await engine.inbox.list() == []


@pytest.mark.parametrize("approve", [True, False])
async def test_a_paused_task_hears_what_was_said_of_its_budget(
    engine: Engine, approve: bool
) -> None:
    fence = await running(engine, budget=Budget(tokens=1))
    await engine.used(fence, usage())
    await stopped(engine, fence)
    await engine.pause(fence.task)
    await engine.inbox.answer(await asked(engine), approve=approve)
    assert await status(engine, fence.task) == ("PAUSED" if approve else "CANCELLED")
    if approve:
        await engine.resume(fence.task)
        await engine.complete((await claim_one(engine)).fence)


@pytest.mark.parametrize("others", [1, 2, 4])
async def test_a_yes_is_heard_by_all_who_wait_for_the_budget(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, others: int
) -> None:
    """However many more they are than one transaction lets go on."""
    monkeypatch.setattr(spending, "MOST_HELD", 2)
    parent = await running(engine, title="parent", budget=Budget(tokens=10))
    for n in range(others):
        await engine.spawn(parent, f"c{n}", new(f"child {n}"))
    fences = [parent, *(work.fence for work in await claim_all(engine))]
    await engine.used(parent, usage(11))
    for fence in fences[1:]:
        await engine.used(fence, usage(1))
    for fence in fences:
        await stopped(engine, fence)
    await engine.inbox.answer(await asked(engine), approve=True)
    while await engine.flows.work_once():
        pass
    assert {await status(engine, fence.task) for fence in fences} == {"PENDING"}


async def test_a_yes_that_is_heard_later_frees_nobody_once_the_budget_is_used_up_again(
    engine: Engine, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spending, "MOST_HELD", 2)
    parent = await running(engine, title="parent", budget=Budget(tokens=10))
    for n in range(2):
        await engine.spawn(parent, f"c{n}", new(f"child {n}"))
    fences = [parent, *(work.fence for work in await claim_all(engine))]
    for fence in fences:
        await engine.used(fence, usage(11))
    for fence in fences:
        await stopped(engine, fence)
    await engine.inbox.answer(await asked(engine), approve=True)
    again = (await claim_one(engine)).fence
    await engine.used(again, usage(100))
    clock.advance(10)
    while await engine.flows.work_once():
        pass
    stands = [await status(engine, fence.task) for fence in fences]
    assert sorted(stands) == ["PENDING", "RUNNING", "WAITING"]
    await stopped(engine, again)
    await engine.inbox.answer(await asked(engine), approve=True)
    while await engine.flows.work_once():
        pass
    assert {await status(engine, fence.task) for fence in fences} == {"PENDING"}


async def test_an_answer_before_the_session_has_stopped_is_too_early(engine: Engine) -> None:
    fence = await running(engine, budget=Budget(tokens=1))
    await engine.used(fence, usage())
    with pytest.raises(Conflict, match="still being stopped"):
        await engine.inbox.answer(await asked(engine), approve=True)
    await stopped(engine, fence)
    await engine.inbox.answer(await asked(engine), approve=True)
    assert await status(engine, fence.task) == "PENDING"


async def test_a_worker_that_is_gone_stops_too(engine: Engine, clock: ManualClock) -> None:
    fence = await running(engine, budget=Budget(tokens=1))
    await engine.used(fence, usage())
    clock.advance(3600)
    await engine.upkeep.expire_once("reaper")
    assert await status(engine, fence.task) == "WAITING"
    await engine.inbox.answer(await asked(engine), approve=True)
    assert await status(engine, fence.task) == "PENDING"


async def test_a_budget_covers_what_the_task_spawns(engine: Engine) -> None:
    parent = await running(engine, title="parent", budget=Budget(tokens=100))
    ids = [await engine.spawn(parent, f"c{n}", new(f"child {n}")) for n in range(2)]
    children = {work.fence.task: work.fence for work in await claim_all(engine)}
    grandchild = await engine.spawn(children[ids[0]], "g", new("grandchild"))
    [deep] = await claim_all(engine)
    assert deep.fence.task == grandchild
    await engine.used(parent, usage(40))
    await engine.used(deep.fence, usage(40))
    await engine.used(children[ids[1]], usage(40))
    await stopped(engine, children[ids[1]])
    await engine.used(deep.fence, usage(1))
    await stopped(engine, deep.fence)
    assert await status(engine, parent.task) == "RUNNING"
    item = await asked(engine)
    assert (await engine.inbox.show(item)).task == parent.task
    await engine.inbox.answer(item, approve=True)
    assert {work.fence.task for work in await claim_all(engine)} == {ids[1], grandchild}


async def test_a_child_may_have_less(engine: Engine) -> None:
    parent = await running(engine, budget=Budget(tokens=1000))
    child = await engine.spawn(parent, "c", new("child", budget=Budget(tokens=10)))
    work = await claim_one(engine)
    await engine.used(work.fence, usage(11))
    await stopped(engine, work.fence)
    assert (await engine.inbox.show(await asked(engine))).task == child
    await engine.inbox.answer(await asked(engine), approve=False)
    assert await status(engine, child) == "CANCELLED"
    assert await status(engine, parent.task) == "RUNNING"


async def test_a_no_ends_the_whole_tree(engine: Engine) -> None:
    parent = await running(engine, budget=Budget(tokens=10))
    child = await engine.spawn(parent, "c", new("child"))
    work = await claim_one(engine)
    await engine.used(work.fence, usage(11))
    await stopped(engine, work.fence)
    await engine.inbox.answer(await asked(engine), approve=False)
    assert await status(engine, child) == "CANCELLED"
    await engine.confirm_cancel(parent, KILLED)
    assert await status(engine, parent.task) == "CANCELLED"


async def test_the_result_of_a_task_over_its_budget_is_taken(engine: Engine) -> None:
    fence = await running(engine, budget=Budget(tokens=1))
    await engine.complete(fence, {"ok": 1}, usage=usage(100))
    assert await status(engine, fence.task) == "COMPLETED"
    assert await engine.inbox.list() == []


async def test_cancelling_a_task_that_waits_for_its_budget_closes_the_question(
    engine: Engine,
) -> None:
    fence = await running(engine, budget=Budget(tokens=1))
    await engine.used(fence, usage())
    await stopped(engine, fence)
    await engine.cancel(fence.task)
    assert await engine.inbox.list() == []
    await engine.retry(fence.task)
    assert await status(engine, fence.task) == "PENDING"


async def test_a_worker_that_is_gone_leaves_no_question_about_a_cancelled_task(
    engine: Engine, clock: ManualClock
) -> None:
    fence = await running(engine, budget=Budget(tokens=1))
    await engine.used(fence, usage())
    await engine.cancel(fence.task)
    clock.advance(3600)
    await engine.upkeep.expire_once("reaper")
    assert await status(engine, fence.task) == "CANCELLED"
    assert await engine.inbox.list() == []


@pytest.mark.parametrize("deep", [False, True])
async def test_a_retry_keeps_the_question_for_which_others_wait(engine: Engine, deep: bool) -> None:
    parent = await running(engine, budget=Budget(tokens=10))
    await engine.spawn(parent, "c", new("child"))
    child = (await claim_one(engine)).fence
    await engine.used(child, usage(11))
    await stopped(engine, child)
    await engine.fail(parent, failure("syntax"))
    await engine.retry(parent.task, cascade=deep)
    await engine.inbox.answer(await asked(engine), approve=True)
    assert await status(engine, child.task) == "PENDING"


async def test_a_rerun_has_the_same_budget(engine: Engine) -> None:
    fence = await running(engine, budget=Budget(cost_usd=2.5))
    await engine.complete(fence)
    assert (await engine.show((await engine.rerun(fence.task)).id)).budget == {
        "tokens": None,
        "costUsd": 2.5,
    }


async def test_a_child_with_a_budget_of_its_own_counts_for_the_one_above_it(
    engine: Engine,
) -> None:
    parent = await running(engine, budget=Budget(tokens=100))
    await engine.spawn(parent, "c", new("child", budget=Budget(tokens=1000)))
    work = await claim_one(engine)
    await engine.used(work.fence, usage(101))
    await stopped(engine, work.fence)
    assert (await engine.inbox.show(await asked(engine))).task == parent.task


async def test_a_yes_reaches_a_task_that_was_paused_meanwhile(engine: Engine) -> None:
    fence = await running(engine, budget=Budget(tokens=1))
    await engine.used(fence, usage())
    await stopped(engine, fence)
    await engine.pause(fence.task)
    await engine.inbox.answer(await asked(engine), approve=True)
    assert await status(engine, fence.task) == "PAUSED"
    await engine.resume(fence.task)
    assert await status(engine, fence.task) == "PENDING"


async def test_people_are_asked_though_they_have_paused_the_task(engine: Engine) -> None:
    """It goes over its budget before it has stopped."""
    fence = await running(engine, budget=Budget(tokens=1))
    await engine.pause(fence.task)
    await engine.used(fence, usage())
    assert await asked(engine)
    await stopped(engine, fence)
    assert (await engine.show(fence.task)).waiting_for == "budget"


def test_a_budget_is_over_beyond_it() -> None:
    assert not is_over(Budget(tokens=10), Spent(input_tokens=5, output_tokens=5, cost_usd=99))
    assert is_over(Budget(tokens=10), Spent(input_tokens=6, output_tokens=5))
    assert is_over(Budget(tokens=10, cost_usd=1.0), Spent(cost_usd=1.01))


def test_a_raised_budget_is_at_least_twice_what_is_used() -> None:
    assert raised(Budget(tokens=10), Spent(input_tokens=30), None) == Budget(tokens=60)
    assert raised(Budget(cost_usd=4.0), Spent(cost_usd=1), None) == Budget(cost_usd=8.0)


async def test_what_others_have_used_is_not_counted(engine: Engine, raw: Raw) -> None:
    """Their row says that their task is part of one of ours."""
    elsewhere = Engine(engine.store, workspace=await raw.workspace(7), actor="tester")
    mine = await running(engine, budget=Budget(tokens=100))
    theirs = await running(elsewhere)
    await below(raw, theirs.task, mine.task)
    await elsewhere.used(theirs, usage(1000))
    await engine.used(mine, usage(1))
    assert (await row_of(engine, mine.task)).hold is None


async def test_a_report_and_an_answer_at_once_leave_nobody_waiting(
    postgres_engine: Engine, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The report stops one task more while the answer lets all go on that it sees."""
    engine, real = postgres_engine, spending._stop
    parent = await running(engine, budget=Budget(tokens=100))
    for key in "ab":
        await engine.spawn(parent, key, new(key))
    one, two = [work.fence for work in await claim_all(engine)]
    await engine.used(one, usage(101))
    await stopped(engine, one)

    def slow(*args: Any) -> Script[None]:
        yield from real(*args)
        yield Statement("workspace_lock", {"workspace": engine.workspace})

    monkeypatch.setattr(spending, "_stop", slow)
    report = engine.used(two, usage(1))
    early = refusal(engine.inbox.answer(await asked(engine), approve=True))
    async with in_line(postgres_url, "select 1 from workspace", report, early):
        await stopped(engine, two)
        await engine.inbox.answer(await asked(engine), approve=True)
        assert await status(engine, two.task) == "PENDING"
