"""Failures: the tries that each outcome counts, and when the task is due again."""

from contextlib import suppress
from datetime import timedelta

import pytest
from tests.contract.conftest import (
    LEASE_S,
    START,
    Another,
    ManualClock,
    Raw,
    claim_all,
    claim_one,
    failure,
    forget,
    new,
    profile,
    row_of,
    running,
)

from tenuto.engine.engine import Engine
from tenuto.model.errors import Conflict
from tenuto.model.tasks.retry import FREE_ENDS, RetryPolicy
from tenuto.model.tasks.task import Fence


async def next_attempt(engine: Engine, clock: ManualClock, task: Fence) -> Fence:
    """The task's next attempt, when it is due."""
    row = await row_of(engine, task.task)
    if row.due_at is not None:
        clock.advance((row.due_at - clock.now()).total_seconds())
        assert await engine.maintenance.promote_once("promoter") == 1
    return (await claim_one(engine)).fence


async def delays(engine: Engine, clock: ManualClock, times: int, **options: object) -> list[float]:
    """The seconds between a failure and the next attempt, one after another."""
    fence = await running(engine, **options)
    matches = []
    for _ in range(times):
        await engine.fail(fence, failure())
        row = await row_of(engine, fence.task)
        assert row.next_attempt_at is not None
        matches.append((row.next_attempt_at - clock.now()).total_seconds())
        fence = await next_attempt(engine, clock, fence)
    return matches


async def test_backoff_doubles_up_to_its_cap(engine: Engine, clock: ManualClock) -> None:
    result = await delays(engine, clock, 10, max_attempts=11)
    assert result == [5, 10, 20, 40, 80, 160, 320, 640, 900, 900]


@pytest.mark.parametrize(("roll", "factor"), [(0.0, 0.8), (0.999999, 1.2)])
async def test_backoff_has_jitter(
    engine: Engine, clock: ManualClock, roll: float, factor: float
) -> None:
    clock.roll = roll
    assert await delays(engine, clock, 2) == pytest.approx([5 * factor, 10 * factor], abs=1e-3)


async def test_backoff_follows_the_tasks_retry_policy(engine: Engine, clock: ManualClock) -> None:
    policy = RetryPolicy(base_s=1, multiplier=3, cap_s=10, jitter=0)
    assert await delays(engine, clock, 4, max_attempts=9, retry=policy) == [1, 3, 9, 10]


async def test_task_without_tries_left_is_dead(engine: Engine, clock: ManualClock) -> None:
    fence = await running(engine)
    for tries in (1, 2, 3):
        await engine.fail(fence, failure(message=f"boom {tries}", stack="trace", exit_code=tries))
        view = await engine.show(fence.task)
        assert view.tries == tries
        if tries < 3:
            assert view.status == "RETRY_WAIT"
            fence = await next_attempt(engine, clock, fence)
    assert (view.status, view.last_error, view.error_class) == ("DEAD", "boom 3", "error")
    assert view.finished_at == clock.now()
    attempts = await engine.attempts(fence.task)
    assert [(a.outcome, a.message, a.exit_code) for a in attempts] == [
        ("FAILED", f"boom {n}", n) for n in (1, 2, 3)
    ]
    event = (await engine.events(fence.task))[-1]
    assert (event.event, event.level, event.stack_trace) == ("dead", "ERROR", "trace")
    assert await claim_all(engine) == []


@pytest.mark.parametrize(
    ("error_class", "retryable", "status", "level"),
    [
        ("error", None, "RETRY_WAIT", "WARN"),
        ("error", False, "FAILED", "ERROR"),
        ("connection", None, "RETRY_WAIT", "WARN"),
        ("crash", None, "RETRY_WAIT", "WARN"),
        ("syntax", None, "FAILED", "ERROR"),
        ("syntax", True, "RETRY_WAIT", "WARN"),
        ("invalid_input", None, "FAILED", "ERROR"),
        ("out_of_memory", None, "FAILED", "CRITICAL"),
        ("out_of_memory", True, "RETRY_WAIT", "WARN"),
        ("rate_limit", None, "RETRY_WAIT", "WARN"),
        ("rate_limit", False, "FAILED", "ERROR"),
        ("timeout", None, "RETRY_WAIT", "WARN"),
        ("timeout", False, "FAILED", "ERROR"),
    ],
)
async def test_error_class_decides_whether_a_task_is_retried(
    engine: Engine, error_class: str, retryable: bool | None, status: str, level: str
) -> None:
    fence = await running(engine)
    await engine.fail(fence, failure(error_class, retryable=retryable))
    view = await engine.show(fence.task)
    event = (await engine.events(fence.task))[-1]
    assert (view.status, view.error_class, event.level) == (status, error_class, level)


async def test_timeout_doubles_the_time_limit_of_the_next_attempt(
    engine: Engine, clock: ManualClock
) -> None:
    fence = await running(engine, timeout_s=30_000, max_attempts=9)
    await engine.time_out(fence, {"state": "killed"})
    view = await engine.show(fence.task)
    assert (view.status, view.timeout_s, view.last_outcome) == ("RETRY_WAIT", 60_000, "TIMED_OUT")
    fence = await next_attempt(engine, clock, fence)
    await engine.fail(fence, failure("timeout"))
    assert (await engine.show(fence.task)).timeout_s == 24 * 3600
    receipts = [attempt.receipt for attempt in await engine.attempts(fence.task)]
    assert receipts == [{"state": "killed"}, None]


async def test_rate_limit_without_a_reset_backs_off_without_counting_a_try(
    engine: Engine, clock: ManualClock
) -> None:
    fence = await running(engine, max_attempts=2)
    matches = []
    for _ in range(20):
        await engine.fail(fence, failure("rate_limit"))
        row = await row_of(engine, fence.task)
        assert (row.status, row.tries) == ("RETRY_WAIT", 0)
        assert row.next_attempt_at is not None
        matches.append((row.next_attempt_at - clock.now()).total_seconds())
        fence = await next_attempt(engine, clock, fence)
    assert matches[:7] == [30, 60, 120, 240, 480, 900, 900]
    await engine.fail(fence, failure("rate_limit"))
    assert (await row_of(engine, fence.task)).tries == 1
    fence = await next_attempt(engine, clock, fence)
    await engine.fail(fence, failure("rate_limit"))
    assert (await row_of(engine, fence.task)).status == "DEAD"


async def test_rate_limit_with_a_reset_parks_the_task(engine: Engine, clock: ManualClock) -> None:
    fence = await running(engine)
    reset = START + timedelta(minutes=7)
    await engine.fail(fence, failure("rate_limit"), resume_at=reset)
    view = await engine.show(fence.task)
    assert (view.status, view.waiting_for, view.tries) == ("WAITING", "quota", 0)
    clock.advance(419)
    assert await engine.maintenance.promote_once("promoter") == 0
    clock.advance(1)
    assert await engine.maintenance.promote_once("promoter") == 1
    view = await engine.show(fence.task)
    assert (view.status, view.hold, view.resume_at) == ("PENDING", None, None)


async def test_rate_limit_with_a_reset_pauses_the_lane(engine: Engine, another: Another) -> None:
    fence = await running(engine)
    other = await engine.submit(new())
    await engine.fail(fence, failure("rate_limit"), resume_at=START + timedelta(minutes=7))
    async with another() as second:
        assert await claim_all(second) == [], "the lane stays open until the provider's reset"
        assert isinstance(second.clock, ManualClock)
        second.clock.advance(minutes=7)
        assert [work.fence.task for work in await claim_all(second)] == [other.id]


async def test_reset_time_that_pauses_a_lane_is_bounded(engine: Engine, another: Another) -> None:
    fence = await running(engine)
    other = await engine.submit(new())
    await engine.fail(fence, failure("rate_limit"), resume_at=START + timedelta(days=9000))
    async with another() as second:
        assert isinstance(second.clock, ManualClock)
        second.clock.advance(days=7)
        assert [work.fence.task for work in await claim_all(second)] == [other.id]


async def test_lost_lease_is_due_at_once_then_with_backoff(
    engine: Engine, clock: ManualClock
) -> None:
    fence = await running(engine, max_attempts=4)
    for tries, delay in ((1, 0), (2, 5), (3, 10)):
        clock.advance(LEASE_S)
        assert await engine.maintenance.expire_once("reaper") == 0
        clock.advance(0.001)
        assert await engine.maintenance.expire_once("reaper") == 1
        row = await row_of(engine, fence.task)
        assert (row.status, row.tries, row.last_outcome) == ("RETRY_WAIT", tries, "STALLED")
        assert row.next_attempt_at == clock.now() + timedelta(seconds=delay)
        fence = await next_attempt(engine, clock, fence)
    clock.advance(LEASE_S + 1)
    await engine.maintenance.expire_once("reaper")
    assert (await row_of(engine, fence.task)).status == "DEAD"


async def test_another_outcome_resets_the_count_of_lost_leases(
    engine: Engine, clock: ManualClock
) -> None:
    fence = await running(engine, max_attempts=9)
    for _ in range(2):
        clock.advance(LEASE_S + 1)
        await engine.maintenance.expire_once("reaper")
        assert (await row_of(engine, fence.task)).next_attempt_at == clock.now()
        fence = await next_attempt(engine, clock, fence)
        await engine.fail(fence, failure())
        fence = await next_attempt(engine, clock, fence)


@pytest.mark.parametrize("mode", ["release", "park"])
async def test_release_is_free_twenty_times(engine: Engine, clock: ManualClock, mode: str) -> None:
    fence = await running(engine, max_attempts=2)
    for ends in range(1, 24):
        if mode == "release":
            await engine.release(fence)
        else:
            await engine.park(fence, "input", resume_at=clock.now() + timedelta(seconds=1))
        row = await row_of(engine, fence.task)
        if row.status == "DEAD":
            break
        assert (row.tries, row.free_ends) == (max(0, ends - 20), ends)
        fence = await next_attempt(engine, clock, fence)
    assert (ends, row.tries) == (22, 2)


async def test_checkpoint_makes_release_free_again(engine: Engine, clock: ManualClock) -> None:
    fence = await running(engine, max_attempts=1)
    for ends in range(45):
        if ends % 19 == 0:
            await engine.checkpoint(fence, ends)
        await engine.release(fence)
        assert (await row_of(engine, fence.task)).tries == 0
        fence = await next_attempt(engine, clock, fence)


async def test_pause_never_counts_a_try(engine: Engine) -> None:
    fence = await running(engine, max_attempts=1)
    for _ in range(25):
        await engine.pause(fence.task)
        await engine.confirm_pause(fence, {"state": "killed"})
        assert (await row_of(engine, fence.task)).tries == 0
        await engine.resume(fence.task)
        fence = (await claim_one(engine)).fence


async def test_task_fails_after_twenty_failed_starts(engine: Engine, clock: ManualClock) -> None:
    fence = await running(engine, max_attempts=2)
    for times in range(1, 21):
        await engine.not_started(fence, failure(message="no such image"))
        row = await row_of(engine, fence.task)
        if times < 20:
            assert (row.status, row.tries) == ("RETRY_WAIT", 0)
            assert row.last_outcome == "NOT_STARTED"
            fence = await next_attempt(engine, clock, fence)
    assert (row.status, row.error_class) == ("FAILED", "cannot_start")
    event = (await engine.events(fence.task))[-1]
    assert event.level == "CRITICAL"
    assert "no such image" in event.text


async def test_retry_by_an_operator_resets_the_count_of_starts(
    engine: Engine, clock: ManualClock
) -> None:
    fence = await running(engine)
    for _ in range(2):
        for _ in range(FREE_ENDS - 1):
            await engine.not_started(fence, failure(message="no such image"))
            fence = await next_attempt(engine, clock, fence)
        await engine.not_started(fence, failure(message="no such image"))
        assert (await row_of(engine, fence.task)).error_class == "cannot_start"
        await engine.retry(fence.task)
        fence = (await claim_one(engine)).fence


async def test_other_outcomes_do_not_count_as_failed_starts(
    engine: Engine, clock: ManualClock
) -> None:
    fence = await running(engine)
    for _ in range(19):
        await engine.release(fence)
        fence = await next_attempt(engine, clock, fence)
    await engine.not_started(fence, failure())
    assert (await row_of(engine, fence.task)).status == "RETRY_WAIT"


async def test_permanent_start_failure_fails_at_once(engine: Engine) -> None:
    fence = await running(engine)
    await engine.not_started(fence, failure("syntax", retryable=False))
    view = await engine.show(fence.task)
    assert (view.status, view.error_class) == ("FAILED", "syntax")


async def test_thousandth_attempt_is_the_last(engine: Engine, clock: ManualClock, raw: Raw) -> None:
    submitted = await engine.submit(new())
    await raw.execute("update task set attempt = 999")
    fence = (await claim_one(engine)).fence
    await engine.release(fence)
    assert (await row_of(engine, submitted.id)).status == "DEAD"
    await forget(raw, submitted.id)


async def test_task_without_attempts_left_does_not_block_its_lane(engine: Engine, raw: Raw) -> None:
    submitted = await engine.submit(new(priority=10))
    await raw.execute("update task set attempt = 999")
    fence = (await claim_one(engine)).fence
    await engine.pause(fence.task)
    await engine.confirm_pause(fence, {"state": "killed"})
    with suppress(Conflict):  # it may as well be refused
        await engine.resume(fence.task)
    other = await engine.submit(new())
    claimed = await engine.claim(profile(), "w", 1)
    await forget(raw, submitted.id)
    assert [work.fence.task for work in claimed] == [other.id]
