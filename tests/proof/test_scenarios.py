"""Six ways to lose a part of the system, by real processes on real databases, and what follows.

1. an agent crashes in the middle of a task;
2. a gateway restarts with all its sessions: `test_gateway.py`;
3. tasks wait for each other in a circle;
4. the database goes away and comes back;
5. two coordinators believe that they lead, among zombies;
6. a task hangs: here with its row made older; hour by hour in
   `tests/coordinator/test_hung_tasks.py`.

`TENUTO_PROOF_ZOMBIES=300` plays the zombies in full size.
"""

import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from uuid import UUID

import msgspec
import pytest
from tests.contract.conftest import Raw
from tests.proof.crash.system import WAIT_S, Process, System, stopped, system
from tests.services.postgres import PostgresServer
from tests.waiting import eventually
from tests.webhooks.receiver import Receiver, receiving
from tests.worker.test_worker_process import without_writers

from tenuto import app
from tenuto.broker.memory import MemoryWakeups
from tenuto.clock import boot_time
from tenuto.engine.core import Core
from tenuto.engine.webhooks.endpoints import WebhookEndpoints
from tenuto.model.errors import Unavailable
from tenuto.model.tasks.task import AGING_MS
from tenuto.webhooks.url_guard import UrlGuard

ZOMBIES = int(os.environ.get("TENUTO_PROOF_ZOMBIES", "8"))
AT_ONCE = 4
LOOPBACK = "127.0.0.0/8"


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


async def kinds(world: System, task: UUID) -> list[str]:
    """Returns the kinds of audit events, in order."""
    rows = await Raw(world.url).fetch(f"select kind from event where task = '{task}' order by seq")
    return [row[0] for row in rows]


async def has_kind(world: System, task: UUID, kind: str) -> None:
    async def there() -> bool:
        return kind in await kinds(world, task)

    await eventually(there, WAIT_S, 0.05)


async def older(world: System, task: UUID, seconds: int, *columns: str) -> None:
    """Make a running task's times so much earlier, and its timer with them."""
    raw = Raw(world.url)
    by = f"{seconds} * 1000000" if raw.path is not None else f"interval '{seconds} seconds'"
    changes = ", ".join(f"{item} = {item} - {by}" for item in (*columns, "due_at"))
    await raw.execute(f"update task set {changes} where id = '{task}'")


async def test_1_task_of_a_crashed_agent_continues_from_its_checkpoint(world: System) -> None:
    seen = world.folder / "seen"
    script = (
        f'echo "$TENUTO_ATTEMPT ${{TENUTO_CHECKPOINT:-none}}" >>{seen};'
        ' [ "$TENUTO_ATTEMPT" -gt 2 ] && exit 0;'
        ' echo "{\\"checkpoint\\": $TENUTO_ATTEMPT}" >&3; sleep 100'
    )
    [task] = await world.submit(world.task(script))
    world.coordinator()
    for attempt in (1, 2):
        worker = world.worker("--slots", "1")
        saved = (
            f"select checkpoint_seq from task where id = '{task}' and checkpoint_seq = {attempt}"
        )
        await eventually(lambda: Raw(world.url).fetch(saved), WAIT_S, 0.05)  # noqa: B023  at once
        worker.signal(signal.SIGKILL)
        await worker.ended()
    world.worker()
    await world.check([task])
    assert seen.read_text().splitlines() == ["1 none", "2 1", "3 2"]
    assert await world.outcomes(task) == ["STALLED", "STALLED", "COMPLETED"]
    reported = (
        f"select data from event where task = '{task}' and kind = 'lease_expired' order by seq"
    )
    waits = [
        msgspec.json.decode(row[0])["backoff_ms"] for row in await Raw(world.url).fetch(reported)
    ]
    assert waits[0] == 0, "the first loss is nobody's fault"
    assert waits[1] > 0


async def test_3_cycle_of_tasks_fails_whole_and_is_reported(world: System) -> None:
    first = world.task("exit 0", key="x", task_tags=["nobody"])
    circle = [
        world.task("exit 0", key=key, depends_on=[before]) for key, before in ("ax", "ba", "cb")
    ]
    after = world.task("exit 0", key="d", depends_on=["c"])
    _, a, b, c, d = await world.submit(first, *circle, after)
    # The engine refuses circles; only somebody who writes to the database can make one.
    raw, workspace = Raw(world.url), world.engine.workspace
    await raw.execute(
        "insert into task_dependency (task, needs, workspace, met)"
        f" values ('{a}', '{c}', '{workspace}', false)"
    )
    await raw.execute(f"update task set unmet = unmet + 1 where id = '{a}'")
    async with receiving() as receiver:
        await watch(world, receiver, "task.dependency_cycle")
        world.coordinator(webhook_allow=LOOPBACK)
        await world.in_status([a, b, c, d], "FAILED")
        await eventually(lambda: len(receiver.got) == 3, WAIT_S)
    for task in (a, b, c):
        view = await world.engine.show(task)
        assert view.error_class == "dependency_cycle"
        assert "cyclic dependencies" in (view.last_error or "")
        assert (await kinds(world, task))[-1] == "dependency_cycle"
    reports = [msgspec.json.decode(item.body) for item in receiver.got]
    assert {item["event"] for item in reports} == {"task.dependency_cycle"}
    assert {item["taskId"] for item in reports} == {str(a), str(b), str(c)}
    assert await world.engine.maintenance.audit() == []


async def watch(world: System, receiver: Receiver, kind: str) -> None:
    """A webhook that the system's own processes can sign for."""
    settings = msgspec.structs.replace(world.settings, data=str(world.folder))
    store, workspace = world.engine.store, world.engine.workspace
    core = Core(store.for_workspace(workspace), MemoryWakeups(), app.open_key_ring(settings))
    hooks = WebhookEndpoints(core, UrlGuard([LOOPBACK]).resolve_allowed)
    await hooks.create(receiver.url, [kind], workspace, None)


async def test_4_database_outage_loses_nothing(durable: PostgresServer, tmp_path: Path) -> None:
    url = durable.create_database()
    done = tmp_path / "done"
    async with system(url, tmp_path) as world:
        script = f"until [ -e '{done}' ]; do sleep 0.05; done"
        tasks = await world.submit(*(world.task(script) for _ in range(6)))
        worker, coordinator = world.worker("--slots", "3"), world.coordinator()
        await eventually(lambda: len(world.sessions()) >= 3, WAIT_S)
        await eventually(lambda: "became leader, epoch" in coordinator.text(), WAIT_S)
        durable.stop("immediate")
        try:
            with pytest.raises(Unavailable):
                await world.submit(world.task("exit 0"))
            await eventually(lambda: "cycle failed" in coordinator.text(), WAIT_S)
            await eventually(lambda: "heartbeat failed" in worker.text(), WAIT_S)
        finally:
            durable.start()
        done.touch()
        await world.check(tasks)
        later = await world.submit(world.task("exit 0"))
        await world.check(later)
        assert worker.code is None
        assert coordinator.code is None


async def test_5_two_leaders_and_zombies_produce_one_result(world: System) -> None:
    done = world.folder / "done"
    late = f"until [ -e '{done}' ]; do sleep 0.05; done; echo '{{\"output\": \"late\"}}' >&3"
    script = f"[ $TENUTO_ATTEMPT -gt 1 ] && exit 0; {late}"
    tasks = await world.submit(*(world.task(script) for _ in range(6)))
    zombies = [world.worker("--slots", "2") for _ in range(3)]
    await world.in_status(tasks, "RUNNING")
    await eventually(lambda: len(world.sessions()) >= len(tasks), WAIT_S)
    with stopped(*zombies, free=without_writers(world)):
        for _ in range(2):
            world.coordinator(leader="false")
        second = world.worker()
        await world.in_status(tasks, "COMPLETED")
        done.touch()
        await eventually(lambda: not world.sessions(), WAIT_S)
        second.signal(signal.SIGTERM)
        assert await second.ended() == 0
    for zombie in zombies:
        zombie.signal(signal.SIGTERM)
        assert await zombie.ended() == 0
    await world.check(tasks)
    for task in tasks:
        assert await world.outcomes(task) == ["STALLED", "COMPLETED"]
        assert (await kinds(world, task)).count("lease_expired") == 1
        assert (await world.engine.show(task)).output == {"exitCode": 0}


async def test_6_hung_task_is_warned_then_aborted_and_runs_again_sooner(world: System) -> None:
    script = "[ $TENUTO_ATTEMPT -gt 1 ] && exit 0; sleep 100"
    [task] = await world.submit(world.task(script, estimate_minutes=1))
    rank = f"select rank from task where id = '{task}'"
    before = await Raw(world.url).value(rank)
    world.coordinator()
    world.worker()
    await eventually(lambda: len(world.sessions()) >= 1, WAIT_S)
    await older(world, task, 60 + 30 * 60 + 1, "started_at")
    await has_kind(world, task, "hung_warned")
    assert (await world.engine.show(task)).status == "RUNNING"
    await older(world, task, 10 * 60 + 1, "hung_warned_at")
    await world.check([task])
    first, last = await world.outcomes(task)
    assert (first, last) == ("ABORTED", "COMPLETED")
    assert await Raw(world.url).value(rank) == before - AGING_MS


def alive_at(world: System, task: UUID) -> list[float]:
    """Returns when the first attempt's command was alive, in seconds since the boot."""
    path = world.folder / f"{task}.beats"
    return [float(line) for line in path.read_text().split()] if path.exists() else []


async def test_zombies_commit_nothing_and_stop_their_commands(world: System) -> None:
    """A zombie's command goes on while its worker stands still, and ends soon after it wakes."""
    script = (
        'f="$0/$TENUTO_TASK_ID"; [ $TENUTO_ATTEMPT -gt 1 ] && exit 0;'
        ' echo "{\\"output\\": \\"stale\\"}" >&3;'
        ' while :; do cut -d" " -f1 /proc/uptime >>"$f.beats"; sleep 0.05; done'
    )
    world.coordinator()
    zombies = [world.worker("--slots", "1") for _ in range(min(AT_ONCE, ZOMBIES))]
    healthy = world.worker("--agent", "healthy")
    waits: list[float] = []
    for start in range(0, ZOMBIES, AT_ONCE):
        some = zombies[: min(AT_ONCE, ZOMBIES - start)]
        waits += await one_round(world, some, healthy, script)
    shown = sorted(waits)
    sys.stdout.write(
        f"{len(waits)} zombies: their commands ended {shown[len(shown) // 2]:.2f} s after the"
        f" wake-up in the middle, {shown[-1]:.2f} s at most\n"
    )
    assert len(waits) == ZOMBIES


async def one_round(
    world: System, zombies: list[Process], healthy: Process, script: str
) -> list[float]:
    """Stop workers past their leases and wake them; how long each command outlived that."""
    new = world.task("", command=["sh", "-c", script, str(world.folder)])
    with stopped(healthy, free=without_writers(world)):
        tasks = await world.submit(*(new for _ in zombies))
        await eventually(lambda: all(alive_at(world, task) for task in tasks), WAIT_S)
        with stopped(*zombies, free=without_writers(world)):
            healthy.signal(signal.SIGCONT)
            await world.in_status(tasks, "COMPLETED")
            over = boot_time()
            # Every command goes on, though its task has ended.
            await eventually(
                lambda: all(alive_at(world, task)[-1] > over for task in tasks), WAIT_S
            )
            woken = boot_time()
    await eventually(lambda: not world.sessions(), WAIT_S)
    await world.check(tasks)
    for task in tasks:
        assert await world.outcomes(task) == ["STALLED", "COMPLETED"]
        assert (await world.engine.show(task)).output == {"exitCode": 0}
    return [alive_at(world, task)[-1] - woken for task in tasks]
