"""Maintenance: timers are columns; every duty is bounded, repeatable and safe beside others."""

import asyncio
import sqlite3
from datetime import timedelta
from typing import Any

import pytest
from tests.contract.conftest import (
    LEASE_S,
    START,
    WORKER,
    Another,
    ManualClock,
    Raw,
    claim_all,
    claim_one,
    failure,
    in_status,
    new,
    profile,
    refusal,
    row_of,
    running,
    status,
)

from tenuto.engine.engine import Engine
from tenuto.engine.tasks.maintenance import EVERY_LEASE, LeaseExemption
from tenuto.engine.tasks.report import WorkerInfo
from tenuto.model.tasks.task import AGING_MS, Fence, Status


async def test_scheduled_task_waits_for_its_time(engine: Engine, clock: ManualClock) -> None:
    submitted = await engine.submit(new(run_at=START + timedelta(seconds=60)))
    view = await engine.show(submitted.id)
    assert (view.status, view.waiting_for) == ("WAITING", "schedule")
    clock.advance(59.999)
    assert await engine.maintenance.promote_once("promoter") == 0
    assert await claim_all(engine) == []
    clock.advance(0.001)
    assert await engine.maintenance.promote_once("promoter") == 1
    assert await engine.maintenance.promote_once("promoter") == 0
    assert (await claim_one(engine)).fence.task == submitted.id


async def test_task_past_its_queue_ttl_fails(engine: Engine, clock: ManualClock) -> None:
    submitted = await engine.submit(new(queue_ttl_s=60))
    clock.advance(59)
    assert await engine.maintenance.promote_once("promoter") == 0
    clock.advance(1)
    assert await engine.maintenance.promote_once("promoter") == 1
    view = await engine.show(submitted.id)
    assert (view.status, view.error_class) == ("FAILED", "queue_ttl")


async def test_queue_ttl_counts_from_the_scheduled_time(engine: Engine, clock: ManualClock) -> None:
    submitted = await engine.submit(new(queue_ttl_s=60, run_at=START + timedelta(hours=1)))
    clock.advance(hours=1)
    assert await engine.maintenance.promote_once("promoter") == 1
    assert await status(engine, submitted.id) == "PENDING"
    clock.advance(60)
    assert await engine.maintenance.promote_once("promoter") == 1
    assert (await engine.show(submitted.id)).error_class == "queue_ttl"


async def test_queue_ttl_ends_with_the_first_attempt(engine: Engine, clock: ManualClock) -> None:
    fence = await running(engine, queue_ttl_s=60)
    await engine.release(fence)
    clock.advance(61)
    assert await engine.maintenance.promote_once("promoter") == 0
    assert await status(engine, fence.task) == "PENDING"


async def test_retry_after_the_queue_ttl_restarts_it(engine: Engine, clock: ManualClock) -> None:
    submitted = await engine.submit(new(queue_ttl_s=60))
    clock.advance(60)
    await engine.maintenance.promote_once("promoter")
    await engine.retry(submitted.id)
    await engine.maintenance.promote_once("promoter")
    assert await status(engine, submitted.id) == "PENDING"


async def hung(engine: Engine, clock: ManualClock) -> Fence:
    fence = await running(engine, estimate_minutes=10)
    clock.advance(minutes=40)
    await engine.heartbeat([fence], 10_000)
    assert await engine.maintenance.promote_once("promoter") == 1
    return fence


async def test_hung_task_is_warned_then_aborted(engine: Engine, clock: ManualClock) -> None:
    fence = await running(engine, estimate_minutes=10)
    before = await row_of(engine, fence.task)
    await engine.heartbeat([fence], 10_000)
    clock.advance(minutes=40, seconds=-1)
    assert await engine.maintenance.promote_once("promoter") == 0
    clock.advance(1)
    assert await engine.maintenance.promote_once("promoter") == 1
    assert (await engine.events(fence.task))[-1].event == "hung_warned"
    assert (await engine.heartbeat([fence], 10_000)).held[fence.task].hung
    clock.advance(minutes=10, seconds=-1)
    assert await engine.maintenance.promote_once("promoter") == 0
    clock.advance(1)
    assert await engine.maintenance.promote_once("promoter") == 1
    row = await row_of(engine, fence.task)
    assert (row.status, row.last_outcome) == ("RETRY_WAIT", "ABORTED")
    assert row.rank == before.rank - AGING_MS
    assert (row.priority, row.next_attempt_at) == (before.priority, clock.now())
    assert await refusal(engine.complete(fence)) == "lease_lost"


@pytest.mark.parametrize("mode", ["progress", "checkpoint"])
async def test_progress_delays_the_abort_of_a_hung_task(
    engine: Engine, clock: ManualClock, mode: str
) -> None:
    fence = await hung(engine, clock)
    clock.advance(minutes=9)
    if mode == "progress":
        await engine.progress(fence, 70)
    else:
        await engine.checkpoint(fence, {"at": 70})
    clock.advance(minutes=9)
    assert await engine.maintenance.promote_once("promoter") == 0
    assert await status(engine, fence.task) == "RUNNING"
    clock.advance(minutes=1)
    assert await engine.maintenance.promote_once("promoter") == 1
    assert await status(engine, fence.task) == "RETRY_WAIT"


async def test_attempt_far_past_its_timeout_is_ended(engine: Engine, clock: ManualClock) -> None:
    fence = await running(engine, timeout_s=60)
    await engine.heartbeat([fence], 10_000)
    clock.advance(89)
    assert await engine.maintenance.promote_once("promoter") == 0
    clock.advance(1)
    assert await engine.maintenance.promote_once("promoter") == 1
    view = await engine.show(fence.task)
    assert (view.status, view.timeout_s, view.last_outcome) == ("RETRY_WAIT", 120, "TIMED_OUT")
    (attempt,) = await engine.attempts(fence.task)
    assert attempt.receipt == {"state": "unconfirmed"}


@pytest.mark.parametrize(("asked", "ended"), [("cancel", "CANCELLED"), ("pause", "PAUSED")])
async def test_stop_request_without_an_answer_counts_the_owner_as_lost(
    engine: Engine, clock: ManualClock, asked: str, ended: str
) -> None:
    fence = await running(engine)
    await (engine.cancel if asked == "cancel" else engine.pause)(fence.task)
    clock.advance(LEASE_S + 10 - 1)
    assert await engine.maintenance.promote_once("promoter") == 0
    clock.advance(1)
    assert await engine.maintenance.promote_once("promoter") == 1
    view = await engine.show(fence.task)
    (attempt,) = await engine.attempts(fence.task)
    assert (view.status, attempt.outcome) == (ended, ended)
    assert (attempt.receipt, attempt.unconfirmed) == ({"state": "unconfirmed"}, True)
    assert view.tries == (0 if asked == "pause" else 1)


async def test_stop_is_confirmed_once(engine: Engine, clock: ManualClock) -> None:
    fence = await running(engine)
    await engine.cancel(fence.task)
    clock.advance(LEASE_S + 11)
    assert await engine.maintenance.expire_once("reaper") == 1
    gone, receipt = [(fence.task, fence.attempt)], {"state": "swept"}
    assert await engine.maintenance.confirm_gone(gone, receipt, "one") == 1
    assert await engine.maintenance.confirm_gone(gone, {"state": "gone"}, "another") == 0
    [attempt] = await engine.attempts(fence.task)
    assert (attempt.receipt, attempt.unconfirmed) == (receipt, False)


async def test_owner_that_sends_heartbeats_but_does_not_stop_is_given_up(
    engine: Engine, clock: ManualClock
) -> None:
    fence = await running(engine)
    await engine.cancel(fence.task)
    ends = []
    for _ in range(36):
        clock.advance(10)
        await engine.heartbeat([fence])
        assert await engine.maintenance.expire_once("reaper") == 0
        ends.append(await engine.maintenance.promote_once("promoter"))
    assert sum(ends[:29]) == 0, "still within five minutes of the request"
    assert sum(ends) == 1
    assert await status(engine, fence.task) == "CANCELLED"


async def test_expired_lease_with_a_stop_request_is_stopped(
    engine: Engine, clock: ManualClock
) -> None:
    cancelled, paused = await running(engine), await running(engine)
    await engine.pause(paused.task)
    await engine.pause(cancelled.task)
    await engine.cancel(cancelled.task)
    clock.advance(LEASE_S + 1)
    assert await engine.maintenance.expire_once("reaper") == 2
    assert await status(engine, cancelled.task) == "CANCELLED"
    assert await status(engine, paused.task) == "PAUSED"


async def test_leases_of_a_crashed_worker_expire_at_once(engine: Engine) -> None:
    fence = await running(engine)
    await engine.submit(new())
    (other,) = await engine.claim(profile(), "host:2:other", 1)
    assert await engine.maintenance.expire_worker(WORKER, "supervisor") == 1
    assert await status(engine, fence.task) == "RETRY_WAIT"
    assert await status(engine, other.fence.task) == "RUNNING"
    assert "worker died" in str((await engine.show(fence.task)).last_error)
    assert await engine.maintenance.expire_worker(WORKER, "supervisor") == 0


async def test_leases_of_a_crashed_worker_expire_beyond_one_batch(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tenuto.engine.tasks.maintenance.BATCH", 4)
    await engine.submit_many([new() for _ in range(10)])
    await claim_all(engine)
    assert await engine.maintenance.expire_worker(WORKER, "supervisor") == 10
    assert (await engine.query.counts(engine.workspace))["RETRY_WAIT"] == 10


async def test_exempt_leases_do_not_expire(engine: Engine, clock: ManualClock) -> None:
    """Two that run out one after the other: which are ended is said by when theirs did."""
    early = await running(engine)
    clock.advance(5)
    late = await running(engine)
    clock.advance(LEASE_S + 1)
    ends = START + timedelta(seconds=LEASE_S)
    upkeep = engine.maintenance
    for expire in (upkeep.expire_once, upkeep.expire_shared):
        assert await expire("reaper", exempt=EVERY_LEASE) == 0
        assert await expire("reaper", exempt=LeaseExemption(ends, clock.now())) == 0
    second = LeaseExemption(ends + timedelta(seconds=1), clock.now())
    assert await upkeep.expire_once("reaper", exempt=second) == 1
    assert await status(engine, early.task) == "RETRY_WAIT"
    assert await status(engine, late.task) == "RUNNING"
    assert (
        await upkeep.expire_shared("reaper", exempt=LeaseExemption(clock.now(), clock.now())) == 1
    )


@pytest.mark.parametrize("mode", ["once", "in_turns"])
async def test_timers_of_exempt_leases_do_not_count(
    engine: Engine, clock: ManualClock, mode: str
) -> None:
    silent = await running(engine, timeout_s=1)
    beating = await running(engine, timeout_s=1)
    retried = await running(engine)
    await engine.fail(retried, failure())
    clock.advance(40)
    await engine.heartbeat([beating])
    promote = (
        engine.maintenance.promote_once if mode == "once" else engine.maintenance.promote_shared
    )
    assert await promote("promoter", exempt=EVERY_LEASE) == 1
    assert await status(engine, retried.task) == "PENDING"
    assert await promote("promoter", exempt=LeaseExemption(START, clock.now())) == 1
    assert await status(engine, beating.task) == "RETRY_WAIT"
    assert await status(engine, silent.task) == "RUNNING"
    assert await promote("promoter", exempt=LeaseExemption(clock.now(), clock.now())) == 1
    assert await status(engine, silent.task) == "RETRY_WAIT"


async def test_many_coordinators_do_each_duty_once(
    engine: Engine, clock: ManualClock, another: Another
) -> None:
    await engine.submit_many([new() for _ in range(60)])
    claimed = await claim_all(engine)
    clock.advance(LEASE_S + 1)
    async with another() as second, another() as third:
        for duty in ("expire_once", "promote_once"):
            calls = [getattr(e.maintenance, duty)("c") for e in (engine, second, third) * 3]
            assert sum(await asyncio.gather(*calls)) == 60
    assert len(await claim_all(engine)) == len(claimed) == 60


async def test_concurrent_reaper_and_owner_have_one_winner(
    engine: Engine, clock: ManualClock, another: Another
) -> None:
    await engine.submit_many([new() for _ in range(40)])
    claimed = await claim_all(engine)
    clock.advance(LEASE_S + 1)
    async with another() as second:
        completes = [engine.complete(work.fence, 1) for work in claimed]
        answers = await asyncio.gather(
            *completes[:20],
            second.maintenance.expire_once("reaper"),
            *completes[20:],
            return_exceptions=True,
        )
    reaped = answers.pop(20)
    refused = [answer for answer in answers if answer is not None]
    assert len(refused) == reaped
    counts = await engine.query.counts(engine.workspace)
    assert (counts["COMPLETED"], counts["RETRY_WAIT"]) == (40 - len(refused), len(refused))


async def test_duty_is_bounded_by_its_batch(
    engine: Engine, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tenuto.engine.tasks.maintenance.BATCH", 4)
    await engine.submit_many([new() for _ in range(10)])
    await claim_all(engine)
    clock.advance(LEASE_S + 1)
    assert [await engine.maintenance.expire_once("reaper") for _ in range(4)] == [4, 4, 2, 0]
    assert [await engine.maintenance.promote_once("promoter") for _ in range(4)] == [4, 4, 2, 0]


async def test_expired_wait_does_not_delay_other_timers(
    engine: Engine, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tenuto.engine.tasks.maintenance.BATCH", 2)
    for _ in range(2):
        fence = await running(engine)
        await engine.park(fence, "approval", wait_until=START + timedelta(seconds=10))
    clock.advance(20)
    retried = await running(engine)
    await engine.fail(retried, failure())
    clock.advance(100)
    for _ in range(5):
        await engine.maintenance.promote_once("promoter")
    assert await status(engine, retried.task) == "PENDING"


async def test_deadline_passed_while_stopping_does_not_delay_other_timers(
    engine: Engine, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tenuto.engine.tasks.maintenance.BATCH", 1)
    stopping = await running(engine, timeout_s=1)
    clock.advance(25)
    await engine.heartbeat([stopping], 10_000)
    await engine.cancel(stopping.task)
    clock.advance(3)
    retried = await running(engine)
    await engine.fail(retried, failure())
    clock.advance(6)
    for _ in range(5):
        await engine.maintenance.promote_once("promoter")
    assert await status(engine, retried.task) == "PENDING"


async def test_owner_that_stops_late_does_not_delay_other_timers(
    engine: Engine, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tenuto.engine.tasks.maintenance.BATCH", 1)
    stopping = await running(engine)
    await engine.cancel(stopping.task)
    for _ in range(4):
        clock.advance(10)
        await engine.heartbeat([stopping])
    retried = await running(engine)
    await engine.fail(retried, failure())
    clock.advance(10)
    await engine.heartbeat([stopping])
    for _ in range(3):
        await engine.maintenance.promote_once("promoter")
    assert await status(engine, retried.task) == "PENDING"
    assert await status(engine, stopping.task) == "RUNNING"


async def test_stale_workers_are_marked(engine: Engine, clock: ManualClock) -> None:
    await engine.record_worker(WorkerInfo("host:1:a", "host", 1, ["agent"], 4, "RUNNING"))
    await engine.record_worker(WorkerInfo("host:2:b", "host", 2, ["agent"], 4, "STOPPED"))
    await engine.record_worker(WorkerInfo("host:3:c", "host", 3, ["agent"], 4, "DRAINING"))
    clock.advance(minutes=3)
    assert await engine.maintenance.prune_once() == 2
    matches = {w["worker_id"]: w["status"] for w in await engine.query.workers(engine.workspace)}
    assert matches == {"host:1:a": "LOST", "host:2:b": "STOPPED", "host:3:c": "LOST"}
    await engine.record_worker(WorkerInfo("host:1:a", "host", 1, ["agent"], 4, "RUNNING"))
    clock.advance(days=1)
    assert await engine.maintenance.prune_once() == 3


async def test_resign_by_another_process_keeps_the_leader(
    engine: Engine, clock: ManualClock
) -> None:
    assert await engine.maintenance.acquire_leadership("duty", "leader", 10) is not None
    await engine.maintenance.resign("duty", "other")
    clock.advance(1)
    assert await engine.maintenance.acquire_leadership("duty", "third", 10) is None
    leads = await engine.maintenance.leader("duty")
    assert leads is not None
    assert (leads.holder, leads.epoch) == ("leader", 1)


async def test_one_coordinator_leads_at_a_time(
    engine: Engine, clock: ManualClock, another: Another
) -> None:
    upkeep = engine.maintenance
    async with another() as second:
        calls: list[Any] = [
            upkeep.acquire_leadership("duty", "a", 10),
            second.maintenance.acquire_leadership("duty", "b", 10),
        ]
        leaders = [result for result in await asyncio.gather(*calls) if result is not None]
    assert [leader.epoch for leader in leaders] == [1]
    first, other = ("a", "b") if leaders[0].holder == "a" else ("b", "a")
    again = await upkeep.acquire_leadership("duty", first, 20)
    assert again is not None
    assert (again.epoch, again.until) == (1, clock.now() + timedelta(seconds=20))
    clock.advance(20.1)
    taken = await upkeep.acquire_leadership("duty", other, 10)
    assert taken is not None
    assert taken.epoch == 2
    assert await upkeep.acquire_leadership("duty", first, 10) is None
    await upkeep.resign("duty", first)
    assert await upkeep.acquire_leadership("duty", first, 10) is None
    await upkeep.resign("duty", other)
    clock.advance(0.001)
    assert (await upkeep.acquire_leadership("duty", first, 10)) is not None
    assert (await upkeep.leader("duty")) is not None
    assert await upkeep.leader("nothing") is None


@pytest.mark.parametrize(
    ("fault", "repair"),
    [
        ("update task set version = 9", "update task set version = 4"),
        ("update task set status = 'PENDING'", "update task set status = 'RUNNING'"),
        ("update task set attempt = 7", "update task set attempt = 2"),
        ("update event set seq = 8 where seq = 4", "update event set seq = 4 where seq = 8"),
        (
            "update event set previous = 'PAUSED' where seq = 4",
            "update event set previous = 'PENDING' where seq = 4",
        ),
    ],
)
async def test_audit_finds_an_inconsistent_row(
    engine: Engine, raw: Raw, fault: str, repair: str
) -> None:
    fence = await running(engine)
    await engine.release(fence)
    await claim_one(engine)
    await raw.execute(fault)
    result = await engine.maintenance.audit()
    await raw.execute(repair)
    assert len(result) >= 1
    assert str(fence.task) in result[0]


UNSOUND = {
    Status.RUNNING: "lease_until = null",
    Status.ASSIGNED: "lease_token = null",
    Status.COMPLETED: "finished_at = null",
    Status.RETRY_WAIT: "next_attempt_at = null",
}


@pytest.mark.parametrize("state", UNSOUND)
async def test_audit_finds_a_row_without_a_field_of_its_status(
    postgres_engine: Engine, postgres_url: str, state: Status
) -> None:
    task = (await in_status(postgres_engine, state)).task
    assert await postgres_engine.maintenance.audit() == []
    await Raw(postgres_url).execute(f"update task set {UNSOUND[state]} where id = '{task}'")
    reports = [f"task {task}: {state}, but columns of this status are missing"]
    assert await postgres_engine.maintenance.audit() == reports


@pytest.mark.parametrize("state", UNSOUND)
async def test_sqlite_refuses_a_row_without_a_field_of_its_status(
    sqlite_engine: Engine, sqlite_url: str, state: Status
) -> None:
    task = (await in_status(sqlite_engine, state)).task
    with pytest.raises(sqlite3.IntegrityError):
        await Raw(sqlite_url).execute(f"update task set {UNSOUND[state]} where id = '{task}'")
