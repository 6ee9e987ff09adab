"""Flows: start definitions, look at what became of them, control them."""

from typing import Annotated, Any, Literal
from uuid import UUID

from litestar import Response, get, post
from litestar.openapi.datastructures import ResponseSpec
from litestar.params import FromPath, FromQuery, JSONBody, QueryParameter

from tenuto.api.edge.openapi import MERMAID
from tenuto.api.routes.bodies import ReasonBody
from tenuto.api.routes.flow_bodies import FlowBody, RerunBody
from tenuto.api.routes.tasks import Key, Limit, TaskPage, count_submit
from tenuto.api.service import InjectedContext
from tenuto.engine.flows.graph import GraphView, mermaid
from tenuto.engine.flows.views import FlowPage, FlowView
from tenuto.model import bounds
from tenuto.model.errors import Invalid

Format = Annotated[Literal["json", "mermaid"], QueryParameter(name="format")]
Named = Annotated[str | None, QueryParameter(max_length=bounds.MAX_NAME)]


@post("/flows")
async def start(
    desk: InjectedContext, data: JSONBody[FlowBody], key: Key = None
) -> Response[FlowView]:
    """Run a stored definition; repeated with one key, it is one flow."""
    del key  # the guard has seen to it
    await count_submit(desk, 1)
    flow = await desk.engine.flows.start(
        data.key, data.input, steps=data.steps, priority=data.priority
    )
    return await begun(desk, flow)


async def begun(desk: InjectedContext, flow: UUID) -> Response[FlowView]:
    """A flow that was just made."""
    view = await desk.engine.flow_views.show(flow)
    return Response(view, status_code=201, headers={"Location": f"/api/v1/flows/{flow}"})


@get("/flows")
async def find(
    desk: InjectedContext,
    status: FromQuery[str | None] = None,
    key: Named = None,
    limit: Limit = 100,
    cursor: FromQuery[UUID | None] = None,
) -> FlowPage:
    """Flows newest first."""
    return await desk.engine.flow_views.page(status, key, limit, cursor)


@get("/flows/{flow_id:uuid}")
async def show(desk: InjectedContext, flow_id: FromPath[UUID]) -> FlowView:
    """One flow: how far it is, its tasks by status, its open groups."""
    return await desk.engine.flow_views.show(flow_id)


@get("/flows/{flow_id:uuid}/tasks")
async def tasks(
    desk: InjectedContext,
    flow_id: FromPath[UUID],
    limit: Limit = 100,
    cursor: FromQuery[UUID | None] = None,
) -> TaskPage:
    """The tasks of a flow, newest first."""
    page = await desk.engine.flow_views.tasks(flow_id, limit, cursor)
    return TaskPage(page.tasks, page.next_cursor)


@get("/flows/{flow_id:uuid}/graph")
async def graph(
    desk: InjectedContext, flow_id: FromPath[UUID], wanted: Format = "json"
) -> Response[GraphView]:
    """What was made in a flow and what is to come: as nodes and edges, or as Mermaid text."""
    return drawn(await desk.engine.flow_views.graph(flow_id), wanted)


def drawn(view: GraphView, wanted: str) -> Response[Any]:
    """A graph in the form that was asked for."""
    if wanted == "mermaid":
        return Response(mermaid(view), media_type=MERMAID)
    return Response(view)


@post("/flows/{flow_id:uuid}/cancel", status_code=200)
async def cancel(
    desk: InjectedContext, flow_id: FromPath[UUID], data: JSONBody[ReasonBody | None] = None
) -> FlowView:
    """End a flow with all that is open in it; running sessions are killed first."""
    await desk.engine.flows.cancel(flow_id, reason_of(data))
    return await desk.engine.flow_views.show(flow_id)


def reason_of(data: ReasonBody | None) -> str | None:
    """Why, if somebody said so."""
    reason = None if data is None else data.reason
    return None if reason is None else bounds.text("reason", reason, bounds.MAX_ERROR)


@post("/flows/{flow_id:uuid}/pause", status_code=200)
async def pause(desk: InjectedContext, flow_id: FromPath[UUID]) -> FlowView:
    """Hold everything of a flow; running sessions are stopped after a last checkpoint."""
    await desk.engine.flows.pause(flow_id)
    return await desk.engine.flow_views.show(flow_id)


@post("/flows/{flow_id:uuid}/resume", status_code=200)
async def resume(desk: InjectedContext, flow_id: FromPath[UUID]) -> FlowView:
    """Let a paused flow go on."""
    await desk.engine.flows.resume(flow_id)
    return await desk.engine.flow_views.show(flow_id)


@post(
    "/flows/{flow_id:uuid}/rerun",
    responses={200: ResponseSpec(FlowView, description="The same flow goes on.")},
)
async def rerun(
    desk: InjectedContext,
    flow_id: FromPath[UUID],
    data: JSONBody[RerunBody | None] = None,
    key: Key = None,
) -> Response[FlowView]:
    """A new flow of the same plan and input, or with `fromFailed` the same one from its failures.

    Repeated with one key, it is one flow.
    """
    del key  # the guard has seen to it
    wish = data or RerunBody()
    await count_submit(desk, 1)
    if not wish.from_failed:
        return await begun(desk, await desk.engine.rerun_flow(flow_id, steps=wish.steps))
    if wish.steps is not None:
        raise Invalid("steps are for a new flow", field="steps")
    await desk.engine.flows.revive(flow_id)
    return Response(await desk.engine.flow_views.show(flow_id), status_code=200)


HANDLERS = [start, find, show, tasks, graph, cancel, pause, resume, rerun]
