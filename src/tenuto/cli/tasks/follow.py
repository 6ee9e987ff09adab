"""Shows a task live for `--follow`: a progress bar on a terminal, plain lines elsewhere."""

from collections.abc import Callable
from typing import Protocol, Self
from uuid import UUID

from tenuto.cli.render import format_duration, is_terminal, print_note, style_of
from tenuto.client.follow import poll_task
from tenuto.client.remote.engine import AnyEngine
from tenuto.engine.tasks.query import LEVELS
from tenuto.engine.views import LogLine, TaskView
from tenuto.model.errors import Invalid
from tenuto.model.printable import indented, printable
from tenuto.model.tasks.task import LEASED, TERMINAL

EXPLAIN_AFTER_POLLS = 5
"""Polls without a change after which `explain` is shown for a task that does not run."""


def level_filter(level: str) -> Callable[[LogLine], bool]:
    """Returns a filter for log lines from `level` up; raises `Invalid` for an unknown level."""
    if level.upper() not in LEVELS:
        raise Invalid(f"unknown level {level!r}; use one of {', '.join(LEVELS)}", "invalid_filter")
    levels = LEVELS[LEVELS.index(level.upper()) :]
    return lambda line: line.level in levels


def format_log_line(line: LogLine) -> str:
    """Formats time, level, attempt and text of a log line; may have several lines of text."""
    prefix = f"{line.at.astimezone():%H:%M:%S.%f}"[:12]
    prefix += f" {line.level:<8} {f'#{line.attempt}' if line.attempt else '':<4} "
    text = f"{line.text}\n{line.stack_trace}" if line.stack_trace else line.text
    return printable(prefix) + indented(text, " " * len(prefix))


class FollowView(Protocol):
    """Shows a followed task."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *exc_info: object) -> None: ...

    def show_output(self, text: str) -> None:
        """Shows a line that the task printed."""

    def show_note(self, text: str) -> None:
        """Shows a line about the task, such as a change of status."""

    def show_progress(self, view: TaskView) -> None:
        """Shows the task's progress."""


def open_view() -> FollowView:
    """Returns a progress bar on a terminal, plain lines elsewhere."""
    return _ProgressBarView() if is_terminal() else _PlainView()


class _PlainView:
    """Prints plain lines: output to standard output, notes to standard error."""

    def __init__(self) -> None:
        self._last: tuple[int | None, str | None] = (None, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        pass

    def show_output(self, text: str) -> None:
        """Prints the text to standard output."""
        print(text, flush=True)

    def show_note(self, text: str) -> None:
        """Prints the text to standard error."""
        print_note(text)

    def show_progress(self, view: TaskView) -> None:
        """Prints progress and step if they have changed."""
        now = (view.progress_percent, view.current_step)
        if now not in (self._last, (None, None)):
            percent = "" if view.progress_percent is None else f"{view.progress_percent}% "
            print_note(f"{percent}{view.current_step or ''}".rstrip())
        self._last = now


class _ProgressBarView:
    """A progress bar on the terminal's last line; output scrolls above it."""

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

    def __exit__(self, *exc_info: object) -> None:
        self._progress.stop()

    def show_output(self, text: str) -> None:
        self._print(text, "")

    def show_note(self, text: str) -> None:
        self._print(printable(text, lines=True), style_of("SKIPPED"))

    def _print(self, text: str, style: str) -> None:
        """Prints text above the progress bar."""
        from rich.text import Text

        self._progress.console.print(Text(text, style=style), soft_wrap=True)

    def show_progress(self, view: TaskView) -> None:
        """Updates the bar."""
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


async def follow_task(
    engine: AnyEngine, task: UUID, display: FollowView, *, output: bool
) -> TaskView:
    """Shows a task, and why it waits, until it has finished; returns its last state.

    `output` includes the task's output.
    """
    unchanged_polls = 0
    version = 0
    explained = ""
    async for poll in poll_task(engine, task):
        view = poll.view
        for line in poll.lines:
            if line.source == "event":
                display.show_note(line.text)
            elif output:
                display.show_output(printable(line.text, lines=True))
        display.show_progress(view)
        unchanged_polls = unchanged_polls + 1 if view.version == version else 0
        version = view.version
        if unchanged_polls == EXPLAIN_AFTER_POLLS and view.status not in TERMINAL | LEASED:
            summary = (await engine.explain(task)).summary
            if summary != explained:
                display.show_note(f"not running: {summary}")
            explained = summary
    return view


def format_outcome(view: TaskView) -> str:
    """Returns one line with a finished task's status, duration, attempt and error."""
    text = str(view.status)
    if view.finished_at is not None and view.started_at is not None:
        text += f" in {format_duration(view.finished_at - view.started_at)}"
        text += f" at attempt {view.attempt}" if view.attempt > 1 else ""
    return f"{text}: {view.last_error}" if view.last_error and view.status != "COMPLETED" else text


def silent_view() -> FollowView:
    """Returns a view that shows nothing, for `--json`: one document at the end."""
    return _SilentView()


class _SilentView(_PlainView):
    """Shows nothing."""

    def show_output(self, text: str) -> None:
        pass

    def show_note(self, text: str) -> None:
        pass

    def show_progress(self, view: TaskView) -> None:
        pass
