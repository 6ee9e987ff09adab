"""Reads the final state of a database after injected faults, for consistency checks."""

from typing import Any
from uuid import UUID

import msgspec

from tenuto.engine.core import Core
from tenuto.store.protocol import Row, Statement

PAGE_SIZE = 2000


class TaskAuditRow(msgspec.Struct, frozen=True):
    """A task's final state, and its accepted completions."""

    id: UUID
    status: str
    attempt: int
    tries: int
    max_attempts: int
    leased: bool
    key: str | None
    output: Any
    completed: int
    """Attempts whose completion was accepted; more than one is an error."""
    completed_by: int | None
    """The number of the last attempt whose completion was accepted."""


class AuditReader:
    """Reads what consistency checks compare after injected faults, in all workspaces."""

    def __init__(self, core: Core) -> None:
        self._core = core

    async def tasks(self) -> list[TaskAuditRow]:
        """Returns all tasks of the database, by id."""
        tasks: list[TaskAuditRow] = []
        after = UUID(int=0)
        while rows := await self._rows("audit_tasks", after=after, most=PAGE_SIZE):
            tasks += [_task_row(row) for row in rows]
            after = tasks[-1].id
        return tasks

    async def count_transitions(self) -> dict[tuple[str, str], int]:
        """Returns how often tasks changed from one status to another, by these two statuses."""
        rows = await self._rows("audit_transitions")
        return {(row["previous"], row["new"]): row["n"] for row in rows}

    async def count_lost_leases(self) -> int:
        """Returns how many attempts lost their lease."""
        return int((await self._rows("audit_lost_leases"))[0]["n"])

    async def count_unfinished(self) -> int:
        """Returns how many tasks are unfinished."""
        return int((await self._rows("audit_unfinished"))[0]["n"])

    async def count_unread(self, subscriber: str, *, errors: bool = False) -> int:
        """Returns 1 if a subscriber has unread events, otherwise 0; `errors`: only ERROR events."""
        cursors = await self._rows("cursor_position", name=subscriber)
        cursor = cursors[0] if cursors else {"xid": 0, "position": 0}
        params = {"xid": cursor["xid"], "position": cursor["position"], "most": 1}
        return len(await self._rows("events_after", **params, errors=errors or None))

    async def _rows(self, query: str, **params: Any) -> list[Row]:
        """Runs a query; returns its rows."""
        return await self._core.store.fetch(Statement(query, params))


def _task_row(row: Row) -> TaskAuditRow:
    """Returns the audit row of a task from a row of the database."""
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
