"""Routes for agents: claims, reports and heartbeats. Each write presents its attempt's fence."""

from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import datetime
from typing import Any, TypeVar
from uuid import UUID

import msgspec
from litestar import Request
from litestar.params import FromPath, JSONBody

from tenuto.api.auth import agent_tokens
from tenuto.api.edge.long_poll import long_poll
from tenuto.api.operation import HOST, WORK, operation
from tenuto.api.routes.bodies import (
    AttemptBody,
    ClaimBody,
    CompleteBody,
    FailBody,
    HeartbeatBody,
    ParkBody,
    ProgressBody,
    ReleaseBody,
    TranscriptBody,
    WorkerHeartbeatBody,
)
from tenuto.api.service import InjectedContext
from tenuto.engine.agents.push import lease_seconds as pushed_lease
from tenuto.engine.agents.registry import HealthSample
from tenuto.engine.agents.subtasks import Child, WaitResult
from tenuto.engine.limits.budgets import usage_task_statement
from tenuto.engine.tasks.claim import ClaimedTask
from tenuto.engine.tasks.report import LeaseStatus, WorkerInfo
from tenuto.engine.tenancy.output_redaction import check_progress
from tenuto.model import bounds
from tenuto.model.agents.matching import AgentProfile
from tenuto.model.errors import Conflict, Invalid, TenutoError
from tenuto.model.limits.budgets import check_usage
from tenuto.model.tasks.attempts import HUNG_WARNING
from tenuto.model.tasks.task import Fence
from tenuto.model.tasks.transcript import Line
from tenuto.model.tenancy.redact import Redactor

T = TypeVar("T")
ESCALATION = "escalation"
"""The capability of agents that must explain a failure with `escalation`."""
MAX_WAIT_S = 60
MAX_TASKS = 100
"""Maximum `limit` of a claim."""
PLAIN_STATUSES = frozenset({"healthy", "degraded", "unhealthy"})
"""Health statuses that an agent may report without its current task."""


class ClaimedTaskView(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A claimed task. `token` authenticates only this attempt."""

    id: UUID
    attempt: int
    lease_token: str
    lease_until: datetime
    token: str
    tries: int
    max_attempts: int
    title: str
    task_type: str
    prompt: str | None
    system_prompt: str | None
    model: str | None
    command: list[str] | None
    cwd: str | None
    env: dict[str, str]
    timeout_s: int | None
    input_context: Any
    metadata: dict[str, Any]
    checkpoint_data: Any
    checkpoint_seq: int
    parent_id: UUID | None
    trace_id: str | None
    flow_id: UUID | None
    key: str | None
    previous: Any
    secrets: list[str]


class ClaimReply(msgspec.Struct, frozen=True):
    """The claimed tasks; empty if none became available in time."""

    tasks: list[ClaimedTaskView]


class AgentHeartbeatReply(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """The lease, the requests to cancel or pause, and the number of waiting messages."""

    lease_until: datetime | None = None
    cancel: bool = False
    pause: bool = False
    messages: int = 0
    warning: str | None = None
    """The reason why the attempt will be aborted unless it reports progress."""
    token: str | None = None


class WorkerHeartbeatReply(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """The tasks that the worker has lost, must cancel, must pause, or that make no progress."""

    lost: list[UUID]
    cancel: list[UUID]
    pause: list[UUID]
    hung: list[UUID] = []
    messages: int = 0
    lease_until: datetime | None = None
    drain: bool = False


class TaskStatusReply(msgspec.Struct, frozen=True):
    """The id and status of a task."""

    id: UUID
    status: str


class ParkReply(msgspec.Struct, frozen=True):
    """Whether the attempt ended by parking; if not, the outcomes of the subtasks it waits for."""

    id: UUID
    status: str
    parked: bool
    children: list[Child] = []


class ProgressReply(msgspec.Struct, frozen=True, rename="camel"):
    """The number of the stored checkpoint, if one was sent."""

    checkpoint_seq: int | None = None


@operation("POST", "/agents/{agent_id:uuid}/claim", HOST, status_code=200)
async def claim_tasks(
    request: Request[Any, Any, Any],
    ctx: InjectedContext,
    agent_id: FromPath[UUID],
    data: JSONBody[ClaimBody | None] = None,
) -> ClaimReply:
    """Claims up to `limit` tasks for the agent; waits up to `waitSeconds` for the first one.

    An agent that disconnects while it waits gets no tasks.
    """
    body = data or ClaimBody()
    bounds.check_number("limit", body.limit, 1, MAX_TASKS)
    bounds.check_number("waitSeconds", body.wait_seconds, 0, MAX_WAIT_S)
    if body.worker is not None:
        await agent_tokens.check_worker(ctx, body.worker)
    agent = await ctx.agents.profile_for_claim(agent_id)
    worker = body.worker or f"http:{agent.name}"
    lease_s = lease_s_for(ctx, agent, body.lease_seconds)

    def claim_once() -> Awaitable[list[ClaimedTask]]:
        return ctx.engine.claim(agent, worker, body.limit, lease_s)

    async with long_poll(ctx, request, agent.id) as poll:
        await ctx.agents.record_heartbeat(agent_id)
        tasks = await poll.claim_within(body.wait_seconds, claim_once)
        if poll.disconnected.is_set():
            await _release_undelivered(ctx, tasks)
    return ClaimReply([claimed_task_view(ctx, agent_id, task) for task in tasks])


async def _release_undelivered(ctx: InjectedContext, tasks: list[ClaimedTask]) -> None:
    """Releases tasks whose client disconnected, without counting the try.

    If a release fails, the lease expires later.
    """
    for task in tasks:
        with suppress(TenutoError):
            await ctx.engine.release(task.fence)


def lease_s_for(ctx: InjectedContext, agent: AgentProfile, requested_s: int | None) -> int:
    """Returns the seconds of a lease: as requested, or the default; at least three heartbeats.

    The default is the setting `lease_s`, or the agent's own lease if a gateway runs it.
    """
    min_s = 3 * (agent.heartbeat_interval_s or 0)
    default_s = max(ctx.service.settings.lease_s, min_s)
    if agent.gateway is not None:
        default_s = max(pushed_lease(agent), min_s)
    if requested_s is None:
        return default_s
    bounds.check_number("leaseSeconds", requested_s, 1, bounds.MAX_LEASE_S)
    return max(requested_s, min_s)


def claimed_task_view(ctx: InjectedContext, agent: UUID, task: ClaimedTask) -> ClaimedTaskView:
    """Returns a claimed task as the response body, with a new token for the attempt."""
    token, _ = ctx.service.attempt_tokens.issue(agent, ctx.workspace, task.fence)
    return ClaimedTaskView(
        id=task.fence.task,
        attempt=task.fence.attempt,
        lease_token=task.fence.token,
        lease_until=task.lease_until,
        token=token,
        tries=task.tries,
        max_attempts=task.max_attempts,
        title=task.title,
        task_type=task.task_type,
        prompt=task.prompt,
        system_prompt=task.system_prompt,
        model=task.model,
        command=task.command,
        cwd=task.cwd,
        env=task.env,
        timeout_s=task.timeout_s,
        input_context=task.input,
        metadata=task.metadata,
        checkpoint_data=task.checkpoint,
        checkpoint_seq=task.checkpoint_seq,
        parent_id=task.parent,
        trace_id=task.trace_id,
        flow_id=task.flow,
        key=task.key,
        previous=task.previous,
        secrets=list(task.secrets),
    )


def fence_of(ctx: InjectedContext, task: UUID, body: AttemptBody | None) -> Fence:
    """Returns the fence of a report, from the attempt's token or from the body.

    Raises `Conflict` (`lease_lost`) if the two differ, `Invalid` if there is none.
    """
    own_fence = ctx.caller.fence
    attempt = body.attempt if body is not None else None
    token = body.lease_token if body is not None else None
    if own_fence is not None:
        if attempt not in (None, own_fence.attempt) or token not in (None, own_fence.token):
            raise Conflict("the attempt no longer owns the task", "lease_lost")
        return own_fence
    if attempt is None or token is None:
        raise Invalid(
            "attempt and leaseToken are required without an attempt's token", field="leaseToken"
        )
    bounds.check_number("attempt", attempt, 1, bounds.MAX_COUNT)
    bounds.check_text("leaseToken", token, bounds.MAX_TITLE)
    return Fence(task, attempt, token)


async def check_attempt_current(ctx: InjectedContext) -> None:
    """Raises `Conflict` (`lease_lost`) if the caller is an attempt that no longer owns its task."""
    own_fence = ctx.caller.fence
    if own_fence is None:
        return
    if not await ctx.engine.core.store.fetch(usage_task_statement(ctx.workspace, own_fence)):
        raise Conflict("the attempt no longer owns the task", "lease_lost")


async def apply_report(ctx: InjectedContext, fence: Fence, report: Callable[[], Awaitable[T]]) -> T:
    """Runs `report`; if the session's start is unreported, reports it and runs `report` again."""
    try:
        return await report()
    except Conflict as error:
        if error.code != "out_of_turn":
            raise
    with suppress(Conflict):  # started meanwhile, or refused for another reason
        await ctx.engine.begin(fence)
    return await report()


@operation("PATCH", "/agent-tasks/{task_id:uuid}/progress", WORK)
async def report_progress(
    ctx: InjectedContext, task_id: FromPath[UUID], data: JSONBody[ProgressBody]
) -> ProgressReply:
    """Reports the progress and usage of an attempt, and stores a checkpoint if one is sent.

    If a field is invalid, nothing of the report is stored.
    """
    fence = fence_of(ctx, task_id, data)
    check_progress(data.progress_percent, data.current_step, data.estimated_completion_at)
    if data.usage is not None:
        check_usage(data.usage)
    seq = None
    if data.checkpoint_data is not msgspec.UNSET:
        seq = await ctx.engine.checkpoint(fence, data.checkpoint_data, data.checkpoint_seq)
    if data.usage is not None:
        await ctx.engine.used(fence, data.usage)
    await ctx.engine.progress(
        fence, data.progress_percent, data.current_step, data.estimated_completion_at
    )
    return ProgressReply(seq)


@operation("POST", "/agent-tasks/{task_id:uuid}/complete", WORK, status_code=200)
async def complete_task(
    ctx: InjectedContext, task_id: FromPath[UUID], data: JSONBody[CompleteBody | None] = None
) -> TaskStatusReply:
    """Completes the task with its result; the same attempt can repeat the request."""
    body = data or CompleteBody()
    fence = fence_of(ctx, task_id, body)
    engine = ctx.engine
    await apply_report(
        ctx, fence, lambda: engine.complete(fence, body.result(), body.summary, body.usage)
    )
    return TaskStatusReply(task_id, "COMPLETED")


async def task_status(ctx: InjectedContext, task: UUID) -> TaskStatusReply:
    """Returns the id and current status of a task."""
    return TaskStatusReply(task, (await ctx.engine.show(task)).status)


async def _check_escalation_optional(ctx: InjectedContext) -> None:
    """Raises `Invalid` if the caller is an agent with the capability `escalation`."""
    if ctx.caller.agent is None:
        return
    agent = await ctx.agents.profile(ctx.caller.agent)
    if ESCALATION in agent.capabilities:
        raise Invalid(
            "escalation.reason and escalation.prompt are required:"
            ' the agent has the capability "escalation"',
            "escalation_required",
            field="escalation",
        )


@operation("POST", "/agent-tasks/{task_id:uuid}/fail", WORK, status_code=200)
async def fail_task(
    ctx: InjectedContext, task_id: FromPath[UUID], data: JSONBody[FailBody]
) -> TaskStatusReply:
    """Fails the attempt; the error class decides if and when the task is retried."""
    fence = fence_of(ctx, task_id, data)
    if data.escalation is None:
        await _check_escalation_optional(ctx)
    engine = ctx.engine
    await apply_report(
        ctx, fence, lambda: engine.fail(fence, data.failure(), data.resume_at, data.usage)
    )
    return await task_status(ctx, task_id)


@operation("POST", "/agent-tasks/{task_id:uuid}/park", WORK, status_code=200)
async def park_task(
    ctx: InjectedContext, task_id: FromPath[UUID], data: JSONBody[ParkBody]
) -> ParkReply:
    """Parks the task: it waits without a slot, and the try is not counted.

    If all subtasks that it waits for have finished, they are returned at once and the attempt
    continues.
    """
    fence, engine = fence_of(ctx, task_id, data), ctx.engine
    result = WaitResult(parked=True)
    if data.children is not None or data.hold == "children":
        timeout_s = _wait_timeout_s(ctx, data)
        result = await apply_report(
            ctx, fence, lambda: engine.wait(fence, data.children, timeout_s, data.key)
        )
    else:
        await apply_report(
            ctx, fence, lambda: engine.park(fence, data.hold, data.resume_at, data.wait_until)
        )
    status = (await task_status(ctx, task_id)).status
    return ParkReply(task_id, status, result.parked, result.children)


def _wait_timeout_s(ctx: InjectedContext, body: ParkBody) -> float | None:
    """Returns the seconds until `waitUntil`, else `timeoutSeconds`, else `None` (no limit)."""
    bounds.check_instant("waitUntil", body.wait_until)
    if body.wait_until is None:
        return body.timeout_seconds
    return max((body.wait_until - ctx.service.clock.now()).total_seconds(), 0.0)


@operation("POST", "/agent-tasks/{task_id:uuid}/release", WORK, status_code=200)
async def release_task(
    ctx: InjectedContext, task_id: FromPath[UUID], data: JSONBody[ReleaseBody | None] = None
) -> TaskStatusReply:
    """Releases the task, so that it can be claimed again; the try is not counted."""
    await ctx.engine.release(fence_of(ctx, task_id, data))
    return await task_status(ctx, task_id)


@operation("POST", "/agent-tasks/{task_id:uuid}/transcript", WORK, status_code=204)
async def append_transcript(
    ctx: InjectedContext, task_id: FromPath[UUID], data: JSONBody[TranscriptBody]
) -> None:
    """Adds lines to the attempt's transcript; lines whose number is stored already are ignored."""
    bounds.check_number("the number of lines", len(data.lines), 0, bounds.MAX_PAGE)
    lines = [Line(line.number, line.level, line.text) for line in data.lines]
    await ctx.engine.append(fence_of(ctx, task_id, data), lines)


@operation("POST", "/agents/{agent_id:uuid}/heartbeat", WORK, status_code=200)
async def send_agent_heartbeat(
    ctx: InjectedContext, agent_id: FromPath[UUID], data: JSONBody[HeartbeatBody | None] = None
) -> AgentHeartbeatReply:
    """Records a heartbeat of an agent, and renews the lease of its task.

    Returns requests to cancel or pause the task, and the number of waiting messages.
    """
    body = data or HeartbeatBody()
    agent = await ctx.agents.profile(agent_id)
    if body.current_task_id is None and ctx.caller.fence is None:
        return AgentHeartbeatReply(
            messages=await ctx.agents.record_heartbeat(agent_id, _health_sample(body, None))
        )
    try:
        fence, lease = await _renew_lease(ctx, agent, body)
        redactor = await ctx.engine.task_secrets.redactor(fence)
    except TenutoError:
        await ctx.agents.record_heartbeat(agent_id, _health_sample(body, None))
        raise
    messages = await ctx.agents.record_heartbeat(agent_id, _health_sample(body, redactor))
    if not lease.begun:
        with suppress(Conflict):  # started meanwhile, or asked to stop
            await ctx.engine.begin(fence)
    if body.progress_percent is not None or body.current_step is not None:
        await ctx.engine.progress(fence, body.progress_percent, body.current_step)
    token, _ = ctx.service.attempt_tokens.issue(agent_id, ctx.workspace, fence)
    return AgentHeartbeatReply(
        lease_until=lease.lease_until,
        cancel=lease.cancel,
        pause=lease.pause,
        messages=messages,
        warning=HUNG_WARNING if lease.hung else None,
        token=token,
    )


async def _renew_lease(
    ctx: InjectedContext, agent: AgentProfile, body: HeartbeatBody
) -> tuple[Fence, LeaseStatus]:
    """Renews the lease of the agent's task, or raises `Conflict`; returns fence and status."""
    own_fence, task = ctx.caller.fence, body.current_task_id
    if own_fence is not None and task not in (None, own_fence.task):
        raise Conflict("the attempt no longer owns the task", "lease_lost")
    fence = fence_of(ctx, own_fence.task if own_fence is not None else _require_task_id(task), body)
    if own_fence is None:
        await agent_tokens.check_task(ctx, fence.task)
    result = await ctx.engine.heartbeat([fence], lease_s_for(ctx, agent, body.lease_seconds))
    lease = result.held.get(fence.task)
    if lease is None:
        raise Conflict("the attempt no longer owns the task", "lease_lost")
    return fence, lease


def _health_sample(body: HeartbeatBody, redactor: Redactor | None) -> HealthSample:
    """Returns the agent's health report, with the secrets of its task redacted.

    Without a redactor free text is dropped: the agent may have got secrets that are unknown here.
    """
    status, step = body.status or "healthy", body.current_step
    if redactor is not None:
        status = redactor.redact_text(status)
    elif status not in PLAIN_STATUSES:
        status = "unknown"
    return HealthSample(
        status=status,
        current_task_id=body.current_task_id,
        progress_percent=body.progress_percent,
        current_step=None if redactor is None or step is None else redactor.redact_text(step),
        memory_mb=body.memory_mb,
        cpu_percent=body.cpu_percent,
    )


def _require_task_id(task: UUID | None) -> UUID:
    """Returns the task id; raises `Invalid` if it is missing."""
    if task is None:
        raise Invalid("currentTaskId is required", field="currentTaskId")
    return task


@operation("POST", "/workers/{worker_id:str}/heartbeat", HOST, status_code=200)
async def send_worker_heartbeat(
    ctx: InjectedContext,
    worker_id: FromPath[str],
    data: JSONBody[WorkerHeartbeatBody | None] = None,
) -> WorkerHeartbeatReply:
    """Records a heartbeat of a worker, and renews all its leases.

    Returns the leases it has lost, and the tasks that it must cancel or pause.
    """
    body = data or WorkerHeartbeatBody()
    bounds.check_number("the number of leases", len(body.leases), 0, bounds.MAX_CLAIM)
    bounds.check_text("worker", worker_id, bounds.MAX_TITLE, empty=False)
    await agent_tokens.check_agent_names(ctx, body.agents)
    worker = WorkerInfo(worker_id, body.host, body.pid, body.agents, body.slots, body.status)
    drain = await ctx.engine.record_worker(worker, ctx.caller.agent)
    fences = [Fence(lease.task_id, lease.attempt, lease.lease_token) for lease in body.leases]
    lease_s = body.lease_seconds or ctx.service.settings.lease_s
    own_fences = await agent_tokens.filter_own_fences(ctx, fences)
    result = await ctx.engine.heartbeat(own_fences, lease_s)
    leases = result.held
    foreign_fences = [fence for fence in fences if fence not in own_fences]
    return WorkerHeartbeatReply(
        lost=[fence.task for fence in (*result.lost, *foreign_fences)],
        cancel=[task for task, lease in leases.items() if lease.cancel],
        pause=[task for task, lease in leases.items() if lease.pause],
        hung=[task for task, lease in leases.items() if lease.hung],
        lease_until=min((lease.lease_until for lease in leases.values()), default=None),
        drain=drain,
        messages=await ctx.engine.mailboxes.count_waiting(body.agents),
    )
