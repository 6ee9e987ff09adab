"""Connects to the present primary among the hosts of an address.

The driver's own time limit covers all hosts together, so one frozen host keeps it from asking the
others. Here each host has a limit of its own, and the next one is asked while a host is silent.
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

from tenuto.store.postgres.address import Host, order, parse

_ALONE_S = 5.0
"""Seconds that the only host of an address has to accept a connection."""
_EACH_S = 2.0
"""Seconds that each of several hosts has."""
_NEXT_S = 0.3
"""Seconds without an answer after which the next host is asked, too."""
_LOOKUP_S = 30.0
"""Seconds after which a lookup of a name is started anew."""
_GIVE_UP_S = 1.0
"""Seconds after a server was given up in which it is not given up again.

A server that refuses writes without being a standby is found again at once, by every program.
"""
_PROBES = {"IDLE": 5, "INTVL": 2, "CNT": 3}
"""Keepalive: the first probe after this many idle seconds, then how often, and how many."""
_UNACKNOWLEDGED_S = 10
"""Seconds that sent bytes may stay unacknowledged before the connection counts as lost."""


class _GivenUp(msgspec.Struct, eq=False):
    """What the connectors of a store share about servers that are given up."""

    told: list[Callable[[], None]]
    """Who learns of it."""
    at: float = float("-inf")
    """When one was given up last, in seconds of the event loop."""


class Connector:
    """Makes connections of one store; all of them learn when its server is given up.

    A store behind a pooler has several: one made `beside` another learns of it, too.
    """

    def __init__(self, url: str, beside: "Connector | None" = None) -> None:
        self._address = parse(url, os.environ)
        self._last: Host | None = None
        self._known: dict[Host, list[Host]] = {}
        """The addresses that each name had at the last lookup which was answered."""
        self._lookups: dict[Host, asyncio.Task[list[Host]]] = {}
        """Those under way, which all who connect share."""
        self._given_up: _GivenUp = _GivenUp([]) if beside is None else beside._given_up  # noqa: SLF001
        self._given_up.told.append(self._forget)

    @property
    def url(self) -> str:
        return self._address.url

    def when_given_up(self, tell: Callable[[], None]) -> None:
        """Call this whenever a server is given up: idle connections to it are worth nothing."""
        self._given_up.told.append(tell)

    def give_up(self) -> None:
        """Tell all connectors of the store: it is silent or is no primary any more.

        Does nothing right after the last time.
        """
        now = asyncio.get_running_loop().time()
        if now - self._given_up.at < _GIVE_UP_S:
            return
        self._given_up.at = now
        for tell in self._given_up.told:
            tell()

    def _forget(self) -> None:
        """Forget the last good host."""
        self._last = None

    async def connect(self, settings: Mapping[str, str], **options: Any) -> Any:
        """A new connection to the primary; raises what the most telling host answered."""
        options["server_settings"] = dict(settings)
        hosts = order(await self._hosts(), self._last)
        if len(hosts) > 1:
            return await self._race(hosts, options)
        host = hosts[0] if hosts else None
        return await self._try(host, _ALONE_S, options, primary=self._address.wants_primary)

    async def _hosts(self) -> list[Host]:
        """Every host of the address; each address of a name counts as a host."""
        if self._address.keeps_names:
            return list(self._address.hosts)
        found = await asyncio.gather(*map(self._resolved, self._address.hosts))
        return [host for each in found for host in each]

    async def _resolved(self, host: Host) -> list[Host]:
        """The addresses of a host's name, or the last known; the host itself if it has just one."""
        if host.is_socket:
            return [host]
        if host not in self._lookups:
            lookup = asyncio.ensure_future(_looked_up(host))
            lookup.add_done_callback(lambda done: self._learn(host, done))
            self._lookups[host] = lookup
        known = self._known.get(host)
        await asyncio.wait([self._lookups[host]], timeout=_NEXT_S if known else _EACH_S)
        addresses = self._known.get(host, [])
        # Without any address the attempt to connect says what is wrong with the name.
        return addresses if len(addresses) > 1 else [host]

    def _learn(self, host: Host, lookup: "asyncio.Task[list[Host]]") -> None:
        """Keep what a lookup found, though nobody waits for it any more."""
        del self._lookups[host]
        if not lookup.cancelled() and (found := lookup.result()):
            self._known[host] = found

    async def _race(self, hosts: list[Host], options: dict[str, Any]) -> Any:
        """The connection of the host that answers first as a primary."""
        waiting = deque(hosts)
        tries: dict[asyncio.Task[Any], Host] = {}
        errors: list[BaseException] = []
        primary = self._address.wants_primary is not False
        try:
            while waiting or tries:
                if waiting:
                    host = waiting.popleft()
                    one = self._try(host, _EACH_S, options, primary=primary)
                    tries[asyncio.ensure_future(one)] = host
                done, _ = await asyncio.wait(
                    tries,
                    timeout=_NEXT_S if waiting else None,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                for each in done:
                    if (error := each.exception()) is not None:
                        errors.append(error)
                        del tries[each]
                if answered := [each for each in done if each in tries]:
                    self._last = tries.pop(answered[0])
                    return answered[0].result()
            raise most_telling(errors)
        finally:
            for each in tries:
                each.cancel()
                each.add_done_callback(_discard)

    async def _try(
        self, host: Host | None, limit_s: float, options: dict[str, Any], *, primary: bool | None
    ) -> Any:
        """A connection to this host, or to the driver's own choice."""
        place: dict[str, Any] = {} if host is None else {"host": host.name, "port": host.port}
        if primary is not None:  # else the driver asks its service file
            place["target_session_attrs"] = "primary" if primary else "any"
        try:
            connection = await asyncpg.connect(
                self.url,
                timeout=limit_s,
                **place,
                **options,
            )
        except asyncpg.UndefinedObjectError as error:  # a setting that the server does not know
            raise asyncpg.ClientConfigurationError(str(error)) from error
        _notice_loss(connection)
        return connection


async def _looked_up(host: Host) -> list[Host]:
    """The addresses of a host's name; none if there are none, or the lookup never ends."""
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(_LOOKUP_S):
            found = await loop.getaddrinfo(host.name, host.port, type=socket.SOCK_STREAM)
    except (OSError, TimeoutError, UnicodeError):
        return []
    return list(dict.fromkeys(Host(str(place[0]), host.port) for *_, place in found))


def most_telling(errors: Iterable[BaseException]) -> BaseException:
    """The error that says most: a server's own, TLS's, a standby's, why none was reached."""

    def rank(error: BaseException) -> int:
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


def _discard(attempt: "asyncio.Task[Any]") -> None:
    """Close the connection of an attempt that came too late."""
    if not attempt.cancelled() and attempt.exception() is None:
        attempt.result().terminate()


def _notice_loss(connection: Any) -> None:
    """Let the kernel find out within seconds that the other machine is gone."""
    found = connection._transport.get_extra_info("socket")  # noqa: SLF001  the driver tells nobody
    if found is None or found.family not in (socket.AF_INET, socket.AF_INET6):
        return
    found.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _PROBES.items():
        if (option := getattr(socket, f"TCP_KEEP{name}", None)) is not None:
            found.setsockopt(socket.IPPROTO_TCP, option, value)
    if (option := getattr(socket, "TCP_USER_TIMEOUT", None)) is not None:  # Linux alone has it
        found.setsockopt(socket.IPPROTO_TCP, option, _UNACKNOWLEDGED_S * 1000)
