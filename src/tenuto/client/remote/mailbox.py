"""The mailboxes of agents over HTTP, with the methods of the engine."""

from uuid import UUID

import msgspec

from tenuto.client.remote.bodies import to_camel
from tenuto.client.remote.generated import MailboxesCalls
from tenuto.engine.agents.mailbox import Message, MessageBatch
from tenuto.model.agents.messages import NewMessage


class RemoteMailboxes(MailboxesCalls):
    """The mailboxes of the agents of the token's workspace."""

    async def send(self, agent: UUID, new: NewMessage) -> Message:
        """Sends a message to an agent, only once even if the response is lost."""
        fields = msgspec.structs.asdict(new)
        if new.client_message_id is None:
            fields["client_message_id"] = str(self.connection.clock.new_id())
        body = {to_camel(name): value for name, value in fields.items()}
        return await self._call(Message, "POST", f"agents/{agent}/messages", body, repeatable=True)

    async def dequeue(
        self, agent: UUID, limit: int = 100, batch: UUID | None = None
    ) -> MessageBatch:
        """Removes and returns the oldest messages, each once even if the response is lost."""
        body = {"limit": limit, "batchId": batch or self.connection.clock.new_id()}
        path = f"agents/{agent}/messages/dequeue"
        return await self._call(MessageBatch, "POST", path, body, repeatable=True)
