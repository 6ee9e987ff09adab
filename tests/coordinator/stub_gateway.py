"""A gateway in the test's process that does as configured and records its requests."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any
from urllib.parse import unquote

Answer = tuple[int, bytes]


class StubGateway:
    """Spawns nothing: every wish gets a session's name, unless `answer` says otherwise."""

    def __init__(self) -> None:
        self.spawned: list[dict[str, Any]] = []
        self.killed: list[str] = []
        self.headers: list[str] = []
        self.answer: Callable[[], Awaitable[Answer]] | None = None
        self.kill_status = 200
        self.kill_said = b"{}"
        self.kill_answers = asyncio.Event()
        """Until it is set, a kill has no answer."""
        self.kill_answers.set()
        self.url = ""
        self._server: asyncio.Server | None = None
        self._port = 0
        self._serving: set[asyncio.Task[Any]] = set()

    async def open(self) -> None:
        """Listen, at the same address as before if there was one."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self._port)
        self._port = self._server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self._port}"

    async def close(self) -> None:
        """Be gone: who connects is refused."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for item in self._serving:
            item.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving = asyncio.current_task()
        assert serving is not None
        self._serving.add(serving)
        try:
            await self._answer(reader, writer)
        finally:
            self._serving.discard(serving)
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            self.headers.append(head)
            size = next(
                int(line.split(":")[1])
                for line in head.lower().splitlines()
                if line.startswith("content-length")
            )
            body = json.loads(await reader.readexactly(size))
            status, output = await self._answered(head.split()[1], body)
            length = f"content-length: {len(output)}\r\nconnection: close\r\n\r\n"
            writer.write(f"HTTP/1.1 {status} X\r\n{length}".encode() + output)
            await writer.drain()

    async def _answered(self, path: str, body: dict[str, Any]) -> Answer:
        if path.endswith("/kill"):
            self.killed.append(unquote(path.split("/")[-2]))
            await self.kill_answers.wait()
            return self.kill_status, self.kill_said
        assert path == "/api/agents/spawn"
        self.spawned.append(body)
        if self.answer is not None:
            return await self.answer()
        return session(f"session-{body['idempotencyKey'][-3:]}-{len(self.spawned)}")


def session(key: str) -> Answer:
    return 200, json.dumps({"session": {"sessionKey": key}}).encode()


def always(status: int, body: bytes = b"no") -> Callable[[], Awaitable[Answer]]:
    async def answer() -> Answer:
        return status, body

    return answer


@asynccontextmanager
async def stub_gateway() -> AsyncIterator[StubGateway]:
    created = StubGateway()
    await created.open()
    try:
        yield created
    finally:
        await created.close()
