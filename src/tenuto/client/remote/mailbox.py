"""The mailboxes of agents over HTTP, with the methods of the engine."""

from uuid import UUID

import msgspec

from tenuto.client.remote.bodies import to_camel
from tenuto.client.remote.http import ApiRequest, ServerConnection
from tenuto.client.remote.worker import V1
from tenuto.engine.agents.mailbox import Message, MessageBatch, MessagePage
from tenuto.model.agents.messages import NewMessage


class RemoteMailboxes:
    """The mailboxes of the agents of the token's workspace."""

    def __init__(self, connection: ServerConnection) -> None:
        self._connection = connection

    async def send(self, agent: UUID, new: NewMessage) -> Message:
        """Sends a message to an agent, only once even if the response is lost."""
        fields = msgspec.structs.asdict(new)
        if new.client_message_id is None:
            fields["client_message_id"] = str(self._connection.clock.new_id())
        body = {to_camel(name): value for name, value in fields.items()}
        path = f"{V1}/agents/{agent}/messages"
        return await self._connection.request(
            Message, ApiRequest(method="POST", path=path, body=body, repeatable=True)
        )

    async def page(
        self, agent: UUID, limit: int = 100, cursor: UUID | None = None, *, waiting: bool = True
    ) -> MessagePage:
        """Returns a page of an agent's waiting messages, oldest first.

        With `waiting=False` it returns all stored messages, dequeued or not.
        """
        params = {"limit": limit, "cursor": cursor, "waiting": "true" if waiting else "false"}
        path = f"{V1}/agents/{agent}/messages"
        request = ApiRequest(method="GET", path=path, params=params, repeatable=True)
        return await self._connection.request(MessagePage, request)

    async def dequeue(
        self, agent: UUID, limit: int = 100, batch: UUID | None = None
    ) -> MessageBatch:
        """Removes and returns the oldest messages, each once even if the response is lost."""
        body = {"limit": limit, "batchId": batch or self._connection.clock.new_id()}
        path = f"{V1}/agents/{agent}/messages/dequeue"
        return await self._connection.request(
            MessageBatch, ApiRequest(method="POST", path=path, body=body, repeatable=True)
        )
