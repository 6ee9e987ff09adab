"""Rate limits: requests and tokens per minute, shared by all workers.

Requests use a sliding window: the time of each request is kept for a minute. There are never more
than the limit in any sixty seconds, but all of them may come at once. Tokens are known only after
they were used, so they use a token bucket. It holds the tokens of one minute and refills steadily.
Using more than it holds makes a debt, which blocks claims until the bucket has refilled.
"""

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta

import msgspec

from tenuto.model import bounds
from tenuto.model.errors import Invalid

MAX_RATE_LIMITS = 100
"""Per workspace."""
MINUTE = timedelta(minutes=1)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
_SECOND_US = 1_000_000
_MINUTE_US = 60 * _SECOND_US

TakenRequests = tuple[tuple[int, int], ...]
"""Pairs of an instant in microseconds and a number of requests.

Requests of the same second share one pair, with the instant of the last of them.
"""
LimitNames = tuple[str, ...]
"""The sorted names of the limits that apply to a group of lanes."""


class RateLimit(msgspec.Struct, frozen=True, kw_only=True):
    """A cap on the use of a provider, a model or an account; `None` matches any."""

    name: str
    provider: str | None = None
    model: str | None = None
    account: str | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None

    def applies_to(self, model: str | None, account: str | None) -> bool:
        """True if tasks that use the model on the account count against this limit."""
        provider, slash, short = (model or "").partition("/")
        return (
            self.provider in (None, provider if slash else None)
            and self.model in (None, model, short if slash else None)
            and self.account in (None, account)
        )

    def check(self) -> None:
        """Raises `Invalid` unless the limit has a subject and a number in range."""
        bounds.check_text("name", self.name, bounds.MAX_NAME, empty=False)
        for field in ("provider", "model", "account"):
            value = getattr(self, field)
            if value is not None:
                bounds.check_text(field, value, bounds.MAX_TITLE, empty=False)
        if self.provider is None and self.model is None and self.account is None:
            raise Invalid("a provider, a model or an account is required", field="provider")
        if self.requests_per_minute is None and self.tokens_per_minute is None:
            raise Invalid(
                "requestsPerMinute or tokensPerMinute is required", field="requestsPerMinute"
            )
        for field, number in (
            ("requestsPerMinute", self.requests_per_minute),
            ("tokensPerMinute", self.tokens_per_minute),
        ):
            if number is not None:
                bounds.check_number(field, number, 1, bounds.MAX_COUNT)


class RateLimitUsage(msgspec.Struct, frozen=True):
    """The use of a limit: requests of the last minute, and tokens left at `counted_at`."""

    taken: TakenRequests
    tokens: float
    counted_at: datetime


def initial_usage(limit: RateLimit, now: datetime) -> RateLimitUsage:
    """Returns the usage of a new limit: nothing used."""
    return RateLimitUsage((), float(limit.tokens_per_minute or 0), now)


def remaining_requests(limit: RateLimit, usage: RateLimitUsage, now: datetime) -> int:
    """Returns the allowed requests; 0 while no token is left, `MAX_CLAIM` without a limit."""
    if limit.tokens_per_minute is not None and remaining_tokens(limit, usage, now) < 1:
        return 0
    if limit.requests_per_minute is None:
        return bounds.MAX_CLAIM
    used = sum(number for _, number in _requests_of_last_minute(usage.taken, now))
    return max(0, limit.requests_per_minute - used)


def remaining_tokens(limit: RateLimit, usage: RateLimitUsage, now: datetime) -> float:
    """Returns the tokens in the bucket; below zero if more were used than it held."""
    capacity = float(limit.tokens_per_minute or 0)
    elapsed = max(timedelta(0), now - usage.counted_at)
    return min(capacity, usage.tokens + capacity * (elapsed / MINUTE))


def next_request_at(limit: RateLimit, usage: RateLimitUsage, now: datetime) -> datetime:
    """Returns when the next request is allowed; `now` if it is allowed now."""
    earliest = now
    if limit.tokens_per_minute is not None:
        missing_tokens = 1 - remaining_tokens(limit, usage, now)
        if missing_tokens > 0:
            wait_s = min(missing_tokens * 60 / limit.tokens_per_minute, bounds.MAX_SECONDS)
            earliest = now + timedelta(seconds=wait_s) + _MICROSECOND
    if limit.requests_per_minute is not None:
        taken = _requests_of_last_minute(usage.taken, now)
        excess = sum(number for _, number in taken) - limit.requests_per_minute
        for taken_at_us, number in taken:
            if excess < 0:
                break
            excess -= number
            earliest = max(earliest, _EPOCH + timedelta(microseconds=taken_at_us + _MINUTE_US))
    return earliest


def add_requests(usage: RateLimitUsage, now: datetime, number: int) -> RateLimitUsage:
    """Returns the usage after `number` more requests."""
    now_us = _to_microseconds(now)
    taken = list(_requests_of_last_minute(usage.taken, now))
    if taken and taken[-1][0] // _SECOND_US >= now_us // _SECOND_US:
        last_us, last_number = taken.pop()
        now_us, number = max(now_us, last_us), number + last_number
    return msgspec.structs.replace(usage, taken=(*taken, (now_us, number)))


def subtract_tokens(
    limit: RateLimit, usage: RateLimitUsage, now: datetime, number: int
) -> RateLimitUsage:
    """Returns the usage after an attempt reported `number` used tokens."""
    remaining = remaining_tokens(limit, usage, now) - number
    return msgspec.structs.replace(usage, tokens=remaining, counted_at=max(now, usage.counted_at))


def adjust_usage(
    before: RateLimit, after: RateLimit, usage: RateLimitUsage, now: datetime
) -> RateLimitUsage:
    """Returns the usage of a changed limit: requests still count, and a token debt remains."""
    capacity = float(after.tokens_per_minute or 0)
    remaining = (
        capacity if before.tokens_per_minute is None else remaining_tokens(before, usage, now)
    )
    return RateLimitUsage(_requests_of_last_minute(usage.taken, now), min(capacity, remaining), now)


def allocate_claims(
    ranks_by_group: Mapping[LimitNames, Sequence[int]], remaining: Mapping[str, int], n: int
) -> dict[LimitNames, int]:
    """Returns how many tasks to claim from each group: best ranks first, within the limits.

    `ranks_by_group` has the ranks of each group's best tasks. `remaining` has the number of claims
    that each limit allows. At most `n` tasks are allocated.
    """
    allowed = dict(remaining)
    shares = dict.fromkeys(ranks_by_group, 0)
    best = sorted((rank, group) for group, ranks in ranks_by_group.items() for rank in ranks)
    for _, group in best:
        if n <= 0:
            break
        if all(allowed[name] > 0 for name in group):
            n -= 1
            shares[group] += 1
            for name in group:
                allowed[name] -= 1
    return shares


def applicable_limit_names(
    limits: Iterable[RateLimit], model: str | None, account: str | None
) -> LimitNames:
    """Returns the names of the limits that apply to tasks with this model and account."""
    return tuple(sorted(limit.name for limit in limits if limit.applies_to(model, account)))


def allowed_claims(group: Iterable[str], remaining: Mapping[str, int], n: int) -> int:
    """Returns the lowest number that remains of the limits, or `n` without any; 0 if `n` <= 0."""
    return min((remaining[name] for name in group), default=n) if n > 0 else 0


def _requests_of_last_minute(taken: TakenRequests, now: datetime) -> TakenRequests:
    """Returns the entries that are younger than a minute."""
    since_us = _to_microseconds(now) - _MINUTE_US
    return tuple(entry for entry in taken if entry[0] > since_us)


def _to_microseconds(moment: datetime) -> int:
    return (moment - _EPOCH) // _MICROSECOND
