"""Why a task is not running. Pure: from what was read to sentences."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime

import msgspec

from tenuto.engine.agents.lanes import Lane
from tenuto.engine.views import Explanation, Gate
from tenuto.model.agents.matching import FETCHES, AgentProfile, obstacles
from tenuto.model.limits import pauses as model
from tenuto.model.tasks.task import LEASED, TERMINAL, Status, Task, queue_expiry
from tenuto.store.protocol import Row


def waiting_for(task: Task, now: datetime) -> str | None:
    """The one word for what a task waits for."""
    if task.status is not Status.WAITING:
        return None
    if task.hold is not None:
        return task.hold.partition(":")[0]
    if task.unmet > 0:
        return "dependencies"
    if task.run_at is not None and task.run_at > now:
        return "schedule"
    return None


class ActiveGates(msgspec.Struct, frozen=True):
    """What holds lanes back: gates, and for each agent by name the rate limits that are used up."""

    gates: Sequence[model.ClaimPause] = ()
    limits: Mapping[str, Mapping[str, datetime]] = {}
    holds: Mapping[str, str] = {}
    """What there is to say of the task's own hold, by its word."""
    gateways: Mapping[str, str | None] = {}
    """Of agents by name that a gateway spawns sessions for, what keeps it from doing so."""
    quota: Sequence[Gate] = ()
    """That the workspace may run no more."""
    agents: Mapping[str, Sequence[str]] = {}
    """Why agents by name take nothing now: silent, about to end, at their limit."""


def explain(
    task: Task,
    lane: Lane | None,
    agents: Mapping[str, AgentProfile],
    workers: Iterable[Row],
    ahead: int,
    now: datetime,
    needs: Sequence[Row] = (),
    held: ActiveGates = ActiveGates(),  # noqa: B008  frozen
) -> Explanation:
    """Every gate before the task, and for each agent what keeps it from taking the task."""
    gates = _own_gates(task, now, needs, held.holds)
    reasons: dict[str, list[str]] = {}
    if task.status not in TERMINAL and task.status not in LEASED:
        gates += [*_lane_gates(lane, now, held), *held.quota]
        reasons, waits = _agents(lane, agents, workers, now, held)
        if all(reasons.values()) and waits:
            gates += waits
        elif all(reasons.values()):
            detail = "no agent with a live worker may take it" if reasons else "no agent is known"
            gates.append(Gate(gate="agent", detail=detail))
        elif ahead:
            gates.append(Gate(gate="queue", detail=f"{ahead:,} tasks of its lane are before it"))
    return Explanation(
        id=task.id,
        status=task.status,
        summary=_summary(task, gates),
        gates=gates,
        agents=reasons,
        lane=None if lane is None else str(lane.id),
    )


_HOLDS = {
    "turn": "waits for its turn in its group",
    "approval": "waits for a person's yes or no; `inbox list` shows it",
    "input": "waits for a person's answer; `inbox list` shows the question",
    "children": "its handler waits for tasks that it made; `task tree` shows them",
    "paused": "its flow is paused; `flow resume` continues",
    "act": "the engine does it once nothing is in its way",
    "budget": "its budget, or that of a task above it, is used up; `inbox list` shows it",
}


def _own_gates(
    task: Task, now: datetime, needs: Sequence[Row], holds: Mapping[str, str]
) -> list[Gate]:
    gates = []
    if task.status is Status.PAUSED:
        gates.append(Gate(gate="paused", detail="a person paused it; `task resume` continues"))
    if task.status is Status.RETRY_WAIT:
        left = f"try {task.tries + 1} of {task.max_attempts}; last: {task.last_error}"
        gates.append(Gate(gate="retry", detail=left, clears_at=task.next_attempt_at))
    if task.hold is not None:
        what = task.hold.partition(":")[0]
        detail = holds.get(what) or _HOLDS.get(what, f"waits for {what}")
        gates.append(Gate(gate=what, detail=detail, clears_at=task.resume_at))
    if task.unmet > 0:
        gates.append(Gate(gate="dependencies", detail=_waits_for(task, needs)))
    if task.run_at is not None and task.run_at > now and task.status not in TERMINAL:
        gates.append(Gate(gate="schedule", detail="starts later", clears_at=task.run_at))
    if task.cancel_requested_at is not None and task.status in LEASED:
        gates.append(Gate(gate="cancel", detail="its session is being stopped"))
    expiry = queue_expiry(task)
    if expiry is not None and task.status not in TERMINAL:
        gates.append(Gate(gate="ttl", detail="fails unless it has started by", clears_at=expiry))
    return gates


def _waits_for(task: Task, needs: Sequence[Row]) -> str:
    open_ = [row for row in needs if not row["met"]]
    shown = ", ".join(f"{row['title']} ({row['id']}, {row['status']})" for row in open_[:5])
    more = f" and {task.unmet - 5:,} more" if task.unmet > 5 else ""
    return f"{task.unmet:,} tasks have to end first: {shown}{more}"


def _lane_gates(lane: Lane | None, now: datetime, held: ActiveGates) -> list[Gate]:
    if lane is None:
        return [Gate(gate="lane", detail="its lane is not known; cancel and `task rerun` it")]
    found = [
        Gate(gate="pause", detail=f"{gate.describe}; `resume` continues", clears_at=gate.until)
        for gate in held.gates
        if gate.holds(now) and gate.blocks_lane(lane.id, lane.requirements)
    ]
    if lane.closed_until is not None and lane.closed_until > now:
        why = lane.closed_why or "closed"
        found.append(Gate(gate="lane", detail=f"lane closed: {why}", clears_at=lane.closed_until))
    return found


def _agents(
    lane: Lane | None,
    agents: Mapping[str, AgentProfile],
    workers: Iterable[Row],
    now: datetime,
    held: ActiveGates,
) -> tuple[dict[str, list[str]], list[Gate]]:
    """What keeps each agent from the task, and what those wait for who else could take it."""
    live: dict[str, int] = {}
    for worker in workers:
        if worker["status"] == "RUNNING":
            free = worker["slots"] - worker["running"]
            for name in msgspec.json.decode(worker["agents"], type=list[str]):
                live[name] = live.get(name, 0) + max(free, 0)
    reasons: dict[str, list[str]] = {}
    waits: dict[str, Gate] = {}
    for name, agent in agents.items():
        why = [] if lane is None else obstacles(agent, lane.requirements)
        waiting = [] if why else _waits(name, now, held)
        if not why and name in held.gateways:
            broken = held.gateways[name]
            why = [] if broken is None else [broken]
            waits |= {gate.detail: gate for gate in waiting}
        elif not why and name not in live and FETCHES.isdisjoint(agent.runtimes):
            why = ["no live worker hosts it"]
        elif not why and live.get(name) == 0:
            why = ["all its slots are busy"]
        elif not why:
            waits |= {gate.detail: gate for gate in waiting}
        reasons[name] = [gate.detail for gate in waiting] + why + list(held.agents.get(name, ()))
    return reasons, list(waits.values())


def _waits(agent: str, now: datetime, held: ActiveGates) -> list[Gate]:
    """What holds an agent back that may take the task."""
    found = [
        Gate(gate="pause", detail=gate.describe, clears_at=gate.until)
        for gate in held.gates
        if gate.holds(now) and gate.blocks_agent(agent)
    ]
    for name, at in held.limits.get(agent, {}).items():
        when = at.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        detail = f"rate limit {name}: next at {when}"
        found.append(Gate(gate="rate_limit", detail=detail, clears_at=at))
    return found


def _summary(task: Task, gates: list[Gate]) -> str:
    if task.status in TERMINAL:
        ended = f"ended {task.status}"
        return f"{ended}: {task.last_error}" if task.last_error else ended
    if task.status is Status.RUNNING:
        return f"running: attempt {task.attempt} on {task.worker}"
    if task.status is Status.ASSIGNED:
        return f"assigned: attempt {task.attempt}, its session has not begun"
    if not gates:
        return "ready: the next free slot takes it"
    return "; ".join(gate.detail for gate in gates)
