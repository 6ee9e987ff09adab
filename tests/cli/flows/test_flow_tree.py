"""The tree of a flow: branches, loops, many items, and untrusted titles."""

from tenuto.cli.flows.flow_tree import tree_lines
from tenuto.engine.flows.graph import GraphEdge, GraphNode, GraphView


def node(name: str, status: str = "COMPLETED", **more: object) -> GraphNode:
    fields = {"id": name, "key": name, "title": name, "kind": "agent", "activation": 1, **more}
    return GraphNode(status=status, **fields)  # type: ignore[arg-type]


def drawn(*nodes: GraphNode, edges: tuple[GraphEdge, ...] = (), max_lines: int = 30) -> list[str]:
    graph = GraphView(nodes=list(nodes), edges=list(edges))
    return [f"{line.branch}{line.text}" for line in tree_lines(graph, max_lines)]


def test_tree_shows_children_below_their_group() -> None:
    assert drawn(
        node("all", "RUNNING", kind="sequential"),
        node("b", "RUNNING", parent="all", slot=1, progress=40),
        node("a", parent="all", slot=0, title="The first"),
        node("end", "PLANNED", activation=None),
    ) == [
        "├─ ▶ all (sequential)  RUNNING",
        "│  ├─ ✓ a  The first  COMPLETED",
        "│  └─ ▶ b  RUNNING 40%",
        "└─   end  PLANNED",
    ]


def test_tree_names_branches_and_jumps() -> None:
    assert drawn(
        node("if", kind="condition"),
        node("again", kind="goto"),
        node("work", "RETRY_WAIT", activation=2, error="no\nmore"),
        edges=(GraphEdge("if", "again", "false"), GraphEdge("again", "work", "goto")),
    ) == [
        "├─ ✓ if (condition)  COMPLETED",
        "├─ ✓ false: again (goto to work)  COMPLETED",
        "└─ ↻ work #2  RETRY_WAIT: no…",
    ]


def test_tree_of_many_items_shows_the_informative_ones() -> None:
    many = [node(f"n{at}", "DEAD" if at == 7 else "COMPLETED", slot=at) for at in range(9)]
    assert drawn(*many, max_lines=3) == [
        "├─ ✓ n0  COMPLETED",
        "├─ ✓ n1  COMPLETED",
        "├─ ✗ n7  DEAD",
        "└─ … 6 more: 6 COMPLETED",
    ]


def test_title_in_a_tree_is_escaped() -> None:
    [line] = drawn(node("a", title="x\x1b[2J\ny", error="\x1b]0;z\x07", status="FAILED"))
    assert "\x1b" not in line
    assert "\n" not in line


def test_truncated_tree_is_marked() -> None:
    graph = GraphView(nodes=[node("a")], edges=[], truncated=True)
    assert "the graph is truncated" in tree_lines(graph)[-1].text
