"""The worker: claims for its agents while it has a free slot, and runs what it claimed."""

import asyncio
import logging
import os
import shlex
import socket
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from contextvars import copy_context
from typing import Any
from uuid import UUID

import msgspec

from tenuto.broker.protocol import EVERYTHING
from tenuto.crash_points import crash_point
from tenuto.engine.tasks.claim import ClaimedTask
from tenuto.engine.tasks.report import WorkerInfo
from tenuto.metrics import PROCESS_METRICS
from tenuto.model.agents.matching import AgentProfile, SupportedWork
from tenuto.model.errors import Forbidden, TenutoError
from tenuto.periodic import NextTick, wait_first_event
from tenuto.settings import Settings
from tenuto.worker.attempt import AttemptRunner
from tenuto.worker.engine_protocol import WorkerEngine
from tenuto.worker.heartbeat import HeartbeatLoop, HeartbeatThread, lease_seconds
from tenuto.worker.leases import HeldLease, HeldLeases, Reason
from tenuto.worker.runtime.function import FunctionRuntime, Handler
from tenuto.worker.runtime.protocol import Runtime

log = logging.getLogger("tenuto.worker")

CLAIM_MOST = 1000
"""Tasks in one claim: enough to share its cost, few enough to spread over workers."""

_PORTION = 100
"""Attempts started in one turn of the loop, where the store needs it, too."""

_SIGN_OFF_S = 5.0
"""How long a worker that ends waits to say so: a store that hangs must not keep it."""

Connect = Callable[[], AbstractAsyncContextManager[WorkerEngine]]


class HostedAgent(msgspec.Struct, frozen=True):
    """An agent and how its attempts are run."""

    profile: AgentProfile
    runtime: Runtime


class Worker:
    """A process that hosts agents. `connect` gives the heart a connection of its own."""

    def __init__(
        self,
        engine: WorkerEngine,
        settings: Settings | None = None,
        *,
        connect: Connect | None = None,
        die: Callable[[], None] | None = None,
        name: str | None = None,
    ) -> None:
        self.engine = engine
        self.settings = settings or Settings()
        host, pid = socket.gethostname(), os.getpid()
        self.id = name or f"{host}:{pid}:{engine.clock.new_id()}"
        self._connect = connect
        self._die = die
        self._hosted: list[HostedAgent] = []
        self._leases = HeldLeases()
        self._running: set[asyncio.Task[None]] = set()
        self._sessions = 0
        self._who = WorkerInfo(self.id, host, pid)
        self._heart: HeartbeatLoop | HeartbeatThread | None = None
        self._claims: set[asyncio.Task[None]] = set()
        self._asking = 0
        """Claims that have not been answered."""
        self._reserved = 0
        self._turn = 0
        self._dry: set[int] = set()
        self._hints = 0
        self._plenty = False
        self._reaching = False
        self._stopping = False
        self._asked = asyncio.Event()
        """Somebody asked this worker to end."""
        self._ending: float | None = None
        """Since when it is to end, if it is."""
        self._refused: set[int] = set()
        """Agents that are to take no more tasks, as was said once."""
        self._context = copy_context()
        self._loop: asyncio.AbstractEventLoop

    async def host(self, profile: AgentProfile, runtime: Runtime) -> AgentProfile:
        """Take an agent in; it is known to everybody when this returns."""
        known = await self.engine.register_agent(profile.hosted())
        if profile.accept_commands and not known.accept_commands:
            log.warning(
                "agent %s does not accept commands; run: orchestrate agent update --accept-commands"
                " -- %s",
                known.name,
                shlex.quote(known.name),
            )
        self._hosted.append(HostedAgent(known, runtime))
        self._who.agents.append(known.name)
        return known

    async def host_functions(
        self,
        name: str,
        handlers: dict[str | None, Handler],
        *,
        task_tags: Sequence[str] = (),
        capabilities: Sequence[str] = (),
        agent_type: str | None = None,
        max_concurrent: int | None = None,
    ) -> AgentProfile:
        """Take in an agent whose tasks are run by these handlers, by task type; `None`: any."""
        runtime = FunctionRuntime()
        runtime.handlers |= handlers
        types = None if None in handlers else tuple(sorted(str(each) for each in handlers))
        profile = AgentProfile(
            id=self.engine.clock.new_id(),
            workspace=self.engine.workspace,
            name=name,
            agent_type=agent_type,
            task_types=types,
            task_tags=tuple(task_tags),
            capabilities=tuple(capabilities),
            runtimes=(runtime.name,),
            max_concurrent=max_concurrent,
        )
        return await self.host(profile, runtime)

    def request_drain(self) -> None:
        """Note that this worker is to end. For any thread, and for the handler of a signal.

        A busy event loop does not hear of it in time; the heart does.
        """
        if self._ending is None:
            self._ending = self.engine.clock.elapsed()
        if isinstance(self._heart, HeartbeatThread):
            self._heart.poke()

    async def run(self, stop: asyncio.Event) -> None:
        """Work until `stop`; then finish or give back what is running."""
        self._who.slots = self._usable_slots()
        self._context = copy_context()
        self._loop = asyncio.get_running_loop()
        unsubscribe = self.engine.subscribe(self._on_hint)
        self._start_heart()
        try:
            ends = [stop, self._asked]
            while not any(each.is_set() for each in ends):
                self._start_claims()
                if not await wait_first_event(ends, self.settings.poll_s, self.engine.clock):
                    self._look_again()
        finally:
            unsubscribe()
            await self._drain()
            await self._stop_heart()

    def _usable_slots(self) -> int:
        """Slots that the machine has room for, with a warning where there are more."""
        slots, usable = self.settings.slots, []
        for hosted in self._hosted:
            room = hosted.runtime.free_sessions(0)
            usable.append(slots if room is None else min(slots, room))
            if usable[-1] < slots:
                log.warning(
                    "%d slots, but the limit of open files is enough for %d sessions of agent %s",
                    slots,
                    usable[-1],
                    hosted.profile.name,
                )
        return max(usable, default=slots)

    def _start_claims(self) -> None:
        """Start to claim for the free slots, unless every agent was just left without a task.

        A second claim may be under way while the queue is full: the store works while we do.
        """
        self._reaching = False
        while self._asking < (2 if self._plenty else 1):
            n = min(self._free(), CLAIM_MOST)
            index = self._next_agent()
            if n <= 0 or index is None or self._stopping:
                return
            n = self._startable(index, n)
            if n <= 0:
                self._dry.add(index)  # until the next look
                continue
            self._asking += 1
            self._reserved += n
            # In a context of our own: what a claim starts must not inherit that of its cause.
            context = self._context.copy()
            claim = self._loop.create_task(self._claim(index, n), context=context)
            self._claims.add(claim)
            claim.add_done_callback(self._claims.discard)

    def _free(self) -> int:
        """Slots without a session.

        The next task need not wait until an outcome is stored, but not too many may be untold.
        """
        untold = len(self._running) - self._sessions
        return self.settings.slots - self._sessions - self._reserved - max(0, untold - CLAIM_MOST)

    def _startable(self, index: int, n: int) -> int:
        """As many of n sessions as the agent's runtime can start now."""
        room = self._hosted[index].runtime.free_sessions(self._sessions + self._reserved)
        return n if room is None else min(n, room)

    def _next_agent(self) -> int | None:
        """Agents take turns; those left without a task wait for a hint."""
        for _ in self._hosted:
            self._turn = (self._turn + 1) % len(self._hosted)
            if self._turn not in self._dry:
                return self._turn
        return None

    def _look_again(self) -> None:
        self._hints += 1
        self._dry.clear()

    async def _claim(self, index: int, n: int) -> None:
        """Claim up to n tasks for an agent and start them."""
        hosted, hints = self._hosted[index], self._hints
        works = self._release_unsupported(hosted.profile.means, await self._claimed(index, n))
        self._asking -= 1
        self._reserved -= n
        if not works:
            hosted.runtime.release_reservation()
        if self._stopping:
            await self._release_all(works)
            return
        self._sessions += len(works)
        self._plenty = len(works) == n
        if not self._plenty and hints == self._hints:
            self._dry.add(index)
        self._start_claims()  # first: the store takes the next ones while we start these
        await self._start_all(works, hosted.runtime)

    def _release_unsupported(
        self, means: SupportedWork | None, works: list[ClaimedTask]
    ) -> list[ClaimedTask]:
        """What can be run here; what cannot goes back, though no store should have given it."""
        if means is None:
            return works
        kinds = {_kind(work) for work in works}
        lacking = {kind: lacks for kind in kinds if (lacks := means.missing_support(*kind))}
        if not lacking:
            return works
        for work in works:
            if lacks := lacking.get(_kind(work)):
                log.error("cannot run %s: the worker %s", work.fence.task, lacks)
                giving = self._loop.create_task(self._give_back(work))
                self._claims.add(giving)
                giving.add_done_callback(self._claims.discard)
        return [work for work in works if _kind(work) not in lacking]

    async def _claimed(self, index: int, n: int) -> list[ClaimedTask]:
        """What the store has for an agent; nothing when it does not answer."""
        hosted = self._hosted[index]
        try:
            crash_point("worker.before_claim")
            works = await self.engine.claim(
                hosted.profile, self.id, n, lease_seconds(self.settings)
            )
            crash_point("worker.claimed")
        except Forbidden as error:
            # Not before somebody changes the agent: said once, not at every look.
            PROCESS_METRICS.count("tenuto_claims_total", "error")
            if index not in self._refused:
                log.warning("agent %s takes nothing: %s", hosted.profile.name, error)
            self._refused.add(index)
        except TenutoError as error:
            PROCESS_METRICS.count("tenuto_claims_total", "error")
            log.warning("cannot claim: %s", error)
        except Exception:
            PROCESS_METRICS.count("tenuto_claims_total", "error")
            log.exception("a fault while claiming; the next look goes on")
        else:
            if not works:
                PROCESS_METRICS.count("tenuto_claims_total", "empty")
            return works
        return []

    async def _start_all(self, works: list[ClaimedTask], runtime: Runtime) -> None:
        """Start them; a store within this process is heard, and given work, every so many."""
        portion = _PORTION if self.engine.within else CLAIM_MOST
        for at in range(0, len(works), portion):
            if at > 0:
                await NextTick()
            if self._stopping:
                await self._release_all(works[at:])
                return
            for work in works[at : at + portion]:
                self._start(work, runtime)

    def _start(self, work: ClaimedTask, runtime: Runtime) -> None:
        attempt = AttemptRunner(
            self.engine,
            work,
            runtime,
            self._leases,
            self.settings,
            self._session_ended,
            self._ended,
        )
        self._running.add(attempt.start(self._loop))

    def _session_ended(self) -> None:
        self._sessions -= 1
        self._reach_soon()

    def _ended(self, task: "asyncio.Task[None] | None") -> None:
        if task is not None:
            self._running.discard(task)
        self._look_again()  # an agent that had reached its own limit may take one more
        self._reach_soon()

    def _on_hint(self, topic: str) -> None:
        if topic == f"worker:{self.id}":
            if self._heart is not None:
                self._wake_heartbeat()
        elif topic.startswith("lane:") or topic == EVERYTHING:
            self._look_again()
            self._start_claims()

    def _reach_soon(self) -> None:
        """Reach once for all who end at this turn of the loop."""
        if not self._reaching:
            self._reaching = True
            self._loop.call_soon(self._start_claims)

    def _wake_heartbeat(self) -> None:
        if isinstance(self._heart, HeartbeatThread):
            self._heart.poke()
        elif self._heart is not None:
            self._heart.poke.set()

    def _start_heart(self) -> None:
        loop = self._loop

        def tell(held: HeldLease, reason: Reason) -> None:
            loop.call_soon_threadsafe(held.stop, reason)

        def drain() -> None:
            if not self._asked.is_set():
                self.request_drain()
                loop.call_soon_threadsafe(self._asked.set)

        def make(engine: WorkerEngine) -> HeartbeatLoop:
            die: dict[str, Any] = {} if self._die is None else {"die": self._die}
            means = {"drain": drain, "ending": lambda: self._ending, **die}
            return HeartbeatLoop(engine, self._leases, self._who, self.settings, tell, **means)

        if self._connect is None:
            self._heart = make(self.engine)
            self._beating = asyncio.Event()
            self._heart_task = loop.create_task(self._keep_beating(self._heart))
        else:
            self._heart = HeartbeatThread(self._connect, make, self.engine.clock)
            self._heart.start()

    async def _keep_beating(self, heart: HeartbeatLoop) -> None:
        """Beat until the end, whatever comes up: without beats every task is lost."""
        while not self._beating.is_set():
            try:
                await heart.run(self._beating)
            except TenutoError as error:
                log.warning("heartbeat failed: %s", error)
                await self.engine.clock.sleep(1.0)
            except Exception:
                log.exception("a fault in the heart; it starts again")
                await self.engine.clock.sleep(1.0)

    async def _stop_heart(self) -> None:
        self._who.status = "STOPPED"
        if isinstance(self._heart, HeartbeatThread):
            await self._heart.close()
        elif self._heart is not None:
            self._beating.set()
            await self._heart_task
        try:
            async with asyncio.timeout(_SIGN_OFF_S):
                await self.engine.record_worker(self._who)
        except (TenutoError, TimeoutError) as error:
            log.warning("cannot sign off: %s", str(error) or "the store does not answer in time")

    async def _release_all(self, works: Sequence[ClaimedTask]) -> None:
        await asyncio.gather(*(self._give_back(work) for work in works))

    async def _give_back(self, work: ClaimedTask) -> None:
        """Release a task that was claimed and not begun."""
        try:
            await self.engine.release(work.fence)
        except TenutoError as error:
            log.warning("cannot give back %s: %s", work.fence.task, error)

    async def _drain(self) -> None:
        """No new claims; what runs may finish for a while, then goes back with its try."""
        self._stopping = True
        self.request_drain()
        self._who.status = "DRAINING"
        crash_point("worker.draining")
        if self._running:
            log.info(
                "takes no more; %d running tasks get %g s to finish",
                len(self._running),
                self.settings.drain_s,
            )
        if under_way := self._claims | self._running:
            await asyncio.wait(under_way, timeout=self.settings.drain_s)
        if self._running:
            log.info(
                "stops %d tasks, within %g s, and gives them back",
                len(self._running),
                self.settings.grace_s,
            )
        for held in self._leases.all():
            held.stop("drain")
        if self._running:
            await asyncio.wait(self._running, timeout=self.settings.grace_s + 30)
        if self._claims:  # what they bring is given back
            await asyncio.wait(self._claims, timeout=_SIGN_OFF_S)

    def holds(self, task: UUID) -> bool:
        """Whether this worker runs an attempt of the task."""
        return self._leases.runs(task)


def _kind(work: ClaimedTask) -> tuple[str, bool]:
    """What running a task takes: its type, and whether it brings a command."""
    return work.task_type, work.command is not None
