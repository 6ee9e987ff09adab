"""The mailboxes of agents behind a server: the calls of the engine's own."""

from uuid import UUID

import msgspec

from tenuto.client.remote.bodies import camel
from tenuto.client.remote.http import ApiRequest, ServerConnection
from tenuto.client.remote.worker import V1
from tenuto.engine.agents.mailbox import Message, MessageBatch, MessagePage
from tenuto.model.agents.messages import NewMessage


class RemoteMailboxes:
    """The mailboxes of the agents of a token's workspace."""

    def __init__(self, link: ServerConnection) -> None:
        self._link = link

    async def send(self, agent: UUID, new: NewMessage) -> Message:
        """Say something to an agent, once though the answer be lost."""
        said = msgspec.structs.asdict(new)
        if new.client_message_id is None:
            said["client_message_id"] = str(self._link.clock.new_id())
        body = {camel(name): value for name, value in said.items()}
        path = f"{V1}/agents/{agent}/messages"
        return await self._link.ask(
            Message, ApiRequest(method="POST", path=path, body=body, repeatable=True)
        )

    async def page(
        self, agent: UUID, limit: int = 100, cursor: UUID | None = None, *, waiting: bool = True
    ) -> MessagePage:
        """What waits for an agent, oldest first; or all that is kept, taken or not."""
        params = {"limit": limit, "cursor": cursor, "waiting": "true" if waiting else "false"}
        path = f"{V1}/agents/{agent}/messages"
        ask = ApiRequest(method="GET", path=path, params=params, repeatable=True)
        return await self._link.ask(MessagePage, ask)

    async def take(self, agent: UUID, limit: int = 100, batch: UUID | None = None) -> MessageBatch:
        """Take the oldest messages out of the mailbox, each once though the answer be lost."""
        body = {"limit": limit, "batchId": batch or self._link.clock.new_id()}
        path = f"{V1}/agents/{agent}/messages/dequeue"
        return await self._link.ask(
            MessageBatch, ApiRequest(method="POST", path=path, body=body, repeatable=True)
        )
