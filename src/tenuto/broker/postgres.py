"""Hints over LISTEN/NOTIFY.

NOTIFY takes a lock that all committing notifiers share, so it is never part of a task's
transaction. The first hint is sent at once; hints that follow closely are sent together.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from typing import Any

import asyncpg

from tenuto.broker.memory import MemoryWakeups
from tenuto.broker.protocol import ALL_TOPICS, BrokerContext, Listener, Wakeups
from tenuto.clock import Clock
from tenuto.model.errors import Invalid
from tenuto.periodic import wait_first_event

CHANNEL = "tenuto_wake"
_SEND_TIMEOUT_S = 10.0
_MAX_PAYLOAD = 7_500
_RECONNECT_S = 1.0
"""Seconds before a reconnect, plus up to twice as many at random: programs reconnect at
different times."""
_SHORT_LIVED_S = 5.0
"""A connection that lasted longer is replaced without a delay."""
_BATCH_DELAY_S = 0.002
_CONNECTION_ERRORS = (
    OSError,
    TimeoutError,
    asyncpg.PostgresError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,  # the server ends the connection at this moment
)


class PostgresWakeups:
    """Hints between all processes on one PostgreSQL database; `connect` opens a connection."""

    def __init__(
        self, connect: Callable[[], Awaitable[Any]], clock: Clock, *, listen: bool = True
    ) -> None:
        self._new_connection = connect
        self._clock = clock
        self._listen = listen
        self._local = MemoryWakeups()
        self._pending: set[str] = set()
        self._connection: Any = None
        self._connecting = asyncio.Lock()
        self._tried_at: float | None = None
        """When the last connection attempt ended, in elapsed seconds."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._sending = False
        self._closed = asyncio.Event()

    async def open(self) -> None:
        """Connects and listens; does nothing if this process only sends hints."""
        if self._listen:
            await self._connect()

    async def close(self) -> None:
        """Sends pending hints for up to 2 seconds, then disconnects and removes all listeners."""
        self._closed.set()
        if self._tasks:
            # A short-lived process: wait until its hints are sent.
            await asyncio.wait(self._tasks, timeout=2)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._connection is not None:
            with suppress(*_CONNECTION_ERRORS):
                await self._connection.close(timeout=2)
        await self._local.close()

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Calls `listener` with each received topic; returns a function that unsubscribes it."""
        return self._local.subscribe(listener)

    def reconnect(self) -> None:
        """Ends the connection to an abandoned server; a listener then connects to the new one."""
        if self._connection is not None:
            self._connection.terminate()

    def notify(self, topics: Iterable[str]) -> None:
        """Calls this process's listeners now, and sends the topics to the others soon."""
        topic_set = set(topics)
        self._local.notify(topic_set)
        self._pending |= topic_set
        if not self._sending and not self._closed.is_set():
            self._sending = True
            self._spawn(self._send())

    def _spawn(self, work: Any) -> None:
        """Starts a background task; `close` waits for it, then cancels it."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _send(self) -> None:
        """Sends pending topics until none is left; counts an error for those that are lost."""
        try:
            while self._pending:
                payload = self._take_payload()
                try:
                    await self._connect()
                    await self._connection.execute("select pg_notify($1, $2)", CHANNEL, payload)
                except _CONNECTION_ERRORS:
                    _count_error()
                await self._clock.sleep(0 if self._closed.is_set() else _BATCH_DELAY_S)
        finally:
            self._sending = False

    def _take_payload(self) -> str:
        """Removes the pending topics; returns them as one payload, or `ALL_TOPICS` if too long."""
        payload = "\n".join(sorted(self._pending))
        self._pending.clear()
        return payload if len(payload) <= _MAX_PAYLOAD else ALL_TOPICS

    async def _connect(self) -> None:
        """Connects unless connected, after a pause if it just tried; or raises driver errors."""
        async with self._connecting:
            if self._connection is not None and not self._connection.is_closed():
                return
            await self._wait_to_reconnect()
            try:
                self._connection = await self._new_listener()
            finally:
                self._tried_at = self._clock.elapsed()

    async def _wait_to_reconnect(self) -> None:
        """Waits 1 to 3 seconds if the last attempt to connect ended less than 5 seconds ago.

        A read-only server is abandoned at each write. A new connection makes all processes look for
        work, which writes: without a delay this would repeat endlessly.
        """
        last_attempt = self._tried_at
        if last_attempt is not None and self._clock.elapsed() - last_attempt < _SHORT_LIVED_S:
            pause = _RECONNECT_S * (1 + 2 * self._clock.random())
            await wait_first_event([self._closed], pause, self._clock)

    async def _new_listener(self) -> Any:
        """Returns a new connection, which receives hints if this object listens."""
        connection = await self._new_connection()
        try:
            if self._listen:
                await connection.add_listener(CHANNEL, self._on_notification)
                connection.add_termination_listener(self._on_connection_lost)
        except BaseException:
            connection.terminate()
            raise
        return connection

    def _on_notification(self, connection: Any, pid: int, channel: str, payload: str) -> None:
        """Delivers the topics of a notification of another process."""
        del channel
        if pid == connection.get_server_pid():
            return  # delivered already, in process
        for topic in payload.split("\n"):
            self._local.deliver(topic)

    def _on_connection_lost(self, connection: Any) -> None:
        """Starts to reconnect, unless the broker is closed or has another connection."""
        if not self._closed.is_set() and connection is self._connection:
            self._spawn(self._reconnect())

    async def _reconnect(self) -> None:
        """Reconnects until that succeeds or it is closed; then delivers `ALL_TOPICS` here."""
        while not self._closed.is_set():
            with suppress(*_CONNECTION_ERRORS):
                await self._connect()
                self._local.deliver(ALL_TOPICS)
                return


def create(context: BrokerContext) -> Wakeups:
    """Creates a broker, in-process if no address bypasses the pooler; `Invalid` for SQLite.

    Notifications do not pass a pooler, so the store must have an address that bypasses it.
    """
    if not hasattr(context.store, "direct"):
        raise Invalid("the broker postgresql: needs a PostgreSQL database; change the setting")
    direct = context.store.direct
    if direct is None:
        return MemoryWakeups()
    wakeups = PostgresWakeups(
        lambda: direct.connect_directly(_SEND_TIMEOUT_S), context.clock, listen=context.listen
    )
    direct.on_server_abandoned(wakeups.reconnect)
    return wakeups


def _count_error() -> None:
    """Counts hints that this process could not send."""
    from tenuto.metrics import PROCESS_METRICS  # noqa: PLC0415  short commands import it only in this case

    PROCESS_METRICS.count("tenuto_broker_errors_total")
