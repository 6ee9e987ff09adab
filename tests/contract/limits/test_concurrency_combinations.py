"""Concurrency keys when tasks are blocked, retried or superseded, and beside other workspaces."""

import pytest
from tests.contract.conftest import (
    ManualClock,
    Raw,
    claim_all,
    claim_one,
    failure,
    new,
    refusal,
    status,
)
from tests.contract.limits.test_concurrency import submit, work_off

from tenuto.engine.engine import Engine
from tenuto.engine.limits import concurrency
from tenuto.engine.limits.concurrency import PermitRepair
from tenuto.model.limits.concurrency import Concurrency


async def test_subtask_with_the_key_of_its_grandparent_is_refused(engine: Engine) -> None:
    """The one between has a key of its own."""
    await submit(engine)
    top = await claim_one(engine)
    await engine.spawn(top.fence, "child", new(concurrency=Concurrency("other")))
    child = await claim_one(engine)
    same = new("same", concurrency=Concurrency("deploy"))
    assert await refusal(engine.spawn(child.fence, "below", same)) == "invalid_value"


async def test_older_tasks_continue_after_their_replacement_finished(
    engine: Engine, raw: Raw, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The replacement is cancelled before all tasks that it replaces are."""
    monkeypatch.setattr(concurrency, "MAX_GRANTS", 2)
    old = [await submit(engine) for _ in range(6)]
    newer = await submit(engine, policy="cancel_old")
    left = [task for task in old if await status(engine, task) != "CANCELLED"]
    assert 0 < len(left) < len(old)
    await engine.cancel(newer)
    await work_off(engine)
    assert [await status(engine, task) for task in left] == [
        "PENDING",
        *["WAITING"] * (len(left) - 1),
    ]


async def test_lost_permit_is_repaired_beside_other_workspaces(
    engine: Engine, raw: Raw, clock: ManualClock
) -> None:
    elsewhere = Engine(engine.store, workspace=await raw.workspace(7), actor="tester")
    await submit(elsewhere)
    await submit(engine)
    second = await submit(engine)
    await raw.execute(
        f"delete from task_turn where held = true and workspace = '{engine.workspace}'"
    )
    clock.advance(120)
    assert await PermitRepair(engine.system).recount_once("mender") == 1
    assert await status(engine, second) == "PENDING"


async def test_retried_task_queues_behind_all_others(engine: Engine) -> None:
    first = await submit(engine)
    second = await submit(engine)
    third = await submit(engine)
    await engine.fail((await claim_one(engine)).fence, failure("syntax"))
    await engine.retry(first)
    order = []
    while claimed := await claim_all(engine):
        order += [work.fence.task for work in claimed]
        for work in claimed:
            await engine.complete(work.fence)
    assert order == [second, third, first]


async def test_task_blocked_while_queued_is_passed_by(engine: Engine) -> None:
    await submit(engine)
    second, third = await submit(engine), await submit(engine)
    holder = await claim_one(engine)
    blocker = (await engine.submit(new("blocker", blocks=[str(second)]))).id
    await engine.complete(holder.fence)
    assert await status(engine, third) == "PENDING"
    claimed = {work.fence.task: work.fence for work in await claim_all(engine)}
    await engine.complete(claimed[blocker])
    assert await status(engine, second) == "WAITING"
    await engine.complete(claimed[third])
    assert await status(engine, second) == "PENDING"


async def test_finished_dependency_releases_its_permit_and_its_dependent(engine: Engine) -> None:
    first, second = await submit(engine), await submit(engine)
    after = (await engine.submit(new(depends_on=[str(first)]))).id
    await engine.complete((await claim_one(engine)).fence)
    assert [await status(engine, task) for task in (second, after)] == ["PENDING"] * 2
