"""A few connections to PostgreSQL, handed out first come, first served.

Connections carry no session state, so taking one and giving it back costs no round trip. One whose
use ended in anything but an answer of the server is closed, never handed out again.
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
        self._used: set[Any] = set()
        self._making = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    def idle(self) -> Any:
        """A connection that is nobody else's until `give`; `None` if one has to be waited for."""
        while self._idle:
            connection = self._idle.pop()
            if not connection.is_closed():
                self._used.add(connection)
                return connection
        return None

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
        self._used.discard(connection)
        if broken:
            connection.terminate()
        elif not connection.is_closed():
            self._idle.append(connection)
        self._next()

    async def close(self) -> None:
        """Let every connection go; those in use are cut."""
        idle, self._idle = self._idle, []
        for connection in self._used:
            connection.terminate()
        for connection in idle:
            try:
                await connection.close(timeout=_CONNECT_S)
            except (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError):
                connection.terminate()

    async def _make(self) -> Any:
        self._making += 1
        connection = None
        try:
            connection = await asyncpg.connect(
                self._url,
                timeout=_CONNECT_S,
                command_timeout=_ANSWER_S,
                server_settings=self._settings,
                max_cached_statement_lifetime=0,
                statement_cache_size=200,
            )
            self._used.add(connection)
            return connection
        finally:
            self._making -= 1
            if connection is None:
                self._next()

    def _next(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
