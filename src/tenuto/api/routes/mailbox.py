"""Mailboxes: what is said to agents, and how they take it."""

from typing import Annotated, Any
from uuid import UUID

from litestar import get, post
from litestar.params import FromPath, FromQuery, JSONBody, QueryParameter

from tenuto.api.routes.agent_protocol import check_current
from tenuto.api.routes.bodies import LenientBody, Written
from tenuto.api.routes.tasks import Limit
from tenuto.api.service import InjectedContext
from tenuto.engine.agents.mailbox import Message, MessageBatch, MessagePage
from tenuto.model.agents.messages import NewMessage


class MessageBody(Written, kw_only=True):
    """What is said to an agent."""

    kind: str
    body: Any = None
    scope_key: str | None = None
    coalescable: bool = False
    client_message_id: str | None = None


class DequeueBody(LenientBody):
    """How many messages an agent takes; `batch_id` makes it one taking though it be repeated."""

    limit: int = 100
    batch_id: UUID | None = None


@get("/agents/{agent_id:uuid}/messages")
async def find(
    desk: InjectedContext,
    agent_id: FromPath[UUID],
    limit: Limit = 100,
    cursor: FromQuery[UUID | None] = None,
    waiting: Annotated[bool, QueryParameter(name="waiting")] = True,
) -> MessagePage:
    """What waits for the agent, oldest first; with `waiting=false` also what it took lately."""
    return await desk.engine.mailboxes.page(agent_id, limit, cursor, waiting=waiting)


@post("/agents/{agent_id:uuid}/messages")
async def send(
    desk: InjectedContext, agent_id: FromPath[UUID], data: JSONBody[MessageBody]
) -> Message:
    """Say something to the agent; with a `clientMessageId`, once though it be repeated."""
    new = NewMessage(
        kind=data.kind,
        body=data.body,
        scope_key=data.scope_key,
        coalescable=data.coalescable,
        client_message_id=data.client_message_id,
    )
    return await desk.engine.mailboxes.send(agent_id, new)


@post("/agents/{agent_id:uuid}/messages/dequeue", status_code=200)
async def dequeue(
    desk: InjectedContext, agent_id: FromPath[UUID], data: JSONBody[DequeueBody | None] = None
) -> MessageBatch:
    """Take the oldest messages out of the mailbox, each once."""
    wish = data or DequeueBody()
    await check_current(desk)
    return await desk.engine.mailboxes.take(agent_id, wish.limit, wish.batch_id)


HANDLERS = [find, send, dequeue]
