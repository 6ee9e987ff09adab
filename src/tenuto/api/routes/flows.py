"""Routes for flows: start definitions, list, read and control their flows."""

from typing import Annotated, Any, Literal
from uuid import UUID

from litestar import Response
from litestar.openapi.datastructures import ResponseSpec
from litestar.params import FromPath, FromQuery, JSONBody, QueryParameter

from tenuto.api.edge.openapi import MERMAID
from tenuto.api.operation import READ, WRITE, operation
from tenuto.api.routes.bodies import ReasonBody
from tenuto.api.routes.flow_bodies import FlowBody, RerunBody
from tenuto.api.routes.tasks import IdempotencyKey, Limit, TaskPage, count_submit
from tenuto.api.service import InjectedContext
from tenuto.engine.engine import Engine
from tenuto.engine.flows.graph import GraphView, mermaid
from tenuto.engine.flows.start import Flows
from tenuto.engine.flows.views import FlowPage, FlowView, FlowViews
from tenuto.model import bounds
from tenuto.model.errors import Invalid

GraphFormat = Annotated[Literal["json", "mermaid"], QueryParameter(name="format")]
KeyFilter = Annotated[str | None, QueryParameter(max_length=bounds.MAX_NAME)]


@operation("POST", "/flows", WRITE, idempotent=True)
async def start_flow(
    ctx: InjectedContext, data: JSONBody[FlowBody], key: IdempotencyKey = None
) -> Response[FlowView]:
    """Starts a flow of a stored definition.

    A request repeated with the same `Idempotency-Key` starts one flow only.
    """
    del key  # the guard handles it
    await count_submit(ctx, 1)
    flow = await ctx.engine.flows.start(
        data.key, data.input, steps=data.steps, priority=data.priority
    )
    return await created_flow_response(ctx, flow)


async def created_flow_response(ctx: InjectedContext, flow: UUID) -> Response[FlowView]:
    """Returns the response for a new flow, with its `Location`."""
    view = await ctx.engine.flow_views.show(flow)
    return Response(view, status_code=201, headers={"Location": f"/api/v1/flows/{flow}"})


@operation("GET", "/flows", READ, remote=FlowViews.page)
async def list_flows(
    ctx: InjectedContext,
    status: FromQuery[str | None] = None,
    key: KeyFilter = None,
    limit: Limit = 100,
    cursor: FromQuery[UUID | None] = None,
) -> FlowPage:
    """Returns flows, newest first."""
    return await ctx.engine.flow_views.page(status, key, limit, cursor)


@operation("GET", "/flows/{flow_id:uuid}", READ, remote=FlowViews.show)
async def get_flow(ctx: InjectedContext, flow_id: FromPath[UUID]) -> FlowView:
    """Returns one flow: its progress, its tasks by status and its open groups."""
    return await ctx.engine.flow_views.show(flow_id)


@operation("GET", "/flows/{flow_id:uuid}/tasks", READ, remote=FlowViews.tasks)
async def list_flow_tasks(
    ctx: InjectedContext,
    flow_id: FromPath[UUID],
    limit: Limit = 100,
    cursor: FromQuery[UUID | None] = None,
) -> TaskPage:
    """Returns the tasks of a flow, newest first."""
    page = await ctx.engine.flow_views.tasks(flow_id, limit, cursor)
    return TaskPage(page.tasks, page.next_cursor)


@operation("GET", "/flows/{flow_id:uuid}/graph", READ, remote=FlowViews.graph)
async def get_flow_graph(
    ctx: InjectedContext, flow_id: FromPath[UUID], graph_format: GraphFormat = "json"
) -> Response[GraphView]:
    """Returns the activated and planned parts of a flow: nodes and edges, or Mermaid text."""
    return graph_response(await ctx.engine.flow_views.graph(flow_id), graph_format)


def graph_response(view: GraphView, graph_format: str) -> Response[Any]:
    """Returns a graph as Mermaid text for the format `mermaid`, otherwise as JSON."""
    if graph_format == "mermaid":
        return Response(mermaid(view), media_type=MERMAID)
    return Response(view)


@operation("POST", "/flows/{flow_id:uuid}/cancel", WRITE, status_code=200, remote=Flows.cancel)
async def cancel_flow(
    ctx: InjectedContext, flow_id: FromPath[UUID], data: JSONBody[ReasonBody | None] = None
) -> FlowView:
    """Cancels a flow with all its open tasks and groups; running sessions are killed first."""
    await ctx.engine.flows.cancel(flow_id, reason_of(data))
    return await ctx.engine.flow_views.show(flow_id)


def reason_of(data: ReasonBody | None) -> str | None:
    """Returns the reason in the body, if any; raises `Invalid` if it is too long."""
    reason = None if data is None else data.reason
    return None if reason is None else bounds.check_text("reason", reason, bounds.MAX_ERROR)


@operation("POST", "/flows/{flow_id:uuid}/pause", WRITE, status_code=200, remote=Flows.pause)
async def pause_flow(ctx: InjectedContext, flow_id: FromPath[UUID]) -> FlowView:
    """Pauses all tasks of a flow; running sessions are stopped after a last checkpoint."""
    await ctx.engine.flows.pause(flow_id)
    return await ctx.engine.flow_views.show(flow_id)


@operation("POST", "/flows/{flow_id:uuid}/resume", WRITE, status_code=200, remote=Flows.resume)
async def resume_flow(ctx: InjectedContext, flow_id: FromPath[UUID]) -> FlowView:
    """Resumes a paused flow."""
    await ctx.engine.flows.resume(flow_id)
    return await ctx.engine.flow_views.show(flow_id)


@operation(
    "POST",
    "/flows/{flow_id:uuid}/rerun",
    WRITE,
    idempotent=True,
    responses={200: ResponseSpec(FlowView, description="The same flow continues.")},
    remote=Engine.rerun_flow,
)
async def rerun_flow(
    ctx: InjectedContext,
    flow_id: FromPath[UUID],
    data: JSONBody[RerunBody | None] = None,
    key: IdempotencyKey = None,
) -> Response[FlowView]:
    """Runs a flow again: a new flow with the same plan and input.

    With `fromFailed` the same flow continues from its failed tasks. A request repeated with the
    same `Idempotency-Key` starts one flow only.
    """
    del key  # the guard handles it
    body = data or RerunBody()
    await count_submit(ctx, 1)
    if not body.from_failed:
        return await created_flow_response(
            ctx, await ctx.engine.rerun_flow(flow_id, steps=body.steps)
        )
    if body.steps is not None:
        raise Invalid("steps cannot be combined with fromFailed", field="steps")
    await ctx.engine.flows.revive(flow_id)
    return Response(await ctx.engine.flow_views.show(flow_id), status_code=200)
