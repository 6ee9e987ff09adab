"""PostgreSQL: statements that skip rows locked by another transaction and return at once."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVar
from uuid import UUID, uuid4

import asyncpg
import pytest
from tests.contract.conftest import (
    AGENT,
    WORKER,
    ManualClock,
    Raw,
    claim_all,
    claim_one,
    failure,
    new,
    profile,
    running,
    status,
)
from tests.contract.schedules.helpers import cron, defined, fire
from tests.webhooks.conftest import VAULT, deliveries_of, hooks_of

from tenuto.encryption_keys import KeyRing
from tenuto.engine.agents.registry import AgentMaintenance
from tenuto.engine.engine import Engine
from tenuto.model.agents.messages import NewMessage
from tenuto.model.limits.concurrency import Concurrency
from tenuto.model.tasks.submission import NewTask

T = TypeVar("T")
WAIT_S = 5


@asynccontextmanager
async def holding(url: str, row: UUID, table: str = "task", key: str = "id") -> AsyncIterator[None]:
    """Another transaction holds the row until the block ends."""
    holder = await asyncpg.connect(url)
    try:
        async with holder.transaction():
            await holder.execute(f"select 1 from {table} where {key} = $1 for update", row)
            yield
    finally:
        await holder.close()


async def at_once(call: Awaitable[T]) -> T:
    """Returns the result of the call; raises if it waits for a lock."""
    calling = asyncio.ensure_future(call)
    done, _ = await asyncio.wait([calling], timeout=WAIT_S)
    assert done, "it waits for the row"
    return await calling


@pytest.mark.parametrize("lanes", [1, 3])
async def test_claim_skips_locked_rows(
    postgres_engine: Engine, postgres_url: str, lanes: int
) -> None:
    engine = postgres_engine
    tasks = [(await engine.submit(new(task_type=f"lane{n % lanes}"))).id for n in range(6)]
    async with holding(postgres_url, tasks[0]):
        claimed = await at_once(engine.claim(profile(), WORKER, 3))
        assert [work.fence.task for work in claimed] == tasks[1:4]
    assert {work.fence.task for work in await claim_all(engine)} == {tasks[0], *tasks[4:]}


async def test_permit_grant_skips_a_locked_task_and_grants_it_later(
    postgres_engine: Engine, postgres_url: str
) -> None:
    """A grant waits for no task's row: two grants could wait for each other."""
    engine = postgres_engine
    keyed = Concurrency(key="deploy", limit=1)
    _, second, third = [(await engine.submit(new(concurrency=keyed))).id for _ in range(3)]
    work = await claim_one(engine)
    async with holding(postgres_url, second):
        await at_once(engine.complete(work.fence))
        await at_once(engine.flows.run_deferred_once())
        assert await status(engine, second) == await status(engine, third) == "WAITING"
    await engine.flows.run_deferred_once()
    assert await status(engine, second) == "PENDING"
    assert await status(engine, third) == "WAITING"


DUTIES: dict[str, Callable[[Engine], Awaitable[int]]] = {
    "expire": lambda engine: engine.maintenance.expire_once("reaper"),
    "expire in turns": lambda engine: engine.maintenance.expire_shared("reaper"),
    "expire of a worker": lambda engine: engine.maintenance.expire_worker(WORKER, "supervisor"),
    "promote": lambda engine: engine.maintenance.promote_once("promoter"),
    "promote in turns": lambda engine: engine.maintenance.promote_shared("promoter"),
}


@pytest.mark.parametrize("name", DUTIES)
async def test_duty_skips_locked_tasks(
    postgres_engine: Engine, postgres_url: str, name: str
) -> None:
    """Other transactions, such as the end of an attempt, can lock the rows for long."""
    engine, duty = postgres_engine, DUTIES[name]
    fences = [await running(engine) for _ in range(2)]
    if name.startswith("promote"):
        for fence in fences:
            await engine.fail(fence, failure())
    clock_of(engine).advance(3600)
    async with holding(postgres_url, fences[0].task):
        assert await at_once(duty(engine)) == 1
    before = "RUNNING" if name.startswith("expire") else "RETRY_WAIT"
    assert [await status(engine, fence.task) == before for fence in fences] == [True, False]
    assert await duty(engine) == 1


def clock_of(engine: Engine) -> ManualClock:
    assert isinstance(engine.clock, ManualClock)
    return engine.clock


async def test_coordinator_skips_locked_agents(postgres_engine: Engine, postgres_url: str) -> None:
    engine, looks = postgres_engine, AgentMaintenance(postgres_engine.system)
    agents = [await engine.register_agent(profile(id=uuid4(), name=name)) for name in ("a", "b")]
    clock_of(engine).advance(3600)
    async with holding(postgres_url, agents[0].id, "agent"):
        assert await at_once(looks.mark_stale_once("keeper")) == 1
    assert await looks.mark_stale_once("keeper") == 1


async def test_dequeue_skips_locked_messages(postgres_engine: Engine, postgres_url: str) -> None:
    engine = postgres_engine
    await engine.register_agent(profile())
    sent = [await engine.mailboxes.send(AGENT, NewMessage(kind="note", body=n)) for n in range(2)]
    async with holding(postgres_url, sent[0].id, "message"):
        taken = (await at_once(engine.mailboxes.dequeue(AGENT))).messages
    assert [item.id for item in taken] == [sent[1].id]


async def test_deferred_work_skips_locked_pieces(
    postgres_engine: Engine, postgres_url: str
) -> None:
    engine, raw = postgres_engine, Raw(postgres_url)
    pieces = [uuid4() for _ in range(2)]
    for piece in pieces:
        await raw.execute(
            "insert into flow_work (id, workspace, kind, subject, data, due_at) values"
            f""" ('{piece}', '{engine.workspace}', 'turn', '{piece}', '{{"key": "k"}}', now())"""
        )
    async with holding(postgres_url, pieces[0], "flow_work"):
        # It was free when it was found, and is held when its turn comes.
        assert await at_once(engine.flows._run_deferred(pieces[0])) == 0
        assert await at_once(engine.flows.run_deferred_once()) == 1
    assert await raw.fetch("select id from flow_work") == [(pieces[0],)]


async def test_coordinator_skips_locked_schedules(
    postgres_engine: Engine, postgres_url: str
) -> None:
    engine = postgres_engine
    await defined(engine)
    created = [await engine.schedules.create(name, "job", cron()) for name in ("a", "b")]
    clock_of(engine).advance(3600)
    async with holding(postgres_url, created[0].id, "schedule"):
        assert await at_once(fire(engine)) == 1
    assert [(await engine.schedules.get(item.id)).fired for item in created] == [0, 1]


async def test_webhook_sender_skips_locked_webhooks(
    postgres_engine: Engine, postgres_url: str
) -> None:
    engine = postgres_engine
    hooks, deliveries = hooks_of(engine.store, engine.workspace), deliveries_of(engine.store)
    held, other = [
        (await hooks.create("https://127.0.0.1/", ["*"], engine.workspace, None)).webhook.id
        for _ in range(2)
    ]
    await engine.complete(await running(engine))
    await deliveries.fan_out_once()
    async with holding(postgres_url, held, "webhook"):
        assert {due.webhook for due in await at_once(deliveries.lease_due(10))} == {other}


@pytest.mark.parametrize(
    ("table", "key"), [("secret", "id"), ("task_secret", "task"), ("webhook", "id")]
)
async def test_key_rotation_skips_locked_rows(
    postgres_engine: Engine, postgres_url: str, table: str, key: str
) -> None:
    engine, raw = Engine(postgres_engine.store, key_ring=VAULT), Raw(postgres_url)
    hooks = hooks_of(engine.store, engine.workspace)
    for name in ("a", "b"):
        if table == "secret":
            await engine.secrets.put(name, "a value")
        elif table == "task_secret":
            await engine.submit(NewTask(title=name, input={"secrets": {"k": "a value"}}))
        else:
            await hooks.create("https://127.0.0.1/", ["*"], engine.workspace, None)
    newer = KeyRing({"second": bytes(range(32, 64)), "first": bytes(range(32))})
    rotating = Engine(engine.store, key_ring=newer).key_rotator
    held = await raw.value(f"select min({key}::text)::uuid from {table}")
    async with holding(postgres_url, held, table, key):
        assert await at_once(rotating.rotate_once()) == 1
    assert await raw.fetch(f"select {key} from {table} where key_id = 'first'") == [(held,)]
    assert await rotating.rotate_once() == 1
