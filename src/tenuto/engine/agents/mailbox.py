"""Mailboxes: messages wait there until their agent dequeues them. Messages never create tasks."""

from collections.abc import Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

import msgspec

from tenuto.engine.core import Core
from tenuto.engine.rows import decode_json
from tenuto.model import bounds
from tenuto.model.agents.lifecycle import claim_refusal
from tenuto.model.agents.messages import MAX_WAITING, NewMessage, message_row, stored_body
from tenuto.model.errors import Conflict, NotFound
from tenuto.store.protocol import Row, Rows, Script, Statement

MAX_DEQUEUED = 500


class Message(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A message to an agent. It is waiting while `taken_at` is `None`."""

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
    """One page of messages, oldest first; `next_cursor` is `None` on the last page."""

    messages: list[Message]
    next_cursor: UUID | None = None


class MessageBatch(msgspec.Struct, frozen=True, rename="camel"):
    """Messages dequeued in one call, oldest first. A repeated call with its id returns the same."""

    batch_id: UUID
    messages: list[Message]


class Mailboxes:
    """The mailboxes of one workspace's agents, on behalf of one actor."""

    def __init__(self, core: Core, workspace: UUID, actor: str | None) -> None:
        self._core = core
        self._workspace = workspace
        self._actor = actor

    async def send(self, agent: UUID, new: NewMessage) -> Message:
        """Stores and returns a message, or returns that of a repeated client id; raises `Conflict`.

        `Conflict`: the mailbox is full, or another message has the client id. Raises `NotFound`,
        and `Forbidden` for a terminated agent. A coalescable message replaces waiting ones of its
        kind and scope. Everything under the key `secrets` of the body is not stored.
        """
        text = stored_body(new)
        message_id, now = self._core.clock.new_id(), self._core.now()

        def script() -> Script[Row]:
            yield from self._lock_mailbox(agent)
            existing = yield from self._find_duplicate(agent, new, text)
            if existing is not None:
                return existing
            if new.coalescable:
                kind_and_scope = {"kind": new.kind, "scope_key": new.scope_key, "now": now}
                yield Statement("messages_replace", self._agent_params(agent) | kind_and_scope)
            waiting = yield Statement(
                "messages_waiting", self._agent_params(agent) | {"most": MAX_WAITING}
            )
            if waiting[0]["n"] >= MAX_WAITING:
                text_ = f"the mailbox of agent {agent} is full: {MAX_WAITING:,} messages wait"
                raise Conflict(f"{text_}; the agent must dequeue messages first", "mailbox_full")
            message = message_row(message_id, self._workspace, agent, new, text, sender=self._actor)
            yield Statement("messages_add", {"now": now}, {"sent": [message]})
            return {
                **msgspec.structs.asdict(new),
                **dict.fromkeys(("task", "attempt", "taken_at", "batch_id")),
                "id": message_id,
                "agent": agent,
                "body": text,
                "sender": self._actor,
                "created_at": now,
                "replaced": False,
            }

        return _message(await self._core.store.transact(script))

    def _lock_mailbox(self, agent: UUID) -> Script[None]:
        """Locks the agent's row; raises `NotFound`, or `Forbidden` if the agent is terminated."""
        rows = yield Statement("agent_locked", {"workspace": self._workspace, "id": agent})
        if not rows:
            raise NotFound(f"no agent {agent}")
        if rows[0]["status"] == "TERMINATED":
            raise claim_refusal("TERMINATED")

    def _find_duplicate(self, agent: UUID, new: NewMessage, text: str) -> Script[Row | None]:
        """Returns the stored message with this client id, or `None`; `Conflict` if it differs."""
        if new.client_message_id is None:
            return None
        client_id = {"client_message_id": new.client_message_id}
        rows = yield Statement("message_by_client_id", self._agent_params(agent) | client_id)
        if not rows:
            return None
        if rows[0]["kind"] != new.kind or decode_json(rows[0]["body"]) != decode_json(text):
            text_ = f"another message has the clientMessageId {new.client_message_id!r}"
            raise Conflict(f"{text_}; choose a new one", "idempotency_conflict")
        existing: Row = rows[0]
        return existing

    async def page(
        self, agent: UUID, limit: int = 100, cursor: UUID | None = None, *, waiting: bool = True
    ) -> MessagePage:
        """Returns the waiting messages (`waiting=False`: all stored), oldest first; `NotFound`."""
        bounds.check_number("limit", limit, 1, bounds.MAX_PAGE)
        await self._require_agent(agent)
        filters = {"after": cursor, "most": limit, "waiting": waiting or None}
        rows = await self._core.store.fetch(
            Statement("message_page", self._agent_params(agent) | filters)
        )
        messages = [_message(row) for row in rows]
        return MessagePage(messages, messages[-1].id if len(messages) == limit else None)

    async def dequeue(
        self, agent: UUID, limit: int = 100, batch: UUID | None = None
    ) -> MessageBatch:
        """Dequeues and returns the oldest messages; a repeated `batch` id only returns them again.

        Raises `NotFound`, or `Forbidden` for a terminated agent.
        """
        bounds.check_number("limit", limit, 1, MAX_DEQUEUED)
        batch_id = batch or self._core.clock.new_id()
        now = self._core.now()
        params = self._agent_params(agent) | {"batch": batch_id}

        def script() -> Script[Rows]:
            yield from self._lock_mailbox(agent)
            rows: Rows = []
            if batch is not None:
                rows = yield Statement("messages_of_batch", params)
            if not rows:
                yield Statement("messages_dequeue", params | {"most": limit, "now": now})
                rows = yield Statement("messages_of_batch", params)
            return rows

        rows = await self._core.store.transact(script)
        return MessageBatch(batch_id, [_message(row) for row in rows])

    async def count_waiting(self, names: Sequence[str]) -> int:
        """Returns how many messages wait for these agents in total, at most `MAX_WAITING`."""
        if not names:
            return 0
        params = {"workspace": self._workspace, "names": list(names), "most": MAX_WAITING}
        rows = await self._core.store.fetch(Statement("messages_waiting_by_name", params))
        waiting: int = rows[0]["n"]
        return waiting

    async def _require_agent(self, agent: UUID) -> None:
        """Raises `NotFound` if the workspace has no such agent."""
        params = {"workspace": self._workspace, "id": agent}
        if not await self._core.store.fetch(Statement("agent", params)):
            raise NotFound(f"no agent {agent}")

    def _agent_params(self, agent: UUID) -> dict[str, Any]:
        """Returns the parameters that select the agent's messages."""
        return {"workspace": self._workspace, "agent": agent}


def _message(row: Row) -> Message:
    """Returns the message in a row."""
    unchanged = ("id", "kind", "scope_key", "client_message_id", "attempt", "sender", "created_at")
    return Message(
        **{name: row[name] for name in unchanged},
        agent_id=row["agent"],
        task_id=row["task"],
        body=decode_json(row["body"]),
        coalescable=bool(row["coalescable"]),
        taken_at=row["taken_at"],
        batch_id=row["batch_id"],
        replaced=bool(row["replaced"]),
    )
