"""Measures the API: submits compared with a route that only parses and responds; live streams."""

import asyncio
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import urlsplit

import msgspec

from tenuto.bench.measures import CALLERS, PAYLOAD, Bench, Figures
from tenuto.bench.server import ECHO

TASKS = "/api/v1/agent-tasks"
STREAMS = 1000
ROUNDS = 5


class Target:
    """An API server in another process."""

    def __init__(self, url: str, token: str, pid: int) -> None:
        parts = urlsplit(url)
        self.host, self.port = parts.hostname or "", parts.port or 0
        self.token = token
        self.pid = pid

    def build_request(self, method: str, path: str, body: bytes = b"") -> bytes:
        """Returns the bytes of an HTTP request; sends nothing."""
        head = (
            f"{method} {path} HTTP/1.1\r\nHost: bench\r\nAuthorization: Bearer {self.token}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body

    def resident_mb(self) -> float:
        """Returns the resident memory of the server in MB."""
        fields = Path(f"/proc/{self.pid}/statm").read_text().split()
        return int(fields[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


@asynccontextmanager
async def running_server(database: str) -> AsyncIterator[Target]:
    """Context with an API server process on the database."""
    with tempfile.TemporaryDirectory(prefix="tenuto-bench-api-") as folder:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "tenuto.bench.server",
            folder,
            database,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        assert process.stdout is not None
        assert process.stdin is not None
        try:
            info: dict[str, Any] = msgspec.json.decode(await process.stdout.readline())
            yield Target(info["url"], info["token"], process.pid)
        finally:
            process.stdin.close()
            await process.wait()


async def request_rate(target: Target, path: str, count: int, callers: int = CALLERS) -> float:
    """Posts `count` tasks over `callers` connections; returns requests per second."""
    body = msgspec.json.encode({"title": "bench", "taskType": "noop", "input": PAYLOAD})
    request = target.build_request("POST", path, body)
    remaining = count

    async def call() -> None:
        nonlocal remaining
        reader, writer = await asyncio.open_connection(target.host, target.port)
        while remaining > 0:
            remaining -= 1
            writer.write(request)
            await _read_response(reader)
        writer.close()

    start = time.perf_counter()
    await asyncio.gather(*(call() for _ in range(callers)))
    return count / (time.perf_counter() - start)


async def _read_response(reader: asyncio.StreamReader) -> bytes:
    """Reads a 201 response and returns its body; fails for any other status."""
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 201"), head[:200]
    for line in head.split(b"\r\n"):
        name, _, value = line.partition(b": ")
        if name.lower() == b"content-length":
            return await reader.readexactly(int(value))
    raise AssertionError("the response has no Content-Length")


async def measure(bench: Bench) -> Figures:
    """Measures submits and echo requests alternately, then submits beside live streams."""
    async with running_server(bench.url) as target:
        count = max(CALLERS, bench.tasks // 2)
        await request_rate(target, TASKS, count // 2)
        await request_rate(target, ECHO, count // 2)
        pairs = []
        for _ in range(ROUNDS):
            pairs.append(
                (await request_rate(target, TASKS, count), await request_rate(target, ECHO, count))
            )
        submit, echo = (median(pair[i] for pair in pairs) for i in (0, 1))
        return {
            "API submit, 64 callers /s": submit,
            "API parse and answer alone /s": echo,
            "API submit, share of that": median(one / other for one, other in pairs),
            **await _measure_streams(target, count),
        }


async def _measure_streams(target: Target, count: int) -> Figures:
    """Measures the memory of idle streams, one task each, and the rate of submits beside them."""
    alone = [await request_rate(target, TASKS, count) for _ in range(ROUNDS)]
    before_mb = target.resident_mb()
    writers = [await _open_stream(target, task) for task in await _create_tasks(target)]
    after_mb = target.resident_mb()
    beside = [await request_rate(target, TASKS, count) for _ in range(ROUNDS)]
    for writer in writers:
        writer.close()
    alone += [await request_rate(target, TASKS, count) for _ in range(ROUNDS)]
    return {
        f"{STREAMS:,} idle streams, MB": after_mb - before_mb,
        "API submit beside them, share": median(beside) / median(alone),
    }


async def _create_tasks(target: Target) -> list[str]:
    """Creates one idle task per stream and returns their ids."""
    reader, writer = await asyncio.open_connection(target.host, target.port)
    body = msgspec.json.encode({"tasks": [{"title": "idle"}] * STREAMS})
    writer.write(target.build_request("POST", f"{TASKS}/bulk", body))
    response = msgspec.json.decode(await _read_response(reader))
    writer.close()
    return [task["id"] for task in response["tasks"]]


async def _open_stream(target: Target, task: str) -> asyncio.StreamWriter:
    """Opens the event stream of a task and returns its connection."""
    reader, writer = await asyncio.open_connection(target.host, target.port)
    writer.write(target.build_request("GET", f"{TASKS}/{task}/events"))
    await reader.readuntil(b": open")
    return writer
