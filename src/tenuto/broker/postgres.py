"""Hints over LISTEN/NOTIFY.

NOTIFY takes a lock that all committing notifiers share, so it is never part of a task's
transaction. The first hint goes out at once; those that follow it closely gather and go together.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from typing import Any

import asyncpg

from tenuto.broker.memory import MemoryWakeups
from tenuto.broker.protocol import EVERYTHING, Listener
from tenuto.clock import Clock
from tenuto.periodic import wait_first_event

CHANNEL = "tenuto_wake"
_LONGEST = 7_500
_PAUSE_S = 1.0
"""Seconds between two connections, and up to twice as many more: programs do not return at once."""
_YOUNG_S = 5.0
"""A connection that lasted longer is replaced without a pause."""
_GATHER_S = 0.002
_FAULTS = (
    OSError,
    TimeoutError,
    asyncpg.PostgresError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,  # a connection that is ended from there at this moment
)


class PostgresWakeups:
    """Hints between all processes on one PostgreSQL database; `connect` makes a connection."""

    def __init__(
        self, connect: Callable[[], Awaitable[Any]], clock: Clock, *, listen: bool = True
    ) -> None:
        self._new_connection = connect
        self._clock = clock
        self._listen = listen
        self._here = MemoryWakeups()
        self._waiting: set[str] = set()
        self._connection: Any = None
        self._connecting = asyncio.Lock()
        self._tried_at: float | None = None
        """When the last attempt to connect ended, in elapsed seconds."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._sending = False
        self._closed = asyncio.Event()

    async def open(self) -> None:
        if self._listen:
            await self._connect()

    async def close(self) -> None:
        self._closed.set()
        if self._tasks:
            # A short process has said what it came to say: let the hint go out first.
            await asyncio.wait(self._tasks, timeout=2)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._connection is not None:
            with suppress(*_FAULTS):
                await self._connection.close(timeout=2)
        await self._here.close()

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        return self._here.subscribe(listener)

    def reconnect(self) -> None:
        """Give the connection up: its server is silent or is no primary any more."""
        if self._connection is not None:
            self._connection.terminate()

    def announce(self, topics: Iterable[str]) -> None:
        told = set(topics)
        self._here.announce(told)
        self._waiting |= told
        if not self._sending and not self._closed.is_set():
            self._sending = True
            self._spawn(self._send())

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _send(self) -> None:
        try:
            while self._waiting:
                payload = self._gather()
                try:
                    await self._connect()
                    await self._connection.execute("select pg_notify($1, $2)", CHANNEL, payload)
                except _FAULTS:
                    _failed()
                await self._clock.sleep(0 if self._closed.is_set() else _GATHER_S)
        finally:
            self._sending = False

    def _gather(self) -> str:
        """The waiting topics as one payload; too many become: look for everything."""
        payload = "\n".join(sorted(self._waiting))
        self._waiting.clear()
        return payload if len(payload) <= _LONGEST else EVERYTHING

    async def _connect(self) -> None:
        """Make the connection unless there is one; who sends and who reconnects share it."""
        async with self._connecting:
            if self._connection is not None and not self._connection.is_closed():
                return
            await self._pause()
            try:
                self._connection = await self._new_listener()
            finally:
                self._tried_at = self._clock.elapsed()

    async def _pause(self) -> None:
        """Wait if the last connection was refused or ended soon.

        A server that only reads is given up at each write. A new connection makes everybody look
        for work, which is a write: without a pause they would never stop.
        """
        last = self._tried_at
        if last is not None and self._clock.elapsed() - last < _YOUNG_S:
            pause = _PAUSE_S * (1 + 2 * self._clock.random())
            await wait_first_event([self._closed], pause, self._clock)

    async def _new_listener(self) -> Any:
        """A new connection, which hears hints if it should."""
        connection = await self._new_connection()
        try:
            if self._listen:
                await connection.add_listener(CHANNEL, self._heard)
                connection.add_termination_listener(self._lost)
        except BaseException:
            connection.terminate()
            raise
        return connection

    def _heard(self, connection: Any, pid: int, channel: str, payload: str) -> None:
        del channel
        if pid == connection.get_server_pid():
            return  # heard already, in process
        for topic in payload.split("\n"):
            self._here.hear(topic)

    def _lost(self, connection: Any) -> None:
        if not self._closed.is_set() and connection is self._connection:
            self._spawn(self._reconnect())

    async def _reconnect(self) -> None:
        while not self._closed.is_set():
            with suppress(*_FAULTS):
                await self._connect()
                self._here.hear(EVERYTHING)
                return


def _failed() -> None:
    from tenuto.metrics import PROCESS_METRICS  # noqa: PLC0415  short commands do without, unless this happens

    PROCESS_METRICS.count("tenuto_broker_errors_total")
