"""Addresses with several hosts: the primary is found soon."""

import asyncio
import socket
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from uuid import UUID

import asyncpg
import pytest
from tests.contract.conftest import new, refusal
from tests.services.postgres import PostgresServer
from tests.services.standby import Standby, frozen
from tests.waiting import eventually

from tenuto import app
from tenuto.broker import postgres as broker_module
from tenuto.broker.postgres import PostgresWakeups
from tenuto.broker.protocol import ALL_TOPICS, Wakeups
from tenuto.clock import Clock
from tenuto.coordinator.coordinator import Coordinator
from tenuto.engine.engine import Engine
from tenuto.model.errors import Unavailable
from tenuto.settings import Settings
from tenuto.store.postgres import connector as connector_module
from tenuto.store.postgres import store as postgres_module
from tenuto.store.postgres.address import Host
from tenuto.store.postgres.connector import Connector, most_informative
from tenuto.store.postgres.store import PostgresStore
from tenuto.store.protocol import Store

SOON_S = 3.0


@pytest.fixture(scope="module")
def primary() -> Iterator[PostgresServer]:
    with PostgresServer(fast=True) as server:
        yield server


@pytest.fixture(scope="module")
def standby(primary: PostgresServer) -> Iterator[Standby]:
    with Standby(primary) as server:
        yield server


def host_port(server: PostgresServer) -> str:
    return urlsplit(server.tcp_url("postgres")).netloc.rpartition("@")[2]


def login(server: PostgresServer) -> str:
    return urlsplit(server.tcp_url("postgres")).netloc.rpartition("@")[0]


def address(server: PostgresServer, *positions: str, database: str = "postgres") -> str:
    """The address of several hosts, with the server's login."""
    return f"postgresql://{login(server)}@{','.join(positions)}/{database}?sslmode=disable"


@contextmanager
def dead() -> Iterator[str]:
    """An address where nobody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{taken.getsockname()[1]}"


@contextmanager
def silent() -> Iterator[str]:
    """An address where connections are accepted and never answered."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


async def port_and_role(connector: Connector) -> tuple[int, bool]:
    """Which server a new connection leads to, and whether that is a standby."""
    connection = await connector.connect({})
    try:
        row = await connection.fetchrow("select inet_server_port(), pg_is_in_recovery()")
        return row[0], row[1]
    finally:
        await connection.close()


async def within(limit_s: float, call: Awaitable[Any]) -> Any:
    """The call's result; an assertion that it came in time."""
    began = time.monotonic()
    try:
        return await call
    finally:
        assert time.monotonic() - began < limit_s


def port_of(server: PostgresServer) -> int:
    return int(host_port(server).rpartition(":")[2])


async def test_dead_host_is_skipped(primary: PostgresServer) -> None:
    with dead() as anonymous:
        result = await within(
            SOON_S, port_and_role(Connector(address(primary, anonymous, host_port(primary))))
        )
    assert result == (port_of(primary), False)


async def test_silent_host_is_skipped(primary: PostgresServer) -> None:
    with silent() as one, silent() as other:
        url = address(primary, one, other, host_port(primary))
        assert (await within(SOON_S, port_and_role(Connector(url))))[0] == port_of(primary)


async def test_standby_is_skipped(primary: PostgresServer, standby: Standby) -> None:
    for url in (
        address(primary, host_port(standby), host_port(primary)),
        address(primary, host_port(primary), host_port(standby)),
        address(primary, host_port(standby), host_port(primary))
        + "&target_session_attrs=read-write",
    ):
        connector = Connector(url)
        assert await within(SOON_S, port_and_role(connector)) == (port_of(primary), False)
        settings = {"default_transaction_read_only": "on"}
        reader = await within(SOON_S, connector.connect(settings))
        assert await reader.fetchval("select inet_server_port()") == port_of(primary)
        await reader.close()


async def test_any_server_is_used_if_the_address_allows_it(
    primary: PostgresServer, standby: Standby
) -> None:
    url = address(primary, host_port(standby), host_port(primary)) + "&target_session_attrs=any"
    assert await port_and_role(Connector(url)) == (port_of(standby), True)


async def test_service_file_selects_the_kind_of_server(
    primary: PostgresServer, standby: Standby, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = urlsplit(primary.tcp_url("postgres"))
    (tmp_path / "services").write_text(
        f"[ha]\nhost=127.0.0.1,127.0.0.1\nport={port_of(standby)},{port_of(primary)}\n"
        f"user={parts.username}\npassword={parts.password}\ndbname=postgres\n"
        "target_session_attrs=primary\n"
    )
    monkeypatch.setenv("PGSERVICEFILE", str(tmp_path / "services"))
    url = "postgresql://?service=ha"
    assert await port_and_role(Connector(url)) == (port_of(primary), False)
    anywhere = Connector(f"{url}&target_session_attrs=any")
    assert await port_and_role(anywhere) == (port_of(standby), True)


async def test_last_good_host_is_connected_first(
    primary: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with silent() as anonymous:
        connector = Connector(address(primary, anonymous, host_port(primary)))
        await port_and_role(connector)
        monkeypatch.setattr(connector_module, "_NEXT_HOST_S", 60)
        await within(SOON_S, port_and_role(connector))
        connector.abandon_server()
        monkeypatch.setattr(connector_module, "_PER_HOST_S", 0.2)
        await within(SOON_S, port_and_role(connector))


async def test_unreachable_hosts_are_reported_within_the_deadline(primary: PostgresServer) -> None:
    with silent() as one, silent() as other:
        store = app.create_store(address(primary, one, other))
        assert await within(2 * 2.0, refusal(store.open())) == "database_unreachable"
        await store.close()


async def test_missing_primary_is_reported(primary: PostgresServer, standby: Standby) -> None:
    with dead() as anonymous:
        store = app.create_store(address(primary, anonymous, host_port(standby)))
        with pytest.raises(Exception, match=r"^the database is being switched over; try again"):
            await within(SOON_S, store.open())
        await store.close()


async def test_every_address_of_a_name_is_a_host(
    primary: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = port_of(primary)

    def resolve(name: str, *_args: object, **_more: object) -> list[Any]:
        assert name == "db.test"
        kind = (socket.AF_INET, socket.SOCK_STREAM, 6, "")
        return [(*kind, ("127.0.0.9", port)), (*kind, ("127.0.0.1", port))]

    loop = asyncio.get_running_loop()

    async def getaddrinfo(name: str, *args: object, **more: object) -> list[Any]:
        return resolve(name, *args, **more)

    monkeypatch.setattr(loop, "getaddrinfo", getaddrinfo)
    url = address(primary, f"db.test:{port}")
    assert await within(SOON_S, port_and_role(Connector(url))) == (port, False)


@pytest.mark.parametrize("answer", ["late", "failure"])
async def test_name_keeps_its_addresses_during_a_dns_outage(
    primary: PostgresServer, monkeypatch: pytest.MonkeyPatch, answer: str
) -> None:
    port = port_of(primary)
    asked: list[str] = []
    answered = asyncio.Event()

    async def getaddrinfo(name: str, *_args: object, **_more: object) -> list[Any]:
        asked.append(name)
        if len(asked) > 1 and answer == "failure":
            raise socket.gaierror
        if len(asked) > 1:
            await answered.wait()
        kind = (socket.AF_INET, socket.SOCK_STREAM, 6, "")
        return [(*kind, (f"127.0.0.{9 * len(asked)}", port)), (*kind, ("127.0.0.1", port))]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
    connector = Connector(address(primary, f"db.test:{port}"))
    await port_and_role(connector)
    assert await within(1.5, port_and_role(connector)) == (port, False)
    assert asked == ["db.test", "db.test"]
    if answer == "late":
        await within(1.5, port_and_role(connector))
        assert asked == ["db.test", "db.test"], "those who connect share a lookup"
        answered.set()
        new_one, name = Host("127.0.0.18", port), Host("db.test", port)
        await eventually(lambda: new_one in connector._cached_addresses[name])


async def test_second_of_two_simultaneous_connections_is_closed(
    primary: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt, both = Connector._connect_to, asyncio.Event()
    created: list[asyncpg.Connection] = []

    async def together(self: Connector, host: Host, *args: Any, **more: Any) -> Any:
        del host
        created.append(await attempt(self, Host("127.0.0.1", port_of(primary)), *args, **more))
        connection = created[-1]
        if len(created) == 2:
            both.set()
        await both.wait()
        return connection

    monkeypatch.setattr(Connector, "_connect_to", together)
    connector = Connector(address(primary, "127.0.0.1:1", "127.0.0.1:2"))
    connection = await within(SOON_S, connector.connect({}))
    await eventually(lambda: sum(item.is_closed() for item in created) == 1)
    assert not connection.is_closed()
    await connection.close()


def test_most_informative_error_is_raised() -> None:
    wrong = asyncpg.InvalidPasswordError("no")
    starting = asyncpg.CannotConnectNowError("starting")
    follows = asyncpg.TargetServerAttributeNotMatched("standby")
    refused, late = ConnectionRefusedError(), TimeoutError()
    untrusted = ssl.SSLCertVerificationError("not the name in the certificate")
    assert most_informative([refused, late, follows, untrusted]) is untrusted
    assert most_informative([untrusted, wrong]) is wrong
    assert most_informative([late, refused, follows, wrong]) is wrong
    assert most_informative([late, refused, starting]) is starting
    assert most_informative([late, follows, refused]) is follows
    assert most_informative([late, refused]) is refused


async def follows(standby: Standby, task: UUID) -> bool:
    """True if the standby has the task."""
    connection = await asyncpg.connect(standby.url("postgres"))
    try:
        return bool(await connection.fetchval("select true from task where id = $1", task))
    finally:
        await connection.close()


@asynccontextmanager
async def cluster() -> AsyncIterator[tuple[PostgresServer, Standby, str]]:
    """A migrated primary, its standby, and the address of both, the primary first."""
    with PostgresServer(fast=True) as first:
        store = app.create_store(first.url("postgres"))
        await store.migrate()
        await store.close()
        with Standby(first) as second:
            yield first, second, address(first, host_port(first), host_port(second))


async def test_frozen_primary_is_left_for_the_promoted_standby(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(postgres_module, "STATEMENT_S", 1.2)
    async with cluster() as (first, second, url):
        store = app.create_store(url)
        await store.open()
        engine = Engine(store)
        before = await engine.submit(new())
        assert isinstance(store, PostgresStore)
        await asyncio.gather(*(engine.show(before.id) for _ in range(4)))
        await eventually(lambda: follows(second, before.id))
        with frozen(first):
            second.promote()
            after = await within(3 * SOON_S, engine.submit(new()))
            assert (await within(SOON_S, engine.show(after.id))).status == "PENDING"
            assert (await engine.show(before.id)).status == "PENDING"
        await store.close()


async def test_maintenance_leaves_a_frozen_primary_for_the_promoted_standby(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(postgres_module, "STATEMENT_S", 1.2)
    async with cluster() as (first, second, url):
        store = app.create_store(url)
        await store.open()
        assert isinstance(store, PostgresStore)
        coordinator = Coordinator(Engine(store), Settings(tick_s=0.2))
        assert (await coordinator.cycle_once()).leading
        coordinator._done_at.clear()
        admin = await asyncpg.connect(first.url("postgres"))
        await admin.execute("begin; lock table lane in access exclusive mode")
        cycle = asyncio.ensure_future(coordinator.cycle_once())

        async def is_pruning() -> bool:
            result = "select true from pg_stat_activity where wait_event_type = 'Lock'"
            return bool(await admin.fetchval(result))

        await eventually(is_pruning)
        with frozen(first):
            second.promote()
            await asyncio.wait([cycle], timeout=3 * SOON_S)
            assert cycle.done()
            assert isinstance(cycle.exception(), Unavailable)
            assert (await within(SOON_S, coordinator.cycle_once())).counts["pruned"] == 0
        admin.terminate()
        await store.close()


async def test_server_that_became_a_standby_is_left(primary: PostgresServer) -> None:
    """A server that only reads, as one that was demoted while connections to it were open."""
    url = primary.create_database()
    store = app.create_store(url)
    await store.migrate()
    await store.open()
    engine = Engine(store)
    await engine.submit(new())
    assert isinstance(store, PostgresStore)
    idle = [item for means in store._tenants.values() for item in means.write._idle]
    assert idle
    for connection in idle:
        await connection.execute("set default_transaction_read_only = on")
    task = await engine.submit(new())
    assert all(connection.is_closed() for connection in idle)
    assert (await engine.show(task.id)).status == "PENDING"
    await store.close()
    primary.drop_database(url)


async def test_hints_are_received_again_after_a_server_was_given_up(postgres_url: str) -> None:
    store = app.create_store(postgres_url)
    assert isinstance(store, PostgresStore)
    received: list[str] = []
    received_there: list[str] = []
    async with hints(postgres_url, store) as here, hints(postgres_url, store) as there:
        here.subscribe(received.append)
        there.subscribe(received_there.append)
        store.connector.abandon_server()
        await eventually(lambda: received and received_there)  # each may have missed everything
        received.clear()
        there.notify(["lane:1"])
        await eventually(lambda: "lane:1" in received)
    await store.close()


async def test_more_hints_than_fit_become_a_hint_for_everything(
    postgres_url: str,
) -> None:
    store = app.create_store(postgres_url)
    received: list[str] = []
    async with hints(postgres_url, store) as here, hints(postgres_url, store) as there:
        here.subscribe(received.append)
        there.notify([f"lane:{number}" for number in range(2000)])
        await eventually(lambda: received)
    assert received == [ALL_TOPICS]
    await store.close()


class Paused(Clock):
    """A clock whose pauses last until `go` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.go = asyncio.Event()
        self.pauses: list[float] = []

    async def sleep(self, seconds: float) -> None:
        if seconds < broker_module._RECONNECT_S:
            return
        self.pauses.append(seconds)
        await self.go.wait()


async def test_young_hint_connection_is_replaced_after_a_delay(postgres_url: str) -> None:
    connector = Connector(postgres_url)
    created: list[Any] = []

    async def connect() -> Any:
        created.append(await connector.connect({}))
        return created[-1]

    clock = Paused()
    wakeups = PostgresWakeups(connect, clock)
    await wakeups.open()
    assert clock.pauses == []
    wakeups.reconnect()
    await eventually(lambda: clock.pauses)
    wakeups.notify(["lane:1"])
    await asyncio.sleep(0)
    assert (len(created), len(clock.pauses)) == (1, 1)
    assert 1 <= clock.pauses[0] <= 3
    clock.go.set()
    await eventually(lambda: not wakeups._tasks)
    assert (len(created), len(clock.pauses)) == (2, 1)
    await wakeups.close()


async def test_old_hint_connection_is_replaced_at_once(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broker_module, "_SHORT_LIVED_S", 0)
    clock = Paused()
    wakeups = PostgresWakeups(lambda: Connector(postgres_url).connect({}), clock)
    await wakeups.open()
    first = wakeups._connection
    wakeups.reconnect()
    await eventually(lambda: wakeups._connection is not first)
    assert clock.pauses == []
    await wakeups.close()


async def test_failed_hints_wait_before_they_reconnect() -> None:
    refused = 0

    async def connect() -> Any:
        nonlocal refused
        refused += 1
        raise ConnectionRefusedError

    clock = Paused()
    wakeups = PostgresWakeups(connect, clock, listen=False)
    for number in range(20):
        wakeups.notify([f"lane:{number}"])
        await eventually(lambda: clock.pauses or not wakeups._tasks)
    assert (refused, len(clock.pauses)) == (1, 1)
    await asyncio.wait_for(wakeups.close(), 1)


async def test_server_is_given_up_at_most_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    connector = Connector("postgresql://127.0.0.1:1/x")
    reports: list[str] = []
    connector.on_server_abandoned(lambda: reports.append("once"))
    beside = Connector("postgresql://127.0.0.1:2/x", connector)
    for _ in range(10):
        connector.abandon_server()
        beside.abandon_server()
    assert reports == ["once"]
    monkeypatch.setattr(connector_module, "_ABANDON_INTERVAL_S", 0)
    connector.abandon_server()
    assert reports == ["once"] * 2


async def test_given_up_server_leaves_one_hint_connection(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broker_module, "_SHORT_LIVED_S", 0)
    connector = Connector(postgres_url)
    created: list[Any] = []

    async def connect() -> Any:
        created.append(await connector.connect({}))
        return created[-1]

    wakeups = PostgresWakeups(connect, Clock())
    await wakeups.open()
    for number in range(3):
        wakeups.reconnect()
        wakeups.notify([f"lane:{number}"])
        await eventually(lambda: not wakeups._tasks)
        assert sum(not item.is_closed() for item in created) == 1
    assert len(created) == 4
    await wakeups.close()
    assert all(item.is_closed() for item in created)


async def test_connection_that_cannot_listen_is_closed(postgres_url: str) -> None:
    created: list[Any] = []

    async def connect() -> Any:
        created.append(await Connector(postgres_url).connect({}))
        await created[-1].execute("begin")
        with suppress(asyncpg.PostgresError):
            await created[-1].execute("select 1 / 0")  # in a failed transaction nothing can listen
        return created[-1]

    wakeups = PostgresWakeups(connect, Clock())
    with pytest.raises(asyncpg.InFailedSQLTransactionError):
        await wakeups.open()
    assert [item.is_closed() for item in created] == [True]
    await wakeups.close()


@asynccontextmanager
async def hints(url: str, store: Store) -> AsyncIterator[Wakeups]:
    wakeups = app.create_wakeups(url, store, "", listen=True)
    await wakeups.open()
    yield wakeups
    await wakeups.close()
