"""Caches the lanes of each workspace and computes which are open for an agent."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from datetime import datetime, timedelta
from functools import partial
from uuid import UUID

import msgspec

from tenuto.model.agents.lifecycle import ENDING, claim_refusal, merge_worker_profile
from tenuto.model.agents.matching import (
    AgentProfile,
    Requirements,
    SupportedWork,
    is_eligible,
    lane_id,
)
from tenuto.model.bounds import MAX_LANES
from tenuto.model.errors import Conflict, Invalid, NotFound
from tenuto.model.limits.complexity import DEFAULT, ComplexityRules
from tenuto.model.limits.pauses import ClaimPause, latest_pause_end
from tenuto.model.limits.quota import Quota, effective_quota, parse_quota
from tenuto.model.limits.rate_limits import LimitNames, RateLimit, applicable_limit_names
from tenuto.store.protocol import Row, Script, Statement, Store

log = logging.getLogger("tenuto.engine")

_MAX_CACHED_AGENTS = 10_000
"""Cached agents per workspace; the cache key is agent id, version and supported work."""
_CONFIRMED_FOR = timedelta(hours=1)


class Lane(msgspec.Struct, frozen=True):
    """Tasks with equal requirements. While `closed_until` is in the future, none is claimed."""

    id: int
    requirements: Requirements
    closed_until: datetime | None
    closed_why: str | None


class OpenLanes(msgspec.Struct, frozen=True):
    """The lanes an agent can claim from now, and the lanes version of the read."""

    version: int
    free: list[int]
    limited: dict[LimitNames, list[int]]
    """Lanes whose tasks count against rate limits, by the names of these limits."""
    agent: AgentProfile
    """The agent's profile, with the settings of users applied if there are any."""

    @property
    def lanes(self) -> list[int]:
        """Returns all open lanes, rate limited or not."""
        return [*self.free, *(lane for lanes in self.limited.values() for lane in lanes)]


_TimedLanes = list[tuple[int, datetime | None]]
"""Lane ids, each with the time until which it is closed."""


class _WorkspaceLanes(msgspec.Struct):
    """What is cached of one workspace, read at the lanes version `version`."""

    version: int
    lanes: list[Lane]
    pauses: list[ClaimPause]
    limits: list[RateLimit]
    quota: Quota
    """The workspace's quota, within the operator's ceiling."""
    complexity: ComplexityRules
    agents: dict[UUID, Row]
    """Rows of agents that users manage, and of agents that are draining or terminated."""
    lanes_by_agent: dict[tuple[UUID, int, SupportedWork | None], dict[LimitNames, _TimedLanes]] = {}
    exhausted_until: dict[str, datetime] = {}
    """Rate limits that were found used up, and the time until which they are."""


class LaneCache:
    """Caches the lanes of each workspace; reloads when `lanes_version` changes."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.ceiling = Quota()
        """The quota that no workspace can exceed, set by the operator."""
        self._confirmed_at: dict[int, datetime] = {}
        self._by_workspace: dict[UUID, _WorkspaceLanes] = {}
        self._ids: dict[Requirements, int] = {}
        self._ids_by_type: dict[tuple[int, str], int] = {}
        """Lane ids by workspace (as an integer) and task type; they require nothing else."""
        self._running_calls: dict[UUID | None, asyncio.Event] = {}

    async def ensure(self, requested: set[Requirements]) -> dict[Requirements, int]:
        """Returns lane ids for these requirements; creates missing ones. `Invalid`: too many."""
        now = self._store.clock.now()
        while missing := [needs for needs in requested if not self.is_confirmed(needs, now)]:
            await self._share_one_call(None, partial(self._create_missing, missing, now))
        return {needs: self._ids[needs] for needs in requested}

    def lane_by_type(self, workspace: UUID, task_type: str, now: datetime) -> int | None:
        """Returns the id of the lane of tasks that require only a type; `None`: read the store.

        The store must also be read where the workspace has a quota of pending tasks.
        """
        key = (workspace.int, task_type)
        lane = self._ids_by_type.get(key)
        if lane is None:
            lane = self._ids.get(Requirements(workspace=workspace, task_type=task_type))
            if lane is None:
                return None
            self._ids_by_type[key] = lane
        cached = self._by_workspace.get(workspace)
        if cached is None or cached.complexity.policy == "require":
            return None
        if cached.quota.pending is not None:
            return None
        return lane if self._is_recent(lane, now) else None

    async def _share_one_call(
        self, key: UUID | None, work: Callable[[], Awaitable[object]]
    ) -> None:
        """Runs the work; if a call with this key is running already, only waits for that call."""
        if key in self._running_calls:
            await self._running_calls[key].wait()
            return
        self._running_calls[key] = done = asyncio.Event()
        try:
            await work()
        finally:
            del self._running_calls[key]
            done.set()

    def is_confirmed(self, needs: Requirements, now: datetime) -> bool:
        """True if the lane was confirmed so recently that it cannot have been pruned since."""
        lane = self._ids.get(needs)
        return lane is not None and self._is_recent(lane, now)

    def _is_recent(self, lane: int, now: datetime) -> bool:
        """True if the lane was confirmed within `_CONFIRMED_FOR`."""
        return now - self._confirmed_at[lane] < _CONFIRMED_FOR

    def mark_used(self, used: Iterable[Requirements], now: datetime) -> None:
        """Marks cached lanes as confirmed now. Call after the transaction with them committed."""
        for needs in used:
            lane, cached = lane_id(needs.key()), self._by_workspace.get(needs.workspace)
            if cached is not None and any(existing.id == lane for existing in cached.lanes):
                self._ids[needs] = lane
                self._confirmed_at[lane] = now

    async def _create_missing(self, missing: list[Requirements], now: datetime) -> None:
        """Creates or confirms lanes in the store and caches them. Raises `NotFound`, `Invalid`."""
        rows = sorted((lane_id(needs.key()), needs.workspace, needs.key()) for needs in missing)
        workspaces = sorted({workspace for _, workspace, _ in rows})
        for workspace in workspaces:
            loaded = await self._load(workspace)
            if loaded.version == 0:
                raise NotFound(f"no workspace {workspace}")
            _check_lane_count(
                loaded, {lane for lane, lane_workspace, _ in rows if lane_workspace == workspace}
            )

        def script() -> Script[None]:
            yield Statement("lane_touch", {"now": now, "most": MAX_LANES}, {"wanted": rows})

        await self._store.transact_one(script)
        existing: set[int] = set()
        for workspace in workspaces:
            existing |= {lane.id for lane in (await self._load(workspace)).lanes}
        if absent := [lane for lane, _, _ in rows if lane not in existing]:
            raise (
                _too_many_lanes_error()
                if len(existing) >= MAX_LANES
                else _corrupt_lane_error(absent[0])
            )
        for needs in missing:
            lane = self._ids[needs] = lane_id(needs.key())
            self._confirmed_at[lane] = now

    async def open_lanes(self, agent: AgentProfile, now: datetime) -> OpenLanes:
        """Returns an agent's open lanes by the cache; `Forbidden` if draining or terminated."""
        cached = await self._cached_or_load(agent.workspace)
        if agent.id in cached.agents:
            if cached.agents[agent.id]["status"] in ENDING and await self.reload_if_changed(
                agent.workspace
            ):
                return await self.open_lanes(agent, now)
            agent = _apply_user_profile(agent, cached.agents[agent.id])
        key = (agent.id, agent.version, agent.means)
        own_lanes = cached.lanes_by_agent.get(key)
        if own_lanes is None:
            if len(cached.lanes_by_agent) >= _MAX_CACHED_AGENTS:
                cached.lanes_by_agent.clear()
            own_lanes = cached.lanes_by_agent[key] = _lanes_by_limits(agent, cached)
        free = _open_now(own_lanes[()], now)
        limited = {
            limit_names: open_lanes
            for limit_names, lanes in own_lanes.items()
            if limit_names
            and all(cached.exhausted_until.get(name, now) <= now for name in limit_names)
            and (open_lanes := _open_now(lanes, now))
        }
        return OpenLanes(cached.version, free, limited, agent)

    def exclude_limited(
        self, workspace: UUID, version: int, exhausted: dict[str, datetime]
    ) -> None:
        """Excludes lanes with used-up limits until the given times, if `version` is still cached.

        This is cached in this process only. A limit closes a lane only for agents with a certain
        model or account; the lane's row would close it for all agents. Other processes read the
        limit from the store. A changed limit changes `lanes_version`, which clears this cache.
        """
        cached = self._by_workspace.get(workspace)
        if cached is not None and cached.version == version:
            cached.exhausted_until.update(exhausted)

    async def complexity(self, workspace: UUID) -> ComplexityRules:
        """Returns the workspace's rules for complex tasks, from the cache of any age."""
        return (await self._cached_or_load(workspace)).complexity

    def max_running(self, workspace: UUID) -> int | None:
        """Returns the cached limit of tasks that run at once in the workspace; `None`: no limit."""
        cached = self._by_workspace.get(workspace)
        return (self.ceiling if cached is None else cached.quota).running

    async def quota(self, workspace: UUID) -> Quota:
        """Returns the workspace's quota, from the cache of any age."""
        return (await self._cached_or_load(workspace)).quota

    async def reload_if_changed(self, workspace: UUID) -> bool:
        """Reloads the lanes if they changed since they were loaded; true if it reloaded them."""
        cached = self._by_workspace.get(workspace)
        rows = await self._store.fetch(Statement("lanes_version", {"workspace": workspace}))
        if not rows or (cached is not None and rows[0]["lanes_version"] == cached.version):
            return False
        await self._load(workspace)
        return True

    async def all(self, workspace: UUID) -> list[Lane]:
        """Reads the workspace's lanes from the store, caches and returns them."""
        return (await self._load(workspace)).lanes

    async def pauses(self, workspace: UUID) -> list[ClaimPause]:
        """Returns the workspace's pauses, including ended ones; reloads them if they changed."""
        await self.reload_if_changed(workspace)
        return (await self._cached_or_load(workspace)).pauses

    async def _cached_or_load(self, workspace: UUID) -> _WorkspaceLanes:
        """Returns the cached lanes of any age; loads them if there are none."""
        while (cached := self._by_workspace.get(workspace)) is None:
            await self._share_one_call(workspace, partial(self._load, workspace))
        return cached

    async def _load(self, workspace: UUID) -> _WorkspaceLanes:
        """Reads, caches and returns lanes, pauses, limits, agents; version 0: unknown workspace."""
        # The version first: if a lane is added in between, the cache looks outdated, never newer.
        versions = await self._store.fetch(Statement("lanes_version", {"workspace": workspace}))
        rows = await self._store.fetch(Statement("lanes", {"workspace": workspace}))
        pauses = await self._store.fetch(Statement("pauses", {"workspace": workspace}))
        limits = await self._store.fetch(Statement("rate_limits", {"workspace": workspace}))
        agents = await self._store.fetch(Statement("agent_profiles", {"workspace": workspace}))
        lanes = [lane for row in rows if (lane := _lane_of(row)) is not None]
        version = versions[0]["lanes_version"] if versions else 0
        quota = effective_quota(
            parse_quota(versions[0]["quota"] if versions else None), self.ceiling
        )
        text = versions[0]["complexity"] if versions else None
        rules = DEFAULT if text is None else msgspec.json.decode(text, type=ComplexityRules)
        loaded = _WorkspaceLanes(
            version,
            lanes,
            [_pause_of(row) for row in pauses],
            [limit_of(row) for row in limits],
            quota,
            rules,
            {row["id"]: row for row in agents},
        )
        self._by_workspace[workspace] = loaded
        return loaded


def _lane_of(row: Row) -> Lane | None:
    """Returns the lane of a row; logs a warning and returns `None` for an invalid row."""
    try:
        needs = msgspec.json.decode(row["key"], type=Requirements)
    except (msgspec.MsgspecError, TypeError):
        log.warning("%s; its tasks are not claimed", _corrupt_lane_error(row["lane"]))
        return None
    return Lane(row["lane"], needs, row["closed_until"], row["closed_why"])


def _lanes_by_limits(agent: AgentProfile, loaded: _WorkspaceLanes) -> dict[LimitNames, _TimedLanes]:
    """Returns the agent's lanes, also closed ones, by their rate limits; the key () is for none."""
    by_limits: dict[LimitNames, _TimedLanes] = {(): []}
    for lane in loaded.lanes:
        if is_eligible(agent, lane.requirements):
            model = lane.requirements.model or agent.model
            limit_names = applicable_limit_names(loaded.limits, model, agent.account)
            paused_until = latest_pause_end(loaded.pauses, agent.name, lane.id, lane.requirements)
            times = [time for time in (lane.closed_until, paused_until) if time is not None]
            by_limits.setdefault(limit_names, []).append((lane.id, max(times, default=None)))
    return by_limits


def _open_now(lanes: _TimedLanes, now: datetime) -> list[int]:
    """Returns the ids of the lanes that are open at `now`."""
    return [lane for lane, until in lanes if until is None or until <= now]


def limit_of(row: Row) -> RateLimit:
    """Returns the rate limit of a row."""
    return RateLimit(**{name: row[name] for name in RateLimit.__struct_fields__})


def _pause_of(row: Row) -> ClaimPause:
    """Returns the pause in a row."""
    return ClaimPause(
        kind=row["kind"],
        subject=row["name"],
        reason=row["reason"],
        until=row["until"],
        created_by=row["created_by"],
    )


def _apply_user_profile(agent: AgentProfile, row: Row) -> AgentProfile:
    """Returns the profile with the settings of users; `Forbidden` if it is draining or terminated.

    Settings that the agent's worker does not support are left out.
    """
    if row["status"] in ENDING:
        raise claim_refusal(row["status"])
    if row["version"] <= agent.version or row["profile"] is None:
        return agent
    managed = msgspec.json.decode(row["profile"], type=AgentProfile)
    return msgspec.structs.replace(merge_worker_profile(managed, agent), version=row["version"])


def _check_lane_count(loaded: _WorkspaceLanes, requested: set[int]) -> None:
    """Raises `Invalid` if the workspace would have more than `MAX_LANES` lanes."""
    existing = {lane.id for lane in loaded.lanes}
    if len(requested | existing) > MAX_LANES and requested - existing:
        raise _too_many_lanes_error()


def _corrupt_lane_error(lane: int) -> Conflict:
    text = f'lane {lane} has an invalid database row; see "orchestrate db check"'
    return Conflict(text, "corrupt")


def _too_many_lanes_error() -> Invalid:
    text = f"the workspace would have more than {MAX_LANES:,} lanes (sets of requirements)"
    return Invalid(text, "too_many_lanes")
