"""The library's face: tasks, agents and administration, over HTTP or on a database itself."""

import asyncio
import threading
from collections.abc import AsyncGenerator, Coroutine, Iterator
from contextlib import AsyncExitStack
from inspect import isasyncgen, iscoroutine
from typing import Any, Self

import msgspec

from tenuto.client.admin import Access, Coordinators, Tokens, Users, Webhooks, Workspaces
from tenuto.client.agents import Agents, needs_a_server
from tenuto.client.link import Ask
from tenuto.client.remote import AnyEngine, RemoteEngine, RemoteSecrets
from tenuto.client.target import Target, choose, opened
from tenuto.client.tasks import TaskFailed, Tasks
from tenuto.engine.secrets import Secrets
from tenuto.model.errors import Invalid

__all__ = ["AsyncClient", "Client", "TaskFailed"]

ACTOR = "python"


class Stats(msgspec.Struct, frozen=True, rename="camel"):
    """How many tasks there are, by status, and how many workers and agents."""

    tasks: dict[str, int]
    workers: int
    agents: int


class AsyncClient:
    """A workspace, for programs that await. Open while `async with` or between open and close.

    `target` is a server (`http://...`) or a database (`sqlite:///...`, `postgresql://...`); without
    one TENUTO_URL, the login, or the embedded file.
    """

    def __init__(
        self,
        target: str | None = None,
        token: str | None = None,
        workspace: str | None = None,
        *,
        engine: AnyEngine | None = None,
    ) -> None:
        self.target = _target(target, token, workspace)
        self._engine = engine
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(self, *raised: object) -> None:
        await self.close()

    async def open(self) -> Self:
        """Be ready; a database is opened now, a server is asked with the first call."""
        if self._engine is None:
            opening = opened(self.target, actor=ACTOR)
            self._engine = await self._stack.enter_async_context(opening)
        return self

    async def close(self) -> None:
        """Let go of connections."""
        self._engine = None
        await self._stack.aclose()

    @property
    def engine(self) -> AnyEngine:
        """The engine behind it all."""
        if self._engine is None:
            raise Invalid("the client is not open: use `async with`, or await its open()")
        return self._engine

    @property
    def tasks(self) -> Tasks:
        return Tasks(self.engine)

    @property
    def agents(self) -> Agents:
        return Agents(self.engine)

    @property
    def secrets(self) -> Secrets | RemoteSecrets:
        return self.engine.secrets

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
        """How many tasks, workers and agents the workspace has."""
        engine = self.engine
        alive = [each for each in await engine.workers() if each.status in ("RUNNING", "DRAINING")]
        agents = [each async for each in self.agents.list() if each.status != "TERMINATED"]
        return Stats(await engine.counts(), len(alive), len(agents))

    async def health(self) -> dict[str, Any]:
        """How the server's parts are."""
        if not isinstance(self.engine, RemoteEngine):
            raise needs_a_server("health")
        ask = Ask(method="GET", path="/health/coordinator", repeatable=True)
        return await self.engine.link.ask(dict[str, Any], ask)


def _target(target: str | None, token: str | None, workspace: str | None) -> Target:
    if target is None or target.startswith(("http://", "https://")):
        return choose(target, token, workspace)
    return choose(database=target)


class Client:
    """The same for programs that do not await: every method of `AsyncClient`, blocking.

    It works on an event loop in a thread of its own, until `close` or the end of the `with`.
    """

    def __init__(
        self, target: str | None = None, token: str | None = None, workspace: str | None = None
    ) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="tenuto-client", daemon=True
        )
        self._thread.start()
        try:
            self._client = AsyncClient(target, token, workspace)
            self._wait(self._client.open())
        except BaseException:
            self._end()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of connections and of the thread."""
        if not self._loop.is_closed():
            self._wait(self._client.close())
            self._end()

    @property
    def target(self) -> Target:
        return self._client.target

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return self._blocking(getattr(self._client, name))

    def _blocking(self, found: Any) -> Any:
        """A method that waits for its answer, or a group of such methods."""
        if callable(found):
            return lambda *args, **fields: self._answer(found(*args, **fields))
        return _Blocking(self, found)

    def _answer(self, answer: Any) -> Any:
        if iscoroutine(answer):
            return self._wait(answer)
        return self._each(answer) if isasyncgen(answer) else answer

    def _each(self, items: AsyncGenerator[Any, Any]) -> Iterator[Any]:
        try:
            while True:
                try:
                    yield self._wait(anext(items))
                except StopAsyncIteration:
                    return
        finally:
            if not self._loop.is_closed():
                self._wait(items.aclose())

    def _wait(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(_awaited(work), self._loop).result()

    def _end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class _Blocking:
    """One group of methods of a client."""

    def __init__(self, client: Client, group: Any) -> None:
        self._client = client
        self._group = group

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return self._client._blocking(getattr(self._group, name))  # noqa: SLF001  its other half


async def _awaited(work: Coroutine[Any, Any, Any]) -> Any:
    return await work
