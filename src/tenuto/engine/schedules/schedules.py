"""Schedules: definitions that are started by time, as people make and change them."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Literal
from uuid import UUID

import msgspec
from msgspec import UNSET, UnsetType

from tenuto.engine.core import Core
from tenuto.engine.flows.advance import Cascade
from tenuto.engine.flows.start import Flows
from tenuto.engine.rows import decode
from tenuto.engine.schedules.rows import (
    MAX_SCHEDULES,
    ScheduleAuditNote,
    ScheduleRow,
    added,
    changed,
    encoded,
    queue_text,
    retimed,
    schedule_of,
    settled,
)
from tenuto.engine.tenancy.secret_use import check_value
from tenuto.model import bounds
from tenuto.model.errors import Conflict, Invalid, NotFound
from tenuto.model.flows.definition import check_key
from tenuto.model.schedules.firing import initial_cursor, next_poll_at
from tenuto.model.schedules.schedule import (
    CatchUp,
    Overlap,
    ScheduleSpec,
    ScheduleType,
    check,
    following,
)
from tenuto.model.tenancy.access import Caller
from tenuto.model.tenancy.secrets import extract_secrets
from tenuto.store.protocol import Row, Script, Statement


class ScheduleTimes(
    msgspec.Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True
):
    """A `ScheduleSpec` as REST spells it."""

    type: ScheduleType
    expression: str | None = None
    timezone: str = "UTC"
    at: datetime | None = None
    until: datetime | None = None
    end: datetime | None = None
    overlap: Overlap = "skip"
    catch_up: CatchUp = "none"
    catch_up_limit: int = 100
    jitter_s: float = 0.0

    def spec(self) -> ScheduleSpec:
        """The same in the model's words."""
        return ScheduleSpec(**{name: getattr(self, name) for name in self.__struct_fields__})


def times_of(spec: ScheduleSpec) -> ScheduleTimes:
    """When to start, as REST spells it."""
    return ScheduleTimes(**{name: getattr(spec, name) for name in ScheduleTimes.__struct_fields__})


class ScheduleView(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A schedule as people see it; `missed` counts its times that started nothing."""

    id: UUID
    name: str
    target: str
    schedule: ScheduleTimes
    input: Any
    status: Literal["ACTIVE", "PAUSED", "ENDED"]
    next_at: datetime | None
    fired: int
    missed: int
    queued: list[datetime]
    fired_at: datetime | None
    last_flow_id: UUID | None
    last_error: str | None
    version: int
    created_by: str | None
    created_at: datetime
    updated_at: datetime


class SchedulePage(msgspec.Struct, frozen=True, rename="camel"):
    """Some schedules and where the next ones begin."""

    schedules: list[ScheduleView]
    next_cursor: UUID | None = None


class ScheduleChange(msgspec.Struct, frozen=True, kw_only=True):
    """What a person changes of a schedule; the rest stays."""

    target: str | UnsetType = UNSET
    schedule: ScheduleSpec | UnsetType = UNSET
    input: Any = UNSET


class DesiredSchedule(msgspec.Struct, frozen=True, kw_only=True):
    """A schedule as a file asks for it."""

    name: str
    target: str
    schedule: ScheduleSpec
    input: Any = None


class Schedules:
    """The schedules of one workspace, on behalf of one actor. One is named by its name or id."""

    def __init__(
        self, core: Core, workspace: UUID, actor: str | None, caller: Caller | None = None
    ) -> None:
        self._core = core
        self._workspace = workspace
        self._actor = actor
        self._caller = caller
        self._flows = Flows(core, workspace, actor)

    async def create(
        self,
        name: str,
        target: str,
        schedule: ScheduleSpec,
        input: Any = None,  # noqa: A002  the name that users know
    ) -> ScheduleView:
        """Start a definition by time from now on; an immediate schedule starts it with this."""
        check_key("name", name)
        check(schedule)
        made = self._made(name, target, schedule, _input(input))
        plan = await self._flows.plan(target)
        begun = None
        if schedule.kind == "immediate":
            key = fire_key(made.id, made.created_at)
            begun = await self._flows.prepare(plan, input, source=made.source, fire_key=key)
        elif made.next_at is None:
            raise Invalid("no time of the schedule is still to come", "schedule_invalid")
        await self._core.run_with_cascade(
            lambda cascade: self._create(cascade, made, begun), self._actor
        )
        return await self.get(made.id)

    async def page(
        self, limit: int = 100, cursor: UUID | None = None, name: str | None = None
    ) -> SchedulePage:
        """The schedules, newest first; with a name, the one that has it."""
        bounds.number("limit", limit, 1, bounds.MAX_PAGE)
        bounds.text("name", name or "", bounds.MAX_TEXT)
        params = {"workspace": self._workspace, "name": name, "before": cursor, "most": limit + 1}
        rows = await self._core.store.fetch(Statement("schedules", params))
        found = [_view(row) for row in rows[:limit]]
        return SchedulePage(found, found[-1].id if len(rows) > limit else None)

    async def get(self, schedule: UUID | str) -> ScheduleView:
        """One schedule."""
        return _view(await self._find(schedule))

    async def next(self, schedule: UUID | str, n: int = 5) -> list[datetime]:
        """Its next times, in UTC and without jitter."""
        found = schedule_of(await self._find(schedule))
        if found.status == "ENDED":
            return []
        fixed = found.times.kind == "datetime-event"
        return following(found.times, found.last_at if fixed else self._core.now(), n)

    async def update(
        self, schedule: UUID | str, change: ScheduleChange, version: int | None = None
    ) -> ScheduleView:
        """Change a schedule, if it still has the version; other times hold from now on."""
        if change.schedule is not UNSET:
            check(change.schedule)
        if change.target is not UNSET:
            await self._flows.plan(change.target)
        text = UNSET if change.input is UNSET else _input(change.input)
        id_ = (await self._find(schedule))["id"]

        def script() -> Script[None]:
            found = yield from self._locked(id_)
            if version is not None and found.version != version:
                raise Conflict(
                    f"the schedule has version {found.version}, not {version}", "version_conflict"
                )
            yield from self._set(found, change, text)

        await self._core.store.transact(script)
        return await self.get(id_)

    async def pause(self, schedule: UUID | str) -> ScheduleView:
        """Start nothing until it is resumed; what runs goes on."""

        def paused(found: ScheduleRow) -> ScheduleRow:
            if found.status != "ACTIVE":
                raise Conflict(f"the schedule is {found.status}")
            return msgspec.structs.replace(found, status="PAUSED", next_at=None)

        return await self._move(schedule, "schedule_paused", paused)

    async def resume(self, schedule: UUID | str) -> ScheduleView:
        """Go on with the times from now on; a fixed time that has passed still starts."""

        def resumed(found: ScheduleRow) -> ScheduleRow:
            if found.status != "PAUSED":
                raise Conflict(f"the schedule is {found.status}")
            spec, now = found.times, self._core.now()
            last = found.last_at if spec.kind == "datetime-event" else max(now, found.last_at)
            upcoming = next_poll_at(spec, last, self._core.clock.random())
            return settled(msgspec.structs.replace(found, last_at=last, next_at=upcoming))

        return await self._move(schedule, "schedule_resumed", resumed)

    async def delete(self, schedule: UUID | str) -> None:
        """Forget a schedule; what it started goes on."""
        found = await self._find(schedule)
        params = {"workspace": self._workspace, "id": found["id"]}
        params |= {"actor": self._actor, "now": self._core.now()}

        def script() -> Script[None]:
            _known((yield Statement("schedule_remove", params)), schedule)

        await self._core.store.once(script)

    def put(self, wanted: Sequence[DesiredSchedule]) -> Script[dict[str, str]]:
        """Keep schedules under their names, as files ask for them; says what became of each.

        What they start may be stored by the same transaction, so it is not looked for.
        """
        actions = yield from self.compare(wanted)
        rows = yield self._named(list(actions))
        stored = {row["name"]: schedule_of(row) for row in rows}
        for each in wanted:
            if actions[each.name] == "created":
                made = self._made(each.name, each.target, each.schedule, _input(each.input))
                if each.schedule.kind == "immediate":
                    made = msgspec.structs.replace(made, queued=queue_text([made.created_at]))
                yield from self._add(settled(made), [ScheduleAuditNote("schedule_created")])
            elif actions[each.name] == "updated":
                told = ScheduleChange(target=each.target, schedule=each.schedule)
                yield from self._set(stored[each.name], told, _input(each.input))
        return actions

    def compare(self, wanted: Sequence[DesiredSchedule]) -> Script[dict[str, str]]:
        """What `put` would do; raises `Invalid` for what cannot be kept."""
        for each in wanted:
            check_key("name", each.name)
            check(each.schedule)
            _input(each.input)
        rows = yield self._named([each.name for each in wanted])
        stored = {row["name"]: schedule_of(row) for row in rows}
        return {each.name: _action(stored, each) for each in wanted}

    def _made(self, name: str, target: str, spec: ScheduleSpec, given: str | None) -> ScheduleRow:
        now = self._core.now()
        last = initial_cursor(spec, now)
        return ScheduleRow(
            id=self._core.clock.new_id(),
            workspace=self._workspace,
            name=name,
            target=target,
            spec=encoded(spec),
            input=given,
            last_at=last,
            next_at=next_poll_at(spec, last, self._core.clock.random()),
            created_at=now,
            updated_at=now,
        )

    def _create(
        self, cascade: Cascade, made: ScheduleRow, begun: dict[str, Any] | None
    ) -> Script[None]:
        if (yield self._named([made.name])):
            raise _taken(made.name)
        noted = [ScheduleAuditNote("schedule_created")]
        if begun is not None:
            yield from self._flows.begin(cascade, begun)
            made = msgspec.structs.replace(
                made, status="ENDED", fired=1, fired_at=made.created_at, last_flow=begun["id"]
            )
            noted += [fired(made.created_at, begun["id"]), ScheduleAuditNote("schedule_ended")]
        yield from self._add(made, noted)

    def _add(self, made: ScheduleRow, noted: Sequence[ScheduleAuditNote]) -> Script[None]:
        yield from check_value(self._workspace, self._caller, decode(made.input))
        if (yield added(made, noted, self._core.now(), self._actor)):
            return
        if (yield self._named([made.name])):
            raise _taken(made.name)
        raise Invalid(f"a workspace has at most {MAX_SCHEDULES:,} schedules", "too_large")

    def _set(
        self, found: ScheduleRow, change: ScheduleChange, text: str | UnsetType | None
    ) -> Script[None]:
        now, after = self._core.now(), found
        if change.target is not UNSET:
            after = msgspec.structs.replace(after, target=change.target)
        if text is not UNSET:
            after = msgspec.structs.replace(after, input=text)
        immediate = after.times.kind == "immediate"
        if change.schedule is not UNSET and (immediate or change.schedule != found.times):
            after = retimed(after, change.schedule, now, self._core.clock.random())
        if after != found:
            # Another target gets the input that is there, too.
            yield from check_value(self._workspace, self._caller, decode(after.input))
            yield changed(after, [ScheduleAuditNote("schedule_changed")], now, self._actor)

    async def _move(self, schedule: UUID | str, kind: str, decide: Any) -> ScheduleView:
        id_ = (await self._find(schedule))["id"]

        def script() -> Script[None]:
            after = decide((yield from self._locked(id_)))
            yield changed(after, [ScheduleAuditNote(kind)], self._core.now(), self._actor)

        await self._core.store.transact(script)
        return await self.get(id_)

    def _named(self, names: Sequence[str]) -> Statement:
        params = {"workspace": self._workspace, "names": sorted(names)}
        return Statement("schedules_named", params)

    def _locked(self, schedule: UUID) -> Script[ScheduleRow]:
        params = {"workspace": self._workspace, "id": schedule}
        return schedule_of(_known((yield Statement("schedule_locked", params)), schedule))

    async def _find(self, schedule: UUID | str) -> Row:
        id_ = id_in(schedule)
        if id_ is None:
            name = bounds.text("name", str(schedule), bounds.MAX_TEXT)
            params = {"workspace": self._workspace, "name": name, "before": None}
            rows = await self._core.store.fetch(Statement("schedules", params | {"most": 1}))
        else:
            params = {"workspace": self._workspace, "id": id_}
            rows = await self._core.store.fetch(Statement("schedule", params))
        return _known(rows, schedule)


def fire_key(schedule: UUID, time: datetime) -> str:
    """What makes the start of a schedule at one of its times the only one."""
    return f"schedule:{schedule}:{time.isoformat()}"


def fired(time: datetime, flow: UUID) -> ScheduleAuditNote:
    """What the trail says of a start."""
    return ScheduleAuditNote("schedule_fired", {"time": time, "flow": flow})


def id_in(name: UUID | str) -> UUID | None:
    """The id that something was named by, if it was."""
    if isinstance(name, UUID):
        return name
    try:
        return UUID(name)
    except ValueError:
        return None


def _input(given: Any) -> str | None:
    """What flows are started with, as it is stored; `Invalid` when it holds a secret itself."""
    if extract_secrets(given)[1]:
        text = 'input has secrets, but it is stored as written; use {"$secret": NAME}'
        raise Invalid(text, "secret_in_definition", field="input")
    return bounds.json_text("input", given)


def _differs(found: ScheduleRow, wanted: DesiredSchedule) -> bool:
    there = (found.target, found.times, decode(found.input))
    return there != (wanted.target, wanted.schedule, wanted.input)


def _action(stored: Mapping[str, ScheduleRow], wanted: DesiredSchedule) -> str:
    found = stored.get(wanted.name)
    if found is None:
        return "created"
    return "updated" if _differs(found, wanted) else "unchanged"


def _taken(name: str) -> Conflict:
    return Conflict(f"there is a schedule {name!r} already", "name_taken")


def _known(rows: Sequence[Row], schedule: UUID | str) -> Row:
    if not rows:
        raise NotFound(f"no schedule {schedule}")
    return rows[0]


def _view(row: Row) -> ScheduleView:
    found = schedule_of(row)
    names = (
        "id name target status next_at fired missed fired_at last_error version created_by"
        " created_at updated_at"
    ).split()
    return ScheduleView(
        **{name: getattr(found, name) for name in names},
        schedule=times_of(found.times),
        input=decode(found.input),
        queued=list(found.line),
        last_flow_id=found.last_flow,
    )
