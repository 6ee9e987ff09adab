"""Addresses of PostgreSQL: which hosts they name, and which kind of server they ask for."""

from collections.abc import Iterator
from itertools import pairwise

import pytest
from asyncpg import connect_utils

from tenuto.chaos.databases import _server_address
from tenuto.logs import without_password
from tenuto.model.errors import Invalid
from tenuto.store.postgres.address import Host, order_hosts, parse


def driver_hosts(url: str) -> list[Host]:
    """The hosts as the driver itself reads them."""
    names = connect_utils._parse_connect_dsn_and_args.__kwdefaults__ or {}
    expected = connect_utils._parse_connect_dsn_and_args.__code__.co_varnames
    count = connect_utils._parse_connect_dsn_and_args.__code__.co_kwonlyargcount
    values = dict.fromkeys(expected[:count]) | names | {"dsn": url}
    addresses, _ = connect_utils._parse_connect_dsn_and_args(**values)
    return [
        Host(*address) if isinstance(address, tuple) else Host(*_socket(address))
        for address in addresses
    ]


def _socket(path: str) -> tuple[str, int]:
    folder, _, port = path.rpartition("/.s.PGSQL.")
    return folder, int(port)


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://u@h/db",
        "postgres://u:p@h:1/db",
        "postgresql://u@h1:1,h2:2/db",
        "postgresql://u@h1,h2:2/db",
        "postgresql://h1:1,h2:2,h3:3/db?target_session_attrs=primary&sslmode=disable",
        "postgresql:///db?host=a,b,c&port=1,2,3",
        "postgresql:///db?host=a:7,b",
        "postgresql://u@/db?host=/run/one&port=6000",
        "postgresql:///db?host=/run/one,/run/two&port=1,2",
        "postgresql://u@%2Frun%2Fone/db",
        "postgresql://u@%2Frun%2Fone:6000/db",
        "postgresql://u:p@%2Frun%2Fa%2Cb:%36000,h:2,%2Frun%2Fc/db",
        "postgresql://u@[::1]:5433/db",
        "postgresql://u@[::1]:1,[fe80::2]:2/db",
        "postgresql:///db?host=[::1]:1,h:2",
        "postgresql://h/db?host=other&port=9",
        "postgresql://h/db?passfile=/none&sslmode=prefer",
        "postgresql://h:1/db?user=a@b",
    ],
)
def test_hosts_equal_those_of_the_driver(url: str) -> None:
    result = parse(url, {})
    assert list(result.hosts) == driver_hosts(url)


def chain(error: BaseException | None) -> Iterator[str]:
    """Returns the texts that a stack trace of the error would show."""
    while error is not None:
        yield str(error)
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def test_hosts_default_to_the_environment() -> None:
    environ = {"PGHOST": "a,b", "PGPORT": "1,2"}
    assert parse("postgresql:///db", environ).hosts == (Host("a", 1), Host("b", 2))
    assert parse("postgresql://c/db", {"PGPORT": "7"}).hosts == (Host("c", 7),)
    assert parse("postgresql:///db", {}).hosts == ()
    assert parse("postgresql:///db?service=s", environ).hosts == ()


def test_chaos_run_uses_the_first_host() -> None:
    assert _server_address("postgresql://u@h1:1,h2:2/db") == Host("h1", 1)
    assert _server_address("postgresql:///db?host=/run/one&port=7") == Host("/run/one", 7)


def test_single_port_applies_to_all_hosts() -> None:
    result = parse("postgresql:///db?host=a,b&port=6000", {})
    assert result.hosts == (Host("a", 6000), Host("b", 6000))


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("postgresql://h:port/db", "a port is not a number from 1 to 65535"),
        ("postgresql://h:99999/db", "a port is not a number from 1 to 65535"),
        ("postgresql://h1:1,h2:x/db", "a port is not a number from 1 to 65535"),
        ("postgresql:///db?host=a,b,c&port=1,2", "3 hosts but 2 ports"),
        ("postgresql:///db?host=a,,c", "a host has no name"),
        ("postgresql://[half/db", "it is not a valid URL"),
        ("postgresql://h/db?sslmode", "the text after ? is not name=value"),
        ("postgresql://h/db#x", "it contains #"),
        ("postgresql:///db?port=x", "a port is not a number from 1 to 65535"),
        ("postgresql://h/db?target_session_attrs=standby", "use target_session_attrs=primary"),
        ("postgresql://h/db?target_session_attrs=best", "use target_session_attrs=primary"),
    ],
)
def test_invalid_address_is_refused_with_the_reason(url: str, reason: str) -> None:
    with pytest.raises(Invalid, match=r"^the database address is invalid: ") as caught:
        parse(url, {})
    assert reason in caught.value.message
    assert caught.value.code == "database_invalid"


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://u:hun/ter2@h/db",
        "postgresql://u:12/ter2@127.0.0.1/db",
        "postgresql://u:hun#ter2@h/db",
        "postgresql://u:12#ter2@h/db",
        "postgresql://u:hun?ter2@h/db",
        "postgresql://u:12?ter2@h/db",
        "postgresql://u:12?ter2=hun@h/db",
        "postgresql://u:12?ter2=hun@h1,h2/db?sslmode=require",
        "postgresql://u:hun@ter2@h/db",
        "postgresql://u:hun\u2100ter2@h/db",
        "postgresql://u:hun[ter2@h/db",
        "postgresql://[hun]ter2/db",
        "postgresql:///db?host=[hun]ter2",
        "postgresql://h/db?target_session_attrs=hunter2",
    ],
)
def test_refusal_of_an_address_repeats_no_part_of_it(url: str) -> None:
    with pytest.raises(Invalid, match="the database address is invalid: ") as caught:
        parse(url, {})
    reported = list(chain(caught.value))
    assert not [part for part in ("hun", "ter2", "12") if any(part in item for item in reported)]
    if "@" in url:
        assert "%2F" in caught.value.message


def test_ipv6_address_without_brackets_has_no_port() -> None:
    result = parse("postgresql:///db?host=::1,[fe80::2]:7,h:8&sslmode=disable", {"PGPORT": "6000"})
    assert result.hosts == (Host("::1", 6000), Host("fe80::2", 7), Host("h", 8))
    assert parse("postgresql:///db?host=::1&port=5433", {}).hosts == (Host("::1", 5433),)
    assert parse("postgresql:///db", {"PGHOST": "fe80::1,::1"}).hosts == (
        Host("fe80::1", 5432),
        Host("::1", 5432),
    )


@pytest.mark.parametrize(
    ("attribute", "expected"),
    [("", None), ("?target_session_attrs=any", False), ("?target_session_attrs=primary", True)],
)
def test_address_selects_the_kind_of_server(attribute: str, expected: bool | None) -> None:
    assert parse(f"postgresql://a,b/db{attribute}", {}).wants_primary is expected


def test_read_write_selects_the_primary() -> None:
    assert parse("postgresql://a,b/db?target_session_attrs=read-write", {}).wants_primary
    assert parse("postgresql://a,b/db", {"PGTARGETSESSIONATTRS": "read-write"}).wants_primary


@pytest.mark.parametrize(
    ("url", "stored"),
    [
        ("postgresql://u:p@h/db", False),
        ("postgresql://u@h/db?password=p", False),
        ("postgresql://u@h/db", True),
        ("postgresql://u:p@h/db?sslmode=verify-full", True),
        ("postgresql://u:p@h/db?sslmode=verify-ca", True),
        ("postgresql://u:p@h/db?sslmode=require", True),
        ("postgresql://u:p@h/db?sslmode=verify_full", True),
        ("postgresql://u:p@h/db?sslmode=verify_ca", True),
        ("postgresql://u:p@h/db?service=s", True),
        ("postgresql://u:p@h/db?sslmode=prefer&service=", False),
        ("postgresql://u:p@h/db?sslmode=prefer", False),
        ("postgresql://u:p@h/db?sslmode=disable", False),
    ],
)
def test_host_name_is_kept_for_certificate_checks(url: str, stored: bool) -> None:
    assert parse(url, {}).keeps_names is stored


def test_last_good_host_is_tried_first() -> None:
    a, b, c = hosts = [Host("a", 1), Host("b", 1), Host("c", 1)]
    assert order_hosts(hosts, None) == [a, b, c]
    assert order_hosts(hosts, b) == [b, a, c]
    assert order_hosts(hosts, Host("gone", 1)) == [a, b, c]
    assert order_hosts([a, a, b], a) == [a, b]
    assert all(first != second for first, second in pairwise(order_hosts([a, b, a], b)))


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://u:hunter2@h/db",
        "postgresql://u:hunter2@h1:1,h2:2/db?target_session_attrs=primary",
        "postgresql://u:hun/ter2@h/db",
        "postgresql://u:hun@ter2@h/db",
        "postgresql:///db?host=a,b&user=u&password=hunter2&port=1,2",
        "postgresql://u@h/db?sslpassword=hunter2",
        "postgresql:///db?password=hunter2",
    ],
)
def test_printed_address_never_shows_its_password(url: str) -> None:
    shown = without_password(f"cannot reach {url} now")
    assert not {part for part in ("hun", "ter2") if part in shown}
    assert shown.startswith("cannot reach postgres")
    assert shown.endswith(" now")


@pytest.mark.parametrize(
    "text",
    [
        "postgresql://u@h1:1,h2:2/db?host=x",
        "see http://127.0.0.1:8484/users/a@b.c",
        "postgresql:///db?passfile=/etc/pass",
    ],
)
def test_printed_address_keeps_other_parts(text: str) -> None:
    assert without_password(text) == text
