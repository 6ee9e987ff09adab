"""Triggers, which start definitions after events: create, change, pause, resume, delete."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, Literal
from uuid import UUID

import msgspec
from msgspec import UNSET, UnsetType

from tenuto.engine.core import Core
from tenuto.engine.flows.start import Flows
from tenuto.engine.lookup import page_of
from tenuto.engine.schedules.rules import RuleKind, Rules
from tenuto.model.flows.definition import check_key
from tenuto.model.flows.expressions.parser import Expression, compile_expression
from tenuto.model.schedules.event_names import check_pattern
from tenuto.store.protocol import Row, Script, Statement

MAX_TRIGGERS = 500
"""Triggers in one workspace; every event is compared with each of them."""
_FIELDS = ("event", "filter", "target")
"""What users change."""
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


KIND = RuleKind(
    noun="trigger",
    max_rules=MAX_TRIGGERS,
    page="triggers",
    one="trigger",
    locked="trigger_locked",
    by_name="triggers_by_name",
    delete="trigger_delete",
)


class Triggers:
    """The triggers of one workspace, for one actor. Methods accept a trigger's name or id."""

    def __init__(self, core: Core, workspace: UUID, actor: str | None) -> None:
        self._core = core
        self._workspace = workspace
        self._actor = actor
        self._flows = Flows(core, workspace, actor)
        self._rules = Rules(KIND, core, workspace, actor)

    async def create(
        self,
        name: str,
        event: str,
        target: str,
        filter: str | None = None,  # noqa: A002  the name that users know
    ) -> TriggerView:
        """Creates a trigger; each new event that matches starts a flow. `Conflict`: name taken.

        An event matches if its name matches the pattern `event` and the filter is true for it.
        """
        desired = DesiredTrigger(name=name, event=event, target=target, filter=filter)
        _check(desired)
        await self._flows.build_plan(target)
        trigger_id = self._core.clock.new_id()
        await self._core.store.transact(lambda: self._insert(trigger_id, desired))
        return await self.get(trigger_id)

    async def page(
        self, limit: int = 100, cursor: UUID | None = None, name: str | None = None
    ) -> TriggerPage:
        """Returns triggers, newest first; with `name`, only the one with this name."""
        return TriggerPage(*page_of(await self._rules.page(limit, cursor, name), limit, _view))

    async def get(self, trigger: UUID | str) -> TriggerView:
        """Returns one trigger; raises `NotFound`."""
        return _view(await self._rules.find(trigger))

    async def update(
        self, trigger: UUID | str, change: TriggerChange, version: int | None = None
    ) -> TriggerView:
        """Changes and returns a trigger, for events from now on. Raises `NotFound`, `Conflict`.

        `Conflict` (`version_conflict`): the trigger no longer has the given version.
        """
        if change.target is not UNSET:
            await self._flows.build_plan(change.target)

        def write(row: Row) -> Script[None]:
            fields = {name: getattr(change, name) for name in _FIELDS}
            fields = {
                name: row[name] if value is UNSET else value for name, value in fields.items()
            }
            desired = DesiredTrigger(name=row["name"], **fields)
            _check(desired)
            yield self._changed_statement(row, desired)

        return await self.get(await self._rules.change(trigger, write, version=version))

    async def pause(self, trigger: UUID | str) -> TriggerView:
        """Pauses an active trigger (else `Conflict`); it ignores events until it is resumed."""
        return await self._set_status(trigger, "ACTIVE", "PAUSED", "paused")

    async def resume(self, trigger: UUID | str) -> TriggerView:
        """Resumes a paused trigger (else `Conflict`) for events from now on."""
        return await self._set_status(trigger, "PAUSED", "ACTIVE", "resumed")

    async def delete(self, trigger: UUID | str) -> None:
        """Deletes a trigger; flows that it started continue. Raises `NotFound`."""
        await self._rules.delete(trigger)

    def put(
        self, requested: Sequence[DesiredTrigger], *, dry_run: bool = False
    ) -> Script[dict[str, str]]:
        """Stores the triggers of files; returns by name `created`, `updated` or `unchanged`.

        A dry run changes nothing. Targets are not checked: the same transaction can store them.
        """
        for desired in requested:
            _check(desired)
        actions, stored = yield from self._rules.lock_and_compare(requested, _differs)
        for desired in () if dry_run else requested:
            if actions[desired.name] == "created":
                yield from self._insert(self._core.clock.new_id(), desired)
            elif actions[desired.name] == "updated":
                yield self._changed_statement(stored[desired.name], desired)
        return actions

    def _insert(self, trigger_id: UUID, desired: DesiredTrigger) -> Script[None]:
        """Inserts a trigger; raises `Conflict` if the name is taken, `Invalid` above the limit."""
        params = msgspec.structs.asdict(desired) | {
            "id": trigger_id,
            "workspace": self._workspace,
            "actor": self._actor,
            "now": self._core.now(),
            "most": MAX_TRIGGERS,
        }
        yield from self._rules.insert(desired.name, Statement("trigger_add", params))

    async def _set_status(
        self, trigger: UUID | str, from_status: str, to_status: str, action: str
    ) -> TriggerView:
        """Changes the status; raises `Conflict` if the trigger does not have `from_status`."""

        def write(row: Row) -> Script[None]:
            self._rules.check_status(trigger, row["status"], from_status, action)
            yield self._update_statement(row, f"trigger_{action}", {"status": to_status})

        return await self.get(await self._rules.change(trigger, write))

    def _changed_statement(self, row: Row, desired: DesiredTrigger) -> Statement:
        """Returns the statement that writes a user's new fields and clears the last error."""
        fields = {name: getattr(desired, name) for name in _FIELDS}
        return self._update_statement(row, "trigger_changed", fields | {"last_error": None})

    def _update_statement(self, row: Row, kind: str, fields: Mapping[str, Any]) -> Statement:
        """Returns the statement that writes new fields and an event; older events match no more."""
        names = ("id", "workspace", *_FIELDS, "status", "last_error")
        now = self._core.now()
        params = {name: row[name] for name in names} | dict(fields)
        params |= {"active_at": now, "kind": kind, "actor": self._actor, "now": now}
        return Statement("trigger_update", params)


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


def _differs(row: Row, desired: DesiredTrigger) -> bool:
    return any(row[name] != getattr(desired, name) for name in _FIELDS)


def _view(row: Row) -> TriggerView:
    names = [name for name in TriggerView.__struct_fields__ if name != "last_flow_id"]
    return TriggerView(**{name: row[name] for name in names}, last_flow_id=row["last_flow"])
