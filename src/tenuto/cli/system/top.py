"""`orchestrate top`: what is going on, live on a terminal or once elsewhere."""

import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any

import click

from tenuto.cli.base import Globals, command
from tenuto.cli.connection import call
from tenuto.cli.parse import Finite

if TYPE_CHECKING:
    import asyncio
    from datetime import datetime

    from rich.console import Group

    from tenuto.client.remote.engine import AnyEngine
    from tenuto.engine.views import TaskSummary, WorkerView

RUNNING = ("RUNNING", "ASSIGNED")


@command("top", "orchestrate top", "orchestrate top --every 5", "orchestrate top --json")
@click.option("--every", type=Finite(0.2, 3600), default=1.0, show_default=True, help="Seconds.")
@click.option(
    "--tasks", type=click.IntRange(1, 1000), default=20, show_default=True, help="Running ones."
)
@click.pass_obj
def top(given: Globals, every: float, tasks: int) -> None:
    """Show how many tasks are in each status, the workers, and what runs; q or Ctrl-C ends.

    Where nobody watches, or with --json, it is shown once.
    """
    from tenuto.cli.render import is_terminal, print_json

    if given.json or not is_terminal():
        seen = call(given, lambda engine: _look(engine, tasks))
        print_json(seen.document()) if given.json else seen.print()
        return
    call(given, lambda engine: _live(engine, tasks, every))


class SystemSnapshot:
    """What is going on at one moment."""

    def __init__(
        self,
        counts: dict[str, int],
        workers: "Sequence[WorkerView]",
        running: "Sequence[TaskSummary]",
        now: "datetime",
    ) -> None:
        self.counts = counts
        self.workers = [each for each in workers if each.status in ("RUNNING", "DRAINING")]
        self.running = running
        self.now = now

    def document(self) -> dict[str, Any]:
        return {
            "tasks": self.counts,
            "workers": self.workers,
            "running": self.running,
            "at": self.now,
        }

    def summary(self) -> str:
        """How many tasks are in each status that has some."""
        told = [f"{status} {n:,}" for status, n in self.counts.items() if n]
        return "  ".join(told) or "no tasks"

    def worker_rows(self) -> list[list[str]]:
        from tenuto.cli.render import span
        from tenuto.model.printable import printable

        return [
            [
                each.status,
                f"{each.running}/{each.slots}",
                span(self.now - each.last_heartbeat),
                printable(", ".join(each.agents)),
                printable(each.id),
            ]
            for each in self.workers
        ]

    def task_rows(self) -> list[list[str]]:
        from tenuto.cli.render import span
        from tenuto.model.printable import printable

        return [
            [
                str(each.id),
                "" if each.progress_percent is None else f"{each.progress_percent}%",
                "" if each.started_at is None else span(self.now - each.started_at),
                printable(each.agent_name or ""),
                printable(each.title),
                printable(each.current_step or ""),
            ]
            for each in self.running
        ]

    def print(self) -> None:
        from tenuto.cli.render import print_table

        print(self.summary())
        for columns, rows in ((WORKERS, self.worker_rows()), (TASKS, self.task_rows())):
            if rows:
                print()
                print_table(columns, rows, wide=columns[-1])


WORKERS = ["STATUS", "BUSY", "SEEN", "AGENTS", "WORKER"]
TASKS = ["ID", "DONE", "FOR", "AGENT", "TITLE", "STEP"]


async def _look(engine: "AnyEngine", tasks: int) -> SystemSnapshot:
    from tenuto.engine.tasks.query import Filter

    page = await engine.list(Filter(status=RUNNING), tasks)
    return SystemSnapshot(
        await engine.counts(), await engine.workers(), page.tasks, engine.clock.now()
    )


async def _live(engine: "AnyEngine", tasks: int, every: float) -> None:
    """Show it again and again until somebody types q; an outage is shown, and waited for."""
    from rich.live import Live

    from tenuto.model.errors import Unavailable
    from tenuto.periodic import run_periodically

    seen = await _look(engine, tasks)
    with Live(_drawn(seen, ""), screen=True, auto_refresh=False) as live:

        async def once() -> None:
            nonlocal seen
            note = "q ends"
            try:
                seen = await _look(engine, tasks)
            except Unavailable as error:
                note = str(error)
            live.update(_drawn(seen, note), refresh=True)

        async with _until_q() as stop:
            await run_periodically(once, lambda: every, stop, engine.clock)


def _drawn(seen: SystemSnapshot, note: str) -> "Group":
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from tenuto.cli.render import style_of
    from tenuto.model.printable import printable

    head = Text()
    for status, n in seen.counts.items():
        if n:
            head.append(f"{status} {n:,}  ", style=style_of(status))
    parts: list[Any] = [head or Text("no tasks")]
    for columns, rows in ((WORKERS, seen.worker_rows()), (TASKS, seen.task_rows())):
        table = Table(box=None, pad_edge=False, header_style="bold")
        for name in columns:
            table.add_column(name, no_wrap=True)
        for row in rows:
            table.add_row(*(Text(cell, style=style_of(cell)) for cell in row))
        parts += [Text(""), table]
    return Group(*parts, Text(""), Text(printable(note), style=style_of("SKIPPED")))


@asynccontextmanager
async def _until_q() -> "AsyncIterator[asyncio.Event]":
    """An event that the key q sets."""
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
    with _keys():
        loop.add_reader(sys.stdin.fileno(), read)
        try:
            yield stop
        finally:
            loop.remove_reader(sys.stdin.fileno())


@contextmanager
def _keys() -> Iterator[None]:
    """Keys arrive one by one and unseen meanwhile."""
    import termios
    import tty

    before = termios.tcgetattr(sys.stdin)
    try:
        tty.setcbreak(sys.stdin)
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
