"""The heart: renews all leases of a worker and passes on what is asked of its attempts.

It runs on a thread and a database connection of its own, so that a handler which keeps the event
loop busy cannot starve it; only C code that never lets the interpreter go can.

When an attempt does not stop though it must, the heart ends the whole worker: killing the process
is the only way to stop code that will not.
"""

import asyncio
import logging
import math
import os
import threading
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, suppress
from uuid import UUID

from tenuto.clock import Clock
from tenuto.crash_points import crash_point
from tenuto.engine.tasks.report import HeartbeatResult, WorkerInfo
from tenuto.metrics import PROCESS_METRICS
from tenuto.model.errors import TenutoError, Unavailable
from tenuto.periodic import run_periodically
from tenuto.settings import Settings
from tenuto.worker.engine_protocol import WorkerEngine
from tenuto.worker.leases import HeldLease, HeldLeases, Reason

log = logging.getLogger("tenuto.worker")

SWEEP_EVERY = 6
"""Beats between looks for ends that nobody confirmed."""
STUCK_EXIT = 70
"""Exit status of a worker that ended itself because a handler would not stop."""


def lease_seconds(settings: Settings) -> int:
    """How long a lease lasts: whole seconds, three beats at least."""
    return max(settings.lease_s, math.ceil(3 * settings.heartbeat_s))


class HeartbeatLoop:
    """Beats for one worker."""

    def __init__(
        self,
        engine: WorkerEngine,
        leases: HeldLeases,
        who: WorkerInfo,
        settings: Settings,
        tell: Callable[[HeldLease, Reason], None],
        die: Callable[[], None] = lambda: os._exit(STUCK_EXIT),
        drain: Callable[[], None] = lambda: None,
        ending: Callable[[], float | None] = lambda: None,
    ) -> None:
        self._engine = engine
        self._leases = leases
        self._who = who
        self._settings = settings
        self._tell = tell
        self._die = die
        self._drain = drain
        self._ending = ending
        """Since when the worker is to end, if it is."""
        self.poke = asyncio.Event()
        self._beats = 0

    async def run(self, stop: asyncio.Event) -> None:
        await run_periodically(
            self.heartbeat_once, self._pause, stop, self._engine.clock, self.poke
        )

    def _pause(self) -> float:
        # While something has to stop, look every second whether it has.
        stopping = any(held.reason is not None for held in self._leases.all())
        return min(1.0, self._settings.heartbeat_s) if stopping else self._settings.heartbeat_s

    async def heartbeat_once(self) -> None:
        """Renew everything; a store that does not answer is asked again at the next beat."""
        held = self._leases.all()
        beat: HeartbeatResult | None = None
        if held:
            crash_point("worker.before_heartbeat")
        try:
            # A beat that hangs must not keep the next one from trying another connection.
            async with asyncio.timeout(self._settings.heartbeat_s):
                fences = [each.fence for each in held]
                beat = await self._engine.worker_heartbeat(
                    self._who, fences, lease_seconds(self._settings)
                )
            if held:
                crash_point("worker.heartbeat_answered")
            self._apply_reply(held, beat)
            async with asyncio.timeout(self._settings.heartbeat_s):
                await self._register_and_sweep()
        except (Unavailable, TimeoutError) as error:
            if beat is None:
                PROCESS_METRICS.count("tenuto_lease_renew_failures_total", by=len(held))
            log.warning("heartbeat failed: %s", str(error) or "the store does not answer in time")
        self._end_drain()
        await self._exit_if_stuck()

    def _apply_reply(self, held: list[HeldLease], beat: HeartbeatResult) -> None:
        lost = {(fence.task, fence.attempt) for fence in beat.lost}
        PROCESS_METRICS.count("tenuto_lease_renew_failures_total", by=len(lost))
        for each in held:
            task = each.fence.task
            if (task, each.fence.attempt) in lost:
                self._ask(each, "lost")
            elif beat.held[task].cancel:
                self._ask(each, "cancel")
            elif beat.held[task].pause:
                self._ask(each, "pause")
            elif beat.held[task].hung and not each.warned:
                each.warned = True
                each.warn()

    async def _register_and_sweep(self) -> None:
        if await self._engine.record_worker(self._who):
            self._drain()
        if self._beats % SWEEP_EVERY == 0:
            await self._engine.confirm_gone_sessions(self._who.worker, self._who.host, self._runs)
        self._beats += 1

    def _runs(self, worker: str, task: UUID) -> bool:
        """Whether a session of the task may run: here while held, elsewhere while its worker lives.

        A dead worker's supervisors have killed its sessions.
        """
        if worker == self._who.worker:
            return self._leases.runs(task)
        pid = worker.removeprefix(f"{self._who.host}:").partition(":")[0]
        return not pid.isdigit() or _is_alive(int(pid))

    def _ask(self, held: HeldLease, reason: Reason) -> None:
        # A lost lease overrules what was asked before: there is nothing left to confirm.
        if not self._leases.holds(held) or held.reason in (reason, "lost"):
            return
        if held.reason is None:
            held.asked_at = self._engine.clock.elapsed()
        held.reason = reason
        self._tell(held, reason)

    def _end_drain(self) -> None:
        """Ask what still runs to stop, when the time to finish is over.

        The worker does so itself, unless a handler keeps its event loop busy.
        """
        since = self._ending()
        if since is None or self._engine.clock.elapsed() - since < self._settings.drain_s + 1.0:
            return
        for held in self._leases.all():
            if held.reason is None and not held.ended:
                self._ask(held, "drain")

    async def _exit_if_stuck(self) -> None:
        now = self._engine.clock.elapsed()
        stopping = [each for each in self._leases.all() if each.reason and not each.ended]
        for each in stopping:
            each.looks += 1
        stuck = [each for each in stopping if self._is_stuck(each, now)]
        if stuck:
            log.error("%d handlers do not stop; ending this worker to stop them", len(stuck))
            self._drain()  # what is given back must not be claimed here again
            await self._give_back(stuck)
            self._die()

    def _is_stuck(self, held: HeldLease, now: float) -> bool:
        # Both by the clock and by looks: a machine that slept gave the handler no time to stop.
        limit = min(self._settings.grace_s, held.longest_grace_s) + 2.0
        return now - held.asked_at > limit and held.looks > limit / self._pause()

    async def _give_back(self, stuck: list[HeldLease]) -> None:
        receipt = {"state": "killed", "how": "the worker process ended itself"}
        for held in self._leases.all():
            if held.ended:
                continue  # its outcome is being told
            fence = held.fence
            with suppress(TenutoError):
                if held not in stuck or held.reason == "drain":
                    await self._engine.release(fence)
                elif held.reason == "cancel":
                    await self._engine.confirm_cancel(fence, receipt)
                elif held.reason == "pause":
                    await self._engine.confirm_pause(fence, receipt)
                elif held.reason == "timeout":
                    await self._engine.time_out(fence, receipt)


class HeartbeatThread:
    """A heart on a thread, an event loop and an engine of its own."""

    def __init__(
        self,
        connect: Callable[[], AbstractAsyncContextManager[WorkerEngine]],
        make: Callable[[WorkerEngine], HeartbeatLoop],
        clock: Clock,
    ) -> None:
        self._connect = connect
        self._make = make
        self._clock = clock
        self._loop: asyncio.AbstractEventLoop | None = None
        self._heart: HeartbeatLoop | None = None
        self._stop: asyncio.Event | None = None
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._main, name="tenuto-heart", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def poke(self) -> None:
        """Beat now."""
        self._call(lambda: self._heart.poke.set() if self._heart else None)

    async def close(self) -> None:
        """The last beat is over when this returns."""
        await asyncio.get_running_loop().run_in_executor(None, self._ready.wait, 10)
        self._call(lambda: self._stop.set() if self._stop else None)
        await asyncio.get_running_loop().run_in_executor(None, self._thread.join, 10)

    def _call(self, what: Callable[[], None]) -> None:
        loop = self._loop
        if loop is not None and not loop.is_closed():
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(what)

    def _main(self) -> None:
        asyncio.run(self._live())

    async def _live(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        self._ready.set()
        while not self._stop.is_set():
            try:
                async with self._connect() as engine:
                    self._heart = self._make(engine)
                    await self._heart.run(self._stop)
            except TenutoError as error:
                log.warning("the heart cannot reach the store: %s", error)
                await self._clock.sleep(1.0)
            except Exception:
                log.exception("a fault in the heart; it starts again")
                await self._clock.sleep(1.0)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
