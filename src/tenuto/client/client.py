"""`AsyncClient` and `Client`: the library's entry points, over HTTP or on a database."""

from contextlib import AsyncExitStack
from typing import Any, Self

import msgspec

from tenuto.client.accounts import Access, Coordinators, Tokens, Users, Webhooks, Workspaces
from tenuto.client.agents import Agents, server_required_error
from tenuto.client.background_loop import BackgroundLoop
from tenuto.client.blocking import BlockingResources
from tenuto.client.flows import FlowFailed, Flows, Groups, InboxItems
from tenuto.client.remote.definitions import RemoteDefinitions
from tenuto.client.remote.engine import AnyEngine, RemoteEngine, RemoteSecrets
from tenuto.client.remote.http import ApiRequest
from tenuto.client.remote.limits import RemotePauses, RemoteRateLimits
from tenuto.client.remote.schedules import Events, RemoteSchedules, RemoteTriggers
from tenuto.client.target import Target, open_engine, resolve_target
from tenuto.client.tasks import TaskFailed, Tasks
from tenuto.engine.flows.definitions import Definitions
from tenuto.engine.limits.budgets import UsageStats
from tenuto.engine.limits.pauses import Pauses
from tenuto.engine.limits.rate_limits import RateLimits
from tenuto.engine.schedules.schedules import Schedules
from tenuto.engine.schedules.triggers import Triggers
from tenuto.engine.tenancy.secrets import NamedSecrets
from tenuto.model.errors import Invalid

__all__ = ["AsyncClient", "Client", "FlowFailed", "TaskFailed"]

ACTOR = "python"


class Stats(msgspec.Struct, frozen=True, rename="camel"):
    """Counts of tasks by status, workers and agents, and the models' token usage and cost."""

    tasks: dict[str, int]
    workers: int
    agents: int
    spending: UsageStats


class AsyncClient:
    """A workspace, for asyncio programs. Use it in `async with`, or call `open` and `close`.

    `target` is a server (`http://...`) or a database (`sqlite:///...`, `postgresql://...`). The
    default is TENUTO_URL, else the login, else the embedded database file.
    """

    def __init__(
        self,
        target: str | None = None,
        token: str | None = None,
        workspace: str | None = None,
        *,
        engine: AnyEngine | None = None,
    ) -> None:
        self.target = _parse_target(target, token, workspace)
        self._engine = engine
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(self, *raised: object) -> None:
        await self.close()

    async def open(self) -> Self:
        """Opens the client. A database is opened now; a server is contacted by the first call."""
        if self._engine is None:
            opening = open_engine(self.target, actor=ACTOR)
            self._engine = await self._stack.enter_async_context(opening)
        return self

    async def close(self) -> None:
        """Closes the connections."""
        self._engine = None
        await self._stack.aclose()

    @property
    def engine(self) -> AnyEngine:
        """The engine that all resources use; raises `Invalid` if the client is not open."""
        if self._engine is None:
            raise Invalid("the client is not open; use `async with`, or await client.open()")
        return self._engine

    @property
    def tasks(self) -> Tasks:
        return Tasks(self.engine)

    @property
    def agents(self) -> Agents:
        return Agents(self.engine)

    @property
    def secrets(self) -> NamedSecrets | RemoteSecrets:
        return self.engine.secrets

    @property
    def definitions(self) -> Definitions | RemoteDefinitions:
        return self.engine.definitions

    @property
    def gates(self) -> Pauses | RemotePauses:
        return self.engine.gates

    @property
    def rate_limits(self) -> RateLimits | RemoteRateLimits:
        return self.engine.rate_limits

    @property
    def flows(self) -> Flows:
        return Flows(self.engine)

    @property
    def groups(self) -> Groups:
        return Groups(self.engine)

    @property
    def inbox(self) -> InboxItems:
        return InboxItems(self.engine)

    @property
    def schedules(self) -> Schedules | RemoteSchedules:
        return self.engine.schedules

    @property
    def triggers(self) -> Triggers | RemoteTriggers:
        return self.engine.triggers

    @property
    def events(self) -> Events:
        return Events(self.engine)

    @property
    def webhooks(self) -> Webhooks:
        return Webhooks(self.engine)

    @property
    def tokens(self) -> Tokens:
        return Tokens(self.engine)

    @property
    def users(self) -> Users:
        return Users(self.engine)

    @property
    def workspaces(self) -> Workspaces:
        return Workspaces(self.engine)

    @property
    def coordinator(self) -> Coordinators:
        return Coordinators(self.engine)

    @property
    def access(self) -> Access:
        return Access(self.engine)

    async def stats(self) -> Stats:
        """Returns counts of tasks, live workers and agents (not terminated ones), and the usage."""
        engine = self.engine
        alive = [
            worker for worker in await engine.workers() if worker.status in ("RUNNING", "DRAINING")
        ]
        agents = [agent async for agent in self.agents.list() if agent.status != "TERMINATED"]
        return Stats(await engine.counts(), len(alive), len(agents), await engine.spending())

    async def health(self) -> dict[str, Any]:
        """Returns the health of server and coordinator, or raises `Unavailable`; needs a server."""
        if not isinstance(self.engine, RemoteEngine):
            raise server_required_error("health")
        ask = ApiRequest(method="GET", path="/health/coordinator", repeatable=True)
        return await self.engine.connection.request(dict[str, Any], ask)


def _parse_target(target: str | None, token: str | None, workspace: str | None) -> Target:
    """Returns the target for a server URL, a database URL, or `None`: the configured one."""
    if target is None or target.startswith(("http://", "https://")):
        return resolve_target(target, token, workspace)
    return resolve_target(None, token, workspace, database=target)


class Client(BlockingResources):
    """The blocking client: every method of `AsyncClient` for programs without asyncio.

    It runs an event loop in its own thread until `close` or the end of the `with` block.
    """

    def __init__(
        self, target: str | None = None, token: str | None = None, workspace: str | None = None
    ) -> None:
        loop = BackgroundLoop()
        try:
            client = AsyncClient(target, token, workspace)
            loop.wait(client.open())
        except BaseException:
            loop.close()
            raise
        super().__init__(loop, client)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connections and ends the thread."""
        if not self._loop.is_closed:
            self._loop.wait(self._client.close())
            self._loop.close()

    @property
    def target(self) -> Target:
        return self._client.target

    def stats(self) -> Stats:
        """Returns counts of tasks, live workers and agents (not terminated ones), and the usage."""
        return self._loop.wait(self._client.stats())

    def health(self) -> dict[str, Any]:
        """Returns the health of server and coordinator, or raises `Unavailable`; needs a server."""
        return self._loop.wait(self._client.health())
