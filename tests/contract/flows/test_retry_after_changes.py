"""Retries after dependencies, groups or flows have changed still finish."""

from contextlib import suppress
from datetime import timedelta
from itertools import pairwise

import pytest
from tests.contract.conftest import (
    START,
    ManualClock,
    Raw,
    claim_all,
    failure,
    new,
    refusal,
    running,
    status,
)
from tests.contract.flows.helpers import WORKER, flow_status, group, start, task, worked

from tenuto.engine.engine import Engine
from tenuto.model.agents.matching import AgentProfile
from tenuto.model.errors import Conflict
from tenuto.model.flows.definition import Approval, Condition, Control


async def test_retried_task_waits_only_for_unfinished_dependencies(
    engine: Engine, agent: AgentProfile
) -> None:
    """A dependency finished while the task was cancelled."""
    needed = await engine.submit(new("a"))
    waiting = await engine.submit(new("b", depends_on=[str(needed.id)]))
    await engine.cancel(waiting.id)
    assert await worked(engine, agent) == ["a"]
    await engine.retry(waiting.id)
    assert await worked(engine, agent) == ["b"]


async def test_task_with_a_failed_dependency_is_not_retried_alone(engine: Engine) -> None:
    """The task would wait for ever: its dependency has already finished."""
    needed = await engine.submit(new("a"))
    waiting = await engine.submit(new("b", depends_on=[str(needed.id)]))
    [work] = await claim_all(engine)
    await engine.fail(work.fence, failure(retryable=False))
    assert await status(engine, waiting.id) == "FAILED"
    assert await refusal(engine.retry(waiting.id)) == "out_of_turn"
    await engine.retry(needed.id, cascade=True)
    assert await status(engine, waiting.id) == "WAITING"


async def test_cancelled_flow_stays_cancelled(engine: Engine, agent: AgentProfile) -> None:
    flow = await start(engine, "g", group("g", "a", "b", order="parallel"), task("a"), task("b"))
    [work, _] = await engine.claim(agent, WORKER, 2)
    await engine.flows.cancel(flow)
    await engine.confirm_cancel(work.fence, {"state": "killed"})
    await engine.retry(work.fence.task, cascade=True)
    assert await flow_status(engine, flow) == "CANCELLED"


@pytest.mark.parametrize("cascade", [True, False])
async def test_retried_child_of_a_sequence_does_not_wait_for_a_past_turn(
    engine: Engine, agent: AgentProfile, cascade: bool
) -> None:
    """One was cancelled before its turn; so the sequence failed, and the one at work went, too."""
    flow = await start(engine, "g", group("g", "a", "b", "c"), task("a"), task("b"), task("c"))
    [work] = await engine.claim(agent, WORKER, 1)
    await engine.fail(work.fence, failure())
    later = next(item.id for item in (await engine.list()).tasks if item.title == "b")
    await engine.cancel(later)
    await engine.retry(later, cascade=cascade)
    await worked(engine, agent)
    assert await status(engine, later) == "COMPLETED"
    assert await flow_status(engine, flow) in ("COMPLETED", "FAILED")


async def test_dependent_of_two_failures_is_reopened_with_the_second(
    engine: Engine, agent: AgentProfile
) -> None:
    needed = [await engine.submit(new(title)) for title in ("a", "b")]
    ids = [str(item.id) for item in needed]
    waiting = await engine.submit(new("c", depends_on=ids))
    for work in await claim_all(engine):
        await engine.fail(work.fence, failure(retryable=False))
    await engine.retry(needed[0].id, cascade=True)
    assert await worked(engine, agent) == ["a"]
    assert await status(engine, waiting.id) == "FAILED"
    await engine.retry(needed[1].id, cascade=True)
    assert await worked(engine, agent) == ["b", "c"]


async def test_task_retried_alone_counts_once_its_group_is_reopened(
    engine: Engine, agent: AgentProfile
) -> None:
    flow = await start(engine, "g", group("g", "a", "b", order="parallel"), task("a"), task("b"))
    claimed = {work.key: work for work in await engine.claim(agent, WORKER, 2)}
    for work in claimed.values():
        await engine.fail(work.fence, failure(retryable=False))
    assert await flow_status(engine, flow) == "FAILED"
    await engine.retry(claimed["a"].fence.task)
    await engine.retry(claimed["b"].fence.task, cascade=True)
    assert sorted(await worked(engine, agent)) == ["a", "b"]
    assert await flow_status(engine, flow) == "COMPLETED"


async def test_undone_outcome_is_not_applied_late(
    engine: Engine, agent: AgentProfile, raw: Raw
) -> None:
    """Children were skipped, and run after all, before what was left of the first end is done."""
    keys = [f"c{number}" for number in range(600)]
    await start(engine, "g", group("g", *keys), *(task(key) for key in keys))
    while await engine.flows.run_deferred_once():
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


async def test_deferred_outcome_is_not_undone_twice(
    engine: Engine, agent: AgentProfile, raw: Raw
) -> None:
    """Children fail because of one, and run after all, before their group has counted them."""
    keys = [f"c{number}" for number in range(510)]
    flow = await start(
        engine,
        "g",
        group("g", "a", *keys, order="parallel"),
        task("a"),
        *(task(key, depends_on=["a"]) for key in keys),
    )
    while await engine.flows.run_deferred_once():
        pass
    [work] = await engine.claim(agent, WORKER, 1)
    await engine.fail(work.fence, failure(retryable=False))
    await engine.retry(work.fence.task, cascade=True)
    assert len(await worked(engine, agent)) == 511
    counts = await raw.fetch("select open, succeeded, failed, status from task_group")
    assert [tuple(row) for row in counts] == [(0, 511, 0, "COMPLETED")]
    assert await flow_status(engine, flow) == "COMPLETED"


async def test_subtask_with_a_deferred_outcome_wakes_its_parent(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The child was cancelled with many of its own, and is tried again before anybody knows."""
    monkeypatch.setattr("tenuto.engine.flows.advance.MAX_CASCADE_ROWS", 2)
    needed = await running(engine)
    await engine.complete(needed)
    parent = await running(engine)
    child = await engine.spawn(parent, "c", new(depends_on=[str(needed.task)]))
    [work] = await claim_all(engine)
    for key in "xyz":
        await engine.spawn(work.fence, key, new(run_at=START + timedelta(days=1)))
    assert (await engine.wait(work.fence)).parked
    assert (await engine.wait(parent)).parked
    await engine.cancel(child)
    await engine.retry(child)
    [work] = await claim_all(engine)
    await engine.complete(work.fence)
    while await engine.flows.run_deferred_once():
        pass
    assert work.fence.task == child
    assert await status(engine, parent.task) == "PENDING"


@pytest.mark.parametrize("subject", ["flow", "group", "outer"])
@pytest.mark.parametrize("key", ["a", "ok"])
async def test_task_retried_during_a_pause_waits_for_resume(
    engine: Engine, agent: AgentProfile, subject: str, key: str
) -> None:
    flow = await start(
        engine,
        "outer",
        group("outer", "group", "c", order="parallel"),
        group("group", "a", "ok", "b", order="parallel"),
        task("ok", control=Approval(message="?")),
        *(task(entry) for entry in "abc"),
    )
    [item] = await engine.inbox.list()
    await engine.inbox.answer(item.id, approve=False)
    claimed = {work.key: work for work in await engine.claim(agent, WORKER, 3)}
    for entry in claimed.values():
        if entry.key == "a":
            await engine.fail(entry.fence, failure(retryable=False))
        else:
            await engine.release(entry.fence)
    failed = {entry.title: entry.id for entry in (await engine.list()).tasks}[key]
    flows = engine.flows
    if subject == "flow":
        await flows.pause(flow)
    else:
        await flows.pause_group(await flows.find_open_group(subject))
    await engine.retry(failed)
    assert "a" not in [work.key for work in await engine.claim(agent, WORKER, 5)]
    assert [entry.kind for entry in await engine.inbox.list() if entry.task == failed] == []
    assert await status(engine, failed) == "WAITING"
    if subject == "flow":
        await flows.resume(flow)
    else:
        await flows.resume_group(await flows.find_open_group(subject))
    if key == "ok":
        asked = [entry.kind for entry in await engine.inbox.list() if entry.task == failed]
        assert asked == ["approval"]
    else:
        assert key in await worked(engine, agent)
        assert await status(engine, failed) == "COMPLETED"


async def test_expired_approval_retried_during_a_pause_waits_for_resume(
    engine: Engine, clock: ManualClock
) -> None:
    approval = task("ok", control=Approval(message="?", timeout_s=60))
    flow = await start(engine, "g", group("g", "ok", "b", order="parallel"), approval, task("b"))
    clock.advance(60)
    assert await engine.maintenance.promote_once("promoter") == 1
    [failed] = [item.id for item in (await engine.list()).tasks if item.title == "ok"]
    await engine.flows.pause(flow)
    await engine.retry(failed)
    await engine.maintenance.promote_once("promoter")
    assert await status(engine, failed) == "WAITING"
    await engine.flows.resume(flow)
    assert [item.task for item in await engine.inbox.list()] == [failed]


async def test_retried_sequence_runs_one_child_at_a_time(
    engine: Engine, agent: AgentProfile
) -> None:
    """All its children have run, and none succeeded."""
    first = group("g", "a", "b", "c", join="first_succeeded")
    flow = await start(engine, "g", first, *(task(key) for key in "abc"))
    for _ in "abc":
        [work] = await engine.claim(agent, WORKER, 5)
        await engine.fail(work.fence, failure(retryable=False))
    assert await engine.flows.revive(flow) == 3
    for key in "ab":
        [work] = await engine.claim(agent, WORKER, 5)
        assert work.key == key
        await engine.fail(work.fence, failure(retryable=False))
    assert await worked(engine, agent) == ["c"]
    assert await flow_status(engine, flow) == "COMPLETED"


async def test_retried_sequence_skips_no_child(
    engine: Engine, agent: AgentProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tenuto.engine.tasks.retry.PAGE_ROWS", 2)
    keys = [f"c{number}" for number in range(7)]
    flow = await start(engine, "g", group("g", *keys), *(task(key) for key in keys))
    [work] = await engine.claim(agent, WORKER, 1)
    await engine.fail(work.fence, failure(retryable=False))
    await engine.retry(work.fence.task, cascade=True)
    assert await worked(engine, agent) == keys
    assert await flow_status(engine, flow) == "COMPLETED"


async def test_missed_turn_of_a_child_with_a_failed_dependency_is_not_taken(
    engine: Engine, agent: AgentProfile
) -> None:
    """Of a sequence in which all failed only the last is tried again, which waits for nobody."""
    flow = await start(
        engine,
        "g",
        group("g", "a", "b", "c", join="first_succeeded"),
        task("a"),
        task("b", depends_on=["a"], on_dependency_failure="skip"),
        task("c"),
    )
    for _ in "ac":
        [work] = await engine.claim(agent, WORKER, 5)
        await engine.fail(work.fence, failure(retryable=False))
    await engine.retry(work.fence.task, cascade=True)
    assert await worked(engine, agent) == ["c"]
    assert await flow_status(engine, flow) == "COMPLETED"


async def test_missed_turns_of_dependent_children_are_taken(
    engine: Engine, agent: AgentProfile
) -> None:
    flow = await start(
        engine,
        "g",
        group("g", "a", "b", "c"),
        task("a"),
        task("b"),
        task("c", depends_on=["b"]),
    )
    [work] = await engine.claim(agent, WORKER, 5)
    await engine.fail(work.fence, failure(retryable=False))
    await engine.retry(work.fence.task, cascade=True)
    assert await worked(engine, agent) == ["a", "b", "c"]
    assert await flow_status(engine, flow) == "COMPLETED"


@pytest.mark.parametrize("late", [True, False])
async def test_reopened_child_does_not_wait_for_a_past_turn(
    engine: Engine, agent: AgentProfile, late: bool
) -> None:
    """The sequence of the child continued without it, and has finished or not."""
    flow = await start(
        engine,
        "g",
        group("g", "a", "b", "c", join="all_done"),
        task("a"),
        task("b", depends_on=["a"]),
        task("c"),
    )
    [failed] = await engine.claim(agent, WORKER, 5)
    await engine.fail(failed.fence, failure(retryable=False))
    [last] = await engine.claim(agent, WORKER, 5)
    if late:
        await engine.complete(last.fence)
    await engine.retry(failed.fence.task, cascade=True)
    assert await worked(engine, agent) == ["a", "b"]
    if not late:
        assert await flow_status(engine, flow) == "RUNNING"
        await engine.complete(last.fence)
    assert await flow_status(engine, flow) == "COMPLETED"


async def test_flow_continues_if_one_failed_task_depends_on_another(
    engine: Engine, agent: AgentProfile
) -> None:
    keys = ["a", *(f"x{number}" for number in range(5))]
    chain = [task(key, depends_on=[before]) for before, key in pairwise(keys)]
    flow = await start(engine, "g", group("g", *keys, order="parallel"), task("a"), *chain)
    for item in (await engine.list()).tasks:
        if item.title != "a":
            with suppress(Conflict):
                await engine.cancel(item.id)
    [work] = await engine.claim(agent, WORKER, 1)
    await engine.fail(work.fence, failure(retryable=False))
    await engine.flows.revive(flow)
    assert await worked(engine, agent) == keys
    assert await flow_status(engine, flow) == "COMPLETED"


@pytest.mark.parametrize("bound", [500, 3])
@pytest.mark.parametrize("step", [1, 2, 7])
async def test_flow_continues_from_the_first_causes(
    engine: Engine,
    agent: AgentProfile,
    clock: ManualClock,
    bound: int,
    step: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a chain longer than is tried again at once each was cancelled, or some were."""
    monkeypatch.setattr("tenuto.engine.tasks.retry.MAX_CASCADE_ROWS", bound)
    keys = [f"x{number}" for number in range(16)]
    chain = [task(key, depends_on=[before]) for before, key in pairwise(keys)]
    flow = await start(engine, "g", group("g", *keys, order="parallel"), task(keys[0]), *chain)
    ids = {item.title: item.id for item in (await engine.list()).tasks}
    for key in reversed(keys[step::step]):
        await engine.cancel(ids[key])
    [work] = await engine.claim(agent, WORKER, 1)
    await engine.fail(work.fence, failure(retryable=False))
    await engine.flows.revive(flow)
    for _ in range(3):
        while await engine.flows.run_deferred_once():
            pass
        clock.advance(2)
    assert await worked(engine, agent) == keys
    assert await flow_status(engine, flow) == "COMPLETED"


async def test_flow_continues_without_dependents_of_another_failure(
    engine: Engine,
    agent: AgentProfile,
    clock: ManualClock,
    raw: Raw,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One fails again before one that waits for it has been tried again."""
    monkeypatch.setattr("tenuto.engine.tasks.retry.MAX_CASCADE_ROWS", 2)
    specs = [task("a"), task("b", depends_on=["a"]), task("c", depends_on=["b"])]
    flow = await start(engine, "g", group("g", "a", "b", "c", order="parallel"), *specs)
    ids = {item.title: item.id for item in (await engine.list()).tasks}
    for key in "cb":
        await engine.cancel(ids[key])
    [work] = await engine.claim(agent, WORKER, 1)
    await engine.fail(work.fence, failure(retryable=False))
    clock.advance(1)
    await engine.flows.revive(flow)
    clock.advance(1)
    [work] = await engine.claim(agent, WORKER, 1)
    await engine.fail(work.fence, failure(retryable=False))
    while await engine.flows.run_deferred_once():
        pass
    assert await raw.count("flow_work") == 0
    assert await flow_status(engine, flow) == "FAILED"
    await engine.flows.revive(flow)
    while await engine.flows.run_deferred_once():
        pass
    assert await worked(engine, agent) == ["a", "b", "c"]
    assert await flow_status(engine, flow) == "COMPLETED"


async def test_flow_continues_from_all_failed_tasks(
    engine: Engine, agent: AgentProfile, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some of it fails again, and is left alone then."""
    monkeypatch.setattr("tenuto.engine.tasks.retry.MAX_CASCADE_ROWS", 3)
    keys = [f"c{number}" for number in range(10)]
    all_ = group("g", *keys, order="parallel")
    flow = await start(engine, "g", all_, *(task(key) for key in keys))
    for work in await engine.claim(agent, WORKER, 10):
        await engine.fail(work.fence, failure(retryable=False))
    clock.advance(1)
    assert await engine.flows.revive(flow) == 3
    clock.advance(1)
    [first, *_] = await engine.claim(agent, WORKER, 1)
    await engine.fail(first.fence, failure(retryable=False))
    assert len(await worked(engine, agent)) == 9
    assert await flow_status(engine, flow) == "FAILED"
    assert await status(engine, first.fence.task) == "FAILED"
    assert await engine.flows.revive(flow) == 1
    assert len(await worked(engine, agent)) == 1
    assert await flow_status(engine, flow) == "COMPLETED"


@pytest.mark.parametrize("meanwhile", [True, False])
async def test_cancelled_flow_is_retried_whole_unless_cancelled_meanwhile(
    engine: Engine,
    agent: AgentProfile,
    clock: ManualClock,
    meanwhile: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tenuto.engine.tasks.retry.MAX_CASCADE_ROWS", 3)
    keys = [f"c{number}" for number in range(10)]
    all_ = group("g", *keys, order="parallel")
    flow = await start(engine, "g", all_, *(task(key) for key in keys))
    if meanwhile:
        for work in await engine.claim(agent, WORKER, 10):
            await engine.fail(work.fence, failure(retryable=False))
    else:
        await engine.flows.cancel(flow)
    clock.advance(1)
    assert await engine.flows.revive(flow) == 3
    clock.advance(1)
    if meanwhile:
        await engine.flows.cancel(flow)
    assert len(await worked(engine, agent)) == (0 if meanwhile else 10)
    assert await flow_status(engine, flow) == "CANCELLED"


@pytest.mark.parametrize("second", ["COMPLETED", "FAILED", "DEAD", "CANCELLED"])
async def test_dependent_failure_names_the_current_outcome_of_its_cause(
    engine: Engine,
    agent: AgentProfile,
    clock: ManualClock,
    second: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The task is tried again and ends before those that ended because of it are."""
    monkeypatch.setattr("tenuto.engine.tasks.retry.MAX_CASCADE_ROWS", 1)
    specs = [task("a", max_attempts=1), task("b", depends_on=["a"])]
    flow = await start(engine, "g", group("g", "a", "b", order="parallel"), *specs)
    [work] = await engine.claim(agent, WORKER, 1)
    await engine.fail(work.fence, failure(retryable=False))
    clock.advance(1)
    await engine.flows.revive(flow)
    clock.advance(1)
    [work] = await engine.claim(agent, WORKER, 1)
    match second:
        case "COMPLETED":
            await engine.complete(work.fence)
        case "CANCELLED":
            await engine.cancel(work.fence.task)
            await engine.confirm_cancel(work.fence, {"state": "killed"})
        case _:
            await engine.fail(work.fence, failure(retryable=second == "DEAD"))
    assert await status(engine, work.fence.task) == second
    good = second == "COMPLETED"
    assert await worked(engine, agent) == (["b"] if good else [])
    assert await flow_status(engine, flow) == ("COMPLETED" if good else "FAILED")


@pytest.mark.parametrize("control", [Approval(message="yes?"), Condition(expression="true")])
async def test_control_task_retried_after_its_dependency_runs(
    engine: Engine,
    agent: AgentProfile,
    clock: ManualClock,
    control: Control,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The dependency completes before the control task is retried: nobody will tell it again."""
    monkeypatch.setattr("tenuto.engine.tasks.retry.MAX_CASCADE_ROWS", 1)
    specs = [task("a", max_attempts=1), task("b", depends_on=["a"], control=control)]
    flow = await start(engine, "g", group("g", "a", "b", order="parallel"), *specs)
    [work] = await engine.claim(agent, WORKER, 1)
    await engine.fail(work.fence, failure(retryable=False))
    clock.advance(1)
    await engine.flows.revive(flow)
    clock.advance(1)
    [work] = await engine.claim(agent, WORKER, 1)
    await engine.complete(work.fence)
    while await engine.flows.run_deferred_once():
        pass
    for item in await engine.inbox.list():
        if item.status == "OPEN" and item.kind == "approval":
            await engine.inbox.answer(item.id, approve=True)
    assert await flow_status(engine, flow) == "COMPLETED"


async def test_retried_task_waits_for_a_paused_dependency(
    engine: Engine, agent: AgentProfile
) -> None:
    needed = await engine.submit(new("a"))
    waiting = await engine.submit(new("b", depends_on=[str(needed.id)]))
    await engine.cancel(waiting.id)
    await engine.pause(needed.id)
    await engine.retry(waiting.id)
    assert await status(engine, waiting.id) == "WAITING"
    await engine.resume(needed.id)
    assert await worked(engine, agent) == ["a", "b"]
