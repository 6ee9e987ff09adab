"""Worker, coordinator and `up` as real processes: killed, stopped, continued and drained."""

import asyncio
import fcntl
import os
import signal
from collections.abc import AsyncIterator, Callable
from datetime import timedelta
from pathlib import Path
from time import monotonic
from typing import Any
from uuid import UUID

import pytest
from tests.proof.crash.system import WAIT_S, System, frozen, stopped, system
from tests.services.postgres import PostgresServer
from tests.waiting import eventually

from tenuto import app
from tenuto.settings import sqlite_path

LATER = '[ "$TENUTO_ATTEMPT" -gt 1 ] && exit 0; '
# Ignores SIGTERM, and has a child in a session of its own that does too, with a child.
NASTY = "trap '' TERM; setsid sh -c 'trap \"\" TERM; sleep 100 & wait' & sleep 100 & wait"
NASTY_SIZE = 4
MEEK = "sleep 100 & wait"
GONE_S = 5.0
"""The promise is 1 s; a loaded machine gets some more."""
SLACK = timedelta(seconds=10)


@pytest.fixture
async def world(database_url: str, tmp_path: Path) -> AsyncIterator[System]:
    async with system(database_url, tmp_path) as created:
        yield created


def without_writers(world: System) -> Callable[[], bool]:
    """A check that no process is inside a write transaction of SQLite."""
    path = sqlite_path(world.url)

    def check() -> bool:
        if path is None:
            return True
        with Path(f"{path}-lock").open("a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
        return True

    return check


async def flying(world: System, n: int, size: int = NASTY_SIZE) -> None:
    """Wait until so many commands run, with everything that they start."""
    await eventually(lambda: len(world.sessions()) >= n * size, WAIT_S, 0.05)


async def claimed_at(world: System, task: UUID, attempt: int) -> float:
    events = await world.engine.events(task)
    [at] = [e.at for e in events if e.event == "claimed" and e.attempt == attempt]
    return at.timestamp()


async def test_tasks_of_a_killed_worker_are_queued_again(
    world: System, record_property: Callable[[str, object], None]
) -> None:
    world.coordinator()
    tasks = await world.submit(*(world.task(LATER + NASTY) for _ in range(20)))
    worker = world.worker("--slots", "20")
    await flying(world, 20)
    worker.signal(signal.SIGKILL)
    killed = monotonic()
    leases = {task: (await world.engine.show(task)).lease_until for task in tasks}
    await eventually(lambda: not world.sessions(), GONE_S)
    record_property("sessions gone after s", monotonic() - killed)
    world.worker("--slots", "20")
    await world.check(tasks)
    late = []
    for task in tasks:
        assert await world.outcomes(task) == ["STALLED", "COMPLETED"]
        until = leases[task]
        assert until is not None
        late.append(await claimed_at(world, task, 2) - until.timestamp())
    record_property("claimed again after lease end + s", max(late))
    assert max(late) < (timedelta(seconds=world.settings.tick_s) + SLACK).total_seconds()


async def test_second_worker_takes_over(world: System) -> None:
    world.coordinator()
    [task] = await world.submit(world.task(LATER + MEEK))
    first = world.worker()
    await flying(world, 1, 2)
    world.worker()
    first.signal(signal.SIGKILL)
    await world.check([task])
    lost, done = await world.attempts(task)
    assert (lost.outcome, lost.message) == ("STALLED", "the lease expired")
    assert lost.worker != done.worker


async def test_tasks_of_a_worker_of_up_are_queued_again_at_once(world: System) -> None:
    world.start("up", "--workers", "1", lease_s=600)
    [task] = await world.submit(world.task(LATER + NASTY))
    await flying(world, 1)
    await eventually(lambda: world.engine.query.workers(world.engine.workspace))
    [row] = await world.engine.query.workers(world.engine.workspace)
    killed = world.engine.clock.now()
    world.kill(row["pid"])
    await world.check([task])
    lost, _ = await world.attempts(task)
    assert (lost.outcome, lost.message) == ("STALLED", "the worker died")
    assert lost.ended_at is not None
    assert lost.ended_at - killed < SLACK
    [event] = [e for e in await world.engine.events(task) if e.event == "lease_expired"]
    assert "worker died" in event.text


async def test_workers_drain_quietly_when_up_is_killed(world: System) -> None:
    up = world.start("up", "--workers", "2", drain_s=2)
    tasks = await world.submit(*(world.task(MEEK) for _ in range(2)))
    await flying(world, 2, 2)

    async def both_workers() -> list[Any]:
        rows = list(await world.engine.query.workers(world.engine.workspace))
        return rows if len(rows) == 2 else []

    before = {row["pid"]: cpu_seconds(row["pid"]) for row in await eventually(both_workers, WAIT_S)}
    used = dict(before)
    up.signal(signal.SIGKILL)

    def gone() -> bool:
        used.update({pid: cpu_seconds(pid) or used[pid] for pid in used})
        return not world.others()

    await eventually(gone, WAIT_S, 0.05)
    assert max(used[pid] - before[pid] for pid in used) < 0.7
    for task in tasks:
        view = await world.engine.show(task)
        assert (view.status, view.tries) == ("PENDING", 0)
        assert await world.outcomes(task) == ["RELEASED"]
    workers = await world.engine.query.workers(world.engine.workspace)
    assert {row["status"] for row in workers} == {"STOPPED"}


def cpu_seconds(pid: int) -> float:
    """Returns the processor time of a process; 0 if it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def test_suspension_of_all_processes_runs_no_task_again(world: System) -> None:
    coordinator = world.coordinator(lease_s=3)
    worker = world.worker(lease_s=3)
    done = world.folder / "done"
    [task] = await world.submit(world.task(f"until [ -e '{done}' ]; do sleep 0.05; done"))
    await flying(world, 1, 1)
    await eventually(lambda: leads(world), WAIT_S)
    with stopped(worker, coordinator, free=without_writers(world)):
        await eventually(lambda: expired(world, task, seconds=1), WAIT_S)
    await eventually(lambda: renewed(world, task), WAIT_S)
    done.touch()
    await world.check([task])
    assert await world.outcomes(task) == ["COMPLETED"]


async def leads(world: System) -> bool:
    return await world.engine.maintenance.leader("coordinator") is not None


async def expired(world: System, task: UUID, seconds: float) -> bool:
    """True if the lease ended that long ago."""
    until = (await world.engine.show(task)).lease_until
    assert until is not None, "the task is nobody's"
    return world.engine.clock.now() > until + timedelta(seconds=seconds)


async def renewed(world: System, task: UUID) -> bool:
    return not await expired(world, task, 0)


async def test_outage_of_the_database_runs_no_task_again(
    postgres_url: str, postgres: PostgresServer, tmp_path: Path
) -> None:
    async with system(postgres_url, tmp_path) as world:
        world.coordinator(lease_s=3)
        world.worker(lease_s=3)
        done = tmp_path / "done"
        [task] = await world.submit(world.task(f"until [ -e '{done}' ]; do sleep 0.05; done"))
        await flying(world, 1, 1)
        await eventually(lambda: leads(world), WAIT_S)
        until = (await world.engine.show(task)).lease_until
        assert until is not None
        with frozen(postgres.pid):
            limit = until + timedelta(seconds=4)
            await eventually(lambda: world.engine.clock.now() > limit, WAIT_S)
        await eventually(lambda: renewed(world, task), WAIT_S)
        done.touch()
        await world.check([task])
        assert await world.outcomes(task) == ["COMPLETED"]


async def test_outage_of_the_database_ends_no_worker(
    postgres_url: str, postgres: PostgresServer, tmp_path: Path
) -> None:
    async with system(postgres_url, tmp_path) as world:
        worker = world.worker(lease_s=60)
        done = tmp_path / "done"
        late, long = await world.submit(
            world.task(MEEK, timeout_s=2),
            world.task(f"until [ -e '{done}' ]; do sleep 0.05; done"),
        )
        await flying(world, 1, 3)
        await asyncio.to_thread(postgres.stop)
        try:
            # The deadline of the first task passes during the outage, for longer than the worker
            # gives a handler that does not stop.
            await eventually(lambda: "not stored yet" in worker.text(), WAIT_S)
            before = worker.text().count("heartbeat failed")
            limit = before + 5 / world.settings.heartbeat_s
            await eventually(
                lambda: worker.code is not None or worker.text().count("heartbeat failed") > limit,
                WAIT_S,
            )
        finally:
            await asyncio.to_thread(postgres.start)
        assert worker.code is None, worker.text()
        done.touch()
        await eventually(lambda: reported_as_lost(world, late), WAIT_S)
        await world.in_status([long], "COMPLETED")
        assert await world.outcomes(late) == ["TIMED_OUT"]
        assert await world.outcomes(long) == ["COMPLETED"]


async def reported_as_lost(world: System, task: UUID) -> bool:
    return (await world.engine.show(task)).status == "RETRY_WAIT"


async def test_hint_outlives_the_client_that_sent_it(world: System) -> None:
    world.worker(poll_s=600, heartbeat_s=100)
    await eventually(lambda: has_worker(world, "RUNNING"), WAIT_S)
    async with app.connect(world.settings) as client:
        task = (await client.submit(world.task(MEEK))).id
    await world.in_status([task], "RUNNING", limit=20)
    await flying(world, 1, 2)
    async with app.connect(world.settings) as client:
        await client.cancel(task)
    await world.in_status([task], "CANCELLED", limit=20)


async def test_zombie_attempt_is_refused_and_stopped(world: System) -> None:
    world.coordinator()
    # The first attempt would end by itself, and be completed, as soon as the second has.
    done = world.folder / "done"
    script = f"[ $TENUTO_ATTEMPT -gt 1 ] && exit 0; until [ -e '{done}' ]; do sleep 0.05; done"
    [task] = await world.submit(world.task(script))
    zombie = world.worker("--slots", "1")
    await flying(world, 1, 1)
    with stopped(zombie, free=without_writers(world)):
        second = world.worker()
        await world.in_status([task], "COMPLETED")
        assert world.sessions(), "the zombie's command should have gone on"
        second.signal(signal.SIGTERM)
        assert await second.ended() == 0
    await eventually(lambda: not world.sessions(), GONE_S)
    assert not done.exists()
    await world.check([task])
    assert await world.outcomes(task) == ["STALLED", "COMPLETED"]


async def test_late_result_of_a_zombie_is_refused(world: System) -> None:
    world.coordinator()
    script = '[ $TENUTO_ATTEMPT -gt 1 ] && exit 0; echo \'{"output": "late"}\' >&3; sleep 2'
    [task] = await world.submit(world.task(script))
    zombie = world.worker("--slots", "1")
    await flying(world, 1, 2)
    with stopped(zombie, free=without_writers(world)):
        second = world.worker()
        await world.in_status([task], "COMPLETED")
        # The zombie wakes up with the end of its command and the loss of its lease before it.
        await eventually(lambda: not world.sessions(), WAIT_S)
        second.signal(signal.SIGTERM)
        assert await second.ended() == 0
    zombie.signal(signal.SIGTERM)
    assert await zombie.ended() == 0
    await world.check([task])
    assert (await world.engine.show(task)).output == {"exitCode": 0}


async def has_worker(world: System, status: str) -> bool:
    rows = await world.engine.query.workers(world.engine.workspace)
    return status in [row["status"] for row in rows]


async def test_sigterm_lets_short_tasks_finish_and_releases_long_ones(world: System) -> None:
    worker = world.worker(drain_s=3)
    marker = world.folder / "draining"
    short, long = await world.submit(
        world.task(f"until [ -e '{marker}' ]; do sleep 0.05; done"), world.task(NASTY)
    )
    await flying(world, 1, NASTY_SIZE + 1)
    before = await world.engine.show(long)
    worker.signal(signal.SIGTERM)
    await eventually(lambda: has_worker(world, "DRAINING"))
    [late] = await world.submit(world.task("exit 0"))
    marker.touch()
    assert await worker.ended() == 0
    assert await world.outcomes(short) == ["COMPLETED"]
    assert await world.outcomes(long) == ["RELEASED"]
    view = await world.engine.show(long)
    assert (view.status, view.tries, before.tries) == ("PENDING", 0, 1)
    assert (await world.engine.show(late)).attempt == 0
    assert not world.sessions()
    assert not world.others()
    assert await world.engine.maintenance.audit() == []
