"""Delivery: signed, retried until it succeeds, and bounded."""

import asyncio
from datetime import timedelta

import pytest
from tests.contract.conftest import Another, ManualClock, refusal
from tests.waiting import eventually
from tests.webhooks.conftest import World, deliveries_of, store_of
from tests.webhooks.receiver import answer, receiving, silent

from tenuto.broker.memory import MemoryWakeups
from tenuto.encryption_keys import KeyRing
from tenuto.engine.core import Core
from tenuto.engine.tasks.maintenance import DELIVERY_AFTER
from tenuto.engine.webhooks.deliveries import LEASE_S, MAX_PER_ENDPOINT, Deliveries
from tenuto.engine.webhooks.endpoints import WebhookChange
from tenuto.model.webhooks import DISABLE_AFTER_FAILURES, MAX_TRIES, TRIP_AFTER_FAILURES
from tenuto.webhooks import signature
from tenuto.webhooks.deliver import Deliverer, deliver_once
from tenuto.webhooks.sender import Sender
from tenuto.webhooks.url_guard import UrlGuard

ENDS = ["task.completed"]


async def waiting(world: World, n: int = 1) -> None:
    """Messages that are due, one for each of n tasks."""
    await world.complete(n)
    await world.fan_out()


async def test_delivery_arrives_signed(world: World) -> None:
    created = await world.hook(ENDS)
    await waiting(world)
    world.clock.advance(7)
    assert await world.deliver() == 1
    message = await world.only(created.webhook.id)
    assert (message.status, message.attempts, message.response_status) == ("DELIVERED", 1, 204)
    assert (message.error, message.next_attempt_at) == (None, None)
    assert message.delivered_at == world.clock.now()
    [got] = world.receiver.got
    assert got.headers["webhook-id"] == str(message.id)
    signature.verify(created.secret, got.headers, got.body, world.clock.now())
    assert world.bodies() == [message.body]
    assert created.secret.encode() not in got.body
    assert await world.deliver() == 0


async def test_both_secrets_sign_after_a_rotation(world: World) -> None:
    created = await world.hook(ENDS)
    second = await world.hooks.rotate_secret(created.webhook.id, world.engine.workspace)
    await waiting(world)
    await world.deliver()
    third = await world.hooks.rotate_secret(created.webhook.id, world.engine.workspace)
    await waiting(world)
    await world.deliver()
    first_got, last_got = world.receiver.got
    for secret, got in ((created, first_got), (second, first_got), (second, last_got)):
        signature.verify(secret.secret, got.headers, got.body, world.clock.now())
    signature.verify(third.secret, last_got.headers, last_got.body, world.clock.now())
    assert len(last_got.headers["webhook-signature"].split(" ")) == 2


async def test_failed_delivery_is_retried_with_growing_delays(world: World) -> None:
    world.receiver.replies = [answer(500, b"out of order")]
    created = (await world.hook(ENDS)).webhook
    await waiting(world)
    waits = []
    for attempt in range(1, MAX_TRIES):
        world.clock.advance(hours=2)  # whatever rests, the endpoint is open again
        assert await deliver_once(world.deliveries, world.sender) == 1
        message = await world.only(created.id)
        assert (message.status, message.attempts) == ("PENDING", attempt)
        assert (message.response_status, message.error) == (500, "HTTP 500: out of order")
        waits.append((await world.wait(created.id)).total_seconds())
    assert waits == [5, 10, 20, 40, 80, 160, 320, 640, 1280, 2560, 3600]
    world.clock.advance(hours=2)
    assert await world.deliver() == 1
    message = await world.only(created.id)
    assert (message.status, message.next_attempt_at) == ("FAILED", None)
    assert (message.attempts, message.error) == (MAX_TRIES, "HTTP 500: out of order")
    world.clock.advance(days=1)
    assert await world.deliver() == 0
    assert len({got.headers["webhook-id"] for got in world.receiver.got}) == 1


async def test_delivery_waits_for_its_time(world: World) -> None:
    world.receiver.replies = [answer(503), answer(503), answer(204)]
    created = (await world.hook(ENDS)).webhook
    await waiting(world)
    assert await world.deliver() == 1
    world.clock.advance(4)
    assert await world.deliver() == 0
    world.clock.advance(2)
    assert await world.deliver() == 1
    world.clock.advance(11)
    assert await world.deliver() == 1
    message = await world.only(created.id)
    assert (message.status, message.attempts, message.error) == ("DELIVERED", 3, None)
    assert (await world.show(created.id)).failures == 0


async def test_jitter_spreads_the_retries(world: World) -> None:
    world.receiver.replies = [answer(500)]
    created = (await world.hook(ENDS)).webhook
    await waiting(world)
    world.clock.roll = 0.0
    await world.deliver()
    assert await world.wait(created.id) == timedelta(seconds=4)


async def test_endpoint_that_responds_410_is_disabled(world: World) -> None:
    created = (await world.hook(ENDS)).webhook
    await waiting(world, 3)
    world.receiver.replies = [answer(410)]
    assert await deliver_once(world.deliveries, world.sender, slots=1) == 1
    view = await world.show(created.id)
    assert (view.enabled, view.disabled_why) == (False, "the endpoint answered 410 Gone")
    messages = await world.messages(created.id)
    assert {(message.status, message.error) for message in messages} == {
        ("FAILED", view.disabled_why)
    }
    assert await world.deliver() == 0
    again = world.hooks.redeliver(messages[0].id, world.engine.workspace)
    assert await refusal(again) == "webhook_disabled"
    assert len(world.receiver.got) == 1


async def test_circuit_of_a_failing_endpoint_opens(world: World) -> None:
    """Five in a row, then rests that double, each ended by one probe."""
    world.receiver.replies = [answer(500)]
    created = (await world.hook(ENDS)).webhook
    await waiting(world, 20)
    for _ in range(TRIP_AFTER_FAILURES):
        assert await deliver_once(world.deliveries, world.sender, slots=1) == 1
    rests = []
    for _ in range(9):
        until = (await world.show(created.id)).closed_until
        assert until is not None
        rests.append((until - world.clock.now()).total_seconds())
        assert await world.deliver() == 0
        world.clock.advance(rests[-1])
        assert await world.deliver() == 1
    assert rests == [30, 60, 120, 240, 480, 960, 1920, 3600, 3600]
    assert len(world.receiver.got) == TRIP_AFTER_FAILURES + 9
    world.receiver.replies = [answer(200)]
    world.clock.advance(3600)
    assert await deliver_once(world.deliveries, world.sender) == 1
    view = await world.show(created.id)
    assert (view.failures, view.closed_until) == (0, None)
    world.clock.advance(3600)
    await world.deliver()
    assert await world.statuses(created.id) == ["DELIVERED"] * 20


async def test_concurrent_failures_open_the_circuit_once(world: World) -> None:
    world.receiver.replies = [answer(500)]
    created = (await world.hook(ENDS)).webhook
    await waiting(world, MAX_PER_ENDPOINT)
    assert await deliver_once(world.deliveries, world.sender) == MAX_PER_ENDPOINT
    view = await world.show(created.id)
    assert view.failures == TRIP_AFTER_FAILURES
    assert view.closed_until == world.clock.now() + timedelta(seconds=30)


async def test_failure_reported_late_does_not_count(world: World) -> None:
    created = (await world.hook(ENDS)).webhook
    await waiting(world, TRIP_AFTER_FAILURES + 1)
    *first, last = await world.deliveries.lease_due(32)
    for item in first:
        await world.deliveries.record_failure(item, "no answer")
    tripped = await world.show(created.id)
    assert tripped.closed_until is not None
    world.clock.advance((tripped.closed_until - world.clock.now()).total_seconds() + 1)
    await world.deliveries.record_failure(last, "no answer")
    assert await world.show(created.id) == tripped


async def test_open_circuit_sends_one_probe_at_a_time(world: World, another: Another) -> None:
    world.receiver.replies = [answer(500)]
    created = (await world.hook(ENDS)).webhook
    await waiting(world, 10)
    await deliver_once(world.deliveries, world.sender)
    world.clock.advance(31)
    async with another() as second:
        other = deliveries_of(store_of(second))
        taken = await asyncio.gather(world.deliveries.lease_due(32), other.lease_due(32))
        [probe] = [due for some in taken for due in some]
        assert probe.probe
        assert await world.deliveries.lease_due(32) == await other.lease_due(32) == []
        # Its sender dies: when the lease is over, another may try.
        world.clock.advance(LEASE_S + 1)
        assert isinstance(second.clock, ManualClock)
        second.clock.advance(LEASE_S + 1)
        [again] = await other.lease_due(32)
        await other.record_success(again, 200)
    assert (await world.show(created.id)).closed_until is None


async def test_endpoint_failing_many_times_in_a_row_is_disabled(world: World) -> None:
    world.receiver.replies = [answer(500)]
    created = (await world.hook(ENDS)).webhook
    await waiting(world, 12)
    await world.raw.execute(f"update webhook set failures = {DISABLE_AFTER_FAILURES - 1}")
    assert await world.deliver() == 1
    view = await world.show(created.id)
    assert not view.enabled
    assert view.disabled_why == f"the endpoint failed {DISABLE_AFTER_FAILURES} times in a row"
    assert await world.statuses(created.id) == ["FAILED"] * 12
    workspace = world.engine.workspace
    view = await world.hooks.update(created.id, workspace, WebhookChange(enabled=True))
    assert (view.failures, view.disabled_why) == (0, None)
    world.receiver.replies = [answer(200)]
    first = (await world.messages(created.id))[0]
    await world.hooks.redeliver(first.id, workspace)
    assert await world.deliver() == 1


async def test_new_url_resets_the_circuit(world: World) -> None:
    world.receiver.replies = [answer(500)]
    created = (await world.hook(ENDS)).webhook
    await waiting(world, MAX_PER_ENDPOINT)
    await deliver_once(world.deliveries, world.sender)
    async with receiving() as moved:
        change = WebhookChange(url=moved.url)
        view = await world.hooks.update(created.id, world.engine.workspace, change)
        assert (view.failures, view.closed_until) == (0, None)
        world.clock.advance(10)
        assert await world.deliver() == MAX_PER_ENDPOINT
        assert len(moved.got) == MAX_PER_ENDPOINT


async def test_delivery_is_sent_again_on_request(world: World) -> None:
    created = (await world.hook(ENDS)).webhook
    await waiting(world)
    await world.deliver()
    message = await world.only(created.id)
    again = await world.hooks.redeliver(message.id, world.engine.workspace)
    assert (again.status, again.attempts, again.delivered_at) == ("PENDING", 0, None)
    repeated = world.hooks.redeliver(message.id, world.engine.workspace)
    assert await refusal(repeated) == "out_of_turn"
    assert await world.deliver() == 1
    first, second = world.receiver.got
    assert first.headers["webhook-id"] == second.headers["webhook-id"]
    assert first.body == second.body
    assert (await world.only(created.id)).status == "DELIVERED"


async def test_delivery_of_a_crashed_sender_is_sent_by_another(
    world: World, another: Another
) -> None:
    """Taken and maybe sent, but not recorded: it is sent again, and the late report is ignored."""
    created = (await world.hook(ENDS)).webhook
    await waiting(world)
    [lost] = await world.deliveries.lease_due(32)
    assert await world.deliver() == 0
    world.clock.advance(LEASE_S - 1)
    assert await world.deliver() == 0
    world.clock.advance(2)
    [second] = await world.deliveries.lease_due(32)
    assert (second.id, second.attempt) == (lost.id, 2)
    await world.deliveries.record_failure(lost, "late")
    await world.deliveries.record_success(lost, 200)
    message = await world.only(created.id)
    assert (message.status, message.error) == ("PENDING", None)
    assert await world.wait(created.id) == timedelta(seconds=LEASE_S)
    await world.deliveries.record_success(second, 201)
    message = await world.only(created.id)
    assert (message.status, message.response_status, message.attempts) == ("DELIVERED", 201, 2)


async def test_delivery_that_always_crashes_its_sender_is_given_up(world: World) -> None:
    created = (await world.hook(ENDS)).webhook
    await waiting(world)
    for _ in range(MAX_TRIES):
        assert len(await world.deliveries.lease_due(32)) == 1
        world.clock.advance(LEASE_S + 1)
    assert await world.deliveries.lease_due(32) == []
    message = await world.only(created.id)
    assert (message.status, message.error) == (
        "FAILED",
        "the sender of the last attempt crashed or timed out",
    )


async def test_two_senders_share_the_deliveries(world: World, another: Another) -> None:
    await world.hook(ENDS)
    await world.hook(ENDS)
    await waiting(world, 12)

    async def drain(deliveries: Deliveries) -> int:
        total = 0
        while n := await deliver_once(deliveries, world.sender, slots=4):
            total += n
        return total

    async with another() as second:
        other = deliveries_of(store_of(second))
        await asyncio.gather(drain(world.deliveries), drain(other))
    await drain(world.deliveries)
    ids = [got.headers["webhook-id"] for got in world.receiver.got]
    assert len(ids) == len(set(ids)) == 24


async def test_slow_endpoint_delays_no_other(world: World) -> None:
    async with receiving() as slow:
        slow.replies = [silent()]
        await world.hook(ENDS, slow.url)
        quick = (await world.hook(ENDS)).webhook
        await waiting(world, 3 * MAX_PER_ENDPOINT)
        sender = Sender(UrlGuard(["127.0.0.1"]), deadline_s=20)
        deliverer = Deliverer(world.deliveries, sender, slots=2 * MAX_PER_ENDPOINT)

        async def look() -> bool:
            await deliverer.once()
            return set(await world.statuses(quick.id)) == {"DELIVERED"}

        await eventually(look)
        assert slow.connections <= MAX_PER_ENDPOINT
        await slow.close()
        await deliverer.wait_until_idle()


async def test_deliverer_runs_until_stopped(world: World) -> None:
    created = (await world.hook(ENDS)).webhook
    stop = asyncio.Event()
    deliverer = Deliverer(world.deliveries, world.sender, tick_s=0.05, slots=4)
    running = asyncio.ensure_future(deliverer.run(stop))
    await world.complete(10)

    async def all_there() -> bool:
        return await world.statuses(created.id) == ["DELIVERED"] * 10

    await eventually(all_there)
    stop.set()
    await running
    assert len(world.receiver.got) == 10


async def test_secret_that_cannot_be_decrypted_fails_the_delivery(world: World) -> None:
    created = (await world.hook(ENDS)).webhook
    await waiting(world)
    ring = KeyRing({"other": bytes(range(2, 34))})
    strange = Deliveries(Core(world.store, MemoryWakeups(), ring))
    assert await deliver_once(strange, world.sender) == 0
    message = await world.only(created.id)
    assert message.status == "PENDING"
    assert "no encryption key" in (message.error or "")
    assert world.receiver.connections == 0
    world.clock.advance(6)
    assert await world.deliver() == 1


async def test_deliverer_without_keys_takes_nothing(world: World) -> None:
    created = (await world.hook(ENDS)).webhook
    keyless = Deliveries(Core(world.store, MemoryWakeups()))
    assert await keyless.lease_due(32) == []
    await waiting(world)
    assert await refusal(keyless.lease_due(32)) == "secrets_unavailable"
    assert (await world.only(created.id)).attempts == 0


@pytest.mark.parametrize("days", [0, 1])
async def test_deliveries_finished_long_ago_are_deleted(world: World, days: int) -> None:
    created = (await world.hook(ENDS)).webhook
    await waiting(world)
    await world.deliver()
    await waiting(world)
    world.clock.advance(DELIVERY_AFTER.total_seconds() + days)
    await world.engine.maintenance.prune_once()
    left = ["PENDING"] if days else ["DELIVERED", "PENDING"]
    assert await world.statuses(created.id) == left
