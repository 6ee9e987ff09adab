"""Triggers: make, look, change, hold and forget what is started after events."""

from uuid import UUID

import msgspec
from litestar import delete, get, patch, post
from litestar.params import FromPath, FromQuery, JSONBody

from tenuto.api.routes.bodies import Written
from tenuto.api.routes.schedules import Named
from tenuto.api.routes.tasks import IfMatch, Key, Limit, version_of
from tenuto.api.service import InjectedContext
from tenuto.engine.schedules.triggers import TriggerChange, TriggerPage, TriggerView


class TriggerBody(Written):
    """A trigger to be: `target` is the key of a definition, which gets the event as its input."""

    name: str
    event: str
    target: str
    filter: str | None = None


class TriggerPatch(Written):
    """What may be changed of a trigger."""

    event: str | msgspec.UnsetType = msgspec.UNSET
    target: str | msgspec.UnsetType = msgspec.UNSET
    filter: str | msgspec.UnsetType | None = msgspec.UNSET


@get("/triggers")
async def triggers(
    desk: InjectedContext,
    name: Named = None,
    limit: Limit = 100,
    cursor: FromQuery[UUID | None] = None,
) -> TriggerPage:
    """What is started after events, newest first."""
    return await desk.engine.triggers.page(limit, cursor, name)


@post("/triggers")
async def make(desk: InjectedContext, data: JSONBody[TriggerBody], key: Key = None) -> TriggerView:
    """Start a definition after each of these events from now on, if the filter holds of it."""
    del key  # the guard has seen to it
    return await desk.engine.triggers.create(data.name, data.event, data.target, data.filter)


@get("/triggers/{trigger_id:uuid}")
async def show(desk: InjectedContext, trigger_id: FromPath[UUID]) -> TriggerView:
    """One trigger."""
    return await desk.engine.triggers.get(trigger_id)


@patch("/triggers/{trigger_id:uuid}")
async def change(
    desk: InjectedContext,
    trigger_id: FromPath[UUID],
    data: JSONBody[TriggerPatch],
    if_match: IfMatch = None,
) -> TriggerView:
    """Change a trigger, for events from now on."""
    changes = TriggerChange(event=data.event, filter=data.filter, target=data.target)
    return await desk.engine.triggers.update(trigger_id, changes, version_of(if_match))


@delete("/triggers/{trigger_id:uuid}")
async def forget(desk: InjectedContext, trigger_id: FromPath[UUID]) -> None:
    """Forget a trigger; what it started goes on."""
    await desk.engine.triggers.delete(trigger_id)


@post("/triggers/{trigger_id:uuid}/pause", status_code=200)
async def pause(desk: InjectedContext, trigger_id: FromPath[UUID]) -> TriggerView:
    """Let events pass until it is resumed."""
    return await desk.engine.triggers.pause(trigger_id)


@post("/triggers/{trigger_id:uuid}/resume", status_code=200)
async def resume(desk: InjectedContext, trigger_id: FromPath[UUID]) -> TriggerView:
    """Look at the events from now on."""
    return await desk.engine.triggers.resume(trigger_id)


HANDLERS = [triggers, make, show, change, forget, pause, resume]
