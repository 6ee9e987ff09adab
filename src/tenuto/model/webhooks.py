"""Webhooks: their events, event filters, retry delays and the circuit breaker."""

from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta

import msgspec

from tenuto.model.errors import Invalid
from tenuto.model.tasks.retry import RetryPolicy, backoff
from tenuto.model.tasks.task import Status

SIGNING_PREFIX = "whsec_"
MAX_URL = 2_000
MAX_WEBHOOKS = 20
"""Per workspace: every webhook receives every event that it subscribes to."""
MAX_RESPONSE_TEXT = 200
"""Characters of an endpoint's response that are stored."""

STATUS_CHANGED = "task.status_changed"
EVENTS = frozenset(
    {
        STATUS_CHANGED,
        *(f"task.{status.lower()}" for status in Status),
        "task.dependency_cycle",
        "inbox.created",
        *(f"agent.{name}" for name in ("stale", "error", "recovered", "draining", "terminated")),
    }
)
_WILDCARDS = frozenset({"*", *(f"{name.partition('.')[0]}.*" for name in EVENTS)})

MAX_TRIES = 12
"""Tries of one delivery."""
RETRY = RetryPolicy(base_s=5.0, cap_s=3600.0)
TRIP_AFTER_FAILURES = 5
"""Failures in a row after which an endpoint's circuit opens for a while."""
CIRCUIT_DELAYS = RetryPolicy(base_s=30.0, cap_s=3600.0, jitter=0.0)
DISABLE_AFTER_FAILURES = 84
"""Failures in a row after which an endpoint is disabled: about three days, with one-hour delays."""


def check_events(patterns: Sequence[str]) -> list[str]:
    """Returns the patterns sorted, each once; `Invalid` if none, or one matches no event."""
    if not patterns:
        raise Invalid("events must contain at least one event", field="events")
    for pattern in patterns:
        if pattern not in EVENTS and pattern not in _WILDCARDS:
            allowed = ", ".join(sorted(EVENTS | _WILDCARDS))
            raise Invalid(f"unknown event {pattern[:60]!r}; use one of {allowed}", field="events")
    return sorted(set(patterns))


def is_subscribed(patterns: Iterable[str], event: str) -> bool:
    """True if a webhook with these patterns receives the event."""
    return not {"*", event, f"{event.partition('.')[0]}.*"}.isdisjoint(patterns)


def webhook_events(previous: str | None, new: str | None, kind: str = "") -> tuple[str, ...]:
    """Returns the webhook events of an audit row; none if the task's status did not change."""
    if kind.startswith("agent_"):
        name = kind.replace("_", ".", 1)
        return (name,) if name in EVENTS else ()
    if new is None or previous == new:
        return ()
    names = (STATUS_CHANGED, f"task.{new.lower()}")
    return (*names, "task.dependency_cycle") if kind == "dependency_cycle" else names


def next_try_at(tries: int, now: datetime, roll: float) -> datetime | None:
    """Returns when a delivery is retried after `tries` tries; `None` after `MAX_TRIES`."""
    if tries >= MAX_TRIES:
        return None
    return now + timedelta(seconds=backoff(RETRY, tries, roll))


class EndpointHealth(msgspec.Struct, frozen=True):
    """Recent results of an endpoint: failures in a row, and until when its circuit is open.

    No requests are sent before `closed_until`.
    """

    failures: int = 0
    closed_until: datetime | None = None

    @property
    def is_tripped(self) -> bool:
        """True if the circuit is open: only one probe at a time may be sent."""
        return self.failures >= TRIP_AFTER_FAILURES


def after_failure(health: EndpointHealth, now: datetime, *, probe: bool) -> EndpointHealth:
    """Returns the endpoint's health after one more failure.

    If the circuit is open, only a failed probe counts: requests sent earlier give no new
    information.
    """
    if health.is_tripped and not probe:
        return health
    failures = health.failures + 1
    if failures < TRIP_AFTER_FAILURES:
        return EndpointHealth(failures)
    delay_s = backoff(CIRCUIT_DELAYS, failures - TRIP_AFTER_FAILURES + 1, 0.5)
    return EndpointHealth(failures, now + timedelta(seconds=delay_s))
