"""Limits requests per token and new tasks per workspace, with token buckets."""

from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Any
from uuid import UUID

import msgspec

from tenuto.clock import Clock
from tenuto.model.errors import TooMany
from tenuto.model.limits.quota import Quota
from tenuto.settings import Settings

MAX_ENTRIES = 10_000
"""Maximum entries of each kind; the one used longest ago is dropped, its bucket starts full."""
QUOTA_CACHE_S = 1.0
"""Seconds that a workspace's quota is cached."""


class _Bucket(msgspec.Struct):
    """A token bucket: its level, and when that was computed, in monotonic seconds."""

    level: float
    at: float


class _CachedQuota(msgspec.Struct):
    """A workspace's quota, and when it was loaded, in monotonic seconds."""

    quota: Quota
    at: float


LoadQuota = Callable[[], Awaitable[Quota]]


class RequestThrottle:
    """Token buckets of this process: requests per token, new tasks per workspace."""

    def __init__(self, clock: Clock, settings: Settings) -> None:
        self._clock = clock
        self._rate = settings.rate_per_s
        self._buckets: OrderedDict[str, _Bucket] = OrderedDict()
        self._quotas: OrderedDict[UUID, _CachedQuota] = OrderedDict()

    def count_request(self, key: str) -> None:
        """Counts a request of the token `key`; `TooMany` above the set rate (0: no limit)."""
        if self._rate > 0:
            self._use_bucket(f"token:{key}", 1, self._rate, self._rate * 2, "rate_limited")

    async def count_tasks(self, workspace: UUID, count: int, load_quota: LoadQuota) -> None:
        """Counts `count` tasks about to be created; `TooMany` above the workspace's quota."""
        cached = self._cached_quota(workspace)
        if cached is None:
            now = self._clock.elapsed()
            cached = _CachedQuota(await load_quota(), now)
            _store_bounded(self._quotas, workspace, cached)
        quota = cached.quota
        if quota.tasks_per_minute is not None:
            rate = quota.tasks_per_minute / 60
            self._use_bucket(
                f"tasks:{workspace}", count, rate, quota.tasks_per_minute, "quota_exceeded"
            )

    def _cached_quota(self, workspace: UUID) -> _CachedQuota | None:
        """Returns the workspace's cached quota; `None` if it is missing or older than a second."""
        cached = self._quotas.get(workspace)
        is_fresh = cached is not None and self._clock.elapsed() - cached.at <= QUOTA_CACHE_S
        return cached if is_fresh else None

    def evict_quota(self, workspace: UUID) -> None:
        """Drops the cached quota of the workspace, so that the next request loads it again."""
        self._quotas.pop(workspace, None)

    def _use_bucket(self, key: str, count: int, rate: float, capacity: float, code: str) -> None:
        """Takes `count` from the bucket `key`; `TooMany`, and takes none, if it has too few."""
        now = self._clock.elapsed()
        bucket = self._buckets.get(key) or _Bucket(capacity, now)
        bucket.level = min(capacity, bucket.level + (now - bucket.at) * rate)
        bucket.at = now
        _store_bounded(self._buckets, key, bucket)
        if bucket.level < count:
            wait = (count - bucket.level) / rate if rate > 0 else 60.0
            raise TooMany(
                f"too many requests; {rate:g} per second are allowed", code, retry_after=wait
            )
        bucket.level -= count


def _store_bounded(entries: OrderedDict[Any, Any], key: Any, value: Any) -> None:
    """Stores the value as the newest entry; evicts the oldest one beyond `MAX_ENTRIES`."""
    entries[key] = value
    entries.move_to_end(key)
    if len(entries) > MAX_ENTRIES:
        entries.popitem(last=False)
