"""Showing a watched task: a bar on a terminal, plain lines elsewhere."""

from collections.abc import Callable
from typing import Protocol, Self
from uuid import UUID

from tenuto.cli.render import is_terminal, print_note, span, style_of
from tenuto.client.follow import poll_task
from tenuto.client.remote.engine import AnyEngine
from tenuto.engine.tasks.query import LEVELS
from tenuto.engine.views import LogLine, TaskView
from tenuto.model.errors import Invalid
from tenuto.model.printable import indented, printable
from tenuto.model.tasks.task import LEASED, TERMINAL

PATIENCE = 5
"""Looks without a change after which a queued task is explained."""


def at_least(level: str) -> Callable[[LogLine], bool]:
    """Whether a line is of that level or a graver one."""
    if level.upper() not in LEVELS:
        raise Invalid(f"no level {level!r}; known are {', '.join(LEVELS)}", "invalid_filter")
    wanted = LEVELS[LEVELS.index(level.upper()) :]
    return lambda line: line.level in wanted


def log_text(line: LogLine) -> str:
    """A log line for people: time, level, attempt, text."""
    start = f"{line.at.astimezone():%H:%M:%S.%f}"[:12]
    start += f" {line.level:<8} {f'#{line.attempt}' if line.attempt else '':<4} "
    text = f"{line.text}\n{line.stack_trace}" if line.stack_trace else line.text
    return printable(start) + indented(text, " " * len(start))


class FollowView(Protocol):
    """Where a watched task is shown."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *raised: object) -> None: ...

    def say(self, text: str) -> None:
        """Show a line of the task's own output."""

    def note(self, text: str) -> None:
        """Show a remark about the task."""

    def progress(self, view: TaskView) -> None:
        """Show how far the task is."""


def screen() -> FollowView:
    """A bar on a terminal, plain lines elsewhere."""
    return _Bar() if is_terminal() else _Plain()


class _Plain:
    def __init__(self) -> None:
        self._last: tuple[int | None, str | None] = (None, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        pass

    def say(self, text: str) -> None:
        print(text, flush=True)

    def note(self, text: str) -> None:
        print_note(text)

    def progress(self, view: TaskView) -> None:
        now = (view.progress_percent, view.current_step)
        if now not in (self._last, (None, None)):
            percent = "" if view.progress_percent is None else f"{view.progress_percent}% "
            print_note(f"{percent}{view.current_step or ''}".rstrip())
        self._last = now


class _Bar:
    """A progress bar on the terminal's last line, with everything else above it."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        self._progress = Progress(
            TextColumn("{task.fields[status]}", markup=False),
            BarColumn(),
            TextColumn("{task.fields[percent]}", markup=False),
            TimeElapsedColumn(),
            TextColumn("{task.fields[step]}", markup=False),
            console=Console(highlight=False, markup=False),
            auto_refresh=False,
            transient=True,
        )
        self._bar = self._progress.add_task("", total=None, status="", percent="", step="")

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._progress.stop()

    def say(self, text: str) -> None:
        self._print(text, "")

    def note(self, text: str) -> None:
        self._print(printable(text, lines=True), style_of("SKIPPED"))

    def _print(self, text: str, style: str) -> None:
        from rich.text import Text

        self._progress.console.print(Text(text, style=style), soft_wrap=True)

    def progress(self, view: TaskView) -> None:
        percent = view.progress_percent
        self._progress.update(
            self._bar,
            total=None if percent is None else 100,
            completed=percent or 0,
            status=printable(view.status),
            percent="" if percent is None else f"{percent}%",
            step=printable(view.current_step or ""),
        )
        self._progress.refresh()


async def watch(engine: AnyEngine, task: UUID, shown: FollowView, *, output: bool) -> TaskView:
    """Show a task until it has ended, with its output if wanted; answers how it ended."""
    still = 0
    version = 0
    explained = ""
    async for look in poll_task(engine, task):
        view = look.view
        for line in look.lines:
            if line.source == "event":
                shown.note(line.text)
            elif output:
                shown.say(printable(line.text, lines=True))
        shown.progress(view)
        still = still + 1 if view.version == version else 0
        version = view.version
        if still == PATIENCE and view.status not in TERMINAL | LEASED:
            summary = (await engine.explain(task)).summary
            if summary != explained:
                shown.note(f"not running: {summary}")
            explained = summary
    return view


def ending(view: TaskView) -> str:
    """One line on how a task ended."""
    text = str(view.status)
    if view.finished_at is not None and view.started_at is not None:
        text += f" in {span(view.finished_at - view.started_at)}"
        text += f" at attempt {view.attempt}" if view.attempt > 1 else ""
    return f"{text}: {view.last_error}" if view.last_error and view.status != "COMPLETED" else text


def quiet() -> FollowView:
    """Shows nothing: for JSON, which is one document at the end."""
    return _Quiet()


class _Quiet(_Plain):
    def say(self, text: str) -> None:
        pass

    def note(self, text: str) -> None:
        pass

    def progress(self, view: TaskView) -> None:
        pass
