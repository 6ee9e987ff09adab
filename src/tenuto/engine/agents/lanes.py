"""Which lanes there are and which of them an agent may take from, remembered between claims."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from datetime import datetime, timedelta
from functools import partial
from uuid import UUID

import msgspec

from tenuto.model.agents.lifecycle import ENDING, merge_worker_profile, refusal
from tenuto.model.agents.matching import (
    AgentProfile,
    Requirements,
    SupportedWork,
    eligible,
    lane_id,
)
from tenuto.model.bounds import MAX_LANES
from tenuto.model.errors import Conflict, Invalid, NotFound
from tenuto.model.limits.complexity import DEFAULT, ComplexityRules
from tenuto.model.limits.pauses import ClaimPause, closed_until
from tenuto.model.limits.quota import Quota, effective, quota_of
from tenuto.model.limits.rate_limits import Group, RateLimit, group_of
from tenuto.store.protocol import Row, Script, Statement, Store

log = logging.getLogger("tenuto.engine")

_MOST_REMEMBERED = 10_000
"""Agents, each by its version and its worker's means, whose lanes are remembered."""
_TOUCH_EVERY = timedelta(hours=1)


class Lane(msgspec.Struct, frozen=True):
    id: int
    requirements: Requirements
    closed_until: datetime | None
    closed_why: str | None


class OpenLanes(msgspec.Struct, frozen=True):
    """The lanes that an agent may take from now, and the version that they were read at."""

    version: int
    free: list[int]
    limited: dict[Group, list[int]]
    """Those whose tasks count against rate limits, by the limits' names."""
    agent: AgentProfile
    """The agent as people have described it, if they have."""

    @property
    def lanes(self) -> list[int]:
        """All of them."""
        return [*self.free, *(lane for lanes in self.limited.values() for lane in lanes)]


_Timed = list[tuple[int, datetime | None]]
"""Lanes, and until when each is closed."""


class _WorkspaceLanes(msgspec.Struct):
    version: int
    lanes: list[Lane]
    gates: list[ClaimPause]
    limits: list[RateLimit]
    quota: Quota
    """What the workspace may use, within the operator's ceiling."""
    complexity: ComplexityRules
    agents: dict[UUID, Row]
    """Agents that people manage, and those that are to take no more tasks."""
    eligible: dict[tuple[UUID, int, SupportedWork | None], dict[Group, _Timed]] = {}
    held: dict[str, datetime] = {}
    """Rate limits that were found used up, until when."""


class LaneCache:
    """The lanes of every workspace this process works for. The store's numbers say when it errs."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.ceiling = Quota()
        """What the operator allows any workspace."""
        self._touched: dict[int, datetime] = {}
        self._known: dict[UUID, _WorkspaceLanes] = {}
        self._ids: dict[Requirements, int] = {}
        self._plain: dict[tuple[int, str], int] = {}
        """Lanes by the numbers of workspaces and the only thing required there, a type."""
        self._under_way: dict[UUID | None, asyncio.Event] = {}

    async def ensure(self, wanted: set[Requirements]) -> dict[Requirements, int]:
        """The numbers of the lanes for these requirements, which exist when this returns."""
        now = self._store.clock.now()
        while missing := [needs for needs in wanted if not self.is_fresh(needs, now)]:
            await self._share_one_call(None, partial(self._touch, missing, now))
        return {needs: self._ids[needs] for needs in wanted}

    def lane_by_type(self, workspace: UUID, task_type: str, now: datetime) -> int | None:
        """The lane of tasks that require but a type; `None` if the store has to be asked first.

        It has to be where a quota of waiting tasks is held.
        """
        key = (workspace.int, task_type)
        lane = self._plain.get(key)
        if lane is None:
            lane = self._ids.get(Requirements(workspace=workspace, task_type=task_type))
            if lane is None:
                return None
            self._plain[key] = lane
        known = self._known.get(workspace)
        if known is None or known.complexity.policy == "require":
            return None
        if known.quota.pending is not None:
            return None
        return lane if self._is_there(lane, now) else None

    async def _share_one_call(
        self, what: UUID | None, work: Callable[[], Awaitable[object]]
    ) -> None:
        """Do the work, or wait until whoever is at it already has ended; all go on together."""
        if what in self._under_way:
            await self._under_way[what].wait()
            return
        self._under_way[what] = ended = asyncio.Event()
        try:
            await work()
        finally:
            del self._under_way[what]
            ended.set()

    def is_fresh(self, needs: Requirements, now: datetime) -> bool:
        """Whether the lane was seen to exist so lately that it still does."""
        lane = self._ids.get(needs)
        return lane is not None and self._is_there(lane, now)

    def _is_there(self, lane: int, now: datetime) -> bool:
        return now - self._touched[lane] < _TOUCH_EVERY

    def mark_used(self, used: Iterable[Requirements], now: datetime) -> None:
        """Note that a transaction which is durable now used these lanes, where they are known."""
        for needs in used:
            lane, known = lane_id(needs.key()), self._known.get(needs.workspace)
            if known is not None and any(each.id == lane for each in known.lanes):
                self._ids[needs] = lane
                self._touched[lane] = now

    async def _touch(self, missing: list[Requirements], now: datetime) -> None:
        rows = sorted((lane_id(needs.key()), needs.workspace, needs.key()) for needs in missing)
        spaces = sorted({workspace for _, workspace, _ in rows})
        for workspace in spaces:
            known = await self._load(workspace)
            if known.version == 0:
                raise NotFound(f"no workspace {workspace}")
            _check_room(known, {lane for lane, of, _ in rows if of == workspace})

        def script() -> Script[None]:
            yield Statement("lane_touch", {"now": now, "most": MAX_LANES}, {"wanted": rows})

        await self._store.once(script)
        there: set[int] = set()
        for workspace in spaces:
            there |= {lane.id for lane in (await self._load(workspace)).lanes}
        if lost := [lane for lane, _, _ in rows if lane not in there]:
            raise _too_many() if len(there) >= MAX_LANES else _unreadable(lost[0])
        for needs in missing:
            lane = self._ids[needs] = lane_id(needs.key())
            self._touched[lane] = now

    async def eligible(self, agent: AgentProfile, now: datetime) -> OpenLanes:
        """The open lanes that the agent may take from; `Forbidden` when it is to take no more."""
        known = await self._cached_or_load(agent.workspace)
        if agent.id in known.agents:
            if known.agents[agent.id]["status"] in ENDING and await self.reload_if_changed(
                agent.workspace
            ):
                return await self.eligible(agent, now)
            agent = _as_managed(agent, known.agents[agent.id])
        key = (agent.id, agent.version, agent.means)
        mine = known.eligible.get(key)
        if mine is None:
            if len(known.eligible) >= _MOST_REMEMBERED:
                known.eligible.clear()
            mine = known.eligible[key] = _lanes_of(agent, known)
        free = _open_now(mine[()], now)
        limited = {
            group: found
            for group, lanes in mine.items()
            if group
            and all(known.held.get(name, now) <= now for name in group)
            and (found := _open_now(lanes, now))
        }
        return OpenLanes(known.version, free, limited, agent)

    def exclude_limited(self, workspace: UUID, version: int, held: dict[str, datetime]) -> None:
        """Keep from lanes whose rate limits are used up, until the instants given.

        Only this process does: a limit closes a lane for the agents whose model or account it
        names, while the lane's row closes it for everybody. Whoever else tries finds the limit in
        the store, and a limit that is changed moves the version, with which this is forgotten.
        """
        known = self._known.get(workspace)
        if known is not None and known.version == version:
            known.held.update(held)

    async def complexity(self, workspace: UUID) -> ComplexityRules:
        """What the workspace says of hard tasks, as far as is known."""
        return (await self._cached_or_load(workspace)).complexity

    def running(self, workspace: UUID) -> int | None:
        """How many tasks the workspace may run at once, if that is bounded, as far as is known."""
        known = self._known.get(workspace)
        return (self.ceiling if known is None else known.quota).running

    async def quota(self, workspace: UUID) -> Quota:
        """What the workspace may use, as far as is known."""
        return (await self._cached_or_load(workspace)).quota

    async def reload_if_changed(self, workspace: UUID) -> bool:
        """Whether the lanes changed since they were loaded; loads them when they did."""
        known = self._known.get(workspace)
        rows = await self._store.fetch(Statement("lanes_version", {"workspace": workspace}))
        if not rows or (known is not None and rows[0]["lanes_version"] == known.version):
            return False
        await self._load(workspace)
        return True

    async def all(self, workspace: UUID) -> list[Lane]:
        return (await self._load(workspace)).lanes

    async def gates(self, workspace: UUID) -> list[ClaimPause]:
        """What people hold back."""
        await self.reload_if_changed(workspace)
        return (await self._cached_or_load(workspace)).gates

    async def _cached_or_load(self, workspace: UUID) -> _WorkspaceLanes:
        """What was loaded before, however old."""
        while (known := self._known.get(workspace)) is None:
            await self._share_one_call(workspace, partial(self._load, workspace))
        return known

    async def _load(self, workspace: UUID) -> _WorkspaceLanes:
        # The version first: lanes that appear in between make it look old, never new.
        versions = await self._store.fetch(Statement("lanes_version", {"workspace": workspace}))
        rows = await self._store.fetch(Statement("lanes", {"workspace": workspace}))
        gates = await self._store.fetch(Statement("gates", {"workspace": workspace}))
        limits = await self._store.fetch(Statement("rate_limits", {"workspace": workspace}))
        agents = await self._store.fetch(Statement("agents_told", {"workspace": workspace}))
        lanes = [lane for row in rows if (lane := _lane_of(row)) is not None]
        version = versions[0]["lanes_version"] if versions else 0
        quota = effective(quota_of(versions[0]["quota"] if versions else None), self.ceiling)
        text = versions[0]["complexity"] if versions else None
        rules = DEFAULT if text is None else msgspec.json.decode(text, type=ComplexityRules)
        known = _WorkspaceLanes(
            version,
            lanes,
            [_gate_of(row) for row in gates],
            [limit_of(row) for row in limits],
            quota,
            rules,
            {row["id"]: row for row in agents},
        )
        self._known[workspace] = known
        return known


def _lane_of(row: Row) -> Lane | None:
    """The lane in a row; `None` for a damaged one: the others are not to suffer for it."""
    try:
        needs = msgspec.json.decode(row["key"], type=Requirements)
    except (msgspec.MsgspecError, TypeError):
        log.warning("%s; its tasks wait", _unreadable(row["lane"]))
        return None
    return Lane(row["lane"], needs, row["closed_until"], row["closed_why"])


def _lanes_of(agent: AgentProfile, known: _WorkspaceLanes) -> dict[Group, _Timed]:
    """The agent's lanes by the limits that hold for it there; those without any stand under ()."""
    found: dict[Group, _Timed] = {(): []}
    for lane in known.lanes:
        if eligible(agent, lane.requirements):
            model = lane.requirements.model or agent.model
            group = group_of(known.limits, model, agent.account)
            gate = closed_until(known.gates, agent.name, lane.id, lane.requirements)
            times = [each for each in (lane.closed_until, gate) if each is not None]
            found.setdefault(group, []).append((lane.id, max(times, default=None)))
    return found


def _open_now(lanes: _Timed, now: datetime) -> list[int]:
    return [lane for lane, until in lanes if until is None or until <= now]


def limit_of(row: Row) -> RateLimit:
    """The rate limit in a row."""
    return RateLimit(**{name: row[name] for name in RateLimit.__struct_fields__})


def _gate_of(row: Row) -> ClaimPause:
    return ClaimPause(
        kind=row["kind"],
        subject=row["name"],
        reason=row["reason"],
        until=row["until"],
        created_by=row["created_by"],
    )


def _as_managed(agent: AgentProfile, row: Row) -> AgentProfile:
    """The agent by the word of people, as far as its worker can do it.

    `Forbidden` when it is to take no more tasks.
    """
    if row["status"] in ENDING:
        raise refusal(row["status"])
    if row["version"] <= agent.version or row["profile"] is None:
        return agent
    told = msgspec.json.decode(row["profile"], type=AgentProfile)
    return msgspec.structs.replace(merge_worker_profile(told, agent), version=row["version"])


def _check_room(known: _WorkspaceLanes, wanted: set[int]) -> None:
    """Raise `Invalid` when the workspace may not have all these lanes."""
    there = {lane.id for lane in known.lanes}
    if len(wanted | there) > MAX_LANES and wanted - there:
        raise _too_many()


def _unreadable(lane: int) -> Conflict:
    return Conflict(f"the row of lane {lane} is unreadable", "corrupt")


def _too_many() -> Invalid:
    text = f"the workspace would have more than {MAX_LANES:,} distinct sets of requirements"
    return Invalid(text, "too_many_lanes")
