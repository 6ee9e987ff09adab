"""Matching: a task's requirements select its lane; an agent's profile decides on its lanes."""

import hashlib
from typing import Literal
from uuid import UUID

import msgspec

Rule = Literal["superset", "single", "exact"]


class Requirements(msgspec.Struct, frozen=True, kw_only=True):
    """What a task needs from an agent. Tasks of a workspace with equal requirements share a lane.

    Matching reads no other fields of a task.
    """

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
        """Returns the canonical text of the requirements; the order of tags does not matter."""
        canonical = msgspec.structs.replace(
            self,
            task_tags=tuple(sorted(set(self.task_tags))),
            capabilities=tuple(sorted(set(self.capabilities))),
        )
        return msgspec.json.encode(canonical, order="deterministic").decode()


class SupportedWork(msgspec.Struct, frozen=True):
    """The tasks that a worker can run. It gets no others, even if its agent accepts them."""

    runtimes: tuple[str, ...] = ()
    task_types: tuple[str, ...] | None = None
    accept_commands: bool = False

    def missing_support(self, task_type: str, has_command: bool) -> str | None:
        """Returns why the worker cannot run a task of this type, or `None` if it can.

        `has_command` is true for a task that has its own command.
        """
        if has_command:
            return None if self.accept_commands else "does not accept commands from tasks"
        if not self.runtimes:
            return "has no runtime of its own; it only accepts tasks with a command"
        if self.task_types is not None and task_type not in self.task_types:
            return f"does not handle type {task_type}"
        return None


class AgentProfile(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of an agent that matching reads. `None` means no restriction."""

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
    """The gateway that spawns the agent's sessions; without one, a worker claims its tasks."""
    means: SupportedWork | None = None
    """What the hosting worker supports; `None` if no Tenuto worker is known to host the agent."""
    version: int = 1

    def with_supported_work(self) -> "AgentProfile":
        """Returns the profile with `means`, by default built from its own fields."""
        means = SupportedWork(self.runtimes, self.task_types, self.accept_commands)
        return msgspec.structs.replace(self, means=self.means or means)


COMMAND = "command"
"""Runtime of a task with its own command line; only agents with `accept_commands` get it."""


WORKERLESS_RUNTIMES = frozenset({"http", "gateway"})
"""Runtimes of agents without a Tenuto worker: they fetch tasks over HTTP, or get them pushed."""


def lane_id(key: str) -> int:
    """Returns the lane id: a hash of the requirements' key, so that no lookup is needed."""
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def find_mismatches(agent: AgentProfile, lane: Requirements) -> list[str]:
    """Returns why the agent cannot claim tasks of the lane; empty if it can."""
    mismatches = []
    if lane.workspace != agent.workspace:
        mismatches.append("another workspace")
    if lane.target_agent is not None and lane.target_agent != agent.id:
        mismatches.append("meant for another agent")
    if lane.agent_type is not None and lane.agent_type != agent.agent_type:
        mismatches.append(f"needs an agent of type {lane.agent_type}")
    mismatches += _runtime_mismatches(agent, lane)
    if missing := sorted(set(lane.capabilities) - set(agent.capabilities)):
        mismatches.append(f"needs capabilities {', '.join(missing)}")
    if not _accepts_tags(agent, lane):
        mismatches.append(f"its choose rules {', '.join(agent.choose_rules)} reject the task tags")
    if lane.container is not None and lane.container not in (agent.containers or ()):
        mismatches.append(f"needs container {lane.container}")
    if lane.region is not None and lane.region != agent.region:
        mismatches.append(f"needs region {lane.region}")
    if lane.model is not None and agent.models is not None and lane.model not in agent.models:
        mismatches.append(f"needs model {lane.model}")
    if lane.needs_subagents and "call_subagent" not in agent.capabilities:
        mismatches.append("needs an agent that can call sub-agents")
    return mismatches


def is_eligible(agent: AgentProfile, lane: Requirements) -> bool:
    """True if the agent can claim tasks of the lane."""
    return not find_mismatches(agent, lane)


def _runtime_mismatches(agent: AgentProfile, lane: Requirements) -> list[str]:
    """Returns why agent and worker cannot run the lane's runtime and type; empty if they can."""
    has_command = lane.runtime == COMMAND
    if not has_command and lane.runtime is not None and lane.runtime not in agent.runtimes:
        return [f"needs runtime {lane.runtime}"]
    own_support = SupportedWork(agent.runtimes, agent.task_types, agent.accept_commands)
    if mismatch := own_support.missing_support(lane.task_type, has_command):
        return [mismatch]
    if agent.means and (mismatch := agent.means.missing_support(lane.task_type, has_command)):
        return [f"its worker {mismatch}"]
    return []


def _accepts_tags(agent: AgentProfile, lane: Requirements) -> bool:
    """True if one of the agent's choose rules accepts the lane's task tags."""
    agent_tags, lane_tags = set(agent.task_tags), set(lane.task_tags)
    accepts = {
        "superset": lane_tags <= agent_tags,
        "single": len(lane_tags) == 1 and lane_tags <= agent_tags,
        "exact": lane_tags == agent_tags,
    }
    return any(accepts[rule] for rule in agent.choose_rules)
