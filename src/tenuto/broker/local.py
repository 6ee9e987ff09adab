"""Hints between processes of one machine that share a SQLite file.

Each listening process has a datagram socket in a folder beside the database, or in the folder for
temporary files, where others may make one of that name; whoever announces writes to every socket
there. A socket whose owner died is removed by the first who notices. So the folder must be private.
"""

import asyncio
import hashlib
import os
import socket
import tempfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from tenuto import private
from tenuto.broker.memory import MemoryWakeups
from tenuto.broker.protocol import Listener
from tenuto.clock import Clock
from tenuto.folder_stamp import Stamp, folder_stamp
from tenuto.model.errors import Unavailable

_LONGEST = 60_000
_LONGEST_PATH = 80
"""Of the folder: a socket's path has at most 107 bytes on Linux, 103 on macOS."""


def _folder(database: str) -> Path:
    """Where the sockets of a database live: beside it, or elsewhere when that path is too long."""
    beside = Path(f"{Path(database).resolve()}-wake")
    if len(str(beside)) < _LONGEST_PATH:
        return beside
    digest = hashlib.blake2b(str(beside).encode(), digest_size=8).hexdigest()
    return Path(tempfile.gettempdir()) / f"tenuto-{os.getuid()}-{digest}"


class LocalWakeups:
    """Hints over datagram sockets in a folder that belongs to the database."""

    def __init__(self, database: str, name: str, clock: Clock) -> None:
        self._here = MemoryWakeups()
        self._clock = clock
        self._folder = _folder(database)
        self._owners = {os.geteuid()}
        with suppress(OSError):  # it is not there yet
            self._owners.add(Path(database).stat().st_uid)
        self._path = self._folder / name
        self._socket: socket.socket | None = None
        self._sender: socket.socket | None = None
        self._others: list[str] = []
        self._listed: Stamp | None = None
        """The folder as it was listed, if its list is known to be whole."""

    async def open(self) -> None:
        """Listen; `Unavailable` when the folder for the sockets is not private."""
        mine = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            mine.setblocking(False)
            while not self._bind(mine):
                pass
        except BaseException:
            mine.close()
            raise
        self._socket = mine
        asyncio.get_running_loop().add_reader(mine, self._read)

    def _bind(self, mine: socket.socket) -> bool:
        """Put the socket into the folder; false if whoever left last took the folder away."""
        with suppress(FileExistsError):
            self._folder.mkdir(private.FOLDER)
        try:
            fault = private.fault_of(self._folder, self._owners)
            if fault is not None:
                raise Unavailable(
                    f"{self._folder} cannot hold the sockets for hints: {fault}; remove it, or move"
                    f" the database to a path below {_LONGEST_PATH - len('-wake')} characters, so"
                    " that they are beside it",
                    "folder_unsafe",
                )
            self._path.unlink(missing_ok=True)
            mine.bind(str(self._path))
        except FileNotFoundError:
            return False
        self._path.chmod(private.FILE)
        return True

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
        now = folder_stamp(str(self._folder), self._clock)
        if now is None or now != self._listed:
            self._others = self._sockets()
            self._listed = now

    def _sockets(self) -> list[str]:
        """The sockets of others; in a folder that is not private nobody of ours listens."""
        if private.fault_of(self._folder, self._owners) is not None:
            return []
        mine = self._path.name
        return [each.path for each in os.scandir(self._folder) if each.name != mine]

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
