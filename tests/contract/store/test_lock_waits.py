"""PostgreSQL: who has to see what another transaction writes waits until it is committed.

Each test opens that transaction itself and commits it once the call waits for it. A call that does
not wait decides on what was there before, and overwrites what it has not seen.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import asynccontextmanager
from typing import Any, TypeVar
from uuid import UUID

import asyncpg
import pytest
from tests.contract.conftest import (
    WORKER,
    Raw,
    claim_all,
    claim_one,
    failure,
    new,
    profile,
    refusal,
    running,
    status,
)
from tests.contract.flows.helpers import flow_status, group, plan, start, task
from tests.contract.schedules.helpers import cron, defined
from tests.services.postgres import PostgresServer
from tests.waiting import eventually
from tests.webhooks.conftest import VAULT, deliveries_of, hooks_of

from tenuto.engine.agents.gateways import Gateways
from tenuto.engine.agents.registry import AgentRegistry
from tenuto.engine.engine import Engine
from tenuto.engine.tenancy.accounts import Identity
from tenuto.engine.tenancy.secrets import NamedSecrets
from tenuto.engine.webhooks.endpoints import WebhookChange
from tenuto.model.limits.budgets import Usage
from tenuto.model.limits.rate_limits import RateLimit
from tenuto.model.tasks.task import token_hash
from tenuto.model.tenancy.access import SCOPES, Caller, Role

T = TypeVar("T")
WAIT_S = 10
ENDED = "status = 'COMPLETED', finished_at = now(), version = version + 1"
CANCELLED = "status = 'CANCELLED', finished_at = now(), version = version + 1"


@pytest.fixture
def postgres_url(postgres: PostgresServer, postgres_template: str) -> Iterator[str]:
    url = postgres.create_database(postgres_template)
    yield url
    postgres.drop_database(url)


@pytest.fixture
def engine(postgres_engine: Engine) -> Engine:
    return postgres_engine


@pytest.fixture
def raw(postgres_url: str) -> Raw:
    return Raw(postgres_url)


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[Any]:
    connection = await asyncpg.connect(url)
    try:
        yield connection
    finally:
        await connection.close()


async def has_looked(url: str, calling: "asyncio.Future[Any]") -> None:
    """Return once the call waits for a lock, or is over without having waited."""
    async with connected(url) as watcher:

        async def looked() -> bool:
            waiting = await watcher.fetchval("select count(*) from pg_locks where not granted")
            return calling.done() or waiting > 0

        await eventually(looked)


async def meanwhile(raw: Raw, call: Awaitable[T], *written: str) -> T:
    """Returns the result of the call beside an uncommitted write of another transaction."""
    async with connected(raw.url) as other:
        async with other.transaction():
            for statement in written:
                await other.execute(statement)
            calling = asyncio.ensure_future(call)
            await has_looked(raw.url, calling)
        async with asyncio.timeout(WAIT_S):
            return await calling


def caller_of(workspace: UUID, role: Role) -> Caller:
    return Caller(workspace=workspace, role=role, scopes=frozenset(SCOPES), actor="a", key="a")


GONE = {
    "lowered": "update member set role = 'VIEWER' where user_id = '{}'",
    "removed": "delete from member where user_id = '{}'",
}


@pytest.mark.parametrize("first", GONE)
@pytest.mark.parametrize("second", GONE)
async def test_concurrent_removal_of_two_owners_keeps_one(
    engine: Engine, raw: Raw, first: str, second: str
) -> None:
    identity, workspace = Identity(engine.store), engine.workspace
    ann, bob = [
        await identity.create_user(name, "correct horse battery", workspace, Role.OWNER)
        for name in ("ann", "bob")
    ]
    caller = caller_of(workspace, Role.OWNER)
    going = {
        "lowered": lambda: identity.set_member_role(caller, bob, Role.VIEWER),
        "removed": lambda: identity.remove_member(caller, bob),
    }
    held = f"select from workspace where id = '{workspace}' for update"
    gone = GONE[first].format(ann)
    assert await refusal(meanwhile(raw, going[second](), held, gone)) == "last_owner"
    owners = await raw.fetch("select user_id from member where role = 'OWNER'")
    assert owners == [(bob,)]


async def test_concurrent_gateway_failures_are_all_counted(engine: Engine, raw: Raw) -> None:
    gateways = Gateways(engine.system)
    await gateways.record_served(["g"])
    await gateways.record_failure("g", "away", probe=False)
    failed = "update gateway set failures = failures + 1"
    closed_until = await meanwhile(raw, gateways.record_failure("g", "away", probe=False), failed)
    [state] = await gateways.states()
    assert (state.failures, state.closed_until) == (3, closed_until)
    assert closed_until is not None


async def test_agent_terminated_meanwhile_is_not_terminated_again(engine: Engine, raw: Raw) -> None:
    existing = await engine.register_agent(profile())
    ending = AgentRegistry(engine.core, engine.workspace).drain(existing.id, None, "tester")
    ended = "update agent set status = 'TERMINATED', version = version + 1"
    assert await refusal(meanwhile(raw, ending, ended)) == "agent_terminated"


async def test_schedule_firing_during_its_pause_has_fired(engine: Engine, raw: Raw) -> None:
    await defined(engine)
    created = await engine.schedules.create("s", "job", cron())
    paused = await meanwhile(raw, engine.schedules.pause("s"), "update schedule set fired = 5")
    assert (paused.id, paused.status, paused.fired) == (created.id, "PAUSED", 5)


async def test_trigger_changed_during_its_pause_is_changed(engine: Engine, raw: Raw) -> None:
    await defined(engine)
    await engine.triggers.create("t", "go", "job")
    changed = "update trigger_rule set event = 'stop', version = version + 1"
    paused = await meanwhile(raw, engine.triggers.pause("t"), changed)
    assert (paused.status, paused.event) == ("PAUSED", "stop")


async def test_definition_changed_meanwhile_has_another_version(engine: Engine, raw: Raw) -> None:
    await defined(engine)
    changing = engine.definitions.put(task("job", description="mine"), version=1)
    theirs = "update definition set version = version + 1"
    assert await refusal(meanwhile(raw, changing, theirs)) == "version_conflict"


async def test_concurrent_token_reports_are_all_counted(engine: Engine, raw: Raw) -> None:
    await engine.rate_limits.put(RateLimit(name="m", model="m", tokens_per_minute=1000))
    await engine.register_agent(profile(model="m"))
    fence = await running(engine)
    telling = engine.used(fence, Usage(model="m", input_tokens=50))
    await meanwhile(raw, telling, "update rate_limit set tokens = tokens - 100")
    [limit] = await engine.rate_limits.list()
    assert limit.tokens_left == 850


async def test_claim_follows_a_concurrent_change_of_its_agent(engine: Engine, raw: Raw) -> None:
    agent = await engine.register_agent(profile(max_concurrent=2), managed=True)
    await engine.submit_many([new(), new()])
    assert len(await engine.claim(agent, WORKER, 1)) == 1
    lowered = "update agent set max_concurrent = 1"
    assert await meanwhile(raw, engine.claim(agent, WORKER, 1), lowered) == []


async def test_submit_follows_a_concurrent_change_of_the_quota(engine: Engine, raw: Raw) -> None:
    await engine.submit(new())
    quota = """update workspace set quota = '{"pending": %d}', lanes_version = lanes_version + %d"""
    await raw.execute(quota % (2, 1))
    await engine.core.lanes.reload_if_changed(engine.workspace)
    lowered = quota % (1, 0)
    assert await refusal(meanwhile(raw, engine.submit(new()), lowered)) == "quota_exceeded"
    assert await raw.count("task") == 1


async def test_concurrent_claims_with_one_token_return_the_same_task(
    engine: Engine, raw: Raw
) -> None:
    """The first one has not committed yet when the second one looks for what it took."""
    await engine.register_agent(profile())
    first, second = [(await engine.submit(new())).id for _ in range(2)]
    token = token_hash("said twice")
    taken = (
        f"update task set status = 'RUNNING', attempt = 1, tries = 1, lease_token = '{token}',"
        f" agent = '{profile().id}', worker = '{WORKER}', lease_until = '2030-01-02',"
        f" started_at = '2030-01-01', version = version + 1 where id = '{first}'"
    )
    held = f"select pg_advisory_xact_lock(hashtextextended('{token}', 0))"
    claiming = engine.claim(profile(), WORKER, 1, 20, "said twice")
    claimed = await meanwhile(raw, claiming, held, taken)
    assert [work.fence.task for work in claimed] == [first]
    assert await status(engine, second) == "PENDING"


async def test_command_decides_on_the_committed_task(engine: Engine, raw: Raw) -> None:
    created = (await engine.submit(new())).id
    await meanwhile(
        raw, engine.cancel(created), "update task set priority = 9, version = version + 1"
    )
    assert await status(engine, created) == "CANCELLED"


async def test_task_submitted_while_its_dependency_finishes_does_not_wait(
    engine: Engine, raw: Raw
) -> None:
    need = (await engine.submit(new())).id
    making = engine.submit(new(depends_on=[str(need)]))
    created = await meanwhile(raw, making, f"update task set {ENDED} where id = '{need}'")
    assert await status(engine, created.id) == "PENDING"


async def test_parent_that_waits_while_its_subtask_finishes_is_woken(
    engine: Engine, raw: Raw
) -> None:
    fence = await running(engine)
    child = await engine.spawn(fence, "one", new())
    waited = await meanwhile(
        raw, engine.wait(fence, [child]), f"update task set {ENDED} where id = '{child}'"
    )
    assert not waited.parked
    assert [(item.id, item.status) for item in waited.children] == [(child, "COMPLETED")]


async def test_concurrent_last_subtasks_wake_the_parent_once(engine: Engine, raw: Raw) -> None:
    fence = await running(engine)
    one, two = [await engine.spawn(fence, key, new(key)) for key in ("one", "two")]
    claimed = {work.fence.task: work.fence for work in await claim_all(engine)}
    assert (await engine.wait(fence, [one, two])).parked
    await meanwhile(
        raw,
        engine.complete(claimed[two]),
        f"select from task where id = '{fence.task}' for update",
        f"delete from child_wait where child = '{one}'",
    )
    assert await status(engine, fence.task) == "PENDING"


async def test_concurrent_last_children_finish_the_group_once(engine: Engine, raw: Raw) -> None:
    flow = await start(engine, "g", group("g", "a", "b", order="parallel"), task("a"), task("b"))
    claimed = await claim_all(engine)
    other = "update task_group set open = open - 1, succeeded = succeeded + 1"
    await meanwhile(raw, engine.complete(claimed[1].fence), other)
    assert await flow_status(engine, flow) == "COMPLETED"


async def test_flow_cancelled_meanwhile_is_not_paused(engine: Engine, raw: Raw) -> None:
    flow = await start(engine, "a", task("a"))
    cancelled = "update flow set status = 'CANCELLED', finished_at = now()"
    assert await refusal(meanwhile(raw, engine.flows.pause(flow), cancelled)) == "out_of_turn"
    assert await flow_status(engine, flow) == "CANCELLED"


@pytest.mark.parametrize("mode", ["completed", "completed elsewhere", "failed"])
async def test_task_cancelled_while_its_dependency_finished_stays_cancelled(
    engine: Engine, raw: Raw, mode: str
) -> None:
    """One statement ends what was claimed here; for all else there is a cascade."""
    need = (await engine.submit(new())).id
    created = new(depends_on=[str(need)], on_dependency_failure="run")
    waiter = (await engine.submit(created)).id
    fence = (await claim_one(engine)).fence
    by = Engine(engine.store) if mode == "completed elsewhere" else engine
    ending = by.fail(fence, failure("syntax")) if mode == "failed" else by.complete(fence)
    await meanwhile(raw, ending, f"update task set {CANCELLED} where id = '{waiter}'")
    assert await status(engine, need) == mode.split(maxsplit=1)[0].upper()
    assert await status(engine, waiter) == "CANCELLED"


async def test_task_blocked_while_its_dependency_finishes_is_released(
    engine: Engine, raw: Raw
) -> None:
    need, other = [(await engine.submit(new(name))).id for name in ("need", "other")]
    await engine.submit(new(depends_on=[str(need)]))
    late = (await engine.submit(new(depends_on=[str(other)]))).id
    claimed = {work.fence.task: work.fence for work in await claim_all(engine)}
    await meanwhile(
        raw,
        engine.complete(claimed[need]),
        f"update task set awaited = 2 where id = '{need}'",
        f"update task set unmet = 2, version = version + 1 where id = '{late}'",
        "insert into task_dependency (task, needs, workspace, met)"
        f" values ('{late}', '{need}', '{engine.workspace}', false)",
    )
    await engine.complete(claimed[other])
    assert await status(engine, late) == "PENDING"


async def test_task_retried_while_its_dependency_finishes_does_not_wait(
    engine: Engine, raw: Raw
) -> None:
    need = (await engine.submit(new())).id
    waiter = (await engine.submit(new(depends_on=[str(need)]))).id
    await engine.cancel(waiter)
    await meanwhile(raw, engine.retry(waiter), f"update task set {ENDED} where id = '{need}'")
    assert await status(engine, waiter) == "PENDING"


async def test_child_cancelled_meanwhile_does_not_get_the_turn(engine: Engine, raw: Raw) -> None:
    await engine.flows.start_plan(plan("g", group("g", "a", "b"), task("a"), task("b")))
    work = await claim_one(engine)
    [(second,)] = await raw.fetch("select task from task_body where key = 'b'")
    await meanwhile(
        raw, engine.complete(work.fence), f"update task set {CANCELLED} where id = '{second}'"
    )
    assert await status(engine, work.fence.task) == "COMPLETED"
    assert await status(engine, second) == "CANCELLED"


async def test_next_task_of_a_flow_paused_meanwhile_waits(engine: Engine, raw: Raw) -> None:
    await engine.flows.start_plan(plan("a", task("a", next="b"), task("b")))
    work = await claim_one(engine)
    await meanwhile(raw, engine.complete(work.fence), "update flow set status = 'PAUSED'")
    assert await status(engine, work.fence.task) == "COMPLETED"
    [(second,)] = await raw.fetch("select task from task_body where key = 'b'")
    assert await status(engine, second) == "WAITING"


async def test_cursor_moved_meanwhile_is_not_moved_back(engine: Engine, raw: Raw) -> None:
    await engine.submit(new())
    async with connected(raw.url) as other:
        transaction = other.transaction()

        async def sink(_events: object) -> int:
            await transaction.start()
            await other.execute("update cursor set position = position + 1000000")
            return 1

        relaying = asyncio.ensure_future(engine.maintenance.relay_once("inbox", sink))
        await has_looked(raw.url, relaying)
        await transaction.commit()
        await relaying
    assert await raw.value("select position from cursor") >= 1000000


async def test_secret_restricted_to_owners_meanwhile_is_not_deleted(
    engine: Engine, raw: Raw
) -> None:
    await Engine(engine.store, key_ring=VAULT).secrets.put("s", "a value")
    admin = caller_of(engine.workspace, Role.ADMIN)
    deleting = NamedSecrets(engine.core, engine.workspace, "admin", admin).delete("s")
    stored = """update secret set use = '{"role": "OWNER"}'"""
    assert await refusal(meanwhile(raw, deleting, stored)) == "secret_forbidden"
    assert await raw.count("secret") == 1


URL = "https://127.0.0.1/"


async def webhook_with_an_event(engine: Engine) -> UUID:
    """Creates a webhook and an event for it; returns the id of the webhook."""
    created = await hooks_of(engine.store, engine.workspace).create(
        URL, ["*"], engine.workspace, "tester"
    )
    await engine.complete(await running(engine))
    return created.webhook.id


async def test_concurrent_endpoint_failures_are_all_counted(engine: Engine, raw: Raw) -> None:
    hooks, hook = hooks_of(engine.store, engine.workspace), await webhook_with_an_event(engine)
    deliveries = deliveries_of(engine.store)
    await deliveries.fan_out_once()
    due, *_ = await deliveries.lease_due(10)
    failed = "update webhook set failures = failures + 1"
    await meanwhile(raw, deliveries.record_failure(due, "no answer"), failed)
    assert (await hooks.show(hook, engine.workspace)).failures == 2


async def test_endpoint_failing_during_an_edit_has_failed(engine: Engine, raw: Raw) -> None:
    hooks, hook = hooks_of(engine.store, engine.workspace), await webhook_with_an_event(engine)
    change = hooks.update(hook, engine.workspace, WebhookChange(description="mine"))
    view = await meanwhile(raw, change, "update webhook set failures = 4")
    assert (view.description, view.failures) == ("mine", 4)


async def test_endpoint_disabled_meanwhile_gets_no_delivery(engine: Engine, raw: Raw) -> None:
    await webhook_with_an_event(engine)
    disabled = "update webhook set enabled = false"
    await meanwhile(raw, deliveries_of(engine.store).fan_out_once(), disabled)
    assert await raw.count("webhook_delivery") == 0
