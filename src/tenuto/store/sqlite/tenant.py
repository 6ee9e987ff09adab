"""SQLite for one tenant: every statement says whose rows it may see and change.

PostgreSQL keeps tenants apart by a role and row policies. SQLite has neither, so here the store
gives `:workspace` with each statement, and the queries compare it with every row of a tenant.
"""

from collections.abc import AsyncIterator, Callable
from functools import cache
from typing import TypeVar
from uuid import UUID

from tenuto.store import sql
from tenuto.store.protocol import Row, SchemaState, Script, Statement, Store

T = TypeVar("T")


@cache
def _asking() -> frozenset[str]:
    """The queries that take a workspace."""
    return frozenset(
        name for name, query in sql.load(sql.SQLITE).items() if "workspace" in query.params
    )


class SqliteTenant:
    """A `SqliteStore` as one workspace sees it."""

    def __init__(self, store: Store, workspace: UUID) -> None:
        self._store = store
        self._workspace = workspace
        self._asking = _asking()
        self.writers = store.writers
        self.mixes = store.mixes
        self.clock = store.clock

    def within(self, workspace: UUID) -> Store:
        assert workspace == self._workspace, "a tenant's store is nobody else's"
        return self

    def unhurried(self) -> Store:
        raise AssertionError("maintenance is the system's")

    async def open(self) -> None:
        await self._store.open()

    async def close(self) -> None:
        """The whole store is closed by whoever opened it."""

    async def migrate(self) -> list[int]:
        return await self._store.migrate()

    async def schema(self) -> SchemaState:
        return await self._store.schema()

    async def describe(self) -> dict[str, str]:
        return await self._store.describe()

    async def fetch(self, statement: Statement) -> list[Row]:
        return await self._store.fetch(self._own(statement))

    async def transact(self, script: Callable[[], Script[T]]) -> T:
        return await self._store.transact(lambda: self._owned(script()))

    async def once(self, script: Callable[[], Script[T]]) -> T:
        return await self._store.once(lambda: self._owned(script()))

    async def stream(self, statements: AsyncIterator[Statement]) -> None:
        await self._store.stream(self._own(each) async for each in statements)

    def _own(self, statement: Statement) -> Statement:
        """The statement with the workspace, where its query takes one."""
        if statement.query not in self._asking:
            return statement
        given = statement.params.get("workspace")
        if given is not None:
            assert given == self._workspace, f"{statement.query} asks for another workspace"
            return statement
        params = statement.params | {"workspace": self._workspace}
        return Statement(statement.query, params, statement.rows, statement.literals)

    def _owned(self, script: Script[T]) -> Script[T]:
        """The script with each of its statements bound to the workspace."""
        try:
            statement = next(script)
            while True:
                statement = script.send((yield self._own(statement)))
        except StopIteration as stop:
            result: T = stop.value
            return result
