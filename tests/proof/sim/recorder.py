"""What an observer outside the system writes down: what was asked, and what was acknowledged."""

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any
from uuid import UUID

import msgspec
from tests.proof.sim.loop import Process, VirtualLoop

from tenuto.engine.agents.subtasks import Child
from tenuto.engine.engine import Engine
from tenuto.engine.tasks.claim import ClaimedTask
from tenuto.engine.tasks.maintenance import SYSTEM_WORKSPACE
from tenuto.engine.tasks.report import HeartbeatResult
from tenuto.model.agents.matching import AgentProfile
from tenuto.model.limits.budgets import Usage
from tenuto.model.tasks.commands import AttemptCommand
from tenuto.model.tasks.submission import NewTask
from tenuto.model.tasks.task import DEFAULT_LEASE_S, TERMINAL, Fence
from tenuto.store.protocol import Row

A_MOMENT_S = 30.0
"""As long as a worker may take to give its tasks back before it ends itself."""


class Submit(msgspec.Struct, eq=False):
    """One submit: its tasks' titles, its key, and every answer that came back."""

    titles: list[str]
    key: str | None
    answers: list[list[UUID]] = []
    keyed_conflict: bool = False


class Save(msgspec.Struct, frozen=True):
    """A checkpoint that was acknowledged."""

    fence: Fence
    seq: int
    data: Any


class Write(msgspec.Struct, frozen=True):
    """A fenced write that was acknowledged, and when it was asked for."""

    what: str
    fence: Fence
    began: int


class Control(msgspec.Struct, frozen=True):
    """An operator's order that was acknowledged, and when."""

    action: str
    task: UUID
    reason: str
    acked: int


class Handling(msgspec.Struct, eq=False):
    """A handler that is running."""

    process: Process
    task: UUID
    attempt: int
    since: float
    deaf: bool = False
    """It does not hear that it is to stop."""


class Recorder:
    """Everything seen from outside. `broken` holds what was seen to be wrong on the spot."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop
        self._count = 0
        self.trace: list[tuple[float, str, str]] = []
        self.broken: list[tuple[str, str]] = []
        self.submits: list[Submit] = []
        self.controls: list[Control] = []
        self.works: dict[UUID, list[tuple[ClaimedTask, int]]] = defaultdict(list)
        self.outputs: dict[tuple[UUID, int], Any] = {}
        self.accepted: list[Write] = []
        self.asked_to_save: dict[UUID, list[Any]] = defaultdict(list)
        self.saves: list[Save] = []
        self.steps: dict[tuple[UUID, str], Any] = {}
        self.children: dict[tuple[UUID, str], set[UUID]] = defaultdict(set)
        self.delivered: list[tuple[UUID, int]] = []
        self.handling: list[Handling] = []
        self.healed_at = 0.0
        self.closed_at = math.inf
        """When everybody was asked to end."""
        self.suicides = 0
        self.last_deaf: dict[str, float] = {}
        """When a process last had a handler that did not hear."""
        self.seen: dict[str, Any] = {}
        """What a story keeps for its own oracles."""

    def tick(self) -> int:
        """A number for now, above all before."""
        self._count += 1
        return self._count

    def note(self, caller: str, subject: str) -> None:
        self.trace.append((self._loop.time(), caller, subject))

    def wrong(self, invariant: str, subject: str) -> None:
        """An invariant is broken."""
        self.note("WRONG", f"{invariant}: {subject}")
        self.broken.append((invariant, subject))

    def claimed(self, n: int, claims: list[ClaimedTask]) -> None:
        if len(claims) > n:
            self.wrong("I8", f"a claim for {n} answered {len(claims)}")
        if len({work.fence.task for work in claims}) < len(claims):
            self.wrong("I8", "a claim answered one task twice")
        for work in claims:
            held = self.works[work.fence.task]
            if any(other.fence.attempt == work.fence.attempt for other, _ in held):
                self.wrong("I7", f"attempt {work.fence.attempt} of {work.title} was claimed twice")
            held.append((work, self.tick()))

    def wrote(self, subject: str, fence: Fence, began: int) -> None:
        """A fenced write was accepted: the attempt must not have been overtaken before it began."""
        for work, at in self.works[fence.task]:
            if work.fence.attempt > fence.attempt and at < began:
                self.wrong("I5", f"{subject} of attempt {fence.attempt} after {work.fence.attempt}")
        if subject != "heartbeat":
            self.accepted.append(Write(subject, fence, began))

    def stepped(self, task: UUID, key: str, value: Any) -> None:
        """A handler was told a step's value."""
        first = self.steps.setdefault((task, key), value)
        if first != value:
            self.wrong("step", f"{task} {key} was {first}, then {value}")

    def waited(self, task: UUID, child: Child, timeout_s: float | None) -> None:
        """A handler was told how a child of its task ended."""
        if timeout_s is None and child.status not in TERMINAL:
            self.wrong("wait", f"{task} went on though {child.id} is {child.status}")

    def stuck(self, process: Process) -> bool:
        """True if the process has, or just had, a handler that does not stop."""
        received = self._loop.time() - self.last_deaf.get(process.name, -1e9) > A_MOMENT_S
        return not received or any(item.deaf and item.process is process for item in self.handling)

    def deliver(self, events: Sequence[Row]) -> None:
        own = [event for event in events if event["workspace"] != SYSTEM_WORKSPACE]
        self.delivered += [(event["task"], event["seq"]) for event in own]


class Watched(Engine):
    """The engine of a process with an observer beside it."""

    recorder: Recorder

    async def _report(self, command: AttemptCommand, *rest: Any) -> None:
        began = self.recorder.tick()
        await super()._report(command, *rest)
        self.recorder.wrote(command.name, command.fence, began)

    async def claim(
        self,
        agent: AgentProfile,
        worker: str,
        n: int = 1,
        lease_s: int = DEFAULT_LEASE_S,
        token: str | None = None,
    ) -> list[ClaimedTask]:
        claimed = await super().claim(agent, worker, n, lease_s, token)
        self.recorder.claimed(n, claimed)
        return claimed

    async def heartbeat(
        self, fences: Sequence[Fence], lease_s: int = DEFAULT_LEASE_S
    ) -> HeartbeatResult:
        began = self.recorder.tick()
        renewal = await super().heartbeat(fences, lease_s)
        for fence in fences:
            if fence not in renewal.lost:
                self.recorder.wrote("heartbeat", fence, began)
        return renewal

    async def checkpoint(self, fence: Fence, data: Any, seq: int | None = None) -> int:
        began = self.recorder.tick()
        self.recorder.asked_to_save[fence.task].append(data)
        number = await super().checkpoint(fence, data, seq)
        self.recorder.wrote("checkpoint", fence, began)
        self.recorder.saves.append(Save(fence, number, data))
        return number

    async def record_step(self, fence: Fence, key: str, value: Any) -> None:
        began = self.recorder.tick()
        await super().record_step(fence, key, value)
        self.recorder.wrote("step", fence, began)

    async def spawn(self, fence: Fence, key: str, new: NewTask) -> UUID:
        began = self.recorder.tick()
        child = await super().spawn(fence, key, new)
        self.recorder.wrote("spawn", fence, began)
        self.recorder.children[fence.task, key].add(child)
        return child

    async def complete(
        self,
        fence: Fence,
        output: Any = None,
        summary: str | None = None,
        usage: Usage | None = None,
    ) -> None:
        began = self.recorder.tick()
        self.recorder.outputs[fence.task, fence.attempt] = output
        await super().complete(fence, output, summary, usage)
        self.recorder.wrote("complete", fence, began)
