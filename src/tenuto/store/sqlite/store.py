"""SQLite: one writer thread, readers beside it, WAL, synchronous=FULL.

A transaction that finds nobody else writing is run in place: going to the thread and back takes as
long as the disk. After one that took long the thread writes, and the loop goes on meanwhile.

Processes that share a file take turns by a lock file: the kernel wakes the next one at once, where
SQLite's own busy handler would sleep.
"""

import asyncio
import errno
import fcntl
import os
import queue
import sqlite3
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar
from uuid import UUID

from tenuto import private
from tenuto.clock import Clock
from tenuto.folder_stamp import Stamp, folder_stamp
from tenuto.model.errors import Conflict, Invalid, Unavailable
from tenuto.store import schema
from tenuto.store.protocol import Row, SchemaState, Script, Statement, Store, gathered
from tenuto.store.sqlite.connection import Connection, WriterBusy
from tenuto.store.sqlite.tenant import SqliteTenant

T = TypeVar("T")

_ROOM = 4000 * 4120 + 32
"""Bytes that the journal takes between two checkpoints: so many pages with their headers."""
_LOOK_EVERY = 64
"""Transactions after which a process looks whether the journal has that room.

Not more often: the sync after a look takes longer, for the file's time of change is written then.
"""
_FILLED = 1 << 14
"""Bytes that are written at once when the journal is lengthened.

The system keeps them together, and goes through all of them at each later write to one of them.
"""
_LONG_S = 0.005
_REST = 3
"""After a transaction that took long, the thread writes for so many times as long."""
_KNOWN = (sqlite3.DatabaseError, OSError, OverflowError)


class _DatabaseFiles:
    """The database's file and its journal, as they were when they were first seen.

    SQLite goes on writing to a file that has no name any more, or whose name another one has: what
    it acknowledges then is nowhere.
    """

    def __init__(self, *paths: str, clock: Clock) -> None:
        self._seen: dict[str, tuple[int, int] | None] = dict.fromkeys(paths)
        self._folders = {str(Path(path).parent) for path in paths}
        self._clock = clock
        self._whole: list[Stamp | None] = [None]
        """Their folders when the files were seen last."""

    def are_there(self) -> bool:
        """Whether none of them was removed or replaced."""
        try:
            now = [folder_stamp(folder, self._clock) for folder in self._folders]
        except OSError:
            now = [None]
        if now == self._whole and None not in now:
            return True
        found = self._look()
        self._whole = now if found else [None]
        return found

    def _look(self) -> bool:
        for path, before in self._seen.items():
            try:
                found = Path(path).stat()
            except FileNotFoundError:
                if before is not None:
                    return False
                continue
            now = (found.st_dev, found.st_ino)
            if before is None:
                self._seen[path] = now
            elif before != now:
                return False
        return True


class SqliteStore:
    """A store in one SQLite file, or in memory and inline for the simulator and tests."""

    writers = 1
    mixes = True

    def __init__(self, path: str, clock: Clock | None = None) -> None:
        self._inline = path == ":memory:"
        # Spelled out: connections are made later, too, wherever the process has gone by then.
        self.path = path if self._inline else os.path.abspath(path)  # noqa: PTH100  links stay
        self.clock = clock or Clock()
        self._connection: Connection | None = None
        self._lock_file: Any = None
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._writer: threading.Thread | None = None
        self._closing = False
        self._writing = threading.Lock()
        """Held by whoever uses the writer's connection, here or in the thread."""
        self._in_thread_until = 0.0
        # SQLite keeps it beside the file itself, wherever a link to that stands.
        self._journal = Path(f"{os.path.realpath(self.path)}-wal")
        self._files: _DatabaseFiles | None = None
        self._written = 0
        self._may_grow = not self._inline
        self._readers: ThreadPoolExecutor | None = None
        self._local = threading.local()
        self._reader_connections: list[Connection] = []

    def within(self, workspace: UUID) -> Store:
        return SqliteTenant(self, workspace)

    def unhurried(self) -> "SqliteStore":
        return self  # nothing here is given up

    async def open(self) -> None:
        state = await self.schema()
        schema.check_fit(state.schema, state.compat)

    async def close(self) -> None:
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
            return self._guard(lambda: list(self._writer_connection().run(statement)))
        if self._readers is None:
            self._readers = ThreadPoolExecutor(2, thread_name_prefix="tenuto-sqlite-read")
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._readers, self._read, statement)

    async def transact(self, script: Callable[[], Script[T]]) -> T:
        if self._is_free():
            try:
                return self._transact(script, wait=False)
            except WriterBusy:
                pass  # the thread waits for its turn
            finally:
                self._writing.release()
        return await self._on_writer(lambda: self._transact(script, wait=True))

    def _is_free(self) -> bool:
        """Whether this process may write in place; then `_writing` is held."""
        if self._inline or self._closing or self.clock.elapsed() < self._in_thread_until:
            return False
        return self._writing.acquire(blocking=False)

    def _transact(self, script: Callable[[], Script[T]], *, wait: bool) -> T:
        """The script's result, committed; `Busy` if others write and the caller may not wait."""
        began = self.clock.elapsed()
        try:
            return self._transaction(
                lambda connection: _run_script(script(), connection), wait=wait
            )
        except _KNOWN as error:
            raise self._map_sqlite_error(error) from error
        finally:
            took = self.clock.elapsed() - began
            if took > _LONG_S:
                self._in_thread_until = began + (1 + _REST) * took
            self._look_for_room()

    def _look_for_room(self) -> None:
        """Have the thread lengthen the journal, once this process has written for a while."""
        self._written += 1
        if self._may_grow and not self._closing and self._written % _LOOK_EVERY == 0:
            with suppress(OSError):
                if self._journal.stat().st_size < _ROOM:
                    self._send(self._preallocate_wal)

    def _preallocate_wal(self) -> None:
        """Fill the journal up to its usual length: a disk is slower to sync a file that grows.

        Within a transaction, so nobody else adds to it; SQLite reads no further than the last frame
        that it knows to be valid, and zeros never are.
        """
        try:
            with self._writing:
                self._transaction(lambda _: _fill(self._journal, _ROOM))
        except (sqlite3.Error, OSError, Unavailable):  # it goes on as it was
            self._may_grow = False

    async def once(self, script: Callable[[], Script[T]]) -> T:
        return await self.transact(script)

    async def stream(self, statements: AsyncIterator[Statement]) -> None:
        await self.transact(await gathered(statements))

    async def _on_writer(self, job: Callable[[], T]) -> T:
        """The job's result, done on the writer thread."""
        if self._inline:
            return self._guard(job)
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def work() -> None:
            try:
                with self._writing:  # though the caller has given up: the job is done all the same
                    result = self._guard(job)
            except BaseException as error:  # noqa: BLE001  handed to the caller
                _answer(loop, future, error=error)
            else:
                _answer(loop, future, result=result)

        self._send(work)
        return await future

    def _send(self, job: Callable[[], None]) -> None:
        """Have the thread do a job; a store that is being closed takes none."""
        if self._closing:
            raise Unavailable(f"the database {self.path} was closed")
        if self._writer is None:
            self._writer = threading.Thread(
                target=self._write_loop, name="tenuto-sqlite-write", daemon=True
            )
            self._writer.start()
        self._jobs.put(job)

    def _write_loop(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()

    def _read(self, statement: Statement) -> list[Row]:
        connection = getattr(self._local, "connection", None)
        if connection is None:
            connection = self._guard(lambda: Connection(self.path))
            self._local.connection = connection
            self._reader_connections.append(connection)
        self._guard(self._check_files)
        return self._guard(lambda: connection.read(statement))

    def _writer_connection(self) -> Connection:
        if self._connection is None:
            if not self._inline:
                if Path(self.path).is_dir():
                    raise Unavailable(f"{self.path} is a directory, not a database file")
                if self._lock_file is None:
                    self._lock_file = open(  # noqa: SIM115  closed with the store
                        f"{self.path}-lock", "a", opener=private.opener
                    )
            self._connection = self._connect()
        return self._connection

    def _connect(self) -> Connection:
        # Several processes that make a new file wait for each other here.
        if self._lock_file is None:
            return Connection(self.path)
        fcntl.flock(self._lock_file, fcntl.LOCK_EX)
        try:
            # Prompts and environments are nobody else's business: SQLite makes a file that all may
            # read, and gives its journal the mode of the file. Only where there is none: closing a
            # descriptor of the file would drop every lock that this process has on it.
            if not Path(self.path).exists():
                with open(os.path.realpath(self.path), "xb", opener=private.opener):
                    pass
            connection = Connection(self.path)
            self._files = _DatabaseFiles(self.path, str(self._journal), clock=self.clock)
            self._check_files()
            return connection
        finally:
            fcntl.flock(self._lock_file, fcntl.LOCK_UN)

    def _check_files(self) -> None:
        if self._files is not None and not self._files.are_there():
            text = "was removed or replaced while it was in use; start again what uses it"
            raise Unavailable(f"the database {self.path} {text}")

    def _transaction(self, body: Callable[[Connection], T], *, wait: bool = True) -> T:
        """The body's result, committed. Text that is not UTF-8 is read with marks in its place."""
        connection = self._writer_connection()
        try:
            return self._commit(connection, body, wait=wait)
        except sqlite3.OperationalError as error:
            if "UTF-8" not in str(error):
                raise
        with connection.lenient():
            return self._commit(connection, body, wait=wait)

    def _commit(self, connection: Connection, body: Callable[[Connection], T], *, wait: bool) -> T:
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
        def body(connection: Connection) -> list[int]:
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
        except _KNOWN as error:
            raise self._map_sqlite_error(error) from error

    def _map_sqlite_error(self, error: Exception) -> Exception:
        """What an error of SQLite means to a caller."""
        if isinstance(error, sqlite3.IntegrityError):
            if "UNIQUE" not in str(error):
                return error
            return Conflict("something with that id exists already", "idempotency_conflict")
        if isinstance(error, OverflowError):
            return Invalid("a number is beyond 64 bits")
        if "full" in str(error) or getattr(error, "errno", None) == errno.ENOSPC:
            return Unavailable(f"no room left for {self.path}: {error}", "storage_full")
        if isinstance(error, sqlite3.ProgrammingError):
            return error
        return Unavailable(f"cannot use the database {self.path}: {error}")


def _run_script(script: Script[T], connection: Connection) -> T:
    """The result of a script whose statements run on the connection."""
    try:
        statement = next(script)
        while True:
            statement = script.send(connection.run(statement))
    except StopIteration as stop:
        result: T = stop.value
        return result


def _fill(path: Path, size: int) -> None:
    """Append zeros to a file until it has that size; where there is no room, nothing."""
    with path.open("r+b", buffering=0) as file:
        before = file.seek(0, os.SEEK_END)
        try:
            for at in range(before, size, _FILLED):
                file.write(bytes(min(_FILLED, size - at)))
            os.fsync(file.fileno())
        except OSError:
            file.truncate(before)
            raise


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
