"""A pool of PostgreSQL connections, lent first come, first served.

Connections have no session state, so lending and releasing one costs no round trip. A connection
whose use ended without an answer of the server is closed and never lent again.

The server stops a statement that takes too long. For a server that no longer answers, one timer
watches all connections: the driver's own timer per statement costs a single submit 6 us.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import asyncpg

from tenuto.model.errors import Unavailable
from tenuto.store.postgres.connector import Connector
from tenuto.store.postgres.sessions import STATEMENT_S

_MAX_CHECKS = 6
"""A connection without progress for this many checks of the timer is terminated."""
_CLOSE_S = 5
_ROLE_CHECK_S = 5.0
"""Seconds for the role check of a new connection, which the watchdog does not cover."""


class Pool:
    """At most `size` connections, created when they are first needed."""

    def __init__(
        self,
        connector: Connector,
        size: int,
        parameters: Mapping[str, str],
        timeout_s: float = STATEMENT_S,
        check_role: Callable[[Any], Awaitable[None]] | None = None,
        *,
        repeatable: bool = False,
    ) -> None:
        self._connector = connector
        self._size = size
        self._parameters = parameters
        self._check_role = check_role
        """Raises an error for a new connection that must not be used."""
        self._repeatable = repeatable
        """True if connections in use are terminated when the server is abandoned: statements are
        repeatable and their own timeout is long."""
        self._check_interval_s = timeout_s / _MAX_CHECKS
        self._idle: list[Any] = []
        self._used: set[Any] = set()
        self._abandoned: set[Any] = set()
        """Connections in use whose server was abandoned: they are not lent again."""
        self._progress: dict[Any, tuple[int, int]] = {}
        """For each connection in use: the number of statements sent at the last check, and for how
        many checks that number has not changed."""
        self._watchdog: asyncio.TimerHandle | None = None
        self._creating = 0
        self._generation = 0
        """How many times the server was abandoned; older connections are not used."""
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_suspect = False
        """True from the termination of a stalled connection until a use succeeds."""
        self._closed = False
        connector.on_server_abandoned(self._discard_connections)

    def take_idle(self) -> Any:
        """Lends an idle connection until `release`; `None` if there is none."""
        while self._idle:
            connection = self._idle.pop()
            if not connection.is_closed():
                return self._lend(connection)
        return None

    def _lend(self, connection: Any) -> Any:
        """Records that the connection is in use; returns it."""
        self._used.add(connection)
        return connection

    async def acquire(self, timeout_s: float) -> Any:
        """Lends a connection until `release`, perhaps a new one; `TimeoutError` if none is free."""
        while True:
            if (connection := self.take_idle()) is not None:
                return connection
            self._check_open()
            if self._can_connect():
                return await self._create()
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(waiter)
            try:
                async with asyncio.timeout(timeout_s):
                    await waiter
            except BaseException:
                if waiter.done() and not waiter.cancelled():
                    self._wake_next()  # this waiter timed out: the free place goes to the next one
                raise

    def _can_connect(self) -> bool:
        """True if one more connection may be created; after a stall, only one at a time.

        After a stalled connection was terminated: only one at a time, until a use succeeds. A
        server whose commits wait for a standby does not end the sessions of terminated
        connections: each still counts against `max_connections`.
        """
        if len(self._used) + self._creating >= self._size:
            return False
        if not self._is_suspect:
            return True
        return not self._creating and all(
            connection.is_closed() for connection in self._used - self._abandoned
        )

    def mark_healthy(self) -> None:
        """Records that a use succeeded, and lets waiting callers create connections again."""
        if not self._is_suspect:
            return
        self._is_suspect = False
        for _ in range(self._size - len(self._used) - self._creating):
            self._wake_next()

    def release(self, connection: Any, *, broken: bool) -> None:
        """Takes a connection back; terminates it if broken, abandoned or still in a transaction."""
        self._used.discard(connection)
        broken = broken or (not connection.is_closed() and connection.is_in_transaction())
        if broken or (self._abandoned and connection in self._abandoned):
            self._abandoned.discard(connection)
            connection.terminate()
        elif not connection.is_closed():
            self._idle.append(connection)
        self._wake_next()

    def abandon_server(self) -> None:
        """Abandons the server for all pools of the store, unless one was in the last second."""
        self._connector.abandon_server()

    def _discard_connections(self) -> None:
        """Terminates idle connections, if repeatable also used ones; lends no old one again."""
        self._generation += 1
        idle, self._idle = self._idle, []
        for connection in idle:
            connection.terminate()
        self._abandoned |= self._used
        if self._repeatable:
            for connection in self._used:
                connection.terminate()

    async def close(self) -> None:
        """Closes idle connections, terminates those in use, and fails the waiting callers."""
        self._closed = True
        if self._watchdog is not None:
            self._watchdog.cancel()
            self._watchdog = None
        idle, self._idle = self._idle, []
        for connection in self._used:
            connection.terminate()
        for waiter in self._waiting:
            if not waiter.done():
                waiter.set_result(None)  # it then raises the error for a closed pool
        await asyncio.gather(*map(_close_connection, idle))

    def _check_open(self) -> None:
        """Raises `InterfaceError` if the pool is closed."""
        if self._closed:
            raise asyncpg.InterfaceError("the pool is closed")

    async def _create(self) -> Any:
        """Creates and lends a connection, starts the watchdog; frees the place if that fails."""
        self._creating += 1
        connection = None
        try:
            connection = await self._connect_current()
            if self._watchdog is None:
                self._check_progress()
            return self._lend(connection)
        finally:
            self._creating -= 1
            if connection is None:
                self._wake_next()

    async def _connect_current(self) -> Any:
        """Returns a new connection; retries if the server was abandoned meanwhile."""
        while True:
            generation = self._generation
            connection = await self._connect_checked()
            if generation == self._generation and not self._closed:
                return connection
            connection.terminate()
            self._check_open()

    async def _connect_checked(self) -> Any:
        """Returns a new connection that passed the role check, or raises that check's error."""
        connection = await self._connector.connect(
            self._parameters, max_cached_statement_lifetime=0, statement_cache_size=200
        )
        if self._check_role is not None:
            try:
                async with asyncio.timeout(_ROLE_CHECK_S):
                    await self._check_role(connection)
            except BaseException as error:
                connection.terminate()
                if isinstance(error, TimeoutError):
                    raise Unavailable(
                        "the database does not answer: the role check of a new connection took"
                        f" longer than {_ROLE_CHECK_S:g} s"
                    ) from error
                raise
        return connection

    def _check_progress(self) -> None:
        """Terminates stalled connections, abandons their server, and schedules the next check."""
        try:
            if self._terminate_stalled():
                self.abandon_server()
        finally:
            self._watchdog = asyncio.get_running_loop().call_later(
                self._check_interval_s, self._check_progress
            )

    def _terminate_stalled(self) -> bool:
        """Terminates used connections without progress for 6 checks; true if there were any."""
        before, self._progress = self._progress, {}
        has_stalled = False
        for connection in self._used:
            if connection.is_closed():
                continue  # terminated before, and not released yet
            sent = connection._protocol.queries_count  # noqa: SLF001  counted by the driver
            sent_before, checks = before.get(connection, (sent, 0))
            checks = checks + 1 if sent_before == sent else 1
            if checks >= _MAX_CHECKS:
                connection.terminate()
                has_stalled = self._is_suspect = True
            self._progress[connection] = sent, checks
        return has_stalled

    def _wake_next(self) -> None:
        """Wakes the next caller that waits for a connection."""
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return


async def _close_connection(connection: Any) -> None:
    """Closes a connection, or terminates it if that fails."""
    try:
        await connection.close(timeout=_CLOSE_S)
    except (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError):
        connection.terminate()
