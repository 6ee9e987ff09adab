"""A flow as a tree of lines: groups with what is in them, and what is still to come."""

from collections import Counter, defaultdict
from typing import TYPE_CHECKING, NamedTuple, TypeVar

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from rich.console import Console
    from rich.text import Text

    from tenuto.cli.base import Globals
    from tenuto.client.remote.engine import AnyEngine
    from tenuto.engine.flows.graph import GraphNode, GraphView
    from tenuto.engine.flows.views import FlowView, GroupView

V = TypeVar("V", "FlowView", "GroupView")

MOST = 30
"""Children of a group that are shown; of the others it is told how many there are."""
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
_DULL = {"PENDING": 1, "WAITING": 1, "COMPLETED": 2, "SKIPPED": 2, "CANCELLED": 2, "PLANNED": 2}
"""Statuses that are less worth a line than failures and what runs."""
_ERROR = 100
"""Characters of an error that are shown."""
_QUIET = ("next", "sequence", "depends")


class Line(NamedTuple):
    """A line of the drawing: the branches before it, its text, and the status that colours it."""

    branch: str
    text: str
    status: str


def lines(graph: "GraphView", most: int = MOST) -> list[Line]:
    """The tree; what stands in one slot stands at one level, in order."""
    inside: defaultdict[str | None, list[GraphNode]] = defaultdict(list)
    for node in graph.nodes:
        inside[node.parent].append(node)
    for nodes in inside.values():
        # Stable: within a slot nodes stay in the order in which they are made.
        nodes.sort(key=lambda node: node.slot)
    why = {edge.target: edge.kind for edge in graph.edges if edge.kind not in _QUIET}
    jumps = {edge.source: edge.target for edge in graph.edges if edge.kind == "goto"}
    keys = {node.id: node.key or node.title for node in graph.nodes}
    said = _TreeLines(inside, why, {one: keys[other] for one, other in jumps.items()}, most)
    found = said.under(None, "")
    if graph.truncated:
        found.append(Line("", "… and more than can be shown", "SKIPPED"))
    return found


class _TreeLines:
    def __init__(
        self,
        inside: "dict[str | None, list[GraphNode]]",
        why: "Mapping[str, str]",
        jumps: dict[str, str],
        most: int,
    ) -> None:
        self._inside = inside
        self._why = why
        self._jumps = jumps
        self._most = most

    def under(self, parent: str | None, branch: str) -> list[Line]:
        """The lines of what stands in a group."""
        shown, rest = _select_nodes(self._inside.get(parent, []), self._most)
        found: list[Line] = []
        for at, node in enumerate(shown):
            last = at == len(shown) - 1 and not rest
            found.append(Line(f"{branch}{'└─ ' if last else '├─ '}", self._text(node), node.status))
            found += self.under(node.id, f"{branch}{'   ' if last else '│  '}")
        if rest:
            counts = Counter(node.status for node in rest)
            told = ", ".join(f"{n:,} {status}" for status, n in sorted(counts.items()))
            found.append(Line(f"{branch}└─ ", f"… {len(rest):,} more: {told}", "SKIPPED"))
        return found

    def _text(self, node: "GraphNode") -> str:
        from tenuto.cli.render import cut
        from tenuto.model.printable import printable

        why = self._why.get(node.id)
        name = node.key or node.title
        if why == "item" and node.is_group:
            name += "  items"
        elif (node.activation or 1) > 1:
            name += f" #{node.activation}"
        if node.title != node.key and not node.is_group:
            name += f"  {node.title}"
        kind = "" if node.kind == "agent" else f" ({node.kind}{self._leads(node)})"
        branch = f"{why}: " if why in ("true", "false") else ""
        done = "" if node.progress is None or node.status == "COMPLETED" else f" {node.progress}%"
        mark = _MARKS.get(node.status, _WAITING)
        error = "" if node.error is None else f": {cut(node.error, _ERROR)}"
        return printable(f"{mark} {branch}{name}{kind}  {node.status}{done}{error}")

    def _leads(self, node: "GraphNode") -> str:
        """Where a jump leads."""
        return f" to {self._jumps[node.id]}" if node.id in self._jumps else ""


def _select_nodes(nodes: "list[GraphNode]", most: int) -> "tuple[list[GraphNode], list[GraphNode]]":
    """The nodes to show, in order, and the rest; of too many, what is over or to come gives way."""
    ranked = sorted(range(len(nodes)), key=lambda at: (_DULL.get(nodes[at].status, 0), at))
    kept = set(ranked[:most])
    shown = [node for at, node in enumerate(nodes) if at in kept]
    return shown, [node for at, node in enumerate(nodes) if at not in kept]


def heading(view: "FlowView | GroupView") -> str:
    """One line on how a flow or group is doing."""
    from tenuto.model.printable import printable

    title = "" if view.title == view.key else f"  {view.title}"
    done = f" {view.progress_percent}%" if view.finished_at is None else ""
    return printable(f"{view.key}{title}  {view.status}{done}  {view.id}")


def print_tree(view: "FlowView | GroupView", graph: "GraphView") -> None:
    """Print a drawing, in colour on a terminal."""
    from tenuto.cli.render import is_terminal

    if is_terminal():
        _console().print(drawn(view, graph))
        return
    print(heading(view))
    for line in lines(graph):
        print(f"{line.branch}{line.text}")


def _console() -> "Console":
    import os

    from rich.console import Console

    plain = bool(os.environ.get("NO_COLOR"))
    return Console(color_system=None if plain else "auto", highlight=False, markup=False)


def drawn(view: "FlowView | GroupView", graph: "GraphView") -> "Text":
    """The drawing as rich shows it."""
    from rich.text import Text

    from tenuto.cli.render import style_of

    text = Text(no_wrap=True, overflow="ellipsis")
    text.append(heading(view), style=style_of(view.status))
    for line in lines(graph):
        text.append(f"\n{line.branch}", style=style_of("PLANNED"))
        text.append(line.text, style=style_of(line.status))
    return text


async def followed(
    given: "Globals",
    engine: "AnyEngine",
    look: "Callable[[], Awaitable[V]]",
    graph: "Callable[[], Awaitable[GraphView]]",
    note: str,
) -> int:
    """Watch a flow or group to its end; answers the exit code. `note` is for who leaves before."""
    import asyncio

    from tenuto.cli.render import is_terminal, print_json, print_note

    try:
        view = await _follow(engine, look, graph, quiet=given.json)
    except asyncio.CancelledError:
        print_note(note)
        raise
    if given.json:
        print_json(view)
    elif not is_terminal():
        print_tree(view, await graph())
    return 0 if view.status == "COMPLETED" else 1


async def _follow(
    engine: "AnyEngine",
    look: "Callable[[], Awaitable[V]]",
    graph: "Callable[[], Awaitable[GraphView]]",
    *,
    quiet: bool,
) -> "V":
    """Show a flow or group until it has ended: live on a terminal, else what changes, by lines."""
    from contextlib import aclosing

    from tenuto.cli.render import is_terminal
    from tenuto.client.flows import poll_until_finished

    async with aclosing(poll_until_finished(engine, look)) as views:
        if quiet:
            async for view in views:
                last = view
        elif is_terminal():
            from rich.live import Live

            shown = ""
            with Live(console=_console(), auto_refresh=False) as live:
                async for view in views:
                    last = view
                    text = drawn(view, await graph())
                    if text.plain != shown:
                        live.update(text, refresh=True)
                    shown = text.plain
        else:
            seen: dict[str, str] = {}
            async for view in views:
                last = view
                _print_news(await graph(), seen)
    return last


def _print_news(graph: "GraphView", seen: dict[str, str]) -> None:
    """Print what has another status than when it was last seen."""
    from tenuto.cli.render import print_note

    for node in graph.nodes:
        if node.status != "PLANNED" and seen.get(node.id) != node.status:
            again = f" #{node.activation}" if (node.activation or 1) > 1 else ""
            print_note(f"{node.status:<10} {node.key or node.title}{again}")
            seen[node.id] = node.status
