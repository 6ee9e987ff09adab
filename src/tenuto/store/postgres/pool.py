"""A few connections to PostgreSQL, handed out first come, first served.

Connections carry no session state, so taking one and giving it back costs no round trip. One whose
use ended in anything but an answer of the server is closed, never handed out again.

The server gives up a statement that takes too long. For a server that is no longer there, one timer
watches over all connections: the driver's own, one a statement, costs a single submit 6 us.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import asyncpg

from tenuto.model.errors import Unavailable
from tenuto.store.postgres.connector import Connector
from tenuto.store.postgres.sessions import ANSWER_S

_LOOKS = 6
"""A use without progress between so many looks of the timer is cut."""
_CLOSE_S = 5
_PROOF_S = 5.0
"""Seconds that a new connection has to prove who it acts as: the watch does not see it yet."""


class Pool:
    """At most `size` connections, made when they are first needed."""

    def __init__(
        self,
        connector: Connector,
        size: int,
        parameters: Mapping[str, str],
        answer_s: float = ANSWER_S,
        prove: Callable[[Any], Awaitable[None]] | None = None,
        *,
        repeatable: bool = False,
    ) -> None:
        self._connector = connector
        self._size = size
        self._parameters = parameters
        self._prove = prove
        """Raises for a new connection that must not be used."""
        self._repeatable = repeatable
        """True if uses are cut when the server is given up: their own limit is far off."""
        self._look_s = answer_s / _LOOKS
        self._idle: list[Any] = []
        self._used: set[Any] = set()
        self._given_up: set[Any] = set()
        """Connections in use whose server was given up: nobody is handed them again."""
        self._silent: dict[Any, tuple[int, int]] = {}
        """How many statements each connection in use had been sent at the last look, and since how
        many looks that is so."""
        self._watch: asyncio.TimerHandle | None = None
        self._making = 0
        self._age = 0
        """How many times the server was given up: a connection of an older age is not used."""
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._doubtful = False
        """True from a cut until a use succeeds."""
        self._closed = False
        connector.when_given_up(self._renew)

    def idle(self) -> Any:
        """A connection that is nobody else's until `give`; `None` if one has to be waited for."""
        while self._idle:
            connection = self._idle.pop()
            if not connection.is_closed():
                return self._use(connection)
        return None

    def _use(self, connection: Any) -> Any:
        self._used.add(connection)
        return connection

    async def take(self, patience_s: float) -> Any:
        """The same, made or waited for; raises `TimeoutError` without one."""
        while True:
            if (connection := self.idle()) is not None:
                return connection
            self._check_open()
            if self._has_room():
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

    def _has_room(self) -> bool:
        """True if one more connection may be made: after a cut one at a time, until one succeeds.

        A server whose commits wait for a standby does not end the sessions of connections that were
        cut: each keeps its place among `max_connections`.
        """
        if len(self._used) + self._making >= self._size:
            return False
        if not self._doubtful:
            return True
        return not self._making and all(each.is_closed() for each in self._used - self._given_up)

    def trust(self) -> None:
        """A use succeeded: make as many connections again as there is room for."""
        if not self._doubtful:
            return
        self._doubtful = False
        for _ in range(self._size - len(self._used) - self._making):
            self._next()

    def release(self, connection: Any, *, broken: bool) -> None:
        """Hand a connection back; it is closed if its use left a transaction open."""
        self._used.discard(connection)
        broken = broken or (not connection.is_closed() and connection.is_in_transaction())
        if broken or (self._given_up and connection in self._given_up):
            self._given_up.discard(connection)
            connection.terminate()
        elif not connection.is_closed():
            self._idle.append(connection)
        self._next()

    def give_up(self) -> None:
        """Give up the server for all pools of the store: the next connections are new ones."""
        self._connector.give_up()

    def _renew(self) -> None:
        """Hand out no connection that was made before, nor one that is being made."""
        self._age += 1
        idle, self._idle = self._idle, []
        for connection in idle:
            connection.terminate()
        self._given_up |= self._used
        if self._repeatable:
            for connection in self._used:
                connection.terminate()

    async def close(self) -> None:
        """Let every connection go; those in use are cut, and no new one is made."""
        self._closed = True
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        idle, self._idle = self._idle, []
        for connection in self._used:
            connection.terminate()
        for turn in self._waiting:
            if not turn.done():
                turn.set_result(None)  # to be told that the pool is closed
        await asyncio.gather(*map(_let_go, idle))

    def _check_open(self) -> None:
        if self._closed:
            raise asyncpg.InterfaceError("the pool is closed")

    async def _make(self) -> Any:
        self._making += 1
        connection = None
        try:
            connection = await self._present()
            if self._watch is None:
                self._look()
            return self._use(connection)
        finally:
            self._making -= 1
            if connection is None:
                self._next()

    async def _present(self) -> Any:
        """A new connection whose server was not given up, nor the pool closed, meanwhile."""
        while True:
            age = self._age
            connection = await self._proven()
            if age == self._age and not self._closed:
                return connection
            connection.terminate()
            self._check_open()

    async def _proven(self) -> Any:
        """A new connection that may be used."""
        connection = await self._connector.connect(
            self._parameters, max_cached_statement_lifetime=0, statement_cache_size=200
        )
        if self._prove is not None:
            try:
                async with asyncio.timeout(_PROOF_S):
                    await self._prove(connection)
            except BaseException as error:
                connection.terminate()
                if isinstance(error, TimeoutError):
                    raise Unavailable(
                        "the database does not answer: a new connection did not prove its role"
                        f" within {_PROOF_S:g} s"
                    ) from error
                raise
        return connection

    def _look(self) -> None:
        """Cut uses without progress and look again later, whatever goes wrong here."""
        try:
            if self._cut_silent():
                self.give_up()
        finally:
            self._watch = asyncio.get_running_loop().call_later(self._look_s, self._look)

    def _cut_silent(self) -> bool:
        """Cut the uses that made no progress for too long; True if there were any."""
        before, self._silent = self._silent, {}
        silent = False
        for connection in self._used:
            if connection.is_closed():
                continue  # cut before, and not given back yet
            sent = connection._protocol.queries_count  # noqa: SLF001  counted by the driver
            was, looks = before.get(connection, (sent, 0))
            looks = looks + 1 if was == sent else 1
            if looks >= _LOOKS:
                connection.terminate()
                silent = self._doubtful = True
            self._silent[connection] = sent, looks
        return silent

    def _next(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return


async def _let_go(connection: Any) -> None:
    """Close a connection politely, or cut it."""
    try:
        await connection.close(timeout=_CLOSE_S)
    except (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError):
        connection.terminate()
