"""`orchestrate task cancel`, `retry`, `pause`, ...: what changes tasks, by id or by filter."""

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from tenuto.cli.base import Command, Globals, command, one_task, task_argument
from tenuto.cli.connection import ask, call
from tenuto.cli.parse import filter_options, has_filter, read_filter, read_json
from tenuto.cli.tasks.create import print_submitted

if TYPE_CHECKING:
    from uuid import UUID

    from tenuto.client.client import AsyncClient
    from tenuto.client.remote.engine import AnyEngine
    from tenuto.engine.tasks.control import Action, ActionResult
    from tenuto.engine.tasks.query import Filter
    from tenuto.engine.tasks.submit import Submitted
    from tenuto.engine.views import TaskView

UNASKED = "do not ask; nobody is asked where standard input is no terminal."
PAST = {
    "cancel": "cancelled",
    "retry": "retried",
    "pause": "paused",
    "resume": "resumed",
    "archive": "archived",
    "requeue": "requeued",
    "purge": "purged",
}


def _action(action: "Action", text: str, *examples: str) -> Command:
    """The command of an action that one task or many can be subject to."""

    def perform(
        given: Globals,
        task: str | None,
        named: str | None,
        dry_run: bool,
        yes: bool,
        limit: int,
        reason: str | None = None,
        cascade: bool = False,
        **chosen: Any,
    ) -> int:
        said: dict[str, Any] = {}
        if action in ("cancel", "pause"):
            said["reason"] = reason
        if cascade:
            said["cascade"] = True
        if not has_filter(chosen):
            return _one(given, action, task_argument(task, named), said, dry_run=dry_run)
        if cascade:
            raise click.UsageError("--cascade is for one task at a time")
        if task is not None or named is not None:
            raise click.UsageError("give either a task or a filter")
        return _many(given, action, chosen, reason, limit, dry_run=dry_run, yes=yes)

    options: list[Callable[[Any], Any]] = [
        one_task,
        filter_options,
        click.option(
            "--limit",
            type=click.IntRange(1, 10_000),
            default=1000,
            show_default=True,
            help="With a filter: at most so many.",
        ),
        click.option("--dry-run", is_flag=True, help="Only say which tasks it would be."),
        click.option("--yes", is_flag=True, help=f"With a filter: {UNASKED}"),
        click.pass_obj,
    ]
    if action in ("cancel", "pause"):
        options.insert(
            1, click.option("--reason", metavar="TEXT", help="Why, for the audit trail.")
        )
    if action == "retry":
        revive = "With one task: also what failed or was skipped because of it."
        options.insert(1, click.option("--cascade", is_flag=True, help=revive))
    function: Any = perform
    for option in reversed(options):
        function = option(function)
    return command(action, *examples, help=text)(function)


def _one(
    given: Globals, action: "Action", name: str, said: dict[str, Any], *, dry_run: bool
) -> int:
    from tenuto.cli.render import print_json
    from tenuto.model.printable import printable

    async def order(engine: "AnyEngine") -> "TaskView":
        task = await engine.find(name)
        if not dry_run:
            await getattr(engine, action)(task, **said)
        return await engine.show(task)

    view = call(given, order)
    if given.json:
        print_json(view)
    else:
        print(printable(f"{view.id} {state_of(view)}"))
    return 0


def state_of(view: "TaskView") -> str:
    """A task's status, with what was asked of it and is still to happen."""
    if view.finished_at is not None:
        return f"{view.status}, archived" if view.archived_at is not None else view.status
    if view.cancel_requested_at is not None:
        return f"{view.status}, cancel requested"
    if view.pause_requested_at is not None:
        return f"{view.status}, pause requested"
    return view.status


def _fitting(action: "Action") -> tuple[str, ...]:
    """The statuses that an action can apply to."""
    from tenuto.model.tasks.task import TERMINAL, TRANSITIONS

    if action == "archive":
        return tuple(sorted(TERMINAL))
    return tuple(sorted({source for source, _ in TRANSITIONS[action]}))


def _many(
    given: Globals,
    action: "Action",
    chosen: dict[str, Any],
    reason: str | None,
    limit: int,
    *,
    dry_run: bool,
    yes: bool,
) -> int:
    chosen["status"] = chosen["status"] or _fitting(action)
    ask = should_confirm(yes=yes)

    async def act(engine: "AnyEngine", *, only_look: bool) -> "ActionResult":
        where: Filter = read_filter(engine.clock.now(), chosen)
        return await engine.act(action, where, reason=reason, limit=limit, dry_run=only_look)

    result = None
    if dry_run or ask:
        result = call(given, lambda engine: act(engine, only_look=True))
        if result.done and not dry_run:
            confirm(f"{action} {count(len(result.done))}?")
            result = None
    if result is None:
        result = call(given, lambda engine: act(engine, only_look=False))
    print_result(given, action, result, dry_run=dry_run)
    if len(result.done) + len(result.refused) == limit and not given.json:
        click.echo(f"stopped at {count(limit)}; there may be more", err=True)
    return 1 if result.refused else 0


def should_confirm(*, yes: bool) -> bool:
    """Whether there is a person to ask, who has not said yes beforehand."""
    return not yes and sys.stdin is not None and sys.stdin.isatty()


def confirm(question: str) -> None:
    """Go on only if a person says yes."""
    if not click.confirm(question, err=True):
        raise click.exceptions.Exit(1)


def print_result(given: Globals, action: str, result: "ActionResult", *, dry_run: bool) -> None:
    """Print which tasks an action changed, or would, and why it left others."""
    from tenuto.cli.render import print_json
    from tenuto.model.printable import printable

    if given.json:
        print_json({"done": result.done, "refused": result.refused, "dryRun": dry_run})
        return
    for task in result.done:
        print(task)
    for name, why in result.refused.items():
        click.echo(printable(f"left {name}: {why}"), err=True)
    did = f"would {action}" if dry_run else PAST[action]
    click.echo(f"{did} {count(len(result.done))}", err=True)


def count(tasks: int) -> str:
    return "1 task" if tasks == 1 else f"{tasks:,} tasks"


cancel = _action(
    "cancel",
    "End a task, or all tasks that a filter picks.\n\nA running task's processes are killed first;"
    " `task attempts` shows the receipt.",
    'orchestrate task cancel 0198c0de-5b1c --reason "wrong branch"',
    "orchestrate task cancel --tag nightly --since 1h --dry-run",
)
retry = _action(
    "retry",
    "Give an ended task, or all that a filter picks, all tries again.",
    "orchestrate task retry 0198c0de-5b1c",
    "orchestrate task retry --status DEAD --tag nightly --since 1h --yes",
)
pause = _action(
    "pause",
    "Hold a task, or all tasks that a filter picks.\n\nA running task is stopped after a last"
    " checkpoint; its try is given back.",
    "orchestrate task pause 0198c0de-5b1c",
    "orchestrate task pause --status PENDING --type import",
)
resume = _action(
    "resume",
    "Let a paused task, or all that a filter picks, go on.",
    "orchestrate task resume 0198c0de-5b1c",
    "orchestrate task resume --tag nightly",
)
archive = _action(
    "archive",
    "Put an ended task, or all that a filter picks, away.",
    "orchestrate task archive 0198c0de-5b1c",
    "orchestrate task archive --status COMPLETED --text report",
)


@command(
    "update",
    "orchestrate task update 0198c0de-5b1c --priority 9",
    'orchestrate task update 0198c0de-5b1c --name "Nightly report" --tag report --tag nightly',
)
@one_task
@click.option("--priority", type=int, metavar="N", help="1 (low) to 10 (urgent).")
@click.option("--name", "title", metavar="TITLE", help="What the task is called.")
@click.option("--description", metavar="TEXT", help="For people; no agent reads it.")
@click.option("--tag", "tags", multiple=True, help="Its labels from now on; repeatable.")
@click.option("--metadata", metavar="JSON|@FILE", help="A JSON object in place of the present one.")
@click.pass_obj
def update(
    given: Globals,
    /,
    task: str | None,
    named: str | None,
    tags: tuple[str, ...],
    metadata: str | None,
    **fields: Any,
) -> None:
    """Change a task's priority, and so its place in the queue, or what it says about itself."""
    from tenuto.cli.render import print_json
    from tenuto.engine.tasks.edit import TaskChanges

    name = task_argument(task, named)
    told = {key: value for key, value in fields.items() if value is not None}
    if tags:
        told["tags"] = tags
    if metadata is not None:
        told["metadata"] = _object(metadata)
    if not told:
        raise click.UsageError("say what to change; --help lists it")

    async def order(engine: "AnyEngine") -> "TaskView":
        found = await engine.find(name)
        await engine.edit(found, TaskChanges(**told))
        return await engine.show(found)

    view = call(given, order)
    if given.json:
        print_json(view)
    else:
        print(f"{view.id} priority {view.priority}")


def _object(text: str) -> dict[str, Any]:
    found = read_json("metadata", text)
    if not isinstance(found, dict):
        raise click.UsageError("--metadata wants a JSON object")
    return found


@command("delete", "orchestrate task delete 0198c0de-5b1c --yes")
@one_task
@click.option("--yes", is_flag=True, help=UNASKED.capitalize())
@click.pass_obj
def delete(given: Globals, task: str | None, named: str | None, yes: bool) -> None:
    """Remove what an ended task carried: its prompt, input, output and log. Its trail stays."""
    from tenuto.cli.output import print_done

    name = task_argument(task, named)
    if should_confirm(yes=yes):
        confirm(f"remove what task {name} carried?")

    async def order(engine: "AnyEngine") -> "UUID":
        found = await engine.find(name)
        await engine.erase(found)
        return found

    found = call(given, order)
    print_done(given, f"{found} deleted", id=found)


@command("start", "orchestrate task start 0198c0de-5b1c")
@one_task
@click.pass_obj
def start(given: Globals, task: str | None, named: str | None) -> None:
    """Let a task run before the time that it was meant for."""
    from tenuto.cli.output import print_done

    name = task_argument(task, named)

    async def order(engine: "AnyEngine") -> "UUID":
        found = await engine.find(name)
        await engine.start(found)
        return found

    found = call(given, order)
    print_done(given, f"{found} pending", id=found)


def _assigning(name: str, text: str, *, take: bool) -> click.Command:
    @one_task
    @click.option("--agent", metavar="AGENT", help="Its name or id; nobody in particular if none.")
    @click.pass_obj
    def perform(given: Globals, task: str | None, named: str | None, agent: str | None) -> None:
        from tenuto.cli.output import print_done

        wanted = task_argument(task, named)

        async def order(client: "AsyncClient") -> "TaskView":
            whom = None if agent is None else (await client.agents.get(agent)).id
            return await client.tasks.assign(wanted, whom, take=take)

        view = ask(given, order)
        print_done(given, f"{view.id} for {agent or 'whoever fits'}", id=view.id)

    return command(name, f"orchestrate task {name} 0198c0de-5b1c --agent dev-1", help=text)(perform)


assign = _assigning("assign", "Let only one agent take a task that nobody runs.", take=False)
reassign = _assigning(
    "reassign",
    "Let only one agent take a task, and take it from whoever runs it.\n\nThe attempt under way has"
    " lost its lease: its session is ended, and nothing it says counts.",
    take=True,
)


@command("rerun", "orchestrate task rerun 0198c0de-5b1c")
@one_task
@click.pass_obj
def rerun(given: Globals, task: str | None, named: str | None) -> None:
    """Submit the same task again as a new one and print its id."""
    name = task_argument(task, named)

    async def order(engine: "AnyEngine") -> "Submitted":
        return await engine.rerun(await engine.find(name))

    print_submitted(given, call(given, order))
