"""A connection to a server that loses requests and responses."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from urllib.parse import urlsplit


class Line:
    """A TCP proxy; it can swallow replies, and cut every connection."""

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self._writers: set[asyncio.StreamWriter] = set()
        self._busy: set[asyncio.Task[None]] = set()
        self.swallow = 0
        """How many replies are lost from now on: the request arrives, the answer does not."""
        self.swallowed = 0
        self.down = False
        """Whether new connections are cut at once."""
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.down:
            writer.close()
            return
        far_reader, far_writer = await asyncio.open_connection(self._host, self._port)
        self._writers |= {writer, far_writer}
        up = asyncio.ensure_future(self._copy(reader, far_writer))
        down = asyncio.ensure_future(self._reply(far_reader, writer))
        self._busy |= {up, down}
        await asyncio.wait([up, down], return_when=asyncio.FIRST_COMPLETED)
        for item in (up, down):
            item.cancel()
        for end in (writer, far_writer):
            self._writers.discard(end)
            end.close()

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while part := await reader.read(65536):
                writer.write(part)
                await writer.drain()

    async def _reply(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while part := await reader.read(65536):
                if self.swallow:
                    self.swallow -= 1
                    self.swallowed += 1
                    return
                writer.write(part)
                await writer.drain()

    def cut(self) -> None:
        """Break every connection."""
        for writer in self._writers:
            writer.transport.abort()


@asynccontextmanager
async def line_to(url: str) -> AsyncIterator[Line]:
    """A line to a server, with an address of its own."""
    parts = urlsplit(url)
    line = Line(parts.hostname or "", parts.port or 0)
    server = await asyncio.start_server(line.serve, "127.0.0.1", 0)
    line.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield line
    finally:
        server.close()
        line.cut()
        for task in line._busy:
            task.cancel()
        await asyncio.gather(*line._busy, return_exceptions=True)
        await server.wait_closed()
