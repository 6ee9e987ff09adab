"""The fields of a task on the command line: options to set and to filter by them, rows to show."""

import shlex
from collections.abc import Callable
from datetime import datetime
from typing import TYPE_CHECKING, Any, TypeVar
from uuid import UUID

import click

from tenuto.cli.parse import parse_time_or_age, time_before

if TYPE_CHECKING:
    from tenuto.engine.views import TaskView

F = TypeVar("F", bound=Callable[..., Any])


def request_options(function: F) -> F:
    """Adds options of `task create` and `run` for dependencies, next task, group and key."""
    options = (
        click.option(
            "--depends-on",
            multiple=True,
            metavar="ID",
            help="A task that must finish first; repeatable.",
        ),
        click.option(
            "--blocks",
            multiple=True,
            metavar="ID",
            help="A task that must wait for this one; repeatable.",
        ),
        click.option(
            "--on-dependency-failure",
            type=click.Choice(["fail", "skip", "run"]),
            help="What to do if a dependency fails; default: fail.",
        ),
        click.option("--next", metavar="KEY", help="Definition to run after this task succeeds."),
        click.option("--group", metavar="G", help="Running group to add the task to: id or key."),
        click.option("--key", metavar="KEY", help="Name by which other tasks refer to this one."),
    )
    for option in reversed(options):
        function = option(function)
    return function


def filter_options(function: F) -> F:
    """Adds the filter options for tasks; `build_filter` reads them."""
    options = (
        click.option(
            "--status", multiple=True, help="Filter by status; repeat for several (any matches)."
        ),
        click.option(
            "--tag", "tags", multiple=True, help="Filter by tag; repeat for several (all required)."
        ),
        click.option("--min-priority", type=click.IntRange(1, 10), help="Minimum priority."),
        click.option("--type", "task_type", help="Filter by task type."),
        click.option("--text", help="Filter by text in the title."),
        click.option(
            "--since",
            type=parse_time_or_age,
            metavar="TIME",
            help="Created since: 1h, 2d, or an ISO 8601 time.",
        ),
    )
    for option in reversed(options):
        function = option(function)
    return function


def has_filter(filters: dict[str, Any]) -> bool:
    """True if at least one filter option was given."""
    return any(value not in (None, ()) for value in filters.values())


def build_filter(now: datetime, filters: dict[str, Any]) -> Any:
    """Builds the engine's task filter from the filter options."""
    from tenuto.model import bounds
    from tenuto.model.tasks.submission import Filter

    if filters["task_type"] is not None:
        bounds.check_text("type", filters["task_type"], bounds.MAX_NAME)
    statuses = (status for text in filters["status"] for status in text.split(","))
    return Filter(
        **{**filters, "status": tuple(statuses), "since": time_before(now, filters["since"])}
    )


def request_rows(view: "TaskView") -> list[tuple[str, str | None]]:
    """Returns (label, text) of a task's request and result; `None` or empty: no value."""
    from tenuto.cli.render import format_json, format_time

    return [
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
        ("flow", _id_text(view.flow)),
        ("group", _id_text(view.group_id)),
        ("depends on", ", ".join(str(task) for task in view.depends_on)),
        ("concurrency", _format_concurrency(view)),
        ("budget", _format_budget(view)),
        ("used", _format_usage(view)),
        ("next", view.next),
        ("complexity", view.complexity),
        ("parent", _id_text(view.parent)),
        ("rerun of", _id_text(view.rerun_of)),
        ("created", format_time(view.created_at)),
        ("created by", view.created_by),
        ("archived", format_time(view.archived_at)),
        ("timeout", None if view.timeout_s is None else f"{view.timeout_s}s"),
        ("estimate", None if view.estimate_minutes is None else f"{view.estimate_minutes}min"),
        ("idempotency key", view.idempotency_key),
        ("description", view.description),
        ("command", None if view.command is None else shlex.join(view.command)),
        ("system prompt", view.system_prompt),
        ("prompt", view.prompt),
        ("input", format_json(view.input)),
        ("metadata", format_json(view.metadata)),
        ("checkpoint", format_json(view.checkpoint)),
        ("summary", view.summary),
        ("output", format_json(view.output)),
    ]


def _id_text(value: UUID | None) -> str | None:
    return None if value is None else str(value)


def _format_concurrency(view: "TaskView") -> str | None:
    """Formats the key with limit and policy; `None` if the task has no concurrency key."""
    concurrency = view.concurrency
    if concurrency is None:
        return None
    return f"{concurrency['key']} (limit {concurrency['limit']}, {concurrency['policy']})"


def _format_budget(view: "TaskView") -> str | None:
    """Formats the budget's tokens and dollars; `None` if the task has no budget."""
    budget = view.budget or {}
    parts = [] if budget.get("tokens") is None else [f"{budget['tokens']:,} tokens"]
    parts += [] if budget.get("costUsd") is None else [f"${budget['costUsd']:,.4f}"]
    return ", ".join(parts) or None


def _format_usage(view: "TaskView") -> str | None:
    """Formats the tokens and cost used so far; `None` if nothing was used."""
    if not (view.input_tokens or view.output_tokens or view.cost_usd):
        return None
    tokens = f"{view.input_tokens:,} tokens in, {view.output_tokens:,} out"
    return f"{tokens}, ${view.cost_usd:,.4f}"
