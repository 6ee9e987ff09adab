"""Rate limits: how many requests and tokens a minute are left of what all workers share.

Requests are kept by the instant at which they were taken, for a minute: never are there more than
the limit in any sixty seconds, and all of them may come at once. Tokens are known only after they
were used, so theirs is a bucket: it holds a minute's worth, is filled all the time, and what was
used beyond that is a debt that holds claims back until it is paid.
"""

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta

import msgspec

from tenuto.model import bounds
from tenuto.model.errors import Invalid

MAX_RATE_LIMITS = 100
"""Of a workspace."""
MINUTE = timedelta(minutes=1)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
_SECOND_US = 1_000_000
_MINUTE_US = 60 * _SECOND_US

Taken = tuple[tuple[int, int], ...]
"""Instants in microseconds, with how many requests were taken; of one second, its last."""
Group = tuple[str, ...]
"""The names of the limits that some lanes share, in order."""


class RateLimit(msgspec.Struct, frozen=True, kw_only=True):
    """What is limited: a provider, a model, an account; none of a kind means any."""

    name: str
    provider: str | None = None
    model: str | None = None
    account: str | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None

    def applies(self, model: str | None, account: str | None) -> bool:
        """Whether tasks that use the model on the account count against it."""
        provider, slash, short = (model or "").partition("/")
        return (
            self.provider in (None, provider if slash else None)
            and self.model in (None, model, short if slash else None)
            and self.account in (None, account)
        )

    def check(self) -> None:
        """Raise `Invalid` unless it limits something by a number that makes sense."""
        bounds.text("name", self.name, bounds.MAX_NAME, empty=False)
        for field in ("provider", "model", "account"):
            value = getattr(self, field)
            if value is not None:
                bounds.text(field, value, bounds.MAX_TITLE, empty=False)
        if self.provider is None and self.model is None and self.account is None:
            raise Invalid("name a provider, a model or an account", field="provider")
        if self.requests_per_minute is None and self.tokens_per_minute is None:
            raise Invalid("limit requests or tokens per minute", field="requestsPerMinute")
        for field, number in (
            ("requestsPerMinute", self.requests_per_minute),
            ("tokensPerMinute", self.tokens_per_minute),
        ):
            if number is not None:
                bounds.number(field, number, 1, bounds.MAX_COUNT)


class RateLimitUsage(msgspec.Struct, frozen=True):
    """What was used of a limit: requests of the last minute, tokens left at an instant."""

    taken: Taken
    tokens: float
    counted_at: datetime


def fresh(limit: RateLimit, now: datetime) -> RateLimitUsage:
    """Nothing used yet."""
    return RateLimitUsage((), float(limit.tokens_per_minute or 0), now)


def requests_left(limit: RateLimit, usage: RateLimitUsage, now: datetime) -> int:
    """How many requests may be made now; while tokens are owed, none."""
    if limit.tokens_per_minute is not None and tokens_left(limit, usage, now) < 1:
        return 0
    if limit.requests_per_minute is None:
        return bounds.MAX_CLAIM
    used = sum(number for _, number in _recent(usage.taken, now))
    return max(0, limit.requests_per_minute - used)


def tokens_left(limit: RateLimit, usage: RateLimitUsage, now: datetime) -> float:
    """The tokens in the bucket, below zero when more were used than there were."""
    most = float(limit.tokens_per_minute or 0)
    passed = max(timedelta(0), now - usage.counted_at)
    return min(most, usage.tokens + most * (passed / MINUTE))


def next_request_at(limit: RateLimit, usage: RateLimitUsage, now: datetime) -> datetime:
    """When the next request may be made; `now` when it may."""
    found = now
    if limit.tokens_per_minute is not None:
        missing = 1 - tokens_left(limit, usage, now)
        if missing > 0:
            wait = min(missing * 60 / limit.tokens_per_minute, bounds.MAX_SECONDS)
            found = now + timedelta(seconds=wait) + _MICROSECOND
    if limit.requests_per_minute is not None:
        taken = _recent(usage.taken, now)
        over = sum(number for _, number in taken) - limit.requests_per_minute
        for at, number in taken:
            if over < 0:
                break
            over -= number
            found = max(found, _EPOCH + timedelta(microseconds=at + _MINUTE_US))
    return found


def add_requests(usage: RateLimitUsage, now: datetime, number: int) -> RateLimitUsage:
    """After so many requests were made."""
    at = _micros(now)
    taken = list(_recent(usage.taken, now))
    if taken and taken[-1][0] // _SECOND_US >= at // _SECOND_US:
        last, before = taken.pop()
        at, number = max(at, last), number + before
    return msgspec.structs.replace(usage, taken=(*taken, (at, number)))


def with_tokens(
    limit: RateLimit, usage: RateLimitUsage, now: datetime, number: int
) -> RateLimitUsage:
    """After it became known that so many tokens were used."""
    left = tokens_left(limit, usage, now) - number
    return msgspec.structs.replace(usage, tokens=left, counted_at=max(now, usage.counted_at))


def adjusted(
    before: RateLimit, after: RateLimit, usage: RateLimitUsage, now: datetime
) -> RateLimitUsage:
    """What is used of a limit that was changed: what was taken stays taken, debts stay debts."""
    full = float(after.tokens_per_minute or 0)
    left = full if before.tokens_per_minute is None else tokens_left(before, usage, now)
    return RateLimitUsage(_recent(usage.taken, now), min(full, left), now)


def allocate_claims(
    heads: Mapping[Group, Sequence[int]], left: Mapping[str, int], n: int
) -> dict[Group, int]:
    """How many tasks to take of each group: the best ranks first, as far as limits allow.

    `heads` has the ranks of each group's best tasks, `left` what each limit allows.
    """
    allowed = dict(left)
    shares = dict.fromkeys(heads, 0)
    best = sorted((rank, group) for group, ranks in heads.items() for rank in ranks)
    for _, group in best:
        if n <= 0:
            break
        if all(allowed[name] > 0 for name in group):
            n -= 1
            shares[group] += 1
            for name in group:
                allowed[name] -= 1
    return shares


def group_of(found: Iterable[RateLimit], model: str | None, account: str | None) -> Group:
    """The limits that hold for tasks that use the model on the account."""
    return tuple(sorted(each.name for each in found if each.applies(model, account)))


def allowance(group: Iterable[str], left: Mapping[str, int], n: int) -> int:
    """How many of n tasks a group's limits allow."""
    return min((left[name] for name in group), default=n) if n > 0 else 0


def _recent(taken: Taken, now: datetime) -> Taken:
    since = _micros(now) - _MINUTE_US
    return tuple(each for each in taken if each[0] > since)


def _micros(moment: datetime) -> int:
    return (moment - _EPOCH) // _MICROSECOND
