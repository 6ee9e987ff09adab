"""Triggers, which start definitions after events: create, change, pause, resume, delete."""

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, Literal
from uuid import UUID

import msgspec
from msgspec import UNSET, UnsetType

from tenuto.engine.core import Core
from tenuto.engine.flows.start import Flows
from tenuto.engine.schedules.schedules import parse_id
from tenuto.model import bounds
from tenuto.model.errors import Conflict, Invalid, NotFound
from tenuto.model.flows.definition import check_key
from tenuto.model.flows.expressions.parser import Expression, compile_expression
from tenuto.model.schedules.event_names import check_pattern
from tenuto.store.protocol import Row, Script, Statement

MAX_TRIGGERS = 500
"""Triggers in one workspace; every event is compared with each of them."""
_FILTER_VARIABLES = frozenset({"event"})


class TriggerView(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A trigger as the API and the CLI show it."""

    id: UUID
    name: str
    event: str
    filter: str | None
    target: str
    status: Literal["ACTIVE", "PAUSED"]
    fired: int
    fired_at: datetime | None
    last_flow_id: UUID | None
    last_error: str | None
    version: int
    created_by: str | None
    created_at: datetime
    updated_at: datetime


class TriggerPage(msgspec.Struct, frozen=True, rename="camel"):
    """One page of triggers; `next_cursor` is `None` on the last page."""

    triggers: list[TriggerView]
    next_cursor: UUID | None = None


class TriggerChange(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Fields of a trigger to change; unset fields stay as they are."""

    event: str | UnsetType = UNSET
    filter: str | UnsetType | None = UNSET
    target: str | UnsetType = UNSET


class DesiredTrigger(msgspec.Struct, frozen=True, kw_only=True):
    """A trigger as declared in a file."""

    name: str
    event: str
    target: str
    filter: str | None = None


class Triggers:
    """The triggers of one workspace, for one actor. Methods accept a trigger's name or id."""

    def __init__(self, core: Core, workspace: UUID, actor: str | None) -> None:
        self._core = core
        self._workspace = workspace
        self._actor = actor
        self._flows = Flows(core, workspace, actor)

    async def create(
        self,
        name: str,
        event: str,
        target: str,
        filter: str | None = None,  # noqa: A002  the name that users know
    ) -> TriggerView:
        """Creates a trigger and returns it; it starts a flow for each new event that matches.

        An event matches if its name matches the pattern `event` and the filter is true for it.
        """
        _check(DesiredTrigger(name=name, event=event, target=target, filter=filter))
        await self._flows.build_plan(target)
        trigger_id = self._core.clock.new_id()
        desired = DesiredTrigger(name=name, event=event, target=target, filter=filter)
        await self._core.store.transact(lambda: self._insert(trigger_id, desired))
        return await self.get(trigger_id)

    async def page(
        self, limit: int = 100, cursor: UUID | None = None, name: str | None = None
    ) -> TriggerPage:
        """Returns triggers, newest first; with `name`, only the one with this name."""
        bounds.check_number("limit", limit, 1, bounds.MAX_PAGE)
        bounds.check_text("name", name or "", bounds.MAX_TEXT)
        params = {"workspace": self._workspace, "name": name, "before": cursor, "most": limit + 1}
        rows = await self._core.store.fetch(Statement("triggers", params))
        triggers = [_view(row) for row in rows[:limit]]
        return TriggerPage(triggers, triggers[-1].id if len(rows) > limit else None)

    async def get(self, trigger: UUID | str) -> TriggerView:
        """Returns one trigger; raises `NotFound`."""
        return _view(await self._require_row(trigger))

    async def update(
        self, trigger: UUID | str, change: TriggerChange, version: int | None = None
    ) -> TriggerView:
        """Changes a trigger and returns it; the change applies to events from now on.

        Raises `Conflict` (`version_conflict`) if the trigger no longer has the given version.
        """
        if change.target is not UNSET:
            await self._flows.build_plan(change.target)

        def changed_fields(row: Row) -> dict[str, Any]:
            if version is not None and row["version"] != version:
                raise Conflict(
                    f"trigger {trigger} has version {row['version']}, not {version};"
                    " read it again and repeat the change",
                    "version_conflict",
                )
            fields = {name: row[name] for name in ("event", "filter", "target")}
            fields |= {
                name: value for name in fields if (value := getattr(change, name)) is not UNSET
            }
            _check(DesiredTrigger(name=row["name"], **fields))
            return fields | {"active_at": self._core.now(), "last_error": None}

        return await self._update_row(trigger, "trigger_changed", changed_fields)

    async def pause(self, trigger: UUID | str) -> TriggerView:
        """Pauses an active trigger (else `Conflict`); it ignores events until it is resumed."""
        return await self._set_status(trigger, "ACTIVE", "PAUSED", "trigger_paused")

    async def resume(self, trigger: UUID | str) -> TriggerView:
        """Resumes the trigger for events from now on."""
        return await self._set_status(trigger, "PAUSED", "ACTIVE", "trigger_resumed")

    async def delete(self, trigger: UUID | str) -> None:
        """Deletes a trigger; flows that it started continue."""
        row = await self._require_row(trigger)
        params = {"workspace": self._workspace, "id": row["id"]}
        params |= {"actor": self._actor, "now": self._core.now()}

        def script() -> Script[None]:
            _require_one((yield Statement("trigger_delete", params)), trigger)

        await self._core.store.transact_one(script)

    def put(self, requested: Sequence[DesiredTrigger]) -> Script[dict[str, str]]:
        """Creates or updates the triggers of files; returns the action by name.

        Targets are not checked: the same transaction can store them.
        """
        actions = yield from self.compare(requested)
        stored = {row["name"]: row for row in (yield self._by_name_statement(list(actions)))}
        for desired in requested:
            if actions[desired.name] == "created":
                yield from self._insert(self._core.clock.new_id(), desired)
            elif actions[desired.name] == "updated":
                fields = {name: getattr(desired, name) for name in ("event", "filter", "target")}
                fields |= {"active_at": self._core.now(), "last_error": None}
                yield self._update_statement(stored[desired.name], fields, "trigger_changed")
        return actions

    def compare(self, requested: Sequence[DesiredTrigger]) -> Script[dict[str, str]]:
        """Returns what `put` would do, by name; raises `Invalid` for an invalid trigger."""
        for desired in requested:
            _check(desired)
        rows = yield self._by_name_statement([desired.name for desired in requested])
        stored = {row["name"]: row for row in rows}
        return {desired.name: _action(stored, desired) for desired in requested}

    def _insert(self, trigger_id: UUID, desired: DesiredTrigger) -> Script[None]:
        """Inserts a trigger; raises `Conflict` if the name is taken, `Invalid` above the limit."""
        if (yield self._by_name_statement([desired.name])):
            raise _name_taken_error(desired.name)
        params: dict[str, Any] = {
            "id": trigger_id,
            "workspace": self._workspace,
            "actor": self._actor,
        }
        params |= {name: getattr(desired, name) for name in DesiredTrigger.__struct_fields__}
        params |= {"now": self._core.now(), "most": MAX_TRIGGERS}
        if (yield Statement("trigger_add", params)):
            return
        if (yield self._by_name_statement([desired.name])):
            raise _name_taken_error(desired.name)
        text = f"the workspace has {MAX_TRIGGERS:,} triggers, the maximum; delete one first"
        raise Invalid(text, "too_large")

    async def _set_status(
        self, trigger: UUID | str, from_status: str, to_status: str, kind: str
    ) -> TriggerView:
        """Changes the status; raises `Conflict` if the trigger does not have `from_status`."""

        def status_fields(row: Row) -> dict[str, Any]:
            if row["status"] != from_status:
                text = f"trigger {trigger} is {row['status']}, not {from_status}"
                raise Conflict(text)
            return {"status": to_status, "active_at": self._core.now()}

        return await self._update_row(trigger, kind, status_fields)

    async def _update_row(
        self, trigger: UUID | str, kind: str, decide: Callable[[Row], dict[str, Any]]
    ) -> TriggerView:
        """Locks the trigger, stores the fields that `decide` returns, and an event of this kind."""
        id_ = (await self._require_row(trigger))["id"]

        def script() -> Script[None]:
            params = {"workspace": self._workspace, "id": id_}
            row = _require_one((yield Statement("trigger_locked", params)), trigger)
            yield self._update_statement(row, decide(row), kind)

        await self._core.store.transact(script)
        return await self.get(id_)

    def _update_statement(self, row: Row, fields: Mapping[str, Any], kind: str) -> Statement:
        """Returns the statement that writes the row with these new fields, and an event."""
        names = "id workspace event filter target status active_at last_error".split()
        params = {name: row[name] for name in names} | dict(fields)
        event = {"kind": kind, "actor": self._actor, "now": self._core.now()}
        return Statement("trigger_update", params | event)

    def _by_name_statement(self, names: Sequence[str]) -> Statement:
        params = {"workspace": self._workspace, "names": sorted(names)}
        return Statement("triggers_by_name", params)

    async def _require_row(self, trigger: UUID | str) -> Row:
        """Returns the row of the trigger with this id or name; raises `NotFound`."""
        id_ = parse_id(trigger)
        if id_ is None:
            name = bounds.check_text("name", str(trigger), bounds.MAX_TEXT)
            params = {"workspace": self._workspace, "name": name, "before": None}
            rows = await self._core.store.fetch(Statement("triggers", params | {"most": 1}))
        else:
            params = {"workspace": self._workspace, "id": id_}
            rows = await self._core.store.fetch(Statement("trigger", params))
        return _require_one(rows, trigger)


@lru_cache(maxsize=MAX_TRIGGERS)
def compile_filter(text: str) -> Expression:
    """Returns a trigger's compiled filter; raises `Invalid` if it is not a valid expression."""
    return compile_expression(text, _FILTER_VARIABLES)


def _check(desired: DesiredTrigger) -> None:
    """Raises `Invalid` if a field of the trigger is invalid."""
    check_key("name", desired.name)
    check_pattern(desired.event)
    check_key("target", desired.target)
    if desired.filter is not None:
        compile_filter(desired.filter)


def _action(stored: Mapping[str, Row], desired: DesiredTrigger) -> str:
    """Returns `created`, `updated` or `unchanged`."""
    row = stored.get(desired.name)
    if row is None:
        return "created"
    names = ("event", "filter", "target")
    is_unchanged = all(row[name] == getattr(desired, name) for name in names)
    return "unchanged" if is_unchanged else "updated"


def _name_taken_error(name: str) -> Conflict:
    return Conflict(f"trigger {name!r} already exists; choose another name", "name_taken")


def _require_one(rows: Sequence[Row], trigger: UUID | str) -> Row:
    """Returns the first row; raises `NotFound` if there is none."""
    if not rows:
        raise NotFound(f"no trigger {trigger}")
    return rows[0]


def _view(row: Row) -> TriggerView:
    names = [name for name in TriggerView.__struct_fields__ if name != "last_flow_id"]
    return TriggerView(**{name: row[name] for name in names}, last_flow_id=row["last_flow"])
