"""`orchestrate top`: running tasks and workers, live on a terminal, once elsewhere."""

import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any

import click

from tenuto.cli.base import GlobalOptions, command
from tenuto.cli.connection import call_engine
from tenuto.cli.parse import FiniteRange

if TYPE_CHECKING:
    import asyncio
    from datetime import datetime

    from rich.console import Group

    from tenuto.client.remote.engine import AnyEngine
    from tenuto.engine.views import TaskSummary, WorkerView

RUNNING = ("RUNNING", "ASSIGNED")


@command("top", "orchestrate top", "orchestrate top --every 5", "orchestrate top --json")
@click.option(
    "--every",
    type=FiniteRange(0.2, 3600),
    default=1.0,
    show_default=True,
    help="Refresh interval in seconds.",
)
@click.option(
    "--tasks",
    type=click.IntRange(1, 1000),
    default=20,
    show_default=True,
    help="Maximum number of running tasks shown.",
)
@click.pass_obj
def top(options: GlobalOptions, every: float, tasks: int) -> None:
    """Show the number of tasks in each status, the workers, and the running tasks.

    q or Ctrl-C ends it. Without a terminal, or with --json, it is printed once.
    """
    from tenuto.cli.render import is_terminal, print_json

    if options.json or not is_terminal():
        snapshot = call_engine(options, lambda engine: _read_snapshot(engine, tasks))
        print_json(snapshot.document()) if options.json else snapshot.print()
        return
    call_engine(options, lambda engine: _show_live(engine, tasks, every))


class SystemSnapshot:
    """Task counts, workers and running tasks at one moment."""

    def __init__(
        self,
        counts: dict[str, int],
        workers: "Sequence[WorkerView]",
        running: "Sequence[TaskSummary]",
        now: "datetime",
    ) -> None:
        self.counts = counts
        self.workers = [worker for worker in workers if worker.status in ("RUNNING", "DRAINING")]
        self.running = running
        self.now = now

    def document(self) -> dict[str, Any]:
        """Returns the snapshot as JSON data."""
        return {
            "tasks": self.counts,
            "workers": self.workers,
            "running": self.running,
            "at": self.now,
        }

    def summary(self) -> str:
        """Returns the number of tasks in each status, without empty statuses."""
        parts = [f"{status} {n:,}" for status, n in self.counts.items() if n]
        return "  ".join(parts) or "no tasks"

    def worker_rows(self) -> list[list[str]]:
        """Returns the table rows of the workers."""
        from tenuto.cli.render import format_duration
        from tenuto.model.printable import printable

        return [
            [
                worker.status,
                f"{worker.running}/{worker.slots}",
                format_duration(self.now - worker.last_heartbeat),
                printable(", ".join(worker.agents)),
                printable(worker.id),
            ]
            for worker in self.workers
        ]

    def task_rows(self) -> list[list[str]]:
        """Returns the table rows of the running tasks."""
        from tenuto.cli.render import format_duration
        from tenuto.model.printable import printable

        return [
            [
                str(task.id),
                "" if task.progress_percent is None else f"{task.progress_percent}%",
                "" if task.started_at is None else format_duration(self.now - task.started_at),
                printable(task.agent_name or ""),
                printable(task.title),
                printable(task.current_step or ""),
            ]
            for task in self.running
        ]

    def print(self) -> None:
        """Prints the summary and both tables once; a table without rows is left out."""
        from tenuto.cli.render import print_table

        print(self.summary())
        for columns, rows in ((WORKERS, self.worker_rows()), (TASKS, self.task_rows())):
            if rows:
                print()
                print_table(columns, rows, wide=columns[-1])


WORKERS = ["STATUS", "BUSY", "SEEN", "AGENTS", "WORKER"]
TASKS = ["ID", "PROGRESS", "TIME", "AGENT", "TITLE", "STEP"]


async def _read_snapshot(engine: "AnyEngine", tasks: int) -> SystemSnapshot:
    """Reads counts, workers and up to `tasks` running tasks."""
    from tenuto.model.tasks.submission import Filter

    page = await engine.list(Filter(status=RUNNING), tasks)
    return SystemSnapshot(
        await engine.counts(), await engine.workers(), page.tasks, engine.clock.now()
    )


async def _show_live(engine: "AnyEngine", tasks: int, every: float) -> None:
    """Refreshes the view until q is pressed; shows an outage and keeps trying."""
    from rich.live import Live

    from tenuto.model.errors import Unavailable
    from tenuto.periodic import run_periodically

    snapshot = await _read_snapshot(engine, tasks)
    with Live(_render(snapshot, ""), screen=True, auto_refresh=False) as live:

        async def refresh() -> None:
            nonlocal snapshot
            note = "q: quit"
            try:
                snapshot = await _read_snapshot(engine, tasks)
            except Unavailable as error:
                note = str(error)
            live.update(_render(snapshot, note), refresh=True)

        async with _quit_key_event() as stop:
            await run_periodically(refresh, lambda: every, stop, engine.clock)


def _render(snapshot: SystemSnapshot, note: str) -> "Group":
    """Returns the snapshot as a live view, with a note below."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from tenuto.cli.render import style_of
    from tenuto.model.printable import printable

    head = Text()
    for status, n in snapshot.counts.items():
        if n:
            head.append(f"{status} {n:,}  ", style=style_of(status))
    parts: list[Any] = [head or Text("no tasks")]
    for columns, rows in ((WORKERS, snapshot.worker_rows()), (TASKS, snapshot.task_rows())):
        table = Table(box=None, pad_edge=False, header_style="bold")
        for name in columns:
            table.add_column(name, no_wrap=True)
        for row in rows:
            table.add_row(*(Text(cell, style=style_of(cell)) for cell in row))
        parts += [Text(""), table]
    return Group(*parts, Text(""), Text(printable(note), style=style_of("SKIPPED")))


@asynccontextmanager
async def _quit_key_event() -> "AsyncIterator[asyncio.Event]":
    """Context with an event that q or a closed terminal sets; never set without a terminal."""
    import asyncio
    import os

    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def read() -> None:
        if os.read(sys.stdin.fileno(), 64)[:1] in (b"q", b"Q", b""):
            stop.set()

    if sys.stdin is None or not sys.stdin.isatty():
        yield stop
        return
    with _cbreak_mode():
        loop.add_reader(sys.stdin.fileno(), read)
        try:
            yield stop
        finally:
            loop.remove_reader(sys.stdin.fileno())


@contextmanager
def _cbreak_mode() -> Iterator[None]:
    """Context in which keys arrive one by one and are not echoed."""
    import termios
    import tty

    previous = termios.tcgetattr(sys.stdin)
    try:
        tty.setcbreak(sys.stdin)
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, previous)
