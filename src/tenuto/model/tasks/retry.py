"""Retry policies, error classes with their rules, and the delay before the next try."""

from collections.abc import Callable
from datetime import datetime
from enum import StrEnum

import msgspec

TIMEOUT_GROWTH = 2
TIMEOUT_CAP_S = 24 * 3600
FREE_ENDS = 20
"""Attempts in a row that may end without counting as a try and without a new checkpoint."""
ATTEMPT_CAP = 1_000
"""Attempts of one task, counted tries or not."""


class ErrorClass(StrEnum):
    """The category of a failure; its `Rule` decides whether and when to retry."""

    ERROR = "error"
    CRASH = "crash"
    CONNECTION = "connection"
    TIMEOUT = "timeout"
    RATE_LIMIT = "rate_limit"
    OUT_OF_MEMORY = "out_of_memory"
    SYNTAX = "syntax"
    INVALID_INPUT = "invalid_input"


class RetryPolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Delay in seconds before the next try: `min(base * multiplier^(tries-1), cap)`, jittered."""

    base_s: float = 5.0
    multiplier: float = 2.0
    cap_s: float = 900.0
    jitter: float = 0.2


DEFAULT = RetryPolicy()


class Rule(msgspec.Struct, frozen=True, kw_only=True):
    """What follows from a failure of one error class. A class without a flag is retried."""

    permanent: bool = False
    """A retry cannot help: the task fails at once."""
    alerting: bool = False
    """An operator has to act: the event of a task that fails at once has the level CRITICAL."""
    policy: RetryPolicy | None = None
    """The policy instead of the task's own."""
    counts: bool = True
    """The attempt counts as a try."""
    longer_timeout: bool = False
    """The attempt timed out: the next one gets a longer timeout."""
    parks: bool = False
    """The task waits until the provider's limit resets, if that time is known."""
    reset_time: Callable[[datetime], datetime] | None = None
    """The time of the reset, from now, for an attempt that does not report it."""


RULES = {
    ErrorClass.ERROR: Rule(),
    ErrorClass.CRASH: Rule(),
    ErrorClass.CONNECTION: Rule(),
    ErrorClass.TIMEOUT: Rule(longer_timeout=True),
    ErrorClass.RATE_LIMIT: Rule(parks=True, counts=False, policy=RetryPolicy(base_s=30.0)),
    ErrorClass.OUT_OF_MEMORY: Rule(permanent=True, alerting=True),
    ErrorClass.SYNTAX: Rule(permanent=True),
    ErrorClass.INVALID_INPUT: Rule(permanent=True),
}
"""The rule of each error class."""


def backoff(policy: RetryPolicy, tries: int, roll: float) -> float:
    """Returns the seconds to wait after `tries` tries; `roll` in [0, 1) spreads them by jitter."""
    # A float overflows at 2.0 ** 1024; the cap is reached long before the exponent matters.
    raw = policy.base_s * policy.multiplier ** min(max(tries - 1, 0), 60)
    return min(raw, policy.cap_s) * (1 - policy.jitter + 2 * policy.jitter * roll)


def increase_timeout(timeout_s: int | None) -> int | None:
    """Returns twice the run timeout, up to the cap, never less than before; `None` for `None`."""
    if timeout_s is None:
        return None
    return max(timeout_s, min(timeout_s * TIMEOUT_GROWTH, TIMEOUT_CAP_S))
