"""A few connections to PostgreSQL, handed out first come, first served.

Connections carry no session state, so taking one and giving it back costs no round trip. One whose
use ended in anything but an answer of the server is closed, never handed out again.

The server gives up a statement that takes too long. For a server that is no longer there, one timer
watches over all connections: the driver's own, one a statement, costs a single submit 6 us.
"""

import asyncio
from collections import deque
from typing import Any

import asyncpg

_CONNECT_S = 5
_ANSWER_S = 60


class Pool:
    """At most `size` connections, made when they are first needed."""

    def __init__(self, url: str, size: int, settings: dict[str, str]) -> None:
        self._url = url
        self._size = size
        self._settings = settings
        self._idle: list[Any] = []
        self._used: dict[Any, int] = {}
        """Connections in use, by the number of the use."""
        self._uses = 0
        self._looked: dict[Any, int] = {}
        """Those that were in use at the last look."""
        self._watch: asyncio.TimerHandle | None = None
        self._making = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    def idle(self) -> Any:
        """A connection that is nobody else's until `give`; `None` if one has to be waited for."""
        while self._idle:
            connection = self._idle.pop()
            if not connection.is_closed():
                return self._use(connection)
        return None

    def _use(self, connection: Any) -> Any:
        self._uses += 1
        self._used[connection] = self._uses
        return connection

    async def take(self, patience_s: float) -> Any:
        """The same, made or waited for; raises `TimeoutError` without one."""
        while True:
            if (connection := self.idle()) is not None:
                return connection
            if len(self._used) + self._making < self._size:
                return await self._make()
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            try:
                async with asyncio.timeout(patience_s):
                    await turn
            except BaseException:
                if turn.done() and not turn.cancelled():
                    self._next()  # our turn came too late: it is the next one's
                raise

    def give(self, connection: Any, *, broken: bool) -> None:
        """Hand a connection back."""
        self._used.pop(connection, None)
        if broken:
            connection.terminate()
        elif not connection.is_closed():
            self._idle.append(connection)
        self._next()

    async def close(self) -> None:
        """Let every connection go; those in use are cut."""
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        idle, self._idle = self._idle, []
        for connection in self._used:
            connection.terminate()
        await asyncio.gather(*map(_let_go, idle))

    async def _make(self) -> Any:
        self._making += 1
        connection = None
        try:
            connection = await asyncpg.connect(
                self._url,
                timeout=_CONNECT_S,
                server_settings=self._settings | {"statement_timeout": f"{_ANSWER_S}s"},
                max_cached_statement_lifetime=0,
                statement_cache_size=200,
            )
            if self._watch is None:
                self._look()
            return self._use(connection)
        except asyncpg.UndefinedObjectError as error:  # a setting that the server does not know
            raise asyncpg.ClientConfigurationError(str(error)) from error
        finally:
            self._making -= 1
            if connection is None:
                self._next()

    def _look(self) -> None:
        """Cut the uses that the last look saw: whoever they wait for answers no more."""
        for connection, use in self._looked.items():
            if self._used.get(connection) == use:
                connection.terminate()
        self._looked = dict(self._used)
        self._watch = asyncio.get_running_loop().call_later(_ANSWER_S, self._look)

    def _next(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return


async def _let_go(connection: Any) -> None:
    """Close a connection politely, or cut it."""
    try:
        await connection.close(timeout=_CONNECT_S)
    except (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError):
        connection.terminate()
