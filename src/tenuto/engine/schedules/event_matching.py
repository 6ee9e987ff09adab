"""Matches events with triggers and starts the flows, in all workspaces.

Several processes can run this at once, and can read an event again: each event starts a trigger's
flow only once.
"""

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
from tenuto.engine.rows import decode_json
from tenuto.engine.schedules.triggers import compile_filter
from tenuto.engine.tasks.maintenance import TaskMaintenance
from tenuto.model import bounds
from tenuto.model.errors import Conflict, Incompatible, TenutoError, Unavailable
from tenuto.model.flows.definition import check_no_references
from tenuto.model.flows.plan import Plan
from tenuto.model.schedules.event_names import (
    MAX_CAUSED_FLOWS,
    MAX_DEPTH,
    PUBLISHED,
    build_source,
    event_names,
    matching_name,
    trigger_depth,
)
from tenuto.store.protocol import Row, Script, Statement

log = logging.getLogger("tenuto.engine")

CURSOR = "triggers"
MAX_BATCH = 100
MAX_MATCHES = 500
"""Matches handled in one poll, because the coordinator has other duties.

The matches of one event stay together, so a poll can handle some more.
"""
MAX_PARENTS = 32
"""Levels of parent tasks in which the flow of a task is searched."""


class _TriggerMatch(msgspec.Struct, frozen=True):
    """An event that matches a trigger, and the event name that matched."""

    trigger: Row
    event: Row
    name: str


class _EventSubject(msgspec.Struct, frozen=True, kw_only=True):
    """The task, group or flow an event is about, with facts that its audit row does not have."""

    task: UUID | None = None
    group: UUID | None = None
    flow: UUID | None = None
    key: str | None = None
    title: str | None = None
    type: str | None = None
    cause: UUID | None = None
    """The flow that caused the event: that of the subject, or of the nearest parent task."""


class _EventSubjects(msgspec.Struct, frozen=True):
    """The subjects of events by id, and the rows of the flows that caused them."""

    by_id: dict[UUID, _EventSubject]
    causes: dict[UUID, Row]

    def of(self, event: Row) -> _EventSubject:
        """Returns the subject of the event; an empty one if it is unknown."""
        return self.by_id.get(event["task"], _EventSubject())


class TriggerRunner:
    """Starts the targets of triggers. One event starts a trigger's target once."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._maintenance = TaskMaintenance(core)
        self._match_count = 0

    @property
    def is_over_limit(self) -> bool:
        """True if enough matches were handled; the rest is left for the next poll."""
        return self._match_count >= MAX_MATCHES

    async def trigger_once(self, limit: int = MAX_BATCH) -> int:
        """Starts flows for the next events; returns how many it handled. No trigger: skips all."""
        unread = await self._core.store.fetch(Statement("triggers_ahead", {"name": CURSOR}))
        if not unread:
            return 0
        if unread[0]["wanted"]:
            return await self._maintenance.relay_once(CURSOR, self.handle_events, limit)

        def skip() -> Script[int]:
            yield Statement("triggers_skip", {"name": CURSOR, "now": self._core.now()})
            return 0

        return await self._core.store.transact_one(skip)

    async def handle_events(self, events: Sequence[Row]) -> int:
        """Starts flows, each once; returns how many events were handled, counted from the first.

        About `MAX_MATCHES` matches are handled; the caller passes the other events again.
        """
        matches, handled = _limit_matches(await self._find_matches(events), events)
        self._match_count += len(matches)
        if not matches:
            return handled
        subjects = await self._load_subjects([match.event for match in matches])
        plans: dict[tuple[UUID, str], Plan] = {}
        for match in matches:
            await self._start_matched(match, subjects, plans)
            await self._core.clock.sleep(0)  # a slow filter must not block the event loop
        return handled

    async def _find_matches(self, events: Sequence[Row]) -> list[_TriggerMatch]:
        """Returns the events' matches with active triggers, in the order of the events."""
        named = [(event, names) for event in events if (names := _event_names(event))]
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
        self, match: _TriggerMatch, subjects: _EventSubjects, plans: dict[tuple[UUID, str], Plan]
    ) -> None:
        """Starts the flow of one match if the filter is true, or records why it could not start."""
        trigger = match.trigger
        try:
            flow_input = _flow_input(match, subjects.of(match.event))
            if trigger["filter"] is None or compile_filter(trigger["filter"]).holds(
                {"event": flow_input}
            ):
                await self._prepare_and_start(match, flow_input, subjects, plans)
        except (Unavailable, Incompatible):
            raise
        except TenutoError as error:
            await self._record_failure(trigger, error.message)
        except Exception as error:
            log.exception("internal error in trigger %s; the next event continues", trigger["id"])
            await self._record_failure(trigger, f"internal error: {error!r}")

    async def _prepare_and_start(
        self,
        match: _TriggerMatch,
        flow_input: Any,
        subjects: _EventSubjects,
        plans: dict[tuple[UUID, str], Plan],
    ) -> None:
        """Prepares the flow of one match and starts it; raises `Conflict` above a limit.

        `plans` caches plans by workspace and target.
        """
        trigger, event = match.trigger, match.event
        cause = subjects.causes.get(subjects.of(event).cause or UUID(int=0))
        depth = 1 + (0 if cause is None else trigger_depth(cause["source"]))
        root = None if cause is None else cause["cause"]
        check_no_references("the event's data", flow_input["data"])
        if depth > MAX_DEPTH:
            text = (
                f"a chain of more than {MAX_DEPTH} triggers started each other{_since_flow(root)}"
            )
            raise Conflict(text)
        actor = f"trigger:{trigger['name']}"
        flows = Flows(self._core, trigger["workspace"], actor)
        plan_key = (trigger["workspace"], trigger["target"])
        if plan_key not in plans:
            plans[plan_key] = await flows.build_plan(trigger["target"])
        params = await flows.prepare(
            plans[plan_key],
            flow_input,
            source=build_source(str(trigger["id"]), depth),
            # Only the position: after a restore, transactions get other numbers.
            fire_key=f"trigger:{trigger['id']}:{event['position']}",
        )

        def script(cascade: Cascade) -> Script[None]:
            yield from self._start_flow(cascade, flows, match, params, root)

        await self._core.run_with_cascade(script, actor)

    def _start_flow(
        self,
        cascade: Cascade,
        flows: Flows,
        match: _TriggerMatch,
        params: dict[str, Any],
        root: UUID | None,
    ) -> Script[None]:
        """Locks the trigger; if active, starts the flow once and records it. `Conflict`: too many.

        `root` is the first flow of the chain of triggers; `None` if this flow is the first.
        """
        trigger = match.trigger
        trigger_key = {"workspace": trigger["workspace"], "id": trigger["id"]}
        rows = yield Statement("trigger_locked", trigger_key)
        if not rows or rows[0]["status"] != "ACTIVE":
            return
        if not (yield from flows.start_prepared(cascade, params)):
            return
        if root is not None:
            [caused] = yield Statement(
                "flow_caused_count", {"cause": root, "most": MAX_CAUSED_FLOWS}
            )
            if caused["n"] >= MAX_CAUSED_FLOWS:
                started = f"triggers have started {MAX_CAUSED_FLOWS:,} flows"
                raise Conflict(f"{started}{_since_flow(root)}, the limit")
        yield Statement("flow_set_cause", {"id": params["id"], "cause": root or params["id"]})
        data = {"event": match.name, "of": match.event["task"], "flow": params["id"]}
        note = {"flow": params["id"], "data": msgspec.json.encode(data).decode()}
        actor_and_time = {"actor": params["actor"], "now": self._core.now()}
        yield Statement("trigger_fired", trigger_key | note | actor_and_time)

    async def _record_failure(self, trigger: Row, reason: str) -> None:
        """Stores a trigger's last error; adds an event if the error is a new one."""
        params = {
            "id": trigger["id"],
            "workspace": trigger["workspace"],
            "error": bounds.make_storable(reason, bounds.MAX_ERROR),
            "actor": f"trigger:{trigger['name']}",
            "now": self._core.now(),
        }

        def script() -> Script[None]:
            yield Statement("trigger_failed", params)

        await self._core.store.transact_one(script)

    # Subjects of events.

    async def _load_subjects(self, events: Sequence[Row]) -> _EventSubjects:
        """Reads the subjects of the events, and the flows that caused them."""
        subjects: dict[UUID, _EventSubject] = {}
        workspaces = {event["task"]: event["workspace"] for event in events}
        groups = await self._fetch("event_groups", workspaces)
        flows = await self._fetch("event_flows", workspaces)
        for row in groups:
            subjects[row["id"]] = _EventSubject(
                group=row["id"],
                flow=row["flow"],
                key=row["key"],
                title=row["title"],
                cause=row["flow"],
            )
        for row in flows:
            subjects[row["id"]] = _EventSubject(
                flow=row["id"], key=row["key"], title=row["title"], cause=row["id"]
            )
        subjects |= await self._task_subjects(events)
        causes = {
            subject.cause: workspaces[id_]
            for id_, subject in subjects.items()
            if id_ in workspaces and subject.cause is not None
        }
        cause_rows = {row["id"]: row for row in await self._fetch("event_flows", causes)}
        return _EventSubjects(subjects, cause_rows)

    async def _task_subjects(self, events: Sequence[Row]) -> dict[UUID, _EventSubject]:
        """Returns subjects by event `task`: of task events, and of custom events by tasks."""
        published = {event["task"]: event for event in events if event["kind"] == PUBLISHED}
        causes: dict[UUID, UUID] = {}
        if published:
            statement = Statement("event_causes", {"ids": sorted(published)})
            for row in await self._core.store.fetch(statement):
                causes[row["id"]] = UUID(row["causation_id"])
        workspaces = {event["task"]: event["workspace"] for event in events if event["new"]}
        workspaces |= {cause: published[event]["workspace"] for event, cause in causes.items()}
        tasks = {row["id"]: row for row in await self._fetch("event_tasks", workspaces)}
        subjects = {}
        for id_, row in tasks.items():
            subjects[id_] = _EventSubject(
                task=id_,
                group=row["group_id"],
                flow=row["flow"],
                key=row["key"],
                title=row["title"],
                type=row["task_type"],
                cause=await self._nearest_flow(row),
            )
        for event, cause in causes.items():
            if cause in subjects:
                subjects[event] = _EventSubject(task=cause, cause=subjects[cause].cause)
        return subjects

    async def _nearest_flow(self, row: Row) -> UUID | None:
        """Returns the flow of a task, or of its nearest parent in a flow; `None` without one."""
        for _ in range(MAX_PARENTS):
            if row["flow"] is not None or row["parent"] is None:
                break
            parents = await self._fetch("event_tasks", {row["parent"]: row["workspace"]})
            if not parents:
                break
            [row] = parents
        flow: UUID | None = row["flow"]
        return flow

    async def _fetch(self, query: str, workspaces: dict[UUID, UUID]) -> Sequence[Row]:
        """Runs a query for these ids, given with the workspace of each; returns its rows."""
        if not workspaces:
            return []
        return await self._core.store.fetch(
            Statement(query, rows={"wanted": sorted(workspaces.items())})
        )


def _limit_matches(
    matches: list[_TriggerMatch], events: Sequence[Row]
) -> tuple[list[_TriggerMatch], int]:
    """Returns the matches to handle now, and how many events these cover.

    At most `MAX_MATCHES` are handled, except that the matches of one event stay together.
    """
    if len(matches) <= MAX_MATCHES:
        return matches, len(events)
    last = matches[MAX_MATCHES - 1].event
    handled = 1 + next(index for index, event in enumerate(events) if event is last)
    end = next(
        (index for index in range(MAX_MATCHES, len(matches)) if matches[index].event is not last),
        len(matches),
    )
    return matches[:end], handled


def _event_names(event: Row) -> tuple[str, ...]:
    """Returns the names of an event that triggers can match; none for an invalid row."""
    is_valid = isinstance(event["at"], datetime) and isinstance(event["workspace"], UUID)
    if not is_valid or not isinstance(event["task"], UUID):
        return ()  # an invalid row must not block the other events
    return event_names(event["kind"], event["previous"], event["new"], event["message"])


def _flow_input(match: _TriggerMatch, subject: _EventSubject) -> dict[str, Any]:
    """Returns the event as filters see it and as flow input; unknown fields are null."""
    event = match.event
    ids = {name: getattr(subject, name) for name in ("task", "flow", "group")}
    return {
        "name": match.name,
        "id": str(event["position"]),
        "subject": str(event["task"]),
        "data": decode_json(event["data"]),
        **{name: None if id_ is None else str(id_) for name, id_ in ids.items()},
        "key": subject.key,
        "title": subject.title,
        "type": subject.type,
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


def _since_flow(root: UUID | None) -> str:
    """Returns the end of an error text, with the first flow of the chain; empty for `None`."""
    return "" if root is None else f" since flow {root}"
