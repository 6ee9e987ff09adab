"""One run: faults while clients submit tasks, then a wait until all finish, then the check."""

import asyncio
import tempfile
from collections.abc import Callable
from pathlib import Path

from tenuto import app
from tenuto.chaos.checker import Verdict, check_run
from tenuto.chaos.databases import Database, open_database
from tenuto.chaos.deployment import Deployment
from tenuto.chaos.faults import FaultInjector
from tenuto.chaos.plan import DEFAULT_MINUTES, ChaosPlan
from tenuto.chaos.recorder import Recorder
from tenuto.chaos.report import Report
from tenuto.clock import Clock
from tenuto.coordinator.duties import ALERTS
from tenuto.engine.engine import Engine
from tenuto.engine.operations.audit import AuditReader
from tenuto.model.errors import TenutoError, Unavailable
from tenuto.periodic import wait_first_event
from tenuto.settings import Settings

BASE_TIMEOUT_S = 300.0
"""Seconds, plus 0.5 s per task, after which a run by number of tasks stops injecting faults."""
POLL_S = 0.5
MAX_FALSE_STARTS = 40
"""Process exits that are tolerated before the first task is acknowledged."""

PrintProgress = Callable[[str], None]


def run_plan(plan: ChaosPlan, print_progress: PrintProgress) -> Report:
    """Runs the plan in a temporary folder, returns the report; `Invalid` for impossible faults."""
    plan.planned_faults()
    with tempfile.TemporaryDirectory(prefix="tenuto-chaos-", ignore_cleanup_errors=True) as folder:
        return app.run(_run_plan(plan, Path(folder), print_progress))


async def _run_plan(plan: ChaosPlan, folder: Path, print_progress: PrintProgress) -> Report:
    """Creates the database and the processes, runs the plan, and kills the processes."""
    clock = Clock()
    print_progress("creating the database")
    async with open_database(plan, folder, clock) as database:
        deployment = Deployment(plan, database.process_url, folder, clock)
        try:
            return await ChaosRun(plan, database, deployment, clock, print_progress).run()
        finally:
            deployment.kill_all()


class ChaosRun:
    """One run: injects faults, waits, checks."""

    def __init__(
        self,
        plan: ChaosPlan,
        database: Database,
        deployment: Deployment,
        clock: Clock,
        print_progress: PrintProgress,
    ) -> None:
        self._plan = plan
        self._database = database
        self._deployment = deployment
        self._clock = clock
        self._print_progress = print_progress
        self._record = Recorder(deployment.record)
        self._faults = FaultInjector(plan, deployment, database, clock)
        self._started_at = clock.elapsed()

    async def run(self) -> Report:
        """Injects faults, waits until all tasks have finished, and checks the result."""
        stop = asyncio.Event()
        self._deployment.start()
        supervising = asyncio.get_running_loop().create_task(self._deployment.supervise(stop))
        try:
            await self._inject_faults()
            faults_ended_at = self._clock.elapsed()
            await self._deployment.heal()
            await self._deployment.retire("client")
            async with app.connect(Settings(database=self._database.url)) as engine:
                await self._wait_until_settled(engine)
                settled_s = self._clock.elapsed() - faults_ended_at
                exit_counts = dict(self._deployment.ended)
                await self._deployment.retire(*self._plan.process_counts)
                verdict = await check_run(engine, self._record.read())
        finally:
            stop.set()
            await supervising
        return self._build_report(verdict, exit_counts, settled_s)

    async def _inject_faults(self) -> None:
        """Injects faults for the planned time or tasks; `Unavailable` if processes only exit."""
        stop = asyncio.Event()
        injecting = asyncio.get_running_loop().create_task(self._faults.run(stop))
        try:
            while not self._has_enough_faults() and not injecting.done():
                await wait_first_event([], POLL_S, self._clock)
                self._print_status("faults")
                self._require_progress()
        finally:
            stop.set()
            await injecting

    def _require_progress(self) -> None:
        """Raises `Unavailable` if many processes exited before the first task is acknowledged."""
        if not self._record.acknowledged and self._deployment.ended.total() > MAX_FALSE_STARTS:
            lines = self._deployment.log.read_text(errors="replace").splitlines()
            raise Unavailable(
                f"the processes of the run exit at once; last log line: {''.join(lines[-1:])}"
            )

    def _has_enough_faults(self) -> bool:
        """True if the time is over, or if enough tasks and every planned fault were seen."""
        elapsed = self._clock.elapsed() - self._started_at
        plan = self._plan
        if plan.tasks is None:
            return elapsed >= 60 * (plan.minutes or DEFAULT_MINUTES)
        if elapsed > BASE_TIMEOUT_S + 0.5 * plan.tasks:
            return True
        return len(self._record.acknowledged) >= plan.tasks and not self._faults.missing()

    async def _wait_until_settled(self, engine: Engine) -> None:
        """Waits until tasks are finished and events read; gives up without progress in time."""
        audit = AuditReader(engine.system)
        fewest, since = -1, self._clock.elapsed()
        while True:
            try:
                remaining = await audit.count_unfinished() + await audit.count_unread(
                    ALERTS, errors=True
                )
            except TenutoError:
                remaining = fewest
            if remaining == 0:
                return
            if remaining < fewest or fewest < 0:
                fewest, since = remaining, self._clock.elapsed()
            if self._clock.elapsed() - since > self._plan.settle_timeout_s:
                return
            self._print_status(f"waiting for {remaining} tasks and events")
            await wait_first_event([], POLL_S, self._clock)

    def _print_status(self, phase: str) -> None:
        """Reads new records; prints the time, phase, and numbers of tasks and faults."""
        self._record.read()
        minutes, seconds = divmod(int(self._clock.elapsed() - self._started_at), 60)
        fault_counts = ", ".join(
            f"{name} {self._faults.counts[name]}" for name in self._faults.planned
        )
        acknowledged = len(self._record.acknowledged)
        self._print_progress(
            f"{minutes}:{seconds:02} {phase}: acknowledged {acknowledged:,}; {fault_counts}"
        )

    def _build_report(
        self, verdict: Verdict, exit_counts: dict[int, int], settled_s: float
    ) -> Report:
        """Builds the report from the verdict and the counts of faults, crashes and exits."""
        counts = self._faults.counts
        return Report(
            database=self._database.name,
            seed=self._plan.seed,
            leader=self._plan.leader,
            seconds=round(self._clock.elapsed() - self._started_at, 1),
            faults={name: counts[name] for name in self._faults.planned},
            crash_points=dict(sorted(self._deployment.crashed.items())),
            missing=self._faults.missing() + ([] if verdict.info["acknowledged"] else ["a task"]),
            verdict=verdict,
            unexpected_exits={str(code): n for code, n in sorted(exit_counts.items())},
            settled_seconds=round(settled_s, 1),
        )
