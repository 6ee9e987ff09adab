"""The agents' side: claim, report, live. Every write carries the fence of its attempt."""

from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import datetime
from typing import Any, TypeVar
from uuid import UUID

import msgspec
from litestar import Request, patch, post
from litestar.params import FromPath, JSONBody

from tenuto.api.auth import agent_tokens
from tenuto.api.edge.long_poll import polling
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
    WorkerBeatBody,
)
from tenuto.api.service import InjectedContext
from tenuto.engine.agents.push import lease_of as pushed_lease
from tenuto.engine.agents.registry import HealthSample
from tenuto.engine.agents.subtasks import Child, WaitResult
from tenuto.engine.limits.budgets import spend_owner
from tenuto.engine.tasks.claim import ClaimedTask
from tenuto.engine.tasks.report import LeaseStatus
from tenuto.engine.tenancy.output_redaction import check_progress
from tenuto.model import bounds
from tenuto.model.agents.matching import AgentProfile
from tenuto.model.errors import Conflict, Invalid, TenutoError
from tenuto.model.limits.budgets import check_usage
from tenuto.model.tasks.attempts import HUNG
from tenuto.model.tasks.task import Fence
from tenuto.model.tasks.transcript import Line
from tenuto.model.tenancy.redact import Redactor

T = TypeVar("T")
ESCALATES = "escalation"
LONGEST_WAIT_S = 60
MOST = 100
PLAIN = frozenset({"healthy", "degraded", "unhealthy"})
"""What an agent may say of itself without saying what task it is at."""


class ClaimedTaskView(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A task that is the agent's now. `token` speaks for this attempt alone."""

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
    """What was claimed; nothing when the wait was in vain."""

    tasks: list[ClaimedTaskView]


class AgentHeartbeatReply(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """What a heartbeat brings back."""

    lease_until: datetime | None = None
    cancel: bool = False
    pause: bool = False
    messages: int = 0
    warning: str | None = None
    """Why the attempt will be aborted unless it reports progress."""
    token: str | None = None


class WorkerHeartbeatReply(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """What a worker still holds, has lost, and is asked to end."""

    lost: list[UUID]
    cancel: list[UUID]
    pause: list[UUID]
    hung: list[UUID] = []
    messages: int = 0
    lease_until: datetime | None = None
    drain: bool = False


class TaskStatusReply(msgspec.Struct, frozen=True):
    """What became of the task."""

    id: UUID
    status: str


class ParkReply(msgspec.Struct, frozen=True):
    """Whether the attempt is over; if not, how the children ended that it asked for."""

    id: UUID
    status: str
    parked: bool
    children: list[Child] = []


class ProgressReply(msgspec.Struct, frozen=True, rename="camel"):
    """The number of the checkpoint that is kept, if one was sent."""

    checkpoint_seq: int | None = None


@post("/agents/{agent_id:uuid}/claim", status_code=200)
async def claim(
    request: Request[Any, Any, Any],
    desk: InjectedContext,
    agent_id: FromPath[UUID],
    data: JSONBody[ClaimBody | None] = None,
) -> ClaimReply:
    """Take up to `limit` tasks for the agent, waiting up to `waitSeconds` for the first.

    An agent that leaves while it waits is given nothing.
    """
    wish = data or ClaimBody()
    bounds.number("limit", wish.limit, 1, MOST)
    bounds.number("waitSeconds", wish.wait_seconds, 0, LONGEST_WAIT_S)
    if wish.worker is not None:
        await agent_tokens.check_worker(desk, wish.worker)
    agent = await desk.registry.profile_for_claim(agent_id)
    worker = wish.worker or f"http:{agent.name}"
    lease_s = lease_of(desk, agent, wish.lease_seconds)

    def take() -> Awaitable[list[ClaimedTask]]:
        return desk.engine.claim(agent, worker, wish.limit, lease_s)

    async with polling(desk, request, agent.id) as poll:
        await desk.registry.record_heartbeat(agent_id)
        found = await poll.until(wish.wait_seconds, take)
        if poll.left.is_set():
            await _give_back(desk, found)
    return ClaimReply([claimed(desk, agent_id, work) for work in found])


async def _give_back(desk: InjectedContext, works: list[ClaimedTask]) -> None:
    """Release what nobody will hear of, each with its try; where that fails, its lease runs out."""
    for work in works:
        with suppress(TenutoError):
            await desk.engine.release(work.fence)


def lease_of(desk: InjectedContext, agent: AgentProfile, asked: int | None) -> int:
    """Seconds that a lease holds: three heartbeats of the agent's, or until it counts as stale."""
    beats = 3 * (agent.heartbeat_interval_s or 0)
    least = max(desk.service.settings.lease_s, beats)
    if agent.gateway is not None:
        least = max(pushed_lease(agent), beats)
    if asked is None:
        return least
    bounds.number("leaseSeconds", asked, 1, bounds.MAX_LEASE_S)
    return max(asked, beats)


def claimed(desk: InjectedContext, agent: UUID, work: ClaimedTask) -> ClaimedTaskView:
    """A claimed task as its agent gets it."""
    token, _ = desk.service.attempts.issue(agent, desk.workspace, work.fence)
    return ClaimedTaskView(
        id=work.fence.task,
        attempt=work.fence.attempt,
        lease_token=work.fence.token,
        lease_until=work.lease_until,
        token=token,
        tries=work.tries,
        max_attempts=work.max_attempts,
        title=work.title,
        task_type=work.task_type,
        prompt=work.prompt,
        system_prompt=work.system_prompt,
        model=work.model,
        command=work.command,
        cwd=work.cwd,
        env=work.env,
        timeout_s=work.timeout_s,
        input_context=work.input,
        metadata=work.metadata,
        checkpoint_data=work.checkpoint,
        checkpoint_seq=work.checkpoint_seq,
        parent_id=work.parent,
        trace_id=work.trace_id,
        flow_id=work.flow,
        key=work.key,
        previous=work.previous,
        secrets=list(work.secrets),
    )


def fence_of(desk: InjectedContext, task: UUID, said: AttemptBody | None) -> Fence:
    """The fence that a report carries, in its token or in its body."""
    mine = desk.caller.fence
    attempt = said.attempt if said is not None else None
    token = said.lease_token if said is not None else None
    if mine is not None:
        if attempt not in (None, mine.attempt) or token not in (None, mine.token):
            raise Conflict("the attempt no longer owns the task", "lease_lost")
        return mine
    if attempt is None or token is None:
        raise Invalid("attempt and leaseToken are missing", field="leaseToken")
    bounds.number("attempt", attempt, 1, bounds.MAX_COUNT)
    bounds.text("leaseToken", token, bounds.MAX_TITLE)
    return Fence(task, attempt, token)


async def check_current(desk: InjectedContext) -> None:
    """Raise `Conflict` when an attempt asks that owns its task no more: its token died with it."""
    mine = desk.caller.fence
    if mine is None:
        return
    if not await desk.engine.core.store.fetch(spend_owner(desk.workspace, mine)):
        raise Conflict("the attempt no longer owns the task", "lease_lost")


async def ensure_started(
    desk: InjectedContext, fence: Fence, report: Callable[[], Awaitable[T]]
) -> T:
    """Take a report. A session that reports has begun, though its gateway is still to say so."""
    try:
        return await report()
    except Conflict as error:
        if error.code != "out_of_turn":
            raise
    with suppress(Conflict):  # it was told meanwhile, or this is not what is wrong
        await desk.engine.begin(fence)
    return await report()


@patch("/agent-tasks/{task_id:uuid}/progress")
async def progress(
    desk: InjectedContext, task_id: FromPath[UUID], data: JSONBody[ProgressBody]
) -> ProgressReply:
    """Say how far the attempt is, and keep what the next one would need.

    Of a report in which something is wrong nothing is kept.
    """
    fence = fence_of(desk, task_id, data)
    check_progress(data.progress_percent, data.current_step, data.estimated_completion_at)
    if data.usage is not None:
        check_usage(data.usage)
    seq = None
    if data.checkpoint_data is not msgspec.UNSET:
        seq = await desk.engine.checkpoint(fence, data.checkpoint_data, data.checkpoint_seq)
    if data.usage is not None:
        await desk.engine.used(fence, data.usage)
    await desk.engine.progress(
        fence, data.progress_percent, data.current_step, data.estimated_completion_at
    )
    return ProgressReply(seq)


@post("/agent-tasks/{task_id:uuid}/complete", status_code=200)
async def complete(
    desk: InjectedContext, task_id: FromPath[UUID], data: JSONBody[CompleteBody | None] = None
) -> TaskStatusReply:
    """Finish the task with its result; repeated by the same attempt, it is one result."""
    wish = data or CompleteBody()
    fence = fence_of(desk, task_id, wish)
    engine = desk.engine
    await ensure_started(
        desk, fence, lambda: engine.complete(fence, wish.result(), wish.summary, wish.usage)
    )
    return TaskStatusReply(task_id, "COMPLETED")


async def ended(desk: InjectedContext, task: UUID) -> TaskStatusReply:
    """What became of a task."""
    return TaskStatusReply(task, (await desk.engine.show(task)).status)


async def _require_escalation(desk: InjectedContext) -> None:
    """Raise `Invalid` for an agent that says it can tell people what is wrong, and does not."""
    if desk.caller.agent is None:
        return
    agent = await desk.registry.profile(desk.caller.agent)
    if ESCALATES in agent.capabilities:
        raise Invalid(
            "the agent has the capability escalation: tell reason and prompt",
            "escalation_required",
            field="escalation",
        )


@post("/agent-tasks/{task_id:uuid}/fail", status_code=200)
async def fail(
    desk: InjectedContext, task_id: FromPath[UUID], data: JSONBody[FailBody]
) -> TaskStatusReply:
    """End the attempt without a result; the error class decides what follows."""
    fence = fence_of(desk, task_id, data)
    if data.escalation is None:
        await _require_escalation(desk)
    engine = desk.engine
    await ensure_started(
        desk, fence, lambda: engine.fail(fence, data.failure(), data.resume_at, data.usage)
    )
    return await ended(desk, task_id)


@post("/agent-tasks/{task_id:uuid}/park", status_code=200)
async def park(
    desk: InjectedContext, task_id: FromPath[UUID], data: JSONBody[ParkBody]
) -> ParkReply:
    """Give the slot up until something happens; the try is given back.

    Children that have all ended are answered at once, and the attempt goes on.
    """
    fence, engine = fence_of(desk, task_id, data), desk.engine
    waited = WaitResult(parked=True)
    if data.children is not None or data.hold == "children":
        seconds = _seconds(desk, data)
        waited = await ensure_started(
            desk, fence, lambda: engine.wait(fence, data.children, seconds, data.key)
        )
    else:
        await ensure_started(
            desk, fence, lambda: engine.park(fence, data.hold, data.resume_at, data.wait_until)
        )
    status = (await ended(desk, task_id)).status
    return ParkReply(task_id, status, waited.parked, waited.children)


def _seconds(desk: InjectedContext, said: ParkBody) -> float | None:
    """How long a wait is to take; `waitUntil` says it as an instant."""
    bounds.instant("waitUntil", said.wait_until)
    if said.wait_until is None:
        return said.timeout_seconds
    return max((said.wait_until - desk.service.clock.now()).total_seconds(), 0.0)


@post("/agent-tasks/{task_id:uuid}/release", status_code=200)
async def release(
    desk: InjectedContext, task_id: FromPath[UUID], data: JSONBody[ReleaseBody | None] = None
) -> TaskStatusReply:
    """Give the task back unharmed; the try is given back."""
    await desk.engine.release(fence_of(desk, task_id, data))
    return await ended(desk, task_id)


@post("/agent-tasks/{task_id:uuid}/transcript", status_code=204)
async def append_transcript(
    desk: InjectedContext, task_id: FromPath[UUID], data: JSONBody[TranscriptBody]
) -> None:
    """Add lines to the attempt's transcript; a number that is there already is kept as it is."""
    bounds.number("the number of lines", len(data.lines), 0, bounds.MAX_PAGE)
    lines = [Line(line.number, line.level, line.text) for line in data.lines]
    await desk.engine.append(fence_of(desk, task_id, data), lines)


@post("/agents/{agent_id:uuid}/heartbeat", status_code=200)
async def heartbeat(
    desk: InjectedContext, agent_id: FromPath[UUID], data: JSONBody[HeartbeatBody | None] = None
) -> AgentHeartbeatReply:
    """The agent lives; the lease of its task holds on, and it hears what is asked of it."""
    said = data or HeartbeatBody()
    agent = await desk.registry.profile(agent_id)
    if said.current_task_id is None and desk.caller.fence is None:
        return AgentHeartbeatReply(
            messages=await desk.registry.record_heartbeat(agent_id, _felt(said, None))
        )
    try:
        fence, pulse = await _renewed(desk, agent, said)
        redactor = await desk.engine.sealing.redactor(fence)
    except TenutoError:
        await desk.registry.record_heartbeat(agent_id, _felt(said, None))
        raise
    messages = await desk.registry.record_heartbeat(agent_id, _felt(said, redactor))
    if not pulse.begun:
        with suppress(Conflict):  # its gateway told it meanwhile, or it is to stop
            await desk.engine.begin(fence)
    if said.progress_percent is not None or said.current_step is not None:
        await desk.engine.progress(fence, said.progress_percent, said.current_step)
    token, _ = desk.service.attempts.issue(agent_id, desk.workspace, fence)
    return AgentHeartbeatReply(
        lease_until=pulse.lease_until,
        cancel=pulse.cancel,
        pause=pulse.pause,
        messages=messages,
        warning=HUNG if pulse.hung else None,
        token=token,
    )


async def _renewed(
    desk: InjectedContext, agent: AgentProfile, said: HeartbeatBody
) -> tuple[Fence, LeaseStatus]:
    """The attempt that an agent is at, and what is asked of it; its lease holds on."""
    mine, task = desk.caller.fence, said.current_task_id
    if mine is not None and task not in (None, mine.task):
        raise Conflict("the attempt no longer owns the task", "lease_lost")
    fence = fence_of(desk, mine.task if mine is not None else _known(task), said)
    if mine is None:
        await agent_tokens.check_task(desk, fence.task)
    beat = await desk.engine.heartbeat([fence], lease_of(desk, agent, said.lease_seconds))
    pulse = beat.held.get(fence.task)
    if pulse is None:
        raise Conflict("the attempt no longer owns the task", "lease_lost")
    return fence, pulse


def _felt(said: HeartbeatBody, redactor: Redactor | None) -> HealthSample:
    """How an agent says it is, with its task's secrets struck; no words of its own without one.

    Without its task nobody knows what it was ever handed, and may be saying.
    """
    status, step = said.status or "healthy", said.current_step
    if redactor is not None:
        status = redactor.text(status)
    elif status not in PLAIN:
        status = "unknown"
    return HealthSample(
        status=status,
        current_task_id=said.current_task_id,
        progress_percent=said.progress_percent,
        current_step=None if redactor is None or step is None else redactor.text(step),
        memory_mb=said.memory_mb,
        cpu_percent=said.cpu_percent,
    )


def _known(task: UUID | None) -> UUID:
    if task is None:
        raise Invalid("currentTaskId is missing", field="currentTaskId")
    return task


@post("/workers/{worker_id:str}/heartbeat", status_code=200)
async def worker_beat(
    desk: InjectedContext, worker_id: FromPath[str], data: JSONBody[WorkerBeatBody | None] = None
) -> WorkerHeartbeatReply:
    """A worker lives; all its leases hold on, in one request."""
    said = data or WorkerBeatBody()
    bounds.number("the number of leases", len(said.leases), 0, bounds.MAX_CLAIM)
    bounds.text("worker", worker_id, bounds.MAX_TITLE, empty=False)
    await agent_tokens.check_names(desk, said.agents)
    drain = await desk.engine.worker_beat(
        worker_id,
        said.host,
        said.pid,
        said.agents,
        said.slots,
        said.status,
        desk.caller.agent,
    )
    fences = [Fence(each.task_id, each.attempt, each.lease_token) for each in said.leases]
    lease_s = said.lease_seconds or desk.service.settings.lease_s
    mine = await agent_tokens.own_fences(desk, fences)
    beat = await desk.engine.heartbeat(mine, lease_s)
    held = beat.held
    foreign = [fence for fence in fences if fence not in mine]
    return WorkerHeartbeatReply(
        lost=[fence.task for fence in (*beat.lost, *foreign)],
        cancel=[task for task, pulse in held.items() if pulse.cancel],
        pause=[task for task, pulse in held.items() if pulse.pause],
        hung=[task for task, pulse in held.items() if pulse.hung],
        lease_until=min((pulse.lease_until for pulse in held.values()), default=None),
        drain=drain,
        messages=await desk.engine.mailboxes.waiting(said.agents),
    )


HANDLERS = [
    claim,
    progress,
    complete,
    fail,
    park,
    release,
    append_transcript,
    heartbeat,
    worker_beat,
]
