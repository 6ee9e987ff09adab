"""Three PostgreSQL servers under Patroni and etcd, for tests that take machines away.

A machine is Patroni and a PostgreSQL server with a folder of their own. Its processes are found by
their working directory, whoever started them, so that all of them are killed or stopped at once.

The owner is the process that made the `Cluster`. A second small process, the keeper (this file run
as a program), holds the reading end of a pipe from the owner. When the owner closes the pipe or
dies in whatever way, the keeper ends every process and removes folders and network namespaces.
"""

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.services import network, patroni
from tests.services import postgres as single
from tests.services.network import SIZE, Loopback, Namespaces
from tests.services.postgres import ROOT, USER
from tests.waiting import eventually_sync

START_S = 90.0
"""Seconds in which a cluster comes up, or is whole again after a fault."""
ASK_S = 2.0
Member = dict[str, Any]


class Cluster:
    """Three machines, numbered from 0; one leads, one follows it synchronously."""

    def __init__(self, net: Loopback | Namespaces | None = None, etcds: int = 1) -> None:
        self.net = net or Loopback()
        self._etcds = etcds
        self._binaries = single.find_binaries()
        self._account = single.server_account()
        self._packages = patroni.packages(patroni.PACKAGES)
        self.folder = single.make_folder(self._account, in_memory=False, executable=False)
        self._keeper = _start_keeper(self.folder, self.net.token)
        self._password = secrets.token_hex(16)
        self._places = [self._place(n) for n in range(SIZE)]
        self._processes: list[subprocess.Popen[bytes]] = []

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

    def start(self) -> None:
        """Return when all three are healthy and one of them follows synchronously."""
        self.begin()
        self.heal()

    def begin(self) -> None:
        """Start every process, and wait for none."""
        if isinstance(self.net, Namespaces):
            self.net.open()
        program = patroni.etcd(self._packages)
        for n in range(self._etcds):
            self._launch(n, f"etcd{n}", patroni.etcd_words(program, self._places[: self._etcds], n))
        for n in range(SIZE):
            self.rejoin(n)

    def close(self) -> None:
        """End all processes and remove everything they left."""
        _, faults = self._keeper.communicate()
        if self._keeper.returncode != 0:
            raise RuntimeError(f"the cluster's keeper failed: {faults.decode()}")
        for process in self._processes:
            process.wait(ASK_S)

    # What there is

    def address(self, database: str, order: Sequence[int] = range(SIZE)) -> str:
        """The address of a database, for clients: every machine, in that order."""
        positions = [self._places[n] for n in order]
        hosts = ",".join(f"{item.outer}:{item.postgres}" for item in positions)
        whom = f"{USER}:{self._password}"
        return f"postgresql://{whom}@{hosts}/{database}?target_session_attrs=primary"

    def direct(self, machine: int, database: str) -> str:
        """The address of one machine, whatever it is at the moment."""
        position = self._places[machine]
        return (
            f"postgresql://{USER}:{self._password}@{position.outer}:{position.postgres}/{database}"
        )

    def leader(self) -> int:
        """The machine that leads."""
        return eventually_sync(self._leader, START_S, 0.1) - 1

    def new_leader(self, old: int) -> int:
        """Wait until another machine than `old` leads and accepts writes."""

        def other() -> int:
            others = (n for n in range(SIZE) if n != old)
            return next((n + 1 for n in others if self._answers(n, "primary")), 0)

        return eventually_sync(other, START_S, 0.05) - 1

    def members(self) -> list[Member]:
        """Returns the machines' states, as the first machine that responds sees them."""
        for n in range(SIZE):
            with suppress(OSError, ValueError):
                result: list[Member] = json.loads(self._ask(n, "cluster"))["members"]
                return result
        return []

    # What happens to it

    def kill_machine(self, machine: int) -> None:
        """Kill Patroni and PostgreSQL at once, as by a power cut."""
        self.freeze(machine)
        for pid in processes_in(self._home(machine)):
            _send(pid, signal.SIGKILL)

    def kill_postmaster(self, machine: int) -> None:
        """Kill PostgreSQL's first process; Patroni lives and sees it."""
        pid = (self._home(machine) / "data" / "postmaster.pid").read_text().split()[0]
        _send(int(pid), signal.SIGKILL)

    def freeze(self, machine: int) -> None:
        """Stop every process of the machine; the kernel still accepts what is sent to them."""
        while running := [p for p in processes_in(self._home(machine)) if _state(p) not in "TZ"]:
            for pid in running:
                _send(pid, signal.SIGSTOP)

    def thaw(self, machine: int) -> None:
        """Let them go on."""
        for pid in processes_in(self._home(machine)):
            _send(pid, signal.SIGCONT)

    def switchover(self) -> None:
        """Hand leadership to the synchronous standby, as planned maintenance does."""
        members = self.members()
        name = {member["role"]: member["name"] for member in members}
        plan = json.dumps({"leader": name["leader"], "candidate": name["sync_standby"]}).encode()
        position = self._places[int(name["leader"][1:])]
        url = f"http://{position.outer}:{position.rest}/switchover"
        with urllib.request.urlopen(url, plan, timeout=START_S) as answer:
            assert answer.status == 200, answer.read()

    def require_standby(self, *, strict: bool) -> None:
        """Makes commits wait without a standby; otherwise the leader continues alone."""
        change = json.dumps({"synchronous_mode_strict": strict}).encode()
        position = self._places[self.leader()]
        url = f"http://{position.outer}:{position.rest}/config"
        request = urllib.request.Request(url, change, method="PATCH")
        with urllib.request.urlopen(request, timeout=ASK_S) as answer:
            assert answer.status == 200, answer.read()

    def rejoin(self, machine: int) -> None:
        """Start a machine that was killed, or never ran."""
        home = self._home(machine)
        self._make_home(home)
        config = home / "patroni.json"
        config.write_text(
            patroni.patroni_config(
                self._places, machine, self._etcds, home, self._binaries, self._password
            )
        )
        config.chmod(0o600)
        self._give(config)
        self._launch(machine, home.name, patroni.patroni_words(config))

    def heal(self) -> None:
        """Start and continue what is down, and wait until the cluster is whole."""
        for n in range(SIZE):
            self.thaw(n)
            if isinstance(self.net, Namespaces):
                for item in network.NETWORKS:
                    self.net.restore(item, n)
            if not processes_in(self._home(n)):
                self.rejoin(n)
        try:
            eventually_sync(self._whole, START_S, 0.2)
        except AssertionError as error:
            raise RuntimeError(f"{error}: {self.members()}\n{self._logs()}") from None

    def _whole(self) -> bool:
        members = self.members()
        roles = sorted(member["role"] for member in members)
        fine = all(member["state"] in ("running", "streaming") for member in members)
        return fine and roles == ["leader", "replica", "sync_standby"]

    def _leader(self) -> int:
        return next((n + 1 for n in range(SIZE) if self._answers(n, "primary")), 0)

    def _answers(self, machine: int, path: str) -> bool:
        """True if Patroni at this address reports that role."""
        with suppress(OSError):
            self._ask(machine, path)
            return True
        return False

    def _ask(self, machine: int, path: str) -> bytes:
        position = self._places[machine]
        url = f"http://{position.outer}:{position.rest}/{path}"
        with urllib.request.urlopen(url, timeout=ASK_S) as answer:
            body: bytes = answer.read()
        return body

    def _home(self, machine: int) -> Path:
        return self.folder / f"m{machine}"

    def _place(self, n: int) -> patroni.Place:
        ports = tuple(single.free_port() for _ in range(4))
        outer, inner = (self.net.host(item, n) for item in network.NETWORKS)
        return patroni.Place(outer, inner, self.net.listen(), ports)

    def _make_home(self, home: Path) -> None:
        home.mkdir(mode=0o700, exist_ok=True)
        self._give(home)

    def _give(self, path: Path) -> None:
        if self._account is not None:
            os.chown(path, self._account.pw_uid, self._account.pw_gid)

    def _launch(self, machine: int, name: str, words: list[str]) -> None:
        home = self.folder / name
        self._make_home(home)
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                self.net.command(machine, words, self._account),
                cwd=home,
                env=single.environment() | {"PYTHONPATH": str(self._packages)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for pytest, which then ends the cluster
            )
        self._processes.append(process)

    def _logs(self) -> str:
        """The ends of all logs."""
        ends = [
            f"{log.name}:\n" + "\n".join(log.read_text(errors="replace").splitlines()[-12:])
            for log in sorted(self.folder.glob("*.log"))
        ]
        return "\n".join(ends)


def processes_in(folder: Path) -> list[int]:
    """The processes whose working directory is the folder or below it."""
    matches = []
    for process in Path("/proc").iterdir():
        with suppress(OSError):
            if process.name.isdigit() and (process / "cwd").readlink().is_relative_to(folder):
                matches.append(int(process.name))
    return matches


def _state(pid: int) -> str:
    """The letter that /proc has for its state; Z for one that is gone."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return "Z"


def _send(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def _start_keeper(folder: Path, token: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.services.cluster", str(folder), token],
        cwd=ROOT,
        env={"PATH": os.environ.get("PATH", os.defpath), "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def _keep(folder: Path, token: str) -> None:
    """Wait for the owner's end; then end all that runs in the folder, and remove it."""
    sys.stdin.read()
    try:
        _end_all(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        network.remove(token)


def _end_all(folder: Path) -> None:
    """End servers by SIGQUIT, so that they tidy up, after Patroni, which would start them anew."""
    for pid in processes_in(folder):
        _send(pid, signal.SIGQUIT if _is_server(pid) else signal.SIGKILL)
        _send(pid, signal.SIGCONT)
    with suppress(AssertionError):
        eventually_sync(lambda: not processes_in(folder), 10.0, 0.05)

    def gone() -> bool:
        left = processes_in(folder)
        for pid in left:
            _send(pid, signal.SIGKILL)
        return not left

    eventually_sync(gone, 20.0, 0.05)


def _is_server(pid: int) -> bool:
    with suppress(OSError):
        return "postgres" in Path(f"/proc/{pid}/cmdline").read_text().split("\0")[0]
    return False


if __name__ == "__main__":
    _keep(Path(sys.argv[1]), sys.argv[2])
