"""Which lanes there are and which of them an agent may take from, remembered between claims."""

import asyncio
from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta
from functools import partial
from uuid import UUID

import msgspec

from tenuto.model.complexity import DEFAULT, ComplexityRules
from tenuto.model.errors import Invalid, NotFound
from tenuto.model.limits import MAX_LANES
from tenuto.model.matching import AgentProfile, Requirements, eligible, lane_id
from tenuto.model.quota import quota_of
from tenuto.store.protocol import Script, Statement, Store

_TOUCH_EVERY = timedelta(hours=1)


class Lane(msgspec.Struct, frozen=True):
    id: int
    requirements: Requirements
    closed_until: datetime | None
    closed_why: str | None


class _Known(msgspec.Struct):
    version: int
    lanes: list[Lane]
    running: int | None
    """How many tasks may run at once."""
    complexity: ComplexityRules
    eligible: dict[tuple[UUID, int], list[Lane]]


class Lanes:
    """The lanes of every workspace this process works for. The store's numbers say when it errs."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._touched: dict[int, datetime] = {}
        self._known: dict[UUID, _Known] = {}
        self._ids: dict[Requirements, int] = {}
        self._under_way: dict[UUID | None, asyncio.Event] = {}

    async def ensure(self, wanted: set[Requirements]) -> dict[Requirements, int]:
        """The numbers of the lanes for these requirements, which exist when this returns."""
        now = self._store.clock.now()
        while missing := [needs for needs in wanted if not self.is_fresh(needs, now)]:
            await self._together(None, partial(self._touch, missing, now))
        return {needs: self._ids[needs] for needs in wanted}

    async def _together(self, what: UUID | None, work: Callable[[], Awaitable[object]]) -> None:
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
        return lane is not None and now - self._touched[lane] < _TOUCH_EVERY

    async def _touch(self, missing: list[Requirements], now: datetime) -> None:
        for workspace in {needs.workspace for needs in missing}:
            wanted = {lane_id(each.key()) for each in missing if each.workspace == workspace}
            known = await self._load(workspace)
            if known.version == 0:
                raise NotFound(f"no workspace {workspace}")
            there = {lane.id for lane in known.lanes}
            if len(wanted | there) > MAX_LANES and wanted - there:
                raise _too_many()
        rows = sorted((lane_id(needs.key()), needs.workspace, needs.key()) for needs in missing)

        def script() -> Script[None]:
            yield Statement("lane_touch", {"now": now, "most": MAX_LANES}, {"wanted": rows})

        await self._store.once(script)
        for needs in missing:
            await self._check_room(needs)
            lane = lane_id(needs.key())
            self._ids[needs] = lane
            self._touched[lane] = now

    async def _check_room(self, needs: Requirements) -> None:
        known = await self._load(needs.workspace)
        if not any(lane.id == lane_id(needs.key()) for lane in known.lanes):
            raise _too_many()

    async def eligible(self, agent: AgentProfile, now: datetime) -> tuple[int, list[int]]:
        """The open lanes that the agent may take from, and the version they were read at."""
        known = await self._some(agent.workspace)
        key = (agent.id, agent.version)
        mine = known.eligible.get(key)
        if mine is None:
            mine = [lane for lane in known.lanes if eligible(agent, lane.requirements)]
            known.eligible[key] = mine
        open_now = [
            lane.id for lane in mine if lane.closed_until is None or lane.closed_until <= now
        ]
        return known.version, open_now

    async def complexity(self, workspace: UUID) -> ComplexityRules:
        """What the workspace says of hard tasks, as far as is known."""
        return (await self._some(workspace)).complexity

    def bounded(self, workspace: UUID) -> bool:
        """Whether the workspace has a quota of running tasks, as far as is known."""
        known = self._known.get(workspace)
        return known is not None and known.running is not None

    async def moved(self, workspace: UUID) -> bool:
        """Whether the lanes changed since they were loaded; loads them when they did."""
        known = self._known.get(workspace)
        rows = await self._store.fetch(Statement("lanes_version", {"workspace": workspace}))
        if not rows or (known is not None and rows[0]["lanes_version"] == known.version):
            return False
        await self._load(workspace)
        return True

    async def all(self, workspace: UUID) -> list[Lane]:
        return (await self._load(workspace)).lanes

    async def _some(self, workspace: UUID) -> _Known:
        """What was loaded before, however old."""
        while (known := self._known.get(workspace)) is None:
            await self._together(workspace, partial(self._load, workspace))
        return known

    async def _load(self, workspace: UUID) -> _Known:
        # The version first: lanes that appear in between make it look old, never new.
        versions = await self._store.fetch(Statement("lanes_version", {"workspace": workspace}))
        rows = await self._store.fetch(Statement("lanes", {"workspace": workspace}))
        lanes = [
            Lane(
                row["lane"],
                msgspec.json.decode(row["key"], type=Requirements),
                row["closed_until"],
                row["closed_why"],
            )
            for row in rows
        ]
        version = versions[0]["lanes_version"] if versions else 0
        quota = quota_of(versions[0]["quota"] if versions else None)
        text = versions[0]["complexity"] if versions else None
        rules = DEFAULT if text is None else msgspec.json.decode(text, type=ComplexityRules)
        known = _Known(version, lanes, quota.running, rules, {})
        self._known[workspace] = known
        return known


def _too_many() -> Invalid:
    text = f"the workspace would have more than {MAX_LANES:,} distinct sets of requirements"
    return Invalid(text, "too_many_lanes")
