"""Webhooks: what a workspace asks to be told, and what became of it."""

from base64 import b64encode
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

import msgspec
from msgspec import UNSET, UnsetType

from tenuto.clock import Clock
from tenuto.encryption_keys import Encrypted
from tenuto.engine.core import Core
from tenuto.engine.rows import decode
from tenuto.engine.tenancy.encryption import vault_of
from tenuto.model import bounds
from tenuto.model.errors import Conflict, NotFound
from tenuto.model.webhooks import MAX_WEBHOOKS, WHSEC, EndpointHealth, check_events
from tenuto.store.protocol import Row, Rows, Script, Statement

Check = Callable[[str], Awaitable[object]]
"""Raises `Invalid` for a URL that must not be called."""

_TURNED_OFF = "the webhook was disabled"
_DELETED = "the webhook was deleted"


class WebhookView(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A webhook as people see it; `closed_until` tells how long its endpoint is left alone."""

    id: UUID
    url: str
    events: list[str]
    description: str | None
    enabled: bool
    disabled_why: str | None
    failures: int
    closed_until: datetime | None
    version: int
    created_by: str | None
    created_at: datetime
    updated_at: datetime


class WebhookSecret(msgspec.Struct, frozen=True, rename="camel"):
    """A webhook with its new secret, which is never shown again."""

    webhook: WebhookView
    secret: str


class WebhookPage(msgspec.Struct, frozen=True, rename="camel"):
    """Some webhooks and where the next ones begin."""

    webhooks: list[WebhookView]
    next_cursor: UUID | None = None


class WebhookChange(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """What a person changes of a webhook; the rest stays."""

    url: str | UnsetType = UNSET
    events: list[str] | UnsetType = UNSET
    description: str | UnsetType | None = UNSET
    enabled: bool | UnsetType = UNSET


class DeliveryView(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A message to a webhook, and how sending it went."""

    id: UUID
    webhook_id: UUID
    task_id: UUID | None
    event: str
    body: dict[str, Any]
    status: str
    attempts: int
    next_attempt_at: datetime | None
    response_status: int | None
    error: str | None
    created_at: datetime
    delivered_at: datetime | None


class DeliveryPage(msgspec.Struct, frozen=True, rename="camel"):
    """Some deliveries and where the next ones begin."""

    deliveries: list[DeliveryView]
    next_cursor: UUID | None = None


class WebhookEndpoints:
    """The webhook family. Every URL passes `check` before it is stored."""

    def __init__(self, core: Core, check: Check) -> None:
        self._core = core
        self._check = check

    async def create(
        self,
        url: str,
        events: Sequence[str],
        workspace: UUID,
        actor: str | None,
        description: str | None = None,
    ) -> WebhookSecret:
        """Tell an endpoint of events from now on; the only answer with the secret."""
        await self._check(url)
        webhook, now = self._core.clock.new_id(), self._core.now()
        secret = new_secret(self._core.clock)
        sealed = seal(self._core, [secret], webhook, workspace)
        params = {
            "id": webhook,
            "workspace": workspace,
            "url": url,
            "events": _events(events),
            "description": _description(description),
            "key_id": sealed.key_id,
            "secret": sealed.data,
            "created_by": actor,
            "now": now,
            "most": MAX_WEBHOOKS,
        }

        def script() -> Script[Rows]:
            rows: Rows = yield Statement("webhook_add", params)
            return rows

        if not await self._core.store.once(script):
            raise Conflict(f"a workspace has at most {MAX_WEBHOOKS} webhooks", "too_many_webhooks")
        return WebhookSecret(await self.show(webhook, workspace), secret)

    async def page(
        self, workspace: UUID, limit: int = 100, cursor: UUID | None = None
    ) -> WebhookPage:
        """The workspace's webhooks, newest first."""
        rows = await self._page("webhooks", {"workspace": workspace}, limit, cursor)
        found = [_webhook(row) for row in rows[:limit]]
        return WebhookPage(found, found[-1].id if len(rows) > limit else None)

    async def show(self, webhook: UUID, workspace: UUID) -> WebhookView:
        """One webhook without its secret."""
        params = {"workspace": workspace, "id": webhook}
        rows = await self._core.store.fetch(Statement("webhook", params))
        return _webhook(_found(rows, webhook))

    async def update(
        self, webhook: UUID, workspace: UUID, change: WebhookChange, version: int | None = None
    ) -> WebhookView:
        """Change a webhook, if it still has the version. Disabling gives up what waits for it."""
        if change.url is not UNSET:
            await self._check(change.url)
        events = UNSET if change.events is UNSET else _events(change.events)
        if change.description is not UNSET:
            _description(change.description)

        def script() -> Script[None]:
            row = yield from self._locked(webhook, workspace)
            if version is not None and row["version"] != version:
                raise Conflict(
                    f"the webhook has version {row['version']}, not {version}", "version_conflict"
                )
            yield Statement("webhook_set", _changed(row, change, events, self._core.now()))
            if row["enabled"] and change.enabled is False:
                yield Statement("deliveries_end", {"webhook": webhook, "why": _TURNED_OFF})

        await self._core.store.transact(script)
        return await self.show(webhook, workspace)

    async def delete(self, webhook: UUID, workspace: UUID) -> None:
        """Forget a webhook; what was sent to it can still be looked at."""

        def script() -> Script[None]:
            params = {"workspace": workspace, "id": webhook}
            _found((yield Statement("webhook_remove", params)), webhook)
            yield Statement("deliveries_end", {"webhook": webhook, "why": _DELETED})

        await self._core.store.transact(script)

    async def rotate_secret(self, webhook: UUID, workspace: UUID) -> WebhookSecret:
        """Give a webhook a new secret; messages are signed with the one before as well."""
        secret = new_secret(self._core.clock)

        def script() -> Script[None]:
            row = yield from self._locked(webhook, workspace)
            kept = [secret, *unseal(self._core, row)[:1]]
            sealed = seal(self._core, kept, webhook, workspace)
            params = {"id": webhook, "key_id": sealed.key_id, "secret": sealed.data}
            yield Statement("webhook_secret", params | {"now": self._core.now()})

        await self._core.store.transact(script)
        return WebhookSecret(await self.show(webhook, workspace), secret)

    async def deliveries(
        self, webhook: UUID, workspace: UUID, limit: int = 100, cursor: UUID | None = None
    ) -> DeliveryPage:
        """What was sent to a webhook or waits to be, newest first; of a deleted one as well."""
        params = {"workspace": workspace, "webhook": webhook}
        rows = await self._page("deliveries", params, limit, cursor)
        if not rows:
            await self.show(webhook, workspace)
        found = [_delivery(row) for row in rows[:limit]]
        return DeliveryPage(found, found[-1].id if len(rows) > limit else None)

    async def redeliver(self, delivery: UUID, workspace: UUID) -> DeliveryView:
        """Send a message again that was delivered or given up; its id stays the same."""
        view = await self._show_delivery(delivery, workspace)

        def script() -> Script[None]:
            params = {"workspace": workspace, "id": view.webhook_id}
            rows = yield Statement("webhook_locked", params)
            if not rows or not rows[0]["enabled"]:
                raise Conflict("the webhook is disabled or deleted", "webhook_disabled")
            again = {"id": delivery, "now": self._core.now()}
            if not (yield Statement("delivery_again", again)):
                raise Conflict("the message is still being sent")

        await self._core.store.transact(script)
        return await self._show_delivery(delivery, workspace)

    async def _show_delivery(self, delivery: UUID, workspace: UUID) -> DeliveryView:
        params = {"workspace": workspace, "id": delivery}
        rows = await self._core.store.fetch(Statement("delivery", params))
        if not rows:
            raise NotFound(f"no delivery {delivery}")
        return _delivery(rows[0])

    async def _page(
        self, query: str, params: dict[str, Any], limit: int, cursor: UUID | None
    ) -> Sequence[Row]:
        bounds.number("limit", limit, 1, bounds.MAX_PAGE)
        asked = params | {"before": cursor, "most": limit + 1}
        return await self._core.store.fetch(Statement(query, asked))

    def _locked(self, webhook: UUID, workspace: UUID) -> Script[Row]:
        rows = yield Statement("webhook_locked", {"workspace": workspace, "id": webhook})
        return _found(rows, webhook)


def new_secret(clock: Clock) -> str:
    """A secret of 32 bytes that nobody can guess."""
    return WHSEC + b64encode(bytes.fromhex(clock.new_token() + clock.new_token())).decode()


def seal(core: Core, secrets: Sequence[str], webhook: UUID, workspace: UUID) -> Encrypted:
    """A webhook's secrets, the newest first, as its row keeps them."""
    return vault_of(core).seal(
        " ".join(secrets), workspace=workspace, table="webhook", row=str(webhook), column="secret"
    )


def unseal(core: Core, row: Row) -> list[str]:
    """The secrets in a webhook's row, the newest first."""
    sealed = Encrypted(row["key_id"], row["secret"])
    place = {"workspace": row["workspace"], "table": "webhook", "row": str(row["id"])}
    return vault_of(core).open(sealed, **place, column="secret").split()


def _found(rows: Sequence[Row], webhook: UUID) -> Row:
    if not rows:
        raise NotFound(f"no webhook {webhook}")
    return rows[0]


def _events(events: Sequence[str]) -> str:
    return msgspec.json.encode(check_events(events)).decode()


def _description(text: str | None) -> str | None:
    return None if text is None else bounds.text("description", text, bounds.MAX_TITLE)


def _changed(
    row: Row, change: WebhookChange, events: str | UnsetType, now: datetime
) -> dict[str, Any]:
    """The row's new values. A new URL, or enabling it again, forgets how the old one answered."""
    url = row["url"] if change.url is UNSET else change.url
    enabled = bool(row["enabled"]) if change.enabled is UNSET else change.enabled
    fresh = url != row["url"] or change.enabled is True
    health = EndpointHealth() if fresh else EndpointHealth(row["failures"], row["closed_until"])
    return {
        "id": row["id"],
        "url": url,
        "events": row["events"] if events is UNSET else events,
        "description": row["description"] if change.description is UNSET else change.description,
        "enabled": enabled,
        "disabled_why": None if enabled else row["disabled_why"] or _TURNED_OFF,
        "failures": health.failures,
        "closed_until": health.closed_until,
        "now": now,
    }


def _webhook(row: Row) -> WebhookView:
    fields = {name: row[name] for name in WebhookView.__struct_fields__}
    fields |= {"events": decode(row["events"]), "enabled": bool(row["enabled"])}
    return WebhookView(**fields)


def _delivery(row: Row) -> DeliveryView:
    names = {"webhook_id": "webhook", "task_id": "task"}
    fields = {name: row[names.get(name, name)] for name in DeliveryView.__struct_fields__}
    fields |= {"body": decode(row["body"]), "webhook_id": UUID(str(row["webhook"]))}
    return DeliveryView(**fields)
