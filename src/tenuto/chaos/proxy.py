"""A proxy to PostgreSQL that forwards a commit, drops the response and closes the connection."""

import asyncio
from contextlib import suppress

CHUNK = 1 << 16
COMMIT = (b"COMMIT;\x00", b"commit\x00")
SYNC = b"S\x00\x00\x00\x04"
"""The message at the end of a statement that is its own transaction."""


class CommitProxy:
    """Listens on a local port and forwards connections to a PostgreSQL server."""

    def __init__(self, host: str, port: int) -> None:
        self._host = host
        self._port = port
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self._armed: tuple[bytes, ...] = ()
        self.dropped_responses = 0
        """Number of responses that the server sent and the proxy dropped."""
        self.port = 0

    async def open(self) -> None:
        """Starts to listen on a free local port, stored in `port`."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """Stops listening and closes all connections."""
        if self._server is not None:
            self._server.close()
        for connection in self._connections:
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    def arm(self, *, only_commits: bool) -> None:
        """Makes the proxy drop the next response (to a COMMIT, or any statement) and disconnect."""
        self._armed = COMMIT if only_commits else (*COMMIT, SYNC)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forwards one accepted connection until it ends."""
        connection = asyncio.current_task()
        assert connection is not None
        self._connections.add(connection)
        try:
            with suppress(OSError):
                await self._forward(reader, writer)
        finally:
            self._connections.discard(connection)
            writer.close()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forwards one connection in both directions until one side closes."""
        if self._host.startswith("/"):
            path = f"{self._host}/.s.PGSQL.{self._port}"
            server_reader, server_writer = await asyncio.open_unix_connection(path)
        else:
            server_reader, server_writer = await asyncio.open_connection(self._host, self._port)
        dropping = asyncio.Event()
        try:
            directions = [
                self._forward_requests(reader, server_writer, dropping),
                self._forward_responses(server_reader, writer, dropping),
            ]
            running = [
                asyncio.get_running_loop().create_task(direction) for direction in directions
            ]
            try:
                await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in running:
                    task.cancel()
                await asyncio.gather(*running, return_exceptions=True)
        finally:
            server_writer.close()

    async def _forward_requests(
        self,
        reader: asyncio.StreamReader,
        server_writer: asyncio.StreamWriter,
        dropping: asyncio.Event,
    ) -> None:
        """Forwards client bytes; sets `dropping` at the request whose response is to be dropped."""
        while data := await reader.read(CHUNK):
            if self._armed and data.endswith(self._armed):
                self._armed = ()
                dropping.set()
            server_writer.write(data)
            await server_writer.drain()

    async def _forward_responses(
        self,
        server_reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        dropping: asyncio.Event,
    ) -> None:
        """Forwards server bytes until `dropping` is set; then drops and counts one response."""
        while data := await server_reader.read(CHUNK):
            if dropping.is_set():
                self.dropped_responses += 1
                return
            writer.write(data)
            await writer.drain()
