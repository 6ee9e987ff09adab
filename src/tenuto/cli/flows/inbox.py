"""`orchestrate inbox`: what waits for a person, and the answers."""

from typing import TYPE_CHECKING, Any

import click

from tenuto.cli.base import Globals, command, group
from tenuto.cli.connection import ask
from tenuto.cli.flows.flows import LIMIT
from tenuto.cli.output import Columns, print_one, tell_list
from tenuto.cli.parse import budget_options, read_budget

if TYPE_CHECKING:
    from uuid import UUID

    from tenuto.client.client import AsyncClient
    from tenuto.engine.agents.inbox import InboxItem


def _said(item: "InboxItem", name: str) -> str | None:
    """A part of what was asked, if it has it."""
    return item.body.get(name) if isinstance(item.body, dict) else None


_FIELDS: Columns = {
    "id": lambda each: each.id,
    "kind": lambda each: each.kind,
    "title": lambda each: each.title,
    "status": lambda each: each.status,
    "task": lambda each: each.task,
    "flow": lambda each: _said(each, "flow"),
    "reason": lambda each: _said(each, "reason"),
    "what to do": lambda each: _said(each, "prompt"),
    "answer by": lambda each: each.expires_at,
    "asked": lambda each: each.created_at,
    "answered": lambda each: each.decided_at,
    "answered by": lambda each: each.decided_by,
    "comment": lambda each: each.decision.get("comment") if each.decision else None,
}
_STATUSES = ("open", "approved", "rejected", "answered", "expired", "all")
_ITEM = click.argument("item_id", type=click.UUID, metavar="ID")
_COMMENT = click.option(
    "--comment", metavar="TEXT", help="What you say to it; whoever goes on reads it."
)


@group("inbox", "orchestrate inbox list", "orchestrate inbox list --status all")
def inbox() -> None:
    """See what waits for a person, and answer."""


@command("list", "orchestrate inbox list", "orchestrate inbox list --status all --limit 20")
@click.option(
    "--status",
    type=click.Choice(_STATUSES, case_sensitive=False),
    default="open",
    show_default=True,
    help="Only these.",
)
@LIMIT
@click.option("--cursor", type=click.UUID, metavar="ID", help="Only older than this item.")
@click.pass_obj
def list_(given: Globals, status: str, limit: int, cursor: "UUID | None") -> None:
    """List what waits for an answer, newest first."""
    wanted = None if status.lower() == "all" else status.upper()

    async def read(client: "AsyncClient") -> "list[InboxItem]":
        found = client.inbox.list(wanted, limit=limit, cursor=cursor)
        return [each async for each in found]

    columns: Columns = {
        "ID": lambda each: each.id,
        "STATUS": lambda each: each.status,
        "KIND": lambda each: each.kind,
        "ASKED": lambda each: each.created_at,
        "ANSWER BY": lambda each: each.expires_at,
        "TITLE": lambda each: each.title,
    }
    items = ask(given, read)
    tell_list(given, "items", items, columns, wide="TITLE")
    if len(items) == limit and not given.json:
        click.echo(f"more: --cursor {items[-1].id}", err=True)


@command("show", "orchestrate inbox show 0198c0de-0000-7000-8000-000000000000")
@_ITEM
@click.pass_obj
def show(given: Globals, item_id: "UUID") -> None:
    """Show what is asked, and the answer if there is one."""
    print_one(given, ask(given, lambda client: client.inbox.show(item_id)), _FIELDS)


@command(
    "approve",
    "orchestrate inbox approve 0198c0de-0000-7000-8000-000000000000",
    "orchestrate inbox approve 0198c0de-0000-7000-8000-000000000000 --budget-usd 20",
)
@_ITEM
@_COMMENT
@budget_options
@click.pass_obj
def approve(given: Globals, /, item_id: "UUID", comment: str | None, **budget: Any) -> None:
    """Say yes; the first answer counts, and the task goes on.

    A task whose budget is used up may use twice as much, or what the options say.
    """
    wanted = read_budget(budget)
    item = ask(given, lambda client: client.inbox.approve(item_id, comment, wanted))
    print_one(given, item, _FIELDS)


@command(
    "reject",
    "orchestrate inbox reject 0198c0de-0000-7000-8000-000000000000 --comment 'not like this'",
)
@_ITEM
@_COMMENT
@click.pass_obj
def reject(given: Globals, item_id: "UUID", comment: str | None) -> None:
    """Say no; the first answer counts, and the task fails or is skipped."""
    print_one(given, ask(given, lambda client: client.inbox.reject(item_id, comment)), _FIELDS)


@command("answer", "orchestrate inbox answer 0198c0de-0000-7000-8000-000000000000 'I saw to it'")
@_ITEM
@click.argument("comment", metavar="TEXT")
@click.pass_obj
def answer(given: Globals, item_id: "UUID", comment: str) -> None:
    """Answer what asks for no yes or no."""
    print_one(given, ask(given, lambda client: client.inbox.answer(item_id, comment)), _FIELDS)


for _each in (list_, show, approve, reject, answer):
    inbox.add_command(_each)
