"""Webhooks of a workspace: create, change, delete, rotate secrets, list deliveries, redeliver."""

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
from tenuto.engine.lookup import check_version, page_of, require_one
from tenuto.engine.rows import decode_json
from tenuto.engine.tenancy.encryption import require_key_ring
from tenuto.model import bounds
from tenuto.model.errors import Conflict
from tenuto.model.webhooks import MAX_WEBHOOKS, SIGNING_PREFIX, EndpointHealth, check_events
from tenuto.store.protocol import Row, Rows, Script, Statement

CheckUrl = Callable[[str], Awaitable[object]]
"""Raises `Invalid` for a URL that must not be called."""

_DISABLED = "the webhook was disabled"
_DELETED = "the webhook was deleted"


class WebhookView(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A webhook as the API and the CLI show it; its circuit is open until `closed_until`."""

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
    """A webhook with its new secret, which is shown only once."""

    webhook: WebhookView
    secret: str


class WebhookPage(msgspec.Struct, frozen=True, rename="camel"):
    """One page of webhooks; `next_cursor` is `None` on the last page."""

    webhooks: list[WebhookView]
    next_cursor: UUID | None = None


class WebhookChange(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Fields of a webhook to change; unset fields stay as they are."""

    url: str | UnsetType = UNSET
    events: list[str] | UnsetType = UNSET
    description: str | UnsetType | None = UNSET
    enabled: bool | UnsetType = UNSET


class DeliveryView(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A message to a webhook, with the result of the last attempt to send it."""

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
    """One page of deliveries; `next_cursor` is `None` on the last page."""

    deliveries: list[DeliveryView]
    next_cursor: UUID | None = None


class WebhookEndpoints:
    """Manages the webhooks of workspaces. Every URL passes `check` before it is stored."""

    def __init__(self, core: Core, check: CheckUrl) -> None:
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
        """Creates a webhook for new events; returns it with its secret. `Conflict`: too many."""
        await self._check(url)
        webhook, now = self._core.clock.new_id(), self._core.now()
        secret = new_secret(self._core.clock)
        encrypted = encrypt_secrets(self._core, [secret], webhook, workspace)
        params = {
            "id": webhook,
            "workspace": workspace,
            "url": url,
            "events": _events_json(events),
            "description": _check_description(description),
            "key_id": encrypted.key_id,
            "secret": encrypted.data,
            "created_by": actor,
            "now": now,
            "most": MAX_WEBHOOKS,
        }

        def script() -> Script[Rows]:
            rows: Rows = yield Statement("webhook_add", params)
            return rows

        if not await self._core.store.transact_one(script):
            text = f"the workspace has {MAX_WEBHOOKS} webhooks, the maximum; delete one first"
            raise Conflict(text, "too_many_webhooks")
        return WebhookSecret(await self.show(webhook, workspace), secret)

    async def page(
        self, workspace: UUID, limit: int = 100, cursor: UUID | None = None
    ) -> WebhookPage:
        """Returns the workspace's webhooks, newest first."""
        rows = await self._fetch_page("webhooks", {"workspace": workspace}, limit, cursor)
        return WebhookPage(*page_of(rows, limit, _webhook_view))

    async def show(self, webhook: UUID, workspace: UUID) -> WebhookView:
        """Returns one webhook, without its secret; raises `NotFound`."""
        params = {"workspace": workspace, "id": webhook}
        rows = await self._core.store.fetch(Statement("webhook", params))
        return _webhook_view(require_one(rows, "webhook", webhook))

    async def update(
        self, webhook: UUID, workspace: UUID, change: WebhookChange, version: int | None = None
    ) -> WebhookView:
        """Changes and returns a webhook; disabling cancels waiting messages. Raises `Conflict`.

        A new URL, or enabling the webhook, resets the health of its endpoint. `Conflict`
        (`version_conflict`): the webhook no longer has the given version.
        """
        if change.url is not UNSET:
            await self._check(change.url)
        events = UNSET if change.events is UNSET else _events_json(change.events)
        if change.description is not UNSET:
            _check_description(change.description)

        def script() -> Script[None]:
            row = yield from self._lock_webhook(webhook, workspace)
            check_version(row, version, "webhook", webhook)
            yield Statement("webhook_update", _update_params(row, change, events, self._core.now()))
            if row["enabled"] and change.enabled is False:
                yield Statement("deliveries_cancel", {"webhook": webhook, "why": _DISABLED})

        await self._core.store.transact(script)
        return await self.show(webhook, workspace)

    async def delete(self, webhook: UUID, workspace: UUID) -> None:
        """Deletes a webhook; waiting deliveries become FAILED, all are kept. Raises `NotFound`."""

        def script() -> Script[None]:
            params = {"workspace": workspace, "id": webhook}
            require_one((yield Statement("webhook_delete", params)), "webhook", webhook)
            yield Statement("deliveries_cancel", {"webhook": webhook, "why": _DELETED})

        await self._core.store.transact(script)

    async def rotate_secret(self, webhook: UUID, workspace: UUID) -> WebhookSecret:
        """Gives a webhook a new secret; messages are signed with it and the one before."""
        secret = new_secret(self._core.clock)

        def script() -> Script[None]:
            row = yield from self._lock_webhook(webhook, workspace)
            secrets = [secret, *decrypt_secrets(self._core, row)[:1]]
            encrypted = encrypt_secrets(self._core, secrets, webhook, workspace)
            params = {"id": webhook, "key_id": encrypted.key_id, "secret": encrypted.data}
            yield Statement("webhook_secret_set", params | {"now": self._core.now()})

        await self._core.store.transact(script)
        return WebhookSecret(await self.show(webhook, workspace), secret)

    async def deliveries(
        self, webhook: UUID, workspace: UUID, limit: int = 100, cursor: UUID | None = None
    ) -> DeliveryPage:
        """Returns messages of a webhook, also a deleted one, newest first; `NotFound`: unknown."""
        params = {"workspace": workspace, "webhook": webhook}
        rows = await self._fetch_page("deliveries", params, limit, cursor)
        if not rows:
            await self.show(webhook, workspace)
        return DeliveryPage(*page_of(rows, limit, _delivery_view))

    async def redeliver(self, delivery: UUID, workspace: UUID) -> DeliveryView:
        """Queues a delivered or failed message again; `Conflict` if waiting or webhook disabled."""
        view = await self._show_delivery(delivery, workspace)

        def script() -> Script[None]:
            params = {"workspace": workspace, "id": view.webhook_id}
            rows = yield Statement("webhook_locked", params)
            if not rows or not rows[0]["enabled"]:
                text = f"webhook {view.webhook_id} is disabled or deleted; enable it first"
                raise Conflict(text, "webhook_disabled")
            restart = {"id": delivery, "now": self._core.now()}
            if not (yield Statement("delivery_restart", restart)):
                raise Conflict(f"delivery {delivery} is still being sent")

        await self._core.store.transact(script)
        return await self._show_delivery(delivery, workspace)

    async def _show_delivery(self, delivery: UUID, workspace: UUID) -> DeliveryView:
        params = {"workspace": workspace, "id": delivery}
        rows = await self._core.store.fetch(Statement("delivery", params))
        return _delivery_view(require_one(rows, "delivery", delivery))

    async def _fetch_page(
        self, query: str, params: dict[str, Any], limit: int, cursor: UUID | None
    ) -> Sequence[Row]:
        """Returns up to `limit + 1` rows: one more than a page shows if there is a next page."""
        bounds.check_number("limit", limit, 1, bounds.MAX_PAGE)
        page_params = params | {"before": cursor, "most": limit + 1}
        return await self._core.store.fetch(Statement(query, page_params))

    def _lock_webhook(self, webhook: UUID, workspace: UUID) -> Script[Row]:
        """Locks and returns the webhook's row; raises `NotFound`."""
        rows = yield Statement("webhook_locked", {"workspace": workspace, "id": webhook})
        return require_one(rows, "webhook", webhook)


def new_secret(clock: Clock) -> str:
    """Returns a new random secret of 32 bytes."""
    return SIGNING_PREFIX + b64encode(bytes.fromhex(clock.new_token() + clock.new_token())).decode()


def encrypt_secrets(
    core: Core, secrets: Sequence[str], webhook: UUID, workspace: UUID
) -> Encrypted:
    """Returns a webhook's secrets (newest first) encrypted for its row."""
    return require_key_ring(core).encrypt(
        " ".join(secrets), workspace=workspace, table="webhook", row=str(webhook), column="secret"
    )


def decrypt_secrets(core: Core, row: Row) -> list[str]:
    """Decrypts the secrets in a webhook's row, and returns them, newest first."""
    encrypted = Encrypted(row["key_id"], row["secret"])
    location = {"workspace": row["workspace"], "table": "webhook", "row": str(row["id"])}
    return require_key_ring(core).decrypt(encrypted, **location, column="secret").split()


def _events_json(events: Sequence[str]) -> str:
    """Returns the event patterns as JSON; raises `Invalid` for an invalid one."""
    return msgspec.json.encode(check_events(events)).decode()


def _check_description(text: str | None) -> str | None:
    """Returns the description; raises `Invalid` if it is too long or cannot be stored."""
    return None if text is None else bounds.check_text("description", text, bounds.MAX_TITLE)


def _update_params(
    row: Row, change: WebhookChange, events: str | UnsetType, now: datetime
) -> dict[str, Any]:
    """Returns the row's new values. A new URL, or enabling it again, resets the health."""
    url = row["url"] if change.url is UNSET else change.url
    enabled = bool(row["enabled"]) if change.enabled is UNSET else change.enabled
    is_reset = url != row["url"] or change.enabled is True
    health = EndpointHealth() if is_reset else EndpointHealth(row["failures"], row["closed_until"])
    return {
        "id": row["id"],
        "url": url,
        "events": row["events"] if events is UNSET else events,
        "description": row["description"] if change.description is UNSET else change.description,
        "enabled": enabled,
        "disabled_why": None if enabled else row["disabled_why"] or _DISABLED,
        "failures": health.failures,
        "closed_until": health.closed_until,
        "now": now,
    }


def _webhook_view(row: Row) -> WebhookView:
    fields = {name: row[name] for name in WebhookView.__struct_fields__}
    fields |= {"events": decode_json(row["events"]), "enabled": bool(row["enabled"])}
    return WebhookView(**fields)


def _delivery_view(row: Row) -> DeliveryView:
    names = {"webhook_id": "webhook", "task_id": "task"}
    fields = {name: row[names.get(name, name)] for name in DeliveryView.__struct_fields__}
    fields |= {"body": decode_json(row["body"]), "webhook_id": UUID(str(row["webhook"]))}
    return DeliveryView(**fields)
