"""A worker that has only a URL and a token: it works, is cancelled, and loses its leases."""

import re
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tests.proof.crash.system import WAIT_S, Process, System, stopped, system
from tests.waiting import eventually
from tests.worker.test_worker_process import NASTY, NASTY_SIZE, without_writers

from tenuto.model.tasks.submission import NewTask


class Server:
    """An API process of a system, and workers that know nothing but it."""

    def __init__(self, world: System) -> None:
        self._world = world
        self.process = world.start("serve", "--port", "0", data=str(world.folder / "data"))
        self.url = ""
        self.token = ""

    async def open(self) -> None:
        at = re.compile(r"API on (http://\S+)")
        result = await eventually(lambda: at.search(self.process.text()), WAIT_S)
        self.url = result[1]
        file = self._world.folder / "data" / "token"
        await eventually(lambda: file.is_file() and file.read_text().endswith("\n"))
        self.token = file.read_text().strip()

    def worker(self, *words: str, **changes: Any) -> Process:
        """A worker elsewhere: it has no database."""
        settings = {"database": "", "TENUTO_TOKEN": self.token, **changes}
        return self._world.worker("--url", self.url, *words, **settings)


@pytest.fixture
async def world(database_url: str, tmp_path: Path) -> AsyncIterator[System]:
    async with system(database_url, tmp_path) as created:
        yield created


@pytest.fixture
async def server(world: System) -> Server:
    created = Server(world)
    await created.open()
    return created


async def flying(world: System, n: int) -> None:
    await eventually(lambda: len(world.sessions()) >= n, WAIT_S, 0.05)


async def test_remote_worker_completes_tasks(world: System, server: Server) -> None:
    report = 'echo hello; echo "{\\"progress\\": 50, \\"output\\": 7}" >&3'
    tasks = await world.submit(*(world.task(report) for _ in range(5)))
    worker = server.worker("--slots", "3")
    await world.check(tasks)
    for task in tasks:
        view = await world.engine.show(task)
        assert (view.output, view.progress_percent) == (7, 50)
        output = await world.engine.transcript(task)
        assert [line.text for line in output] == ["hello"]
    [existing] = await world.engine.workers()
    assert (existing.status, existing.slots, existing.agents) == ("RUNNING", 3, ["local"])
    worker.signal(signal.SIGTERM)
    assert await worker.ended() == 0
    [existing] = await world.engine.workers()
    assert existing.status == "STOPPED"


async def test_cancel_kills_the_process_tree_of_a_remote_worker(
    world: System, server: Server
) -> None:
    [task] = await world.submit(world.task(NASTY, max_attempts=1))
    server.worker()
    await flying(world, NASTY_SIZE)
    await world.engine.cancel(task)
    await world.in_status([task], "CANCELLED")
    assert not world.sessions()
    [attempt] = await world.attempts(task)
    assert attempt.receipt is not None
    assert attempt.receipt["state"] == "killed"
    assert not attempt.unconfirmed


async def test_lease_is_lost_while_the_server_is_stopped(world: System, server: Server) -> None:
    world.coordinator()
    first = '[ "$TENUTO_ATTEMPT" -gt 1 ] && exit 0; '
    [task] = await world.submit(world.task(first + NASTY))
    server.worker()
    await flying(world, NASTY_SIZE)
    with stopped(server.process, free=without_writers(world)):

        async def expired() -> bool:
            return "STALLED" in await world.outcomes(task)

        await eventually(expired, WAIT_S, 0.05)
        assert world.sessions(), "nobody has told the worker yet"
    await world.check([task])
    assert await world.outcomes(task) == ["STALLED", "COMPLETED"]
    lost, _ = await world.attempts(task)

    async def confirmed() -> bool:
        [lost, *_] = await world.attempts(task)
        return not lost.unconfirmed

    await eventually(confirmed, WAIT_S, 0.05)
    assert lost.message == "the lease expired"


async def test_sessions_of_a_crashed_remote_worker_are_swept(world: System, server: Server) -> None:
    world.coordinator()
    first = '[ "$TENUTO_ATTEMPT" -gt 1 ] && exit 0; '
    [task] = await world.submit(world.task(first + NASTY))
    worker = server.worker()
    await flying(world, NASTY_SIZE)
    worker.signal(signal.SIGKILL)
    server.worker()
    await world.check([task])

    async def swept() -> bool:
        return not any(attempt.unconfirmed for attempt in await world.attempts(task))

    await eventually(swept, WAIT_S, 0.05)


async def test_drained_remote_worker_releases_its_tasks(world: System, server: Server) -> None:
    [task] = await world.submit(world.task("sleep 100", max_attempts=1))
    worker = server.worker(drain_s=0)
    await flying(world, 1)
    worker.signal(signal.SIGTERM)
    assert await worker.ended() == 0
    assert (await world.engine.show(task)).status == "PENDING"
    assert not world.sessions()


async def test_idle_remote_worker_stops_at_once(world: System, server: Server) -> None:
    worker = server.worker()
    await eventually(world.engine.workers, WAIT_S)
    worker.signal(signal.SIGTERM)
    assert await worker.ended(5) == 0


async def test_wrong_token_or_address_is_reported(world: System, server: Server) -> None:
    worker = server.worker(TENUTO_TOKEN="tnt_wrong")
    assert await worker.ended() == 1
    assert "[unauthenticated]" in worker.text()
    await world.engine.submit(NewTask(title="x"))
