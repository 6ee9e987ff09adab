"""`orchestrate inbox`: approvals and questions for people, and their answers."""

from typing import TYPE_CHECKING, Any

import click

from tenuto.cli.base import GlobalOptions, command, cursor_option, group, limit_option
from tenuto.cli.connection import call_client
from tenuto.cli.output import Columns, columns, print_list
from tenuto.cli.parse import budget_options, pop_budget
from tenuto.cli.shared_commands import Resource, print_result

if TYPE_CHECKING:
    from uuid import UUID

    from tenuto.client.client import AsyncClient
    from tenuto.engine.agents.inbox import InboxItem


def _body_field(item: "InboxItem", name: str) -> str | None:
    """Returns a field of the item's body, or `None`."""
    return item.body.get(name) if isinstance(item.body, dict) else None


_FIELDS: Columns = {
    **columns("id, kind, title, status, task"),
    "flow": lambda item: _body_field(item, "flow"),
    "reason": lambda item: _body_field(item, "reason"),
    "what to do": lambda item: _body_field(item, "prompt"),
    **columns(
        "answer by: expires_at, asked: created_at, answered: decided_at, answered by: decided_by"
    ),
    "comment": lambda item: item.decision.get("comment") if item.decision else None,
}
_INBOX = Resource(
    "inbox",
    lambda client: client.inbox,
    _FIELDS,
    "0198c0de-0000-7000-8000-000000000000",
    "ID",
    click.UUID,
)
_STATUSES = ("open", "approved", "rejected", "answered", "expired", "all")
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
@limit_option()
@cursor_option("items")
@click.pass_obj
def list_(options: GlobalOptions, status: str, limit: int, cursor: "UUID | None") -> None:
    """List approvals and questions, newest first."""
    status_filter = None if status.lower() == "all" else status.upper()

    async def read_items(client: "AsyncClient") -> "list[InboxItem]":
        items = client.inbox.list(status_filter, limit=limit, cursor=cursor)
        return [item async for item in items]

    headings = columns("ID, STATUS, KIND, ASKED: created_at, ANSWER BY: expires_at, TITLE")
    items = call_client(options, read_items)
    print_list(options, "items", items, headings, wide="TITLE")
    if len(items) == limit and not options.json:
        click.echo(f"more: --cursor {items[-1].id}", err=True)


@command(
    "approve",
    "orchestrate inbox approve 0198c0de-0000-7000-8000-000000000000",
    "orchestrate inbox approve 0198c0de-0000-7000-8000-000000000000 --budget-usd 20",
)
@click.argument("item_id", type=click.UUID, metavar="ID")
@_COMMENT
@budget_options
@click.pass_obj
def approve(options: GlobalOptions, /, item_id: "UUID", comment: str | None, **budget: Any) -> None:
    """Approve a request; the first answer counts, and the task continues.

    If the task's budget was used up, the budget is doubled, or set to the budget options.
    """
    new_budget = pop_budget(budget)
    print_result(
        options, lambda client: client.inbox.approve(item_id, comment, new_budget), _FIELDS
    )


inbox.add_commands(
    list_,
    _INBOX.item_command("show", "Show an item, with its answer if there is one."),
    approve,
    _INBOX.item_command(
        "reject",
        "Reject a request; the first answer counts, and the task fails or is skipped.",
        _COMMENT,
        examples=(f"orchestrate inbox reject {_INBOX.example} --comment 'not like this'",),
    ),
    _INBOX.item_command(
        "answer",
        "Answer a question (not an approval).",
        click.argument("comment", metavar="TEXT"),
        examples=(f"orchestrate inbox answer {_INBOX.example} 'I saw to it'",),
    ),
)
