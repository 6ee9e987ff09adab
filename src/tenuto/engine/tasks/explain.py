"""Explains why a task is not running. Pure functions over rows that were read before."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime

import msgspec

from tenuto.engine.agents.lanes import Lane
from tenuto.engine.views import Explanation, Gate
from tenuto.model.agents.matching import WORKERLESS_RUNTIMES, AgentProfile, find_mismatches
from tenuto.model.limits.pauses import ClaimPause
from tenuto.model.tasks.task import LEASED, TERMINAL, Status, Task, queue_expires_at
from tenuto.store.protocol import Row


def waiting_for(task: Task, now: datetime) -> str | None:
    """Returns the reason for WAITING in one word, for example `dependencies`; else `None`."""
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
    """The active gates of a workspace; `limits` has the exhausted rate limits per agent name."""

    pauses: Sequence[ClaimPause] = ()
    limits: Mapping[str, Mapping[str, datetime]] = {}
    holds: Mapping[str, str] = {}
    """Texts about the task's own hold, by its kind; they replace the general text."""
    gateways: Mapping[str, str | None] = {}
    """For agents with a gateway, by name: why the gateway cannot start sessions, or `None`."""
    quota: Sequence[Gate] = ()
    """Gates of the workspace's quota."""
    agents: Mapping[str, Sequence[str]] = {}
    """Why agents, by name, claim no tasks now: stale, draining or at their limit."""


def explain(
    task: Task,
    lane: Lane | None,
    agents: Mapping[str, AgentProfile],
    workers: Iterable[Row],
    ahead: int,
    now: datetime,
    needs: Sequence[Row] = (),
    active: ActiveGates = ActiveGates(),  # noqa: B008  frozen
) -> Explanation:
    """Returns all gates that block the task, and for each agent why it cannot claim the task."""
    gates = _own_gates(task, now, needs, active.holds)
    reasons: dict[str, list[str]] = {}
    if task.status not in TERMINAL and task.status not in LEASED:
        gates += [*_lane_gates(lane, now, active), *active.quota]
        reasons, delays = _agent_reasons(lane, agents, workers, now, active)
        if all(reasons.values()) and delays:
            gates += delays
        elif all(reasons.values()):
            detail = "no agent with a live worker can run it" if reasons else "no agent exists"
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


_HOLD_TEXTS = {
    "turn": "waits for its turn in its group",
    "approval": "waits for a person's approval; `inbox list` shows the request",
    "input": "waits for a person's answer; `inbox list` shows the question",
    "children": "its handler waits for its subtasks; `task tree` shows them",
    "paused": "its flow is paused; `flow resume` continues",
    "act": "the engine runs this control task once nothing blocks it",
    "budget": "the budget of the task or of a parent is used up; `inbox list` shows it",
}


def _own_gates(
    task: Task, now: datetime, needs: Sequence[Row], holds: Mapping[str, str]
) -> list[Gate]:
    """Returns the gates of the task itself: pause, retry, hold, dependencies, start time, TTL."""
    gates = []
    if task.status is Status.PAUSED:
        gates.append(Gate(gate="paused", detail="a user paused it; `task resume` continues"))
    if task.status is Status.RETRY_WAIT:
        progress = f"try {task.tries + 1} of {task.max_attempts}; last: {task.last_error}"
        gates.append(Gate(gate="retry", detail=progress, clears_at=task.next_attempt_at))
    if task.hold is not None:
        kind = task.hold.partition(":")[0]
        detail = holds.get(kind) or _HOLD_TEXTS.get(kind, f"waits for {kind}")
        gates.append(Gate(gate=kind, detail=detail, clears_at=task.resume_at))
    if task.unmet > 0:
        gates.append(Gate(gate="dependencies", detail=_format_dependencies(task, needs)))
    if task.run_at is not None and task.run_at > now and task.status not in TERMINAL:
        gates.append(Gate(gate="schedule", detail="starts later", clears_at=task.run_at))
    if task.cancel_requested_at is not None and task.status in LEASED:
        gates.append(Gate(gate="cancel", detail="its session is being stopped"))
    expiry = queue_expires_at(task)
    if expiry is not None and task.status not in TERMINAL:
        gates.append(Gate(gate="ttl", detail="fails unless it starts by then", clears_at=expiry))
    return gates


def _format_dependencies(task: Task, needs: Sequence[Row]) -> str:
    """Returns a text with the number of unmet dependencies and the first five of them."""
    unmet = [row for row in needs if not row["met"]]
    shown = ", ".join(f"{row['title']} ({row['id']}, {row['status']})" for row in unmet[:5])
    more = f" and {task.unmet - 5:,} more" if task.unmet > 5 else ""
    return f"{task.unmet:,} tasks must finish first: {shown}{more}"


def _lane_gates(lane: Lane | None, now: datetime, active: ActiveGates) -> list[Gate]:
    """Returns the active pauses of the lane, and its closing by a provider's limit."""
    if lane is None:
        return [Gate(gate="lane", detail="its lane does not exist; cancel it and use `task rerun`")]
    gates = [
        Gate(gate="pause", detail=f"{pause.description}; `resume` continues", clears_at=pause.until)
        for pause in active.pauses
        if pause.is_active(now) and pause.blocks_lane(lane.id, lane.requirements)
    ]
    if lane.closed_until is not None and lane.closed_until > now:
        reason = lane.closed_why or "closed"
        gates.append(
            Gate(gate="lane", detail=f"lane closed: {reason}", clears_at=lane.closed_until)
        )
    return gates


def _agent_reasons(
    lane: Lane | None,
    agents: Mapping[str, AgentProfile],
    workers: Iterable[Row],
    now: datetime,
    active: ActiveGates,
) -> tuple[dict[str, list[str]], list[Gate]]:
    """Returns why each agent cannot claim now, by name, and gates that only delay able agents."""
    free_slots: dict[str, int] = {}
    for worker in workers:
        if worker["status"] == "RUNNING":
            free = worker["slots"] - worker["running"]
            for name in msgspec.json.decode(worker["agents"], type=list[str]):
                free_slots[name] = free_slots.get(name, 0) + max(free, 0)
    reasons: dict[str, list[str]] = {}
    delays: dict[str, Gate] = {}
    for name, agent in agents.items():
        obstacles = [] if lane is None else find_mismatches(agent, lane.requirements)
        gates = [] if obstacles else _agent_gates(name, now, active)
        if not obstacles and name in active.gateways:
            problem = active.gateways[name]
            obstacles = [] if problem is None else [problem]
            delays |= {gate.detail: gate for gate in gates}
        elif (
            not obstacles
            and name not in free_slots
            and WORKERLESS_RUNTIMES.isdisjoint(agent.runtimes)
        ):
            obstacles = ["no live worker hosts this agent"]
        elif not obstacles and free_slots.get(name) == 0:
            obstacles = ["all its slots are busy"]
        elif not obstacles:
            delays |= {gate.detail: gate for gate in gates}
        reasons[name] = (
            [gate.detail for gate in gates] + obstacles + list(active.agents.get(name, ()))
        )
    return reasons, list(delays.values())


def _agent_gates(agent: str, now: datetime, active: ActiveGates) -> list[Gate]:
    """Returns the pauses and rate limits of an agent that is able to run the task."""
    gates = [
        Gate(gate="pause", detail=pause.description, clears_at=pause.until)
        for pause in active.pauses
        if pause.is_active(now) and pause.blocks_agent(agent)
    ]
    for name, at in active.limits.get(agent, {}).items():
        when = at.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        detail = f"rate limit {name}: next at {when}"
        gates.append(Gate(gate="rate_limit", detail=detail, clears_at=at))
    return gates


def _summary(task: Task, gates: list[Gate]) -> str:
    """Returns one line: the end, the attempt that has the task, or the details of all gates."""
    if task.status in TERMINAL:
        outcome = f"ended {task.status}"
        return f"{outcome}: {task.last_error}" if task.last_error else outcome
    if task.status is Status.RUNNING:
        return f"running: attempt {task.attempt} on {task.worker}"
    if task.status is Status.ASSIGNED:
        return f"assigned: attempt {task.attempt}, its session has not started"
    if not gates:
        return "ready: the next free slot claims it"
    return "; ".join(gate.detail for gate in gates)
