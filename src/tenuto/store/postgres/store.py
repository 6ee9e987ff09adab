"""PostgreSQL over asyncpg: every query one statement, every batch one round trip."""

import asyncio
import math
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import cache, cached_property
from types import TracebackType
from typing import Any, TypeVar
from uuid import UUID

from asyncpg.pgproto import pgproto

from tenuto.clock import Clock, to_micros
from tenuto.model.errors import Incompatible, Invalid, Unavailable
from tenuto.store import schema, sql
from tenuto.store.postgres import sessions
from tenuto.store.postgres.connector import Connector
from tenuto.store.postgres.errors import AGAIN, CUT, GONE, LEAVING, meant
from tenuto.store.postgres.pool import Pool
from tenuto.store.postgres.pooler import Pooler, check_pooler
from tenuto.store.postgres.roles import IDENTITY, SYSTEM, TENANT, Identity, mistake
from tenuto.store.postgres.sessions import (
    ANSWER_S,
    DIRECT,
    MIGRATION_S,
    NAMED,
    SLOW_S,
    Session,
    Use,
    limit,
)
from tenuto.store.protocol import Row, SchemaState, Script, Statement

T = TypeVar("T")

_MIGRATION_LOCK = 0x74656E75746F
_RERUNS = 10
_READERS = 2
_PATIENCE_S = 10.0
_NOBODY = UUID(int=0)
"""A workspace that does not exist."""
_FOLD = 64
"""Sets from this size on send a value that all rows share once: arrays cost by the element."""
_SHAPES = 32
_SLOW_READING_S = 1.0
"""A reading of the database's clock that took longer is not used, if there was one before."""


class DatabaseClock(Clock):
    """The database's clock, so that hosts whose clocks are wrong agree.

    It is read now and then and carried forward by the machine's own elapsed time in between.
    """

    def __init__(self) -> None:
        super().__init__()
        self._offset: float | None = None
        self._read_at = 0.0

    def stale(self) -> bool:
        return self._offset is None or self.elapsed() - self._read_at > 15

    def set(self, database_now: datetime, before: float, after: float) -> None:
        """Take a reading that came between two instants; one that took long says too little."""
        if self._offset is None or after - before < _SLOW_READING_S:
            self._offset = to_micros(database_now) / 1e6 - (before + after) / 2
            self._read_at = after

    def now(self) -> datetime:
        if self._offset is None:
            return super().now()
        return datetime.fromtimestamp(self._offset + self.elapsed(), UTC)

    def _as_id(self, value: int) -> UUID:
        # The driver's own kind of id: made and sent in a fifth of the time.
        made: UUID = pgproto.UUID(value.to_bytes(16, "big"))
        return made


class _Means:
    """The connections of one role, and the statements spelled for them."""

    def __init__(
        self,
        connector: Connector,
        writers: int,
        session_for: Callable[[Use], Session],
        answer_s: float,
        *,
        repeatable: bool,
    ) -> None:
        self.connector = connector
        self.writing, self.reading = session_for("write"), session_for("read")
        self.write = _pool(connector, writers, self.writing, answer_s, repeatable=repeatable)
        self.streams = asyncio.Semaphore(max(1, writers - 1))
        """Who makes the statements of a stream may need a connection, too: one is left for that."""
        self.read = _pool(connector, _READERS, self.reading, answer_s, repeatable=repeatable)
        self.compiled: dict[Any, sql.PostgresQuery] = {}
        self.shapes: Counter[str] = Counter()

    @property
    def pools(self) -> tuple[Pool, Pool]:
        return self.write, self.read


def _pool(
    connector: Connector, size: int, session: Session, answer_s: float, *, repeatable: bool
) -> Pool:
    """Connections that are what the session says, each one asked before it is used."""

    async def prove(connection: Any) -> None:
        found = await _identity(connection, session)
        if (wrong := mistake(found, session.role, session.workspace)) is not None:
            raise Incompatible(wrong, "wrong_role")

    return Pool(connector, size, session.parameters, answer_s, prove, repeatable=repeatable)


async def _identity(connection: Any, session: Session) -> Identity:
    """Who a connection acts as."""
    if not session.opening:
        return Identity(**await connection.fetchrow(IDENTITY))
    async with _Transaction(connection, session.opening):
        return Identity(**await connection.fetchrow(IDENTITY))


class PostgresStore:
    """A store in a PostgreSQL database, in the role of the system: it sees every workspace.

    `within` gives the same store in the role of a tenant. Its connections belong to that workspace
    alone; with `many`, tenants share connections, and every transaction says whose it is. So it
    does with a `pooler`, where connections belong to nobody.
    """

    mixes = False

    def __init__(
        self,
        url: str,
        clock: Clock | None = None,
        writers: int = 4,
        *,
        many: bool = False,
        pooler: Pooler | None = None,
        means: _Means | None = None,
        tenant: UUID | None = None,
    ) -> None:
        self.url = url
        self.writers = writers
        self.clock = clock or DatabaseClock()
        self._ruled = self.clock if isinstance(self.clock, DatabaseClock) else None
        self._many = many
        self._pooler = pooler
        self._system = means is None
        self._means = means or self._made(Connector(url), writers, SYSTEM)
        self._write_opening = _opening(self._means.writing, tenant)
        self._read_opening = _opening(self._means.reading, tenant)
        self._tenants: dict[UUID | None, _Means] = {}
        self._owner: Pool | None = None
        self._slow: _Means | None = None

    def _made(
        self,
        connector: Connector,
        writers: int,
        role: str,
        workspace: UUID | None = None,
        answer_s: float | None = None,
    ) -> _Means:
        """Connections of a role; with a limit of their own they serve what may be repeated."""
        limit_s = answer_s or ANSWER_S

        def session_for(use: Use) -> Session:
            if self._pooler is not None:
                return sessions.pooled(role, use, limit_s)
            return sessions.direct(role, workspace, use, limit_s)

        return _Means(connector, writers, session_for, limit_s, repeatable=answer_s is not None)

    @property
    def connector(self) -> Connector:
        """What connects to the present primary."""
        return self._means.connector

    @cached_property
    def direct(self) -> Connector | None:
        """What connects past a pooler: for hints and migrations. `None`: nothing does."""
        if self._pooler is None:
            return self.connector
        return Connector(self._pooler.direct, self.connector) if self._pooler.direct else None

    @cached_property
    def _runtime(self) -> Connector:
        """What connects tenants."""
        if self._pooler is None:
            return self.connector
        return Connector(self._pooler.runtime, self.connector)

    def within(self, workspace: UUID) -> "PostgresStore":
        assert self._system, "a tenant's store is nobody else's"
        shared = self._many or self._pooler is not None
        key = None if shared else workspace
        if key not in self._tenants:
            self._tenants[key] = self._made(self._runtime, self.writers, TENANT, key)
        return PostgresStore(
            self.url,
            self.clock,
            self.writers,
            means=self._tenants[key],
            tenant=workspace if shared else None,
        )

    def unhurried(self) -> "PostgresStore":
        assert self._system, "maintenance is the system's"
        if self._slow is None:
            self._slow = self._made(self.connector, 1, SYSTEM, answer_s=SLOW_S)
        return PostgresStore(self.url, self.clock, 1, means=self._slow)

    async def identity(self) -> Identity:
        """Who the store's connections act as."""
        async with self._connection(read=True) as connection:
            return await _identity(connection, self._means.reading)

    async def open(self) -> None:
        state = await self.schema()
        schema.check_fit(state.schema, state.compat)
        if self._pooler is not None:
            for connector in (self.connector, self._runtime):
                await check_pooler(connector)
        # A connection that acts in a wrong role is refused when it is made: now, not at first use.
        async with self._connection(read=True):
            pass
        if self._many or self._pooler is not None:
            async with self.within(_NOBODY)._connection(read=True):  # noqa: SLF001  one of us
                pass
        if self._pooler is not None:
            await self._check_one_database()
        await self.sync_clock()

    async def _check_one_database(self) -> None:
        """Refuse addresses that lead to different databases: tasks would be in one or the other."""
        tenants = self.within(_NOBODY)._means.read  # noqa: SLF001  one of us
        pools = {"database": self._means.read, "database_runtime": tenants}
        if self.direct is not None and self._owner is not None:
            pools["database_direct"] = self._owner
        marks = {}
        for name, pool in pools.items():
            async with _PooledConnection(pool) as connection:
                marks[name] = tuple(await connection.fetchrow(schema.MARK))
        for name, mark in marks.items():
            if mark != marks["database"]:
                raise Incompatible(
                    f"{name} leads to a database {mark[0]} that is not the database"
                    f" {marks['database'][0]} of the setting database; give addresses of one"
                    " database",
                    "wrong_database",
                )

    async def close(self) -> None:
        # All at once: a server that hangs answers none of them.
        every = (self._means, *self._tenants.values(), *filter(None, [self._slow]))
        pools = [pool for means in every for pool in means.pools]
        await asyncio.gather(*(pool.close() for pool in filter(None, [self._owner, *pools])))

    async def sync_clock(self) -> None:
        """Read the database's clock again when the last reading is old."""
        clock = self._ruled
        if clock is not None and clock.stale():
            async with self._connection(read=True) as connection:
                before = clock.elapsed()
                now = await connection.fetchval("select clock_timestamp()")
                clock.set(now, before, clock.elapsed())

    async def migrate(self) -> list[int]:
        if self.direct is None:
            raise Invalid(
                "migrations need a connection past the pooler; set database_direct to the address"
                " of the server itself",
                "database_invalid",
            )
        owner = Pool(self.direct, 1, DIRECT | limit(MIGRATION_S), MIGRATION_S)
        try:
            return await self._migrate(owner)
        finally:
            await owner.close()

    async def _migrate(self, owner: Pool) -> list[int]:
        async with _PooledConnection(owner) as connection, connection.transaction():
            await connection.execute("select pg_advisory_xact_lock($1)", _MIGRATION_LOCK)
            await connection.execute(schema.BOOKKEEPING)
            rows = await connection.fetch("select number from schema_migration")
            done = {row["number"] for row in rows}
            applied = []
            for migration in schema.migrations():
                if migration.number not in done:
                    await self._apply(connection, migration)
                    applied.append(migration.number)
            return applied

    async def _apply(self, connection: Any, migration: schema.Migration) -> None:
        await connection.execute(
            "insert into schema_migration values ($1, $2, $3, clock_timestamp()::text)",
            migration.number,
            migration.name,
            migration.compat,
        )
        for statement in schema.statements(migration, "postgres"):
            await connection.execute(statement)

    async def schema(self) -> SchemaState:
        if self._owner is None:
            parameters = NAMED if self.direct is None else DIRECT | limit(ANSWER_S)
            self._owner = Pool(self.direct or self.connector, 1, parameters)
        async with _PooledConnection(self._owner) as connection:
            if await connection.fetchval("select to_regclass('schema_migration')") is None:
                return SchemaState(0, 0)
            row = await connection.fetchrow(
                "select coalesce(max(number), 0), coalesce(max(compat), 0) from schema_migration"
            )
            return SchemaState(*row)

    async def describe(self) -> dict[str, str]:
        async with self._connection(read=True) as connection:
            names = (
                *("server_version", "fsync", "full_page_writes"),
                *("synchronous_commit", "synchronous_standby_names"),
            )
            settings = {
                name: await connection.fetchval("select current_setting($1)", name)
                for name in names
            }
            role = await connection.fetchval("select current_user")
            database = await connection.fetchval("select current_database()")
        version = settings.pop("server_version")
        return {"database": f"PostgreSQL {version}", "name": database, "role": role, **settings}

    async def fetch(self, statement: Statement) -> list[Row]:
        # Idle connections do not survive the server; a read can be asked again on a new one.
        for _ in range(_READERS):
            try:
                return await self._read(statement)
            except Unavailable as error:
                if not isinstance(error.__cause__, GONE):
                    raise
        return await self._read(statement)

    async def _read(self, statement: Statement) -> list[Row]:
        async with self._connection(read=True) as connection:
            if not self._read_opening:
                return await self._asked(connection, statement)
            async with _Transaction(connection, self._read_opening):
                return await self._asked(connection, statement)

    async def transact(self, script: Callable[[], Script[T]]) -> T:
        await self.sync_clock()
        for _ in range(_RERUNS):
            try:
                async with self._connection() as connection, self._transaction(connection):
                    return await self._script(connection, script())
            except AGAIN:
                continue
        raise Unavailable("the database kept reporting deadlocks")

    def _transaction(self, connection: Any) -> Any:
        if not self._write_opening:
            return connection.transaction()
        return _Transaction(connection, self._write_opening)

    async def once(self, script: Callable[[], Script[T]]) -> T:
        if self._write_opening:
            return await self.transact(script)
        if self._ruled is not None and self._ruled.stale():
            await self.sync_clock()
        for _ in range(_RERUNS):
            try:
                async with self._connection() as connection:
                    return await self._script(connection, script())
            except AGAIN:
                continue
        raise Unavailable("the database kept reporting deadlocks")

    async def stream(self, statements: AsyncIterator[Statement]) -> None:
        await self.sync_clock()
        async with self._means.streams, self._connection() as connection:
            coming = asyncio.ensure_future(self._next(statements))
            try:
                async with self._transaction(connection):
                    # It began, so the server answers: who makes the statements may connect, too.
                    self._means.write.trust()
                    while (words := await coming) is not None:
                        coming = asyncio.ensure_future(self._next(statements))
                        await connection.fetch(*words)
            finally:
                await asyncio.wait([coming])
                coming.exception()  # looked at: what went wrong first is what is raised

    async def _script(self, connection: Any, steps: Script[T]) -> T:
        try:
            statement = next(steps)
            while True:
                statement = steps.send(await self._asked(connection, statement))
        except StopIteration as stop:
            result: T = stop.value
            return result

    def _connection(self, *, read: bool = False) -> "_PooledConnection":
        return _PooledConnection(self._means.read if read else self._means.write)

    async def _next(self, statements: AsyncIterator[Statement]) -> list[Any] | None:
        """The words of the next one, `None` after the last."""
        statement = await anext(statements, None)
        return None if statement is None else self._words(statement)

    def _asked(self, connection: Any, statement: Statement) -> Awaitable[list[Row]]:
        """The answer to a statement, on its way."""
        asked: Awaitable[list[Row]] = connection.fetch(*self._words(statement))
        return asked

    def _words(self, statement: Statement) -> list[Any]:
        """A statement as the driver takes it: its text, then its arguments."""
        compiled, cells = self._render(statement, _FOLD)
        if compiled is None:
            compiled, cells = self._render(statement, math.inf)
        assert compiled is not None
        params = statement.params
        words: list[Any] = [compiled.sql]
        words += [
            params.get(argument) if isinstance(argument, str) else cells[argument[0]][argument[1]]
            for argument in compiled.arguments
        ]
        return words

    def _render(
        self, statement: Statement, fold: float
    ) -> tuple[sql.PostgresQuery | None, dict[str, Sequence[Any]]]:
        """The query for arguments of this shape, and its sets by column.

        `None` when sets from `fold` rows on have shapes enough already: each has its plan.
        """
        cells, shape = _columns(statement.rows, fold)
        params = statement.params
        given = tuple([name for name in params if params[name] is not None])
        literals = tuple(statement.literals.items())
        key = (statement.query, given, literals, shape)
        compiled = self._means.compiled.get(key)
        if compiled is None:
            if fold is not math.inf:
                self._means.shapes[statement.query] += 1
                if self._means.shapes[statement.query] > _SHAPES:
                    return None, {}
            query = sql.load(sql.POSTGRES)[statement.query]
            known = frozenset(given) | frozenset(statement.literals)
            settled = sql.variant(query, known, literals, set(cells))
            same = _NONE_SAME.union(*(each for _, each in shape))
            compiled = sql.for_postgres(settled, same)
            sql.keep(self._means.compiled, key, compiled)
        return compiled, cells


def _opening(session: Session, tenant: UUID | None) -> str:
    """What each transaction of a store begins with; empty: as the driver begins one."""
    return session.opening if tenant is None else sessions.within(session.opening, tenant)


class _Transaction:
    """A transaction that begins with settings of its own, among them whose it is."""

    def __init__(self, connection: Any, opening: str) -> None:
        self._connection = connection
        self._opening = opening

    async def __aenter__(self) -> None:
        await self._connection.execute(self._opening)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            await self._connection.execute("commit")
        elif not isinstance(error, CUT) and isinstance(error, Exception):
            await self._connection.execute("rollback")


class _PooledConnection:
    """A connection; whatever says that the database is gone becomes `Unavailable`."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._connection: Any = None

    async def __aenter__(self) -> Any:
        try:
            self._connection = self._pool.idle() or await self._pool.take(_PATIENCE_S)
        except Exception as error:
            if (said := meant(error)) is not error:
                raise said from error
            raise
        return self._connection

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self._pool.trust()
            self._pool.release(self._connection, broken=False)
            return
        if isinstance(error, LEAVING):
            self._pool.give_up()
        # After a cut, and when somebody gave up, nobody knows what the connection will say next.
        broken = isinstance(error, CUT) or not isinstance(error, Exception)
        self._pool.release(self._connection, broken=broken)
        if isinstance(error, Exception) and (said := meant(error)) is not error:
            raise said from error


_NONE_SAME: sql.Same = frozenset()


@cache
def _all_same(name: str, width: int) -> sql.Same:
    return frozenset((name, index) for index in range(width))


def _columns(
    rows: Mapping[str, Sequence[tuple[Any, ...]]], fold: float
) -> tuple[dict[str, Sequence[Any]], tuple[tuple[str, sql.Same], ...]]:
    """Each set that is not empty by column, and its columns that are plain values.

    Those are all columns of a single row, and of `fold` rows or more those that all of them share.
    """
    cells: dict[str, Sequence[Any]] = {}
    shape = []
    for name, each in rows.items():
        if not each:
            continue
        if len(each) == 1:
            cells[name] = each[0]
            shape.append((name, _all_same(name, len(each[0]))))
            continue
        columns: list[Any] = list(zip(*each, strict=True))
        cells[name] = columns
        if len(each) < fold:
            shape.append((name, _NONE_SAME))
            continue
        same = set()
        for index, column in enumerate(columns):
            if index and column.count(column[0]) == len(column):
                columns[index] = column[0]
                same.add((name, index))
        shape.append((name, frozenset(same)))
    return cells, tuple(shape)
