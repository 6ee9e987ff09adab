"""Hints between processes of one machine that share a SQLite file.

Each listening process has a datagram socket in a folder beside the database, or in the folder for
temporary files, where other users could create a folder of that name. A hint is sent to every
socket there. The first sender that notices a dead socket removes it. So the folder must be private.
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
from tenuto.broker.protocol import BrokerContext, Listener, Wakeups
from tenuto.clock import Clock
from tenuto.folder_stamp import Stamp, folder_stamp
from tenuto.model.errors import Unavailable
from tenuto.settings import sqlite_path

_MAX_MESSAGE_BYTES = 60_000
_MAX_SOCKET_NAME = 20
_MAX_FOLDER_PATH = 80
"""Longest path of the folder: a socket's path has at most 107 bytes on Linux, 103 on macOS."""


def _socket_folder(database: str) -> Path:
    """Returns the folder for a database's sockets: beside it, or elsewhere if that path is long."""
    beside = Path(f"{Path(database).resolve()}-wake")
    if len(str(beside)) < _MAX_FOLDER_PATH:
        return beside
    digest = hashlib.blake2b(str(beside).encode(), digest_size=8).hexdigest()
    return Path(tempfile.gettempdir()) / f"tenuto-{os.getuid()}-{digest}"


class LocalWakeups:
    """Hints over datagram sockets in a folder that belongs to the database."""

    def __init__(self, database: str, name: str, clock: Clock) -> None:
        self._local = MemoryWakeups()
        self._clock = clock
        self._folder = _socket_folder(database)
        self._owners = {os.geteuid()}
        with suppress(OSError):  # the database does not exist yet
            self._owners.add(Path(database).stat().st_uid)
        self._path = self._folder / name
        self._socket: socket.socket | None = None
        self._sender: socket.socket | None = None
        self._other_sockets: list[str] = []
        self._listed_stamp: Stamp | None = None
        """The folder's stamp when it was listed, if the list is known to be complete."""

    async def open(self) -> None:
        """Starts to listen; raises `Unavailable` if the socket folder is not private."""
        own_socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            own_socket.setblocking(False)
            while not self._bind(own_socket):
                pass
        except BaseException:
            own_socket.close()
            raise
        self._socket = own_socket
        asyncio.get_running_loop().add_reader(own_socket, self._read)

    def _bind(self, own_socket: socket.socket) -> bool:
        """Binds the socket; false if the folder was removed; `Unavailable` if it is not private."""
        with suppress(FileExistsError):
            self._folder.mkdir(private.FOLDER_MODE)
        try:
            problem = private.privacy_problem(self._folder, self._owners)
            if problem is not None:
                raise Unavailable(
                    f"{self._folder} cannot be used for the hint sockets: {problem}; remove it, or"
                    f" move the database to a path below {_MAX_FOLDER_PATH - len('-wake')}"
                    " characters, so that the sockets are beside it",
                    "folder_unsafe",
                )
            self._path.unlink(missing_ok=True)
            own_socket.bind(str(self._path))
        except FileNotFoundError:
            return False
        self._path.chmod(private.FILE_MODE)
        return True

    async def close(self) -> None:
        """Stops listening; removes the socket, the listeners, and the folder if it is empty."""
        if self._socket is not None:
            asyncio.get_running_loop().remove_reader(self._socket)
            self._socket.close()
            self._socket = None
            self._path.unlink(missing_ok=True)
            with suppress(OSError):  # other processes still use it
                self._folder.rmdir()
        if self._sender is not None:
            self._sender.close()
            self._sender = None
        await self._local.close()

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Calls `listener` with each received topic; returns a function that unsubscribes it."""
        return self._local.subscribe(listener)

    def notify(self, topics: Iterable[str]) -> None:
        """Calls this process's listeners and sends the topics to the others; never fails."""
        topic_list = list(topics)
        self._local.notify(topic_list)
        try:
            self._refresh_sockets()
        except OSError:  # no folder: no process listens
            return
        if self._other_sockets:
            message = "\n".join(topic_list).encode()[:_MAX_MESSAGE_BYTES]
            for path in self._other_sockets:
                self._send(path, message)

    def _refresh_sockets(self) -> None:
        """Lists the sockets again if the folder has changed; raises `OSError` if there is none."""
        now = folder_stamp(str(self._folder), self._clock)
        if now is None or now != self._listed_stamp:
            self._other_sockets = self._list_sockets()
            self._listed_stamp = now

    def _list_sockets(self) -> list[str]:
        """Returns the paths of the other processes' sockets; none if the folder is not private."""
        if private.privacy_problem(self._folder, self._owners) is not None:
            return []
        own_name = self._path.name
        return [entry.path for entry in os.scandir(self._folder) if entry.name != own_name]

    def _send(self, path: str, message: bytes) -> None:
        """Sends a message to a socket without waiting; removes the socket if it is dead."""
        if self._sender is None:
            self._sender = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            self._sender.setblocking(False)
        try:
            self._sender.sendto(message, path)
        except ConnectionRefusedError:
            Path(path).unlink(missing_ok=True)
        except OSError:
            return  # the socket is full or gone: a hint may be lost

    def _read(self) -> None:
        """Delivers the topics of one received message to this process."""
        assert self._socket is not None
        try:
            message = self._socket.recv(_MAX_MESSAGE_BYTES)
        except BlockingIOError:
            return
        for topic in message.decode(errors="replace").split("\n"):
            self._local.deliver(topic)


def create(context: BrokerContext) -> Wakeups:
    """Creates the broker beside a SQLite file; in this process only for one in memory."""
    path = sqlite_path(context.url)
    if path is None or path == ":memory:":
        return MemoryWakeups()
    return LocalWakeups(path, context.name[-_MAX_SOCKET_NAME:], context.clock)
