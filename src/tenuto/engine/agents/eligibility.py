"""Explains which lanes an agent can claim from, and what keeps it from the others."""

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

import msgspec

from tenuto.engine.agents.gateways import GatewayState, unavailable_reason
from tenuto.engine.agents.lanes import Lane
from tenuto.engine.agents.registry import AgentView, claim_blockers, profile_of, view_of
from tenuto.engine.core import Core
from tenuto.engine.limits.quotas import quota_gates
from tenuto.engine.limits.rate_limits import exhausted_limits, limit_rows
from tenuto.engine.views import Gate
from tenuto.model.agents.matching import (
    WORKERLESS_RUNTIMES,
    AgentProfile,
    Requirements,
    find_mismatches,
)
from tenuto.model.errors import NotFound
from tenuto.model.limits import pauses as model
from tenuto.store.protocol import Row, Statement

MAX_LANES_SHOWN = 50
MAX_COUNTED = 1_000
"""Pending tasks of a lane that are counted; a larger number is shown as this number."""
_DEFAULTS = {
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
    """Running tasks and free capacity of an agent. `most` is `None` if it has no limit."""

    running: int
    unconfirmed: int
    most: int | None
    free: int | None
    workers: list[str]
    """The live workers that host it."""


class LaneEligibility(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """One lane: its requirements, its number of pending tasks, and what blocks the agent."""

    lane: int
    requires: dict[str, Any]
    pending: int
    obstacles: list[str]
    """Requirements the agent does not meet; empty if it can claim from the lane."""
    gates: list[Gate] = []
    """What blocks claims from the lane for a while."""


class AgentExplanation(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """What an agent can claim and why. Of many lanes, the first are listed; `more` are not."""

    id: UUID
    name: str
    status: str
    summary: str
    capacity: Capacity
    gates: list[Gate]
    lanes: list[LaneEligibility]
    more: int


class _ActiveLimits(msgspec.Struct, frozen=True):
    """What blocks lanes at the time `now`: pauses, and the stored rate limits."""

    pauses: list[model.ClaimPause]
    limits: Sequence[Row]
    now: datetime


async def explain_agent(
    core: Core, workspace: UUID, agent: UUID, gateways: Sequence[GatewayState] = ()
) -> AgentExplanation:
    """Returns what the agent can claim and what keeps it from the rest; raises `NotFound`."""
    now = core.now()
    params = {"workspace": workspace, "id": agent}
    rows = await core.store.fetch(Statement("agent", params))
    if not rows:
        raise NotFound(f"no agent {agent}")
    row, view = rows[0], view_of(rows[0], now)
    capacity = _capacity(view, row, await core.store.fetch(Statement("workers", params)))
    pauses = [pause for pause in await core.lanes.pauses(workspace) if pause.is_active(now)]
    limits = _ActiveLimits(pauses, await limit_rows(core, workspace), now)
    lanes = await _explain_lanes(core, workspace, profile_of(row), limits)
    gates = [Gate(gate="agent", detail=reason) for reason in claim_blockers(row, now)]
    gates += _pause_gates(
        pause for pause in pauses if pause.blocks_agent(view.name) or pause.kind == "workspace"
    )
    gates += _host_gates(view, capacity, now, gateways)
    gates += await quota_gates(core, workspace)
    shown, more = lanes[:MAX_LANES_SHOWN], max(0, len(lanes) - MAX_LANES_SHOWN)
    depths = await _pending_by_lane(core, [lane.lane for lane in shown])
    shown = [msgspec.structs.replace(lane, pending=depths[lane.lane]) for lane in shown]
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
    """Returns the agent's capacity; only RUNNING workers count as hosts."""
    hosts = [
        worker["worker_id"]
        for worker in workers
        if worker["status"] == "RUNNING"
        and view.name in msgspec.json.decode(worker["agents"], type=list[str])
    ]
    used, maximum = row["running"] + row["kills"], view.max_concurrent_tasks
    return Capacity(
        running=row["running"],
        unconfirmed=row["kills"],
        most=maximum,
        free=None if maximum is None else max(0, maximum - used),
        workers=hosts,
    )


def _host_gates(
    view: AgentView, capacity: Capacity, now: datetime, gateways: Sequence[GatewayState]
) -> list[Gate]:
    """Returns a gate if the agent's gateway is unavailable, or it needs a worker and has none."""
    if view.gateway is not None:
        unavailable = unavailable_reason(view.gateway, gateways, now)
        return [] if unavailable is None else [Gate(gate="gateway", detail=unavailable)]
    if capacity.workers or not WORKERLESS_RUNTIMES.isdisjoint(view.runtimes):
        return []
    return [Gate(gate="worker", detail="no live worker hosts this agent")]


def _pause_gates(pauses: Iterable[model.ClaimPause]) -> list[Gate]:
    """Returns a gate for each pause."""
    return [Gate(gate="pause", detail=pause.description, clears_at=pause.until) for pause in pauses]


async def _explain_lanes(
    core: Core, workspace: UUID, agent: AgentProfile, limits: _ActiveLimits
) -> list[LaneEligibility]:
    """Returns all lanes: with tasks first, then without obstacles; `pending` is only 1 or 0.

    Lanes that are equal in both are in the order of their requirements.
    """
    rows = await core.store.fetch(Statement("lanes_with_pending", {"workspace": workspace}))
    with_tasks = {row["lane"] for row in rows}
    explained = [
        LaneEligibility(
            lane=lane.id,
            requires=lane_requirements(lane),
            pending=1 if lane.id in with_tasks else 0,
            obstacles=find_mismatches(agent, lane.requirements),
            gates=_lane_gates(agent, lane, limits),
        )
        for lane in await core.lanes.all(workspace)
    ]
    return sorted(explained, key=_sort_key)


def _lane_gates(agent: AgentProfile, lane: Lane, limits: _ActiveLimits) -> list[Gate]:
    """Returns what temporarily blocks the agent's claims from the lane."""
    needs, now = lane.requirements, limits.now
    gates = _pause_gates(pause for pause in limits.pauses if pause.blocks_lane(lane.id, needs))
    if lane.closed_until is not None and lane.closed_until > now:
        reason = f"lane closed: {lane.closed_why or 'closed'}"
        gates.append(Gate(gate="lane", detail=reason, clears_at=lane.closed_until))
    for name, at in exhausted_limits(
        limits.limits, needs.model or agent.model, agent.account, now
    ).items():
        gates.append(Gate(gate="rate_limit", detail=f"rate limit {name}", clears_at=at))
    return gates


def _sort_key(lane: LaneEligibility) -> tuple[bool, bool, str, int]:
    """Returns the sort key: lanes with tasks first, then lanes without obstacles."""
    text = msgspec.json.encode(lane.requires, order="deterministic").decode()
    return not lane.pending, bool(lane.obstacles), text, lane.lane


def lane_requirements(lane: Lane) -> dict[str, Any]:
    """Returns a lane's requirements by field: the task type, and fields that require something."""
    required = {"task_type": lane.requirements.task_type}
    for name, default in _DEFAULTS.items():
        value = getattr(lane.requirements, name)
        if value != default:
            required[name] = str(value) if isinstance(value, UUID) else value
    return required


async def _pending_by_lane(core: Core, lanes: list[int]) -> dict[int, int]:
    """Returns the number of pending tasks by lane, at most `MAX_COUNTED` each."""
    if not lanes:
        return {}
    statement = Statement("lane_depths", {"lanes": lanes, "most": MAX_COUNTED})
    return {row["lane"]: row["n"] for row in await core.store.fetch(statement)}


def _summary(gates: list[Gate], lanes: list[LaneEligibility]) -> str:
    """Returns one sentence on what the agent can claim now."""
    if gates:
        return "cannot claim tasks: " + "; ".join(gate.detail for gate in gates)
    matching = [lane for lane in lanes if not lane.obstacles]
    ready = [lane for lane in matching if lane.pending and not lane.gates]
    if ready:
        return f"can claim now: {len(ready):,} lanes with pending tasks"
    if not matching:
        return "matches no existing lane"
    has_tasks = any(lane.pending for lane in matching)
    rest = "their pending tasks are blocked" if has_tasks else "they have no pending task"
    return f"matches {len(matching):,} lanes; {rest}"
