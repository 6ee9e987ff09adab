"""Questions to people: one per key, one answer, and no slot occupied meanwhile."""

import asyncio
from typing import Any
from uuid import UUID

import pytest
from tests.contract.conftest import (
    Another,
    ManualClock,
    Raw,
    claim_one,
    new,
    refusal,
    row_of,
    running,
    status,
)

from tenuto.engine.agents.inbox import InboxItem
from tenuto.engine.agents.subtasks import Question
from tenuto.engine.engine import Engine
from tenuto.model.tasks.retry import FREE_ENDS
from tenuto.model.tasks.task import Fence

APPROVAL = Question(kind="approval", title="deploy?", body={"to": "production"})
QUESTION = Question(kind="question", title="which one?")


async def asked(engine: Engine, question: Question, key: str = "q") -> tuple[Fence, InboxItem]:
    """A task that waits for an answer, and the item in the inbox."""
    fence = await running(engine)
    assert (await engine.ask(fence, key, question)).parked
    [item] = await engine.inbox.list()
    assert (item.task, item.key, item.kind) == (fence.task, key, question.kind)
    return fence, item


async def again(engine: Engine, task: UUID) -> Fence:
    work = await claim_one(engine)
    assert work.fence.task == task
    return work.fence


@pytest.mark.parametrize("approve", [True, False])
async def test_decision_reaches_the_next_attempt(engine: Engine, *, approve: bool) -> None:
    fence, item = await asked(engine, APPROVAL)
    task = await row_of(engine, fence.task)
    assert (task.status, task.hold, task.tries) == ("WAITING", "approval", 0)
    assert (item.title, item.body, item.expires_at) == ("deploy?", {"to": "production"}, None)
    await engine.inbox.answer(item.id, approve=approve, comment="so be it")
    next_ = await again(engine, fence.task)
    answer = (await engine.ask(next_, "q", APPROVAL)).answer
    output = "approved" if approve else "rejected"
    assert (answer["decision"], answer["by"], answer["comment"]) == (output, "tester", "so be it")
    decided = await engine.inbox.show(item.id)
    assert (decided.status, decided.decided_by) == (output.upper(), "tester")
    assert await engine.inbox.list() == []


async def test_answer_reaches_the_next_attempt(engine: Engine) -> None:
    fence, item = await asked(engine, QUESTION)
    assert (await row_of(engine, fence.task)).hold == "input"
    assert await refusal(engine.inbox.answer(item.id, approve=True)) == "out_of_turn"
    await engine.inbox.dismiss(item.id, "the left one")
    next_ = await again(engine, fence.task)
    assert (await engine.ask(next_, "q", QUESTION)).answer["answer"] == "the left one"
    assert (await engine.inbox.show(item.id)).status == "ANSWERED"


async def test_first_decision_wins(engine: Engine, another: Another) -> None:
    async with another() as other:
        for number in range(20):
            fence, item = await asked(engine, APPROVAL)
            calls = [
                engine.inbox.answer(item.id, approve=True),
                other.inbox.answer(item.id, approve=False),
            ]
            output = await asyncio.gather(
                *calls[:: -1 if number % 2 else 1], return_exceptions=True
            )
            assert [entry is None for entry in output].count(True) == 1
            next_ = await again(engine, fence.task)
            answer = (await engine.ask(next_, "q", APPROVAL)).answer
            decided = await engine.inbox.show(item.id)
            assert answer["decision"].upper() == decided.status
            await engine.complete(next_)


async def test_question_is_asked_once_per_key(engine: Engine) -> None:
    fence, item = await asked(engine, APPROVAL)
    assert (await engine.ask(fence, "q", APPROVAL)).parked  # its answer was lost
    assert len(await engine.inbox.list()) == 1
    await engine.inbox.answer(item.id, approve=True)
    next_ = await again(engine, fence.task)
    for _ in range(2):
        assert not (await engine.ask(next_, "q", APPROVAL)).parked
    assert (await engine.ask(next_, "another", APPROVAL)).parked
    assert [entry.key for entry in await engine.inbox.list()] == ["another"]


@pytest.mark.parametrize(
    ("question", "default", "reported"),
    [
        (APPROVAL, None, {"decision": "rejected", "by": "timeout"}),
        (APPROVAL, True, {"decision": "approved", "by": "timeout"}),
        (QUESTION, None, {"answer": None, "by": "timeout"}),
        (QUESTION, ["any"], {"answer": ["any"], "by": "timeout"}),
    ],
)
async def test_question_without_an_answer_times_out(
    engine: Engine, clock: ManualClock, question: Question, default: Any, reported: Any
) -> None:
    limited = Question(
        kind=question.kind, title="?", timeout_s=60, default=default, body=question.body
    )
    fence, item = await asked(engine, limited)
    assert item.expires_at is not None
    clock.advance(61)
    assert await engine.maintenance.promote_once("promoter") == 1
    shown = await engine.inbox.show(item.id)
    assert (shown.status, shown.decision) == ("EXPIRED", reported)
    assert await refusal(engine.inbox.answer(item.id, approve=True)) == "out_of_turn"
    next_ = await again(engine, fence.task)
    assert (await engine.ask(next_, "q", limited)).answer == reported
    assert (await row_of(engine, fence.task)).free_ends == 0


async def test_concurrent_answer_and_timeout_agree(
    engine: Engine, another: Another, clock: ManualClock
) -> None:
    async with another() as other:
        for number in range(20):
            limited = Question(kind="approval", title="?", timeout_s=10)
            fence, item = await asked(engine, limited)
            clock.advance(11)
            calls = [
                engine.maintenance.promote_once("promoter"),
                other.inbox.answer(item.id, approve=True),
            ]
            await asyncio.gather(*calls[:: -1 if number % 2 else 1], return_exceptions=True)
            decided = await engine.inbox.show(item.id)
            assert decided.status in ("APPROVED", "EXPIRED")
            next_ = await again(engine, fence.task)
            answer = (await engine.ask(next_, "q", limited)).answer
            assert answer["decision"] == decided.decision["decision"]
            await engine.complete(next_)


async def test_cancel_closes_the_question(engine: Engine) -> None:
    fence, item = await asked(engine, APPROVAL)
    await engine.cancel(fence.task)
    assert (await engine.inbox.show(item.id)).status == "EXPIRED"
    assert await refusal(engine.inbox.answer(item.id, approve=True)) == "out_of_turn"
    await engine.retry(fence.task)
    next_ = await again(engine, fence.task)
    assert (await engine.ask(next_, "q", APPROVAL)).parked
    [fresh] = await engine.inbox.list()
    assert fresh.id != item.id


async def test_cancel_of_the_parent_closes_the_question(engine: Engine) -> None:
    root = await running(engine)
    child = await engine.spawn(root, "child", new("child"))
    work = await claim_one(engine)
    assert (await engine.ask(work.fence, "q", APPROVAL)).parked
    [item] = await engine.inbox.list()
    await engine.cancel(root.task)
    assert await status(engine, child) == "CANCELLED"
    assert (await engine.inbox.show(item.id)).status == "EXPIRED"


async def test_answer_reaches_a_paused_task_after_resume(engine: Engine) -> None:
    fence, item = await asked(engine, QUESTION)
    await engine.pause(fence.task)
    await engine.inbox.dismiss(item.id, "yes")
    assert await status(engine, fence.task) == "PAUSED"
    await engine.resume(fence.task)
    next_ = await again(engine, fence.task)
    assert (await engine.ask(next_, "q", QUESTION)).answer["answer"] == "yes"


@pytest.mark.parametrize("approve", [True, False])
async def test_decision_reaches_a_paused_task_after_resume(
    engine: Engine, *, approve: bool
) -> None:
    fence, item = await asked(engine, APPROVAL)
    await engine.pause(fence.task)
    await engine.inbox.answer(item.id, approve=approve)
    assert await status(engine, fence.task) == "PAUSED"
    await engine.resume(fence.task)
    next_ = await again(engine, fence.task)
    output = "approved" if approve else "rejected"
    assert (await engine.ask(next_, "q", APPROVAL)).answer["decision"] == output


async def test_step_with_the_key_is_not_an_answer(engine: Engine, raw: Raw) -> None:
    fence = await running(engine)
    await engine.record_step(fence, "q", 7)
    before = await raw.counts()
    assert await refusal(engine.ask(fence, "q", APPROVAL)) == "step_conflict"
    assert await refusal(engine.ask(fence, "$q", APPROVAL)) == "invalid_value"
    assert await refusal(engine.ask(fence, "", APPROVAL)) == "invalid_value"
    assert await raw.counts() == before


async def test_attempt_with_a_stop_request_cannot_ask(engine: Engine, raw: Raw) -> None:
    fence = await running(engine)
    await engine.pause(fence.task)
    assert await refusal(engine.ask(fence, "q", APPROVAL)) == "pause_requested"
    await engine.cancel(fence.task)
    assert await refusal(engine.ask(fence, "q", APPROVAL)) == "cancel_requested"
    anonymous = UUID(int=7)
    for stale in (
        Fence(fence.task, 1, "0" * 32),
        Fence(fence.task, 0, ""),
        Fence(anonymous, 0, ""),
    ):
        assert await refusal(engine.ask(stale, "q", APPROVAL)) == "lease_lost"
        assert await refusal(engine.wait(stale)) == "lease_lost"
    assert await refusal(engine.ask(Fence(anonymous, 1, ""), "q", APPROVAL)) == "not_found"
    assert await raw.count("inbox_item") == 0


async def test_question_times_out_at_its_deadline(engine: Engine, clock: ManualClock) -> None:
    limited = Question(kind="approval", title="?", timeout_s=60, default=True)
    fence, item = await asked(engine, limited)
    clock.advance(60)
    assert await engine.maintenance.promote_once("promoter") == 1
    assert (await engine.inbox.show(item.id)).status == "EXPIRED"
    assert not (await engine.ask(await again(engine, fence.task), "q", limited)).parked


async def test_failed_ask_leaves_no_inbox_item(engine: Engine, raw: Raw) -> None:
    """The task has used up its waits without a result."""
    fence = await running(engine, max_attempts=1)
    await raw.execute(f"update task set free_ends = {FREE_ENDS} where id = '{fence.task}'")
    assert (await engine.ask(fence, "q", QUESTION)).parked
    assert await status(engine, fence.task) == "DEAD"
    assert [item.kind for item in await engine.inbox.list()] == ["escalation"]
