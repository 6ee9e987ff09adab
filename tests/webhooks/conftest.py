"""Webhooks of an engine on each kind of store, and a receiver that the operator allows."""

from collections.abc import AsyncIterator, Sequence
from datetime import timedelta
from typing import Any
from uuid import UUID

import msgspec
import pytest
from tests.contract.conftest import (
    AnyStore,
    ManualClock,
    Raw,
    another,
    clock,
    engine,
    postgres_engine,
    raw,
    running,
    sqlite_engine,
    store,
)
from tests.webhooks.receiver import Receiver, receiving

from tenuto.broker.memory import MemoryWakeups
from tenuto.encryption_keys import KeyRing
from tenuto.engine.core import Core
from tenuto.engine.engine import Engine
from tenuto.engine.webhooks.deliveries import Deliveries
from tenuto.engine.webhooks.endpoints import (
    DeliveryView,
    WebhookEndpoints,
    WebhookSecret,
    WebhookView,
)
from tenuto.store.protocol import Store
from tenuto.webhooks.deliver import deliver_once
from tenuto.webhooks.sender import Sender
from tenuto.webhooks.url_guard import UrlGuard

__all__ = ["another", "clock", "engine", "postgres_engine", "raw", "sqlite_engine", "store"]

VAULT = KeyRing({"first": bytes(range(32))})
LOOPBACK = ["127.0.0.0/8"]


def hooks_of(store: Store, workspace: UUID) -> WebhookEndpoints:
    """Returns the endpoints of an engine's workspace."""
    core = Core(store.for_workspace(workspace), MemoryWakeups(), VAULT)
    return WebhookEndpoints(core, UrlGuard(LOOPBACK).resolve_allowed)


def deliveries_of(store: Store) -> Deliveries:
    """Returns the deliveries of all workspaces."""
    return Deliveries(Core(store, MemoryWakeups(), VAULT))


def store_of(engine: Engine) -> Store:
    """The store of an engine, as the system sees it."""
    return engine.maintenance._core.store


class World:
    """Everything that a message passes, with a clock that the test moves."""

    def __init__(self, engine: Engine, store: Store, raw: Raw, receiver: Receiver) -> None:
        self.engine = engine
        self.store = store
        self.raw = raw
        self.receiver = receiver
        self.hooks = hooks_of(store, engine.workspace)
        self.deliveries = deliveries_of(store)
        self.sender = Sender(UrlGuard(LOOPBACK), deadline_s=5)
        assert isinstance(engine.clock, ManualClock)
        self.clock = engine.clock

    async def hook(self, events: Sequence[str] = ("*",), url: str | None = None) -> WebhookSecret:
        """A new webhook to the receiver."""
        return await self.hooks.create(
            url or self.receiver.url, events, self.engine.workspace, "tester"
        )

    async def show(self, webhook: UUID) -> WebhookView:
        return await self.hooks.show(webhook, self.engine.workspace)

    async def complete(self, n: int = 1) -> list[UUID]:
        """Tasks that were submitted, claimed and completed."""
        done = []
        for _ in range(n):
            fence = await running(self.engine)
            await self.engine.complete(fence)
            done.append(fence.task)
        return done

    async def fan_out(self, limit: int = 500) -> int:
        """All events there are, batch by batch; answers how many."""
        total = 0
        while n := await self.deliveries.fan_out_once(limit):
            total += n
        return total

    async def deliver(self) -> int:
        """Everything that is due now; answers how many messages were sent."""
        total = 0
        while n := await deliver_once(self.deliveries, self.sender):
            total += n
        return total

    async def messages(self, webhook: UUID) -> list[DeliveryView]:
        """Returns all deliveries of a webhook, oldest first."""
        page = await self.hooks.deliveries(webhook, self.engine.workspace, 1000)
        return page.deliveries[::-1]

    async def only(self, webhook: UUID) -> DeliveryView:
        [message] = await self.messages(webhook)
        return message

    async def statuses(self, webhook: UUID) -> list[str]:
        return [message.status for message in await self.messages(webhook)]

    def bodies(self) -> list[dict[str, Any]]:
        """Returns the bodies that the receiver got, in order of arrival."""
        return [msgspec.json.decode(got.body) for got in self.receiver.got]

    async def wait(self, webhook: UUID) -> timedelta:
        """Returns how long the only delivery waits for its next attempt."""
        at = (await self.only(webhook)).next_attempt_at
        assert at is not None
        return at - self.clock.now()


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    async with receiving() as created:
        yield created


@pytest.fixture
def world(engine: Engine, store: AnyStore, raw: Raw, receiver: Receiver) -> World:
    return World(engine, store, raw, receiver)
