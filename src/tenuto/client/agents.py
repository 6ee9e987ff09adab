"""The agents of a workspace, on a database or over HTTP."""

from collections.abc import AsyncGenerator, Sequence
from typing import Any, Protocol
from uuid import UUID

import msgspec

from tenuto.client.paging import PAGE_SIZE
from tenuto.client.remote.bodies import agent_body
from tenuto.client.remote.engine import AnyEngine, RemoteEngine
from tenuto.client.remote.resource import RemoteResource
from tenuto.engine.agents.eligibility import AgentExplanation
from tenuto.engine.agents.mailbox import Message, MessageBatch, MessagePage
from tenuto.engine.agents.registry import AgentHealth, AgentRegistry, AgentToken, AgentView
from tenuto.engine.engine import Engine
from tenuto.engine.views import TaskSummary
from tenuto.model.agents.lifecycle import STALE_AFTER_S
from tenuto.model.agents.matching import AgentProfile
from tenuto.model.agents.messages import NewMessage
from tenuto.model.errors import Invalid, NotFound
from tenuto.model.tasks.submission import Filter


class _AgentBackend(Protocol):
    """The operations on agents that differ between a database and a server."""

    async def page(self, after: str | None, limit: int) -> Sequence[AgentView]:
        """Returns at most `limit` agents by name, after the name `after`."""

    async def show(self, agent: UUID) -> AgentView: ...

    async def profile(self, agent: AgentView) -> AgentProfile: ...

    async def put(self, profile: AgentProfile) -> AgentView: ...

    async def health(self, agent: UUID, limit: int) -> AgentHealth: ...

    async def delete(self, agent: UUID) -> None: ...

    async def create_token(self, agent: UUID) -> AgentToken: ...


class Agents:
    """The agents of a workspace. Methods accept an agent's name or its id."""

    def __init__(self, engine: AnyEngine) -> None:
        self._engine = engine
        self._backend: _AgentBackend = (
            _RemoteAgents(engine) if isinstance(engine, RemoteEngine) else _DatabaseAgents(engine)
        )

    async def list(self) -> AsyncGenerator[AgentView, None]:
        """Yields the agents in order of their names, also terminated ones."""
        after: str | None = None
        while page := await self._backend.page(after, PAGE_SIZE):
            for agent in page:
                yield agent
            if len(page) < PAGE_SIZE:
                return
            after = page[-1].name

    async def get(self, agent: UUID | str) -> AgentView:
        """Returns one agent; raises `NotFound` with the known names if there is none."""
        if isinstance(agent, UUID):
            return await self._backend.show(agent)
        names = []
        async for view in self.list():
            if agent in (view.name, str(view.id)):
                return view
            if view.status != "TERMINATED":
                names.append(view.name)
        raise NotFound(f"no agent {agent!r}; existing agents: {', '.join(names) or 'none'}")

    async def put(self, name: str, **fields: Any) -> AgentView:
        """Creates or changes an agent and returns it; fields not given keep their values."""
        unknown = sorted(set(fields) - set(AgentProfile.__struct_fields__))
        if unknown:
            raise Invalid(f"unknown agent field {unknown[0]!r}", field=unknown[0])
        try:
            current = await self._backend.profile(await self.get(name))
        except NotFound:
            current = AgentProfile(
                id=self._engine.clock.new_id(),
                workspace=self._engine.workspace,
                name=name,
                runtimes=("http",),
            )
        changes = {
            key: tuple(value) if isinstance(value, list) else value for key, value in fields.items()
        }
        return await self._backend.put(msgspec.structs.replace(current, **changes))

    async def health(self, agent: UUID | str, limit: int = 60) -> AgentHealth:
        """Returns an agent's status and its health samples of the last hour, newest first."""
        return await self._backend.health((await self.get(agent)).id, limit)

    async def explain(self, agent: UUID | str) -> AgentExplanation:
        """Explains which tasks an agent can claim, which wait for it, and why not others."""
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
        """Sends a message; a coalescable one replaces waiting ones of its kind and scope.

        Returns the stored message.
        """
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
        """Returns a page of an agent's waiting messages, oldest first; `waiting=False`: all stored.

        Stored messages include dequeued ones.
        """
        agent_id = (await self.get(agent)).id
        return await self._engine.mailboxes.page(agent_id, limit, cursor, waiting=waiting)

    async def dequeue(
        self, agent: UUID | str, limit: int = 100, batch: UUID | None = None
    ) -> MessageBatch:
        """Removes the oldest messages from an agent's mailbox and returns them, each only once.

        Repeated with the same `batch`, it returns the same messages.
        """
        return await self._engine.mailboxes.dequeue((await self.get(agent)).id, limit, batch)

    async def tasks(
        self, agent: UUID | str, status: Sequence[str] = (), limit: int = 100
    ) -> Sequence[TaskSummary]:
        """Returns the tasks whose latest attempt was by the agent, newest first."""
        agent_id = (await self.get(agent)).id
        return (await self._engine.list(Filter(agent=agent_id, status=tuple(status)), limit)).tasks

    async def terminate(
        self, agent: UUID | str, reason: str | None = None, *, graceful: bool = True
    ) -> AgentView:
        """Stops an agent from claiming tasks; unless `graceful`, cancels the tasks it runs.

        Returns the agent: DRAINING while it still runs tasks, then TERMINATED.
        """
        agent_id = (await self.get(agent)).id
        await self._engine.terminate_agent(agent_id, reason, graceful=graceful)
        return await self._backend.show(agent_id)

    async def delete(self, agent: UUID | str) -> None:
        """Deletes an agent; raises `Conflict` while it runs tasks."""
        await self._backend.delete((await self.get(agent)).id)

    async def token(self, agent: UUID | str) -> AgentToken:
        """Creates a token with which a worker can act as this agent only; needs a server."""
        return await self._backend.create_token((await self.get(agent)).id)


class _DatabaseAgents:
    """The operations on a database."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._registry = AgentRegistry(engine.core, engine.workspace)

    async def page(self, after: str | None, limit: int) -> Sequence[AgentView]:
        """Returns at most `limit` agents by name, after the name `after`."""
        return await self._registry.page(after, limit)

    async def show(self, agent: UUID) -> AgentView:
        return await self._registry.show(agent)

    async def profile(self, agent: AgentView) -> AgentProfile:
        return await self._registry.profile(agent.id)

    async def put(self, profile: AgentProfile) -> AgentView:
        """Stores the profile as settings of a user, which a worker cannot override later."""
        stored = await self._engine.register_agent(profile, managed=True)
        return await self._registry.show(stored.id)

    async def health(self, agent: UUID, limit: int) -> AgentHealth:
        return await self._registry.health(agent, limit)

    async def delete(self, agent: UUID) -> None:
        """Deletes an agent; raises `Conflict` while it runs tasks."""
        await self._registry.delete(agent)

    async def create_token(self, agent: UUID) -> AgentToken:
        """Raises `Invalid`: only a server has tokens."""
        del agent
        raise server_required_error("an agent's token")


class _AgentList(msgspec.Struct):
    agents: list[AgentView]


class _RemoteAgents(RemoteResource):
    """The operations over HTTP."""

    def __init__(self, engine: RemoteEngine) -> None:
        super().__init__(engine.connection)
        self._workspace = engine.workspace

    async def page(self, after: str | None, limit: int) -> Sequence[AgentView]:
        """Returns at most `limit` agents by name, after the name `after`."""
        params = {"cursor": after, "limit": limit}
        return (await self._call(_AgentList, "GET", "agents", params=params)).agents

    async def show(self, agent: UUID) -> AgentView:
        return await self._call(AgentView, "GET", f"agents/{agent}")

    async def profile(self, agent: AgentView) -> AgentProfile:
        """Returns the profile from the view, without a request."""
        return _profile_from_view(agent, self._workspace)

    async def put(self, profile: AgentProfile) -> AgentView:
        return await self._call(AgentView, "PUT", f"agents/{profile.id}", agent_body(profile))

    async def health(self, agent: UUID, limit: int) -> AgentHealth:
        params = {"limit": limit}
        return await self._call(AgentHealth, "GET", f"agents/{agent}/health", params=params)

    async def delete(self, agent: UUID) -> None:
        """Deletes an agent; raises `Conflict` while it runs tasks."""
        await self._call(type(None), "DELETE", f"agents/{agent}")

    async def create_token(self, agent: UUID) -> AgentToken:
        return await self._call(AgentToken, "POST", f"agents/{agent}/token")


_VIEW_FIELDS = {
    "max_concurrent": "max_concurrent_tasks",
    "heartbeat_interval_s": "heartbeat_interval_seconds",
    "stale_threshold_s": "stale_threshold_seconds",
}


def _profile_from_view(view: AgentView, workspace: UUID) -> AgentProfile:
    """Returns the agent's profile; fields that the view does not contain get their defaults."""
    view_fields = set(AgentView.__struct_fields__)
    fields: dict[str, Any] = {"workspace": workspace}
    for name in AgentProfile.__struct_fields__:
        view_field = _VIEW_FIELDS.get(name, name)
        if view_field in view_fields:
            fields[name] = getattr(view, view_field)
    if view.stale_threshold_seconds == STALE_AFTER_S:
        del fields["stale_threshold_s"]  # the view contains the default, too
    return msgspec.convert(fields, AgentProfile)


def server_required_error(feature: str) -> Invalid:
    """Returns the error for a feature that only a server has."""
    return Invalid(f"{feature} needs a server; set its URL (TENUTO_URL)")
