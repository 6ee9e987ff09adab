"""The agents of a workspace, on the database itself or behind a server."""

from collections.abc import AsyncGenerator, Sequence
from typing import Any, Protocol
from uuid import UUID

import msgspec

from tenuto.client.remote.bodies import agent_body
from tenuto.client.remote.engine import AnyEngine, RemoteEngine
from tenuto.client.remote.http import ApiRequest
from tenuto.client.remote.worker import V1
from tenuto.engine.agents.eligibility import AgentExplanation
from tenuto.engine.agents.mailbox import Message, MessageBatch, MessagePage
from tenuto.engine.agents.registry import AgentHealth, AgentRegistry, AgentToken, AgentView
from tenuto.engine.engine import Engine
from tenuto.engine.tasks.query import Filter
from tenuto.engine.views import TaskSummary
from tenuto.model.agents.lifecycle import STALE_AFTER_S
from tenuto.model.agents.matching import AgentProfile
from tenuto.model.agents.messages import NewMessage
from tenuto.model.errors import Invalid, NotFound

PAGE = 500


class _AgentBackend(Protocol):
    """Where agents are kept."""

    async def page(self, after: str | None, limit: int) -> Sequence[AgentView]: ...

    async def show(self, agent: UUID) -> AgentView: ...

    async def profile(self, agent: AgentView) -> AgentProfile: ...

    async def put(self, profile: AgentProfile) -> AgentView: ...

    async def health(self, agent: UUID, limit: int) -> AgentHealth: ...

    async def forget(self, agent: UUID) -> None: ...

    async def token(self, agent: UUID) -> AgentToken: ...


class Agents:
    """The agents of a workspace. An agent is named by its name or its id."""

    def __init__(self, engine: AnyEngine) -> None:
        self._engine = engine
        self._place: _AgentBackend = (
            _RemoteAgents(engine) if isinstance(engine, RemoteEngine) else _DatabaseAgents(engine)
        )

    async def list(self) -> AsyncGenerator[AgentView, None]:
        """The agents by name."""
        after: str | None = None
        while page := await self._place.page(after, PAGE):
            for agent in page:
                yield agent
            if len(page) < PAGE:
                return
            after = page[-1].name

    async def get(self, agent: UUID | str) -> AgentView:
        """One agent."""
        if isinstance(agent, UUID):
            return await self._place.show(agent)
        names = []
        async for known in self.list():
            if agent in (known.name, str(known.id)):
                return known
            if known.status != "TERMINATED":
                names.append(known.name)
        raise NotFound(f"no agent {agent!r}; known are {', '.join(names) or 'none'}")

    async def put(self, name: str, **fields: Any) -> AgentView:
        """Register an agent or change it: what is not said stays as it was."""
        unknown = sorted(set(fields) - set(AgentProfile.__struct_fields__))
        if unknown:
            raise Invalid(f"an agent has no {unknown[0]}", field=unknown[0])
        try:
            before = await self._place.profile(await self.get(name))
        except NotFound:
            before = AgentProfile(
                id=self._engine.clock.new_id(),
                workspace=self._engine.workspace,
                name=name,
                runtimes=("http",),
            )
        told = {
            key: tuple(each) if isinstance(each, list) else each for key, each in fields.items()
        }
        return await self._place.put(msgspec.structs.replace(before, **told))

    async def health(self, agent: UUID | str, limit: int = 60) -> AgentHealth:
        """Whether an agent lives, and how it said it was within the last hour, newest first."""
        return await self._place.health((await self.get(agent)).id, limit)

    async def explain(self, agent: UUID | str) -> AgentExplanation:
        """What an agent may take, what waits for it, and why it takes nothing else."""
        return await self._engine.explain_agent((await self.get(agent)).id)

    async def message(
        self,
        agent: UUID | str,
        body: Any,
        *,
        kind: str = "note",
        scope_key: str | None = None,
        coalescable: bool = False,
        client_message_id: str | None = None,
    ) -> Message:
        """Say something to an agent; a coalescable message replaces those of its kind and scope."""
        new = NewMessage(
            kind=kind,
            body=body,
            scope_key=scope_key,
            coalescable=coalescable,
            client_message_id=client_message_id,
        )
        return await self._engine.mailboxes.send((await self.get(agent)).id, new)

    async def messages(
        self,
        agent: UUID | str,
        limit: int = 100,
        cursor: UUID | None = None,
        *,
        waiting: bool = True,
    ) -> MessagePage:
        """What waits for an agent, oldest first; or all that is kept, taken or not."""
        found = (await self.get(agent)).id
        return await self._engine.mailboxes.page(found, limit, cursor, waiting=waiting)

    async def dequeue(
        self, agent: UUID | str, limit: int = 100, batch: UUID | None = None
    ) -> MessageBatch:
        """Take the oldest messages out of an agent's mailbox, each once."""
        return await self._engine.mailboxes.take((await self.get(agent)).id, limit, batch)

    async def tasks(
        self, agent: UUID | str, status: Sequence[str] = (), limit: int = 100
    ) -> Sequence[TaskSummary]:
        """The tasks whose latest attempt was the agent's, newest first."""
        found = (await self.get(agent)).id
        return (await self._engine.list(Filter(agent=found, status=tuple(status)), limit)).tasks

    async def terminate(
        self, agent: UUID | str, reason: str | None = None, *, graceful: bool = True
    ) -> AgentView:
        """Let the agent take no more tasks; unless gracefully, its running ones are cancelled."""
        found = (await self.get(agent)).id
        await self._engine.terminate_agent(found, reason, graceful=graceful)
        return await self._place.show(found)

    async def delete(self, agent: UUID | str) -> None:
        """Forget an agent that runs nothing."""
        await self._place.forget((await self.get(agent)).id)

    async def token(self, agent: UUID | str) -> AgentToken:
        """A key for the agent's own process."""
        return await self._place.token((await self.get(agent)).id)


class _DatabaseAgents:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._registry = AgentRegistry(engine.core, engine.workspace)

    async def page(self, after: str | None, limit: int) -> Sequence[AgentView]:
        return await self._registry.page(after, limit)

    async def show(self, agent: UUID) -> AgentView:
        return await self._registry.show(agent)

    async def profile(self, agent: AgentView) -> AgentProfile:
        return await self._registry.profile(agent.id)

    async def put(self, profile: AgentProfile) -> AgentView:
        made = await self._engine.register_agent(profile, managed=True)
        return await self._registry.show(made.id)

    async def health(self, agent: UUID, limit: int) -> AgentHealth:
        return await self._registry.health(agent, limit)

    async def forget(self, agent: UUID) -> None:
        await self._registry.forget(agent)

    async def token(self, agent: UUID) -> AgentToken:
        del agent
        raise needs_a_server("an agent's token")


class _Page(msgspec.Struct):
    agents: list[AgentView]


class _RemoteAgents:
    def __init__(self, engine: RemoteEngine) -> None:
        self._link = engine.link
        self._workspace = engine.workspace

    async def page(self, after: str | None, limit: int) -> Sequence[AgentView]:
        params = {"cursor": after, "limit": limit}
        ask = ApiRequest(method="GET", path=f"{V1}/agents", params=params, repeatable=True)
        return (await self._link.ask(_Page, ask)).agents

    async def show(self, agent: UUID) -> AgentView:
        ask = ApiRequest(method="GET", path=f"{V1}/agents/{agent}", repeatable=True)
        return await self._link.ask(AgentView, ask)

    async def profile(self, agent: AgentView) -> AgentProfile:
        return _profile(agent, self._workspace)

    async def put(self, profile: AgentProfile) -> AgentView:
        path = f"{V1}/agents/{profile.id}"
        ask = ApiRequest(method="PUT", path=path, body=agent_body(profile), repeatable=True)
        return await self._link.ask(AgentView, ask)

    async def health(self, agent: UUID, limit: int) -> AgentHealth:
        path, params = f"{V1}/agents/{agent}/health", {"limit": limit}
        ask = ApiRequest(method="GET", path=path, params=params, repeatable=True)
        return await self._link.ask(AgentHealth, ask)

    async def forget(self, agent: UUID) -> None:
        await self._link.ask(type(None), ApiRequest(method="DELETE", path=f"{V1}/agents/{agent}"))

    async def token(self, agent: UUID) -> AgentToken:
        return await self._link.ask(
            AgentToken, ApiRequest(method="POST", path=f"{V1}/agents/{agent}/token")
        )


_VIEWED = {
    "max_concurrent": "max_concurrent_tasks",
    "heartbeat_interval_s": "heartbeat_interval_seconds",
    "stale_threshold_s": "stale_threshold_seconds",
}


def _profile(view: AgentView, workspace: UUID) -> AgentProfile:
    """What matching knows of an agent, as far as its view tells."""
    shown = set(AgentView.__struct_fields__)
    fields: dict[str, Any] = {"workspace": workspace}
    for name in AgentProfile.__struct_fields__:
        seen = _VIEWED.get(name, name)
        if seen in shown:
            fields[name] = getattr(view, seen)
    if view.stale_threshold_seconds == STALE_AFTER_S:
        del fields["stale_threshold_s"]  # the view shows the default as well
    return msgspec.convert(fields, AgentProfile)


def needs_a_server(what: str) -> Invalid:
    """Something that only a server has."""
    return Invalid(f"{what} needs a server: name one by its URL (TENUTO_URL)")
