"""Rate limits in the model: remaining requests and tokens, resets and shares."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenuto.model.errors import Invalid
from tenuto.model.limits import rate_limits
from tenuto.model.limits.rate_limits import RateLimit

NOW = datetime(2030, 1, 1, tzinfo=UTC)


def limit(**fields: Any) -> RateLimit:
    return RateLimit(**{"name": "l", "provider": "p", **fields})


def later(seconds: float) -> datetime:
    return NOW + timedelta(seconds=seconds)


@pytest.mark.parametrize(
    ("fields", "model", "account", "applies"),
    [
        ({"provider": "anthropic"}, "anthropic/opus", None, True),
        ({"provider": "anthropic"}, "openai/gpt", None, False),
        ({"provider": "anthropic"}, "anthropic", None, False),
        ({"provider": "anthropic"}, None, None, False),
        ({"provider": "anthropic", "model": "opus"}, "anthropic/opus", "a", True),
        ({"provider": None, "model": "anthropic/opus"}, "anthropic/opus", None, True),
        ({"provider": None, "model": "opus"}, "opus", None, True),
        ({"provider": "anthropic", "model": "opus"}, "anthropic/haiku", None, False),
        ({"provider": "a", "model": "b/c"}, "a/b/c", None, True),
        ({"provider": "anthropic", "account": "a"}, "anthropic/opus", "a", True),
        ({"provider": "anthropic", "account": "a"}, "anthropic/opus", None, False),
        ({"provider": None, "account": "a"}, None, "a", True),
    ],
)
def test_rate_limit_applies_to_its_subject(
    fields: dict[str, Any], model: str | None, account: str | None, applies: bool
) -> None:
    assert limit(**fields).applies_to(model, account) is applies


@pytest.mark.parametrize(
    "fields",
    [
        {"requests_per_minute": None},
        {"requests_per_minute": 0},
        {"tokens_per_minute": -1},
        {"provider": None},
        {"provider": " "},
        {"name": ""},
        {"name": "x" * 101},
        {"model": "\x00"},
    ],
)
def test_invalid_rate_limit_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(Invalid):
        limit(**{"requests_per_minute": 1, **fields}).check()


@given(
    per_minute=st.integers(1, 30),
    asks=st.lists(st.tuples(st.floats(0, 40), st.integers(1, 40)), max_size=60),
)
def test_requests_in_any_sixty_seconds_stay_within_the_limit(
    per_minute: int, asks: list[tuple[float, int]]
) -> None:
    expected = limit(requests_per_minute=per_minute)
    usage, now = rate_limits.initial_usage(expected, NOW), NOW
    created: list[tuple[datetime, int]] = []
    for pause, number in asks:
        now += timedelta(seconds=pause)
        got = min(number, rate_limits.remaining_requests(expected, usage, now))
        if got:
            usage = rate_limits.add_requests(usage, now, got)
            created.append((now, got))
        opens = rate_limits.next_request_at(expected, usage, now)
        assert (opens == now) == (rate_limits.remaining_requests(expected, usage, now) > 0)
        assert rate_limits.remaining_requests(expected, usage, opens) > 0
        window = [n for at, n in created if now - rate_limits.MINUTE < at <= now]
        assert sum(window) <= per_minute
        assert len(usage.taken) <= 61


def test_requests_of_a_minute_can_burst_and_return_after_sixty_seconds() -> None:
    expected = limit(requests_per_minute=3)
    usage = rate_limits.add_requests(rate_limits.initial_usage(expected, NOW), NOW, 3)
    assert rate_limits.remaining_requests(expected, usage, later(59.999999)) == 0
    assert rate_limits.next_request_at(expected, usage, later(10)) == later(60)
    assert rate_limits.remaining_requests(expected, usage, later(60)) == 3


def test_clock_set_back_grants_no_extra_requests() -> None:
    expected = limit(requests_per_minute=2)
    usage = rate_limits.add_requests(rate_limits.initial_usage(expected, NOW), later(5), 1)
    usage = rate_limits.add_requests(usage, later(1), 1)
    assert rate_limits.remaining_requests(expected, usage, later(61.5)) == 0
    assert rate_limits.remaining_requests(expected, usage, later(65)) == 2


def test_report_from_a_slow_clock_refills_no_bucket_twice() -> None:
    expected = limit(tokens_per_minute=600)
    usage = rate_limits.subtract_tokens(
        expected, rate_limits.initial_usage(expected, NOW), later(30), 600
    )
    usage = rate_limits.subtract_tokens(
        expected, usage, later(0), 0
    )  # from a host that is 30 s behind
    assert rate_limits.remaining_tokens(expected, usage, later(30)) == 0
    assert rate_limits.remaining_tokens(expected, usage, later(60)) == 300


def test_token_debt_is_repaid_before_the_next_request() -> None:
    expected = limit(tokens_per_minute=600)
    usage = rate_limits.initial_usage(expected, NOW)
    assert rate_limits.remaining_requests(expected, usage, NOW) > 0
    usage = rate_limits.subtract_tokens(expected, usage, NOW, 1800)
    assert rate_limits.remaining_tokens(expected, usage, NOW) == -1200
    assert rate_limits.remaining_requests(expected, usage, later(120)) == 0
    opens = rate_limits.next_request_at(expected, usage, later(30))
    assert later(120) < opens < later(120.2)
    assert rate_limits.remaining_requests(expected, usage, opens) > 0
    assert rate_limits.remaining_tokens(expected, usage, later(100_000)) == 600


def test_changed_limit_keeps_its_usage() -> None:
    before = limit(requests_per_minute=5, tokens_per_minute=60)
    usage = rate_limits.add_requests(rate_limits.initial_usage(before, NOW), NOW, 4)
    usage = rate_limits.subtract_tokens(before, usage, NOW, 100)
    after = limit(requests_per_minute=6, tokens_per_minute=6000)
    now = rate_limits.adjust_usage(before, after, usage, NOW)
    assert rate_limits.remaining_tokens(after, now, NOW) == -40
    assert rate_limits.remaining_requests(limit(requests_per_minute=6), now, NOW) == 2
    only = limit(requests_per_minute=5)
    new = rate_limits.adjust_usage(only, after, rate_limits.initial_usage(only, NOW), NOW)
    assert rate_limits.remaining_tokens(after, new, NOW) == 6000


def test_shares_follow_rank_within_every_limit() -> None:
    heads = {(): [1, 4, 9], ("a",): [2, 3, 5], ("a", "b"): [0, 6]}
    left = {"a": 2, "b": 1}
    assert rate_limits.allocate_claims(heads, left, 10) == {(): 3, ("a",): 1, ("a", "b"): 1}
    assert rate_limits.allocate_claims(heads, left, 2) == {(): 1, ("a",): 0, ("a", "b"): 1}
    assert rate_limits.allocate_claims(heads, {"a": 9, "b": 0}, 10) == {
        (): 3,
        ("a",): 3,
        ("a", "b"): 0,
    }
