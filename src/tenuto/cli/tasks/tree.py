"""`orchestrate task tree`: a task with its direct and nested subtasks."""

from typing import TYPE_CHECKING, NamedTuple

import click

from tenuto.cli.base import GlobalOptions, command, task_argument, task_id_options
from tenuto.cli.connection import call_engine

if TYPE_CHECKING:
    from uuid import UUID

    from tenuto.client.remote.engine import AnyEngine
    from tenuto.engine.views import TaskSummary, TaskView

MAX_TASKS = 500
"""Maximum number of tasks shown."""
_PAGE_SIZE = 100


class TaskNode(NamedTuple):
    """One task of the tree."""

    id: "UUID"
    title: str
    status: str
    children: "list[TaskNode]"


class TaskTree(NamedTuple):
    """A task with its subtasks; `truncated` is True if there are more than `MAX_TASKS`."""

    root: TaskNode
    truncated: bool


@command(
    "tree", "orchestrate task tree 0198c0de-5b1c", "orchestrate task tree --id 0198c0de --json"
)
@task_id_options
@click.pass_obj
def tree(options: GlobalOptions, task: str | None, named: str | None) -> None:
    """Show a task with its direct and nested subtasks."""
    name = task_argument(task, named)

    async def find_tree(engine: "AnyEngine") -> TaskTree:
        return await read_tree(engine, await engine.find(name))

    result = call_engine(options, find_tree)
    if options.json:
        from tenuto.cli.render import print_json

        print_json({"root": _to_json(result.root), "truncated": result.truncated})
        return
    click.echo(_format_node(result.root))
    _print_children(result.root, "")
    if result.truncated:
        click.echo(
            f"more than {MAX_TASKS:,} tasks; run `task tree` on a subtask to see tasks below it",
            err=True,
        )


async def read_tree(engine: "AnyEngine", task: "UUID") -> TaskTree:
    """Reads a task's tree level by level; stops as truncated before more than `MAX_TASKS` tasks."""
    root = _to_node(await engine.show(task))
    level, shown = [root], 1
    while level:
        next_level: list[TaskNode] = []
        for node in level:
            children = await _read_children(engine, node.id, MAX_TASKS - shown + 1)
            if shown + len(children) > MAX_TASKS:
                return TaskTree(root, truncated=True)
            node.children.extend(children)
            shown += len(children)
            next_level += children
        level = next_level
    return TaskTree(root, truncated=False)


async def _read_children(engine: "AnyEngine", task: "UUID", limit: int) -> list[TaskNode]:
    """Returns the newest `limit` subtasks, oldest first."""
    from tenuto.model.tasks.submission import Filter

    children: list[TaskNode] = []
    cursor = None
    while len(children) < limit:
        page = await engine.list(Filter(parent=task), _PAGE_SIZE, cursor)
        children += [_to_node(summary) for summary in page.tasks]
        cursor = page.next_cursor
        if cursor is None:
            break
    return children[:limit][::-1]


def _to_node(task: "TaskView | TaskSummary") -> TaskNode:
    """Returns a tree node for the task, without children yet."""
    return TaskNode(task.id, task.title, str(task.status), [])


def _format_node(node: TaskNode) -> str:
    """Returns one line: title, status and id."""
    from tenuto.model.printable import printable

    return printable(f"{node.title}  {node.status}  {node.id}")


def _print_children(node: TaskNode, indent: str) -> None:
    """Prints the children of a node with branch lines, recursively."""
    for index, child in enumerate(node.children):
        last = index == len(node.children) - 1
        click.echo(f"{indent}{'└─ ' if last else '├─ '}{_format_node(child)}")
        _print_children(child, f"{indent}{'   ' if last else '│  '}")


def _to_json(node: TaskNode) -> dict[str, object]:
    """Returns the node and all nodes below it as JSON data."""
    children = [_to_json(child) for child in node.children]
    return {
        "id": str(node.id),
        "title": node.title,
        "status": node.status,
        "children": children,
    }
