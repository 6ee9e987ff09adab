"""Schedules, triggers and events through a server are equal to those of the engine itself."""

from datetime import UTC, datetime

import pytest
from tests.api.conftest import Api

from tenuto.client.remote.engine import RemoteEngine
from tenuto.engine.engine import Engine
from tenuto.engine.schedules.schedules import ScheduleChange
from tenuto.engine.schedules.triggers import TriggerChange
from tenuto.model.errors import Conflict, Invalid, NotFound
from tenuto.model.schedules.schedule import ScheduleSpec
from tenuto.model.tasks.submission import NewTask

SPECS = [
    ScheduleSpec(type="cron", expression="0 9 * * *", timezone="Europe/Berlin", catch_up="all"),
    ScheduleSpec(type="iso", expression="R/2026-01-01/P1D", until=datetime(2099, 1, 1)),  # noqa: DTZ001
    ScheduleSpec(type="datetime-event", at=datetime(2098, 1, 1, tzinfo=UTC), jitter_s=0),
    ScheduleSpec(type="immediate"),
]


async def test_schedules_are_equal_direct_and_remote(
    api: Api, far: RemoteEngine, near: Engine
) -> None:
    await near.definitions.put(NewTask(title="job", key="job"))
    for number, spec in enumerate(SPECS):
        view = await far.schedules.create(f"team/s:{number}", "job", spec, {"n": number})
        assert await near.schedules.get(view.name) == view
        assert await far.schedules.get(view.name) == await far.schedules.get(view.id) == view
        assert await far.schedules.next(view.name, 3) == await near.schedules.next(view.id, 3)
    assert await far.schedules.page(2) == await near.schedules.page(2)
    assert (await far.schedules.pause("team/s:0")).status == "PAUSED"
    assert (await far.schedules.resume("team/s:0")).status == "ACTIVE"
    change = ScheduleChange(schedule=SPECS[1], input=None)
    changed = await far.schedules.update("team/s:0", change, 3)
    assert (changed.schedule.spec(), changed.input) == (SPECS[1], None)
    await far.schedules.delete("team/s:1")
    for engine in (far, near):
        with pytest.raises(NotFound):
            await engine.schedules.get("team/s:1")
        with pytest.raises(Conflict) as stale:
            await engine.schedules.update("team/s:0", ScheduleChange(input=1), 1)
        assert stale.value.code == "version_conflict"
        with pytest.raises(Invalid) as bad:
            await engine.schedules.create("x", "job", ScheduleSpec(type="cron", expression="x"))
        assert bad.value.details["field"] == "expression"


async def test_triggers_and_events_are_equal_direct_and_remote(
    api: Api, far: RemoteEngine, near: Engine
) -> None:
    await near.definitions.put(NewTask(title="job", key="job"))
    view = await far.triggers.create("t", "deploy.*", "job", "event.data.live")
    assert await near.triggers.get("t") == await far.triggers.get(view.id) == view
    assert await far.triggers.page() == await near.triggers.page()
    assert (await far.triggers.pause("t")).status == "PAUSED"
    assert (await far.triggers.resume("t")).status == "ACTIVE"
    change = TriggerChange(filter=None, event="build.done")
    assert (await far.triggers.update("t", change)).filter is None
    task = (await near.submit(NewTask(title="a"))).id
    reported = await far.publish("build.done", {"n": 1}, task)
    assert (reported.name, reported.data, reported.task_id) == ("build.done", {"n": 1}, task)
    await far.triggers.delete("t")
    for engine in (far, near):
        with pytest.raises(NotFound):
            await engine.triggers.pause("t")
        with pytest.raises(Invalid):
            await engine.publish("task.done")
