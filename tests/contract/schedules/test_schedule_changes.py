"""Schedules that are changed, and starts that are paused, at due times."""

from typing import Any
from uuid import UUID

import pytest
from tests.contract.conftest import ManualClock, Raw
from tests.contract.flows.helpers import task
from tests.contract.schedules.helpers import cron, defined, fire, flows

from tenuto.engine.engine import Engine
from tenuto.engine.flows.start import Flows
from tenuto.engine.schedules.schedules import ScheduleChange

HOUR = 3600


async def hourly(engine: Engine, **fields: Any) -> UUID:
    """A schedule of a task that nobody works at."""
    await defined(engine)
    return (await engine.schedules.create("s", "job", cron(**fields))).id


@pytest.mark.parametrize("change", [ScheduleChange(target="other"), ScheduleChange(input={"n": 2})])
async def test_start_in_progress_uses_the_changed_schedule(
    engine: Engine,
    clock: ManualClock,
    raw: Raw,
    monkeypatch: pytest.MonkeyPatch,
    change: ScheduleChange,
) -> None:
    await defined(engine, task("job"), task("other"))
    await engine.schedules.create("s", "job", cron(), {"n": 1})
    clock.advance(HOUR)
    prepare = Flows.prepare

    async def changed_meanwhile(*args: Any, **options: Any) -> Any:
        prepared = await prepare(*args, **options)
        await engine.schedules.update("s", change)
        return prepared

    with monkeypatch.context() as patched:
        patched.setattr(Flows, "prepare", changed_meanwhile)
        assert await fire(engine) == 0
    assert await fire(engine) == 1
    [(key, values)] = await flows(raw, "key, input")
    assert (key, values) in [("other", '{"n":1}'), ("job", '{"n":2}')]


async def test_changed_schedule_keeps_its_queue_only_if_it_queues(
    engine: Engine, clock: ManualClock
) -> None:
    created = await hourly(engine, overlap="queue")
    for _ in range(3):
        clock.advance(HOUR)
        await fire(engine)
    for overlap, queued in (("queue", 2), ("skip", 0)):
        change = ScheduleChange(schedule=cron("30 * * * *", overlap=overlap))
        assert len((await engine.schedules.update(created, change)).queued) == queued


async def test_paused_start_counts_as_running(engine: Engine, clock: ManualClock) -> None:
    created = await hourly(engine)
    clock.advance(HOUR)
    await fire(engine)
    flow = (await engine.schedules.get(created)).last_flow_id
    assert flow is not None
    await engine.flows.pause(flow)
    clock.advance(HOUR)
    await fire(engine)
    view = await engine.schedules.get(created)
    assert (view.fired, view.missed) == (1, 1)
