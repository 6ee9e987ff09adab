"""Fan-out: every event becomes its deliveries once, despite crashes and other processes."""

import asyncio
from uuid import UUID

import pytest
from tests.contract.conftest import Another, ManualClock, Raw, failure, new, profile, running
from tests.contract.operations.test_relay import connected
from tests.waiting import eventually
from tests.webhooks.conftest import World, deliveries_of, hooks_of, store_of
from tests.webhooks.receiver import Receiver

from tenuto.engine.agents.registry import AgentMaintenance
from tenuto.engine.engine import Engine
from tenuto.engine.webhooks.deliveries import CURSOR, WebhookEvent
from tenuto.engine.webhooks.endpoints import WebhookChange
from tenuto.model.tasks.task import Status
from tenuto.store.protocol import Script, Statement

FIELDS = ["event", "taskId", "previousStatus", "newStatus", "workspaceId", "timestamp"]


async def cursor_position(raw: Raw) -> tuple[int, int]:
    [result] = await raw.fetch(f"select xid, position from cursor where name = '{CURSOR}'")
    return result[0], result[1]


async def delivered(world: World, webhook: UUID) -> list[tuple[str, str | None, str]]:
    bodies = [message.body for message in await world.messages(webhook)]
    return [(body["event"], body["previousStatus"], body["newStatus"]) for body in bodies]


async def test_status_change_is_two_events(world: World) -> None:
    created = (await world.hook()).webhook
    [task] = await world.complete()
    assert await world.fan_out() == 3
    assert await delivered(world, created.id) == [
        ("task.status_changed", None, "PENDING"),
        ("task.pending", None, "PENDING"),
        ("task.status_changed", "PENDING", "RUNNING"),
        ("task.running", "PENDING", "RUNNING"),
        ("task.status_changed", "RUNNING", "COMPLETED"),
        ("task.completed", "RUNNING", "COMPLETED"),
    ]
    for message in await world.messages(created.id):
        assert list(message.body) == FIELDS
        assert message.body["taskId"] == str(task) == str(message.task_id)
        assert message.body["workspaceId"] == str(world.engine.workspace)
        assert message.body["timestamp"] == world.clock.now().isoformat().replace("+00:00", "Z")
        assert (message.status, message.attempts) == ("PENDING", 0)


async def test_webhook_gets_the_events_it_subscribed_to(world: World) -> None:
    dead = (await world.hook(["task.dead"])).webhook
    ends = (await world.hook(["task.completed", "task.cancelled"])).webhook
    others = (await world.hook(["inbox.*", "agent.stale"])).webhook
    await world.complete()
    fence = await running(world.engine, max_attempts=1)
    await world.engine.fail(fence, failure())
    waiting = await world.engine.submit(new())
    await world.engine.cancel(waiting.id)
    await world.fan_out()
    assert await delivered(world, dead.id) == [("task.dead", "RUNNING", "DEAD")]
    assert [event for event, _, _ in await delivered(world, ends.id)] == [
        "task.completed",
        "task.cancelled",
    ]
    assert await delivered(world, others.id) == []


async def test_change_without_a_status_change_is_no_event(world: World) -> None:
    created = (await world.hook()).webhook
    task = (await world.engine.submit(new())).id
    await world.engine.reprioritise(task, 9)
    assert await world.fan_out() == 2
    assert len(await world.messages(created.id)) == 2


async def test_new_webhook_gets_no_past_events(world: World) -> None:
    await world.complete()
    world.clock.advance(1)
    created = (await world.hook(["task.completed"])).webhook
    [task] = await world.complete()
    assert await world.fan_out(2) == 6
    assert (await world.only(created.id)).task_id == task


async def test_webhook_gets_events_of_its_workspace_only(world: World) -> None:
    other = await world.raw.workspace(2)
    theirs = hooks_of(world.store, other)
    untrusted = (await theirs.create(world.receiver.url, ["*"], other, None)).webhook
    ours = (await world.hook(["task.completed"])).webhook
    await world.complete()
    elsewhere = Engine(world.store, workspace=other)
    task = (await elsewhere.submit(new())).id
    await world.fan_out()
    assert len(await world.messages(ours.id)) == 1
    page = await theirs.deliveries(untrusted.id, other)
    assert {delivery.task_id for delivery in page.deliveries} == {task}
    assert {delivery.body["workspaceId"] for delivery in page.deliveries} == {str(other)}


async def test_events_without_a_webhook_are_skipped(world: World) -> None:
    assert await world.deliveries.fan_out_once() == 0
    await world.complete(3)
    assert await world.deliveries.fan_out_once() == 0
    here = await cursor_position(world.raw)
    assert await world.deliveries.fan_out_once() == 0
    assert await cursor_position(world.raw) == here
    await world.complete()
    assert await world.deliveries.fan_out_once() == 0
    assert await cursor_position(world.raw) > here
    assert await world.raw.count("webhook_delivery") == 0
    created = (await world.hook(["task.completed"])).webhook
    await world.complete()
    assert await world.fan_out() == 3
    assert len(await world.messages(created.id)) == 1


async def test_webhook_created_during_a_fan_out_misses_no_event(world: World) -> None:
    """A fan-out without webhooks skips events only if there is still none."""
    await world.deliveries.fan_out_once()
    created = (await world.hook(["task.completed"])).webhook
    await world.complete()

    def late() -> Script[None]:
        yield Statement("fan_out_skip", {"name": CURSOR, "now": world.clock.now()})

    await world.store.transact_one(late)
    assert await world.fan_out() == 3
    assert len(await world.messages(created.id)) == 1


async def test_events_of_a_disabled_webhook_are_skipped(world: World) -> None:
    created = (await world.hook(["task.completed"])).webhook
    workspace = world.engine.workspace
    await world.hooks.update(created.id, workspace, WebhookChange(enabled=False))
    await world.complete(2)
    assert await world.deliveries.fan_out_once() == 0
    await world.hooks.update(created.id, workspace, WebhookChange(enabled=True))
    await world.complete()
    assert await world.fan_out() == 3
    assert len(await world.messages(created.id)) == 1


@pytest.mark.parametrize("limit", [1, 7, 500])
async def test_concurrent_fan_outs_create_every_delivery_once(
    world: World, another: Another, limit: int
) -> None:
    created = (await world.hook(["task.completed"])).webhook
    both = (await world.hook(["task.*"])).webhook
    await world.complete(10)

    async def drain(engine: Engine) -> int:
        duty, total = deliveries_of(store_of(engine)), 0
        while n := await duty.fan_out_once(limit):
            total += n
        return total

    async with another() as second:
        done = await asyncio.gather(*(drain(item) for item in (world.engine, second) * 2))
    assert sum(done) == 30
    assert len(await world.messages(created.id)) == 10
    assert len(await world.messages(both.id)) == 60


async def test_interrupted_fan_out_leaves_nothing(world: World) -> None:
    """After the insert, before the commit: the messages are gone with the move of the cursor."""
    created = (await world.hook(["task.completed"])).webhook
    await world.complete(2)

    def broken() -> Script[int]:
        yield from world.deliveries._fan_out(500)
        raise RuntimeError("cut off")

    with pytest.raises(RuntimeError):
        await world.store.transact(broken)
    assert await world.messages(created.id) == []
    assert await world.fan_out() == 6
    assert len(await world.messages(created.id)) == 2


async def test_delivery_is_created_once_though_the_cursor_goes_back(world: World) -> None:
    created = (await world.hook(["task.completed"])).webhook
    await world.complete(2)
    await world.fan_out()
    before = await world.messages(created.id)
    await world.raw.execute("update cursor set xid = 0, position = 0")
    assert await world.fan_out() == 6
    assert await world.messages(created.id) == before


async def test_events_of_other_objects_have_their_subject(world: World) -> None:
    created = (await world.hook(["agent.*"])).webhook
    stale = WebhookEvent(
        event="agent.stale", workspace=world.engine.workspace, at=world.clock.now()
    )

    def script() -> Script[int]:
        return (yield from world.deliveries.add_messages([stale, stale]))

    assert await world.store.transact(script) == 2
    for message in await world.messages(created.id):
        assert message.body["event"] == "agent.stale"
        assert [message.body[name] for name in FIELDS[1:4]] == [None, None, None]


async def test_damaged_event_does_not_block_the_others(
    sqlite_engine: Engine, sqlite_url: str, receiver: Receiver
) -> None:
    world = World(sqlite_engine, store_of(sqlite_engine), Raw(sqlite_url), receiver)
    created = (await world.hook(["task.completed"])).webhook
    damaged, good = await world.complete(2)
    await world.raw.execute(f"update event set at = {2**62} where task = '{damaged}'")
    assert await world.fan_out() == 6
    assert (await world.only(created.id)).task_id == good


async def test_fan_out_waits_for_an_open_transaction(
    postgres_engine: Engine, postgres_url: str, receiver: Receiver
) -> None:
    """Neither a fan-out nor a skip may pass over what is still to be committed."""
    world = World(postgres_engine, store_of(postgres_engine), Raw(postgres_url), receiver)
    task = UUID(int=1)
    async with connected(postgres_url) as connection:
        transaction = connection.transaction()
        await transaction.start()
        await connection.execute(
            "insert into event (task, seq, workspace, xid, kind, level, new, attempt, at)"
            " values ($1, 1, $2, pg_current_xact_id()::text::bigint, 'x', 'INFO', $3, 0, $4)",
            task,
            world.engine.workspace,
            Status.COMPLETED,
            world.clock.now(),
        )
        await world.complete()
        assert await world.deliveries.fan_out_once() == 0
        created = (await world.hook(["task.completed"])).webhook
        assert await world.fan_out() == 0
        await transaction.commit()
    assert await world.fan_out() == 4
    assert [message.task_id for message in await world.messages(created.id)][:1] == [task]


async def test_webhook_deleted_meanwhile_gets_no_delivery(
    postgres_engine: Engine, postgres_url: str, receiver: Receiver
) -> None:
    """The fan-out has read the webhook and not yet written; the deletion must wait for it."""
    world = World(postgres_engine, store_of(postgres_engine), Raw(postgres_url), receiver)
    created = (await world.hook(["task.completed"])).webhook
    await world.complete(3)
    waiting = "select count(*) from pg_locks where not granted"
    async with connected(postgres_url) as locker, connected(postgres_url) as watcher:
        transaction = locker.transaction()
        await transaction.start()
        await locker.execute("lock table webhook_delivery in exclusive mode")
        fan_out = asyncio.ensure_future(world.fan_out())
        await eventually(lambda: watcher.fetchval(waiting))
        deletion = asyncio.ensure_future(world.hooks.delete(created.id, world.engine.workspace))

        async def both_wait() -> bool:
            return bool(await watcher.fetchval(waiting) == 2)

        await eventually(both_wait)
        await transaction.commit()
        await asyncio.gather(fan_out, deletion)
    messages = await world.messages(created.id)
    assert {message.error for message in messages} == {"the webhook was deleted"}
    assert len(messages) == 3


async def test_stale_agent_is_an_event(world: World, clock: ManualClock) -> None:
    hook = await world.hook(["agent.*"])
    agent = await world.engine.register_agent(profile())
    clock.advance(100)
    assert await AgentMaintenance(world.engine.system).mark_stale_once("keeper") == 1
    await world.fan_out()
    assert (await world.only(hook.webhook.id)).event == "agent.stale"
    await world.deliver()
    [body] = world.bodies()
    assert (body["event"], body["agentId"], body["taskId"]) == ("agent.stale", str(agent.id), None)
