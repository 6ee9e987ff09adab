"""Runs commands in forks of one process that has imported the program.

A command costs its own work then, not the import of everything below it, which takes longer. Each
is a process of its own with its own arguments, environment, folder and standard files, and runs the
same entry as the installed program. Run as a program this module is the server.
"""

import atexit
import gc
import importlib
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import NamedTuple

import msgspec

_MODULES = """
asyncio asyncpg click httpx2 msgspec rich.console rich.table rich.tree uvicorn uvloop yaml
tenuto.api.app tenuto.api.server tenuto.app tenuto.cli.tasks.create tenuto.cli.connection
tenuto.cli.flows.manifest tenuto.cli.tasks.read tenuto.cli.render tenuto.cli.root
tenuto.cli.system.serve tenuto.cli.tasks.group tenuto.client.remote.engine
tenuto.coordinator.coordinator tenuto.worker.worker
"""
"""What most commands import, by themselves or on first use."""
_MOST_BYTES = 1 << 20


class Command(msgspec.Struct):
    """A command line and what it starts with; its standard files travel beside it."""

    words: list[bytes]
    folder: str
    environment: dict[str, str]


class Forked:
    """A command that was started."""

    def __init__(self, command: Command, files: list[int]) -> None:
        """Starts a command with these standard files."""
        self._link = socket.socket(socket.AF_UNIX)
        self._link.connect(_server())
        socket.send_fds(self._link, [msgspec.msgpack.encode(command)], files)
        self._link.shutdown(socket.SHUT_WR)
        self._told = self._link.makefile("rb")
        self.pid = int(self._told.readline())

    def terminate(self) -> None:
        os.kill(self.pid, signal.SIGTERM)

    def wait(self, timeout_s: float) -> int:
        """The exit code once it ended, negative for a signal; kills it after that time."""
        self._link.settimeout(timeout_s)
        with self._link, self._told:
            try:
                return int(self._told.readline())
            except TimeoutError:
                os.kill(self.pid, signal.SIGKILL)
                raise


class Ended(NamedTuple):
    """What a command left behind."""

    code: int
    out: bytes
    err: bytes


def run(command: Command, values: bytes, timeout_s: float) -> Ended:
    """Runs a command to its end; raises `TimeoutError` and kills it if that takes longer."""
    out, out_end = os.pipe()
    err, err_end = os.pipe()
    try:
        with tempfile.TemporaryFile() as source:
            source.write(values)
            source.seek(0)
            forked = Forked(command, [source.fileno(), out_end, err_end])
    finally:
        os.close(out_end)
        os.close(err_end)
    output = _read([out, err], timeout_s)
    return Ended(forked.wait(timeout_s), output[out], output[err])


def _read(ends: list[int], timeout_s: float) -> dict[int, bytes]:
    """All that is written to some pipes, until nothing comes for so long; closes them."""
    result = dict.fromkeys(ends, b"")
    with selectors.DefaultSelector() as selector:
        try:
            for end in ends:
                selector.register(end, selectors.EVENT_READ)
            while selector.get_map() and (ready := selector.select(timeout_s)):
                for key, _ in ready:
                    if part := os.read(key.fd, 65536):
                        result[key.fd] += part
                    else:
                        selector.unregister(key.fd)
        finally:
            for end in ends:
                os.close(end)
    return result


@cache
def _server() -> str:
    """The address of this process's server, which ends with it."""
    folder = tempfile.mkdtemp(prefix="tenuto-forks-")
    address = f"{folder}/socket"
    # Its standard input ends when this process does, however that ends.
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.cli.fork_server", address],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=Path(__file__).resolve().parents[2],
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"

    def end() -> None:
        process.communicate()
        Path(folder).rmdir()

    atexit.register(end)
    return address


def _serve(address: str) -> Command:
    """Forks for each command, and returns it in the fork; ends when standard input does."""
    for name in _MODULES.split():
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    links: dict[int, tuple[int, socket.socket]] = {}
    with socket.socket(socket.AF_UNIX) as listening, selectors.DefaultSelector() as selector:
        listening.bind(address)
        listening.listen(16)
        os.write(1, b"ready\n")
        selector.register(0, selectors.EVENT_READ)
        selector.register(listening, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fd == 0:
                    Path(address).unlink()
                    raise SystemExit(0)
                if key.fd != listening.fileno():
                    selector.unregister(key.fd)
                    _report_exit(key.fd, *links.pop(key.fd))
                    continue
                link, _ = listening.accept()
                command, files = _received(link)
                if (child := os.fork()) == 0:
                    os.setsid()
                    for number, file in enumerate(files):
                        os.dup2(file, number)
                    return command
                for file in files:
                    os.close(file)
                link.sendall(b"%d\n" % child)
                ended = os.pidfd_open(child)
                links[ended] = (child, link)
                selector.register(ended, selectors.EVENT_READ)


def _received(link: socket.socket) -> tuple[Command, list[int]]:
    result, files, _, _ = socket.recv_fds(link, _MOST_BYTES, 3)
    while part := link.recv(_MOST_BYTES):
        result += part
    return msgspec.msgpack.decode(result, type=Command), files


def _report_exit(ended: int, child: int, link: socket.socket) -> None:
    os.close(ended)
    _, status = os.waitpid(child, 0)
    with link:
        link.sendall(b"%d\n" % os.waitstatus_to_exitcode(status))


def _become(command: Command) -> None:
    """Gives this process what the command starts with; its standard files it has."""
    os.closerange(3, 256)
    sys.argv = [os.fsdecode(word) for word in command.words]
    os.chdir(command.folder)
    os.environ.clear()
    os.environ.update(command.environment)
    for name, number, mode in (("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w")):
        setattr(sys, name, os.fdopen(number, mode, closefd=False))


if __name__ == "__main__":
    _become(_serve(sys.argv[1]))
    from tenuto.cli.main import main

    sys.exit(main())
