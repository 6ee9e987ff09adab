"""One run: faults while clients hand in tasks, then rest, then the verdict."""

import asyncio
import tempfile
from collections.abc import Callable
from pathlib import Path

from tenuto import app
from tenuto.chaos.checker import Verdict, judge
from tenuto.chaos.databases import Database, made
from tenuto.chaos.deployment import Deployment
from tenuto.chaos.faults import FaultInjector
from tenuto.chaos.plan import MINUTES, ChaosPlan
from tenuto.chaos.recorder import Recorder
from tenuto.chaos.report import Report
from tenuto.clock import Clock
from tenuto.coordinator.coordinator import ALERTS
from tenuto.engine.engine import Engine
from tenuto.engine.operations.audit import AuditReader
from tenuto.model.errors import TenutoError, Unavailable
from tenuto.periodic import wait_first_event
from tenuto.settings import Settings

LIMIT_S = 300.0
"""Seconds, beside half a second a task, after which a run by number of tasks gives up waiting."""
LOOK_S = 0.5
FALSE_STARTS = 40
"""Processes that may end by themselves before anything was acknowledged."""

Tell = Callable[[str], None]


def perform(plan: ChaosPlan, tell: Tell) -> Report:
    """Do all of it in a temporary folder; nothing is left of it."""
    plan.planned()
    with tempfile.TemporaryDirectory(prefix="tenuto-chaos-", ignore_cleanup_errors=True) as folder:
        return app.run(_perform(plan, Path(folder), tell))


async def _perform(plan: ChaosPlan, folder: Path, tell: Tell) -> Report:
    clock = Clock()
    tell("making the database")
    async with made(plan, folder, clock) as database:
        deployment = Deployment(plan, database.way, folder, clock)
        try:
            return await ChaosRun(plan, database, deployment, clock, tell).play()
        finally:
            deployment.end()


class ChaosRun:
    """The acts of one run."""

    def __init__(
        self, plan: ChaosPlan, database: Database, deployment: Deployment, clock: Clock, tell: Tell
    ) -> None:
        self._plan = plan
        self._database = database
        self._deployment = deployment
        self._clock = clock
        self._say = tell
        self._record = Recorder(deployment.record)
        self._faults = FaultInjector(plan, deployment, database, clock)
        self._began = clock.elapsed()

    async def play(self) -> Report:
        """Faults, rest, verdict."""
        over = asyncio.Event()
        self._deployment.start()
        keeping = asyncio.get_running_loop().create_task(self._deployment.keep(over))
        try:
            await self._strike()
            calm = self._clock.elapsed()
            await self._deployment.heal()
            await self._deployment.retire("client")
            async with app.connect(Settings(database=self._database.url)) as engine:
                await self._rest(engine)
                rested = self._clock.elapsed() - calm
                unruly = dict(self._deployment.ended)
                await self._deployment.retire(*self._plan.staff)
                verdict = await judge(engine, self._record.read())
        finally:
            over.set()
            await keeping
        return self._report(verdict, unruly, rested)

    async def _strike(self) -> None:
        """Faults until there was enough of everything."""
        stop = asyncio.Event()
        striking = asyncio.get_running_loop().create_task(self._faults.run(stop))
        try:
            while not self._enough() and not striking.done():
                await wait_first_event([], LOOK_S, self._clock)
                self._tell("faults")
                self._check_alive()
        finally:
            stop.set()
            await striking

    def _check_alive(self) -> None:
        """`Unavailable` when the deployment cannot even start."""
        if not self._record.acknowledged and self._deployment.ended.total() > FALSE_STARTS:
            words = self._deployment.log.read_text(errors="replace").splitlines()
            raise Unavailable(f"the processes of the run end at once: {''.join(words[-1:])}")

    def _enough(self) -> bool:
        """Whether the time is over or the tasks are there; then whether each fault happened."""
        spent = self._clock.elapsed() - self._began
        plan = self._plan
        if plan.tasks is None:
            return spent >= 60 * (plan.minutes or MINUTES)
        if spent > LIMIT_S + 0.5 * plan.tasks:
            return True
        return len(self._record.acknowledged) >= plan.tasks and not self._faults.missing()

    async def _rest(self, engine: Engine) -> None:
        """Wait until everything has ended, or nothing more does."""
        proof = AuditReader(engine.system)
        fewest, since = -1, self._clock.elapsed()
        while True:
            try:
                left = await proof.open() + await proof.untold(ALERTS, errors=True)
            except TenutoError:
                left = fewest
            if left == 0:
                return
            if left < fewest or fewest < 0:
                fewest, since = left, self._clock.elapsed()
            if self._clock.elapsed() - since > self._plan.rest_s:
                return
            self._tell(f"rest, {left} left")
            await wait_first_event([], LOOK_S, self._clock)

    def _tell(self, what: str) -> None:
        self._record.read()
        minutes, seconds = divmod(int(self._clock.elapsed() - self._began), 60)
        done = ", ".join(f"{name} {self._faults.happened[name]}" for name in self._faults.planned)
        acknowledged = len(self._record.acknowledged)
        self._say(f"{minutes}:{seconds:02} {what}: acknowledged {acknowledged:,}; {done}")

    def _report(self, verdict: Verdict, unruly: dict[int, int], rested_s: float) -> Report:
        happened = self._faults.happened
        return Report(
            database=self._database.name,
            seed=self._plan.seed,
            leader=self._plan.leader,
            seconds=round(self._clock.elapsed() - self._began, 1),
            faults={name: happened[name] for name in self._faults.planned},
            crash_points=dict(sorted(self._deployment.crashed.items())),
            missing=self._faults.missing() + ([] if verdict.told["acknowledged"] else ["a task"]),
            verdict=verdict,
            unruly={str(code): n for code, n in sorted(unruly.items())},
            rested_seconds=round(rested_s, 1),
        )
