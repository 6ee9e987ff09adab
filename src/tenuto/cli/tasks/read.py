"""`orchestrate task list`, `show`, `status`, `logs`, `attempts`, `explain`: read-only commands.

Their rows come from `Engine.list` and its neighbours (`engine/tasks/query.py`), or over HTTP.
"""

from typing import TYPE_CHECKING, Any
from uuid import UUID

import click

from tenuto.cli.base import GlobalOptions, command, task_argument, task_id_options
from tenuto.cli.connection import call_engine
from tenuto.cli.tasks.fields import build_filter, filter_options, request_rows

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from tenuto.client.remote.engine import AnyEngine
    from tenuto.engine.views import AttemptView, Explanation, LogLine, Page, TaskSummary, TaskView


@command(
    "list",
    "orchestrate task list --status RUNNING --min-priority 8",
    "orchestrate task list --tag nightly --since 1d --limit 20",
    "orchestrate task list --json --limit 100 --cursor 0198c0de-0000-7000-8000-000000000000",
)
@filter_options
@click.option("--limit", type=int, default=50, show_default=True, help="Maximum number of rows.")
@click.option("--cursor", type=click.UUID, metavar="ID", help="Only tasks older than this one.")
@click.pass_obj
def list_(options: GlobalOptions, /, limit: int, cursor: UUID | None, **filters: Any) -> None:
    """List tasks, newest first."""

    async def read_page(engine: "AnyEngine") -> "tuple[Page, datetime]":
        now = engine.clock.now()
        return await engine.list(build_filter(now, filters), limit, cursor), now

    print_task_page(options, *call_engine(options, read_page))


def print_task_page(options: GlobalOptions, page: "Page", now: "datetime") -> None:
    """Prints a page of tasks, and how to see the next page."""
    from tenuto.cli.output import print_next_cursor
    from tenuto.cli.render import print_json

    if options.json:
        print_json(page)
        return
    print_tasks(page.tasks, now)
    print_next_cursor(page.next_cursor)


def print_tasks(tasks: "Sequence[TaskSummary]", now: "datetime") -> None:
    """Prints a table of tasks."""
    from tenuto.cli.render import format_duration, print_table

    rows = [
        [
            str(task.id),
            str(task.status),
            str(task.priority),
            f"{task.tries}/{task.max_attempts}",
            "" if task.progress_percent is None else f"{task.progress_percent}%",
            format_duration(now - task.created_at),
            task.agent_name or "",
            task.title,
        ]
        for task in tasks
    ]
    columns = ["ID", "STATUS", "PRI", "TRIES", "PROGRESS", "AGE", "AGENT", "TITLE"]
    print_table(columns, rows, wide="TITLE")


async def _load_task(engine: "AnyEngine", name: str) -> "TaskView":
    """Returns the task with this id, or with an id that begins with `name`."""
    return await engine.show(await engine.find(name))


@command(
    "show", "orchestrate task show 0198c0de-5b1c", "orchestrate task show --id 0198c0de --json"
)
@task_id_options
@click.pass_obj
def show(options: GlobalOptions, task: str | None, named: str | None) -> None:
    """Show everything about a task: request, status, progress and result."""
    name = task_argument(task, named)
    print_view(options, call_engine(options, lambda engine: _load_task(engine, name)))


def print_view(options: GlobalOptions, view: "TaskView") -> None:
    """Prints all fields of a task; its history is in `task logs` and `task attempts`."""
    from tenuto.cli.render import print_fields, print_json

    if options.json:
        print_json(view)
        return
    print_fields([*_state_fields(view), *request_rows(view)])


def _state_fields(view: "TaskView") -> list[tuple[str, str | None]]:
    """Returns (label, text) of a task's status and progress; `None` or empty: no value."""
    from tenuto.cli.render import format_time

    percent = "" if view.progress_percent is None else f"{view.progress_percent}% "
    requested = [
        word
        for word, at in (
            ("cancel requested", view.cancel_requested_at),
            ("pause requested", view.pause_requested_at),
        )
        if at is not None and view.finished_at is None
    ]
    error = None if view.status == "COMPLETED" else view.last_error
    return [
        ("id", str(view.id)),
        ("title", view.title),
        ("status", ", ".join([view.status, *requested])),
        ("waiting for", view.waiting_for),
        ("progress", f"{percent}{view.current_step or ''}".rstrip()),
        ("tries", f"{view.tries} of {view.max_attempts} (attempt {view.attempt})"),
        ("agent", view.agent_name),
        ("worker", view.worker),
        ("not before", None if view.started_at else format_time(view.run_at)),
        (
            "next attempt",
            format_time(view.next_attempt_at) if view.status == "RETRY_WAIT" else None,
        ),
        ("started", format_time(view.started_at)),
        ("expected finish", format_time(view.estimated_completion_at)),
        ("finished", format_time(view.finished_at)),
        ("last error", error),
    ]


@command(
    "status",
    "orchestrate task status --id 0198c0de-5b1c --follow",
    "orchestrate task status 0198c0de-5b1c --json",
)
@task_id_options
@click.option(
    "--follow", is_flag=True, help="Show the task until it finishes; exit code 1 unless COMPLETED."
)
@click.pass_obj
def status(options: GlobalOptions, task: str | None, named: str | None, follow: bool) -> int:
    """Show a task's status and progress."""
    from tenuto.cli.render import print_fields, print_json

    name = task_argument(task, named)

    async def read(engine: "AnyEngine") -> "TaskView":
        if not follow:
            return await _load_task(engine, name)
        from tenuto.cli.tasks.follow import follow_task, open_view, silent_view

        task_id = await engine.find(name)
        with silent_view() if options.json else open_view() as display:
            return await follow_task(engine, task_id, display, output=False)

    view = call_engine(options, read)
    if options.json:
        print_json(view)
    else:
        print_fields(_state_fields(view))
    return 1 if follow and view.status != "COMPLETED" else 0


@command(
    "logs",
    "orchestrate task logs 0198c0de-5b1c --level WARN",
    "orchestrate task logs --id 0198c0de-5b1c --follow",
)
@task_id_options
@click.option("--level", default="DEBUG", help="Minimum level: DEBUG, INFO, WARN, ERROR, CRITICAL.")
@click.option("--limit", type=click.IntRange(1), metavar="N", help="Only the last N lines.")
@click.option("--follow", is_flag=True, help="Print new lines until the task finishes.")
@click.pass_obj
def logs(
    options: GlobalOptions,
    task: str | None,
    named: str | None,
    level: str,
    limit: int | None,
    follow: bool,
) -> None:
    """Print a task's audit trail and its attempts' output, by time."""
    from tenuto.cli.render import print_json
    from tenuto.cli.tasks.follow import format_log_line, level_filter
    from tenuto.client.follow import load_new_lines, poll_task

    name = task_argument(task, named)
    matches_level = level_filter(level)

    def show_lines(lines: "list[LogLine]") -> None:
        for line in lines:
            print(format_log_line(line), flush=True)

    async def collect_lines(engine: "AnyEngine") -> "list[LogLine]":
        task_id = await engine.find(name)
        if not follow:
            lines, _, _ = await load_new_lines(engine, task_id)
            return [line for line in lines if matches_level(line)]
        collected: list[LogLine] = []
        async for poll in poll_task(engine, task_id):
            new_lines = [line for line in poll.lines if matches_level(line)]
            if options.json:
                collected += new_lines
            else:
                show_lines(new_lines)
        return collected

    lines = call_engine(options, collect_lines)
    if limit is not None:
        lines = lines[-limit:]
    if options.json:
        print_json({"logs": lines})
    else:
        show_lines(lines)


@command(
    "attempts",
    "orchestrate task attempts 0198c0de-5b1c",
    "orchestrate task attempts 0198c0de-5b1c --json",
)
@task_id_options
@click.pass_obj
def attempts(options: GlobalOptions, task: str | None, named: str | None) -> None:
    """List a task's attempts: agent, times, outcome and error; --json adds the kill receipt."""
    from tenuto.cli.render import format_duration, format_time, print_json, print_table

    name = task_argument(task, named)

    async def read_attempts(engine: "AnyEngine") -> "Sequence[AttemptView]":
        return await engine.attempts(await engine.find(name))

    views = call_engine(options, read_attempts)
    if options.json:
        print_json({"attempts": views})
        return
    rows = [
        [
            str(attempt.attempt),
            attempt.outcome or "(running)",
            attempt.agent_name or "",
            format_time(attempt.started_at) or "",
            format_duration(attempt.ended_at - attempt.started_at)
            if attempt.started_at and attempt.ended_at
            else "",
            "" if attempt.exit_code is None else str(attempt.exit_code),
            attempt.error_class or "",
            attempt.message or "",
        ]
        for attempt in views
    ]
    columns = ["NO", "OUTCOME", "AGENT", "STARTED", "TOOK", "EXIT", "CLASS", "MESSAGE"]
    print_table(columns, rows, wide="MESSAGE", fold=True)


@command("explain", "orchestrate task explain 0198c0de-5b1c", "orchestrate explain 0198c0de-5b1c")
@task_id_options
@click.pass_obj
def explain(options: GlobalOptions, task: str | None, named: str | None) -> None:
    """Show why a task is not running: every gate, and for each agent why it cannot claim it."""
    from tenuto.cli.render import format_time, print_json
    from tenuto.model.printable import printable

    name = task_argument(task, named)

    async def explain_task(engine: "AnyEngine") -> "Explanation":
        return await engine.explain(await engine.find(name))

    explanation = call_engine(options, explain_task)
    if options.json:
        print_json(explanation)
        return
    print(printable(f"{explanation.status}: {explanation.summary}"))
    for gate in explanation.gates:
        clears = "" if gate.clears_at is None else f" (until {format_time(gate.clears_at)})"
        print(f"  {printable(gate.gate)}: {printable(gate.detail)}{clears}")
    if explanation.lane is not None:
        print(f"lane: {printable(explanation.lane)}")
    if explanation.agents:
        print("agents:")
    for agent, reasons in explanation.agents.items():
        print(f"  {printable(agent)}: {printable('; '.join(reasons) or 'may take it')}")
