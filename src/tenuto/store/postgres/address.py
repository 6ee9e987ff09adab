"""Parses PostgreSQL addresses: their hosts and the kind of server they require.

An address has the form of the driver and libpq: `postgresql://user@a:1,b:2/name`, or
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
"""Modes that always use TLS: proxies of cloud providers route by the host name it sends (SNI)."""


class Host(NamedTuple):
    """Host name or socket folder, and port, of one server."""

    name: str
    port: int

    @property
    def is_socket(self) -> bool:
        return self.name.startswith("/")


class Address(msgspec.Struct, frozen=True):
    """A parsed address."""

    url: str
    hosts: tuple[Host, ...]
    """If empty, the driver uses its default hosts."""
    wants_primary: bool | None
    """True if only a primary is acceptable, `None` if the address does not say."""
    keeps_names: bool
    """True if host names must not be replaced by their addresses: TLS sends or checks the name,
    the password file is searched for it, or a service file may require one of these."""


def parse(url: str, environ: Mapping[str, str]) -> Address:
    """Returns the hosts and kind of server of the URL, defaults from `PG*` variables; or `Invalid`.

    The reason never quotes the address: because of an unencoded character, a part of the password
    may be where a host, a port or an option is expected.
    """
    try:
        return _parse(url, environ)
    except ValueError as error:
        raise Invalid(f"the database address is invalid: {error}", "database_invalid") from error


def _malformed_error(problem: str) -> ValueError:
    """Returns the error for a malformed address, with a hint about encoding passwords."""
    return ValueError(f"{problem}; in a password write / as %2F, # as %23, ? as %3F and @ as %40")


def _parse(url: str, environ: Mapping[str, str]) -> Address:
    """Parses the URL, with `PG*` variables as defaults; raises `ValueError` if it is invalid."""
    parts, query = _split_url(url)
    user, _, netloc = parts.netloc.rpartition("@")
    hosts = [_decode_host(part) for part in netloc.split(",")] if netloc else []
    ports: list[str] = []
    if not hosts:
        hosts = _parse_hosts(query.get("host"))
        ports = query.get("port", "").split(",") if query.get("port") else []
    service = query.get("service") or environ.get("PGSERVICE")
    if not hosts and not service:
        hosts = _parse_hosts(environ.get("PGHOST"))
    has_password = ":" in user or "password" in query or "PGPASSWORD" in environ
    ssl_mode = query.get("sslmode") or environ.get("PGSSLMODE") or ""
    target_attrs = query.get("target_session_attrs") or environ.get("PGTARGETSESSIONATTRS")
    return Address(
        url=url,
        hosts=tuple(_add_ports(hosts, ports, environ.get("PGPORT") or _DEFAULT_PORT)),
        wants_primary=_parse_target_attrs(target_attrs),
        keeps_names=ssl_mode.replace("_", "-") in _TLS or bool(service) or not has_password,
    )


def _split_url(url: str) -> tuple[SplitResult, dict[str, str]]:
    """Returns the parts of an address, and its options by name; `ValueError` if malformed."""
    try:
        parts = urlsplit(url)
    except ValueError:
        raise _malformed_error("it is not a valid URL") from None
    if parts.fragment:
        raise _malformed_error("it contains #, which would end the address")
    at_signs = parts.netloc.count("@")
    has_misplaced_at = ":" in parts.netloc and not at_signs and "@" in (parts.path or parts.query)
    if at_signs > 1 or has_misplaced_at:
        raise _malformed_error("it contains an unexpected @")
    try:
        options = parse_qs(parts.query, strict_parsing=True) if parts.query else {}
    except ValueError:
        raise _malformed_error("the text after ? is not name=value") from None
    return parts, {name: values[-1] for name, values in options.items()}


def _parse_hosts(text: str | None) -> list[tuple[str, str]]:
    """Returns name and port, which may be empty, of each host in a comma-separated list."""
    return [
        (part, "") if part.count(":") > 1 and not part.startswith("[") else _split_port(part)
        for part in (text.split(",") if text else [])
    ]


def _add_ports(hosts: list[tuple[str, str]], ports: list[str], default: str) -> Iterable[Host]:
    """Yields hosts with the port of `ports` (one is for all), else their own, else `default`."""
    defaults = ports or default.split(",")
    for port in defaults:
        _parse_port(port)
    if len(defaults) == 1:
        defaults = list(repeat(defaults[0], len(hosts)))
    if len(defaults) != len(hosts) and hosts:
        raise _malformed_error(f"{len(hosts)} hosts but {len(defaults)} ports")
    for (name, own_port), port in zip(hosts, defaults, strict=False):
        if not name:
            raise _malformed_error("a host has no name")
        yield Host(name, _parse_port(port if ports else own_port or port))


def _split_port(text: str) -> tuple[str, str]:
    """Returns name and port, which may be empty, of `name:port`, `[IPv6]:port` or a folder."""
    if text.startswith("/"):
        return text, ""
    if text.startswith("["):
        name, bracket, rest = text[1:].partition("]")
        if not bracket or (rest and not rest.startswith(":")):
            raise _malformed_error("an IPv6 address has no closing bracket")
        return name, rest[1:]
    name, _, port = text.partition(":")
    return name, port


def _decode_host(text: str) -> tuple[str, str]:
    """Returns decoded name and port of a host in a URL, where `/` of a folder is written as %2F."""
    name, port = _split_port(text)
    return unquote(name), unquote(port)


def _parse_port(text: str) -> int:
    """Returns the port; raises `ValueError` if it is out of range."""
    if not text.isascii() or not text.isdigit() or not 0 < int(text) < 65536:
        raise _malformed_error("a port is not a number from 1 to 65535")
    return int(text)


def _parse_target_attrs(target_attrs: str | None) -> bool | None:
    """Returns true if only a primary will do, false for `any`, `None` for none; or `ValueError`.

    The error is for options that require a standby, and unknown ones.

    `read-write` counts as `primary`: connections for reading start read-only, and the driver would
    mistake their server for a read-only one.
    """
    if target_attrs in _STANDBY:
        raise ValueError(
            f"target_session_attrs={target_attrs} selects read-only servers;"
            " use target_session_attrs=primary"
        )
    if target_attrs not in (None, "any", *_PRIMARY):
        raise ValueError(
            "target_session_attrs has an unknown value; use target_session_attrs=primary"
        )
    return None if target_attrs is None else target_attrs in _PRIMARY


def order_hosts(hosts: Iterable[Host], last: Host | None) -> list[Host]:
    """Returns the hosts in the order of attempts: the last good host first, each host once."""
    first = [last] if last in (all_hosts := list(hosts)) and last is not None else []
    return list(dict.fromkeys([*first, *all_hosts]))
