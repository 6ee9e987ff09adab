"""What is left of a database under faults: read by a checker that trusts nothing else."""

from typing import Any
from uuid import UUID

import msgspec

from tenuto.engine.core import Core
from tenuto.store.protocol import Row, Statement

PAGE = 2000


class TaskAuditRow(msgspec.Struct, frozen=True):
    """A task as it was left, and what its end says."""

    id: UUID
    status: str
    attempt: int
    tries: int
    max_attempts: int
    leased: bool
    key: str | None
    output: Any
    completed: int
    """How many of its attempts were accepted as completed."""
    completed_by: int | None
    """The number of the last of them."""


class AuditReader:
    """Reads what must hold when faults are over."""

    def __init__(self, core: Core) -> None:
        self._core = core

    async def tasks(self) -> list[TaskAuditRow]:
        """Every task there is."""
        found: list[TaskAuditRow] = []
        after = UUID(int=0)
        while rows := await self._rows("proof_tasks", after=after, most=PAGE):
            found += [_remains(row) for row in rows]
            after = found[-1].id
        return found

    async def moves(self) -> dict[tuple[str, str], int]:
        """How often tasks went from one status to another."""
        rows = await self._rows("proof_moves")
        return {(row["previous"], row["new"]): row["n"] for row in rows}

    async def stalls(self) -> int:
        """How many attempts lost their lease."""
        return int((await self._rows("proof_stalls"))[0]["n"])

    async def open(self) -> int:
        """How many tasks have not ended."""
        return int((await self._rows("proof_open"))[0]["n"])

    async def untold(self, subscriber: str, *, errors: bool = False) -> int:
        """Whether there are events that a subscriber was not told."""
        found = await self._rows("cursor_place", name=subscriber)
        here = found[0] if found else {"xid": 0, "position": 0}
        params = {"xid": here["xid"], "position": here["position"], "most": 1}
        return len(await self._rows("events_after", **params, errors=errors or None))

    async def _rows(self, query: str, **params: Any) -> list[Row]:
        return await self._core.store.fetch(Statement(query, params))


def _remains(row: Row) -> TaskAuditRow:
    output = row["output"]
    return TaskAuditRow(
        id=row["id"],
        status=row["status"],
        attempt=row["attempt"],
        tries=row["tries"],
        max_attempts=row["max_attempts"],
        leased=row["lease_until"] is not None,
        key=row["key"],
        output=None if output is None else msgspec.json.decode(output),
        completed=row["completed"],
        completed_by=row["completed_by"],
    )
