"""Helpers for tests of schedules and triggers: definitions, polls and their results."""

from typing import Any
from uuid import UUID

from tests.contract.conftest import Raw
from tests.contract.flows.helpers import task

from tenuto.engine.engine import Engine
from tenuto.engine.schedules.event_matching import TriggerRunner
from tenuto.engine.schedules.firing import ScheduleRunner
from tenuto.model.flows.plan import Spec
from tenuto.model.schedules.schedule import ScheduleSpec


async def defined(engine: Engine, *specs: Spec) -> None:
    """Keep definitions; without any, a task `job`."""
    for spec in specs or (task("job"),):
        await engine.definitions.put(spec)


def cron(line: str = "0 * * * *", **fields: Any) -> ScheduleSpec:
    return ScheduleSpec(type="time-based", expression=line, **fields)


async def fire(engine: Engine) -> int:
    return await ScheduleRunner(engine.system).fire_once()


async def trigger(engine: Engine) -> int:
    """Hand triggers all events there are."""
    total = 0
    while n := await TriggerRunner(engine.system).trigger_once():
        total += n
    return total


async def flows(raw: Raw, columns: str = "key, status") -> list[tuple[Any, ...]]:
    """The flows there are, oldest first."""
    return await raw.fetch(f"select {columns} from flow order by id")


async def trail(raw: Raw, subject: UUID) -> list[str]:
    """Returns the events of a schedule or trigger; asserts that its versions have no gaps."""
    rows = await raw.fetch(f"select seq, kind from event where task = '{subject}' order by seq")
    assert [seq for seq, _ in rows] == list(range(1, len(rows) + 1))
    return [kind.partition("_")[2] for _, kind in rows]


async def faults(raw: Raw) -> list[tuple[str, str]]:
    """Kind and message of all events of level ERROR."""
    rows = await raw.fetch(
        "select kind, message from event where level = 'ERROR' order by at, task, seq"
    )
    return [(kind, message) for kind, message in rows]
