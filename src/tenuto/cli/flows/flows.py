"""`orchestrate flow`: starts, shows and controls flows."""

from typing import TYPE_CHECKING, Any, NamedTuple

import click

from tenuto.cli.base import (
    GlobalOptions,
    add_options,
    command,
    cursor_option,
    group,
    limit_option,
    reason_option,
)
from tenuto.cli.connection import call_client, call_engine
from tenuto.cli.output import Columns, columns, print_one, print_page, print_value
from tenuto.cli.parse import read_json
from tenuto.cli.shared_commands import Resource

if TYPE_CHECKING:
    from uuid import UUID

    from tenuto.client.client import AsyncClient
    from tenuto.client.remote.engine import AnyEngine
    from tenuto.engine.flows.graph import GraphView
    from tenuto.engine.flows.views import FlowPage, FlowView

_FIELDS: Columns = {
    **columns("id, key, title, status"),
    "progress": lambda flow: f"{flow.progress_percent}%",
    "tasks": lambda flow: [f"{status} {n:,}" for status, n in flow.tasks.items()],
    "failed": lambda flow: "\n".join(
        f"{task.key or task.title} ({task.status}): {task.last_error or ''}"
        for task in flow.failures
    ),
    "open groups": lambda flow: [f"{group.key} ({group.status})" for group in flow.open_groups],
    **columns("priority, jumps left: steps_left"),
    "cost": lambda flow: None if flow.cost_usd is None else f"${flow.cost_usd:,.4f}",
    **columns(
        "started by: source, rerun of, created: created_at, created by, finished: finished_at"
    ),
}


class RunKind(NamedTuple):
    """A kind of run, flow or group run: what it is called, and the engine's methods to read it."""

    noun: str
    find: str
    show: str
    graph: str
    fields: Columns


_FLOW_RUN = RunKind("flow", "find", "show", "graph", _FIELDS)
_FLOWS = Resource("flow", lambda client: client.flows, _FIELDS, "nightly", "FLOW")
FLOW = click.argument("flow_name", metavar="FLOW")
STATUS = click.option("--status", help="Filter by status.")
START = add_options(
    click.option("--input", "input_", metavar="JSON|@FILE", help="JSON input for its tasks."),
    click.option("--steps", type=int, metavar="N", help="Maximum number of jumps; default: 100."),
    click.option("--priority", type=int, metavar="N", help="1 to 10, for all its tasks."),
    click.option("--follow", is_flag=True, help="Show it live; exit code 1 unless COMPLETED."),
)
SHOW = add_options(
    click.option("--graph", "as_graph", is_flag=True, help="Print it as a tree."),
    click.option("--mermaid", is_flag=True, help="Print it as Mermaid text."),
    click.option("--follow", is_flag=True, help="Show it live; exit code 1 unless COMPLETED."),
)


@group("flow", "orchestrate flow start nightly --follow", "orchestrate flow list --status RUNNING")
def flow() -> None:
    """Start, show and control flows.

    A flow is named by its id, or by the key of its definition: then the newest flow of that key.
    """


@command(
    "start",
    "orchestrate flow start nightly --follow",
    """orchestrate flow start nightly --input '{"day": "monday"}'""",
)
@click.argument("key")
@START
@click.pass_obj
def start(
    options: GlobalOptions, /, key: str, input_: str | None, follow: bool, **start_options: Any
) -> int:
    """Run a definition and print the id of its flow."""
    return start_flow(options, key, input_, follow=follow, **start_options)


def start_flow(
    options: GlobalOptions,
    key: str,
    input_: str | None,
    *,
    follow: bool,
    group: bool = False,
    **start_options: Any,
) -> int:
    """Starts a definition, or a group; prints its flow and returns 0, or follows it.

    Returns 1 if the followed flow is not COMPLETED at the end.
    """
    value = None if input_ is None else read_json("input", input_)

    async def start(client: "AsyncClient") -> "FlowView":
        api = client.groups if group else client.flows
        return await api.start(key, value, **start_options)

    flow_view = call_client(options, start)
    return print_or_follow(options, flow_view, follow=follow)


def print_or_follow(options: GlobalOptions, flow_view: "FlowView", *, follow: bool) -> int:
    """Prints a new flow's id and returns 0, or follows it: then 1 if it ends as not COMPLETED."""
    from tenuto.cli.render import print_note

    if not follow:
        print_value(options, flow_view, flow_view.id)
        return 0
    if not options.json:
        print_note(f"flow {flow_view.id}")
    return call_engine(
        options, lambda engine: _follow_run(options, engine, _FLOW_RUN, flow_view.id)
    )


@command("list", "orchestrate flow list --status RUNNING", "orchestrate flow list --key nightly")
@STATUS
@click.option("--key", metavar="KEY", help="Filter by definition.")
@limit_option()
@cursor_option("flows")
@click.pass_obj
def list_(
    options: GlobalOptions, status: str | None, key: str | None, limit: int, cursor: "UUID | None"
) -> None:
    """List flows, newest first."""
    page: FlowPage = call_engine(
        options, lambda engine: engine.flow_views.page(status, key, limit, cursor)
    )
    headings = columns("ID, STATUS, CREATED: created_at, KEY, TITLE")
    print_page(options, page, page.flows, headings, wide="TITLE")


@command(
    "show",
    "orchestrate flow show nightly --graph",
    "orchestrate flow show 0198c0de-0000-7000-8000-000000000000 --follow",
)
@FLOW
@SHOW
@click.pass_obj
def show(options: GlobalOptions, /, flow_name: str, **choices: bool) -> int:
    """Show a flow's status and progress, or print it as a graph."""
    return show_run(options, _FLOW_RUN, flow_name, **choices)


def show_run(
    options: GlobalOptions, kind: RunKind, name: str, *, as_graph: bool, mermaid: bool, follow: bool
) -> int:
    """Prints a flow, a group run or its graph and returns 0, or follows it: 1 if not COMPLETED."""

    async def print_run(engine: "AnyEngine") -> int:
        run_id: UUID = await getattr(engine.flow_views, kind.find)(name)
        if follow:
            return await _follow_run(options, engine, kind, run_id)
        view = await getattr(engine.flow_views, kind.show)(run_id)
        graph = None
        if as_graph or mermaid:
            graph = await getattr(engine.flow_views, kind.graph)(run_id)
        _print_view_or_graph(options, view, graph, mermaid, kind.fields)
        return 0

    return call_engine(options, print_run)


async def _follow_run(
    options: GlobalOptions, engine: "AnyEngine", kind: RunKind, run_id: "UUID"
) -> int:
    """Shows a flow or group run until it finishes; returns 0 if it is COMPLETED, else 1."""
    from tenuto.cli.flows.flow_tree import follow_to_end

    views, noun = engine.flow_views, kind.noun
    return await follow_to_end(
        options,
        engine,
        lambda: getattr(views, kind.show)(run_id),
        lambda: getattr(views, kind.graph)(run_id),
        f"the {noun} continues; `orchestrate {noun} cancel {run_id}` cancels it",
    )


def _print_view_or_graph(
    options: GlobalOptions, view: Any, graph: "GraphView | None", mermaid: bool, fields: Columns
) -> None:
    """Prints a flow or group: its fields, or its graph as tree, Mermaid text or JSON."""
    from tenuto.cli.render import print_json
    from tenuto.model.printable import printable

    if graph is None:
        print_one(options, view, fields)
        return
    if mermaid:
        from tenuto.engine.flows.graph import mermaid as mermaid_text

        text = mermaid_text(graph)
        print_json({"mermaid": text}) if options.json else print(
            printable(text, lines=True), end=""
        )
    elif options.json:
        print_json(graph)
    else:
        from tenuto.cli.flows.flow_tree import print_tree

        print_tree(view, graph)


@command("tasks", "orchestrate flow tasks nightly --limit 20")
@FLOW
@limit_option()
@cursor_option("tasks")
@click.pass_obj
def tasks(options: GlobalOptions, flow_name: str, limit: int, cursor: "UUID | None") -> None:
    """List the tasks of a flow, newest first."""
    from tenuto.cli.tasks.read import print_task_page

    async def read_page(engine: "AnyEngine") -> Any:
        flow_id = await engine.flow_views.find(flow_name)
        return await engine.flow_views.tasks(flow_id, limit, cursor), engine.clock.now()

    print_task_page(options, *call_engine(options, read_page))


@command(
    "rerun",
    "orchestrate flow rerun nightly --follow",
    "orchestrate flow rerun nightly --from-failed",
)
@FLOW
@click.option(
    "--from-failed", is_flag=True, help="Retry the failed tasks of the same flow instead."
)
@click.option("--steps", type=int, metavar="N", help="Maximum jumps of the new flow; default: 100.")
@click.option("--follow", is_flag=True, help="Show it live; exit code 1 unless COMPLETED.")
@click.pass_obj
def rerun(
    options: GlobalOptions, flow_name: str, from_failed: bool, steps: int | None, follow: bool
) -> int:
    """Run a flow again with the same plan and input, and print the id of the new flow."""
    if from_failed and steps is not None:
        raise click.UsageError(
            "--steps applies to a new flow; it cannot be used with --from-failed"
        )
    flow_view = call_client(
        options,
        lambda client: client.flows.rerun(flow_name, from_failed=from_failed, steps=steps),
    )
    return print_or_follow(options, flow_view, follow=follow)


flow.add_commands(
    start,
    list_,
    show,
    tasks,
    _FLOWS.item_command(
        "cancel",
        "Cancel a flow with all its open tasks; running tasks are killed.",
        reason_option,
        examples=("orchestrate flow cancel nightly --reason 'not today'",),
    ),
    _FLOWS.item_command("pause", "Pause a flow with all its tasks; running tasks are stopped."),
    _FLOWS.item_command("resume", "Resume a paused flow."),
    rerun,
)
