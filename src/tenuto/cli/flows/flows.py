"""`orchestrate flow`: start definitions, watch what they do, control it."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from tenuto.cli.base import Globals, command, group
from tenuto.cli.connection import ask, call
from tenuto.cli.output import Columns, print_one, tell_page
from tenuto.cli.parse import read_json

if TYPE_CHECKING:
    from uuid import UUID

    from tenuto.client.client import AsyncClient
    from tenuto.client.remote.engine import AnyEngine
    from tenuto.engine.flows.graph import GraphView
    from tenuto.engine.flows.views import FlowPage, FlowView

F = TypeVar("F", bound=Callable[..., Any])
FIELDS: Columns = {
    "id": lambda each: each.id,
    "key": lambda each: each.key,
    "title": lambda each: each.title,
    "status": lambda each: each.status,
    "progress": lambda each: f"{each.progress_percent}%",
    "tasks": lambda each: [f"{status} {n:,}" for status, n in each.tasks.items()],
    "failed": lambda each: "\n".join(
        f"{one.key or one.title} ({one.status}): {one.last_error or ''}" for one in each.failures
    ),
    "open groups": lambda each: [f"{one.key} ({one.status})" for one in each.open_groups],
    "priority": lambda each: each.priority,
    "jumps left": lambda each: each.steps_left,
    "cost": lambda each: None if each.cost_usd is None else f"${each.cost_usd:,.4f}",
    "started by": lambda each: each.source,
    "rerun of": lambda each: each.rerun_of,
    "created": lambda each: each.created_at,
    "created by": lambda each: each.created_by,
    "finished": lambda each: each.finished_at,
}
FLOW = click.argument("flow_name", metavar="FLOW")
STATUS = click.option("--status", help="Only with this status.")
LIMIT = click.option(
    "--limit", type=click.IntRange(1, 1000), default=50, show_default=True, help="Most."
)
START = (
    click.option("--input", "input_", metavar="JSON|@FILE", help="A JSON value for its tasks."),
    click.option("--steps", type=int, metavar="N", help="Jumps that it may make; 100."),
    click.option("--priority", type=int, metavar="N", help="1 to 10, for all its tasks."),
    click.option("--follow", is_flag=True, help="Watch it to its end; the exit code tells."),
)
SHOW = (
    click.option("--graph", "as_graph", is_flag=True, help="Draw it as a tree."),
    click.option("--mermaid", is_flag=True, help="Print it as Mermaid text."),
    click.option("--follow", is_flag=True, help="Draw it live until its end; exit code tells."),
)


def options(given: tuple[Callable[[Any], Any], ...]) -> Callable[[F], F]:
    """Adds options that several commands have."""

    def add(function: F) -> F:
        for option in reversed(given):
            function = option(function)
        return function

    return add


@group("flow", "orchestrate flow start nightly --follow", "orchestrate flow list --status RUNNING")
def flow() -> None:
    """Start definitions, watch what they do, control it.

    A flow is named by its id, or by the key of its definition: the newest flow of it.
    """


@command(
    "start",
    "orchestrate flow start nightly --follow",
    """orchestrate flow start nightly --input '{"day": "monday"}'""",
)
@click.argument("key")
@options(START)
@click.pass_obj
def start(given: Globals, /, key: str, input_: str | None, follow: bool, **how: Any) -> int:
    """Run a definition and print the id of its flow."""
    return started(given, key, input_, follow=follow, **how)


def started(
    given: Globals, key: str, input_: str | None, *, follow: bool, group: bool = False, **how: Any
) -> int:
    """Run a definition, or only a group, watched to its end if wanted; answers the exit code."""
    value = None if input_ is None else read_json("input", input_)

    async def start(client: "AsyncClient") -> "FlowView":
        kind = client.groups if group else client.flows
        return await kind.start(key, value, **how)

    made = ask(given, start)
    return told(given, made, follow=follow)


def told(given: Globals, made: "FlowView", *, follow: bool) -> int:
    """Print a flow that was just made, or watch it to its end."""
    from tenuto.cli.render import print_json, print_note

    if not follow:
        print_json(made) if given.json else print(made.id)
        return 0
    if not given.json:
        print_note(f"flow {made.id}")
    return call(given, lambda engine: _followed(given, engine, made.id))


async def _followed(given: Globals, engine: "AnyEngine", found: "UUID") -> int:
    """Watch a flow to its end; answers the exit code."""
    from tenuto.cli.flows.flow_tree import followed

    views = engine.flow_views
    note = f"the flow goes on; `orchestrate flow cancel {found}` ends it"
    return await followed(
        given, engine, lambda: views.show(found), lambda: views.graph(found), note
    )


@command("list", "orchestrate flow list --status RUNNING", "orchestrate flow list --key nightly")
@STATUS
@click.option("--key", metavar="KEY", help="Only of this definition.")
@LIMIT
@click.option("--cursor", type=click.UUID, metavar="ID", help="Only older than this flow.")
@click.pass_obj
def list_(
    given: Globals, status: str | None, key: str | None, limit: int, cursor: "UUID | None"
) -> None:
    """List flows, newest first."""
    page: FlowPage = call(given, lambda engine: engine.flow_views.page(status, key, limit, cursor))
    columns: Columns = {
        "ID": lambda each: each.id,
        "STATUS": lambda each: each.status,
        "CREATED": lambda each: each.created_at,
        "KEY": lambda each: each.key,
        "TITLE": lambda each: each.title,
    }
    tell_page(given, page, page.flows, columns, wide="TITLE")


@command(
    "show",
    "orchestrate flow show nightly --graph",
    "orchestrate flow show 0198c0de-0000-7000-8000-000000000000 --follow",
)
@FLOW
@options(SHOW)
@click.pass_obj
def show(given: Globals, flow_name: str, as_graph: bool, mermaid: bool, follow: bool) -> int:
    """Show how a flow is doing, or draw it."""

    async def read(engine: "AnyEngine") -> int:
        views = engine.flow_views
        found = await views.find(flow_name)
        if follow:
            return await _followed(given, engine, found)
        view = await views.show(found)
        tell_view(given, view, await views.graph(found) if as_graph or mermaid else None, mermaid)
        return 0

    return call(given, read)


def tell_view(
    given: Globals,
    view: Any,
    graph: "GraphView | None",
    mermaid: bool,
    fields: Columns = FIELDS,
) -> None:
    """Print a flow or group: its fields, or its graph in the form that was asked for."""
    from tenuto.cli.render import print_json
    from tenuto.model.printable import printable

    if graph is None:
        print_one(given, view, fields)
        return
    if mermaid:
        from tenuto.engine.flows.graph import mermaid as mermaid_text

        text = mermaid_text(graph)
        print_json({"mermaid": text}) if given.json else print(printable(text, lines=True), end="")
    elif given.json:
        print_json(graph)
    else:
        from tenuto.cli.flows.flow_tree import print_tree

        print_tree(view, graph)


@command("tasks", "orchestrate flow tasks nightly --limit 20")
@FLOW
@LIMIT
@click.option("--cursor", type=click.UUID, metavar="ID", help="Only older than this task.")
@click.pass_obj
def tasks(given: Globals, flow_name: str, limit: int, cursor: "UUID | None") -> None:
    """List the tasks of a flow, newest first."""
    from tenuto.cli.tasks.read import tell_tasks

    async def read(engine: "AnyEngine") -> Any:
        found = await engine.flow_views.find(flow_name)
        return await engine.flow_views.tasks(found, limit, cursor), engine.clock.now()

    tell_tasks(given, *call(given, read))


@command("cancel", "orchestrate flow cancel nightly --reason 'not today'")
@FLOW
@click.option("--reason", metavar="TEXT", help="Why; the audit trail keeps it.")
@click.pass_obj
def cancel(given: Globals, flow_name: str, reason: str | None) -> None:
    """End a flow with all that is open in it; running tasks are killed."""
    print_one(given, ask(given, lambda client: client.flows.cancel(flow_name, reason)), FIELDS)


@command("pause", "orchestrate flow pause nightly")
@FLOW
@click.pass_obj
def pause(given: Globals, flow_name: str) -> None:
    """Hold everything of a flow; running tasks are stopped."""
    print_one(given, ask(given, lambda client: client.flows.pause(flow_name)), FIELDS)


@command("resume", "orchestrate flow resume nightly")
@FLOW
@click.pass_obj
def resume(given: Globals, flow_name: str) -> None:
    """Let a paused flow go on."""
    print_one(given, ask(given, lambda client: client.flows.resume(flow_name)), FIELDS)


@command(
    "rerun",
    "orchestrate flow rerun nightly --follow",
    "orchestrate flow rerun nightly --from-failed",
)
@FLOW
@click.option("--from-failed", is_flag=True, help="No new flow: the same one from what failed.")
@click.option("--steps", type=int, metavar="N", help="Jumps that a new flow may make; 100.")
@click.option("--follow", is_flag=True, help="Watch it to its end; the exit code tells.")
@click.pass_obj
def rerun(
    given: Globals, flow_name: str, from_failed: bool, steps: int | None, follow: bool
) -> int:
    """Run a flow again with the same plan and input, and print the id of the new flow."""
    if from_failed and steps is not None:
        raise click.UsageError("--steps is for a new flow")
    made = ask(
        given,
        lambda client: client.flows.rerun(flow_name, from_failed=from_failed, steps=steps),
    )
    return told(given, made, follow=follow)


for _each in (start, list_, show, tasks, cancel, pause, resume, rerun):
    flow.add_command(_each)
