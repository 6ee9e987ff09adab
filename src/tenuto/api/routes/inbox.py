"""The inbox: what waits for people, and their answers."""

from typing import Annotated, Literal
from uuid import UUID

import msgspec
from litestar import get, post
from litestar.params import FromPath, FromQuery, JSONBody, QueryParameter

from tenuto.api.routes.flow_bodies import AnswerBody, ApproveBody, CommentBody
from tenuto.api.routes.tasks import Limit
from tenuto.api.service import InjectedContext
from tenuto.engine.agents.inbox import InboxItem
from tenuto.model.errors import Forbidden
from tenuto.model.limits.budgets import Budget

Status = Annotated[
    Literal["OPEN", "APPROVED", "REJECTED", "ANSWERED", "EXPIRED"] | None,
    QueryParameter(name="status"),
]


class InboxPage(msgspec.Struct, frozen=True, rename="camel"):
    """What people were asked, newest first, and where the next items begin."""

    items: list[InboxItem]
    next_cursor: UUID | None = None


@get("/inbox")
async def find(
    desk: InjectedContext,
    status: Status = None,
    limit: Limit = 100,
    cursor: FromQuery[UUID | None] = None,
) -> InboxPage:
    """What people were asked, newest first; with `status=OPEN` what still waits for an answer."""
    items = await desk.engine.inbox.list(status, limit, cursor)
    return InboxPage(items, items[-1].id if len(items) == limit else None)


@get("/inbox/{item_id:uuid}")
async def show(desk: InjectedContext, item_id: FromPath[UUID]) -> InboxItem:
    """One item."""
    return await desk.engine.inbox.show(item_id)


@post("/inbox/{item_id:uuid}/approve", status_code=200)
async def approve(
    desk: InjectedContext, item_id: FromPath[UUID], data: JSONBody[ApproveBody | None] = None
) -> InboxItem:
    """Say yes; the first answer counts, and the task goes on by it."""
    budget = None if data is None else data.budget
    return await _answered(desk, item_id, data, approve=True, budget=budget)


@post("/inbox/{item_id:uuid}/reject", status_code=200)
async def reject(
    desk: InjectedContext, item_id: FromPath[UUID], data: JSONBody[CommentBody | None] = None
) -> InboxItem:
    """Say no; the first answer counts, and the task fails or is skipped by it."""
    return await _answered(desk, item_id, data, approve=False)


@post("/inbox/{item_id:uuid}/answer", status_code=200)
async def answer(
    desk: InjectedContext, item_id: FromPath[UUID], data: JSONBody[AnswerBody]
) -> InboxItem:
    """Answer an item that asks for no yes or no."""
    _check_person(desk)
    await desk.engine.inbox.dismiss(item_id, data.comment)
    return await desk.engine.inbox.show(item_id)


async def _answered(
    desk: InjectedContext,
    item: UUID,
    data: CommentBody | None,
    *,
    approve: bool,
    budget: Budget | None = None,
) -> InboxItem:
    _check_person(desk)
    comment = None if data is None else data.comment
    await desk.engine.inbox.answer(item, approve=approve, comment=comment, budget=budget)
    return await desk.engine.inbox.show(item)


def _check_person(desk: InjectedContext) -> None:
    """Agents do not answer for people, whatever else their token may do."""
    if desk.caller.agent is not None:
        raise Forbidden("an agent's token does not allow it")


HANDLERS = [find, show, approve, reject, answer]
