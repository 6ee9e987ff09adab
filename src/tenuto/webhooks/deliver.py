"""Sends what is due: a batch at a time, or for as long as a coordinator runs."""

import asyncio
import logging

from tenuto.crash_points import crash_point
from tenuto.engine.webhooks.deliveries import BATCH, LEASE_S, Deliveries, DueDelivery
from tenuto.metrics import PROCESS_METRICS
from tenuto.model.errors import TenutoError
from tenuto.periodic import run_periodically
from tenuto.webhooks import signature
from tenuto.webhooks.sender import Sender

log = logging.getLogger("tenuto.webhooks")

SLOTS = 32
"""Messages that one process sends at once."""
ROUNDS = 20
"""How often one look repeats a fan-out that still finds full batches."""


async def deliver_once(deliveries: Deliveries, sender: Sender, slots: int = SLOTS) -> int:
    """Take due messages and send them all at once; answers how many, when each is recorded."""
    taken = await deliveries.due(slots)
    await asyncio.gather(*(_deliver(deliveries, sender, due) for due in taken))
    return len(taken)


async def _deliver(deliveries: Deliveries, sender: Sender, due: DueDelivery) -> None:
    """Send one message and record what came of it; unrecorded, it is sent again after its lease."""
    headers = signature.headers(due.secrets, str(due.id), deliveries.clock.now(), due.body)
    answer = await sender.post(due.url, headers, due.body)
    crash_point("webhooks.sent")
    if answer.error is None:
        assert answer.status is not None
        await deliveries.delivered(due, answer.status)
        PROCESS_METRICS.count("tenuto_webhook_deliveries_total", "delivered")
    else:
        log.info("message %s was not delivered: attempt %d", due.id, due.attempt)
        await deliveries.failed(due, answer.error, answer.status)
        PROCESS_METRICS.count("tenuto_webhook_deliveries_total", "failed")


class Deliverer:
    """Fans events out and keeps up to `slots` messages under way, beside other duties.

    An endpoint gets its next messages when those before are through, so a slow one holds few slots.
    """

    def __init__(
        self, deliveries: Deliveries, sender: Sender, tick_s: float = 2.0, slots: int = SLOTS
    ) -> None:
        assert sender.deadline_s < LEASE_S
        self._deliveries = deliveries
        self._sender = sender
        self._tick_s = tick_s
        self._slots = slots
        self._under_way: dict[asyncio.Task[None], DueDelivery] = {}
        self._poke = asyncio.Event()

    async def run(self, stop: asyncio.Event) -> None:
        """Deliver until `stop`, then let what is under way end."""
        await run_periodically(
            self._guarded, lambda: self._tick_s, stop, self._deliveries.clock, self._poke
        )
        await self.settle()

    async def settle(self) -> None:
        """Wait for what is under way; the sender's deadline bounds it."""
        await asyncio.gather(*self._under_way)

    async def _guarded(self) -> None:
        try:
            await self.once()
        except TenutoError as error:
            log.warning("webhooks have to wait: %s", error)
        except Exception:
            log.exception("a fault in the webhooks; the next look goes on")

    async def once(self) -> int:
        """Fan events out and start sending what is due; answers how many, without waiting."""
        for _ in range(ROUNDS):
            if await self._deliveries.fan_out_once() < BATCH:
                break
        free = self._slots - len(self._under_way)
        if not free:
            return 0
        busy = {due.webhook for due in self._under_way.values()}
        taken = await self._deliveries.due(free, busy)
        for due in taken:
            task = asyncio.create_task(self._send(due))
            self._under_way[task] = due
            task.add_done_callback(self._ended)
        return len(taken)

    async def _send(self, due: DueDelivery) -> None:
        try:
            await _deliver(self._deliveries, self._sender, due)
        except TenutoError as error:
            log.warning("what became of message %s is not recorded: %s", due.id, error)
        except Exception:
            log.exception("a fault with message %s; it is sent again", due.id)

    def _ended(self, task: asyncio.Task[None]) -> None:
        due = self._under_way.pop(task)
        if all(each.webhook != due.webhook for each in self._under_way.values()):
            self._poke.set()
