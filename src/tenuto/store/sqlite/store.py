"""The SQLite store: one writer thread, parallel readers, WAL, synchronous=FULL.

A transaction runs in the caller's thread if no other write is running: switching to the writer
thread and back takes as long as the disk. After a slow transaction, the writer thread writes for a
while, so that the event loop continues meanwhile.

Processes that share a file take turns by a lock file: the kernel wakes the next process at once,
where SQLite's own busy handler would sleep.
"""

import asyncio
import errno
import fcntl
import os
import queue
import re
import sqlite3
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, TypeVar
from uuid import UUID

from tenuto import private
from tenuto.clock import Clock
from tenuto.folder_stamp import WatchedFiles
from tenuto.model.errors import Conflict, Invalid, Unavailable
from tenuto.store import schema, sql
from tenuto.store.dialects import SQLITE
from tenuto.store.protocol import Row, SchemaState, Script, Statement, Store, collect_script
from tenuto.store.sqlite.connection import Connection, WriterBusy

T = TypeVar("T")

_JOURNAL_BYTES = 4000 * 4120 + 32
"""Size of the journal between two checkpoints: 4000 pages with their headers, in bytes."""
_CHECK_JOURNAL_EVERY = 64
"""Transactions after which a process checks the size of the journal.

Not more often: the sync after a check takes longer, because it writes the file's change time.
"""
_FILL_CHUNK = 1 << 14
"""Bytes per write when the journal is extended.

The system stores each chunk together, and processes all of it at each later write to a part of it.
"""
_SLOW_S = 0.005
_THREAD_FACTOR = 3
"""After a slow transaction, the thread writes for this many times its duration."""
_SQLITE_ERRORS = (sqlite3.DatabaseError, OSError, OverflowError)


class SqliteStore:
    """A store in one SQLite file, or in memory without threads for the simulator and tests."""

    writers = 1
    mixes = True

    def __init__(self, path: str, clock: Clock | None = None) -> None:
        self._inline = path == ":memory:"
        # Absolute: connections are created later, too, when the working directory may differ.
        self.path = path if self._inline else os.path.abspath(path)  # noqa: PTH100  links stay
        self.clock = clock or Clock()
        self._connection: Connection | None = None
        self._lock_file: Any = None
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._writer: threading.Thread | None = None
        self._closing = False
        self._writing = threading.Lock()
        """Held while the writer's connection is used, by a caller or by the thread."""
        self._in_thread_until = 0.0
        # SQLite puts it beside the file itself, not beside a link to it.
        self._journal = Path(f"{os.path.realpath(self.path)}-wal")
        self._files: WatchedFiles | None = None
        """Watched, because SQLite writes on to a removed file: its commits would be lost."""
        self._written = 0
        self._can_preallocate = not self._inline
        self._readers: ThreadPoolExecutor | None = None
        self._local = threading.local()
        self._reader_connections: list[Connection] = []

    def for_workspace(self, workspace: UUID) -> Store:
        """Returns a store on the same file that sees one workspace only."""
        return SqliteTenant(self, workspace)

    def for_maintenance(self) -> "SqliteStore":
        """Returns this store: SQLite has no statement timeouts."""
        return self

    async def open(self) -> None:
        """Raises `Incompatible` unless the file's schema fits; creates a missing file, empty."""
        state = await self.schema()
        schema.check_fit(state.schema, state.compat)

    async def close(self) -> None:
        """Ends the threads after their work, and closes all connections and the lock file."""
        self._closing = True
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
        self._files = None
        if self._lock_file is not None:
            self._lock_file.close()
            self._lock_file = None
        self._closing = False

    async def migrate(self) -> list[int]:
        """Applies missing migrations on the writer thread; returns their numbers."""
        return await self._run_on_writer(self._migrate)

    async def schema(self) -> SchemaState:
        """Returns the schema state of the file; zeros for an empty one."""
        return await self._run_on_writer(self._read_schema)

    async def describe(self) -> dict[str, str]:
        """Returns version, path and durability settings of the file, for operators."""

        def read_settings() -> dict[str, str]:
            raw = self._writer_connection().raw
            levels = {0: "OFF", 1: "NORMAL", 2: "FULL", 3: "EXTRA"}
            return {
                "database": f"SQLite {sqlite3.sqlite_version}",
                "file": self.path,
                "journal": raw.execute("pragma journal_mode").fetchone()[0],
                "synchronous": levels[raw.execute("pragma synchronous").fetchone()[0]],
            }

        return await self._run_on_writer(read_settings)

    async def fetch(self, statement: Statement) -> list[Row]:
        """Runs one read on a reader thread and returns its rows."""
        if self._inline:
            return self._with_mapped_errors(lambda: list(self._writer_connection().run(statement)))
        if self._readers is None:
            self._readers = ThreadPoolExecutor(2, thread_name_prefix="tenuto-sqlite-read")
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._readers, self._read, statement)

    async def transact(self, script: Callable[[], Script[T]]) -> T:
        """Runs a script in one transaction: on the caller's thread if it may write there now."""
        if self._try_lock_writer():
            try:
                return self._transact(script, wait=False)
            except WriterBusy:
                pass  # the thread waits for the other process
            finally:
                self._writing.release()
        return await self._run_on_writer(lambda: self._transact(script, wait=True))

    def _try_lock_writer(self) -> bool:
        """True if the caller may write on its own thread now: it then holds the lock `_writing`."""
        if self._inline or self._closing or self.clock.elapsed() < self._in_thread_until:
            return False
        return self._writing.acquire(blocking=False)

    def _transact(self, script: Callable[[], Script[T]], *, wait: bool) -> T:
        """Runs and commits a script; without `wait`, `WriterBusy` if another process writes."""
        started = self.clock.elapsed()
        try:
            return self._run_and_commit(
                lambda connection: _run_script(script(), connection), wait=wait
            )
        except _SQLITE_ERRORS as error:
            raise self._map_sqlite_error(error) from error
        finally:
            took = self.clock.elapsed() - started
            if took > _SLOW_S:
                self._in_thread_until = started + (1 + _THREAD_FACTOR) * took
            self._check_journal_size()

    def _check_journal_size(self) -> None:
        """Queues a job that extends a short journal; checks every 64 transactions."""
        self._written += 1
        if (
            self._can_preallocate
            and not self._closing
            and self._written % _CHECK_JOURNAL_EVERY == 0
        ):
            with suppress(OSError):
                if self._journal.stat().st_size < _JOURNAL_BYTES:
                    self._enqueue(self._preallocate_wal)

    def _preallocate_wal(self) -> None:
        """Extends the journal to its usual size, since growth is slow; never again after an error.

        It runs within a transaction, so no other process appends. SQLite reads only up to the last
        valid frame, and zeros are never valid.
        """
        try:
            with self._writing:
                self._run_and_commit(lambda _: _extend_file(self._journal, _JOURNAL_BYTES))
        except (sqlite3.Error, OSError, Unavailable):  # the journal stays as it is
            self._can_preallocate = False

    transact_one = transact

    async def stream(self, statements: AsyncIterator[Statement]) -> None:
        """Collects all statements, then runs them in one transaction."""
        await self.transact(await collect_script(statements))

    async def _run_on_writer(self, job: Callable[[], T]) -> T:
        """Runs a job on the writer thread; returns its result."""
        if self._inline:
            return self._with_mapped_errors(job)
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def work() -> None:
            try:
                with self._writing:  # also for a cancelled caller: the job runs to its end
                    result = self._with_mapped_errors(job)
            except BaseException as error:  # noqa: BLE001  raised to the caller
                _resolve_future(loop, future, error=error)
            else:
                _resolve_future(loop, future, result=result)

        self._enqueue(work)
        return await future

    def _enqueue(self, job: Callable[[], None]) -> None:
        """Queues a job for the writer thread; raises `Unavailable` while the store is closing."""
        if self._closing:
            raise Unavailable(f"the database {self.path} was closed")
        if self._writer is None:
            self._writer = threading.Thread(
                target=self._write_loop, name="tenuto-sqlite-write", daemon=True
            )
            self._writer.start()
        self._jobs.put(job)

    def _write_loop(self) -> None:
        """Runs the queued jobs on the writer thread, until `None` is queued."""
        while (job := self._jobs.get()) is not None:
            job()

    def _read(self, statement: Statement) -> list[Row]:
        """Runs one read on this reader thread's own connection, which the first read opens."""
        connection = getattr(self._local, "connection", None)
        if connection is None:
            connection = self._with_mapped_errors(lambda: Connection(self.path))
            self._local.connection = connection
            self._reader_connections.append(connection)
        self._with_mapped_errors(self._check_files)
        return self._with_mapped_errors(lambda: connection.read(statement))

    def _writer_connection(self) -> Connection:
        """Returns the writer's connection; opens it at the first use."""
        if self._connection is None:
            if not self._inline:
                if Path(self.path).is_dir():
                    raise Unavailable(
                        f"{self.path} is a directory; give the path of a database file"
                    )
                if self._lock_file is None:
                    self._lock_file = open(  # noqa: SIM115  closed with the store
                        f"{self.path}-lock", "a", opener=private.opener
                    )
            self._connection = self._connect()
        return self._connection

    def _connect(self) -> Connection:
        """Opens the database file and creates it with private permissions if needed."""
        # Several processes that create the same new file wait for each other here.
        if self._lock_file is None:
            return Connection(self.path)
        fcntl.flock(self._lock_file, fcntl.LOCK_EX)
        try:
            # Prompts and environments are private, but SQLite creates a file that all users may
            # read, and gives its journal the mode of the file. Only if there is no file: closing a
            # descriptor of the file would release every lock that this process has on it.
            if not Path(self.path).exists():
                with open(os.path.realpath(self.path), "xb", opener=private.opener):
                    pass
            connection = Connection(self.path)
            self._files = WatchedFiles(self.path, str(self._journal), clock=self.clock)
            self._check_files()
            return connection
        finally:
            fcntl.flock(self._lock_file, fcntl.LOCK_UN)

    def _check_files(self) -> None:
        """Raises `Unavailable` if the database file was removed or replaced."""
        if self._files is not None and not self._files.are_unchanged():
            text = "was removed or replaced while it was in use; restart the processes that use it"
            raise Unavailable(f"the database {self.path} {text}")

    def _run_and_commit(self, body: Callable[[Connection], T], *, wait: bool = True) -> T:
        """Runs and commits `body`; returns its result. Invalid UTF-8 is read with replacements."""
        connection = self._writer_connection()
        try:
            return self._commit(connection, body, wait=wait)
        except sqlite3.OperationalError as error:
            if "UTF-8" not in str(error):
                raise
        with connection.replace_invalid_text():
            return self._commit(connection, body, wait=wait)

    def _commit(self, connection: Connection, body: Callable[[Connection], T], *, wait: bool) -> T:
        """Runs `body` in one locked transaction; without `wait`, `WriterBusy` if it would wait."""
        if self._lock_file is not None:
            try:
                fcntl.flock(self._lock_file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError as error:
                raise WriterBusy from error
        try:
            self._check_files()
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

    def _migrate(self) -> list[int]:
        """Applies missing migrations in one transaction; returns their numbers."""

        def body(connection: Connection) -> list[int]:
            raw = connection.raw
            raw.execute(schema.MIGRATION_TABLE)
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

        return self._run_and_commit(body)

    def _read_schema(self) -> SchemaState:
        """Reads the schema state from the migration table; zeros if there is no such table."""
        raw = self._writer_connection().raw
        table = raw.execute(
            "select 1 from sqlite_master where name = 'schema_migration'"
        ).fetchone()
        if table is None:
            return SchemaState(0, 0)
        row = raw.execute(
            "select coalesce(max(number), 0), coalesce(max(compat), 0) from schema_migration"
        ).fetchone()
        return SchemaState(*row)

    def _with_mapped_errors(self, job: Callable[[], T]) -> T:
        """Runs a job and returns its result; maps SQLite's errors to errors of the engine."""
        try:
            return job()
        except _SQLITE_ERRORS as error:
            raise self._map_sqlite_error(error) from error

    def _map_sqlite_error(self, error: Exception) -> Exception:
        """Returns the engine's error for an error of SQLite; a bug of ours stays unchanged."""
        if isinstance(error, sqlite3.IntegrityError) and "UNIQUE" in str(error):
            return Conflict(
                "a row with this id or unique key exists already", "idempotency_conflict"
            )
        if isinstance(error, sqlite3.IntegrityError | sqlite3.ProgrammingError):
            return error
        if isinstance(error, OverflowError):
            return Invalid("a number does not fit into 64 bits")
        if "full" in str(error) or getattr(error, "errno", None) == errno.ENOSPC:
            return Unavailable(f"the disk of {self.path} is full: {error}", "storage_full")
        if re.match(r"no such (table|column): |table \w+ has no column named ", str(error)):
            return schema.missing_column_error(error)
        return Unavailable(f"cannot use the database {self.path}: {error}")


class SqliteTenant:
    """A `SqliteStore` restricted to the rows of one workspace.

    PostgreSQL separates tenants by a role and row policies. SQLite has neither, so the tenant's
    store passes `:workspace` with each statement, and the queries compare it with every row.
    """

    def __init__(self, store: SqliteStore, workspace: UUID) -> None:
        self._store = store
        self._workspace = workspace
        self._workspace_queries = _workspace_queries()
        self.writers = store.writers
        self.mixes = store.mixes
        self.clock = store.clock

    def for_workspace(self, workspace: UUID) -> Store:
        """Returns this store; a tenant's store cannot change its workspace."""
        assert workspace == self._workspace, "a tenant's store serves one workspace only"
        return self

    def for_maintenance(self) -> Store:
        """Always fails: the whole store runs maintenance."""
        raise AssertionError("only the system runs maintenance")

    async def open(self) -> None:
        """Opens the whole store."""
        await self._store.open()

    async def close(self) -> None:
        """Does nothing: the caller that opened the whole store closes it."""

    async def migrate(self) -> list[int]:
        """Applies missing migrations to the whole file; returns their numbers."""
        return await self._store.migrate()

    async def schema(self) -> SchemaState:
        """Returns the schema state of the file; zeros for an empty one."""
        return await self._store.schema()

    async def describe(self) -> dict[str, str]:
        """Returns version, path and durability settings of the file."""
        return await self._store.describe()

    async def fetch(self, statement: Statement) -> list[Row]:
        """Runs one read, restricted to the workspace, and returns its rows."""
        return await self._store.fetch(self._bind(statement))

    async def transact(self, script: Callable[[], Script[T]]) -> T:
        """Runs a script in one transaction, each of its statements restricted to the workspace."""
        return await self._store.transact(lambda: self._bind_script(script()))

    transact_one = transact

    async def stream(self, statements: AsyncIterator[Statement]) -> None:
        """Runs statements in one transaction, each restricted to the workspace."""
        await self._store.stream(self._bind(statement) async for statement in statements)

    def _bind(self, statement: Statement) -> Statement:
        """Returns the statement with the workspace added, if its query has that parameter."""
        if statement.query not in self._workspace_queries:
            return statement
        workspace = statement.params.get("workspace")
        if workspace is not None:
            assert workspace == self._workspace, f"{statement.query} is for another workspace"
            return statement
        params = statement.params | {"workspace": self._workspace}
        return Statement(statement.query, params, statement.rows, statement.literals)

    def _bind_script(self, script: Script[T]) -> Script[T]:
        """Returns the script with each of its statements bound to the workspace."""
        try:
            statement = next(script)
            while True:
                statement = script.send((yield self._bind(statement)))
        except StopIteration as stop:
            result: T = stop.value
            return result


@cache
def _workspace_queries() -> frozenset[str]:
    """Returns the names of the queries that have a workspace parameter."""
    return frozenset(
        name for name, query in sql.load(SQLITE).items() if "workspace" in query.params
    )


def _run_script(script: Script[T], connection: Connection) -> T:
    """Runs a script on the connection; returns its result."""
    try:
        statement = next(script)
        while True:
            statement = script.send(connection.run(statement))
    except StopIteration as stop:
        result: T = stop.value
        return result


def _extend_file(path: Path, size: int) -> None:
    """Appends zeros to a file up to a size; if the disk is full, undoes that and raises."""
    with path.open("r+b", buffering=0) as file:
        before = file.seek(0, os.SEEK_END)
        try:
            for offset in range(before, size, _FILL_CHUNK):
                file.write(bytes(min(_FILL_CHUNK, size - offset)))
            os.fsync(file.fileno())
        except OSError:
            file.truncate(before)
            raise


def _resolve_future(
    loop: asyncio.AbstractEventLoop,
    future: "asyncio.Future[T]",
    *,
    result: Any = None,
    error: BaseException | None = None,
) -> None:
    """Sets a future's result or error from another thread."""

    def resolve() -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)

    if not loop.is_closed():
        loop.call_soon_threadsafe(resolve)
