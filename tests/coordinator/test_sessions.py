"""Sessions at gateways: who ends them, when, and with which receipt."""

import asyncio
import logging
from collections.abc import AsyncIterator

import pytest
from tests.contract.conftest import Raw, row_of
from tests.coordinator.helpers import KEY, SETTINGS, Stage, staged
from tests.coordinator.stub_gateway import always, session
from tests.secrets.conftest import dump
from tests.waiting import eventually

from tenuto.encryption_keys import KeyRing
from tenuto.engine.agents.push import PushSessions, SessionToKill
from tenuto.engine.engine import Engine


@pytest.fixture
async def stage(database_url: str) -> AsyncIterator[Stage]:
    async with staged(database_url) as created:
        yield created


async def test_kill_of_an_old_session_does_not_end_a_new_one(stage: Stage) -> None:
    await stage.agent(max_concurrent=2)
    [task] = await stage.submit(max_attempts=5)
    await stage.push()
    await stage.later(91)
    await stage.push()
    await stage.push()
    assert (await row_of(stage.engine, task)).attempt == 2
    await stage.engine.cancel(task)
    dispatching = PushSessions(stage.engine.system)
    old = SessionToKill(task, 1, "gateway:default", "old")
    await dispatching.confirm_killed(old, {"state": "killed"}, "test")
    assert await stage.status(task) == "RUNNING"
    await dispatching.confirm_killed(
        SessionToKill(task, 2, "gateway:default", "new"), {"state": "killed"}, "test"
    )
    assert await stage.status(task) == "CANCELLED"


async def test_cancel_kills_the_session_with_a_receipt(stage: Stage) -> None:
    await stage.agent()
    [task] = await stage.submit()
    await stage.push()
    key = (await row_of(stage.engine, task)).session_key
    await stage.engine.cancel(task, "enough")
    assert await stage.push(stage.another()) == 1, "by a coordinator that did not spawn it"
    assert stage.gateway.killed == [key]
    assert await stage.status(task) == "CANCELLED"
    [attempt] = await stage.engine.attempts(task)
    assert attempt.receipt == {
        "state": "killed",
        "how": "gateway default",
        "session": key,
        "at": stage.clock.now().isoformat(),
    }
    assert await stage.push() == 0


async def test_session_unknown_to_its_gateway_counts_as_gone(stage: Stage) -> None:
    stage.gateway.kill_status = 404
    await stage.agent()
    [task] = await stage.submit()
    await stage.push()
    await stage.engine.cancel(task)
    await stage.push()
    [attempt] = await stage.engine.attempts(task)
    assert (attempt.receipt or {})["state"] == "gone"


async def test_failed_kill_is_retried(stage: Stage) -> None:
    await stage.agent()
    [task] = await stage.submit()
    await stage.push()
    await stage.engine.cancel(task)
    stage.gateway.kill_status = 500
    assert await stage.push() == 1
    assert await stage.status(task) == "RUNNING"
    stage.gateway.kill_status = 200
    assert await stage.push() == 1
    assert await stage.status(task) == "CANCELLED"


async def test_session_is_not_killed_twice_at_once(stage: Stage) -> None:
    await stage.agent()
    [task] = await stage.submit()
    await stage.push()
    await stage.engine.cancel(task)
    stage.gateway.kill_answers.clear()
    assert [await stage.dispatcher.once() for _ in range(2)] == [1, 0]
    stage.gateway.kill_answers.set()
    await stage.dispatcher.finish_calls(30)
    assert len(stage.gateway.killed) == 1
    assert await stage.status(task) == "CANCELLED"


async def test_unkillable_session_does_not_block_its_gateway(
    stage: Stage,
) -> None:
    await stage.agent()
    [lost] = await stage.submit(max_attempts=1)
    await stage.push()
    await stage.later(91)
    assert await stage.outcomes(lost) == ["STALLED"]
    stage.gateway.kill_status = 500
    for _ in range(20):
        await stage.push()
        stage.clock.advance(10)
    assert (await stage.state()).failures > 3
    tasks = await stage.submit(5)
    for _ in range(20):
        await stage.push()
        stage.clock.advance(10)
    assert {await stage.status(task) for task in tasks} == {"RUNNING"}
    stage.gateway.kill_status = 200
    stage.clock.advance(60)
    await stage.push()
    [attempt] = await stage.engine.attempts(lost)
    assert (attempt.receipt or {})["state"] == "killed", "and it is tried again and again"


async def test_kills_do_not_wait_for_the_spawn_rate(stage: Stage) -> None:
    await stage.agent()
    await stage.submit(max_attempts=1)
    await stage.push()
    await stage.later(91)
    stage.gateway.kill_status = 500
    for _ in range(20):
        await stage.push()
        stage.clock.advance(60)
    [task] = await stage.submit()
    pace, tried = stage.dispatcher._limiter, len(stage.gateway.killed)
    pace.grant(pace.burst, stage.clock.now())
    assert await stage.push() == 0
    stage.clock.advance(1)
    await stage.push()
    assert await stage.status(task) == "RUNNING"
    assert len(stage.gateway.killed) == tried


async def test_pause_leaves_time_for_a_checkpoint(stage: Stage) -> None:
    await stage.agent()
    [task] = await stage.submit()
    await stage.push()
    await stage.engine.pause(task)
    assert await stage.push() == 0
    await stage.engine.checkpoint(stage.fences[task], {"half": True})
    stage.clock.advance(SETTINGS.grace_s)
    assert await stage.push() == 1
    row = await row_of(stage.engine, task)
    assert (row.status, row.tries, row.checkpoint_seq) == ("PAUSED", 0, 1)
    await stage.engine.resume(task)
    await stage.push()
    assert stage.gateway.spawned[-1]["context"]["checkpointData"] == {"half": True}


async def test_cancel_before_the_session_is_reported_kills_it(stage: Stage) -> None:
    """The session is killed when its gateway has told it; one that never began needs no kill."""
    held, go = asyncio.Event(), asyncio.Event()

    async def answer() -> tuple[int, bytes]:
        held.set()
        await go.wait()
        return session("late") if len(stage.gateway.spawned) == 1 else (500, b"")

    stage.gateway.answer = answer
    await stage.agent()
    for status, killed in (("killed", ["late"]), ("not_started", ["late"])):
        [task] = await stage.submit()
        await stage.dispatcher.once()
        await held.wait()
        await stage.engine.cancel(task)
        go.set()
        await stage.dispatcher.finish_calls(30)
        await stage.push()
        assert await stage.status(task) == "CANCELLED"
        [attempt] = await stage.engine.attempts(task)
        assert (attempt.receipt or {})["state"] == status
        assert stage.gateway.killed == killed
        held.clear()
        go.clear()


async def test_session_reported_too_late_is_killed(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    held, go = asyncio.Event(), asyncio.Event()

    async def answer() -> tuple[int, bytes]:
        held.set()
        await go.wait()
        return session(f"session {len(stage.gateway.spawned)}")

    stage.gateway.answer = answer
    await stage.agent()
    [task] = await stage.submit()
    await stage.dispatcher.once()
    await held.wait()
    await stage.later(61)
    with caplog.at_level(logging.WARNING, "tenuto.dispatch"):
        go.set()
        await stage.dispatcher.finish_calls(30)
    assert "attempt 1 of task" in caplog.text
    assert stage.gateway.killed == ["session 1"]
    assert await stage.outcomes(task) == ["STALLED"]
    await stage.push()
    row = await row_of(stage.engine, task)
    assert (row.status, row.attempt, row.session_key) == ("RUNNING", 2, "session 2")


async def test_session_can_report_before_its_gateway(stage: Stage) -> None:
    await stage.agent()
    held, go = asyncio.Event(), asyncio.Event()

    async def answer() -> tuple[int, bytes]:
        held.set()
        await go.wait()
        return session("eager")

    stage.gateway.answer = answer
    [task] = await stage.submit()
    await stage.dispatcher.once()
    await held.wait()
    await stage.engine.progress(stage.fences[task], 50)
    await stage.engine.begin(stage.fences[task])
    await stage.engine.complete(stage.fences[task], {"done": True})
    go.set()
    await stage.dispatcher.finish_calls(30)
    assert await stage.status(task) == "COMPLETED"
    assert stage.gateway.killed == []
    trail = [event.new_status for event in await stage.engine.events(task)]
    assert trail == ["PENDING", "ASSIGNED", "RUNNING", "COMPLETED"]


async def test_begun_session_continues_after_a_gateway_failure(stage: Stage) -> None:
    await stage.agent()
    held, go = asyncio.Event(), asyncio.Event()

    async def answer() -> tuple[int, bytes]:
        held.set()
        await go.wait()
        return 500, b"oops"

    stage.gateway.answer = answer
    [task] = await stage.submit()
    await stage.dispatcher.once()
    await held.wait()
    await stage.engine.begin(stage.fences[task])
    go.set()
    await stage.dispatcher.finish_calls(30)
    assert await stage.status(task) == "RUNNING"
    await stage.engine.complete(stage.fences[task])


async def test_lost_session_is_killed_before_its_slot_is_free(stage: Stage) -> None:
    await stage.agent(max_concurrent=1)
    [task] = await stage.submit(max_attempts=5)
    await stage.push()
    first = (await row_of(stage.engine, task)).session_key
    await stage.gateway.close()
    await stage.later(91)
    await stage.later(0)
    assert await stage.outcomes(task) == ["STALLED"]
    assert await stage.push() == 1, "the kill, which the gateway does not answer"
    assert await stage.status(task) == "PENDING"
    await stage.gateway.open()
    assert await stage.push() == 1
    assert stage.gateway.killed == [first]
    assert await stage.push() == 1
    assert await stage.status(task) == "RUNNING"
    attempts = await stage.engine.attempts(task)
    assert (attempts[0].receipt or {})["state"] == "killed"


async def test_open_circuit_of_a_gateway_is_probed_by_a_kill(stage: Stage) -> None:
    """Else an agent whose places are all taken by lost sessions would wait for ever."""
    await stage.agent(max_concurrent=1)
    await stage.submit(2, max_attempts=5)
    await stage.push()
    await stage.gateway.close()
    await stage.later(91)
    await stage.later(0)
    for _ in range(3):
        assert await stage.push() == 1
    assert (await stage.state()).failures == 3
    assert await stage.push() == 0
    await stage.gateway.open()
    stage.clock.advance(2)
    assert await stage.push() == 1
    assert (await stage.state()).failures == 0
    assert await stage.push() == 1


async def test_session_never_reported_is_given_up(stage: Stage) -> None:
    """A coordinator died between the spawn and the word of it, and the task was cancelled."""
    await stage.agent(max_concurrent=1)
    [task] = await stage.submit()
    held = asyncio.Event()

    async def answer() -> tuple[int, bytes]:
        held.set()
        await asyncio.Event().wait()
        raise AssertionError

    stage.gateway.answer = answer
    dying = stage.another()
    await dying.once()
    await held.wait()
    await stage.engine.cancel(task)
    await dying.finish_calls(0)
    await stage.later(61)
    await stage.later(61)
    assert await stage.status(task) == "CANCELLED"
    stage.gateway.answer = None
    [other] = await stage.submit()
    assert await stage.push() == 0, "its place is not free"
    stage.clock.advance(301)
    await stage.push()
    await stage.push()
    assert await stage.status(other) == "RUNNING"


async def test_dispatcher_is_woken_only_by_hints_for_its_agents(stage: Stage) -> None:
    await stage.agent(task_tags=("mine",))
    [other] = await stage.submit(task_tags=["other"])
    [own] = await stage.submit(task_tags=["mine"])
    await stage.push()
    lanes = [(await row_of(stage.engine, task)).lane for task in (own, other)]
    topics = [f"lane:{lanes[0]}", f"lane:{lanes[1]}", "lane:1", "worker:host:1:x", "flow"]
    woken = []
    for topic in [*topics, "worker:gateway:default", "*"]:
        stage.dispatcher._wake.clear()
        stage.dispatcher._on_hint(topic)
        woken.append(stage.dispatcher._wake.is_set())
    assert woken == [True, False, True, False, False, True, True]


async def test_hint_pushes_a_task_at_once(stage: Stage) -> None:
    await stage.agent()
    dispatcher = stage.another(poll_s=3600.0)
    stop, clock = asyncio.Event(), stage.clock
    asleep = asyncio.Event()

    async def sleep(seconds: float) -> None:
        if seconds > 60:
            asleep.set()
            await stop.wait()

    clock.sleep = sleep  # type: ignore[method-assign]
    running = asyncio.create_task(dispatcher.run(stop))
    await asleep.wait()
    [task] = await stage.submit()

    async def runs() -> bool:
        return await stage.status(task) == "RUNNING"

    await eventually(runs)
    stop.set()
    await running


async def test_gateway_error_that_repeats_a_secret_is_redacted(
    stage: Stage, database_url: str
) -> None:
    stage.engine = Engine(
        stage.engine.store, actor="test", key_ring=KeyRing({"k": bytes(range(32))})
    )
    stage.dispatcher = stage.another()
    await stage.agent()
    secret = "canary-7f3a-0123456789"
    [task] = await stage.submit(input={"secrets": {"key": secret}})
    for status in (500, 400):
        for before in (0, 180):

            async def answer(status: int = status, before: int = before) -> tuple[int, bytes]:
                asked = stage.gateway.spawned[-1]
                key = asked["context"]["inputContext"]["secrets"]["key"]
                output = f"{'x' * before}{key} {asked['callback']['token']}"
                return status, output.encode()

            stage.gateway.answer = answer
            assert await stage.push() == 1
            await stage.later(3600)
    assert await stage.outcomes(task) == ["NOT_STARTED"] * 4
    stored = await dump(Raw(database_url))
    assert [item for item in (secret[:8], "token of") if item in stored] == []


async def test_gateway_error_that_repeats_its_key_is_redacted(
    stage: Stage, database_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    output = f"who is Bearer {KEY}?".encode()
    await stage.agent()
    await stage.submit(max_attempts=5)
    for status in (401, 400):
        stage.gateway.answer = always(status, output)
        assert await stage.push() == 1
        await stage.later(3600)
    stage.gateway.answer = None
    [task] = await stage.submit()
    await stage.push()
    await stage.engine.cancel(task)
    stage.gateway.kill_status, stage.gateway.kill_said = 500, output
    await stage.push()
    assert "was not killed: HTTP 500: who is Bearer ***?" in caplog.text
    assert KEY not in await dump(Raw(database_url)) + caplog.text
