"""Processes killed during fan-out or sending: no delivery is lost or doubled."""

import signal
from pathlib import Path
from uuid import UUID

import pytest
from tests.contract.conftest import Raw, running
from tests.proof.crash.system import System, system
from tests.webhooks.conftest import hooks_of, store_of
from tests.webhooks.receiver import Receiver

# How many messages there are after the crash, and how often the receiver gets the only one.
WEBHOOK_POINTS = {"webhooks.noted": (0, 1), "webhooks.taken": (1, 1), "webhooks.sent": (1, 2)}


async def subscribe(world: System, url: str) -> UUID:
    """Creates a webhook for one task and returns its id."""
    workspace = world.engine.workspace
    hooks = hooks_of(store_of(world.engine), workspace)
    created = await hooks.create(url, ["task.completed"], workspace, None)
    await world.engine.complete(await running(world.engine))
    return created.webhook.id


@pytest.mark.parametrize("point", WEBHOOK_POINTS)
async def test_crash_neither_loses_nor_doubles_a_delivery(
    database_url: str, tmp_path: Path, receiver: Receiver, point: str
) -> None:
    raw, process = Raw(database_url), ("python", "-m", "tests.webhooks.process")
    created, sent = WEBHOOK_POINTS[point]
    async with system(database_url, tmp_path) as world:
        webhook = await subscribe(world, receiver.url)
        crashing = world.start(*process, CRASH_AT=point)
        assert await crashing.ended() == -signal.SIGKILL, crashing.text()
        assert await raw.count("webhook_delivery") == created
        # What it had taken is anybody's again when the lease is over.
        await raw.execute("update webhook_delivery set next_attempt_at = created_at")
        healthy = world.start(*process)
        assert await healthy.ended() == 0, healthy.text()
        workspace = world.engine.workspace
        page = await hooks_of(store_of(world.engine), workspace).deliveries(webhook, workspace)
    [message] = page.deliveries
    assert message.status == "DELIVERED"
    assert [got.headers["webhook-id"] for got in receiver.got] == [str(message.id)] * sent
