"""Control: user commands in every status, as the model decides them."""

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

import pytest
from tests.contract.conftest import (
    LEASE_S,
    START,
    WORKER,
    Another,
    ManualClock,
    Raw,
    claim_all,
    claim_one,
    failure,
    in_status,
    new,
    profile,
    refusal,
    row_of,
    running,
    snapshot,
    status,
)

from tenuto.engine.engine import Engine
from tenuto.engine.tasks.control import Action
from tenuto.engine.tasks.edit import TaskChanges
from tenuto.model.errors import Conflict
from tenuto.model.limits.budgets import Budget
from tenuto.model.limits.concurrency import Concurrency
from tenuto.model.tasks import commands
from tenuto.model.tasks.commands import DecisionContext, Escalation
from tenuto.model.tasks.decide import decide
from tenuto.model.tasks.retry import RetryPolicy
from tenuto.model.tasks.submission import Filter, NewTask
from tenuto.model.tasks.task import AGING_MS, Status, TaskChange
from tenuto.model.tasks.transcript import Line
from tenuto.store.protocol import Statement

KILLED = {"state": "killed", "pid": 7}
Person = Callable[[Engine, Any], Awaitable[None]]
ASKS: dict[str, tuple[Person, commands.Command]] = {
    "cancel": (lambda e, t: e.cancel(t, "why"), commands.Cancel(reason="why")),
    "pause": (lambda e, t: e.pause(t, "why"), commands.Pause(reason="why")),
    "resume": (lambda e, t: e.resume(t), commands.Resume()),
    "retry": (lambda e, t: e.retry(t), commands.Retry()),
    "archive": (lambda e, t: e.archive(t), commands.Archive()),
    "reprioritise": (lambda e, t: e.reprioritise(t, 9), commands.SetPriority(priority=9)),
}


@pytest.mark.parametrize("of", Status)
async def test_every_command_in_every_status_does_what_the_model_decides(
    engine: Engine, of: Status
) -> None:
    for name, (ask, command) in ASKS.items():
        fence = await in_status(engine, of)
        before, seen = await row_of(engine, fence.task), await snapshot(engine, fence.task)
        expected: TaskChange | str | None
        try:
            expected = decide(before, command, DecisionContext(engine.clock.now(), 0.5, "tester"))
        except Conflict as error:
            expected = error.code
        if isinstance(expected, TaskChange):
            await ask(engine, fence.task)
            assert await row_of(engine, fence.task) == expected.task, name
            event = (await engine.events(fence.task))[-1]
            assert (event.event, event.actor) == (expected.event.kind, "tester")
        else:
            assert await refusal(ask(engine, fence.task)) == expected, name
            assert await snapshot(engine, fence.task) == seen
        if (await row_of(engine, fence.task)).status is Status.PENDING:
            await engine.cancel(fence.task)  # else the next claim takes it


async def test_control_of_a_missing_or_other_workspaces_task_is_not_found(
    engine: Engine, raw: Raw
) -> None:
    elsewhere = Engine(engine.store, workspace=await raw.workspace(77))
    others = (await elsewhere.submit(new())).id
    for ask, _ in ASKS.values():
        assert await refusal(ask(engine, others)) == "not_found"
    assert await refusal(engine.rerun(others)) == "not_found"
    assert (await elsewhere.show(others)).version == 1


async def test_cancel_of_a_running_task_stores_the_receipt(
    engine: Engine, clock: ManualClock
) -> None:
    fence = await running(engine)
    clock.advance(1)
    await engine.cancel(fence.task, "changed my mind")
    view = await engine.show(fence.task)
    assert (view.status, view.cancel_requested_at) == ("RUNNING", clock.now())
    asked = clock.now()
    clock.advance(1)
    await engine.cancel(fence.task)
    assert (await engine.show(fence.task)).cancel_requested_at == asked
    await engine.confirm_cancel(fence, KILLED)
    view = await engine.show(fence.task)
    assert (view.status, view.cancel_requested_at) == ("CANCELLED", None)
    (attempt,) = await engine.attempts(fence.task)
    assert (attempt.outcome, attempt.receipt, attempt.unconfirmed) == ("CANCELLED", KILLED, False)
    texts = [line.text for line in await engine.events(fence.task)]
    assert any("changed my mind" in text for text in texts)


async def test_running_task_is_paused_and_resumed(engine: Engine) -> None:
    fence = await running(engine)
    await engine.pause(fence.task)
    await engine.checkpoint(fence, {"last": True})
    await engine.confirm_pause(fence, KILLED)
    view = await engine.show(fence.task)
    assert (view.status, view.tries, view.attempt) == ("PAUSED", 0, 1)
    assert await claim_all(engine) == []
    await engine.resume(fence.task)
    work = await claim_one(engine)
    assert (work.checkpoint, work.tries, work.fence.attempt) == ({"last": True}, 1, 2)


async def test_cancel_request_survives_a_pause(engine: Engine) -> None:
    fence = await running(engine)
    await engine.pause(fence.task)
    await engine.cancel(fence.task)
    try:
        await engine.confirm_pause(fence, KILLED)
    except Conflict as error:
        assert error.code == "cancel_requested"  # noqa: PT017  either answer keeps the cancel
        await engine.confirm_cancel(fence, KILLED)
    assert await status(engine, fence.task) == "CANCELLED"


async def test_task_with_a_cancel_request_is_not_paused(engine: Engine) -> None:
    fence = await running(engine)
    await engine.cancel(fence.task)
    assert await refusal(engine.pause(fence.task)) == "cancel_requested"
    assert await refusal(engine.confirm_pause(fence, KILLED)) == "cancel_requested"


async def test_concurrent_cancel_and_complete_have_one_winner(
    engine: Engine, another: Another
) -> None:
    await engine.submit_many([new() for _ in range(30)])
    claimed = await claim_all(engine)
    async with another() as second:
        calls = []
        for work in claimed:
            calls += [engine.complete(work.fence), second.cancel(work.fence.task)]
        answers = await asyncio.gather(*calls, return_exceptions=True)
    for work, completed, cancelled in zip(claimed, answers[::2], answers[1::2], strict=True):
        view = await engine.show(work.fence.task)
        if completed is None:
            assert view.status == "COMPLETED"
            assert isinstance(cancelled, Conflict)
        else:
            assert isinstance(completed, Conflict)
            assert completed.code == "cancel_requested"
            assert (view.status, cancelled) == ("RUNNING", None)


async def test_resume_restores_a_scheduled_start(engine: Engine, clock: ManualClock) -> None:
    submitted = await engine.submit(new(run_at=START + timedelta(seconds=60)))
    await engine.pause(submitted.id)
    clock.advance(30)
    await engine.resume(submitted.id)
    assert await status(engine, submitted.id) == "WAITING"
    await engine.pause(submitted.id)
    clock.advance(60)
    assert await engine.maintenance.promote_once("promoter") == 0
    await engine.resume(submitted.id)
    assert await status(engine, submitted.id) == "PENDING"


async def test_resume_restores_a_retry_wait(engine: Engine, clock: ManualClock) -> None:
    fence = await running(engine)
    await engine.fail(fence, failure())
    await engine.pause(fence.task)
    await engine.resume(fence.task)
    assert await status(engine, fence.task) == "RETRY_WAIT"
    clock.advance(5)
    assert await engine.maintenance.promote_once("promoter") == 1
    assert await status(engine, fence.task) == "PENDING"


async def test_resume_restores_a_hold(engine: Engine, clock: ManualClock) -> None:
    fence = await running(engine)
    await engine.park(fence, "quota", resume_at=START + timedelta(seconds=60))
    await engine.pause(fence.task)
    await engine.resume(fence.task)
    assert (await engine.show(fence.task)).waiting_for == "quota"
    await engine.pause(fence.task)
    clock.advance(61)
    await engine.resume(fence.task)
    view = await engine.show(fence.task)
    assert (view.status, view.hold) == ("PENDING", None)


async def test_retry_resets_the_tries(engine: Engine, clock: ManualClock) -> None:
    fence = await in_status(engine, Status.DEAD)
    await engine.archive(fence.task)
    await engine.retry(fence.task)
    view = await engine.show(fence.task)
    assert (view.status, view.tries, view.attempt) == ("PENDING", 0, 1)
    assert (view.finished_at, view.archived_at, view.error_class) == (None, None, None)
    work = await claim_one(engine)
    assert (work.fence.attempt, work.tries) == (2, 1)
    await engine.complete(work.fence)
    assert await refusal(engine.retry(fence.task)) == "out_of_turn"


async def test_retry_of_a_cancelled_task_waits_for_its_start_time(engine: Engine) -> None:
    submitted = await engine.submit(new(run_at=START + timedelta(hours=1)))
    await engine.cancel(submitted.id)
    await engine.retry(submitted.id)
    assert await status(engine, submitted.id) == "WAITING"


async def test_retry_after_an_expired_wait_is_pending(engine: Engine, clock: ManualClock) -> None:
    fence = await running(engine)
    await engine.park(fence, "vendor", wait_until=clock.now() + timedelta(seconds=10))
    clock.advance(10)
    assert await engine.maintenance.promote_once("promoter") == 1
    assert (await engine.show(fence.task)).error_class == "wait_expired"
    await engine.retry(fence.task)
    await engine.maintenance.promote_once("promoter")
    assert (await claim_one(engine)).fence.task == fence.task


async def test_retry_before_the_resume_time_waits(engine: Engine, clock: ManualClock) -> None:
    fence = await running(engine)
    at = clock.now() + timedelta(seconds=10)
    await engine.park(fence, "vendor", resume_at=at, wait_until=at + timedelta(seconds=10))
    await engine.cancel(fence.task)
    await engine.retry(fence.task)
    assert await status(engine, fence.task) == "WAITING"
    clock.advance(10)
    await engine.maintenance.promote_once("promoter")
    assert await status(engine, fence.task) == "PENDING"


RERUN: dict[str, Any] = {
    "title": "again",
    "description": "d",
    "prompt": "p",
    "system_prompt": "s",
    "model": "m",
    "max_turns": 3,
    "conversation": "c",
    "task_type": "build",
    "agent_type": "coder",
    "runtime": "preset",
    "cwd": "/x",
    "env": {"A": "1"},
    "priority": 8,
    "tags": ["label"],
    "task_tags": ["tag"],
    "capabilities": ["gpu"],
    "container": "box",
    "estimate_minutes": 5,
    "max_attempts": 2,
    "retry": RetryPolicy(base_s=2),
    "timeout_s": 60,
    "queue_ttl_s": 99,
    "lease_s": 44,
    "input": {"a": [1]},
    "metadata": {"m": 1},
    "trace_id": "t",
    "source": "s",
}


async def test_rerun_has_the_same_request(engine: Engine, clock: ManualClock) -> None:
    first = await engine.submit(new(**RERUN))
    clock.advance(10)
    again = await engine.rerun(first.id)
    assert again.created
    assert again.id != first.id
    old, created = await engine.show(first.id), await engine.show(again.id)
    assert (created.rerun_of, created.status) == (first.id, "PENDING")
    changed = {n for n in old.__struct_fields__ if getattr(old, n) != getattr(created, n)}
    assert changed == {"id", "rerun_of", "created_at", "updated_at"}
    assert (await row_of(engine, first.id)).lane == (await row_of(engine, again.id)).lane
    assert old.version == 1


ITS_OWN = """
id idempotency_key run_at key depends_on blocks on_dependency_failure next group control
""".split()
"""What a rerun does not repeat: names and time of the first task, and its place among others."""


async def test_rerun_copies_every_field(engine: Engine) -> None:
    await engine.register_agent(profile())
    asked = new(
        **RERUN | {"retry": RetryPolicy(base_s=2.0)},
        region="eu",
        target_agent=profile().id,
        parent=(await engine.submit(new("parent"))).id,
        complexity="Hard",
        escalation=Escalation("why", "what"),
        concurrency=Concurrency("c", 2),
        budget=Budget(tokens=7),
    )
    plain, fields = new(), NewTask.__struct_fields__
    unset = {name for name in fields if getattr(asked, name) == getattr(plain, name)}
    assert unset == {*ITS_OWN, "command"}  # which has a test of its own

    async def stored(task: Any) -> dict[str, Any]:
        labels = await engine.query.labels([task])
        expected = Statement("task_show", {"id": task, "workspace": engine.workspace})
        return {**(await engine.core.store.fetch(expected))[0], "labels": labels[task]}

    first = (await engine.submit(asked)).id
    old, created = await stored(first), await stored((await engine.rerun(first)).id)
    assert set(fields) - old.keys() <= {*ITS_OWN, "tags", "task_tags", "capabilities"}
    changed = {name for name in old if old[name] != created[name]}
    assert changed - {"event_xid"} == {"id", "rerun_of"}


async def test_rerun_of_a_command_task_has_the_command(engine: Engine) -> None:
    first = await engine.submit(new(command=["echo", "hi"], idempotency_key="k"))
    again = await engine.rerun(first.id)
    view = await engine.show(again.id)
    assert (view.command, view.idempotency_key) == (["echo", "hi"], None)
    assert (await row_of(engine, first.id)).lane == (await row_of(engine, again.id)).lane


async def test_rerun_copies_every_requirement(engine: Engine) -> None:
    await engine.register_agent(profile())
    first = await engine.submit(new(region="eu", target_agent=profile().id))
    await engine.cancel(first.id)
    await engine.rerun(first.id)
    assert await engine.claim(profile(region="us"), WORKER, 1) == []


@pytest.mark.parametrize("mode", ["aged", "erased"])
async def test_rerun_of_a_task_without_contents_is_refused(
    engine: Engine, clock: ManualClock, raw: Raw, mode: str
) -> None:
    first = await engine.submit(new(command=["echo", "hi"], tags=["x"]))
    await engine.cancel(first.id)
    if mode == "aged":
        await engine.archive(first.id)
        clock.advance(days=31)
        await engine.maintenance.prune_once()
    else:
        await engine.erase(first.id)
    assert (await engine.show(first.id)).command is None
    before = await raw.counts()
    assert await refusal(engine.rerun(first.id)) == "payload_pruned"
    for cascade in (False, True):
        assert await refusal(engine.retry(first.id, cascade=cascade)) == "payload_pruned"
    assert await raw.counts() == before


CONTENT = "sesame"


@pytest.mark.parametrize("mode", ["aged", "erased"])
async def test_deleted_contents_leave_no_trace(
    engine: Engine, clock: ManualClock, raw: Raw, mode: str
) -> None:
    body: dict[str, Any] = {
        "description": CONTENT,
        "prompt": CONTENT,
        "system_prompt": CONTENT,
        "input": {"a": CONTENT},
        "env": {"A": CONTENT},
        "metadata": {"a": CONTENT},
        "escalation": Escalation(CONTENT, CONTENT),
    }
    if mode == "erased":
        body |= {
            "title": CONTENT,
            "tags": [CONTENT],
            "cwd": f"/{CONTENT}",
            "idempotency_key": CONTENT,
        }
    fence = await running(engine, **body)
    await engine.append(fence, [Line(0, "INFO", CONTENT)])
    await engine.record_step(fence, "k", CONTENT)
    await engine.checkpoint(fence, CONTENT)
    await engine.complete(fence, CONTENT, CONTENT)
    if mode == "erased":
        await engine.erase(fence.task)
    else:
        await engine.archive(fence.task)
        clock.advance(days=31)
        await engine.maintenance.prune_once()
    holding = [
        table
        for table in await raw.counts()
        if CONTENT in str(await raw.fetch(f"select * from {table}"))
    ]
    assert holding == []


async def test_progress_with_a_reserved_text_is_refused(engine: Engine) -> None:
    fence = await running(engine)
    assert await refusal(engine.progress(fence, 1, "(pruned)")) == "invalid_value"


async def test_new_priority_changes_the_rank(engine: Engine) -> None:
    first, second = await engine.submit(new()), await engine.submit(new())
    await engine.reprioritise(second.id, 6)
    row = await row_of(engine, second.id)
    assert row.rank == (await row_of(engine, first.id)).rank - AGING_MS
    assert (await claim_one(engine)).fence.task == second.id
    for wrong in (0, 11):
        assert await refusal(engine.reprioritise(first.id, wrong)) == "invalid_value"


async def test_new_priority_is_recorded_apart_from_edits(engine: Engine) -> None:
    task = (await engine.submit(new())).id
    await engine.edit(task, TaskChanges(priority=6))
    await engine.edit(task, TaskChanges(priority=7, title="t"))
    reports = [event.event for event in await engine.events(task)]
    assert reports == ["submitted", "priority_changed", "priority_changed", "edited"]


async def test_action_applies_to_many_tasks(engine: Engine) -> None:
    created = [await in_status(engine, s) for s in (Status.DEAD, Status.FAILED, Status.COMPLETED)]
    everything = Filter()
    planned = await engine.act("retry", everything, dry_run=True)
    assert set(planned.done) == {fence.task for fence in created}
    assert await status(engine, created[0].task) == "DEAD"
    result = await engine.act("retry", everything)
    assert set(result.done) == {fence.task for fence in created[:2]}
    assert list(result.refused) == [str(created[2].task)]
    assert "COMPLETED" in result.refused[str(created[2].task)]


async def test_action_by_filter_takes_the_newest_up_to_its_limit(engine: Engine) -> None:
    submitted = await engine.submit_many([new(tags=["x"]) for _ in range(5)])
    await engine.submit(new())
    result = await engine.act("cancel", Filter(tags=("x",)), reason="all", limit=2)
    assert result.done == [submitted[4].id, submitted[3].id]
    for limit in (0, 10_001):
        assert await refusal(engine.act("cancel", Filter(), limit=limit)) == "invalid_value"


@pytest.mark.parametrize(
    ("action", "of", "ends"),
    [
        ("cancel", Status.PENDING, "CANCELLED"),
        ("pause", Status.PENDING, "PAUSED"),
        ("resume", Status.PAUSED, "PENDING"),
        ("retry", Status.FAILED, "PENDING"),
        ("archive", Status.COMPLETED, "COMPLETED"),
    ],
)
async def test_every_action_works_by_filter(
    engine: Engine, action: Action, of: Status, ends: str
) -> None:
    fence = await in_status(engine, of)
    result = await engine.act(action, Filter(status=(of.value.lower(),)))
    assert (result.done, result.refused) == ([fence.task], {})
    assert await status(engine, fence.task) == ends


async def test_action_wakes_workers_if_a_task_becomes_claimable(
    engine: Engine, clock: ManualClock
) -> None:
    received: list[str] = []
    engine.core.wakeups.subscribe(received.append)
    fence = await running(engine)
    lane = f"lane:{(await row_of(engine, fence.task)).lane}"
    assert received == [lane]
    await engine.pause(fence.task)
    assert received[1:] == [f"worker:{WORKER}"]
    await engine.confirm_pause(fence, KILLED)
    await engine.resume(fence.task)
    assert received[2:] == [lane]
    fence = (await claim_one(engine)).fence
    clock.advance(LEASE_S + 1)
    await engine.maintenance.expire_once("reaper")
    await engine.maintenance.promote_once("promoter")
    assert received[3:] == [lane]
