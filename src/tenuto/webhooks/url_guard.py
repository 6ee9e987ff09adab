"""Every URL a user gives: read by one parser, resolved once, refused where it must not lead.

Whoever connects uses the addresses that were checked and no others, so a name that answers
differently the second time changes nothing.
"""

import asyncio
import re
import socket
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from ipaddress import (
    IPv4Address,
    IPv4Network,
    IPv6Address,
    IPv6Network,
    ip_address,
    ip_network,
)

import idna
import msgspec

from tenuto.model.errors import Invalid
from tenuto.model.webhooks import MAX_URL

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network
Resolve = Callable[[str, int], Awaitable[list[str]]]
"""The addresses of a name; raises `OSError` when it has none."""

_PORTS = {"http": 80, "https": 443}
_URL = re.compile(
    r"(?P<scheme>https?)://"
    r"(?:\[(?P<literal>[0-9a-f:.]+)\]|(?P<name>[^\x00-\x20\x7f/?#@:\[\]\\%]+))"
    r"(?::(?P<port>[0-9]{1,5}))?"
    r"(?P<path>[/?](?:[a-z0-9\-._~!$&'()*+,;=:@/?]|%[0-9a-f]{2})*)?",
    flags=re.ASCII | re.IGNORECASE,
)
_NAME = re.compile(r"(?!-)[a-z0-9_-]{1,63}(?<!-)(?:\.(?!-)[a-z0-9_-]{1,63}(?<!-))*")
_NUMBER = re.compile(r"(?:.*\.)?(?:[0-9]+|0x[0-9a-f]*)")
_LONGEST_NAME = 253
PATIENCE_S = 5.0
"""Seconds that the lookup of a name may take."""
_LOOKUPS = ThreadPoolExecutor(64, thread_name_prefix="lookup")
"""More than the messages that a process sends at once."""
_under_way: dict[tuple[str, int], Future[list[str]]] = {}


def _networks(text: str) -> tuple[Network, ...]:
    return tuple(map(ip_network, text.split()))


_PRIVATE = _networks(
    "10.0.0.0/8 172.16.0.0/12 192.168.0.0/16 127.0.0.0/8 100.64.0.0/10 ::1/128 fc00::/7"
)
"""Where a name may lead that the operator allows."""
_SPECIAL = (
    *_PRIVATE,
    # this network, link-local, assigned to protocols, documentation, 6to4 relays, benchmarks,
    # multicast, reserved and broadcast, a cloud's own host
    *_networks(
        "0.0.0.0/8 169.254.0.0/16 192.0.0.0/24 192.0.2.0/24 192.88.99.0/24 198.18.0.0/15"
        " 198.51.100.0/24 203.0.113.0/24 224.0.0.0/4 240.0.0.0/4 168.63.129.16/32"
    ),
    # assigned to protocols with Teredo, documentation, 6to4
    *_networks("2001::/23 2001:db8::/32 2002::/16 3fff::/20"),
)
_GLOBAL_V6 = IPv6Network("2000::/3")
"""All IPv6 addresses that are routed; what embeds IPv4 is elsewhere, but for Teredo and 6to4."""
_NAT64 = IPv6Network("64:ff9b::/96")
_METADATA = frozenset(
    map(
        ip_address,
        "169.254.169.254 169.254.170.2 169.254.42.42 100.100.100.200 168.63.129.16 192.0.0.192"
        " fd00:ec2::254 fd20:ce::254 fd00:42::42".split(),
    )
)
"""Where clouds hand out credentials: no operator can allow these."""


class ParsedUrl(msgspec.Struct, frozen=True, kw_only=True):
    """A URL in parts. `host` is ASCII, lower case, without a dot at the end."""

    scheme: str
    host: str
    port: int
    path: str

    @property
    def literal(self) -> Address | None:
        """The address, where the URL has one instead of a name."""
        try:
            return _address(self.host)
        except ValueError:
            return None

    @property
    def authority(self) -> str:
        """What the `Host` header says."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _PORTS[self.scheme] else f"{host}:{self.port}"


class CheckedUrl(msgspec.Struct, frozen=True):
    """A target, and the only addresses that may be connected to for it."""

    target: ParsedUrl
    addresses: tuple[Address, ...]


def _address(text: str) -> Address:
    """The address as it is connected to: without a zone, and IPv4 as IPv4."""
    address = ip_address(text.partition("%")[0])
    return getattr(address, "ipv4_mapped", None) or address


async def resolve(host: str, port: int) -> list[str]:
    """The addresses that the system knows for a name.

    Nobody can stop a lookup: one whose servers are silent keeps its thread long after patience is
    over. So a name has one thread at most, whoever asks, and other work of the process none of it.
    """
    loop = asyncio.get_running_loop()
    waiter: asyncio.Future[list[str]] = loop.create_future()

    def told(done: Future[list[str]]) -> None:
        with suppress(RuntimeError):  # the loop is over, and nobody waits
            loop.call_soon_threadsafe(_pass_on, done, waiter)

    _looked_up(host, port).add_done_callback(told)
    return await waiter


def _looked_up(host: str, port: int) -> Future[list[str]]:
    """The lookup of a name that is under way, or a new one."""
    name = (host, port)
    lookup = _under_way.get(name)
    if lookup is None:
        lookup = _under_way[name] = _LOOKUPS.submit(_addresses, host, port)
        lookup.add_done_callback(lambda _: _under_way.pop(name, None))
    return lookup


def _addresses(host: str, port: int) -> list[str]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(sockaddr[0]) for *_, sockaddr in found))


def _pass_on(done: Future[list[str]], waiter: asyncio.Future[list[str]]) -> None:
    if waiter.done():
        return  # it was given up
    if (error := done.exception()) is not None:
        waiter.set_exception(error)
    else:
        waiter.set_result(done.result())


def parse(url: str) -> ParsedUrl:
    """The URL in parts; `Invalid` unless it is one that every program reads alike."""
    match = _URL.fullmatch(url) if len(url) <= MAX_URL else None
    if match is None:
        raise _invalid(
            f"must be http(s)://host[:port][/path] of at most {MAX_URL:,} characters, without"
            " user, password, fragment, spaces or backslashes"
        )
    scheme = match["scheme"].lower()
    host = _host_v6(match["literal"]) if match["literal"] else _host(match["name"])
    port = int(match["port"] or _PORTS[scheme])
    if not 1 <= port <= 65_535:
        raise _invalid("has a port out of range")
    path = match["path"] or "/"
    return ParsedUrl(
        scheme=scheme, host=host, port=port, path=path if path[0] == "/" else f"/{path}"
    )


def _host_v6(literal: str) -> str:
    try:
        return str(IPv6Address(literal))
    except ValueError as error:
        raise _invalid("has a host that is not an IPv6 address") from error


def _host(name: str) -> str:
    if len(name) > _LONGEST_NAME:
        raise _invalid("has a host name that is too long")
    try:
        host = name.lower() if name.isascii() else idna.encode(name, uts46=True).decode()
    except idna.IDNAError as error:
        raise _invalid("has a host name that cannot be spelled in ASCII") from error
    host = host.removesuffix(".")
    if _NUMBER.fullmatch(host):
        # Octal, hexadecimal and short forms mean different addresses to different programs.
        try:
            return str(IPv4Address(host))
        except ValueError as error:
            raise _invalid("has an address that is not four decimal numbers") from error
    if len(host) > _LONGEST_NAME or not _NAME.fullmatch(host):
        raise _invalid("has a host that is not a name")
    return host


class UrlGuard:
    """Decides where webhooks may lead."""

    def __init__(
        self,
        allow: Iterable[str] = (),
        resolve: Resolve = resolve,
        patience_s: float = PATIENCE_S,
    ) -> None:
        """`allow` holds the operator's exceptions: `host`, `host:port`, an address or a network.

        A name allowed may lead into private networks, a network allowed is as good as public. Both
        may be called without TLS.
        """
        self._resolve = resolve
        self._patience_s = patience_s
        self._networks: list[Network] = []
        self._names: set[tuple[str, int | None]] = set()
        for entry in filter(None, (each.strip() for each in allow)):
            self._add(entry)

    def _add(self, entry: str) -> None:
        try:
            self._networks.append(ip_network(entry))
        except ValueError:
            target = _named(entry)
            port = target.port if re.search(r":[0-9]+$", entry) else None
            self._names.add((target.host, port))

    async def look_up(self, url: str) -> CheckedUrl:
        """Where the URL leads, for one connection; `Invalid` when it must not be called."""
        target = parse(url)
        addresses = tuple([target.literal] if target.literal else await self._addresses(target))
        named = not self._names.isdisjoint({(target.host, None), (target.host, target.port)})
        trusted = named or all(map(self._in_allowed_network, addresses))
        if target.scheme == "http" and not trusted:
            raise _forbidden(
                "must begin with https:// unless the setting webhook_allow names its host"
            )
        if target.port < 1024 and target.port not in _PORTS.values() and not trusted:
            raise _forbidden("must use port 443, 80 or one above 1023")
        for address in addresses:
            self._check(address, named=named)
        return CheckedUrl(target, addresses)

    async def _addresses(self, target: ParsedUrl) -> list[Address]:
        try:
            async with asyncio.timeout(self._patience_s):
                found = await self._resolve(target.host, target.port)
        except (OSError, UnicodeError) as error:  # a timeout is an OSError, too
            raise _invalid("has a host that cannot be found") from error
        if not found:
            raise _invalid("has a host without an address")
        return [_address(each) for each in found]

    def _in_allowed_network(self, address: Address) -> bool:
        return any(address in network for network in self._networks)

    def _check(self, address: Address, *, named: bool) -> None:
        may = (
            self._in_allowed_network(address)
            or _is_public(address)
            or (named and any(address in network for network in _PRIVATE))
        )
        if not may or address in _METADATA:
            raise _forbidden("leads to an address that webhooks must not call")


def _named(entry: str) -> ParsedUrl:
    wrong = Invalid(f"webhook_allow has a wrong entry: {entry[:100]}")
    try:
        target = parse(f"http://{entry}/")
    except Invalid as error:
        raise wrong from error
    if target.path != "/":
        raise wrong
    return target


def _is_public(address: Address) -> bool:
    if isinstance(address, IPv6Address):
        if address in _NAT64:
            return _is_public(IPv4Address(int(address) & 0xFFFF_FFFF))
        if address not in _GLOBAL_V6:
            return False
    return not any(address in network for network in _SPECIAL)


def _invalid(why: str) -> Invalid:
    return Invalid(f"the URL {why}", "url_invalid", field="url")


def _forbidden(why: str) -> Invalid:
    return Invalid(f"the URL {why}", "url_forbidden", field="url")
