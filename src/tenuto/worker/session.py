"""Starts commands as sessions: process trees that are killed as a whole and die with the worker.

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
MAX_STARTING = 32  # keeps the descriptors in flight to the zygote far below the system's limit
START_ATTEMPTS = 3
MAX_CONTROL_LINE_BYTES = 1 << 20
LOST_RECEIPT: dict[str, Any] = {"killed": [], "killed_count": 0, "how": "lost", "remaining": None}


class SpawnError(Exception):
    """A command was not started; `code` is the supervisor's code of the reason."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message


class SessionEnd(msgspec.Struct, frozen=True):
    """How a command ended, and the processes that were killed with it.

    The receipt's `how` is `exited`, `SIGTERM`, `SIGKILL`, or `lost` if the session's supervisor
    died: its tree is killed then, too, but the remaining processes were not counted.
    """

    exit_code: int | None
    signal: int | None
    oom: bool
    receipt: dict[str, Any]


class _SessionFds(NamedTuple):
    """The worker's ends of the pipes and the control socket of one session."""

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
        """Returns the next line; empty if the session supervisor is gone."""
        try:
            return await self.reader.readline()
        except OSError:
            return b""

    def send(self, message: dict[str, Any]) -> None:
        """Queues a message for the session supervisor; does not wait until it is sent."""
        self.writer.write(json.dumps(message).encode() + b"\n")


class _PipeProtocol(asyncio.StreamReaderProtocol):
    """Feeds a reader and closes the pipe at its end, which not every event loop does."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        super().__init__(reader)
        self.reader = reader

    def as_factory(self) -> "_PipeProtocol":
        """Returns this object: event loops take a factory of protocols."""
        return self

    def eof_received(self) -> bool:
        super().eof_received()
        return False


class _Pipes(NamedTuple):
    readers: list[asyncio.StreamReader]
    transports: list[asyncio.BaseTransport]


class Session:
    """One running command; the caller must read its pipes."""

    def __init__(self, pid: int, pipes: _Pipes, control: _ControlChannel) -> None:
        self.pid = pid
        self.stdout, self.stderr, self.report = pipes.readers
        self._transports = pipes.transports
        self._control = control
        self._end = asyncio.create_task(self._read_end(), name=f"session {pid}")

    async def wait(self) -> SessionEnd:
        """Waits for the end of the command and of everything it started. Many callers may wait."""
        return await asyncio.shield(self._end)

    async def kill(self, grace_s: float) -> SessionEnd:
        """Sends SIGTERM to the tree, SIGKILL after `grace_s` (0: at once); waits for the end."""
        if not self._end.done():
            self._control.send({"kill": {"grace": grace_s}})
        return await self.wait()

    @property
    def is_drained(self) -> bool:
        """True if the session has ended and its pipes are closed: read to the end, or dropped."""
        return self._end.done() and all(pipe.is_closing() for pipe in self._transports)

    def drop(self) -> None:
        """Closes the pipes at once; output that was not read is lost."""
        for transport in self._transports:
            transport.close()

    async def _read_end(self) -> SessionEnd:
        """Waits for the session supervisor's final message; returns a `lost` end if it died."""
        line = await self._control.receive()
        self._control.writer.close()
        if not line:
            return SessionEnd(exit_code=None, signal=9, oom=False, receipt=dict(LOST_RECEIPT))
        return msgspec.json.decode(line, type=SessionEnd)


class Supervisor:
    """Starts commands as children of one zygote process, which is replaced if it dies."""

    def __init__(self) -> None:
        self._zygote: _Zygote | None = None
        self._zygote_lock = asyncio.Lock()
        self._starting = asyncio.Semaphore(MAX_STARTING)
        self._sessions: set[Session] = set()
        self._closed = False

    async def start(self) -> None:
        """Starts the zygote, as `spawn` would; returns when it is ready or raises `SpawnError`."""
        await self._ensure_zygote()

    async def spawn(
        self,
        argv: Sequence[str],
        *,
        cwd: str | None,
        env: Mapping[str, str],
        stdin: bytes = b"",
        limit: int = 1 << 16,
    ) -> Session:
        """Starts the command with exactly this environment; raises `SpawnError` if it cannot start.

        `limit` bounds the buffer of each pipe's reader, and so the longest line it can return.
        """
        request = {"argv": list(argv), "cwd": cwd, "env": dict(env)}
        with contextlib.ExitStack() as cleanup:
            async with self._starting:
                fds, control = await self._start_session_supervisor(cleanup, has_stdin=bool(stdin))
                pid = await _start_command(control, request)
            pipes = await _open_pipes(cleanup, fds, stdin, limit)
            session = Session(pid, pipes, control)
            cleanup.pop_all()
        self._sessions = {live for live in self._sessions if not live.is_drained} | {session}
        if self._closed:
            await self._end_sessions()
            raise SpawnError("spawn_failed", "the supervisor was closed")
        return session

    async def close(self) -> None:
        """Kills every session and ends the zygote; nothing can be spawned afterwards."""
        self._closed = True
        await self._end_sessions()
        async with self._zygote_lock:
            if self._zygote is not None:
                self._zygote.socket.close()
                await self._zygote.process.wait()
                self._zygote = None

    async def _end_sessions(self) -> None:
        """Kills all sessions at once, waits for their ends, and drops their unread output."""
        sessions, self._sessions = self._sessions, set()
        await asyncio.gather(*(session.kill(0) for session in sessions))
        for session in sessions:
            session.drop()

    async def _start_session_supervisor(
        self, cleanup: contextlib.ExitStack, *, has_stdin: bool
    ) -> tuple[_SessionFds, _ControlChannel]:
        """Starts a session supervisor; returns its descriptors and channel when it is ready.

        Nothing has run until it is ready, so a dead zygote is replaced and the start is repeated;
        raises `SpawnError` after the last attempt.
        """
        for _ in range(START_ATTEMPTS):
            zygote = await self._ensure_zygote()
            with contextlib.ExitStack() as attempt_cleanup:
                fds = await _send_session_fds(attempt_cleanup, zygote, has_stdin=has_stdin)
                if fds is None:
                    continue
                control = _ControlChannel(
                    *await asyncio.open_unix_connection(
                        sock=fds.control, limit=MAX_CONTROL_LINE_BYTES
                    )
                )
                attempt_cleanup.callback(control.writer.close)
                if await control.receive():
                    cleanup.push(attempt_cleanup.pop_all())
                    return fds, control
        raise SpawnError("spawn_failed", "no session supervisor could be started")

    async def _ensure_zygote(self) -> _Zygote:
        """Returns the running zygote; starts one if needed, also if this call is cancelled."""
        # Shielded, so that a cancelled spawn leaves no half-started zygote behind.
        return await asyncio.shield(self._ensure_zygote_locked())

    async def _ensure_zygote_locked(self) -> _Zygote:
        """Returns the running zygote, started if needed; raises `SpawnError` also after `close`."""
        async with self._zygote_lock:
            if self._closed:
                raise SpawnError("spawn_failed", "the supervisor is closed")
            if self._zygote is not None and self._zygote.process.returncode is not None:
                self._zygote.socket.close()
                self._zygote = None
            if self._zygote is None:
                self._zygote = await _start_zygote()
            return self._zygote


async def _start_zygote() -> _Zygote:
    """Starts a zygote; raises `SpawnError` if the system cannot start a process."""
    try:
        return await _spawn_zygote()
    except OSError as error:
        raise SpawnError("spawn_failed", str(error)) from error


async def _spawn_zygote() -> _Zygote:
    """Starts the supervisor program and waits until it is ready; `SpawnError` if it ends first."""
    worker_end, zygote_end = socket.socketpair()
    worker_end.setblocking(False)
    with contextlib.ExitStack() as cleanup:
        cleanup.callback(worker_end.close)
        with zygote_end:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", "-X", "utf8", str(PROGRAM), str(zygote_end.fileno())),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                pass_fds=(zygote_end.fileno(),),
                start_new_session=True,
            )
        if not await asyncio.get_running_loop().sock_recv(worker_end, 1):
            await process.wait()
            raise SpawnError("spawn_failed", f"{PROGRAM.name} did not start")
        cleanup.pop_all()
    return _Zygote(process, worker_end)


async def _send_session_fds(
    cleanup: contextlib.ExitStack, zygote: _Zygote, *, has_stdin: bool
) -> _SessionFds | None:
    """Opens pipes and sends the zygote its ends; returns the worker's, `None` if it is dead."""
    try:
        with contextlib.ExitStack() as supervisor_ends:
            fds, supervisor_fds = _open_session_fds(cleanup, supervisor_ends, has_stdin=has_stdin)
            socket.send_fds(zygote.socket, [b"+"], supervisor_fds)
            return fds
    except (BrokenPipeError, ConnectionResetError):
        await zygote.process.wait()
        return None
    except OSError as error:
        raise SpawnError("spawn_failed", str(error)) from error


def _open_session_fds(
    worker_ends: contextlib.ExitStack, supervisor_ends: contextlib.ExitStack, *, has_stdin: bool
) -> tuple[_SessionFds, list[int]]:
    """Opens pipes and a control socket; returns the worker's ends, and those for `RECEIVED`."""

    def pipe(
        reader_end: contextlib.ExitStack, writer_end: contextlib.ExitStack
    ) -> tuple[FileIO, FileIO]:
        reader, writer = (FileIO(fd, mode) for fd, mode in zip(os.pipe(), "rw", strict=True))
        reader_end.callback(_close, reader)
        writer_end.callback(_close, writer)
        return reader, writer

    supervisor_control, control = socket.socketpair()
    supervisor_ends.callback(supervisor_control.close)
    worker_ends.callback(control.close)
    supervisor_stdin, stdin = (
        pipe(supervisor_ends, worker_ends) if has_stdin else (FileIO(os.devnull), None)
    )
    supervisor_ends.callback(supervisor_stdin.close)
    (stdout, stdout_writer), (stderr, stderr_writer), (report, report_writer) = (
        pipe(worker_ends, supervisor_ends) for _ in range(3)
    )
    fds = _SessionFds(control, stdin, stdout, stderr, report)
    return fds, [
        end.fileno()
        for end in (
            supervisor_stdin,
            stdout_writer,
            stderr_writer,
            report_writer,
            supervisor_control,
        )
    ]


def _close(file: FileIO) -> None:
    """Closes a file; does nothing if its descriptor is closed already."""
    # An event loop may have closed the file's descriptor together with its transport.
    with contextlib.suppress(OSError):
        file.close()


async def _start_command(control: _ControlChannel, request: dict[str, Any]) -> int:
    """Has a session supervisor start the command; returns the pid or raises `SpawnError`."""
    control.send(request)
    line = await control.receive()
    if not line:
        raise SpawnError("spawn_failed", "the session's supervisor died")
    reply = json.loads(line)
    if "error" in reply:
        raise SpawnError(reply["error"]["code"], reply["error"]["message"])
    return int(reply["pid"])


async def _open_pipes(
    cleanup: contextlib.ExitStack, fds: _SessionFds, stdin: bytes, limit: int
) -> _Pipes:
    """Opens streams on the worker's pipe ends; writes `stdin` in the background, then closes it."""
    loop = asyncio.get_running_loop()
    pipes = _Pipes([], [])
    for file in (fds.stdout, fds.stderr, fds.report):
        protocol = _PipeProtocol(asyncio.StreamReader(limit=limit))
        transport, _ = await loop.connect_read_pipe(protocol.as_factory, file)
        cleanup.callback(transport.close)
        pipes.readers.append(protocol.reader)
        pipes.transports.append(transport)
    if fds.stdin is not None:
        stdin_transport, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, fds.stdin)
        cleanup.callback(stdin_transport.abort)
        pipes.transports.append(stdin_transport)
        stdin_transport.write(stdin)
        stdin_transport.close()  # after what is written
    return pipes
