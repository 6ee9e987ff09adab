"""Operating: health, statistics, the coordinator."""

from datetime import datetime
from typing import Any
from uuid import UUID

import msgspec
from litestar import Request, Response, get, post
from litestar.params import FromQuery, JSONBody

from tenuto.api.service import AtDesk, Service
from tenuto.api.shapes import RecoverBody
from tenuto.api.tasks import Limit, Lines
from tenuto.coordinator.coordinator import NAME
from tenuto.engine.views import LogLine, WorkerView
from tenuto.model.errors import Forbidden, TenutoError
from tenuto.store.protocol import Statement


class Live(msgspec.Struct, frozen=True):
    """The process answers."""

    status: str = "healthy"


class CoordinatorPart(msgspec.Struct, frozen=True, rename="camel"):
    """Whether somebody repairs and promotes."""

    active: bool
    last_cycle: datetime | None
    cycle_count: int


class Health(msgspec.Struct, frozen=True):
    """How the parts are. The broker is the database's own notification here; no gateway is used."""

    status: str
    coordinator: CoordinatorPart
    database: str
    valkey: str = "not configured"
    gateway: str = "not configured"


class CoordinatorStats(msgspec.Struct, frozen=True, rename="camel"):
    """How much there is to do, and who is there to do it."""

    pending_tasks: int
    running_tasks: int
    healthy_agents: int
    stale_agents: int


class CoordinatorStatus(msgspec.Struct, frozen=True, rename="camel"):
    """Who coordinates."""

    active: bool
    instance_id: str | None
    workspaces: list[UUID]
    last_heartbeat: datetime | None
    epoch: int
    cycle_count: int
    stats: CoordinatorStats


class Workers(msgspec.Struct, frozen=True):
    """The workers of the workspace, newest first."""

    workers: list[WorkerView]


class Stats(msgspec.Struct, frozen=True, rename="camel"):
    """How many tasks there are, by status."""

    tasks: dict[str, int]
    workers: int
    agents: int


class Recovered(msgspec.Struct, frozen=True):
    """The duties ran."""

    ok: bool = True


@get("/health/live")
async def live() -> Live:
    """Whether the process answers."""
    return Live()


@get("/health/ready")
async def ready(request: Request[Any, Any, Any]) -> Response[Live]:
    """Whether requests can be served: the database answers."""
    service: Service = request.app.state.service
    try:
        await service.store.fetch(Statement("tokens_any"))
    except TenutoError:
        return Response(Live("unavailable"), status_code=503)
    return Response(Live())


@get("/health/coordinator")
async def coordinator_health(request: Request[Any, Any, Any]) -> Response[Health]:
    """How the parts are."""
    service: Service = request.app.state.service
    try:
        leader = await service.system.leader(NAME)
    except TenutoError:
        part = CoordinatorPart(active=False, last_cycle=None, cycle_count=0)
        return Response(Health("unavailable", part, "unreachable"), status_code=503)
    active = leader is not None and leader.until > service.clock.now()
    part = CoordinatorPart(
        active=active,
        last_cycle=leader.seen_at if leader else None,
        cycle_count=leader.cycles if leader else 0,
    )
    return Response(Health("healthy" if active else "degraded", part, "connected"))


@get("/stats")
async def stats(desk: AtDesk) -> Stats:
    """How many tasks, workers and agents the workspace has."""
    query = desk.engine.query
    counts = await query.counts(desk.workspace)
    workers = await query.workers(desk.workspace)
    agents = await query.agents(desk.workspace)
    alive = sum(1 for row in workers if row["status"] in ("RUNNING", "DRAINING"))
    return Stats(counts, alive, len(agents))


@get("/workers")
async def workers(desk: AtDesk) -> Workers:
    """The workers of the workspace."""
    return Workers(list(await desk.engine.workers()))


@get("/coordinator/status")
async def coordinator_status(desk: AtDesk) -> CoordinatorStatus:
    """Who coordinates, and what there is to do in this workspace."""
    leader = await desk.service.system.leader(NAME)
    counts = await desk.engine.query.counts(desk.workspace)
    agents = await desk.registry.page(None, 1000)
    stale = sum(1 for agent in agents if agent.status == "STALE")
    healthy = sum(1 for agent in agents if agent.status in ("IDLE", "WORKING"))
    return CoordinatorStatus(
        leader is not None and leader.until > desk.service.clock.now(),
        leader.holder if leader else None,
        [desk.workspace],
        leader.seen_at if leader else None,
        leader.epoch if leader else 0,
        leader.cycles if leader else 0,
        CoordinatorStats(counts["PENDING"], counts["RUNNING"] + counts["ASSIGNED"], healthy, stale),
    )


@post("/coordinator/recover", status_code=200)
async def recover(desk: AtDesk, data: JSONBody[RecoverBody | None] = None) -> Recovered:
    """Look for expired leases and due timers now, not at the next tick."""
    if data is not None and data.workspace_id not in (None, desk.workspace):
        raise Forbidden("no such workspace of yours")
    await desk.service.system.expire_once(desk.caller.actor)
    await desk.service.system.promote_once(desk.caller.actor)
    return Recovered()


@get("/coordinator/logs")
async def coordinator_logs(
    desk: AtDesk,
    workspace: FromQuery[UUID | None] = None,
    level: FromQuery[str] = "WARN",
    limit: Limit = 100,
) -> Lines:
    """The newest events of at least that level, of all tasks of the workspace."""
    if workspace not in (None, desk.workspace):
        raise Forbidden("no such workspace of yours")
    lines: list[LogLine] = await desk.engine.query.notable(desk.workspace, level, limit)
    return Lines(lines)


PUBLIC = [live, ready, coordinator_health]
HANDLERS = [stats, workers, coordinator_status, recover, coordinator_logs]
