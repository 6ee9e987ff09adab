"""Reports: the fence decides over every write of an attempt; a repeat gets the same response."""

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest
from tests.contract.conftest import (
    LEASE_S,
    START,
    Another,
    ManualClock,
    Raw,
    assigned,
    claim_one,
    failure,
    in_status,
    new,
    profile,
    reclaimed,
    refusal,
    row_of,
    running,
    snapshot,
    status,
)

from tenuto.engine.engine import Engine
from tenuto.model.errors import Conflict, NotFound
from tenuto.model.tasks.commands import Complete, DecisionContext
from tenuto.model.tasks.decide import decide
from tenuto.model.tasks.task import Fence, Status, TaskChange
from tenuto.model.tasks.transcript import Line

Call = Callable[[Engine, Fence], Awaitable[Any]]
KILLED = {"state": "killed"}
ENDS: dict[str, Call] = {
    "complete": lambda engine, fence: engine.complete(fence, {"late": True}, "late"),
    "fail": lambda engine, fence: engine.fail(fence, failure()),
    "not_started": lambda engine, fence: engine.not_started(fence, failure()),
    "time_out": lambda engine, fence: engine.time_out(fence, KILLED),
    "park": lambda engine, fence: engine.park(fence, "approval", wait_until=START),
    "release": lambda engine, fence: engine.release(fence),
    "confirm_cancel": lambda engine, fence: engine.confirm_cancel(fence, KILLED),
    "confirm_pause": lambda engine, fence: engine.confirm_pause(fence, KILLED),
}
WRITES: dict[str, Call] = {
    "begin": lambda engine, fence: engine.begin(fence, "session"),
    "checkpoint": lambda engine, fence: engine.checkpoint(fence, {"late": True}),
    "progress": lambda engine, fence: engine.progress(fence, 99, "late"),
    "record_step": lambda engine, fence: engine.record_step(fence, "late", 1),
    "spawn": lambda engine, fence: engine.spawn(fence, "late", new("late child")),
}
FENCED = ENDS | WRITES


async def shut_out(engine: Engine, fence: Fence, *, but: str = "") -> None:
    """Every write by the fence is refused and changes nothing."""
    before = await snapshot(engine, fence.task)
    for name, call in FENCED.items():
        if name != but:
            assert await refusal(call(engine, fence)) == "lease_lost", name
    assert (await engine.heartbeat([fence])).lost == [fence]
    assert await snapshot(engine, fence.task) == before


async def test_write_of_an_older_attempt_is_refused(engine: Engine, raw: Raw) -> None:
    stale = await running(engine)
    await reclaimed(engine, stale)
    before = await raw.counts()
    await shut_out(engine, stale)
    assert await raw.counts() == before


async def test_write_after_the_lease_expired_is_refused(engine: Engine, clock: ManualClock) -> None:
    fence = await running(engine)
    clock.advance(LEASE_S + 1)
    assert await engine.maintenance.expire_once("reaper") == 1
    await shut_out(engine, fence)


async def test_fence_with_one_wrong_part_is_refused(engine: Engine) -> None:
    fence = await running(engine)
    await engine.release(fence)
    current = (await claim_one(engine)).fence
    await shut_out(engine, Fence(fence.task, current.attempt, fence.token))
    await shut_out(engine, Fence(fence.task, fence.attempt, current.token))
    await shut_out(engine, Fence(fence.task, current.attempt + 1, current.token))
    await shut_out(engine, Fence(fence.task, current.attempt, ""))


@pytest.mark.parametrize("stolen", [False, True])
async def test_refused_result_is_not_stored_beside_an_accepted_one(
    engine: Engine, stolen: bool
) -> None:
    stale = await running(engine)
    current = await reclaimed(engine, stale)
    await engine.complete(current, "accepted")
    beside = await running(engine)
    late = Fence(stale.task, current.attempt, "a guess") if stolen else stale
    ends = engine.complete(late, "late"), engine.complete(beside, None)
    reported = await asyncio.gather(*ends, return_exceptions=True)
    assert [type(item) for item in reported] == [Conflict, type(None)]
    assert (await engine.show(stale.task)).output == "accepted"


async def test_result_of_another_workspace_is_not_changed(engine: Engine, raw: Raw) -> None:
    fence = await running(engine)
    await engine.complete(fence, "accepted")
    intruder = Engine(engine.store, workspace=await raw.workspace(77), actor="intruder")
    own = await running(intruder)
    forged = Fence(fence.task, fence.attempt, "a guess")
    ends = intruder.complete(forged, "forged"), intruder.complete(own, None)
    reported = await asyncio.gather(*ends, return_exceptions=True)
    assert [type(item) for item in reported] == [NotFound, type(None)]
    assert (await engine.show(fence.task)).output == "accepted"


async def test_report_after_the_outcome_is_refused(engine: Engine) -> None:
    await shut_out(engine, await in_status(engine, Status.COMPLETED), but="complete")
    await shut_out(engine, await in_status(engine, Status.CANCELLED), but="confirm_cancel")
    await shut_out(engine, await in_status(engine, Status.FAILED), but="fail")


@pytest.mark.parametrize("hold", ["act", "turn", "turn:act", "paused", "budget", "concurrency"])
async def test_attempt_cannot_park_with_a_hold_of_the_engine(engine: Engine, hold: str) -> None:
    fence = await running(engine)
    assert await refusal(engine.park(fence, hold, wait_until=START)) == "invalid_value"
    assert await status(engine, fence.task) == "RUNNING"


async def test_park_has_a_longest_wait(engine: Engine) -> None:
    fence = await running(engine)
    assert await refusal(engine.park(fence, "quota")) == "invalid_value"
    assert await status(engine, fence.task) == "RUNNING"


async def test_transcript_lines_of_an_older_attempt_are_dropped(engine: Engine) -> None:
    stale = await running(engine)
    current = await reclaimed(engine, stale)
    before = await snapshot(engine, stale.task)
    for fence in (stale, Fence(stale.task, current.attempt, stale.token)):
        await engine.append(fence, [Line(1, "INFO", "late")])
    assert await snapshot(engine, stale.task) == before


async def test_transcript_lines_are_stored_once_and_in_order(
    engine: Engine, clock: ManualClock
) -> None:
    fence = await running(engine)
    lines = [Line(number, "INFO", f"line {number}") for number in range(5)]
    await engine.append(fence, lines[:3])
    await engine.append(fence, lines[2:])
    await engine.append(fence, [])
    output = await engine.query.transcript(fence.task, engine.workspace)
    assert [(line.seq, line.text) for line in output] == [(n, f"line {n}") for n in range(5)]


async def test_heartbeat_renews_held_leases_and_names_lost_ones(
    engine: Engine, clock: ManualClock
) -> None:
    stale = await running(engine)
    current = await reclaimed(engine, stale)
    other = await running(engine, lease_s=100)
    clock.advance(5)
    heartbeat = await engine.heartbeat([current, other, Fence(UUID(int=9), 1, "x")], 30)
    assert heartbeat.held[current.task].lease_until == clock.now() + timedelta(seconds=30)
    assert heartbeat.held[other.task].lease_until == clock.now() + timedelta(seconds=100)
    assert [fence.task for fence in heartbeat.lost] == [UUID(int=9)]
    before = await snapshot(engine, stale.task)
    assert (await engine.heartbeat([stale])).lost == [stale]
    assert await snapshot(engine, stale.task) == before
    assert (await engine.show(current.task)).version == 5


async def test_heartbeat_distinguishes_two_attempts_of_a_task(engine: Engine) -> None:
    stale = await running(engine)
    current = await reclaimed(engine, stale)
    heartbeat = await engine.heartbeat([stale, current])
    assert list(heartbeat.held) == [current.task]
    assert heartbeat.lost == [stale]


async def test_heartbeat_returns_cancel_and_pause_requests(engine: Engine) -> None:
    fence = await running(engine)
    lease_status = (await engine.heartbeat([fence])).held[fence.task]
    assert (lease_status.cancel, lease_status.pause, lease_status.hung) == (False, False, False)
    await engine.pause(fence.task)
    await engine.cancel(fence.task)
    lease_status = (await engine.heartbeat([fence])).held[fence.task]
    assert (lease_status.cancel, lease_status.pause, lease_status.hung) == (True, True, False)
    assert (await engine.heartbeat([])).lost == []


async def test_heartbeat_does_not_renew_an_expired_lease_that_was_reaped(
    engine: Engine, clock: ManualClock
) -> None:
    fence = await running(engine)
    clock.advance(LEASE_S + 1)
    await engine.maintenance.expire_once("reaper")
    assert (await engine.heartbeat([fence])).lost == [fence]
    assert await status(engine, fence.task) == "RETRY_WAIT"


async def test_expired_lease_that_was_not_reaped_still_completes(
    engine: Engine, clock: ManualClock
) -> None:
    fence = await running(engine)
    clock.advance(LEASE_S * 100)
    await engine.complete(fence, 1)
    assert await status(engine, fence.task) == "COMPLETED"
    assert await engine.maintenance.expire_once("reaper") == 0


async def test_result_is_stored(engine: Engine) -> None:
    outputs: list[Any] = [None, 0, "", [], {"a": None}, False, "x" * 1000]
    for output in outputs:
        fence = await running(engine)
        await engine.complete(fence, output, "in short")
        view = await engine.show(fence.task)
        assert (view.status, view.output, view.summary) == ("COMPLETED", output, "in short")
        assert view.finished_at == START
        (attempt,) = await engine.attempts(fence.task)
        assert (attempt.outcome, attempt.ended_at) == ("COMPLETED", START)


@pytest.mark.parametrize("name", ["complete", "fail", "not_started", "time_out", "park", "release"])
async def test_repeated_outcome_gets_the_same_response(
    engine: Engine, clock: ManualClock, name: str
) -> None:
    fence = await running(engine, timeout_s=5)
    await ENDS[name](engine, fence)
    before = await snapshot(engine, fence.task)
    clock.advance(1)
    await ENDS[name](engine, fence)
    assert await snapshot(engine, fence.task) == before
    others = {"complete", "not_started", "release"} - {name}
    for other in sorted(others):
        assert await refusal(ENDS[other](engine, fence)) == "lease_lost"
    assert await snapshot(engine, fence.task) == before


async def test_repeated_failure_of_any_class_gets_the_same_response(engine: Engine) -> None:
    for error_class in ("error", "rate_limit", "timeout", "syntax"):
        for resume_at in (None, START + timedelta(hours=1)):
            lane = f"{error_class} {resume_at}"  # a known reset closes it
            fence = await running(engine, max_attempts=2, task_type=lane)
            await engine.fail(fence, failure(error_class), resume_at)
            before = await snapshot(engine, fence.task)
            await engine.fail(fence, failure(error_class), resume_at)
            assert await snapshot(engine, fence.task) == before


async def test_repeated_confirmation_gets_the_same_response(engine: Engine) -> None:
    for asked in (Status.CANCELLED, Status.PAUSED):
        fence = await in_status(engine, asked)
        before = await snapshot(engine, fence.task)
        name = "confirm_cancel" if asked is Status.CANCELLED else "confirm_pause"
        await ENDS[name](engine, fence)
        assert await snapshot(engine, fence.task) == before


async def test_outcome_after_the_next_claim_is_refused(engine: Engine) -> None:
    fence = await running(engine)
    await engine.release(fence)
    await claim_one(engine)
    assert await refusal(engine.release(fence)) == "lease_lost"


@pytest.mark.parametrize("asked", ["cancel", "pause"])
async def test_requested_stop_refuses_other_outcomes(engine: Engine, asked: str) -> None:
    fence = await running(engine)
    await (engine.cancel if asked == "cancel" else engine.pause)(fence.task)
    before = await snapshot(engine, fence.task)
    allowed = {"progress", "begin", f"confirm_{asked}"}
    allowed |= {"checkpoint"} if asked == "pause" else set()
    for name in sorted(FENCED.keys() - allowed):
        expected = "out_of_turn" if name == "confirm_cancel" else f"{asked}_requested"
        assert await refusal(FENCED[name](engine, fence)) == expected, name
    assert await snapshot(engine, fence.task) == before
    assert not (await engine.heartbeat([fence])).lost
    if asked == "pause":
        assert await engine.checkpoint(fence, "last") == 1
    await FENCED[f"confirm_{asked}"](engine, fence)


@pytest.mark.parametrize("of", Status)
async def test_complete_in_the_store_equals_complete_in_the_model(
    engine: Engine, of: Status
) -> None:
    leased = of in (Status.ASSIGNED, Status.RUNNING)
    for asked in ("", "cancel", "pause", "pause cancel") if leased else ("",):
        for attempt in (0, 1):
            for token in ("", "wrong"):
                right = await in_status(engine, of)
                for word in asked.split():
                    await (engine.cancel if word == "cancel" else engine.pause)(right.task)
                fence = Fence(right.task, right.attempt + attempt, token or right.token)
                await compare_complete(engine, fence)
                if of is Status.PENDING:
                    await engine.cancel(right.task)  # else the next claim takes it


async def compare_complete(engine: Engine, fence: Fence) -> None:
    before = await row_of(engine, fence.task)
    command = Complete(fence=fence, output="1")
    expected: TaskChange | str | None
    try:
        expected = decide(before, command, DecisionContext(engine.clock.now(), actor="tester"))
    except Conflict as error:
        expected = error.code
    reported: str | None = None
    try:
        await engine.complete(fence, 1)
    except Conflict as error:
        reported = error.code
    assert reported == (expected if isinstance(expected, str) else None)
    after = await row_of(engine, fence.task)
    assert after == (expected.task if isinstance(expected, TaskChange) else before)
    output = (await engine.show(fence.task)).output
    assert output == (1 if isinstance(expected, TaskChange) else None)


async def test_checkpoint_numbers_only_grow(engine: Engine) -> None:
    fence = await running(engine)
    assert await engine.checkpoint(fence, {"n": 1}) == 1
    assert await engine.checkpoint(fence, {"n": 5}, seq=5) == 5
    assert await engine.checkpoint(fence, {"n": "ignored"}, seq=5) == 5
    assert await refusal(engine.checkpoint(fence, {"n": 4}, seq=4)) == "checkpoint_stale"
    assert await engine.checkpoint(fence, None) == 6
    view = await engine.show(fence.task)
    assert (view.checkpoint, view.checkpoint_seq, view.version) == (None, 6, 2)
    await engine.checkpoint(fence, {"n": 7})
    assert (await engine.show(fence.task)).checkpoint == {"n": 7}


async def test_checkpoint_number_of_an_earlier_attempt_is_stale(engine: Engine, raw: Raw) -> None:
    """The next attempt stores another checkpoint under the same number."""
    first = await running(engine)
    await engine.checkpoint(first, {"by": 1}, seq=5)
    second = await reclaimed(engine, first)
    assert await refusal(engine.checkpoint(second, {"by": 2}, seq=5)) == "checkpoint_stale"
    assert (await engine.show(first.task)).checkpoint == {"by": 1}
    assert await engine.checkpoint(second, {"by": 2}, seq=6) == 6
    assert await engine.checkpoint(second, {"by": 3}, seq=6) == 6
    assert (await engine.show(first.task)).checkpoint == {"by": 2}


async def test_progress_report_keeps_omitted_fields(engine: Engine, clock: ManualClock) -> None:
    fence = await running(engine)
    finish = START + timedelta(minutes=3)
    await engine.progress(fence, 10, "one", finish)
    await engine.progress(fence, step="two")
    view = await engine.show(fence.task)
    assert (view.progress_percent, view.current_step) == (10, "two")
    assert (view.estimated_completion_at, view.version) == (finish, 2)


async def test_step_is_recorded_once_for_all_attempts(engine: Engine) -> None:
    fence = await running(engine)
    await engine.record_step(fence, "fetch", {"rows": 3})
    await engine.record_step(fence, "fetch", {"rows": 3})
    await engine.release(fence)
    again = (await claim_one(engine)).fence
    assert await engine.steps(fence.task) == {"fetch": ({"rows": 3}, None)}
    await engine.record_step(again, "null", None)
    assert (await engine.steps(fence.task))["null"] == (None, None)


async def test_step_with_another_value_is_a_conflict(engine: Engine) -> None:
    fence = await running(engine)
    await engine.record_step(fence, "fetch", 1)
    assert await refusal(engine.record_step(fence, "fetch", 2)) == "step_conflict"
    assert await engine.steps(fence.task) == {"fetch": (1, None)}


async def test_subtask_key_is_not_a_step_key(engine: Engine) -> None:
    fence = await running(engine)
    child = await engine.spawn(fence, "child", new("child"))
    assert await refusal(engine.record_step(fence, "child", None)) == "step_conflict"
    await engine.record_step(fence, "nothing", None)
    assert await refusal(engine.spawn(fence, "nothing", new("child"))) == "step_conflict"
    assert await engine.steps(fence.task) == {"child": (None, child), "nothing": (None, None)}


async def test_subtask_is_created_once_per_key(engine: Engine, raw: Raw) -> None:
    fence = await running(engine)
    child = await engine.spawn(fence, "child", new("child", input=1))
    assert await engine.spawn(fence, "child", new("child", input=1)) == child
    other = await engine.spawn(fence, "other", new("child", input=1))
    assert other != child
    await engine.release(fence)
    again = (await claim_one(engine, task_types=("default",))).fence
    assert again.task == fence.task
    assert await engine.spawn(again, "child", new("child", input=1)) == child
    assert (await engine.show(child)).parent == fence.task
    assert await engine.steps(fence.task) == {"child": (None, child), "other": (None, other)}
    assert await refusal(engine.spawn(again, "child", new("else"))) == "idempotency_conflict"
    assert await raw.count("task") == 3


async def test_spawned_subtask_exists(engine: Engine) -> None:
    fence = await running(engine)
    await engine.spawn(fence, "one", new("child", idempotency_key="k"))
    child = await engine.spawn(fence, "two", new("child", idempotency_key="k"))
    assert (await engine.show(child)).title == "child"
    assert (await engine.steps(fence.task))["two"] == (None, child)


async def test_push_task_begins_before_it_completes(engine: Engine) -> None:
    fence = await assigned(engine)
    assert await refusal(engine.complete(fence)) == "out_of_turn"
    assert await refusal(engine.fail(fence, failure())) == "out_of_turn"
    await engine.begin(fence, "session")
    await engine.begin(fence, "session")
    assert await refusal(engine.begin(fence, "another session")) == "out_of_turn"
    view = await engine.show(fence.task)
    assert (view.status, view.session_key, view.version) == ("RUNNING", "session", 3)
    await engine.complete(fence)


async def test_report_on_a_missing_task_is_not_found(engine: Engine) -> None:
    anonymous = Fence(UUID(int=1), 1, "token")
    for name in ("complete", "fail", "release", "checkpoint", "record_step", "spawn"):
        assert await refusal(FENCED[name](engine, anonymous)) == "not_found"
    assert await refusal(engine.progress(anonymous, 1)) == "lease_lost"
    assert (await engine.heartbeat([anonymous])).lost == [anonymous]
    await engine.append(anonymous, [Line(1, "INFO", "x")])
    assert await engine.claim(profile(), "w", 1) == []


async def kept_lines(raw: Raw) -> list[str]:
    return [text for (text,) in await raw.fetch("select text from transcript order by line_no")]


async def test_transcript_of_an_attempt_is_bounded(engine: Engine, raw: Raw) -> None:
    engine.core.transcript_kb = 1
    fence = await running(engine)
    for number in range(5):
        await engine.append(fence, [Line(number, "INFO", str(number) * 268)])
    # Whoever begins with high numbers has no more room for that.
    await engine.append(fence, [Line(0, "INFO", "again"), Line(9, "INFO", "more")])
    full = "(transcript is full: 1 KB kept)"
    assert await kept_lines(raw) == ["0" * 268, "1" * 268, "2" * 268, full]
    again = await reclaimed(engine, fence)
    await engine.append(again, [Line(0, "INFO", "the next attempt has a cap of its own")])
    assert await raw.count("transcript") == 5


async def test_too_long_report_is_stored_in_part(engine: Engine, raw: Raw) -> None:
    engine.core.transcript_kb = 1
    fence = await running(engine)
    await engine.append(fence, [Line(number, "INFO", "é" * 100) for number in range(9)])
    full = "(transcript is full: 1 KB kept)"
    assert await kept_lines(raw) == [*["é" * 100] * 4, full]


async def test_repeated_transcript_report_counts_once(engine: Engine, raw: Raw) -> None:
    """The response to the first report may have been lost."""
    engine.core.transcript_kb = 1
    fence = await running(engine)
    first = [Line(0, "INFO", "x" * 900)]
    for lines in (first, first, [*first, Line(1, "INFO", "more")]):
        await engine.append(fence, lines)
    assert await kept_lines(raw) == ["x" * 900, "more"]
    await engine.append(fence, [*first, Line(2, "INFO", "x" * 900)])
    assert (await kept_lines(raw))[2:] == ["(transcript is full: 1 KB kept)"]


async def test_transcript_line_level_counts_towards_the_bound(engine: Engine, raw: Raw) -> None:
    engine.core.transcript_kb = 1
    fence = await running(engine)
    await engine.append(fence, [Line(number, "x" * 100, "") for number in range(100)])
    assert await raw.count("transcript") == 1024 // 132 + 1


async def test_concurrent_transcript_reports_share_one_cap(
    engine: Engine, raw: Raw, another: Another
) -> None:
    fence = await running(engine)
    async with another() as second:
        for caller in (engine, second):
            caller.core.transcript_kb = 1
        await asyncio.gather(
            *(
                caller.append(fence, [Line(20 * n + number, "INFO", "x" * 66) for n in range(5)])
                for number, caller in enumerate((engine, second) * 5)
            )
        )
    lines = await kept_lines(raw)
    assert min(lines) == "(transcript is full: 1 KB kept)"
    assert len(lines) == 11
