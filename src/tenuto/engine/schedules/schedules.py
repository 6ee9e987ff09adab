"""Schedules, which start definitions by time: create, change, pause, resume, delete."""

from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any, Literal
from uuid import UUID

import msgspec
from msgspec import UNSET, UnsetType

from tenuto.engine.core import Core
from tenuto.engine.flows.advance import Cascade
from tenuto.engine.flows.start import Flows
from tenuto.engine.lookup import page_of
from tenuto.engine.rows import decode_json
from tenuto.engine.schedules.rows import (
    MAX_SCHEDULES,
    ScheduleAuditNote,
    ScheduleRow,
    insert_statement,
    queue_json,
    schedule_of,
    spec_json,
    update_statement,
    with_derived_status,
    with_new_times,
)
from tenuto.engine.schedules.rules import RuleKind, Rules
from tenuto.engine.tenancy.secret_use import check_value
from tenuto.model import bounds
from tenuto.model.errors import Invalid
from tenuto.model.flows.definition import check_key
from tenuto.model.schedules.firing import initial_cursor, next_poll_at
from tenuto.model.schedules.schedule import (
    CatchUp,
    Overlap,
    ScheduleSpec,
    ScheduleType,
    check,
    next_times,
)
from tenuto.model.tenancy.access import Caller
from tenuto.model.tenancy.secrets import extract_secrets
from tenuto.store.protocol import Row, Script


class ScheduleTimes(
    msgspec.Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True
):
    """A `ScheduleSpec` with the field names of REST."""

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
        """Returns the same times as a `ScheduleSpec`."""
        return ScheduleSpec(**{name: getattr(self, name) for name in self.__struct_fields__})


def times_of(spec: ScheduleSpec) -> ScheduleTimes:
    """Returns the times with the field names of REST."""
    return ScheduleTimes(**{name: getattr(spec, name) for name in ScheduleTimes.__struct_fields__})


class ScheduleView(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A schedule as the API and the CLI show it; `missed` counts times that started no flow."""

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
    """One page of schedules; `next_cursor` is `None` on the last page."""

    schedules: list[ScheduleView]
    next_cursor: UUID | None = None


class ScheduleChange(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of a schedule to change; unset fields stay as they are."""

    target: str | UnsetType = UNSET
    schedule: ScheduleSpec | UnsetType = UNSET
    input: Any = UNSET


class DesiredSchedule(msgspec.Struct, frozen=True, kw_only=True):
    """A schedule as declared in a file."""

    name: str
    target: str
    schedule: ScheduleSpec
    input: Any = None


KIND = RuleKind(
    noun="schedule",
    max_rules=MAX_SCHEDULES,
    page="schedules",
    one="schedule",
    locked="schedule_locked",
    by_name="schedules_by_name",
    delete="schedule_delete",
)


class Schedules:
    """The schedules of one workspace, for one actor. Methods accept a schedule's name or id."""

    def __init__(
        self, core: Core, workspace: UUID, actor: str | None, caller: Caller | None = None
    ) -> None:
        self._core = core
        self._workspace = workspace
        self._actor = actor
        self._caller = caller
        self._flows = Flows(core, workspace, actor)
        self._rules = Rules(KIND, core, workspace, actor)

    async def create(
        self,
        name: str,
        target: str,
        schedule: ScheduleSpec,
        input: Any = None,  # noqa: A002  the name that users know
    ) -> ScheduleView:
        """Creates and returns a schedule; an `immediate` one starts now. `Conflict`: name taken."""
        check_key("name", name)
        check(schedule)
        new = self._new_row(name, target, schedule, _input_json(input))
        plan = await self._flows.build_plan(target)
        flow_params = None
        if schedule.kind == "immediate":
            key = fire_key(new.id, new.created_at)
            flow_params = await self._flows.prepare(plan, input, source=new.source, fire_key=key)
        elif new.next_at is None:
            raise Invalid("the schedule has no time in the future", "schedule_invalid")
        await self._core.run_with_cascade(
            lambda cascade: self._insert_and_start(cascade, new, flow_params), self._actor
        )
        return await self.get(new.id)

    async def page(
        self, limit: int = 100, cursor: UUID | None = None, name: str | None = None
    ) -> SchedulePage:
        """Returns schedules, newest first; with `name`, only the one with this name."""
        return SchedulePage(*page_of(await self._rules.page(limit, cursor, name), limit, _view))

    async def get(self, schedule: UUID | str) -> ScheduleView:
        """Returns one schedule; raises `NotFound`."""
        return _view(await self._rules.find(schedule))

    async def next(self, schedule: UUID | str, n: int = 5) -> list[datetime]:
        """Returns at most `n` coming times, in UTC and without jitter; none if it has ended."""
        row = schedule_of(await self._rules.find(schedule))
        if row.status == "ENDED":
            return []
        has_fixed_time = row.times.kind == "datetime-event"
        return next_times(row.times, row.last_at if has_fixed_time else self._core.now(), n)

    async def update(
        self, schedule: UUID | str, change: ScheduleChange, version: int | None = None
    ) -> ScheduleView:
        """Changes and returns a schedule; new times from now on. Raises `NotFound`, `Conflict`.

        `Conflict` (`version_conflict`): the schedule no longer has the given version.
        """
        if change.schedule is not UNSET:
            check(change.schedule)
        if change.target is not UNSET:
            await self._flows.build_plan(change.target)
        text = UNSET if change.input is UNSET else _input_json(change.input)
        id_ = await self._rules.change(
            schedule,
            lambda row: self._apply_change(schedule_of(row), change, text),
            version=version,
        )
        return await self.get(id_)

    async def pause(self, schedule: UUID | str) -> ScheduleView:
        """Pauses an active schedule (else `Conflict`) until resumed; running flows continue."""

        def pause_row(row: ScheduleRow) -> ScheduleRow:
            self._rules.check_status(schedule, row.status, "ACTIVE", "paused")
            return msgspec.structs.replace(row, status="PAUSED", next_at=None)

        return await self._update_row(schedule, "schedule_paused", pause_row)

    async def resume(self, schedule: UUID | str) -> ScheduleView:
        """Resumes a paused schedule (else `Conflict`) from now on; a missed fixed time starts."""

        def resume_row(row: ScheduleRow) -> ScheduleRow:
            self._rules.check_status(schedule, row.status, "PAUSED", "resumed")
            spec, now = row.times, self._core.now()
            last = row.last_at if spec.kind == "datetime-event" else max(now, row.last_at)
            upcoming = next_poll_at(spec, last, self._core.clock.random())
            return with_derived_status(msgspec.structs.replace(row, last_at=last, next_at=upcoming))

        return await self._update_row(schedule, "schedule_resumed", resume_row)

    async def delete(self, schedule: UUID | str) -> None:
        """Deletes a schedule; flows that it started continue. Raises `NotFound`."""
        await self._rules.delete(schedule)

    def put(
        self, requested: Sequence[DesiredSchedule], *, dry_run: bool = False
    ) -> Script[dict[str, str]]:
        """Stores the schedules of files; returns by name `created`, `updated` or `unchanged`.

        A dry run changes nothing. Targets are not checked: the same transaction can store them.
        """
        for desired in requested:
            check_key("name", desired.name)
            check(desired.schedule)
            _input_json(desired.input)
        actions, stored = yield from self._rules.lock_and_compare(requested, _differs)
        for desired in () if dry_run else requested:
            if actions[desired.name] == "created":
                new = self._new_row(
                    desired.name, desired.target, desired.schedule, _input_json(desired.input)
                )
                if desired.schedule.kind == "immediate":
                    new = msgspec.structs.replace(new, queued=queue_json([new.created_at]))
                yield from self._insert(
                    with_derived_status(new), [ScheduleAuditNote("schedule_created")]
                )
            elif actions[desired.name] == "updated":
                change = ScheduleChange(target=desired.target, schedule=desired.schedule)
                row = schedule_of(stored[desired.name])
                yield from self._apply_change(row, change, _input_json(desired.input))
        return actions

    def _new_row(
        self, name: str, target: str, spec: ScheduleSpec, input_json: str | None
    ) -> ScheduleRow:
        """Returns a new schedule's row, not stored; `next_at` is `None` if no time is left."""
        now = self._core.now()
        last = initial_cursor(spec, now)
        return ScheduleRow(
            id=self._core.clock.new_id(),
            workspace=self._workspace,
            name=name,
            target=target,
            spec=spec_json(spec),
            input=input_json,
            last_at=last,
            next_at=next_poll_at(spec, last, self._core.clock.random()),
            created_at=now,
            updated_at=now,
        )

    def _insert_and_start(
        self, cascade: Cascade, new: ScheduleRow, flow_params: dict[str, Any] | None
    ) -> Script[None]:
        """Inserts a schedule; with `flow_params`, starts a flow and ends it. Raises `Conflict`."""
        yield from self._rules.require_free_name(new.name)
        notes = [ScheduleAuditNote("schedule_created")]
        if flow_params is not None:
            yield from self._flows.start_prepared(cascade, flow_params)
            new = msgspec.structs.replace(
                new, status="ENDED", fired=1, fired_at=new.created_at, last_flow=flow_params["id"]
            )
            notes += [
                fired_note(new.created_at, flow_params["id"]),
                ScheduleAuditNote("schedule_ended"),
            ]
        yield from self._insert(new, notes)

    def _insert(self, new: ScheduleRow, notes: Sequence[ScheduleAuditNote]) -> Script[None]:
        """Inserts a schedule; `Forbidden` if its input names a secret for a higher role."""
        yield from check_value(self._workspace, self._caller, decode_json(new.input))
        statement = insert_statement(new, notes, self._core.now(), self._actor)
        yield from self._rules.insert(new.name, statement)

    def _apply_change(
        self, stored: ScheduleRow, change: ScheduleChange, input_json: str | UnsetType | None
    ) -> Script[None]:
        """Updates a locked schedule if it differs; `Forbidden` for a secret of a higher role."""
        now, after = self._core.now(), stored
        if change.target is not UNSET:
            after = msgspec.structs.replace(after, target=change.target)
        if input_json is not UNSET:
            after = msgspec.structs.replace(after, input=input_json)
        immediate = after.times.kind == "immediate"
        if change.schedule is not UNSET and (immediate or change.schedule != stored.times):
            after = with_new_times(after, change.schedule, now, self._core.clock.random())
        if after != stored:
            # The stored input is checked again, because a new target receives it.
            yield from check_value(self._workspace, self._caller, decode_json(after.input))
            yield update_statement(after, [ScheduleAuditNote("schedule_changed")], now, self._actor)

    async def _update_row(
        self, schedule: UUID | str, event_kind: str, build_row: Callable[[ScheduleRow], ScheduleRow]
    ) -> ScheduleView:
        """Locks the schedule, stores what `build_row` returns, with an event, and returns it."""

        def write(row: Row) -> Script[None]:
            notes, after = [ScheduleAuditNote(event_kind)], build_row(schedule_of(row))
            yield update_statement(after, notes, self._core.now(), self._actor)

        return await self.get(await self._rules.change(schedule, write))


def fire_key(schedule: UUID, time: datetime) -> str:
    """Returns the idempotency key of a schedule's start at one of its times."""
    return f"schedule:{schedule}:{time.isoformat()}"


def fired_note(time: datetime, flow: UUID) -> ScheduleAuditNote:
    """Returns the audit note that the schedule started this flow."""
    return ScheduleAuditNote("schedule_fired", {"time": time, "flow": flow})


def _input_json(value: Any) -> str | None:
    """Returns the flow input as JSON, or `None`; raises `Invalid` if it contains a secret."""
    if extract_secrets(value)[1]:
        text = 'input contains secrets, but it is stored unencrypted; use {"$secret": NAME}'
        raise Invalid(text, "secret_in_definition", field="input")
    return bounds.to_json_text("input", value)


def _differs(row: Row, desired: DesiredSchedule) -> bool:
    stored = schedule_of(row)
    current = (stored.target, stored.times, decode_json(stored.input))
    return current != (desired.target, desired.schedule, desired.input)


def _view(row: Row) -> ScheduleView:
    schedule = schedule_of(row)
    names = (
        "id name target status next_at fired missed fired_at last_error version created_by"
        " created_at updated_at"
    ).split()
    return ScheduleView(
        **{name: getattr(schedule, name) for name in names},
        schedule=times_of(schedule.times),
        input=decode_json(schedule.input),
        queued=list(schedule.queued_times),
        last_flow_id=schedule.last_flow,
    )
