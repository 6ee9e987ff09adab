"""Retention: finished tasks are archived and pruned, unused lanes are deleted."""

import pytest
from tests.contract.conftest import (
    Another,
    ManualClock,
    Raw,
    claim_all,
    claim_one,
    failure,
    in_status,
    new,
    running,
)

from tenuto.engine.engine import Engine
from tenuto.model.tasks.task import TERMINAL, Fence, Status


async def test_task_finished_long_ago_is_archived(engine: Engine, clock: ManualClock) -> None:
    old = await running(engine)
    await engine.complete(old)
    clock.advance(days=6)
    recent = await running(engine)
    await engine.complete(recent)
    alive = await engine.submit(new())
    assert await engine.maintenance.archive_once("archiver") == 0
    clock.advance(days=1, seconds=1)
    assert await engine.maintenance.archive_once("archiver") == 1
    assert await engine.maintenance.archive_once("archiver") == 0
    view = await engine.show(old.task)
    assert (view.status, view.archived_at) == ("COMPLETED", clock.now())
    assert (await engine.show(recent.task)).archived_at is None
    assert (await engine.show(alive.id)).archived_at is None


async def test_task_with_any_outcome_is_archived(engine: Engine, clock: ManualClock) -> None:
    fences = [await in_status(engine, ended) for ended in sorted(TERMINAL)]
    clock.advance(days=8)
    assert await engine.maintenance.archive_once("archiver") == len(TERMINAL)
    for fence in fences:
        assert (await engine.show(fence.task)).archived_at == clock.now()


async def aged(engine: Engine, clock: ManualClock, days: float) -> Fence:
    """A completed task with everything a task can carry, archived and that old."""
    fence = await running(engine, prompt="p", input={"i": 1}, env={"A": "1"}, metadata={"m": 1})
    await engine.checkpoint(fence, {"c": 1})
    await engine.record_step(fence, "s", 1)
    await engine.complete(fence, {"o": 1}, "s")
    clock.advance(days=8)
    assert await engine.maintenance.archive_once("archiver") == 1
    clock.advance(days=days - 8)
    return fence


async def test_old_payload_is_deleted_and_the_task_stays(
    engine: Engine, clock: ManualClock, raw: Raw
) -> None:
    fence = await aged(engine, clock, 29.9)
    await engine.maintenance.prune_once()
    assert (await engine.show(fence.task)).input == {"i": 1}
    clock.advance(days=0.2)
    assert await engine.maintenance.prune_once() == 1
    assert await engine.maintenance.prune_once() == 0
    view = await engine.show(fence.task)
    assert (view.title, view.status) == ("a task", "COMPLETED")
    assert [view.prompt, view.input, view.metadata, view.output, view.checkpoint] == [None] * 5
    for table in ("task_output", "checkpoint", "task_step", "transcript"):
        assert await raw.count(table) == 0
    assert len(await engine.events(fence.task)) == 4


async def test_pruned_audit_trail_passes_the_audit(engine: Engine, clock: ManualClock) -> None:
    await aged(engine, clock, 366)
    await engine.maintenance.prune_once()
    assert await engine.maintenance.audit() == []


async def test_unused_lane_is_deleted_and_created_again(
    engine: Engine, clock: ManualClock, raw: Raw, another: Another
) -> None:
    fence = await running(engine)
    await engine.complete(fence)
    clock.advance(days=1, seconds=1)
    pruned = await engine.maintenance.prune_once()
    assert await raw.count("lane") == 0
    assert pruned == 1
    again = await engine.submit(new())
    assert (await claim_one(engine)).fence.task == again.id


@pytest.mark.parametrize("of", sorted(set(Status) - TERMINAL))
async def test_lane_in_use_is_not_deleted(
    engine: Engine, clock: ManualClock, raw: Raw, of: Status
) -> None:
    await in_status(engine, of)
    clock.advance(days=9)
    await engine.maintenance.prune_once()
    assert await raw.count("lane") == 1


@pytest.mark.parametrize("mode", ["retry", "rerun"])
async def test_task_of_a_deleted_lane_can_be_rerun(
    engine: Engine, clock: ManualClock, another: Another, mode: str
) -> None:
    fence = await running(engine)
    await engine.fail(fence, failure("syntax"))
    clock.advance(days=2)
    await engine.maintenance.prune_once()
    again = fence.task
    if mode == "retry":
        await engine.retry(fence.task)
    else:
        again = (await engine.rerun(fence.task)).id
    async with another() as second:
        assert [work.fence.task for work in await claim_all(second)] == [again]
