"""The agents' side of an engine behind a server: claim, report, live."""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

import msgspec

from tenuto.broker.protocol import Listener
from tenuto.client.remote.bodies import agent_body, failure_body, fence_body, means_body, task_body
from tenuto.client.remote.http import ApiRequest, ServerConnection, part
from tenuto.clock import Clock
from tenuto.engine.agents.registry import AgentView
from tenuto.engine.agents.subtasks import AskResult, Question, WaitResult
from tenuto.engine.engine import DEFAULT_WORKSPACE
from tenuto.engine.tasks.claim import ClaimedTask
from tenuto.engine.tasks.report import HeartbeatResult, LeaseStatus, WorkerInfo
from tenuto.model.agents.matching import AgentProfile
from tenuto.model.limits.budgets import Usage
from tenuto.model.tasks.commands import Failure
from tenuto.model.tasks.submission import NewTask
from tenuto.model.tasks.task import DEFAULT_LEASE_S, Fence
from tenuto.model.tasks.transcript import Line

V1 = "/api/v1"
WAIT_S = 20.0
"""Seconds that a claim waits at the server for a task."""
MOST_CLAIMED = 200
MOST_LINES = 500


class _Claimed(msgspec.Struct, rename="camel"):
    id: UUID
    attempt: int
    lease_token: str
    lease_until: datetime
    tries: int
    max_attempts: int
    title: str
    task_type: str
    prompt: str | None = None
    system_prompt: str | None = None
    model: str | None = None
    command: list[str] | None = None
    cwd: str | None = None
    env: dict[str, str] = {}
    timeout_s: int | None = None
    input_context: Any = None
    metadata: dict[str, Any] = {}
    checkpoint_data: Any = None
    checkpoint_seq: int = 0
    parent_id: UUID | None = None
    trace_id: str | None = None
    flow_id: UUID | None = None
    key: str | None = None
    previous: Any = None
    secrets: tuple[str, ...] = ()


class _Claims(msgspec.Struct):
    tasks: list[_Claimed]


class _Held(msgspec.Struct, rename="camel"):
    lost: list[UUID]
    cancel: list[UUID]
    pause: list[UUID]
    hung: list[UUID] = []
    lease_until: datetime | None = None
    drain: bool = False


class _Unconfirmed(msgspec.Struct, rename="camel"):
    worker: str
    task_id: UUID
    attempt: int


class _Swept(msgspec.Struct):
    confirmed: int
    unconfirmed: list[_Unconfirmed]


class _Kept(msgspec.Struct):
    seq: int


class _Found(msgspec.Struct):
    id: UUID


class _Step(msgspec.Struct):
    value: Any
    child: UUID | None


class RemoteWorkerEngine:
    """What a worker asks of an engine, over HTTP. Every write carries its fence."""

    within = False

    def __init__(self, link: ServerConnection, workspace: UUID | None = None) -> None:
        self.link = link
        self.workspace = workspace or DEFAULT_WORKSPACE
        """Only a name here: the server goes by the token."""
        self.actor: str | None = None
        self._silent: asyncio.Event | None = None
        self._told: WorkerInfo | None = None
        self._drain = False

    @property
    def clock(self) -> Clock:
        return self.link.clock

    async def register_agent(self, profile: AgentProfile) -> AgentProfile:
        """Make an agent known by its name; a token of one agent answers with that agent."""
        ask = ApiRequest(
            method="POST", path=f"{V1}/agents", body=agent_body(profile), repeatable=True
        )
        known = await self.link.ask(AgentView, ask)
        return msgspec.structs.replace(
            profile.hosted(),
            id=known.id,
            name=known.name,
            version=known.version,
            accept_commands=known.accept_commands,
        )

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """No hints come from afar: a claim waits at the server instead, until this is ended."""
        del listener
        silent = self._silent = asyncio.Event()
        return silent.set

    async def claim(
        self,
        agent: AgentProfile,
        worker: str,
        n: int = 1,
        lease_s: int = DEFAULT_LEASE_S,
        token: str | None = None,
    ) -> list[ClaimedTask]:
        """Take up to n tasks; while somebody listens for hints, wait for the first."""
        mine = token or self.clock.new_token()
        waits = self._silent is not None and not self._silent.is_set()
        body = {
            "agentId": agent.id,
            "claimToken": mine,
            "limit": min(n, MOST_CLAIMED),
            "leaseSeconds": lease_s,
            "waitSeconds": WAIT_S if waits else 0,
            "means": None if agent.means is None else means_body(agent.means),
        }
        asking = asyncio.ensure_future(self._claim(worker, body))
        if not waits or self._silent is None:
            return await asking
        silent = asyncio.ensure_future(self._silent.wait())
        try:
            await asyncio.wait([asking, silent], return_when=asyncio.FIRST_COMPLETED)
            if asking.done():
                return asking.result()
        finally:
            silent.cancel()
            asking.cancel()
        # The server may have given us tasks just now: what it did, it says when asked again.
        await asyncio.gather(asking, return_exceptions=True)
        return await self._claim(worker, body | {"limit": 0, "waitSeconds": 0})

    async def _claim(self, worker: str, body: dict[str, Any]) -> list[ClaimedTask]:
        ask = ApiRequest(
            method="POST",
            path=f"{V1}/workers/{part(worker)}/claim",
            body=body,
            repeatable=True,
            wait_s=body["waitSeconds"],
        )
        claims = await self.link.ask(_Claims, ask)
        return [_work(each, self.workspace) for each in claims.tasks]

    async def worker_heartbeat(
        self, who: WorkerInfo, fences: Sequence[Fence], lease_s: int
    ) -> HeartbeatResult:
        """A worker lives and holds these: one request renews all its leases."""
        leases = [
            {"taskId": each.task, "attempt": each.attempt, "leaseToken": each.token}
            for each in fences
        ]
        body = _presence(who) | {"leases": leases, "leaseSeconds": lease_s}
        told = msgspec.structs.replace(who)
        held = await self.link.ask(_Held, self._beat_of(who, body))
        self._drain = held.drain
        beat = _beat(fences, held)
        self._told = told
        return beat

    async def record_worker(self, who: WorkerInfo) -> bool:
        """Note in the registry that a worker lives or goes, unless its last beat has said so.

        Answers whether the worker is asked to end.
        """
        if who == self._told:
            self._told = None
            return self._drain
        return (await self.link.ask(_Held, self._beat_of(who, _presence(who)))).drain

    def _beat_of(self, who: WorkerInfo, body: dict[str, Any]) -> ApiRequest:
        path = f"{V1}/workers/{part(who.worker)}/heartbeat"
        return ApiRequest(method="POST", path=path, body=body, repeatable=True)

    async def confirm_gone_sessions(
        self, worker: str, host: str, runs: Callable[[str, UUID], bool]
    ) -> int:
        """Confirm the unconfirmed ends of a worker and its host of which nothing runs any more."""
        path = f"{V1}/workers/{part(worker)}/sweep"
        ask = ApiRequest(method="POST", path=path, body={"host": host}, repeatable=True)
        found = (await self.link.ask(_Swept, ask)).unconfirmed
        gone = [
            {"taskId": each.task_id, "attempt": each.attempt}
            for each in found
            if not runs(each.worker, each.task_id)
        ]
        if not gone:
            return 0
        ask = ApiRequest(
            method="POST", path=path, body={"host": host, "gone": gone}, repeatable=True
        )
        return (await self.link.ask(_Swept, ask)).confirmed

    async def progress(
        self,
        fence: Fence,
        percent: float | None = None,
        step: str | None = None,
        finish_at: datetime | None = None,
    ) -> None:
        """Say how far the attempt is."""
        body = fence_body(
            fence, progressPercent=percent, currentStep=step, estimatedCompletionAt=finish_at
        )
        await self._tell(fence, "progress", body, method="PATCH")

    async def used(self, fence: Fence, usage: Usage) -> None:
        """Say what the attempt used since its last report."""
        await self._tell(fence, "progress", fence_body(fence, usage=usage), method="PATCH")

    async def checkpoint(self, fence: Fence, data: Any, seq: int | None = None) -> int:
        """Keep what the next attempt needs to go on; answers the checkpoint's number."""
        body = fence_body(fence, data=data, seq=seq)
        kept: _Kept = await self._tell(fence, "checkpoint", body, _Kept)
        return kept.seq

    async def append(self, fence: Fence, lines: Sequence[Line]) -> None:
        """Add lines to the attempt's transcript."""
        for start in range(0, len(lines), MOST_LINES):
            some = lines[start : start + MOST_LINES]
            await self._tell(fence, "transcript", fence_body(fence, lines=some))

    async def steps(self, task: UUID) -> dict[str, tuple[Any, UUID | None]]:
        """What the task's attempts recorded by key."""
        ask = ApiRequest(method="GET", path=f"{V1}/agent-tasks/{task}/steps", repeatable=True)
        found = await self.link.ask(dict[str, _Step], ask)
        return {key: (step.value, step.child) for key, step in found.items()}

    async def record_step(self, fence: Fence, key: str, value: Any) -> None:
        """Record a step's value for every later attempt."""
        await self._tell(fence, "steps", fence_body(fence, key=key, value=value))

    async def spawn(self, fence: Fence, key: str, new: NewTask) -> UUID:
        """Make a child task, once per key."""
        body = fence_body(fence, key=key, task=task_body(new))
        child: _Found = await self._tell(fence, "children", body, _Found)
        return child.id

    async def wait(
        self,
        fence: Fence,
        children: Sequence[UUID | str] | None = None,
        timeout_s: float | None = None,
        key: str | None = None,
    ) -> WaitResult:
        """How the children ended; while one has not, the task waits and the attempt is over."""
        names = None if children is None else [str(each) for each in children]
        body = fence_body(fence, hold="children", children=names, timeoutSeconds=timeout_s, key=key)
        told: WaitResult = await self._tell(fence, "park", body, WaitResult)
        return told

    async def ask(self, fence: Fence, key: str, question: Question) -> AskResult:
        """What people answered; until they have, the task waits and the attempt is over."""
        body = fence_body(
            fence,
            key=key,
            kind=question.kind,
            title=question.title,
            body=question.body,
            timeoutSeconds=question.timeout_s,
            default=question.default,
        )
        told: AskResult = await self._tell(fence, "ask", body, AskResult)
        return told

    async def complete(
        self,
        fence: Fence,
        output: Any = None,
        summary: str | None = None,
        usage: Usage | None = None,
    ) -> None:
        """Finish the task with its result."""
        body = fence_body(fence, outputResult=output, summary=summary, usage=usage)
        await self._tell(fence, "complete", body)

    async def fail(
        self,
        fence: Fence,
        failure: Failure,
        resume_at: datetime | None = None,
        usage: Usage | None = None,
    ) -> None:
        """End the attempt without a result; the error class decides what follows."""
        body = failure_body(fence, failure, resumeAt=resume_at, usage=usage)
        await self._tell(fence, "fail", body)

    async def not_started(self, fence: Fence, failure: Failure) -> None:
        """The session could not be started; the try is given back."""
        await self._tell(fence, "not-started", failure_body(fence, failure))

    async def time_out(self, fence: Fence, receipt: dict[str, Any] | None = None) -> None:
        """The session was ended because it ran too long."""
        await self._tell(fence, "timed-out", fence_body(fence, receipt=receipt))

    async def park(
        self,
        fence: Fence,
        hold: str,
        resume_at: datetime | None = None,
        wait_until: datetime | None = None,
    ) -> None:
        """Give the slot up until something happens; the try is given back."""
        body = fence_body(fence, hold=hold, resumeAt=resume_at, waitUntil=wait_until)
        await self._tell(fence, "park", body)

    async def release(self, fence: Fence) -> None:
        """Give the task back unharmed; the try is given back."""
        await self._tell(fence, "release", fence_body(fence))

    async def confirm_cancel(self, fence: Fence, receipt: dict[str, Any]) -> None:
        """The session that was to be cancelled is gone; the receipt says how."""
        await self._tell(fence, "confirm-cancel", fence_body(fence, receipt=receipt))

    async def confirm_pause(self, fence: Fence, receipt: dict[str, Any]) -> None:
        """The session that was to be paused is gone."""
        await self._tell(fence, "confirm-pause", fence_body(fence, receipt=receipt))

    async def confirm_gone(self, fence: Fence, receipt: dict[str, Any]) -> None:
        """The session of an attempt that was given up is gone after all."""
        await self._tell(fence, "confirm-gone", fence_body(fence, receipt=receipt))

    async def _tell(
        self, fence: Fence, what: str, body: dict[str, Any], kind: Any = None, method: str = "POST"
    ) -> Any:
        path = f"{V1}/agent-tasks/{fence.task}/{what}"
        ask = ApiRequest(method=method, path=path, body=body, repeatable=True)
        return await self.link.ask(kind or type(None), ask)


def _work(told: _Claimed, workspace: UUID) -> ClaimedTask:
    return ClaimedTask(
        fence=Fence(told.id, told.attempt, told.lease_token),
        workspace=workspace,
        tries=told.tries,
        max_attempts=told.max_attempts,
        lease_until=told.lease_until,
        timeout_s=told.timeout_s,
        checkpoint_seq=told.checkpoint_seq,
        title=told.title,
        prompt=told.prompt,
        system_prompt=told.system_prompt,
        model=told.model,
        task_type=told.task_type,
        command=told.command,
        cwd=told.cwd,
        env=told.env,
        input=told.input_context,
        metadata=told.metadata,
        parent=told.parent_id,
        trace_id=told.trace_id,
        checkpoint=told.checkpoint_data,
        flow=told.flow_id,
        key=told.key,
        previous=told.previous,
        secrets=told.secrets,
    )


def _presence(who: WorkerInfo) -> dict[str, Any]:
    return {
        "host": who.host,
        "pid": who.pid,
        "agents": who.agents,
        "slots": who.slots,
        "status": who.status,
    }


def _beat(fences: Sequence[Fence], told: _Held) -> HeartbeatResult:
    """What is held and lost. Of two attempts at one task, the older one is lost first."""
    missing = Counter(told.lost)
    lost: list[Fence] = []
    held: dict[UUID, LeaseStatus] = {}
    for fence in sorted(fences, key=lambda each: each.attempt):
        task = fence.task
        if missing[task] > 0 or told.lease_until is None:
            missing[task] -= 1
            lost.append(fence)
        else:
            held[task] = LeaseStatus(
                told.lease_until, task in told.cancel, task in told.pause, task in told.hung
            )
    return HeartbeatResult(held, lost)
