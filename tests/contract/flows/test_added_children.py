"""Tasks added to a running group, on both databases."""

from typing import Any
from uuid import uuid4

import msgspec
import pytest
from tests.contract.conftest import Raw, failure, refusal
from tests.contract.flows.helpers import WORKER, flow_status, group, start, statuses, task, worked

from tenuto.engine.engine import Engine
from tenuto.engine.tasks.submit import Submitted
from tenuto.model.agents.matching import AgentProfile


@pytest.mark.parametrize("by_id", [True, False])
async def test_task_is_added_to_a_group_once(
    engine: Engine, agent: AgentProfile, by_id: bool
) -> None:
    """The answer to a submit may be lost, and the group have ended when it is repeated."""
    await start(engine, "g", group("g", "a"), task("a"))
    existing: dict[str, Any] = {"id": uuid4()} if by_id else {"idempotency_key": "k"}
    late = task("late", group="g", **existing)
    submitted = await engine.submit(late)
    assert submitted == Submitted(late.id or submitted.id)
    assert await engine.submit(late) == Submitted(submitted.id, created=False)
    assert await worked(engine, agent) == ["a", "late"]
    assert await engine.submit(late) == Submitted(submitted.id, created=False)
    other = msgspec.structs.replace(late, priority=9)
    assert await refusal(engine.submit(other)) == "idempotency_conflict"


async def test_task_added_to_a_group_has_no_secrets(engine: Engine, raw: Raw) -> None:
    await start(engine, "g", group("g", "a"), task("a"))
    open_ = task("late", group="g", input={"secrets": {"token": "hunter2"}})
    assert await refusal(engine.submit(open_)) == "secret_in_definition"
    assert await raw.count("task") == 1


@pytest.mark.parametrize("order", ["sequential", "parallel"])
@pytest.mark.parametrize("children", [[], ["b"], ["b", "c"]])
async def test_task_added_to_a_waiting_group_waits_with_it(
    engine: Engine, agent: AgentProfile, order: Any, children: list[str]
) -> None:
    flow = await start(
        engine,
        "g",
        group("g", "a", "later", next="end"),
        group("later", *children, order=order),
        *(task(key) for key in ("a", "end", *children)),
    )
    late = ["x", "y"]
    for key in late:
        await engine.submit(task(key, group="later"))
    [work] = await engine.claim(agent, WORKER, 10)
    assert work.key == "a"
    await engine.complete(work.fence)
    done = await worked(engine, agent)
    assert sorted(done[:-1]) == sorted([*children, *late])
    if order == "sequential":
        assert done[:-1] == [*children, *late]
    assert done[-1] == "end"
    assert await flow_status(engine, flow) == "COMPLETED"


async def test_waiting_group_fails_with_an_added_child(engine: Engine, agent: AgentProfile) -> None:
    flow = await start(engine, "g", group("g", "a", "later"), task("a"), group("later"))
    late = await engine.submit(task("x", group="later"))
    await engine.cancel(late.id)
    await worked(engine, agent)
    assert await flow_status(engine, flow) == "FAILED"


@pytest.mark.parametrize("order", ["sequential", "parallel"])
@pytest.mark.parametrize("children", [[], ["b"]])
async def test_retried_task_of_a_waiting_group_waits_with_it(
    engine: Engine, agent: AgentProfile, order: Any, children: list[str]
) -> None:
    flow = await start(
        engine,
        "g",
        group("g", "a", "later"),
        group("later", *children, order=order, join="all_done"),
        *(task(key) for key in ("a", *children)),
    )
    late = [(await engine.submit(task(key, group="later"))).id for key in "xy"]
    await engine.cancel(late[0])
    await engine.retry(late[0])
    [work] = await engine.claim(agent, WORKER, 10)
    assert work.key == "a"
    await engine.complete(work.fence)
    assert sorted(await worked(engine, agent)) == [*children, "x", "y"]
    assert await flow_status(engine, flow) == "COMPLETED"


@pytest.mark.parametrize("bound", [500, 2])
@pytest.mark.parametrize("order", ["sequential", "parallel"])
@pytest.mark.parametrize("children", [[], ["b"]])
async def test_added_children_of_a_waiting_group_are_reopened_with_it(
    engine: Engine,
    agent: AgentProfile,
    order: Any,
    children: list[str],
    bound: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They were skipped with their group, all of them or as many as are at once."""
    monkeypatch.setattr("tenuto.engine.flows.advance.MAX_CASCADE_ROWS", bound)
    flow = await start(
        engine,
        "g",
        group("g", "a", "later"),
        group("later", *children, order=order),
        *(task(key) for key in ("a", *children)),
    )
    late = ["x", "y", "z"]
    for key in late:
        await engine.submit(task(key, group="later"))
    [work] = await engine.claim(agent, WORKER, 5)
    await engine.fail(work.fence, failure(retryable=False))
    assert (await statuses(engine, flow))["z"] == ["SKIPPED" if bound > 2 else "WAITING"]
    await engine.retry(work.fence.task, cascade=True)
    done = await worked(engine, agent)
    assert (done[0], sorted(done[1:])) == ("a", [*children, *late])
    assert await flow_status(engine, flow) == "COMPLETED"


@pytest.mark.parametrize("children", [[], ["b"]])
@pytest.mark.parametrize("meanwhile", ["nothing", "pause", "cancel"])
async def test_many_added_children_of_a_waiting_group_are_activated_in_parts(
    engine: Engine,
    agent: AgentProfile,
    children: list[str],
    meanwhile: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their flow is held or ended while some of them have still to be let run."""
    monkeypatch.setattr("tenuto.engine.flows.added_children.MAX_CASCADE_ROWS", 2)
    flow = await start(
        engine,
        "g",
        group("g", "a", "later", next="end"),
        group("later", *children, order="parallel"),
        *(task(key) for key in ("a", "end", *children)),
    )
    late = [f"x{number}" for number in range(7)]
    for key in late:
        await engine.submit(task(key, group="later"))
    [work] = await engine.claim(agent, WORKER, 10)
    await engine.complete(work.fence)
    result = await statuses(engine, flow)
    assert [result[key] for key in late] == [["PENDING"]] * 2 + [["WAITING"]] * 5
    if meanwhile == "cancel":
        await engine.flows.cancel(flow)
        assert await worked(engine, agent) == []
        return
    if meanwhile == "pause":
        await engine.flows.pause(flow)
        assert await worked(engine, agent) == []
        await engine.flows.resume(flow)
    done = await worked(engine, agent)
    assert (sorted(done[:-1]), done[-1]) == ([*children, *late], "end")
    assert await flow_status(engine, flow) == "COMPLETED"


@pytest.mark.parametrize("subject", ["flow", "g", "outer"])
async def test_task_added_during_a_pause_runs_after_resume(
    engine: Engine, agent: AgentProfile, subject: str
) -> None:
    outer = group("outer", "g", order="parallel")
    flow = await start(engine, "outer", outer, group("g", "a", order="parallel"), task("a"))
    flows = engine.flows
    run = None if subject == "flow" else await flows.find_open_group(subject)
    await (flows.pause(flow) if run is None else flows.pause_group(run))
    await engine.submit(task("x", group="g"))
    assert await worked(engine, agent) == []
    await (flows.resume(flow) if run is None else flows.resume_group(run))
    assert sorted(await worked(engine, agent)) == ["a", "x"]
    assert await flow_status(engine, flow) == "COMPLETED"


async def test_paused_added_child_has_its_turn(engine: Engine, agent: AgentProfile) -> None:
    """The child is resumed only after the turn of its group."""
    flow = await start(
        engine,
        "g",
        group("g", "a", "later"),
        group("later", "b", order="parallel"),
        task("a"),
        task("b"),
    )
    late = (await engine.submit(task("x", group="later"))).id
    await engine.pause(late)
    assert await worked(engine, agent) == ["a", "b"]
    await engine.resume(late)
    assert await worked(engine, agent) == ["x"]
    assert await flow_status(engine, flow) == "COMPLETED"


async def test_task_is_added_to_the_newest_run_of_a_group(
    engine: Engine, agent: AgentProfile
) -> None:
    g, a = group("g", "a"), task("a")
    old, young = await start(engine, "g", g, a), await start(engine, "g", g, a)
    await engine.submit(task("late", group="g"))
    assert "late" in await statuses(engine, young)
    assert "late" not in await statuses(engine, old)
