"""Agents: register, look, end."""

from typing import Annotated
from uuid import UUID

import msgspec
from litestar import delete, get, post, put
from litestar.params import FromPath, FromQuery, JSONBody, QueryParameter

from tenuto.api.routes.bodies import AgentBody, TerminateBody
from tenuto.api.routes.tasks import Limit, TaskPage
from tenuto.api.service import InjectedContext
from tenuto.engine.agents.eligibility import AgentExplanation
from tenuto.engine.agents.registry import AgentHealth, AgentToken, AgentView
from tenuto.engine.tasks.query import Filter
from tenuto.model.agents.lifecycle import rules_of
from tenuto.model.agents.matching import AgentProfile
from tenuto.model.errors import Conflict, NotFound
from tenuto.model.tenancy.access import Role


class AgentPage(msgspec.Struct, frozen=True, rename="camel"):
    """Agents by name, and where the next ones begin."""

    agents: list[AgentView]
    next_cursor: str | None = None


@get("/agents")
async def find(
    desk: InjectedContext,
    limit: Limit = 100,
    cursor: Annotated[str | None, QueryParameter(max_length=255)] = None,
    status: FromQuery[str | None] = None,
    coordinator_enabled: Annotated[bool | None, QueryParameter(name="coordinatorEnabled")] = None,
) -> AgentPage:
    """Agents by name; filters apply to each page."""
    found = await desk.registry.page(cursor, limit + 1)
    page, more = found[:limit], len(found) > limit
    kept = [
        agent
        for agent in page
        if status in (None, agent.status)
        and coordinator_enabled in (None, agent.coordinator_enabled)
    ]
    return AgentPage(kept, page[-1].name if more else None)


@get("/agents/{agent_id:uuid}")
async def show(desk: InjectedContext, agent_id: FromPath[UUID]) -> AgentView:
    """One agent."""
    return await desk.registry.show(agent_id)


def profile_of(desk: InjectedContext, agent_id: UUID, data: AgentBody) -> AgentProfile:
    """What matching is to know of an agent."""
    return AgentProfile(
        id=agent_id,
        workspace=desk.workspace,
        name=data.name,
        agent_type=data.agent_type,
        task_types=None if data.task_types is None else tuple(data.task_types),
        task_tags=tuple(data.task_tags),
        capabilities=tuple(data.capabilities),
        choose_rules=rules_of(data.choose_rules),
        runtimes=tuple(data.runtimes),
        accept_commands=data.accept_commands,
        region=data.region,
        models=None if data.models is None else tuple(data.models),
        max_concurrent=data.limit("max_concurrent"),
        model=data.model,
        account=data.account,
        skills=tuple(data.skills),
        tags=tuple(data.tags),
        heartbeat_interval_s=data.limit("heartbeat_interval_s"),
        stale_threshold_s=data.limit("stale_threshold_s"),
        coordinator_enabled=data.coordinator_enabled,
        gateway=data.gateway,
    )


@put("/agents/{agent_id:uuid}")
async def put_agent(
    desk: InjectedContext, agent_id: FromPath[UUID], data: JSONBody[AgentBody]
) -> AgentView:
    """Register an agent, or change it."""
    profile = profile_of(desk, agent_id, data)
    if not profile.runtimes:
        runtime = "http" if profile.gateway is None else "gateway"
        profile = msgspec.structs.replace(profile, runtimes=(runtime,))
    try:
        known = await desk.registry.show(agent_id)
    except NotFound:
        known = None
    if known is not None and known.name != data.name:
        raise Conflict(f"the agent is called {known.name!r}", "name_taken")
    await desk.registry.put(profile, managed=True, by_id=True)
    return await desk.registry.show(agent_id)


@delete("/agents/{agent_id:uuid}")
async def drop(desk: InjectedContext, agent_id: FromPath[UUID]) -> None:
    """Forget an agent that runs nothing."""
    await desk.registry.forget(agent_id)


@get("/agents/{agent_id:uuid}/health")
async def health(desk: InjectedContext, agent_id: FromPath[UUID], limit: Limit = 60) -> AgentHealth:
    """Whether the agent lives, and how it said it was within the last hour, newest first."""
    return await desk.registry.health(agent_id, limit)


@get("/agents/{agent_id:uuid}/explain")
async def explain(desk: InjectedContext, agent_id: FromPath[UUID]) -> AgentExplanation:
    """What the agent may take, what waits for it, and why it takes nothing else."""
    return await desk.engine.explain_agent(agent_id)


@get("/agents/{agent_id:uuid}/tasks")
async def tasks(
    desk: InjectedContext,
    agent_id: FromPath[UUID],
    status: FromQuery[str | None] = None,
    limit: Limit = 100,
    cursor: FromQuery[UUID | None] = None,
) -> TaskPage:
    """The tasks whose latest attempt was this agent's, newest first."""
    await desk.registry.show(agent_id)
    statuses = tuple(word for word in (status or "").split(",") if word)
    page = await desk.engine.list(Filter(agent=agent_id, status=statuses), limit, cursor)
    return TaskPage(page.tasks, page.next_cursor)


@post("/agents/{agent_id:uuid}/terminate", status_code=200)
async def terminate(
    desk: InjectedContext, agent_id: FromPath[UUID], data: JSONBody[TerminateBody | None] = None
) -> AgentView:
    """Let the agent take no more tasks; unless gracefully, its running ones are cancelled.

    It is DRAINING until the last of them has ended, then TERMINATED.
    """
    wish = data or TerminateBody()
    await desk.engine.terminate_agent(agent_id, wish.reason, graceful=wish.graceful)
    return await desk.registry.show(agent_id)


@post("/agents/{agent_id:uuid}/token")
async def token(desk: InjectedContext, agent_id: FromPath[UUID]) -> AgentToken:
    """A key for the agent's own process: it may claim and report for this agent, nothing else."""
    agent = await desk.registry.show(agent_id)
    made = await desk.service.identity.make_token(
        desk.workspace,
        f"agent {agent.name}"[:100],
        Role.MEMBER,
        ("work",),
        agent=agent_id,
        maker=desk.caller,
    )
    return AgentToken(made.id, made.token, made.expires_at)


HANDLERS = [find, show, put_agent, drop, health, explain, tasks, terminate, token]
