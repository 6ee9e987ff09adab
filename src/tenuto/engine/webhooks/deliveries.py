"""Deliveries: events become messages, and messages are sent until they arrive. All workspaces."""

from collections import defaultdict
from collections.abc import Collection, Sequence
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

import msgspec

from tenuto.clock import Clock
from tenuto.crash_points import crash_point
from tenuto.engine.core import Core
from tenuto.engine.rows import decode
from tenuto.engine.tenancy.encryption import vault_of
from tenuto.engine.webhooks.endpoints import unseal
from tenuto.model import bounds, webhooks
from tenuto.model.errors import TenutoError
from tenuto.model.webhooks import EndpointHealth
from tenuto.store.protocol import Row, Script, Statement

CURSOR = "webhooks"
BATCH = 500
SHARE = 8
"""Deliveries to one endpoint that are taken together: a slow one must not hold up the rest."""
LEASE_S = 60.0
"""Longer than any sender takes: what is not recorded by then is sent again."""
GONE = 410


class WebhookEvent(msgspec.Struct, frozen=True, kw_only=True):
    """Something that webhooks may want to be told. `seq` is the version of the task."""

    event: str
    workspace: UUID
    at: datetime
    task: UUID | None = None
    seq: int | None = None
    previous: str | None = None
    new: str | None = None
    agent: UUID | None = None
    """The agent that it is about, when it is about no task."""


class _Payload(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """What is sent, field by field in this order."""

    event: str
    task_id: UUID | None
    previous_status: str | None
    new_status: str | None
    workspace_id: UUID
    timestamp: datetime
    agent_id: UUID | msgspec.UnsetType = msgspec.UNSET


class DueDelivery(msgspec.Struct, frozen=True, kw_only=True):
    """A message to send now. `attempt` is its fence, `probe` tells that the endpoint is tried."""

    id: UUID
    webhook: UUID
    url: str
    secrets: list[str]
    body: bytes
    attempt: int
    probe: bool

    def __repr__(self) -> str:
        return f"Due({self.id})"  # the secrets must not get into a log


class Deliveries:
    """The system's side of webhooks. Any number may run: rows are taken, never shared."""

    def __init__(self, core: Core) -> None:
        self._core = core

    @property
    def clock(self) -> Clock:
        return self._core.clock

    async def fan_out_once(self, limit: int = BATCH) -> int:
        """Make messages of the next task events, once each; answers how many events were read."""
        ahead = await self._core.store.fetch(Statement("fan_out_ahead", {"name": CURSOR}))
        if not ahead:
            return 0
        if ahead[0]["wanted"]:
            return await self._core.store.transact(lambda: self._fan_out(limit))

        def skip() -> Script[int]:
            yield Statement("fan_out_skip", {"name": CURSOR, "now": self._core.now()})
            return 0

        return await self._core.store.once(skip)

    def _fan_out(self, limit: int) -> Script[int]:
        params = {"name": CURSOR, "now": self._core.now()}
        rows = yield Statement("cursor_lock", {"name": CURSOR})
        if not rows:
            yield Statement("cursor_make", params)
            rows = yield Statement("cursor_lock", {"name": CURSOR})
        place = {"xid": rows[0]["xid"], "position": rows[0]["position"], "most": limit}
        events = yield Statement("events_after", place)
        if not events:
            return 0
        yield from self.announce([each for event in events for each in _occurrences(event)])
        crash_point("webhooks.noted")
        last = {"xid": events[-1]["xid"], "position": events[-1]["position"]}
        yield Statement("cursor_move", params | last)
        return len(events)

    def announce(self, occurrences: Sequence[WebhookEvent]) -> Script[int]:
        """Make messages for the webhooks that want to know, in the transaction of the caller."""
        workspaces = sorted({each.workspace for each in occurrences})
        if not workspaces:
            return 0
        hooks: dict[UUID, list[tuple[Row, list[str]]]] = defaultdict(list)
        for row in (yield Statement("webhooks_of", {"workspaces": workspaces})):
            hooks[row["workspace"]].append((row, decode(row["events"])))
        messages = [
            self._message(each, row["id"])
            for each in occurrences
            for row, patterns in hooks[each.workspace]
            if webhooks.wants(patterns, each.event) and each.at >= row["created_at"]
        ]
        if messages:
            params = {"now": self._core.now()}
            yield Statement("deliveries_add", params, {"message": messages})
        return len(messages)

    def _message(self, told: WebhookEvent, webhook: UUID) -> tuple[Any, ...]:
        body = _Payload(
            event=told.event,
            task_id=told.task if told.agent is None else None,
            previous_status=told.previous,
            new_status=told.new,
            workspace_id=told.workspace,
            timestamp=told.at,
            agent_id=told.agent or msgspec.UNSET,
        )
        text = msgspec.json.encode(body).decode()
        message = self._core.clock.new_id()
        return message, told.workspace, webhook, told.task, told.seq, told.event, text

    async def due(self, limit: int, busy: Collection[UUID] = ()) -> list[DueDelivery]:
        """Take up to `limit` due messages, not for busy webhooks; nobody else gets them meanwhile.

        An endpoint that failed too often gets one, which tries it out. `Invalid` when messages wait
        and this program has no keys to sign them.
        """
        now = self._core.now()
        params = {"now": now, "most": limit, "busy": list(busy) or None}
        ready = await self._core.store.fetch(Statement("webhooks_ready", params))
        if not ready:
            return []
        vault_of(self._core)
        ids = [row["id"] for row in ready]
        hooks, rows = await self._core.store.transact(lambda: self._take(ids, limit, now))
        crash_point("webhooks.taken")
        taken = []
        for row in rows:
            hook = hooks[UUID(str(row["webhook"]))]
            if (due := await self._opened(row, hook)) is not None:
                taken.append(due)
        return taken

    def _take(
        self, ids: list[UUID], limit: int, now: datetime
    ) -> Script[tuple[dict[UUID, Row], list[Row]]]:
        until = now + timedelta(seconds=LEASE_S)
        found = yield Statement("webhooks_taken", {"ids": ids, "now": now})
        hooks = {row["id"]: row for row in found}
        tripped = [each for each, row in hooks.items() if EndpointHealth(row["failures"]).tripped]
        steady = [each for each in hooks if each not in tripped]
        rows: list[Row] = []
        for some, share in ((tripped, 1), (steady, min(SHARE, limit))):
            if some:
                asked = {"ids": some, "now": now, "most": share}
                rows += yield Statement("deliveries_due", asked)
        rows = rows[:limit]
        if rows:
            taken = [row["id"] for row in rows]
            yield Statement("deliveries_take", {"ids": taken, "until": until})
            tried = {UUID(str(row["webhook"])) for row in rows} & set(tripped)
            if tried:
                yield Statement("webhooks_probe", {"ids": sorted(tried), "until": until})
        return hooks, rows

    async def _opened(self, row: Row, hook: Row) -> DueDelivery | None:
        """The message with its secrets; `None` when it cannot be sent at all."""
        due = DueDelivery(
            id=row["id"],
            webhook=hook["id"],
            url=hook["url"],
            secrets=[],
            body=row["body"].encode(),
            attempt=row["attempts"] + 1,
            probe=EndpointHealth(hook["failures"]).tripped,
        )
        if row["attempts"] >= webhooks.MAX_TRIES:
            await self.failed(due, "no sender came back from the last attempt")
            return None
        try:
            return msgspec.structs.replace(due, secrets=unseal(self._core, hook))
        except TenutoError as error:
            await self.failed(due, error.message)
            return None

    async def delivered(self, due: DueDelivery, status: int) -> None:
        """The endpoint has taken the message."""
        params = {"id": due.id, "attempt": due.attempt, "now": self._core.now()}

        def script() -> Script[None]:
            held = yield Statement("webhook_held", {"id": due.webhook})
            yield Statement("delivery_done", params | {"response_status": status})
            if held and held[0]["failures"]:
                yield _health(due.webhook, EndpointHealth())

        await self._core.store.transact(script)

    async def failed(self, due: DueDelivery, error: str, status: int | None = None) -> None:
        """The endpoint has not: try again later, or give up. One that is gone is left for good."""
        now = self._core.now()
        again = webhooks.next_try(due.attempt, now, self._core.clock.random())
        params = {
            "id": due.id,
            "attempt": due.attempt,
            "response_status": status,
            "error": bounds.clean(error, bounds.MAX_ERROR),
        }

        def script() -> Script[None]:
            held = yield Statement("webhook_held", {"id": due.webhook})
            yield Statement("delivery_failed", params | {"next_attempt_at": again})
            if not held or not held[0]["enabled"]:
                return
            before = EndpointHealth(held[0]["failures"], held[0]["closed_until"])
            health = webhooks.after_failure(before, now, probe=due.probe)
            why = _why_disabled(health, status)
            if why is None:
                yield _health(due.webhook, health)
                return
            off = {"id": due.webhook, "why": why, "failures": health.failures, "now": now}
            yield Statement("webhook_disable", off)
            yield Statement("deliveries_end", {"webhook": due.webhook, "why": why})

        await self._core.store.transact(script)


def _occurrences(event: Row) -> list[WebhookEvent]:
    if not isinstance(event["at"], datetime) or not isinstance(event["workspace"], UUID):
        return []  # a damaged row must not keep the others back
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
        for name in webhooks.events_of(event["previous"], event["new"], event["kind"])
    ]


def _health(webhook: UUID, health: EndpointHealth) -> Statement:
    params = {"failures": health.failures, "closed_until": health.closed_until}
    return Statement("webhook_health", {"id": webhook} | params)


def _why_disabled(health: EndpointHealth, status: int | None) -> str | None:
    if status == GONE:
        return "the endpoint answered 410 Gone"
    if health.failures >= webhooks.DISABLE_AFTER:
        return f"the endpoint failed {health.failures} times in a row"
    return None
