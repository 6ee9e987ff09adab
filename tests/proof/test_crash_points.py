"""Every crash point, with real processes on real databases: die there, heal, and miss nothing.

A process is made to kill itself at the point. A planned crash that never happened is a failure.
Then healthy processes start, and everything that was acknowledged must end, completed once.
"""

import asyncio
import signal
from collections.abc import AsyncIterator, Iterable, Iterator
from pathlib import Path
from uuid import UUID

import msgspec
import pytest
from tests.proof.crash.system import Process, System, system
from tests.proof.test_flow_processes import FLOW_POINTS
from tests.proof.test_gateway import DISPATCH_POINTS
from tests.services.postgres import PostgresServer
from tests.waiting import eventually
from tests.webhooks.test_crashes import WEBHOOK_POINTS

from tenuto.crash_points import POINTS

KILLED = -signal.SIGKILL

# What a task has to do for its worker to get to the point, on the first attempt; later ones end.
TREE = "setsid sh -c 'trap \"\" TERM; sleep 100 & wait' & "
QUICK = "exit 0"
LONG = f"{TREE} sleep 100 & wait"
SIZE = 4  # processes of a long one
LATER = '[ "$TENUTO_ATTEMPT" -gt 1 ] && exit 0; '
WORKER_POINTS = {
    "worker.before_claim": QUICK,
    "worker.claimed": QUICK,
    "worker.before_start": QUICK,
    "worker.running": QUICK,
    "worker.session_spawned": LONG,
    "worker.before_heartbeat": LONG,
    "worker.heartbeat_answered": LONG,
    "worker.before_checkpoint": f"echo '{{\"checkpoint\": 1}}' >&3; {LONG}",
    "worker.checkpoint_saved": f"echo '{{\"checkpoint\": 1}}' >&3; {LONG}",
    "worker.before_complete": QUICK,
    "worker.complete_answered": QUICK,
    "worker.before_fail": "exit 3",
}
DRAIN_POINTS = {"worker.draining": LONG, "worker.released": LONG}
HARMLESS = {"worker.before_claim", "worker.complete_answered"}
"""Where a worker holds nothing."""
# In this order, with the status that tasks whose worker is dead have after the crash.
COORDINATOR_POINTS = {
    "coordinator.leading": "RUNNING",
    "coordinator.expired": "RETRY_WAIT",
    "coordinator.promoted": "PENDING",
    "coordinator.before_resign": "PENDING",
}
RELAY_POINTS = ("relay.before_publish", "relay.published", "relay.moved")
ENGINE_POINTS = {"engine.before_commit", "engine.committed", "engine.before_announce"}


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


async def all_killed(crashing: dict[str, Process]) -> None:
    """Each process ends at its point, by the signal that it sends to itself."""

    async def end(point: str, process: Process) -> None:
        code = await process.ended()
        assert code == KILLED, f"{point} was not reached: {code}\n{process.text()}"

    await asyncio.gather(*(end(*item) for item in crashing.items()))


def test_every_crash_point_is_covered() -> None:
    tried = (WORKER_POINTS, DRAIN_POINTS, COORDINATOR_POINTS, RELAY_POINTS, ENGINE_POINTS)
    assert {*WEBHOOK_POINTS, *FLOW_POINTS, *DISPATCH_POINTS}.union(*tried) == POINTS


async def test_worker_crashes_lose_and_double_nothing(world: System) -> None:
    tasks = await submit_tagged(world, WORKER_POINTS)
    await all_killed({p: world.worker("--task-tag", p, CRASH_AT=p) for p in WORKER_POINTS})
    await eventually(lambda: not world.sessions(), 5)
    heal(world, WORKER_POINTS)
    await world.check(tasks.values())
    for point, task in tasks.items():
        expected = ["COMPLETED"] if point in HARMLESS else ["STALLED", "COMPLETED"]
        assert await world.outcomes(task) == expected, point


async def test_worker_crashes_during_a_drain_lose_nothing(world: System) -> None:
    tasks = await submit_tagged(world, DRAIN_POINTS)
    crashing = {p: world.worker("--task-tag", p, CRASH_AT=p, drain_s=0.1) for p in DRAIN_POINTS}
    await world.in_status(tasks.values(), "RUNNING")
    await eventually(lambda: len(world.sessions()) >= SIZE * len(tasks), 20)
    for process in crashing.values():
        process.signal(signal.SIGTERM)
    await all_killed(crashing)
    await eventually(lambda: not world.sessions(), 5)
    heal(world, DRAIN_POINTS)
    await world.check(tasks.values())
    assert await world.outcomes(tasks["worker.draining"]) == ["STALLED", "COMPLETED"]
    assert await world.outcomes(tasks["worker.released"]) == ["RELEASED", "COMPLETED"]


async def submit_tagged(world: System, scripts: dict[str, str]) -> dict[str, UUID]:
    """One task per point, for the worker that is to crash there."""
    new_tasks = [world.task(LATER + script, task_tags=[point]) for point, script in scripts.items()]
    return dict(zip(scripts, await world.submit(*new_tasks), strict=True))


def heal(world: System, tags: Iterable[str]) -> None:
    """Start a worker that takes everything, and a coordinator."""
    world.worker("--agent", "healthy", *(word for tag in tags for word in ("--task-tag", tag)))
    world.coordinator()


async def lose(world: System) -> list[UUID]:
    """Tasks whose worker is gone; only a coordinator can make them go on."""
    ids = await world.submit(*(world.task(LATER + LONG) for _ in range(3)))
    process = world.worker()
    await eventually(lambda: len(world.sessions()) >= SIZE * len(ids), 20)
    process.signal(signal.SIGKILL)
    await process.ended()
    return ids


async def test_coordinator_crashes_lose_and_double_nothing(world: System) -> None:
    tasks = await lose(world)
    for point, status in COORDINATOR_POINTS.items():
        crashing = world.coordinator(CRASH_AT=point)
        if point == "coordinator.before_resign":
            await eventually(lambda: "coordinator" in crashing.text(), 20)  # noqa: B023  at once
            crashing.signal(signal.SIGTERM)
        await all_killed({point: crashing})
        assert {(await world.engine.show(task)).status for task in tasks} == {status}, point
    world.coordinator()
    world.worker()
    await world.check(tasks)


async def test_relay_crashes_lose_no_event(world: System) -> None:
    world.worker()
    first, second = world.task("", command=["no such program"]), world.task(QUICK)
    bad, good = await world.submit(first, second)
    await world.in_status([bad], "FAILED")
    reports = []
    for point in RELAY_POINTS:
        crashing = world.coordinator(CRASH_AT=point)
        await all_killed({point: crashing})
        reports.append(crashing.text().count(f"failed {bad}"))
    # Told before the cursor moved, so told again; not any more after it has.
    assert reports == [0, 1, 1]
    [late] = await world.submit(first)
    healthy = world.coordinator()
    await eventually(lambda: f"failed {late}" in healthy.text(), 20)
    assert str(bad) not in healthy.text()
    await world.check([good])


@pytest.mark.parametrize("keyed", [True, False], ids=["keyed", "plain"])
async def test_client_crashes_lose_no_acknowledged_task(world: System, keyed: bool) -> None:
    def submit(point: str, *words: str) -> Process:
        new = world.task(QUICK, title=point, idempotency_key=point if keyed else None)
        task = msgspec.json.encode(new).decode()
        return world.start("python", "-m", "tests.proof.crash.submitter", task, *words)

    crashing = {point: submit(point, point) for point in ENGINE_POINTS}
    await all_killed(crashing)
    again = {point: submit(point) for point in ENGINE_POINTS}
    assert [await process.ended() for process in again.values()] == [0, 0, 0]
    answers = [process.text().split() for process in (*crashing.values(), *again.values())]
    assert [len(item) for item in answers] == [1, 1, 1, 2, 2, 2]
    world.worker()
    await world.check({UUID(item) for answer in answers for item in answer})
    tasks = {task.id for task in (await world.engine.list()).tasks}
    # Repeated under its key, a submit makes no second task; without one, what was stored unheard
    # of stays. Either way only what was stored before the crash is there.
    assert len(tasks) == (9 if keyed else 11)
    await world.check(tasks)
