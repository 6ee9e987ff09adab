"""`orchestrate webhook`: endpoints that receive events."""

from typing import TYPE_CHECKING, Any

import click

from tenuto.cli.base import GlobalOptions, command, cursor_option, group, limit_option
from tenuto.cli.connection import call_client
from tenuto.cli.output import columns, print_list, print_page, split_commas
from tenuto.cli.shared_commands import Resource, print_result

if TYPE_CHECKING:
    from uuid import UUID

    from tenuto.client.client import AsyncClient
    from tenuto.engine.webhooks.endpoints import WebhookView

_FIELDS = columns(
    "id, url, events, description, enabled, disabled because: disabled_why, failures,"
    " circuit open until: closed_until, created: created_at"
)
_SECRET = columns("id: webhook.id, url: webhook.url, secret")
_DELIVERY = columns("id, event, status, attempts, next attempt: next_attempt_at, error")
_WEBHOOKS = Resource(
    "webhook",
    lambda client: client.webhooks,
    _FIELDS,
    "0198c0de-0000-7000-8000-000000000000",
    "ID",
    click.UUID,
)
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

    async def read_webhooks(client: "AsyncClient") -> "list[WebhookView]":
        return [webhook async for webhook in client.webhooks.list()]

    headings = columns("ID, ENABLED, FAILURES, EVENTS, URL")
    print_list(options, "webhooks", call_client(options, read_webhooks), headings, wide="URL")


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
    print_result(
        options,
        lambda client: client.webhooks.create(address, split_commas(events), description),
        _SECRET,
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
    print_result(options, lambda client: client.webhooks.update(webhook_id, **changes), _FIELDS)


@command("deliveries", "orchestrate webhook deliveries 0198c0de-0000-7000-8000-000000000000")
@_WEBHOOK
@limit_option()
@cursor_option("deliveries")
@click.pass_obj
def deliveries(
    options: GlobalOptions, webhook_id: "UUID", limit: int, cursor: "UUID | None"
) -> None:
    """List the deliveries to an endpoint, newest first."""
    page = call_client(
        options, lambda client: client.webhooks.deliveries(webhook_id, limit, cursor)
    )
    headings = columns("ID, STATUS, TRIES: attempts, HTTP: response_status, EVENT, ERROR")
    print_page(options, page, page.deliveries, headings, wide="ERROR")


webhook.add_commands(
    list_,
    create,
    _WEBHOOKS.item_command("show", "Show an endpoint with its failures.", method="get"),
    update,
    _WEBHOOKS.delete_command("Delete an endpoint; it receives no more events."),
    deliveries,
    _WEBHOOKS._replace(metavar="DELIVERY").item_command(
        "redeliver", "Send a delivery again.", fields=_DELIVERY
    ),
    _WEBHOOKS.item_command(
        "rotate-secret",
        "Create a new signing secret and print it, once; for now the old one signs as well.",
        method="rotate_secret",
        fields=_SECRET,
    ),
)
