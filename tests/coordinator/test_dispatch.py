"""Push: claims for agents with a gateway, and failures of gateways."""

import asyncio
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest
from tests.contract.conftest import ManualClock, row_of
from tests.coordinator.helpers import KEY, Stage, staged
from tests.coordinator.stub_gateway import always, session

from tenuto.coordinator import dispatch
from tenuto.coordinator.dispatch import round_robin
from tenuto.coordinator.rate import RateLimiter
from tenuto.engine.agents.gateways import Gateways, GatewayState, worst_status
from tenuto.engine.agents.push import PushSessions, PushTarget
from tenuto.metrics import PROCESS_METRICS
from tenuto.model.agents.matching import AgentProfile

SPAWNED = "tenuto_agents_spawned_total"


@pytest.fixture
async def stage(database_url: str) -> AsyncIterator[Stage]:
    async with staged(database_url) as created:
        yield created


async def test_pushed_task_runs_once_its_session_is_reported(stage: Stage) -> None:
    agent = await stage.agent(stale_threshold_s=70)
    before = PROCESS_METRICS.value(SPAWNED)
    [task] = await stage.submit(  # a gateway is not told what a task would set: env, cwd
        prompt="do it",
        description="more",
        input={"a": 1},
        metadata={"b": 2},
        env={"A": "1"},
        cwd="/etc",
    )
    held, go = asyncio.Event(), asyncio.Event()

    async def answer() -> tuple[int, bytes]:
        held.set()
        await go.wait()
        return session("the session")

    stage.gateway.answer = answer
    assert await stage.dispatcher.once() == 1
    await held.wait()
    row = await row_of(stage.engine, task)
    assert (row.status, row.worker, row.agent) == ("ASSIGNED", "gateway:default", agent.id)
    assert row.lease_until == stage.clock.now() + timedelta(seconds=60)
    go.set()
    await stage.dispatcher.finish_calls(30)
    row = await row_of(stage.engine, task)
    assert (row.status, row.session_key, row.tries) == ("RUNNING", "the session", 1)
    assert row.lease_until == stage.clock.now() + timedelta(seconds=70)
    assert stage.gateway.spawned == [
        {
            "workspaceId": str(stage.engine.workspace),
            "agentId": str(agent.id),
            "taskId": str(task),
            "label": f"task:{task}:task 0",
            "context": {
                "taskTitle": "task 0",
                "taskDescription": "more",
                "prompt": "do it",
                "inputContext": {"a": 1},
                "checkpointData": None,
            },
            "callback": {"url": "http://api.test/api/v1", "token": f"token of {agent.id}"},
            "idempotencyKey": f"{task}:1",
        }
    ]
    assert f"authorization: bearer {KEY}" in stage.gateway.headers[0].lower()
    assert PROCESS_METRICS.value(SPAWNED) == before + 1
    await stage.engine.complete(stage.fences[task], {"c": 3})
    assert await stage.outcomes(task) == ["COMPLETED"]


async def test_push_respects_the_agent_limit(stage: Stage) -> None:
    await stage.agent(max_concurrent=2)
    tasks = await stage.submit(5)
    assert await stage.push() == 2
    assert await stage.push() == 0
    await stage.engine.complete(stage.fences[tasks[0]])
    assert await stage.push() == 1
    assert len(stage.gateway.spawned) == 3


@pytest.mark.parametrize(
    "changes", [{"gateway": "elsewhere"}, {"gateway": None}, {"coordinator_enabled": False}]
)
async def test_push_skips_agents_without_a_served_gateway(
    stage: Stage, changes: dict[str, Any]
) -> None:
    await stage.agent(**changes)
    [task] = await stage.submit()
    assert await stage.push() == 0
    assert await stage.status(task) == "PENDING"


async def test_explain_shows_why_a_gateway_gets_no_task(stage: Stage) -> None:
    own, other = await stage.agent(), await stage.agent("other", gateway="elsewhere")
    [task] = await stage.submit()
    unserved = "its gateway {} is not configured in a running coordinator"
    explained = await stage.engine.explain(task)
    assert explained.agents["pushed"] == [unserved.format("default")]
    stage.gateway.answer = always(503)
    await stage.push(stage.another(dispatch_per_s=4))
    await stage.later(10)
    explained = await stage.engine.explain(task)
    assert explained.agents == {"pushed": [], "other": [unserved.format("elsewhere")]}
    assert [gate.gate for gate in (await stage.engine.explain_agent(own.id)).gates] == []
    gates = (await stage.engine.explain_agent(other.id)).gates
    assert [gate.detail for gate in gates] == [unserved.format("elsewhere")]
    for _ in range(2):
        await stage.push()
        await stage.later(10)
    await Gateways(stage.engine.system).record_failure("default", "HTTP 503", probe=True)
    explained = await stage.engine.explain(task)
    assert explained.agents["pushed"] == ["its gateway default is unreachable"]


async def test_draining_agent_gets_no_task(stage: Stage) -> None:
    agent = await stage.agent()
    await stage.engine.terminate_agent(agent.id)
    await stage.submit()
    assert await stage.push() == 0


async def test_only_the_leader_pushes(stage: Stage) -> None:
    await stage.agent()
    [task] = await stage.submit()
    stage.leads = False
    assert await stage.push() == 0
    stage.leads = True
    assert await stage.push() == 1
    assert await stage.status(task) == "RUNNING"


FAILURES = {
    "refused by the task's fault": (always(400, b"bad label"), 0, "HTTP 400: bad label"),
    "a fault of its own": (always(500, b"oops"), 1, "HTTP 500: oops"),
    "our key is wrong": (always(401), 1, "HTTP 401: no"),
    "too many of our requests": (always(429), 1, "HTTP 429: no"),
    "no JSON": (always(200, b"<html>"), 1, "to a spawn is invalid"),
    "no session in it": (always(200, b'{"session": {}}'), 1, "to a spawn is invalid"),
    "an empty key": (always(200, b'{"session": {"sessionKey": ""}}'), 1, "to a spawn is invalid"),
    "a redirect": (always(302), 1, "HTTP 302"),
    "far too much": (always(200, b" " * 100_000), 1, "is longer than"),
}


@pytest.mark.parametrize("name", FAILURES)
async def test_failed_spawn_counts_no_try(stage: Stage, name: str) -> None:
    answer, failures, output = FAILURES[name]
    stage.gateway.answer = answer
    await stage.agent()
    [task] = await stage.submit()
    assert await stage.push() == 1
    row = await row_of(stage.engine, task)
    assert (row.status, row.tries, row.attempt) == ("RETRY_WAIT", 0, 1)
    assert await stage.outcomes(task) == ["NOT_STARTED"]
    assert output in (row.last_error or "")
    assert (await stage.state()).failures == failures
    stage.gateway.answer = None
    await stage.later(7)
    assert await stage.push() == 1
    assert await stage.status(task) == "RUNNING"
    assert (await stage.state()).failures == 0


@pytest.mark.parametrize("answered", [422, 500])
async def test_failed_spawns_occupy_no_slot(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, answered: int
) -> None:
    monkeypatch.setattr("tenuto.coordinator.dispatch.MAX_CALLS", 2)
    await stage.agent()
    await stage.submit(2)
    stage.gateway.answer = always(answered)
    assert await stage.push() == 2
    stage.gateway.answer = None
    [task] = await stage.submit()
    assert await stage.push() == 1
    assert await stage.status(task) == "RUNNING"


async def test_unreachable_gateway_releases_its_tasks(stage: Stage) -> None:
    await stage.gateway.close()
    await stage.agent()
    [task] = await stage.submit()
    await stage.push()
    assert (await row_of(stage.engine, task)).tries == 0
    assert (await stage.state()).failures == 1
    assert "cannot be reached" in ((await stage.state()).last_error or "")
    await stage.gateway.open()
    await stage.later(7)
    await stage.push()
    assert await stage.status(task) == "RUNNING"


async def test_slow_gateway_releases_its_tasks(stage: Stage) -> None:
    async def never() -> tuple[int, bytes]:
        await asyncio.Event().wait()
        raise AssertionError

    stage.gateway.answer = never
    await stage.agent()
    [task] = await stage.submit()
    await stage.push(stage.another(deadline_s=0.05))
    row = await row_of(stage.engine, task)
    assert (row.status, row.tries) == ("RETRY_WAIT", 0)
    assert "no answer within 0.05 s" in (row.last_error or "")
    assert (await stage.state()).failures == 1


async def test_task_fails_after_twenty_failed_spawns(stage: Stage) -> None:
    stage.gateway.answer = always(422)
    await stage.agent()
    [task] = await stage.submit()
    for _ in range(20):
        assert await stage.push() == 1
        await stage.later(3600)
    view = await stage.engine.show(task)
    assert (view.status, view.error_class) == ("FAILED", "cannot_start")
    assert await stage.push() == 0


async def test_circuit_of_a_failing_gateway_opens_and_is_probed_once(stage: Stage) -> None:
    stage.gateway.answer = always(503)
    await stage.agent()
    await stage.submit(12)
    dispatcher = stage.another(dispatch_per_s=4)
    for _ in range(3):
        assert await stage.push(dispatcher) == 1
        stage.clock.advance(1)
    state = await stage.state()
    assert state.failures == 3
    assert state.closed_until == stage.clock.now()  # a second after the third failure
    assert worst_status([state], stage.clock.now() - timedelta(seconds=0.5)) == "unreachable"
    for rest in (2, 4, 8, 16, 32, 60, 60):
        stage.clock.advance(0.001)
        assert await stage.push(dispatcher) == 1, "one try"
        assert await stage.push(stage.another()) == 0, "for all coordinators"
        state = await stage.state()
        assert state.closed_until == stage.clock.now() + timedelta(seconds=rest)
        stage.clock.advance(rest)
    stage.gateway.answer = None
    assert await stage.push() == 1
    state = await stage.state()
    assert (state.failures, state.closed_until, state.last_error) == (0, None, None)
    assert state.status_at(stage.clock.now()) == "connected"
    await stage.engine.maintenance.promote_once("promoter")
    assert await stage.push() > 1


async def test_gateway_is_probed_by_one_of_two_coordinators(stage: Stage) -> None:
    stage.gateway.answer = always(503)
    await stage.agent()
    await stage.submit(5)
    dispatcher = stage.another(dispatch_per_s=4)
    for _ in range(3):
        await stage.push(dispatcher)
        stage.clock.advance(1)
    before = [await stage.state()]
    late = PushSessions(stage.engine.system)

    async def states() -> list[GatewayState]:
        return before

    late.gateways.states = states  # type: ignore[method-assign]
    assert await stage.push() == 1
    asked = len(stage.gateway.spawned)
    other = stage.another()
    other._sessions = late
    await stage.push(other)
    assert len(stage.gateway.spawned) == asked
    counts = await stage.engine.counts()
    assert (counts["ASSIGNED"], counts["PENDING"]) == (0, 1), "it was given back"


async def test_concurrent_failures_open_the_circuit_of_a_gateway(stage: Stage) -> None:
    stage.gateway.answer = always(500)
    await stage.agent()
    tasks = await stage.submit(10)
    assert await stage.push() == 10
    assert (await stage.state()).failures == 3
    for task in tasks:
        assert (await row_of(stage.engine, task)).tries == 0


@pytest.mark.parametrize("failing", [400, 500])
async def test_failed_spawns_occupy_no_slot_of_a_gateway(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    monkeypatch.setattr(dispatch, "MAX_CALLS", 4)
    stage.gateway.answer = always(failing)
    await stage.agent()
    tasks = await stage.submit(6)
    failed = 0
    for _ in range(8):
        failed += await stage.push()
        await stage.later(3600)
    assert failed > 2 * dispatch.MAX_CALLS - 1
    stage.gateway.answer = None
    for _ in range(3):
        await stage.push()
    assert {await stage.status(task) for task in tasks} == {"RUNNING"}


async def test_refused_task_does_not_count_as_a_gateway_failure(stage: Stage) -> None:
    """The refusal resets the failures in a row and closes an open circuit."""
    await stage.agent()
    await stage.submit()
    for status in (503, 503, 400, 503, 503):
        stage.gateway.answer = always(status)
        assert await stage.push() == 1
        await stage.later(3600)
    assert ((await stage.state()).failures, (await stage.state()).closed_until) == (2, None)
    assert await stage.push() == 1
    assert (await stage.state()).closed_until is not None
    await stage.later(3600)
    stage.gateway.answer = always(400)
    assert await stage.push() == 1
    assert ((await stage.state()).failures, (await stage.state()).closed_until) == (0, None)


async def test_success_resets_failures_counted_by_another_coordinator(stage: Stage) -> None:
    await stage.agent()
    for answer, caller, failures in (
        (None, stage.dispatcher, 0),
        (always(500), stage.another(), 1),
        (None, stage.dispatcher, 0),
    ):
        stage.gateway.answer = answer
        await stage.submit()
        assert await stage.push(caller) == 1
        assert (await stage.state()).failures == failures


async def test_push_serves_every_workspace_in_turn(stage: Stage) -> None:
    def target(workspace: int, number: int) -> PushTarget:
        profile = AgentProfile(id=UUID(int=number), workspace=UUID(int=workspace), name="a")
        return PushTarget(profile, None)

    many = [target(1, number) for number in range(10)]
    few = [target(2, 20), target(3, 30)]
    for turn in range(6):
        first = [item.agent.workspace.int for item in round_robin([*many, *few], turn)[:3]]
        assert sorted(first) == [1, 2, 3]
    starts = {round_robin([*many, *few], turn)[0].agent.workspace.int for turn in range(6)}
    assert starts == {1, 2, 3}


@pytest.mark.parametrize("cap", [0.5, 1, 1.5, 3, 7, 9, 20, 101, 1000.0])
def test_spawns_per_second_stay_within_the_cap(cap: float) -> None:
    pace, clock = RateLimiter(cap), ManualClock()
    granted = []
    for step in range(4000):
        if n := pace.available(clock.now()):
            granted += [clock.elapsed()] * n
            pace.grant(n, clock.now())
        assert pace.wait_s(clock.now()) >= 0
        clock.advance(0.001 * (1 + step % 7))
    seconds = max(1.0, 1 / cap)
    maximum = max(1, int(cap * seconds))
    for index, first in enumerate(granted):
        if index + maximum < len(granted):
            assert granted[index + maximum] - first >= seconds - 1e-6
    assert len(granted) >= 0.4 * cap * clock.elapsed()


def test_clock_set_back_does_not_stop_dispatch() -> None:
    pace, now = RateLimiter(20), ManualClock().now()
    pace.grant(pace.available(now), now)
    assert pace.available(now - timedelta(milliseconds=1)) == 0, "a clock is corrected now and then"
    assert pace.available(now - timedelta(hours=1)) == pace.burst
    assert pace.wait_s(now - timedelta(hours=1)) == 0
