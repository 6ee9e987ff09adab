"""Operating: health, statistics, the coordinator."""

from datetime import datetime
from typing import Any
from uuid import UUID

import msgspec
from litestar import Request, Response, get, post
from litestar.params import FromPath, FromQuery, JSONBody

from tenuto.api.routes.bodies import RecoverBody
from tenuto.api.routes.tasks import Limit, Lines
from tenuto.api.service import InjectedContext, RequestContext, service_of
from tenuto.coordinator.coordinator import NAME
from tenuto.engine.agents.gateways import worst
from tenuto.engine.limits.budgets import UsageStats
from tenuto.engine.operations.coordination import RecoverResult, happened
from tenuto.engine.operations.coordination import recover as recover_now
from tenuto.engine.tasks.maintenance import CycleReport
from tenuto.engine.views import WorkerView
from tenuto.model.errors import Forbidden, NotFound, TenutoError
from tenuto.model.tenancy.access import Role
from tenuto.store.protocol import Statement


class LivenessReply(msgspec.Struct, frozen=True):
    """The process answers."""

    status: str = "healthy"


class CoordinatorHealth(msgspec.Struct, frozen=True, rename="camel"):
    """Whether somebody repairs and promotes."""

    active: bool
    last_cycle: datetime | None
    cycle_count: int


class Health(msgspec.Struct, frozen=True, rename="camel"):
    """How the parts are. The broker is the database's own notification; of gateways the worst."""

    status: str
    coordinator: CoordinatorHealth
    database: str
    valkey: str = "not configured"
    gateway: str = "not configured"
    down_since: datetime | None = None
    """When this process first found the database unreachable, until it answers."""


class CoordinatorStats(msgspec.Struct, frozen=True, rename="camel"):
    """How much there is to do, and who is there to do it."""

    pending_tasks: int
    running_tasks: int
    healthy_agents: int
    stale_agents: int


class CoordinatorStatus(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Who coordinates since when, how its last cycle went, and who would take over."""

    active: bool
    instance_id: str | None = None
    workspaces: list[UUID]
    last_heartbeat: datetime | None = None
    epoch: int = 0
    since: datetime | None = None
    until: datetime | None = None
    cycle_count: int = 0
    last_cycle: CycleReport | None = None
    standby: list[str]
    stats: CoordinatorStats


class Workers(msgspec.Struct, frozen=True):
    """The workers of the workspace, newest first."""

    workers: list[WorkerView]


class Stats(msgspec.Struct, frozen=True, rename="camel"):
    """How many tasks there are, by status, and what models used."""

    tasks: dict[str, int]
    workers: int
    agents: int
    spending: UsageStats


@get("/health/live")
async def live() -> LivenessReply:
    """Whether the process answers."""
    return LivenessReply()


@get("/health/ready")
async def ready(request: Request[Any, Any, Any]) -> Response[LivenessReply]:
    """Whether requests can be served: the database answers."""
    service = service_of(request.scope)
    try:
        await service.store.fetch(Statement("tokens_any"))
    except TenutoError:
        return Response(LivenessReply("unavailable"), status_code=503)
    return Response(LivenessReply())


@get("/health/coordinator")
async def coordinator_health(request: Request[Any, Any, Any]) -> Response[Health]:
    """How the parts are."""
    service = service_of(request.scope)
    try:
        leader = await service.system.leader(NAME)
        gateway = worst(await service.gateways.states(), service.clock.now())
    except TenutoError:
        service.down_since = service.down_since or service.clock.now()
        part = CoordinatorHealth(active=False, last_cycle=None, cycle_count=0)
        health = Health("unavailable", part, "unreachable", down_since=service.down_since)
        return Response(health, status_code=503)
    service.down_since = None
    active = leader is not None and leader.until > service.clock.now()
    part = CoordinatorHealth(
        active=active,
        last_cycle=leader.seen_at if leader else None,
        cycle_count=leader.cycles if leader else 0,
    )
    status = "healthy" if active else "degraded"
    return Response(Health(status, part, "connected", gateway=gateway))


@get("/stats")
async def stats(desk: InjectedContext) -> Stats:
    """How many tasks, workers and agents the workspace has."""
    query = desk.engine.query
    counts = await query.counts(desk.workspace)
    workers = await query.workers(desk.workspace)
    agents = await query.agents(desk.workspace)
    alive = sum(1 for row in workers if row["status"] in ("RUNNING", "DRAINING"))
    return Stats(counts, alive, len(agents), await desk.engine.spending())


@get("/workers")
async def workers(desk: InjectedContext) -> Workers:
    """The workers of the workspace."""
    return Workers(list(await desk.engine.workers()))


@post("/workers/{worker_id:str}/drain", status_code=200)
async def drain(desk: InjectedContext, worker_id: FromPath[str]) -> WorkerView:
    """Ask a worker to take no more tasks, finish or give back what it runs, and end."""
    await desk.engine.drain_worker(worker_id)
    found = {each.id: each for each in await desk.engine.workers()}
    if worker_id not in found:
        raise NotFound(f"no worker {worker_id!r} is at work")
    return found[worker_id]


@get("/coordinator/status")
async def coordinator_status(desk: InjectedContext) -> CoordinatorStatus:
    """Who coordinates, and what there is to do in this workspace."""
    system = desk.service.system
    leader = await system.leader(NAME)
    counts = await desk.engine.query.counts(desk.workspace)
    agents = await desk.registry.page(None, 1000)
    stale = sum(1 for agent in agents if agent.status == "STALE")
    healthy = sum(1 for agent in agents if agent.status in ("IDLE", "WORKING"))
    running = counts["RUNNING"] + counts["ASSIGNED"]
    plain = CoordinatorStatus(
        active=False,
        workspaces=[desk.workspace],
        standby=await system.standbys(NAME),
        stats=CoordinatorStats(counts["PENDING"], running, healthy, stale),
    )
    if leader is None:
        return plain
    return msgspec.structs.replace(
        plain,
        active=leader.until > desk.service.clock.now(),
        instance_id=leader.holder,
        last_heartbeat=leader.seen_at,
        epoch=leader.epoch,
        since=leader.since,
        until=leader.until,
        cycle_count=leader.cycles,
        last_cycle=leader.cycle,
    )


async def _within(desk: RequestContext, asked: UUID | None) -> RequestContext:
    """The means of the same caller in the workspace that it asks for; its own if it names none."""
    if asked in (None, desk.workspace):
        return desk
    caller = await desk.service.callers.of(desk.token, asked)
    if caller.workspace != asked or not caller.may(Role.ADMIN, "admin"):
        raise Forbidden("no such workspace of yours")
    return desk.service.request_context(caller, desk.token)


@post("/coordinator/recover", status_code=200)
async def recover(
    desk: InjectedContext, data: JSONBody[RecoverBody | None] = None
) -> RecoverResult:
    """Look for expired leases and due timers of one workspace now, not at the next tick."""
    own = await _within(desk, data.workspace_id if data is not None else None)
    return await recover_now(own.engine.system, own.caller.actor, own.workspace)


@get("/coordinator/logs")
async def coordinator_logs(
    desk: InjectedContext,
    workspace: FromQuery[UUID | None] = None,
    level: FromQuery[str] = "WARN",
    limit: Limit = 100,
) -> Lines:
    """The newest events of at least that level: the workspace's, and the coordinators' own."""
    own = await _within(desk, workspace)
    return Lines(await happened(own.engine, level, limit))


PUBLIC = [live, ready, coordinator_health]
HANDLERS = [stats, workers, drain, coordinator_status, recover, coordinator_logs]
