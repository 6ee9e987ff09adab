"""The engine calls that a worker uses, in this process or behind a server."""

from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any, Protocol
from uuid import UUID

from tenuto.broker.protocol import Listener
from tenuto.clock import Clock
from tenuto.engine.agents.subtasks import AskResult, Question, WaitResult
from tenuto.engine.tasks.claim import ClaimedTask
from tenuto.engine.tasks.report import HeartbeatResult, WorkerInfo
from tenuto.model.agents.matching import AgentProfile
from tenuto.model.limits.budgets import Usage
from tenuto.model.tasks.commands import Failure
from tenuto.model.tasks.submission import NewTask
from tenuto.model.tasks.task import Fence
from tenuto.model.tasks.transcript import Line


class WorkerEngine(Protocol):
    """The worker's part of an engine; `Engine` documents the contracts."""

    workspace: UUID
    actor: str | None

    @property
    def clock(self) -> Clock: ...

    @property
    def is_store_in_process(self) -> bool: ...

    async def register_agent(self, profile: AgentProfile) -> AgentProfile: ...

    def subscribe(self, listener: Listener) -> Callable[[], None]: ...

    async def claim(
        self, agent: AgentProfile, worker: str, n: int, lease_s: int
    ) -> list[ClaimedTask]: ...

    async def worker_heartbeat(
        self, worker: WorkerInfo, fences: Sequence[Fence], lease_s: int
    ) -> HeartbeatResult: ...

    async def record_worker(self, worker: WorkerInfo) -> bool: ...

    async def confirm_gone_sessions(
        self, worker: str, host: str, runs: Callable[[str, UUID], bool]
    ) -> int: ...

    async def progress(
        self, fence: Fence, percent: float | None = None, step: str | None = None
    ) -> None: ...

    async def used(self, fence: Fence, usage: Usage) -> None: ...

    async def checkpoint(self, fence: Fence, data: Any, seq: int | None = None) -> int: ...

    async def append(self, fence: Fence, lines: Sequence[Line]) -> None: ...

    async def steps(self, task: UUID) -> dict[str, tuple[Any, UUID | None]]: ...

    async def record_step(self, fence: Fence, key: str, value: Any) -> None: ...

    async def spawn(self, fence: Fence, key: str, new: NewTask) -> UUID: ...

    async def wait(
        self,
        fence: Fence,
        children: Sequence[UUID | str] | None = None,
        timeout_s: float | None = None,
        key: str | None = None,
    ) -> WaitResult: ...

    async def ask(self, fence: Fence, key: str, question: Question) -> AskResult: ...

    async def complete(self, fence: Fence, output: Any = None) -> None: ...

    async def fail(
        self, fence: Fence, failure: Failure, resume_at: datetime | None = None
    ) -> None: ...

    async def not_started(self, fence: Fence, failure: Failure) -> None: ...

    async def time_out(self, fence: Fence, receipt: dict[str, Any] | None = None) -> None: ...

    async def release(self, fence: Fence) -> None: ...

    async def confirm_cancel(self, fence: Fence, receipt: dict[str, Any]) -> None: ...

    async def confirm_pause(self, fence: Fence, receipt: dict[str, Any]) -> None: ...

    async def confirm_gone(self, fence: Fence, receipt: dict[str, Any]) -> None: ...
