"""Agents over time: heartbeats, termination, settings of users and workers, explain."""

import asyncio
from typing import Any
from uuid import UUID

import msgspec
import pytest
from tests.contract.conftest import (
    AGENT,
    LEASE_S,
    WORKER,
    Another,
    ManualClock,
    Raw,
    claim_one,
    new,
    profile,
    refusal,
)

from tenuto.engine.agents.registry import AgentMaintenance, AgentRegistry, AgentView, HealthSample
from tenuto.engine.engine import Engine
from tenuto.engine.tasks.report import WorkerInfo
from tenuto.model.errors import Invalid
from tenuto.model.limits.complexity import ComplexityRules

WORKER_INFO = WorkerInfo(WORKER, "host", 1, ["agent"], 4)


def registry(engine: Engine) -> AgentRegistry:
    return AgentRegistry(engine.core, engine.workspace)


async def look(engine: Engine) -> int:
    return await AgentMaintenance(engine.system).mark_stale_once("keeper")


async def shown(engine: Engine, agent: UUID = AGENT) -> AgentView:
    return await registry(engine).show(agent)


async def agent_events(raw: Raw) -> list[tuple[Any, ...]]:
    """Returns the audit events of agents, in order."""
    rows = await raw.fetch(
        "select kind, level, message from event where kind like 'agent_%' order by position"
    )
    return [tuple(row) for row in rows]


def clock_of(engine: Engine) -> ManualClock:
    assert isinstance(engine.clock, ManualClock)
    return engine.clock


async def test_idle_agent_without_heartbeats_is_stale_and_recovers(
    engine: Engine, raw: Raw
) -> None:
    await engine.register_agent(profile())
    await engine.record_worker(WORKER_INFO)
    clock_of(engine).advance(60)
    assert (await shown(engine)).status == "IDLE"
    assert await look(engine) == 0
    clock_of(engine).advance(31)
    assert (await shown(engine)).status == "STALE"  # seen by whoever looks
    assert await look(engine) == 1
    assert await look(engine) == 0  # and noted once
    assert (await shown(engine)).status == "STALE"
    assert (await registry(engine).health(AGENT)).healthy is False
    await engine.record_worker(WORKER_INFO)
    assert (await shown(engine)).status == "IDLE"
    assert await agent_events(raw) == [
        ("agent_stale", "WARN", "agent"),
        ("agent_recovered", "INFO", "agent"),
    ]


async def test_agent_that_lost_tasks_without_heartbeats_is_in_error(
    engine: Engine, raw: Raw
) -> None:
    await engine.register_agent(profile(stale_threshold_s=10))
    await engine.submit(new())
    await claim_one(engine)
    clock_of(engine).advance(11)
    assert await look(engine) == 1
    assert (await shown(engine)).status == "STALE"  # its lease holds still
    clock_of(engine).advance(LEASE_S)
    assert await engine.maintenance.expire_once("reaper") == 1
    assert await look(engine) == 1
    assert (await shown(engine)).status == "ERROR"
    assert await look(engine) == 0
    assert await registry(engine).record_heartbeat(AGENT) == 0
    assert (await shown(engine)).status == "IDLE"
    kinds = [kind for kind, _, _ in await agent_events(raw)]
    assert kinds == ["agent_stale", "agent_error", "agent_recovered"]


async def test_agent_without_any_heartbeat_is_not_stale(engine: Engine) -> None:
    await engine.register_agent(profile(), managed=True)
    clock_of(engine).advance(days=1)
    assert (await shown(engine)).status == "IDLE"
    assert await look(engine) == 0


async def test_worker_that_signs_off_leaves_no_stale_agent(engine: Engine) -> None:
    await engine.register_agent(profile())
    await engine.record_worker(WORKER_INFO)
    await engine.record_worker(WorkerInfo(WORKER, "host", 1, ["agent"], 4, "STOPPED"))
    clock_of(engine).advance(days=1)
    assert await look(engine) == 0
    assert (await shown(engine)).status == "IDLE"


async def test_agent_with_tasks_elsewhere_is_stale_after_a_worker_signs_off(
    engine: Engine,
) -> None:
    await engine.register_agent(profile())
    await engine.submit(new())
    await claim_one(engine)
    await engine.record_worker(WorkerInfo("host:2:other", "host", 2, ["agent"], 4))
    await engine.record_worker(WorkerInfo("host:2:other", "host", 2, ["agent"], 4, "STOPPED"))
    clock_of(engine).advance(91)
    assert await look(engine) == 1
    assert (await shown(engine)).status == "STALE"


async def test_graceful_termination_waits_for_running_tasks(engine: Engine, raw: Raw) -> None:
    await engine.register_agent(profile())
    await engine.submit(new())
    work = await claim_one(engine)
    await engine.submit(new())
    await engine.terminate_agent(AGENT, "old")
    assert (await shown(engine)).status == "DRAINING"
    assert await refusal(engine.claim(profile(), WORKER, 1)) == "agent_draining"
    clock_of(engine).advance(5)
    await look(engine)
    assert (await shown(engine)).status == "DRAINING"
    assert await registry(engine).profile(AGENT)  # it may still beat and report
    await engine.complete(work.fence)
    clock_of(engine).advance(5)
    assert await look(engine) == 1
    assert (await shown(engine)).status == "TERMINATED"
    assert await refusal(engine.claim(profile(), WORKER, 1)) == "agent_terminated"
    assert await refusal(engine.terminate_agent(AGENT)) == "agent_terminated"
    assert [kind for kind, _, _ in await agent_events(raw)] == [
        "agent_draining",
        "agent_terminated",
    ]
    await engine.register_agent(profile())
    assert (await shown(engine)).status == "TERMINATED"  # a worker does not bring it back


async def test_immediate_termination_cancels_running_tasks(engine: Engine) -> None:
    await engine.register_agent(profile())
    await engine.submit(new())
    work = await claim_one(engine)
    await engine.terminate_agent(AGENT, "now", graceful=False)
    assert (await shown(engine)).status == "DRAINING"  # until the kill is confirmed
    heartbeat = await engine.heartbeat([work.fence], LEASE_S)
    assert heartbeat.held[work.fence.task].cancel
    await engine.confirm_cancel(work.fence, {"state": "killed"})
    clock_of(engine).advance(5)
    await look(engine)
    assert (await shown(engine)).status == "TERMINATED"


async def test_heartbeats_do_not_delay_the_termination(engine: Engine) -> None:
    await engine.register_agent(profile())
    await engine.submit(new())
    work = await claim_one(engine)
    await engine.terminate_agent(AGENT, "old")
    await engine.complete(work.fence)
    clock_of(engine).advance(1)
    await engine.record_worker(WORKER_INFO)
    assert await registry(engine).record_heartbeat(AGENT) == 0
    clock_of(engine).advance(1)
    assert await look(engine) == 1
    assert (await shown(engine)).status == "TERMINATED"


async def test_idle_agent_is_terminated_at_once(engine: Engine) -> None:
    await engine.register_agent(profile())
    await engine.terminate_agent(AGENT)
    assert (await shown(engine)).status == "TERMINATED"
    await registry(engine).delete(AGENT)
    assert await refusal(registry(engine).show(AGENT)) == "not_found"


async def test_termination_is_seen_by_a_process_with_a_lane_cache(
    engine: Engine, another: Another
) -> None:
    await engine.register_agent(profile())
    await engine.submit(new())
    async with another() as other:
        assert await other.claim(profile(), WORKER, 1, LEASE_S)  # it knows lanes and agent now
        await engine.submit(new())
        await engine.terminate_agent(AGENT)
        assert await refusal(other.claim(profile(), WORKER, 1)) == "agent_draining"


async def test_user_settings_override_a_workers_profile(engine: Engine) -> None:
    updated = profile(
        max_concurrent=1, capabilities=("git",), task_tags=("a",), stale_threshold_s=30
    )
    await engine.register_agent(updated, managed=True)
    greedy = profile(
        max_concurrent=100,
        capabilities=("git", "root"),
        accept_commands=True,
        choose_rules=("exact",),
        stale_threshold_s=9000,
        task_tags=("a", "b"),
        runtimes=("command",),
        task_types=("x",),
    )
    stored = await engine.register_agent(greedy)
    view = await shown(engine)
    assert (view.max_concurrent_tasks, view.capabilities, view.task_tags) == (1, ("git",), ("a",))
    assert (view.accept_commands, view.choose_rules) == (False, ("superset",))
    assert (view.stale_threshold_seconds, view.managed) == (30, True)
    assert (view.runtimes, view.task_types) == (("command",), ("x",))  # how, its worker knows
    assert (stored.max_concurrent, stored.capabilities) == (1, ("git",))
    assert stored.version == view.version


async def test_worker_profile_applies_without_user_settings(engine: Engine) -> None:
    await engine.register_agent(profile(max_concurrent=1))
    await engine.register_agent(profile(max_concurrent=5, capabilities=("git",)))
    view = await shown(engine)
    assert (view.max_concurrent_tasks, view.capabilities, view.managed) == (5, ("git",), False)


async def test_other_user_settings_keep_the_types_of_a_pull_agent(
    engine: Engine,
) -> None:
    existing = await engine.register_agent(profile(runtimes=("http",), task_types=("x",)))
    asked = msgspec.structs.replace(await registry(engine).profile(existing.id), region="eu")
    updated = await engine.register_agent(asked, managed=True)
    assert (updated.region, updated.task_types) == ("eu", ("x",))
    assert (await shown(engine)).task_types == ("x",)


async def test_new_limit_applies_to_a_running_worker(engine: Engine, another: Another) -> None:
    for _ in range(4):
        await engine.submit(new())
    async with another() as other:
        own = await other.register_agent(profile())
        assert len(await other.claim(own, WORKER, 1, LEASE_S)) == 1
        await engine.register_agent(profile(max_concurrent=2), managed=True)
        assert len(await other.claim(own, WORKER, 10, LEASE_S)) == 1
        assert await other.claim(own, WORKER, 10, LEASE_S) == []


async def test_worker_claims_nothing_that_it_cannot_run(engine: Engine, another: Another) -> None:
    allowed = profile(task_types=None, accept_commands=True, runtimes=("http",))
    await engine.register_agent(allowed, managed=True)
    await engine.submit(new(task_type="other"))
    await engine.submit(new(command=["true"]))
    bare = profile(runtimes=())
    function = profile(task_types=("mine",))
    async with another() as other:
        for brought in (bare, function):
            own = await other.register_agent(brought)
            assert await other.claim(own, WORKER, 10, LEASE_S) == []
        await engine.register_agent(profile(task_types=("mine", "other")), managed=True)
        assert await other.claim(own, WORKER, 10, LEASE_S) == []
        more = await other.register_agent(profile(task_types=("mine", "other")))
        [work] = await other.claim(more, WORKER, 10, LEASE_S)
        assert work.task_type == "other"
        await engine.submit(new(task_type="other"))
        assert await other.claim(own, WORKER, 10, LEASE_S) == []  # each worker by its own means


async def test_explain_shows_why_a_worker_cannot_run_a_task_of_its_agent(engine: Engine) -> None:
    await engine.register_agent(profile(accept_commands=True), managed=True)
    await engine.register_agent(profile(task_types=("mine",)))
    other = (await engine.submit(new(task_type="other"))).id
    command = (await engine.submit(new(command=["true"]))).id
    reason = (await engine.explain(other)).agents
    assert reason == {"agent": ["its worker does not handle type other"]}
    reason = (await engine.explain(command)).agents
    assert reason == {"agent": ["its worker does not accept commands from tasks"]}


async def test_invalid_rules_have_their_own_error_codes(engine: Engine) -> None:
    await engine.register_agent(profile(choose_rules=("all", "superset", "single")))
    assert (await shown(engine)).choose_rules == ("superset", "single")
    for bad in ({"choose_rules": ("some",)}, {"choose_rules": ()}, {"stale_threshold_s": -1}):
        with pytest.raises(Invalid):
            await engine.register_agent(profile(**bad))


async def test_health_samples_are_thinned_and_deleted(engine: Engine, raw: Raw) -> None:
    await engine.register_agent(profile())
    for step in range(4):
        output = HealthSample(
            status="degraded", memory_mb=10.5 + step, cpu_percent=-1, current_step=f"{step}"
        )
        await registry(engine).record_heartbeat(AGENT, output)
        clock_of(engine).advance(6)
    health = await registry(engine).health(AGENT)
    assert [item.current_step for item in health.history] == ["2", "0"]
    assert health.current == health.history[0]
    assert (health.history[0].memory_mb, health.history[0].cpu_percent) == (12.5, None)
    assert len((await registry(engine).health(AGENT, 1)).history) == 1
    clock_of(engine).advance(hours=1)
    assert await AgentMaintenance(engine.system).prune_once() == 2
    assert await raw.count("agent_health") == 0


async def test_heartbeat_returns_the_request_to_stop(engine: Engine) -> None:
    assert await refusal(engine.drain_worker(WORKER)) == "not_found"
    assert await engine.record_worker(WORKER_INFO) is False
    await engine.drain_worker(WORKER)
    await engine.drain_worker(WORKER)
    assert await engine.record_worker(WORKER_INFO) is True
    [view] = await engine.workers()
    assert view.drain_requested_at == engine.clock.now()
    await engine.record_worker(WorkerInfo(WORKER, "host", 1, ["agent"], 4, "STOPPED"))
    assert await refusal(engine.drain_worker(WORKER)) == "not_found"


async def test_explain_covers_an_agent(engine: Engine) -> None:
    await engine.complexity.set(ComplexityRules(policy="require"))
    await engine.register_agent(profile(task_tags=("a",), max_concurrent=1))
    for _ in range(3):
        await engine.submit(new(task_tags=["a"]))
    await engine.submit(new(task_tags=["b"], capabilities=["git"]))
    await engine.submit(new(estimate_minutes=500))
    result = await engine.explain_agent(AGENT)
    assert [gate.detail for gate in result.gates] == ["no live worker hosts this agent"]
    await engine.record_worker(WORKER_INFO)
    result = await engine.explain_agent(AGENT)
    assert (result.gates, result.summary) == ([], "can claim now: 1 lanes with pending tasks")
    own, *others = result.lanes
    assert (own.pending, own.obstacles, own.requires["task_tags"]) == (3, [], ("a",))
    obstacles = {reason for other in others for reason in other.obstacles}
    assert "needs capabilities git" in obstacles
    assert "needs capabilities call_subagent" in obstacles
    assert (result.capacity.workers, result.capacity.free, result.more) == ([WORKER], 1, 0)
    await engine.claim(await registry(engine).profile(AGENT), WORKER, 1, LEASE_S)
    [gate] = (await engine.explain_agent(AGENT)).gates
    assert gate.detail == "runs 1 of at most 1 tasks"
    clock_of(engine).advance(300)
    details = [gate.detail for gate in (await engine.explain_agent(AGENT)).gates]
    assert "was last seen 300 s ago" in details


async def test_explain_of_an_agent_shows_the_first_lanes(engine: Engine) -> None:
    await engine.register_agent(profile())
    await engine.submit_many([new(task_type=f"t{n:02}") for n in range(60)])
    result = await engine.explain_agent(AGENT)
    assert (len(result.lanes), result.more) == (50, 10)
    assert [lane.requires["task_type"] for lane in result.lanes][:2] == ["t00", "t01"]


async def test_explain_of_an_agent_shows_pauses_and_limits(engine: Engine) -> None:
    await engine.register_agent(profile(runtimes=("http",)))
    await engine.submit(new())
    await engine.gates.close("type", "default", "repairs", None)
    result = await engine.explain_agent(AGENT)
    assert result.gates == []  # it fetches its tasks itself: no worker has to host it
    [lane] = result.lanes
    assert [gate.gate for gate in lane.gates] == ["pause"]
    assert "repairs" in lane.gates[0].detail
    assert result.summary == "matches 1 lanes; their pending tasks are blocked"
    await engine.gates.close("agent", "agent", None, None)
    [gate] = (await engine.explain_agent(AGENT)).gates
    assert gate.gate == "pause"


async def test_explain_of_a_task_shows_what_stops_each_agent(engine: Engine) -> None:
    others = {
        "full": profile(id=UUID(int=1), name="full", max_concurrent=1),
        "gone": profile(id=UUID(int=2), name="gone", stale_threshold_s=10),
        "leaving": profile(id=UUID(int=3), name="leaving"),
        "fetching": profile(id=UUID(int=4), name="fetching", runtimes=("http",)),
    }
    for other in others.values():
        await engine.register_agent(other)
    for name in ("full", "leaving"):
        await engine.submit(new())
        assert await engine.claim(others[name], f"host:1:{name}", 1, LEASE_S)
    await engine.terminate_agent(others["leaving"].id)
    task = (await engine.submit(new())).id
    clock_of(engine).advance(15)
    await engine.record_worker(WorkerInfo(WORKER, "host", 1, ["full", "leaving"], 4))
    reasons = (await engine.explain(task)).agents
    assert reasons["full"] == ["runs 1 of at most 1 tasks"]
    assert reasons["leaving"] == ["is draining and ends when its 1 running tasks have ended"]
    assert reasons["gone"] == ["no live worker hosts this agent", "was last seen 15 s ago"]
    assert reasons["fetching"] == []


async def test_concurrent_registrations_agree(engine: Engine, another: Another) -> None:
    async with another() as other:
        output = engine.register_agent(profile(max_concurrent=1), managed=True)
        brought = [
            caller.register_agent(profile(id=UUID(int=n), max_concurrent=50))
            for n, caller in enumerate((engine, other) * 3, start=1)
        ]
        existing = await asyncio.gather(output, *brought)
    assert len({item.id for item in existing}) == 1
    view = await shown(engine, existing[0].id)
    assert (view.max_concurrent_tasks, view.managed, view.version) == (1, True, 7)
