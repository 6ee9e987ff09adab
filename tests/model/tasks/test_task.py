"""The task's own arithmetic: rank, readiness, timers, and the table of transitions."""

from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

from hypothesis import example, given
from hypothesis import strategies as st

from tenuto.model.tasks.task import (
    AGING_MS,
    DEFAULT_LEASE_S,
    KILL_GRACE_S,
    LEASED,
    TERMINAL,
    TRANSITIONS,
    Status,
    Task,
    is_ready,
    next_due_at,
    rank,
    watch_seconds,
)

NOW = datetime(2030, 1, 1, tzinfo=UTC)
TIMES = st.datetimes(datetime(1990, 1, 1), datetime(2100, 1, 1), timezones=st.just(UTC))  # noqa: DTZ001


def task(status: Status, **fields: Any) -> Task:
    created = {"created_at": NOW, "updated_at": NOW} | fields
    return Task(id=UUID(int=1), workspace=UUID(int=2), lane=1, status=status, **created)


def after(seconds: float) -> datetime:
    return NOW + timedelta(seconds=seconds)


@given(base=TIMES, priority=st.integers(1, 9))
@example(base=datetime(2038, 1, 19, 3, 0, 0, 9000, UTC), priority=1)  # floats lose a millisecond
def test_priority_step_is_worth_an_hour(base: datetime, priority: int) -> None:
    assert rank(priority, base) - rank(priority + 1, base) == AGING_MS
    assert rank(priority, base + timedelta(hours=1)) - rank(priority, base) == AGING_MS


@given(one=TIMES, two=TIMES)
def test_older_task_has_the_better_rank(one: datetime, two: datetime) -> None:
    if one + timedelta(milliseconds=1) <= two:
        assert rank(5, one) < rank(5, two)


def test_ready_task_has_no_hold_no_open_dependency_and_is_due() -> None:
    assert is_ready(task(Status.WAITING), NOW)
    assert is_ready(task(Status.WAITING, run_at=NOW), NOW)
    assert not is_ready(task(Status.WAITING, run_at=after(1)), NOW)
    assert not is_ready(task(Status.WAITING, hold="approval"), NOW)
    assert not is_ready(task(Status.WAITING, unmet=1), NOW)


def test_watch_time_follows_timeout_and_estimate() -> None:
    assert watch_seconds(None, None) is None
    assert watch_seconds(60, None) == 90
    assert watch_seconds(None, 2) == 120 + 1800
    assert watch_seconds(60, 2) == 90


@given(timeout=st.none() | st.integers(1, 10**6), estimate=st.none() | st.integers(1, 10**4))
def test_timer_of_a_claim_equals_the_timer_of_the_row(
    timeout: int | None, estimate: int | None
) -> None:
    running = task(Status.RUNNING, started_at=NOW, timeout_s=timeout, estimate_minutes=estimate)
    watch = watch_seconds(timeout, estimate)
    assert next_due_at(running) == (None if watch is None else after(watch))


def test_earliest_timer_applies() -> None:
    assert next_due_at(task(Status.PENDING)) is None
    assert next_due_at(task(Status.PENDING, queue_ttl_s=9)) == after(9)
    assert next_due_at(task(Status.PENDING, queue_ttl_s=9, attempt=1)) is None
    assert next_due_at(task(Status.RETRY_WAIT, next_attempt_at=after(3))) == after(3)
    assert next_due_at(task(Status.WAITING, run_at=after(5), queue_ttl_s=3)) == after(5)
    assert next_due_at(task(Status.PENDING, run_at=after(5), queue_ttl_s=3)) == after(8)
    assert next_due_at(task(Status.WAITING, hold="approval", queue_ttl_s=3)) == after(3)
    assert next_due_at(task(Status.WAITING, run_at=after(5), hold="approval")) is None
    assert next_due_at(task(Status.WAITING, run_at=after(5), unmet=1)) is None
    assert next_due_at(task(Status.WAITING, hold="quota", resume_at=after(7))) == after(7)
    asked = KILL_GRACE_S + DEFAULT_LEASE_S
    assert next_due_at(task(Status.RUNNING, cancel_requested_at=NOW)) == after(asked)
    assert next_due_at(task(Status.RUNNING, pause_requested_at=NOW, lease_s=90)) == after(100)
    for status in TERMINAL | {Status.PAUSED}:
        assert next_due_at(task(status, queue_ttl_s=1, timeout_s=1, next_attempt_at=NOW)) is None


def test_terminal_status_is_left_only_by_a_retry() -> None:
    for command, moves in TRANSITIONS.items():
        for source, target in moves:
            assert source is not target or command in ("block", "unblock")
            if source in TERMINAL:
                assert command in ("retry", "revive")
                assert source is not Status.COMPLETED
                assert source is not Status.SKIPPED or command == "revive"


def test_lease_begins_only_with_a_claim() -> None:
    for command, moves in TRANSITIONS.items():
        for source, target in moves:
            if target in LEASED and source not in LEASED:
                assert (command, source) == ("claim", Status.PENDING)


def test_every_status_is_reachable_and_every_open_one_is_left() -> None:
    pairs = {pair for moves in TRANSITIONS.values() for pair in moves}
    assert {target for _, target in pairs} == set(Status)
    assert {source for source, _ in pairs} == set(Status) - {Status.COMPLETED}
