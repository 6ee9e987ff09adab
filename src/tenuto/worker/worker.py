"""The worker: claims tasks for its agents while it has free slots, and runs them."""

import asyncio
import logging
import os
import shlex
import socket
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from contextvars import copy_context
from functools import lru_cache
from typing import Any
from uuid import UUID

import msgspec

from tenuto.broker.protocol import ALL_TOPICS
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
from tenuto.worker.heartbeat import HeartbeatLoop, HeartbeatThread
from tenuto.worker.leases import HeldLease, HeldLeases, StopReason, lease_seconds
from tenuto.worker.runtime.function import FunctionRuntime
from tenuto.worker.runtime.protocol import Handler, Runtime

log = logging.getLogger("tenuto.worker")

MAX_CLAIM = 1000
"""Tasks in one claim: enough to share its cost, few enough to spread over workers."""

_START_BATCH = 100
"""Attempts started per event-loop tick if the store runs on the same loop."""

_SIGN_OFF_TIMEOUT_S = 5.0
"""Seconds that a stopping worker waits to report it: a store that hangs must not delay it."""

Connect = Callable[[], AbstractAsyncContextManager[WorkerEngine]]


class HostedAgent(msgspec.Struct, frozen=True):
    """An agent and the runtime of its attempts."""

    profile: AgentProfile
    runtime: Runtime


class Worker:
    """A process that hosts agents. `connect` opens a separate connection for the heartbeat."""

    def __init__(
        self,
        engine: WorkerEngine,
        settings: Settings | None = None,
        *,
        connect: Connect | None = None,
        exit_process: Callable[[], None] | None = None,
        name: str | None = None,
    ) -> None:
        self.engine = engine
        self.settings = settings or Settings()
        host, pid = socket.gethostname(), os.getpid()
        self.id = name or f"{host}:{pid}:{engine.clock.new_id()}"
        self._connect = connect
        self._exit_process = exit_process
        self._hosted: list[HostedAgent] = []
        self._leases = HeldLeases()
        self._running: set[asyncio.Task[None]] = set()
        """Attempts whose outcome is not stored yet."""
        self._session_count = 0
        """Attempts whose session has not ended."""
        self._info = WorkerInfo(self.id, host, pid)
        self._heartbeat: HeartbeatLoop | HeartbeatThread | None = None
        self._claims: set[asyncio.Task[None]] = set()
        self._unanswered_claims = 0
        """Claims without a reply yet."""
        self._reserved = 0
        """Slots of claims without a reply yet."""
        self._last_agent_index = 0
        self._agents_without_tasks: set[int] = set()
        """Agents, by index, whose last claim found fewer tasks than requested."""
        self._wake_count = 0
        """Hints and polls so far; one during a claim means that more tasks may be ready."""
        self._last_claim_was_full = False
        self._claim_scheduled = False
        self._stopping = False
        self._drain_requested = asyncio.Event()
        """Set when the engine asks this worker to drain."""
        self._draining_since: float | None = None
        """When this worker began to drain, on the scale of `elapsed`; `None` before."""
        self._refused_agents: set[int] = set()
        """Agents, by index, that may not claim; each is logged once."""
        self._context = copy_context()
        self._loop: asyncio.AbstractEventLoop

    async def host(self, profile: AgentProfile, runtime: Runtime) -> AgentProfile:
        """Registers an agent for which `run` claims; returns the profile that is now stored."""
        registered = await self.engine.register_agent(profile.with_supported_work())
        if profile.accept_commands and not registered.accept_commands:
            log.warning(
                "agent %s does not accept commands; run: orchestrate agent update --accept-commands"
                " -- %s",
                registered.name,
                shlex.quote(registered.name),
            )
        self._hosted.append(HostedAgent(registered, runtime))
        self._info.agents.append(registered.name)
        return registered

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
        """Hosts an agent with handlers by task type (`None`: any); returns its stored profile."""
        runtime = FunctionRuntime(handlers)
        profile = AgentProfile(
            id=self.engine.clock.new_id(),
            workspace=self.engine.workspace,
            name=name,
            agent_type=agent_type,
            task_types=runtime.task_types,
            task_tags=tuple(task_tags),
            capabilities=tuple(capabilities),
            runtimes=(runtime.name,),
            max_concurrent=max_concurrent,
        )
        return await self.host(profile, runtime)

    def request_drain(self) -> None:
        """Starts the drain time, once, and wakes a heartbeat on a thread; does not stop claims.

        Callable from threads and signal handlers: a busy event loop would notice a signal too late;
        the heartbeat does not.
        """
        if self._draining_since is None:
            self._draining_since = self.engine.clock.elapsed()
        if isinstance(self._heartbeat, HeartbeatThread):
            self._heartbeat.wake()

    async def run(self, stop: asyncio.Event) -> None:
        """Claims and runs tasks until `stop` or a drain request; then finishes or releases them."""
        self._info.slots = self._usable_slots()
        self._context = copy_context()
        self._loop = asyncio.get_running_loop()
        unsubscribe = self.engine.subscribe(self._on_hint)
        self._start_heartbeat()
        try:
            stop_events = [stop, self._drain_requested]
            while not any(event.is_set() for event in stop_events):
                self._start_claims()
                if not await wait_first_event(stop_events, self.settings.poll_s, self.engine.clock):
                    self._allow_all_agents()
        finally:
            unsubscribe()
            await self._drain()
            await self._stop_heartbeat()

    def _usable_slots(self) -> int:
        """Returns how many of the configured slots the machine can fill; warns if not all."""
        slots, usable = self.settings.slots, []
        for hosted in self._hosted:
            free = hosted.runtime.free_sessions(0)
            usable.append(slots if free is None else min(slots, free))
            if usable[-1] < slots:
                log.warning(
                    "%d slots, but the limit of open files is enough for %d sessions of agent %s",
                    slots,
                    usable[-1],
                    hosted.profile.name,
                )
        return max(usable, default=slots)

    def _start_claims(self) -> None:
        """Keeps one claim in progress while slots are free; skips agents that last lacked tasks.

        A second claim may run at once while claims come back full: the store works in parallel. A
        skipped agent waits for a hint or poll.
        """
        self._claim_scheduled = False
        while self._unanswered_claims < (2 if self._last_claim_was_full else 1):
            n = min(self._free_slots(), MAX_CLAIM)
            index = self._next_agent()
            if n <= 0 or index is None or self._stopping:
                return
            n = self._reserve_sessions(index, n)
            if n <= 0:
                self._agents_without_tasks.add(index)  # until the next poll
                continue
            self._unanswered_claims += 1
            self._reserved += n
            # In its own context: what a claim starts must not inherit the context of its trigger.
            context = self._context.copy()
            claim = self._loop.create_task(self._claim(index, n), context=context)
            self._claims.add(claim)
            claim.add_done_callback(self._claims.discard)

    def _free_slots(self) -> int:
        """Returns the slots without a session or a claim in progress; 0 or less if there are none.

        The next task does not wait until an outcome is stored, but each unreported outcome beyond
        `MAX_CLAIM` takes a slot.
        """
        unreported = len(self._running) - self._session_count
        return (
            self.settings.slots
            - self._session_count
            - self._reserved
            - max(0, unreported - MAX_CLAIM)
        )

    def _reserve_sessions(self, index: int, n: int) -> int:
        """Asks the agent's runtime to reserve n sessions; returns how many can start, 0 to n."""
        free = self._hosted[index].runtime.free_sessions(self._session_count + self._reserved)
        return n if free is None else min(n, free)

    def _next_agent(self) -> int | None:
        """Moves to the next agent that may have tasks; returns its index, or `None` without one."""
        for _ in self._hosted:
            self._last_agent_index = (self._last_agent_index + 1) % len(self._hosted)
            if self._last_agent_index not in self._agents_without_tasks:
                return self._last_agent_index
        return None

    def _allow_all_agents(self) -> None:
        """Allows claims for all agents, even if their last found too few tasks; starts no claim."""
        self._wake_count += 1
        self._agents_without_tasks.clear()

    async def _claim(self, index: int, n: int) -> None:
        """Claims up to n tasks for an agent and starts them; if the worker stops, releases them."""
        hosted, wake_count = self._hosted[index], self._wake_count
        claimed = self._release_unsupported(
            hosted.profile.means, await self._claim_from_store(index, n)
        )
        self._unanswered_claims -= 1
        self._reserved -= n
        if not claimed:
            hosted.runtime.release_reservation()
        if self._stopping:
            await self._release_all(claimed)
            return
        self._session_count += len(claimed)
        self._last_claim_was_full = len(claimed) == n
        if not self._last_claim_was_full and wake_count == self._wake_count:
            self._agents_without_tasks.add(index)
        self._start_claims()  # first: the store claims the next ones meanwhile
        await self._start_all(claimed, hosted.runtime)

    def _release_unsupported(
        self, supported: SupportedWork | None, claimed: list[ClaimedTask]
    ) -> list[ClaimedTask]:
        """Returns the tasks that can run here (`None`: all); releases others in the background."""
        if supported is None:
            return claimed
        kinds = {_work_kind(work) for work in claimed}
        missing_by_kind = {
            kind: missing for kind in kinds if (missing := _missing_support(supported, *kind))
        }
        if not missing_by_kind:
            return claimed
        for work in claimed:
            if missing := missing_by_kind.get(_work_kind(work)):
                log.error(
                    "cannot run task %s, releasing it: the worker %s", work.fence.task, missing
                )
                release = self._loop.create_task(self._release(work))
                self._claims.add(release)
                release.add_done_callback(self._claims.discard)
        return [work for work in claimed if _work_kind(work) not in missing_by_kind]

    async def _claim_from_store(self, index: int, n: int) -> list[ClaimedTask]:
        """Claims and returns up to n tasks for an agent; an empty list if that fails (logged)."""
        hosted = self._hosted[index]
        try:
            crash_point("worker.before_claim")
            claimed = await self.engine.claim(
                hosted.profile, self.id, n, lease_seconds(self.settings)
            )
            crash_point("worker.claimed")
        except Forbidden as error:
            # Lasts until the agent is changed: logged once, not at every poll.
            PROCESS_METRICS.count("tenuto_claims_total", "error")
            if index not in self._refused_agents:
                log.warning("agent %s cannot claim tasks: %s", hosted.profile.name, error)
            self._refused_agents.add(index)
        except TenutoError as error:
            PROCESS_METRICS.count("tenuto_claims_total", "error")
            log.warning("cannot claim tasks, trying again later: %s", error)
        except Exception:
            PROCESS_METRICS.count("tenuto_claims_total", "error")
            log.exception("internal error in a claim; the next poll retries")
        else:
            if not claimed:
                PROCESS_METRICS.count("tenuto_claims_total", "empty")
            return claimed
        return []

    async def _start_all(self, claimed: list[ClaimedTask], runtime: Runtime) -> None:
        """Starts the tasks, in batches if the store needs the loop; releases the rest at a stop."""
        batch = _START_BATCH if self.engine.is_store_in_process else MAX_CLAIM
        for start in range(0, len(claimed), batch):
            if start > 0:
                await NextTick()
            if self._stopping:
                await self._release_all(claimed[start:])
                return
            for work in claimed[start : start + batch]:
                self._start(work, runtime)

    def _start(self, work: ClaimedTask, runtime: Runtime) -> None:
        """Starts the attempt of a claimed task."""
        attempt = AttemptRunner(
            self.engine,
            work,
            runtime,
            self._leases,
            self.settings,
            self._on_session_ended,
            self._on_attempt_ended,
        )
        self._running.add(attempt.start(self._loop))

    def _on_session_ended(self) -> None:
        """Frees the slot of an ended session and schedules claims."""
        self._session_count -= 1
        self._schedule_claims()

    def _on_attempt_ended(self, task: "asyncio.Task[None] | None") -> None:
        """Forgets an ended attempt's asyncio task, if any, and schedules claims for all agents."""
        if task is not None:
            self._running.discard(task)
        self._allow_all_agents()  # an agent at its own limit may claim one more
        self._schedule_claims()

    def _on_hint(self, topic: str) -> None:
        """Wakes the heartbeat or, on a hint for any lane, claims for all agents; ignores others."""
        if topic == f"worker:{self.id}":
            if self._heartbeat is not None:
                self._wake_heartbeat()
        elif topic.startswith("lane:") or topic == ALL_TOPICS:
            self._allow_all_agents()
            self._start_claims()

    def _schedule_claims(self) -> None:
        """Schedules one round of claims for all attempts that end in this event-loop tick."""
        if not self._claim_scheduled:
            self._claim_scheduled = True
            self._loop.call_soon(self._start_claims)

    def _wake_heartbeat(self) -> None:
        """Triggers a heartbeat now, on its own thread or on this event loop."""
        if isinstance(self._heartbeat, HeartbeatThread):
            self._heartbeat.wake()
        elif self._heartbeat is not None:
            self._heartbeat.wake_event.set()

    def _start_heartbeat(self) -> None:
        """Starts the heartbeat: on its own thread if it can have its own connection."""
        loop = self._loop

        def stop_attempt(lease: HeldLease, reason: StopReason) -> None:
            loop.call_soon_threadsafe(lease.stop, reason)

        def request_drain() -> None:
            if not self._drain_requested.is_set():
                self.request_drain()
                loop.call_soon_threadsafe(self._drain_requested.set)

        def create_loop(engine: WorkerEngine) -> HeartbeatLoop:
            exit_option: dict[str, Any] = (
                {} if self._exit_process is None else {"exit_process": self._exit_process}
            )
            options = {
                "request_drain": request_drain,
                "draining_since": lambda: self._draining_since,
                **exit_option,
            }
            return HeartbeatLoop(
                engine, self._leases, self._info, self.settings, stop_attempt, **options
            )

        if self._connect is None:
            self._heartbeat = create_loop(self.engine)
            self._stop_heartbeat_event = asyncio.Event()
            self._heartbeat_task = loop.create_task(self._run_heartbeat(self._heartbeat))
        else:
            self._heartbeat = HeartbeatThread(self._connect, create_loop, self.engine.clock)
            self._heartbeat.start()

    async def _run_heartbeat(self, heartbeat: HeartbeatLoop) -> None:
        """Runs the heartbeat until the worker stops; after an error, logs and restarts in 1 s."""
        while not self._stop_heartbeat_event.is_set():
            try:
                await heartbeat.run(self._stop_heartbeat_event)
            except TenutoError as error:
                log.warning("heartbeat failed: %s", error)
                await self.engine.clock.sleep(1.0)
            except Exception:
                log.exception("internal error in the heartbeat; it is restarted")
                await self.engine.clock.sleep(1.0)

    async def _stop_heartbeat(self) -> None:
        """Stops the heartbeat and records the worker as STOPPED; logs a failure."""
        self._info.status = "STOPPED"
        if isinstance(self._heartbeat, HeartbeatThread):
            await self._heartbeat.close()
        elif self._heartbeat is not None:
            self._stop_heartbeat_event.set()
            await self._heartbeat_task
        try:
            async with asyncio.timeout(_SIGN_OFF_TIMEOUT_S):
                await self.engine.record_worker(self._info)
        except (TenutoError, TimeoutError) as error:
            log.warning(
                "worker could not report its shutdown: %s",
                str(error) or "the store does not answer in time",
            )

    async def _release_all(self, claimed: Sequence[ClaimedTask]) -> None:
        """Releases these claimed tasks concurrently; logs failures."""
        await asyncio.gather(*(self._release(work) for work in claimed))

    async def _release(self, work: ClaimedTask) -> None:
        """Releases a task that was claimed but not started; logs a failure."""
        try:
            await self.engine.release(work.fence)
        except TenutoError as error:
            log.warning("cannot release task %s: %s", work.fence.task, error)

    async def _drain(self) -> None:
        """Stops claiming; waits a while for running tasks, then stops and releases the others.

        A release does not count the try.
        """
        self._stopping = True
        self.request_drain()
        self._info.status = "DRAINING"
        crash_point("worker.draining")
        if self._running:
            log.info(
                "draining: no more claims; %d running tasks get %g s to finish",
                len(self._running),
                self.settings.drain_s,
            )
        if pending := self._claims | self._running:
            await asyncio.wait(pending, timeout=self.settings.drain_s)
        if self._running:
            log.info(
                "draining: stopping %d tasks within %g s and releasing them",
                len(self._running),
                self.settings.grace_s,
            )
        for lease in self._leases.all():
            lease.stop("drain")
        if self._running:
            await asyncio.wait(self._running, timeout=self.settings.grace_s + 30)
        if self._claims:  # the tasks they return are released
            await asyncio.wait(self._claims, timeout=_SIGN_OFF_TIMEOUT_S)

    def holds(self, task: UUID) -> bool:
        """True if this worker runs an attempt at the task, or has yet to report its outcome."""
        return self._leases.is_running(task)


@lru_cache(maxsize=4096)
def _missing_support(supported: SupportedWork, task_type: str, has_command: bool) -> str | None:
    """Returns why a worker cannot run a kind of work, or `None` if it can.

    Cached: it is asked for each claimed task.
    """
    return supported.missing_support(task_type, has_command)


def _work_kind(work: ClaimedTask) -> tuple[str, bool]:
    """Returns what a worker must support to run the task: its type, and if it has a command."""
    return work.task_type, work.command is not None
