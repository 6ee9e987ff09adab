"""`orchestrate dlq`: tasks that used up their tries."""

from typing import TYPE_CHECKING

import click

from tenuto.cli.base import Globals, command, group, one_task, task_argument
from tenuto.cli.connection import call
from tenuto.cli.tasks.control import (
    UNASKED,
    confirm,
    count,
    print_result,
    should_confirm,
    state_of,
)
from tenuto.cli.tasks.read import print_view, tell_tasks

if TYPE_CHECKING:
    from datetime import datetime
    from uuid import UUID

    from tenuto.client.remote.engine import AnyEngine
    from tenuto.engine.tasks.control import Action, ActionResult
    from tenuto.engine.views import Page, TaskSummary, TaskView

PAGE = 500
MOST = 10_000


@group(
    "dlq", "orchestrate dlq list", "orchestrate dlq requeue --all", "orchestrate dlq purge --yes"
)
def dlq() -> None:
    """Look after tasks that used up their tries (status DEAD)."""


async def _dead(engine: "AnyEngine", limit: int, cursor: "UUID | None" = None) -> "Page":
    """Dead tasks that nobody has put away, newest first."""
    from tenuto.engine.tasks.query import Filter
    from tenuto.engine.views import Page

    found: list[TaskSummary] = []
    while True:
        page = await engine.list(Filter(status=("DEAD",)), PAGE, cursor)
        found += [task for task in page.tasks if task.archived_at is None]
        cursor = page.next_cursor
        if len(found) > limit:
            return Page(found[:limit], found[limit - 1].id)
        if cursor is None:
            return Page(found)


async def _dead_one(engine: "AnyEngine", name: str) -> "TaskView":
    from tenuto.model.errors import Conflict

    view = await engine.show(await engine.find(name))
    if view.status != "DEAD":
        raise Conflict(f"task {view.id} is {view.status}, not DEAD")
    return view


@command("list", "orchestrate dlq list --limit 20")
@click.option(
    "--limit", type=click.IntRange(1, MOST), default=50, show_default=True, help="At most so many."
)
@click.option("--cursor", type=click.UUID, metavar="ID", help="Only older than this task.")
@click.pass_obj
def list_(given: Globals, limit: int, cursor: "UUID | None") -> None:
    """List dead tasks, newest first."""

    async def read(engine: "AnyEngine") -> "tuple[Page, datetime]":
        return await _dead(engine, limit, cursor), engine.clock.now()

    tell_tasks(given, *call(given, read))


@command("show", "orchestrate dlq show 0198c0de-5b1c")
@one_task
@click.pass_obj
def show(given: Globals, task: str | None, named: str | None) -> None:
    """Show everything about a dead task."""
    name = task_argument(task, named)
    print_view(given, call(given, lambda engine: _dead_one(engine, name)))


@command("requeue", "orchestrate dlq requeue 0198c0de-5b1c", "orchestrate dlq requeue --all --yes")
@one_task
@click.option("--all", "every", is_flag=True, help="All dead tasks.")
@click.option("--yes", is_flag=True, help=f"With --all: {UNASKED}")
@click.pass_obj
def requeue(given: Globals, task: str | None, named: str | None, every: bool, yes: bool) -> int:
    """Give a dead task, or all of them, all tries again."""
    from tenuto.cli.render import print_json
    from tenuto.model.printable import printable

    if every:
        if task is not None or named is not None:
            raise click.UsageError("give either a task or --all")
        return _all(given, "retry", "requeue", yes=yes)
    name = task_argument(task, named)

    async def order(engine: "AnyEngine") -> "TaskView":
        found = (await _dead_one(engine, name)).id
        await engine.retry(found)
        return await engine.show(found)

    view = call(given, order)
    if given.json:
        print_json(view)
    else:
        print(printable(f"{view.id} {state_of(view)}"))
    return 0


@command("purge", "orchestrate dlq purge --yes")
@click.option("--yes", is_flag=True, help=UNASKED.capitalize())
@click.pass_obj
def purge(given: Globals, yes: bool) -> int:
    """Put all dead tasks away: they keep their status and leave this list."""
    return _all(given, "archive", "purge", yes=yes)


def _all(given: Globals, action: "Action", word: str, *, yes: bool) -> int:
    """One action for all dead tasks, confirmed on a terminal."""
    dead = call(given, lambda engine: _dead(engine, MOST)).tasks
    if dead and should_confirm(yes=yes):
        confirm(f"{word} {count(len(dead))}?")

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

    result = call(given, act)
    print_result(given, word, result, dry_run=False)
    return 1 if result.refused else 0


for _each in (list_, show, requeue, purge):
    dlq.add_command(_each)
