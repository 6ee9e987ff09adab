"""Routes for remote workers and clients: claims, checkpoints, steps, subtasks and other reports.

Each request can be repeated if its response was lost: claims are recognised by their claim token,
reports by their fence.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import Annotated, Any, Literal
from uuid import UUID
from weakref import WeakValueDictionary

import msgspec
from litestar import Request
from litestar.params import FromPath, FromQuery, JSONBody, QueryParameter

from tenuto.api.auth import agent_tokens
from tenuto.api.edge.long_poll import long_poll
from tenuto.api.operation import HOST, READ, WORK, operation
from tenuto.api.routes.agent_protocol import (
    MAX_WAIT_S,
    ClaimReply,
    TaskStatusReply,
    check_attempt_current,
    claimed_task_view,
    fence_of,
    lease_s_for,
    task_status,
)
from tenuto.api.routes.agents import profile_of
from tenuto.api.routes.bodies import AgentBody, AttemptBody, FailBody, LenientBody
from tenuto.api.routes.task_bodies import TaskBody
from tenuto.api.routes.tasks import Limit, LogPage
from tenuto.api.service import InjectedContext
from tenuto.engine.agents.registry import AgentView
from tenuto.engine.agents.subtasks import Question
from tenuto.engine.engine import Engine
from tenuto.engine.tasks.claim import ClaimedTask
from tenuto.engine.tasks.maintenance import TaskMaintenance
from tenuto.engine.views import Page
from tenuto.model import bounds
from tenuto.model.agents.lifecycle import validate_profile
from tenuto.model.agents.matching import AgentProfile, SupportedWork
from tenuto.model.errors import NotFound
from tenuto.model.tasks.submission import Filter
from tenuto.store.protocol import Statement

MIN_TOKEN_LENGTH = 32
"""Minimum characters of a claim token, so that it cannot be guessed."""
MAX_SWEPT = 500

_claim_locks: WeakValueDictionary[tuple[UUID, str], asyncio.Lock] = WeakValueDictionary()


class SupportedWorkBody(LenientBody, kw_only=True):
    """The work that a worker can run, independent of its agent's profile."""

    runtimes: tuple[str, ...] = ()
    task_types: tuple[str, ...] | None = None
    accept_commands: bool = False


class WorkerClaimBody(LenientBody, kw_only=True):
    """A worker's claim; `limit` 0 returns only the tasks of an earlier claim with this token."""

    agent_id: UUID
    claim_token: str
    limit: int = 1
    wait_seconds: float = 0
    lease_seconds: int | None = None
    means: SupportedWorkBody | None = None


class UnconfirmedEndBody(LenientBody):
    """An attempt whose end is not confirmed."""

    task_id: UUID
    attempt: int


class SweepBody(LenientBody):
    """A worker's host, and the attempts of which no process runs there any more."""

    host: str
    gone: tuple[UnconfirmedEndBody, ...] = ()


class UnconfirmedEnd(msgspec.Struct, frozen=True, rename="camel"):
    """An attempt whose end is not confirmed, and the worker that ran it."""

    worker: str
    task_id: UUID
    attempt: int


class SweepReply(msgspec.Struct, frozen=True):
    """How many attempts were confirmed as ended, and those that are still unconfirmed."""

    confirmed: int
    unconfirmed: list[UnconfirmedEnd]


class TaskIdReply(msgspec.Struct, frozen=True):
    """The id of a task."""

    id: UUID


class CheckpointBody(AttemptBody):
    """A checkpoint: data that the next attempt continues from."""

    data: Any = None
    seq: int | None = None


class CheckpointReply(msgspec.Struct, frozen=True):
    """The number of the stored checkpoint."""

    seq: int


class StepBody(AttemptBody, kw_only=True):
    """A finished step with its value."""

    key: str
    value: Any = None


class StepView(msgspec.Struct, frozen=True):
    """A recorded step: its value, or the subtask it created."""

    value: Any
    child: UUID | None


class ChildBody(AttemptBody, kw_only=True):
    """A subtask to create; `key` makes the request repeatable."""

    key: str
    task: TaskBody


class AskBody(AttemptBody, kw_only=True):
    """A question for a person; `default` is the answer if none is given in time."""

    key: str
    title: str
    kind: Literal["approval", "question"] = "approval"
    body: Any = None
    timeout_seconds: float | None = None
    default: Any = None


class AskView(msgspec.Struct, frozen=True):
    """Whether the attempt ended by parking; if not, the answer that a person gave."""

    id: UUID
    status: str
    parked: bool
    answer: Any = None


class ReceiptBody(AttemptBody):
    """How the session was stopped."""

    receipt: dict[str, Any] | None = None


@operation("GET", "/agent-tasks/find", READ)
async def find_task(
    ctx: InjectedContext, prefix: Annotated[str, QueryParameter(name="id", max_length=60)]
) -> TaskIdReply:
    """Returns the id of the task with this id, or with this unique beginning of an id."""
    return TaskIdReply(await ctx.engine.find(prefix))


@operation("GET", "/agent-tasks/{task_id:uuid}/trail", READ, remote=Engine.events)
async def list_task_events(
    ctx: InjectedContext,
    task_id: FromPath[UUID],
    after: Annotated[int, QueryParameter(ge=0, le=bounds.MAX_COUNT)] = 0,
    limit: Limit = 100,
) -> LogPage:
    """Returns the task's audit trail after a version, oldest first."""
    return LogPage(list(await ctx.engine.events(task_id, after, limit)))


@operation("POST", "/agents", HOST, status_code=200)
async def register_agent(ctx: InjectedContext, data: JSONBody[AgentBody]) -> AgentView:
    """Registers an agent by its name.

    A request with an agent's own token changes nothing and returns that agent.
    """
    if ctx.caller.agent is not None:
        return await ctx.agents.show(ctx.caller.agent)
    profile = profile_of(ctx, ctx.service.clock.new_id(), data)
    registered = await ctx.engine.register_agent(profile)
    return await ctx.agents.show(registered.id)


@operation("POST", "/workers/{worker_id:str}/claim", HOST, status_code=200)
async def claim_tasks_for_worker(
    request: Request[Any, Any, Any],
    ctx: InjectedContext,
    worker_id: FromPath[str],
    data: JSONBody[WorkerClaimBody],
) -> ClaimReply:
    """Claims up to `limit` tasks for an agent of a worker.

    A request repeated with the same claim token returns the same tasks. A worker that disconnects
    while it waits gets no more tasks.
    """
    if ctx.caller.agent not in (None, data.agent_id):
        raise NotFound(f"no agent {data.agent_id}")
    await agent_tokens.check_worker(ctx, worker_id)
    bounds.check_number("limit", data.limit, 0, bounds.MAX_PAGE)
    bounds.check_number("waitSeconds", data.wait_seconds, 0, MAX_WAIT_S)
    bounds.check_number(
        "the length of claimToken", len(data.claim_token), MIN_TOKEN_LENGTH, bounds.MAX_NAME
    )
    load_profile = ctx.agents.profile_for_claim if data.limit else ctx.agents.profile
    agent = _with_supported_work(await load_profile(data.agent_id), data.means)
    await ctx.agents.record_heartbeat(agent.id)
    lease_s = lease_s_for(ctx, agent, data.lease_seconds)

    def claim_once() -> Awaitable[list[ClaimedTask]]:
        return ctx.engine.claim(agent, worker_id, data.limit, lease_s, data.claim_token)

    async with _lock_claim_token(ctx, data.claim_token), long_poll(ctx, request, agent.id) as poll:
        tasks = await ctx.engine.claimed(agent.id, data.claim_token)
        if not tasks and data.limit:
            tasks = await poll.claim_within(data.wait_seconds, claim_once)
    return ClaimReply([claimed_task_view(ctx, agent.id, task) for task in tasks])


def _with_supported_work(agent: AgentProfile, body: SupportedWorkBody | None) -> AgentProfile:
    """Returns the profile limited to the work that the worker supports; `None` sets no limit."""
    if body is None:
        return agent
    supported = SupportedWork(body.runtimes, body.task_types, body.accept_commands)
    return validate_profile(msgspec.structs.replace(agent, means=supported))


@asynccontextmanager
async def _lock_claim_token(ctx: InjectedContext, token: str) -> AsyncIterator[None]:
    """Locks the claim token in this process during the block.

    A repeated request waits for the first one, so that it can return the tasks of that one.
    """
    lock = _claim_locks.setdefault((ctx.workspace, token), asyncio.Lock())
    async with lock:
        yield


@operation("POST", "/workers/{worker_id:str}/sweep", HOST, status_code=200)
async def sweep_sessions(
    ctx: InjectedContext, worker_id: FromPath[str], data: JSONBody[SweepBody]
) -> SweepReply:
    """Confirms that sessions have ended; returns the attempts of the host still unconfirmed.

    With an agent's token, only attempts of this agent are returned and confirmed.
    """
    bounds.check_text("worker", worker_id, bounds.MAX_TITLE, empty=False)
    bounds.check_text("host", data.host, bounds.MAX_TITLE, empty=False)
    bounds.check_number("the number of ends", len(data.gone), 0, MAX_SWEPT)
    await agent_tokens.check_worker(ctx, worker_id)
    open_ends = await _list_unconfirmed(ctx, worker_id, data.host)
    requested = {(end.task_id, end.attempt) for end in data.gone}
    gone = [end for end in open_ends if (end.task_id, end.attempt) in requested]
    if gone:
        receipt = {"state": "swept", "how": "nothing of it runs on its host"}
        ends = [(end.task_id, end.attempt) for end in gone]
        await TaskMaintenance(ctx.engine.core).confirm_gone(ends, receipt, ctx.caller.actor)
    return SweepReply(len(gone), [end for end in open_ends if end not in gone])


async def _list_unconfirmed(ctx: InjectedContext, worker: str, host: str) -> list[UnconfirmedEnd]:
    """Returns unconfirmed ends of the worker and its host; for an agent's token only its own."""
    scope = {"workspace": ctx.workspace, "agent": ctx.caller.agent}
    worker_filter = {"worker": worker, "prefix": f"{host}:", "most": MAX_SWEPT}
    rows = await ctx.engine.core.store.fetch(
        Statement("attempts_unconfirmed", scope | worker_filter)
    )
    return [UnconfirmedEnd(row["worker"], row["id"], row["attempt"]) for row in rows]


@operation("POST", "/agent-tasks/{task_id:uuid}/checkpoint", WORK, status_code=200)
async def save_checkpoint(
    ctx: InjectedContext, task_id: FromPath[UUID], data: JSONBody[CheckpointBody]
) -> CheckpointReply:
    """Stores a checkpoint, also from an attempt that is being paused."""
    fence = fence_of(ctx, task_id, data)
    return CheckpointReply(await ctx.engine.checkpoint(fence, data.data, data.seq))


@operation("GET", "/agent-tasks/{task_id:uuid}/steps", WORK)
async def list_steps(ctx: InjectedContext, task_id: FromPath[UUID]) -> dict[str, StepView]:
    """Returns the recorded steps of a task by key; an agent can read only its own tasks."""
    task = await ctx.engine.show(task_id)
    if ctx.caller.agent not in (None, task.agent):
        raise NotFound(f"no task {task_id}")
    await check_attempt_current(ctx)
    steps = await ctx.engine.steps(task_id)
    return {key: StepView(value, child) for key, (value, child) in steps.items()}


@operation("POST", "/agent-tasks/{task_id:uuid}/steps", WORK, status_code=204)
async def record_step(
    ctx: InjectedContext, task_id: FromPath[UUID], data: JSONBody[StepBody]
) -> None:
    """Records a step's value for later attempts; repeating it with the same value is allowed."""
    await ctx.engine.record_step(fence_of(ctx, task_id, data), data.key, data.value)


@operation("POST", "/agent-tasks/{task_id:uuid}/children", WORK, status_code=200)
async def create_child(
    ctx: InjectedContext, task_id: FromPath[UUID], data: JSONBody[ChildBody]
) -> TaskIdReply:
    """Creates a subtask, once per key."""
    fence = fence_of(ctx, task_id, data)
    return TaskIdReply(await ctx.engine.spawn(fence, data.key, data.task.new_task()))


@operation("GET", "/agent-tasks/{task_id:uuid}/children", READ)
async def list_children(
    ctx: InjectedContext,
    task_id: FromPath[UUID],
    limit: Limit = 100,
    cursor: FromQuery[UUID | None] = None,
) -> Page:
    """Returns the subtasks that attempts of the task created, newest first."""
    await ctx.engine.show(task_id)
    return await ctx.engine.list(Filter(parent=task_id), limit, cursor)


@operation("POST", "/agent-tasks/{task_id:uuid}/ask", WORK, status_code=200)
async def ask_person(
    ctx: InjectedContext, task_id: FromPath[UUID], data: JSONBody[AskBody]
) -> AskView:
    """Asks a person a question, once per key; the task waits without a slot for the answer."""
    fence = fence_of(ctx, task_id, data)
    question = Question(
        kind=data.kind,
        title=data.title,
        body=data.body,
        timeout_s=data.timeout_seconds,
        default=data.default,
    )
    result = await ctx.engine.ask(fence, data.key, question)
    return AskView(task_id, (await task_status(ctx, task_id)).status, result.parked, result.answer)


@operation("POST", "/agent-tasks/{task_id:uuid}/not-started", WORK, status_code=200)
async def report_not_started(
    ctx: InjectedContext, task_id: FromPath[UUID], data: JSONBody[FailBody]
) -> TaskStatusReply:
    """Reports that the session could not be started; the try is not counted."""
    await ctx.engine.not_started(fence_of(ctx, task_id, data), data.failure())
    return await task_status(ctx, task_id)


@operation("POST", "/agent-tasks/{task_id:uuid}/timed-out", WORK, status_code=200)
async def report_timed_out(
    ctx: InjectedContext, task_id: FromPath[UUID], data: JSONBody[ReceiptBody]
) -> TaskStatusReply:
    """Reports that the session was stopped because it exceeded its timeout."""
    await ctx.engine.time_out(fence_of(ctx, task_id, data), data.receipt)
    return await task_status(ctx, task_id)


@operation("POST", "/agent-tasks/{task_id:uuid}/confirm-cancel", WORK, status_code=200)
async def confirm_cancel(
    ctx: InjectedContext, task_id: FromPath[UUID], data: JSONBody[ReceiptBody]
) -> TaskStatusReply:
    """Confirms that the session to be cancelled has ended; `receipt` records how."""
    await ctx.engine.confirm_cancel(fence_of(ctx, task_id, data), data.receipt or {})
    return await task_status(ctx, task_id)


@operation("POST", "/agent-tasks/{task_id:uuid}/confirm-pause", WORK, status_code=200)
async def confirm_pause(
    ctx: InjectedContext, task_id: FromPath[UUID], data: JSONBody[ReceiptBody]
) -> TaskStatusReply:
    """Confirms that the session to be paused has ended."""
    await ctx.engine.confirm_pause(fence_of(ctx, task_id, data), data.receipt or {})
    return await task_status(ctx, task_id)


@operation("POST", "/agent-tasks/{task_id:uuid}/confirm-gone", WORK, status_code=200)
async def confirm_gone(
    ctx: InjectedContext, task_id: FromPath[UUID], data: JSONBody[ReceiptBody]
) -> TaskStatusReply:
    """Confirms that the session of an expired or replaced attempt has ended."""
    fence = fence_of(ctx, task_id, data)
    # The lease token of a replaced attempt is not stored any more: its row has the agent.
    for attempt in await ctx.engine.attempts(task_id):
        if attempt.attempt == fence.attempt and ctx.caller.agent in (None, attempt.agent):
            await ctx.engine.confirm_gone(fence, data.receipt or {})
    return await task_status(ctx, task_id)
