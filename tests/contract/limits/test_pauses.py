"""Pauses: a paused subject is not claimed from the commit on, and explain shows why."""

from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest
from tests.contract.conftest import (
    LEASE_S,
    WORKER,
    Another,
    ManualClock,
    Raw,
    claim_all,
    new,
    profile,
    refusal,
    row_of,
)

from tenuto.engine.engine import Engine
from tenuto.engine.tasks.report import WorkerInfo
from tenuto.model.limits.pauses import PauseKind


async def subject_of(engine: Engine, kind: PauseKind, task: UUID) -> str:
    lane = str((await row_of(engine, task)).lane)
    return {"lane": lane, "agent": "agent", "type": "deploy", "workspace": "all"}[kind]


async def titles(engine: Engine, **changes: Any) -> list[str]:
    agent = profile(workspace=engine.workspace, **changes)
    return [work.title for work in await engine.claim(agent, WORKER, 100, LEASE_S)]


@pytest.mark.parametrize("kind", ["lane", "agent", "type", "workspace"])
async def test_paused_subject_is_not_claimed_until_resumed(engine: Engine, kind: PauseKind) -> None:
    await engine.register_agent(profile())
    task = (await engine.submit(new("held", task_type="deploy"))).id
    subject = await subject_of(engine, kind, task)
    created = await engine.gates.close(kind, subject, reason="freeze")
    assert await engine.gates.list() == [created]
    assert await claim_all(engine) == []
    await engine.gates.open(kind, subject)
    assert await engine.gates.list() == []
    assert await titles(engine) == ["held"]


async def test_pause_stops_only_its_subject(engine: Engine) -> None:
    await engine.register_agent(profile())
    task = (await engine.submit(new("a", task_type="a"))).id
    await engine.submit(new("b", task_type="b"))
    await engine.submit(new("c", task_type="c"))
    await engine.gates.close("lane", await subject_of(engine, "lane", task))
    await engine.gates.close("type", "b")
    await engine.gates.close("agent", "agent")
    assert await titles(engine) == []
    other = UUID(int=7)
    assert await titles(engine, id=other, name="other") == ["c"]
    await engine.gates.open("type", "b")
    assert await titles(engine, id=other, name="other") == ["b"]


@pytest.mark.parametrize("kind", ["lane", "agent", "type", "workspace"])
async def test_claim_with_an_outdated_cache_sees_the_pause(
    engine: Engine, another: Another, raw: Raw, kind: PauseKind
) -> None:
    await engine.register_agent(profile())
    first, *_ = [await engine.submit(new(task_type="deploy")) for _ in range(3)]
    agent = profile(task_types=("deploy",))
    assert len(await engine.claim(agent, WORKER, 1, LEASE_S)) == 1
    remembered = await engine.core.lanes.open_lanes(agent, engine.clock.now())
    async with another() as operator:
        await operator.gates.close(kind, await subject_of(engine, kind, first.id))
    # This process has not heard of it: its lanes are still open as far as it knows.
    assert await engine.core.lanes.open_lanes(agent, engine.clock.now()) == remembered
    assert remembered.free
    assert await engine.claim(agent, WORKER, 10, LEASE_S) == []
    assert await raw.value("select count(*) from task where status = 'RUNNING'") == 1


async def test_pause_does_not_stop_running_tasks(engine: Engine) -> None:
    await engine.submit(new())
    [work] = await claim_all(engine)
    await engine.gates.close("workspace")
    assert (await engine.heartbeat([work.fence])).lost == []
    await engine.complete(work.fence, {"done": True})
    assert (await engine.show(work.fence.task)).status == "COMPLETED"


async def test_pause_stops_lanes_created_later(engine: Engine) -> None:
    await engine.gates.close("type", "deploy")
    await engine.submit(new("old", task_type="deploy"))
    await engine.submit(new("new", task_type="deploy", priority=10))
    await engine.submit(new("other", task_type="build"))
    assert await titles(engine) == ["other"]


async def test_pause_with_an_end_time_expires(engine: Engine, clock: ManualClock, raw: Raw) -> None:
    until = clock.now() + timedelta(hours=1)
    await engine.submit(new("held"))
    await engine.gates.close("workspace", until=until)
    clock.advance(3599)
    assert await titles(engine) == []
    before = await raw.counts()
    clock.advance(1)
    assert await engine.gates.list() == []
    assert await raw.counts() == before
    assert await titles(engine) == ["held"]


async def test_lane_with_two_pauses_opens_with_the_last(engine: Engine, clock: ManualClock) -> None:
    await engine.submit(new("held", task_type="deploy"))
    gates = engine.gates
    await gates.close("type", "deploy", until=clock.now() + timedelta(hours=1))
    await gates.close("workspace", until=clock.now() + timedelta(hours=2))
    clock.advance(hours=1)
    assert await titles(engine) == []
    clock.advance(hours=1)
    assert await titles(engine) == ["held"]


async def test_second_pause_changes_reason_and_end_time(engine: Engine, clock: ManualClock) -> None:
    await engine.gates.close("type", "deploy", reason="freeze")
    until = clock.now() + timedelta(minutes=5)
    await engine.gates.close("type", "deploy", until=until)
    [gate] = await engine.gates.list()
    assert (gate.reason, gate.until, gate.created_by) == (None, until, "tester")


async def test_workspace_at_its_limit_of_pauses_can_change_them(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tenuto.engine.limits.pauses.MAX_PAUSES", 2)
    for name in ("a", "b"):
        await engine.gates.close("type", name)
    assert await refusal(engine.gates.close("type", "c")) == "too_large"
    await engine.gates.close("type", "a", reason="freeze")
    assert [gate.reason for gate in await engine.gates.list()] == ["freeze", None]


async def test_resume_wakes_workers(engine: Engine) -> None:
    received: list[str] = []
    await engine.gates.close("workspace")
    engine.subscribe(received.append)
    await engine.gates.open("workspace")
    assert received == ["*"]


async def test_audit_trail_names_who_paused_and_who_resumed(engine: Engine, raw: Raw) -> None:
    await engine.gates.close("type", "deploy", reason="freeze")
    await engine.gates.open("type", "deploy")
    rows = await raw.fetch(
        "select kind, level, message, actor from event where kind like 'gate%' order by kind"
    )
    assert rows == [
        ("gate_closed", "WARN", "type deploy", "tester"),
        ("gate_opened", "INFO", "type deploy", "tester"),
    ]
    reported = await engine.query.severe_events(engine.workspace, "WARN", 10)
    assert [(line.event, line.data["reason"]) for line in reported] == [("gate_closed", "freeze")]


async def test_explain_shows_every_pause_with_reason_and_end_time(
    engine: Engine, clock: ManualClock
) -> None:
    await engine.register_agent(profile())
    await engine.record_worker(WorkerInfo(WORKER, "host", 1, ["agent"], 5, "RUNNING"))
    task = (await engine.submit(new(task_type="deploy"))).id
    assert (await engine.explain(task)).gates == []
    until = clock.now() + timedelta(hours=1)
    await engine.gates.close("type", "deploy", reason="freeze", until=until)
    await engine.gates.close("type", "other")
    await engine.gates.close("workspace")
    result = await engine.explain(task)
    assert result.lane == await subject_of(engine, "lane", task)
    reports = [(gate.gate, gate.detail.partition(";")[0], gate.clears_at) for gate in result.gates]
    assert reports == [
        ("pause", "type deploy was paused by tester: freeze", until),
        ("pause", "the workspace was paused by tester", None),
    ]
    await engine.gates.open("workspace")
    clock.advance(3600)
    await engine.record_worker(WorkerInfo(WORKER, "host", 1, ["agent"], 5, "RUNNING"))
    await engine.gates.close("agent", "agent", reason="broken")
    result = await engine.explain(task)
    assert [(gate.gate, gate.detail) for gate in result.gates] == [
        ("pause", "agent agent was paused by tester: broken")
    ]
    assert result.agents == {"agent": ["agent agent was paused by tester: broken"]}


@pytest.mark.parametrize(
    ("kind", "subject", "code"),
    [
        ("lane", "12", "not_found"),
        ("lane", "x", "invalid_value"),
        ("lane", "\u0663", "invalid_value"),
        ("agent", "nobody", "not_found"),
        ("type", "", "invalid_value"),
        ("type", "a\x00", "text_invalid"),
        ("type", "x" * 300, "too_large"),
        ("workspace", "other", "invalid_value"),
        ("planet", "all", "invalid_value"),
    ],
)
async def test_pause_without_a_subject_is_refused(
    engine: Engine, raw: Raw, kind: Any, subject: str, code: str
) -> None:
    assert await refusal(engine.gates.close(kind, subject)) == code
    assert await raw.count("gate") == 0


async def test_pause_until_the_past_and_resume_without_a_pause_are_refused(
    engine: Engine, clock: ManualClock, raw: Raw
) -> None:
    assert await refusal(engine.gates.close("workspace", until=clock.now())) == "invalid_value"
    naive = (clock.now() + timedelta(hours=1)).replace(tzinfo=None)
    assert await refusal(engine.gates.close("workspace", until=naive)) == "invalid_value"
    assert await refusal(engine.gates.open("type", "deploy")) == "not_found"
    assert (await raw.count("gate"), await raw.count("event")) == (0, 0)


async def test_pause_applies_to_its_own_workspace(engine: Engine, raw: Raw) -> None:
    other = Engine(engine.store, workspace=await raw.workspace(5), actor="tester")
    await other.gates.close("workspace")
    await engine.submit(new("here"))
    await other.submit(new("there"))
    assert await titles(engine) == ["here"]
    assert await titles(other) == []
    assert await engine.gates.list() == []
