"""What is tried again after its circumstances have changed still comes to an end."""

import pytest
from tests.contract.conftest import Raw, claim_all, failure, new, refusal, status
from tests.contract.flowing import WORKER, flow_status, group, start, task, worked

from tenuto.engine.engine import Engine
from tenuto.model.matching import AgentProfile


async def test_a_task_tried_again_waits_only_for_what_has_not_ended(
    engine: Engine, agent: AgentProfile
) -> None:
    """What it waited for ended while it was cancelled."""
    needed = await engine.submit(new("a"))
    waiting = await engine.submit(new("b", depends_on=[str(needed.id)]))
    await engine.cancel(waiting.id)
    assert await worked(engine, agent) == ["a"]
    await engine.retry(waiting.id)
    assert await worked(engine, agent) == ["b"]


async def test_a_task_whose_dependency_failed_is_not_tried_again_alone(engine: Engine) -> None:
    """It would wait for ever: nobody tells it of an end that has been."""
    needed = await engine.submit(new("a"))
    waiting = await engine.submit(new("b", depends_on=[str(needed.id)]))
    [work] = await claim_all(engine)
    await engine.fail(work.fence, failure(retryable=False))
    assert await status(engine, waiting.id) == "FAILED"
    assert await refusal(engine.retry(waiting.id)) == "out_of_turn"
    await engine.retry(needed.id, cascade=True)
    assert await status(engine, waiting.id) == "WAITING"


async def test_a_cancelled_flow_stays_cancelled(engine: Engine, agent: AgentProfile) -> None:
    flow = await start(engine, "g", group("g", "a", "b", order="parallel"), task("a"), task("b"))
    [work, _] = await engine.claim(agent, WORKER, 2)
    await engine.flows.cancel(flow)
    await engine.confirm_cancel(work.fence, {"state": "killed"})
    await engine.retry(work.fence.task, cascade=True)
    assert await flow_status(engine, flow) == "CANCELLED"


@pytest.mark.parametrize("cascade", [True, False])
async def test_a_child_of_a_sequence_tried_again_does_not_wait_for_a_turn_that_was(
    engine: Engine, agent: AgentProfile, cascade: bool
) -> None:
    """One was cancelled before its turn; so the sequence failed, and the one at work went, too."""
    flow = await start(engine, "g", group("g", "a", "b", "c"), task("a"), task("b"), task("c"))
    [work] = await engine.claim(agent, WORKER, 1)
    await engine.fail(work.fence, failure())
    later = next(each.id for each in (await engine.list()).tasks if each.title == "b")
    await engine.cancel(later)
    await engine.retry(later, cascade=cascade)
    await worked(engine, agent)
    assert await status(engine, later) == "COMPLETED"
    assert await flow_status(engine, flow) in ("COMPLETED", "FAILED")


async def test_what_waits_for_two_failures_is_revived_with_the_second(
    engine: Engine, agent: AgentProfile
) -> None:
    needed = [await engine.submit(new(title)) for title in ("a", "b")]
    ids = [str(each.id) for each in needed]
    waiting = await engine.submit(new("c", depends_on=ids))
    for work in await claim_all(engine):
        await engine.fail(work.fence, failure(retryable=False))
    await engine.retry(needed[0].id, cascade=True)
    assert await worked(engine, agent) == ["a"]
    assert await status(engine, waiting.id) == "FAILED"
    await engine.retry(needed[1].id, cascade=True)
    assert await worked(engine, agent) == ["b", "c"]


async def test_what_was_tried_again_alone_counts_once_its_group_runs_again(
    engine: Engine, agent: AgentProfile
) -> None:
    flow = await start(engine, "g", group("g", "a", "b", order="parallel"), task("a"), task("b"))
    works = {work.key: work for work in await engine.claim(agent, WORKER, 2)}
    for work in works.values():
        await engine.fail(work.fence, failure(retryable=False))
    assert await flow_status(engine, flow) == "FAILED"
    await engine.retry(works["a"].fence.task)
    await engine.retry(works["b"].fence.task, cascade=True)
    assert sorted(await worked(engine, agent)) == ["a", "b"]
    assert await flow_status(engine, flow) == "COMPLETED"


async def test_an_end_that_was_undone_is_not_told_late(
    engine: Engine, agent: AgentProfile, raw: Raw
) -> None:
    """Children were skipped, and run after all, before what was left of the first end is done."""
    keys = [f"c{number}" for number in range(600)]
    await start(engine, "g", group("g", *keys), *(task(key) for key in keys))
    while await engine.flows.work_once():
        pass
    [work] = await engine.claim(agent, WORKER, 1)
    await engine.fail(work.fence, failure(retryable=False))
    await engine.retry(work.fence.task, cascade=True)
    for _ in range(3):
        [work] = await engine.claim(agent, WORKER, 1)
        await engine.complete(work.fence)
    assert len(await worked(engine, agent)) == 597
    counts = await raw.fetch("select open, succeeded, failed, status from task_group")
    assert [tuple(row) for row in counts] == [(0, 600, 0, "COMPLETED")]
