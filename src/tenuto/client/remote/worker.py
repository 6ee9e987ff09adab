"""`RemoteWorkerEngine`: the engine methods of workers over HTTP: claim, report, heartbeat."""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

import msgspec

from tenuto.broker.protocol import Listener
from tenuto.client.remote.bodies import (
    agent_body,
    failure_body,
    fence_body,
    supported_work_body,
    task_body,
)
from tenuto.client.remote.http import ServerConnection, path_segment
from tenuto.client.remote.resource import RemoteResource
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

CLAIM_WAIT_S = 20.0
"""Seconds that a claim waits at the server for a task."""
MAX_CLAIMED = 200
MAX_LINES = 500


class _ClaimedTask(msgspec.Struct, rename="camel"):
    """A claimed task in the response to a claim."""

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


class _ClaimReply(msgspec.Struct):
    tasks: list[_ClaimedTask]


class _HeartbeatReply(msgspec.Struct, rename="camel"):
    """The response to a heartbeat: task ids of lost leases and of requests to stop."""

    lost: list[UUID]
    cancel: list[UUID]
    pause: list[UUID]
    hung: list[UUID] = []
    lease_until: datetime | None = None
    drain: bool = False


class _UnconfirmedEnd(msgspec.Struct, rename="camel"):
    worker: str
    task_id: UUID
    attempt: int


class _SweepReply(msgspec.Struct):
    confirmed: int
    unconfirmed: list[_UnconfirmedEnd]


class _CheckpointReply(msgspec.Struct):
    seq: int


class _TaskId(msgspec.Struct):
    id: UUID


class _StepReply(msgspec.Struct):
    value: Any
    child: UUID | None


class RemoteWorkerEngine(RemoteResource):
    """The engine methods that a worker uses, over HTTP. Every write sends its fence."""

    is_store_in_process = False

    def __init__(self, connection: ServerConnection, workspace: UUID | None = None) -> None:
        super().__init__(connection)
        self.workspace = workspace or DEFAULT_WORKSPACE
        """Only set on the returned objects; the server uses the token's workspace."""
        self.actor: str | None = None
        self._unsubscribed: asyncio.Event | None = None
        self._last_reported: WorkerInfo | None = None
        self._is_drain_requested = False

    @property
    def clock(self) -> Clock:
        return self.connection.clock

    async def register_agent(self, profile: AgentProfile) -> AgentProfile:
        """Registers an agent by name and returns its stored profile.

        With an agent's own token, the server returns that agent, whatever the name.
        """
        view = await self._call(AgentView, "POST", "agents", agent_body(profile), repeatable=True)
        return msgspec.structs.replace(
            profile.with_supported_work(),
            id=view.id,
            name=view.name,
            version=view.version,
            accept_commands=view.accept_commands,
        )

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Makes claims wait at the server (long poll); returns the function that ends that.

        HTTP delivers no hints, so `listener` is never called. The returned function also ends a
        waiting claim.
        """
        del listener
        unsubscribed = self._unsubscribed = asyncio.Event()
        return unsubscribed.set

    async def claim(
        self,
        agent: AgentProfile,
        worker: str,
        n: int = 1,
        lease_s: int = DEFAULT_LEASE_S,
        token: str | None = None,
    ) -> list[ClaimedTask]:
        """Claims up to n tasks; while subscribed, waits up to 20 s for the first one.

        Returns an empty list if there are none. With the same `token`, a repeated claim returns the
        same tasks.
        """
        claim_token = token or self.clock.new_token()
        can_wait = self._unsubscribed is not None and not self._unsubscribed.is_set()
        body = {
            "agentId": agent.id,
            "claimToken": claim_token,
            "limit": min(n, MAX_CLAIMED),
            "leaseSeconds": lease_s,
            "waitSeconds": CLAIM_WAIT_S if can_wait else 0,
            "means": None if agent.means is None else supported_work_body(agent.means),
        }
        pending_claim = asyncio.ensure_future(self._claim(worker, body))
        if not can_wait or self._unsubscribed is None:
            return await pending_claim
        unsubscribed = asyncio.ensure_future(self._unsubscribed.wait())
        try:
            await asyncio.wait([pending_claim, unsubscribed], return_when=asyncio.FIRST_COMPLETED)
            if pending_claim.done():
                return pending_claim.result()
        finally:
            unsubscribed.cancel()
            pending_claim.cancel()
        # The server may have assigned tasks just now. The same claim token returns them again.
        await asyncio.gather(pending_claim, return_exceptions=True)
        return await self._claim(worker, body | {"limit": 0, "waitSeconds": 0})

    async def _claim(self, worker: str, body: dict[str, Any]) -> list[ClaimedTask]:
        """Sends a claim and returns the claimed tasks."""
        path, wait_s = f"workers/{path_segment(worker)}/claim", body["waitSeconds"]
        claims = await self._call(_ClaimReply, "POST", path, body, repeatable=True, wait_s=wait_s)
        return [_to_claimed_task(task, self.workspace) for task in claims.tasks]

    async def worker_heartbeat(
        self, info: WorkerInfo, fences: Sequence[Fence], lease_s: int
    ) -> HeartbeatResult:
        """Renews a worker's leases; returns lost leases, and cancel and pause requests."""
        leases = [
            {"taskId": fence.task, "attempt": fence.attempt, "leaseToken": fence.token}
            for fence in fences
        ]
        body = _worker_body(info) | {"leases": leases, "leaseSeconds": lease_s}
        reported = msgspec.structs.replace(info)
        reply = await self._send_heartbeat(info, body)
        self._is_drain_requested = reply.drain
        result = _to_heartbeat_result(fences, reply)
        self._last_reported = reported
        return result

    async def record_worker(self, info: WorkerInfo) -> bool:
        """Reports a worker's status unless a heartbeat just did; True if the worker is to drain."""
        if info == self._last_reported:
            self._last_reported = None
            return self._is_drain_requested
        return (await self._send_heartbeat(info, _worker_body(info))).drain

    async def _send_heartbeat(self, worker: WorkerInfo, body: dict[str, Any]) -> _HeartbeatReply:
        """Sends a heartbeat and returns the response."""
        path = f"workers/{path_segment(worker.worker)}/heartbeat"
        return await self._call(_HeartbeatReply, "POST", path, body, repeatable=True)

    async def confirm_gone_sessions(
        self, worker: str, host: str, may_run: Callable[[str, UUID], bool]
    ) -> int:
        """Confirms ended attempts whose sessions no longer run on the host; returns how many.

        `may_run(worker, task)` tells if a session may still run.
        """
        path = f"workers/{path_segment(worker)}/sweep"
        body: dict[str, Any] = {"host": host}
        reply = await self._call(_SweepReply, "POST", path, body, repeatable=True)
        gone = [
            {"taskId": end.task_id, "attempt": end.attempt}
            for end in reply.unconfirmed
            if not may_run(end.worker, end.task_id)
        ]
        if not gone:
            return 0
        body = {"host": host, "gone": gone}
        return (await self._call(_SweepReply, "POST", path, body, repeatable=True)).confirmed

    async def progress(
        self,
        fence: Fence,
        percent: float | None = None,
        step: str | None = None,
        finish_at: datetime | None = None,
    ) -> None:
        """Reports the progress of the attempt; `None` leaves a value unchanged."""
        body = fence_body(
            fence, progressPercent=percent, currentStep=step, estimatedCompletionAt=finish_at
        )
        await self._report(fence, "progress", body, method="PATCH")

    async def used(self, fence: Fence, usage: Usage) -> None:
        """Reports the token usage and cost of the attempt since its last report."""
        await self._report(fence, "progress", fence_body(fence, usage=usage), method="PATCH")

    async def checkpoint(self, fence: Fence, data: Any, seq: int | None = None) -> int:
        """Stores a checkpoint and returns its number; `Conflict` if a higher `seq` is stored."""
        body = fence_body(fence, data=data, seq=seq)
        reply: _CheckpointReply = await self._report(fence, "checkpoint", body, _CheckpointReply)
        return reply.seq

    async def append(self, fence: Fence, lines: Sequence[Line]) -> None:
        """Appends lines to the attempt's transcript."""
        for start in range(0, len(lines), MAX_LINES):
            chunk = lines[start : start + MAX_LINES]
            await self._report(fence, "transcript", fence_body(fence, lines=chunk))

    async def steps(self, task: UUID) -> dict[str, tuple[Any, UUID | None]]:
        """Returns the recorded steps of the task: (value, child task id) by key."""
        path = f"agent-tasks/{task}/steps"
        steps = await self._call(dict[str, _StepReply], "GET", path)
        return {key: (step.value, step.child) for key, step in steps.items()}

    async def record_step(self, fence: Fence, key: str, value: Any) -> None:
        """Records a step's value for every later attempt; `Conflict` if it has another value."""
        await self._report(fence, "steps", fence_body(fence, key=key, value=value))

    async def spawn(self, fence: Fence, key: str, new: NewTask) -> UUID:
        """Submits a subtask, once per key; returns its id."""
        body = fence_body(fence, key=key, task=task_body(new))
        child: _TaskId = await self._report(fence, "children", body, _TaskId)
        return child.id

    async def wait(
        self,
        fence: Fence,
        children: Sequence[UUID | str] | None = None,
        timeout_s: float | None = None,
        key: str | None = None,
    ) -> WaitResult:
        """Returns the results of the subtasks; if one is unfinished, parks the task instead.

        The attempt is over then, and the task waits.
        """
        names = None if children is None else [str(child) for child in children]
        body = fence_body(fence, hold="children", children=names, timeoutSeconds=timeout_s, key=key)
        result: WaitResult = await self._report(fence, "park", body, WaitResult)
        return result

    async def ask(self, fence: Fence, key: str, question: Question) -> AskResult:
        """Returns a person's answer; without one yet, parks the task and ends the attempt."""
        body = fence_body(
            fence,
            key=key,
            kind=question.kind,
            title=question.title,
            body=question.body,
            timeoutSeconds=question.timeout_s,
            default=question.default,
        )
        result: AskResult = await self._report(fence, "ask", body, AskResult)
        return result

    async def complete(
        self,
        fence: Fence,
        output: Any = None,
        summary: str | None = None,
        usage: Usage | None = None,
    ) -> None:
        """Completes the task with its output."""
        body = fence_body(fence, outputResult=output, summary=summary, usage=usage)
        await self._report(fence, "complete", body)

    async def fail(
        self,
        fence: Fence,
        failure: Failure,
        resume_at: datetime | None = None,
        usage: Usage | None = None,
    ) -> None:
        """Fails the attempt; its class decides on a retry. A rate limit resets at `resume_at`."""
        body = failure_body(fence, failure, resumeAt=resume_at, usage=usage)
        await self._report(fence, "fail", body)

    async def not_started(self, fence: Fence, failure: Failure) -> None:
        """Reports a session that could not be started; it counts no try, up to a limit in a row."""
        await self._report(fence, "not-started", failure_body(fence, failure))

    async def time_out(self, fence: Fence, receipt: dict[str, Any] | None = None) -> None:
        """Reports that the session was stopped because it exceeded its timeout."""
        await self._report(fence, "timed-out", fence_body(fence, receipt=receipt))

    async def park(
        self,
        fence: Fence,
        hold: str,
        resume_at: datetime | None = None,
        wait_until: datetime | None = None,
    ) -> None:
        """Parks the task until `hold` is lifted and frees the slot; the try is not counted."""
        body = fence_body(fence, hold=hold, resumeAt=resume_at, waitUntil=wait_until)
        await self._report(fence, "park", body)

    async def release(self, fence: Fence) -> None:
        """Releases the task to the queue; the try is not counted."""
        await self._report(fence, "release", fence_body(fence))

    async def confirm_cancel(self, fence: Fence, receipt: dict[str, Any]) -> None:
        """Confirms that a cancelled attempt's session has ended; the receipt says how."""
        await self._report(fence, "confirm-cancel", fence_body(fence, receipt=receipt))

    async def confirm_pause(self, fence: Fence, receipt: dict[str, Any]) -> None:
        """Confirms that a paused attempt's session has ended."""
        await self._report(fence, "confirm-pause", fence_body(fence, receipt=receipt))

    async def confirm_gone(self, fence: Fence, receipt: dict[str, Any]) -> None:
        """Confirms that the session of an attempt that lost its lease has ended."""
        await self._report(fence, "confirm-gone", fence_body(fence, receipt=receipt))

    async def _report(
        self,
        fence: Fence,
        action: str,
        body: dict[str, Any],
        response_type: Any = None,
        method: str = "POST",
    ) -> Any:
        """Sends a write of an attempt, whose `body` has the fence; returns the decoded response."""
        path = f"agent-tasks/{fence.task}/{action}"
        return await self._call(response_type or type(None), method, path, body, repeatable=True)


def _to_claimed_task(body: _ClaimedTask, workspace: UUID) -> ClaimedTask:
    """Returns a claimed task of the response as the engine's `ClaimedTask`."""
    return ClaimedTask(
        fence=Fence(body.id, body.attempt, body.lease_token),
        workspace=workspace,
        tries=body.tries,
        max_attempts=body.max_attempts,
        lease_until=body.lease_until,
        timeout_s=body.timeout_s,
        checkpoint_seq=body.checkpoint_seq,
        title=body.title,
        prompt=body.prompt,
        system_prompt=body.system_prompt,
        model=body.model,
        task_type=body.task_type,
        command=body.command,
        cwd=body.cwd,
        env=body.env,
        input=body.input_context,
        metadata=body.metadata,
        parent=body.parent_id,
        trace_id=body.trace_id,
        checkpoint=body.checkpoint_data,
        flow=body.flow_id,
        key=body.key,
        previous=body.previous,
        secrets=body.secrets,
    )


def _worker_body(worker: WorkerInfo) -> dict[str, Any]:
    """Returns the worker fields of a heartbeat body."""
    return {
        "host": worker.host,
        "pid": worker.pid,
        "agents": worker.agents,
        "slots": worker.slots,
        "status": worker.status,
    }


def _to_heartbeat_result(fences: Sequence[Fence], reply: _HeartbeatReply) -> HeartbeatResult:
    """Returns the held and the lost leases; without `leaseUntil` in the reply all are lost.

    The server reports task ids. Of two attempts of one task, the older one is lost.
    """
    missing = Counter(reply.lost)
    lost: list[Fence] = []
    held: dict[UUID, LeaseStatus] = {}
    for fence in sorted(fences, key=lambda fence: fence.attempt):
        task = fence.task
        if missing[task] > 0 or reply.lease_until is None:
            missing[task] -= 1
            lost.append(fence)
        else:
            held[task] = LeaseStatus(
                reply.lease_until, task in reply.cancel, task in reply.pause, task in reply.hung
            )
    return HeartbeatResult(held, lost)
