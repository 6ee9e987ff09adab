"""Schedules, triggers and events behind a server: the calls of the engine's own."""

from datetime import datetime
from typing import Any, TypeVar
from uuid import UUID

import msgspec
from msgspec import UNSET

from tenuto.client.remote.engine import AnyEngine
from tenuto.client.remote.http import ApiRequest, ServerConnection
from tenuto.client.remote.worker import V1
from tenuto.engine.schedules.events import EventView
from tenuto.engine.schedules.schedules import (
    ScheduleChange,
    SchedulePage,
    ScheduleView,
    id_in,
    times_of,
)
from tenuto.engine.schedules.triggers import TriggerChange, TriggerPage, TriggerView
from tenuto.model.errors import NotFound
from tenuto.model.schedules.schedule import ScheduleSpec

T = TypeVar("T")


class _Times(msgspec.Struct):
    times: list[datetime]


class _Remote:
    """One kind of thing that is named by its name or id."""

    def __init__(self, link: ServerConnection) -> None:
        self._link = link

    async def _get(self, kind: type[T], path: str, **params: Any) -> T:
        ask = ApiRequest(method="GET", path=f"{V1}/{path}", params=params, repeatable=True)
        return await self._link.ask(kind, ask)

    async def _make(self, kind: type[T], path: str, body: Any) -> T:
        """Make something, once though the answer be lost."""
        headers = {"Idempotency-Key": str(self._link.clock.new_id())}
        ask = ApiRequest(
            method="POST", path=f"{V1}/{path}", body=body, headers=headers, repeatable=True
        )
        return await self._link.ask(kind, ask)

    async def _send(self, kind: type[T], method: str, path: str, body: Any = UNSET) -> T:
        return await self._link.ask(kind, ApiRequest(method=method, path=f"{V1}/{path}", body=body))

    async def _patch(self, kind: type[T], path: str, body: Any, version: int | None) -> T:
        headers = {} if version is None else {"If-Match": f'"{version}"'}
        ask = ApiRequest(method="PATCH", path=f"{V1}/{path}", body=body, headers=headers)
        return await self._link.ask(kind, ask)


class RemoteSchedules(_Remote):
    """The schedules of a token's workspace. One is named by its name or id."""

    async def create(
        self,
        name: str,
        target: str,
        schedule: ScheduleSpec,
        input: Any = None,  # noqa: A002  the name that users know
    ) -> ScheduleView:
        """Start a definition by time from now on; an immediate schedule starts it with this."""
        body = {"name": name, "target": target, "schedule": times_of(schedule), "input": input}
        return await self._make(ScheduleView, "schedules", body)

    async def page(
        self, limit: int = 100, cursor: UUID | None = None, name: str | None = None
    ) -> SchedulePage:
        """The schedules, newest first; with a name, the one that has it."""
        return await self._get(SchedulePage, "schedules", limit=limit, cursor=cursor, name=name)

    async def get(self, schedule: UUID | str) -> ScheduleView:
        """One schedule."""
        if (id_ := id_in(schedule)) is not None:
            return await self._get(ScheduleView, f"schedules/{id_}")
        found = (await self.page(1, name=str(schedule))).schedules
        if not found:
            raise NotFound(f"no schedule {schedule}")
        return found[0]

    async def next(self, schedule: UUID | str, n: int = 5) -> list[datetime]:
        """Its next times, in UTC and without jitter."""
        path = f"schedules/{await self._id(schedule)}/next"
        return (await self._get(_Times, path, n=n)).times

    async def update(
        self, schedule: UUID | str, change: ScheduleChange, version: int | None = None
    ) -> ScheduleView:
        """Change a schedule, if it still has the version; other times hold from now on."""
        times = UNSET if change.schedule is UNSET else times_of(change.schedule)
        said = {"target": change.target, "schedule": times, "input": change.input}
        body = {name: value for name, value in said.items() if value is not UNSET}
        path = f"schedules/{await self._id(schedule)}"
        return await self._patch(ScheduleView, path, body, version)

    async def pause(self, schedule: UUID | str) -> ScheduleView:
        """Start nothing until it is resumed; what runs goes on."""
        path = f"schedules/{await self._id(schedule)}/pause"
        return await self._send(ScheduleView, "POST", path)

    async def resume(self, schedule: UUID | str) -> ScheduleView:
        """Go on with the times from now on; a fixed time that has passed still starts."""
        path = f"schedules/{await self._id(schedule)}/resume"
        return await self._send(ScheduleView, "POST", path)

    async def delete(self, schedule: UUID | str) -> None:
        """Forget a schedule; what it started goes on."""
        await self._send(type(None), "DELETE", f"schedules/{await self._id(schedule)}")

    async def _id(self, schedule: UUID | str) -> UUID:
        return id_in(schedule) or (await self.get(schedule)).id


class RemoteTriggers(_Remote):
    """The triggers of a token's workspace. One is named by its name or id."""

    async def create(
        self,
        name: str,
        event: str,
        target: str,
        filter: str | None = None,  # noqa: A002  the name that users know
    ) -> TriggerView:
        """Start a definition after each of these events from now on, if the filter holds of it."""
        body = {"name": name, "event": event, "target": target, "filter": filter}
        return await self._make(TriggerView, "triggers", body)

    async def page(
        self, limit: int = 100, cursor: UUID | None = None, name: str | None = None
    ) -> TriggerPage:
        """The triggers, newest first; with a name, the one that has it."""
        return await self._get(TriggerPage, "triggers", limit=limit, cursor=cursor, name=name)

    async def get(self, trigger: UUID | str) -> TriggerView:
        """One trigger."""
        if (id_ := id_in(trigger)) is not None:
            return await self._get(TriggerView, f"triggers/{id_}")
        found = (await self.page(1, name=str(trigger))).triggers
        if not found:
            raise NotFound(f"no trigger {trigger}")
        return found[0]

    async def update(
        self, trigger: UUID | str, change: TriggerChange, version: int | None = None
    ) -> TriggerView:
        """Change a trigger, if it still has the version; for events from now on."""
        path = f"triggers/{await self._id(trigger)}"
        return await self._patch(TriggerView, path, change, version)

    async def pause(self, trigger: UUID | str) -> TriggerView:
        """Let events pass until it is resumed."""
        return await self._send(TriggerView, "POST", f"triggers/{await self._id(trigger)}/pause")

    async def resume(self, trigger: UUID | str) -> TriggerView:
        """Look at the events from now on."""
        return await self._send(TriggerView, "POST", f"triggers/{await self._id(trigger)}/resume")

    async def delete(self, trigger: UUID | str) -> None:
        """Forget a trigger; what it started goes on."""
        await self._send(type(None), "DELETE", f"triggers/{await self._id(trigger)}")

    async def _id(self, trigger: UUID | str) -> UUID:
        return id_in(trigger) or (await self.get(trigger)).id


class Events:
    """What a workspace is told of."""

    def __init__(self, engine: AnyEngine) -> None:
        self._engine = engine

    async def publish(self, name: str, data: Any = None, task: UUID | None = None) -> EventView:
        """Tell the workspace, and its triggers, that something happened; perhaps by a task."""
        return await self._engine.publish(name, data, task)
