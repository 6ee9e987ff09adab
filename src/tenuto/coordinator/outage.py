"""While the store is away: when to ask again, and whom to tell by means that need no store."""

import asyncio
import logging
from contextlib import suppress
from datetime import datetime
from typing import Literal

import httpx2
import msgspec

from tenuto.clock import Clock
from tenuto.metrics import PROCESS_METRICS
from tenuto.model.printable import printable
from tenuto.tls import trusted_for

log = logging.getLogger("tenuto.coordinator")

PAUSES = (5.0, 10.0, 20.0, 40.0)
"""Seconds between looks for a store that does not answer; the last one repeats."""
TOO_LONG_S = 300.0
"""How long the store may be away before somebody is told."""
POST_S = 5.0
TRIES = (1.0, 5.0, 0.0)
"""Seconds after each try to post an alert; after the last one it is given up."""


def pause_after(failures: int) -> float:
    """Seconds to wait after so many failed looks in a row."""
    return PAUSES[min(failures, len(PAUSES)) - 1]


class Alert(msgspec.Struct, frozen=True, kw_only=True):
    """What is posted: which alert, in words, since when the store has been away, who noticed."""

    alert: Literal["database_down", "database_up"]
    message: str
    since: datetime
    instance: str


class AlertSender:
    """Tells the log and a URL. It never raises and keeps nobody waiting."""

    def __init__(self, url: str, clock: Clock) -> None:
        self._url = url
        self._clock = clock
        self._order = asyncio.Lock()
        self._posts: set[asyncio.Task[None]] = set()

    def tell(self, alert: Alert) -> None:
        """Say it now; the URL hears it as soon as it listens, each alert after the one before."""
        level = logging.CRITICAL if alert.alert == "database_down" else logging.WARNING
        log.log(level, "%s: %s", alert.alert, alert.message)
        if self._url:
            post = asyncio.get_running_loop().create_task(self._post(msgspec.json.encode(alert)))
            self._posts.add(post)
            post.add_done_callback(self._posts.discard)

    async def _post(self, body: bytes) -> None:
        async with self._order:
            for pause in TRIES:
                if (why := await self._refusal(body)) is None:
                    return
                # The address may hold a key: it stays out of the log.
                log.warning("the alert could not be posted: %s", why)
                await self._clock.sleep(pause)

    async def _refusal(self, body: bytes) -> str | None:
        """Post once; answers why it was in vain, if it was."""
        headers = {"content-type": "application/json"}
        try:
            client = httpx2.AsyncClient(verify=trusted_for(self._url))
            async with asyncio.timeout(POST_S), client:
                answer = await client.post(self._url, content=body, headers=headers)
        except TimeoutError:
            return f"no answer within {POST_S:g} s"
        except Exception as error:  # noqa: BLE001  whatever a URL does, the cycle goes on
            return type(error).__name__
        return None if answer.is_success else f"HTTP {answer.status_code}"

    async def close(self) -> None:
        """Give posts under way a moment, then leave them."""
        posts = list(self._posts)
        if posts:
            await asyncio.wait(posts, timeout=POST_S)
        for post in posts:
            post.cancel()
            with suppress(asyncio.CancelledError):
                await post


class OutageMonitor:
    """How long the store has not answered, what to do meanwhile, and what to say once."""

    def __init__(self, alarm: AlertSender, clock: Clock, instance: str) -> None:
        self._alarm = alarm
        self._clock = clock
        self._instance = instance
        self.failures = 0
        self._begun = 0.0
        self._since = clock.now()
        self._told = False
        PROCESS_METRICS.put("tenuto_database_down_seconds", 0)

    def pause(self, usual: float) -> float:
        """Seconds until the next look."""
        return pause_after(self.failures) if self.failures else usual

    def failed(self, why: str) -> None:
        """The store did not answer; tell of it once it has been so for too long."""
        now = self._clock.elapsed()
        if not self.failures:
            self._begun, self._since = now, self._clock.now()
        self.failures += 1
        away = now - self._begun
        PROCESS_METRICS.put("tenuto_database_down_seconds", away)
        if away > TOO_LONG_S and not self._told:
            self._told = True
            self._tell("database_down", f"the database has been away for {away:.0f} s: {why}")

    def answered(self) -> float | None:
        """The store answered; how long it had been away, if it was missed more than once."""
        if not self.failures:
            return None
        away = self._clock.elapsed() - self._begun
        missed, self.failures = self.failures > 1, 0
        PROCESS_METRICS.put("tenuto_database_down_seconds", 0)
        if self._told:
            self._told = False
            self._tell("database_up", f"the database is back after {away:.0f} s")
        return away if missed else None

    def _tell(self, alert: Literal["database_down", "database_up"], message: str) -> None:
        # The reasons are a server's words, and whoever is told shows them as they come.
        told, instance = printable(message), printable(self._instance)
        self._alarm.tell(Alert(alert=alert, message=told, since=self._since, instance=instance))
