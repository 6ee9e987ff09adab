"""`orchestrate pause`, `resume` and `limit`: pauses and rate limits of claims."""

from typing import TYPE_CHECKING, Any

import click

from tenuto.cli.base import GlobalOptions, add_options, command, group
from tenuto.cli.connection import call_client
from tenuto.cli.output import Columns, columns, parse_future_time, print_done, print_list
from tenuto.cli.shared_commands import Resource, print_result

if TYPE_CHECKING:
    from tenuto.model.limits.pauses import PauseKind

_PAUSE_COLUMNS = columns("KIND, SUBJECT, UNTIL, BY: created_by, SINCE: created_at, REASON")
_LIMIT_COLUMNS: Columns = {
    **columns("NAME, PROVIDER, MODEL, ACCOUNT"),
    "REQUESTS": lambda limit: _format_share(limit.requests_left, limit.requests_per_minute),
    "TOKENS": lambda limit: _format_share(limit.tokens_left, limit.tokens_per_minute),
    **columns("NEXT: next_at"),
}
_LIMIT_FIELDS = {name.lower(): show for name, show in _LIMIT_COLUMNS.items()}
_LIMITS = Resource("limit", lambda client: client.rate_limits, _LIMIT_FIELDS, "claude")


def _format_share(remaining: int | None, maximum: int | None) -> str:
    """Formats `REMAINING of MAXIMUM`; empty if there is no maximum."""
    return "" if maximum is None else f"{remaining:,} of {maximum:,}"


_subject_options = add_options(
    click.option("--lane", metavar="N", help="A lane by its id, as `explain` shows it."),
    click.option("--agent", metavar="NAME", help="An agent."),
    click.option("--type", "task_type", metavar="T", help="A task type, also for new tasks."),
    click.option(
        "--workspace",
        "everything",
        is_flag=True,
        help="The whole workspace. For another one, give its id before the command's name.",
    ),
)
"""Adds the options that name what to pause; `_subject_from_options` reads them."""


def _subject_from_options(values: dict[str, Any]) -> "tuple[PauseKind, str] | None":
    """Removes the subject options from `values`; returns (kind, subject), or `None` without any.

    Raises `UsageError` if there are several.
    """
    from tenuto.model.limits.pauses import WORKSPACE_SUBJECT

    lane, agent = values.pop("lane"), values.pop("agent")
    task_type, everything = values.pop("task_type"), values.pop("everything")
    subjects: list[tuple[PauseKind, str]] = []
    if lane is not None:
        subjects.append(("lane", lane))
    if agent is not None:
        subjects.append(("agent", agent))
    if task_type is not None:
        subjects.append(("type", task_type))
    if everything:
        subjects.append(("workspace", WORKSPACE_SUBJECT))
    if len(subjects) > 1:
        raise click.UsageError("give exactly one of --lane, --agent, --type and --workspace")
    return subjects[0] if subjects else None


@command(
    "pause",
    "orchestrate pause --type deploy --reason 'release freeze' --until +2h",
    "orchestrate pause --agent claude-1",
    "orchestrate pause --workspace",
    "orchestrate pause",
)
@_subject_options
@click.option("--reason", metavar="TEXT", help="Reason, shown in lists and by explain.")
@click.option("--until", metavar="TIME", help="End of the pause: +2h, or 2026-01-31T09:00.")
@click.pass_obj
def pause(options: GlobalOptions, /, reason: str | None, until: str | None, **values: Any) -> None:
    """Stop new tasks from starting, by lane, agent, task type or workspace.

    No worker claims such tasks until `resume`. Running tasks continue; `task pause` stops a task.
    Without an option that names a subject, all pauses are listed.
    """
    subject = _subject_from_options(values)
    if subject is None:
        if reason is not None or until is not None:
            raise click.UsageError("give exactly one of --lane, --agent, --type and --workspace")
        pauses = call_client(options, lambda client: client.gates.list())
        print_list(options, "gates", pauses, _PAUSE_COLUMNS, wide="REASON")
        return
    until_at = None if until is None else parse_future_time(until)
    fields = {name.lower(): show for name, show in _PAUSE_COLUMNS.items()}
    print_result(options, lambda client: client.gates.close(*subject, reason, until_at), fields)


@command(
    "resume",
    "orchestrate resume --type deploy",
    "orchestrate resume --agent claude-1",
    "orchestrate resume --workspace",
)
@_subject_options
@click.pass_obj
def resume(options: GlobalOptions, /, **values: Any) -> None:
    """End a pause, so that its tasks can start again."""
    subject = _subject_from_options(values)
    if subject is None:
        raise click.UsageError("give exactly one of --lane, --agent, --type and --workspace")
    call_client(options, lambda client: client.gates.open(*subject))
    print_done(options, f"resumed {' '.join(subject)}", kind=subject[0], subject=subject[1])


@group(
    "limit",
    "orchestrate limit list",
    "orchestrate limit set claude --provider anthropic --requests-per-minute 50",
)
def limit() -> None:
    """Limit requests and tokens per minute, over all workers."""


@command(
    "set",
    "orchestrate limit set claude --provider anthropic --requests-per-minute 50",
    "orchestrate limit set opus --provider anthropic --model claude-opus --account team-a"
    " --requests-per-minute 10 --tokens-per-minute 200000",
)
@click.argument("name")
@click.option(
    "--provider", metavar="P", help="Provider: the part of a model name before the slash."
)
@click.option("--model", metavar="M", help="One model; default: any.")
@click.option("--account", metavar="A", help="Agents of one account; default: any.")
@click.option(
    "--requests-per-minute",
    type=click.IntRange(1),
    metavar="N",
    help="Claims within any 60 seconds.",
)
@click.option(
    "--tokens-per-minute", type=click.IntRange(1), metavar="N", help="Tokens that attempts report."
)
@click.pass_obj
def set_(options: GlobalOptions, /, name: str, **fields: Any) -> None:
    """Create a limit, or replace the limit of the same name.

    The claim of a task counts as one request. The model is the task's; if it has none, the
    agent's.
    """
    from tenuto.model.limits.rate_limits import RateLimit

    rate_limit = RateLimit(name=name, **fields)
    print_result(options, lambda client: client.rate_limits.put(rate_limit), _LIMIT_FIELDS)


limit.add_commands(
    set_,
    _LIMITS.list_command(
        "List the limits and how much of each is left now.",
        "rateLimits",
        _LIMIT_COLUMNS,
        wide="NAME",
    ),
    _LIMITS.delete_command("Delete a limit.", json_name="name"),
)
