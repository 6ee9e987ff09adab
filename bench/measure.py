"""The measurements, the same code for every peer.

The rules:
- submit_one: one caller, one task after the other, each awaited. Tasks per second.
- submit_bulk: one caller, through the peer's bulk interface where it has one. Tasks per second.
- drain_N: N worker processes on a filled queue. The clock runs from the moment the first task
  starts until the store records all as completed. During the drain nobody asks the store: the
  journal tells when the last task has started, and only then is the store polled.
- idle_latency: from just before the submit to the task's first line, by one machine's clock, one
  at a time, with a random pause that leaves the worker idle. Milliseconds.
- rss_mb: memory of that worker after it. Megabytes.
- recovery: 20 tasks asleep in one worker, SIGKILL to its process group, another worker started at
  once. Seconds from the kill until the store records all 20 as completed.
- help_ms: the command line's `--help`, median of five. Milliseconds.
- sync_us: not the peer's but the disk's: one fdatasync, median of 50, taken before each measure.
  Where it differs between two peers of a run, their figures must not be compared.
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

from bench.crew import Crew
from bench.peer import Mode, Peer
from bench.workload import Journal, make_payload, make_payloads

DRAIN_LIMIT_S = 300.0
PROBE_LIMIT_S = 30.0
CALM_TRIES = 60
WARM_UP_TASKS = 20
IN_FLIGHT = 20
IN_FLIGHT_MS = 1000


@dataclass(frozen=True)
class Result:
    """One figure; `value` is None where `text` has to say what happened instead."""

    measure: str
    value: float | None
    unit: str
    text: str = ""


@dataclass(frozen=True)
class Plan:
    """How much of everything, and where the scratch files go."""

    tasks: int
    submits: int
    probes: int
    recovery_limit_s: float
    calm_us: float
    scratch: Path
    worker_command: list[str]


class Bench:
    """Measures one connected peer by one plan."""

    def __init__(self, peer: Peer, plan: Plan) -> None:
        self._peer = peer
        self._plan = plan
        self._journals = 0

    async def run(self, measure: str) -> AsyncIterator[Result]:
        """The results of one measure, which begins with an empty store."""
        steps: dict[str, Callable[[], Awaitable[list[Result]]]] = {
            "submit_one": self.submit_one,
            "submit_bulk": self.submit_bulk,
            "drain_1": lambda: self.drain(1),
            "drain_2": lambda: self.drain(2),
            "idle_latency": self.idle_latency,
            "recovery": self.recovery,
            "help": self.help_time,
        }
        await self._peer.clear()
        for result in await steps[measure]():
            yield result

    async def calm_disk(self) -> Result:
        """How long the disk takes to sync, after waiting a while for one as calm as asked for."""
        took = self._disk_sync_us()
        for _ in range(CALM_TRIES):
            if took <= self._plan.calm_us:
                break
            await asyncio.sleep(1)
            took = self._disk_sync_us()
        return Result("sync_us", took, "us")

    def _disk_sync_us(self) -> float:
        """How long the disk takes right now to make 4 KiB durable."""
        path = self._plan.scratch / "sync-probe"
        with path.open("wb", buffering=0) as file:
            return statistics.median(_sync_time_us(file) for _ in range(50))

    async def submit_one(self) -> list[Result]:
        for payload in make_payloads(WARM_UP_TASKS):
            await self._peer.submit(payload)
        payloads = make_payloads(self._plan.submits)
        begin = time.perf_counter()
        for payload in payloads:
            await self._peer.submit(payload)
        rate = len(payloads) / (time.perf_counter() - begin)
        return [Result("submit_one", rate, "/s")]

    async def submit_bulk(self) -> list[Result]:
        if not self._peer.bulk_size:
            return [Result("submit_bulk", None, "/s", "no bulk interface")]
        begin = time.perf_counter()
        await self._fill(self._drained())
        rate = self._drained() / (time.perf_counter() - begin)
        return [Result("submit_bulk", rate, "/s")]

    async def drain(self, workers: int) -> list[Result]:
        count = self._drained()
        await self._fill(count)
        await self._peer.settle()
        journal = self._journal()
        with self._crew(Mode.DRAIN, journal, workers) as crew:
            crew.go()
            await _until(lambda: journal.count() >= count, DRAIN_LIMIT_S, 0.005, crew.check)
            end = await self._all_completed(count, DRAIN_LIMIT_S)
        first = min(start for _, start in journal.records())
        rate = count / ((end - first) / 1e9)
        return [Result(f"drain_{workers}", rate, "/s", f"{count} tasks")]

    async def idle_latency(self) -> list[Result]:
        results = await self._latency(Mode.LATENCY, "")
        if self._peer.polls:
            results += (await self._latency(Mode.DEFAULT, "_default"))[:2]
        return results

    async def recovery(self) -> list[Result]:
        for index in range(IN_FLIGHT):
            await self._peer.submit(make_payload(index, IN_FLIGHT_MS))
        journal = self._journal()
        with self._crew(Mode.DEFAULT, journal) as crew:
            crew.go()
            await _until(lambda: journal.count() >= IN_FLIGHT, PROBE_LIMIT_S, 0.01, crew.check)
            crew.kill()
        killed = time.time_ns()
        result = await self._recovered(killed, self._journal())
        return [result]

    async def help_time(self) -> list[Result]:
        command = [str(Path(sys.executable).parent / self._peer.help_command[0])]
        command += self._peer.help_command[1:]
        times = [_run_time_ms(command) for _ in range(5)]
        return [Result("help_ms", statistics.median(times), "ms")]

    def _drained(self) -> int:
        return max(1, round(self._plan.tasks * self._peer.share))

    async def _fill(self, count: int) -> None:
        payloads = make_payloads(count)
        if not self._peer.bulk_size:
            for payload in payloads:
                await self._peer.submit(payload)
            return
        for begin in range(0, count, self._peer.bulk_size):
            await self._peer.submit_many(payloads[begin : begin + self._peer.bulk_size])

    async def _latency(self, mode: Mode, suffix: str) -> list[Result]:
        journal = self._journal()
        with self._crew(mode, journal) as crew:
            crew.go()
            for index in range(WARM_UP_TASKS):
                await self._probe(index, journal, crew)
            waits = [await self._probe(i, journal, crew) for i in range(self._plan.probes)]
            memory = crew.resident_mb() if sys.platform == "linux" else None
        waits.sort()
        return [
            Result(f"idle_latency_p50{suffix}", statistics.median(waits), "ms"),
            Result(f"idle_latency_p99{suffix}", waits[int(len(waits) * 0.99)], "ms"),
            Result("rss_mb", memory, "MB", "" if memory else "only on Linux"),
        ]

    async def _probe(self, index: int, journal: Journal, crew: Crew) -> float:
        """Milliseconds from the submit of one task to its start."""
        before = journal.count()
        submitted = time.time_ns()
        await self._peer.submit(make_payload(index))
        # The start is read from the journal: whoever waits for it here must not take a core away.
        await _until(lambda: journal.count() > before, PROBE_LIMIT_S, 0.005, crew.check)
        await asyncio.sleep(random.uniform(0.03, 0.07))
        return (journal.last()[1] - submitted) / 1e6

    async def _recovered(self, killed: int, journal: Journal) -> Result:
        with self._crew(Mode.DEFAULT, journal) as crew:
            crew.go()
            try:
                end = await self._all_completed(IN_FLIGHT, self._plan.recovery_limit_s, 0.05)
            except TimeoutError:
                done = await self._peer.completed()
                text = f"{done}/{IN_FLIGHT} within {self._plan.recovery_limit_s:.0f} s"
                return Result("recovery", None, "s", text)
        return Result("recovery", (end - killed) / 1e9, "s")

    async def _all_completed(self, count: int, limit: float, pause: float = 0.005) -> int:
        """The time in ns at which the store was seen to record `count` tasks as completed."""
        deadline = time.monotonic() + limit
        while await self._peer.completed() < count:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{count} tasks were not completed within {limit:.0f} s")
            await asyncio.sleep(pause)
        return time.time_ns()

    def _journal(self) -> Journal:
        self._journals += 1
        return Journal(self._plan.scratch / f"journal-{self._journals}")

    def _crew(self, mode: Mode, journal: Journal, size: int = 1) -> Crew:
        return Crew(self._plan.worker_command, mode, journal.path, size)


async def _until(
    condition: Callable[[], bool], limit: float, pause: float, check: Callable[[], Any]
) -> None:
    """Returns when the condition holds; `check` may raise meanwhile."""
    deadline = time.monotonic() + limit
    while not condition():
        check()
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {limit:.0f} s")
        await asyncio.sleep(pause)


def _sync_time_us(file: FileIO) -> float:
    file.write(b"x" * 4096)
    sync = getattr(os, "fdatasync", os.fsync)  # macOS has no fdatasync
    begin = time.perf_counter()
    sync(file.fileno())
    return (time.perf_counter() - begin) * 1e6


def _run_time_ms(command: list[str]) -> float:
    begin = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return (time.perf_counter() - begin) * 1000
