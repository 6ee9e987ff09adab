"""Escalations of final failures, and requirements of hard tasks."""

import sqlite3

import pytest
from tests.contract.conftest import (
    Raw,
    claim_all,
    claim_one,
    failure,
    new,
    profile,
    running,
    status,
)
from tests.contract.flows.helpers import start, task

from tenuto.engine.engine import Engine
from tenuto.model.limits.complexity import ComplexityRules, complexity_of_estimate
from tenuto.model.tasks.commands import Escalation, Failure


async def test_final_failure_opens_an_escalation(engine: Engine) -> None:
    fence = await running(engine, title="Build")
    await engine.progress(fence, 40, "linking")
    await engine.fail(fence, failure("syntax", "no such symbol"))
    [item] = await engine.inbox.list()
    assert (item.kind, item.task, item.title) == ("escalation", fence.task, "Build: FAILED")
    assert item.body["reason"] == "no such symbol"
    assert "linking" in item.body["prompt"]


async def test_escalation_has_the_agents_reason_and_advice(engine: Engine) -> None:
    fence = await running(engine, max_attempts=1, escalation=Escalation("mine", "my own"))
    reported = Escalation("The key is missing", "Please add the key.")
    await engine.fail(fence, Failure(message="401", escalation=reported))
    [item] = await engine.inbox.list()
    assert (item.body["reason"], item.body["prompt"]) == (reported.reason, reported.prompt)


async def test_retried_failure_opens_no_escalation(engine: Engine) -> None:
    fence = await running(engine)
    await engine.fail(fence, failure())
    assert await engine.inbox.list() == []


async def test_open_escalations_are_bounded(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tenuto.engine.agents.escalation.MAX_OPEN", 2)
    fences = [await running(engine) for _ in range(3)]
    for fence in fences:
        await engine.fail(fence, failure("syntax"))
    assert {item.task for item in await engine.inbox.list()} == {entry.task for entry in fences[:2]}
    await engine.retry(fences[0].task)
    await engine.fail((await claim_one(engine)).fence, failure("syntax"))
    assert len(await engine.inbox.list()) == 2


async def test_retry_closes_the_escalation(engine: Engine) -> None:
    fence = await running(engine, escalation=Escalation("Validation failed", "Look at it."))
    await engine.fail(fence, failure("syntax"))
    [item] = await engine.inbox.list()
    assert item.body["reason"] == "Validation failed"
    await engine.retry(fence.task)
    assert await engine.inbox.list() == []


async def test_retry_and_closed_escalation_are_one_transaction(
    sqlite_engine: Engine, sqlite_url: str
) -> None:
    fence = await running(sqlite_engine)
    await sqlite_engine.fail(fence, failure("syntax"))
    raw = Raw(sqlite_url)
    refuse = "begin select raise(abort, 'no'); end"
    await raw.execute(f"create trigger refuse before update on inbox_item {refuse}")
    with pytest.raises(sqlite3.IntegrityError):
        await sqlite_engine.retry(fence.task)
    assert await status(sqlite_engine, fence.task) == "FAILED"
    await raw.execute("drop trigger refuse")


async def test_continued_flow_closes_the_escalations_of_its_tasks(engine: Engine) -> None:
    flow = await start(engine, "a", task("a"))
    await engine.fail((await claim_one(engine)).fence, failure("syntax"))
    assert len(await engine.inbox.list()) == 1
    assert await engine.flows.revive(flow) == 1
    assert await engine.inbox.list() == []


async def test_escalation_is_answered_by_an_action(engine: Engine) -> None:
    fence = await running(engine)
    await engine.fail(fence, failure("syntax"))
    [item] = await engine.inbox.list()
    await engine.inbox.dismiss(item.id, "known")
    assert (await engine.inbox.show(item.id)).status == "ANSWERED"


@pytest.mark.parametrize(
    ("minutes", "expected"),
    [(1, "Low"), (30, "Low"), (31, "Middle"), (60, "Middle"), (61, "Hard"), (None, "ExtremHard")],
)
def test_complexity_level_follows_the_estimate(minutes: int | None, expected: str) -> None:
    assert complexity_of_estimate(minutes) == expected


async def test_hard_task_requires_an_agent_that_can_split_it(engine: Engine) -> None:
    await engine.complexity.set(ComplexityRules(policy="require"))
    hard = (await engine.submit(new(estimate_minutes=90))).id
    easy = (await engine.submit(new(estimate_minutes=5))).id
    plain = (await engine.submit(new())).id
    assert {work.fence.task for work in await claim_all(engine)} == {easy, plain}
    work = await claim_one(engine, capabilities=("call_subagent",), version=2)
    assert work.fence.task == hard
    assert profile().capabilities == ()
