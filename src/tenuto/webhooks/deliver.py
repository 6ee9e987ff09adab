"""Signs and sends due webhook messages: one batch, or continuously while a coordinator runs."""

import asyncio
import logging

from tenuto.crash_points import crash_point
from tenuto.engine.webhooks.deliveries import LEASE_S, MAX_BATCH, Deliveries, DueDelivery
from tenuto.metrics import PROCESS_METRICS
from tenuto.model.errors import TenutoError
from tenuto.periodic import run_periodically
from tenuto.webhooks import signature
from tenuto.webhooks.sender import Sender

log = logging.getLogger("tenuto.webhooks")

SLOTS = 32
"""Messages that one process sends at the same time."""
ROUNDS = 20
"""How often one cycle repeats the fan-out while it finds full batches."""


async def deliver_once(deliveries: Deliveries, sender: Sender, slots: int = SLOTS) -> int:
    """Sends up to `slots` due messages and records the results; returns how many, failed too."""
    leased = await deliveries.lease_due(slots)
    await asyncio.gather(*(_deliver(deliveries, sender, due) for due in leased))
    return len(leased)


async def _deliver(deliveries: Deliveries, sender: Sender, due: DueDelivery) -> None:
    """Sends one message and records the result; raises if unrecorded: it is sent again."""
    headers = signature.headers(due.secrets, str(due.id), deliveries.clock.now(), due.body)
    result = await sender.post(due.url, headers, due.body)
    crash_point("webhooks.sent")
    if result.error is None:
        assert result.status is not None
        await deliveries.record_success(due, result.status)
        PROCESS_METRICS.count("tenuto_webhook_deliveries_total", "delivered")
    else:
        log.info("webhook message %s was not delivered in attempt %d", due.id, due.attempt)
        await deliveries.record_failure(due, result.error, result.status)
        PROCESS_METRICS.count("tenuto_webhook_deliveries_total", "failed")


class Deliverer:
    """Fans events out and sends up to `slots` messages at the same time.

    An endpoint gets its next messages when the previous ones are done, so a slow endpoint uses few
    slots.
    """

    def __init__(
        self, deliveries: Deliveries, sender: Sender, tick_s: float = 2.0, slots: int = SLOTS
    ) -> None:
        assert sender.deadline_s < LEASE_S
        self._deliveries = deliveries
        self._sender = sender
        self._tick_s = tick_s
        self._slots = slots
        self._in_flight: dict[asyncio.Task[None], DueDelivery] = {}
        self._wake = asyncio.Event()

    async def run(self, stop: asyncio.Event) -> None:
        """Delivers until `stop`, then waits for running deliveries."""
        await run_periodically(
            self._run_once_logged, lambda: self._tick_s, stop, self._deliveries.clock, self._wake
        )
        await self.wait_until_idle()

    async def wait_until_idle(self) -> None:
        """Waits until the running deliveries have ended, within the sender's deadline."""
        await asyncio.gather(*self._in_flight)

    async def _run_once_logged(self) -> None:
        """Runs one cycle; logs errors instead of raising them."""
        try:
            await self.once()
        except TenutoError as error:
            log.warning("webhook deliveries are delayed: %s", error)
        except Exception:
            log.exception("internal error in webhook deliveries; the next cycle retries")

    async def once(self) -> int:
        """Fans events out; starts due deliveries except for busy webhooks, and returns how many."""
        for _ in range(ROUNDS):
            if await self._deliveries.fan_out_once() < MAX_BATCH:
                break
        free = self._slots - len(self._in_flight)
        if not free:
            return 0
        busy = {due.webhook for due in self._in_flight.values()}
        leased = await self._deliveries.lease_due(free, busy)
        for due in leased:
            task = asyncio.create_task(self._send(due))
            self._in_flight[task] = due
            task.add_done_callback(self._on_sent)
        return len(leased)

    async def _send(self, due: DueDelivery) -> None:
        """Sends one message and records the result; logs errors instead of raising them."""
        try:
            await _deliver(self._deliveries, self._sender, due)
        except TenutoError as error:
            log.warning("the result of webhook message %s is not recorded: %s", due.id, error)
        except Exception:
            log.exception("internal error with webhook message %s; it is sent again", due.id)

    def _on_sent(self, task: asyncio.Task[None]) -> None:
        """Removes a finished delivery; wakes the loop if it was the last of its endpoint."""
        due = self._in_flight.pop(task)
        if all(other.webhook != due.webhook for other in self._in_flight.values()):
            self._wake.set()
