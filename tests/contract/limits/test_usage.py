"""Usage of attempts: counted once, shown everywhere, and bounded by budgets."""

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
    running,
    status,
)
from tests.contract.flows.helpers import group, start, task

from tenuto.engine.engine import Engine
from tenuto.metrics import PROCESS_METRICS
from tenuto.model.errors import Conflict, Invalid
from tenuto.model.flows.definition import Condition, Foreach
from tenuto.model.limits.budgets import Budget, Usage
from tenuto.model.limits.rate_limits import RateLimit
from tenuto.model.tasks.task import Fence

KILLED = {"state": "killed"}


def usage(tokens: int = 100, cost: float = 0.5, **more: Any) -> Usage:
    return Usage(**{"model": "m1", "input_tokens": tokens, "cost_usd": cost, **more})


async def spent(engine: Engine, task: UUID) -> tuple[int, int, float]:
    view = await engine.show(task)
    return view.input_tokens, view.output_tokens, view.cost_usd


async def stopped(engine: Engine, fence: Fence) -> None:
    """Does what a worker does on a stop request."""
    assert (await engine.heartbeat([fence])).held[fence.task].pause
    await engine.confirm_pause(fence, KILLED)


async def asked(engine: Engine) -> UUID:
    """The one question about a budget that is open."""
    [item] = [entry for entry in await engine.inbox.list() if entry.kind == "budget"]
    return item.id


async def test_usage_reports_add_up(engine: Engine, raw: Raw) -> None:
    fence = await running(engine)
    before = (
        PROCESS_METRICS.value("tenuto_tokens_total", model="m1"),
        PROCESS_METRICS.value("tenuto_cost_usd_total"),
    )
    await engine.used(fence, usage(100, 0.5, output_tokens=10))
    await engine.used(fence, usage(200, 0.25))
    await engine.used(fence, Usage(model="m2", output_tokens=7))
    assert await spent(engine, fence.task) == (300, 17, 0.75)
    [attempt] = await engine.attempts(fence.task)
    assert (attempt.input_tokens, attempt.output_tokens, attempt.cost_usd) == (300, 17, 0.75)
    assert await raw.count("spending") == 2
    assert PROCESS_METRICS.value("tenuto_tokens_total", model="m1") - before[0] == 310
    assert PROCESS_METRICS.value("tenuto_cost_usd_total") - before[1] == pytest.approx(0.75)


async def test_usage_is_stored_per_attempt(engine: Engine) -> None:
    first = await running(engine)
    await engine.used(first, usage(100, 1))
    second = await reclaimed(engine, first)
    await engine.used(second, usage(10, 0.5))
    attempts = await engine.attempts(first.task)
    assert [(attempt.input_tokens, attempt.cost_usd) for attempt in attempts] == [
        (100, 1),
        (10, 0.5),
    ]
    assert await spent(engine, first.task) == (110, 0, 1.5)


async def below(raw: Raw, task: UUID, parent: UUID) -> None:
    """Stores a parent for a task that no submit could name."""
    await raw.execute(f"update task_body set parent = '{parent}' where task = '{task}'")


async def test_usage_of_another_workspace_does_not_count_against_a_budget(
    engine: Engine, raw: Raw
) -> None:
    own = await running(engine, budget=Budget(tokens=1000))
    other = Engine(engine.system.store, workspace=await raw.workspace(7))
    agent = profile(id=uuid4(), workspace=other.workspace)
    await other.register_agent(agent)
    await other.submit(new())
    [others] = await other.claim(agent, "theirs", 1)
    await below(raw, others.fence.task, own.task)
    await other.used(others.fence, usage(5000))
    await engine.used(own, usage(10))
    assert not (await engine.heartbeat([own])).held[own.task].pause
    assert await engine.inbox.list() == []


async def test_usage_of_an_older_attempt_is_refused(
    engine: Engine, clock: ManualClock, raw: Raw
) -> None:
    first = await running(engine)
    clock.advance(LEASE_S + 1)
    await engine.maintenance.expire_once("reaper")
    assert await refusal(engine.used(first, usage())) == "lease_lost"
    await engine.maintenance.promote_once("promoter")
    second = (await claim_one(engine)).fence
    assert await refusal(engine.used(first, usage())) == "lease_lost"
    assert await refusal(engine.used(Fence(second.task, second.attempt, "x"), usage())) == (
        "lease_lost"
    )
    await engine.complete(second)
    assert await refusal(engine.used(second, usage())) == "lease_lost"
    assert await raw.count("spending") == 0


async def test_numbered_usage_report_counts_once(engine: Engine) -> None:
    fence = await running(engine)
    for number in (1, 1, 2, 2, 1):
        await engine.used(fence, usage(10, 1, number=number))
    assert await spent(engine, fence.task) == (20, 0, 2)


async def test_numbered_usage_report_counts_once_after_other_reports(engine: Engine) -> None:
    fence = await running(engine)
    for number in (3, None, 3):
        await engine.used(fence, usage(10, 1, number=number))
    assert await spent(engine, fence.task) == (20, 0, 2)


async def test_concurrent_usage_reports_are_all_counted(engine: Engine) -> None:
    fence = await running(engine)
    await asyncio.gather(*(engine.used(fence, usage(1, 0.5)) for _ in range(20)))
    assert await spent(engine, fence.task) == (20, 0, 10)


@pytest.mark.parametrize("watched", [False, True])
async def test_usage_with_the_result_counts_once(engine: Engine, watched: bool) -> None:
    fence = await running(engine)
    if watched:
        await engine.submit(new(depends_on=[str(fence.task)]))
    await engine.complete(fence, {"ok": 1}, usage=usage(5, 1))
    await engine.complete(fence, {"ok": 1}, usage=usage(5, 1))
    assert await status(engine, fence.task) == "COMPLETED"
    assert await spent(engine, fence.task) == (5, 0, 1)
    assert len(await claim_all(engine)) == int(watched)


async def test_usage_with_a_refused_result_counts_once(engine: Engine) -> None:
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
async def test_usage_with_a_result_that_a_control_task_cannot_use_counts_once(
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
async def test_usage_with_a_result_that_its_own_control_cannot_use_counts_once(
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


async def test_usage_with_a_failure_counts_once(engine: Engine) -> None:
    fence = await running(engine)
    await engine.fail(fence, failure(), usage=usage(5, 1))
    await engine.fail(fence, failure(), usage=usage(5, 1))
    assert await status(engine, fence.task) == "RETRY_WAIT"
    assert await spent(engine, fence.task) == (5, 0, 1)


async def test_usage_of_a_cancelled_attempt_counts(engine: Engine) -> None:
    fence = await running(engine)
    await engine.cancel(fence.task)
    await engine.used(fence, usage(5, 1))
    assert await refusal(engine.complete(fence, usage=usage(6, 1))) == "cancel_requested"
    assert await spent(engine, fence.task) == (11, 0, 2)


async def test_invalid_usage_is_refused(engine: Engine) -> None:
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


async def test_workspace_usage_is_the_sum_of_its_tasks(
    engine: Engine, clock: ManualClock, raw: Raw
) -> None:
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


async def test_flow_and_group_usage_is_the_sum_of_their_tasks(engine: Engine) -> None:
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


async def test_reported_tokens_count_against_rate_limits(engine: Engine) -> None:
    await engine.rate_limits.put(RateLimit(name="m1", model="m1", tokens_per_minute=1000))
    fence = await running(engine, model="m1")
    await engine.used(fence, usage(300, number=1))
    await engine.used(fence, usage(300, number=1))
    await engine.complete(fence, usage=usage(100, number=2))
    [limit] = await engine.rate_limits.list()
    assert limit.tokens_left == 600


# Budgets.
