"""The blocking form of `client.agents`."""

from collections.abc import Generator, Sequence
from typing import Any
from uuid import UUID

from tenuto.client.agents import Agents
from tenuto.client.background_loop import BlockingResource
from tenuto.engine.agents.eligibility import AgentExplanation
from tenuto.engine.agents.mailbox import Message, MessageBatch, MessagePage
from tenuto.engine.agents.registry import AgentHealth, AgentToken, AgentView
from tenuto.engine.views import TaskSummary


class BlockingAgents(BlockingResource[Agents]):
    """The agents of a workspace. Methods accept an agent's name or its id."""

    def list(self) -> Generator[AgentView, None, None]:
        return self._iterate(self._resource.list())

    def get(self, agent: UUID | str) -> AgentView:
        return self._wait(self._resource.get(agent))

    def put(self, name: str, **fields: Any) -> AgentView:
        return self._wait(self._resource.put(name, **fields))

    def health(self, agent: UUID | str, limit: int = 60) -> AgentHealth:
        return self._wait(self._resource.health(agent, limit))

    def explain(self, agent: UUID | str) -> AgentExplanation:
        return self._wait(self._resource.explain(agent))

    def message(
        self,
        agent: UUID | str,
        body: Any,
        *,
        kind: str = "note",
        scope_key: str | None = None,
        coalescable: bool = False,
        client_message_id: str | None = None,
    ) -> Message:
        return self._wait(
            self._resource.message(
                agent,
                body,
                kind=kind,
                scope_key=scope_key,
                coalescable=coalescable,
                client_message_id=client_message_id,
            )
        )

    def messages(
        self,
        agent: UUID | str,
        limit: int = 100,
        cursor: UUID | None = None,
        *,
        waiting: bool = True,
    ) -> MessagePage:
        return self._wait(self._resource.messages(agent, limit, cursor, waiting=waiting))

    def dequeue(
        self, agent: UUID | str, limit: int = 100, batch: UUID | None = None
    ) -> MessageBatch:
        return self._wait(self._resource.dequeue(agent, limit, batch))

    def tasks(
        self, agent: UUID | str, status: Sequence[str] = (), limit: int = 100
    ) -> Sequence[TaskSummary]:
        return self._wait(self._resource.tasks(agent, status, limit))

    def terminate(
        self, agent: UUID | str, reason: str | None = None, *, graceful: bool = True
    ) -> AgentView:
        return self._wait(self._resource.terminate(agent, reason, graceful=graceful))

    def delete(self, agent: UUID | str) -> None:
        return self._wait(self._resource.delete(agent))

    def token(self, agent: UUID | str) -> AgentToken:
        return self._wait(self._resource.token(agent))
