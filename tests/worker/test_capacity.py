"""Workers on machines that lack resources claim only what they can start."""

import asyncio
import errno
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from tests.proof.crash.inside import Inside, working
from tests.waiting import eventually

from tenuto.worker.capacity import SessionCapacity
from tenuto.worker.runtime.command import CommandRuntime
from tenuto.worker.session import SpawnError, Supervisor

FEW = 48 + 3 * 5
"""Descriptors for everything else, and for three sessions."""


@contextmanager
def open_files(limit: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def now_open() -> int:
    return len(os.listdir("/dev/fd"))  # noqa: PTH208  names alone


async def test_worker_with_more_slots_than_file_descriptors_finishes_its_tasks(
    sqlite_url: str,
) -> None:
    with open_files(now_open() + FEW):
        async with working(sqlite_url, slots=30) as inside:
            tasks = [await inside.shell("sleep 0.1") for _ in range(20)]
            for task in tasks:
                assert (await inside.ended(task)).status == "COMPLETED"
                assert await inside.outcomes(task) == ["COMPLETED"]


async def test_failed_supervisor_start_counts_no_try(
    sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = asyncio.create_subprocess_exec
    left = [OSError(errno.EAGAIN, "no more processes"), OSError(errno.EMFILE, "no more files")]

    async def poor(*args: Any, **options: Any) -> Any:
        if left:
            raise left.pop()
        return await start(*args, **options)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", poor)
    async with working(sqlite_url) as inside:
        task = await inside.shell("exit 0", max_attempts=1)
        assert (await inside.ended(task)).status == "COMPLETED"
        assert await inside.outcomes(task) == ["NOT_STARTED", "NOT_STARTED", "COMPLETED"]


async def test_failed_supervisor_start_names_the_missing_resource(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def poor(*args: Any, **options: Any) -> Any:
        raise OSError(errno.EAGAIN, "no more processes")

    monkeypatch.setattr(asyncio, "create_subprocess_exec", poor)
    supervisor = Supervisor()
    with pytest.raises(SpawnError) as caught:
        await supervisor.spawn(["/bin/true"], cwd=None, env={})
    await supervisor.close()
    assert caught.value.code == "spawn_failed"


def test_session_capacity_follows_free_file_descriptors() -> None:
    with open_files(now_open() + FEW):
        room = SessionCapacity()
        assert [room.free_sessions(busy) for busy in range(5)] == [3, 2, 1, 0, 0]


def test_session_capacity_is_at_least_one() -> None:
    with open_files(now_open() + 10):
        assert SessionCapacity().free_sessions(0) == 1


def test_failed_start_reduces_starts_to_one_at_a_time_with_backoff() -> None:
    at = [0.0]
    room = SessionCapacity(lambda: at[0])
    assert room.free_sessions(0) > 1
    for _ in range(10):
        room.on_start_failed()  # all at once: one reason
    waits = []
    for _ in range(9):
        before = at[0]
        while not (left := room.free_sessions(0)):
            at[0] += 0.5
        assert left == 1
        assert room.free_sessions(0) == 0  # the trial has not failed yet
        waits.append(at[0] - before)
        room.on_start_failed()
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    room.on_started()
    assert room.free_sessions(0) > 1


def test_reservation_without_a_task_counts_as_no_start() -> None:
    at = [0.0]
    room = SessionCapacity(lambda: at[0])
    room.on_start_failed()
    room.release_reservation()  # asked for before the failure
    assert room.free_sessions(0) == 0
    at[0] = 1.0
    for _ in range(3):
        assert room.free_sessions(0) == 1
        room.release_reservation()
    assert room.free_sessions(0) == 1
    room.on_start_failed()
    at[0] = 2.5
    assert room.free_sessions(0) == 0, "and failures are counted as before"


class Watched(SessionCapacity):
    """Room on a machine where one start failed, at a time that stands still."""

    def __init__(self) -> None:
        self.at = 0.0
        super().__init__(lambda: self.at)
        self.on_start_failed()
        self.at = 1.0
        self.looks: list[int] = []

    def free_sessions(self, busy: int) -> int:
        self.looks.append(super().free_sessions(busy))
        return self.looks[-1]


async def after_a_failure(inside: Inside) -> Watched:
    await inside.ended(await inside.shell("exit 0"))
    [hosted] = inside.worker._hosted
    assert isinstance(hosted.runtime, CommandRuntime)
    hosted.runtime._capacity = room = Watched()
    return room


async def test_idle_worker_claims_at_once_after_failed_starts(sqlite_url: str) -> None:
    async with working(sqlite_url) as inside:
        room = await after_a_failure(inside)
        await eventually(lambda: len(room.looks) > 2)
        task = await inside.shell("exit 0")
        assert (await inside.ended(task)).status == "COMPLETED"


async def test_command_that_cannot_run_resets_the_start_backoff(sqlite_url: str) -> None:
    async with working(sqlite_url) as inside:
        room = await after_a_failure(inside)
        task = await inside.submit(command=["/no/such/program"])
        assert (await inside.ended(task)).status == "FAILED"
        assert room.free_sessions(0) > 1
