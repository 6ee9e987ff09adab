"""Worker processes under a parent that sees them die: their tasks go on at once, and so do they."""

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

LONGEST_PAUSE_S = 30.0
HEALTHY_S = 10.0
HANDED_ON = (
    *("heartbeat_s", "lease_s", "tick_s", "poll_s", "grace_s", "drain_s", "slots"),
    *("task_env", "task_folders"),
    *("pooler", "database_runtime", "database_direct"),
)
"""The settings that flags of the parent may have changed."""


class WorkerPool:
    """So many workers, each started again when it ends unasked."""

    def __init__(self, engine: Engine, settings: Settings, n: int) -> None:
        self._engine = engine
        self._settings = settings
        self._n = n

    async def run(self, stop: asyncio.Event) -> None:
        await asyncio.gather(*(self._keep(number, stop) for number in range(self._n)))

    async def _keep(self, number: int, stop: asyncio.Event) -> None:
        """Keep one worker alive until `stop`, then let it drain."""
        pause = 0.5
        while not stop.is_set():
            started = self._engine.clock.elapsed()
            try:
                child = await self._start()
            except OSError as error:  # no memory, no descriptors: the others go on meanwhile
                log.warning("cannot start worker %d: %s", number, error)
                pause = min(pause * 2, LONGEST_PAUSE_S)
                await wait_first_event([stop], pause, self._engine.clock)
                continue
            ended = asyncio.Event()
            watch = asyncio.get_running_loop().create_task(_announce_end(child, ended))
            await wait_first_event([stop, ended], float(10**9), self._engine.clock)
            if stop.is_set():
                await self._drain(child, ended)
                await watch
                return
            if child.returncode == 0 and await self._was_drained(child.pid):
                log.warning("worker %d (pid %d) ended as it was asked to", number, child.pid)
                await wait_first_event([stop], float(10**9), self._engine.clock)
                return
            log.error("worker %d (pid %d) ended with %s", number, child.pid, child.returncode)
            await self._expire_leases_of(child.pid)
            healthy = self._engine.clock.elapsed() - started > HEALTHY_S
            pause = 0.5 if healthy else min(pause * 2, LONGEST_PAUSE_S)
            await wait_first_event([stop], pause, self._engine.clock)

    async def _start(self) -> asyncio.subprocess.Process:
        env = os.environ | {"TENUTO_PARENT_PIPE": "1", "TENUTO_DATABASE": self._settings.url()}
        env |= {"TENUTO_DATA": str(self._settings.folder()), "TENUTO_KEYS": self._settings.keys}
        for name in ("TENUTO_URL", "TENUTO_WORKSPACE"):
            env.pop(name, None)  # they work on the database, whatever commands here are for
        for name in HANDED_ON:
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
            start_new_session=True,  # a Ctrl-C for the parent must not end the sessions first
        )

    async def _drain(self, child: asyncio.subprocess.Process, ended: asyncio.Event) -> None:
        if child.returncode is None:
            child.send_signal(signal.SIGTERM)
        patience = self._settings.drain_s + self._settings.grace_s + 35
        await wait_first_event([ended], patience, self._engine.clock)
        if child.returncode is None:
            child.kill()

    async def _was_drained(self, pid: int) -> bool:
        """Whether somebody asked the worker to end: then no other takes its place."""
        host = socket.gethostname()
        try:
            rows = await self._engine.query.workers(self._engine.workspace)
        except TenutoError:
            return False
        mine = (row for row in rows if row["host"] == host and row["pid"] == pid)
        return any(row["drain_requested_at"] is not None for row in mine)

    async def _expire_leases_of(self, pid: int) -> None:
        """Expire what the dead worker held, now instead of at the end of its leases."""
        host, upkeep = socket.gethostname(), self._engine.upkeep
        try:
            for row in await self._engine.query.workers(self._engine.workspace):
                if row["host"] == host and row["pid"] == pid and row["status"] != "STOPPED":
                    lost = await upkeep.expire_worker(row["worker_id"], "parent")
                    log.warning("worker %s died; %d tasks go on elsewhere", row["worker_id"], lost)
                    for _ in range(0, lost, BATCH):
                        # Whether the living are late is the coordinator's matter, which knows of
                        # pauses.
                        await upkeep.promote_once("parent", spared=EVERY_LEASE)
        except TenutoError as error:
            log.warning("cannot expire the dead worker's leases: %s", error)


async def _announce_end(child: asyncio.subprocess.Process, ended: asyncio.Event) -> None:
    await child.wait()
    ended.set()
