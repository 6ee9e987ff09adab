"""The library over HTTP and on the database: the same calls return the same results."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest
from tests.api.conftest import Api, running
from tests.waiting import eventually

import tenuto
from tenuto import AsyncClient, Client, TaskFailed, Worker, app, task
from tenuto.client.follow import OUTAGE_S
from tenuto.client.remote import http
from tenuto.client.remote.errors import unreachable_error
from tenuto.client.worker import Worker as Facade
from tenuto.clock import Clock
from tenuto.coordinator.coordinator import Coordinator
from tenuto.model.errors import Conflict, Invalid, NotFound, Unavailable
from tenuto.model.limits.budgets import Budget
from tenuto.model.limits.concurrency import Concurrency
from tenuto.model.tasks.commands import Escalation
from tenuto.model.tasks.retry import RetryPolicy
from tenuto.settings import Settings

WAIT_S = 30
WORKSPACE = "0190f3c0-0000-7000-8000-000000000001"


@pytest.fixture(params=["near", "far"])
async def client(
    request: pytest.FixtureRequest, api: Api, token: str, settings: Settings
) -> AsyncIterator[AsyncClient]:
    """A client of the database, and one of the server in front of it."""
    output = (api.url, token) if request.param == "far" else (settings.database_url(),)
    async with AsyncClient(*output) as client:
        yield client


async def worked(client: AsyncClient, worker: Worker, *tasks: Any) -> None:
    """Let a worker run until the tasks have ended."""
    stop = asyncio.Event()
    serving = asyncio.create_task(worker.serve(stop))

    async def ended() -> bool:
        views = [await client.tasks.get(item) for item in tasks]
        return all(view.finished_at for view in views)

    try:
        await eventually(lambda: ended() if not serving.done() else serving, WAIT_S, 0.05)
    finally:
        stop.set()
        await serving


async def test_task_is_created_waited_for_and_followed(client: AsyncClient) -> None:
    worker = Worker(client, agent="dev-1", task_tags=["typescript"], slots=2)

    @worker.handles("development")
    async def work(ctx: Any) -> dict[str, Any]:
        ctx.log("began")
        await ctx.progress(50, "half")
        await ctx.save({"n": 1})
        value = await ctx.step("once", lambda: 42)
        return {"value": value, "input": ctx.input}

    @worker.handles()
    def other(ctx: Any) -> None:
        raise ValueError("no")

    created = await client.tasks.create(
        title="Fix strict errors", priority=8, task_type="development", input={"a": 1}
    )
    bad = await client.tasks.create("bad", max_attempts=1, prompt="x")
    stop = asyncio.Event()
    serving = asyncio.create_task(worker.serve(stop))
    events = [event async for event in client.tasks.follow(created.id)]
    done = await client.tasks.wait(created.id, timeout=WAIT_S)
    assert done.output == {"value": 42, "input": {"a": 1}}
    assert done.agent_name == "dev-1"
    with pytest.raises(TaskFailed) as failed:
        await client.tasks.wait(str(bad.id), timeout=WAIT_S)
    assert (failed.value.status, failed.value.error) == ("DEAD", "ValueError: no")
    stop.set()
    await serving
    reports = [event.line for event in events if event.kind == "status"]
    assert [line.event for line in reports if line] == ["submitted", "claimed", "completed"]
    assert [event.line.text for event in events if event.kind == "log" and event.line] == ["began"]
    assert (50, "half") in [(item.progress_percent, item.current_step) for item in events]
    [attempt] = await client.tasks.attempts(created.id)
    assert attempt.outcome == "COMPLETED"
    assert [line.text for line in await client.tasks.logs(bad.id, "ERROR")]
    assert (await client.tasks.explain(bad.id)).status == "DEAD"


async def test_lists_cover_all_pages(client: AsyncClient, monkeypatch: Any) -> None:
    monkeypatch.setattr("tenuto.client.paging.PAGE_SIZE", 3)
    created = await client.tasks.create_many(
        [{"title": f"t{number}", "tags": ["x"]} for number in range(8)]
    )
    matches = [item.id async for item in client.tasks.list(tags=["x"], status="PENDING")]
    assert matches == [item.id for item in reversed(created)]
    assert len([item async for item in client.tasks.list(limit=5)]) == 5
    with pytest.raises(Invalid, match="unknown field 'tagz'"):
        await anext(client.tasks.list(tagz=["x"]))
    with pytest.raises(Invalid, match="unknown field 'promt'"):
        await client.tasks.create("x", promt="y")


async def test_tasks_are_controlled_by_the_client(client: AsyncClient) -> None:
    created = await client.tasks.create("x")
    assert (await client.tasks.pause(created.id, "why")).status == "PAUSED"
    assert (await client.tasks.resume(created.id)).status == "PENDING"
    changed = await client.tasks.update(created.id, title="y", tags=["a"], priority=9)
    assert (changed.title, changed.tags, changed.priority) == ("y", ["a"], 9)
    with pytest.raises(Conflict):
        await client.tasks.update(created.id, title="z", version=1)
    assert (await client.tasks.cancel(created.id, "no")).status == "CANCELLED"
    again = await client.tasks.rerun(created.id)
    assert again.rerun_of == created.id
    assert (await client.tasks.retry(created.id)).status == "PENDING"
    assert (await client.tasks.act("cancel", tags="a", reason="r")).done == [again.id, created.id]
    assert (await client.tasks.archive(created.id)).archived_at
    await client.tasks.delete(created.id)
    with pytest.raises(NotFound):
        await client.tasks.get("0000000")


async def test_agents_and_counts_are_read(client: AsyncClient) -> None:
    created = await client.agents.put("dev", task_tags=["a"], max_concurrent=2, skills=["b"])
    again = await client.agents.put("dev", capabilities=["c"])
    assert again.id == created.id
    assert (again.task_tags, again.capabilities) == (("a",), ("c",))
    assert (again.max_concurrent_tasks, again.skills) == (2, ("b",))
    assert [item.name async for item in client.agents.list()] == ["dev"]
    assert (await client.agents.health("dev")).healthy
    assert await client.agents.tasks("dev") == []
    assert (await client.agents.terminate("dev", graceful=False)).status == "TERMINATED"
    stats = await client.stats()
    assert (stats.agents, stats.workers, stats.tasks["PENDING"]) == (0, 0, 0)
    await client.agents.delete("dev")
    with pytest.raises(NotFound, match="existing agents: none"):
        await client.agents.get("dev")
    await client.secrets.put("api-key", "s3cret-value")
    assert [item.name for item in await client.secrets.list()] == ["api-key"]
    await client.secrets.delete("api-key")


async def test_decorated_functions_are_registered(client: AsyncClient) -> None:
    @task("add")
    async def add(ctx: Any) -> int:
        total: int = sum(ctx.input)
        return total

    @task()
    def double(ctx: Any) -> Any:
        return ctx.input * 2

    worker = Worker(client)
    worker.add(add, double)
    one = await client.tasks.create("x", task_type="add", input=[1, 2])
    two = await client.tasks.create("x", task_type="double", input=4)
    await worked(client, worker, one.id, two.id)
    assert (await client.tasks.wait(one.id)).output == 3
    assert (await client.tasks.wait(two.id)).output == 8
    with pytest.raises(Invalid, match="not a handler"):
        worker.add(lambda _: None)
    with pytest.raises(Invalid, match="has a handler already"):
        worker.handles("add")(add)
    with pytest.raises(Invalid, match="no handlers"):
        await Worker(client).serve(asyncio.Event())


async def test_wait_has_a_timeout(client: AsyncClient) -> None:
    created = await client.tasks.create("x")
    with pytest.raises(TimeoutError):
        await client.tasks.wait(created.id, timeout=0.3)


async def test_embedded_database_has_no_administration(settings: Settings) -> None:
    store = app.create_store(settings.database_url())
    await store.migrate()
    await store.close()
    async with AsyncClient(settings.database_url()) as client:
        for subject, call in (
            ("a token", client.tokens.list()),
            ("a user", client.users.list()),
            ("a workspace", client.workspaces.list()),
            ("a webhook", client.webhooks.get("x")),
            ("health", client.health()),
            ("a login", client.access.me()),
        ):
            with pytest.raises(Invalid, match=f"^{subject} needs a server"):
                await call
        assert (await client.coordinator.status()).active is False
        await client.coordinator.recover()
        assert await client.coordinator.logs() == []
    with pytest.raises(Invalid, match="not open"):
        _ = client.tasks


async def test_accounts_are_administered(api: Api, token: str, settings: Settings) -> None:
    async with AsyncClient(api.url, token) as client:
        me = await client.access.me()
        assert me.role == "OWNER"
        created = await client.tokens.create("ci", role="MEMBER", scopes=["read"])
        assert {item.name for item in await client.tokens.list()} == {"bootstrap", "ci"}
        await client.tokens.revoke(created.id)
        user = await client.users.create("ann", "correct horse", "ADMIN")
        assert (await client.users.update(user.id, "VIEWER")).role == "VIEWER"
        session = await client.access.login("ann", "correct horse")
        async with AsyncClient(api.url, session.token) as ann:
            assert (await ann.access.me()).user_id == user.id
            await ann.access.logout()
        assert [item.name for item in await client.users.list()] == ["ann"]
        await client.users.delete(user.id)
        [workspace] = await client.workspaces.list()
        assert (await client.workspaces.get(workspace.id)).name == workspace.name
        changed = await client.workspaces.quota(workspace.id, pending=1000)
        assert changed.quota.pending == 1000
        other = await client.workspaces.create("other")
        assert other.workspace.name == "other"
        assert (await client.health())["database"] == "connected"
        assert not (await client.coordinator.status()).active
        await client.coordinator.recover()
        dev = await client.agents.put("dev")
        assert (await client.agents.token("dev")).token
        assert dev.status == "IDLE"
    del settings


def test_blocking_client_does_the_same(tmp_path: Any) -> None:
    with Client(f"sqlite:///{tmp_path}/t.db") as client:
        created = client.tasks.create(title="x", prompt="do", priority=8)
        assert client.tasks.get(created.id).title == "x"
        assert [item.id for item in client.tasks.list()] == [created.id]
        events = client.tasks.follow(created.id)
        line = next(events).line
        assert line is not None
        assert line.event == "submitted"
        events.close()
        client.tasks.cancel(created.id)
        with pytest.raises(TaskFailed):
            client.tasks.wait(created.id, timeout=WAIT_S)
        assert client.stats().tasks["CANCELLED"] == 1
    with pytest.raises(Invalid):
        Client("nonsense://x")


@pytest.mark.parametrize("output", [{"token": "tnt_x"}, {"workspace": WORKSPACE}])
def test_server_only_calls_are_refused_on_a_database(
    tmp_path: Path, output: dict[str, str]
) -> None:
    with pytest.raises(Invalid, match=r"needs a server"):
        Client(f"sqlite:///{tmp_path}/t.db", **output)
    assert list(tmp_path.iterdir()) == []


async def test_coordinator_status_shows_the_leader(
    api: Api, token: str, settings: Settings
) -> None:
    quick = msgspec.structs.replace(settings, tick_s=0.1)
    stop = asyncio.Event()
    async with app.connect(quick) as engine, AsyncClient(api.url, token) as client:
        coordinating = asyncio.create_task(Coordinator(engine, quick, name="here").run(stop))

        async def leads() -> bool:
            return (await client.coordinator.status()).instance_id == "here"

        await eventually(leads, WAIT_S)
        stop.set()
        await coordinating


def test_import_of_the_package_loads_nothing() -> None:
    code = "import sys, tenuto; print('httpx2' in sys.modules, 'msgspec' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False False\n"
    assert tenuto.Worker is Facade
    with pytest.raises(AttributeError):
        _ = tenuto.nothing


@pytest.mark.parametrize("quiet_s", [0, 2 * OUTAGE_S])
async def test_follow_continues_after_an_outage_of_the_server(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, quiet_s: int
) -> None:
    elapsed, refused = Clock.elapsed, asyncio.Event()

    def on_error(url: str, error: Exception) -> Unavailable:
        if isinstance(error, httpx2.ConnectError):
            refused.set()
        return unreachable_error(url, error)

    monkeypatch.setattr(http, "unreachable_error", on_error)
    async with running(settings) as first:
        fixed = msgspec.structs.replace(settings, port=int(first.url.rpartition(":")[2]))
        token = await first.token()
        client = await AsyncClient(first.url, token).open()
        created = await client.tasks.create("x")
        events = client.tasks.follow(created.id)
        seen = [await anext(events)]
        following = asyncio.ensure_future(anext(events))
        monkeypatch.setattr(Clock, "elapsed", lambda clock: elapsed(clock) + quiet_s)
    await eventually(refused.is_set, WAIT_S)
    async with running(fixed):
        await client.tasks.cancel(created.id)
        seen.append(await following)
        seen += [event async for event in events]
        await client.close()
    assert [event.line.event for event in seen if event.line] == ["submitted", "cancelled"]


_NOON_IN_BERLIN = datetime(2999, 6, 1, 12, tzinfo=timezone(timedelta(hours=2)))


_REQUESTS: list[dict[str, Any]] = [
    {},
    {"input": {"pair": (1, 2.0), "none": None}, "metadata": {"a": ("b",)}},
    {"input": {"secrets": {"password": "correct horse"}, "user": "ada"}},
    {"input": {"secrets": {}}, "env": {"MODE": "test"}},
    {"input": "plain text", "prompt": "do it", "priority": 1, "max_attempts": 1},
    {"run_at": _NOON_IN_BERLIN, "timeout_s": 60, "queue_ttl_s": 90, "lease_s": 30},
    {"tags": ["b", "a", "b"], "task_tags": ["z", "y"], "capabilities": ["code"]},
    {"command": ("echo", "hello"), "cwd": "/tmp", "runtime": "command"},
    {"retry": RetryPolicy(), "on_dependency_failure": "skip", "estimate_minutes": 5},
    {"concurrency": Concurrency(key="door", limit=1)},
    {"budget": Budget(cost_usd=1.5), "complexity": "Hard", "trace_id": "t-1", "source": "cli"},
    {"escalation": Escalation(reason="stuck", prompt="help"), "idempotency_key": "once"},
]


async def test_a_created_task_is_returned_as_it_is_stored(client: AsyncClient) -> None:
    await client.tasks.create("the first of its type waits for its lane")
    for fields in _REQUESTS:
        created = await client.tasks.create("new", **fields)
        stored = await client.tasks.get(created.id)
        assert msgspec.json.encode(created) == msgspec.json.encode(stored), fields
        assert created == stored, fields
