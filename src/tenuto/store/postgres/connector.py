"""Connects to the present primary among the hosts of an address.

The driver's own timeout covers all hosts together, so one frozen host keeps it from trying the
others. Here each host has its own timeout, and the next host is tried while one does not answer.
"""

import asyncio
import os
import socket
import ssl
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import asyncpg
import msgspec

from tenuto.store.postgres.address import Host, order_hosts, parse
from tenuto.store.postgres.sessions import DIRECT_SETTINGS

_ONLY_HOST_S = 5.0
"""Seconds to connect to the only host of an address."""
_PER_HOST_S = 2.0
"""Seconds to connect to each of several hosts."""
_NEXT_HOST_S = 0.3
"""Seconds without an answer after which the next host is tried, too."""
_LOOKUP_S = 30.0
"""Seconds after which a name lookup is given up and can be started again."""
_ABANDON_INTERVAL_S = 1.0
"""Minimum seconds between two times that a server is abandoned.

A server that refuses writes without being a standby is found again at once, by every program.
"""
_PROBES = {"IDLE": 5, "INTVL": 2, "CNT": 3}
"""Keepalive: the first probe after this many idle seconds, then how often, and how many."""
_MAX_UNACKNOWLEDGED_S = 10
"""Seconds that sent bytes may stay unacknowledged before the connection counts as lost."""


class _AbandonedServer(msgspec.Struct, eq=False):
    """State that the connectors of a store share about abandoned servers."""

    callbacks: list[Callable[[], None]]
    """Called each time a server is abandoned."""
    last_at: float = float("-inf")
    """When a server was abandoned last, in event-loop seconds."""


class Connector:
    """Creates connections of one store, and abandons a server that failed.

    A store behind a pooler has several connectors: those created with `sibling` share that state.
    """

    def __init__(self, url: str, sibling: "Connector | None" = None) -> None:
        self._address = parse(url, os.environ)
        self._last: Host | None = None
        self._cached_addresses: dict[Host, list[Host]] = {}
        """The addresses of each host name at the last successful lookup."""
        self._lookups: dict[Host, asyncio.Task[list[Host]]] = {}
        """Running lookups, shared by all connection attempts."""
        self._abandoned: _AbandonedServer = (
            _AbandonedServer([]) if sibling is None else sibling._abandoned  # noqa: SLF001  same class
        )
        self._abandoned.callbacks.append(self._clear_last_host)

    @property
    def url(self) -> str:
        """The address, for the driver."""
        return self._address.url

    def on_server_abandoned(self, callback: Callable[[], None]) -> None:
        """Registers a callback for each abandoned server: its idle connections become useless."""
        self._abandoned.callbacks.append(callback)

    def abandon_server(self) -> None:
        """Abandons a failed server: runs all callbacks, unless it did within the last second."""
        now = asyncio.get_running_loop().time()
        if now - self._abandoned.last_at < _ABANDON_INTERVAL_S:
            return
        self._abandoned.last_at = now
        for callback in self._abandoned.callbacks:
            callback()

    def _clear_last_host(self) -> None:
        """Makes the next connection try the hosts in the order of the address."""
        self._last = None

    async def connect(self, settings: Mapping[str, str], **options: Any) -> Any:
        """Returns a connection with these server settings; raises the most informative error."""
        options["server_settings"] = dict(settings)
        hosts = order_hosts(await self._resolve_hosts(), self._last)
        if len(hosts) > 1:
            return await self._race(hosts, options)
        host = hosts[0] if hosts else None
        return await self._connect_to(
            host, _ONLY_HOST_S, options, primary=self._address.wants_primary
        )

    async def connect_directly(self, command_timeout_s: float) -> Any:
        """Returns a new connection for hints, which is not part of a pool."""
        return await self.connect(DIRECT_SETTINGS, command_timeout=command_timeout_s)

    async def _resolve_hosts(self) -> list[Host]:
        """Returns every host of the address; each network address of a name counts as a host."""
        if self._address.keeps_names:
            return list(self._address.hosts)
        resolved = await asyncio.gather(*map(self._resolve_host, self._address.hosts))
        return [host for addresses in resolved for host in addresses]

    async def _resolve_host(self, host: Host) -> list[Host]:
        """Returns the addresses of a host, perhaps cached; else or if only one, the host itself."""
        if host.is_socket:
            return [host]
        if host not in self._lookups:
            lookup = asyncio.ensure_future(_lookup_addresses(host))
            lookup.add_done_callback(lambda done: self._store_lookup(host, done))
            self._lookups[host] = lookup
        cached = self._cached_addresses.get(host)
        await asyncio.wait([self._lookups[host]], timeout=_NEXT_HOST_S if cached else _PER_HOST_S)
        addresses = self._cached_addresses.get(host, [])
        # Without any address, the connection attempt reports what is wrong with the name.
        return addresses if len(addresses) > 1 else [host]

    def _store_lookup(self, host: Host, lookup: "asyncio.Task[list[Host]]") -> None:
        """Caches the result of a lookup, even if no caller waits for it any more."""
        del self._lookups[host]
        if not lookup.cancelled() and (addresses := lookup.result()):
            self._cached_addresses[host] = addresses

    async def _race(self, hosts: list[Host], options: dict[str, Any]) -> Any:
        """Connects to the first host that answers in the required role; raises the best error."""
        waiting = deque(hosts)
        attempts: dict[asyncio.Task[Any], Host] = {}
        errors: list[BaseException] = []
        primary = self._address.wants_primary is not False
        try:
            while waiting or attempts:
                if waiting:
                    host = waiting.popleft()
                    connecting = self._connect_to(host, _PER_HOST_S, options, primary=primary)
                    attempts[asyncio.ensure_future(connecting)] = host
                done, _ = await asyncio.wait(
                    attempts,
                    timeout=_NEXT_HOST_S if waiting else None,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                for attempt in done:
                    if (error := attempt.exception()) is not None:
                        errors.append(error)
                        del attempts[attempt]
                if connected := [attempt for attempt in done if attempt in attempts]:
                    self._last = attempts.pop(connected[0])
                    return connected[0].result()
            raise most_informative(errors)
        finally:
            for attempt in attempts:
                attempt.cancel()
                attempt.add_done_callback(_close_late)

    async def _connect_to(
        self, host: Host | None, timeout_s: float, options: dict[str, Any], *, primary: bool | None
    ) -> Any:
        """Returns a new connection to the host, which the driver chooses if it is `None`.

        `primary`: only to a primary if true, to any server if false; `None`: as the driver decides.
        """
        target: dict[str, Any] = {} if host is None else {"host": host.name, "port": host.port}
        if primary is not None:  # else the driver reads its service file
            target["target_session_attrs"] = "primary" if primary else "any"
        try:
            connection = await asyncpg.connect(
                self.url,
                timeout=timeout_s,
                **target,
                **options,
            )
        except asyncpg.UndefinedObjectError as error:  # the server does not know a setting
            raise asyncpg.ClientConfigurationError(str(error)) from error
        _enable_keepalive(connection)
        return connection


async def _lookup_addresses(host: Host) -> list[Host]:
    """Returns the addresses of a host name; none if the lookup fails or times out."""
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(_LOOKUP_S):
            entries = await loop.getaddrinfo(host.name, host.port, type=socket.SOCK_STREAM)
    except (OSError, TimeoutError, UnicodeError):
        return []
    return list(dict.fromkeys(Host(str(sockaddr[0]), host.port) for *_, sockaddr in entries))


def most_informative(errors: Iterable[BaseException]) -> BaseException:
    """Returns the error of a server, else of TLS, of a standby, of the network, else a timeout."""

    def rank(error: BaseException) -> int:
        """Returns a smaller number for an error that says more."""
        if isinstance(
            error, asyncpg.CannotConnectNowError | asyncpg.TargetServerAttributeNotMatched
        ):
            return 2
        if isinstance(error, asyncpg.PostgresError | asyncpg.ClientConfigurationError):
            return 0
        if isinstance(error, ssl.SSLError):
            return 1
        return 4 if isinstance(error, TimeoutError) else 3

    return min(errors, key=rank)


def _close_late(attempt: "asyncio.Task[Any]") -> None:
    """Closes the connection of an attempt that lost the race."""
    if not attempt.cancelled() and attempt.exception() is None:
        attempt.result().terminate()


def _enable_keepalive(connection: Any) -> None:
    """Enables TCP keepalive, so that the kernel detects a lost machine within seconds."""
    sock = connection._transport.get_extra_info("socket")  # noqa: SLF001  the driver has no public access
    if sock is None or sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _PROBES.items():
        if (option := getattr(socket, f"TCP_KEEP{name}", None)) is not None:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
    if (option := getattr(socket, "TCP_USER_TIMEOUT", None)) is not None:  # only on Linux
        sock.setsockopt(socket.IPPROTO_TCP, option, _MAX_UNACKNOWLEDGED_S * 1000)
