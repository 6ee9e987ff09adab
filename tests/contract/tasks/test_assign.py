"""Tasks assigned to an agent by a user, on both databases."""

from uuid import uuid4

from tests.contract.conftest import (
    ManualClock,
    claim_all,
    claim_one,
    new,
    profile,
    refusal,
    running,
    status,
)

from tenuto.engine.engine import Engine


async def test_assigned_task_is_claimed_by_its_agent_only(engine: Engine) -> None:
    own = await engine.register_agent(profile(name="mine"))
    other = await engine.register_agent(profile(id=uuid4(), name="other"))
    task = (await engine.submit(new())).id
    await engine.assign(task, other.id)
    assert await claim_all(engine) == []
    assert (await engine.show(task)).target_agent == other.id
    [work] = await engine.claim(other, "host:2:worker", 5)
    assert work.fence.task == task
    assert own.id != other.id


async def test_running_task_is_reassigned_only_if_forced(
    engine: Engine, clock: ManualClock
) -> None:
    other = await engine.register_agent(profile(id=uuid4(), name="other"))
    fence = await running(engine)
    assert await refusal(engine.assign(fence.task, other.id)) == "out_of_turn"
    await engine.assign(fence.task, other.id, take=True)
    assert await refusal(engine.complete(fence, "too late")) == "lease_lost"
    clock.advance(1)
    await engine.maintenance.promote_once("promoter")
    assert await claim_all(engine) == []
    [work] = await engine.claim(other, "host:2:worker", 5)
    assert (work.fence.task, work.fence.attempt) == (fence.task, 2)
    await engine.complete(work.fence)


async def test_assignment_of_a_task_can_be_removed(engine: Engine) -> None:
    other = await engine.register_agent(profile(id=uuid4(), name="other"))
    task = (await engine.submit(new(target_agent=other.id))).id
    assert await claim_all(engine) == []
    await engine.assign(task, None)
    assert (await claim_one(engine)).fence.task == task


async def test_invalid_assignment_is_refused(engine: Engine) -> None:
    task = (await engine.submit(new())).id
    assert await refusal(engine.assign(task, uuid4())) == "not_found"
    assert await refusal(engine.assign(uuid4(), None)) == "not_found"
    await engine.cancel(task)
    assert await refusal(engine.assign(task, None)) == "out_of_turn"
    assert await status(engine, task) == "CANCELLED"
