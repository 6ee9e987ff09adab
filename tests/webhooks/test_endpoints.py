"""Webhook endpoints as users manage them, on both databases."""

from uuid import UUID

import msgspec
import pytest
from tests.contract.conftest import refusal
from tests.webhooks.conftest import VAULT, World, hooks_of

from tenuto.broker.memory import MemoryWakeups
from tenuto.encryption_keys import KeyRing
from tenuto.engine.core import Core
from tenuto.engine.tenancy.secrets import KeyRotator
from tenuto.engine.webhooks.endpoints import WebhookChange, WebhookEndpoints
from tenuto.model.errors import NotFound
from tenuto.model.webhooks import EVENTS, MAX_WEBHOOKS, is_subscribed
from tenuto.webhooks.url_guard import UrlGuard

MISSING_ID = UUID(int=7 << 76 | 2 << 62)


async def test_webhook_is_shown_as_created(world: World) -> None:
    created = await world.hooks.create(
        world.receiver.url, ["task.dead", "*", "task.dead"], world.engine.workspace, "me", "mine"
    )
    view = await world.show(created.webhook.id)
    assert view == created.webhook
    assert (view.url, view.events) == (world.receiver.url, ["*", "task.dead"])
    assert (view.enabled, view.disabled_why, view.failures) == (True, None, 0)
    assert (view.description, view.created_by, view.version) == ("mine", "me", 1)
    assert view.created_at == view.updated_at == world.clock.now()
    shown = msgspec.to_builtins(view)
    assert {"closedUntil", "disabledWhy", "createdBy"} <= set(shown)


async def test_webhook_secret_is_shown_once_and_stored_encrypted(world: World) -> None:
    created = await world.hook()
    assert created.secret.startswith("whsec_")
    again = await world.hook()
    assert again.secret != created.secret
    shown = msgspec.json.encode(await world.hooks.page(world.engine.workspace))
    stored = str(await world.raw.fetch("select * from webhook"))
    for secret in (created.secret, again.secret):
        assert secret.encode() not in shown
        assert secret.removeprefix("whsec_") not in stored


async def test_webhooks_are_listed_in_pages(world: World) -> None:
    created = [(await world.hook()).webhook.id for _ in range(5)]
    workspace = world.engine.workspace
    first = await world.hooks.page(workspace, 2)
    assert first.next_cursor is not None
    second = await world.hooks.page(workspace, 2, first.next_cursor)
    third = await world.hooks.page(workspace, 2, second.next_cursor)
    assert third.next_cursor is None
    pages = (first, second, third)
    assert [webhook.id for page in pages for webhook in page.webhooks] == created[::-1]


async def test_webhooks_of_a_workspace_are_limited(world: World) -> None:
    for _ in range(MAX_WEBHOOKS):
        await world.hook()
    assert await refusal(world.hook()) == "too_many_webhooks"
    assert len((await world.hooks.page(world.engine.workspace)).webhooks) == MAX_WEBHOOKS


@pytest.mark.parametrize(
    ("url", "code"),
    [
        ("http://10.0.0.1/", "url_forbidden"),
        ("https://169.254.169.254/", "url_forbidden"),
        ("http://2130706433/", "url_invalid"),
        ("file:///etc/passwd", "url_invalid"),
    ],
)
async def test_webhook_url_is_checked_before_it_is_stored(
    world: World, url: str, code: str
) -> None:
    created = await world.hook()
    assert await refusal(world.hook(url=url)) == code
    change = WebhookChange(url=url)
    update = world.hooks.update(created.webhook.id, world.engine.workspace, change)
    assert await refusal(update) == code
    assert await world.raw.count("webhook") == 1
    assert await world.show(created.webhook.id) == created.webhook


@pytest.mark.parametrize("events", [[], [""], ["task"], ["task.gone"], ["task.*", "x.*"], ["**"]])
async def test_unknown_webhook_event_is_refused(world: World, events: list[str]) -> None:
    assert await refusal(world.hook(events)) == "invalid_value"
    created = await world.hook()
    change = WebhookChange(events=events)
    update = world.hooks.update(created.webhook.id, world.engine.workspace, change)
    assert await refusal(update) == "invalid_value"


def test_event_pattern_matches_a_whole_family() -> None:
    named = {"task.status_changed", "task.completed", "task.failed", "task.dead", "task.cancelled"}
    assert named | {"inbox.created", "agent.stale"} <= EVENTS
    assert all(is_subscribed(["*"], event) for event in EVENTS)
    assert {event for event in EVENTS if is_subscribed(["inbox.*"], event)} == {"inbox.created"}
    assert is_subscribed(["agent.stale", "task.*"], "task.dead")
    assert not is_subscribed(["task.completed", "agent.*"], "task.dead")


async def test_edit_keeps_other_fields(world: World) -> None:
    created = (await world.hook()).webhook
    workspace = world.engine.workspace
    world.clock.advance(5)
    change = WebhookChange(events=["task.dead"], description="now")
    view = await world.hooks.update(created.id, workspace, change, version=1)
    assert (view.events, view.description) == (["task.dead"], "now")
    assert (view.url, view.enabled, view.version) == (created.url, True, 2)
    assert (view.created_at, view.updated_at) == (created.created_at, world.clock.now())
    view = await world.hooks.update(created.id, workspace, WebhookChange(description=None))
    assert (view.description, view.events, view.version) == (None, ["task.dead"], 3)


async def test_edit_does_not_overwrite_a_concurrent_edit(world: World) -> None:
    created = (await world.hook()).webhook
    workspace = world.engine.workspace
    await world.hooks.update(created.id, workspace, WebhookChange(description="first"), version=1)
    late = world.hooks.update(created.id, workspace, WebhookChange(description="late"), version=1)
    assert await refusal(late) == "version_conflict"
    assert (await world.show(created.id)).description == "first"


async def test_disabled_webhook_drops_waiting_deliveries(world: World) -> None:
    created = (await world.hook(["task.completed"])).webhook
    workspace = world.engine.workspace
    await world.complete()
    await world.fan_out()
    view = await world.hooks.update(created.id, workspace, WebhookChange(enabled=False))
    assert (view.enabled, view.disabled_why) == (False, "the webhook was disabled")
    message = await world.only(created.id)
    assert (message.status, message.error) == ("FAILED", "the webhook was disabled")
    await world.complete()
    await world.fan_out()
    view = await world.hooks.update(created.id, workspace, WebhookChange(enabled=True))
    assert (view.enabled, view.disabled_why) == (True, None)
    assert await world.statuses(created.id) == ["FAILED"]
    assert await world.deliver() == 0


async def test_deleted_webhook_leaves_sent_deliveries(world: World) -> None:
    created = (await world.hook(["task.completed"])).webhook
    workspace = world.engine.workspace
    await world.complete()
    await world.fan_out()
    await world.deliver()
    await world.complete()
    await world.fan_out()
    await world.hooks.delete(created.id, workspace)
    assert await refusal(world.show(created.id)) == "not_found"
    sent, given_up = await world.messages(created.id)
    assert (sent.status, given_up.status) == ("DELIVERED", "FAILED")
    assert given_up.error == "the webhook was deleted"
    assert await world.deliver() == 0
    assert await refusal(world.hooks.redeliver(sent.id, workspace)) == "webhook_disabled"
    assert await refusal(world.hooks.delete(created.id, workspace)) == "not_found"


async def test_webhooks_of_another_workspace_are_not_found(world: World) -> None:
    created = (await world.hook(["task.completed"])).webhook
    await world.complete()
    await world.fan_out()
    message = await world.only(created.id)
    other = await world.raw.workspace(2)
    theirs = hooks_of(world.store, other)
    assert (await theirs.page(other)).webhooks == []
    for call in (
        theirs.show(created.id, other),
        theirs.update(created.id, other, WebhookChange(enabled=False)),
        theirs.delete(created.id, other),
        theirs.rotate_secret(created.id, other),
        theirs.deliveries(created.id, other),
        theirs.redeliver(message.id, other),
    ):
        with pytest.raises(NotFound):
            await call
    assert await world.show(created.id) == created
    assert await world.only(created.id) == message
    assert await refusal(world.show(MISSING_ID)) == "not_found"


async def test_webhook_without_an_encryption_key_is_refused(world: World) -> None:
    core = Core(world.store.for_workspace(world.engine.workspace), MemoryWakeups())
    hooks = WebhookEndpoints(core, UrlGuard(["127.0.0.1"]).resolve_allowed)
    call = hooks.create(world.receiver.url, ["*"], world.engine.workspace, None)
    assert await refusal(call) == "secrets_unavailable"


async def test_webhook_works_after_a_key_rotation(world: World) -> None:
    created = (await world.hook(["task.completed"])).webhook
    ring = KeyRing({"second": bytes(range(1, 33)), "first": bytes(range(32))})
    core = Core(world.store, MemoryWakeups(), ring)
    assert await KeyRotator(core).rotate_once() == 1
    [(key_id,)] = await world.raw.fetch("select key_id from webhook")
    assert key_id == "second"
    assert VAULT.current == "first"
    rotated = await WebhookEndpoints(core, UrlGuard().resolve_allowed).rotate_secret(
        created.id, world.engine.workspace
    )
    assert rotated.secret.startswith("whsec_")
