"""A standby of a test's PostgreSQL, and servers that are frozen as by a machine that hangs."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.services.postgres import PostgresServer


class Standby(PostgresServer):
    """A server that follows another by streaming replication, until it is promoted."""

    def __init__(self, primary: PostgresServer) -> None:
        super().__init__(fast=True)
        self._primary = primary
        self._password = primary._password

    def _initialise(self) -> None:
        if self._copies:
            super()._initialise()  # copies the programs, too
            self._remove_data()
        source = f"host={self._primary._folder} port={self._primary._port} user=tenuto"
        command = ["pg_basebackup", "-D", str(self._data), "-d", source, "-R", "-c", "fast"]
        self._process = self._launch([*command, "--no-sync"])
        code = self._process.wait()
        self._forget_process()
        if code != 0:
            raise RuntimeError(f"pg_basebackup failed; its output ends with:\n{self._log_end()}")

    def _remove_data(self) -> None:
        for path in sorted(self._data.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
        self._data.rmdir()

    def promote(self) -> None:
        """Return when the server is a primary."""
        self._execute("select pg_promote()")


@contextmanager
def frozen(server: PostgresServer) -> Iterator[None]:
    """All processes of the server stopped: its sockets are open, and nobody answers."""
    stopped: list[int] = []
    try:
        # The first process last to thaw and first to stop, so that it starts no more.
        for pid in [server.pid, *_children(server.pid)]:
            os.kill(pid, signal.SIGSTOP)
            stopped.append(pid)
        yield
    finally:
        for pid in reversed(stopped):
            os.kill(pid, signal.SIGCONT)


def _children(parent: int) -> list[int]:
    matches = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[1]) == parent:
            matches.append(int(stat.parent.name))
    return matches
