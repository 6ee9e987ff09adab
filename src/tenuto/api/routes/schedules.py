"""Schedules: make, look, change, hold and forget what is started by time."""

from datetime import datetime
from typing import Annotated, Any
from uuid import UUID

import msgspec
from litestar import delete, get, patch, post
from litestar.params import FromPath, FromQuery, JSONBody, QueryParameter

from tenuto.api.routes.bodies import Written
from tenuto.api.routes.tasks import IfMatch, Key, Limit, count_submit, version_of
from tenuto.api.service import InjectedContext
from tenuto.engine.schedules.schedules import (
    ScheduleChange,
    SchedulePage,
    ScheduleTimes,
    ScheduleView,
)
from tenuto.model import bounds

Named = Annotated[str | None, QueryParameter(max_length=bounds.MAX_NAME)]
Count = Annotated[int, QueryParameter(ge=1, le=bounds.MAX_PAGE)]


class ScheduleBody(Written):
    """A schedule to be: `target` is the key of a definition, `input` what its flows start with."""

    name: str
    target: str
    schedule: ScheduleTimes
    input: Any = None


class SchedulePatch(Written):
    """What may be changed of a schedule."""

    target: str | msgspec.UnsetType = msgspec.UNSET
    schedule: ScheduleTimes | msgspec.UnsetType = msgspec.UNSET
    input: Any = msgspec.UNSET


class NextTimes(msgspec.Struct, frozen=True):
    """Times to come."""

    times: list[datetime]


@get("/schedules")
async def schedules(
    desk: InjectedContext,
    name: Named = None,
    limit: Limit = 100,
    cursor: FromQuery[UUID | None] = None,
) -> SchedulePage:
    """What is started by time, newest first."""
    return await desk.engine.schedules.page(limit, cursor, name)


@post("/schedules")
async def make(
    desk: InjectedContext, data: JSONBody[ScheduleBody], key: Key = None
) -> ScheduleView:
    """Start a definition by time from now on; an immediate schedule starts it with this."""
    del key  # the guard has seen to it
    if data.schedule.type == "immediate":
        await count_submit(desk, 1)
    spec = data.schedule.spec()
    return await desk.engine.schedules.create(data.name, data.target, spec, data.input)


@get("/schedules/{schedule_id:uuid}")
async def show(desk: InjectedContext, schedule_id: FromPath[UUID]) -> ScheduleView:
    """One schedule."""
    return await desk.engine.schedules.get(schedule_id)


@patch("/schedules/{schedule_id:uuid}")
async def change(
    desk: InjectedContext,
    schedule_id: FromPath[UUID],
    data: JSONBody[SchedulePatch],
    if_match: IfMatch = None,
) -> ScheduleView:
    """Change a schedule; other times hold from now on."""
    times = msgspec.UNSET if data.schedule is msgspec.UNSET else data.schedule.spec()
    changes = ScheduleChange(target=data.target, schedule=times, input=data.input)
    return await desk.engine.schedules.update(schedule_id, changes, version_of(if_match))


@delete("/schedules/{schedule_id:uuid}")
async def forget(desk: InjectedContext, schedule_id: FromPath[UUID]) -> None:
    """Forget a schedule; what it started goes on."""
    await desk.engine.schedules.delete(schedule_id)


@post("/schedules/{schedule_id:uuid}/pause", status_code=200)
async def pause(desk: InjectedContext, schedule_id: FromPath[UUID]) -> ScheduleView:
    """Start nothing until it is resumed."""
    return await desk.engine.schedules.pause(schedule_id)


@post("/schedules/{schedule_id:uuid}/resume", status_code=200)
async def resume(desk: InjectedContext, schedule_id: FromPath[UUID]) -> ScheduleView:
    """Go on with the times from now on."""
    return await desk.engine.schedules.resume(schedule_id)


@get("/schedules/{schedule_id:uuid}/next")
async def upcoming(desk: InjectedContext, schedule_id: FromPath[UUID], n: Count = 5) -> NextTimes:
    """The next times, in UTC and without jitter."""
    return NextTimes(await desk.engine.schedules.next(schedule_id, n))


HANDLERS = [schedules, make, show, change, forget, pause, resume, upcoming]
