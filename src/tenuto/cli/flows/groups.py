"""`orchestrate group`: defines groups; starts, shows and controls their runs."""

from typing import TYPE_CHECKING, Any

import click

from tenuto.cli.base import (
    GlobalOptions,
    command,
    cursor_option,
    group,
    limit_option,
    reason_option,
)
from tenuto.cli.connection import call_client, call_engine
from tenuto.cli.flows.flows import SHOW, START, STATUS, RunKind, show_run, start_flow
from tenuto.cli.output import Columns, columns, print_page, print_value, split_commas
from tenuto.cli.parse import read_json
from tenuto.cli.shared_commands import Resource

if TYPE_CHECKING:
    from uuid import UUID

    from tenuto.client.client import AsyncClient
    from tenuto.engine.flows.views import GroupPage

_JOINS = ("all_succeeded", "all_done", "any_failed", "first_succeeded")
_FIELDS: Columns = {
    **columns("id, key, title, status, type: kind, join: join_policy"),
    "progress": lambda run: f"{run.progress_percent}%",
    "children": lambda run: f"{run.total} ({run.open} open, {run.failed} failed)",
    "tasks": lambda run: f"{run.tasks} ({run.ended} finished)",
    "cost": lambda run: None if run.cost_usd is None else f"${run.cost_usd:,.4f}",
    **columns("flow, in group: parent, created: created_at, finished: finished_at"),
}
_GROUP_RUN = RunKind("group", "find_group", "group", "group_graph", _FIELDS)
_GROUPS = Resource("group", lambda client: client.groups, _FIELDS, "nightly", "GROUP")


@group(
    "group",
    "orchestrate group create nightly --child fetch --child report --start",
    "orchestrate group show nightly --graph",
)
def group_() -> None:
    """Define groups; start, show and control their runs.

    A run is named by its id, or by the key of its group: then the newest run of that key.
    """


@command(
    "create",
    "orchestrate group create nightly --child fetch --child clean,report",
    "orchestrate group create tests --type parallel --child unit,lint --join all_done --start",
)
@click.argument("key")
@click.option("--name", "title", metavar="TITLE", help="Title; default: the key.")
@click.option(
    "--type",
    "order",
    type=click.Choice(["sequential", "parallel"], case_sensitive=False),
    default="sequential",
    show_default=True,
    help="Run the children one after the other, or all at once.",
)
@click.option("--child", "children", multiple=True, help="Key of a task or group; repeatable.")
@click.option("--next", metavar="KEY", help="Definition to run after the group completes.")
@click.option(
    "--join",
    type=click.Choice(_JOINS),
    default="all_succeeded",
    show_default=True,
    help="Rule for when and how the group finishes.",
)
@click.option("--prompt", metavar="TEXT", help="Text put before the prompts of all its tasks.")
@click.option("--start", "starts", is_flag=True, help="Start it now.")
@click.option("--input", "input_", metavar="JSON|@FILE", help="JSON input for its tasks.")
@click.pass_obj
def create(
    options: GlobalOptions,
    /,
    key: str,
    children: tuple[str, ...],
    starts: bool,
    input_: str | None,
    **fields: Any,
) -> None:
    """Define a group of existing definitions; prints its key, or its flow's id with --start."""
    from tenuto.cli.render import print_note
    from tenuto.model.errors import TenutoError

    if input_ is not None and not starts:
        raise click.UsageError("--input requires --start")
    value = None if input_ is None else read_json("input", input_)

    async def define_and_start(client: "AsyncClient") -> dict[str, Any]:
        definition = await client.groups.create(key, split_commas(children), **fields)
        try:
            flow = await client.groups.start(key, value) if starts else None
        except TenutoError:
            print_note(f"the group is defined; `orchestrate group start {key}` starts it")
            raise
        return {"definition": definition, "flow": flow}

    result = call_client(options, define_and_start)
    print_value(options, result, key if result["flow"] is None else result["flow"].id)


@command("list", "orchestrate group list --status RUNNING", "orchestrate group list --key nightly")
@STATUS
@click.option("--key", metavar="KEY", help="Filter by group.")
@click.option("--flow", type=click.UUID, metavar="ID", help="Filter by flow.")
@limit_option()
@cursor_option("runs")
@click.pass_obj
def list_(
    options: GlobalOptions,
    status: str | None,
    key: str | None,
    flow: "UUID | None",
    limit: int,
    cursor: "UUID | None",
) -> None:
    """List the runs of groups, newest first."""
    page: GroupPage = call_engine(
        options, lambda engine: engine.flow_views.groups(status, key, flow, limit, cursor)
    )
    headings: Columns = {
        **columns("ID, STATUS, TYPE: kind"),
        "OPEN": lambda run: f"{run.open}/{run.total}",
        "FAILED": lambda run: run.failed or "",
        **columns("CREATED: created_at, KEY, TITLE"),
    }
    print_page(options, page, page.groups, headings, wide="TITLE")


@command(
    "show",
    "orchestrate group show nightly --graph",
    "orchestrate group show nightly --mermaid",
)
@click.argument("group_name", metavar="GROUP")
@SHOW
@click.pass_obj
def show(options: GlobalOptions, /, group_name: str, **choices: bool) -> int:
    """Show the status and progress of a group's run, or print it as a graph."""
    return show_run(options, _GROUP_RUN, group_name, **choices)


@command("start", "orchestrate group start nightly --follow")
@click.argument("key")
@START
@click.pass_obj
def start(
    options: GlobalOptions, /, key: str, input_: str | None, follow: bool, **start_options: Any
) -> int:
    """Start a group and print the id of its flow."""
    return start_flow(options, key, input_, follow=follow, group=True, **start_options)


group_.add_commands(
    create,
    list_,
    show,
    start,
    _GROUPS.item_command(
        "cancel",
        "Cancel a run of a group with all its open tasks; running tasks are killed.",
        reason_option,
        examples=("orchestrate group cancel nightly --reason 'not today'",),
    ),
    _GROUPS.item_command(
        "pause", "Pause a run of a group with all its tasks; running tasks are stopped."
    ),
    _GROUPS.item_command("resume", "Resume a paused run of a group."),
)
