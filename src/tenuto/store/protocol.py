"""The interface of a store.

A `Statement` names a query of `queries/` with its arguments. A `Script` is a transaction whose
statements depend on each other's answers: a generator that yields statements, receives their rows,
and returns its result. It does no I/O itself, so the same script runs on a writer thread, over a
network connection or inline in the simulator, and can be run again after a deadlock.
"""

from collections.abc import AsyncIterator, Callable, Generator, Mapping, Sequence
from typing import Any, Protocol, TypeVar
from uuid import UUID

import msgspec

from tenuto.clock import Clock

Row = Mapping[str, Any]
Rows = Sequence[Row]
T = TypeVar("T")


class Statement(msgspec.Struct, frozen=True):
    """One named query with its arguments."""

    query: str
    params: dict[str, Any] = {}
    rows: Mapping[str, Sequence[tuple[Any, ...]]] = {}
    literals: dict[str, tuple[str, ...]] = {}


Script = Generator[Statement, Rows, T]


class SchemaState(msgspec.Struct, frozen=True):
    """The schema number of a database, and the lowest `compat` that a program must support."""

    schema: int
    compat: int


class Store(Protocol):
    """A database. Every method raises `Unavailable` when the database does not answer."""

    writers: int
    """How many transactions can usefully run at the same time."""

    mixes: bool
    """True if different kinds of writes should share a transaction."""

    clock: Clock
    """The clock whose time is written to this store."""

    def for_workspace(self, workspace: UUID) -> "Store":
        """Returns a store that sees this workspace only; it is closed together with this store."""

    def for_maintenance(self) -> "Store":
        """Returns a store with timeouts of minutes, which is closed together with this store."""

    async def open(self) -> None:
        """Connects; raises `Incompatible` unless the schema fits this program."""

    async def close(self) -> None:
        """Closes all connections."""

    async def migrate(self) -> list[int]:
        """Applies missing migrations; returns their numbers. Many processes may do it at once."""

    async def schema(self) -> SchemaState:
        """Returns the present schema state; zeros for an empty database."""

    async def describe(self) -> dict[str, str]:
        """Returns version, durability settings and location, for operators."""

    async def fetch(self, statement: Statement) -> list[Row]:
        """Runs one read in its own snapshot; returns its rows."""

    async def transact(self, script: Callable[[], Script[T]]) -> T:
        """Runs a script as a transaction, again after deadlock; returns its result once durable."""

    async def transact_one(self, script: Callable[[], Script[T]]) -> T:
        """Runs a script of exactly one statement, a transaction by itself; returns its result."""

    async def stream(self, statements: AsyncIterator[Statement]) -> None:
        """Runs statements without results in one transaction; SQLite collects them all first.

        With a database server, the next statement is built while the server runs the previous one.
        """


async def collect_script(statements: AsyncIterator[Statement]) -> Callable[[], Script[None]]:
    """Collects statements without results; returns them as a script."""
    collected = [statement async for statement in statements]

    def script() -> Script[None]:
        for statement in collected:
            _ = yield statement

    return script
