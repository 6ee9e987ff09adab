"""Agent registry: creates, changes, lists and terminates agents; heartbeats, health samples."""

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
from tenuto.model.agents.messages import MAX_WAITING
from tenuto.model.errors import Conflict, NotFound
from tenuto.store.protocol import Row, Script, Statement

MAX_BATCH = 500
SAMPLE_EVERY_S = 10
"""Seconds between two samples of an agent's health."""
SAMPLES_KEPT = timedelta(hours=1)
MAX_PRUNED = 20_000
"""Health samples deleted per run: more than 1,000 agents write between two runs."""
DEQUEUED_KEPT = timedelta(days=7)
"""Age at which a dequeued message is deleted. Until then, its client id still deduplicates."""
MAX_MEASURE = 1e12


class AgentView(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """An agent as the API and the CLI show it."""

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
    """A token to work as the agent. The text is shown once, when it is created."""

    id: UUID
    token: str
    expires_at: datetime | None = None


class HealthSample(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """One health report of an agent. `at` is set when it is read from the store."""

    status: str = "healthy"
    current_task_id: UUID | None = None
    progress_percent: float | None = None
    current_step: str | None = None
    memory_mb: float | None = None
    cpu_percent: float | None = None
    at: datetime | None = None


class AgentHealth(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """An agent's status and its health samples, newest first. `current` is the newest sample."""

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
        """Returns at most `limit` agents in the order of their names, after the name `after`."""
        bounds.check_number("limit", limit, 1, bounds.MAX_PAGE + 1)
        if after is not None:
            bounds.check_text("cursor", after, bounds.MAX_TITLE)
        params = {"workspace": self._workspace, "after": after, "most": limit}
        rows = await self._core.store.fetch(Statement("agent_page", params))
        return [view_of(row, self._core.now()) for row in rows]

    async def show(self, agent: UUID) -> AgentView:
        """Returns one agent; raises `NotFound`."""
        return view_of(await self._require_row(agent), self._core.now())

    async def profile(self, agent: UUID) -> AgentProfile:
        """Returns the profile for matching; `NotFound`, or `Forbidden` if it is terminated."""
        row = await self._require_row(agent)
        if row["status"] == "TERMINATED":
            raise lifecycle.claim_refusal("TERMINATED")
        return profile_of(row)

    async def profile_for_claim(self, agent: UUID) -> AgentProfile:
        """Returns the profile for a claim; `NotFound`, or `Forbidden` if draining or terminated."""
        row = await self._require_row(agent)
        if row["status"] in lifecycle.ENDING:
            raise lifecycle.claim_refusal(row["status"])
        return profile_of(row)

    async def put(
        self, profile: AgentProfile, *, managed: bool, by_id: bool = False
    ) -> AgentProfile:
        """Creates an agent, or merges into the one with this name; returns the stored profile.

        `managed` means that a user sends the profile: a worker cannot override these settings
        later. A worker's profile counts as a heartbeat. With `by_id`, raises `Conflict`
        (`name_taken`) if the agent with this name has another id than the profile.
        """
        if profile.workspace != self._workspace:
            raise NotFound(f"no workspace {profile.workspace}, or no access to it")
        requested = lifecycle.validate_profile(
            profile if managed else profile.with_supported_work()
        )

        def script() -> Script[AgentProfile | None]:
            by_name = {"workspace": self._workspace, "name": requested.name}
            if managed:
                yield Statement("lanes_version_increment", {"workspace": self._workspace})
            rows = yield Statement("agent_by_name", by_name)
            new, seen_version = requested, 0
            if rows and by_id and rows[0]["id"] != requested.id:
                text = (
                    f"agent name {requested.name!r} is taken by another agent; choose another name"
                )
                raise Conflict(text, "name_taken")
            if rows:
                new, seen_version = (
                    self._merge_profile(requested, rows[0], managed=managed),
                    rows[0]["version"],
                )
            now = self._core.now()
            params = {
                "id": new.id,
                "profile": bounds.to_json_text("profile", msgspec.to_builtins(new)),
                "max_concurrent": new.max_concurrent,
                "managed": managed,
            }
            rows = yield Statement(
                "agent_put", by_name | params | {"seen": seen_version, "now": now}
            )
            if not rows:
                return None
            if not managed:
                heartbeat = {"workspace": self._workspace, "names": [requested.name], "now": now}
                yield Statement("agents_alive", heartbeat | {"stale_s": STALE_AFTER_S})
            return msgspec.structs.replace(new, version=rows[0]["version"])

        while (stored := await self._core.store.transact(script)) is None:
            pass  # another process stored this name in between: read it again and merge
        return stored

    def _merge_profile(self, requested: AgentProfile, row: Row, *, managed: bool) -> AgentProfile:
        """Merges a new profile into the stored one, which keeps its id; returns the result."""
        stored, new = _stored_profile(row), requested
        if managed:
            new = lifecycle.merge_user_profile(stored, requested, managed=bool(row["managed"]))
        elif row["managed"]:
            new = lifecycle.merge_worker_profile(stored, requested)
        return msgspec.structs.replace(new, id=row["id"])

    async def record_heartbeat(self, agent: UUID, sample: HealthSample | None = None) -> int:
        """Stores a heartbeat and, each 10 s, a sample; returns how many messages wait; unknown: 0.

        A stale agent is no longer stale.
        An impossible measurement is left out, not refused: an agent must not lose a lease over it.
        """
        params = {
            "workspace": self._workspace,
            "id": agent,
            "now": self._core.now(),
            "stale_s": STALE_AFTER_S,
            "most": MAX_WAITING,
            "every": SAMPLE_EVERY_S,
        }
        samples = [] if sample is None else [_sample_row(sample)]

        def script() -> Script[Sequence[Row]]:
            rows: Sequence[Row] = yield Statement("agent_heartbeat", params, {"felt": samples})
            return rows

        rows = await self._core.store.transact_one(script)
        return rows[0]["messages"] if rows else 0

    async def health(self, agent: UUID, limit: int = 60) -> AgentHealth:
        """Returns status and at most `limit` samples of the last hour. Raises `NotFound`."""
        bounds.check_number("limit", limit, 1, bounds.MAX_PAGE)
        view = await self.show(agent)
        params = {"workspace": self._workspace, "id": agent, "most": limit}
        rows = await self._core.store.fetch(Statement("agent_health", params))
        history = [_health_sample(row) for row in rows]
        return AgentHealth(
            id=view.id,
            status=view.status,
            healthy=view.status in lifecycle.ALIVE,
            last_heartbeat=view.last_heartbeat,
            stale_threshold_seconds=view.stale_threshold_seconds,
            running_tasks=view.running_tasks,
            current=history[0] if history else None,
            history=history,
        )

    async def drain(self, agent: UUID, reason: str | None, actor: str | None) -> None:
        """Lets an agent claim no more; TERMINATED after its last task. `NotFound`, `Conflict`."""
        bounds.check_text("reason", reason or "", bounds.MAX_ERROR)
        data = None if reason is None else msgspec.json.encode({"reason": reason}).decode()

        def script() -> Script[None]:
            # Lock order: workspace (for its lanes version), then agent, as in claims.
            yield Statement("lanes_version_increment", {"workspace": self._workspace})
            rows = yield Statement("agent_locked", {"workspace": self._workspace, "id": agent})
            if not rows:
                raise NotFound(f"no agent {agent}")
            if rows[0]["status"] == "TERMINATED":
                text = f"agent {agent} is already terminated; delete it to use its name again"
                raise Conflict(text, "agent_terminated")
            now = self._core.now()
            transition = lifecycle.drain_or_terminate(rows[0]["running"], now)
            if transition.status != rows[0]["status"]:
                params = {"now": now, "actor": actor}
                yield Statement(
                    "agents_set_status",
                    params,
                    {"moved": [_transition_row(rows[0], transition, data)]},
                )

        await self._core.store.transact(script)

    async def delete(self, agent: UUID) -> None:
        """Deletes an agent with its messages; `NotFound`, or `Conflict` while it runs tasks."""
        if not await self._write("agent_delete", agent):
            await self._require_row(agent)
            raise Conflict(f"agent {agent} still runs tasks; terminate it first")

    async def _require_row(self, agent: UUID) -> Row:
        """Returns the agent's row; raises `NotFound`."""
        params = {"workspace": self._workspace, "id": agent}
        rows = await self._core.store.fetch(Statement("agent", params))
        if not rows:
            raise NotFound(f"no agent {agent}")
        return rows[0]

    async def _write(self, query: str, agent: UUID, **params: Any) -> Sequence[Row]:
        """Runs a query for one agent in a transaction; returns its rows."""
        statement = Statement(query, {"workspace": self._workspace, "id": agent, **params})

        def script() -> Script[Sequence[Row]]:
            rows: Sequence[Row] = yield statement
            return rows

        return await self._core.store.transact_one(script)


class AgentMaintenance:
    """The coordinator's duties for the agents of all workspaces."""

    def __init__(self, core: Core) -> None:
        self._core = core

    async def mark_stale_once(self, actor: str) -> int:
        """Marks agents without heartbeats as stale and ends drained agents; returns how many."""
        now = self._core.now()

        def script() -> Script[int]:
            rows = yield Statement("agents_due", {"now": now, "most": MAX_BATCH})
            transitions = []
            for row in rows:
                transition = lifecycle.transition_when_due(
                    row["status"], row["running"], now, lost_tasks=bool(row["lost"])
                )
                transitions.append(_transition_row(row, transition, _last_heartbeat_json(row, now)))
            if transitions:
                yield Statement(
                    "agents_set_status", {"now": now, "actor": actor}, {"moved": transitions}
                )
            for workspace in sorted(
                {changed[1] for changed in transitions if changed[3] == "TERMINATED"}
            ):
                yield Statement("lanes_version_increment", {"workspace": workspace})
            return len(transitions)

        return await self._core.store.transact(script)

    async def prune_once(self) -> int:
        """Deletes old health samples and dequeued messages; returns how many rows."""
        now = self._core.now()
        statements = [
            Statement("agent_health_prune", {"before": now - SAMPLES_KEPT, "most": MAX_PRUNED}),
            Statement("messages_prune", {"before": now - DEQUEUED_KEPT, "most": MAX_BATCH}),
        ]

        def script() -> Script[int]:
            deleted = 0
            for statement in statements:
                deleted += len((yield statement))
            return deleted

        return await self._core.store.transact(script)


def _last_heartbeat_json(row: Row, now: datetime) -> str | None:
    """Returns event data on the agent's last heartbeat; `None` if it never sent one."""
    seen_at = row["seen_at"]
    if seen_at is None:
        return None
    data = {"lastHeartbeat": seen_at, "silentSeconds": int((now - seen_at).total_seconds())}
    return msgspec.json.encode(data | {"running": row["running"]}).decode()


def _transition_row(row: Row, transition: AgentTransition, data: str | None) -> tuple[Any, ...]:
    """Returns a row for the query `agents_set_status`.

    The version grows with each status change, and numbers the event of that change.
    """
    version = row["version"] + (1 if transition.kind is not None else 0)
    return (
        row["id"],
        row["workspace"],
        row["name"],
        transition.status,
        version,
        transition.due_at,
        transition.kind,
        transition.level,
        data,
    )


def _sample_row(sample: HealthSample) -> tuple[Any, ...]:
    """Returns the sample as a row for `agent_heartbeat`, shortened, without impossible values."""
    return (
        bounds.make_storable(sample.status, bounds.MAX_NAME),
        sample.current_task_id,
        _valid_measurement(sample.progress_percent, 100),
        bounds.make_storable(sample.current_step or "", bounds.MAX_TITLE) or None,
        _valid_measurement(sample.memory_mb, MAX_MEASURE),
        _valid_measurement(sample.cpu_percent, MAX_MEASURE),
    )


def _valid_measurement(value: float | None, maximum: float) -> float | None:
    """Returns the value if it is between 0 and the maximum, otherwise `None`."""
    return value if value is not None and 0 <= value <= maximum else None


def claim_blockers(row: Row, now: datetime) -> list[str]:
    """Returns the reasons why an agent can claim no task at all now; empty if it can."""
    seen_at = row["seen_at"]
    return lifecycle.claim_blockers(
        lifecycle.current_status(row["status"], row["running"], row["due_at"], now),
        row["running"],
        row["max_concurrent"],
        row["kills"],
        None if seen_at is None else (now - seen_at).total_seconds(),
    )


def _health_sample(row: Row) -> HealthSample:
    """Returns the health sample in a row."""
    return HealthSample(
        status=row["status"],
        current_task_id=row["task"],
        progress_percent=row["progress_percent"],
        current_step=row["current_step"],
        memory_mb=row["memory_mb"],
        cpu_percent=row["cpu_percent"],
        at=row["at"],
    )


def _stored_profile(row: Row) -> AgentProfile:
    """Returns the agent's profile as stored in its row."""
    return msgspec.json.decode(row["profile"], type=AgentProfile)


def profile_of(row: Row) -> AgentProfile:
    """Returns the agent's profile for matching, with its supported work, from its row."""
    stored = _stored_profile(row)
    means = lifecycle.effective_support(stored)
    return msgspec.structs.replace(stored, id=row["id"], version=row["version"], means=means)


def view_of(row: Row, now: datetime) -> AgentView:
    """Returns the response object for an agent's row."""
    profile = _stored_profile(row)
    return AgentView(
        id=row["id"],
        name=row["name"],
        status=lifecycle.current_status(row["status"], row["running"], row["due_at"], now),
        agent_type=profile.agent_type,
        model=profile.model,
        account=profile.account,
        skills=profile.skills,
        tags=profile.tags,
        task_types=lifecycle.claimable_types(profile),
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
