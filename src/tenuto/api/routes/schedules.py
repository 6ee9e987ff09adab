"""Routes for schedules, which start flows by time."""

from datetime import datetime
from typing import Annotated, Any
from uuid import UUID

import msgspec
from litestar.params import FromPath, FromQuery, JSONBody, QueryParameter

from tenuto.api.operation import READ, WRITE, operation
from tenuto.api.routes.flow_bodies import StrictBody
from tenuto.api.routes.tasks import IdempotencyKey, IfMatch, Limit, count_submit, version_of
from tenuto.api.service import InjectedContext
from tenuto.engine.schedules.schedules import (
    ScheduleChange,
    SchedulePage,
    ScheduleTimes,
    ScheduleView,
)
from tenuto.model import bounds

NameFilter = Annotated[str | None, QueryParameter(max_length=bounds.MAX_NAME)]
Count = Annotated[int, QueryParameter(ge=1, le=bounds.MAX_PAGE)]


class ScheduleBody(StrictBody):
    """A schedule to create; `target` is the key of a definition, `input` the input of its flows."""

    name: str
    target: str
    schedule: ScheduleTimes
    input: Any = None


class SchedulePatch(StrictBody):
    """Changes of a schedule; fields that are not set stay as they are."""

    target: str | msgspec.UnsetType = msgspec.UNSET
    schedule: ScheduleTimes | msgspec.UnsetType = msgspec.UNSET
    input: Any = msgspec.UNSET


class NextTimes(msgspec.Struct, frozen=True):
    """The next times of a schedule."""

    times: list[datetime]


@operation("GET", "/schedules", READ)
async def list_schedules(
    ctx: InjectedContext,
    name: NameFilter = None,
    limit: Limit = 100,
    cursor: FromQuery[UUID | None] = None,
) -> SchedulePage:
    """Returns schedules, newest first."""
    return await ctx.engine.schedules.page(limit, cursor, name)


@operation("POST", "/schedules", WRITE, idempotent=True)
async def create_schedule(
    ctx: InjectedContext, data: JSONBody[ScheduleBody], key: IdempotencyKey = None
) -> ScheduleView:
    """Creates a schedule, which starts flows of a definition from now on.

    A schedule of type `immediate` starts its flow with this request. A request repeated with the
    same `Idempotency-Key` creates one schedule only.
    """
    del key  # the guard handles it
    if data.schedule.type == "immediate":
        await count_submit(ctx, 1)
    spec = data.schedule.spec()
    return await ctx.engine.schedules.create(data.name, data.target, spec, data.input)


@operation("GET", "/schedules/{schedule_id:uuid}", READ)
async def get_schedule(ctx: InjectedContext, schedule_id: FromPath[UUID]) -> ScheduleView:
    """Returns one schedule."""
    return await ctx.engine.schedules.get(schedule_id)


@operation("PATCH", "/schedules/{schedule_id:uuid}", WRITE)
async def update_schedule(
    ctx: InjectedContext,
    schedule_id: FromPath[UUID],
    data: JSONBody[SchedulePatch],
    if_match: IfMatch = None,
) -> ScheduleView:
    """Changes a schedule; new times apply from now on."""
    times = msgspec.UNSET if data.schedule is msgspec.UNSET else data.schedule.spec()
    changes = ScheduleChange(target=data.target, schedule=times, input=data.input)
    return await ctx.engine.schedules.update(schedule_id, changes, version_of(if_match))


@operation("DELETE", "/schedules/{schedule_id:uuid}", WRITE)
async def delete_schedule(ctx: InjectedContext, schedule_id: FromPath[UUID]) -> None:
    """Deletes a schedule; flows that it started continue."""
    await ctx.engine.schedules.delete(schedule_id)


@operation("POST", "/schedules/{schedule_id:uuid}/pause", WRITE, status_code=200)
async def pause_schedule(ctx: InjectedContext, schedule_id: FromPath[UUID]) -> ScheduleView:
    """Pauses a schedule: it starts nothing until it is resumed."""
    return await ctx.engine.schedules.pause(schedule_id)


@operation("POST", "/schedules/{schedule_id:uuid}/resume", WRITE, status_code=200)
async def resume_schedule(ctx: InjectedContext, schedule_id: FromPath[UUID]) -> ScheduleView:
    """Resumes a paused schedule, for times from now on."""
    return await ctx.engine.schedules.resume(schedule_id)


@operation("GET", "/schedules/{schedule_id:uuid}/next", READ)
async def list_next_times(
    ctx: InjectedContext, schedule_id: FromPath[UUID], n: Count = 5
) -> NextTimes:
    """Returns the next `n` times, in UTC and without jitter."""
    return NextTimes(await ctx.engine.schedules.next(schedule_id, n))
