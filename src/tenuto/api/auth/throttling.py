"""How often and how much: a bucket per token, quotas per workspace."""

from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Any
from uuid import UUID

import msgspec

from tenuto.clock import Clock
from tenuto.model.errors import TooMany
from tenuto.model.limits.quota import Quota
from tenuto.settings import Settings

KEPT = 10_000
"""Tokens and workspaces remembered; whoever was longest away starts with a full bucket again."""
LOOK_S = 1.0
"""Seconds that a workspace's quota is believed."""


class _Bucket(msgspec.Struct):
    level: float
    at: float


class _Usage(msgspec.Struct):
    quota: Quota
    at: float


Look = Callable[[], Awaitable[Quota]]


class RequestThrottle:
    """What was asked of late, in this process."""

    def __init__(self, clock: Clock, settings: Settings) -> None:
        self._clock = clock
        self._rate = settings.rate_per_s
        self._buckets: OrderedDict[str, _Bucket] = OrderedDict()
        self._usage: OrderedDict[UUID, _Usage] = OrderedDict()

    def request(self, key: str) -> None:
        """Count a request of a token; raises `TooMany` when it asks too often."""
        if self._rate > 0:
            self._take(f"token:{key}", 1, self._rate, self._rate * 2, "rate_limited")

    async def submit(self, workspace: UUID, count: int, look: Look) -> None:
        """Count tasks about to be made; raises `TooMany` beyond the workspace's rate."""
        usage = self._known(workspace)
        if usage is None:
            now = self._clock.elapsed()
            usage = _Usage(await look(), now)
            _keep(self._usage, workspace, usage)
        quota = usage.quota
        if quota.tasks_per_minute is not None:
            rate = quota.tasks_per_minute / 60
            self._take(f"tasks:{workspace}", count, rate, quota.tasks_per_minute, "quota_exceeded")

    def _known(self, workspace: UUID) -> _Usage | None:
        """The workspace's quota, while it is believed."""
        usage = self._usage.get(workspace)
        fresh = usage is not None and self._clock.elapsed() - usage.at <= LOOK_S
        return usage if fresh else None

    def forget(self, workspace: UUID) -> None:
        """Look at the workspace's quotas anew."""
        self._usage.pop(workspace, None)

    def _take(self, key: str, count: int, rate: float, size: float, code: str) -> None:
        now = self._clock.elapsed()
        bucket = self._buckets.get(key) or _Bucket(size, now)
        bucket.level = min(size, bucket.level + (now - bucket.at) * rate)
        bucket.at = now
        _keep(self._buckets, key, bucket)
        if bucket.level < count:
            wait = (count - bucket.level) / rate if rate > 0 else 60.0
            raise TooMany(
                f"too many requests; {rate:g} a second are accepted", code, retry_after=wait
            )
        bucket.level -= count


def _keep(kept: OrderedDict[Any, Any], key: Any, value: Any) -> None:
    kept[key] = value
    kept.move_to_end(key)
    if len(kept) > KEPT:
        kept.popitem(last=False)
