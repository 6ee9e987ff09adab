"""When a task is tried again, and when it is not."""

from enum import StrEnum

import msgspec

TIMEOUT_GROWTH = 2
TIMEOUT_CAP_S = 24 * 3600
FREE_ENDS = 20
ATTEMPT_CAP = 1_000


class ErrorClass(StrEnum):
    """What went wrong, as far as the retry policy cares."""

    ERROR = "error"
    CRASH = "crash"
    CONNECTION = "connection"
    TIMEOUT = "timeout"
    RATE_LIMIT = "rate_limit"
    OUT_OF_MEMORY = "out_of_memory"
    SYNTAX = "syntax"
    INVALID_INPUT = "invalid_input"


PERMANENT = frozenset({ErrorClass.OUT_OF_MEMORY, ErrorClass.SYNTAX, ErrorClass.INVALID_INPUT})
"""Trying again cannot help: the task fails at once."""

ALERTING = frozenset({ErrorClass.OUT_OF_MEMORY})
"""Somebody has to look: the event is CRITICAL."""


class RetryPolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds to wait before the next try: `min(base * multiplier^(tries-1), cap)`, jittered."""

    base_s: float = 5.0
    multiplier: float = 2.0
    cap_s: float = 900.0
    jitter: float = 0.2


DEFAULT = RetryPolicy()
RATE_LIMIT = RetryPolicy(base_s=30.0)


def backoff(policy: RetryPolicy, tries: int, roll: float) -> float:
    """Seconds to wait after that many tries; `roll` in [0, 1) spreads it by the jitter."""
    # A float overflows at 2.0 ** 1024; the cap is reached long before the exponent matters.
    raw = policy.base_s * policy.multiplier ** min(max(tries - 1, 0), 60)
    return min(raw, policy.cap_s) * (1 - policy.jitter + 2 * policy.jitter * roll)


def longer_timeout(timeout_s: int | None) -> int | None:
    """The run timeout of a task whose last run was too short."""
    if timeout_s is None:
        return None
    return max(timeout_s, min(timeout_s * TIMEOUT_GROWTH, TIMEOUT_CAP_S))
