"""The pending quota holds in the database for every way to create a task."""

import asyncio
from datetime import timedelta
from typing import Any

import pytest
from tests.contract.conftest import (
    WORKER,
    Another,
    ManualClock,
    Raw,
    assigned,
    new,
    profile,
    refusal,
)
from tests.contract.schedules.helpers import cron, defined, fire, trigger

from tenuto.engine.engine import Engine
from tenuto.model.errors import TooMany
from tenuto.model.limits.concurrency import Concurrency
from tenuto.model.limits.quota import Quota

WAITING = "select count(*) from task where status in ('PENDING', 'WAITING')"


async def bound(raw: Raw, engine: Engine, pending: int | None) -> None:
    """Give the workspace a quota; its version moves, as by the API."""
    quota = "null" if pending is None else f"""'{{"pending": {pending}}}'"""
    await raw.execute(f"update workspace set quota = {quota}, lanes_version = lanes_version + 1")
    await engine.core.lanes.reload_if_changed(engine.workspace)


async def test_concurrent_submits_share_the_pending_quota(
    engine: Engine, raw: Raw, another: Another
) -> None:
    await bound(raw, engine, 5)
    async with another() as other:
        await other.core.lanes.reload_if_changed(other.workspace)
        created = await asyncio.gather(
            *(item.submit(new(f"t{n}")) for n in range(6) for item in (engine, other)),
            return_exceptions=True,
        )
    refused = [item for item in created if isinstance(item, BaseException)]
    assert {type(item) for item in refused} == {TooMany}
    assert (len(created), len(refused)) == (12, 7)
    assert await raw.value(WAITING) == 5


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"idempotency_key": "k"},
        {"concurrency": Concurrency(key="k", limit=1)},
        {"run_at": True},
        {"key": "self", "next": "job"},
    ],
    ids=str,
)
async def test_pending_quota_counts_every_kind_of_task(
    engine: Engine, clock: ManualClock, raw: Raw, fields: dict[str, Any]
) -> None:
    await defined(engine)
    if fields.get("run_at"):
        fields = {"run_at": clock.now() + timedelta(hours=1)}
    await bound(raw, engine, 1)
    first = await engine.submit(new("first", **fields))
    if "idempotency_key" in fields:  # what exists already makes nothing more
        again = await engine.submit(new("first", **fields))
        assert (again.id, again.created) == (first.id, False)
        fields = {"idempotency_key": "another"}
    assert await refusal(engine.submit(new("second", **fields))) == "quota_exceeded"
    assert await raw.value(WAITING) == 1
    await bound(raw, engine, None)
    await engine.submit(new("second", **fields))


async def test_assigned_task_counts_as_running(engine: Engine, raw: Raw) -> None:
    await engine.register_agent(profile())
    await assigned(engine)
    await raw.execute(
        """update workspace set quota = '{"running": 2}', lanes_version = lanes_version + 1"""
    )
    await engine.core.lanes.reload_if_changed(engine.workspace)
    await engine.submit_many([new(), new()])
    assert len(await engine.claim(profile(), WORKER, 5)) == 1
    assert await engine.claim(profile(), WORKER, 5) == []


async def test_pending_quota_counts_paused_tasks(engine: Engine, raw: Raw) -> None:
    """Else any number could be paused one after the other, and resumed at once."""
    await bound(raw, engine, 1)
    first = await engine.submit(new())
    await engine.pause(first.id)
    assert await refusal(engine.submit(new())) == "quota_exceeded"
    await engine.resume(first.id)
    await engine.cancel(first.id)
    await engine.submit(new())


async def test_pending_quota_counts_the_whole_bulk(engine: Engine, raw: Raw) -> None:
    await bound(raw, engine, 500)
    assert await refusal(engine.submit_many([new("t")] * 501)) == "quota_exceeded"
    await engine.submit_many([new("t")] * 300)
    assert await refusal(engine.submit_many([new("t")] * 201)) == "quota_exceeded"
    assert await raw.value(WAITING) == 300
    await engine.submit_many([new("t")] * 200)


async def test_pending_quota_counts_flows_and_added_children(engine: Engine, raw: Raw) -> None:
    await defined(engine)
    await bound(raw, engine, 1)
    await engine.flows.start("job")
    assert await refusal(engine.flows.start("job")) == "quota_exceeded"
    assert await raw.value("select count(*) from flow") == 1


async def test_trigger_beyond_the_quota_starts_nothing_and_reports_it(
    engine: Engine, raw: Raw
) -> None:
    await defined(engine)
    await engine.triggers.create("t", "go", "job")
    await bound(raw, engine, 2)
    for _ in range(4):
        await engine.publish("go")
    await trigger(engine)
    view = await engine.triggers.get("t")
    assert (await raw.value("select count(*) from flow"), view.fired) == (2, 2)
    assert view.last_error == "the workspace has reached its quota of 2 tasks waiting to run"
    await bound(raw, engine, None)
    await engine.publish("go")
    await trigger(engine)
    assert (await engine.triggers.get("t")).fired == 3


async def test_due_time_beyond_the_quota_is_missed_and_the_schedule_continues(
    engine: Engine, clock: ManualClock, raw: Raw
) -> None:
    await defined(engine)
    await engine.schedules.create("s", "job", cron())
    await engine.submit(new("in the way"))
    await bound(raw, engine, 1)
    clock.advance(3600)
    await fire(engine)
    view = await engine.schedules.get("s")
    assert (view.status, view.fired, view.missed) == ("ACTIVE", 0, 1)
    assert view.last_error == "the workspace has reached its quota of 1 tasks waiting to run"
    await bound(raw, engine, None)
    clock.advance(3600)
    await fire(engine)
    view = await engine.schedules.get("s")
    assert (view.fired, view.missed, view.last_error) == (1, 1, None)


async def test_pending_quota_is_bounded_by_the_operators_ceiling(engine: Engine, raw: Raw) -> None:
    engine.core.lanes.ceiling = Quota(pending=1)
    await bound(raw, engine, 3)
    await engine.submit(new("first"))
    assert await refusal(engine.submit(new("second"))) == "quota_exceeded"
