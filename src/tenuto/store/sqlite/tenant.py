"""SQLite for one tenant: every statement is restricted to the rows of one workspace.

PostgreSQL separates tenants by a role and row policies. SQLite has neither, so here the store
passes `:workspace` with each statement, and the queries compare it with every row of a tenant.
"""

from collections.abc import AsyncIterator, Callable
from functools import cache
from typing import TypeVar
from uuid import UUID

from tenuto.store import sql
from tenuto.store.protocol import Row, SchemaState, Script, Statement, Store

T = TypeVar("T")


@cache
def _workspace_queries() -> frozenset[str]:
    """Returns the names of the queries that have a workspace parameter."""
    return frozenset(
        name for name, query in sql.load(sql.SQLITE).items() if "workspace" in query.params
    )


class SqliteTenant:
    """A `SqliteStore` restricted to one workspace."""

    def __init__(self, store: Store, workspace: UUID) -> None:
        self._store = store
        self._workspace = workspace
        self._workspace_queries = _workspace_queries()
        self.writers = store.writers
        self.mixes = store.mixes
        self.clock = store.clock

    def for_workspace(self, workspace: UUID) -> Store:
        assert workspace == self._workspace, "a tenant's store serves one workspace only"
        return self

    def for_maintenance(self) -> Store:
        raise AssertionError("only the system runs maintenance")

    async def open(self) -> None:
        await self._store.open()

    async def close(self) -> None:
        """Does nothing: the caller that opened the whole store closes it."""

    async def migrate(self) -> list[int]:
        return await self._store.migrate()

    async def schema(self) -> SchemaState:
        return await self._store.schema()

    async def describe(self) -> dict[str, str]:
        return await self._store.describe()

    async def fetch(self, statement: Statement) -> list[Row]:
        return await self._store.fetch(self._bind(statement))

    async def transact(self, script: Callable[[], Script[T]]) -> T:
        return await self._store.transact(lambda: self._bind_script(script()))

    async def transact_one(self, script: Callable[[], Script[T]]) -> T:
        return await self._store.transact_one(lambda: self._bind_script(script()))

    async def stream(self, statements: AsyncIterator[Statement]) -> None:
        await self._store.stream(self._bind(statement) async for statement in statements)

    def _bind(self, statement: Statement) -> Statement:
        """Returns the statement with the workspace, if its query has that parameter."""
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
