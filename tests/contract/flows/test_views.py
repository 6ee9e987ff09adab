"""Views of flows and groups, on both databases."""

from typing import Any
from uuid import UUID, uuid4

import pytest
from tests.contract.conftest import new, refusal
from tests.contract.flows.helpers import Wrong, group, start, task, worked

from tenuto.engine.engine import Engine
from tenuto.engine.flows.graph import GraphView, mermaid
from tenuto.engine.tasks.claim import ClaimedTask
from tenuto.model.agents.matching import AgentProfile
from tenuto.model.flows.definition import Approval, Condition, Foreach, Goto

NIGHTLY = (
    group("nightly", "fetch", "each", "check", next="report", prompt="Be brief."),
    task("fetch"),
    task("each", control=Foreach(items=["a", "b"], template="one", order="parallel")),
    task("one", prompt="Look at {{item}}."),
    task("check", control=Condition(expression="input == null", on_true="good", on_false="again")),
    task("good"),
    task("again", control=Goto(target="fetch", prompt="Once more.")),
    task("report", next="sign"),
    task("sign", control=Approval(message="Ship it?")),
)


def edges(graph: GraphView) -> set[tuple[str, str, str]]:
    """Edges by keys; what is planned has a star."""
    names = {
        node.id: f"{node.key}*" if node.status == "PLANNED" else str(node.key)
        for node in graph.nodes
    }
    return {(names[edge.source], edge.kind, names[edge.target]) for edge in graph.edges}


def statuses(graph: GraphView) -> dict[str, list[str]]:
    result: dict[str, list[str]] = {}
    for node in graph.nodes:
        result.setdefault(str(node.key), []).append(node.status)
    return result


async def test_flow_view_shows_activated_and_future_tasks(
    engine: Engine, agent: AgentProfile
) -> None:
    flow = await start(engine, "nightly", *NIGHTLY, input=None)
    before = await engine.flow_views.graph(flow)
    assert edges(before) == {
        ("fetch", "sequence", "each"),
        ("each", "sequence", "check"),
        ("each", "item", "one*"),
        ("check", "true", "good*"),
        ("check", "false", "again*"),
        ("again*", "goto", "fetch"),
        ("nightly", "next", "report*"),
        ("report*", "next", "sign*"),
    }
    assert statuses(before)["nightly"] == ["RUNNING"]
    assert not before.truncated
    shown = await engine.flow_views.show(flow)
    assert (shown.status, shown.tasks) == ("RUNNING", {"WAITING": 2, "PENDING": 1})
    assert [open_group.key for open_group in shown.open_groups] == ["nightly"]
    assert shown.progress_percent == 0
    assert await worked(engine, agent, maximum=1) == ["fetch"]
    assert (await engine.flow_views.show(flow)).progress_percent == 100 * 2 // 7
    assert await worked(engine, agent) == ["one", "one", "good", "report"]
    ended = await engine.flow_views.graph(flow)
    assert edges(ended) == {
        ("fetch", "sequence", "each"),
        ("each", "item", "each"),
        ("each", "sequence", "check"),
        ("check", "true", "good"),
        ("nightly", "next", "report"),
        ("report", "next", "sign"),
    }
    assert statuses(ended)["one"] == ["COMPLETED", "COMPLETED"]
    assert {node.status for node in ended.nodes} == {"COMPLETED", "WAITING"}
    [item] = await engine.inbox.list()
    await engine.inbox.answer(item.id, approve=True)
    done = await engine.flow_views.show(flow)
    assert (done.status, done.progress_percent, done.open_groups) == ("COMPLETED", 100, [])


async def test_group_view_shows_its_progress(engine: Engine, agent: AgentProfile) -> None:
    def handler(work: ClaimedTask) -> Any:
        if work.key == "b":
            raise Wrong("no")

    flow = await start(
        engine,
        "all",
        group("all", "first", "rest"),
        group("rest", "a", "b", order="parallel", join="all_done", next="end"),
        *(task(key) for key in ("first", "a", "b", "end")),
    )
    page = await engine.flow_views.groups(flow=flow)
    assert [item.key for item in page.groups] == ["rest", "all"]
    every, rest = page.groups[1].id, page.groups[0].id
    view = await engine.flow_views.group(every)
    assert (view.status, view.tasks, view.progress_percent) == ("RUNNING", 1, 0)
    assert edges(await engine.flow_views.group_graph(every)) == {
        ("first", "sequence", "rest"),
        ("rest", "next", "end*"),
    }
    assert statuses(await engine.flow_views.group_graph(rest)) == {
        "rest": ["WAITING"],
        "a": ["PLANNED"],
        "b": ["PLANNED"],
    }
    await worked(engine, agent, handler, maximum=1)
    assert (await engine.flow_views.group(every)).progress_percent == 25
    await worked(engine, agent, handler)
    done = await engine.flow_views.group(rest)
    assert (done.status, done.tasks, done.ended, done.progress_percent) == ("COMPLETED", 2, 2, 100)
    assert (done.succeeded, done.failed, done.kind, done.join_policy) == (
        1,
        1,
        "parallel",
        "all_done",
    )
    assert await engine.flow_views.find_group("rest") == rest
    assert [item.key for item in (await engine.flow_views.groups("COMPLETED")).groups] == [
        "rest",
        "all",
    ]


async def test_loop_is_drawn_activation_by_activation(engine: Engine, agent: AgentProfile) -> None:
    flow = await start(
        engine,
        "work",
        task("work", next="again"),
        task("again", control=Goto(target="work")),
        steps=2,
    )
    await worked(engine, agent)
    graph = await engine.flow_views.graph(flow)
    reported = {node.id: f"{node.key}{node.activation}" for node in graph.nodes}
    assert [(reported[edge.source], edge.kind, reported[edge.target]) for edge in graph.edges] == [
        ("work1", "next", "again1"),
        ("again1", "goto", "work2"),
        ("work2", "next", "again2"),
        ("again2", "goto", "work3"),
        ("work3", "next", "again3"),
    ]


async def test_graph_shows_dependencies(engine: Engine, agent: AgentProfile) -> None:
    flow = await start(
        engine,
        "g",
        group("g", "a", "b", order="parallel"),
        task("a"),
        task("b", depends_on=["a"]),
    )
    assert edges(await engine.flow_views.graph(flow)) == {("a", "depends", "b")}
    [b] = [item for item in (await engine.flow_views.tasks(flow)).tasks if item.key == "b"]
    view = await engine.show(b.id)
    [a] = view.depends_on
    assert (view.waiting_for, (await engine.show(a)).key) == ("dependencies", "a")
    assert (view.flow, view.group_id) == (flow, b.group_id)


async def test_flows_are_listed_in_pages(engine: Engine, agent: AgentProfile) -> None:
    ids = [await start(engine, key, task(key)) for key in ("a", "b", "a")]
    first = await engine.flow_views.page(limit=2)
    assert [flow.id for flow in first.flows] == [ids[2], ids[1]]
    rest = await engine.flow_views.page(limit=2, cursor=first.next_cursor)
    assert ([flow.id for flow in rest.flows], rest.next_cursor) == ([ids[0]], None)
    assert [flow.id for flow in (await engine.flow_views.page(key="b")).flows] == [ids[1]]
    assert await engine.flow_views.find("a") == ids[2]
    await engine.flows.cancel(ids[0], "enough")
    assert [flow.id for flow in (await engine.flow_views.page("cancelled")).flows] == [ids[0]]
    assert await refusal(engine.flow_views.page("GONE")) == "invalid_filter"
    tasks = await engine.flow_views.tasks(ids[1], 1)
    assert ([item.key for item in tasks.tasks], tasks.next_cursor) == (["b"], None)


async def test_flow_is_run_again(engine: Engine, agent: AgentProfile) -> None:
    flow = await start(engine, "a", task("a"), input={"n": 1}, priority=9)
    again = await engine.rerun_flow(flow)
    assert again != flow
    view = await engine.flow_views.show(again)
    assert (view.rerun_of, view.input, view.priority, view.key) == (flow, {"n": 1}, 9, "a")


async def test_large_graph_is_truncated(engine: Engine, agent: AgentProfile) -> None:
    flow = await start(
        engine,
        "each",
        task("each", control=Foreach(items=list(range(2100)), template="one", order="parallel")),
        task("one"),
    )
    while await engine.flows.run_deferred_once():
        pass
    graph = await engine.flow_views.graph(flow)
    assert (len(graph.nodes), graph.truncated) == (2000, True)


async def test_missing_flow_is_not_found(engine: Engine) -> None:
    views, anonymous = engine.flow_views, uuid4()
    for asked in (
        views.show(anonymous),
        views.graph(anonymous),
        views.tasks(anonymous),
        views.group(anonymous),
        views.group_graph(anonymous),
        views.find("nobody"),
        views.find_group("nobody"),
        engine.rerun_flow(anonymous),
    ):
        assert await refusal(asked) == "not_found"


@pytest.mark.parametrize("title", ['say "hi" <b>', "a\n# end", "x"])
async def test_mermaid_text_is_escaped(engine: Engine, agent: AgentProfile, title: str) -> None:
    from tenuto.model.flows.definition import GroupSpec
    from tenuto.model.tasks.submission import NewTask

    flow = await start(
        engine,
        "g",
        GroupSpec(title=title, key="g", children=("a", "if")),
        NewTask(title=title, key="a"),
        task("if", control=Condition(expression="true", on_true="b")),
        task("b"),
    )
    text = mermaid(await engine.flow_views.graph(flow))
    assert text.startswith("flowchart TD\n")
    lines = text.splitlines()
    [box] = [item for item in lines if "subgraph" in item]
    assert box.count('"') == 2
    assert sum(line.strip() == "end" for line in lines) == 1
    assert any("-->|true|" in line for line in lines)
    assert "classDef planned" in text


async def test_task_outside_flows_has_no_flow_position(engine: Engine) -> None:
    first = (await engine.submit(new(key="k"))).id
    view = await engine.show(first)
    assert (view.key, view.flow, view.group_id, view.depends_on) == ("k", None, None, [])
    assert view.kind == "agent"
    assert isinstance((await engine.list()).tasks[0].id, UUID)
