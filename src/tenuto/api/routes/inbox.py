"""Routes for the inbox: approvals and questions that wait for a person."""

from typing import Annotated, Literal
from uuid import UUID

import msgspec
from litestar.params import FromPath, FromQuery, JSONBody, QueryParameter

from tenuto.api.operation import READ, WRITE, operation
from tenuto.api.routes.flow_bodies import AnswerBody, ApproveBody, CommentBody
from tenuto.api.routes.tasks import Limit
from tenuto.api.service import InjectedContext
from tenuto.engine.agents.inbox import Inbox, InboxItem
from tenuto.model.errors import Forbidden
from tenuto.model.limits.budgets import Budget

ItemStatus = Annotated[
    Literal["OPEN", "APPROVED", "REJECTED", "ANSWERED", "EXPIRED"] | None,
    QueryParameter(name="status"),
]


class InboxPage(msgspec.Struct, frozen=True, rename="camel"):
    """A page of inbox items, newest first, and the cursor of the next page."""

    items: list[InboxItem]
    next_cursor: UUID | None = None


@operation("GET", "/inbox", READ, remote=Inbox.list)
async def list_inbox_items(
    ctx: InjectedContext,
    status: ItemStatus = None,
    limit: Limit = 100,
    cursor: FromQuery[UUID | None] = None,
) -> InboxPage:
    """Returns inbox items, newest first; with `status=OPEN` only those that wait for an answer."""
    items = await ctx.engine.inbox.list(status, limit, cursor)
    return InboxPage(items, items[-1].id if len(items) == limit else None)


@operation("GET", "/inbox/{item_id:uuid}", READ, remote=Inbox.show)
async def get_inbox_item(ctx: InjectedContext, item_id: FromPath[UUID]) -> InboxItem:
    """Returns one inbox item."""
    return await ctx.engine.inbox.show(item_id)


@operation("POST", "/inbox/{item_id:uuid}/approve", WRITE, status_code=200)
async def approve_inbox_item(
    ctx: InjectedContext, item_id: FromPath[UUID], data: JSONBody[ApproveBody | None] = None
) -> InboxItem:
    """Approves an item; the first answer counts, and the task continues."""
    budget = None if data is None else data.budget
    return await _resolve_item(ctx, item_id, data, approve=True, budget=budget)


@operation("POST", "/inbox/{item_id:uuid}/reject", WRITE, status_code=200)
async def reject_inbox_item(
    ctx: InjectedContext, item_id: FromPath[UUID], data: JSONBody[CommentBody | None] = None
) -> InboxItem:
    """Rejects an item; the first answer counts, and the task fails or is skipped."""
    return await _resolve_item(ctx, item_id, data, approve=False)


@operation("POST", "/inbox/{item_id:uuid}/answer", WRITE, status_code=200, remote=Inbox.dismiss)
async def answer_inbox_item(
    ctx: InjectedContext, item_id: FromPath[UUID], data: JSONBody[AnswerBody]
) -> InboxItem:
    """Answers an item that needs no approval; the comment is the answer."""
    _check_person(ctx)
    await ctx.engine.inbox.dismiss(item_id, data.comment)
    return await ctx.engine.inbox.show(item_id)


async def _resolve_item(
    ctx: InjectedContext,
    item: UUID,
    data: CommentBody | None,
    *,
    approve: bool,
    budget: Budget | None = None,
) -> InboxItem:
    """Approves or rejects an item and returns it; raises `Forbidden` for an agent's token."""
    _check_person(ctx)
    comment = None if data is None else data.comment
    await ctx.engine.inbox.answer(item, approve=approve, comment=comment, budget=budget)
    return await ctx.engine.inbox.show(item)


def _check_person(ctx: InjectedContext) -> None:
    """Raises `Forbidden` for an agent's token: agents cannot answer for a person."""
    if ctx.caller.agent is not None:
        raise Forbidden("an agent's token cannot answer inbox items; use a user's token")
