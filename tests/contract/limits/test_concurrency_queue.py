"""Concurrency keys: tasks that queue again or are passed by, and more than one batch of them."""

from datetime import timedelta

import pytest
from tests.contract.conftest import ManualClock, claim_one, new, status
from tests.contract.limits.test_concurrency import KILLED, submit, work_off

from tenuto.engine.engine import Engine
from tenuto.engine.limits import concurrency
from tenuto.model.limits.concurrency import Concurrency


async def test_resumed_cancel_old_task_cancels_neither_itself_nor_newer_ones(
    engine: Engine,
) -> None:
    await submit(engine)
    fence = (await claim_one(engine)).fence
    second = await submit(engine, policy="cancel_old")
    third = await submit(engine)
    await engine.pause(second)
    await engine.resume(second)
    await work_off(engine)
    assert [await status(engine, task) for task in (second, third)] == ["WAITING"] * 2
    await engine.confirm_cancel(fence, KILLED)
    assert [await status(engine, task) for task in (second, third)] == ["PENDING", "WAITING"]


async def test_cancel_old_task_replaces_any_number_of_queued_tasks(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(concurrency, "MAX_GRANTS", 2)
    before = [await submit(engine) for _ in range(12)]
    last = await submit(engine, policy="cancel_old")
    await work_off(engine)
    assert {await status(engine, task) for task in before} == {"CANCELLED"}
    assert await status(engine, last) == "PENDING"


async def test_cancel_new_task_runs_while_a_permit_is_free(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(concurrency, "MAX_GRANTS", 2)
    cancel_new = Concurrency("deploy", limit=5, policy="cancel_new")
    submitted = await engine.submit_many(
        [new(f"task {n}", concurrency=cancel_new) for n in range(6)]
    )
    await work_off(engine)
    ends = [await status(engine, item.id) for item in submitted]
    assert ends == [*["PENDING"] * 5, "CANCELLED"]


@pytest.mark.parametrize("blocked", [False, True])
async def test_passed_by_task_does_not_delay_the_queue(engine: Engine, blocked: bool) -> None:
    """The first in line has the lower limit."""
    await submit(engine)
    second, third = await submit(engine, limit=1), await submit(engine, limit=2)
    assert await status(engine, third) == "WAITING"
    if blocked:
        await engine.submit(new(blocks=[str(second)]))
    else:
        await engine.pause(second)
    assert await status(engine, third) == "PENDING"


async def test_timer_of_a_cancelled_attempt_grants_no_permit(
    engine: Engine, clock: ManualClock
) -> None:
    first = await submit(engine)
    fence = (await claim_one(engine)).fence
    await engine.park(fence, "input", clock.now() + timedelta(minutes=1))
    await engine.cancel(first)
    await submit(engine)
    await engine.retry(first)
    clock.advance(120)
    await engine.maintenance.promote_once("promoter")
    assert await status(engine, first) == "WAITING"
