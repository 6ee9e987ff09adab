"""Hints between processes of one machine that share a SQLite file.

Each listening process has a datagram socket in a folder beside the database; whoever announces
writes to every socket there. A socket whose owner died is removed by the first who notices.
"""

import asyncio
import hashlib
import os
import socket
import tempfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from tenuto.broker.memory import MemoryWakeups
from tenuto.broker.protocol import Listener
from tenuto.clock import Clock
from tenuto.folder import Stamp, stamp

_LONGEST = 60_000


def _folder(database: str) -> Path:
    """Where the sockets of a database live: beside it, or elsewhere when that path is too long."""
    beside = Path(f"{Path(database).resolve()}-wake")
    if len(str(beside)) < 80:  # a socket's path has at most 107 bytes on Linux, 103 on macOS
        return beside
    digest = hashlib.blake2b(str(beside).encode(), digest_size=8).hexdigest()
    return Path(tempfile.gettempdir()) / f"tenuto-{os.getuid()}-{digest}"


class LocalWakeups:
    """Hints over datagram sockets in a folder that belongs to the database."""

    def __init__(self, database: str, name: str, clock: Clock) -> None:
        self._here = MemoryWakeups()
        self._clock = clock
        self._folder = _folder(database)
        self._path = self._folder / name
        self._socket: socket.socket | None = None
        self._sender: socket.socket | None = None
        self._others: list[str] = []
        self._listed: Stamp | None = None
        """The folder as it was listed, if its list is known to be whole."""

    async def open(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        bound = False
        while not bound:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            self._path.unlink(missing_ok=True)
            with suppress(FileNotFoundError):  # whoever was the last to leave took the folder
                self._socket.bind(str(self._path))
                bound = True
        asyncio.get_running_loop().add_reader(self._socket, self._read)

    async def close(self) -> None:
        if self._socket is not None:
            asyncio.get_running_loop().remove_reader(self._socket)
            self._socket.close()
            self._socket = None
            self._path.unlink(missing_ok=True)
            with suppress(OSError):  # others are still there
                self._folder.rmdir()
        if self._sender is not None:
            self._sender.close()
            self._sender = None
        await self._here.close()

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        return self._here.subscribe(listener)

    def announce(self, topics: Iterable[str]) -> None:
        told = list(topics)
        self._here.announce(told)
        try:
            self._look()
        except OSError:  # no folder: nobody listens
            return
        if self._others:
            message = "\n".join(told).encode()[:_LONGEST]
            for path in self._others:
                self._send(path, message)

    def _look(self) -> None:
        """List who listens, unless the folder has not changed since it was listed."""
        now = stamp(str(self._folder), self._clock)
        if now is None or now != self._listed:
            mine = self._path.name
            self._others = [each.path for each in os.scandir(self._folder) if each.name != mine]
            self._listed = now

    def _send(self, path: str, message: bytes) -> None:
        if self._sender is None:
            self._sender = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            self._sender.setblocking(False)
        try:
            self._sender.sendto(message, path)
        except ConnectionRefusedError:
            Path(path).unlink(missing_ok=True)
        except OSError:
            return  # full or gone: a hint may be lost

    def _read(self) -> None:
        assert self._socket is not None
        try:
            message = self._socket.recv(_LONGEST)
        except BlockingIOError:
            return
        for topic in message.decode(errors="replace").split("\n"):
            self._here.hear(topic)
