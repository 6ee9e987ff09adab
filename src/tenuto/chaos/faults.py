"""The faults of a run, each a loop of its own: whom it strikes and when, a seed decides."""

import asyncio
import logging
import signal
from collections import Counter

from tenuto.chaos.databases import Database
from tenuto.chaos.deployment import Deployment
from tenuto.chaos.plan import SHORT, ChaosPlan, SeededRandom
from tenuto.clock import Clock
from tenuto.model.errors import TenutoError
from tenuto.periodic import run_periodically, wait_first_event

log = logging.getLogger("tenuto.chaos")

STOPPED = ("worker", "worker", "commands", "coordinator")
"""Who stands still, workers twice as often."""
STILL_S = SHORT["lease_s"] + 2 * SHORT["tick_s"] + 1.2
"""Seconds that a process stands still: past its lease, until somebody else has its tasks."""
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
"""Where processes of a kind can be made to die, by the names in `tenuto.crash_points`."""


class FaultInjector:
    """Strikes a deployment until told to stop, and counts what happened."""

    def __init__(
        self, plan: ChaosPlan, deployment: Deployment, database: Database, clock: Clock
    ) -> None:
        self._plan = plan
        self._deployment = deployment
        self._database = database
        self._clock = clock
        self.planned = plan.planned()
        self._count: Counter[str] = Counter()
        self._dice = {name: SeededRandom(plan.seed, name) for name in self.planned}

    @property
    def happened(self) -> Counter[str]:
        """How often each kind came to be; a crash only if the process died where it was to."""
        crashes = self._deployment.crashed.total()
        return self._count + Counter({"crash": crashes} if crashes else {})

    def missing(self) -> list[str]:
        """The planned kinds that have not happened."""
        return [kind for kind in self.planned if not self.happened[kind]]

    async def run(self, stop: asyncio.Event) -> None:
        """Every planned kind of fault again and again."""
        async with asyncio.TaskGroup() as group:
            for name in self.planned:
                group.create_task(self._again(name, stop))

    async def _again(self, name: str, stop: asyncio.Event) -> None:
        dice, strike = self._dice[name], getattr(self, f"_{name}")

        async def once() -> None:
            try:
                await strike(dice, stop)
            except (TenutoError, OSError, TimeoutError) as error:
                log.info("the fault %s did not come to be: %s", name, error)

        def pause() -> float:
            return dice.around(self._plan.every_s[name])

        await wait_first_event([stop], pause(), self._clock)
        await run_periodically(once, pause, stop, self._clock)

    async def _kill(self, dice: SeededRandom, _stop: asyncio.Event) -> None:
        """SIGKILL, as by a power cut."""
        found = [each for each in self._deployment.of(*self._plan.victims) if each.code is None]
        if found:
            dice.choose(found).kill()
            self._count["kill"] += 1

    async def _stop(self, dice: SeededRandom, stop: asyncio.Event) -> None:
        """SIGSTOP past the lease, then SIGCONT: a zombie that believes in its tasks."""
        kinds = [each for each in STOPPED if each in self._plan.victims]
        found = self._deployment.of(dice.choose(kinds)) if kinds else []
        victims = found[: dice.choose((1, 2))]
        for victim in victims:
            victim.signal(signal.SIGSTOP)
            victim.stopped = True
        if self._database.free():
            await wait_first_event([stop], STILL_S, self._clock)
            if not stop.is_set():
                self._count["stop"] += len([each for each in victims if each.code is None])
        for victim in victims:
            victim.signal(signal.SIGCONT)
            victim.stopped = False

    async def _crash(self, dice: SeededRandom, _stop: asyncio.Event) -> None:
        """A process that kills itself at a named place of the program."""
        kind = dice.choose([each for each in POINTS if each in self._plan.victims])
        self._deployment.armed[kind] = dice.choose(POINTS[kind])
        # Of coordinators a single one leads, and only who leads gets anywhere: all make room.
        most = None if kind == "coordinator" else 1
        for victim in self._deployment.of(kind)[:most]:
            victim.kill()

    async def _cut(self, _dice: SeededRandom, _stop: asyncio.Event) -> None:
        """All connections to the database end, in the middle of whatever they were at."""
        self._count["cut"] += await self._database.cut() > 0

    async def _swallow(self, dice: SeededRandom, stop: asyncio.Event) -> None:
        """A commit that succeeds, and nobody hears of it."""
        proxy = self._database.proxy
        assert proxy is not None
        before = proxy.swallowed
        proxy.arm(commits=dice.roll() < 0.5)
        await wait_first_event([stop], 1.0, self._clock)
        if proxy.swallowed == before:
            proxy.arm(commits=False)
            await wait_first_event([stop], 1.0, self._clock)
        self._count["swallow"] += proxy.swallowed > before

    async def _restart(self, _dice: SeededRandom, _stop: asyncio.Event) -> None:
        """The database server crashes and recovers."""
        server = self._database.server
        assert server is not None
        await server.restart()
        self._count["restart"] += 1
