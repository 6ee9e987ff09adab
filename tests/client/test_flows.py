"""Flows, groups and the inbox from a program: direct and remote, async and blocking."""

import asyncio
from collections.abc import AsyncIterator
from itertools import count
from typing import Any
from uuid import uuid4

import pytest
from tests.api.conftest import Api
from tests.contract.flows.helpers import Wrong, group, task, worked

from tenuto import AsyncClient, Client, FlowFailed
from tenuto.client.flows import poll_until_finished
from tenuto.client.follow import OUTAGE_S
from tenuto.client.remote.engine import RemoteEngine
from tenuto.client.worker import Worker
from tenuto.engine.engine import Engine
from tenuto.engine.flows.views import FlowView
from tenuto.engine.tasks.claim import ClaimedTask
from tenuto.model.agents.matching import AgentProfile
from tenuto.model.errors import Conflict, Invalid, NotFound, Unavailable
from tenuto.model.flows.definition import Approval, Condition, Foreach, Goto
from tenuto.model.flows.plan import Spec
from tenuto.model.tasks.submission import NewTask

SPECS: tuple[Spec, ...] = (
    group("nightly", "fetch", "rest", next="sign"),
    group("rest", "a", "b", order="parallel"),
    task("sign", control=Approval(message="Ship it?")),
    *(task(key) for key in ("fetch", "a", "b")),
)


@pytest.fixture
async def agent(near: Engine) -> AgentProfile:
    profile = AgentProfile(
        id=near.clock.new_id(), workspace=near.workspace, name="tester", runtimes=("test",)
    )
    return await near.register_agent(profile)


@pytest.fixture
async def clients(far: RemoteEngine, near: Engine) -> list[AsyncClient]:
    for spec in SPECS:
        await near.definitions.put(spec)
    return [AsyncClient(engine=far), AsyncClient(engine=near)]


async def test_flow_views_are_equal_direct_and_remote(
    api: Api, clients: list[AsyncClient], near: Engine, agent: AgentProfile
) -> None:
    for client in clients:
        created = await client.flows.start("nightly", {"n": 1}, steps=7, priority=8)
        assert (created.steps_left, created.priority, created.input) == (7, 8, {"n": 1})
        await worked(near, agent, maximum=2)
        shown = [
            [
                await item.flows.show(created.id),
                await item.flows.show("nightly"),
                await item.flows.graph(str(created.id)),
                await item.groups.show("rest"),
                await item.groups.graph("nightly"),
            ]
            for item in clients
        ]
        assert shown[0] == shown[1]
        lists: list[list[Any]] = []
        for item in clients:
            lists.append(
                [
                    [one async for one in item.flows.list(key="nightly")],
                    [one async for one in item.flows.list(status="RUNNING", limit=1)],
                    [one async for one in item.flows.tasks(created.id)],
                    [one async for one in item.groups.list(flow=created.id)],
                    [one async for one in item.inbox.list(None)],
                ]
            )
        assert lists[0] == lists[1]
        ended = await client.flows.cancel(created.id, "enough")
        assert ended.status == "CANCELLED"


async def test_wait_returns_the_finished_flow(
    api: Api, clients: list[AsyncClient], near: Engine, agent: AgentProfile
) -> None:
    for client in clients:
        created = await client.flows.start("nightly")
        waiting = asyncio.create_task(client.flows.wait(created.id, 30))
        await worked(near, agent)
        [item] = [entry async for entry in client.inbox.list()]
        assert (await client.inbox.show(item.id)).title == "Ship it?"
        answered = await client.inbox.approve(item.id, "go")
        assert (answered.status, answered.decision["comment"]) == ("APPROVED", "go")
        assert (await waiting).status == "COMPLETED"
        assert (await client.groups.wait("nightly")).status == "COMPLETED"


async def test_failed_flow_raises_and_is_retried(
    api: Api, clients: list[AsyncClient], near: Engine, agent: AgentProfile
) -> None:
    def handler(work: ClaimedTask) -> Any:
        if work.key == "a":
            raise Wrong("no")

    for client in clients:
        created = await client.flows.start("nightly")
        await worked(near, agent, handler)
        with pytest.raises(FlowFailed, match="FAILED"):
            await client.flows.wait(created.id)
        with pytest.raises(FlowFailed) as failed:
            await client.groups.wait("rest")
        assert failed.value.status == "FAILED"
        [asked] = [entry async for entry in client.inbox.list()]
        assert asked.kind == "escalation"
        assert (await client.inbox.answer(asked.id, "mended")).status == "ANSWERED"
        again = await client.flows.rerun(created.id, from_failed=True)
        assert (again.id, again.status) == (created.id, "RUNNING")
        await worked(near, agent)
        [item] = [entry async for entry in client.inbox.list()]
        assert item.kind == "approval"
        assert (await client.inbox.reject(item.id)).status == "REJECTED"
        fresh = await client.flows.rerun(created.id, steps=3)
        assert (fresh.rerun_of, fresh.steps_left) == (created.id, 3)
        await client.flows.cancel(fresh.id)


async def test_groups_are_defined_paused_and_cancelled(
    api: Api, clients: list[AsyncClient], near: Engine
) -> None:
    for number, client in enumerate(clients):
        key = f"both-{number}"
        created = await client.groups.create(
            key, ["a", "b"], title="Both", order="parallel", next="fetch", prompt="Be brief."
        )
        assert (created.kind, created.title, created.spec["children"]) == (
            "group",
            "Both",
            ["a", "b"],
        )
        with pytest.raises(Conflict) as taken:
            await client.groups.create(key)
        assert taken.value.code == "name_taken"
        await client.groups.start(key, {"n": 1})
        assert (await client.groups.pause(key)).status == "PAUSED"
        assert (await client.groups.resume(key)).status == "RUNNING"
        assert (await client.groups.cancel(key, "enough")).status == "CANCELLED"
        flow = await client.flows.start(key)
        assert (await client.flows.pause(flow.id)).status == "PAUSED"
        assert (await client.flows.resume(key)).status == "RUNNING"


async def test_flow_refusals_are_equal_direct_and_remote(
    api: Api, clients: list[AsyncClient]
) -> None:
    for client in clients:
        for asked, kind in (
            (client.flows.show(uuid4()), NotFound),
            (client.flows.show("nobody"), NotFound),
            (client.flows.rerun(uuid4(), from_failed=True), NotFound),
            (client.flows.start("nobody"), Invalid),
            (client.groups.graph("nobody"), NotFound),
            (client.inbox.approve(uuid4()), NotFound),
            (client.inbox.answer(str(uuid4()), "x"), NotFound),
        ):
            with pytest.raises(kind):
                await asked


@pytest.mark.parametrize(
    "control",
    [
        Condition(expression="true", on_true="fetch"),
        Foreach(items=[1, 2], template="fetch", order="parallel", join="all_done"),
        Goto(target="fetch", prompt="Again."),
        Approval(message="Well?", timeout_s=60, on_timeout="approve", on_reject="skip"),
    ],
    ids=lambda control: type(control).__name__,
)
async def test_control_arrives_as_it_was_sent(
    api: Api, clients: list[AsyncClient], far: RemoteEngine, near: Engine, control: Any
) -> None:
    new = NewTask(title="t", key="t", control=control, complexity="Low")
    views = [await item.show((await item.submit(new)).id) for item in (far, near)]
    assert views[0].control == views[1].control
    assert {view.kind for view in views} == {new.kind}
    assert all(view.flow is not None for view in views)


@pytest.fixture
async def served(api: Api, token: str) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(api.url, token) as client:
        yield client


async def test_remote_handler_gets_earlier_results(
    clients: list[AsyncClient], served: AsyncClient
) -> None:
    seen: list[tuple[str | None, Any]] = []
    worker = Worker(served, agent="far")

    @worker.handles("chain")
    async def work(ctx: Any) -> Any:
        seen.append((ctx.key, ctx.previous))
        return {"from": ctx.key}

    await served.definitions.put(task("one", task_type="chain", next="two"))
    await served.definitions.put(task("two", task_type="chain"))
    stop = asyncio.Event()
    serving = asyncio.create_task(worker.serve(stop))
    try:
        flow = await served.flows.start("one")
        await served.flows.wait(flow.id, 30)
    finally:
        stop.set()
        await serving
    assert seen == [("one", None), ("two", {"from": "one"})]


def test_blocking_client_controls_flows(tmp_path: Any) -> None:
    with Client(f"sqlite:///{tmp_path}/t.db") as client:
        client.definitions.put(task("sign", control=Approval(message="Ship it?")))
        client.groups.create("all", ["sign"])
        flow = client.groups.start("all")
        [item] = client.inbox.list()
        client.inbox.approve(item.id)
        assert client.flows.wait(flow.id, 10).status == "COMPLETED"
        assert [entry.id for entry in client.flows.list()] == [flow.id]
        assert [entry.key for entry in client.flows.tasks(flow.id)] == ["sign"]
        assert client.groups.show("all").progress_percent == 100


async def test_flow_wait_has_a_timeout(api: Api, clients: list[AsyncClient]) -> None:
    for client in clients:
        created = await client.flows.start("nightly")
        with pytest.raises(TimeoutError):
            await client.flows.wait(created.id, 0.05)
        assert (await client.flows.cancel(created.id)).finished_at is not None


async def test_inbox_is_listed_page_after_page(
    clients: list[AsyncClient], near: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tenuto.client.flows.PAGE_SIZE", 2)
    for _ in range(4):
        await near.flows.start("sign")
    for client in clients:
        items = [item.id async for item in client.inbox.list()]
        assert len(set(items)) == 4
        assert [item.id async for item in client.inbox.list(limit=3)] == items[:3]


async def test_flow_wait_survives_any_number_of_short_outages(
    clients: list[AsyncClient], near: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    flow = await near.flows.start("nightly")
    now, looks = 0.0, count()

    async def pass_time(_: float) -> None:
        nonlocal now
        now += OUTAGE_S - 1

    async def flaky() -> FlowView:
        if (look := next(looks)) % 2:
            raise Unavailable("restarting")
        if look == 6:
            await near.flows.cancel(flow)
        return await near.flow_views.show(flow)

    monkeypatch.setattr(near.clock, "sleep", pass_time)
    monkeypatch.setattr(near.clock, "elapsed", lambda: now)
    seen = [view.status async for view in poll_until_finished(near, flaky)]
    assert seen == ["RUNNING"] * 3 + ["CANCELLED"]
