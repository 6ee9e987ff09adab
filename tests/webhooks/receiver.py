"""A small HTTP server on loopback that records requests and responds as configured."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import NamedTuple

PACE_S = 0.01
"""Between two bytes of an endpoint that drips."""


class Received(NamedTuple):
    """One request as it arrived."""

    line: str
    headers: dict[str, str]
    body: bytes


Reply = Callable[[asyncio.StreamWriter], Awaitable[None]]


def answer(status: int, body: bytes = b"", *headers: str) -> Reply:
    """A reply of one piece."""
    lines = [f"HTTP/1.1 {status} x", f"content-length: {len(body)}", *headers, "", ""]

    async def reply(writer: asyncio.StreamWriter) -> None:
        writer.write("\r\n".join(lines).encode() + body)
        await writer.drain()

    return reply


class Receiver:
    """What arrived, and what the next request gets; the last reply stays."""

    def __init__(self) -> None:
        self.got: list[Received] = []
        self.names: list[str | None] = []
        self.replies: list[Reply] = [answer(204)]
        self.connections = 0
        self.written = 0
        self.port = 0
        self._serving: dict[asyncio.Future[None], asyncio.StreamWriter] = {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/hook?x=1"

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        task = asyncio.ensure_future(self._serve(reader, writer))
        self._serving[task] = writer
        task.add_done_callback(lambda _: writer.close())

    async def close(self) -> None:
        """End every connection, whatever its reply is about to do."""
        for task, writer in self._serving.items():
            task.cancel()
            writer.transport.abort()
        await asyncio.gather(*self._serving, return_exceptions=True)
        for writer in self._serving.values():
            with suppress(ConnectionError, ssl.SSLError):
                await writer.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            line, *rest = head.rstrip().split("\r\n")
            headers = {k.lower(): v.strip() for k, _, v in (item.partition(":") for item in rest)}
            body = await reader.readexactly(int(headers["content-length"]))
            self.got.append(Received(line, headers, body))
            reply = self.replies[0] if len(self.replies) == 1 else self.replies.pop(0)
            await reply(writer)

    async def endless(self, writer: asyncio.StreamWriter) -> None:
        """A success that never stops talking."""
        writer.write(b"HTTP/1.1 200 x\r\n\r\n")
        while True:
            writer.write(b"x" * 16384)
            self.written += 16384
            await writer.drain()


def silent(after: bytes = b"") -> Reply:
    """A reply that stops in the middle and keeps the connection."""

    async def reply(writer: asyncio.StreamWriter) -> None:
        writer.write(after)
        await writer.drain()
        await asyncio.Event().wait()

    return reply


async def drip(writer: asyncio.StreamWriter) -> None:
    """A header that comes byte by byte and never ends."""
    writer.write(b"HTTP/1.1 200 x\r\nx-slow: ")
    while True:
        writer.write(b"y")
        await writer.drain()
        await asyncio.sleep(PACE_S)


@asynccontextmanager
async def receiving(tls: ssl.SSLContext | None = None) -> AsyncIterator[Receiver]:
    """A receiver on a free port until the block ends."""
    receiver = Receiver()
    if tls is not None:
        tls.sni_callback = lambda _socket, name, _context: receiver.names.append(name)
    server = await asyncio.start_server(receiver.accept, "127.0.0.1", 0, ssl=tls)
    receiver.port = server.sockets[0].getsockname()[1]
    try:
        yield receiver
    finally:
        server.close()
        await receiver.close()
