"""Triggers: definitions that are started after events, as people make and change them."""

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, Literal
from uuid import UUID

import msgspec
from msgspec import UNSET, UnsetType

from tenuto.engine.core import Core
from tenuto.engine.flows.start import Flows
from tenuto.engine.schedules.schedules import id_in
from tenuto.model import bounds
from tenuto.model.errors import Conflict, Invalid, NotFound
from tenuto.model.flows.definition import check_key
from tenuto.model.flows.expressions.parser import Expression, compile_expression
from tenuto.model.schedules.event_names import check_pattern
from tenuto.store.protocol import Row, Script, Statement

MAX_TRIGGERS = 500
"""Of a workspace: each of them looks at every event."""
_NAMES = frozenset({"event"})


class TriggerView(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A trigger as people see it."""

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
    """Some triggers and where the next ones begin."""

    triggers: list[TriggerView]
    next_cursor: UUID | None = None


class TriggerChange(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """What a person changes of a trigger; the rest stays."""

    event: str | UnsetType = UNSET
    filter: str | UnsetType | None = UNSET
    target: str | UnsetType = UNSET


class DesiredTrigger(msgspec.Struct, frozen=True, kw_only=True):
    """A trigger as a file asks for it."""

    name: str
    event: str
    target: str
    filter: str | None = None


class Triggers:
    """The triggers of one workspace, on behalf of one actor. One is named by its name or id."""

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
        """Start a definition after each of these events from now on, if the filter holds of it."""
        _check(DesiredTrigger(name=name, event=event, target=target, filter=filter))
        await self._flows.plan(target)
        made = self._core.clock.new_id()
        wanted = DesiredTrigger(name=name, event=event, target=target, filter=filter)
        await self._core.store.transact(lambda: self._add(made, wanted))
        return await self.get(made)

    async def page(
        self, limit: int = 100, cursor: UUID | None = None, name: str | None = None
    ) -> TriggerPage:
        """The triggers, newest first; with a name, the one that has it."""
        bounds.number("limit", limit, 1, bounds.MAX_PAGE)
        bounds.text("name", name or "", bounds.MAX_TEXT)
        params = {"workspace": self._workspace, "name": name, "before": cursor, "most": limit + 1}
        rows = await self._core.store.fetch(Statement("triggers", params))
        found = [_view(row) for row in rows[:limit]]
        return TriggerPage(found, found[-1].id if len(rows) > limit else None)

    async def get(self, trigger: UUID | str) -> TriggerView:
        """One trigger."""
        return _view(await self._find(trigger))

    async def update(
        self, trigger: UUID | str, change: TriggerChange, version: int | None = None
    ) -> TriggerView:
        """Change a trigger, if it still has the version; for events from now on."""
        if change.target is not UNSET:
            await self._flows.plan(change.target)

        def changed(row: Row) -> dict[str, Any]:
            if version is not None and row["version"] != version:
                raise Conflict(
                    f"the trigger has version {row['version']}, not {version}", "version_conflict"
                )
            fields = {name: row[name] for name in ("event", "filter", "target")}
            fields |= {
                name: value for name in fields if (value := getattr(change, name)) is not UNSET
            }
            _check(DesiredTrigger(name=row["name"], **fields))
            return fields | {"active_at": self._core.now(), "last_error": None}

        return await self._move(trigger, "trigger_changed", changed)

    async def pause(self, trigger: UUID | str) -> TriggerView:
        """Let events pass until it is resumed."""
        return await self._turn(trigger, "ACTIVE", "PAUSED", "trigger_paused")

    async def resume(self, trigger: UUID | str) -> TriggerView:
        """Look at the events from now on."""
        return await self._turn(trigger, "PAUSED", "ACTIVE", "trigger_resumed")

    async def delete(self, trigger: UUID | str) -> None:
        """Forget a trigger; what it started goes on."""
        found = await self._find(trigger)
        params = {"workspace": self._workspace, "id": found["id"]}
        params |= {"actor": self._actor, "now": self._core.now()}

        def script() -> Script[None]:
            _known((yield Statement("trigger_remove", params)), trigger)

        await self._core.store.once(script)

    def put(self, wanted: Sequence[DesiredTrigger]) -> Script[dict[str, str]]:
        """Keep triggers under their names, as files ask for them; says what became of each.

        What they start may be stored by the same transaction, so it is not looked for.
        """
        actions = yield from self.compare(wanted)
        stored = {row["name"]: row for row in (yield self._named(list(actions)))}
        for each in wanted:
            if actions[each.name] == "created":
                yield from self._add(self._core.clock.new_id(), each)
            elif actions[each.name] == "updated":
                fields = {name: getattr(each, name) for name in ("event", "filter", "target")}
                fields |= {"active_at": self._core.now(), "last_error": None}
                yield self._set(stored[each.name], fields, "trigger_changed")
        return actions

    def compare(self, wanted: Sequence[DesiredTrigger]) -> Script[dict[str, str]]:
        """What `put` would do; raises `Invalid` for what cannot be kept."""
        for each in wanted:
            _check(each)
        rows = yield self._named([each.name for each in wanted])
        stored = {row["name"]: row for row in rows}
        return {each.name: _action(stored, each) for each in wanted}

    def _add(self, made: UUID, wanted: DesiredTrigger) -> Script[None]:
        if (yield self._named([wanted.name])):
            raise _taken(wanted.name)
        params: dict[str, Any] = {"id": made, "workspace": self._workspace, "actor": self._actor}
        params |= {name: getattr(wanted, name) for name in DesiredTrigger.__struct_fields__}
        params |= {"now": self._core.now(), "most": MAX_TRIGGERS}
        if (yield Statement("trigger_add", params)):
            return
        if (yield self._named([wanted.name])):
            raise _taken(wanted.name)
        raise Invalid(f"a workspace has at most {MAX_TRIGGERS:,} triggers", "too_large")

    async def _turn(self, trigger: UUID | str, source: str, target: str, kind: str) -> TriggerView:
        def turned(row: Row) -> dict[str, Any]:
            if row["status"] != source:
                raise Conflict(f"the trigger is {row['status']}")
            return {"status": target, "active_at": self._core.now()}

        return await self._move(trigger, kind, turned)

    async def _move(
        self, trigger: UUID | str, kind: str, decide: Callable[[Row], dict[str, Any]]
    ) -> TriggerView:
        id_ = (await self._find(trigger))["id"]

        def script() -> Script[None]:
            params = {"workspace": self._workspace, "id": id_}
            row = _known((yield Statement("trigger_locked", params)), trigger)
            yield self._set(row, decide(row), kind)

        await self._core.store.transact(script)
        return await self.get(id_)

    def _set(self, row: Row, fields: Mapping[str, Any], kind: str) -> Statement:
        names = "id workspace event filter target status active_at last_error".split()
        params = {name: row[name] for name in names} | dict(fields)
        now = {"kind": kind, "actor": self._actor, "now": self._core.now()}
        return Statement("trigger_set", params | now)

    def _named(self, names: Sequence[str]) -> Statement:
        params = {"workspace": self._workspace, "names": sorted(names)}
        return Statement("triggers_named", params)

    async def _find(self, trigger: UUID | str) -> Row:
        id_ = id_in(trigger)
        if id_ is None:
            name = bounds.text("name", str(trigger), bounds.MAX_TEXT)
            params = {"workspace": self._workspace, "name": name, "before": None}
            rows = await self._core.store.fetch(Statement("triggers", params | {"most": 1}))
        else:
            params = {"workspace": self._workspace, "id": id_}
            rows = await self._core.store.fetch(Statement("trigger", params))
        return _known(rows, trigger)


@lru_cache(maxsize=MAX_TRIGGERS)
def condition(text: str) -> Expression:
    """A trigger's filter, understood; `Invalid` when it cannot be."""
    return compile_expression(text, _NAMES)


def _check(wanted: DesiredTrigger) -> None:
    check_key("name", wanted.name)
    check_pattern(wanted.event)
    check_key("target", wanted.target)
    if wanted.filter is not None:
        condition(wanted.filter)


def _action(stored: Mapping[str, Row], wanted: DesiredTrigger) -> str:
    row = stored.get(wanted.name)
    if row is None:
        return "created"
    names = ("event", "filter", "target")
    same = all(row[name] == getattr(wanted, name) for name in names)
    return "unchanged" if same else "updated"


def _taken(name: str) -> Conflict:
    return Conflict(f"there is a trigger {name!r} already", "name_taken")


def _known(rows: Sequence[Row], trigger: UUID | str) -> Row:
    if not rows:
        raise NotFound(f"no trigger {trigger}")
    return rows[0]


def _view(row: Row) -> TriggerView:
    names = [name for name in TriggerView.__struct_fields__ if name != "last_flow_id"]
    return TriggerView(**{name: row[name] for name in names}, last_flow_id=row["last_flow"])
