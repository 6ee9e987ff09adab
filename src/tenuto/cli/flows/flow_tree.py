"""Prints a flow or group as a tree, with planned tasks; also live, for `--follow`."""

from collections import Counter, defaultdict
from typing import TYPE_CHECKING, NamedTuple, TypeVar

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from rich.console import Console
    from rich.text import Text

    from tenuto.cli.base import GlobalOptions
    from tenuto.client.remote.engine import AnyEngine
    from tenuto.engine.flows.graph import GraphNode, GraphView
    from tenuto.engine.flows.views import FlowView, GroupView

V = TypeVar("V", "FlowView", "GroupView")

MAX_CHILDREN = 30
"""Maximum number of a group's children shown; the others are counted by status."""
_MARKS = {
    "COMPLETED": "✓",
    "RUNNING": "▶",
    "ASSIGNED": "▶",
    "FAILED": "✗",
    "DEAD": "✗",
    "CANCELLED": "■",
    "SKIPPED": "-",
    "PAUSED": "‖",
    "RETRY_WAIT": "↻",
    "PLANNED": " ",
}
_WAITING = "·"
_DISPLAY_RANK = {
    "PENDING": 1,
    "WAITING": 1,
    "COMPLETED": 2,
    "SKIPPED": 2,
    "CANCELLED": 2,
    "PLANNED": 2,
}
"""Sort rank of statuses that are shown last if a group has too many children; default: 0."""
_MAX_ERROR_CHARS = 100
"""Maximum number of characters of an error."""
_UNLABELLED_EDGES = ("next", "sequence", "depends")


class Line(NamedTuple):
    """One line of the tree: indentation with branches, text, and the status that colours it."""

    branch: str
    text: str
    status: str


def tree_lines(graph: "GraphView", max_children: int = MAX_CHILDREN) -> list[Line]:
    """Returns the lines of the tree; nodes of one group slot follow each other on one level."""
    children: defaultdict[str | None, list[GraphNode]] = defaultdict(list)
    for node in graph.nodes:
        children[node.parent].append(node)
    for nodes in children.values():
        # The sort is stable: within a slot, nodes stay in the order of their creation.
        nodes.sort(key=lambda node: node.slot)
    edge_kinds = {
        edge.target: edge.kind for edge in graph.edges if edge.kind not in _UNLABELLED_EDGES
    }
    jumps = {edge.source: edge.target for edge in graph.edges if edge.kind == "goto"}
    keys = {node.id: node.key or node.title for node in graph.nodes}
    tree = _TreeLines(
        children,
        edge_kinds,
        {source: keys[target] for source, target in jumps.items()},
        max_children,
    )
    result = tree.lines_in(None, "")
    if graph.truncated:
        result.append(Line("", "… the graph is truncated", "SKIPPED"))
    return result


class _TreeLines:
    """Builds the lines of a tree from its nodes, by parent, and their edges."""

    def __init__(
        self,
        children: "dict[str | None, list[GraphNode]]",
        edge_kinds: "Mapping[str, str]",
        jumps: dict[str, str],
        max_children: int,
    ) -> None:
        self._children = children
        self._edge_kinds = edge_kinds
        self._jumps = jumps
        self._max_children = max_children

    def lines_in(self, parent: str | None, branch: str) -> list[Line]:
        """Returns the lines of a group's nodes, with nested groups; summarises too many."""
        shown, rest = _select_nodes(self._children.get(parent, []), self._max_children)
        result: list[Line] = []
        for index, node in enumerate(shown):
            last = index == len(shown) - 1 and not rest
            result.append(
                Line(f"{branch}{'└─ ' if last else '├─ '}", self._node_text(node), node.status)
            )
            result += self.lines_in(node.id, f"{branch}{'   ' if last else '│  '}")
        if rest:
            counts = Counter(node.status for node in rest)
            summary = ", ".join(f"{n:,} {status}" for status, n in sorted(counts.items()))
            result.append(Line(f"{branch}└─ ", f"… {len(rest):,} more: {summary}", "SKIPPED"))
        return result

    def _node_text(self, node: "GraphNode") -> str:
        """Returns a node's mark, name, kind, status, progress and error in one line."""
        from tenuto.cli.render import shorten_line
        from tenuto.model.printable import printable

        edge_kind = self._edge_kinds.get(node.id)
        name = node.key or node.title
        if edge_kind == "item" and node.is_group:
            name += "  items"
        elif (node.activation or 1) > 1:
            name += f" #{node.activation}"
        if node.title != node.key and not node.is_group:
            name += f"  {node.title}"
        kind = "" if node.kind == "agent" else f" ({node.kind}{self._jump_text(node)})"
        branch = f"{edge_kind}: " if edge_kind in ("true", "false") else ""
        done = "" if node.progress is None or node.status == "COMPLETED" else f" {node.progress}%"
        mark = _MARKS.get(node.status, _WAITING)
        error = "" if node.error is None else f": {shorten_line(node.error, _MAX_ERROR_CHARS)}"
        return printable(f"{mark} {branch}{name}{kind}  {node.status}{done}{error}")

    def _jump_text(self, node: "GraphNode") -> str:
        """Returns ` to TARGET` for a goto node, else an empty text."""
        return f" to {self._jumps[node.id]}" if node.id in self._jumps else ""


def _select_nodes(
    nodes: "list[GraphNode]", max_nodes: int
) -> "tuple[list[GraphNode], list[GraphNode]]":
    """Returns the nodes to show, in order, and the rest; failures and running nodes come first."""
    ranked = sorted(range(len(nodes)), key=lambda at: (_DISPLAY_RANK.get(nodes[at].status, 0), at))
    selected = set(ranked[:max_nodes])
    shown = [node for at, node in enumerate(nodes) if at in selected]
    return shown, [node for at, node in enumerate(nodes) if at not in selected]


def format_heading(view: "FlowView | GroupView") -> str:
    """Returns one line with the key, title, status, progress and id of a flow or group."""
    from tenuto.model.printable import printable

    title = "" if view.title == view.key else f"  {view.title}"
    done = f" {view.progress_percent}%" if view.finished_at is None else ""
    return printable(f"{view.key}{title}  {view.status}{done}  {view.id}")


def print_tree(view: "FlowView | GroupView", graph: "GraphView") -> None:
    """Prints the tree, coloured on a terminal."""
    from tenuto.cli.render import is_terminal

    if is_terminal():
        _console().print(format_tree(view, graph))
        return
    print(format_heading(view))
    for line in tree_lines(graph):
        print(f"{line.branch}{line.text}")


def _console() -> "Console":
    """Returns a new console for trees, without colours if NO_COLOR is set."""
    import os

    from rich.console import Console

    plain = bool(os.environ.get("NO_COLOR"))
    return Console(color_system=None if plain else "auto", highlight=False, markup=False)


def format_tree(view: "FlowView | GroupView", graph: "GraphView") -> "Text":
    """Returns the tree as coloured text for rich."""
    from rich.text import Text

    from tenuto.cli.render import style_of

    text = Text(no_wrap=True, overflow="ellipsis")
    text.append(format_heading(view), style=style_of(view.status))
    for line in tree_lines(graph):
        text.append(f"\n{line.branch}", style=style_of("PLANNED"))
        text.append(line.text, style=style_of(line.status))
    return text


async def follow_to_end(
    options: "GlobalOptions",
    engine: "AnyEngine",
    read_view: "Callable[[], Awaitable[V]]",
    read_graph: "Callable[[], Awaitable[GraphView]]",
    note: str,
) -> int:
    """Shows a flow or group until it finishes; returns 0 if it is COMPLETED, else 1.

    On Ctrl-C, prints `note`.
    """
    import asyncio

    from tenuto.cli.render import is_terminal, print_json, print_note

    try:
        view = await _show_until_finished(engine, read_view, read_graph, quiet=options.json)
    except asyncio.CancelledError:
        print_note(note)
        raise
    if options.json:
        print_json(view)
    elif not is_terminal():
        print_tree(view, await read_graph())
    return 0 if view.status == "COMPLETED" else 1


async def _show_until_finished(
    engine: "AnyEngine",
    read_view: "Callable[[], Awaitable[V]]",
    read_graph: "Callable[[], Awaitable[GraphView]]",
    *,
    quiet: bool,
) -> "V":
    """Shows a flow or group until it finishes and returns its last state.

    On a terminal the tree is redrawn; elsewhere status changes are printed line by line. `quiet`
    prints nothing.
    """
    from contextlib import aclosing

    from tenuto.cli.render import is_terminal
    from tenuto.client.flows import poll_until_finished

    async with aclosing(poll_until_finished(engine, read_view)) as views:
        if quiet:
            async for view in views:
                last = view
        elif is_terminal():
            from rich.live import Live

            shown = ""
            with Live(console=_console(), auto_refresh=False) as live:
                async for view in views:
                    last = view
                    text = format_tree(view, await read_graph())
                    if text.plain != shown:
                        live.update(text, refresh=True)
                    shown = text.plain
        else:
            seen: dict[str, str] = {}
            async for view in views:
                last = view
                _print_status_changes(await read_graph(), seen)
    return last


def _print_status_changes(graph: "GraphView", seen: dict[str, str]) -> None:
    """Prints to standard error the nodes with a new status, and updates `seen` (status by id).

    Planned nodes are left out.
    """
    from tenuto.cli.render import print_note

    for node in graph.nodes:
        if node.status != "PLANNED" and seen.get(node.id) != node.status:
            activation = f" #{node.activation}" if (node.activation or 1) > 1 else ""
            print_note(f"{node.status:<10} {node.key or node.title}{activation}")
            seen[node.id] = node.status
