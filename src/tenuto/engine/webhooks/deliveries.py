"""Turns events into webhook messages and records their deliveries, in all workspaces.

A message is sent again until its endpoint accepts it, or the maximum number of attempts is reached.
"""

from collections import defaultdict
from collections.abc import Collection, Sequence
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

import msgspec

from tenuto.clock import Clock
from tenuto.crash_points import crash_point
from tenuto.engine.core import Core
from tenuto.engine.rows import decode_json
from tenuto.engine.tenancy.encryption import require_key_ring
from tenuto.engine.webhooks.endpoints import decrypt_secrets
from tenuto.model import bounds, webhooks
from tenuto.model.errors import TenutoError
from tenuto.model.webhooks import EndpointHealth
from tenuto.store.protocol import Row, Script, Statement

CURSOR = "webhooks"
MAX_BATCH = 500
MAX_PER_ENDPOINT = 8
"""Messages to one endpoint that are leased together: a slow one must not delay the others."""
LEASE_S = 60.0
"""Longer than any sender takes: a message without a recorded result by then is sent again."""
STATUS_GONE = 410


class WebhookEvent(msgspec.Struct, frozen=True, kw_only=True):
    """An event that webhooks can subscribe to. `seq` is the version of the task."""

    event: str
    workspace: UUID
    at: datetime
    task: UUID | None = None
    seq: int | None = None
    previous: str | None = None
    new: str | None = None
    agent: UUID | None = None
    """The agent of an agent event; `None` for events of tasks."""


class _Payload(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """The JSON body of a message, with the fields in this order."""

    event: str
    task_id: UUID | None
    previous_status: str | None
    new_status: str | None
    workspace_id: UUID
    timestamp: datetime
    agent_id: UUID | msgspec.UnsetType = msgspec.UNSET


class DueDelivery(msgspec.Struct, frozen=True, kw_only=True):
    """A message to send now. `attempt` is its fence; `probe`: it tests an endpoint that failed."""

    id: UUID
    webhook: UUID
    url: str
    secrets: list[str]
    body: bytes
    attempt: int
    probe: bool

    def __repr__(self) -> str:
        return f"DueDelivery({self.id})"  # keeps the secrets out of logs


class Deliveries:
    """Creates webhook messages and leases due ones to senders. Several processes can run it."""

    def __init__(self, core: Core) -> None:
        self._core = core

    @property
    def clock(self) -> Clock:
        return self._core.clock

    async def fan_out_once(self, limit: int = MAX_BATCH) -> int:
        """Creates messages for the next events; returns how many it read. No webhook: skips all."""
        unread = await self._core.store.fetch(Statement("fan_out_ahead", {"name": CURSOR}))
        if not unread:
            return 0
        if unread[0]["wanted"]:
            return await self._core.store.transact(lambda: self._fan_out(limit))

        def skip() -> Script[int]:
            yield Statement("fan_out_skip", {"name": CURSOR, "now": self._core.now()})
            return 0

        return await self._core.store.transact_one(skip)

    def _fan_out(self, limit: int) -> Script[int]:
        """Creates messages and moves the cursor in one transaction; returns the events read."""
        params = {"name": CURSOR, "now": self._core.now()}
        rows = yield Statement("cursor_lock", {"name": CURSOR})
        if not rows:
            yield Statement("cursor_insert", params)
            rows = yield Statement("cursor_lock", {"name": CURSOR})
        cursor = {"xid": rows[0]["xid"], "position": rows[0]["position"], "most": limit}
        events = yield Statement("events_after", cursor)
        if not events:
            return 0
        yield from self.add_messages(
            [webhook_event for event in events for webhook_event in _webhook_events(event)]
        )
        crash_point("webhooks.noted")
        last = {"xid": events[-1]["xid"], "position": events[-1]["position"]}
        yield Statement("cursor_move", params | last)
        return len(events)

    def add_messages(self, events: Sequence[WebhookEvent]) -> Script[int]:
        """Creates the events' messages for subscribed webhooks; returns how many messages."""
        workspaces = sorted({event.workspace for event in events})
        if not workspaces:
            return 0
        hooks: dict[UUID, list[tuple[Row, list[str]]]] = defaultdict(list)
        for row in (yield Statement("webhooks_of", {"workspaces": workspaces})):
            hooks[row["workspace"]].append((row, decode_json(row["events"])))
        messages = [
            self._message_row(event, row["id"])
            for event in events
            for row, patterns in hooks[event.workspace]
            if webhooks.is_subscribed(patterns, event.event) and event.at >= row["created_at"]
        ]
        if messages:
            params = {"now": self._core.now()}
            yield Statement("deliveries_add", params, {"message": messages})
        return len(messages)

    def _message_row(self, event: WebhookEvent, webhook: UUID) -> tuple[Any, ...]:
        """Returns the row of a new message with its JSON body."""
        body = _Payload(
            event=event.event,
            task_id=event.task if event.agent is None else None,
            previous_status=event.previous,
            new_status=event.new,
            workspace_id=event.workspace,
            timestamp=event.at,
            agent_id=event.agent or msgspec.UNSET,
        )
        text = msgspec.json.encode(body).decode()
        message_id = self._core.clock.new_id()
        return message_id, event.workspace, webhook, event.task, event.seq, event.event, text

    async def lease_due(self, limit: int, busy: Collection[UUID] = ()) -> list[DueDelivery]:
        """Leases up to `limit` due messages, except those for `busy` webhooks, and returns them.

        An endpoint whose circuit is open gets one message, as a probe. Raises `Invalid` if messages
        are due and no encryption key is configured, so they cannot be signed.
        """
        now = self._core.now()
        params = {"now": now, "most": limit, "busy": list(busy) or None}
        ready = await self._core.store.fetch(Statement("webhooks_ready", params))
        if not ready:
            return []
        require_key_ring(self._core)
        ids = [row["id"] for row in ready]
        hooks, rows = await self._core.store.transact(lambda: self._lease(ids, limit, now))
        crash_point("webhooks.taken")
        leased = []
        for row in rows:
            hook = hooks[UUID(str(row["webhook"]))]
            if (due := await self._prepare(row, hook)) is not None:
                leased.append(due)
        return leased

    def _lease(
        self, ids: list[UUID], limit: int, now: datetime
    ) -> Script[tuple[dict[UUID, Row], list[Row]]]:
        """Locks the webhooks and leases their due messages; returns webhooks by id, and messages.

        Webhooks that another process has locked are left out.
        """
        until = now + timedelta(seconds=LEASE_S)
        hook_rows = yield Statement("webhooks_locked", {"ids": ids, "now": now})
        hooks = {row["id"]: row for row in hook_rows}
        tripped = [
            webhook for webhook, row in hooks.items() if EndpointHealth(row["failures"]).is_tripped
        ]
        healthy = [webhook for webhook in hooks if webhook not in tripped]
        rows: list[Row] = []
        for selected, share in ((tripped, 1), (healthy, min(MAX_PER_ENDPOINT, limit))):
            if selected:
                params = {"ids": selected, "now": now, "most": share}
                rows += yield Statement("deliveries_due", params)
        rows = rows[:limit]
        if rows:
            leased = [row["id"] for row in rows]
            yield Statement("deliveries_start", {"ids": leased, "until": until})
            probed = {UUID(str(row["webhook"])) for row in rows} & set(tripped)
            if probed:
                yield Statement("webhooks_probe", {"ids": sorted(probed), "until": until})
        return hooks, rows

    async def _prepare(self, row: Row, hook: Row) -> DueDelivery | None:
        """Returns the message with its secrets; else records a failure and returns `None`.

        It fails if its tries are used up, or if it cannot be signed.
        """
        due = DueDelivery(
            id=row["id"],
            webhook=hook["id"],
            url=hook["url"],
            secrets=[],
            body=row["body"].encode(),
            attempt=row["attempts"] + 1,
            probe=EndpointHealth(hook["failures"]).is_tripped,
        )
        if row["attempts"] >= webhooks.MAX_TRIES:
            await self.record_failure(due, "the sender of the last attempt crashed or timed out")
            return None
        try:
            return msgspec.structs.replace(due, secrets=decrypt_secrets(self._core, hook))
        except TenutoError as error:
            await self.record_failure(due, error.message)
            return None

    async def record_success(self, due: DueDelivery, status: int) -> None:
        """Records that the endpoint accepted the message, and closes its circuit."""
        params = {"id": due.id, "attempt": due.attempt, "now": self._core.now()}

        def script() -> Script[None]:
            locked = yield Statement("webhook_health_locked", {"id": due.webhook})
            yield Statement("delivery_succeeded", params | {"response_status": status})
            if locked and locked[0]["failures"]:
                yield _health_statement(due.webhook, EndpointHealth())

        await self._core.store.transact(script)

    async def record_failure(self, due: DueDelivery, error: str, status: int | None = None) -> None:
        """Records a failed attempt: sends again later or gives up; may disable the webhook.

        A webhook is disabled if its endpoint answers 410 Gone, or after too many failures.
        """
        now = self._core.now()
        next_attempt_at = webhooks.next_try_at(due.attempt, now, self._core.clock.random())
        params = {
            "id": due.id,
            "attempt": due.attempt,
            "response_status": status,
            "error": bounds.make_storable(error, bounds.MAX_ERROR),
        }

        def script() -> Script[None]:
            locked = yield Statement("webhook_health_locked", {"id": due.webhook})
            yield Statement("delivery_failed", params | {"next_attempt_at": next_attempt_at})
            if not locked or not locked[0]["enabled"]:
                return
            before = EndpointHealth(locked[0]["failures"], locked[0]["closed_until"])
            health = webhooks.after_failure(before, now, probe=due.probe)
            reason = _disable_reason(health, status)
            if reason is None:
                yield _health_statement(due.webhook, health)
                return
            disabled = {"id": due.webhook, "why": reason, "failures": health.failures, "now": now}
            yield Statement("webhook_disable", disabled)
            yield Statement("deliveries_cancel", {"webhook": due.webhook, "why": reason})

        await self._core.store.transact(script)


def _webhook_events(event: Row) -> list[WebhookEvent]:
    """Returns the webhook events of an audit event; none for an invalid row."""
    if not isinstance(event["at"], datetime) or not isinstance(event["workspace"], UUID):
        return []  # an invalid row must not block the other events
    return [
        WebhookEvent(
            event=name,
            workspace=event["workspace"],
            at=event["at"],
            task=event["task"],
            seq=event["seq"],
            previous=event["previous"],
            new=event["new"],
            agent=event["agent"] if event["kind"].startswith("agent_") else None,
        )
        for name in webhooks.webhook_events(event["previous"], event["new"], event["kind"])
    ]


def _health_statement(webhook: UUID, health: EndpointHealth) -> Statement:
    """Returns the statement that stores the health of a webhook's endpoint."""
    params = {"failures": health.failures, "closed_until": health.closed_until}
    return Statement("webhook_health_set", {"id": webhook} | params)


def _disable_reason(health: EndpointHealth, status: int | None) -> str | None:
    """Returns why a webhook must be disabled after a failure; `None` if it stays enabled."""
    if status == STATUS_GONE:
        return "the endpoint answered 410 Gone"
    if health.failures >= webhooks.DISABLE_AFTER_FAILURES:
        return f"the endpoint failed {health.failures} times in a row"
    return None
