"""Who may take what: a task's requirements make its lane, an agent's profile picks its lanes."""

import hashlib
from typing import Literal
from uuid import UUID

import msgspec

Rule = Literal["superset", "single", "exact"]


class Requirements(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that matching looks at. Tasks that require the same share a lane."""

    workspace: UUID
    task_type: str = "default"
    agent_type: str | None = None
    target_agent: UUID | None = None
    runtime: str | None = None
    task_tags: tuple[str, ...] = ()
    capabilities: tuple[str, ...] = ()
    container: str | None = None
    region: str | None = None
    model: str | None = None
    needs_subagents: bool = False

    def key(self) -> str:
        """The canonical text of the requirements: equal for equal sets, in any order."""
        tidy = msgspec.structs.replace(
            self,
            task_tags=tuple(sorted(set(self.task_tags))),
            capabilities=tuple(sorted(set(self.capabilities))),
        )
        return msgspec.json.encode(tidy, order="deterministic").decode()


class SupportedWork(msgspec.Struct, frozen=True):
    """What a worker can run: it is given nothing else, whatever its agent may take."""

    runtimes: tuple[str, ...] = ()
    task_types: tuple[str, ...] | None = None
    accept_commands: bool = False

    def missing_support(self, task_type: str, command: bool) -> str | None:
        """What it lacks for a task of the type, or for one that brings a command."""
        if command:
            return None if self.accept_commands else "does not accept commands from tasks"
        if not self.runtimes:
            return "has no runtime of its own; it only takes tasks that bring a command"
        if self.task_types is not None and task_type not in self.task_types:
            return f"does not handle type {task_type}"
        return None


class AgentProfile(msgspec.Struct, frozen=True, kw_only=True):
    """What matching knows of an agent. `None` means: no restriction of that kind."""

    id: UUID
    workspace: UUID
    name: str
    agent_type: str | None = None
    task_types: tuple[str, ...] | None = None
    task_tags: tuple[str, ...] = ()
    capabilities: tuple[str, ...] = ()
    choose_rules: tuple[Rule, ...] = ("superset",)
    runtimes: tuple[str, ...] = ()
    accept_commands: bool = False
    containers: tuple[str, ...] | None = None
    region: str | None = None
    models: tuple[str, ...] | None = None
    max_concurrent: int | None = None
    model: str | None = None
    account: str | None = None
    skills: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    heartbeat_interval_s: int | None = None
    stale_threshold_s: int | None = None
    coordinator_enabled: bool = True
    gateway: str | None = None
    """The gateway that spawns its sessions; without one, a worker fetches its tasks."""
    means: SupportedWork | None = None
    """Of the worker that hosts it; `None`: no worker of ours is known to."""
    version: int = 1

    def hosted(self) -> "AgentProfile":
        """The profile that a worker brings, which says what the worker can run as well."""
        means = SupportedWork(self.runtimes, self.task_types, self.accept_commands)
        return msgspec.structs.replace(self, means=self.means or means)


COMMAND = "command"
"""The runtime of a task that brings its own argv; only agents with `accept_commands` take it."""


FETCHES = frozenset({"http", "gateway"})
"""Runtimes of agents that need no worker of ours: they fetch tasks, or are handed them."""


def lane_id(key: str) -> int:
    """A lane's number follows from its key, so that nobody has to look it up to use it."""
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def obstacles(agent: AgentProfile, lane: Requirements) -> list[str]:
    """Why the agent may not take tasks of the lane; empty when it may."""
    found = []
    if lane.workspace != agent.workspace:
        found.append("another workspace")
    if lane.target_agent is not None and lane.target_agent != agent.id:
        found.append("meant for another agent")
    if lane.agent_type is not None and lane.agent_type != agent.agent_type:
        found.append(f"needs an agent of type {lane.agent_type}")
    found += _runtime_obstacles(agent, lane)
    if missing := sorted(set(lane.capabilities) - set(agent.capabilities)):
        found.append(f"needs capabilities {', '.join(missing)}")
    if not _tags_accepted(agent, lane):
        found.append(f"its rules {', '.join(agent.choose_rules)} refuse the task tags")
    if lane.container is not None and lane.container not in (agent.containers or ()):
        found.append(f"needs container {lane.container}")
    if lane.region is not None and lane.region != agent.region:
        found.append(f"needs region {lane.region}")
    if lane.model is not None and agent.models is not None and lane.model not in agent.models:
        found.append(f"needs model {lane.model}")
    if lane.needs_subagents and "call_subagent" not in agent.capabilities:
        found.append("needs an agent that can call sub-agents")
    return found


def eligible(agent: AgentProfile, lane: Requirements) -> bool:
    return not obstacles(agent, lane)


def _runtime_obstacles(agent: AgentProfile, lane: Requirements) -> list[str]:
    command = lane.runtime == COMMAND
    if not command and lane.runtime is not None and lane.runtime not in agent.runtimes:
        return [f"needs runtime {lane.runtime}"]
    own = SupportedWork(agent.runtimes, agent.task_types, agent.accept_commands)
    if lacks := own.missing_support(lane.task_type, command):
        return [lacks]
    if agent.means and (lacks := agent.means.missing_support(lane.task_type, command)):
        return [f"its worker {lacks}"]
    return []


def _tags_accepted(agent: AgentProfile, lane: Requirements) -> bool:
    mine, wanted = set(agent.task_tags), set(lane.task_tags)
    accepts = {
        "superset": wanted <= mine,
        "single": len(wanted) == 1 and wanted <= mine,
        "exact": wanted == mine,
    }
    return any(accepts[rule] for rule in agent.choose_rules)
