"""Retry policies, error classes and the delay before the next try."""

from enum import StrEnum

import msgspec

TIMEOUT_GROWTH = 2
TIMEOUT_CAP_S = 24 * 3600
FREE_ENDS = 20
"""Attempts in a row that may end without counting as a try and without a new checkpoint."""
ATTEMPT_CAP = 1_000
"""Attempts of one task, counted tries or not."""


class ErrorClass(StrEnum):
    """The category of a failure; it decides whether and when to retry."""

    ERROR = "error"
    CRASH = "crash"
    CONNECTION = "connection"
    TIMEOUT = "timeout"
    RATE_LIMIT = "rate_limit"
    OUT_OF_MEMORY = "out_of_memory"
    SYNTAX = "syntax"
    INVALID_INPUT = "invalid_input"


PERMANENT = frozenset({ErrorClass.OUT_OF_MEMORY, ErrorClass.SYNTAX, ErrorClass.INVALID_INPUT})
"""A retry cannot help: the task fails at once."""

ALERTING = frozenset({ErrorClass.OUT_OF_MEMORY})
"""An operator has to act: the event has the level CRITICAL."""


class RetryPolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Delay in seconds before the next try: `min(base * multiplier^(tries-1), cap)`, jittered."""

    base_s: float = 5.0
    multiplier: float = 2.0
    cap_s: float = 900.0
    jitter: float = 0.2


DEFAULT = RetryPolicy()
RATE_LIMIT = RetryPolicy(base_s=30.0)


def backoff(policy: RetryPolicy, tries: int, roll: float) -> float:
    """Returns the seconds to wait after `tries` tries; `roll` in [0, 1) spreads them by jitter."""
    # A float overflows at 2.0 ** 1024; the cap is reached long before the exponent matters.
    raw = policy.base_s * policy.multiplier ** min(max(tries - 1, 0), 60)
    return min(raw, policy.cap_s) * (1 - policy.jitter + 2 * policy.jitter * roll)


def increase_timeout(timeout_s: int | None) -> int | None:
    """Returns the run timeout after an attempt timed out: twice as long, up to the cap."""
    if timeout_s is None:
        return None
    return max(timeout_s, min(timeout_s * TIMEOUT_GROWTH, TIMEOUT_CAP_S))
