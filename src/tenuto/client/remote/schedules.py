"""Schedules, triggers and events over HTTP, with the methods of the engine."""

from datetime import datetime
from typing import Any
from uuid import UUID

import msgspec
from msgspec import UNSET

from tenuto.client.remote.engine import AnyEngine
from tenuto.client.remote.resource import RemoteResource
from tenuto.engine.schedules.events import EventView
from tenuto.engine.schedules.rules import parse_id
from tenuto.engine.schedules.schedules import (
    ScheduleChange,
    SchedulePage,
    ScheduleView,
    times_of,
)
from tenuto.engine.schedules.triggers import TriggerChange, TriggerPage, TriggerView
from tenuto.model.errors import NotFound
from tenuto.model.schedules.schedule import ScheduleSpec


class _NextTimes(msgspec.Struct):
    times: list[datetime]


class RemoteSchedules(RemoteResource):
    """The schedules of the token's workspace. Methods accept a schedule's name or id."""

    async def create(
        self,
        name: str,
        target: str,
        schedule: ScheduleSpec,
        input: Any = None,  # noqa: A002  public name
    ) -> ScheduleView:
        """Creates a schedule that starts a definition; an immediate one starts it now."""
        body = {"name": name, "target": target, "schedule": times_of(schedule), "input": input}
        return await self._call(ScheduleView, "POST", "schedules", body, once=True)

    async def page(
        self, limit: int = 100, cursor: UUID | None = None, name: str | None = None
    ) -> SchedulePage:
        """Returns a page of schedules, newest first; with `name`, only the one of that name."""
        return await self._call(
            SchedulePage,
            "GET",
            "schedules",
            params={"limit": limit, "cursor": cursor, "name": name},
        )

    async def get(self, schedule: UUID | str) -> ScheduleView:
        """Returns one schedule; raises `NotFound`."""
        if (id_ := parse_id(schedule)) is not None:
            return await self._call(ScheduleView, "GET", f"schedules/{id_}")
        matches = (await self.page(1, name=str(schedule))).schedules
        if not matches:
            raise NotFound(f"no schedule {schedule}")
        return matches[0]

    async def next(self, schedule: UUID | str, n: int = 5) -> list[datetime]:
        """Returns at most `n` coming times, in UTC and without jitter; none if it has ended."""
        path = f"schedules/{await self._resolve_id(schedule)}/next"
        return (await self._call(_NextTimes, "GET", path, params={"n": n})).times

    async def update(
        self, schedule: UUID | str, change: ScheduleChange, version: int | None = None
    ) -> ScheduleView:
        """Changes and returns a schedule, from now on; `Conflict` if `version` is outdated."""
        times = UNSET if change.schedule is UNSET else times_of(change.schedule)
        fields = {"target": change.target, "schedule": times, "input": change.input}
        body = {name: value for name, value in fields.items() if value is not UNSET}
        path = f"schedules/{await self._resolve_id(schedule)}"
        return await self._call(ScheduleView, "PATCH", path, body, version=version)

    async def pause(self, schedule: UUID | str) -> ScheduleView:
        """Pauses an active schedule (else `Conflict`) until resumed; running flows continue."""
        path = f"schedules/{await self._resolve_id(schedule)}/pause"
        return await self._call(ScheduleView, "POST", path)

    async def resume(self, schedule: UUID | str) -> ScheduleView:
        """Resumes a schedule with the times from now on; a missed fixed time still starts."""
        path = f"schedules/{await self._resolve_id(schedule)}/resume"
        return await self._call(ScheduleView, "POST", path)

    async def delete(self, schedule: UUID | str) -> None:
        """Deletes a schedule; the flows it started continue."""
        await self._call(type(None), "DELETE", f"schedules/{await self._resolve_id(schedule)}")

    async def _resolve_id(self, schedule: UUID | str) -> UUID:
        """Returns the id of a schedule from an id, its text, or a name; raises `NotFound`."""
        return parse_id(schedule) or (await self.get(schedule)).id


class RemoteTriggers(RemoteResource):
    """The triggers of the token's workspace. Methods accept a trigger's name or id."""

    async def create(
        self,
        name: str,
        event: str,
        target: str,
        filter: str | None = None,  # noqa: A002  public name
    ) -> TriggerView:
        """Creates a trigger: each new event of that name that matches `filter` starts `target`."""
        body = {"name": name, "event": event, "target": target, "filter": filter}
        return await self._call(TriggerView, "POST", "triggers", body, once=True)

    async def page(
        self, limit: int = 100, cursor: UUID | None = None, name: str | None = None
    ) -> TriggerPage:
        """Returns a page of triggers, newest first; with `name`, only the one of that name."""
        return await self._call(
            TriggerPage, "GET", "triggers", params={"limit": limit, "cursor": cursor, "name": name}
        )

    async def get(self, trigger: UUID | str) -> TriggerView:
        """Returns one trigger; raises `NotFound`."""
        if (id_ := parse_id(trigger)) is not None:
            return await self._call(TriggerView, "GET", f"triggers/{id_}")
        matches = (await self.page(1, name=str(trigger))).triggers
        if not matches:
            raise NotFound(f"no trigger {trigger}")
        return matches[0]

    async def update(
        self, trigger: UUID | str, change: TriggerChange, version: int | None = None
    ) -> TriggerView:
        """Changes and returns a trigger, for new events; `Conflict` if `version` is outdated."""
        path = f"triggers/{await self._resolve_id(trigger)}"
        return await self._call(TriggerView, "PATCH", path, change, version=version)

    async def pause(self, trigger: UUID | str) -> TriggerView:
        """Pauses an active trigger (else `Conflict`); it ignores events until it is resumed."""
        return await self._call(
            TriggerView, "POST", f"triggers/{await self._resolve_id(trigger)}/pause"
        )

    async def resume(self, trigger: UUID | str) -> TriggerView:
        """Resumes a paused trigger (else `Conflict`) for events from now on."""
        return await self._call(
            TriggerView, "POST", f"triggers/{await self._resolve_id(trigger)}/resume"
        )

    async def delete(self, trigger: UUID | str) -> None:
        """Deletes a trigger; the flows it started continue."""
        await self._call(type(None), "DELETE", f"triggers/{await self._resolve_id(trigger)}")

    async def _resolve_id(self, trigger: UUID | str) -> UUID:
        """Returns the id of a trigger from an id, its text, or a name; raises `NotFound`."""
        return parse_id(trigger) or (await self.get(trigger)).id


class Events:
    """Publishes events in a workspace, over HTTP or on a database."""

    def __init__(self, engine: AnyEngine) -> None:
        self._engine = engine

    async def publish(self, name: str, data: Any = None, task: UUID | None = None) -> EventView:
        """Publishes an event, which can start triggers; `task` is the task that it is about."""
        return await self._engine.publish(name, data, task)
