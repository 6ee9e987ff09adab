"""SQLite: one writer thread, readers beside it, WAL, synchronous=FULL.

A transaction that finds nobody else writing is run in place: going to the thread and back takes as
long as the disk. After one that took long the thread writes, and the loop goes on meanwhile.

Processes that share a file take turns by a lock file: the kernel wakes the next one at once, where
SQLite's own busy handler would sleep.
"""

import asyncio
import fcntl
import queue
import sqlite3
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar
from uuid import UUID

import msgspec

from tenuto.clock import Clock, from_micros, to_micros
from tenuto.model.errors import Conflict, Invalid, TenutoError, Unavailable
from tenuto.store import schema, sql
from tenuto.store.protocol import Row, SchemaState, Script, Statement, gathered

T = TypeVar("T")

_LONG_S = 0.02
_REST = 3
"""After a transaction in place that took long, the thread writes for so many times as long."""


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


_ENCODE: dict[str, Callable[[Any], Any]] = {
    "uuid": str,
    "timestamptz": to_micros,
    "boolean": int,
    "bigint[]": _json,
    "uuid[]": _json,
    "text[]": _json,
}
_UUIDS = frozenset(
    "id task workspace agent parent target_agent definition flow group_id rerun_of child needs"
    " follows subject wanted_id before_id user_id webhook last_flow cause".split()
)
_TIMES = frozenset({"at", "until", "lease_until", "wait_until", "closed_until"})
_FLAGS = frozenset({"watched", "unconfirmed", "met", "enabled"})


@lru_cache(maxsize=256)
def _time(value: Any) -> Any:
    try:
        return from_micros(value)
    except (OverflowError, TypeError):
        return value  # beyond the calendar: found out like a damaged id


@lru_cache(maxsize=1024)
def _uuid(value: Any) -> Any:
    try:
        return UUID(value)
    except (ValueError, AttributeError, TypeError):
        return value  # a damaged id: whoever reads the row finds out and quarantines it


def _decoder(column: str) -> Callable[[Any], Any] | None:
    if column in _UUIDS:
        return _uuid
    if column in _TIMES or column.endswith("_at"):
        return _time
    return bool if column in _FLAGS else None


class _Prepared:
    """A query's steps with what is needed to bind their arguments and read their answers."""

    def __init__(self, query: sql.Query, single: frozenset[str]) -> None:
        self.query = query
        self.steps = sql.for_sqlite(query, single)
        self._row_encoders = {
            name: [(i, _ENCODE[kind]) for i, (_, kind) in enumerate(columns) if kind in _ENCODE]
            for name, columns in query.rows.items()
        }
        self._encoded = {
            step.label: self._encodes(step) for step in self.steps if step.rowset is not None
        }
        self._decoders: list[tuple[int, Callable[[Any], Any]]] | None = None
        self._names: list[str] = []

    def param(self, name: str, value: Any) -> Any:
        encode = _ENCODE.get(self.query.params[name])
        return value if encode is None or value is None else encode(value)

    def _encodes(self, step: sql.SqliteStep) -> list[tuple[int, Callable[[Any], Any]]]:
        """What has to be encoded of the columns that a step reads; JSON spells ids by itself."""
        return [
            (i, encode)
            for i, encode in self._row_encoders[step.rowset or ""]
            if i in step.uses and not (step.whole and encode is str)
        ]

    def cells(self, step: sql.SqliteStep, rows: Sequence[tuple[Any, ...]]) -> list[Any]:
        """The columns that a step reads of the rows of its set, encoded."""
        encoders, uses = self._encoded[step.label], step.uses
        if not encoders:
            every = rows and len(uses) == len(rows[0])
            return list(rows) if every else [[row[index] for index in uses] for row in rows]
        encoded = []
        last: dict[int, tuple[Any, Any]] = {}  # rows of a set often share a value: encoded once
        for row in rows:
            full = list(row)
            for index, encode in encoders:
                value = full[index]
                if value is None:
                    continue
                known = last.get(index)
                if known is None or known[0] is not value:
                    known = last[index] = (value, encode(value))
                full[index] = known[1]
            encoded.append([full[index] for index in uses])
        return encoded

    def answer(self, rows: list[tuple[Any, ...]], description: Any) -> list[Row]:
        if not rows:
            return []
        if self._decoders is None:
            self._names = [column[0] for column in description]
            found = ((i, _decoder(name)) for i, name in enumerate(self._names))
            wanted = self.query.columns or self._names
            self._decoders = [
                (i, decode)
                for i, decode in found
                if decode is not None and self._names[i] in wanted
            ]
        names, decoders = self._names, self._decoders
        answers: list[Row] = []
        for row in rows:
            cells = list(row)
            for index, decode in decoders:
                if (cell := cells[index]) is not None:
                    cells[index] = decode(cell)
            answers.append(dict(zip(names, cells, strict=True)))
        return answers


class _Busy(Exception):
    """Somebody else is writing."""


class _Connection:
    """One SQLite connection and the queries prepared for it. Used by one thread at a time."""

    def __init__(self, path: str) -> None:
        self.raw = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=10)
        self._waits = True
        if self.raw.execute("pragma journal_mode").fetchone()[0] != "wal":
            self.raw.execute("pragma journal_mode = wal")
        self.raw.execute("pragma synchronous = full")
        self.raw.execute("pragma wal_autocheckpoint = 4000")
        self.raw.execute("pragma cache_size = -16000")
        self._prepared: dict[Any, _Prepared] = {}

    def begin(self, *, wait: bool) -> None:
        """Begin to write; unless the caller may wait, `_Busy` when somebody else does."""
        if wait is not self._waits:
            self.raw.execute(f"pragma busy_timeout = {10_000 if wait else 0}")
            self._waits = wait
        try:
            self.raw.execute("begin immediate")
        except sqlite3.OperationalError as error:
            if wait or "locked" not in str(error):
                raise
            raise _Busy from error

    def prepare(self, statement: Statement) -> _Prepared:
        sizes = tuple([(name, min(len(rows), 2)) for name, rows in statement.rows.items()])
        given = frozenset(
            name for name, value in statement.params.items() if value is not None
        ) | frozenset(statement.literals)
        literals = tuple(statement.literals.items())
        key = (statement.query, given, literals, sizes)
        prepared = self._prepared.get(key)
        if prepared is None:
            query = sql.load(sql.SQLITE)[statement.query]
            empty = {name for name, size in sizes if size == 0}
            single = frozenset(name for name, size in sizes if size == 1)
            prepared = _Prepared(sql.variant(query, given, literals, empty), single)
            self._prepared[key] = prepared
        return prepared

    @contextmanager
    def lenient(self) -> Iterator[None]:
        """Read text that is not UTF-8, for a row that somebody damaged."""
        self.raw.text_factory = lambda raw: raw.decode("utf-8", "replace")
        try:
            yield
        finally:
            self.raw.text_factory = str

    def read(self, statement: Statement) -> list[Row]:
        """Run a statement outside a transaction."""
        try:
            return self.run(statement)
        except sqlite3.OperationalError as error:
            if "UTF-8" not in str(error):
                raise
        with self.lenient():
            return self.run(statement)

    def run(self, statement: Statement) -> list[Row]:
        """Run the statement's steps in order; answers the rows of its answer step."""
        prepared = self.prepare(statement)
        returned: dict[str, list[tuple[Any, ...]]] = {}
        answer: list[Row] = []
        for step in prepared.steps:
            base = tuple(prepared.param(name, statement.params.get(name)) for name in step.params)
            rows, description = self._step(step, base, prepared, statement, returned)
            returned[step.label] = rows
            if step.label == prepared.query.answer:
                answer = prepared.answer(rows, description)
        return answer

    def _step(
        self,
        step: sql.SqliteStep,
        base: tuple[Any, ...],
        prepared: _Prepared,
        statement: Statement,
        returned: dict[str, list[tuple[Any, ...]]],
    ) -> tuple[list[tuple[Any, ...]], Any]:
        if step.rowset is None and step.source is None:
            cursor = self.raw.execute(step.sql, base)
            return cursor.fetchall(), cursor.description
        if step.flat:
            places = [row[step.uses[0]] for row in returned[step.source or ""]]
            cursor = self.raw.execute(step.sql, (*base, _json(places)))
            return cursor.fetchall(), cursor.description
        if step.source is not None:
            uses = step.uses
            inputs = [[row[index] for index in uses] for row in returned[step.source]]
        else:
            rows = statement.rows[step.rowset or ""]
            if step.of is not None and len(rows) != len(returned[step.of]):
                kept = {row[0] for row in returned[step.of]}
                rows = [row for row in rows if str(row[0]) in kept]
            inputs = prepared.cells(step, rows)
        return self._with_set(step, base, inputs)

    def _with_set(
        self, step: sql.SqliteStep, base: tuple[Any, ...], inputs: list[Any]
    ) -> tuple[list[tuple[Any, ...]], Any]:
        if not inputs:
            return [], None
        if step.whole:
            cursor = self.raw.execute(step.sql, (*base, _json(inputs)))
            return cursor.fetchall(), cursor.description
        found: list[tuple[Any, ...]] = []
        description = None
        execute = self.raw.execute
        for cells in inputs:
            cursor = execute(step.sql, (*base, *cells))
            found += cursor.fetchall()
            description = cursor.description
        return found, description


class SqliteStore:
    """A store in one SQLite file, or in memory and inline for the simulator and tests."""

    writers = 1
    mixes = True

    def __init__(self, path: str, clock: Clock | None = None) -> None:
        self.path = path
        self.clock = clock or Clock()
        self._inline = path == ":memory:"
        self._connection: _Connection | None = None
        self._lock_file: Any = None
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._writer: threading.Thread | None = None
        self._writing = threading.Lock()
        """Held by whoever uses the writer's connection, here or in the thread."""
        self._in_thread_until = 0.0
        self._readers: ThreadPoolExecutor | None = None
        self._local = threading.local()
        self._reader_connections: list[_Connection] = []

    def within(self, workspace: UUID) -> "SqliteStore":
        del workspace  # every query names it; the file has no roles
        return self

    async def open(self) -> None:
        state = await self.schema()
        schema.check_fit(state.schema, state.compat)

    async def close(self) -> None:
        if self._writer is not None:
            self._jobs.put(None)
            await asyncio.get_running_loop().run_in_executor(None, self._writer.join)
            self._writer = None
        if self._readers is not None:
            self._readers.shutdown(wait=True)
            self._readers = None
        connections = [*self._reader_connections, self._connection]
        for connection in connections:
            if connection is not None:
                connection.raw.close()
        self._reader_connections.clear()
        self._connection = None
        if self._lock_file is not None:
            self._lock_file.close()
            self._lock_file = None

    async def migrate(self) -> list[int]:
        return await self._on_writer(self._migrate)

    async def schema(self) -> SchemaState:
        return await self._on_writer(self._schema)

    async def describe(self) -> dict[str, str]:
        def look() -> dict[str, str]:
            raw = self._writer_connection().raw
            levels = {0: "OFF", 1: "NORMAL", 2: "FULL", 3: "EXTRA"}
            return {
                "database": f"SQLite {sqlite3.sqlite_version}",
                "file": self.path,
                "journal": raw.execute("pragma journal_mode").fetchone()[0],
                "synchronous": levels[raw.execute("pragma synchronous").fetchone()[0]],
            }

        return await self._on_writer(look)

    async def fetch(self, statement: Statement) -> list[Row]:
        if self._inline:
            return self._guard(lambda: self._writer_connection().run(statement))
        if self._readers is None:
            self._readers = ThreadPoolExecutor(2, thread_name_prefix="tenuto-sqlite-read")
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._readers, self._read, statement)

    async def transact(self, script: Callable[[], Script[T]]) -> T:
        if not self._inline and self.clock.elapsed() >= self._in_thread_until:
            with suppress(_Busy):
                return self._in_place(script)
        return await self._on_writer(lambda: self._transact(script, wait=True))

    def _in_place(self, script: Callable[[], Script[T]]) -> T:
        """The script's result, here and now; `_Busy` when anybody else writes."""
        if not self._writing.acquire(blocking=False):
            raise _Busy
        began = self.clock.elapsed()
        try:
            return self._guard(lambda: self._transact(script, wait=False))
        finally:
            self._writing.release()
            now = self.clock.elapsed()
            if now - began > _LONG_S:
                self._in_thread_until = now + _REST * (now - began)

    async def once(self, script: Callable[[], Script[T]]) -> T:
        return await self.transact(script)

    async def stream(self, statements: AsyncIterator[Statement]) -> None:
        await self.transact(await gathered(statements))

    async def _on_writer(self, job: Callable[[], T]) -> T:
        """The job's result, done on the writer thread."""
        if self._inline:
            return self._guard(job)
        if self._writer is None:
            self._writer = threading.Thread(
                target=self._write_loop, name="tenuto-sqlite-write", daemon=True
            )
            self._writer.start()
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def work() -> None:
            try:
                result = self._guard(job)
            except BaseException as error:  # noqa: BLE001  handed to the caller
                _answer(loop, future, error=error)
            else:
                _answer(loop, future, result=result)

        self._jobs.put(work)
        return await future

    def _write_loop(self) -> None:
        while (job := self._jobs.get()) is not None:
            # Its caller may have given up meanwhile: the job is done all the same.
            with self._writing:
                job()

    def _read(self, statement: Statement) -> list[Row]:
        connection = getattr(self._local, "connection", None)
        if connection is None:
            connection = self._guard(lambda: _Connection(self.path))
            self._local.connection = connection
            self._reader_connections.append(connection)
        return self._guard(lambda: connection.read(statement))

    def _writer_connection(self) -> _Connection:
        if self._connection is None:
            if not self._inline:
                if Path(self.path).is_dir():
                    raise Unavailable(f"{self.path} is a directory, not a database file")
                if self._lock_file is None:
                    self._lock_file = open(f"{self.path}-lock", "a")  # noqa: SIM115, PTH123
            self._connection = self._connect()
        return self._connection

    def _connect(self) -> _Connection:
        # Several processes that make a new file wait for each other here.
        if self._lock_file is None:
            return _Connection(self.path)
        fcntl.flock(self._lock_file, fcntl.LOCK_EX)
        try:
            made = not Path(self.path).exists()
            connection = _Connection(self.path)
            if made:
                # Prompts and environments are nobody else's business. By name: closing a
                # descriptor of the file would drop every lock that this process has on it.
                Path(self.path).chmod(0o600)
            return connection
        finally:
            fcntl.flock(self._lock_file, fcntl.LOCK_UN)

    def _transaction(self, body: Callable[[_Connection], T], *, wait: bool = True) -> T:
        """The body's result, committed. Text that is not UTF-8 is read with marks in its place."""
        connection = self._writer_connection()
        try:
            return self._commit(connection, body, wait=wait)
        except sqlite3.OperationalError as error:
            if "UTF-8" not in str(error):
                raise
        with connection.lenient():
            return self._commit(connection, body, wait=wait)

    def _commit(
        self, connection: _Connection, body: Callable[[_Connection], T], *, wait: bool
    ) -> T:
        if self._lock_file is not None:
            try:
                fcntl.flock(self._lock_file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError as error:
                raise _Busy from error
        try:
            connection.begin(wait=wait)
            try:
                result = body(connection)
                connection.raw.execute("commit")
            except BaseException:
                if connection.raw.in_transaction:
                    connection.raw.execute("rollback")
                raise
            return result
        finally:
            if self._lock_file is not None:
                fcntl.flock(self._lock_file, fcntl.LOCK_UN)

    def _transact(self, script: Callable[[], Script[T]], *, wait: bool) -> T:
        def body(connection: _Connection) -> T:
            steps = script()
            try:
                statement = next(steps)
                while True:
                    statement = steps.send(connection.run(statement))
            except StopIteration as stop:
                result: T = stop.value
                return result

        return self._transaction(body, wait=wait)

    def _migrate(self) -> list[int]:
        def body(connection: _Connection) -> list[int]:
            raw = connection.raw
            raw.execute(schema.BOOKKEEPING)
            done = {row[0] for row in raw.execute("select number from schema_migration")}
            applied = []
            for migration in schema.migrations():
                if migration.number in done:
                    continue
                raw.execute(
                    "insert into schema_migration values (?, ?, ?, ?)",
                    (migration.number, migration.name, migration.compat, str(self.clock.now())),
                )
                for statement in schema.statements(migration, "sqlite"):
                    raw.execute(statement)
                applied.append(migration.number)
            return applied

        return self._transaction(body)

    def _schema(self) -> SchemaState:
        raw = self._writer_connection().raw
        known = raw.execute(
            "select 1 from sqlite_master where name = 'schema_migration'"
        ).fetchone()
        if known is None:
            return SchemaState(0, 0)
        row = raw.execute(
            "select coalesce(max(number), 0), coalesce(max(compat), 0) from schema_migration"
        ).fetchone()
        return SchemaState(*row)

    def _guard(self, job: Callable[[], T]) -> T:
        """The job's result; what SQLite says about its file becomes `Unavailable`."""
        try:
            return job()
        except TenutoError:
            raise
        except sqlite3.IntegrityError as error:
            if "UNIQUE" not in str(error):
                raise
            raise Conflict(
                "something with that id exists already", "idempotency_conflict"
            ) from error
        except OverflowError as error:
            raise Invalid("a number is beyond 64 bits") from error
        except (sqlite3.DatabaseError, OSError) as error:
            full = "full" in str(error) or getattr(error, "errno", None) == 28
            if full:
                raise Unavailable(
                    f"no room left for {self.path}: {error}", "storage_full"
                ) from error
            if isinstance(error, sqlite3.ProgrammingError):
                raise
            raise Unavailable(f"cannot use the database {self.path}: {error}") from error


def _answer(
    loop: asyncio.AbstractEventLoop,
    future: "asyncio.Future[T]",
    *,
    result: Any = None,
    error: BaseException | None = None,
) -> None:
    def settle() -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)

    if not loop.is_closed():
        loop.call_soon_threadsafe(settle)
