"""Registry: the agents of a workspace as people and coordinators see them."""

from collections.abc import Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

import msgspec

from tenuto.engine.core import Core
from tenuto.model import limits
from tenuto.model.errors import Conflict, Forbidden, NotFound
from tenuto.model.matching import AgentProfile
from tenuto.store.protocol import Row, Script, Statement

STALE_AFTER_S = 90
"""Seconds of silence after which an agent without a threshold of its own counts as stale."""


class AgentView(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """An agent as people see it."""

    id: UUID
    name: str
    status: str
    agent_type: str | None
    model: str | None
    skills: tuple[str, ...]
    tags: tuple[str, ...]
    task_types: tuple[str, ...] | None
    task_tags: tuple[str, ...]
    capabilities: tuple[str, ...]
    choose_rules: tuple[str, ...]
    runtimes: tuple[str, ...]
    accept_commands: bool
    region: str | None
    models: tuple[str, ...] | None
    max_concurrent_tasks: int | None
    heartbeat_interval_seconds: int | None
    stale_threshold_seconds: int
    coordinator_enabled: bool
    running_tasks: int
    last_heartbeat: datetime | None
    version: int
    created_at: datetime
    updated_at: datetime


class AgentToken(msgspec.Struct, frozen=True, rename="camel"):
    """A key with which to work as the agent; shown once."""

    id: UUID
    token: str
    expires_at: datetime | None = None


class AgentHealth(msgspec.Struct, frozen=True, rename="camel"):
    """Whether an agent lives."""

    id: UUID
    status: str
    healthy: bool
    last_heartbeat: datetime | None
    stale_threshold_seconds: int
    running_tasks: int


def health_of(agent: AgentView) -> AgentHealth:
    """Whether the agent lives, by what is seen of it."""
    return AgentHealth(
        agent.id,
        agent.status,
        agent.status in ("IDLE", "WORKING"),
        agent.last_heartbeat,
        agent.stale_threshold_seconds,
        agent.running_tasks,
    )


class Registry:
    """The agents of one workspace."""

    def __init__(self, core: Core, workspace: UUID) -> None:
        self._core = core
        self._workspace = workspace

    async def page(self, after: str | None, limit: int) -> list[AgentView]:
        """Agents by name, after one of that name."""
        limits.number("limit", limit, 1, limits.MAX_PAGE + 1)
        if after is not None:
            limits.text("cursor", after, limits.MAX_TITLE)
        params = {"workspace": self._workspace, "after": after, "most": limit}
        rows = await self._core.store.fetch(Statement("agent_page", params))
        return [self._view(row) for row in rows]

    async def show(self, agent: UUID) -> AgentView:
        return self._view(await self._row(agent))

    async def profile(self, agent: UUID) -> AgentProfile:
        """What matching knows of the agent; `Forbidden` once it was terminated."""
        row = await self._row(agent)
        if row["status"] == "TERMINATED":
            raise Forbidden("the agent was terminated", "agent_terminated")
        known = _profile(row)
        return msgspec.structs.replace(known, id=row["id"], version=row["version"])

    async def seen(self, agent: UUID) -> bool:
        """Note that the agent lives."""
        return bool(await self._write("agent_seen", agent, now=self._core.now()))

    async def move(self, agent: UUID, status: str) -> None:
        """Give the agent another status; TERMINATED is final."""
        if not await self._write("agent_status", agent, status=status, now=self._core.now()):
            await self._row(agent)
            raise Conflict("the agent was terminated", "agent_terminated")

    async def forget(self, agent: UUID) -> None:
        """Remove an agent that runs nothing."""
        if not await self._write("agent_drop", agent):
            await self._row(agent)
            raise Conflict("the agent still runs tasks; terminate it first")

    async def _row(self, agent: UUID) -> Row:
        params = {"workspace": self._workspace, "id": agent}
        rows = await self._core.store.fetch(Statement("agent", params))
        if not rows:
            raise NotFound(f"no agent {agent}")
        return rows[0]

    async def _write(self, query: str, agent: UUID, **params: Any) -> Sequence[Row]:
        wanted = Statement(query, {"workspace": self._workspace, "id": agent, **params})

        def script() -> Script[Sequence[Row]]:
            rows: Sequence[Row] = yield wanted
            return rows

        return await self._core.store.once(script)

    def _view(self, row: Row) -> AgentView:
        profile = _profile(row)
        threshold = profile.stale_threshold_s or STALE_AFTER_S
        return AgentView(
            id=row["id"],
            name=row["name"],
            status=_status(row, threshold, self._core.now()),
            agent_type=profile.agent_type,
            model=profile.model,
            skills=profile.skills,
            tags=profile.tags,
            task_types=profile.task_types,
            task_tags=profile.task_tags,
            capabilities=profile.capabilities,
            choose_rules=profile.choose_rules,
            runtimes=profile.runtimes,
            accept_commands=profile.accept_commands,
            region=profile.region,
            models=profile.models,
            max_concurrent_tasks=profile.max_concurrent,
            heartbeat_interval_seconds=profile.heartbeat_interval_s,
            stale_threshold_seconds=threshold,
            coordinator_enabled=profile.coordinator_enabled,
            running_tasks=row["running"],
            last_heartbeat=row["seen_at"],
            version=row["version"],
            created_at=row["created_at"],
            updated_at=row["updated_at"],
        )


def _profile(row: Row) -> AgentProfile:
    return msgspec.json.decode(row["profile"], type=AgentProfile)


def _status(row: Row, threshold: int, now: datetime) -> str:
    """What the agent is now: working and stale are seen, the rest is stored."""
    stored: str = row["status"]
    if stored not in ("IDLE", "WORKING"):
        return stored
    seen = row["seen_at"]
    if row["running"] and seen is not None and (now - seen).total_seconds() > threshold:
        return "STALE"
    return "WORKING" if row["running"] else "IDLE"
