"""Results are kept as long as an unfinished task can read them."""

from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest
from tests.contract.conftest import START, ManualClock, claim_all, claim_one, new, refusal, running
from tests.contract.flows.helpers import start, task

from tenuto.engine.engine import Engine
from tenuto.model.flows.definition import Approval
from tenuto.model.tasks.task import Fence

LATER = START + timedelta(days=60)
MADE = {"n": 1}


async def in_a_flow(engine: Engine, *, paused: bool = False) -> tuple[UUID, Any]:
    """A task that is done, and how to see what is made of its result."""
    flow = await start(
        engine,
        "a",
        task("a", next="ok"),
        task("ok", control=Approval(message="?"), next="b"),
        task("b", input={"$from": "a"}),
    )
    done = (await claim_one(engine)).fence
    await engine.complete(done, MADE)
    if paused:
        await engine.flows.pause(flow)

    async def seen() -> Any:
        if paused:
            await engine.flows.resume(flow)
        [item] = await engine.inbox.list()
        await engine.inbox.answer(item.id, approve=True)
        return (await claim_one(engine)).input

    return done.task, seen


async def in_a_paused_flow(engine: Engine) -> tuple[UUID, Any]:
    return await in_a_flow(engine, paused=True)


async def waited_for(engine: Engine) -> tuple[UUID, Any]:
    done = await running(engine)
    await engine.submit(
        new(depends_on=[str(done.task)], input={"$from": str(done.task)}, run_at=LATER)
    )
    await engine.complete(done, MADE)

    async def seen() -> Any:
        return (await claim_one(engine)).input

    return done.task, seen


async def a_child(engine: Engine) -> tuple[UUID, Any]:
    parent = await running(engine)
    child = await engine.spawn(parent, "c", new())
    await engine.spawn(parent, "d", new(run_at=LATER))
    await engine.complete((await claim_one(engine)).fence, MADE)
    assert (await engine.wait(parent)).parked

    async def seen() -> Any:
        await engine.complete((await claim_one(engine)).fence)
        fence: Fence = (await claim_one(engine)).fence
        return (await engine.wait(fence)).children[0].output

    return child, seen


@pytest.mark.parametrize("created", [in_a_flow, in_a_paused_flow, waited_for, a_child])
async def test_result_is_kept_while_an_unfinished_task_can_read_it(
    engine: Engine, clock: ManualClock, created: Any
) -> None:
    done, seen = await created(engine)
    assert await refusal(engine.erase(done)) == "out_of_turn"
    for days in (8, 60):
        clock.advance(days=days)
        await engine.maintenance.archive_once("archiver")
        await engine.maintenance.prune_once()
    await engine.maintenance.promote_once("promoter")
    assert await seen() == MADE


async def test_result_is_deleted_once_no_task_can_read_it(
    engine: Engine, clock: ManualClock
) -> None:
    done, _ = await waited_for(engine)
    clock.advance(days=61)
    await engine.maintenance.promote_once("promoter")
    work = await claim_one(engine)
    await engine.complete(work.fence)
    await engine.maintenance.archive_once("archiver")
    await engine.maintenance.prune_once()
    assert (await engine.show(done)).output is None
    await engine.erase(done)


async def test_deleted_result_is_reported_as_missing(engine: Engine) -> None:
    done = await running(engine)
    await engine.complete(done, MADE)
    await engine.erase(done.task)
    late = await engine.submit(new(depends_on=[str(done.task)], input={"$from": str(done.task)}))
    assert await claim_all(engine) == []
    assert "no result" in ((await engine.show(late.id)).last_error or "")
