"""A way to PostgreSQL that forwards a commit, swallows the answer, and hangs up."""

import asyncio
from contextlib import suppress

CHUNK = 1 << 16
COMMIT = (b"COMMIT;\x00", b"commit\x00")
SYNC = b"S\x00\x00\x00\x04"
"""What ends a statement that is a transaction of its own."""


class CommitProxy:
    """Listens on a port of this machine for a server elsewhere."""

    def __init__(self, host: str, port: int) -> None:
        self._host = host
        self._port = port
        self._server: asyncio.Server | None = None
        self._lines: set[asyncio.Task[None]] = set()
        self._armed: tuple[bytes, ...] = ()
        self.swallowed = 0
        """Answers that nobody heard, though the server had given them."""
        self.port = 0

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for line in self._lines:
            line.cancel()
        await asyncio.gather(*self._lines, return_exceptions=True)

    def arm(self, *, commits: bool) -> None:
        """Swallow the next answer: to a COMMIT, or to whatever ends a statement."""
        self._armed = COMMIT if commits else (*COMMIT, SYNC)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = asyncio.current_task()
        assert line is not None
        self._lines.add(line)
        try:
            with suppress(OSError):
                await self._join(reader, writer)
        finally:
            self._lines.discard(line)
            writer.close()

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._host.startswith("/"):
            path = f"{self._host}/.s.PGSQL.{self._port}"
            back, forth = await asyncio.open_unix_connection(path)
        else:
            back, forth = await asyncio.open_connection(self._host, self._port)
        deaf = asyncio.Event()
        try:
            ways = [self._ask(reader, forth, deaf), self._answer(back, writer, deaf)]
            running = [asyncio.get_running_loop().create_task(way) for way in ways]
            try:
                await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for each in running:
                    each.cancel()
                await asyncio.gather(*running, return_exceptions=True)
        finally:
            forth.close()

    async def _ask(
        self, reader: asyncio.StreamReader, forth: asyncio.StreamWriter, deaf: asyncio.Event
    ) -> None:
        while data := await reader.read(CHUNK):
            if self._armed and data.endswith(self._armed):
                self._armed = ()
                deaf.set()
            forth.write(data)
            await forth.drain()

    async def _answer(
        self, back: asyncio.StreamReader, writer: asyncio.StreamWriter, deaf: asyncio.Event
    ) -> None:
        while data := await back.read(CHUNK):
            if deaf.is_set():
                self.swallowed += 1
                return
            writer.write(data)
            await writer.drain()
