"""Routes for triggers, which start flows after events."""

from uuid import UUID

import msgspec
from litestar.params import FromPath, FromQuery, JSONBody

from tenuto.api.operation import READ, WRITE, operation
from tenuto.api.routes.flow_bodies import StrictBody
from tenuto.api.routes.schedules import NameFilter
from tenuto.api.routes.tasks import IdempotencyKey, IfMatch, Limit, version_of
from tenuto.api.service import InjectedContext
from tenuto.engine.schedules.triggers import TriggerChange, TriggerPage, TriggerView


class TriggerBody(StrictBody):
    """A trigger to create; `target` is the key of a definition, which gets the event as input."""

    name: str
    event: str
    target: str
    filter: str | None = None


class TriggerPatch(StrictBody):
    """Changes of a trigger; fields that are not set stay as they are."""

    event: str | msgspec.UnsetType = msgspec.UNSET
    target: str | msgspec.UnsetType = msgspec.UNSET
    filter: str | msgspec.UnsetType | None = msgspec.UNSET


@operation("GET", "/triggers", READ)
async def list_triggers(
    ctx: InjectedContext,
    name: NameFilter = None,
    limit: Limit = 100,
    cursor: FromQuery[UUID | None] = None,
) -> TriggerPage:
    """Returns triggers, newest first."""
    return await ctx.engine.triggers.page(limit, cursor, name)


@operation("POST", "/triggers", WRITE, idempotent=True)
async def create_trigger(
    ctx: InjectedContext, data: JSONBody[TriggerBody], key: IdempotencyKey = None
) -> TriggerView:
    """Creates a trigger: each matching event from now on starts the definition.

    A request repeated with the same `Idempotency-Key` creates one trigger only.
    """
    del key  # the guard handles it
    return await ctx.engine.triggers.create(data.name, data.event, data.target, data.filter)


@operation("GET", "/triggers/{trigger_id:uuid}", READ)
async def get_trigger(ctx: InjectedContext, trigger_id: FromPath[UUID]) -> TriggerView:
    """Returns one trigger."""
    return await ctx.engine.triggers.get(trigger_id)


@operation("PATCH", "/triggers/{trigger_id:uuid}", WRITE)
async def update_trigger(
    ctx: InjectedContext,
    trigger_id: FromPath[UUID],
    data: JSONBody[TriggerPatch],
    if_match: IfMatch = None,
) -> TriggerView:
    """Changes a trigger, for events from now on."""
    changes = TriggerChange(event=data.event, filter=data.filter, target=data.target)
    return await ctx.engine.triggers.update(trigger_id, changes, version_of(if_match))


@operation("DELETE", "/triggers/{trigger_id:uuid}", WRITE)
async def delete_trigger(ctx: InjectedContext, trigger_id: FromPath[UUID]) -> None:
    """Deletes a trigger; flows that it started continue."""
    await ctx.engine.triggers.delete(trigger_id)


@operation("POST", "/triggers/{trigger_id:uuid}/pause", WRITE, status_code=200)
async def pause_trigger(ctx: InjectedContext, trigger_id: FromPath[UUID]) -> TriggerView:
    """Pauses a trigger: events are skipped until it is resumed."""
    return await ctx.engine.triggers.pause(trigger_id)


@operation("POST", "/triggers/{trigger_id:uuid}/resume", WRITE, status_code=200)
async def resume_trigger(ctx: InjectedContext, trigger_id: FromPath[UUID]) -> TriggerView:
    """Resumes a paused trigger, for events from now on."""
    return await ctx.engine.triggers.resume(trigger_id)
