"""What an agent may take, what waits for it, and why it takes nothing else."""

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

import msgspec

from tenuto.engine.agents.gateways import GatewayState, obstacle
from tenuto.engine.agents.lanes import Lane
from tenuto.engine.agents.registry import AgentView, claim_blockers, profile_of, view_of
from tenuto.engine.core import Core
from tenuto.engine.limits.quotas import quota_gates
from tenuto.engine.limits.rate_limits import limit_rows, used_up
from tenuto.engine.views import Gate
from tenuto.model.agents.matching import FETCHES, AgentProfile, Requirements, obstacles
from tenuto.model.errors import NotFound
from tenuto.model.limits import pauses as model
from tenuto.store.protocol import Row, Statement

MOST_LANES = 50
MOST_COUNTED = 1_000
"""Waiting tasks of a lane that are counted; more are as many."""
_PLAIN = {
    name: getattr(Requirements(workspace=UUID(int=0)), name)
    for name in (
        "task_type",
        "agent_type",
        "target_agent",
        "runtime",
        "task_tags",
        "capabilities",
        "container",
        "region",
        "model",
        "needs_subagents",
    )
}


class Capacity(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """How much an agent does at once. `most` is none when nobody limits it."""

    running: int
    unconfirmed: int
    most: int | None
    free: int | None
    workers: list[str]
    """The workers that host it and live."""


class LaneEligibility(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Tasks of equal requirements: what they require, how many wait, what is in the way."""

    lane: int
    requires: dict[str, Any]
    pending: int
    obstacles: list[str]
    """Why the agent may never take them as it is; none of them when it may."""
    gates: list[Gate] = []
    """What holds them back for a while."""


class AgentExplanation(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Why an agent takes what it takes. Of many lanes the first are shown, `more` are not."""

    id: UUID
    name: str
    status: str
    summary: str
    capacity: Capacity
    gates: list[Gate]
    lanes: list[LaneEligibility]
    more: int


class _ActiveLimits(msgspec.Struct, frozen=True):
    """What holds lanes back now: pauses, and rate limits as they are kept."""

    pauses: list[model.ClaimPause]
    limits: Sequence[Row]
    now: datetime


async def explain_agent(
    core: Core, workspace: UUID, agent: UUID, gateways: Sequence[GatewayState] = ()
) -> AgentExplanation:
    """Look at an agent, its workers and the lanes of its workspace."""
    now = core.now()
    params = {"workspace": workspace, "id": agent}
    rows = await core.store.fetch(Statement("agent", params))
    if not rows:
        raise NotFound(f"no agent {agent}")
    row, view = rows[0], view_of(rows[0], now)
    capacity = _capacity(view, row, await core.store.fetch(Statement("workers", params)))
    paused = [gate for gate in await core.lanes.gates(workspace) if gate.holds(now)]
    held = _ActiveLimits(paused, await limit_rows(core, workspace), now)
    lanes = await _lanes(core, workspace, profile_of(row), held)
    gates = [Gate(gate="agent", detail=each) for each in claim_blockers(row, now)]
    gates += _pauses(
        gate for gate in paused if gate.blocks_agent(view.name) or gate.kind == "workspace"
    )
    gates += _spawners(view, capacity, now, gateways)
    gates += await quota_gates(core, workspace)
    shown, more = lanes[:MOST_LANES], max(0, len(lanes) - MOST_LANES)
    depths = await _depths(core, [each.lane for each in shown])
    shown = [msgspec.structs.replace(each, pending=depths[each.lane]) for each in shown]
    return AgentExplanation(
        id=view.id,
        name=view.name,
        status=view.status,
        summary=_summary(gates, lanes),
        capacity=capacity,
        gates=gates,
        lanes=shown,
        more=more,
    )


def _capacity(view: AgentView, row: Row, workers: Sequence[Row]) -> Capacity:
    hosts = [
        each["worker_id"]
        for each in workers
        if each["status"] == "RUNNING"
        and view.name in msgspec.json.decode(each["agents"], type=list[str])
    ]
    used, most = row["running"] + row["kills"], view.max_concurrent_tasks
    return Capacity(
        running=row["running"],
        unconfirmed=row["kills"],
        most=most,
        free=None if most is None else max(0, most - used),
        workers=hosts,
    )


def _spawners(
    view: AgentView, capacity: Capacity, now: datetime, gateways: Sequence[GatewayState]
) -> list[Gate]:
    """That nobody would start the agent's sessions."""
    if view.gateway is not None:
        broken = obstacle(view.gateway, gateways, now)
        return [] if broken is None else [Gate(gate="gateway", detail=broken)]
    if capacity.workers or not FETCHES.isdisjoint(view.runtimes):
        return []
    return [Gate(gate="worker", detail="no live worker hosts it")]


def _pauses(gates: Iterable[model.ClaimPause]) -> list[Gate]:
    return [Gate(gate="pause", detail=gate.describe, clears_at=gate.until) for gate in gates]


async def _lanes(
    core: Core, workspace: UUID, agent: AgentProfile, held: _ActiveLimits
) -> list[LaneEligibility]:
    """The lanes: those with tasks first, of these what the agent may take, then by their names."""
    found = await core.store.fetch(Statement("lanes_waiting", {"workspace": workspace}))
    waiting = {each["lane"] for each in found}
    seen = [
        LaneEligibility(
            lane=lane.id,
            requires=requires(lane),
            pending=1 if lane.id in waiting else 0,
            obstacles=obstacles(agent, lane.requirements),
            gates=_lane_gates(agent, lane, held),
        )
        for lane in await core.lanes.all(workspace)
    ]
    return sorted(seen, key=_place)


def _lane_gates(agent: AgentProfile, lane: Lane, held: _ActiveLimits) -> list[Gate]:
    """What holds the lane's tasks back from the agent for a while."""
    needs, now = lane.requirements, held.now
    gates = _pauses(gate for gate in held.pauses if gate.blocks_lane(lane.id, needs))
    if lane.closed_until is not None and lane.closed_until > now:
        why = f"lane closed: {lane.closed_why or 'closed'}"
        gates.append(Gate(gate="lane", detail=why, clears_at=lane.closed_until))
    for name, at in used_up(held.limits, needs.model or agent.model, agent.account, now).items():
        gates.append(Gate(gate="rate_limit", detail=f"rate limit {name}", clears_at=at))
    return gates


def _place(each: LaneEligibility) -> tuple[bool, bool, str, int]:
    text = msgspec.json.encode(each.requires, order="deterministic").decode()
    return not each.pending, bool(each.obstacles), text, each.lane


def requires(lane: Lane) -> dict[str, Any]:
    """What the tasks of a lane require, but for what requires nothing."""
    said = {"task_type": lane.requirements.task_type}
    for name, plain in _PLAIN.items():
        value = getattr(lane.requirements, name)
        if value != plain:
            said[name] = str(value) if isinstance(value, UUID) else value
    return said


async def _depths(core: Core, lanes: list[int]) -> dict[int, int]:
    if not lanes:
        return {}
    wanted = Statement("lane_depths", {"lanes": lanes, "most": MOST_COUNTED})
    return {row["lane"]: row["n"] for row in await core.store.fetch(wanted)}


def _summary(gates: list[Gate], lanes: list[LaneEligibility]) -> str:
    if gates:
        return "takes nothing: " + "; ".join(gate.detail for gate in gates)
    may = [each for each in lanes if not each.obstacles]
    ready = [each for each in may if each.pending and not each.gates]
    if ready:
        return f"takes from {len(ready):,} lanes in which tasks wait"
    if not may:
        return "may take from none of the lanes that there are"
    waits = any(each.pending for each in may)
    rest = "what waits in them is held back" if waits else "no task waits in them"
    return f"may take from {len(may):,} lanes; {rest}"
