"""The load of a case: real processes on the cluster, a recorder outside, the final judgement."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import asyncpg
import msgspec
from tests.proof.crash.system import Process, frozen
from tests.services.postgres import ROOT
from tests.waiting import eventually

from tenuto import app
from tenuto.chaos.checker import Verdict, check_run
from tenuto.chaos.recorder import RECORD_VARIABLE, Recorder
from tenuto.clock import Clock
from tenuto.coordinator.duties import ALERTS
from tenuto.engine.operations.audit import AuditReader
from tenuto.periodic import wait_first_event
from tenuto.settings import Settings, environment_without_settings
from tenuto.store.postgres.admin import create_database

TASKS = int(os.environ.get("TENUTO_PROOF_TASKS", "10000"))
RATE = 200.0
WORKERS = 2
SLOTS = 40
LONGEST_GAP_S = 30.0
REST_S = 90.0
"""Seconds in which everything ends after the last submit."""
SUBMITS_S = 240.0
PAUSE_S = 0.1
WITNESS_S = 2.0
"""Seconds that a witness waits for an answer before it tries again."""
INSERT = "insert into witness values ($1)"


class TimedRecord(Recorder):
    """A record that also holds when each submit was acknowledged."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.times: list[float] = []

    def gap(self) -> float:
        """The longest time without an acknowledgement, in seconds."""
        return max((b - a for a, b in pairwise(sorted(self.times))), default=0.0)

    def _at(self, elapsed: str) -> None:
        self.times.append(float(elapsed))


class Outcome(msgspec.Struct, frozen=True):
    """What a case came to."""

    verdict: Verdict
    acknowledged: int
    gap_s: float
    never_ran: int
    """Attempts that were claimed, and of which no run began."""
    ended: list[str]
    """Processes of ours that ended by themselves."""

    def line(self, case: str, leader_s: float | None) -> str:
        """The case as a row of the table in the documents."""
        reported, breaches = self.verdict.info, self.verdict.violations
        lost = len(breaches["acknowledged tasks lost"])
        double = len(breaches["tasks made twice"]) + len(breaches["stale commits accepted"])
        leader = "-" if leader_s is None else f"{leader_s:.1f} s"
        cells = [case, f"{self.acknowledged:,}", leader, f"{self.gap_s:.1f} s", str(lost)]
        cells += [
            str(double),
            str(len(breaches["tasks stuck"])),
            str(reported["executions doubled"]),
        ]
        cells += [str(self.never_ran), str(reported["leases taken over"])]
        return f"| {' | '.join(cells)} |"

    def check(self, away_s: float = 0.0) -> None:
        """AssertionError for whatever must not be; nothing is acknowledged for `away_s` seconds."""
        assert self.acknowledged == TASKS
        assert self.verdict.info["tasks"] == TASKS
        broken = {name: cases[:5] for name, cases in self.verdict.violations.items() if cases}
        assert broken == {}
        assert self.ended == []
        assert self.never_ran == 0
        assert away_s <= self.gap_s <= away_s + LONGEST_GAP_S


class Load:
    """A coordinator, workers and a submitter on a database of their own."""

    def __init__(self, folder: Path, url: str) -> None:
        self._folder = folder
        self._url = url
        self.record = TimedRecord(folder / "record")
        self.record.path.touch()
        program = ("-m", "tenuto.cli.main")
        handlers = ("--app", "tenuto.chaos.handlers:handlers")
        self._workers = [
            self._start(f"worker-{n}", *program, "worker", "--agent", "failover", *handlers)
            for n in range(WORKERS)
        ]
        self._staff = [self._start("coordinator", *program, "coordinator"), *self._workers]
        words = ("-m", "tests.proof.failover.submitter", str(TASKS), str(RATE))
        self._submitter = self._start("submitter", *words)

    async def acknowledged(self, share: float) -> None:
        """Wait until that share of the tasks is acknowledged."""

        def there() -> bool:
            return len(self.record.read().acknowledged) >= share * TASKS or self._failed() != []

        await eventually(there, SUBMITS_S, 0.05)
        assert self._failed() == []

    @asynccontextmanager
    async def backlog(self, share: float) -> AsyncIterator[None]:
        """No worker does anything, and that share of the tasks, at least, can be claimed."""
        with ExitStack() as stack:
            for worker in self._workers:
                stack.enter_context(frozen(worker.pid))
            await self.acknowledged(len(self.record.acknowledged) / TASKS + share)
            yield

    async def outcome(self, url: str) -> Outcome:
        """Wait for the end of the submits and of all tasks, then judge the database there."""
        await self.acknowledged(1.0)
        await self._submitter.ended()
        async with app.connect(Settings(database=url)) as engine:
            proof = AuditReader(engine.system)

            async def rested() -> bool:
                return not await proof.count_unfinished() and not await proof.count_unread(
                    ALERTS, errors=True
                )

            with suppress(AssertionError):  # what is stuck is found by the verdict
                await eventually(rested, REST_S, 0.25)
            record = self.record.read()
            verdict = await check_run(engine, record)
            tasks = await proof.tasks()
        never_ran = sum(max(0, task.tries - record.starts[str(task.id)]) for task in tasks)
        acknowledged = len(record.acknowledged)
        return Outcome(verdict, acknowledged, self.record.gap(), never_ran, self._failed())

    def end(self) -> None:
        """Leave no process."""
        for process in (*self._staff, self._submitter):
            process.end()

    def _failed(self) -> list[str]:
        """The last words of processes that ended though nobody asked them to."""
        dead = [item for item in self._staff if item.code is not None]
        dead += [self._submitter] if self._submitter.code else []
        return [f"{item.log.name}: exit {item.code}: {item.text()[-2000:]}" for item in dead]

    def _start(self, name: str, *words: str) -> Process:
        env = environment_without_settings()
        env |= {"TENUTO_DATABASE": self._url, "TENUTO_DATA": str(self._folder)}
        env |= {
            "TENUTO_SLOTS": str(SLOTS),
            RECORD_VARIABLE: str(self.record.path),
            "PYTHONPATH": str(ROOT),
        }
        return Process([sys.executable, *words], env, self._folder / f"{name}.log")


@asynccontextmanager
async def load(folder: Path, leader: str, name: str, address: str) -> AsyncIterator[Load]:
    """A load on the new database `name`, made on the leader and used through `address`."""
    created = await create_database(leader, name)
    store = app.create_store(created)
    await store.migrate()
    await store.close()
    running = Load(folder, address)
    try:
        yield running
    finally:
        running.end()


_REFUSED = (
    OSError,
    TimeoutError,
    asyncpg.PostgresError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,  # a connection that the server ends at this moment
)


class Witness:
    """Inserts rows on one machine alone, whatever it is, and knows which were acknowledged."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._acknowledged: list[int] = []
        self.refused = 0
        """How often an insert or a connection was refused, cut, or not answered in time."""
        self._stop = asyncio.Event()
        self._number = 0
        self._clock = Clock()

    @asynccontextmanager
    async def watch(self) -> AsyncIterator["Witness"]:
        """Insert rows for as long as the block runs."""
        await ask(self._url, "drop table if exists witness; create table witness (n int)")
        watching = asyncio.get_running_loop().create_task(self._insert())
        try:
            yield self
        finally:
            self._stop.set()
            watching.cancel()
            with suppress(asyncio.CancelledError):
                await watching

    async def lost(self, url: str) -> set[int]:
        """The acknowledged rows that the database there does not have."""
        assert self._acknowledged
        rows = await ask(url, "select array_agg(n) from witness")
        return set(self._acknowledged) - set(rows)

    def check(self, leader_s: float | None) -> None:
        """AssertionError if the machine was replaced and the witness noticed nothing of it."""
        assert leader_s is None or self.refused

    async def _insert(self) -> None:
        while not self._stop.is_set():
            try:
                connection = await asyncpg.connect(self._url, timeout=WITNESS_S)
                try:
                    while not self._stop.is_set():
                        self._number += 1
                        await connection.execute(INSERT, self._number, timeout=WITNESS_S)
                        self._acknowledged.append(self._number)
                        await wait_first_event([self._stop], PAUSE_S, self._clock)
                finally:
                    connection.terminate()
            except _REFUSED:
                self.refused += 1
                await wait_first_event([self._stop], PAUSE_S, self._clock)


async def ask(url: str, statements: str) -> Any:
    """Returns the rows of the statements, on a connection of its own."""
    connection = await asyncpg.connect(url, timeout=5)
    try:
        if statements.startswith("select"):
            return await connection.fetchval(statements)
        return await connection.execute(statements)
    finally:
        connection.terminate()
