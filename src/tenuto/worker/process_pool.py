"""Worker processes under a parent that restarts them and releases the tasks of crashed ones."""

import asyncio
import logging
import os
import signal
import socket
import sys

from tenuto.engine.engine import Engine
from tenuto.engine.tasks.maintenance import BATCH, EVERY_LEASE
from tenuto.model.errors import TenutoError
from tenuto.periodic import wait_first_event
from tenuto.settings import Settings

log = logging.getLogger("tenuto")

MAX_PAUSE_S = 30.0
HEALTHY_S = 10.0
PASSED_SETTINGS = (
    *("heartbeat_s", "lease_s", "tick_s", "poll_s", "grace_s", "drain_s", "slots"),
    *("task_env", "task_folders"),
    *("pooler", "database_runtime", "database_direct"),
)
"""Settings passed on to the workers, because flags of the parent may have changed them."""


class WorkerPool:
    """Runs `n` worker processes and restarts each that exits without a request."""

    def __init__(self, engine: Engine, settings: Settings, n: int) -> None:
        self._engine = engine
        self._settings = settings
        self._count = n

    async def run(self, stop: asyncio.Event) -> None:
        """Runs the workers until `stop`, then drains them; restarts any that exits undrained."""
        await asyncio.gather(*(self._keep_running(number, stop) for number in range(self._count)))

    async def _keep_running(self, number: int, stop: asyncio.Event) -> None:
        """Runs one worker; unless it was drained, expires its leases and restarts it at its exit.

        When `stop` is set, drains the worker.
        """
        pause_s = 0.5
        while not stop.is_set():
            started_at = self._engine.clock.elapsed()
            try:
                child = await self._start()
            except OSError as error:  # no memory or descriptors: the other workers continue
                log.warning("cannot start worker %d: %s", number, error)
                pause_s = min(pause_s * 2, MAX_PAUSE_S)
                await wait_first_event([stop], pause_s, self._engine.clock)
                continue
            ended = asyncio.Event()
            watcher = asyncio.get_running_loop().create_task(_set_when_exited(child, ended))
            await wait_first_event([stop, ended], float(10**9), self._engine.clock)
            if stop.is_set():
                await self._drain(child, ended)
                await watcher
                return
            if child.returncode == 0 and await self._was_drained(child.pid):
                log.warning(
                    "worker %d (pid %d) was drained and exited; it is not restarted",
                    number,
                    child.pid,
                )
                await wait_first_event([stop], float(10**9), self._engine.clock)
                return
            log.error(
                "worker %d (pid %d) exited with %s; it will be restarted",
                number,
                child.pid,
                child.returncode,
            )
            await self._expire_leases_of(child.pid)
            was_healthy = self._engine.clock.elapsed() - started_at > HEALTHY_S
            pause_s = 0.5 if was_healthy else min(pause_s * 2, MAX_PAUSE_S)
            await wait_first_event([stop], pause_s, self._engine.clock)

    async def _start(self) -> asyncio.subprocess.Process:
        """Starts a worker for the agent `local`, with this process's settings; raises `OSError`."""
        env = os.environ | {
            "TENUTO_PARENT_PIPE": "1",
            "TENUTO_DATABASE": self._settings.database_url(),
        }
        env |= {
            "TENUTO_DATA": str(self._settings.data_folder()),
            "TENUTO_KEYS": self._settings.keys,
        }
        for name in ("TENUTO_URL", "TENUTO_WORKSPACE"):
            env.pop(name, None)  # the workers use the database, not a server
        for name in PASSED_SETTINGS:
            env[f"TENUTO_{name.upper()}"] = str(getattr(self._settings, name))
        return await asyncio.create_subprocess_exec(
            *(
                sys.executable,
                "-m",
                "tenuto.cli.main",
                "worker",
                "--agent",
                "local",
                "--accept-commands",
            ),
            stdin=asyncio.subprocess.PIPE,
            env=env,
            start_new_session=True,  # a Ctrl-C for the parent must not stop the sessions first
        )

    async def _drain(self, child: asyncio.subprocess.Process, ended: asyncio.Event) -> None:
        """Drains the worker by SIGTERM; kills it if it does not exit in time."""
        if child.returncode is None:
            child.send_signal(signal.SIGTERM)
        timeout_s = self._settings.drain_s + self._settings.grace_s + 35
        await wait_first_event([ended], timeout_s, self._engine.clock)
        if child.returncode is None:
            child.kill()

    async def _was_drained(self, pid: int) -> bool:
        """True if an operator requested this worker's drain; False also if the store is away."""
        host = socket.gethostname()
        try:
            rows = await self._engine.query.workers(self._engine.workspace)
        except TenutoError:
            return False
        own_rows = (row for row in rows if row["host"] == host and row["pid"] == pid)
        return any(row["drain_requested_at"] is not None for row in own_rows)

    async def _expire_leases_of(self, pid: int) -> None:
        """Expires the crashed worker's leases now and requeues its tasks; logs errors."""
        host, maintenance = socket.gethostname(), self._engine.maintenance
        try:
            for row in await self._engine.query.workers(self._engine.workspace):
                if row["host"] == host and row["pid"] == pid and row["status"] != "STOPPED":
                    expired = await maintenance.expire_worker(row["worker_id"], "parent")
                    log.warning(
                        "worker %s crashed; %d tasks were released to other workers",
                        row["worker_id"],
                        expired,
                    )
                    for _ in range(0, expired, BATCH):
                        # Only the coordinator judges the leases of other workers: it detects
                        # suspensions.
                        await maintenance.promote_once("parent", exempt=EVERY_LEASE)
        except TenutoError as error:
            log.warning("cannot expire the crashed worker's leases: %s", error)


async def _set_when_exited(child: asyncio.subprocess.Process, ended: asyncio.Event) -> None:
    """Waits for the child's exit, then sets `ended`."""
    await child.wait()
    ended.set()
