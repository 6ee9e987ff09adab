"""Injects the faults of a run, each kind in its own loop. A seed decides the target and time."""

import asyncio
import logging
import signal
from collections import Counter

from tenuto.chaos.databases import Database
from tenuto.chaos.deployment import Deployment
from tenuto.chaos.plan import SHORT_SETTINGS, ChaosPlan, SeededRandom
from tenuto.clock import Clock
from tenuto.model.errors import TenutoError
from tenuto.periodic import run_periodically, wait_first_event

log = logging.getLogger("tenuto.chaos")

STOP_KINDS = ("worker", "worker", "commands", "coordinator")
"""Kinds of processes to stop; workers are stopped twice as often."""
STOP_S = SHORT_SETTINGS["lease_s"] + 2 * SHORT_SETTINGS["tick_s"] + 1.2
"""Seconds that a process is stopped: past its lease, until another worker has its tasks."""
WORKER_POINTS = (
    "worker.before_claim",
    "worker.claimed",
    "worker.before_start",
    "worker.running",
    "worker.before_heartbeat",
    "worker.heartbeat_answered",
    "worker.before_checkpoint",
    "worker.checkpoint_saved",
    "worker.before_complete",
    "worker.complete_answered",
    "worker.before_fail",
)
ENGINE_POINTS = ("engine.before_commit", "engine.committed", "engine.before_announce")
POINTS = {
    "worker": WORKER_POINTS,
    "commands": ("worker.session_spawned", "worker.claimed", "worker.before_complete"),
    "coordinator": (
        "coordinator.leading",
        "coordinator.expired",
        "coordinator.promoted",
        "relay.before_publish",
        "relay.published",
        "relay.moved",
    ),
    "client": ENGINE_POINTS,
}
"""Crash points of each kind of process; the names are those of `tenuto.crash_points`."""


class FaultInjector:
    """Injects faults into a deployment until stopped, and counts them."""

    def __init__(
        self, plan: ChaosPlan, deployment: Deployment, database: Database, clock: Clock
    ) -> None:
        self._plan = plan
        self._deployment = deployment
        self._database = database
        self._clock = clock
        self.planned = plan.planned_faults()
        self._count: Counter[str] = Counter()
        self._randoms = {name: SeededRandom(plan.seed, name) for name in self.planned}

    @property
    def counts(self) -> Counter[str]:
        """Number of injected faults by kind; a crash counts only if it happened at its point."""
        crashes = self._deployment.crashed.total()
        return self._count + Counter({"crash": crashes} if crashes else {})

    def missing(self) -> list[str]:
        """Returns the planned kinds of faults that were not injected yet."""
        return [kind for kind in self.planned if not self.counts[kind]]

    async def run(self, stop: asyncio.Event) -> None:
        """Injects every planned kind of fault repeatedly until `stop` is set."""
        async with asyncio.TaskGroup() as group:
            for name in self.planned:
                group.create_task(self._repeat(name, stop))

    async def _repeat(self, name: str, stop: asyncio.Event) -> None:
        """Injects one kind of fault at random intervals until `stop` is set; logs failures."""
        random, inject = self._randoms[name], getattr(self, f"_{name}")

        async def once() -> None:
            try:
                await inject(random, stop)
            except (TenutoError, OSError, TimeoutError) as error:
                log.info("fault %s could not be injected: %s", name, error)

        def pause() -> float:
            return random.around(self._plan.fault_intervals_s[name])

        await wait_first_event([stop], pause(), self._clock)
        await run_periodically(once, pause, stop, self._clock)

    async def _kill(self, random: SeededRandom, _stop: asyncio.Event) -> None:
        """Sends SIGKILL to a random process, like a power failure."""
        candidates = [
            process
            for process in self._deployment.running(*self._plan.target_kinds)
            if process.code is None
        ]
        if candidates:
            random.choose(candidates).kill()
            self._count["kill"] += 1

    async def _stop(self, random: SeededRandom, stop: asyncio.Event) -> None:
        """Suspends one or two processes past their leases, or only briefly if SQLite is locked."""
        kinds = [kind for kind in STOP_KINDS if kind in self._plan.target_kinds]
        candidates = self._deployment.running(random.choose(kinds)) if kinds else []
        targets = candidates[: random.choose((1, 2))]
        for process in targets:
            process.signal(signal.SIGSTOP)
            process.stopped = True
        if self._database.is_unlocked():
            await wait_first_event([stop], STOP_S, self._clock)
            if not stop.is_set():
                self._count["stop"] += len([process for process in targets if process.code is None])
        for process in targets:
            process.signal(signal.SIGCONT)
            process.stopped = False

    async def _crash(self, random: SeededRandom, _stop: asyncio.Event) -> None:
        """Kills a process, or all coordinators: a successor kills itself at a crash point."""
        kind = random.choose([name for name in POINTS if name in self._plan.target_kinds])
        self._deployment.armed[kind] = random.choose(POINTS[kind])
        # Only the leading coordinator reaches its crash points, so all coordinators are replaced.
        count = None if kind == "coordinator" else 1
        for process in self._deployment.running(kind)[:count]:
            process.kill()

    async def _cut(self, _random: SeededRandom, _stop: asyncio.Event) -> None:
        """Ends all connections to the database, also those with a transaction in progress."""
        self._count["cut"] += await self._database.cut_connections() > 0

    async def _swallow(self, random: SeededRandom, stop: asyncio.Event) -> None:
        """Lets the proxy drop the response to the next commit; waits up to two seconds for it."""
        proxy = self._database.proxy
        assert proxy is not None
        before = proxy.dropped_responses
        proxy.arm(only_commits=random.roll() < 0.5)
        await wait_first_event([stop], 1.0, self._clock)
        if proxy.dropped_responses == before:
            proxy.arm(only_commits=False)
            await wait_first_event([stop], 1.0, self._clock)
        self._count["swallow"] += proxy.dropped_responses > before

    async def _restart(self, _random: SeededRandom, _stop: asyncio.Event) -> None:
        """Crashes the database server and starts it again."""
        server = self._database.server
        assert server is not None
        await server.restart()
        self._count["restart"] += 1
