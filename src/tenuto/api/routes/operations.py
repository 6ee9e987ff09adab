"""Routes for operations: health, statistics, workers and the coordinator."""

from datetime import datetime
from typing import Any
from uuid import UUID

import msgspec
from litestar import Request, Response
from litestar.params import FromPath, FromQuery, JSONBody

from tenuto.api.operation import ADMIN, PUBLIC, READ, operation
from tenuto.api.routes.bodies import RecoverBody
from tenuto.api.routes.tasks import Limit, LogPage
from tenuto.api.service import InjectedContext, RequestContext, service_of
from tenuto.coordinator.coordinator import NAME
from tenuto.engine.agents.gateways import worst_status
from tenuto.engine.engine import Engine
from tenuto.engine.limits.budgets import UsageStats
from tenuto.engine.operations.coordination import RecoverResult, recent_logs
from tenuto.engine.operations.coordination import recover as recover_now
from tenuto.engine.tasks.maintenance import CycleReport
from tenuto.engine.views import WorkerView
from tenuto.model.errors import Forbidden, NotFound, TenutoError
from tenuto.model.tenancy.access import Role
from tenuto.store.protocol import Statement


class LivenessReply(msgspec.Struct, frozen=True):
    """The status of the process."""

    status: str = "healthy"


class CoordinatorHealth(msgspec.Struct, frozen=True, rename="camel"):
    """Whether a coordinator is active, and its last cycle."""

    active: bool
    last_cycle: datetime | None
    cycle_count: int


class Health(msgspec.Struct, frozen=True, rename="camel"):
    """Health of the components.

    The broker is the database's own notification. `gateway` is the worst state of all gateways.
    """

    status: str
    coordinator: CoordinatorHealth
    database: str
    valkey: str = "not configured"
    gateway: str = "not configured"
    down_since: datetime | None = None
    """When this process first found the database unreachable; `null` if it is reachable."""


class CoordinatorStats(msgspec.Struct, frozen=True, rename="camel"):
    """Counts of open tasks and of agents."""

    pending_tasks: int
    running_tasks: int
    healthy_agents: int
    stale_agents: int


class CoordinatorStatus(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """The leading coordinator, its last cycle, and the standby coordinators."""

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


class WorkerList(msgspec.Struct, frozen=True):
    """The workers of the workspace, newest first."""

    workers: list[WorkerView]


class Stats(msgspec.Struct, frozen=True, rename="camel"):
    """Counts of tasks by status, workers and agents, and the usage of models."""

    tasks: dict[str, int]
    workers: int
    agents: int
    spending: UsageStats


@operation("GET", "/health/live", PUBLIC, prefix="")
async def get_liveness() -> LivenessReply:
    """Returns 200 if the process is alive."""
    return LivenessReply()


@operation("GET", "/health/ready", PUBLIC, prefix="")
async def get_readiness(request: Request[Any, Any, Any]) -> Response[LivenessReply]:
    """Returns 200 if requests can be served, 503 if the database is unavailable."""
    service = service_of(request.scope)
    try:
        await service.store.fetch(Statement("tokens_exist"))
    except TenutoError:
        return Response(LivenessReply("unavailable"), status_code=503)
    return Response(LivenessReply())


@operation("GET", "/health/coordinator", PUBLIC, prefix="")
async def get_coordinator_health(request: Request[Any, Any, Any]) -> Response[Health]:
    """Returns the health of the coordinator, the database and the gateways.

    The status is 503 if the database is unavailable.
    """
    service = service_of(request.scope)
    try:
        leader = await service.maintenance.leader(NAME)
        gateway = worst_status(await service.gateways.states(), service.clock.now())
    except TenutoError:
        service.down_since = service.down_since or service.clock.now()
        coordinator = CoordinatorHealth(active=False, last_cycle=None, cycle_count=0)
        health = Health("unavailable", coordinator, "unreachable", down_since=service.down_since)
        return Response(health, status_code=503)
    service.down_since = None
    active = leader is not None and leader.until > service.clock.now()
    coordinator = CoordinatorHealth(
        active=active,
        last_cycle=leader.seen_at if leader else None,
        cycle_count=leader.cycles if leader else 0,
    )
    status = "healthy" if active else "degraded"
    return Response(Health(status, coordinator, "connected", gateway=gateway))


@operation("GET", "/stats", READ)
async def get_stats(ctx: InjectedContext) -> Stats:
    """Returns counts of tasks, workers and agents of the workspace, and its usage."""
    query = ctx.engine.query
    counts = await query.counts(ctx.workspace)
    workers = await query.workers(ctx.workspace)
    agents = await query.agents(ctx.workspace)
    alive = sum(1 for row in workers if row["status"] in ("RUNNING", "DRAINING"))
    return Stats(counts, alive, len(agents), await ctx.engine.spending())


@operation("GET", "/workers", READ, remote=Engine.workers)
async def list_workers(ctx: InjectedContext) -> WorkerList:
    """Returns the workers of the workspace."""
    return WorkerList(list(await ctx.engine.workers()))


@operation("POST", "/workers/{worker_id:str}/drain", ADMIN, status_code=200)
async def drain_worker(ctx: InjectedContext, worker_id: FromPath[str]) -> WorkerView:
    """Drains a worker: it claims no more tasks, finishes or releases its tasks, and exits."""
    await ctx.engine.drain_worker(worker_id)
    workers = {worker.id: worker for worker in await ctx.engine.workers()}
    if worker_id not in workers:
        raise NotFound(f"no running worker {worker_id!r}")
    return workers[worker_id]


@operation("GET", "/coordinator/status", ADMIN)
async def get_coordinator_status(ctx: InjectedContext) -> CoordinatorStatus:
    """Returns the leading coordinator, the standbys, and the open work of this workspace."""
    system = ctx.service.maintenance
    leader = await system.leader(NAME)
    counts = await ctx.engine.query.counts(ctx.workspace)
    agents = await ctx.agents.page(None, 1000)
    stale = sum(1 for agent in agents if agent.status == "STALE")
    healthy = sum(1 for agent in agents if agent.status in ("IDLE", "WORKING"))
    running = counts["RUNNING"] + counts["ASSIGNED"]
    inactive = CoordinatorStatus(
        active=False,
        workspaces=[ctx.workspace],
        standby=await system.standbys(NAME),
        stats=CoordinatorStats(counts["PENDING"], running, healthy, stale),
    )
    if leader is None:
        return inactive
    return msgspec.structs.replace(
        inactive,
        active=leader.until > ctx.service.clock.now(),
        instance_id=leader.holder,
        last_heartbeat=leader.seen_at,
        epoch=leader.epoch,
        since=leader.since,
        until=leader.until,
        cycle_count=leader.cycles,
        last_cycle=leader.cycle,
    )


async def _context_in_workspace(ctx: RequestContext, workspace: UUID | None) -> RequestContext:
    """Returns the caller's context in the requested workspace; `ctx` itself if none is given.

    Raises `Forbidden` unless the caller is an ADMIN there.
    """
    if workspace in (None, ctx.workspace):
        return ctx
    caller = await ctx.service.token_cache.caller_of(ctx.token, workspace)
    if caller.workspace != workspace or not caller.may(Role.ADMIN, "admin"):
        raise Forbidden(f"the token has no access to workspace {workspace}")
    return ctx.service.request_context(caller, ctx.token)


@operation("POST", "/coordinator/recover", ADMIN, status_code=200)
async def recover_workspace(
    ctx: InjectedContext, data: JSONBody[RecoverBody | None] = None
) -> RecoverResult:
    """Handles expired leases and due timers of one workspace now, not in the next cycle."""
    target = await _context_in_workspace(ctx, data.workspace_id if data is not None else None)
    return await recover_now(target.engine.system, target.caller.actor, target.workspace)


@operation("GET", "/coordinator/logs", ADMIN)
async def list_coordinator_logs(
    ctx: InjectedContext,
    workspace: FromQuery[UUID | None] = None,
    level: FromQuery[str] = "WARN",
    limit: Limit = 100,
) -> LogPage:
    """Returns the newest events of at least `level`: of the workspace and of the coordinators."""
    target = await _context_in_workspace(ctx, workspace)
    return LogPage(await recent_logs(target.engine, level, limit))
