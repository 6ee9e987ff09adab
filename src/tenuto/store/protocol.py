"""What the engine asks of a store.

A `Statement` names a query of `queries/` with its arguments. A `Script` is a transaction whose
statements depend on each other's answers: a generator that yields statements, is sent their rows,
and returns its result. It does no I/O itself, so the same script runs on a writer thread, over a
network connection or inline in the simulator, and may be run again after a deadlock.
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
    """The schema a database has, and the oldest program knowledge that can live with it."""

    schema: int
    compat: int


class Store(Protocol):
    """The only truth. Every method raises `Unavailable` when the database does not answer."""

    writers: int
    """How many transactions can usefully be under way at once."""

    mixes: bool
    """Whether different kinds of writes should share a transaction."""

    clock: Clock
    """The clock that rules in this store."""

    def within(self, workspace: UUID) -> "Store":
        """The store for one tenant: where the database has roles, it sees that workspace alone.

        Closed with this one.
        """

    def unhurried(self) -> "Store":
        """The same store for maintenance that reads or writes whole tables: it waits for minutes.

        Closed with this one.
        """

    async def open(self) -> None:
        """Connect; raises `Incompatible` unless the schema fits this program."""

    async def close(self) -> None:
        """Let everything go."""

    async def migrate(self) -> list[int]:
        """Bring the schema up to date; answers the numbers applied. Safe in many processes."""

    async def schema(self) -> SchemaState:
        """The schema as it is; zeros for an empty database."""

    async def describe(self) -> dict[str, str]:
        """What an operator wants to know: version, durability, where it is."""

    async def fetch(self, statement: Statement) -> list[Row]:
        """Read in a snapshot of its own."""

    async def transact(self, script: Callable[[], Script[T]]) -> T:
        """Run a script in one transaction, durable when this returns."""

    async def once(self, script: Callable[[], Script[T]]) -> T:
        """The same for a script of exactly one statement, which is a transaction by itself."""

    async def stream(self, statements: AsyncIterator[Statement]) -> None:
        """Run statements that ask nothing in one transaction, each as soon as it is there.

        Where the database works beside us, the next one is made while it runs the last.
        """


async def gathered(statements: AsyncIterator[Statement]) -> Callable[[], Script[None]]:
    """Statements that ask nothing, as a script."""
    made = [statement async for statement in statements]

    def script() -> Script[None]:
        for statement in made:
            _ = yield statement

    return script
