"""Flows under concurrent changes, on both databases."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any
from uuid import UUID

import pytest
from tests.contract.conftest import Another, ManualClock, Raw, claim_all, failure, refusal, status
from tests.contract.flows.helpers import (
    WORKER,
    Wrong,
    flow_status,
    group,
    plan,
    start,
    statuses,
    task,
    worked,
)

from tenuto.engine.engine import Engine
from tenuto.engine.tasks.claim import ClaimedTask
from tenuto.model.agents.matching import AgentProfile
from tenuto.model.errors import Conflict, Invalid
from tenuto.model.flows.definition import (
    Approval,
    Condition,
    Foreach,
    Goto,
)

Control = Callable[[UUID], Awaitable[None]]


async def events(raw: Raw, kind: str) -> int:
    return int(await raw.value(f"select count(*) from event where kind = '{kind}'"))


async def test_finished_group_activates_no_child(engine: Engine, agent: AgentProfile) -> None:
    """Two children end in one transaction: one has a successor, the other ends the group."""
    flow = await start(
        engine,
        "g",
        group("g", "a", "c", order="parallel", join="first_succeeded"),
        task("a", next="b"),
        task("b"),
        task("c"),
    )
    claimed = await engine.claim(agent, WORKER, 2)
    await asyncio.gather(*(engine.complete(work.fence) for work in claimed))
    assert await flow_status(engine, flow) == "COMPLETED"
    assert await worked(engine, agent) == []
    result = await statuses(engine, flow)
    assert set(result.get("b", [])) <= {"CANCELLED", "SKIPPED"}


async def test_group_finished_before_its_activation_stays_finished(
    engine: Engine, agent: AgentProfile
) -> None:
    flow = await start(
        engine,
        "g",
        group("g", "if", "more", order="parallel", join="first_succeeded"),
        group("more", "x", "y"),
        task("if", control=Condition(expression="true")),
        task("x"),
        task("y"),
    )
    assert await worked(engine, agent) == []
    result = await statuses(engine, flow)
    assert result["g"] == ["COMPLETED"]
    assert result["more"] == ["CANCELLED"]
    assert await flow_status(engine, flow) == "COMPLETED"


async def test_paused_control_task_runs_after_resume(engine: Engine, agent: AgentProfile) -> None:
    flow = await start(
        engine,
        "g",
        group("g", "a", "if"),
        task("a"),
        task("if", control=Condition(expression="true", on_true="end")),
        task("end"),
    )
    held = next(item.id for item in (await engine.list()).tasks if item.title == "if")
    await engine.pause(held)
    assert await worked(engine, agent) == ["a"]
    assert await status(engine, held) == "PAUSED"
    await engine.resume(held)
    assert await worked(engine, agent) == ["end"]
    assert await flow_status(engine, flow) == "COMPLETED"


async def test_one_flow_over_its_budget_is_reported_alone(
    engine: Engine, agent: AgentProfile, raw: Raw
) -> None:
    specs = [task("work", next="again"), task("again", control=Goto(target="work"))]
    spent = await start(engine, "work", *specs, steps=1)
    rich = await start(engine, "work", *specs, steps=50)
    for _ in range(2):
        claimed = await engine.claim(agent, WORKER, 2)
        await asyncio.gather(*(engine.complete(work.fence) for work in claimed))
    assert await flow_status(engine, spent) == "FAILED"
    assert await flow_status(engine, rich) == "RUNNING"
    assert await events(raw, "step_budget") == 1


async def test_repeated_complete_counts_once(engine: Engine, agent: AgentProfile, raw: Raw) -> None:
    flow = await start(
        engine,
        "g",
        group("g", "a", "b", order="parallel", next="end"),
        *(task(key) for key in ("a", "b", "end")),
    )
    first, second = await engine.claim(agent, WORKER, 2)
    for _ in range(3):
        await engine.complete(first.fence)
    assert (await statuses(engine, flow))["g"] == ["RUNNING"]
    await asyncio.gather(*(engine.complete(second.fence) for _ in range(3)))
    assert await worked(engine, agent) == ["end"]
    assert await events(raw, "group_completed") == 1


async def test_concurrently_finished_children_join_once(
    engine: Engine, another: Another, agent: AgentProfile, raw: Raw
) -> None:
    keys = [f"c{number}" for number in range(16)]
    flow = await start(
        engine,
        "g",
        group("g", *keys, order="parallel", next="end"),
        *(task(key) for key in (*keys, "end")),
    )
    claimed = await claim_all(engine)
    async with another() as second, another() as third:
        engines = [engine, second, third]
        await asyncio.gather(
            *(engines[n % 3].complete(work.fence) for n, work in enumerate(claimed)),
            *(engines[(n + 1) % 3].complete(work.fence) for n, work in enumerate(claimed)),
        )
    assert await worked(engine, agent) == ["end"]
    assert await events(raw, "group_completed") == 1
    assert await flow_status(engine, flow) == "COMPLETED"


async def test_approval_is_decided_once(
    engine: Engine, another: Another, agent: AgentProfile
) -> None:
    flow = await start(
        engine, "ok", task("ok", next="ship", control=Approval(message="?")), task("ship")
    )
    [item] = await engine.inbox.list()
    async with another() as second:
        reported = await asyncio.gather(
            engine.inbox.answer(item.id, approve=True),
            second.inbox.answer(item.id, approve=True),
            engine.inbox.answer(item.id, approve=False),
            return_exceptions=True,
        )
    assert [type(entry) for entry in reported if entry is not None] == [Conflict, Conflict]
    winner = reported.index(None)
    assert await worked(engine, agent) == (["ship"] if winner < 2 else [])
    assert await flow_status(engine, flow) == ("COMPLETED" if winner < 2 else "FAILED")


async def test_deferred_items_of_a_foreach_are_activated_once(
    engine: Engine, another: Another, agent: AgentProfile, raw: Raw
) -> None:
    await start(
        engine,
        "each",
        task("each", control=Foreach(items=list(range(1300)), template="one", order="parallel")),
        task("one"),
    )
    async with another() as second:
        while any(
            await asyncio.gather(*(e.flows.run_deferred_once() for e in (engine, second, engine)))
        ):
            pass
    assert await raw.value("select count(*) from task_body where key = 'one'") == 1300
    assert await raw.value("select count(distinct slot) from task_body where key = 'one'") == 1300


async def test_child_dead_by_an_expired_lease_finishes_its_group(
    engine: Engine, agent: AgentProfile, clock: ManualClock
) -> None:
    flow = await start(engine, "g", group("g", "a", "b"), task("a", max_attempts=1), task("b"))
    await engine.claim(agent, WORKER, 1)
    clock.advance(60)
    await engine.maintenance.expire_once("reaper")
    assert await statuses(engine, flow) == {"g": ["FAILED"], "a": ["DEAD"], "b": ["SKIPPED"]}
    assert await flow_status(engine, flow) == "FAILED"


async def test_corrupt_child_does_not_block_its_flow(
    engine: Engine, agent: AgentProfile, raw: Raw, clock: ManualClock
) -> None:
    """The row of the child is quarantined, which finishes the child."""
    flow = await start(engine, "g", group("g", "a", join="all_done"), task("a"))
    [work] = await engine.claim(agent, WORKER, 1)
    odd = '{"bogus": 1}'
    await raw.execute(f"update task set retry = '{odd}' where id = '{work.fence.task}'")
    clock.advance(60)
    await engine.maintenance.expire_once("reaper")
    assert await worked(engine, agent) == []
    assert await flow_status(engine, flow) == "COMPLETED"


@pytest.mark.parametrize("failing", [True, False])
async def test_cascade_over_its_bound_is_finished_later(
    engine: Engine, agent: AgentProfile, failing: bool
) -> None:
    """600 children are skipped when the first of a sequence fails."""

    def handler(work: ClaimedTask) -> Any:
        if failing:
            raise Wrong("no")

    keys = [f"c{number}" for number in range(600)]
    flow = await start(engine, "g", group("g", *keys), *(task(key) for key in keys))
    ran = await worked(engine, agent, handler)
    assert len(ran) == (1 if failing else 600)
    result = await statuses(engine, flow)
    ends = [item for key in keys for item in result.get(key, [])]
    assert set(ends) == ({"FAILED", "SKIPPED"} if failing else {"COMPLETED"})
    assert await flow_status(engine, flow) == ("FAILED" if failing else "COMPLETED")


async def test_children_activated_during_a_pause_continue_with_their_flow(
    engine: Engine, agent: AgentProfile
) -> None:
    """The last hundred are made between the pause and its reaching the tasks."""
    keys = [f"c{number}" for number in range(600)]
    flow = await start(
        engine, "g", group("g", *keys, order="parallel"), *(task(key) for key in keys)
    )
    await engine.flows.pause(flow)
    assert await worked(engine, agent) == []
    await engine.flows.resume(flow)
    assert len(await worked(engine, agent)) == 600
    assert await flow_status(engine, flow) == "COMPLETED"


async def test_task_stopped_by_a_pause_continues_with_its_flow(
    engine: Engine, agent: AgentProfile, clock: ManualClock
) -> None:
    """The flow is resumed before the worker has said that it stopped."""
    flow = await start(engine, "a", task("a"))
    [work] = await engine.claim(agent, WORKER, 1)
    await engine.flows.pause(flow)
    await engine.flows.resume(flow)
    await engine.confirm_pause(work.fence, {"state": "killed"})
    clock.advance(5)
    assert await worked(engine, agent) == ["a"]
    assert await flow_status(engine, flow) == "COMPLETED"


async def test_started_task_is_cancelled_and_not_skipped(
    engine: Engine, agent: AgentProfile
) -> None:
    flow = await start(engine, "g", group("g", "a", "b"), task("a"), task("b"))
    [work] = await engine.claim(agent, WORKER, 1)
    await engine.fail(work.fence, failure())
    later = next(item.id for item in (await engine.list()).tasks if item.title == "b")
    await engine.cancel(later)
    assert await statuses(engine, flow) == {"g": ["FAILED"], "a": ["CANCELLED"], "b": ["CANCELLED"]}


async def test_reopened_flow_outlives_deferred_work_of_its_end(
    engine: Engine, agent: AgentProfile
) -> None:
    """500 children are skipped; before the rest is, the one that failed is tried again."""
    keys = [f"c{number}" for number in range(600)]
    flow = await start(engine, "g", group("g", *keys), *(task(key) for key in keys))
    while await engine.flows.run_deferred_once():
        pass
    [work] = await engine.claim(agent, WORKER, 1)
    await engine.fail(work.fence, failure(retryable=False))
    await engine.retry(work.fence.task, cascade=True)
    assert len(await worked(engine, agent)) == 600
    assert await flow_status(engine, flow) == "COMPLETED"


def test_child_can_depend_on_the_child_that_names_it_as_next() -> None:
    both = [task("a", next="b"), task("b", depends_on=["a"])]
    assert plan("g", group("g", "a", "b"), *both).root == "g"


@pytest.mark.parametrize(
    "specs",
    [
        [group("g", "a", "b"), task("a", depends_on=["b"]), task("b")],
        [group("g", "a", "b", order="parallel"), task("a", next="b", depends_on=["b"]), task("b")],
    ],
    ids=["its turn comes later", "it names what it waits for"],
)
def test_child_of_a_sequence_cannot_depend_on_a_later_child(specs: list[Any]) -> None:
    with pytest.raises(Invalid) as caught:
        plan("g", *specs)
    assert caught.value.code == "dependency_cycle"


@pytest.mark.parametrize("mode", ["retried", "joined"])
@pytest.mark.parametrize("subject", ["flow", "g", "outer"])
async def test_turn_reached_during_a_pause_is_taken_after_resume(
    engine: Engine, agent: AgentProfile, subject: str, mode: str
) -> None:
    """The one before is cancelled while everything is held, and another has come meanwhile."""
    flow = await start(
        engine,
        "outer",
        group("outer", "g", order="parallel"),
        group("g", "a", "b", join="all_done"),
        task("a"),
        task("b"),
    )
    ids = {item.title: item.id for item in (await engine.list()).tasks}
    await engine.cancel(ids["b"])
    flows = engine.flows
    run = None if subject == "flow" else await flows.find_open_group(subject)
    await (flows.pause(flow) if run is None else flows.pause_group(run))
    if mode == "retried":
        await engine.retry(ids["b"])
    else:
        ids["b"] = (await engine.submit(task("b", group="g"))).id
    await engine.cancel(ids["a"])
    assert await worked(engine, agent) == []
    assert await status(engine, ids["b"]) == "PAUSED"
    await (flows.resume(flow) if run is None else flows.resume_group(run))
    assert await worked(engine, agent) == ["b"]
    assert await status(engine, ids["b"]) == "COMPLETED"


@pytest.mark.parametrize("approve", [True, False])
@pytest.mark.parametrize("subject", ["task", "flow", "g"])
async def test_paused_approval_stays_open_and_is_answered_after_resume(
    engine: Engine, agent: AgentProfile, subject: str, approve: bool
) -> None:
    flow = await start(
        engine,
        "g",
        group("g", "ok", "then"),
        task("ok", control=Approval(message="?")),
        task("then"),
    )
    [item] = await engine.inbox.list()
    assert item.task is not None
    flows, run = engine.flows, await engine.flows.find_open_group("g")
    pauses: dict[str, tuple[Control, Control, UUID]] = {
        "task": (engine.pause, engine.resume, item.task),
        "flow": (flows.pause, flows.resume, flow),
        "g": (flows.pause_group, flows.resume_group, run),
    }
    pause, resume, held = pauses[subject]
    await pause(held)
    assert await status(engine, item.task) == "PAUSED"
    assert await refusal(engine.inbox.answer(item.id, approve=approve)) == "out_of_turn"
    assert (await engine.inbox.show(item.id)).status == "OPEN"
    await resume(held)
    await engine.inbox.answer(item.id, approve=approve)
    assert await worked(engine, agent) == (["then"] if approve else [])
    assert await flow_status(engine, flow) == ("COMPLETED" if approve else "FAILED")


async def test_child_activated_during_a_pause_has_its_turn_after_resume(
    engine: Engine, agent: AgentProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All children that were there when the pause came are cancelled while it lasts."""
    monkeypatch.setattr("tenuto.engine.flows.activation.MAX_CASCADE_ROWS", 2)
    keys = [f"c{number}" for number in range(6)]
    flow = await start(
        engine, "g", group("g", *keys, join="all_done"), *(task(key) for key in keys)
    )
    await engine.flows.pause(flow)
    there = [item.id for item in (await engine.list()).tasks]
    while await engine.flows.run_deferred_once():
        pass
    for item in there:
        await engine.cancel(item)
    assert len(there) < 6
    assert await worked(engine, agent) == []
    await engine.flows.resume(flow)
    assert await worked(engine, agent) == keys[len(there) :]


async def test_approval_activated_after_its_dependency_opens_an_inbox_item(
    engine: Engine, agent: AgentProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The approval is in a later part of its group than its finished dependency."""
    monkeypatch.setattr("tenuto.engine.flows.activation.MAX_CASCADE_ROWS", 2)
    approval = task("yes", depends_on=["a"], control=Approval(message="yes?"))
    specs = [task("a"), task("b"), task("c"), approval]
    flow = await start(
        engine, "g", group("g", *(spec.key or "" for spec in specs), order="parallel"), *specs
    )
    for work in await engine.claim(agent, WORKER, 4):
        assert work.key in ("a", "b")
        await engine.complete(work.fence)
    assert await worked(engine, agent) == ["c"]
    [item] = await engine.inbox.list()
    await engine.inbox.answer(item.id, approve=True)
    assert await flow_status(engine, flow) == "COMPLETED"


async def test_all_running_tasks_of_a_large_group_are_requested_to_stop(
    engine: Engine, agent: AgentProfile, raw: Raw, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tasks with a stop request do not fill the next batch."""
    monkeypatch.setattr("tenuto.engine.flows.advance.MAX_CASCADE_ROWS", 2)
    keys = [f"c{number}" for number in range(5)]
    flow = await start(
        engine, "g", group("g", *keys, order="parallel"), *(task(key) for key in keys)
    )
    claimed = await engine.claim(agent, WORKER, 5)
    await engine.flows.cancel_group(await engine.flows.find_open_group("g"))
    for _ in claimed:
        await engine.flows.run_deferred_once()
    assert await events(raw, "cancel_requested") == 5
    for work in claimed:
        await engine.confirm_cancel(work.fence, {"state": "killed"})
    assert await flow_status(engine, flow) == "FAILED"
    assert await engine.flows.run_deferred_once() == 0


async def test_approval_activated_during_a_pause_opens_its_item_after_resume(
    engine: Engine, agent: AgentProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tenuto.engine.flows.activation.MAX_CASCADE_ROWS", 2)
    specs = [task("a"), task("b"), task("yes", control=Approval(message="yes?"))]
    keys = [spec.key or "" for spec in specs]
    flow = await start(engine, "g", group("g", *keys, order="parallel"), *specs)
    await engine.flows.pause(flow)
    assert await worked(engine, agent) == []
    assert await engine.inbox.list() == []
    await engine.flows.resume(flow)
    assert await worked(engine, agent) == ["a", "b"]
    [item] = await engine.inbox.list()
    await engine.inbox.answer(item.id, approve=True)
    assert await flow_status(engine, flow) == "COMPLETED"


async def test_task_stopped_by_a_pause_stays_paused_in_the_next_pause(
    engine: Engine, agent: AgentProfile, clock: ManualClock
) -> None:
    """The flow is resumed and paused again before the worker has said that it stopped."""
    flow = await start(engine, "a", task("a"))
    [work] = await engine.claim(agent, WORKER, 1)
    await engine.flows.pause(flow)
    await engine.flows.resume(flow)
    await engine.flows.pause(flow)
    await engine.confirm_pause(work.fence, {"state": "killed"})
    clock.advance(5)
    assert await worked(engine, agent) == []
    assert await status(engine, work.fence.task) == "PAUSED"
    await engine.flows.resume(flow)
    assert await worked(engine, agent) == ["a"]


@pytest.mark.parametrize("subject", ["next", "turn"])
async def test_activation_inside_a_paused_group_waits_with_it(
    engine: Engine, agent: AgentProfile, subject: str
) -> None:
    """A child is cancelled in the pause: the next of its group, or the next in turn, begins."""
    specs = [group("g", "a", join="all_done", next="b")]
    if subject == "turn":
        specs = [group("g", "a", "inner", join="all_done"), group("inner", "b")]
    outer = group("outer", "g", order="parallel")
    flow = await start(engine, "outer", outer, *specs, task("a"), task("b"))
    run = await engine.flows.find_open_group("outer")
    await engine.flows.pause_group(run)
    [first] = (await engine.list()).tasks
    await engine.cancel(first.id)
    assert await worked(engine, agent) == []
    await engine.flows.resume_group(run)
    assert await worked(engine, agent) == ["b"]
    assert await flow_status(engine, flow) == "COMPLETED"


async def test_failing_deferred_work_does_not_delay_the_rest(
    engine: Engine, raw: Raw, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More of it is due than is done at once, before all else."""
    monkeypatch.setattr("tenuto.engine.flows.activation.MAX_CASCADE_ROWS", 2)
    await start(engine, "g", group("g", "a", "b", "c", order="parallel"), *map(task, "abc"))
    created = "select {}, workspace, 'no such kind', subject, due_at from flow_work"
    for number in range(2):
        bad = created.format(f"'00000000-0000-7000-8000-00000000000{number}'")
        columns = "id, workspace, kind, subject, due_at"
        await raw.execute(f"insert into flow_work ({columns}) {bad} limit 1")
    assert await engine.flows.run_deferred_once(2) == 0
    assert await raw.count("task") == 2
    assert await engine.flows.run_deferred_once(2) == 1
    assert await raw.count("task") == 3
    assert await raw.count("flow_work") == 2


@pytest.mark.parametrize(
    ("control", "ends"),
    [
        (Approval(timeout_s=60), "FAILED"),
        (Approval(timeout_s=60, on_timeout="approve"), "COMPLETED"),
    ],
)
async def test_paused_approval_still_times_out(
    engine: Engine, clock: ManualClock, control: Approval, ends: str
) -> None:
    flow = await start(engine, "yes", task("yes", control=control))
    [item] = await engine.inbox.list()
    assert item.task is not None
    await engine.pause(item.task)
    clock.advance(61)
    assert await engine.maintenance.promote_once("promoter") == 0
    await engine.resume(item.task)
    assert await engine.maintenance.promote_once("promoter") == 1
    assert await flow_status(engine, flow) == ends


@pytest.mark.parametrize("answered", [True, False])
async def test_rejection_skips_an_approval_that_a_timeout_would_approve(
    engine: Engine, clock: ManualClock, answered: bool
) -> None:
    control = Approval(timeout_s=60, on_timeout="approve", on_reject="skip")
    flow = await start(engine, "yes", task("yes", control=control))
    [item] = await engine.inbox.list()
    if answered:
        await engine.inbox.answer(item.id, approve=False)
    else:
        clock.advance(61)
        await engine.maintenance.promote_once("promoter")
    assert await statuses(engine, flow) == {"yes": ["SKIPPED" if answered else "COMPLETED"]}
