"""Groups: define them, start them, look at their runs and control them."""

from typing import Annotated
from uuid import UUID

import msgspec
from litestar import Response, get, post
from litestar.params import FromPath, FromQuery, JSONBody, QueryParameter

from tenuto.api.routes.bodies import ReasonBody
from tenuto.api.routes.flow_bodies import GroupBody, StartBody
from tenuto.api.routes.flows import Format, Named, begun, drawn, reason_of
from tenuto.api.routes.tasks import Key, Limit, count_submit
from tenuto.api.service import InjectedContext
from tenuto.engine.flows.definitions import DefinitionView
from tenuto.engine.flows.graph import GraphView
from tenuto.engine.flows.start import input_text
from tenuto.engine.flows.views import FlowView, GroupPage, GroupView
from tenuto.model.errors import Conflict, NotFound


class CreatedGroup(msgspec.Struct, frozen=True):
    """A group that is defined, and its flow if it was started."""

    definition: DefinitionView
    flow: FlowView | None = None


@post("/groups")
async def create(desk: InjectedContext, data: JSONBody[GroupBody], key: Key = None) -> CreatedGroup:
    """Define a group and, with `start`, run it; a key that is taken is refused."""
    del key  # the guard has seen to it
    spec = data.spec()
    if data.start:  # it can start, or nothing is defined either
        await desk.engine.flows.plan(spec.key, {spec.key: spec})
        input_text(data.input)
        await count_submit(desk, 1)
        await desk.engine.flows.check_room()
    try:
        definition = await desk.engine.definitions.put(spec, 0)
    except Conflict as error:
        if error.code != "version_conflict":
            raise
        raise Conflict(f"there is a definition {spec.key!r} already", "name_taken") from error
    if not data.start:
        return CreatedGroup(definition)
    flow = await desk.engine.flows.start(spec.key, data.input)
    return CreatedGroup(definition, await desk.engine.flow_views.show(flow))


@get("/groups")
async def find(
    desk: InjectedContext,
    status: FromQuery[str | None] = None,
    key: Named = None,
    flow: Annotated[UUID | None, QueryParameter(name="flowId")] = None,
    limit: Limit = 100,
    cursor: FromQuery[UUID | None] = None,
) -> GroupPage:
    """Runs of groups, newest first."""
    return await desk.engine.flow_views.groups(status, key, flow, limit, cursor)


@get("/groups/{group_id:str}")
async def show(desk: InjectedContext, group_id: FromPath[str]) -> GroupView:
    """One run of a group, by its id; by a key, the newest run of it."""
    return await _shown(desk, await _run(desk, group_id))


@get("/groups/{group_id:str}/graph")
async def graph(
    desk: InjectedContext, group_id: FromPath[str], wanted: Format = "json"
) -> Response[GraphView]:
    """What was made in a run of a group and what is to come, as nodes and edges or Mermaid text."""
    run = await _run(desk, group_id)
    return drawn(await desk.engine.flow_views.group_graph(run), wanted)


@post("/groups/{group_id:str}/start")
async def start(
    desk: InjectedContext,
    group_id: FromPath[str],
    data: JSONBody[StartBody | None] = None,
    key: Key = None,
) -> Response[FlowView]:
    """Run a group by its key, or that of which an id is a run; repeated with one key, once."""
    del key  # the guard has seen to it
    wish = data or StartBody()
    await count_submit(desk, 1)
    named = await _key(desk, group_id)
    if (await desk.engine.definitions.get(named)).kind != "group":
        raise NotFound(f"no group {group_id}")
    flow = await desk.engine.flows.start(
        named, wish.input, steps=wish.steps, priority=wish.priority
    )
    return await begun(desk, flow)


@post("/groups/{group_id:str}/cancel", status_code=200)
async def cancel(
    desk: InjectedContext, group_id: FromPath[str], data: JSONBody[ReasonBody | None] = None
) -> GroupView:
    """End a run of a group with all that is open in it; running sessions are killed first."""
    run = await _run(desk, group_id)
    await desk.engine.flows.cancel_group(run, reason_of(data))
    return await _shown(desk, run)


@post("/groups/{group_id:str}/pause", status_code=200)
async def pause(desk: InjectedContext, group_id: FromPath[str]) -> GroupView:
    """Hold everything of a run of a group."""
    run = await _run(desk, group_id)
    await desk.engine.flows.pause_group(run)
    return await _shown(desk, run)


@post("/groups/{group_id:str}/resume", status_code=200)
async def resume(desk: InjectedContext, group_id: FromPath[str]) -> GroupView:
    """Let a paused run of a group go on."""
    run = await _run(desk, group_id)
    await desk.engine.flows.resume_group(run)
    return await _shown(desk, run)


async def _run(desk: InjectedContext, name: str) -> UUID:
    return await desk.engine.flow_views.find_group(name)


async def _key(desk: InjectedContext, name: str) -> str:
    try:
        return (await desk.engine.flow_views.group(UUID(name))).key
    except ValueError:
        return name


async def _shown(desk: InjectedContext, run: UUID) -> GroupView:
    return await desk.engine.flow_views.group(run)


HANDLERS = [create, find, show, graph, start, cancel, pause, resume]
