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
    def is_store_in_process(self) -> bool:
        """True if the store runs in this process and needs its event loop."""

    async def register_agent(self, profile: AgentProfile) -> AgentProfile:
        """Registers an agent and returns it as stored: a user's settings win."""

    def subscribe(self, listener: Listener) -> Callable[[], None]: ...

    async def claim(
        self, agent: AgentProfile, worker: str, n: int, lease_s: int
    ) -> list[ClaimedTask]: ...

    async def worker_heartbeat(
        self, worker: WorkerInfo, fences: Sequence[Fence], lease_s: int
    ) -> HeartbeatResult:
        """Renews the leases; returns lost ones, and cancel and pause requests by task."""

    async def record_worker(self, worker: WorkerInfo) -> bool:
        """Records that a worker is alive or exits; returns True if a drain is requested."""

    async def confirm_gone_sessions(
        self, worker: str, host: str, may_run: Callable[[str, UUID], bool]
    ) -> int:
        """Confirms that ended sessions of the host are gone, unless `may_run`; returns how many."""

    async def progress(
        self, fence: Fence, percent: float | None = None, step: str | None = None
    ) -> None: ...

    async def used(self, fence: Fence, usage: Usage) -> None: ...

    async def checkpoint(self, fence: Fence, data: Any, seq: int | None = None) -> int:
        """Stores data for the next attempt; returns the checkpoint's number."""

    async def append(self, fence: Fence, lines: Sequence[Line]) -> None:
        """Adds lines to the attempt's transcript."""

    async def steps(self, task: UUID) -> dict[str, tuple[Any, UUID | None]]:
        """Returns the task's recorded steps by key: (value, id of the subtask or `None`)."""

    async def record_step(self, fence: Fence, key: str, value: Any) -> None: ...

    async def spawn(self, fence: Fence, key: str, new: NewTask) -> UUID: ...

    async def wait(
        self,
        fence: Fence,
        children: Sequence[UUID | str] | None = None,
        timeout_s: float | None = None,
        key: str | None = None,
    ) -> WaitResult:
        """Returns the subtasks' outcomes (`None`: of all), or parks the task."""

    async def ask(self, fence: Fence, key: str, question: Question) -> AskResult:
        """Returns a person's answer, or parks the task until there is one."""

    async def complete(self, fence: Fence, output: Any = None) -> None: ...

    async def fail(
        self, fence: Fence, failure: Failure, resume_at: datetime | None = None
    ) -> None: ...

    async def not_started(self, fence: Fence, failure: Failure) -> None:
        """Reports that the session could not be started; the try is not counted."""

    async def time_out(self, fence: Fence, receipt: dict[str, Any] | None = None) -> None: ...

    async def release(self, fence: Fence) -> None:
        """Releases the task for another claim; the try is not counted."""

    async def confirm_cancel(self, fence: Fence, receipt: dict[str, Any]) -> None: ...

    async def confirm_pause(self, fence: Fence, receipt: dict[str, Any]) -> None: ...

    async def confirm_gone(self, fence: Fence, receipt: dict[str, Any]) -> None:
        """Confirms that the session of an attempt with an unconfirmed end is gone."""
