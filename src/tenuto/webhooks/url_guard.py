"""Checks every URL of a user: parses it, resolves it once, and refuses private addresses.

The sender connects only to the checked addresses, so a second lookup with another result has no
effect.
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
"""Returns the addresses of a name and port; raises `OSError` if there is none."""

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
_MAX_NAME_LENGTH = 253
LOOKUP_S = 5.0
"""Timeout of a name lookup in seconds."""
_LOOKUPS = ThreadPoolExecutor(64, thread_name_prefix="lookup")
"""More threads than the messages that a process sends at once."""
_lookups_running: dict[tuple[str, int], Future[list[str]]] = {}


def _parse_networks(text: str) -> tuple[Network, ...]:
    """Parses networks separated by spaces."""
    return tuple(map(ip_network, text.split()))


_PRIVATE = _parse_networks(
    "10.0.0.0/8 172.16.0.0/12 192.168.0.0/16 127.0.0.0/8 100.64.0.0/10 ::1/128 fc00::/7"
)
"""Private networks that a name allowed by the operator may resolve to."""
_SPECIAL = (
    *_PRIVATE,
    # this network, link-local, assigned to protocols, documentation, 6to4 relays, benchmarks,
    # multicast, reserved and broadcast, a cloud's own host
    *_parse_networks(
        "0.0.0.0/8 169.254.0.0/16 192.0.0.0/24 192.0.2.0/24 192.88.99.0/24 198.18.0.0/15"
        " 198.51.100.0/24 203.0.113.0/24 224.0.0.0/4 240.0.0.0/4 168.63.129.16/32"
    ),
    # assigned to protocols with Teredo, documentation, 6to4
    *_parse_networks("2001::/23 2001:db8::/32 2002::/16 3fff::/20"),
)
_GLOBAL_V6 = IPv6Network("2000::/3")
"""All routed IPv6 addresses. Ranges that embed IPv4 are outside, except Teredo and 6to4."""
_NAT64 = IPv6Network("64:ff9b::/96")
_METADATA = frozenset(
    map(
        ip_address,
        "169.254.169.254 169.254.170.2 169.254.42.42 100.100.100.200 168.63.129.16 192.0.0.192"
        " fd00:ec2::254 fd20:ce::254 fd00:42::42".split(),
    )
)
"""Metadata services of clouds, which issue credentials: no operator can allow these."""


class ParsedUrl(msgspec.Struct, frozen=True, kw_only=True):
    """A URL in parts. `host` is ASCII, lower case, without a dot at the end."""

    scheme: str
    host: str
    port: int
    path: str
    """With the query; begins with `/`."""

    @property
    def literal(self) -> Address | None:
        """The address in the URL; `None` if the URL has a host name."""
        try:
            return _parse_address(self.host)
        except ValueError:
            return None

    @property
    def authority(self) -> str:
        """The value of the `Host` header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _PORTS[self.scheme] else f"{host}:{self.port}"


class CheckedUrl(msgspec.Struct, frozen=True):
    """A URL, and the only addresses that may be used for it."""

    target: ParsedUrl
    addresses: tuple[Address, ...]


def _parse_address(text: str) -> Address:
    """Parses an address without its zone, IPv4-mapped as IPv4; raises `ValueError` for a name."""
    address = ip_address(text.partition("%")[0])
    return getattr(address, "ipv4_mapped", None) or address


async def resolve(host: str, port: int) -> list[str]:
    """Returns the addresses that the system's resolver finds for a name, or raises `OSError`.

    A lookup cannot be cancelled: if its servers do not answer, it uses its thread long after the
    timeout. So each name has at most one thread, and lookups have their own thread pool.
    """
    loop = asyncio.get_running_loop()
    waiter: asyncio.Future[list[str]] = loop.create_future()

    def on_done(done: Future[list[str]]) -> None:
        with suppress(RuntimeError):  # the loop is closed, and no caller waits
            loop.call_soon_threadsafe(_copy_result, done, waiter)

    _start_lookup(host, port).add_done_callback(on_done)
    return await waiter


def _start_lookup(host: str, port: int) -> Future[list[str]]:
    """Returns the running lookup of a name; starts one on a thread if there is none."""
    name = (host, port)
    lookup = _lookups_running.get(name)
    if lookup is None:
        lookup = _lookups_running[name] = _LOOKUPS.submit(_lookup_blocking, host, port)
        lookup.add_done_callback(lambda _: _lookups_running.pop(name, None))
    return lookup


def _lookup_blocking(host: str, port: int) -> list[str]:
    """Returns the addresses of a name, each once; blocks its thread."""
    entries = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(sockaddr[0]) for *_, sockaddr in entries))


def _copy_result(done: Future[list[str]], waiter: asyncio.Future[list[str]]) -> None:
    """Copies the result or error of a lookup to `waiter`, unless its caller has given up."""
    if waiter.done():
        return
    if (error := done.exception()) is not None:
        waiter.set_exception(error)
    else:
        waiter.set_result(done.result())


def parse(url: str) -> ParsedUrl:
    """Returns the parsed URL; raises `Invalid` unless every program parses it alike."""
    match = _URL.fullmatch(url) if len(url) <= MAX_URL else None
    if match is None:
        raise _invalid(
            f"must be http(s)://host[:port][/path] of at most {MAX_URL:,} characters, without"
            " user, password, fragment, spaces or backslashes"
        )
    scheme = match["scheme"].lower()
    host = _parse_ipv6_host(match["literal"]) if match["literal"] else _parse_host(match["name"])
    port = int(match["port"] or _PORTS[scheme])
    if not 1 <= port <= 65_535:
        raise _invalid("has a port outside of 1 to 65535")
    path = match["path"] or "/"
    return ParsedUrl(
        scheme=scheme, host=host, port=port, path=path if path[0] == "/" else f"/{path}"
    )


def _parse_ipv6_host(literal: str) -> str:
    """Returns the address in its shortest form; raises `Invalid` if it is not one."""
    try:
        return str(IPv6Address(literal))
    except ValueError as error:
        raise _invalid("has a host that is not an IPv6 address") from error


def _parse_host(name: str) -> str:
    """Returns the host in lower-case ASCII; `Invalid` if programs may parse it differently."""
    if len(name) > _MAX_NAME_LENGTH:
        raise _invalid("has a host name that is too long")
    try:
        host = name.lower() if name.isascii() else idna.encode(name, uts46=True).decode()
    except idna.IDNAError as error:
        raise _invalid("has a host name that cannot be converted to ASCII") from error
    host = host.removesuffix(".")
    if _NUMBER.fullmatch(host):
        # Octal, hexadecimal and short forms mean different addresses to different programs.
        try:
            return str(IPv4Address(host))
        except ValueError as error:
            raise _invalid("has an address that is not four decimal numbers") from error
    if len(host) > _MAX_NAME_LENGTH or not _NAME.fullmatch(host):
        raise _invalid("has an invalid host name")
    return host


class UrlGuard:
    """Decides which URLs webhooks may call."""

    def __init__(
        self,
        allow: Iterable[str] = (),
        resolve: Resolve = resolve,
        timeout_s: float = LOOKUP_S,
    ) -> None:
        """`allow` lists the operator's exceptions: `host`, `host:port`, an address or a network.

        An allowed name may resolve to private networks; an allowed network counts as public. Both
        may be called without TLS.
        """
        self._resolve = resolve
        self._timeout_s = timeout_s
        self._allowed_networks: list[Network] = []
        self._allowed_names: set[tuple[str, int | None]] = set()
        for entry in filter(None, (text.strip() for text in allow)):
            self._add_allowed(entry)

    def _add_allowed(self, entry: str) -> None:
        """Adds the operator's entry to the allowed networks or names, or raises `Invalid`."""
        try:
            self._allowed_networks.append(ip_network(entry))
        except ValueError:
            target = _parse_allowed(entry)
            port = target.port if re.search(r":[0-9]+$", entry) else None
            self._allowed_names.add((target.host, port))

    async def resolve_allowed(self, url: str) -> CheckedUrl:
        """Resolves a URL for one connection; raises `Invalid` if it must not be called."""
        target = parse(url)
        addresses = tuple([target.literal] if target.literal else await self._resolve_host(target))
        is_allowed_name = not self._allowed_names.isdisjoint(
            {(target.host, None), (target.host, target.port)}
        )
        is_trusted = is_allowed_name or all(map(self._in_allowed_network, addresses))
        if target.scheme == "http" and not is_trusted:
            raise _forbidden(
                "must begin with https:// unless the setting webhook_allow names its host"
            )
        if target.port < 1024 and target.port not in _PORTS.values() and not is_trusted:
            raise _forbidden("must use port 443, port 80 or a port above 1023")
        for address in addresses:
            self._check_address(address, is_allowed_name=is_allowed_name)
        return CheckedUrl(target, addresses)

    async def _resolve_host(self, target: ParsedUrl) -> list[Address]:
        """Returns the addresses of the host; raises `Invalid` if it has none."""
        try:
            async with asyncio.timeout(self._timeout_s):
                resolved = await self._resolve(target.host, target.port)
        except (OSError, UnicodeError) as error:  # a timeout is an OSError, too
            raise _invalid("has a host name that cannot be resolved") from error
        if not resolved:
            raise _invalid("has a host name without an address")
        return [_parse_address(text) for text in resolved]

    def _in_allowed_network(self, address: Address) -> bool:
        """True if a network in the operator's list contains the address."""
        return any(address in network for network in self._allowed_networks)

    def _check_address(self, address: Address, *, is_allowed_name: bool) -> None:
        """Raises `Invalid` for a forbidden address; an allowed name may have a private one."""
        is_allowed = (
            self._in_allowed_network(address)
            or _is_public(address)
            or (is_allowed_name and any(address in network for network in _PRIVATE))
        )
        if not is_allowed or address in _METADATA:
            raise _forbidden("leads to an address that webhooks must not call")


def _parse_allowed(entry: str) -> ParsedUrl:
    """Parses `host` or `host:port` of the operator's list; raises `Invalid` for anything else."""
    error_to_raise = Invalid(f"webhook_allow has an invalid entry: {entry[:100]}")
    try:
        target = parse(f"http://{entry}/")
    except Invalid as error:
        raise error_to_raise from error
    if target.path != "/":
        raise error_to_raise
    return target


def _is_public(address: Address) -> bool:
    """True if the address is publicly routed."""
    if isinstance(address, IPv6Address):
        if address in _NAT64:
            return _is_public(IPv4Address(int(address) & 0xFFFF_FFFF))
        if address not in _GLOBAL_V6:
            return False
    return not any(address in network for network in _SPECIAL)


def _invalid(reason: str) -> Invalid:
    """Returns the error of a URL that cannot be parsed or resolved."""
    return Invalid(f"the URL {reason}", "url_invalid", field="url")


def _forbidden(reason: str) -> Invalid:
    """Returns the error of a URL that webhooks must not call."""
    return Invalid(f"the URL {reason}", "url_forbidden", field="url")
