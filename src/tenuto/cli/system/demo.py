"""`orchestrate up --demo`: shows a retry, a kill -9 and a cancel live, in half a minute.

It uses an embedded database in a temporary folder, a coordinator in this process, two worker
processes, and commands as sessions under their supervisors. Nothing is simulated.
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
from tenuto.cli.signals import terminate_like_ctrl_c
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
TIMEOUT_S = 90.0
SETTINGS = {"heartbeat_s": 1.0, "lease_s": LEASE_S, "tick_s": 0.5, "poll_s": 0.5, "slots": 2}
QUICK_RETRY = RetryPolicy(base_s=1.0, jitter=0.0)

COUNT_SCRIPT = """
import json, os, time
report = os.fdopen(3, "w", buffering=1)
done = json.loads(os.environ.get("TENUTO_CHECKPOINT", "0"))
steps = {steps}
for step in range(done, steps):
    time.sleep({pause})
    print("page", step + 1, "of", steps)
    progress = {{"progress": 100 * (step + 1) // steps, "step": f"page {{step + 1}}"}}
    report.write(json.dumps(progress) + "\\n")
    report.write(json.dumps({{"checkpoint": step + 1}}) + "\\n")
report.write(json.dumps({{"output": {{"pages": steps, "started_at_page": done}}}}) + "\\n")
"""
FAIL_ONCE_SCRIPT = """
import os, sys, time
time.sleep(1)
if os.environ["TENUTO_ATTEMPT"] == "1":
    sys.exit("the first try fails on purpose")
print("the second try works")
"""


class DemoTasks(msgspec.Struct, frozen=True):
    """Ids of the demo's tasks: whose worker is killed, retried, cancelled, and the others."""

    killed: UUID
    retried: UUID
    cancelled: UUID
    plain: list[UUID]

    def all(self) -> list[UUID]:
        """Returns the ids of all tasks."""
        return [self.killed, self.retried, self.cancelled, *self.plain]


def _count_command(steps: int, pause: float) -> list[str]:
    """Returns a command that counts with pauses and saves a checkpoint at each step."""
    return [sys.executable, "-c", COUNT_SCRIPT.format(steps=steps, pause=pause)]


async def _submit(engine: Engine) -> DemoTasks:
    """Submits the demo's tasks and returns their ids."""
    new_tasks = [
        NewTask(
            title="Survive kill -9 from a checkpoint", command=_count_command(10, 1), priority=9
        ),
        NewTask(
            title="Fail once, then succeed",
            command=[sys.executable, "-c", FAIL_ONCE_SCRIPT],
            retry=QUICK_RETRY,
        ),
        NewTask(title="Be cancelled while running", command=["sleep", "600"], priority=8),
        NewTask(title="Summarise the report", command=_count_command(4, 0.5), tags=["demo"]),
        NewTask(title="Translate the report", command=_count_command(5, 0.4), tags=["demo"]),
        NewTask(title="Say hello", command=["echo", "hello from a task"], priority=3),
    ]
    ids = [submitted.id for submitted in await engine.submit_many(new_tasks)]
    return DemoTasks(ids[0], ids[1], ids[2], ids[3:])


class Demo:
    """One run of the demo."""

    def __init__(self, engine: Engine, settings: Settings) -> None:
        self._engine = engine
        self._settings = settings
        self._workers: list[asyncio.subprocess.Process] = []
        self._tasks: DemoTasks | None = None
        self._killed_at: float | None = None

    async def run(self) -> int:
        """Runs the demo; returns exit code 0 if all checks pass, else 1."""
        stop = asyncio.Event()
        coordinator = Coordinator(self._engine, self._settings, name="demo")
        coordinating = asyncio.get_running_loop().create_task(coordinator.run(stop))
        try:
            await self._start_worker()
            await self._start_worker()
            self._tasks = await _submit(self._engine)
            await self._show_until_finished()
        finally:
            await self._stop_workers()
            stop.set()
            await coordinating
        return await self._print_checks()

    async def _start_worker(self) -> None:
        """Starts a worker process."""
        env = environment_without_settings()
        env |= {"TENUTO_DATABASE": self._settings.database_url(), app.PARENT_PIPE: "1"}
        env |= {f"TENUTO_{name.upper()}": str(value) for name, value in SETTINGS.items()}
        worker = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tenuto.cli.main", "worker", "--accept-commands"),
            stdin=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env=env,
            start_new_session=True,
        )
        self._workers.append(worker)

    async def _stop_workers(self) -> None:
        """Asks all workers to drain and waits until they have exited."""
        for worker in self._workers:
            if worker.returncode is None:
                worker.terminate()
        await asyncio.gather(*(worker.wait() for worker in self._workers))

    async def _show_until_finished(self) -> None:
        """Shows the tasks until all finish or time is up; kills a worker and cancels a task."""
        deadline = self._engine.clock.elapsed() + TIMEOUT_S
        with _open_view() as view:
            while self._engine.clock.elapsed() < deadline:
                page = await self._engine.list(limit=50)
                view.show(page.tasks)
                await self._inject_faults(page.tasks, view)
                if all(task.status in TERMINAL for task in page.tasks):
                    view.show((await self._engine.list(limit=50)).tasks)
                    return
                await wait_first_event([], 0.25, self._engine.clock)

    async def _inject_faults(self, tasks: Sequence[TaskSummary], view: "DemoView") -> None:
        """Kills a worker at 30 % of the first task; cancels another task once it runs."""
        assert self._tasks is not None
        current = {task.id: task for task in tasks}
        killed_task = current[self._tasks.killed]
        if self._killed_at is None and (killed_task.progress_percent or 0) >= 30:
            await self._kill_worker_of(killed_task.id, view)
        cancelled_task = current[self._tasks.cancelled]
        if cancelled_task.status == "RUNNING" and cancelled_task.cancel_requested_at is None:
            view.print_event(
                "cancelling a running task: its process tree is killed, with a receipt"
            )
            await self._engine.cancel(cancelled_task.id, "the demo cancels it")

    async def _kill_worker_of(self, task: UUID, demo_view: "DemoView") -> None:
        """Kills the worker that runs the task, if any, and starts another one."""
        view = await self._engine.show(task)
        if view.worker is None:
            return
        pid = int(view.worker.split(":")[1])
        demo_view.print_event(
            f"kill -9 {pid}: the worker that runs the first task; lease {LEASE_S} s"
        )
        os.kill(pid, signal.SIGKILL)
        self._killed_at = self._engine.clock.elapsed()
        await self._start_worker()

    async def _print_checks(self) -> int:
        """Checks the results and prints each check; returns 0 if all pass, else 1."""
        assert self._tasks is not None
        demo_tasks, engine = self._tasks, self._engine
        attempts = {task: list(await engine.attempts(task)) for task in demo_tasks.all()}
        views = {task: await engine.show(task) for task in demo_tasks.all()}
        output = views[demo_tasks.killed].output or {}
        receipt = (attempts[demo_tasks.cancelled][-1].receipt or {}) if attempts else {}
        checks = {
            "every task has finished": all(view.status in TERMINAL for view in views.values()),
            "the failed task was retried and completed": _completed_after(
                attempts[demo_tasks.retried], "FAILED"
            ),
            f"the killed worker's task continued from its checkpoint (page "
            f"{output.get('started_at_page')}) and completed once": _completed_after(
                attempts[demo_tasks.killed], "STALLED"
            )
            and output.get("started_at_page", 0) >= 1,
            f"the cancelled task's processes are gone ({receipt.get('how')}, "
            f"{receipt.get('killed_count')} killed)": views[demo_tasks.cancelled].status
            == "CANCELLED"
            and receipt.get("state") == "killed",
            "rows and audit trail agree": not await engine.maintenance.audit(),
        }
        print()
        for text, passed in checks.items():
            print(f"  {'ok  ' if passed else 'FAIL'}  {text}")
        print("\nNext: orchestrate up, then in another terminal: orchestrate run --follow -- CMD")
        return 0 if all(checks.values()) else 1


def _completed_after(attempts: Sequence[AttemptView], expected_outcome: str) -> bool:
    """True if an attempt ended with that outcome and only the last one completed the task."""
    outcomes = [attempt.outcome for attempt in attempts]
    return expected_outcome in outcomes and outcomes.index("COMPLETED") == len(outcomes) - 1


class DemoView:
    """Shows the demo line by line, without a terminal."""

    def __init__(self) -> None:
        self._seen: dict[UUID, str] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def print_event(self, text: str) -> None:
        """Prints what the demo does now."""
        print(f"* {text}", flush=True)

    def show(self, tasks: Sequence[TaskSummary]) -> None:
        """Prints a line for each task whose status or number of tries has changed."""
        for task in reversed(tasks):
            state = f"{task.status} try {task.tries}/{task.max_attempts}"
            if self._seen.get(task.id) != state:
                self._seen[task.id] = state
                print(
                    f"  {task.status:<10} {task.tries}/{task.max_attempts}  {task.title}",
                    flush=True,
                )


class LiveDemoView(DemoView):
    """Shows the demo as a live table on a terminal."""

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

    def print_event(self, text: str) -> None:
        self._console.print(f"[bold]*[/bold] {printable(text)}")

    def show(self, tasks: Sequence[TaskSummary]) -> None:
        """Updates the live table."""
        self._live.update(_build_table(tasks))


def _open_view() -> DemoView:
    """Returns a live table on a terminal, plain lines elsewhere."""
    return LiveDemoView() if sys.stdout.isatty() else DemoView()


def _build_table(tasks: Sequence[TaskSummary]) -> Any:
    """Returns the tasks as a table for the terminal."""
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
    """Runs the demo in a temporary folder; returns the exit code."""
    set_up("CRITICAL")
    with terminate_like_ctrl_c(), tempfile.TemporaryDirectory(prefix="tenuto-demo-") as folder:
        path = Path(folder) / "demo.db"
        settings = msgspec.convert({**SETTINGS, "database": f"sqlite:///{path}"}, Settings)

        async def run_demo() -> int:
            async with app.connect(settings, actor="demo") as engine:
                return await Demo(engine, settings).run()

        return app.run(run_demo())
