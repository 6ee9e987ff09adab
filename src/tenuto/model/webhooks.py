"""Webhooks: which events there are, who is told, and when a failing endpoint is tried again."""

from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta

import msgspec

from tenuto.model.errors import Invalid
from tenuto.model.tasks.retry import RetryPolicy, backoff
from tenuto.model.tasks.task import Status

WHSEC = "whsec_"
MAX_URL = 2_000
MAX_WEBHOOKS = 20
"""Of a workspace: each of them gets every event it asks for."""
MAX_SAID = 200
"""How much of an endpoint's answer is kept."""

STATUS_CHANGED = "task.status_changed"
EVENTS = frozenset(
    {
        STATUS_CHANGED,
        *(f"task.{status.lower()}" for status in Status),
        "task.dependency_cycle",
        "inbox.created",
        *(f"agent.{what}" for what in ("stale", "error", "recovered", "draining", "terminated")),
    }
)
_WHOLE = frozenset({"*", *(f"{name.partition('.')[0]}.*" for name in EVENTS)})

MAX_TRIES = 12
RETRY = RetryPolicy(base_s=5.0, cap_s=3600.0)
TRIP_AFTER = 5
"""Failures in a row after which an endpoint is left alone for a while."""
REST = RetryPolicy(base_s=30.0, cap_s=3600.0, jitter=0.0)
DISABLE_AFTER = 84
"""Failures in a row after which nobody lives there: rests of an hour make that three days."""


def check_events(wanted: Sequence[str]) -> list[str]:
    """The names in order and once each; `Invalid` names one that no event could match."""
    if not wanted:
        raise Invalid("events must name at least one event", field="events")
    for name in wanted:
        if name not in EVENTS and name not in _WHOLE:
            known = ", ".join(sorted(EVENTS | _WHOLE))
            raise Invalid(f"no event {name[:60]!r}; known are {known}", field="events")
    return sorted(set(wanted))


def wants(patterns: Iterable[str], event: str) -> bool:
    """Whether a webhook with these patterns is told of the event."""
    return not {"*", event, f"{event.partition('.')[0]}.*"}.isdisjoint(patterns)


def events_of(previous: str | None, new: str | None, kind: str = "") -> tuple[str, ...]:
    """The events that a row of the trail stands for: a task's none unless its status changed."""
    if kind.startswith("agent_"):
        name = kind.replace("_", ".", 1)
        return (name,) if name in EVENTS else ()
    if new is None or previous == new:
        return ()
    usual = (STATUS_CHANGED, f"task.{new.lower()}")
    return (*usual, "task.dependency_cycle") if kind == "dependency_cycle" else usual


def next_try(tries: int, now: datetime, roll: float) -> datetime | None:
    """When a delivery is tried again after that many tries; `None` when it is given up."""
    if tries >= MAX_TRIES:
        return None
    return now + timedelta(seconds=backoff(RETRY, tries, roll))


class EndpointHealth(msgspec.Struct, frozen=True):
    """How an endpoint has answered lately: failures in a row, and until when it is left alone."""

    failures: int = 0
    closed_until: datetime | None = None

    @property
    def tripped(self) -> bool:
        """Nothing but one probe at a time may be sent."""
        return self.failures >= TRIP_AFTER


def after_failure(health: EndpointHealth, now: datetime, *, probe: bool) -> EndpointHealth:
    """The endpoint's health after one more failure.

    Of a tripped endpoint only the probe counts: what was sent before it tripped tells nothing new.
    """
    if health.tripped and not probe:
        return health
    failures = health.failures + 1
    if failures < TRIP_AFTER:
        return EndpointHealth(failures)
    rest = backoff(REST, failures - TRIP_AFTER + 1, 0.5)
    return EndpointHealth(failures, now + timedelta(seconds=rest))
