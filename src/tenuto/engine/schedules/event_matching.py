"""Triggering: events become flows, all workspaces. Any number may run, and read events again."""

import logging
from collections import defaultdict
from collections.abc import Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

import msgspec

from tenuto.engine.core import Core
from tenuto.engine.flows.advance import Cascade
from tenuto.engine.flows.start import Flows
from tenuto.engine.rows import decode
from tenuto.engine.schedules.triggers import condition
from tenuto.engine.tasks.maintenance import TaskMaintenance
from tenuto.model import bounds
from tenuto.model.errors import Conflict, Incompatible, TenutoError, Unavailable
from tenuto.model.flows.definition import check_data
from tenuto.model.flows.plan import Plan
from tenuto.model.schedules.event_names import (
    MAX_CAUSED,
    MAX_DEPTH,
    PUBLISHED,
    depth_of,
    matching_name,
    names_of,
    source_of,
)
from tenuto.store.protocol import Row, Script, Statement

log = logging.getLogger("tenuto.engine")

CURSOR = "triggers"
BATCH = 100
MOST = 500
"""Starts at one look, but for those of its last event: whoever looks has other duties."""
CLIMB = 32
"""How far up its parents the flow of a task is looked for."""


class _TriggerMatch(msgspec.Struct, frozen=True):
    """An event that a trigger waits for, and the name by which."""

    trigger: Row
    event: Row
    name: str


class _EventSubject(msgspec.Struct, frozen=True, kw_only=True):
    """What an event is about, as far as the trail does not say it."""

    task: UUID | None = None
    group: UUID | None = None
    flow: UUID | None = None
    key: str | None = None
    title: str | None = None
    type: str | None = None
    cause: UUID | None = None
    """The flow whose doing it is, near or far; that of `flow`, or of a parent's."""


class _EventSubjects(msgspec.Struct, frozen=True):
    """What is known of tasks, groups and flows, by id."""

    places: dict[UUID, _EventSubject]
    flows: dict[UUID, Row]

    def of(self, event: Row) -> _EventSubject:
        return self.places.get(event["task"], _EventSubject())


class TriggerRunner:
    """The system's side of triggers. An event starts a trigger's target once."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._upkeep = TaskMaintenance(core)
        self._heard = 0

    @property
    def is_over_limit(self) -> bool:
        """Whether what is left had better wait for the next look."""
        return self._heard >= MOST

    async def trigger_once(self, limit: int = BATCH) -> int:
        """Start what the next events call for; answers how many events were read."""
        ahead = await self._core.store.fetch(Statement("triggers_ahead", {"name": CURSOR}))
        if not ahead:
            return 0
        if ahead[0]["wanted"]:
            return await self._upkeep.relay_once(CURSOR, self.hear, limit)

        def skip() -> Script[int]:
            yield Statement("triggers_skip", {"name": CURSOR, "now": self._core.now()})
            return 0

        return await self._core.store.once(skip)

    async def hear(self, events: Sequence[Row]) -> int:
        """Start what these events call for, as often as they are handed in only once.

        Answers how many of them, from the first, were looked at.
        """
        matches, taken = _some(await self._matches(events), events)
        self._heard += len(matches)
        if not matches:
            return taken
        told = await self._places([match.event for match in matches])
        plans: dict[tuple[UUID, str], Plan] = {}
        for match in matches:
            await self._start_matched(match, told, plans)
            await self._core.clock.sleep(0)  # a costly filter must not keep others waiting
        return taken

    async def _matches(self, events: Sequence[Row]) -> list[_TriggerMatch]:
        named = [(event, names) for event in events if (names := _names(event))]
        workspaces = sorted({event["workspace"] for event, _ in named})
        if not workspaces:
            return []
        triggers: dict[UUID, list[Row]] = defaultdict(list)
        for row in await self._core.store.fetch(
            Statement("triggers_of", {"workspaces": workspaces})
        ):
            triggers[row["workspace"]].append(row)
        return [
            _TriggerMatch(trigger, event, name)
            for event, names in named
            for trigger in triggers[event["workspace"]]
            if event["at"] >= trigger["active_at"]
            if (name := matching_name(trigger["event"], names)) is not None
        ]

    async def _start_matched(
        self, match: _TriggerMatch, told: _EventSubjects, plans: dict[tuple[UUID, str], Plan]
    ) -> None:
        """Start what one event calls for, or note why it cannot be; it holds up no other."""
        trigger = match.trigger
        try:
            given = _flow_input(match, told.of(match.event))
            if trigger["filter"] is None or condition(trigger["filter"]).holds({"event": given}):
                await self._start(match, given, told, plans)
        except (Unavailable, Incompatible):
            raise
        except TenutoError as error:
            await self._failed(trigger, error.message)
        except Exception as error:
            log.exception("trigger %s cannot follow an event", trigger["id"])
            await self._failed(trigger, f"a fault in this program: {error!r}")

    async def _start(
        self,
        match: _TriggerMatch,
        given: Any,
        told: _EventSubjects,
        plans: dict[tuple[UUID, str], Plan],
    ) -> None:
        trigger, event = match.trigger, match.event
        cause = told.flows.get(told.of(event).cause or UUID(int=0))
        depth = 1 + (0 if cause is None else depth_of(cause["source"]))
        root = None if cause is None else cause["cause"]
        check_data("the event's data", given["data"])
        if depth > MAX_DEPTH:
            raise Conflict(f"{MAX_DEPTH} triggers have followed from each other{_since(root)}")
        actor = f"trigger:{trigger['name']}"
        flows = Flows(self._core, trigger["workspace"], actor)
        place = (trigger["workspace"], trigger["target"])
        if place not in plans:
            plans[place] = await flows.plan(trigger["target"])
        params = await flows.prepare(
            plans[place],
            given,
            source=source_of(str(trigger["id"]), depth),
            # The position alone: a restore numbers transactions anew.
            fire_key=f"trigger:{trigger['id']}:{event['position']}",
        )

        def script(cascade: Cascade) -> Script[None]:
            yield from self._begin(cascade, flows, match, params, root)

        await self._core.run_with_cascade(script, actor)

    def _begin(
        self,
        cascade: Cascade,
        flows: Flows,
        match: _TriggerMatch,
        params: dict[str, Any],
        root: UUID | None,
    ) -> Script[None]:
        trigger = match.trigger
        place = {"workspace": trigger["workspace"], "id": trigger["id"]}
        rows = yield Statement("trigger_locked", place)
        if not rows or rows[0]["status"] != "ACTIVE":
            return
        if not (yield from flows.begin(cascade, params)):
            return
        if root is not None:
            [found] = yield Statement("caused", {"cause": root, "most": MAX_CAUSED})
            if found["n"] >= MAX_CAUSED:
                raise Conflict(f"{MAX_CAUSED:,} flows have followed{_since(root)}")
        yield Statement("flow_caused", {"id": params["id"], "cause": root or params["id"]})
        data = {"event": match.name, "of": match.event["task"], "flow": params["id"]}
        noted = {"flow": params["id"], "data": msgspec.json.encode(data).decode()}
        now = {"actor": params["actor"], "now": self._core.now()}
        yield Statement("trigger_fired", place | noted | now)

    async def _failed(self, trigger: Row, why: str) -> None:
        params = {
            "id": trigger["id"],
            "workspace": trigger["workspace"],
            "error": bounds.clean(why, bounds.MAX_ERROR),
            "actor": f"trigger:{trigger['name']}",
            "now": self._core.now(),
        }

        def script() -> Script[None]:
            yield Statement("trigger_failed", params)

        await self._core.store.once(script)

    # What events are about.

    async def _places(self, events: Sequence[Row]) -> _EventSubjects:
        """What the events are about, and the flows whose doing they are."""
        places: dict[UUID, _EventSubject] = {}
        asked = {event["task"]: event["workspace"] for event in events}
        groups = await self._fetch("told_groups", asked)
        flows = await self._fetch("told_flows", asked)
        for row in groups:
            places[row["id"]] = _EventSubject(
                group=row["id"],
                flow=row["flow"],
                key=row["key"],
                title=row["title"],
                cause=row["flow"],
            )
        for row in flows:
            places[row["id"]] = _EventSubject(
                flow=row["id"], key=row["key"], title=row["title"], cause=row["id"]
            )
        places |= await self._of_tasks(events)
        more = {
            place.cause: asked[subject]
            for subject, place in places.items()
            if subject in asked and place.cause is not None
        }
        known = {row["id"]: row for row in await self._fetch("told_flows", more)}
        return _EventSubjects(places, known)

    async def _of_tasks(self, events: Sequence[Row]) -> dict[UUID, _EventSubject]:
        """What events of tasks are about, and what published ones owe to a task."""
        published = {event["task"]: event for event in events if event["kind"] == PUBLISHED}
        causes: dict[UUID, UUID] = {}
        if published:
            asked = Statement("causes", {"ids": sorted(published)})
            for row in await self._core.store.fetch(asked):
                causes[row["id"]] = UUID(row["causation_id"])
        subjects = {event["task"]: event["workspace"] for event in events if event["new"]}
        subjects |= {cause: published[event]["workspace"] for event, cause in causes.items()}
        tasks = {row["id"]: row for row in await self._fetch("told_tasks", subjects)}
        found = {}
        for id_, row in tasks.items():
            found[id_] = _EventSubject(
                task=id_,
                group=row["group_id"],
                flow=row["flow"],
                key=row["key"],
                title=row["title"],
                type=row["task_type"],
                cause=await self._flow_above(row),
            )
        for event, cause in causes.items():
            if cause in found:
                found[event] = _EventSubject(task=cause, cause=found[cause].cause)
        return found

    async def _flow_above(self, row: Row) -> UUID | None:
        """The flow of a task, or of the nearest parent that has one."""
        for _ in range(CLIMB):
            if row["flow"] is not None or row["parent"] is None:
                break
            above = await self._fetch("told_tasks", {row["parent"]: row["workspace"]})
            if not above:
                break
            [row] = above
        flow: UUID | None = row["flow"]
        return flow

    async def _fetch(self, query: str, subjects: dict[UUID, UUID]) -> Sequence[Row]:
        if not subjects:
            return []
        return await self._core.store.fetch(
            Statement(query, rows={"wanted": sorted(subjects.items())})
        )


def _some(matches: list[_TriggerMatch], events: Sequence[Row]) -> tuple[list[_TriggerMatch], int]:
    """The first of the matches, those of an event together, and how many events that makes."""
    if len(matches) <= MOST:
        return matches, len(events)
    last = matches[MOST - 1].event
    taken = 1 + next(place for place, event in enumerate(events) if event is last)
    beyond = next(
        (place for place in range(MOST, len(matches)) if matches[place].event is not last),
        len(matches),
    )
    return matches[:beyond], taken


def _names(event: Row) -> tuple[str, ...]:
    whole = isinstance(event["at"], datetime) and isinstance(event["workspace"], UUID)
    if not whole or not isinstance(event["task"], UUID):
        return ()  # a damaged row must not keep the others back
    return names_of(event["kind"], event["previous"], event["new"], event["message"])


def _flow_input(match: _TriggerMatch, place: _EventSubject) -> dict[str, Any]:
    """The event as filters see it, and flows are started with; what is not known is null."""
    event = match.event
    ids = {name: getattr(place, name) for name in ("task", "flow", "group")}
    return {
        "name": match.name,
        "id": str(event["position"]),
        "subject": str(event["task"]),
        "data": decode(event["data"]),
        **{name: None if id_ is None else str(id_) for name, id_ in ids.items()},
        "key": place.key,
        "title": place.title,
        "type": place.type,
        "kind": event["kind"],
        "level": event["level"],
        "message": event["message"],
        "previous": event["previous"],
        "status": event["new"],
        "attempt": event["attempt"],
        "agent": None if event["agent"] is None else str(event["agent"]),
        "actor": event["actor"],
        "at": event["at"].isoformat(),
    }


def _since(root: UUID | None) -> str:
    return "" if root is None else f" since flow {root}"
