"""Registry: the agents of a workspace as people and coordinators see them."""

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

import msgspec

from tenuto.engine.core import Core
from tenuto.model import bounds
from tenuto.model.agents import lifecycle
from tenuto.model.agents.lifecycle import STALE_AFTER_S, AgentTransition
from tenuto.model.agents.matching import AgentProfile
from tenuto.model.agents.messages import MOST_WAITING
from tenuto.model.errors import Conflict, NotFound
from tenuto.store.protocol import Row, Script, Statement

BATCH = 500
SAMPLE_EVERY_S = 10
"""Seconds between two samples of an agent's health."""
SAMPLES_KEPT = timedelta(hours=1)
MOST_PRUNED = 20_000
"""Samples removed at once: more than a thousand agents make between two prunings."""
TAKEN_KEPT = timedelta(days=7)
"""How long a taken message is kept; its client id is known for as long."""
MAX_MEASURE = 1e12


class AgentView(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """An agent as people see it."""

    id: UUID
    name: str
    status: str
    agent_type: str | None
    model: str | None
    account: str | None = None
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
    gateway: str | None
    running_tasks: int
    last_heartbeat: datetime | None
    managed: bool = False
    version: int
    created_at: datetime
    updated_at: datetime


class AgentToken(msgspec.Struct, frozen=True, rename="camel"):
    """A key with which to work as the agent; shown once."""

    id: UUID
    token: str
    expires_at: datetime | None = None


class HealthSample(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """How an agent said it was."""

    status: str = "healthy"
    current_task_id: UUID | None = None
    progress_percent: float | None = None
    current_step: str | None = None
    memory_mb: float | None = None
    cpu_percent: float | None = None
    at: datetime | None = None


class AgentHealth(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Whether an agent lives, and how it says it was, newest first."""

    id: UUID
    status: str
    healthy: bool
    last_heartbeat: datetime | None
    stale_threshold_seconds: int
    running_tasks: int
    current: HealthSample | None = None
    history: list[HealthSample] = []


class AgentRegistry:
    """The agents of one workspace."""

    def __init__(self, core: Core, workspace: UUID) -> None:
        self._core = core
        self._workspace = workspace

    async def page(self, after: str | None, limit: int) -> list[AgentView]:
        """Agents by name, after one of that name."""
        bounds.number("limit", limit, 1, bounds.MAX_PAGE + 1)
        if after is not None:
            bounds.text("cursor", after, bounds.MAX_TITLE)
        params = {"workspace": self._workspace, "after": after, "most": limit}
        rows = await self._core.store.fetch(Statement("agent_page", params))
        return [view_of(row, self._core.now()) for row in rows]

    async def show(self, agent: UUID) -> AgentView:
        """One agent."""
        return view_of(await self._row(agent), self._core.now())

    async def profile(self, agent: UUID) -> AgentProfile:
        """What matching knows of the agent; `Forbidden` once it was terminated."""
        row = await self._row(agent)
        if row["status"] == "TERMINATED":
            raise lifecycle.refusal("TERMINATED")
        return profile_of(row)

    async def profile_for_claim(self, agent: UUID) -> AgentProfile:
        """What matching knows of the agent; `Forbidden` when it is to take no more tasks."""
        row = await self._row(agent)
        if row["status"] in lifecycle.ENDING:
            raise lifecycle.refusal(row["status"])
        return profile_of(row)

    async def put(
        self, wanted: AgentProfile, *, managed: bool, by_id: bool = False
    ) -> AgentProfile:
        """Make an agent known by its name, or change it; answers it as it is kept.

        What people have said of an agent (`managed`) holds, whatever its worker brings. `by_id`
        means the agent of that id: `Conflict` when the name is another's.
        """
        if wanted.workspace != self._workspace:
            raise NotFound(f"no workspace {wanted.workspace}")
        asked = lifecycle.checked(wanted if managed else wanted.hosted())

        def script() -> Script[AgentProfile | None]:
            named = {"workspace": self._workspace, "name": asked.name}
            if managed:
                yield Statement("lanes_moved", {"workspace": self._workspace})
            rows = yield Statement("agent_named", named)
            new, seen = asked, 0
            if rows and by_id and rows[0]["id"] != asked.id:
                raise Conflict(f"another agent is called {asked.name!r}", "name_taken")
            if rows:
                new, seen = self._renewed(asked, rows[0], managed=managed), rows[0]["version"]
            now = self._core.now()
            params = {
                "id": new.id,
                "profile": bounds.json_text("profile", msgspec.to_builtins(new)),
                "max_concurrent": new.max_concurrent,
                "managed": managed,
            }
            rows = yield Statement("agent_put", named | params | {"seen": seen, "now": now})
            if not rows:
                return None
            if not managed:
                heard = {"workspace": self._workspace, "names": [asked.name], "now": now}
                yield Statement("agents_heard", heard | {"stale_s": STALE_AFTER_S})
            return msgspec.structs.replace(new, version=rows[0]["version"])

        while (known := await self._core.store.transact(script)) is None:
            pass  # somebody else made the name known at the same moment: look at what they said
        return known

    def _renewed(self, asked: AgentProfile, row: Row, *, managed: bool) -> AgentProfile:
        """What is to be known of an agent that there is, under the id that it has."""
        kept, new = _stored(row), asked
        if managed:
            new = lifecycle.merge_user_profile(kept, asked, managed=bool(row["managed"]))
        elif row["managed"]:
            new = lifecycle.merge_worker_profile(kept, asked)
        return msgspec.structs.replace(new, id=row["id"])

    async def record_heartbeat(self, agent: UUID, said: HealthSample | None = None) -> int:
        """Note that the agent lives, and how it says it is; how many messages wait for it.

        A measure that cannot be is left out: nobody loses a lease over it.
        """
        params = {
            "workspace": self._workspace,
            "id": agent,
            "now": self._core.now(),
            "stale_s": STALE_AFTER_S,
            "most": MOST_WAITING,
            "every": SAMPLE_EVERY_S,
        }
        felt = [] if said is None else [_sample(said)]

        def script() -> Script[Sequence[Row]]:
            rows: Sequence[Row] = yield Statement("agent_seen", params, {"felt": felt})
            return rows

        rows = await self._core.store.once(script)
        return rows[0]["messages"] if rows else 0

    async def health(self, agent: UUID, limit: int = 60) -> AgentHealth:
        """Whether the agent lives, and how it said it was within the last hour."""
        bounds.number("limit", limit, 1, bounds.MAX_PAGE)
        view = await self.show(agent)
        params = {"workspace": self._workspace, "id": agent, "most": limit}
        rows = await self._core.store.fetch(Statement("agent_health", params))
        history = [_health_sample(row) for row in rows]
        return AgentHealth(
            id=view.id,
            status=view.status,
            healthy=view.status in lifecycle.LIVING,
            last_heartbeat=view.last_heartbeat,
            stale_threshold_seconds=view.stale_threshold_seconds,
            running_tasks=view.running_tasks,
            current=history[0] if history else None,
            history=history,
        )

    async def end(self, agent: UUID, reason: str | None, actor: str | None) -> None:
        """Let the agent take no more tasks; it is TERMINATED when the last of them has ended."""
        bounds.text("reason", reason or "", bounds.MAX_ERROR)
        data = None if reason is None else msgspec.json.encode({"reason": reason}).decode()

        def script() -> Script[None]:
            # The lanes first, as claims lock the workspace before the agent.
            yield Statement("lanes_moved", {"workspace": self._workspace})
            rows = yield Statement("agent_held", {"workspace": self._workspace, "id": agent})
            if not rows:
                raise NotFound(f"no agent {agent}")
            if rows[0]["status"] == "TERMINATED":
                raise Conflict("the agent was terminated", "agent_terminated")
            now = self._core.now()
            verdict = lifecycle.ended(rows[0]["running"], now)
            if verdict.status != rows[0]["status"]:
                params = {"now": now, "actor": actor}
                yield Statement("agents_moved", params, {"moved": [_move(rows[0], verdict, data)]})

        await self._core.store.transact(script)

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


class AgentMaintenance:
    """What a coordinator does for agents, over all workspaces."""

    def __init__(self, core: Core) -> None:
        self._core = core

    async def stale_once(self, actor: str) -> int:
        """Note which agents fell silent, and end those that were to end; answers how many moved."""
        now = self._core.now()

        def script() -> Script[int]:
            rows = yield Statement("agents_due", {"now": now, "most": BATCH})
            moves = []
            for row in rows:
                verdict = lifecycle.on_due(
                    row["status"], row["running"], now, lost=bool(row["lost"])
                )
                moves.append(_move(row, verdict, _silence(row, now)))
            if moves:
                yield Statement("agents_moved", {"now": now, "actor": actor}, {"moved": moves})
            for workspace in sorted({move[1] for move in moves if move[3] == "TERMINATED"}):
                yield Statement("lanes_moved", {"workspace": workspace})
            return len(moves)

        return await self._core.store.transact(script)

    async def prune_once(self) -> int:
        """Remove what agents said of themselves, and messages that they took, past their age."""
        now = self._core.now()
        statements = [
            Statement("agent_health_prune", {"before": now - SAMPLES_KEPT, "most": MOST_PRUNED}),
            Statement("messages_prune", {"before": now - TAKEN_KEPT, "most": BATCH}),
        ]

        def script() -> Script[int]:
            n = 0
            for statement in statements:
                n += len((yield statement))
            return n

        return await self._core.store.transact(script)


def _silence(row: Row, now: datetime) -> str | None:
    seen = row["seen_at"]
    if seen is None:
        return None
    said = {"lastHeartbeat": seen, "silentSeconds": int((now - seen).total_seconds())}
    return msgspec.json.encode(said | {"running": row["running"]}).decode()


def _move(row: Row, verdict: AgentTransition, data: str | None) -> tuple[Any, ...]:
    """A row for `agents_moved`; the version moves with the status, and is its event's number."""
    version = row["version"] + (1 if verdict.kind is not None else 0)
    return (
        row["id"],
        row["workspace"],
        row["name"],
        verdict.status,
        version,
        verdict.due_at,
        verdict.kind,
        verdict.level,
        data,
    )


def _sample(said: HealthSample) -> tuple[Any, ...]:
    return (
        bounds.clean(said.status, bounds.MAX_NAME),
        said.current_task_id,
        _measure(said.progress_percent, 100),
        bounds.clean(said.current_step or "", bounds.MAX_TITLE) or None,
        _measure(said.memory_mb, MAX_MEASURE),
        _measure(said.cpu_percent, MAX_MEASURE),
    )


def _measure(value: float | None, most: float) -> float | None:
    return value if value is not None and 0 <= value <= most else None


def claim_blockers(row: Row, now: datetime) -> list[str]:
    """Why an agent takes nothing now, whatever it could take."""
    seen = row["seen_at"]
    return lifecycle.claim_blockers(
        lifecycle.current_status(row["status"], row["running"], row["due_at"], now),
        row["running"],
        row["max_concurrent"],
        row["kills"],
        None if seen is None else (now - seen).total_seconds(),
    )


def _health_sample(row: Row) -> HealthSample:
    return HealthSample(
        status=row["status"],
        current_task_id=row["task"],
        progress_percent=row["progress_percent"],
        current_step=row["current_step"],
        memory_mb=row["memory_mb"],
        cpu_percent=row["cpu_percent"],
        at=row["at"],
    )


def _stored(row: Row) -> AgentProfile:
    return msgspec.json.decode(row["profile"], type=AgentProfile)


def profile_of(row: Row) -> AgentProfile:
    """What matching knows of an agent."""
    kept = _stored(row)
    means = lifecycle.means_of(kept)
    return msgspec.structs.replace(kept, id=row["id"], version=row["version"], means=means)


def view_of(row: Row, now: datetime) -> AgentView:
    """An agent as people see it."""
    profile = _stored(row)
    return AgentView(
        id=row["id"],
        name=row["name"],
        status=lifecycle.current_status(row["status"], row["running"], row["due_at"], now),
        agent_type=profile.agent_type,
        model=profile.model,
        account=profile.account,
        skills=profile.skills,
        tags=profile.tags,
        task_types=lifecycle.types_of(profile),
        task_tags=profile.task_tags,
        capabilities=profile.capabilities,
        choose_rules=profile.choose_rules,
        runtimes=profile.runtimes,
        accept_commands=profile.accept_commands,
        region=profile.region,
        models=profile.models,
        max_concurrent_tasks=profile.max_concurrent,
        heartbeat_interval_seconds=profile.heartbeat_interval_s,
        stale_threshold_seconds=profile.stale_threshold_s or STALE_AFTER_S,
        coordinator_enabled=profile.coordinator_enabled,
        gateway=profile.gateway,
        running_tasks=row["running"],
        last_heartbeat=row["seen_at"],
        managed=bool(row["managed"]),
        version=row["version"],
        created_at=row["created_at"],
        updated_at=row["updated_at"],
    )
