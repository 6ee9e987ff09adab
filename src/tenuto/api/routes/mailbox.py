"""Routes for mailboxes: send messages to agents, and dequeue them."""

from typing import Annotated, Any
from uuid import UUID

from litestar.params import FromPath, FromQuery, JSONBody, QueryParameter

from tenuto.api.operation import READ, WORK, WRITE, operation
from tenuto.api.routes.agent_protocol import check_attempt_current
from tenuto.api.routes.bodies import LenientBody
from tenuto.api.routes.flow_bodies import StrictBody
from tenuto.api.routes.tasks import Limit
from tenuto.api.service import InjectedContext
from tenuto.engine.agents.mailbox import Mailboxes, Message, MessageBatch, MessagePage
from tenuto.model.agents.messages import NewMessage


class MessageBody(StrictBody, kw_only=True):
    """A message to an agent."""

    kind: str
    body: Any = None
    scope_key: str | None = None
    coalescable: bool = False
    client_message_id: str | None = None


class DequeueBody(LenientBody):
    """How many messages to dequeue; with `batchId` a repeated request returns the same messages."""

    limit: int = 100
    batch_id: UUID | None = None


@operation("GET", "/agents/{agent_id:uuid}/messages", READ, remote=Mailboxes.page)
async def list_messages(
    ctx: InjectedContext,
    agent_id: FromPath[UUID],
    limit: Limit = 100,
    cursor: FromQuery[UUID | None] = None,
    waiting: Annotated[bool, QueryParameter(name="waiting")] = True,
) -> MessagePage:
    """Returns the agent's waiting messages, oldest first.

    With `waiting=false` recently dequeued messages are included.
    """
    return await ctx.engine.mailboxes.page(agent_id, limit, cursor, waiting=waiting)


@operation("POST", "/agents/{agent_id:uuid}/messages", WRITE)
async def send_message(
    ctx: InjectedContext, agent_id: FromPath[UUID], data: JSONBody[MessageBody]
) -> Message:
    """Sends a message to the agent; a repeated `clientMessageId` sends it only once."""
    message = NewMessage(
        kind=data.kind,
        body=data.body,
        scope_key=data.scope_key,
        coalescable=data.coalescable,
        client_message_id=data.client_message_id,
    )
    return await ctx.engine.mailboxes.send(agent_id, message)


@operation("POST", "/agents/{agent_id:uuid}/messages/dequeue", WORK, status_code=200)
async def dequeue_messages(
    ctx: InjectedContext, agent_id: FromPath[UUID], data: JSONBody[DequeueBody | None] = None
) -> MessageBatch:
    """Dequeues the oldest messages of the mailbox, each once."""
    body = data or DequeueBody()
    await check_attempt_current(ctx)
    return await ctx.engine.mailboxes.dequeue(agent_id, body.limit, body.batch_id)
