"""PostgreSQL addresses: which hosts one names, and what kind of server it asks for.

An address is written as the driver and libpq take it: `postgresql://user@a:1,b:2/name`, or
`postgresql:///name?host=a,b&port=1,2`. A host that begins with `/` is a folder of Unix sockets.
"""

from collections.abc import Iterable, Mapping
from itertools import repeat
from typing import NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

import msgspec

from tenuto.model.errors import Invalid

_DEFAULT_PORT = "5432"
_PRIMARY = frozenset(["primary", "read-write"])
_STANDBY = frozenset(["standby", "read-only", "prefer-standby"])
_TLS = frozenset(["require", "verify-ca", "verify-full"])
"""With these TLS is certain, and proxies of cloud providers route by the name that it sends (SNI)."""


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
    """True if TLS sends a host's name to the server or compares it with the certificate, or if it
    is looked up in the file of passwords."""


def parse(url: str, environ: Mapping[str, str]) -> Address:
    """The address as the driver understands it; raises `Invalid` with the reason."""
    try:
        return _parse(url, environ)
    except ValueError as error:
        raise Invalid(f"the database address is wrong: {error}", "database_invalid") from error


def _parse(url: str, environ: Mapping[str, str]) -> Address:
    parts = urlsplit(url)
    query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
    user, _, netloc = parts.netloc.rpartition("@")
    hosts = [unquote(each) for each in netloc.split(",")] if netloc else []
    ports: list[str] = []
    if not hosts:
        hosts = query.get("host", "").split(",") if query.get("host") else []
        ports = query.get("port", "").split(",") if query.get("port") else []
    if not hosts and not (query.get("service") or environ.get("PGSERVICE")):
        hosts = environ.get("PGHOST", "").split(",") if environ.get("PGHOST") else []
    has_password = ":" in user or "password" in query or "PGPASSWORD" in environ
    ssl_mode = query.get("sslmode") or environ.get("PGSSLMODE")
    wanted = query.get("target_session_attrs") or environ.get("PGTARGETSESSIONATTRS")
    return Address(
        url=url,
        hosts=tuple(_hosts(hosts, ports, environ.get("PGPORT") or _DEFAULT_PORT)),
        wants_primary=_wants_primary(wanted),
        keeps_names=ssl_mode in _TLS or not has_password,
    )


def _hosts(hosts: list[str], ports: list[str], default: str) -> Iterable[Host]:
    """Each host with its port; one port serves all hosts."""
    defaults = ports or default.split(",")
    if len(defaults) == 1:
        defaults = list(repeat(defaults[0], len(hosts)))
    if len(defaults) != len(hosts) and hosts:
        raise ValueError(f"{len(hosts)} hosts and {len(defaults)} ports")
    for text, port in zip(hosts, defaults, strict=False):
        name, own = _split(text)
        if not name:
            raise ValueError("a host has no name")
        yield Host(name, _port(port if ports else own or port))


def _split(text: str) -> tuple[str, str]:
    """The name and the port, if any, of `name:port`, `[IPv6]:port` or a folder."""
    if text.startswith("/"):
        return text, ""
    if text.startswith("["):
        name, bracket, rest = text[1:].partition("]")
        if not bracket or (rest and not rest.startswith(":")):
            raise ValueError(f"{text!r} is not an IPv6 address in brackets")
        return name, rest[1:]
    name, _, port = text.partition(":")
    return name, port


def _port(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 0 < int(text) < 65536:
        raise ValueError(f"{text!r} is not a port; use a number from 1 to 65535")
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
            f"target_session_attrs={wanted} is not known; use target_session_attrs=primary"
        )
    return None if wanted is None else wanted in _PRIMARY


def order(hosts: Iterable[Host], last: Host | None) -> list[Host]:
    """The hosts in the order in which they are tried: the last good one first, each one once."""
    first = [last] if last in (known := list(hosts)) and last is not None else []
    return list(dict.fromkeys([*first, *known]))
