"""`orchestrate task list`, `show`, `status`, `logs`, `attempts`, `explain`: what only looks."""

import shlex
from typing import TYPE_CHECKING, Any
from uuid import UUID

import click

from tenuto.cli.base import Globals, command, one_task, task_argument
from tenuto.cli.connection import call
from tenuto.cli.parse import filter_options, read_filter

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
@click.option("--limit", type=int, default=50, show_default=True, help="At most so many.")
@click.option("--cursor", type=click.UUID, metavar="ID", help="Only older than this task.")
@click.pass_obj
def list_(given: Globals, /, limit: int, cursor: UUID | None, **chosen: Any) -> None:
    """List tasks, newest first."""

    async def read(engine: "AnyEngine") -> "tuple[Page, datetime]":
        now = engine.clock.now()
        return await engine.list(read_filter(now, chosen), limit, cursor), now

    tell_tasks(given, *call(given, read))


def tell_tasks(given: Globals, page: "Page", now: "datetime") -> None:
    """Print a page of tasks, and how to see the next one."""
    from tenuto.cli.output import tell_more
    from tenuto.cli.render import print_json

    if given.json:
        print_json(page)
        return
    print_tasks(page.tasks, now)
    tell_more(page.next_cursor)


def print_tasks(tasks: "Sequence[TaskSummary]", now: "datetime") -> None:
    from tenuto.cli.render import print_table, span

    rows = [
        [
            str(task.id),
            str(task.status),
            str(task.priority),
            f"{task.tries}/{task.max_attempts}",
            "" if task.progress_percent is None else f"{task.progress_percent}%",
            span(now - task.created_at),
            task.agent_name or "",
            task.title,
        ]
        for task in tasks
    ]
    columns = ["ID", "STATUS", "PRI", "TRIES", "DONE", "AGE", "AGENT", "TITLE"]
    print_table(columns, rows, wide="TITLE")


async def _found(engine: "AnyEngine", name: str) -> "TaskView":
    return await engine.show(await engine.find(name))


@command(
    "show", "orchestrate task show 0198c0de-5b1c", "orchestrate task show --id 0198c0de --json"
)
@one_task
@click.pass_obj
def show(given: Globals, task: str | None, named: str | None) -> None:
    """Show everything about a task: what was asked, how it goes, its result."""
    name = task_argument(task, named)
    print_view(given, call(given, lambda engine: _found(engine, name)))


def print_view(given: Globals, view: "TaskView") -> None:
    """Print a task with everything about it but its history."""
    from tenuto.cli.render import json_line, moment, print_fields, print_json

    if given.json:
        print_json(view)
        return
    print_fields(
        [
            *_state(view),
            ("type", view.task_type),
            ("priority", str(view.priority)),
            ("tags", ", ".join(view.tags)),
            ("needs tags", ", ".join(view.task_tags)),
            ("needs capabilities", ", ".join(view.capabilities)),
            ("needs agent type", view.agent_type),
            ("runtime", view.runtime),
            ("model", view.model),
            ("folder", view.cwd),
            ("key", view.key),
            ("kind", None if view.kind == "agent" else view.kind),
            ("flow", _text(view.flow)),
            ("group", _text(view.group_id)),
            ("depends on", ", ".join(str(each) for each in view.depends_on)),
            ("concurrency", _concurrency(view)),
            ("budget", _budget(view)),
            ("used", _used(view)),
            ("next", view.next),
            ("complexity", view.complexity),
            ("parent", _text(view.parent)),
            ("rerun of", _text(view.rerun_of)),
            ("created", moment(view.created_at)),
            ("created by", view.created_by),
            ("archived", moment(view.archived_at)),
            ("timeout", None if view.timeout_s is None else f"{view.timeout_s}s"),
            ("estimate", None if view.estimate_minutes is None else f"{view.estimate_minutes}min"),
            ("idempotency key", view.idempotency_key),
            ("description", view.description),
            ("command", None if view.command is None else shlex.join(view.command)),
            ("system prompt", view.system_prompt),
            ("prompt", view.prompt),
            ("input", json_line(view.input)),
            ("metadata", json_line(view.metadata)),
            ("checkpoint", json_line(view.checkpoint)),
            ("summary", view.summary),
            ("output", json_line(view.output)),
        ]
    )


def _text(value: UUID | None) -> str | None:
    return None if value is None else str(value)


def _concurrency(view: "TaskView") -> str | None:
    wish = view.concurrency
    if wish is None:
        return None
    return f"{wish['key']} (limit {wish['limit']}, {wish['policy']})"


def _budget(view: "TaskView") -> str | None:
    said = view.budget or {}
    parts = [] if said.get("tokens") is None else [f"{said['tokens']:,} tokens"]
    parts += [] if said.get("costUsd") is None else [f"${said['costUsd']:,.4f}"]
    return ", ".join(parts) or None


def _used(view: "TaskView") -> str | None:
    if not (view.input_tokens or view.output_tokens or view.cost_usd):
        return None
    tokens = f"{view.input_tokens:,} tokens in, {view.output_tokens:,} out"
    return f"{tokens}, ${view.cost_usd:,.4f}"


def _state(view: "TaskView") -> list[tuple[str, str | None]]:
    from tenuto.cli.render import moment

    percent = "" if view.progress_percent is None else f"{view.progress_percent}% "
    asked = [
        word
        for word, at in (
            ("cancel requested", view.cancel_requested_at),
            ("pause requested", view.pause_requested_at),
        )
        if at is not None and view.finished_at is None
    ]
    failed = None if view.status == "COMPLETED" else view.last_error
    return [
        ("id", str(view.id)),
        ("title", view.title),
        ("status", ", ".join([view.status, *asked])),
        ("waiting for", view.waiting_for),
        ("progress", f"{percent}{view.current_step or ''}".rstrip()),
        ("tries", f"{view.tries} of {view.max_attempts} (attempt {view.attempt})"),
        ("agent", view.agent_name),
        ("worker", view.worker),
        ("not before", None if view.started_at else moment(view.run_at)),
        ("next attempt", moment(view.next_attempt_at) if view.status == "RETRY_WAIT" else None),
        ("started", moment(view.started_at)),
        ("expected end", moment(view.estimated_completion_at)),
        ("finished", moment(view.finished_at)),
        ("last error", failed),
    ]


@command(
    "status",
    "orchestrate task status --id 0198c0de-5b1c --follow",
    "orchestrate task status 0198c0de-5b1c --json",
)
@one_task
@click.option("--follow", is_flag=True, help="Watch it to its end; exit code 1 unless COMPLETED.")
@click.pass_obj
def status(given: Globals, task: str | None, named: str | None, follow: bool) -> int:
    """Show how a task is doing."""
    from tenuto.cli.render import print_fields, print_json

    name = task_argument(task, named)

    async def read(engine: "AnyEngine") -> "TaskView":
        if not follow:
            return await _found(engine, name)
        from tenuto.cli.tasks.follow import quiet, screen, watch

        found = await engine.find(name)
        with quiet() if given.json else screen() as shown:
            return await watch(engine, found, shown, output=False)

    view = call(given, read)
    if given.json:
        print_json(view)
    else:
        print_fields(_state(view))
    return 1 if follow and view.status != "COMPLETED" else 0


@command(
    "logs",
    "orchestrate task logs 0198c0de-5b1c --level WARN",
    "orchestrate task logs --id 0198c0de-5b1c --follow",
)
@one_task
@click.option("--level", default="DEBUG", help="Only this grave: DEBUG INFO WARN ERROR CRITICAL.")
@click.option("--limit", type=click.IntRange(1), metavar="N", help="Only the last so many lines.")
@click.option("--follow", is_flag=True, help="Go on until the task has ended.")
@click.pass_obj
def logs(
    given: Globals,
    task: str | None,
    named: str | None,
    level: str,
    limit: int | None,
    follow: bool,
) -> None:
    """Print a task's audit trail and what its attempts printed, by time."""
    from tenuto.cli.render import print_json
    from tenuto.cli.tasks.follow import at_least, log_text
    from tenuto.client.follow import history, poll_task

    name = task_argument(task, named)
    wanted = at_least(level)

    def show_lines(lines: "list[LogLine]") -> None:
        for line in lines:
            print(log_text(line), flush=True)

    async def read(engine: "AnyEngine") -> "list[LogLine]":
        found = await engine.find(name)
        if not follow:
            lines, _, _ = await history(engine, found)
            return [line for line in lines if wanted(line)]
        kept: list[LogLine] = []
        async for look in poll_task(engine, found):
            fresh = [line for line in look.lines if wanted(line)]
            if given.json:
                kept += fresh
            else:
                show_lines(fresh)
        return kept

    lines = call(given, read)
    if limit is not None:
        lines = lines[-limit:]
    if given.json:
        print_json({"logs": lines})
    else:
        show_lines(lines)


@command(
    "attempts",
    "orchestrate task attempts 0198c0de-5b1c",
    "orchestrate task attempts 0198c0de-5b1c --json",
)
@one_task
@click.pass_obj
def attempts(given: Globals, task: str | None, named: str | None) -> None:
    """List the tries at a task: who, when, how they ended and what was killed."""
    from tenuto.cli.render import moment, print_json, print_table, span

    name = task_argument(task, named)

    async def read(engine: "AnyEngine") -> "Sequence[AttemptView]":
        return await engine.attempts(await engine.find(name))

    found = call(given, read)
    if given.json:
        print_json({"attempts": found})
        return
    rows = [
        [
            str(each.attempt),
            each.outcome or "(running)",
            each.agent_name or "",
            moment(each.started_at) or "",
            span(each.ended_at - each.started_at) if each.started_at and each.ended_at else "",
            "" if each.exit_code is None else str(each.exit_code),
            each.error_class or "",
            each.message or "",
        ]
        for each in found
    ]
    columns = ["NO", "OUTCOME", "AGENT", "STARTED", "TOOK", "EXIT", "CLASS", "MESSAGE"]
    print_table(columns, rows, wide="MESSAGE", fold=True)


@command("explain", "orchestrate task explain 0198c0de-5b1c", "orchestrate explain 0198c0de-5b1c")
@one_task
@click.pass_obj
def explain(given: Globals, task: str | None, named: str | None) -> None:
    """Say why a task is not running: every gate, and for each agent what keeps it away."""
    from tenuto.cli.render import moment, print_json
    from tenuto.model.printable import printable

    name = task_argument(task, named)

    async def read(engine: "AnyEngine") -> "Explanation":
        return await engine.explain(await engine.find(name))

    found = call(given, read)
    if given.json:
        print_json(found)
        return
    print(printable(f"{found.status}: {found.summary}"))
    for gate in found.gates:
        clears = "" if gate.clears_at is None else f" (until {moment(gate.clears_at)})"
        print(f"  {printable(gate.gate)}: {printable(gate.detail)}{clears}")
    if found.lane is not None:
        print(f"lane: {printable(found.lane)}")
    if found.agents:
        print("agents:")
    for agent, reasons in found.agents.items():
        print(f"  {printable(agent)}: {printable('; '.join(reasons) or 'may take it')}")
