"""What others notice while strangers try to stop the API.

`python -m tests.proof.edge_load` starts the API as a process on SQLite, attacks it, and measures
the requests of somebody else on a connection of their own. `--short` takes a tenth of everything.
It prints a table, and ends with 1 where a bound is missed.
"""

import argparse
import asyncio
import contextlib
import os
import resource
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from tenuto import app
from tenuto.api.edge.connection_limits import Deadlines
from tenuto.api.server import serve
from tenuto.engine.engine import DEFAULT_WORKSPACE
from tenuto.model.tenancy.access import Role
from tenuto.settings import Settings

P99_MS = 250.0
GROWTH_MB = 50.0
OPEN = 200
LEAST_S = 4.0
"""Seconds that an attack goes on, repeated if need be: others must be heard meanwhile."""
STAGGER_S = 0.002
"""Seconds between the starts of an attack's connections."""
PACE_S = 0.02
"""Seconds between the requests of the one who is not to notice."""
DRIP_S = 0.5
"""Seconds between the bytes of a dripping client."""
LOOK_S = 0.1
"""Seconds between looks at the server's memory and files."""
PIECE = b"a" * 65536


class Scale(msgspec.Struct, frozen=True):
    """How much of each attack there is."""

    connections: int = 400
    addresses: int = 16
    header_mb: int = 100
    bodies: int = 8
    body_mb: int = 15
    streams: int = 1100
    deadlines: Deadlines = Deadlines()

    @property
    def hold_s(self) -> float:
        """Returns how long attackers wait for the server to close their connections."""
        return self.deadlines.body_s + 15


SHORT = Scale(40, 4, 10, 4, 4, 110, Deadlines(head_s=2.0, body_s=3.0))


class Served(msgspec.Struct):
    """Where the API is, and how to get in."""

    url: str
    token: str
    pid: int = 0


async def serving(folder: str, scale: Scale, files: int | None) -> None:
    """The API in this process, until standard input ends."""
    if files is not None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    settings = Settings(database=f"sqlite:///{folder}/t.db", data=folder, port=0, rate_per_s=0)
    store = app.create_store(settings.database_url())
    await store.migrate()
    await store.close()
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.run_in_executor(None, sys.stdin.read).add_done_callback(lambda _: stop.set())
    async with app.open_service(settings) as service:
        created = await service.identity.create_token(DEFAULT_WORKSPACE, "load", Role.OWNER)

        def ready(url: str) -> None:
            print(msgspec.json.encode(Served(url, created.token)).decode(), flush=True)  # noqa: T201

        await serve(service, stop, ready, deadlines=scale.deadlines)


@asynccontextmanager
async def server(scale: Scale, files: int | None) -> AsyncIterator[Served]:
    """An API in a process of its own."""
    with tempfile.TemporaryDirectory(prefix="tenuto-edge-") as folder:
        options = ["--short"] if scale == SHORT else []
        options += [] if files is None else ["--files", str(files)]
        process = await program("--serve", folder, *options)
        assert process.stdout is not None
        assert process.stdin is not None
        try:
            served = msgspec.json.decode(await process.stdout.readline(), type=Served)
            served.pid = process.pid
            yield served
        finally:
            process.stdin.close()
            await process.wait()


def resident_mb(pid: int) -> float:
    fields = Path(f"/proc/{pid}/statm").read_text().split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def open_files(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


class Received(msgspec.Struct):
    """How long somebody else's requests took, and what became of those that failed."""

    times_ms: list[float] = []
    failed: dict[str, int] = {}


async def ask(served: Served, received: Received) -> None:
    """Ask steadily until cancelled; a connection that broke is opened again."""
    turns = [head(served, "GET", "/api/v1/me"), submit(served)]
    while True:
        reader, writer = await dial(served, "127.0.0.1")
        try:
            while True:
                for request in turns:
                    begun = time.perf_counter()
                    writer.write(request)
                    status = await status_of(reader)
                    received.times_ms.append((time.perf_counter() - begun) * 1000)
                    assert status in (200, 201), status
                    await asyncio.sleep(PACE_S)
        except (OSError, AssertionError, asyncio.IncompleteReadError) as error:
            kind = type(error).__name__
            received.failed[kind] = received.failed.get(kind, 0) + 1
        finally:
            writer.close()


async def asking(url: str, token: str) -> None:
    """Somebody else, in this process, until standard input ends; prints what it heard."""
    received = Received()
    task = asyncio.create_task(ask(Served(url, token), received))
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    sys.stdout.write(msgspec.json.encode(received).decode())


async def program(*arguments: str) -> asyncio.subprocess.Process:
    """Starts this program in a process of its own: attackers must not delay who measures."""
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.proof.edge_load", *arguments),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )


def head(served: Served, method: str, path: str, more: str = "", *, token: bool = True) -> bytes:
    bearer = f"Authorization: Bearer {served.token}\r\n" if token else ""
    return f"{method} {path} HTTP/1.1\r\nHost: x\r\n{bearer}{more}\r\n".encode()


def submit(served: Served) -> bytes:
    body = b'{"title": "a"}'
    more = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    return head(served, "POST", "/api/v1/agent-tasks", more) + body


async def dial(served: Served, address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    parts = urlsplit(served.url)
    return await asyncio.open_connection(parts.hostname, parts.port, local_addr=(address, 0))


async def status_of(reader: asyncio.StreamReader) -> int:
    """The status of the next answer, read to its end."""
    text = await reader.readuntil(b"\r\n\r\n")
    for line in text.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            await reader.readexactly(int(line.split(b":")[1]))
    return int(text.split(b" ", 2)[1])


Send = Callable[[asyncio.StreamWriter], Awaitable[None]]


async def attack(
    served: Served, address: str, send: Send, hold_s: float, after_s: float = 0.0
) -> str:
    """Returns the outcome of one connection, a status or its end. An open stream stays open."""
    await asyncio.sleep(after_s)
    try:
        reader, writer = await dial(served, address)
    except OSError as error:
        return type(error).__name__
    sending = asyncio.create_task(_sent(send, writer))
    reported = "held"
    try:
        async with asyncio.timeout(hold_s):
            status = await status_of(reader)
            reported = str(status)
            while status == OPEN and await reader.read(65536):
                pass
    except TimeoutError:
        pass
    except (OSError, asyncio.IncompleteReadError) as error:
        return f"closed ({type(error).__name__})"
    finally:
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        writer.transport.abort()
    return reported


async def _sent(send: Send, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        await send(writer)


async def silent(writer: asyncio.StreamWriter) -> None:
    writer.write(b"GET / HT")
    await writer.drain()


async def dripping(writer: asyncio.StreamWriter) -> None:
    writer.write(b"GET /health/live HTTP/1.1\r\nHost: x\r\nx-drip: ")
    while True:
        writer.write(b"a")
        await writer.drain()
        await asyncio.sleep(DRIP_S)


async def slow_body(writer: asyncio.StreamWriter) -> None:
    writer.write(b"POST /api/v1/login HTTP/1.1\r\nHost: x\r\nContent-Length: 60000\r\n\r\n")
    while True:
        writer.write(b" ")
        await writer.drain()
        await asyncio.sleep(DRIP_S)


def endless_header(size_mb: int) -> Send:
    async def send(writer: asyncio.StreamWriter) -> None:
        writer.write(b"GET /health/live HTTP/1.1\r\nHost: x\r\nx-big: ")
        for _ in range(size_mb * 16):
            writer.write(PIECE)
            await writer.drain()

    return send


def large_json(served: Served, size_mb: int) -> Send:
    names = b",".join(b'"%07d":1' % n for n in range(size_mb * 1_000_000 // 12))
    body = b"{" + names + b"}"
    more = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    request = head(served, "POST", "/api/v1/agent-tasks", more, token=False) + body

    async def send(writer: asyncio.StreamWriter) -> None:
        for start in range(0, len(request), len(PIECE)):
            writer.write(request[start : start + len(PIECE)])
            await writer.drain()

    return send


def a_stream(served: Served) -> Send:
    async def send(writer: asyncio.StreamWriter) -> None:
        writer.write(head(served, "GET", "/api/v1/events"))
        await writer.drain()

    return send


def attacks(served: Served, scale: Scale) -> dict[str, list[tuple[str, Send]]]:
    """Each attack's connections: from where, and what they send."""
    many = [f"127.0.0.{2 + n % scale.addresses}" for n in range(scale.connections)]
    body, header = large_json(served, scale.body_mb), endless_header(scale.header_mb)
    return {
        "silent, many addresses": [(item, silent) for item in many],
        "dripping, many addresses": [(item, dripping) for item in many],
        "silent, one address": [("127.0.0.250", silent)] * scale.connections,
        "slow bodies": [(item, slow_body) for item in many[: scale.connections // 4]],
        f"{scale.body_mb} MB of JSON without a token": [("127.0.0.251", body)] * scale.bodies,
        f"{scale.header_mb} MB of headers": [("127.0.0.252", header)],
        "event streams of one token": [
            (f"127.0.1.{1 + n % scale.addresses}", a_stream(served)) for n in range(scale.streams)
        ],
    }


class Row(msgspec.Struct):
    """What an attack did."""

    name: str
    answers: Counter[str]
    p50_ms: float
    p99_ms: float
    max_ms: float
    failed: Counter[str]
    growth_mb: float
    files: int


async def measured(
    served: Served, name: str, connections: list[tuple[str, Send]], hold_s: float
) -> Row:
    """One attack, beside somebody else's requests."""
    before = resident_mb(served.pid)
    client = await program("--ask", served.url, served.token)
    most_mb, most_files = before, 0

    async def look() -> None:
        nonlocal most_mb, most_files
        while True:
            most_mb = max(most_mb, resident_mb(served.pid))
            most_files = max(most_files, open_files(served.pid))
            await asyncio.sleep(LOOK_S)

    looking = asyncio.create_task(look())
    reports: list[str] = []
    begun = time.perf_counter()
    while time.perf_counter() - begun < LEAST_S:
        running = [
            attack(served, address, send, hold_s, after_s=n * STAGGER_S)
            for n, (address, send) in enumerate(connections)
        ]
        reports += await asyncio.gather(*running)
    looking.cancel()
    await asyncio.gather(looking, return_exceptions=True)
    received = msgspec.json.decode((await client.communicate(b""))[0], type=Received)
    times = sorted(received.times_ms) or [float("inf")]
    return Row(
        name,
        Counter(reports),
        times[len(times) // 2],
        times[min(len(times) - 1, int(len(times) * 0.99))],
        times[-1],
        Counter(received.failed),
        most_mb - before,
        most_files,
    )


async def run(scale: Scale, files: int | None = None) -> list[Row]:
    """Every attack after the other on one server; the first row is without any."""
    async with server(scale, files) as served:

        async def rest(_: asyncio.StreamWriter) -> None:
            await asyncio.sleep(0)

        await measured(served, "warm", [("127.0.0.2", rest)], 3.0)
        rows = [await measured(served, "none", [("127.0.0.2", rest)], 3.0)]
        for name, connections in attacks(served, scale).items():
            hold_s = 5.0 if "stream" in name else scale.hold_s
            rows.append(await measured(served, name, connections, hold_s))
        return rows


def missed(rows: list[Row], p99_ms: float = P99_MS) -> list[str]:
    """Which bounds do not hold."""
    wrong = [f"{row.name}: p99 {row.p99_ms:.0f} ms" for row in rows if row.p99_ms >= p99_ms]
    wrong += [f"{row.name}: failed {dict(row.failed)}" for row in rows if row.failed]
    growth = sum(row.growth_mb for row in rows if "stream" not in row.name)
    if growth >= GROWTH_MB:
        wrong.append(f"the server grew by {growth:.0f} MB")
    held = [row.name for row in rows[1:] if row.answers["held"]]
    return wrong + [f"{name}: connections are held" for name in held]


def table(rows: list[Row]) -> str:
    lines = ["| attack | others: p50, p99, max ms | memory | files | attackers were told |"]
    lines.append("|---|---|---|---|---|")
    for row in rows:
        reported = ", ".join(
            f"{count} of {subject}" for subject, count in row.answers.most_common()
        )
        failed = f"; {dict(row.failed)} failed" if row.failed else ""
        ms = f"{row.p50_ms:.1f}, {row.p99_ms:.1f}, {row.max_ms:.1f}{failed}"
        lines.append(f"| {row.name} | {ms} | +{row.growth_mb:.1f} MB | {row.files} | {reported} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--serve", metavar="FOLDER")
    parser.add_argument("--files", type=int, metavar="N", help="files the server may open")
    parser.add_argument("--ask", nargs=2, metavar=("URL", "TOKEN"))
    values = parser.parse_args()
    scale = SHORT if values.short else Scale()
    if values.ask:
        asyncio.run(asking(*values.ask))
        return 0
    if values.serve:
        app.run(serving(values.serve, scale, values.files))
        return 0
    rows = asyncio.run(run(scale, values.files))
    print(table(rows))  # noqa: T201
    wrong = missed(rows)
    print("\n".join(wrong) or "all bounds hold")  # noqa: T201
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
