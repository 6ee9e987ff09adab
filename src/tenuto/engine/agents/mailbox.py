"""Mailboxes: what is said to an agent waits there until the agent takes it. Never work itself."""

from collections.abc import Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

import msgspec

from tenuto.engine.core import Core
from tenuto.engine.rows import decode
from tenuto.model import bounds
from tenuto.model.agents.lifecycle import refusal
from tenuto.model.agents.messages import MOST_WAITING, NewMessage, body_text, message_row
from tenuto.model.errors import Conflict, NotFound
from tenuto.store.protocol import Row, Rows, Script, Statement

MOST_TAKEN = 500


class Message(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Something said to an agent. It waits while `taken_at` is none."""

    id: UUID
    agent_id: UUID
    kind: str
    body: Any
    scope_key: str | None
    coalescable: bool
    client_message_id: str | None
    task_id: UUID | None
    attempt: int | None
    sender: str | None
    created_at: datetime
    taken_at: datetime | None
    batch_id: UUID | None
    replaced: bool


class MessagePage(msgspec.Struct, frozen=True, rename="camel"):
    """Messages, oldest first, and where the next ones begin."""

    messages: list[Message]
    next_cursor: UUID | None = None


class MessageBatch(msgspec.Struct, frozen=True, rename="camel"):
    """What an agent took at once, oldest first; asked for again by its id, it is the same."""

    batch_id: UUID
    messages: list[Message]


class Mailboxes:
    """The mailboxes of one workspace's agents, on behalf of one actor."""

    def __init__(self, core: Core, workspace: UUID, actor: str | None) -> None:
        self._core = core
        self._workspace = workspace
        self._actor = actor

    async def send(self, agent: UUID, new: NewMessage) -> Message:
        """Say something to an agent; repeated with the same client id it is one message.

        Nothing is stored of what stands under `secrets` in the body.
        """
        text = body_text(new)
        made, now = self._core.clock.new_id(), self._core.now()

        def script() -> Script[Row]:
            yield from self._open(agent)
            known = yield from self._known(agent, new, text)
            if known is not None:
                return known
            if new.coalescable:
                same = {"kind": new.kind, "scope_key": new.scope_key, "now": now}
                yield Statement("messages_replace", self._of(agent) | same)
            waiting = yield Statement("messages_waiting", self._of(agent) | {"most": MOST_WAITING})
            if waiting[0]["n"] >= MOST_WAITING:
                text_ = f"{MOST_WAITING:,} messages wait for the agent already"
                raise Conflict(text_, "mailbox_full")
            sent = message_row(made, self._workspace, agent, new, text, sender=self._actor)
            yield Statement("messages_add", {"now": now}, {"sent": [sent]})
            return {
                **msgspec.structs.asdict(new),
                **dict.fromkeys(("task", "attempt", "taken_at", "batch_id")),
                "id": made,
                "agent": agent,
                "body": text,
                "sender": self._actor,
                "created_at": now,
                "replaced": False,
            }

        return _message(await self._core.store.transact(script))

    def _open(self, agent: UUID) -> Script[None]:
        """Hold the mailbox: who sends at the same moment takes turns."""
        rows = yield Statement("agent_held", {"workspace": self._workspace, "id": agent})
        if not rows:
            raise NotFound(f"no agent {agent}")
        if rows[0]["status"] == "TERMINATED":
            raise refusal("TERMINATED")

    def _known(self, agent: UUID, new: NewMessage, text: str) -> Script[Row | None]:
        if new.client_message_id is None:
            return None
        named = {"client_message_id": new.client_message_id}
        rows = yield Statement("message_known", self._of(agent) | named)
        if not rows:
            return None
        if rows[0]["kind"] != new.kind or decode(rows[0]["body"]) != decode(text):
            raise Conflict("another message has that clientMessageId", "idempotency_conflict")
        found: Row = rows[0]
        return found

    async def page(
        self, agent: UUID, limit: int = 100, cursor: UUID | None = None, *, waiting: bool = True
    ) -> MessagePage:
        """What waits for an agent, oldest first; or all that is kept, taken or not."""
        bounds.number("limit", limit, 1, bounds.MAX_PAGE)
        await self._exists(agent)
        wanted = {"after": cursor, "most": limit, "waiting": waiting or None}
        rows = await self._core.store.fetch(Statement("message_page", self._of(agent) | wanted))
        found = [_message(row) for row in rows]
        return MessagePage(found, found[-1].id if len(found) == limit else None)

    async def take(self, agent: UUID, limit: int = 100, batch: UUID | None = None) -> MessageBatch:
        """Take the oldest messages out of the mailbox, each once.

        A caller that may not hear the answer names the batch, and is told the same again.
        """
        bounds.number("limit", limit, 1, MOST_TAKEN)
        mine = batch or self._core.clock.new_id()
        now = self._core.now()
        taken = self._of(agent) | {"batch": mine}

        def script() -> Script[Rows]:
            yield from self._open(agent)
            rows: Rows = []
            if batch is not None:
                rows = yield Statement("messages_of_batch", taken)
            if not rows:
                yield Statement("messages_take", taken | {"most": limit, "now": now})
                rows = yield Statement("messages_of_batch", taken)
            return rows

        rows = await self._core.store.transact(script)
        return MessageBatch(mine, [_message(row) for row in rows])

    async def waiting(self, names: Sequence[str]) -> int:
        """How many messages wait for the agents of these names together."""
        if not names:
            return 0
        params = {"workspace": self._workspace, "names": list(names), "most": MOST_WAITING}
        rows = await self._core.store.fetch(Statement("messages_for", params))
        n: int = rows[0]["n"]
        return n

    async def _exists(self, agent: UUID) -> None:
        params = {"workspace": self._workspace, "id": agent}
        if not await self._core.store.fetch(Statement("agent", params)):
            raise NotFound(f"no agent {agent}")

    def _of(self, agent: UUID) -> dict[str, Any]:
        return {"workspace": self._workspace, "agent": agent}


def _message(row: Row) -> Message:
    same = ("id", "kind", "scope_key", "client_message_id", "attempt", "sender", "created_at")
    return Message(
        **{name: row[name] for name in same},
        agent_id=row["agent"],
        task_id=row["task"],
        body=decode(row["body"]),
        coalescable=bool(row["coalescable"]),
        taken_at=row["taken_at"],
        batch_id=row["batch_id"],
        replaced=bool(row["replaced"]),
    )
