"""`orchestrate webhook`: endpoints that hear of events."""

from typing import TYPE_CHECKING, Any

import click

from tenuto.cli.base import Globals, command, group
from tenuto.cli.connection import ask
from tenuto.cli.output import Columns, print_done, print_one, tell_list, tell_page, words

if TYPE_CHECKING:
    from uuid import UUID

    from tenuto.client.client import AsyncClient
    from tenuto.engine.webhooks.endpoints import WebhookView

_FIELDS: Columns = {
    "id": lambda each: each.id,
    "url": lambda each: each.url,
    "events": lambda each: each.events,
    "description": lambda each: each.description,
    "enabled": lambda each: each.enabled,
    "why not": lambda each: each.disabled_why,
    "failures": lambda each: each.failures,
    "left alone until": lambda each: each.closed_until,
    "created": lambda each: each.created_at,
}
_SECRET: Columns = {
    "id": lambda each: each.webhook.id,
    "url": lambda each: each.webhook.url,
    "secret": lambda each: each.secret,
}
_DELIVERY: Columns = {
    "id": lambda each: each.id,
    "event": lambda each: each.event,
    "status": lambda each: each.status,
    "attempts": lambda each: each.attempts,
    "next attempt": lambda each: each.next_attempt_at,
    "error": lambda each: each.error,
}
_WEBHOOK = click.argument("webhook_id", type=click.UUID, metavar="ID")


@group(
    "webhook",
    "orchestrate webhook list",
    "orchestrate webhook create https://example.com/hook --event task.status_changed",
)
def webhook() -> None:
    """Tell endpoints of events by signed messages."""


@command("list", "orchestrate webhook list")
@click.pass_obj
def list_(given: Globals) -> None:
    """List the endpoints, newest first."""

    async def read(client: "AsyncClient") -> "list[WebhookView]":
        return [each async for each in client.webhooks.list()]

    columns: Columns = {
        "ID": lambda each: each.id,
        "ENABLED": lambda each: each.enabled,
        "FAILURES": lambda each: each.failures,
        "EVENTS": lambda each: each.events,
        "URL": lambda each: each.url,
    }
    tell_list(given, "webhooks", ask(given, read), columns, wide="URL")


@command(
    "create",
    "orchestrate webhook create https://example.com/hook --event task.dead",
    "orchestrate webhook create https://example.com/hook --event '*' --description Pager",
)
@click.argument("address", metavar="URL")
@click.option("--event", "events", multiple=True, required=True, help="An event; * for all.")
@click.option("--description", metavar="TEXT", help="For people.")
@click.pass_obj
def create(given: Globals, address: str, events: tuple[str, ...], description: str | None) -> None:
    """Tell an endpoint of events from now on; prints the secret of its signatures, once."""
    made = ask(given, lambda client: client.webhooks.create(address, words(events), description))
    print_one(given, made, _SECRET)


@command("show", "orchestrate webhook show 0198c0de-0000-7000-8000-000000000000")
@_WEBHOOK
@click.pass_obj
def show(given: Globals, webhook_id: "UUID") -> None:
    """Show an endpoint and how it does."""
    print_one(given, ask(given, lambda client: client.webhooks.get(webhook_id)), _FIELDS)


@command("update", "orchestrate webhook update 0198c0de-0000-7000-8000-000000000000 --disable")
@_WEBHOOK
@click.option("--address", "address", metavar="URL", help="Where it is from now on.")
@click.option("--event", "events", multiple=True, help="The events from now on; repeatable.")
@click.option("--description", metavar="TEXT", help="For people.")
@click.option("--enable/--disable", "enabled", default=None, help="Turn it on or off.")
@click.pass_obj
def update(given: Globals, /, webhook_id: "UUID", **fields: Any) -> None:
    """Change an endpoint, or turn it off and on."""
    told = {
        "url": fields["address"],
        "events": words(fields["events"]) or None,
        "description": fields["description"],
        "enabled": fields["enabled"],
    }
    print_one(given, ask(given, lambda client: client.webhooks.update(webhook_id, **told)), _FIELDS)


@command("delete", "orchestrate webhook delete 0198c0de-0000-7000-8000-000000000000")
@_WEBHOOK
@click.pass_obj
def delete(given: Globals, webhook_id: "UUID") -> None:
    """Tell an endpoint nothing more."""
    ask(given, lambda client: client.webhooks.delete(webhook_id))
    print_done(given, f"deleted {webhook_id}")


@command("rotate-secret", "orchestrate webhook rotate-secret 0198c0de-0000-7000-8000-000000000000")
@_WEBHOOK
@click.pass_obj
def rotate_secret(given: Globals, webhook_id: "UUID") -> None:
    """Make a new secret and print it, once; the old one still signs as well for now."""
    print_one(given, ask(given, lambda client: client.webhooks.rotate_secret(webhook_id)), _SECRET)


@command("deliveries", "orchestrate webhook deliveries 0198c0de-0000-7000-8000-000000000000")
@_WEBHOOK
@click.option("--limit", type=click.IntRange(1, 1000), default=50, show_default=True, help="Most.")
@click.option("--cursor", type=click.UUID, metavar="ID", help="Only older than this message.")
@click.pass_obj
def deliveries(given: Globals, webhook_id: "UUID", limit: int, cursor: "UUID | None") -> None:
    """List what was sent to an endpoint, newest first."""
    page = ask(given, lambda client: client.webhooks.deliveries(webhook_id, limit, cursor))
    columns: Columns = {
        "ID": lambda each: each.id,
        "STATUS": lambda each: each.status,
        "TRIES": lambda each: each.attempts,
        "HTTP": lambda each: each.response_status,
        "EVENT": lambda each: each.event,
        "ERROR": lambda each: each.error,
    }
    tell_page(given, page, page.deliveries, columns, wide="ERROR")


@command("redeliver", "orchestrate webhook redeliver 0198c0de-0000-7000-8000-000000000000")
@click.argument("delivery_id", type=click.UUID, metavar="DELIVERY")
@click.pass_obj
def redeliver(given: Globals, delivery_id: "UUID") -> None:
    """Send a message again."""
    print_one(given, ask(given, lambda client: client.webhooks.redeliver(delivery_id)), _DELIVERY)


for _each in (
    list_,
    create,
    show,
    update,
    delete,
    deliveries,
    redeliver,
    rotate_secret,
):
    webhook.add_command(_each)
