"""`orchestrate dlq`: dead-letter tasks, which used up their tries."""

from typing import TYPE_CHECKING

import click

from tenuto.cli.base import (
    GlobalOptions,
    command,
    cursor_option,
    group,
    limit_option,
    task_argument,
    task_id_options,
)
from tenuto.cli.connection import call_engine
from tenuto.cli.tasks.control import (
    NO_CONFIRMATION,
    confirm,
    describe_state,
    format_task_count,
    print_result,
    should_confirm,
)
from tenuto.cli.tasks.read import print_task_page, print_view

if TYPE_CHECKING:
    from datetime import datetime
    from uuid import UUID

    from tenuto.client.remote.engine import AnyEngine
    from tenuto.engine.tasks.control import Action, ActionResult
    from tenuto.engine.views import Page, TaskSummary, TaskView

PAGE_SIZE = 500
MAX_TASKS = 10_000


@group(
    "dlq", "orchestrate dlq list", "orchestrate dlq requeue --all", "orchestrate dlq purge --yes"
)
def dlq() -> None:
    """List, requeue or purge dead-letter tasks: all tries used up (status DEAD)."""


async def _list_dead(engine: "AnyEngine", limit: int, cursor: "UUID | None" = None) -> "Page":
    """Returns up to `limit` dead tasks that are not archived, newest first."""
    from tenuto.engine.views import Page
    from tenuto.model.tasks.submission import Filter

    dead: list[TaskSummary] = []
    while True:
        page = await engine.list(Filter(status=("DEAD",)), PAGE_SIZE, cursor)
        dead += [task for task in page.tasks if task.archived_at is None]
        cursor = page.next_cursor
        if len(dead) > limit:
            return Page(dead[:limit], dead[limit - 1].id)
        if cursor is None:
            return Page(dead)


async def _require_dead(engine: "AnyEngine", name: str) -> "TaskView":
    """Returns the task; raises `Conflict` if it is not DEAD."""
    from tenuto.model.errors import Conflict

    view = await engine.show(await engine.find(name))
    if view.status != "DEAD":
        raise Conflict(
            f'task {view.id} is {view.status}, not DEAD; "orchestrate dlq list" shows dead tasks'
        )
    return view


@command("list", "orchestrate dlq list --limit 20")
@limit_option(maximum=MAX_TASKS)
@cursor_option("tasks")
@click.pass_obj
def list_(options: GlobalOptions, limit: int, cursor: "UUID | None") -> None:
    """List dead tasks, newest first."""

    async def read_page(engine: "AnyEngine") -> "tuple[Page, datetime]":
        return await _list_dead(engine, limit, cursor), engine.clock.now()

    print_task_page(options, *call_engine(options, read_page))


@command("show", "orchestrate dlq show 0198c0de-5b1c")
@task_id_options
@click.pass_obj
def show(options: GlobalOptions, task: str | None, named: str | None) -> None:
    """Show everything about a dead task."""
    name = task_argument(task, named)
    print_view(options, call_engine(options, lambda engine: _require_dead(engine, name)))


@command("requeue", "orchestrate dlq requeue 0198c0de-5b1c", "orchestrate dlq requeue --all --yes")
@task_id_options
@click.option("--all", "every", is_flag=True, help="All dead tasks.")
@click.option("--yes", is_flag=True, help=f"With --all: {NO_CONFIRMATION}")
@click.pass_obj
def requeue(
    options: GlobalOptions, task: str | None, named: str | None, every: bool, yes: bool
) -> int:
    """Requeue a dead task, or all of them, with all tries again."""
    from tenuto.cli.render import print_json
    from tenuto.model.printable import printable

    if every:
        if task is not None or named is not None:
            raise click.UsageError("give either a task id or --all, not both")
        return _act_on_all_dead(options, "retry", "requeue", yes=yes)
    name = task_argument(task, named)

    async def retry_task(engine: "AnyEngine") -> "TaskView":
        task_id = (await _require_dead(engine, name)).id
        await engine.retry(task_id)
        return await engine.show(task_id)

    view = call_engine(options, retry_task)
    if options.json:
        print_json(view)
    else:
        print(printable(f"{view.id} {describe_state(view)}"))
    return 0


@command("purge", "orchestrate dlq purge --yes")
@click.option("--yes", is_flag=True, help=NO_CONFIRMATION.capitalize())
@click.pass_obj
def purge(options: GlobalOptions, yes: bool) -> int:
    """Archive all dead tasks: they keep their status and are no longer listed here."""
    return _act_on_all_dead(options, "archive", "purge", yes=yes)


def _act_on_all_dead(options: GlobalOptions, action: "Action", verb: str, *, yes: bool) -> int:
    """Asks on a terminal, then applies an action to dead tasks; returns 1 if one is refused.

    Archived tasks, and those beyond the newest `MAX_TASKS`, are left out.
    """
    dead = call_engine(options, lambda engine: _list_dead(engine, MAX_TASKS)).tasks
    if dead and should_confirm(yes=yes):
        confirm(f"{verb} {format_task_count(len(dead))}?")

    async def act(engine: "AnyEngine") -> "ActionResult":
        from tenuto.engine.tasks.control import ActionResult
        from tenuto.model.errors import Conflict, NotFound

        result = ActionResult([], {})
        for task in dead:
            try:
                await getattr(engine, action)(task.id)
            except (Conflict, NotFound) as error:
                result.refused[str(task.id)] = error.message
            else:
                result.done.append(task.id)
        return result

    result = call_engine(options, act)
    print_result(options, verb, result, dry_run=False)
    return 1 if result.refused else 0


dlq.add_commands(list_, show, requeue, purge)
