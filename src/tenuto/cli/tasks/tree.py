"""`orchestrate task tree`: a task with the tasks that its attempts made, near and far."""

from typing import TYPE_CHECKING, NamedTuple

import click

from tenuto.cli.base import Globals, command, one_task, task_argument
from tenuto.cli.connection import call

if TYPE_CHECKING:
    from uuid import UUID

    from tenuto.client.remote.engine import AnyEngine
    from tenuto.engine.views import TaskSummary, TaskView

MOST = 500
"""Tasks that are shown at most."""
_PAGE = 100


class TaskNode(NamedTuple):
    """A task as the tree shows it."""

    id: "UUID"
    title: str
    status: str
    children: "list[TaskNode]"


class TaskTree(NamedTuple):
    """The task with all below it; `left` is whether there are more than are shown."""

    root: TaskNode
    left: bool


@command(
    "tree", "orchestrate task tree 0198c0de-5b1c", "orchestrate task tree --id 0198c0de --json"
)
@one_task
@click.pass_obj
def tree(given: Globals, task: str | None, named: str | None) -> None:
    """Show a task with the tasks that its attempts made, and those that these made."""
    name = task_argument(task, named)

    async def read(engine: "AnyEngine") -> TaskTree:
        return await grown(engine, await engine.find(name))

    found = call(given, read)
    if given.json:
        from tenuto.cli.render import print_json

        print_json({"root": _plain(found.root), "truncated": found.left})
        return
    click.echo(_line(found.root))
    _print_below(found.root, "")
    if found.left:
        click.echo(f"more than {MOST:,} tasks: name one of them to see what is below it", err=True)


async def grown(engine: "AnyEngine", task: "UUID") -> TaskTree:
    """A task's tree, level by level, until it is too large to show."""
    root = _node(await engine.show(task))
    level, shown = [root], 1
    while level:
        below: list[TaskNode] = []
        for node in level:
            children = await _children(engine, node.id, MOST - shown + 1)
            if shown + len(children) > MOST:
                return TaskTree(root, left=True)
            node.children.extend(children)
            shown += len(children)
            below += children
        level = below
    return TaskTree(root, left=False)


async def _children(engine: "AnyEngine", task: "UUID", most: int) -> list[TaskNode]:
    """Up to so many children, oldest first."""
    from tenuto.engine.tasks.query import Filter

    found: list[TaskNode] = []
    cursor = None
    while len(found) < most:
        page = await engine.list(Filter(parent=task), _PAGE, cursor)
        found += [_node(each) for each in page.tasks]
        cursor = page.next_cursor
        if cursor is None:
            break
    return found[:most][::-1]


def _node(task: "TaskView | TaskSummary") -> TaskNode:
    return TaskNode(task.id, task.title, str(task.status), [])


def _line(node: TaskNode) -> str:
    from tenuto.model.printable import printable

    return printable(f"{node.title}  {node.status}  {node.id}")


def _print_below(node: TaskNode, branch: str) -> None:
    for at, child in enumerate(node.children):
        last = at == len(node.children) - 1
        click.echo(f"{branch}{'└─ ' if last else '├─ '}{_line(child)}")
        _print_below(child, f"{branch}{'   ' if last else '│  '}")


def _plain(node: TaskNode) -> dict[str, object]:
    children = [_plain(child) for child in node.children]
    return {
        "id": str(node.id),
        "title": node.title,
        "status": node.status,
        "children": children,
    }
