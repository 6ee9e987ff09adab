"""A flow as a tree of lines: groups with what is in them, and what is still to come."""

from collections import Counter, defaultdict
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from tenuto.engine.flow_graph import GraphNode, GraphView

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
    said = _Said(inside, why, {one: keys[other] for one, other in jumps.items()}, most)
    found = said.under(None, "")
    if graph.truncated:
        found.append(Line("", "… and more than can be shown", "SKIPPED"))
    return found


class _Said:
    def __init__(
        self,
        inside: "dict[str | None, list[GraphNode]]",
        why: dict[str, str],
        jumps: dict[str, str],
        most: int,
    ) -> None:
        self._inside = inside
        self._why = why
        self._jumps = jumps
        self._most = most

    def under(self, parent: str | None, branch: str) -> list[Line]:
        """The lines of what stands in a group."""
        nodes = self._inside.get(parent, [])
        shown, rest = nodes[: self._most], nodes[self._most :]
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
        from tenuto.cli.render import printable

        name = node.key or node.title
        if (node.activation or 1) > 1:
            name += f" #{node.activation}"
        if node.title not in (node.key, ""):
            name += f"  {node.title}"
        kind = "" if node.kind == "agent" else f" ({node.kind}{self._leads(node)})"
        why = f"{self._why[node.id]}: " if self._why.get(node.id) in ("true", "false") else ""
        done = "" if node.progress is None or node.status == "COMPLETED" else f" {node.progress}%"
        mark = _MARKS.get(node.status, _WAITING)
        return printable(f"{mark} {why}{name}{kind}  {node.status}{done}")

    def _leads(self, node: "GraphNode") -> str:
        """Where a jump leads."""
        return f" {self._jumps[node.id]}" if node.id in self._jumps else ""


def print_tree(head: str, graph: "GraphView", status: str) -> None:
    """Print a drawing, in colour on a terminal."""
    from rich.console import Console

    from tenuto.cli.render import is_terminal

    if is_terminal():
        Console(highlight=False, markup=False).print(drawn(head, graph, status))
        return
    print(head)
    for line in lines(graph):
        print(f"{line.branch}{line.text}")


def drawn(head: str, graph: "GraphView", status: str):  # type: ignore[no-untyped-def]  # noqa: ANN201
    """The drawing for rich."""
    from rich.text import Text

    from tenuto.cli.render import style_of

    text = Text(no_wrap=True, overflow="ellipsis")
    text.append(head, style=style_of(status))
    for line in lines(graph):
        text.append(f"\n{line.branch}", style="dim")
        text.append(line.text, style=style_of(line.status))
    return text
