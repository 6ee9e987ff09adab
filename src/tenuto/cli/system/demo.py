"""`orchestrate up --demo`: half a minute that shows a retry, a kill -9 and a cancel on a live view.

Everything is real: an embedded database in a temporary folder, a coordinator in this process, two
worker processes, and commands as sessions under their supervisors.
"""

import asyncio
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self
from uuid import UUID

import msgspec

from tenuto import app
from tenuto.cli.signals import as_ctrl_c
from tenuto.coordinator.coordinator import Coordinator
from tenuto.engine.engine import Engine
from tenuto.engine.views import AttemptView, TaskSummary
from tenuto.logs import set_up
from tenuto.model.printable import printable
from tenuto.model.tasks.retry import RetryPolicy
from tenuto.model.tasks.submission import NewTask
from tenuto.model.tasks.task import TERMINAL
from tenuto.periodic import wait_first_event
from tenuto.settings import Settings, environment_without_settings

LEASE_S = 3
PATIENCE_S = 90.0
SETTINGS = {"heartbeat_s": 1.0, "lease_s": LEASE_S, "tick_s": 0.5, "poll_s": 0.5, "slots": 2}
QUICK = RetryPolicy(base_s=1.0, jitter=0.0)

COUNT = """
import json, os, time
report = os.fdopen(3, "w", buffering=1)
done = json.loads(os.environ.get("TENUTO_CHECKPOINT", "0"))
steps = {steps}
for step in range(done, steps):
    time.sleep({pause})
    print("page", step + 1, "of", steps)
    told = {{"progress": 100 * (step + 1) // steps, "step": f"page {{step + 1}}"}}
    report.write(json.dumps(told) + "\\n")
    report.write(json.dumps({{"checkpoint": step + 1}}) + "\\n")
report.write(json.dumps({{"output": {{"pages": steps, "started_at_page": done}}}}) + "\\n")
"""
STUMBLE = """
import os, sys, time
time.sleep(1)
if os.environ["TENUTO_ATTEMPT"] == "1":
    sys.exit("the first try fails on purpose")
print("the second try works")
"""


class DemoTasks(msgspec.Struct, frozen=True):
    """The demo's tasks by the part they play."""

    killed: UUID
    retried: UUID
    cancelled: UUID
    plain: list[UUID]

    def all(self) -> list[UUID]:
        return [self.killed, self.retried, self.cancelled, *self.plain]


def _count(steps: int, pause: float) -> list[str]:
    return [sys.executable, "-c", COUNT.format(steps=steps, pause=pause)]


async def _submit(engine: Engine) -> DemoTasks:
    news = [
        NewTask(title="Survive kill -9 from a checkpoint", command=_count(10, 1), priority=9),
        NewTask(
            title="Fail once, then succeed", command=[sys.executable, "-c", STUMBLE], retry=QUICK
        ),
        NewTask(title="Be cancelled while running", command=["sleep", "600"], priority=8),
        NewTask(title="Summarise the report", command=_count(4, 0.5), tags=["demo"]),
        NewTask(title="Translate the report", command=_count(5, 0.4), tags=["demo"]),
        NewTask(title="Say hello", command=["echo", "hello from a task"], priority=3),
    ]
    ids = [submitted.id for submitted in await engine.submit_many(news)]
    return DemoTasks(ids[0], ids[1], ids[2], ids[3:])


class Demo:
    """One performance."""

    def __init__(self, engine: Engine, settings: Settings) -> None:
        self._engine = engine
        self._settings = settings
        self._workers: list[asyncio.subprocess.Process] = []
        self._script: DemoTasks | None = None
        self._killed_at: float | None = None
        self._told: set[str] = set()

    async def run(self) -> int:
        """Play it; 0 when everything came out as promised."""
        stop = asyncio.Event()
        coordinator = Coordinator(self._engine, self._settings, name="demo")
        coordinating = asyncio.get_running_loop().create_task(coordinator.run(stop))
        try:
            await self._start_worker()
            await self._start_worker()
            self._script = await _submit(self._engine)
            await self._watch()
        finally:
            await self._end_workers()
            stop.set()
            await coordinating
        return await self._summary()

    async def _start_worker(self) -> None:
        env = environment_without_settings()
        env |= {"TENUTO_DATABASE": self._settings.url(), app.PARENT_PIPE: "1"}
        env |= {f"TENUTO_{name.upper()}": str(value) for name, value in SETTINGS.items()}
        worker = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tenuto.cli.main", "worker", "--accept-commands"),
            stdin=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env=env,
            start_new_session=True,
        )
        self._workers.append(worker)

    async def _end_workers(self) -> None:
        for worker in self._workers:
            if worker.returncode is None:
                worker.terminate()
        await asyncio.gather(*(worker.wait() for worker in self._workers))

    async def _watch(self) -> None:
        """Show the tasks until all have ended, and do what the script says meanwhile."""
        deadline = self._engine.clock.elapsed() + PATIENCE_S
        with _stage() as stage:
            while self._engine.clock.elapsed() < deadline:
                page = await self._engine.list(limit=50)
                stage.show(page.tasks)
                await self._act(page.tasks, stage)
                if all(task.status in TERMINAL for task in page.tasks):
                    stage.show((await self._engine.list(limit=50)).tasks)
                    return
                await wait_first_event([], 0.25, self._engine.clock)

    async def _act(self, tasks: Sequence[TaskSummary], stage: "DemoView") -> None:
        assert self._script is not None
        now = {task.id: task for task in tasks}
        victim = now[self._script.killed]
        if self._killed_at is None and (victim.progress_percent or 0) >= 30:
            await self._kill_owner_of(victim.id, stage)
        doomed = now[self._script.cancelled]
        if doomed.status == "RUNNING" and doomed.cancel_requested_at is None:
            stage.say("cancelling a running task: its process tree is killed, with a receipt")
            await self._engine.cancel(doomed.id, "the demo cancels it")

    async def _kill_owner_of(self, task: UUID, stage: "DemoView") -> None:
        view = await self._engine.show(task)
        if view.worker is None:
            return
        pid = int(view.worker.split(":")[1])
        stage.say(f"kill -9 {pid}: the worker that runs the first task; lease {LEASE_S} s")
        os.kill(pid, signal.SIGKILL)
        self._killed_at = self._engine.clock.elapsed()
        await self._start_worker()

    async def _summary(self) -> int:
        assert self._script is not None
        script, engine = self._script, self._engine
        attempts = {task: list(await engine.attempts(task)) for task in script.all()}
        views = {task: await engine.show(task) for task in script.all()}
        output = views[script.killed].output or {}
        receipt = (attempts[script.cancelled][-1].receipt or {}) if attempts else {}
        checks = {
            "every task has ended": all(view.status in TERMINAL for view in views.values()),
            "the failed task was retried and completed": _ended_well(
                attempts[script.retried], "FAILED"
            ),
            f"the killed worker's task went on from its checkpoint (page "
            f"{output.get('started_at_page')}) and completed once": _ended_well(
                attempts[script.killed], "STALLED"
            )
            and output.get("started_at_page", 0) >= 1,
            f"the cancelled task's processes are gone ({receipt.get('how')}, "
            f"{receipt.get('killed_count')} killed)": views[script.cancelled].status == "CANCELLED"
            and receipt.get("state") == "killed",
            "rows and audit trail agree": not await engine.upkeep.audit(),
        }
        print()
        for text, good in checks.items():
            print(f"  {'ok  ' if good else 'FAIL'}  {text}")
        print("\nNext: orchestrate up, then in another terminal: orchestrate run --follow -- CMD")
        return 0 if all(checks.values()) else 1


def _ended_well(attempts: Sequence[AttemptView], first: str) -> bool:
    """Whether an attempt ended as told, and exactly the last one completed the task."""
    outcomes = [attempt.outcome for attempt in attempts]
    return first in outcomes and outcomes.index("COMPLETED") == len(outcomes) - 1


class DemoView:
    """Where the demo is shown: line by line, when there is no terminal."""

    def __init__(self) -> None:
        self._seen: dict[UUID, str] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def say(self, text: str) -> None:
        print(f"* {text}", flush=True)

    def show(self, tasks: Sequence[TaskSummary]) -> None:
        for task in reversed(tasks):
            state = f"{task.status} try {task.tries}/{task.max_attempts}"
            if self._seen.get(task.id) != state:
                self._seen[task.id] = state
                print(
                    f"  {task.status:<10} {task.tries}/{task.max_attempts}  {task.title}",
                    flush=True,
                )


class LiveStage(DemoView):
    """The same as a table that redraws itself."""

    def __init__(self) -> None:
        super().__init__()
        from rich.console import Console
        from rich.live import Live

        self._console = Console()
        self._live = Live(console=self._console, refresh_per_second=8)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def say(self, text: str) -> None:
        self._console.print(f"[bold]*[/bold] {printable(text)}")

    def show(self, tasks: Sequence[TaskSummary]) -> None:
        self._live.update(_table(tasks))


def _stage() -> DemoView:
    return LiveStage() if sys.stdout.isatty() else DemoView()


def _table(tasks: Sequence[TaskSummary]) -> Any:
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    from tenuto.cli.render import style_of

    table = Table(title="Tenuto: six tasks, two workers, one SQLite file")
    for column in ("task", "status", "try", "progress", "step"):
        table.add_column(column, min_width=20 if column == "progress" else None)
    for task in reversed(tasks):
        percent = 100 if task.status == "COMPLETED" else task.progress_percent or 0
        table.add_row(
            Text(printable(task.title)),
            Text(task.status, style=style_of(task.status)),
            f"{task.tries}/{task.max_attempts}",
            ProgressBar(total=100, completed=percent, width=20),
            Text(printable(task.current_step or "")),
        )
    return table


def demo() -> int:
    """Run the demo in a temporary folder; the exit code."""
    set_up("CRITICAL")
    with as_ctrl_c(), tempfile.TemporaryDirectory(prefix="tenuto-demo-") as folder:
        path = Path(folder) / "demo.db"
        settings = msgspec.convert({**SETTINGS, "database": f"sqlite:///{path}"}, Settings)

        async def play() -> int:
            async with app.connect(settings, actor="demo") as engine:
                return await Demo(engine, settings).run()

        return app.run(play())
