"""Builds the graph of a flow: created and planned tasks and groups, and edges. Pure.

Nodes of one slot are in the order of their creation. Planned nodes are read from the plan,
starting from the nodes that have not finished.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, Literal
from uuid import UUID

import msgspec

from tenuto.model.flows.definition import Condition, Foreach, Goto, GroupSpec
from tenuto.model.flows.groups import GROUP_OPEN
from tenuto.model.flows.plan import Plan
from tenuto.model.flows.progress import is_next_child
from tenuto.model.tasks.task import TERMINAL
from tenuto.store.protocol import Row

EdgeKind = Literal["next", "sequence", "true", "false", "goto", "item", "depends"]
MAX_NODES = 2000
MAX_DEPENDENCIES = 10_000
PLANNED = "PLANNED"
_GROUPS = ("sequential", "parallel")
_FAILED = ("FAILED", "DEAD", "RETRY_WAIT")
_UNCONDITIONAL = ("next", "sequence")


class GraphNode(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A task or group of a flow; `id` is its id, or `plan:KEY` if it is not created yet.

    `kind` of a group is its order. `parent` is the id of the group that contains it.
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
    """The error of its last attempt, if the task failed or dependencies for a retry."""

    @property
    def is_group(self) -> bool:
        """True for a group or a foreach's run."""
        return self.kind in _GROUPS


class GraphEdge(msgspec.Struct, frozen=True, rename={"source": "from", "target": "to"}):
    """A directed edge between two nodes."""

    source: str
    target: str
    kind: EdgeKind


class GraphView(msgspec.Struct, frozen=True, kw_only=True):
    """A flow, or a run of a group, as nodes and edges; `truncated` if some are missing."""

    nodes: list[GraphNode]
    edges: list[GraphEdge]
    truncated: bool = False


class GraphBuilder:
    """Builds a graph; `root` is a group run to draw without its own successors."""

    def __init__(
        self,
        plan: Plan,
        rows: Sequence[Row],
        dependencies: Sequence[Row] = (),
        root: UUID | None = None,
        max_nodes: int = MAX_NODES,
    ) -> None:
        self._plan = plan
        self._max_nodes = max_nodes
        self._root = None if root is None else str(root)
        self._truncated = len(rows) > max_nodes or len(dependencies) > MAX_DEPENDENCIES
        self._created_children = {
            str(row["id"]): row["made"] for row in rows[:max_nodes] if row["is_group"]
        }
        self._nodes: dict[str, GraphNode] = {}
        for row in rows[:max_nodes]:
            self._add_node(_node_from_row(row))
        self._edges = list(self._slot_edges())
        self._edges += _dependency_edges(self._nodes, dependencies)
        self._certain: set[str] = set(self._nodes)
        """Ids of nodes that exist, or will run if all tasks before them succeed."""
        self._unexpanded: list[GraphNode] = []
        """Planned nodes whose children and successors are not added yet."""

    def view(self, *, planned: bool) -> GraphView:
        """Returns the graph, with planned nodes if `planned`; parents outside become `None`."""
        if planned:
            self._add_all_planned()
        nodes = [
            node
            if node.parent is None or node.parent in self._nodes
            else msgspec.structs.replace(node, parent=None)
            for node in self._nodes.values()
        ]
        return GraphView(nodes=nodes, edges=self._edges, truncated=self._truncated)

    def count_planned(self) -> int:
        """Adds the planned nodes; returns how many of them are tasks that run if all succeed."""
        self._add_all_planned()
        certain = (self._nodes[node_id] for node_id in self._certain)
        return sum(node.status == PLANNED and not node.is_group for node in certain)

    def _add_node(self, node: GraphNode) -> None:
        self._nodes[node.id] = node

    def _nodes_by_slot(self) -> dict[str | None, dict[int, list[GraphNode]]]:
        """Returns nodes but the root by parent id and slot: the planned child, then by creation."""
        by_slot: dict[str | None, dict[int, list[GraphNode]]] = defaultdict(
            lambda: defaultdict(list)
        )
        for node in self._nodes.values():
            if node.id != self._root:
                by_slot[node.parent][node.slot].append(node)
        for parent, slots in by_slot.items():
            for slot, nodes in slots.items():
                own_key = self._first_key_in_slot(parent, slot)
                first = next((at for at, node in enumerate(nodes) if node.key == own_key), 0)
                nodes.insert(0, nodes.pop(first))
        return by_slot

    def _first_key_in_slot(self, parent: str | None, slot: int) -> str | None:
        """Returns the key that starts a slot of node id `parent` or the flow; `None`: unplanned."""
        spec = None if parent is None else self._group_spec(self._nodes.get(parent))
        if spec is None or slot >= len(spec.children):
            return self._plan.root if parent is None else None
        return spec.children[slot]

    def _group_spec(self, node: GraphNode | None) -> GroupSpec | None:
        """Returns the definition of a group; `None` for a task or the run of a foreach."""
        return None if node is None or not node.is_group else self._plan.groups.get(node.key or "")

    def _slot_edges(self) -> Iterator[GraphEdge]:
        """Yields the edges between created nodes: within slots, and between slots of a sequence."""
        for parent, slots in self._nodes_by_slot().items():
            for nodes in slots.values():
                for earlier, later in pairwise(nodes):
                    yield GraphEdge(earlier.id, later.id, self._edge_kind(earlier, later))
            group = None if parent is None else self._nodes.get(parent)
            if group is not None and group.kind == "sequential":
                for before, after in pairwise(sorted(slots)):
                    yield GraphEdge(slots[before][-1].id, slots[after][0].id, "sequence")

    def _edge_kind(self, earlier: GraphNode, later: GraphNode) -> EdgeKind:
        """Returns the edge kind between nodes that followed each other; `next` if unknown."""
        for key, kind in self._successors(earlier):
            if key == later.key or (kind == "item" and later.is_group):
                return kind
        return "next"

    def _add_all_planned(self) -> None:
        """Adds planned nodes and edges inside and after unfinished nodes, up to the limit."""
        existing = list(self._nodes.values())
        last = {
            nodes[-1].id for slots in self._nodes_by_slot().values() for nodes in slots.values()
        }
        for node in existing:
            if not _is_open(node):
                continue
            if node.is_group:
                self._add_planned_children(node, self._created_children[node.id])
            if node.id in last and node.id != self._root:
                self._add_planned_successors(node)
        while self._unexpanded:
            node = self._unexpanded.pop(0)
            if node.is_group:
                self._add_planned_children(node, 0)
            self._add_planned_successors(node)

    def _add_planned_children(self, group: GraphNode, first: int) -> None:
        """Adds a group's planned children from slot `first` on, with edges; none for a foreach."""
        spec = self._group_spec(group)
        if spec is None or first >= len(spec.children):
            return
        previous = None
        if first:
            slots = self._nodes_by_slot()[group.id]
            previous = slots[first - 1][-1].id if slots.get(first - 1) else None
        for slot, key in enumerate(spec.children[first:], start=first):
            node_id = self._add_planned_node(key, group.id, slot, certain=group.id in self._certain)
            if node_id is None:
                return
            if previous is not None and spec.order == "sequential":
                self._edges.append(GraphEdge(previous, node_id, "sequence"))
            previous = node_id

    def _add_planned_successors(self, node: GraphNode) -> None:
        """Adds the edges to what can follow a node in its slot, and planned nodes if needed."""
        for key, kind in self._successors(node):
            target = self._latest_node_id(key) if kind == "goto" else None
            if target is None:
                certain = node.id in self._certain and kind in _UNCONDITIONAL
                target = self._add_planned_node(key, node.parent, node.slot, certain=certain)
            if target is not None:
                self._edges.append(GraphEdge(node.id, target, kind))

    def _successors(self, node: GraphNode) -> list[tuple[str, EdgeKind]]:
        """Returns (key, edge kind) of what can follow a node in its slot, not the next child."""
        spec = self._group_spec(node) or self._plan.tasks.get(node.key or "")
        if spec is None:
            return []
        successors: list[tuple[str | None, EdgeKind]] = [(spec.next, "next")]
        if not isinstance(spec, GroupSpec) and not node.is_group:
            match spec.control:
                case Goto(target=target):
                    successors = [(target, "goto")]
                case Condition(on_true=yes, on_false=no):
                    successors = [(yes or spec.next, "true"), (no or spec.next, "false")]
                case Foreach(template=template):
                    successors = [(template, "item"), *successors]
        group = self._nodes.get(node.parent or "")
        group_key = None if group is None else group.key
        return [
            (key, kind)
            for key, kind in successors
            if key is not None
            and (
                kind in ("goto", "item")
                or not is_next_child(self._plan, group_key, node.key or "", key)
            )
        ]

    def _latest_node_id(self, key: str) -> str | None:
        """Returns the id of the node with the key that was added last; `None` without one."""
        nodes = [node for node in self._nodes.values() if node.key == key]
        return nodes[-1].id if nodes else None

    def _add_planned_node(
        self, key: str, parent: str | None, slot: int, *, certain: bool
    ) -> str | None:
        """Adds the planned node of a key unless it exists; returns its id, `None` at the limit.

        A `certain` node runs if all tasks before it succeed.
        """
        node_id = f"plan:{key}"
        if certain:
            self._certain.add(node_id)
        if node_id in self._nodes:
            return node_id
        if len(self._nodes) >= self._max_nodes:
            self._truncated = True
            return None
        spec = self._plan.spec(key)
        kind = spec.order if isinstance(spec, GroupSpec) else spec.kind
        node = GraphNode(
            id=node_id,
            key=key,
            title=spec.title,
            kind=kind,
            status=PLANNED,
            parent=parent,
            slot=slot,
        )
        self._add_node(node)
        self._unexpanded.append(node)
        return node_id


def _node_from_row(row: Row) -> GraphNode:
    """Returns the node of the task or group in a row."""
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
    """True if the task or group of the node is unfinished."""
    return node.status in GROUP_OPEN if node.is_group else node.status not in TERMINAL


def _dependency_edges(nodes: dict[str, Any], dependencies: Iterable[Row]) -> Iterator[GraphEdge]:
    """Yields an edge from each dependency to its dependent, if the graph has both."""
    for row in dependencies:
        needed, waiting = str(row["needs"]), str(row["task"])
        if needed in nodes and waiting in nodes:
            yield GraphEdge(needed, waiting, "depends")


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
_STYLED_AS = {"ASSIGNED": "RUNNING", "DEAD": "FAILED", "CANCELLED": "FAILED"}
_SHAPES = {"condition": ("{", "}"), "approval": ("([", "])"), "goto": ("[/", "/]")}


def mermaid(graph: GraphView) -> str:
    """Returns the graph as a flowchart in the Mermaid language."""
    names = {node.id: f"n{number}" for number, node in enumerate(graph.nodes)}
    by_parent: dict[str | None, list[GraphNode]] = defaultdict(list)
    for node in graph.nodes:
        by_parent[node.parent].append(node)
    lines = ["flowchart TD", *_render_nodes(by_parent, names, None, 1)]
    for edge in graph.edges:
        arrow = "-.->" if edge.kind == "depends" else "-->"
        label = "" if edge.kind in _UNCONDITIONAL else f"|{edge.kind}|"
        lines.append(f"  {names[edge.source]} {arrow}{label} {names[edge.target]}")
    for status, style in _COLOURS.items():
        node_names = [
            node for node in graph.nodes if _STYLED_AS.get(node.status, node.status) == status
        ]
        if node_names:
            lines.append(f"  classDef {status.lower()} {style}")
            lines.append(
                f"  class {','.join(names[node.id] for node in node_names)} {status.lower()}"
            )
    return "\n".join(lines) + "\n"


def _render_nodes(
    by_parent: dict[str | None, list[GraphNode]],
    names: dict[str, str],
    parent: str | None,
    depth: int,
) -> Iterator[str]:
    """Yields lines of the nodes inside node id `parent`; groups with nodes are subgraphs."""
    indent = "  " * depth
    for node in by_parent.get(parent, ()):
        name, label = names[node.id], _label(node)
        if node.is_group and by_parent.get(node.id):
            yield f'{indent}subgraph {name} ["{label}"]'
            yield from _render_nodes(by_parent, names, node.id, depth + 1)
            yield f"{indent}end"
        else:
            opening, closing = _SHAPES.get(node.kind, ("[", "]"))
            yield f'{indent}{name}{opening}"{label}"{closing}'


def _label(node: GraphNode) -> str:
    """Returns a node's title, number if above 1, kind unless `agent`, and status, for Mermaid."""
    suffix = f" #{node.activation}" if (node.activation or 1) > 1 else ""
    kind = "" if node.kind == "agent" else f"{node.kind}, "
    return f"{node.title}{suffix} ({kind}{node.status})".translate(_ESCAPES)
