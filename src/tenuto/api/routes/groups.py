"""Routes for groups: define and start them, list, read and control their runs."""

from typing import Annotated
from uuid import UUID

import msgspec
from litestar import Response
from litestar.params import FromPath, FromQuery, JSONBody, QueryParameter

from tenuto.api.operation import READ, WRITE, operation
from tenuto.api.routes.bodies import ReasonBody
from tenuto.api.routes.flow_bodies import GroupBody, StartBody
from tenuto.api.routes.flows import (
    GraphFormat,
    KeyFilter,
    created_flow_response,
    graph_response,
    reason_of,
)
from tenuto.api.routes.tasks import IdempotencyKey, Limit, count_submit
from tenuto.api.service import InjectedContext
from tenuto.engine.flows.definitions import DefinitionView
from tenuto.engine.flows.graph import GraphView
from tenuto.engine.flows.start import Flows, encode_input
from tenuto.engine.flows.views import FlowView, FlowViews, GroupPage, GroupView
from tenuto.model.errors import Conflict, NotFound


class CreatedGroup(msgspec.Struct, frozen=True):
    """The definition of a new group, and its flow if the group was started."""

    definition: DefinitionView
    flow: FlowView | None = None


@operation("POST", "/groups", WRITE, idempotent=True)
async def create_group(
    ctx: InjectedContext, data: JSONBody[GroupBody], key: IdempotencyKey = None
) -> CreatedGroup:
    """Defines a group and, with `start`, starts a flow of it.

    A key that has a definition already is refused.
    """
    del key  # the guard handles it
    spec = data.spec()
    if data.start:  # check first that it can start; otherwise define nothing
        await ctx.engine.flows.build_plan(spec.key, {spec.key: spec})
        encode_input(data.input)
        await count_submit(ctx, 1)
        await ctx.engine.flows.check_quota()
    try:
        definition = await ctx.engine.definitions.put(spec, 0)
    except Conflict as error:
        if error.code != "version_conflict":
            raise
        raise Conflict(
            f"a definition {spec.key!r} exists already; choose another key", "name_taken"
        ) from error
    if not data.start:
        return CreatedGroup(definition)
    flow = await ctx.engine.flows.start(spec.key, data.input)
    return CreatedGroup(definition, await ctx.engine.flow_views.show(flow))


@operation("GET", "/groups", READ, remote=FlowViews.groups)
async def list_groups(
    ctx: InjectedContext,
    status: FromQuery[str | None] = None,
    key: KeyFilter = None,
    flow: Annotated[UUID | None, QueryParameter(name="flowId")] = None,
    limit: Limit = 100,
    cursor: FromQuery[UUID | None] = None,
) -> GroupPage:
    """Returns runs of groups, newest first."""
    return await ctx.engine.flow_views.groups(status, key, flow, limit, cursor)


@operation("GET", "/groups/{group_id:str}", READ, remote=FlowViews.group)
async def get_group(ctx: InjectedContext, group_id: FromPath[str]) -> GroupView:
    """Returns one run of a group, by its id; for a key, the newest run of that group."""
    return await _group_view(ctx, await _find_run(ctx, group_id))


@operation("GET", "/groups/{group_id:str}/graph", READ, remote=FlowViews.group_graph)
async def get_group_graph(
    ctx: InjectedContext, group_id: FromPath[str], graph_format: GraphFormat = "json"
) -> Response[GraphView]:
    """Returns the activated and planned parts of a group run: nodes and edges, or Mermaid text."""
    run = await _find_run(ctx, group_id)
    return graph_response(await ctx.engine.flow_views.group_graph(run), graph_format)


@operation("POST", "/groups/{group_id:str}/start", WRITE, idempotent=True)
async def start_group(
    ctx: InjectedContext,
    group_id: FromPath[str],
    data: JSONBody[StartBody | None] = None,
    key: IdempotencyKey = None,
) -> Response[FlowView]:
    """Starts a flow of a group, given by its key or by the id of one of its runs.

    A request repeated with the same `Idempotency-Key` starts one flow only.
    """
    del key  # the guard handles it
    body = data or StartBody()
    await count_submit(ctx, 1)
    definition_key = await _definition_key(ctx, group_id)
    if (await ctx.engine.definitions.get(definition_key)).kind != "group":
        raise NotFound(f"no group {group_id}")
    flow = await ctx.engine.flows.start(
        definition_key, body.input, steps=body.steps, priority=body.priority
    )
    return await created_flow_response(ctx, flow)


@operation(
    "POST", "/groups/{group_id:str}/cancel", WRITE, status_code=200, remote=Flows.cancel_group
)
async def cancel_group(
    ctx: InjectedContext, group_id: FromPath[str], data: JSONBody[ReasonBody | None] = None
) -> GroupView:
    """Cancels a group run with all its open tasks and groups; running sessions are killed first."""
    run = await _find_run(ctx, group_id)
    await ctx.engine.flows.cancel_group(run, reason_of(data))
    return await _group_view(ctx, run)


@operation("POST", "/groups/{group_id:str}/pause", WRITE, status_code=200, remote=Flows.pause_group)
async def pause_group(ctx: InjectedContext, group_id: FromPath[str]) -> GroupView:
    """Pauses all tasks of a group run."""
    run = await _find_run(ctx, group_id)
    await ctx.engine.flows.pause_group(run)
    return await _group_view(ctx, run)


@operation(
    "POST", "/groups/{group_id:str}/resume", WRITE, status_code=200, remote=Flows.resume_group
)
async def resume_group(ctx: InjectedContext, group_id: FromPath[str]) -> GroupView:
    """Resumes a paused group run."""
    run = await _find_run(ctx, group_id)
    await ctx.engine.flows.resume_group(run)
    return await _group_view(ctx, run)


async def _find_run(ctx: InjectedContext, name: str) -> UUID:
    """Returns the id of the group run with this id, or of the newest run with this key."""
    return await ctx.engine.flow_views.find_group(name)


async def _definition_key(ctx: InjectedContext, name: str) -> str:
    """Returns the key of the group run with this id (else `NotFound`); other text is the key."""
    try:
        return (await ctx.engine.flow_views.group(UUID(name))).key
    except ValueError:
        return name


async def _group_view(ctx: InjectedContext, run: UUID) -> GroupView:
    return await ctx.engine.flow_views.group(run)
