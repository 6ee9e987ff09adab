"""Budgets: a task that exceeds its budget is paused, and people are asked."""

from typing import Any

import pytest
from tests.contract.conftest import (
    ManualClock,
    Raw,
    claim_all,
    claim_one,
    failure,
    new,
    refusal,
    row_of,
    running,
    status,
)
from tests.contract.limits.test_usage import KILLED, asked, below, stopped, usage
from tests.contract.store.test_prune_races import in_line

from tenuto.engine.engine import Engine
from tenuto.engine.limits import budgets
from tenuto.model.errors import Conflict
from tenuto.model.limits.budgets import Budget, UsageTotal, higher_budget, is_exceeded
from tenuto.store.protocol import Script, Statement


async def test_exceeded_budget_pauses_the_task_and_opens_an_inbox_item(engine: Engine) -> None:
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


async def test_attempt_over_its_budget_cannot_spawn_or_record_steps(
    engine: Engine, raw: Raw
) -> None:
    """Only the last checkpoint is kept, for when somebody gives more."""
    fence = await running(engine, budget=Budget(tokens=100))
    await engine.used(fence, usage(101))
    assert await refusal(engine.spawn(fence, "child", new())) == "pause_requested"
    assert await refusal(engine.record_step(fence, "step", 1)) == "pause_requested"
    await engine.checkpoint(fence, {"page": 7})
    assert await raw.count("task") == 1
    assert await engine.steps(fence.task) == {}


async def test_approval_doubles_the_budget_and_resumes_the_task(engine: Engine) -> None:
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


async def test_rejection_cancels_the_task(engine: Engine) -> None:
    fence = await running(engine, budget=Budget(tokens=1))
    await engine.used(fence, usage())
    await stopped(engine, fence)
    item = await asked(engine)
    assert await refusal(engine.inbox.dismiss(item, "seen")) == "out_of_turn"
    await engine.inbox.answer(item, approve=False)
    assert await status(engine, fence.task) == "CANCELLED"
    assert await engine.inbox.list() == []


@pytest.mark.parametrize("approve", [True, False])
async def test_budget_answer_reaches_a_paused_task_after_resume(
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
async def test_approval_resumes_all_tasks_that_wait_for_the_budget(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, others: int
) -> None:
    """However many more they are than one transaction lets go on."""
    monkeypatch.setattr(budgets, "MAX_RESUMED", 2)
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
    while await engine.flows.run_deferred_once():
        pass
    assert {await status(engine, fence.task) for fence in fences} == {"PENDING"}


async def test_late_approval_resumes_no_task_once_the_budget_is_exceeded_again(
    engine: Engine, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budgets, "MAX_RESUMED", 2)
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
    while await engine.flows.run_deferred_once():
        pass
    stands = [await status(engine, fence.task) for fence in fences]
    assert sorted(stands) == ["PENDING", "RUNNING", "WAITING"]
    await stopped(engine, again)
    await engine.inbox.answer(await asked(engine), approve=True)
    while await engine.flows.run_deferred_once():
        pass
    assert {await status(engine, fence.task) for fence in fences} == {"PENDING"}


async def test_answer_before_the_session_stopped_is_refused(engine: Engine) -> None:
    fence = await running(engine, budget=Budget(tokens=1))
    await engine.used(fence, usage())
    with pytest.raises(Conflict, match="still being stopped"):
        await engine.inbox.answer(await asked(engine), approve=True)
    await stopped(engine, fence)
    await engine.inbox.answer(await asked(engine), approve=True)
    assert await status(engine, fence.task) == "PENDING"


async def test_exceeded_budget_pauses_the_task_of_a_lost_worker(
    engine: Engine, clock: ManualClock
) -> None:
    fence = await running(engine, budget=Budget(tokens=1))
    await engine.used(fence, usage())
    clock.advance(3600)
    await engine.maintenance.expire_once("reaper")
    assert await status(engine, fence.task) == "WAITING"
    await engine.inbox.answer(await asked(engine), approve=True)
    assert await status(engine, fence.task) == "PENDING"


async def test_budget_covers_subtasks(engine: Engine) -> None:
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


async def test_subtask_can_have_a_smaller_budget(engine: Engine) -> None:
    parent = await running(engine, budget=Budget(tokens=1000))
    child = await engine.spawn(parent, "c", new("child", budget=Budget(tokens=10)))
    work = await claim_one(engine)
    await engine.used(work.fence, usage(11))
    await stopped(engine, work.fence)
    assert (await engine.inbox.show(await asked(engine))).task == child
    await engine.inbox.answer(await asked(engine), approve=False)
    assert await status(engine, child) == "CANCELLED"
    assert await status(engine, parent.task) == "RUNNING"


async def test_rejection_cancels_the_whole_tree(engine: Engine) -> None:
    parent = await running(engine, budget=Budget(tokens=10))
    child = await engine.spawn(parent, "c", new("child"))
    work = await claim_one(engine)
    await engine.used(work.fence, usage(11))
    await stopped(engine, work.fence)
    await engine.inbox.answer(await asked(engine), approve=False)
    assert await status(engine, child) == "CANCELLED"
    await engine.confirm_cancel(parent, KILLED)
    assert await status(engine, parent.task) == "CANCELLED"


async def test_result_of_a_task_over_its_budget_is_stored(engine: Engine) -> None:
    fence = await running(engine, budget=Budget(tokens=1))
    await engine.complete(fence, {"ok": 1}, usage=usage(100))
    assert await status(engine, fence.task) == "COMPLETED"
    assert await engine.inbox.list() == []


async def test_cancel_closes_the_budget_item(
    engine: Engine,
) -> None:
    fence = await running(engine, budget=Budget(tokens=1))
    await engine.used(fence, usage())
    await stopped(engine, fence)
    await engine.cancel(fence.task)
    assert await engine.inbox.list() == []
    await engine.retry(fence.task)
    assert await status(engine, fence.task) == "PENDING"


async def test_lost_worker_leaves_no_budget_item_of_a_cancelled_task(
    engine: Engine, clock: ManualClock
) -> None:
    fence = await running(engine, budget=Budget(tokens=1))
    await engine.used(fence, usage())
    await engine.cancel(fence.task)
    clock.advance(3600)
    await engine.maintenance.expire_once("reaper")
    assert await status(engine, fence.task) == "CANCELLED"
    assert await engine.inbox.list() == []


@pytest.mark.parametrize("deep", [False, True])
async def test_retry_keeps_the_budget_item_that_subtasks_wait_for(
    engine: Engine, deep: bool
) -> None:
    parent = await running(engine, budget=Budget(tokens=10))
    await engine.spawn(parent, "c", new("child"))
    child = (await claim_one(engine)).fence
    await engine.used(child, usage(11))
    await stopped(engine, child)
    await engine.fail(parent, failure("syntax"))
    await engine.retry(parent.task, cascade=deep)
    await engine.inbox.answer(await asked(engine), approve=True)
    assert await status(engine, child.task) == "PENDING"


async def test_rerun_has_the_same_budget(engine: Engine) -> None:
    fence = await running(engine, budget=Budget(cost_usd=2.5))
    await engine.complete(fence)
    assert (await engine.show((await engine.rerun(fence.task)).id)).budget == {
        "tokens": None,
        "costUsd": 2.5,
    }


async def test_subtask_with_its_own_budget_counts_for_its_parents_budget(
    engine: Engine,
) -> None:
    parent = await running(engine, budget=Budget(tokens=100))
    await engine.spawn(parent, "c", new("child", budget=Budget(tokens=1000)))
    work = await claim_one(engine)
    await engine.used(work.fence, usage(101))
    await stopped(engine, work.fence)
    assert (await engine.inbox.show(await asked(engine))).task == parent.task


async def test_approval_reaches_a_task_paused_meanwhile(engine: Engine) -> None:
    fence = await running(engine, budget=Budget(tokens=1))
    await engine.used(fence, usage())
    await stopped(engine, fence)
    await engine.pause(fence.task)
    await engine.inbox.answer(await asked(engine), approve=True)
    assert await status(engine, fence.task) == "PAUSED"
    await engine.resume(fence.task)
    assert await status(engine, fence.task) == "PENDING"


async def test_exceeded_budget_of_a_paused_task_opens_an_inbox_item(engine: Engine) -> None:
    """The task exceeds its budget before it has stopped."""
    fence = await running(engine, budget=Budget(tokens=1))
    await engine.pause(fence.task)
    await engine.used(fence, usage())
    assert await asked(engine)
    await stopped(engine, fence)
    assert (await engine.show(fence.task)).waiting_for == "budget"


def test_budget_is_exceeded_only_beyond_its_limit() -> None:
    assert not is_exceeded(
        Budget(tokens=10), UsageTotal(input_tokens=5, output_tokens=5, cost_usd=99)
    )
    assert is_exceeded(Budget(tokens=10), UsageTotal(input_tokens=6, output_tokens=5))
    assert is_exceeded(Budget(tokens=10, cost_usd=1.0), UsageTotal(cost_usd=1.01))


def test_raised_budget_is_at_least_twice_the_usage() -> None:
    assert higher_budget(Budget(tokens=10), UsageTotal(input_tokens=30), None) == Budget(tokens=60)
    assert higher_budget(Budget(cost_usd=4.0), UsageTotal(cost_usd=1), None) == Budget(cost_usd=8.0)


async def test_usage_of_other_tasks_does_not_count(engine: Engine, raw: Raw) -> None:
    """Their row says that their task is part of one of ours."""
    elsewhere = Engine(engine.store, workspace=await raw.workspace(7), actor="tester")
    own = await running(engine, budget=Budget(tokens=100))
    theirs = await running(elsewhere)
    await below(raw, theirs.task, own.task)
    await elsewhere.used(theirs, usage(1000))
    await engine.used(own, usage(1))
    assert (await row_of(engine, own.task)).hold is None


async def test_concurrent_report_and_answer_leave_no_task_waiting(
    postgres_engine: Engine, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The report stops one task more while the answer lets all go on that it sees."""
    engine, real = postgres_engine, budgets._request_pause
    parent = await running(engine, budget=Budget(tokens=100))
    for key in "ab":
        await engine.spawn(parent, key, new(key))
    one, two = [work.fence for work in await claim_all(engine)]
    await engine.used(one, usage(101))
    await stopped(engine, one)

    def slow(*args: Any) -> Script[None]:
        yield from real(*args)
        yield Statement("workspace_lock", {"workspace": engine.workspace})

    monkeypatch.setattr(budgets, "_request_pause", slow)
    report = engine.used(two, usage(1))
    early = refusal(engine.inbox.answer(await asked(engine), approve=True))
    async with in_line(postgres_url, "select 1 from workspace", report, early):
        await stopped(engine, two)
        await engine.inbox.answer(await asked(engine), approve=True)
        assert await status(engine, two.task) == "PENDING"
