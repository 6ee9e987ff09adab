"""A flow as a drawing: what was made, what is planned to follow, and what leads to what. Pure.

Whatever ran in one slot stands there in the order in which it was made. What is still to come is
read from the plan, on from whatever has not ended.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, Literal
from uuid import UUID

import msgspec

from tenuto.model.flows.definition import Condition, Foreach, Goto, GroupSpec
from tenuto.model.flows.plan import Plan
from tenuto.model.flows.progress import GROUP_OPEN, is_next_child
from tenuto.model.tasks.task import TERMINAL
from tenuto.store.protocol import Row

EdgeKind = Literal["next", "sequence", "true", "false", "goto", "item", "depends"]
MAX_NODES = 2000
MAX_WAITS = 10_000
PLANNED = "PLANNED"
_GROUPS = ("sequential", "parallel")
_FAILED = ("FAILED", "DEAD", "RETRY_WAIT")
_CERTAIN = ("next", "sequence")


class GraphNode(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A task or group of a flow; `id` is its own, or `plan:KEY` for one that is to be made.

    Of a group `kind` is its order. `parent` is the id of the group that it stands in.
    """

    id: str
    key: str | None
    title: str
    kind: str
    status: str
    activation: int | None = None
    parent: str | None = None
    slot: int = 0
    progress: int | None = None
    error: str | None = None
    """Why its last attempt failed, where it has not succeeded since."""

    @property
    def is_group(self) -> bool:
        return self.kind in _GROUPS


class GraphEdge(msgspec.Struct, frozen=True, rename={"source": "from", "target": "to"}):
    """What leads from one node to another."""

    source: str
    target: str
    kind: EdgeKind


class GraphView(msgspec.Struct, frozen=True, kw_only=True):
    """A flow, or a run of a group, as nodes and edges; `truncated` when there is more of it."""

    nodes: list[GraphNode]
    edges: list[GraphEdge]
    truncated: bool = False


class GraphBuilder:
    """Puts a graph together; `root` is the run of a group whose successors are not of interest."""

    def __init__(
        self,
        plan: Plan,
        rows: Sequence[Row],
        waits: Sequence[Row] = (),
        root: UUID | None = None,
        most: int = MAX_NODES,
    ) -> None:
        self._plan = plan
        self._most = most
        self._root = None if root is None else str(root)
        self._truncated = len(rows) > most or len(waits) > MAX_WAITS
        self._made = {str(row["id"]): row["made"] for row in rows[:most] if row["is_group"]}
        self._nodes: dict[str, GraphNode] = {}
        for row in rows[:most]:
            self._add(_node(row))
        self._edges = list(self._between())
        self._edges += _waits(self._nodes, waits)
        self._certain: set[str] = set(self._nodes)
        self._todo: list[GraphNode] = []

    def view(self, *, planned: bool) -> GraphView:
        """The graph, with what is to come if wanted."""
        if planned:
            self._look_ahead()
        nodes = [
            node
            if node.parent is None or node.parent in self._nodes
            else msgspec.structs.replace(node, parent=None)
            for node in self._nodes.values()
        ]
        return GraphView(nodes=nodes, edges=self._edges, truncated=self._truncated)

    def to_come(self) -> int:
        """How many tasks will be made if everything goes well, whatever conditions decide."""
        self._look_ahead()
        coming = (self._nodes[each] for each in self._certain)
        return sum(node.status == PLANNED and not node.is_group for node in coming)

    def _add(self, node: GraphNode) -> None:
        self._nodes[node.id] = node

    # What was made.

    def _slots(self) -> dict[str | None, dict[int, list[GraphNode]]]:
        """What stands in each slot of each group, in order; the first is the group's own child."""
        found: dict[str | None, dict[int, list[GraphNode]]] = defaultdict(lambda: defaultdict(list))
        for node in self._nodes.values():
            if node.id != self._root:
                found[node.parent][node.slot].append(node)
        for parent, slots in found.items():
            for slot, nodes in slots.items():
                own = self._child(parent, slot)
                first = next((at for at, node in enumerate(nodes) if node.key == own), 0)
                nodes.insert(0, nodes.pop(first))
        return found

    def _child(self, parent: str | None, slot: int) -> str | None:
        """The key that a slot begins with."""
        spec = None if parent is None else self._group(self._nodes.get(parent))
        if spec is None or slot >= len(spec.children):
            return self._plan.root if parent is None else None
        return spec.children[slot]

    def _group(self, node: GraphNode | None) -> GroupSpec | None:
        return None if node is None or not node.is_group else self._plan.groups.get(node.key or "")

    def _between(self) -> Iterator[GraphEdge]:
        for parent, slots in self._slots().items():
            for nodes in slots.values():
                for one, other in pairwise(nodes):
                    yield GraphEdge(one.id, other.id, self._kind(one, other))
            home = None if parent is None else self._nodes.get(parent)
            if home is not None and home.kind == "sequential":
                for before, after in pairwise(sorted(slots)):
                    yield GraphEdge(slots[before][-1].id, slots[after][0].id, "sequence")

    def _kind(self, one: GraphNode, other: GraphNode) -> EdgeKind:
        """Why the other took the place of the one."""
        for key, kind in self._successors(one):
            if key == other.key or (kind == "item" and other.is_group):
                return kind
        return "next"

    # What is to come.

    def _look_ahead(self) -> None:
        made = list(self._nodes.values())
        last = {nodes[-1].id for slots in self._slots().values() for nodes in slots.values()}
        for node in made:
            if not _is_open(node):
                continue
            if node.is_group:
                self._children(node, self._made[node.id])
            if node.id in last and node.id != self._root:
                self._onward(node)
        while self._todo:
            node = self._todo.pop(0)
            if node.is_group:
                self._children(node, 0)
            self._onward(node)

    def _children(self, group: GraphNode, first: int) -> None:
        """The children of a group that are not made yet."""
        spec = self._group(group)
        if spec is None or first >= len(spec.children):
            return
        before = None
        if first:
            slots = self._slots()[group.id]
            before = slots[first - 1][-1].id if slots.get(first - 1) else None
        for slot, key in enumerate(spec.children[first:], start=first):
            found = self._planned(key, group.id, slot, certain=group.id in self._certain)
            if found is None:
                return
            if before is not None and spec.order == "sequential":
                self._edges.append(GraphEdge(before, found, "sequence"))
            before = found

    def _onward(self, node: GraphNode) -> None:
        for key, kind in self._successors(node):
            found = self._latest(key) if kind == "goto" else None
            if found is None:
                certain = node.id in self._certain and kind in _CERTAIN
                found = self._planned(key, node.parent, node.slot, certain=certain)
            if found is not None:
                self._edges.append(GraphEdge(node.id, found, kind))

    def _successors(self, node: GraphNode) -> list[tuple[str, EdgeKind]]:
        """What may take the node's place, and why."""
        spec = self._group(node) or self._plan.tasks.get(node.key or "")
        if spec is None:
            return []
        after: list[tuple[str | None, EdgeKind]] = [(spec.next, "next")]
        if not isinstance(spec, GroupSpec) and not node.is_group:
            match spec.control:
                case Goto(target=target):
                    after = [(target, "goto")]
                case Condition(on_true=yes, on_false=no):
                    after = [(yes or spec.next, "true"), (no or spec.next, "false")]
                case Foreach(template=template):
                    after = [(template, "item"), *after]
        around = self._nodes.get(node.parent or "")
        home = None if around is None else around.key
        return [
            (key, kind)
            for key, kind in after
            if key is not None
            and (
                kind in ("goto", "item") or not is_next_child(self._plan, home, node.key or "", key)
            )
        ]

    def _latest(self, key: str) -> str | None:
        found = [node for node in self._nodes.values() if node.key == key]
        return found[-1].id if found else None

    def _planned(self, key: str, parent: str | None, slot: int, *, certain: bool) -> str | None:
        """The id of the node that stands for the key's next run; none where there is no room."""
        name = f"plan:{key}"
        if certain:
            self._certain.add(name)
        if name in self._nodes:
            return name
        if len(self._nodes) >= self._most:
            self._truncated = True
            return None
        spec = self._plan.spec(key)
        kind = spec.order if isinstance(spec, GroupSpec) else spec.kind
        node = GraphNode(
            id=name, key=key, title=spec.title, kind=kind, status=PLANNED, parent=parent, slot=slot
        )
        self._add(node)
        self._todo.append(node)
        return name


def _node(row: Row) -> GraphNode:
    return GraphNode(
        id=str(row["id"]),
        key=row["key"],
        title=row["title"],
        kind=row["kind"],
        status=row["status"],
        activation=row["activation"],
        parent=None if row["parent"] is None else str(row["parent"]),
        slot=row["slot"] or 0,
        progress=row["progress_percent"],
        error=row["last_error"] if row["status"] in _FAILED else None,
    )


def _is_open(node: GraphNode) -> bool:
    return node.status in GROUP_OPEN if node.is_group else node.status not in TERMINAL


def _waits(nodes: dict[str, Any], waits: Iterable[Row]) -> Iterator[GraphEdge]:
    for row in waits:
        one, other = str(row["needs"]), str(row["task"])
        if one in nodes and other in nodes:
            yield GraphEdge(one, other, "depends")


# Mermaid.

_ESCAPES = str.maketrans(
    {'"': "#quot;", "<": "#lt;", ">": "#gt;", "#": "#35;", "&": "#amp;", "\n": " ", "\r": " "}
)
_COLOURS = {
    "COMPLETED": "fill:#d7f5dd,stroke:#2e7d32",
    "RUNNING": "fill:#d6ecff,stroke:#1565c0",
    "FAILED": "fill:#ffdad6,stroke:#b3261e",
    "PLANNED": "fill:#ffffff,stroke:#999999,stroke-dasharray:4",
}
_LIKE = {"ASSIGNED": "RUNNING", "DEAD": "FAILED", "CANCELLED": "FAILED"}
_SHAPES = {"condition": ("{", "}"), "approval": ("([", "])"), "goto": ("[/", "/]")}


def mermaid(graph: GraphView) -> str:
    """The graph as Mermaid text."""
    names = {node.id: f"n{number}" for number, node in enumerate(graph.nodes)}
    inside: dict[str | None, list[GraphNode]] = defaultdict(list)
    for node in graph.nodes:
        inside[node.parent].append(node)
    lines = ["flowchart TD", *_drawn(inside, names, None, 1)]
    for edge in graph.edges:
        arrow = "-.->" if edge.kind == "depends" else "-->"
        said = "" if edge.kind in _CERTAIN else f"|{edge.kind}|"
        lines.append(f"  {names[edge.source]} {arrow}{said} {names[edge.target]}")
    for status, style in _COLOURS.items():
        like = [n for n in graph.nodes if _LIKE.get(n.status, n.status) == status]
        if like:
            lines.append(f"  classDef {status.lower()} {style}")
            lines.append(f"  class {','.join(names[n.id] for n in like)} {status.lower()}")
    return "\n".join(lines) + "\n"


def _drawn(
    inside: dict[str | None, list[GraphNode]],
    names: dict[str, str],
    parent: str | None,
    depth: int,
) -> Iterator[str]:
    """The nodes of a group, the groups among them as boxes around their own."""
    room = "  " * depth
    for node in inside.get(parent, ()):
        name, label = names[node.id], _label(node)
        if node.is_group and inside.get(node.id):
            yield f'{room}subgraph {name} ["{label}"]'
            yield from _drawn(inside, names, node.id, depth + 1)
            yield f"{room}end"
        else:
            left, right = _SHAPES.get(node.kind, ("[", "]"))
            yield f'{room}{name}{left}"{label}"{right}'


def _label(node: GraphNode) -> str:
    again = f" #{node.activation}" if (node.activation or 1) > 1 else ""
    kind = "" if node.kind == "agent" else f"{node.kind}, "
    return f"{node.title}{again} ({kind}{node.status})".translate(_ESCAPES)
