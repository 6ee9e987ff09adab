"""Retry maths: backoff, jitter, caps, growing timeouts."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenuto.model import bounds
from tenuto.model.tasks.retry import (
    DEFAULT,
    RULES,
    TIMEOUT_CAP_S,
    ErrorClass,
    RetryPolicy,
    backoff,
    increase_timeout,
)

POLICIES = st.builds(
    RetryPolicy,
    base_s=st.floats(0, bounds.MAX_SECONDS),
    multiplier=st.floats(1, 100),
    cap_s=st.floats(0, bounds.MAX_SECONDS),
    jitter=st.floats(0, 1),
)
ROLLS = st.floats(0, 1, exclude_max=True)


@pytest.mark.parametrize(
    ("tries", "seconds"),
    [(0, 5), (1, 5), (2, 10), (3, 20), (8, 640), (9, 900), (1000, 900), (10**9, 900)],
)
def test_default_backoff_doubles_from_five_seconds_to_fifteen_minutes(
    tries: int, seconds: float
) -> None:
    assert backoff(DEFAULT, tries, 0.5) == pytest.approx(seconds)


def test_jitter_spreads_by_twenty_percent() -> None:
    assert backoff(DEFAULT, 1, 0.0) == pytest.approx(4)
    assert backoff(DEFAULT, 1, 1 - 1e-12) == pytest.approx(6)
    assert backoff(RetryPolicy(jitter=0), 1, 0.9) == 5


def test_rate_limit_backoff_starts_at_thirty_seconds() -> None:
    policy = RULES[ErrorClass.RATE_LIMIT].policy
    assert policy is not None
    delays = [backoff(policy, tries, 0.5) for tries in (1, 2, 3, 4, 5, 6, 7)]
    assert delays == pytest.approx([30, 60, 120, 240, 480, 900, 900])


@given(policy=POLICIES, tries=st.integers(0, 10**12), roll=ROLLS)
def test_backoff_is_finite_and_within_its_cap(policy: RetryPolicy, tries: int, roll: float) -> None:
    seconds = backoff(policy, tries, roll)
    assert math.isfinite(seconds)
    assert 0 <= seconds <= policy.cap_s * (1 + policy.jitter) * (1 + 1e-9)


@given(policy=POLICIES, tries=st.integers(1, 200), roll=ROLLS)
def test_backoff_never_decreases(policy: RetryPolicy, tries: int, roll: float) -> None:
    assert backoff(policy, tries + 1, roll) >= backoff(policy, tries, roll)


def test_each_class_has_one_rule() -> None:
    assert RULES.keys() == set(ErrorClass)
    permanent = {kind for kind, rule in RULES.items() if rule.permanent}
    assert permanent == {ErrorClass.OUT_OF_MEMORY, ErrorClass.SYNTAX, ErrorClass.INVALID_INPUT}
    assert {kind for kind, rule in RULES.items() if rule.alerting} == {ErrorClass.OUT_OF_MEMORY}
    assert {kind for kind, rule in RULES.items() if not rule.counts} == {ErrorClass.RATE_LIMIT}
    assert {kind for kind, rule in RULES.items() if rule.parks} == {ErrorClass.RATE_LIMIT}
    assert {kind for kind, rule in RULES.items() if rule.longer_timeout} == {ErrorClass.TIMEOUT}


def test_only_a_class_that_parks_has_a_reset_time() -> None:
    assert all(rule.parks for rule in RULES.values() if rule.reset_time is not None)


def test_timeout_doubles_up_to_a_day() -> None:
    assert increase_timeout(None) is None
    assert increase_timeout(60) == 120
    assert increase_timeout(TIMEOUT_CAP_S - 1) == TIMEOUT_CAP_S
    assert increase_timeout(TIMEOUT_CAP_S) == TIMEOUT_CAP_S


@given(timeout_s=st.integers(1, bounds.MAX_SECONDS))
def test_grown_timeout_is_never_shorter(timeout_s: int) -> None:
    longer = increase_timeout(timeout_s)
    assert longer is not None
    assert longer >= timeout_s
