"""One database for all processes, and the unreliable way to it that each of them has."""

import asyncio
from collections.abc import AsyncIterator, Callable
from functools import cache
from typing import Any, TypeVar
from uuid import UUID

from tests.proof.sim.clock import SimClock
from tests.proof.sim.loop import Process, later, run_now
from tests.proof.sim.plan import Faults
from tests.proof.sim.recorder import Recorder

from tenuto.clock import Clock
from tenuto.model.errors import TenutoError, Unavailable
from tenuto.store.protocol import Row, SchemaState, Script, Statement, collect_script
from tenuto.store.sqlite.store import SqliteStore

T = TypeVar("T")


class Database:
    """SQLite in memory. One connection serves all runs, so that its statements stay prepared."""

    def __init__(self) -> None:
        self.store = SqliteStore(":memory:")
        run_now(self.store.migrate())
        self.raw = self.store._writer_connection().raw
        names = [row[0] for row in self.rows("select name from sqlite_master where type = 'table'")]
        self._kept = {name: self.rows(f"select * from {name}") for name in names}

    def reset(self) -> None:
        """As new."""
        self.raw.execute("begin")
        for name, rows in self._kept.items():
            self.raw.execute(f"delete from {name}")
            for row in rows:
                self.raw.execute(f"insert into {name} values ({', '.join('?' * len(row))})", row)
        self.raw.execute("commit")

    def rows(self, sql: str, *params: Any) -> list[tuple[Any, ...]]:
        """Returns the rows of a checker's query."""
        return self.raw.execute(sql, params).fetchall()


@cache
def database() -> Database:
    """The database of this Python process; clear the cache after planting a fault in the SQL."""
    return Database()


class SimStore:
    """A process's connection to the database: slow, failing before or after the commit, or cut."""

    def __init__(
        self,
        database: Database,
        process: Process,
        clock: SimClock,
        faults: Faults,
        recorder: Recorder,
    ) -> None:
        self.clock: Clock = clock
        self.writers = faults.plan.writers
        self.mixes = faults.plan.mixes
        self._database = database.store
        self._process = process
        self._faults = faults
        self._recorder = recorder

    def for_workspace(self, workspace: UUID) -> "SimStore":
        del workspace
        return self

    def for_maintenance(self) -> "SimStore":
        return self

    async def open(self) -> None:
        await self._database.open()

    async def close(self) -> None:
        """The database outlives the process."""

    async def migrate(self) -> list[int]:
        return []

    async def schema(self) -> SchemaState:
        return await self._database.schema()

    async def describe(self) -> dict[str, str]:
        return {}

    async def fetch(self, statement: Statement) -> list[Row]:
        return await self._call(lambda: run_now(self._database.fetch(statement)), statement.query)

    async def transact(self, script: Callable[[], Script[T]]) -> T:
        names: list[str] = []
        heartless = self._process.heartless_until > self.clock.elapsed()
        if self._faults.on and heartless and next(script()).query == "heartbeat":
            raise Unavailable("no heartbeat gets through")

        def named() -> Script[T]:
            steps = script()
            try:
                statement = next(steps)
                while True:
                    names.append(statement.query)
                    statement = steps.send((yield statement))
            except StopIteration as done:
                result: T = done.value
                return result

        return await self._call(lambda: run_now(self._database.transact(named)), names)

    async def transact_one(self, script: Callable[[], Script[T]]) -> T:
        return await self.transact(script)

    async def stream(self, statements: AsyncIterator[Statement]) -> None:
        await self.transact(await collect_script(statements))

    async def _call(self, run: Callable[[], T], names: str | list[str]) -> T:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()
        if self._process.state == "dead":
            return await answer  # what is left of a process that is no more
        call = _Call(loop, answer, run, names, self._process.name, self._recorder)
        call.send(self._process, self._faults)
        return await answer


class _Call:
    """One request on its way to the database, and its reply on the way back."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        answer: "asyncio.Future[Any]",
        run: Callable[[], Any],
        names: str | list[str],
        caller: str,
        recorder: Recorder,
    ) -> None:
        self._loop = loop
        self._answer = answer
        self._run = run
        self._names = names
        self._who = caller
        self._recorder = recorder

    def send(self, process: Process, faults: Faults) -> None:
        """Decide what becomes of the request; none of it waits for the process."""
        plan, rng = faults.plan, faults.rng
        there, back = rng.random() * plan.latency, rng.random() * plan.latency
        if faults.on and process.unreachable_until > self._loop.time():
            faults.happened["unreachable"] += 1
            later(self._loop, there + back, self._refuse, "unreachable")
        elif faults.happens(plan.refused, "call refused"):
            later(self._loop, there + back, self._refuse, "refused")
        elif faults.happens(plan.lost, "reply lost"):
            later(self._loop, there, self._execute, back, True)
        elif faults.happens(plan.late, "late commit"):
            later(self._loop, there, self._refuse, "given up")
            later(self._loop, there + rng.uniform(0.01, 3.0), self._execute, None, True)
        elif faults.happens(plan.slow, "slow reply"):
            later(self._loop, there, self._execute, rng.uniform(1.0, 6.0), False)
        else:
            later(self._loop, there, self._execute, back, False)

    def _execute(self, back: float | None, lost: bool) -> None:
        try:
            value, error = self._run(), None
        except Exception as raised:  # noqa: BLE001  the caller's
            value, error = None, raised
        subject = self._names if isinstance(self._names, str) else " ".join(self._names)
        self._recorder.note(
            self._who, subject if error is None else f"{subject} {type(error).__name__}"
        )
        if error is not None and not isinstance(error, TenutoError):
            self._recorder.wrong("store", repr(error))
        if back is None:
            return
        if lost:
            later(self._loop, back, self._refuse, "reply lost")
        else:
            later(self._loop, back, self._reply, value, error)

    def _refuse(self, reason: str) -> None:
        self._recorder.note(self._who, reason)
        self._reply(None, Unavailable(reason))

    def _reply(self, value: Any, error: Exception | None) -> None:
        if self._answer.done():
            return
        if error is not None:
            self._answer.set_exception(error)
        else:
            self._answer.set_result(value)
