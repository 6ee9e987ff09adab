"""`orchestrate webhook`: endpoints that receive events."""

from typing import TYPE_CHECKING, Any

import click

from tenuto.cli.base import GlobalOptions, command, group
from tenuto.cli.connection import call_client
from tenuto.cli.output import Columns, print_done, print_list, print_one, print_page, split_commas

if TYPE_CHECKING:
    from uuid import UUID

    from tenuto.client.client import AsyncClient
    from tenuto.engine.webhooks.endpoints import WebhookView

_FIELDS: Columns = {
    "id": lambda webhook: webhook.id,
    "url": lambda webhook: webhook.url,
    "events": lambda webhook: webhook.events,
    "description": lambda webhook: webhook.description,
    "enabled": lambda webhook: webhook.enabled,
    "disabled because": lambda webhook: webhook.disabled_why,
    "failures": lambda webhook: webhook.failures,
    "circuit open until": lambda webhook: webhook.closed_until,
    "created": lambda webhook: webhook.created_at,
}
_SECRET: Columns = {
    "id": lambda created: created.webhook.id,
    "url": lambda created: created.webhook.url,
    "secret": lambda created: created.secret,
}
_DELIVERY: Columns = {
    "id": lambda delivery: delivery.id,
    "event": lambda delivery: delivery.event,
    "status": lambda delivery: delivery.status,
    "attempts": lambda delivery: delivery.attempts,
    "next attempt": lambda delivery: delivery.next_attempt_at,
    "error": lambda delivery: delivery.error,
}
_WEBHOOK = click.argument("webhook_id", type=click.UUID, metavar="ID")


@group(
    "webhook",
    "orchestrate webhook list",
    "orchestrate webhook create https://example.com/hook --event task.status_changed",
)
def webhook() -> None:
    """Send events to HTTP endpoints, as signed messages."""


@command("list", "orchestrate webhook list")
@click.pass_obj
def list_(options: GlobalOptions) -> None:
    """List the endpoints, newest first."""

    async def read(client: "AsyncClient") -> "list[WebhookView]":
        return [webhook async for webhook in client.webhooks.list()]

    columns: Columns = {
        "ID": lambda webhook: webhook.id,
        "ENABLED": lambda webhook: webhook.enabled,
        "FAILURES": lambda webhook: webhook.failures,
        "EVENTS": lambda webhook: webhook.events,
        "URL": lambda webhook: webhook.url,
    }
    print_list(options, "webhooks", call_client(options, read), columns, wide="URL")


@command(
    "create",
    "orchestrate webhook create https://example.com/hook --event task.dead",
    "orchestrate webhook create https://example.com/hook --event '*' --description Pager",
)
@click.argument("address", metavar="URL")
@click.option("--event", "events", multiple=True, required=True, help="Event name; * for all.")
@click.option("--description", metavar="TEXT", help="Text for people.")
@click.pass_obj
def create(
    options: GlobalOptions, address: str, events: tuple[str, ...], description: str | None
) -> None:
    """Register an endpoint; prints its signing secret, which is shown only once."""
    created = call_client(
        options, lambda client: client.webhooks.create(address, split_commas(events), description)
    )
    print_one(options, created, _SECRET)


@command("show", "orchestrate webhook show 0198c0de-0000-7000-8000-000000000000")
@_WEBHOOK
@click.pass_obj
def show(options: GlobalOptions, webhook_id: "UUID") -> None:
    """Show an endpoint with its failures."""
    print_one(
        options, call_client(options, lambda client: client.webhooks.get(webhook_id)), _FIELDS
    )


@command("update", "orchestrate webhook update 0198c0de-0000-7000-8000-000000000000 --disable")
@_WEBHOOK
@click.option("--address", "address", metavar="URL", help="New URL.")
@click.option("--event", "events", multiple=True, help="New list of events; repeatable.")
@click.option("--description", metavar="TEXT", help="Text for people.")
@click.option("--enable/--disable", "enabled", default=None, help="Turn it on or off.")
@click.pass_obj
def update(options: GlobalOptions, /, webhook_id: "UUID", **fields: Any) -> None:
    """Change, enable or disable an endpoint."""
    changes = {
        "url": fields["address"],
        "events": split_commas(fields["events"]) or None,
        "description": fields["description"],
        "enabled": fields["enabled"],
    }
    print_one(
        options,
        call_client(options, lambda client: client.webhooks.update(webhook_id, **changes)),
        _FIELDS,
    )


@command("delete", "orchestrate webhook delete 0198c0de-0000-7000-8000-000000000000")
@_WEBHOOK
@click.pass_obj
def delete(options: GlobalOptions, webhook_id: "UUID") -> None:
    """Delete an endpoint; it receives no more events."""
    call_client(options, lambda client: client.webhooks.delete(webhook_id))
    print_done(options, f"deleted {webhook_id}")


@command("rotate-secret", "orchestrate webhook rotate-secret 0198c0de-0000-7000-8000-000000000000")
@_WEBHOOK
@click.pass_obj
def rotate_secret(options: GlobalOptions, webhook_id: "UUID") -> None:
    """Create a new signing secret and print it, once; for now the old one signs as well."""
    print_one(
        options,
        call_client(options, lambda client: client.webhooks.rotate_secret(webhook_id)),
        _SECRET,
    )


@command("deliveries", "orchestrate webhook deliveries 0198c0de-0000-7000-8000-000000000000")
@_WEBHOOK
@click.option(
    "--limit",
    type=click.IntRange(1, 1000),
    default=50,
    show_default=True,
    help="Maximum number of rows.",
)
@click.option(
    "--cursor", type=click.UUID, metavar="ID", help="Only deliveries older than this one."
)
@click.pass_obj
def deliveries(
    options: GlobalOptions, webhook_id: "UUID", limit: int, cursor: "UUID | None"
) -> None:
    """List the deliveries to an endpoint, newest first."""
    page = call_client(
        options, lambda client: client.webhooks.deliveries(webhook_id, limit, cursor)
    )
    columns: Columns = {
        "ID": lambda delivery: delivery.id,
        "STATUS": lambda delivery: delivery.status,
        "TRIES": lambda delivery: delivery.attempts,
        "HTTP": lambda delivery: delivery.response_status,
        "EVENT": lambda delivery: delivery.event,
        "ERROR": lambda delivery: delivery.error,
    }
    print_page(options, page, page.deliveries, columns, wide="ERROR")


@command("redeliver", "orchestrate webhook redeliver 0198c0de-0000-7000-8000-000000000000")
@click.argument("delivery_id", type=click.UUID, metavar="DELIVERY")
@click.pass_obj
def redeliver(options: GlobalOptions, delivery_id: "UUID") -> None:
    """Send a delivery again."""
    print_one(
        options,
        call_client(options, lambda client: client.webhooks.redeliver(delivery_id)),
        _DELIVERY,
    )


for _command in (
    list_,
    create,
    show,
    update,
    delete,
    deliveries,
    redeliver,
    rotate_secret,
):
    webhook.add_command(_command)
