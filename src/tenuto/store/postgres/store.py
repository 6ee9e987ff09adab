"""The PostgreSQL store: every query is one statement, every batch one round trip."""

import asyncio
import math
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from functools import cache, cached_property
from types import TracebackType
from typing import Any, TypeVar
from uuid import UUID

from tenuto.clock import Clock
from tenuto.model.errors import Incompatible, Invalid, Unavailable
from tenuto.store import schema, sql
from tenuto.store.dialects import POSTGRES
from tenuto.store.postgres import errors, sessions
from tenuto.store.postgres.clock import DatabaseClock
from tenuto.store.postgres.connector import Connector
from tenuto.store.postgres.pool import Pool
from tenuto.store.postgres.pooler import Pooler, check_pooler
from tenuto.store.postgres.roles import IDENTITY_QUERY, SYSTEM, TENANT, Identity, role_error
from tenuto.store.postgres.sessions import (
    APPLICATION,
    DIRECT_SETTINGS,
    MAINTENANCE_S,
    MIGRATION_S,
    STATEMENT_S,
    Session,
    Use,
    statement_timeout,
)
from tenuto.store.protocol import Row, SchemaState, Script, Statement

T = TypeVar("T")

_MIGRATION_LOCK = 0x74656E75746F
_RERUNS = 10
_READERS = 2
_ACQUIRE_S = 10.0
_NO_WORKSPACE = UUID(int=0)
"""A workspace that does not exist."""
_FOLD_FROM = 64
"""Sets with this many rows send a value that all rows share only once: arrays cost per element."""
_MAX_SHAPES = 32


class _ConnectionSet:
    """The connections of one role, and the statements rendered for them."""

    def __init__(
        self,
        connector: Connector,
        writers: int,
        session_for: Callable[[Use], Session],
        timeout_s: float,
        *,
        repeatable: bool,
    ) -> None:
        self.connector = connector
        self.writing, self.reading = session_for("write"), session_for("read")
        self.write = _new_pool(connector, writers, self.writing, timeout_s, repeatable=repeatable)
        self.streams = asyncio.Semaphore(max(1, writers - 1))
        """Limits streams: building their statements may need a connection, so one is left."""
        self.read = _new_pool(connector, _READERS, self.reading, timeout_s, repeatable=repeatable)
        self.compiled: dict[Any, sql.PostgresQuery] = {}
        self.shapes: Counter[str] = Counter()

    @property
    def pools(self) -> tuple[Pool, Pool]:
        """The pools for writes and for reads."""
        return self.write, self.read


def _new_pool(
    connector: Connector, size: int, session: Session, timeout_s: float, *, repeatable: bool
) -> Pool:
    """Returns a pool whose new connections are checked for the session's role and workspace."""

    async def check_role(connection: Any) -> None:
        """Raises `Incompatible` if the connection has a wrong role or workspace."""
        identity = await _read_identity(connection, session)
        if (error := role_error(identity, session.role, session.workspace)) is not None:
            raise Incompatible(error, "wrong_role")

    return Pool(connector, size, session.parameters, timeout_s, check_role, repeatable=repeatable)


async def _read_identity(connection: Any, session: Session) -> Identity:
    """Queries the role, workspace and rights of a connection."""
    if not session.opening:
        return Identity(**await connection.fetchrow(IDENTITY_QUERY))
    async with _Transaction(connection, session.opening):
        return Identity(**await connection.fetchrow(IDENTITY_QUERY))


class PostgresStore:
    """A store in a PostgreSQL database, in the role of the system: it sees every workspace.

    `for_workspace` returns the same store in the role of a tenant, with its own connections. With
    `share_connections` or a `pooler`, tenants share connections; every transaction sets its tenant.
    """

    mixes = False

    def __init__(
        self,
        url: str,
        clock: Clock | None = None,
        writers: int = 4,
        *,
        share_connections: bool = False,
        pooler: Pooler | None = None,
        connections: _ConnectionSet | None = None,
        tenant: UUID | None = None,
    ) -> None:
        self.url = url
        self.writers = writers
        self.clock = clock or DatabaseClock()
        self._database_clock = self.clock if isinstance(self.clock, DatabaseClock) else None
        self._shares_connections = share_connections
        self._pooler = pooler
        self._is_system = connections is None
        self._connections = connections or self._create_connections(Connector(url), writers, SYSTEM)
        self._write_opening = _opening_for(self._connections.writing, tenant)
        self._read_opening = _opening_for(self._connections.reading, tenant)
        self._tenants: dict[UUID | None, _ConnectionSet] = {}
        self._owner: Pool | None = None
        self._maintenance: _ConnectionSet | None = None

    def _create_connections(
        self,
        connector: Connector,
        writers: int,
        role: str,
        workspace: UUID | None = None,
        timeout_s: float | None = None,
    ) -> _ConnectionSet:
        """Returns empty pools for a role; with `timeout_s`, for repeatable statements."""
        limit_s = timeout_s or STATEMENT_S

        def session_for(use: Use) -> Session:
            if self._pooler is not None:
                return sessions.pooled_session(role, use, limit_s)
            return sessions.direct_session(role, workspace, use, limit_s)

        repeatable = timeout_s is not None
        return _ConnectionSet(connector, writers, session_for, limit_s, repeatable=repeatable)

    @property
    def connector(self) -> Connector:
        """The connector to the present primary."""
        return self._connections.connector

    @cached_property
    def direct(self) -> Connector | None:
        """The connector that bypasses a pooler, for hints and migrations, or `None`."""
        if self._pooler is None:
            return self.connector
        return Connector(self._pooler.direct, self.connector) if self._pooler.direct else None

    @cached_property
    def _runtime(self) -> Connector:
        """The connector for tenants."""
        if self._pooler is None:
            return self.connector
        return Connector(self._pooler.runtime, self.connector)

    def for_workspace(self, workspace: UUID) -> "PostgresStore":
        """Returns a store for this workspace; it may share connections, which this store closes."""
        assert self._is_system, "a tenant's store serves one workspace only"
        shared = self._shares_connections or self._pooler is not None
        key = None if shared else workspace
        if key not in self._tenants:
            self._tenants[key] = self._create_connections(self._runtime, self.writers, TENANT, key)
        return PostgresStore(
            self.url,
            self.clock,
            self.writers,
            connections=self._tenants[key],
            tenant=workspace if shared else None,
        )

    def for_maintenance(self) -> "PostgresStore":
        """Returns a store with one connection and a long time limit, for repeatable work."""
        assert self._is_system, "only the system runs maintenance"
        if self._maintenance is None:
            self._maintenance = self._create_connections(
                self.connector, 1, SYSTEM, timeout_s=MAINTENANCE_S
            )
        return PostgresStore(self.url, self.clock, 1, connections=self._maintenance)

    async def identity(self) -> Identity:
        """Queries the role, workspace and rights of the store's connections."""
        async with self._connection(read=True) as connection:
            return await _read_identity(connection, self._connections.reading)

    async def open(self) -> None:
        """Connects, and checks the schema, the pooler and the roles; raises `Incompatible`."""
        state = await self.schema()
        schema.check_fit(state.schema, state.compat)
        if self._pooler is not None:
            for connector in (self.connector, self._runtime):
                await check_pooler(connector)
        # A connection with a wrong role is refused when it is created: now, not at first use.
        async with self._connection(read=True):
            pass
        if self._shares_connections or self._pooler is not None:
            tenant = self.for_workspace(_NO_WORKSPACE)
            async with tenant._connection(read=True):  # noqa: SLF001  same class
                pass
        if self._pooler is not None:
            await self._check_one_database()
        await self.sync_clock()

    async def _check_one_database(self) -> None:
        """Raises `Incompatible` if the addresses in the settings lead to different databases."""
        tenants = self.for_workspace(_NO_WORKSPACE)._connections.read  # noqa: SLF001  same class
        pools = {"database": self._connections.read, "database_runtime": tenants}
        if self.direct is not None and self._owner is not None:
            pools["database_direct"] = self._owner
        marks = {}
        for name, pool in pools.items():
            async with _PooledConnection(pool) as connection:
                marks[name] = tuple(await connection.fetchrow(schema.FINGERPRINT_QUERY))
        for name, mark in marks.items():
            if mark != marks["database"]:
                raise Incompatible(
                    f"{name} leads to database {mark[0]}, which is not the database"
                    f" {marks['database'][0]} of the setting database; use one database only",
                    "wrong_database",
                )

    async def close(self) -> None:
        """Closes all connections, also those of tenants' stores."""
        # All at once: a server that hangs would delay each of them.
        sets = (self._connections, *self._tenants.values(), *filter(None, [self._maintenance]))
        pools = [pool for connections in sets for pool in connections.pools]
        await asyncio.gather(*(pool.close() for pool in filter(None, [self._owner, *pools])))

    async def sync_clock(self) -> None:
        """Reads the database's clock if that is used and the last reading is over 15 s old."""
        clock = self._database_clock
        if clock is not None and clock.is_stale():
            async with self._connection(read=True) as connection:
                before = clock.elapsed()
                now = await connection.fetchval("select clock_timestamp()")
                clock.store_reading(now, before, clock.elapsed())

    async def migrate(self) -> list[int]:
        """Applies missing migrations, returns their numbers; `Invalid` without a direct address."""
        if self.direct is None:
            raise Invalid(
                "migrations need a connection past the pooler; set database_direct to the address"
                " of the server itself",
                "database_invalid",
            )
        owner = Pool(self.direct, 1, DIRECT_SETTINGS | statement_timeout(MIGRATION_S), MIGRATION_S)
        try:
            return await self._apply_missing_migrations(owner)
        finally:
            await owner.close()

    async def _apply_missing_migrations(self, owner: Pool) -> list[int]:
        """Applies missing migrations under an advisory lock; returns their numbers."""
        async with _PooledConnection(owner) as connection, connection.transaction():
            await connection.execute("select pg_advisory_xact_lock($1)", _MIGRATION_LOCK)
            await connection.execute(schema.MIGRATION_TABLE)
            rows = await connection.fetch("select number from schema_migration")
            done = {row["number"] for row in rows}
            applied = []
            for migration in schema.migrations():
                if migration.number not in done:
                    await self._apply_migration(connection, migration)
                    applied.append(migration.number)
            return applied

    async def _apply_migration(self, connection: Any, migration: schema.Migration) -> None:
        """Records a migration and runs its statements."""
        await connection.execute(
            "insert into schema_migration values ($1, $2, $3, clock_timestamp()::text)",
            migration.number,
            migration.name,
            migration.compat,
        )
        for statement in schema.statements(migration, "postgres"):
            await connection.execute(statement)

    async def schema(self) -> SchemaState:
        """Returns the schema state of the database; zeros before the first migration."""
        if self._owner is None:
            timeout = statement_timeout(STATEMENT_S)
            parameters = APPLICATION if self.direct is None else DIRECT_SETTINGS | timeout
            self._owner = Pool(self.direct or self.connector, 1, parameters)
        async with _PooledConnection(self._owner) as connection:
            if await connection.fetchval("select to_regclass('schema_migration')") is None:
                return SchemaState(0, 0)
            row = await connection.fetchrow(
                "select coalesce(max(number), 0), coalesce(max(compat), 0) from schema_migration"
            )
            return SchemaState(*row)

    async def describe(self) -> dict[str, str]:
        """Returns version, database name, role and durability settings, for diagnostics."""
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
        """Returns the rows of a read; repeats it on a new connection if one was lost."""
        # Idle connections do not survive the server; a read can be repeated on a new one.
        for _ in range(_READERS):
            try:
                return await self._read(statement)
            except Unavailable as error:
                if not isinstance(error.__cause__, errors.CONNECTION_LOST):
                    raise
        return await self._read(statement)

    async def _read(self, statement: Statement) -> list[Row]:
        """Runs one read on a connection of the read pool."""
        async with self._connection(read=True) as connection:
            if not self._read_opening:
                return await self._execute(connection, statement)
            async with _Transaction(connection, self._read_opening):
                return await self._execute(connection, statement)

    async def transact(self, script: Callable[[], Script[T]]) -> T:
        """Runs the script in a transaction and returns its result; repeats it after a deadlock."""
        await self.sync_clock()
        for _ in range(_RERUNS):
            try:
                async with self._connection() as connection, self._transaction(connection):
                    return await self._run_script(connection, script())
            except errors.RETRYABLE:
                continue
        raise Unavailable(f"the database reported a deadlock {_RERUNS} times in a row; try again")

    def _transaction(self, connection: Any) -> Any:
        """Returns a context manager for a write transaction, with the tenant's settings if any."""
        if not self._write_opening:
            return connection.transaction()
        return _Transaction(connection, self._write_opening)

    async def transact_one(self, script: Callable[[], Script[T]]) -> T:
        """Runs a script of one statement, mostly without `begin`; repeats it after a deadlock."""
        if self._write_opening:
            return await self.transact(script)
        if self._database_clock is not None and self._database_clock.is_stale():
            await self.sync_clock()
        for _ in range(_RERUNS):
            try:
                async with self._connection() as connection:
                    return await self._run_script(connection, script())
            except errors.RETRYABLE:
                continue
        raise Unavailable(f"the database reported a deadlock {_RERUNS} times in a row; try again")

    async def stream(self, statements: AsyncIterator[Statement]) -> None:
        """Runs the statements in one transaction, sending each while the next one is built."""
        await self.sync_clock()
        async with self._connections.streams, self._connection() as connection:
            next_call = asyncio.ensure_future(self._next_call(statements))
            try:
                async with self._transaction(connection):
                    # It started, so the server answers: building the statements may connect, too.
                    self._connections.write.mark_healthy()
                    while (call := await next_call) is not None:
                        next_call = asyncio.ensure_future(self._next_call(statements))
                        await connection.fetch(*call)
            finally:
                await asyncio.wait([next_call])
                next_call.exception()  # marks it as retrieved: the first error is raised

    async def _run_script(self, connection: Any, steps: Script[T]) -> T:
        """Runs the script's statements on the connection and returns its result."""
        try:
            statement = next(steps)
            while True:
                statement = steps.send(await self._execute(connection, statement))
        except StopIteration as stop:
            result: T = stop.value
            return result

    def _connection(self, *, read: bool = False) -> "_PooledConnection":
        """Returns a context manager that lends a connection of the write or read pool."""
        return _PooledConnection(self._connections.read if read else self._connections.write)

    async def _next_call(self, statements: AsyncIterator[Statement]) -> list[Any] | None:
        """Returns the driver call of the next statement, `None` after the last."""
        statement = await anext(statements, None)
        return None if statement is None else self._driver_call(statement)

    def _execute(self, connection: Any, statement: Statement) -> Awaitable[list[Row]]:
        """Sends a statement; returns an awaitable of its rows."""
        reply: Awaitable[list[Row]] = connection.fetch(*self._driver_call(statement))
        return reply

    def _driver_call(self, statement: Statement) -> list[Any]:
        """Returns the driver's arguments for a statement: its text, then its values."""
        compiled, columns = self._render(statement, _FOLD_FROM)
        if compiled is None:
            compiled, columns = self._render(statement, math.inf)
        assert compiled is not None
        params = statement.params
        call: list[Any] = [compiled.sql]
        call += [
            params.get(argument) if isinstance(argument, str) else columns[argument[0]][argument[1]]
            for argument in compiled.arguments
        ]
        return call

    def _render(
        self, statement: Statement, fold_from: float
    ) -> tuple[sql.PostgresQuery | None, dict[str, Sequence[Any]]]:
        """Returns the query for arguments of this shape, and its sets by column.

        The query is `None` if it has too many shapes with folded sets: each shape has a plan.
        """
        columns, shape = _by_column(statement.rows, fold_from)
        params = statement.params
        present = tuple([name for name in params if params[name] is not None])
        literals = tuple(statement.literals.items())
        key = (statement.query, present, literals, shape)
        compiled = self._connections.compiled.get(key)
        if compiled is None:
            if fold_from is not math.inf:
                self._connections.shapes[statement.query] += 1
                if self._connections.shapes[statement.query] > _MAX_SHAPES:
                    return None, {}
            query = sql.load(POSTGRES)[statement.query]
            switches = frozenset(present) | frozenset(statement.literals)
            resolved = sql.variant(query, switches, literals, set(columns))
            constant = _NO_CONSTANTS.union(*(set_constant for _, set_constant in shape))
            compiled = sql.for_postgres(resolved, constant)
            sql.cache_put(self._connections.compiled, key, compiled)
        return compiled, columns


def _opening_for(session: Session, tenant: UUID | None) -> str:
    """Returns the statements that start each transaction; empty: the driver's default."""
    return (
        session.opening
        if tenant is None
        else sessions.opening_for_workspace(session.opening, tenant)
    )


class _Transaction:
    """A transaction that starts with its own settings, for example its tenant."""

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
        """Commits; after an error rolls back, unless the connection is unusable."""
        if error is None:
            await self._connection.execute("commit")
        elif not isinstance(error, errors.UNUSABLE) and isinstance(error, Exception):
            await self._connection.execute("rollback")


class _PooledConnection:
    """A connection lent by a pool; errors of the driver become errors of the engine."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._connection: Any = None

    async def __aenter__(self) -> Any:
        """Returns the lent connection, after up to 10 s; maps the driver's errors."""
        try:
            self._connection = self._pool.take_idle() or await self._pool.acquire(_ACQUIRE_S)
        except Exception as error:
            if (mapped := errors.map_driver_error(error)) is not error:
                raise mapped from error
            raise
        return self._connection

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Releases the connection, abandons a leaving server, and maps the driver's errors."""
        if error is None:
            self._pool.mark_healthy()
            self._pool.release(self._connection, broken=False)
            return
        if isinstance(error, errors.SERVER_LEAVING):
            self._pool.abandon_server()
        # After a lost connection or a cancellation, the state of the connection is unknown.
        broken = isinstance(error, errors.UNUSABLE) or not isinstance(error, Exception)
        self._pool.release(self._connection, broken=broken)
        if isinstance(error, Exception) and (mapped := errors.map_driver_error(error)) is not error:
            raise mapped from error


_NO_CONSTANTS: sql.ConstantColumns = frozenset()


@cache
def _all_columns_of(name: str, width: int) -> sql.ConstantColumns:
    """Returns all columns of a set with `width` columns, as `(set, index)`."""
    return frozenset((name, index) for index in range(width))


def _by_column(
    rows: Mapping[str, Sequence[tuple[Any, ...]]], fold_from: float
) -> tuple[dict[str, Sequence[Any]], tuple[tuple[str, sql.ConstantColumns], ...]]:
    """Returns the non-empty sets by column, and which of their columns are single values.

    In a set of one row all columns are single values; from `fold_from` rows on, those columns with
    the same value in all rows.
    """
    by_name: dict[str, Sequence[Any]] = {}
    shape = []
    for name, tuples in rows.items():
        if not tuples:
            continue
        if len(tuples) == 1:
            by_name[name] = tuples[0]
            shape.append((name, _all_columns_of(name, len(tuples[0]))))
            continue
        columns: list[Any] = list(zip(*tuples, strict=True))
        by_name[name] = columns
        if len(tuples) < fold_from:
            shape.append((name, _NO_CONSTANTS))
            continue
        constant = set()
        for index, column in enumerate(columns):
            if index and column.count(column[0]) == len(column):
                columns[index] = column[0]
                constant.add((name, index))
        shape.append((name, frozenset(constant)))
    return by_name, tuple(shape)
