"""Routes for agents: register, list, read, terminate and delete them."""

from typing import Annotated
from uuid import UUID

import msgspec
from litestar.params import FromPath, FromQuery, JSONBody, QueryParameter

from tenuto.api.operation import ADMIN, READ, WRITE, operation
from tenuto.api.routes.bodies import AgentBody, TerminateBody
from tenuto.api.routes.tasks import Limit, TaskPage
from tenuto.api.service import InjectedContext
from tenuto.engine.agents.eligibility import AgentExplanation
from tenuto.engine.agents.registry import AgentHealth, AgentToken, AgentView
from tenuto.engine.engine import Engine
from tenuto.model.agents.lifecycle import parse_rules
from tenuto.model.agents.matching import AgentProfile
from tenuto.model.errors import Conflict, NotFound
from tenuto.model.tasks.submission import Filter
from tenuto.model.tenancy.access import Role


class AgentPage(msgspec.Struct, frozen=True, rename="camel"):
    """A page of agents, ordered by name, and the cursor of the next page."""

    agents: list[AgentView]
    next_cursor: str | None = None


@operation("GET", "/agents", READ)
async def list_agents(
    ctx: InjectedContext,
    limit: Limit = 100,
    cursor: Annotated[str | None, QueryParameter(max_length=255)] = None,
    status: FromQuery[str | None] = None,
    coordinator_enabled: Annotated[bool | None, QueryParameter(name="coordinatorEnabled")] = None,
) -> AgentPage:
    """Returns agents, ordered by name.

    Filters apply within a page, so that a page may have fewer agents than `limit`.
    """
    agents = await ctx.agents.page(cursor, limit + 1)
    page, has_more = agents[:limit], len(agents) > limit
    matches = [
        agent
        for agent in page
        if status in (None, agent.status)
        and coordinator_enabled in (None, agent.coordinator_enabled)
    ]
    return AgentPage(matches, page[-1].name if has_more else None)


@operation("GET", "/agents/{agent_id:uuid}", READ)
async def get_agent(ctx: InjectedContext, agent_id: FromPath[UUID]) -> AgentView:
    """Returns one agent."""
    return await ctx.agents.show(agent_id)


def profile_of(ctx: InjectedContext, agent_id: UUID, data: AgentBody) -> AgentProfile:
    """Returns the agent's profile for matching, from the request body."""
    return AgentProfile(
        id=agent_id,
        workspace=ctx.workspace,
        name=data.name,
        agent_type=data.agent_type,
        task_types=None if data.task_types is None else tuple(data.task_types),
        task_tags=tuple(data.task_tags),
        capabilities=tuple(data.capabilities),
        choose_rules=parse_rules(data.choose_rules),
        runtimes=tuple(data.runtimes),
        accept_commands=data.accept_commands,
        region=data.region,
        models=None if data.models is None else tuple(data.models),
        max_concurrent=data.number_of("max_concurrent"),
        model=data.model,
        account=data.account,
        skills=tuple(data.skills),
        tags=tuple(data.tags),
        heartbeat_interval_s=data.number_of("heartbeat_interval_s"),
        stale_threshold_s=data.number_of("stale_threshold_s"),
        coordinator_enabled=data.coordinator_enabled,
        gateway=data.gateway,
    )


@operation("PUT", "/agents/{agent_id:uuid}", WRITE)
async def put_agent(
    ctx: InjectedContext, agent_id: FromPath[UUID], data: JSONBody[AgentBody]
) -> AgentView:
    """Creates or replaces an agent under this id; its name cannot be changed."""
    profile = profile_of(ctx, agent_id, data)
    if not profile.runtimes:
        runtime = "http" if profile.gateway is None else "gateway"
        profile = msgspec.structs.replace(profile, runtimes=(runtime,))
    try:
        existing = await ctx.agents.show(agent_id)
    except NotFound:
        existing = None
    if existing is not None and existing.name != data.name:
        raise Conflict(
            f"agent {agent_id} has the name {existing.name!r}; a name cannot be changed",
            "name_taken",
        )
    await ctx.agents.put(profile, managed=True, by_id=True)
    return await ctx.agents.show(agent_id)


@operation("DELETE", "/agents/{agent_id:uuid}", ADMIN)
async def delete_agent(ctx: InjectedContext, agent_id: FromPath[UUID]) -> None:
    """Deletes an agent that runs no tasks."""
    await ctx.agents.delete(agent_id)


@operation("GET", "/agents/{agent_id:uuid}/health", READ)
async def get_agent_health(
    ctx: InjectedContext, agent_id: FromPath[UUID], limit: Limit = 60
) -> AgentHealth:
    """Returns the agent's status and its health reports of the last hour, newest first."""
    return await ctx.agents.health(agent_id, limit)


@operation("GET", "/agents/{agent_id:uuid}/explain", READ, remote=Engine.explain_agent)
async def explain_agent(ctx: InjectedContext, agent_id: FromPath[UUID]) -> AgentExplanation:
    """Explains which tasks the agent can claim, and why it cannot claim others."""
    return await ctx.engine.explain_agent(agent_id)


@operation("GET", "/agents/{agent_id:uuid}/tasks", READ)
async def list_agent_tasks(
    ctx: InjectedContext,
    agent_id: FromPath[UUID],
    status: FromQuery[str | None] = None,
    limit: Limit = 100,
    cursor: FromQuery[UUID | None] = None,
) -> TaskPage:
    """Returns the tasks whose latest attempt was by this agent, newest first."""
    await ctx.agents.show(agent_id)
    statuses = tuple(text for text in (status or "").split(",") if text)
    page = await ctx.engine.list(Filter(agent=agent_id, status=statuses), limit, cursor)
    return TaskPage(page.tasks, page.next_cursor)


@operation(
    "POST",
    "/agents/{agent_id:uuid}/terminate",
    WRITE,
    status_code=200,
    remote=Engine.terminate_agent,
)
async def terminate_agent(
    ctx: InjectedContext, agent_id: FromPath[UUID], data: JSONBody[TerminateBody | None] = None
) -> AgentView:
    """Terminates an agent: it claims no more tasks.

    With `graceful` its running tasks finish, otherwise they are cancelled. The agent is DRAINING
    until the last of them has finished, then TERMINATED.
    """
    body = data or TerminateBody()
    await ctx.engine.terminate_agent(agent_id, body.reason, graceful=body.graceful)
    return await ctx.agents.show(agent_id)


@operation("POST", "/agents/{agent_id:uuid}/token", ADMIN)
async def create_agent_token(ctx: InjectedContext, agent_id: FromPath[UUID]) -> AgentToken:
    """Creates a token for the agent's own process; it can only claim and report for this agent."""
    agent = await ctx.agents.show(agent_id)
    created = await ctx.service.identity.create_token(
        ctx.workspace,
        f"agent {agent.name}"[:100],
        Role.MEMBER,
        ("work",),
        agent=agent_id,
        creator=ctx.caller,
    )
    return AgentToken(created.id, created.token, created.expires_at)
