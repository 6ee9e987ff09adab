"""`orchestrate task cancel`, `retry`, `pause`, ...: changes tasks by id or by filter."""

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from tenuto.cli.base import Command, GlobalOptions, command, task_argument, task_id_options
from tenuto.cli.connection import call_client, call_engine
from tenuto.cli.parse import read_json
from tenuto.cli.tasks.create import print_submitted
from tenuto.cli.tasks.fields import build_filter, filter_options, has_filter

if TYPE_CHECKING:
    from uuid import UUID

    from tenuto.client.client import AsyncClient
    from tenuto.client.remote.engine import AnyEngine
    from tenuto.engine.tasks.control import Action, ActionResult
    from tenuto.engine.tasks.submit import Submitted
    from tenuto.engine.views import TaskView
    from tenuto.model.tasks.submission import Filter

NO_CONFIRMATION = "do not ask for confirmation (never asked if stdin is not a terminal)."
PAST_TENSE = {
    "cancel": "cancelled",
    "retry": "retried",
    "pause": "paused",
    "resume": "resumed",
    "archive": "archived",
    "requeue": "requeued",
    "purge": "purged",
}


def _action_command(action: "Action", text: str, *examples: str) -> Command:
    """Returns the command of an action on one task, or on all tasks that match a filter."""

    def perform(
        options: GlobalOptions,
        task: str | None,
        named: str | None,
        dry_run: bool,
        yes: bool,
        limit: int,
        reason: str | None = None,
        cascade: bool = False,
        **filters: Any,
    ) -> int:
        arguments: dict[str, Any] = {}
        if action in ("cancel", "pause"):
            arguments["reason"] = reason
        if cascade:
            arguments["cascade"] = True
        if not has_filter(filters):
            return _act_on_one(
                options, action, task_argument(task, named), arguments, dry_run=dry_run
            )
        if cascade:
            raise click.UsageError("--cascade requires a task id; it cannot be used with a filter")
        if task is not None or named is not None:
            raise click.UsageError("give either a task id or a filter, not both")
        return _act_on_matching(options, action, filters, reason, limit, dry_run=dry_run, yes=yes)

    decorators: list[Callable[[Any], Any]] = [
        task_id_options,
        filter_options,
        click.option(
            "--limit",
            type=click.IntRange(1, 10_000),
            default=1000,
            show_default=True,
            help="With a filter: maximum number of tasks.",
        ),
        click.option("--dry-run", is_flag=True, help="Change nothing; print the matching tasks."),
        click.option("--yes", is_flag=True, help=f"With a filter: {NO_CONFIRMATION}"),
        click.pass_obj,
    ]
    if action in ("cancel", "pause"):
        decorators.insert(
            1, click.option("--reason", metavar="TEXT", help="Reason for the audit trail.")
        )
    if action == "retry":
        cascade_help = "With a task id: also retry tasks that failed or were skipped because of it."
        decorators.insert(1, click.option("--cascade", is_flag=True, help=cascade_help))
    function: Any = perform
    for option in reversed(decorators):
        function = option(function)
    return command(action, *examples, help=text)(function)


def _act_on_one(
    options: GlobalOptions, action: "Action", name: str, arguments: dict[str, Any], *, dry_run: bool
) -> int:
    """Applies the action to one task, unless `dry_run`, and prints the task; returns 0."""
    from tenuto.cli.render import print_json
    from tenuto.model.printable import printable

    async def act(engine: "AnyEngine") -> "TaskView":
        task = await engine.find(name)
        if not dry_run:
            await getattr(engine, action)(task, **arguments)
        return await engine.show(task)

    view = call_engine(options, act)
    if options.json:
        print_json(view)
    else:
        print(printable(f"{view.id} {describe_state(view)}"))
    return 0


def describe_state(view: "TaskView") -> str:
    """Returns a task's status, with `archived` or a pending cancel or pause request."""
    if view.finished_at is not None:
        return f"{view.status}, archived" if view.archived_at is not None else view.status
    if view.cancel_requested_at is not None:
        return f"{view.status}, cancel requested"
    if view.pause_requested_at is not None:
        return f"{view.status}, pause requested"
    return view.status


def _applicable_statuses(action: "Action") -> tuple[str, ...]:
    """Returns the statuses from which the action is allowed."""
    from tenuto.model.tasks.task import TERMINAL, TRANSITIONS

    if action == "archive":
        return tuple(sorted(TERMINAL))
    return tuple(sorted({source for source, _ in TRANSITIONS[action]}))


def _act_on_matching(
    options: GlobalOptions,
    action: "Action",
    filters: dict[str, Any],
    reason: str | None,
    limit: int,
    *,
    dry_run: bool,
    yes: bool,
) -> int:
    """Asks on a terminal, then applies the action to matching tasks; returns 1 if one was refused.

    Otherwise returns 0. Without a status in `filters`, only tasks in statuses that allow the action
    match. `dry_run` only prints the tasks.
    """
    filters["status"] = filters["status"] or _applicable_statuses(action)
    needs_confirmation = should_confirm(yes=yes)

    async def act(engine: "AnyEngine", *, preview: bool) -> "ActionResult":
        task_filter: Filter = build_filter(engine.clock.now(), filters)
        return await engine.act(action, task_filter, reason=reason, limit=limit, dry_run=preview)

    result = None
    if dry_run or needs_confirmation:
        result = call_engine(options, lambda engine: act(engine, preview=True))
        if result.done and not dry_run:
            confirm(f"{action} {format_task_count(len(result.done))}?")
            result = None
    if result is None:
        result = call_engine(options, lambda engine: act(engine, preview=False))
    print_result(options, action, result, dry_run=dry_run)
    if len(result.done) + len(result.refused) == limit and not options.json:
        click.echo(
            f"stopped at the limit of {format_task_count(limit)}; there may be more", err=True
        )
    return 1 if result.refused else 0


def should_confirm(*, yes: bool) -> bool:
    """True if standard input is a terminal and `--yes` was not given."""
    return not yes and sys.stdin is not None and sys.stdin.isatty()


def confirm(question: str) -> None:
    """Asks a yes/no question; exits with code 1 unless the answer is yes."""
    if not click.confirm(question, err=True):
        raise click.exceptions.Exit(1)


def print_result(
    options: GlobalOptions, action: str, result: "ActionResult", *, dry_run: bool
) -> None:
    """Prints the tasks that an action changed or would change, and why others were refused."""
    from tenuto.cli.render import print_json
    from tenuto.model.printable import printable

    if options.json:
        print_json({"done": result.done, "refused": result.refused, "dryRun": dry_run})
        return
    for task in result.done:
        print(task)
    for task_id, reason in result.refused.items():
        click.echo(printable(f"refused {task_id}: {reason}"), err=True)
    verb = f"would {action}" if dry_run else PAST_TENSE[action]
    click.echo(f"{verb} {format_task_count(len(result.done))}", err=True)


def format_task_count(count: int) -> str:
    return "1 task" if count == 1 else f"{count:,} tasks"


cancel = _action_command(
    "cancel",
    "Cancel a task, or all tasks that match a filter.\n\nThe processes of a running task are killed"
    " first; `task attempts --json` shows the receipt.",
    'orchestrate task cancel 0198c0de-5b1c --reason "wrong branch"',
    "orchestrate task cancel --tag nightly --since 1h --dry-run",
)
retry = _action_command(
    "retry",
    "Retry a finished task, or all that match a filter, with all tries again.",
    "orchestrate task retry 0198c0de-5b1c",
    "orchestrate task retry --status DEAD --tag nightly --since 1h --yes",
)
pause = _action_command(
    "pause",
    "Pause a task, or all tasks that match a filter.\n\nA running task is stopped after a last"
    " checkpoint; its try is not counted.",
    "orchestrate task pause 0198c0de-5b1c",
    "orchestrate task pause --status PENDING --type import",
)
resume = _action_command(
    "resume",
    "Resume a paused task, or all that match a filter.",
    "orchestrate task resume 0198c0de-5b1c",
    "orchestrate task resume --tag nightly",
)
archive = _action_command(
    "archive",
    "Archive a finished task, or all that match a filter.",
    "orchestrate task archive 0198c0de-5b1c",
    "orchestrate task archive --status COMPLETED --text report",
)


@command(
    "update",
    "orchestrate task update 0198c0de-5b1c --priority 9",
    'orchestrate task update 0198c0de-5b1c --name "Nightly report" --tag report --tag nightly',
)
@task_id_options
@click.option("--priority", type=int, metavar="N", help="1 (low) to 10 (urgent).")
@click.option("--name", "title", metavar="TITLE", help="Title of the task.")
@click.option("--description", metavar="TEXT", help="Text for people; agents do not get it.")
@click.option("--tag", "tags", multiple=True, help="New list of labels; repeatable.")
@click.option("--metadata", metavar="JSON|@FILE", help="A JSON object that replaces the old one.")
@click.pass_obj
def update(
    options: GlobalOptions,
    /,
    task: str | None,
    named: str | None,
    tags: tuple[str, ...],
    metadata: str | None,
    **fields: Any,
) -> None:
    """Change a task's priority, name, description, tags or metadata.

    The priority decides its position in the queue.
    """
    from tenuto.cli.render import print_json
    from tenuto.engine.tasks.edit import TaskChanges

    name = task_argument(task, named)
    changes = {key: value for key, value in fields.items() if value is not None}
    if tags:
        changes["tags"] = tags
    if metadata is not None:
        changes["metadata"] = _parse_object(metadata)
    if not changes:
        raise click.UsageError("no change given; --help lists the options")

    async def apply_changes(engine: "AnyEngine") -> "TaskView":
        task_id = await engine.find(name)
        await engine.edit(task_id, TaskChanges(**changes))
        return await engine.show(task_id)

    view = call_engine(options, apply_changes)
    if options.json:
        print_json(view)
    else:
        print(f"{view.id} priority {view.priority}")


def _parse_object(text: str) -> dict[str, Any]:
    """Parses the JSON object of `--metadata`; raises `UsageError` for another value."""
    value = read_json("metadata", text)
    if not isinstance(value, dict):
        raise click.UsageError("--metadata must be a JSON object")
    return value


@command("delete", "orchestrate task delete 0198c0de-5b1c --yes")
@task_id_options
@click.option("--yes", is_flag=True, help=NO_CONFIRMATION.capitalize())
@click.pass_obj
def delete(options: GlobalOptions, task: str | None, named: str | None, yes: bool) -> None:
    """Delete a finished task's prompt, input, output and log. Its audit trail stays."""
    from tenuto.cli.output import print_done

    name = task_argument(task, named)
    if should_confirm(yes=yes):
        confirm(f"delete prompt, input, output and log of task {name}?")

    async def delete_task(engine: "AnyEngine") -> "UUID":
        task_id = await engine.find(name)
        await engine.erase(task_id)
        return task_id

    deleted = call_engine(options, delete_task)
    print_done(options, f"{deleted} deleted", id=deleted)


@command("start", "orchestrate task start 0198c0de-5b1c")
@task_id_options
@click.pass_obj
def start(options: GlobalOptions, task: str | None, named: str | None) -> None:
    """Start a task before its planned time."""
    from tenuto.cli.output import print_done

    name = task_argument(task, named)

    async def start_task(engine: "AnyEngine") -> "UUID":
        task_id = await engine.find(name)
        await engine.start(task_id)
        return task_id

    started = call_engine(options, start_task)
    print_done(options, f"{started} pending", id=started)


def _assign_command(name: str, text: str, *, take: bool) -> click.Command:
    """Returns the command `assign`, or with `take`, `reassign`."""

    @task_id_options
    @click.option("--agent", metavar="AGENT", help="Agent name or id; any agent if not given.")
    @click.pass_obj
    def perform(
        options: GlobalOptions, task: str | None, named: str | None, agent: str | None
    ) -> None:
        from tenuto.cli.output import print_done

        task_name = task_argument(task, named)

        async def assign_task(client: "AsyncClient") -> "TaskView":
            agent_id = None if agent is None else (await client.agents.get(agent)).id
            return await client.tasks.assign(task_name, agent_id, take=take)

        view = call_client(options, assign_task)
        print_done(options, f"{view.id} assigned to {agent or 'any agent'}", id=view.id)

    return command(name, f"orchestrate task {name} 0198c0de-5b1c --agent dev-1", help=text)(perform)


assign = _assign_command(
    "assign", "Reserve a task for one agent; the task must not be running.", take=False
)
reassign = _assign_command(
    "reassign",
    "Reserve a task for one agent, even while it is running.\n\nThe running attempt loses its"
    " lease: its session is stopped and its reports are refused.",
    take=True,
)


@command("rerun", "orchestrate task rerun 0198c0de-5b1c")
@task_id_options
@click.pass_obj
def rerun(options: GlobalOptions, task: str | None, named: str | None) -> None:
    """Submit a copy of a task as a new task and print its id."""
    name = task_argument(task, named)

    async def submit_again(engine: "AnyEngine") -> "Submitted":
        return await engine.rerun(await engine.find(name))

    print_submitted(options, call_engine(options, submit_again))
