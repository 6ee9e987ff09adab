"""What workers and clients elsewhere need of an engine besides: the rest of an attempt's reports.

Whatever may have to be asked twice, because an answer was lost, can be: claims by their token,
reports by their fence.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager
from typing import Annotated, Any, Literal
from uuid import UUID
from weakref import WeakValueDictionary

import msgspec
from litestar import Request, get, post
from litestar.params import FromPath, FromQuery, JSONBody, QueryParameter

from tenuto.api.auth import agent_tokens
from tenuto.api.edge.long_poll import polling
from tenuto.api.routes.agent_protocol import (
    LONGEST_WAIT_S,
    ClaimReply,
    TaskStatusReply,
    check_current,
    claimed,
    ended,
    fence_of,
    lease_of,
)
from tenuto.api.routes.agents import profile_of
from tenuto.api.routes.bodies import AgentBody, AttemptBody, FailBody, LenientBody, TaskBody
from tenuto.api.routes.tasks import Limit, Lines
from tenuto.api.service import InjectedContext
from tenuto.engine.agents.registry import AgentView
from tenuto.engine.agents.subtasks import Question
from tenuto.engine.tasks.claim import ClaimedTask
from tenuto.engine.tasks.maintenance import TaskMaintenance
from tenuto.engine.tasks.query import Filter
from tenuto.engine.views import Page
from tenuto.model import bounds
from tenuto.model.agents.lifecycle import checked
from tenuto.model.agents.matching import AgentProfile, SupportedWork
from tenuto.model.errors import NotFound
from tenuto.store.protocol import Statement

LEAST_TOKEN = 32
"""Characters of a claim's token: nobody else may guess it."""
MOST_SWEPT = 500


_turns: WeakValueDictionary[tuple[UUID, str], asyncio.Lock] = WeakValueDictionary()


class SupportedWorkBody(LenientBody, kw_only=True):
    """What a worker can run, whatever its agent may take."""

    runtimes: tuple[str, ...] = ()
    task_types: tuple[str, ...] | None = None
    accept_commands: bool = False


class WorkerClaimBody(LenientBody, kw_only=True):
    """What a worker asks for; with `limit` 0 only what an earlier claim by the token took."""

    agent_id: UUID
    claim_token: str
    limit: int = 1
    wait_seconds: float = 0
    lease_seconds: int | None = None
    means: SupportedWorkBody | None = None


class UnconfirmedEndBody(LenientBody):
    """An end that nobody confirmed."""

    task_id: UUID
    attempt: int


class SweepBody(LenientBody):
    """A worker's host, and the ends of which nothing runs there any more."""

    host: str
    gone: tuple[UnconfirmedEndBody, ...] = ()


class UnconfirmedEnd(msgspec.Struct, frozen=True, rename="camel"):
    """An end that nobody confirmed, and the worker that had the attempt."""

    worker: str
    task_id: UUID
    attempt: int


class SweepReply(msgspec.Struct, frozen=True):
    """How many ends were confirmed, and those that are not yet."""

    confirmed: int
    unconfirmed: list[UnconfirmedEnd]


class TaskIdReply(msgspec.Struct, frozen=True):
    """The task that was meant."""

    id: UUID


class CheckpointBody(AttemptBody):
    """What the next attempt needs to go on."""

    data: Any = None
    seq: int | None = None


class CheckpointReply(msgspec.Struct, frozen=True):
    """The number of the checkpoint that is kept."""

    seq: int


class StepBody(AttemptBody, kw_only=True):
    """A step that is done, with its value."""

    key: str
    value: Any = None


class StepView(msgspec.Struct, frozen=True):
    """What was recorded under a key: a value, or a child."""

    value: Any
    child: UUID | None


class ChildBody(AttemptBody, kw_only=True):
    """A part of the task that becomes a task of its own."""

    key: str
    task: TaskBody


class AskBody(AttemptBody, kw_only=True):
    """What people are asked; `default` is the answer when none comes in time."""

    key: str
    title: str
    kind: Literal["approval", "question"] = "approval"
    body: Any = None
    timeout_seconds: float | None = None
    default: Any = None


class AskView(msgspec.Struct, frozen=True):
    """Whether the attempt is over; if not, what people answered."""

    id: UUID
    status: str
    parked: bool
    answer: Any = None


class ReceiptBody(AttemptBody):
    """How the session ended."""

    receipt: dict[str, Any] | None = None


@get("/agent-tasks/find")
async def find(
    desk: InjectedContext, prefix: Annotated[str, QueryParameter(name="id", max_length=60)]
) -> TaskIdReply:
    """The task that an id, or the unambiguous beginning of one, names."""
    return TaskIdReply(await desk.engine.find(prefix))


@get("/agent-tasks/{task_id:uuid}/trail")
async def trail(
    desk: InjectedContext,
    task_id: FromPath[UUID],
    after: Annotated[int, QueryParameter(ge=0, le=bounds.MAX_COUNT)] = 0,
    limit: Limit = 100,
) -> Lines:
    """The task's audit trail after a version, oldest first."""
    return Lines(list(await desk.engine.events(task_id, after, limit)))


@post("/agents", status_code=200)
async def host(desk: InjectedContext, data: JSONBody[AgentBody]) -> AgentView:
    """Register an agent by its name; an agent's own token answers with that agent as it is."""
    if desk.caller.agent is not None:
        return await desk.registry.show(desk.caller.agent)
    profile = profile_of(desk, desk.service.clock.new_id(), data)
    known = await desk.engine.register_agent(profile)
    return await desk.registry.show(known.id)


@post("/workers/{worker_id:str}/claim", status_code=200)
async def claim(
    request: Request[Any, Any, Any],
    desk: InjectedContext,
    worker_id: FromPath[str],
    data: JSONBody[WorkerClaimBody],
) -> ClaimReply:
    """Take up to `limit` tasks for an agent; asked again with the same token, the same tasks.

    A worker that leaves while it waits is given nothing more.
    """
    if desk.caller.agent not in (None, data.agent_id):
        raise NotFound(f"no agent {data.agent_id}")
    await agent_tokens.check_worker(desk, worker_id)
    bounds.number("limit", data.limit, 0, bounds.MAX_PAGE)
    bounds.number("waitSeconds", data.wait_seconds, 0, LONGEST_WAIT_S)
    bounds.number("the length of claimToken", len(data.claim_token), LEAST_TOKEN, bounds.MAX_NAME)
    ask = desk.registry.profile_for_claim if data.limit else desk.registry.profile
    agent = _with_supported_work(await ask(data.agent_id), data.means)
    await desk.registry.record_heartbeat(agent.id)
    lease_s = lease_of(desk, agent, data.lease_seconds)

    def take() -> Awaitable[list[ClaimedTask]]:
        return desk.engine.claim(agent, worker_id, data.limit, lease_s, data.claim_token)

    async with _lock_claim_token(desk, data.claim_token), polling(desk, request, agent.id) as poll:
        found = await desk.engine.claimed(agent.id, data.claim_token)
        if not found and data.limit:
            found = await poll.until(data.wait_seconds, take)
    return ClaimReply([claimed(desk, agent.id, work) for work in found])


def _with_supported_work(agent: AgentProfile, said: SupportedWorkBody | None) -> AgentProfile:
    """The agent, bound by what the worker that asks can run; without a word by what is known."""
    if said is None:
        return agent
    means = SupportedWork(said.runtimes, said.task_types, said.accept_commands)
    return checked(msgspec.structs.replace(agent, means=means))


@asynccontextmanager
async def _lock_claim_token(desk: InjectedContext, token: str) -> AsyncIterator[None]:
    """Whoever asks again waits until its first request is over, and so knows what that took."""
    lock = _turns.setdefault((desk.workspace, token), asyncio.Lock())
    async with lock:
        yield


@post("/workers/{worker_id:str}/sweep", status_code=200)
async def sweep(
    desk: InjectedContext, worker_id: FromPath[str], data: JSONBody[SweepBody]
) -> SweepReply:
    """Confirm ends of sessions that are gone; answers those of the worker's host that remain.

    An agent's own token sees and confirms those of its agent alone.
    """
    bounds.text("worker", worker_id, bounds.MAX_TITLE, empty=False)
    bounds.text("host", data.host, bounds.MAX_TITLE, empty=False)
    bounds.number("the number of ends", len(data.gone), 0, MOST_SWEPT)
    await agent_tokens.check_worker(desk, worker_id)
    open_ends = await _open_ends(desk, worker_id, data.host)
    named = {(each.task_id, each.attempt) for each in data.gone}
    gone = [each for each in open_ends if (each.task_id, each.attempt) in named]
    if gone:
        receipt = {"state": "swept", "how": "nothing of it runs on its host"}
        ends = [(each.task_id, each.attempt) for each in gone]
        await TaskMaintenance(desk.engine.core).confirm_gone(ends, receipt, desk.caller.actor)
    return SweepReply(len(gone), [each for each in open_ends if each not in gone])


async def _open_ends(desk: InjectedContext, worker: str, host: str) -> list[UnconfirmedEnd]:
    """The unconfirmed ends on a host, of tasks of the caller's workspace, or of its agent alone."""
    whose = {"workspace": desk.workspace, "agent": desk.caller.agent}
    where = {"worker": worker, "prefix": f"{host}:", "most": MOST_SWEPT}
    rows = await desk.engine.core.store.fetch(Statement("unconfirmed", whose | where))
    return [UnconfirmedEnd(row["worker"], row["id"], row["attempt"]) for row in rows]


@post("/agent-tasks/{task_id:uuid}/checkpoint", status_code=200)
async def checkpoint(
    desk: InjectedContext, task_id: FromPath[UUID], data: JSONBody[CheckpointBody]
) -> CheckpointReply:
    """Keep what the next attempt needs to go on; accepted also from one that is being paused."""
    fence = fence_of(desk, task_id, data)
    return CheckpointReply(await desk.engine.checkpoint(fence, data.data, data.seq))


@get("/agent-tasks/{task_id:uuid}/steps")
async def steps(desk: InjectedContext, task_id: FromPath[UUID]) -> dict[str, StepView]:
    """What the task's attempts recorded, by key; an agent sees those of its own tasks."""
    task = await desk.engine.show(task_id)
    if desk.caller.agent not in (None, task.agent):
        raise NotFound(f"no task {task_id}")
    await check_current(desk)
    found = await desk.engine.steps(task_id)
    return {key: StepView(value, child) for key, (value, child) in found.items()}


@post("/agent-tasks/{task_id:uuid}/steps", status_code=204)
async def record_step(
    desk: InjectedContext, task_id: FromPath[UUID], data: JSONBody[StepBody]
) -> None:
    """Record a step's value for every later attempt; repeated with that value, it is one step."""
    await desk.engine.record_step(fence_of(desk, task_id, data), data.key, data.value)


@post("/agent-tasks/{task_id:uuid}/children", status_code=200)
async def spawn(
    desk: InjectedContext, task_id: FromPath[UUID], data: JSONBody[ChildBody]
) -> TaskIdReply:
    """Make a child task, once per key."""
    fence = fence_of(desk, task_id, data)
    return TaskIdReply(await desk.engine.spawn(fence, data.key, data.task.task()))


@get("/agent-tasks/{task_id:uuid}/children")
async def children(
    desk: InjectedContext,
    task_id: FromPath[UUID],
    limit: Limit = 100,
    cursor: FromQuery[UUID | None] = None,
) -> Page:
    """The tasks that attempts at the task have made, newest first."""
    await desk.engine.show(task_id)
    return await desk.engine.list(Filter(parent=task_id), limit, cursor)


@post("/agent-tasks/{task_id:uuid}/ask", status_code=200)
async def ask(desk: InjectedContext, task_id: FromPath[UUID], data: JSONBody[AskBody]) -> AskView:
    """Ask people something, once per key; until they answer, the task waits without a slot."""
    fence = fence_of(desk, task_id, data)
    question = Question(
        kind=data.kind,
        title=data.title,
        body=data.body,
        timeout_s=data.timeout_seconds,
        default=data.default,
    )
    asked = await desk.engine.ask(fence, data.key, question)
    return AskView(task_id, (await ended(desk, task_id)).status, asked.parked, asked.answer)


@post("/agent-tasks/{task_id:uuid}/not-started", status_code=200)
async def not_started(
    desk: InjectedContext, task_id: FromPath[UUID], data: JSONBody[FailBody]
) -> TaskStatusReply:
    """The session could not be started; the try is given back."""
    await desk.engine.not_started(fence_of(desk, task_id, data), data.failure())
    return await ended(desk, task_id)


@post("/agent-tasks/{task_id:uuid}/timed-out", status_code=200)
async def timed_out(
    desk: InjectedContext, task_id: FromPath[UUID], data: JSONBody[ReceiptBody]
) -> TaskStatusReply:
    """The session was ended because it ran too long."""
    await desk.engine.time_out(fence_of(desk, task_id, data), data.receipt)
    return await ended(desk, task_id)


@post("/agent-tasks/{task_id:uuid}/confirm-cancel", status_code=200)
async def confirm_cancel(
    desk: InjectedContext, task_id: FromPath[UUID], data: JSONBody[ReceiptBody]
) -> TaskStatusReply:
    """The session that was to be cancelled is gone; the receipt says how."""
    await desk.engine.confirm_cancel(fence_of(desk, task_id, data), data.receipt or {})
    return await ended(desk, task_id)


@post("/agent-tasks/{task_id:uuid}/confirm-pause", status_code=200)
async def confirm_pause(
    desk: InjectedContext, task_id: FromPath[UUID], data: JSONBody[ReceiptBody]
) -> TaskStatusReply:
    """The session that was to be paused is gone."""
    await desk.engine.confirm_pause(fence_of(desk, task_id, data), data.receipt or {})
    return await ended(desk, task_id)


@post("/agent-tasks/{task_id:uuid}/confirm-gone", status_code=200)
async def confirm_gone(
    desk: InjectedContext, task_id: FromPath[UUID], data: JSONBody[ReceiptBody]
) -> TaskStatusReply:
    """The session of an attempt that was given up is gone after all."""
    fence = fence_of(desk, task_id, data)
    # The token of an attempt that was overtaken is known no more: whose it was, its row says.
    for attempt in await desk.engine.attempts(task_id):
        if attempt.attempt == fence.attempt and desk.caller.agent in (None, attempt.agent):
            await desk.engine.confirm_gone(fence, data.receipt or {})
    return await ended(desk, task_id)


HANDLERS: Sequence[Any] = [
    find,
    trail,
    host,
    claim,
    sweep,
    checkpoint,
    steps,
    record_step,
    spawn,
    children,
    ask,
    not_started,
    timed_out,
    confirm_cancel,
    confirm_pause,
    confirm_gone,
]
