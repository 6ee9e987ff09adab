"""The inbox: what waits for a person, and the answers."""

from datetime import datetime
from typing import Any
from uuid import UUID

import msgspec

from tenuto.engine.cascade import Cascade
from tenuto.engine.core import Core
from tenuto.engine.rows import decode
from tenuto.model import commands, limits
from tenuto.model.commands import Command
from tenuto.model.errors import Conflict, NotFound
from tenuto.model.task import Status, Task
from tenuto.store.protocol import Row, Script, Statement


def _rename(name: str) -> str:
    first, *rest = name.split("_")
    return "taskId" if name == "task" else first + "".join(part.capitalize() for part in rest)


class InboxItem(msgspec.Struct, frozen=True, kw_only=True, rename=_rename):
    """Something that a person was asked."""

    id: UUID
    task: UUID | None
    kind: str
    title: str
    body: Any
    status: str
    decision: Any
    decided_by: str | None
    decided_at: datetime | None
    expires_at: datetime | None
    created_at: datetime


class Inbox:
    """The inbox of one workspace, on behalf of one actor."""

    def __init__(self, core: Core, workspace: UUID, actor: str | None) -> None:
        self._core = core
        self._workspace = workspace
        self._actor = actor

    async def list(
        self, status: str | None = "OPEN", limit: int = 100, cursor: UUID | None = None
    ) -> list[InboxItem]:
        """Items newest first; with no status, those that were answered as well."""
        limits.number("limit", limit, 1, limits.MAX_PAGE)
        params = {
            "workspace": self._workspace,
            "status": status,
            "before": cursor,
            "most": limit,
        }
        rows = await self._core.store.fetch(Statement("inbox_page", params))
        return [_item(row) for row in rows]

    async def show(self, item: UUID) -> InboxItem:
        """One item."""
        params = {"id": item, "workspace": self._workspace}
        rows = await self._core.store.fetch(Statement("inbox_item", params))
        if not rows:
            raise NotFound(f"no inbox item {item}")
        return _item(rows[0])

    async def answer(self, item: UUID, *, approve: bool, comment: str | None = None) -> None:
        """Approve or reject; the first answer counts, and the task goes on by it."""
        limits.text("comment", comment or "", limits.MAX_TEXT)
        said = {
            "decision": "approved" if approve else "rejected",
            "by": self._actor,
            "comment": comment,
            "at": self._core.now(),
        }
        text = msgspec.json.encode(said).decode()

        def script(cascade: Cascade) -> Script[None]:
            rows = yield Statement("inbox_locked", {"id": item, "workspace": self._workspace})
            if not rows:
                raise NotFound(f"no inbox item {item}")
            if rows[0]["status"] != "OPEN":
                raise Conflict(f"the item is {rows[0]['status']} already")
            if rows[0]["kind"] != "approval":
                raise Conflict(f"an item of kind {rows[0]['kind']} is not approved or rejected")
            changed = yield from cascade.each(
                [rows[0]["task"]], lambda task: _verdict(task, text, approve=approve)
            )
            if not changed:
                raise Conflict("the task no longer waits for an answer")
            yield self._decided(item, "APPROVED" if approve else "REJECTED", text)

        await self._core.flowing(script, self._actor)

    async def dismiss(self, item: UUID, comment: str) -> None:
        """Answer an item that is no approval: somebody has seen to it."""
        limits.text("comment", comment, limits.MAX_TEXT)
        text = msgspec.json.encode({"comment": comment, "by": self._actor}).decode()

        def script(cascade: Cascade) -> Script[None]:
            del cascade
            rows = yield Statement("inbox_locked", {"id": item, "workspace": self._workspace})
            if not rows:
                raise NotFound(f"no inbox item {item}")
            if rows[0]["status"] != "OPEN" or rows[0]["kind"] == "approval":
                raise Conflict(f"the item is {rows[0]['status']}, of kind {rows[0]['kind']}")
            yield self._decided(item, "ANSWERED", text)

        await self._core.flowing(script, self._actor)

    def _decided(self, item: UUID, status: str, text: str) -> Statement:
        params = {
            "id": item,
            "status": status,
            "decision": text,
            "actor": self._actor,
            "now": self._core.now(),
        }
        return Statement("inbox_decide", params)


def _item(row: Row) -> InboxItem:
    fields = {name: row[name] for name in InboxItem.__struct_fields__}
    return InboxItem(**fields | {"body": decode(row["body"]), "decision": decode(row["decision"])})


def _verdict(task: Task, text: str, *, approve: bool) -> Command | None:
    if task.hold is None or not task.hold.startswith("approval"):
        return None
    if approve:
        return commands.Decide(status=Status.COMPLETED, output=text)
    if task.hold.endswith(":skip"):
        return commands.Decide(status=Status.SKIPPED, message="rejected", output=text)
    return commands.Decide(status=Status.FAILED, message="rejected", code="rejected", output=text)
