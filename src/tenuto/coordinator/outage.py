"""Retry delays while the store is unavailable, and alerts that work without the store."""

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
from tenuto.tls import verify_option

log = logging.getLogger("tenuto.coordinator")

RETRY_DELAYS_S = (5.0, 10.0, 20.0, 40.0)
"""Seconds between cycles while the store does not answer; the last value repeats."""
ALERT_AFTER_S = 300.0
"""Seconds of an outage after which an alert is sent."""
POST_TIMEOUT_S = 5.0
POST_DELAYS_S = (1.0, 5.0, 0.0)
"""Seconds after each failed attempt to post an alert; after the last one it gives up."""


def retry_delay(failures: int) -> float:
    """Returns the seconds to wait after `failures` (1 or more) failed cycles in a row."""
    return RETRY_DELAYS_S[min(failures, len(RETRY_DELAYS_S)) - 1]


class Alert(msgspec.Struct, frozen=True, kw_only=True):
    """The posted body: kind, text, start of the outage, and the reporting coordinator."""

    alert: Literal["database_down", "database_up"]
    message: str
    since: datetime
    instance: str


class AlertSender:
    """Sends alerts to the log and to a URL. It never raises and never blocks."""

    def __init__(self, url: str, clock: Clock) -> None:
        self._url = url
        self._clock = clock
        self._post_lock = asyncio.Lock()
        self._posts: set[asyncio.Task[None]] = set()

    def send(self, alert: Alert) -> None:
        """Logs an alert; posts it to the URL, if any, in the background, after earlier alerts."""
        level = logging.CRITICAL if alert.alert == "database_down" else logging.WARNING
        log.log(level, "%s: %s", alert.alert, alert.message)
        if self._url:
            post = asyncio.get_running_loop().create_task(self._post(msgspec.json.encode(alert)))
            self._posts.add(post)
            post.add_done_callback(self._posts.discard)

    async def _post(self, body: bytes) -> None:
        """Posts an alert after earlier ones, in up to 3 attempts; logs failures, never raises."""
        async with self._post_lock:
            for delay in POST_DELAYS_S:
                if (reason := await self._try_post(body)) is None:
                    return
                # The URL may contain a secret: it is not logged.
                log.warning("the alert could not be posted: %s", reason)
                await self._clock.sleep(delay)

    async def _try_post(self, body: bytes) -> str | None:
        """Posts once; returns the reason if it failed, else `None`."""
        headers = {"content-type": "application/json"}
        try:
            client = httpx2.AsyncClient(verify=verify_option(self._url))
            async with asyncio.timeout(POST_TIMEOUT_S), client:
                response = await client.post(self._url, content=body, headers=headers)
        except TimeoutError:
            return f"no answer within {POST_TIMEOUT_S:g} s"
        except Exception as error:  # noqa: BLE001  whatever the URL does, the cycle continues
            return type(error).__name__
        return None if response.is_success else f"HTTP {response.status_code}"

    async def close(self) -> None:
        """Waits a few seconds for running posts, then cancels them."""
        posts = list(self._posts)
        if posts:
            await asyncio.wait(posts, timeout=POST_TIMEOUT_S)
        for post in posts:
            post.cancel()
            with suppress(asyncio.CancelledError):
                await post


class OutageMonitor:
    """Measures an outage of the store, sets the retry delay, and sends one alert."""

    def __init__(self, alerts: AlertSender, clock: Clock, instance: str) -> None:
        self._alerts = alerts
        self._clock = clock
        self._instance = instance
        self.failures = 0
        self._started_at = 0.0
        self._since = clock.now()
        self._alerted = False
        PROCESS_METRICS.put("tenuto_database_down_seconds", 0)

    def next_delay(self, usual_s: float) -> float:
        """Returns the seconds until the next cycle: `usual_s`, but more while cycles fail."""
        return retry_delay(self.failures) if self.failures else usual_s

    def record_failure(self, reason: str) -> None:
        """Counts a failed cycle; sends one alert per outage that lasts more than 5 minutes."""
        now = self._clock.elapsed()
        if not self.failures:
            self._started_at, self._since = now, self._clock.now()
        self.failures += 1
        away_s = now - self._started_at
        PROCESS_METRICS.put("tenuto_database_down_seconds", away_s)
        if away_s > ALERT_AFTER_S and not self._alerted:
            self._alerted = True
            self._send_alert(
                "database_down", f"the database has not answered for {away_s:.0f} s: {reason}"
            )

    def record_answer(self) -> float | None:
        """Ends an outage, with an alert if it was long; returns its seconds if 2+ cycles failed."""
        if not self.failures:
            return None
        away_s = self._clock.elapsed() - self._started_at
        failed_twice, self.failures = self.failures > 1, 0
        PROCESS_METRICS.put("tenuto_database_down_seconds", 0)
        if self._alerted:
            self._alerted = False
            self._send_alert("database_up", f"the database answers again after {away_s:.0f} s")
        return away_s if failed_twice else None

    def _send_alert(self, alert: Literal["database_down", "database_up"], message: str) -> None:
        # The reason is a text of the server, and receivers of alerts may show it unchanged.
        text, instance = printable(message), printable(self._instance)
        self._alerts.send(Alert(alert=alert, message=text, since=self._since, instance=instance))
