"""Mailboxes: each message is delivered once, can be replaced, and is bounded."""

import asyncio
from datetime import timedelta
from unittest.mock import patch
from uuid import UUID, uuid4

import pytest
from tests.contract.conftest import (
    AGENT,
    START,
    Another,
    ManualClock,
    Raw,
    claim_one,
    failure,
    new,
    profile,
    refusal,
)

from tenuto.engine.agents import mailbox
from tenuto.engine.agents.registry import AgentMaintenance, AgentRegistry
from tenuto.engine.engine import Engine
from tenuto.model.agents.messages import MAX_BODY, NewMessage


def note(body: object = "hello", **more: object) -> NewMessage:
    return NewMessage(kind="note", body=body, **more)  # type: ignore[arg-type]


@pytest.fixture
async def registered(engine: Engine) -> Engine:
    await engine.register_agent(profile())
    return engine


async def test_messages_are_dequeued_in_order_and_once(registered: Engine) -> None:
    for n in range(3):
        await registered.mailboxes.send(AGENT, note(n))
    assert await AgentRegistry(registered.core, registered.workspace).record_heartbeat(AGENT) == 3
    first = await registered.mailboxes.dequeue(AGENT, 2)
    assert [message.body for message in first.messages] == [0, 1]
    assert [message.body for message in (await registered.mailboxes.page(AGENT)).messages] == [2]
    assert [message.body for message in (await registered.mailboxes.dequeue(AGENT)).messages] == [2]
    assert (await registered.mailboxes.dequeue(AGENT)).messages == []
    stored = (await registered.mailboxes.page(AGENT, waiting=False)).messages
    assert [item.taken_at is not None for item in stored] == [True] * 3


@pytest.mark.parametrize("waiting", [True, False])
async def test_pages_show_every_message_once(registered: Engine, waiting: bool) -> None:
    for n in range(5):
        await registered.mailboxes.send(AGENT, note(n))
    seen: list[object] = []
    page = await registered.mailboxes.page(AGENT, 2, waiting=waiting)
    while page.next_cursor is not None:
        seen += [message.body for message in page.messages]
        page = await registered.mailboxes.page(AGENT, 2, page.next_cursor, waiting=waiting)
    assert seen + [message.body for message in page.messages] == list(range(5))


async def test_unacknowledged_batch_is_delivered_again(registered: Engine) -> None:
    await registered.mailboxes.send(AGENT, note(1))
    batch = uuid4()
    first = await registered.mailboxes.dequeue(AGENT, batch=batch)
    await registered.mailboxes.send(AGENT, note(2))
    again = await registered.mailboxes.dequeue(AGENT, batch=batch)
    assert again == first
    assert [message.body for message in again.messages] == [1]


async def test_two_readers_share_the_mailbox(registered: Engine, another: Another) -> None:
    for n in range(20):
        await registered.mailboxes.send(AGENT, note(n))
    async with another() as other:
        both = await asyncio.gather(
            *(item.mailboxes.dequeue(AGENT, 5) for item in (registered, other) for _ in range(2))
        )
    bodies = [message.body for batch in both for message in batch.messages]
    assert sorted(bodies) == list(range(20))


async def test_repeated_message_is_stored_once(registered: Engine) -> None:
    first = await registered.mailboxes.send(AGENT, note(client_message_id="m1"))
    again = await registered.mailboxes.send(AGENT, note(client_message_id="m1"))
    assert again.id == first.id
    other = registered.mailboxes.send(AGENT, note("else", client_message_id="m1"))
    assert await refusal(other) == "idempotency_conflict"
    await registered.mailboxes.dequeue(AGENT)
    late = await registered.mailboxes.send(AGENT, note(client_message_id="m1"))
    assert late.id == first.id  # also after it was taken
    assert (await registered.mailboxes.page(AGENT)).messages == []


async def test_repeated_message_of_another_kind_is_a_conflict(registered: Engine) -> None:
    await registered.mailboxes.send(AGENT, note(client_message_id="m1"))
    other = NewMessage(kind="order", body="hello", client_message_id="m1")
    assert await refusal(registered.mailboxes.send(AGENT, other)) == "idempotency_conflict"


async def test_coalescable_message_replaces_the_waiting_one(registered: Engine) -> None:
    scoped = {"scope_key": "s", "coalescable": True}
    old = await registered.mailboxes.send(AGENT, note(1, client_message_id="old", **scoped))
    await registered.mailboxes.send(AGENT, note(2, scope_key="other", coalescable=True))
    await registered.mailboxes.send(AGENT, note(3, scope_key="s"))
    await registered.mailboxes.send(AGENT, note(4, **scoped))
    repeated = await registered.mailboxes.send(AGENT, note(1, client_message_id="old", **scoped))
    assert (repeated.id, repeated.replaced) == (old.id, True)  # a late repetition changes nothing
    taken = await registered.mailboxes.dequeue(AGENT)
    assert [message.body for message in taken.messages] == [2, 3, 4]


async def test_mailbox_is_bounded(registered: Engine) -> None:
    with patch.object(mailbox, "MAX_WAITING", 2):
        await registered.mailboxes.send(AGENT, note())
        await registered.mailboxes.send(AGENT, note(coalescable=True))
        assert await refusal(registered.mailboxes.send(AGENT, note())) == "mailbox_full"
        await registered.mailboxes.send(
            AGENT, note(coalescable=True)
        )  # takes a place that was taken


async def test_invalid_message_is_refused(registered: Engine) -> None:
    send = registered.mailboxes.send
    assert await refusal(send(uuid4(), note())) == "not_found"
    assert await refusal(send(AGENT, NewMessage(kind="Not A Kind"))) == "invalid_value"
    assert await refusal(send(AGENT, note("x" * MAX_BODY))) == "too_large"
    assert await refusal(send(AGENT, note("\x00"))) == "text_invalid"
    assert await refusal(registered.mailboxes.dequeue(AGENT, 0)) == "invalid_value"
    await registered.terminate_agent(AGENT)
    assert await refusal(send(AGENT, note())) == "agent_terminated"


async def test_message_secrets_are_redacted(registered: Engine, raw: Raw) -> None:
    body = {"secrets": {"key": "hush-hush-42"}, "text": "use hush-hush-42"}
    await registered.mailboxes.send(AGENT, note(body))
    assert "hush-hush-42" not in str(await raw.fetch("select body from message"))


async def test_dequeued_messages_are_deleted_after_their_retention(
    registered: Engine, raw: Raw
) -> None:
    await registered.mailboxes.send(AGENT, note())
    await registered.mailboxes.send(AGENT, note())
    await registered.mailboxes.dequeue(AGENT, 1)
    assert isinstance(registered.clock, ManualClock)
    registered.clock.advance(days=8)
    assert await AgentMaintenance(registered.system).prune_once() == 1
    assert await raw.count("message") == 1


async def child_of_running(engine: Engine) -> tuple[UUID, UUID]:
    """A task that runs, and a child of it that has failed for good."""
    parent = (await engine.submit(new("parent"))).id
    work = await claim_one(engine)
    child = await engine.spawn(work.fence, "part", new("child"))
    other = profile(id=UUID(int=99), name="other")
    [own] = await engine.claim(other, "host:2:other", 1)
    await engine.progress(own.fence, 10, "linking")
    await engine.fail(own.fence, failure("syntax", "no such symbol"))
    return parent, child


async def test_failure_of_a_subtask_is_sent_to_the_parents_agent(registered: Engine) -> None:
    parent, child = await child_of_running(registered)
    [message] = (await registered.mailboxes.dequeue(AGENT)).messages
    assert (message.kind, message.task_id, message.attempt) == ("escalation", child, 1)
    body = message.body
    assert (body["taskId"], body["parentId"]) == (str(child), str(parent))
    assert (body["title"], body["status"], body["reason"]) == ("child", "FAILED", "no such symbol")
    assert (body["errorClass"], body["lastStep"], body["tries"]) == ("syntax", "linking", 1)
    assert "Read its log" in body["prompt"]
    assert await registered.inbox.list() == []


async def test_retry_withdraws_the_failure_message(registered: Engine) -> None:
    _, child = await child_of_running(registered)
    await registered.retry(child)
    assert (await registered.mailboxes.dequeue(AGENT)).messages == []


async def test_failure_of_a_subtask_is_sent_to_a_parked_parents_agent(registered: Engine) -> None:
    await registered.submit(new("parent"))
    work = await claim_one(registered)
    child = await registered.spawn(work.fence, "part", new("child"))
    await registered.park(work.fence, "input", wait_until=START + timedelta(days=1))
    other = profile(id=UUID(int=99), name="other")
    [own] = await registered.claim(other, "host:2:other", 1)
    await registered.fail(own.fence, failure("syntax"))
    [message] = (await registered.mailboxes.dequeue(AGENT)).messages
    assert message.task_id == child


async def test_failure_without_a_parents_agent_opens_an_escalation(engine: Engine) -> None:
    _, child = await child_of_running(engine)  # its agent was never registered
    [item] = await engine.inbox.list()
    assert item.task == child


async def test_failure_for_a_terminated_agent_opens_an_escalation(registered: Engine) -> None:
    await registered.submit(new("parent"))
    work = await claim_one(registered)
    child = await registered.spawn(work.fence, "part", new("child"))
    await registered.park(work.fence, "input", wait_until=START + timedelta(days=1))
    await registered.terminate_agent(AGENT)
    other = profile(id=UUID(int=99), name="other")
    [own] = await registered.claim(other, "host:2:other", 1)
    await registered.fail(own.fence, failure("syntax"))
    [item] = await registered.inbox.list()
    assert item.task == child
