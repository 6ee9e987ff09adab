"""`orchestrate inbox`: approvals and questions for people, and their answers."""

from typing import TYPE_CHECKING, Any

import click

from tenuto.cli.base import GlobalOptions, command, group
from tenuto.cli.connection import call_client
from tenuto.cli.flows.flows import LIMIT
from tenuto.cli.output import Columns, print_list, print_one
from tenuto.cli.parse import budget_options, pop_budget

if TYPE_CHECKING:
    from uuid import UUID

    from tenuto.client.client import AsyncClient
    from tenuto.engine.agents.inbox import InboxItem


def _body_field(item: "InboxItem", name: str) -> str | None:
    """Returns a field of the item's body, or `None`."""
    return item.body.get(name) if isinstance(item.body, dict) else None


_FIELDS: Columns = {
    "id": lambda item: item.id,
    "kind": lambda item: item.kind,
    "title": lambda item: item.title,
    "status": lambda item: item.status,
    "task": lambda item: item.task,
    "flow": lambda item: _body_field(item, "flow"),
    "reason": lambda item: _body_field(item, "reason"),
    "what to do": lambda item: _body_field(item, "prompt"),
    "answer by": lambda item: item.expires_at,
    "asked": lambda item: item.created_at,
    "answered": lambda item: item.decided_at,
    "answered by": lambda item: item.decided_by,
    "comment": lambda item: item.decision.get("comment") if item.decision else None,
}
_STATUSES = ("open", "approved", "rejected", "answered", "expired", "all")
_ITEM = click.argument("item_id", type=click.UUID, metavar="ID")
_COMMENT = click.option("--comment", metavar="TEXT", help="Comment for the agent.")


@group("inbox", "orchestrate inbox list", "orchestrate inbox list --status all")
def inbox() -> None:
    """List and answer approvals and questions."""


@command("list", "orchestrate inbox list", "orchestrate inbox list --status all --limit 20")
@click.option(
    "--status",
    type=click.Choice(_STATUSES, case_sensitive=False),
    default="open",
    show_default=True,
    help="Filter by status.",
)
@LIMIT
@click.option("--cursor", type=click.UUID, metavar="ID", help="Only items older than this one.")
@click.pass_obj
def list_(options: GlobalOptions, status: str, limit: int, cursor: "UUID | None") -> None:
    """List approvals and questions, newest first."""
    status_filter = None if status.lower() == "all" else status.upper()

    async def read(client: "AsyncClient") -> "list[InboxItem]":
        items = client.inbox.list(status_filter, limit=limit, cursor=cursor)
        return [item async for item in items]

    columns: Columns = {
        "ID": lambda item: item.id,
        "STATUS": lambda item: item.status,
        "KIND": lambda item: item.kind,
        "ASKED": lambda item: item.created_at,
        "ANSWER BY": lambda item: item.expires_at,
        "TITLE": lambda item: item.title,
    }
    items = call_client(options, read)
    print_list(options, "items", items, columns, wide="TITLE")
    if len(items) == limit and not options.json:
        click.echo(f"more: --cursor {items[-1].id}", err=True)


@command("show", "orchestrate inbox show 0198c0de-0000-7000-8000-000000000000")
@_ITEM
@click.pass_obj
def show(options: GlobalOptions, item_id: "UUID") -> None:
    """Show an item, with its answer if there is one."""
    print_one(options, call_client(options, lambda client: client.inbox.show(item_id)), _FIELDS)


@command(
    "approve",
    "orchestrate inbox approve 0198c0de-0000-7000-8000-000000000000",
    "orchestrate inbox approve 0198c0de-0000-7000-8000-000000000000 --budget-usd 20",
)
@_ITEM
@_COMMENT
@budget_options
@click.pass_obj
def approve(options: GlobalOptions, /, item_id: "UUID", comment: str | None, **budget: Any) -> None:
    """Approve a request; the first answer counts, and the task continues.

    If the task's budget was used up, the budget is doubled, or set to the budget options.
    """
    new_budget = pop_budget(budget)
    item = call_client(options, lambda client: client.inbox.approve(item_id, comment, new_budget))
    print_one(options, item, _FIELDS)


@command(
    "reject",
    "orchestrate inbox reject 0198c0de-0000-7000-8000-000000000000 --comment 'not like this'",
)
@_ITEM
@_COMMENT
@click.pass_obj
def reject(options: GlobalOptions, item_id: "UUID", comment: str | None) -> None:
    """Reject a request; the first answer counts, and the task fails or is skipped."""
    print_one(
        options, call_client(options, lambda client: client.inbox.reject(item_id, comment)), _FIELDS
    )


@command("answer", "orchestrate inbox answer 0198c0de-0000-7000-8000-000000000000 'I saw to it'")
@_ITEM
@click.argument("comment", metavar="TEXT")
@click.pass_obj
def answer(options: GlobalOptions, item_id: "UUID", comment: str) -> None:
    """Answer a question (not an approval)."""
    print_one(
        options, call_client(options, lambda client: client.inbox.answer(item_id, comment)), _FIELDS
    )


for _command in (list_, show, approve, reject, answer):
    inbox.add_command(_command)
