"""Commands as sessions: a process tree that is killed as a whole and dies with the worker.

`Supervisor` talks to the small program in `supervisor.py`, which starts and watches the commands.
"""

import asyncio
import contextlib
import json
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

PROGRAM = Path(__file__).with_name("supervisor.py")
STARTING_LIMIT = 32  # keeps the descriptors in flight to the zygote far below the system's limit
START_ATTEMPTS = 3
CONTROL_LIMIT = 1 << 20
LOST: dict[str, Any] = {"killed": [], "killed_count": 0, "how": "lost", "remaining": None}


class SpawnError(Exception):
    """A command was not started; `code` is the supervisor's word for why."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message


class SessionEnd(msgspec.Struct, frozen=True):
    """How a command ended and what was killed with it.

    The receipt's `how` is `exited`, `SIGTERM`, `SIGKILL`, or `lost` when the session's supervisor
    died: its tree is killed then too, but nobody counted what remained.
    """

    exit_code: int | None
    signal: int | None
    oom: bool
    receipt: dict[str, Any]


class _SessionFds(NamedTuple):
    """The worker's ends of what joins it to one session."""

    control: socket.socket
    stdin: FileIO | None
    stdout: FileIO
    stderr: FileIO
    report: FileIO


class _Zygote(NamedTuple):
    process: asyncio.subprocess.Process
    socket: socket.socket


class _ControlChannel(NamedTuple):
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def receive(self) -> bytes:
        """The next line; nothing when the session supervisor is gone."""
        try:
            return await self.reader.readline()
        except OSError:
            return b""

    def send(self, message: dict[str, Any]) -> None:
        self.writer.write(json.dumps(message).encode() + b"\n")


class _PipeProtocol(asyncio.StreamReaderProtocol):
    """Feeds a reader and closes the pipe at its end, which not every loop does by itself."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        super().__init__(reader)
        self.reader = reader

    def itself(self) -> "_PipeProtocol":
        return self

    def eof_received(self) -> bool:
        super().eof_received()
        return False


class _Pipes(NamedTuple):
    readers: list[asyncio.StreamReader]
    transports: list[asyncio.BaseTransport]


class Session:
    """One running command; the caller drains its pipes."""

    def __init__(self, pid: int, pipes: _Pipes, control: _ControlChannel) -> None:
        self.pid = pid
        self.stdout, self.stderr, self.report = pipes.readers
        self._transports = pipes.transports
        self._control = control
        self._end = asyncio.create_task(self._read_end(), name=f"session {pid}")

    async def wait(self) -> SessionEnd:
        """The end of the command and of everything it started; any number may wait."""
        return await asyncio.shield(self._end)

    async def kill(self, grace: float) -> SessionEnd:
        """SIGTERM to the whole tree, SIGKILL to what is left after `grace` seconds."""
        if not self._end.done():
            self._control.send({"kill": {"grace": grace}})
        return await self.wait()

    @property
    def drained(self) -> bool:
        """Ended, and everything it wrote has been received."""
        return self._end.done() and all(pipe.is_closing() for pipe in self._transports)

    def drop(self) -> None:
        """Closes the pipes, read or not."""
        for transport in self._transports:
            transport.close()

    async def _read_end(self) -> SessionEnd:
        line = await self._control.receive()
        self._control.writer.close()
        if not line:
            return SessionEnd(exit_code=None, signal=9, oom=False, receipt=dict(LOST))
        return msgspec.json.decode(line, type=SessionEnd)


class Supervisor:
    """Starts commands below one zygote process, which is replaced when it dies."""

    def __init__(self) -> None:
        self._zygote: _Zygote | None = None
        self._changing = asyncio.Lock()
        self._starting = asyncio.Semaphore(STARTING_LIMIT)
        self._sessions: set[Session] = set()
        self._closed = False

    async def start(self) -> None:
        """Returns when commands can be spawned; a spawn does this too when it has to."""
        await self._running_zygote()

    async def spawn(
        self,
        argv: Sequence[str],
        *,
        cwd: str | None,
        env: Mapping[str, str],
        stdin: bytes = b"",
        limit: int = 1 << 16,
    ) -> Session:
        """Starts the command with exactly that environment; SpawnError when it did not start.

        `limit` bounds the buffer of each pipe's reader, and so the longest line it can return.
        """
        request = {"argv": list(argv), "cwd": cwd, "env": dict(env)}
        with contextlib.ExitStack() as undo:
            async with self._starting:
                wires, control = await self._connect(undo, feed=bool(stdin))
                pid = await _start_command(control, request)
            pipes = await _open_pipes(undo, wires, stdin, limit)
            session = Session(pid, pipes, control)
            undo.pop_all()
        self._sessions = {known for known in self._sessions if not known.drained} | {session}
        if self._closed:
            await self._end_sessions()
            raise SpawnError("spawn_failed", "the supervisor was closed")
        return session

    async def close(self) -> None:
        """Kills every session and ends the zygote; nothing can be spawned afterwards."""
        self._closed = True
        await self._end_sessions()
        async with self._changing:
            if self._zygote is not None:
                self._zygote.socket.close()
                await self._zygote.process.wait()
                self._zygote = None

    async def _end_sessions(self) -> None:
        sessions, self._sessions = self._sessions, set()
        await asyncio.gather(*(session.kill(0) for session in sessions))
        for session in sessions:
            session.drop()

    async def _connect(
        self, undo: contextlib.ExitStack, *, feed: bool
    ) -> tuple[_SessionFds, _ControlChannel]:
        """A session supervisor that is ready for its command.

        Before it says so nothing has run, so a zygote found dead is replaced and asked again.
        """
        for _ in range(START_ATTEMPTS):
            zygote = await self._running_zygote()
            with contextlib.ExitStack() as attempt:
                wires = await _send_wires(attempt, zygote, feed=feed)
                if wires is None:
                    continue
                control = _ControlChannel(
                    *await asyncio.open_unix_connection(sock=wires.control, limit=CONTROL_LIMIT)
                )
                attempt.callback(control.writer.close)
                if await control.receive():
                    undo.push(attempt.pop_all())
                    return wires, control
        raise SpawnError("spawn_failed", "no session supervisor could be started")

    async def _running_zygote(self) -> _Zygote:
        # Shielded, so that a spawn given up leaves no half-started zygote behind.
        return await asyncio.shield(self._ensure_zygote())

    async def _ensure_zygote(self) -> _Zygote:
        async with self._changing:
            if self._closed:
                raise SpawnError("spawn_failed", "the supervisor is closed")
            if self._zygote is not None and self._zygote.process.returncode is not None:
                self._zygote.socket.close()
                self._zygote = None
            if self._zygote is None:
                self._zygote = await _start_zygote()
            return self._zygote


async def _start_zygote() -> _Zygote:
    try:
        return await _started_zygote()
    except OSError as error:
        raise SpawnError("spawn_failed", str(error)) from error


async def _started_zygote() -> _Zygote:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    with contextlib.ExitStack() as undo:
        undo.callback(ours.close)
        with theirs:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", "-X", "utf8", str(PROGRAM), str(theirs.fileno())),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        if not await asyncio.get_running_loop().sock_recv(ours, 1):
            await process.wait()
            raise SpawnError("spawn_failed", f"{PROGRAM.name} did not start")
        undo.pop_all()
    return _Zygote(process, ours)


async def _send_wires(
    undo: contextlib.ExitStack, zygote: _Zygote, *, feed: bool
) -> _SessionFds | None:
    """Sends the session's ends to the zygote and keeps ours; None when the zygote is dead."""
    try:
        with contextlib.ExitStack() as theirs:
            wires, sent = _open_wires(undo, theirs, feed=feed)
            socket.send_fds(zygote.socket, [b"+"], sent)
            return wires
    except (BrokenPipeError, ConnectionResetError):
        await zygote.process.wait()
        return None
    except OSError as error:
        raise SpawnError("spawn_failed", str(error)) from error


def _open_wires(
    ours: contextlib.ExitStack, theirs: contextlib.ExitStack, *, feed: bool
) -> tuple[_SessionFds, list[int]]:
    """Our ends, and the descriptors of theirs in the supervisor's order."""

    def pipe(reads: contextlib.ExitStack, writes: contextlib.ExitStack) -> tuple[FileIO, FileIO]:
        reader, writer = (FileIO(fd, mode) for fd, mode in zip(os.pipe(), "rw", strict=True))
        reads.callback(_close, reader)
        writes.callback(_close, writer)
        return reader, writer

    their_control, control = socket.socketpair()
    theirs.callback(their_control.close)
    ours.callback(control.close)
    their_stdin, stdin = pipe(theirs, ours) if feed else (FileIO(os.devnull), None)
    theirs.callback(their_stdin.close)
    (stdout, out), (stderr, err), (report, rep) = (pipe(ours, theirs) for _ in range(3))
    wires = _SessionFds(control, stdin, stdout, stderr, report)
    return wires, [end.fileno() for end in (their_stdin, out, err, rep, their_control)]


def _close(file: FileIO) -> None:
    # A loop may have closed the descriptor below the file together with its transport.
    with contextlib.suppress(OSError):
        file.close()


async def _start_command(control: _ControlChannel, request: dict[str, Any]) -> int:
    """The pid of the command that the ready session supervisor has started."""
    control.send(request)
    line = await control.receive()
    if not line:
        raise SpawnError("spawn_failed", "the session's supervisor died")
    reply = json.loads(line)
    if "error" in reply:
        raise SpawnError(reply["error"]["code"], reply["error"]["message"])
    return int(reply["pid"])


async def _open_pipes(
    undo: contextlib.ExitStack, wires: _SessionFds, stdin: bytes, limit: int
) -> _Pipes:
    """Streams over our ends of the pipes; `stdin` is fed as fast as the command reads it."""
    loop = asyncio.get_running_loop()
    pipes = _Pipes([], [])
    for file in (wires.stdout, wires.stderr, wires.report):
        protocol = _PipeProtocol(asyncio.StreamReader(limit=limit))
        source, _ = await loop.connect_read_pipe(protocol.itself, file)
        undo.callback(source.close)
        pipes.readers.append(protocol.reader)
        pipes.transports.append(source)
    if wires.stdin is not None:
        feed, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, wires.stdin)
        undo.callback(feed.abort)
        pipes.transports.append(feed)
        feed.write(stdin)
        feed.close()  # after what is written
    return pipes
