"""Flows by real processes on real databases that are killed: nothing is lost, nothing comes twice.

`TENUTO_PROOF_GROUPS=1000` plays the joins in full size.
"""

import asyncio
import os
import random
import signal
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.contract.conftest import Raw
from tests.contract.flows.helpers import group, plan, task
from tests.proof.crash.system import Process, System, system
from tests.services.postgres import PostgresServer
from tests.waiting import eventually

from tenuto.model.flows.definition import Foreach
from tenuto.model.flows.plan import Plan
from tenuto.model.tasks.retry import RetryPolicy

KILLED = -signal.SIGKILL
FLOW_POINTS = ("flow.before_piece", "flow.before_commit", "flow.committed")
HANDLERS = ("--app", "tests.proof.crash.handlers:handlers")
GROUPS = int(os.environ.get("TENUTO_PROOF_GROUPS", "60"))
CHILDREN = 16
KILLS = 6
WAIT_S = 60 + GROUPS * 0.6
SOON: dict[str, Any] = {"max_attempts": 100, "retry": RetryPolicy(base_s=0.05, cap_s=0.2)}


@pytest.fixture(scope="module")
def durable() -> Iterator[PostgresServer]:
    """A server that keeps what it has acknowledged."""
    with PostgresServer() as server:
        yield server


@pytest.fixture(params=["sqlite", "postgres"])
async def world(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[System]:
    if request.param == "sqlite":
        url = f"sqlite:///{tmp_path}/t.db"
    else:
        url = request.getfixturevalue("durable").create_database()
    async with system(url, tmp_path) as created:
        yield created


async def check_flows(world: System, flows: int, ends: dict[str, int]) -> None:
    """Checks the number of flows, of runs per key, of attempts per task, and of joins."""
    raw = Raw(world.url)
    rows = await raw.fetch("select status, count(*) from flow group by status")
    assert [tuple(row) for row in rows] == [("COMPLETED", flows)]
    tasks = await raw.fetch(
        "select body.key, task.status from task_body body join task on task.id = body.task"
    )
    result = Counter("child" if key[0] == "c" else key for key, _ in tasks)
    assert result == ends
    assert {status for _, status in tasks} == {"COMPLETED"}
    twice = "select task from attempt where outcome = 'COMPLETED' group by task having count(*) > 1"
    assert await raw.fetch(twice) == []
    wrong = "select key from task_group where open <> 0 or failed <> 0 or succeeded <> total"
    assert await raw.fetch(wrong) == []
    assert await raw.fetch("select id from flow_work") == []
    reported = "select count(*) from event where kind = 'group_completed' group by task"
    assert {int(row[0]) for row in await raw.fetch(reported)} == {1}
    assert await world.engine.maintenance.audit() == []


def joining() -> Plan:
    keys = [f"c{number}" for number in range(CHILDREN)]
    return plan(
        "g",
        group("g", *keys, order="parallel", next="end"),
        *(task(key, task_type="together", **SOON) for key in (*keys, "end")),
    )


class Killer:
    """Processes of both kinds, of which one after the other is killed and replaced."""

    def __init__(self, world: System) -> None:
        self._world = world
        self._rng = random.Random(GROUPS)
        self.killed: Counter[str] = Counter()
        self._alive: list[tuple[str, Process]] = []
        for kind in ("worker", "worker", "worker", "coordinator", "coordinator"):
            self._start(kind)

    def _start(self, kind: str) -> None:
        if kind == "worker":
            process = self._world.worker(*HANDLERS, "--slots", "32")
        else:
            process = self._world.coordinator()
        self._alive.append((kind, process))

    def kill_one(self) -> None:
        """Kill one, of the kind that was killed least so far, and start another."""
        fewest = min("worker", "coordinator", key=lambda kind: self.killed[kind])
        kind, process = self._rng.choice([item for item in self._alive if item[0] == fewest])
        self._alive.remove((kind, process))
        process.signal(signal.SIGKILL)
        self.killed[kind] += 1
        self._start(kind)


async def test_groups_join_once_while_processes_are_killed(world: System) -> None:
    created = joining()
    for start in range(0, GROUPS, 20):
        batch = range(start, min(start + 20, GROUPS))
        await asyncio.gather(*(world.engine.flows.start_plan(created) for _ in batch))
    killer = Killer(world)
    kills = max(KILLS, GROUPS // 12)
    total = GROUPS * (CHILDREN + 1)
    for number in range(kills):
        part = total * number // (kills + 1)

        async def so_far(part: int = part) -> bool:
            return (await world.engine.counts())["COMPLETED"] > part

        await eventually(so_far, WAIT_S, 0.05)
        killer.kill_one()

    async def all_done() -> bool:
        return (await world.engine.counts())["COMPLETED"] == total

    await eventually(all_done, WAIT_S, 0.1)
    assert min(killer.killed["worker"], killer.killed["coordinator"]) >= KILLS // 2
    lost = await Raw(world.url).value("select count(*) from attempt where outcome = 'STALLED'")
    assert lost, "no worker was killed at work"
    await check_flows(world, GROUPS, {"child": GROUPS * CHILDREN, "end": GROUPS})


def foreach(items: int) -> Plan:
    control = Foreach(items=list(range(items)), template="one", order="parallel")
    return plan(
        "each",
        task("each", next="end", control=control),
        task("one", task_type="together", **SOON),
        task("end", task_type="together", **SOON),
    )


async def test_coordinator_crashes_activate_every_item_once(world: System) -> None:
    """A start makes the first items and leaves the rest to coordinators, which die at it."""
    await world.engine.flows.start_plan(foreach(1700))
    created = []
    for point in FLOW_POINTS:
        process = world.coordinator(CRASH_AT=point)
        assert await process.ended() == KILLED, f"{point} was not reached\n{process.text()}"
        created.append(await Raw(world.url).value("select made from task_group"))
    assert 0 < created[0] == created[1] < created[2] < 1700
    world.coordinator()
    world.worker(*HANDLERS, "--slots", "400")

    async def all_done() -> bool:
        return (await world.engine.counts())["COMPLETED"] == 1702

    await eventually(all_done, WAIT_S, 0.1)
    await check_flows(world, 1, {"each": 1, "one": 1700, "end": 1})


async def test_client_crashes_start_one_flow(world: System) -> None:
    text = msgspec.json.encode(joining()).decode()
    for point in ("flow.before_commit", "flow.committed"):
        process = world.start("python", "-m", "tests.proof.crash.starter", text, CRASH_AT=point)
        assert await process.ended() == KILLED, f"{point} was not reached\n{process.text()}"
    again = world.start("python", "-m", "tests.proof.crash.starter", text)
    assert await again.ended() == 0
    world.coordinator()
    world.worker(*HANDLERS)

    async def all_done() -> bool:
        return (await world.engine.counts())["COMPLETED"] == CHILDREN + 1

    await eventually(all_done, WAIT_S, 0.1)
    await check_flows(world, 1, {"child": CHILDREN, "end": 1})
