"""PostgreSQL addresses: which hosts one names, and what kind of server it asks for.

An address is written as the driver and libpq take it: `postgresql://user@a:1,b:2/name`, or
`postgresql:///name?host=a,b&port=1,2`. A host that begins with `/` is a folder of Unix sockets.
"""

from collections.abc import Iterable, Mapping
from itertools import repeat
from typing import NamedTuple
from urllib.parse import SplitResult, parse_qs, unquote, urlsplit

import msgspec

from tenuto.model.errors import Invalid

_DEFAULT_PORT = "5432"
_PRIMARY = frozenset(["primary", "read-write"])
_STANDBY = frozenset(["standby", "read-only", "prefer-standby"])
_TLS = frozenset(["require", "verify-ca", "verify-full"])
"""With these TLS is certain, and cloud providers' proxies route by the name that it sends (SNI)."""


class Host(NamedTuple):
    """Where one server listens."""

    name: str
    port: int

    @property
    def is_socket(self) -> bool:
        return self.name.startswith("/")


class Address(msgspec.Struct, frozen=True):
    """What an address says about the way to its database."""

    url: str
    hosts: tuple[Host, ...]
    """Without any the driver looks where it looks by default."""
    wants_primary: bool | None
    """True if only a primary will do, `None` if the address does not say."""
    keeps_names: bool
    """True if TLS sends a host's name to the server or compares it with the certificate, if it is
    looked up in the file of passwords, or if a service file may say so."""


def parse(url: str, environ: Mapping[str, str]) -> Address:
    """The address as the driver understands it; raises `Invalid` with the reason.

    The reason never quotes the address: a character that is not encoded moves pieces of the
    password to where a host, a port or an option stands.
    """
    try:
        return _parse(url, environ)
    except ValueError as error:
        raise Invalid(f"the database address is wrong: {error}", "database_invalid") from error


def _malformed(what: str) -> ValueError:
    return ValueError(f"{what}; in a password write / as %2F, # as %23, ? as %3F and @ as %40")


def _parse(url: str, environ: Mapping[str, str]) -> Address:
    parts, query = _parts(url)
    user, _, netloc = parts.netloc.rpartition("@")
    hosts = [_decoded(each) for each in netloc.split(",")] if netloc else []
    ports: list[str] = []
    if not hosts:
        hosts = _listed(query.get("host"))
        ports = query.get("port", "").split(",") if query.get("port") else []
    service = query.get("service") or environ.get("PGSERVICE")
    if not hosts and not service:
        hosts = _listed(environ.get("PGHOST"))
    has_password = ":" in user or "password" in query or "PGPASSWORD" in environ
    ssl_mode = query.get("sslmode") or environ.get("PGSSLMODE") or ""
    wanted = query.get("target_session_attrs") or environ.get("PGTARGETSESSIONATTRS")
    return Address(
        url=url,
        hosts=tuple(_hosts(hosts, ports, environ.get("PGPORT") or _DEFAULT_PORT)),
        wants_primary=_wants_primary(wanted),
        keeps_names=ssl_mode.replace("_", "-") in _TLS or bool(service) or not has_password,
    )


def _parts(url: str) -> tuple[SplitResult, dict[str, str]]:
    """The parts of an address, and its options by name."""
    try:
        parts = urlsplit(url)
    except ValueError:
        raise _malformed("its parts cannot be told apart") from None
    if parts.fragment:
        raise _malformed("# ends an address")
    ats = parts.netloc.count("@")
    has_late = ":" in parts.netloc and not ats and "@" in (parts.path or parts.query)
    if ats > 1 or has_late:
        raise _malformed("an @ stands where none belongs")
    try:
        found = parse_qs(parts.query, strict_parsing=True) if parts.query else {}
    except ValueError:
        raise _malformed("what follows ? is not name=value") from None
    return parts, {name: values[-1] for name, values in found.items()}


def _listed(text: str | None) -> list[tuple[str, str]]:
    """The hosts of an option or a variable; an IPv6 address without brackets has no port there."""
    return [
        (each, "") if each.count(":") > 1 and not each.startswith("[") else _split(each)
        for each in (text.split(",") if text else [])
    ]


def _hosts(hosts: list[tuple[str, str]], ports: list[str], default: str) -> Iterable[Host]:
    """Each host with its port; one port serves all hosts."""
    defaults = ports or default.split(",")
    for port in defaults:
        _port(port)
    if len(defaults) == 1:
        defaults = list(repeat(defaults[0], len(hosts)))
    if len(defaults) != len(hosts) and hosts:
        raise _malformed(f"{len(hosts)} hosts and {len(defaults)} ports")
    for (name, own), port in zip(hosts, defaults, strict=False):
        if not name:
            raise _malformed("a host has no name")
        yield Host(name, _port(port if ports else own or port))


def _split(text: str) -> tuple[str, str]:
    """The name and the port, if any, of `name:port`, `[IPv6]:port` or a folder."""
    if text.startswith("/"):
        return text, ""
    if text.startswith("["):
        name, bracket, rest = text[1:].partition("]")
        if not bracket or (rest and not rest.startswith(":")):
            raise _malformed("an IPv6 address does not end with its bracket")
        return name, rest[1:]
    name, _, port = text.partition(":")
    return name, port


def _decoded(text: str) -> tuple[str, str]:
    """The same of a host in an address, where `/` of a folder is written as %2F."""
    name, port = _split(text)
    return unquote(name), unquote(port)


def _port(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 0 < int(text) < 65536:
        raise _malformed("a port is no number from 1 to 65535")
    return int(text)


def _wants_primary(wanted: str | None) -> bool | None:
    """What `target_session_attrs` means for a program that writes.

    `read-write` counts as `primary`: connections for reading begin read-only, and the driver takes
    their server for one that cannot be written to.
    """
    if wanted in _STANDBY:
        raise ValueError(
            f"target_session_attrs={wanted} leads to servers that cannot be written to;"
            " use target_session_attrs=primary"
        )
    if wanted not in (None, "any", *_PRIMARY):
        raise ValueError(
            "target_session_attrs has a value that is not known; use target_session_attrs=primary"
        )
    return None if wanted is None else wanted in _PRIMARY


def order(hosts: Iterable[Host], last: Host | None) -> list[Host]:
    """The hosts in the order in which they are tried: the last good one first, each one once."""
    first = [last] if last in (known := list(hosts)) and last is not None else []
    return list(dict.fromkeys([*first, *known]))
