"""A pooler as PgBouncer in transaction mode: clients share the connections of a server.

It speaks the protocol of PostgreSQL in units that end with Sync, Flush or a simple query. A client
has a server's connection for one transaction. Start-up parameters are refused, or dropped without
a word. With `tracks`, prepared statements follow their client to another connection, as since
PgBouncer 1.21; without, they stay where they were prepared.
"""

import asyncio
import struct
from collections import deque
from collections.abc import Sequence
from types import TracebackType
from typing import NamedTuple, Self
from urllib.parse import parse_qs, quote, unquote, urlsplit

SSL_REQUEST = 80877103
GSS_REQUEST = 80877104
CANCEL_REQUEST = 80877102
PROTOCOL = 196608
KNOWN = {"user", "database", "client_encoding", "application_name"}
"""Parameters that a pooler understands."""


class Message(NamedTuple):
    """One message of the protocol."""

    kind: bytes
    body: bytes

    @property
    def encoded(self) -> bytes:
        return self.kind + struct.pack("!i", len(self.body) + 4) + self.body


READY = Message(b"Z", b"I")
PARSED, CLOSED = Message(b"1", b""), Message(b"3", b"")
SYNC = Message(b"S", b"")
COMPLETES = {b"P": b"1", b"B": b"2", b"C": b"3", b"D": b"Tn", b"E": b"CIs"}
"""What ends the answer to each kind of message."""


async def read(reader: asyncio.StreamReader) -> Message:
    kind, size = struct.unpack("!ci", await reader.readexactly(5))
    return Message(kind, await reader.readexactly(size - 4))


def text(body: bytes, start: int = 0) -> tuple[str, bytes]:
    """The string that begins there, and what follows it."""
    end = body.index(b"\0", start)
    return body[start:end].decode(), body[end + 1 :]


class Backend:
    """One connection to the server."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.prepared: set[str] = set()
        self.greeting: list[Message] = []

    async def ask(self, unit: Sequence[Message]) -> list[Message]:
        """The answers to a unit."""
        self.writer.write(b"".join(item.encoded for item in unit))
        if unit[-1].kind == b"H":
            return await self._flushed([COMPLETES[item.kind] for item in unit[:-1]])
        answers = [await read(self.reader)]
        while answers[-1].kind != b"Z":
            answers.append(await read(self.reader))
        return answers

    async def _flushed(self, completes: list[bytes]) -> list[Message]:
        """The answers up to the last one that is due, or to an error."""
        answers: list[Message] = []
        for last in completes:
            answers.append(await read(self.reader))
            while answers[-1].kind not in last:
                if answers[-1].kind == b"E":
                    return answers
                answers.append(await read(self.reader))
        return answers


class Pooler:
    """A pooler in front of the server behind a url that goes through a Unix socket."""

    def __init__(
        self, url: str, *, size: int = 4, ignores: bool = False, tracks: bool = True
    ) -> None:
        parts = urlsplit(url)
        query = parse_qs(parts.query)
        self._socket = f"{unquote(query['host'][0])}/.s.PGSQL.{query['port'][0]}"
        self._user, self._database = parts.username, parts.path[1:]
        self._size, self._ignores, self._tracks = size, ignores, tracks
        self._idle: dict[str, list[Backend]] = {}
        self._made: dict[str, int] = {}
        self._freed = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()
        self._clients: set[asyncio.StreamWriter] = set()
        self._backends: list[Backend] = []
        self._names: dict[bytes, str] = {}
        self.transactions = 0
        """Units that were given a server's connection."""

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._server.close()
        for client in self._clients:
            client.close()
        for backend in self._backends:
            backend.writer.close()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=5)
        await self._server.wait_closed()

    def url(self, user: str | None = None) -> str:
        """The address of the database through the pooler, for a login that is trusted."""
        port = self._server.sockets[0].getsockname()[1]
        return f"postgresql://{quote(user or self._user or '')}@127.0.0.1:{port}/{self._database}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._clients.add(writer)
        try:
            client = Client(self, reader, writer)
            if await client.greet(ignores=self._ignores):
                await client.serve()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._tasks.discard(task)
            self._clients.discard(writer)
            writer.close()

    async def take(self, user: str) -> Backend:
        """An idle connection of the login, the one last used first."""
        async with self._freed:
            while not self._idle.get(user) and self._made.get(user, 0) >= self._size:
                await self._freed.wait()
            self.transactions += 1
            if idle := self._idle.get(user):
                return idle.pop()
            self._made[user] = self._made.get(user, 0) + 1
        return await self._connect(user)

    async def give(self, user: str, backend: Backend) -> None:
        async with self._freed:
            self._idle.setdefault(user, []).append(backend)
            self._freed.notify_all()

    async def drop(self, user: str, backend: Backend) -> None:
        """Close a connection whose client left amid a transaction."""
        backend.writer.close()
        async with self._freed:
            self._made[user] -= 1
            self._freed.notify_all()

    async def _connect(self, user: str) -> Backend:
        backend = Backend(*await asyncio.open_unix_connection(self._socket))
        self._backends.append(backend)
        words = ["user", user, "database", self._database, "client_encoding", "utf8", ""]
        body = struct.pack("!i", PROTOCOL) + b"".join(word.encode() + b"\0" for word in words)
        backend.writer.write(struct.pack("!i", len(body) + 4) + body)
        while (message := await read(backend.reader)).kind != b"Z":
            if message.kind == b"E":
                raise ConnectionError(message.body.decode(errors="replace"))
            backend.greeting.append(message)
        return backend

    def name_of(self, statement: bytes) -> str:
        """The name by which servers know a statement."""
        return self._names.setdefault(statement, f"pooled_{len(self._names)}")

    @property
    def tracks(self) -> bool:
        return self._tracks


class Client:
    """One program's connection to the pooler."""

    def __init__(
        self, pooler: Pooler, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._pooler, self._reader, self._writer = pooler, reader, writer
        self._user = ""
        self._statements: dict[str, bytes] = {}
        self._backend: Backend | None = None

    def _send(self, messages: Sequence[Message]) -> None:
        self._writer.write(b"".join(message.encoded for message in messages))

    def _refuse(self, code: str, reason: str) -> None:
        fields = f"SFATAL\0VFATAL\0C{code}\0M{reason}\0\0"
        self._send([Message(b"E", fields.encode())])

    async def greet(self, *, ignores: bool) -> bool:
        """True if the client may continue."""
        while True:
            size, code = struct.unpack("!ii", await self._reader.readexactly(8))
            if code == CANCEL_REQUEST:
                return False
            if code not in (SSL_REQUEST, GSS_REQUEST):
                break
            self._writer.write(b"N")
        words = (await self._reader.readexactly(size - 8)).decode().split("\0")
        values = dict(zip(words[::2], words[1::2], strict=False))
        self._user = values["user"]
        unknown = [name for name in values if name and name not in KNOWN]
        if unknown and not ignores:
            self._refuse("08P01", f"unsupported startup parameter: {unknown[0]}")
            return False
        backend = await self._pooler.take(self._user)
        await self._pooler.give(self._user, backend)
        self._send([*backend.greeting, READY])
        return True

    async def serve(self) -> None:
        """Answer unit after unit until the client leaves."""
        unit: deque[Message] = deque()
        try:
            while (message := await read(self._reader)).kind != b"X":
                unit.append(message)
                if message.kind in (b"S", b"Q", b"H"):
                    await self._answer(unit)
                    unit.clear()
        finally:
            if self._backend is not None:
                await self._pooler.drop(self._user, self._backend)

    async def _answer(self, unit: Sequence[Message]) -> None:
        backend = self._backend or await self._pooler.take(self._user)
        self._backend = backend
        if self._pooler.tracks:
            answers = await self._tracked(backend, unit)
        else:
            answers = await backend.ask(list(unit))
        self._send(answers)
        if answers and answers[-1] == READY:
            self._backend = None
            await self._pooler.give(self._user, backend)

    async def _tracked(self, backend: Backend, unit: Sequence[Message]) -> list[Message]:
        """The answers to a unit whose named statements the connection may not know yet."""
        ahead: list[Message] = []
        rest: list[Message] = []
        for message in unit:
            name = self._named(message)
            if message.kind == b"P" and name:
                self._statements[name] = text(message.body)[1]
                ahead.append(PARSED)
            elif message.kind == b"C" and name:
                self._statements.pop(name, None)
                ahead.append(CLOSED)
                continue
            if not name:
                rest.append(message)
                continue
            shared = self._pooler.name_of(self._statements[name])
            if shared not in backend.prepared:
                body = shared.encode() + b"\0" + self._statements[name]
                reported = await backend.ask([Message(b"P", body), SYNC])
                if reported[0].kind == b"E":
                    return reported if unit[-1].kind == b"S" else reported[:1]
                backend.prepared.add(shared)
            if message.kind != b"P":
                rest.append(_renamed(message, shared))
        return [*ahead, *await backend.ask(rest)]

    def _named(self, message: Message) -> str:
        """The name of the prepared statement that a message is about; empty: none."""
        if message.kind == b"P":
            return text(message.body)[0]
        if message.kind in (b"D", b"C") and message.body[:1] == b"S":
            return text(message.body, 1)[0]
        if message.kind == b"B":
            return text(text(message.body)[1])[0]
        return ""


def _renamed(message: Message, name: str) -> Message:
    """A Bind or Describe that is about the statement of another name."""
    own = name.encode() + b"\0"
    if message.kind == b"D":
        return Message(b"D", b"S" + own)
    portal, rest = text(message.body)
    return Message(b"B", portal.encode() + b"\0" + own + text(rest)[1])
