"""The heartbeat: renews all leases of a worker and delivers requests to stop its attempts.

It runs on a thread and a database connection of its own, so that a handler that keeps the event
loop busy cannot starve it; only C code that never releases the interpreter lock can.

If an attempt does not stop although it must, the heartbeat ends the whole worker: killing the
process is the only way to stop such code.
"""

import asyncio
import logging
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
from tenuto.worker.leases import HeldLease, HeldLeases, StopReason, lease_seconds

log = logging.getLogger("tenuto.worker")

SWEEP_EVERY = 6
"""Heartbeats between checks for ended sessions that are still unconfirmed."""
STUCK_EXIT = 70
"""Exit status of a worker that ended itself because a handler would not stop."""


class HeartbeatLoop:
    """Sends one worker's heartbeats, and stops attempts as the replies require."""

    def __init__(
        self,
        engine: WorkerEngine,
        leases: HeldLeases,
        info: WorkerInfo,
        settings: Settings,
        stop_attempt: Callable[[HeldLease, StopReason], None],
        exit_process: Callable[[], None] = lambda: os._exit(STUCK_EXIT),
        request_drain: Callable[[], None] = lambda: None,
        draining_since: Callable[[], float | None] = lambda: None,
    ) -> None:
        self._engine = engine
        self._leases = leases
        self._info = info
        self._settings = settings
        self._stop_attempt = stop_attempt
        self._exit_process = exit_process
        self._request_drain = request_drain
        self._draining_since = draining_since
        """Returns the time since which the worker is draining, or `None`."""
        self.wake_event = asyncio.Event()
        self._heartbeat_count = 0

    async def run(self, stop: asyncio.Event) -> None:
        """Sends heartbeats, also at `wake_event`, until `stop`; raises errors except outages."""
        await run_periodically(
            self.heartbeat_once, self._interval_s, stop, self._engine.clock, self.wake_event
        )

    def _interval_s(self) -> float:
        """Returns the seconds until the next heartbeat: at most 1 while attempts have to stop."""
        # While attempts have to stop, check every second whether they have.
        stopping = any(lease.reason is not None for lease in self._leases.all())
        return min(1.0, self._settings.heartbeat_s) if stopping else self._settings.heartbeat_s

    async def heartbeat_once(self) -> None:
        """Renews all leases, stops attempts as the reply says; exits the process if one is stuck.

        If the store does not answer, the next heartbeat tries again.
        """
        leases = self._leases.all()
        reply: HeartbeatResult | None = None
        if leases:
            crash_point("worker.before_heartbeat")
        try:
            # A heartbeat that hangs must not keep the next one from trying another connection.
            async with asyncio.timeout(self._settings.heartbeat_s):
                fences = [lease.fence for lease in leases]
                reply = await self._engine.worker_heartbeat(
                    self._info, fences, lease_seconds(self._settings)
                )
            if leases:
                crash_point("worker.heartbeat_answered")
            self._apply_reply(leases, reply)
            async with asyncio.timeout(self._settings.heartbeat_s):
                await self._register_and_sweep()
        except (Unavailable, TimeoutError) as error:
            if reply is None:
                PROCESS_METRICS.count("tenuto_lease_renew_failures_total", by=len(leases))
            log.warning("heartbeat failed: %s", str(error) or "the store does not answer in time")
        self._stop_after_drain()
        await self._exit_if_stuck()

    def _apply_reply(self, leases: list[HeldLease], reply: HeartbeatResult) -> None:
        """Stops or warns the attempts for which the reply to a heartbeat requires it."""
        lost = {(fence.task, fence.attempt) for fence in reply.lost}
        PROCESS_METRICS.count("tenuto_lease_renew_failures_total", by=len(lost))
        for lease in leases:
            task = lease.fence.task
            if (task, lease.fence.attempt) in lost:
                self._request_stop(lease, "lost")
            elif reply.held[task].cancel:
                self._request_stop(lease, "cancel")
            elif reply.held[task].pause:
                self._request_stop(lease, "pause")
            elif reply.held[task].hung and not lease.warned:
                lease.warned = True
                lease.warn()

    async def _register_and_sweep(self) -> None:
        """Records this worker as alive, starts a requested drain; at times confirms ended sessions.

        Every `SWEEP_EVERY` heartbeats, it confirms those of this host.
        """
        if await self._engine.record_worker(self._info):
            self._request_drain()
        if self._heartbeat_count % SWEEP_EVERY == 0:
            await self._engine.confirm_gone_sessions(
                self._info.worker, self._info.host, self._may_be_running
            )
        self._heartbeat_count += 1

    def _may_be_running(self, worker: str, task: UUID) -> bool:
        """True if a session of the task may be running on this host, under the given worker.

        In this worker: while it holds a lease of the task. In another: while its process is alive,
        because a dead worker's supervisors have killed its sessions.
        """
        if worker == self._info.worker:
            return self._leases.is_running(task)
        pid = worker.removeprefix(f"{self._info.host}:").partition(":")[0]
        return not pid.isdigit() or _is_alive(int(pid))

    def _request_stop(self, lease: HeldLease, reason: StopReason) -> None:
        """Requests the stop of an attempt, unless it is over, lost, or has this reason already."""
        # A lost lease overrides earlier requests: there is nothing left to confirm.
        if not self._leases.holds(lease) or lease.reason in (reason, "lost"):
            return
        if lease.reason is None:
            lease.stop_requested_at = self._engine.clock.elapsed()
        lease.reason = reason
        self._stop_attempt(lease, reason)

    def _stop_after_drain(self) -> None:
        """Once the drain time is over, requests the stop of attempts that were not asked before.

        The worker itself does so too, unless a handler keeps its event loop busy.
        """
        since = self._draining_since()
        if since is None or self._engine.clock.elapsed() - since < self._settings.drain_s + 1.0:
            return
        for lease in self._leases.all():
            if lease.reason is None and not lease.ended:
                self._request_stop(lease, "drain")

    async def _exit_if_stuck(self) -> None:
        """Counts checks of each stopping attempt; if one is stuck, reports, ends the process."""
        now = self._engine.clock.elapsed()
        stopping = [lease for lease in self._leases.all() if lease.reason and not lease.ended]
        for lease in stopping:
            lease.checks += 1
        stuck = [lease for lease in stopping if self._is_stuck(lease, now)]
        if stuck:
            log.error(
                "%d handlers did not stop in time; exiting with code %d to stop them",
                len(stuck),
                STUCK_EXIT,
            )
            self._request_drain()  # released tasks must not be claimed here again
            await self._report_all(stuck)
            self._exit_process()

    def _is_stuck(self, lease: HeldLease, now: float) -> bool:
        """True if a stopping attempt is over its time, by clock and by number of heartbeats."""
        # By time and by heartbeats: a machine that slept gave the handler no time to stop.
        limit = min(self._settings.grace_s, lease.longest_grace_s) + 2.0
        return now - lease.stop_requested_at > limit and lease.checks > limit / self._interval_s()

    async def _report_all(self, stuck: list[HeldLease]) -> None:
        """Reports stuck attempts as stopped, except lost ones; releases others, ignores errors."""
        receipt = {"state": "killed", "how": "the worker process ended itself"}
        for lease in self._leases.all():
            if lease.ended:
                continue  # its outcome is being reported
            fence = lease.fence
            with suppress(TenutoError):
                if lease not in stuck or lease.reason == "drain":
                    await self._engine.release(fence)
                elif lease.reason == "cancel":
                    await self._engine.confirm_cancel(fence, receipt)
                elif lease.reason == "pause":
                    await self._engine.confirm_pause(fence, receipt)
                elif lease.reason == "timeout":
                    await self._engine.time_out(fence, receipt)


class HeartbeatThread:
    """Runs the heartbeat on a thread, an event loop and an engine of its own."""

    def __init__(
        self,
        connect: Callable[[], AbstractAsyncContextManager[WorkerEngine]],
        create_loop: Callable[[WorkerEngine], HeartbeatLoop],
        clock: Clock,
    ) -> None:
        self._connect = connect
        self._create_loop = create_loop
        self._clock = clock
        self._loop: asyncio.AbstractEventLoop | None = None
        self._heartbeat: HeartbeatLoop | None = None
        self._stop: asyncio.Event | None = None
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._main, name="tenuto-heartbeat", daemon=True)

    def start(self) -> None:
        """Starts the thread and returns at once."""
        self._thread.start()

    def wake(self) -> None:
        """Triggers a heartbeat now, if the thread is running. Callable from any thread."""
        self._call_on_loop(lambda: self._heartbeat.wake_event.set() if self._heartbeat else None)

    async def close(self) -> None:
        """Stops the thread and waits for its end, for at most 20 seconds."""
        await asyncio.get_running_loop().run_in_executor(None, self._ready.wait, 10)
        self._call_on_loop(lambda: self._stop.set() if self._stop else None)
        await asyncio.get_running_loop().run_in_executor(None, self._thread.join, 10)

    def _call_on_loop(self, callback: Callable[[], None]) -> None:
        """Schedules the function on the heartbeat's event loop, if the loop is running."""
        loop = self._loop
        if loop is not None and not loop.is_closed():
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(callback)

    def _main(self) -> None:
        """Runs the heartbeat's event loop on the new thread, until `close`."""
        asyncio.run(self._run())

    async def _run(self) -> None:
        """Runs the heartbeat until it is stopped; after an error it connects again."""
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        self._ready.set()
        while not self._stop.is_set():
            try:
                async with self._connect() as engine:
                    self._heartbeat = self._create_loop(engine)
                    await self._heartbeat.run(self._stop)
            except TenutoError as error:
                log.warning("the heartbeat cannot reach the store and tries again: %s", error)
                await self._clock.sleep(1.0)
            except Exception:
                log.exception("internal error in the heartbeat; it is restarted")
                await self._clock.sleep(1.0)


def _is_alive(pid: int) -> bool:
    """True if a process with this pid exists."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
