"""The measurements, the same code for every peer.

The rules:
- submit_one: one caller, one task after the other, each awaited. Tasks per second.
- submit_bulk: one caller, through the peer's bulk interface if it has one. Tasks per second.
- drain_N: N worker processes on a filled queue. The clock runs from the moment the first task
  starts until the store records all as completed. During the drain the store is not
  queried: it is polled only after the journal has the start of the last task.
- idle_latency: from just before the submit to the task's first line, by the machine's clock. One
  task at a time, with a random pause in which the worker becomes idle. Milliseconds.
- rss_mb: memory of that worker after the last task. Megabytes.
- recovery: 20 tasks asleep in one worker, SIGKILL to its process group, another worker started at
  once. Seconds from the kill until the store records all 20 as completed.
- help_ms: the command line's `--help`, median of five. Milliseconds.
- sync_us: measures the disk, not the peer: one fdatasync, median of 50, before each measure. If
  it differs between two peers of a run, their figures must not be compared.
"""

import asyncio
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

from bench.peer import Mode, Peer
from bench.worker_group import WorkerGroup
from bench.workload import Journal, make_payload, make_payloads

DRAIN_LIMIT_S = 300.0
PROBE_LIMIT_S = 30.0
CALM_TRIES = 60
WARM_UP_TASKS = 20
IN_FLIGHT = 20
IN_FLIGHT_MS = 1000


@dataclass(frozen=True)
class Result:
    """One figure; if `value` is None, `text` has the reason."""

    measure: str
    value: float | None
    unit: str
    text: str = ""


@dataclass(frozen=True)
class Plan:
    """The number of tasks for each measure, the limits, and the scratch folder."""

    tasks: int
    submits: int
    probes: int
    recovery_limit_s: float
    calm_us: float
    scratch: Path
    worker_command: list[str]


class Bench:
    """Runs the measures of a plan on one connected peer."""

    def __init__(self, peer: Peer, plan: Plan) -> None:
        self._peer = peer
        self._plan = plan
        self._journals = 0

    async def run(self, measure: str) -> AsyncIterator[Result]:
        """Yields the results of one measure, which starts with an empty store."""
        steps: dict[str, Callable[[], Awaitable[list[Result]]]] = {
            "submit_one": self.submit_one,
            "submit_bulk": self.submit_bulk,
            "drain_1": lambda: self.drain(1),
            "drain_2": lambda: self.drain(2),
            "idle_latency": self.measure_idle_latency,
            "recovery": self.measure_recovery,
            "help": self.measure_help,
        }
        await self._peer.clear()
        for result in await steps[measure]():
            yield result

    async def wait_for_calm_disk(self) -> Result:
        """Returns the sync time of the disk, after waiting up to `CALM_TRIES` s for `calm_us`."""
        duration_us = self._measure_disk_sync_us()
        for _ in range(CALM_TRIES):
            if duration_us <= self._plan.calm_us:
                break
            await asyncio.sleep(1)
            duration_us = self._measure_disk_sync_us()
        return Result("sync_us", duration_us, "us")

    def _measure_disk_sync_us(self) -> float:
        """Returns the time that the disk needs to sync 4 KiB, as the median of 50."""
        path = self._plan.scratch / "sync-probe"
        with path.open("wb", buffering=0) as file:
            return statistics.median(_time_sync_us(file) for _ in range(50))

    async def submit_one(self) -> list[Result]:
        for payload in make_payloads(WARM_UP_TASKS):
            await self._peer.submit(payload)
        payloads = make_payloads(self._plan.submits)
        start = time.perf_counter()
        for payload in payloads:
            await self._peer.submit(payload)
        rate = len(payloads) / (time.perf_counter() - start)
        return [Result("submit_one", rate, "/s")]

    async def submit_bulk(self) -> list[Result]:
        if not self._peer.bulk_size:
            return [Result("submit_bulk", None, "/s", "no bulk interface")]
        start = time.perf_counter()
        await self._fill(self._count_to_drain())
        rate = self._count_to_drain() / (time.perf_counter() - start)
        return [Result("submit_bulk", rate, "/s")]

    async def drain(self, workers: int) -> list[Result]:
        count = self._count_to_drain()
        await self._fill(count)
        await self._peer.maintain_store()
        journal = self._create_journal()
        with self._create_group(Mode.DRAIN, journal, workers) as group:
            group.start()
            await _wait_until(
                lambda: journal.count_starts() >= count, DRAIN_LIMIT_S, 0.005, group.check_running
            )
            end = await self._wait_until_completed(count, DRAIN_LIMIT_S)
        first = min(started_at for _, started_at in journal.read_starts())
        rate = count / ((end - first) / 1e9)
        return [Result(f"drain_{workers}", rate, "/s", f"{count} tasks")]

    async def measure_idle_latency(self) -> list[Result]:
        results = await self._measure_latency(Mode.LATENCY, "")
        if self._peer.is_polling:
            results += (await self._measure_latency(Mode.DEFAULT, "_default"))[:2]
        return results

    async def measure_recovery(self) -> list[Result]:
        for index in range(IN_FLIGHT):
            await self._peer.submit(make_payload(index, IN_FLIGHT_MS))
        journal = self._create_journal()
        with self._create_group(Mode.DEFAULT, journal) as group:
            group.start()
            await _wait_until(
                lambda: journal.count_starts() >= IN_FLIGHT,
                PROBE_LIMIT_S,
                0.01,
                group.check_running,
            )
            group.kill()
        killed_at = time.time_ns()
        result = await self._time_recovery(killed_at, self._create_journal())
        return [result]

    async def measure_help(self) -> list[Result]:
        command = [str(Path(sys.executable).parent / self._peer.help_command[0])]
        command += self._peer.help_command[1:]
        times = [_time_command_ms(command) for _ in range(5)]
        return [Result("help_ms", statistics.median(times), "ms")]

    def _count_to_drain(self) -> int:
        return max(1, round(self._plan.tasks * self._peer.share))

    async def _fill(self, count: int) -> None:
        payloads = make_payloads(count)
        if not self._peer.bulk_size:
            for payload in payloads:
                await self._peer.submit(payload)
            return
        for start in range(0, count, self._peer.bulk_size):
            await self._peer.submit_many(payloads[start : start + self._peer.bulk_size])

    async def _measure_latency(self, mode: Mode, suffix: str) -> list[Result]:
        journal = self._create_journal()
        with self._create_group(mode, journal) as group:
            group.start()
            for index in range(WARM_UP_TASKS):
                await self._probe(index, journal, group)
            waits = [await self._probe(i, journal, group) for i in range(self._plan.probes)]
            memory = group.read_memory_mb() if sys.platform == "linux" else None
        waits.sort()
        return [
            Result(f"idle_latency_p50{suffix}", statistics.median(waits), "ms"),
            Result(f"idle_latency_p99{suffix}", waits[int(len(waits) * 0.99)], "ms"),
            Result("rss_mb", memory, "MB", "" if memory else "only on Linux"),
        ]

    async def _probe(self, index: int, journal: Journal, group: WorkerGroup) -> float:
        """Returns the milliseconds from the submit of one task to its start."""
        before = journal.count_starts()
        submitted_at = time.time_ns()
        await self._peer.submit(make_payload(index))
        # Polls slowly: the time is read from the journal, and this process must not occupy a core.
        await _wait_until(
            lambda: journal.count_starts() > before, PROBE_LIMIT_S, 0.005, group.check_running
        )
        await asyncio.sleep(random.uniform(0.03, 0.07))
        return (journal.read_last()[1] - submitted_at) / 1e6

    async def _time_recovery(self, killed_at: int, journal: Journal) -> Result:
        with self._create_group(Mode.DEFAULT, journal) as group:
            group.start()
            try:
                end = await self._wait_until_completed(IN_FLIGHT, self._plan.recovery_limit_s, 0.05)
            except TimeoutError:
                done = await self._peer.count_completed()
                text = f"{done}/{IN_FLIGHT} within {self._plan.recovery_limit_s:.0f} s"
                return Result("recovery", None, "s", text)
        return Result("recovery", (end - killed_at) / 1e9, "s")

    async def _wait_until_completed(self, count: int, limit: float, pause: float = 0.005) -> int:
        """Returns the time in ns at which the store had recorded `count` tasks as completed."""
        deadline = time.monotonic() + limit
        while await self._peer.count_completed() < count:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{count} tasks were not completed within {limit:.0f} s")
            await asyncio.sleep(pause)
        return time.time_ns()

    def _create_journal(self) -> Journal:
        self._journals += 1
        return Journal(self._plan.scratch / f"journal-{self._journals}")

    def _create_group(self, mode: Mode, journal: Journal, size: int = 1) -> WorkerGroup:
        return WorkerGroup(self._plan.worker_command, mode, journal.path, size)


async def _wait_until(
    condition: Callable[[], bool], limit: float, pause: float, check: Callable[[], Any]
) -> None:
    """Returns when the condition is true; raises `TimeoutError`, or what `check` raises."""
    deadline = time.monotonic() + limit
    while not condition():
        check()
        if time.monotonic() > deadline:
            raise TimeoutError(f"the workers did not start enough tasks within {limit:.0f} s")
        await asyncio.sleep(pause)


def _time_sync_us(file: FileIO) -> float:
    file.write(b"x" * 4096)
    sync = getattr(os, "fdatasync", os.fsync)  # macOS has no fdatasync
    start = time.perf_counter()
    sync(file.fileno())
    return (time.perf_counter() - start) * 1e6


def _time_command_ms(command: list[str]) -> float:
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return (time.perf_counter() - start) * 1000
