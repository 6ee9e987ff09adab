"""Connections before authentication: size, speed and number of requests."""

import asyncio
import resource
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from uuid import UUID

import msgspec
import pytest
from tests.api.conftest import Api, replaced, running
from tests.waiting import eventually

from tenuto.api import server
from tenuto.api.edge import connection
from tenuto.api.edge.connection_limits import ConnectionTable, Deadlines, ReadProgress
from tenuto.api.edge.forwarded import address_key, client_address, is_in_networks
from tenuto.settings import Settings

HASTY = Deadlines(head_s=0.3, body_s=0.3, write_s=0.5, linger_s=0.3, sweep_s=0.05)
LIVE = b"GET /health/live HTTP/1.1\r\nHost: x\r\n\r\n"
LINE = b"GET /health/live HTTP/1.1\r\nHost: x\r\n"
POST = b"POST /api/v1/login HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
TASKS = POST.replace(b"login", b"agent-tasks")
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """These tests do not depend on the database."""
    return Settings(database=f"sqlite:///{tmp_path}/t.db", data=str(tmp_path), port=0)


class Raw:
    """A connection that sends bytes and reads answers."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def send(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def answer(self) -> tuple[int, Any]:
        """The next answer: its status, and its body as JSON."""
        async with asyncio.timeout(10):
            head = await self._reader.readuntil(b"\r\n\r\n")
            length = next(
                int(line.split(b":")[1])
                for line in head.lower().split(b"\r\n")
                if line.startswith(b"content-length")
            )
            body = await self._reader.readexactly(length)
        return int(head.split(b" ", 2)[1]), msgspec.json.decode(body) if body else None

    async def line(self) -> bytes:
        """Reads the status line and the empty line before a response."""
        return await self._reader.readuntil(b"\r\n\r\n")

    async def until(self, text: bytes) -> bytes:
        """All that comes up to that text."""
        async with asyncio.timeout(10):
            return await self._reader.readuntil(text)

    async def refusal(self) -> tuple[int, str]:
        """Status and code of a refusal, after which the server has closed the connection."""
        status, body = await self.answer()
        assert await self.is_closed()
        return status, body["code"]

    async def is_closed(self) -> bool:
        async with asyncio.timeout(10):
            try:
                return await self._reader.read(1) == b""
            except ConnectionError:
                return True


@asynccontextmanager
async def raw(api: Api, address: str = "127.0.0.1") -> AsyncIterator[Raw]:
    parts = urlsplit(api.url)
    reader, writer = await asyncio.open_connection(
        parts.hostname, parts.port, local_addr=(address, 0)
    )
    try:
        yield Raw(reader, writer)
    finally:
        writer.close()


TOO_LARGE: dict[str, list[bytes]] = {
    "one header": [LINE + b"X-Big: ", *[b"a" * 30_000] * 10],
    "one header in one piece": [LINE + b"X-Big: " + b"a" * 200_000],
    "a line": [b"GET /" + b"a" * 70_000],
    "many headers": [LINE + b"".join(b"h%d: v\r\n" % n for n in range(101)) + b"\r\n"],
    "trailers": [CHUNKED + b"1\r\n{\r\n0\r\nX-Trailer: ", *[b"a" * 30_000] * 10],
    "a chunk's extension": [CHUNKED + b"1;e=", *[b"a" * 30_000] * 10],
    "empty lines": [b"\r\n" * 20_000] * 3,
}


@pytest.mark.parametrize("kind", TOO_LARGE)
async def test_request_head_is_bounded(settings: Settings, kind: str) -> None:
    async with running(settings) as api, raw(api) as client:
        for piece in TOO_LARGE[kind]:
            await client.send(piece)
        assert await client.refusal() == (431, "headers_too_large")


async def test_headers_up_to_the_bound_are_read(settings: Settings) -> None:
    async with running(settings) as api, raw(api) as client:
        many = b"".join(b"h%d: %s\r\n" % (n, b"v" * 600) for n in range(99))
        assert len(LINE + many) < connection.MAX_HEAD_BYTES
        for _ in range(3):  # each request is counted from the start
            await client.send(LINE + many + b"\r\n")
            assert (await client.answer())[0] == 200


MALFORMED = {
    "no request": b"hello there\r\n\r\n",
    "two lengths": POST + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n",
    "length and chunks": POST + b"Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
    "a bad chunk": CHUNKED + b"zz\r\n",
}


@pytest.mark.parametrize("kind", MALFORMED)
async def test_invalid_request_is_refused_without_a_log_line(
    settings: Settings, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(settings) as api, raw(api) as client:
        caplog.clear()
        await client.send(MALFORMED[kind])
        assert await client.refusal() == (400, "invalid_request")
        assert [record for record in caplog.records if record.name.startswith("uvicorn")] == []


async def test_refusals_are_logged_together(
    settings: Settings, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "REPORT_S", 0.2)
    async with running(settings, HASTY) as api:
        for _ in range(3):
            async with raw(api) as client:
                await client.send(MALFORMED["no request"])
                assert await client.refusal() == (400, "invalid_request")
        await eventually(lambda: "invalid_request" in caplog.text)
    assert len([line for line in caplog.messages if "invalid_request" in line]) <= 3


SLOW = {
    "a byte": b"G",
    "half a line": b"GET / HT",
    "half a head": LINE,
    "no body": POST + b"Content-Length: 5\r\n\r\n",
    "half a body": POST + b"Content-Length: 5\r\n\r\n{",
    "no chunk": CHUNKED,
    "empty lines": b"\r\n",
}


@pytest.mark.parametrize("kind", SLOW)
async def test_stalled_request_is_closed(settings: Settings, kind: str) -> None:
    async with running(settings, HASTY) as api, raw(api) as client:
        await client.send(SLOW[kind])
        assert await client.refusal() == (408, "request_timeout")


async def test_unused_connection_is_closed_without_a_response(
    settings: Settings,
) -> None:
    async with running(settings, HASTY) as api, raw(api) as client:
        assert await client.is_closed()


@pytest.mark.parametrize("start", [LINE + b"X: ", POST + b"Content-Length: 9999\r\n\r\n", CHUNKED])
async def test_slow_request_head_is_closed(settings: Settings, start: bytes) -> None:
    async with running(settings, HASTY) as api, raw(api) as client:
        await client.send(start)

        async def drip() -> None:
            while True:
                await client.send(b"1\r\nx\r\n" if start is CHUNKED else b"x")
                await api.service.clock.sleep(0.02)

        dripping = asyncio.create_task(drip())
        try:
            assert (await client.answer())[1]["code"] == "request_timeout"
        finally:
            dripping.cancel()
            await asyncio.gather(dripping, return_exceptions=True)


async def test_body_at_the_minimum_rate_can_take_longer(settings: Settings) -> None:
    hasty = msgspec.structs.replace(HASTY, body_rate=1000)
    async with running(settings, hasty) as api, raw(api) as client:
        await client.send(POST + b"Content-Length: 3000\r\n\r\n")
        begun = api.service.clock.elapsed()
        for _ in range(10):
            await client.send(b" " * 300)
            await api.service.clock.sleep(0.1)
        assert api.service.clock.elapsed() - begun > hasty.body_s
        assert (await client.answer())[1]["code"] == "invalid_json"


async def test_stalled_body_is_closed_whatever_its_rate(settings: Settings) -> None:
    hasty = msgspec.structs.replace(HASTY, body_rate=1.0, body_idle_s=0.3)
    async with running(settings, hasty) as api, raw(api) as client:
        await client.send(POST + b"Content-Length: 60000\r\n\r\n" + b" " * 50_000)
        assert await client.refusal() == (408, "request_timeout")


async def test_body_that_the_server_does_not_read_is_not_late(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    hasty = msgspec.structs.replace(HASTY, body_s=60.0, body_idle_s=0.2)
    async with running(settings, hasty) as api, raw(api) as client:
        existing, clock = api.service.token_cache.caller_of, api.service.clock

        async def slow(token: str, expected: UUID | None) -> Any:
            await clock.sleep(0.6)
            return await existing(token, expected)

        monkeypatch.setattr(api.service.token_cache, "caller_of", slow)
        bearer = b"Authorization: Bearer %s\r\n" % (await api.token()).encode()
        await client.send(TASKS + bearer + b"Content-Length: 13\r\nExpect: 100-continue\r\n\r\n")
        assert (await client.line()).startswith(b"HTTP/1.1 100 ")
        await client.send(b'{"title":"a"}')
        assert (await client.answer())[0] == 201
        body = b'{"title":"a","prompt":"%b"}' % (b"x" * 200_000)
        await client.send(TASKS + bearer + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        assert (await client.answer())[0] == 201


async def test_idle_connection_is_closed_without_a_timeout_response(settings: Settings) -> None:
    hasty = msgspec.structs.replace(HASTY, head_s=0.2)
    async with running(settings, hasty) as api, raw(api) as client:
        for _ in range(3):
            await client.send(LIVE)
            assert (await client.answer())[0] == 200
            await api.service.clock.sleep(0.4)


async def test_client_that_does_not_read_its_response_is_disconnected(settings: Settings) -> None:
    async with running(settings, HASTY) as api:
        parts = urlsplit(api.url)
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port, limit=1024)
        for _ in range(400):  # more than the buffers of both sides hold
            writer.write(b"GET /openapi.json HTTP/1.1\r\nHost: x\r\n\r\n")
        await eventually(lambda: connections(api) == 1)
        await eventually(lambda: connections(api) == 0)
        writer.close()
        del reader


def connections(api: Api) -> int:
    """Returns how many connections the server holds."""
    return len(tables[-1])


tables: list[ConnectionTable[Any]] = []


@pytest.fixture(autouse=True)
def kept_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let tests see the table of the server that they started last."""

    class Kept(ConnectionTable[Any]):
        def __init__(self, maximum: int, per_address: int) -> None:
            super().__init__(maximum, per_address)
            tables.append(self)

    monkeypatch.setattr(server, "ConnectionTable", Kept)


async def test_connections_per_address_are_limited(settings: Settings) -> None:
    async with running(replaced(settings, connections_per_address=2)) as api:
        async with raw(api) as one, raw(api), raw(api) as third:
            assert await third.refusal() == (503, "too_many_connections")
            async with raw(api, "127.0.0.2") as other:
                await other.send(LIVE)
                assert (await other.answer())[0] == 200
            await one.send(LIVE)
            assert (await one.answer())[0] == 200
        await eventually(lambda: connections(api) == 0)
        async with raw(api) as again:
            await again.send(LIVE)
            assert (await again.answer())[0] == 200


async def test_longest_idle_connection_is_closed_for_a_new_one(settings: Settings) -> None:
    async with running(replaced(settings, connections=2)) as api:
        token = await api.token()
        tasks = (
            b"POST /api/v1/agent-tasks HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        )
        good = tasks + b"Authorization: Bearer %s\r\nContent-Length: 5\r\n\r\n" % token.encode()
        async with raw(api) as busy, raw(api, "127.0.0.2") as silent:
            await busy.send(good)
            await eventually(lambda: connections(api) == 2 and len(tables[-1]._closable) == 1)
            async with raw(api, "127.0.0.3") as new:
                assert await silent.is_closed()
                await new.send(good)
                await eventually(lambda: not tables[-1]._closable)
                async with raw(api, "127.0.0.4") as last:
                    assert await last.refusal() == (503, "too_many_connections")


UNPROVEN = {
    "no token is needed": POST,
    "no token": TASKS,
    "no path": b"POST /nowhere HTTP/1.1\r\nHost: x\r\n",
    "a wrong token": b"POST /api/v1/logout HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer x\r\n",
}


@pytest.mark.parametrize("kind", UNPROVEN)
async def test_headers_without_a_body_reserve_no_connection(settings: Settings, kind: str) -> None:
    async with (
        running(replaced(settings, connections=2)) as api,
        raw(api, "127.0.0.2") as one,
        raw(api, "127.0.0.3") as two,
    ):
        for item in (one, two):
            await item.send(UNPROVEN[kind] + b"Content-Length: 60000\r\n\r\n")
        await eventually(lambda: served(api) == 2)
        async with raw(api, "127.0.0.4") as honest:
            await honest.send(LIVE)
            assert (await honest.answer())[0] == 200


async def test_valid_token_reserves_a_connection_for_its_request(settings: Settings) -> None:
    async with running(replaced(settings, connections=1)) as api, raw(api) as one:
        token = (await api.token()).encode()
        await one.send(b"GET /api/v1/me HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer ")
        await one.send(token + b"\r\n\r\n")
        assert (await one.answer())[0] == 200
        await one.send(POST + b"Content-Length: 60000\r\n\r\n")
        await eventually(lambda: any(address._open for address in tables[-1]._addresses))
        async with raw(api, "127.0.0.4") as honest:
            await honest.send(LIVE)
            assert (await honest.answer())[0] == 200


async def test_unread_response_of_an_unknown_client_reserves_no_connection(
    settings: Settings,
) -> None:
    async with running(replaced(settings, connections=1)) as api, unread(api) as untrusted:
        await untrusted.send(b"GET /openapi.json HTTP/1.1\r\nHost: x\r\n\r\n" * 16)
        await eventually(
            lambda: any(address.flow.write_paused for address in tables[-1]._addresses)
        )
        async with raw(api, "127.0.0.4") as honest:
            await honest.send(LIVE)
            assert (await honest.answer())[0] == 200


@asynccontextmanager
async def unread(api: Api) -> AsyncIterator[Raw]:
    """A connection whose client side holds next to nothing until it is read."""
    parts = urlsplit(api.url)
    with socket.socket() as small:
        small.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        small.setblocking(False)
        await asyncio.get_running_loop().sock_connect(small, (parts.hostname, parts.port))
        reader, writer = await asyncio.open_connection(sock=small, limit=1024)
        try:
            yield Raw(reader, writer)
        finally:
            writer.transport.abort()
            with suppress(ConnectionError):
                await writer.wait_closed()


def served(api: Api) -> int:
    """Returns how many connections have sent the headers of a request."""
    return sum(bool(address.cycle) for address in tables[-1]._addresses)


async def test_trailer_is_not_a_header(settings: Settings) -> None:
    async with running(settings) as api, raw(api) as client:
        token = await api.token()
        trailer = b"Authorization: Bearer %s\r\n" % token.encode()
        chunked = b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n"
        await client.send(TASKS + chunked + trailer + b"\r\n")
        assert (await client.answer())[0] == 401


async def test_pipelined_requests_are_answered_in_order(settings: Settings) -> None:
    async with running(settings) as api, raw(api) as client:
        await client.send(LIVE * 10)
        assert [(await client.answer())[0] for _ in range(10)] == [200] * 10
        await client.send(LIVE * 5000)
        maximum = connection.MAX_PIPELINED + 1
        assert [(await client.answer())[0] for _ in range(maximum)] == [200] * maximum
        assert await client.is_closed()


async def test_other_protocols_are_refused(
    settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(settings) as api, raw(api) as client:
        caplog.clear()
        await client.send(LINE + b"Connection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
        assert (await client.answer())[0] == 200
        assert await client.is_closed()
        assert [record for record in caplog.records if record.name.startswith("uvicorn")] == []


async def test_connection_limit_fits_the_limit_of_open_files(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = (256, 256)
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda _, expected: None)
    assert server._max_connections(1000) == 156
    assert "allows 156 of the 1000 connections" in caplog.text
    limits = (256, 4096)
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "setrlimit", lambda _, expected: asked.append(expected))
    assert server._max_connections(1000) == 1000
    assert asked == [(1100, 4096)]


def test_connection_table_counts_per_address() -> None:
    table: ConnectionTable[int] = ConnectionTable(max_total=10, max_per_address=2)
    assert [table.add(n, "a").accepted for n in range(3)] == [True, True, False]
    assert table.add(3, "b").accepted
    assert [table.add(n, None).accepted for n in (4, 5, 6)] == [True] * 3
    assert (len(table), table.count("a")) == (6, 2)
    table.remove(0)
    table.remove(0)
    assert table.count("a") == 1
    assert table.add(7, "a").accepted


def test_connection_table_closes_the_longest_idle() -> None:
    table: ConnectionTable[int] = ConnectionTable(max_total=3, max_per_address=9)
    for n in range(3):
        table.add(n, "a")
    table.mark_served(0)
    table.mark_closable(0)  # served meanwhile, it has not waited for long
    assert table.add(3, "b").closed == 1
    assert table.add(4, "b").closed == 2
    assert table.add(5, "b").closed == 0
    for n in (3, 4, 5):
        table.mark_served(n)
    assert table.add(6, "b") == table.add(7, "b")
    assert not table.add(6, "b").accepted
    table.mark_closable(1)  # an ended one does not come back
    assert not table.add(6, "b").accepted
    assert len(table) == 3


def test_response_progress_counts_bytes_that_the_client_read() -> None:
    deadlines = Deadlines(write_s=60.0, min_read_bytes=64_000)

    def cut_off(per_s: int, standing: int) -> int | None:
        """The second at which a reader is cut off who is sent and reads so much."""
        reading = ReadProgress()
        seconds = (
            now
            for now in range(600)
            if reading.is_too_slow(now, standing + now * per_s, standing, deadlines)
        )
        return next(seconds, None)

    assert cut_off(per_s=10_000, standing=20_000) is None  # as fast as the events
    assert cut_off(per_s=1_100, standing=500_000) is None
    assert cut_off(per_s=1_000, standing=500_000) == 60
    assert cut_off(per_s=10, standing=500) is None  # little, but it is read
    assert cut_off(per_s=0, standing=500) == 60


def test_client_is_the_rightmost_address_that_is_no_proxy() -> None:
    proxies = Settings(proxies="10.0.0.0/8, 127.0.0.1, fd00::/8").proxy_networks()
    assert is_in_networks(proxies, "10.1.2.3")
    assert is_in_networks(proxies, "::ffff:10.1.2.3")
    assert not is_in_networks(proxies, "192.0.2.1")
    assert not is_in_networks(proxies, "no address")
    peer = ("127.0.0.1", 4711)

    def client_of(*values: bytes) -> str:
        reported = client_address(peer, [(b"x-forwarded-for", value) for value in values], proxies)
        assert reported is not None
        return reported[0]

    assert client_of() == "127.0.0.1"
    assert client_of(b"192.0.2.1") == "192.0.2.1"
    assert client_of(b"203.0.113.9, 192.0.2.1, 10.0.0.7") == "192.0.2.1"
    assert client_of(b"203.0.113.9", b"192.0.2.1") == "192.0.2.1"
    assert client_of(b"203.0.113.9, nonsense, 10.0.0.7") == "10.0.0.7"
    assert client_of(b"10.0.0.8, 10.0.0.7") == "10.0.0.8"


def test_addresses_of_one_ipv6_network_count_as_one() -> None:
    assert address_key("192.0.2.1") == "192.0.2.1"
    assert address_key("::ffff:192.0.2.1") == "192.0.2.1"
    assert address_key("2001:db8::1") == address_key("2001:db8::ffff:2") == "2001:db8::/64"
    assert address_key("-") == "-"
