"""`orchestrate group`: define groups, start them, watch and control their runs."""

from typing import TYPE_CHECKING, Any

import click

from tenuto.cli.base import Globals, command, group
from tenuto.cli.connection import ask, call
from tenuto.cli.flows.flows import LIMIT, SHOW, START, STATUS, options, started, tell_view
from tenuto.cli.output import Columns, print_one, tell_page, words
from tenuto.cli.parse import read_json

if TYPE_CHECKING:
    from uuid import UUID

    from tenuto.client.client import AsyncClient
    from tenuto.client.remote.engine import AnyEngine
    from tenuto.engine.flows.views import GroupPage

_JOINS = ("all_succeeded", "all_done", "any_failed", "first_succeeded")
_FIELDS: Columns = {
    "id": lambda each: each.id,
    "key": lambda each: each.key,
    "title": lambda each: each.title,
    "status": lambda each: each.status,
    "type": lambda each: each.kind,
    "join": lambda each: each.join_policy,
    "progress": lambda each: f"{each.progress_percent}%",
    "children": lambda each: f"{each.total} ({each.open} open, {each.failed} failed)",
    "tasks": lambda each: f"{each.tasks} ({each.ended} ended)",
    "cost": lambda each: None if each.cost_usd is None else f"${each.cost_usd:,.4f}",
    "flow": lambda each: each.flow,
    "in group": lambda each: each.parent,
    "created": lambda each: each.created_at,
    "finished": lambda each: each.finished_at,
}
_GROUP = click.argument("group_name", metavar="GROUP")


@group(
    "group",
    "orchestrate group create nightly --child fetch --child report --start",
    "orchestrate group show nightly --graph",
)
def group_() -> None:
    """Define groups, start them, watch and control their runs.

    A run is named by its id, or by the key of its group: the newest run of it.
    """


@command(
    "create",
    "orchestrate group create nightly --child fetch --child clean,report",
    "orchestrate group create tests --type parallel --child unit,lint --join all_done --start",
)
@click.argument("key")
@click.option("--name", "title", metavar="TITLE", help="What it is called; its key if not given.")
@click.option(
    "--type",
    "order",
    type=click.Choice(["sequential", "parallel"], case_sensitive=False),
    default="sequential",
    show_default=True,
    help="One after the other, or side by side.",
)
@click.option("--child", "children", multiple=True, help="A task or group by key; repeatable.")
@click.option("--next", metavar="KEY", help="What runs when the group is done.")
@click.option(
    "--join",
    type=click.Choice(_JOINS),
    default="all_succeeded",
    show_default=True,
    help="When it is done.",
)
@click.option("--prompt", metavar="TEXT", help="Stands before the prompts of all its tasks.")
@click.option("--start", "starts", is_flag=True, help="Run it at once.")
@click.option("--input", "input_", metavar="JSON|@FILE", help="A JSON value for its tasks.")
@click.pass_obj
def create(
    given: Globals,
    /,
    key: str,
    children: tuple[str, ...],
    starts: bool,
    input_: str | None,
    **fields: Any,
) -> None:
    """Define a group of what is defined by other keys; prints its key, or its flow's id."""
    from tenuto.cli.render import print_json, print_note
    from tenuto.model.errors import TenutoError

    if input_ is not None and not starts:
        raise click.UsageError("--input is for a group that starts: add --start")
    value = None if input_ is None else read_json("input", input_)

    async def make(client: "AsyncClient") -> dict[str, Any]:
        made = await client.groups.create(key, words(children), **fields)
        try:
            flow = await client.groups.start(key, value) if starts else None
        except TenutoError:
            print_note(f"the group is defined; `orchestrate group start {key}` starts it")
            raise
        return {"definition": made, "flow": flow}

    done = ask(given, make)
    if given.json:
        print_json(done)
    else:
        print(key if done["flow"] is None else done["flow"].id)


@command("list", "orchestrate group list --status RUNNING", "orchestrate group list --key nightly")
@STATUS
@click.option("--key", metavar="KEY", help="Only of this group.")
@click.option("--flow", type=click.UUID, metavar="ID", help="Only in this flow.")
@LIMIT
@click.option("--cursor", type=click.UUID, metavar="ID", help="Only older than this run.")
@click.pass_obj
def list_(
    given: Globals,
    status: str | None,
    key: str | None,
    flow: "UUID | None",
    limit: int,
    cursor: "UUID | None",
) -> None:
    """List the runs of groups, newest first."""
    page: GroupPage = call(
        given, lambda engine: engine.flow_views.groups(status, key, flow, limit, cursor)
    )
    columns: Columns = {
        "ID": lambda each: each.id,
        "STATUS": lambda each: each.status,
        "TYPE": lambda each: each.kind,
        "OPEN": lambda each: f"{each.open}/{each.total}",
        "FAILED": lambda each: each.failed or "",
        "CREATED": lambda each: each.created_at,
        "KEY": lambda each: each.key,
        "TITLE": lambda each: each.title,
    }
    tell_page(given, page, page.groups, columns, wide="TITLE")


@command(
    "show",
    "orchestrate group show nightly --graph",
    "orchestrate group show nightly --mermaid",
)
@_GROUP
@options(SHOW)
@click.pass_obj
def show(given: Globals, group_name: str, as_graph: bool, mermaid: bool, follow: bool) -> int:
    """Show how a run of a group is doing, or draw it."""

    async def read(engine: "AnyEngine") -> int:
        views = engine.flow_views
        found = await views.find_group(group_name)
        if follow:
            return await _followed(given, engine, found)
        view = await views.group(found)
        graph = await views.group_graph(found) if as_graph or mermaid else None
        tell_view(given, view, graph, mermaid, _FIELDS)
        return 0

    return call(given, read)


async def _followed(given: Globals, engine: "AnyEngine", found: "UUID") -> int:
    """Watch a run of a group to its end; answers the exit code."""
    from tenuto.cli.flows.flow_tree import followed

    views = engine.flow_views
    note = f"the group goes on; `orchestrate group cancel {found}` ends it"
    return await followed(
        given, engine, lambda: views.group(found), lambda: views.group_graph(found), note
    )


@command("start", "orchestrate group start nightly --follow")
@click.argument("key")
@options(START)
@click.pass_obj
def start(given: Globals, /, key: str, input_: str | None, follow: bool, **how: Any) -> int:
    """Run a group and print the id of its flow."""
    return started(given, key, input_, follow=follow, group=True, **how)


@command("cancel", "orchestrate group cancel nightly --reason 'not today'")
@_GROUP
@click.option("--reason", metavar="TEXT", help="Why; the audit trail keeps it.")
@click.pass_obj
def cancel(given: Globals, group_name: str, reason: str | None) -> None:
    """End a run of a group with all that is open in it; running tasks are killed."""
    print_one(given, ask(given, lambda client: client.groups.cancel(group_name, reason)), _FIELDS)


@command("pause", "orchestrate group pause nightly")
@_GROUP
@click.pass_obj
def pause(given: Globals, group_name: str) -> None:
    """Hold everything of a run of a group; running tasks are stopped."""
    print_one(given, ask(given, lambda client: client.groups.pause(group_name)), _FIELDS)


@command("resume", "orchestrate group resume nightly")
@_GROUP
@click.pass_obj
def resume(given: Globals, group_name: str) -> None:
    """Let a paused run of a group go on."""
    print_one(given, ask(given, lambda client: client.groups.resume(group_name)), _FIELDS)


for _each in (create, list_, show, start, cancel, pause, resume):
    group_.add_command(_each)
