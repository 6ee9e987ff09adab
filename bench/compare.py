"""Compares job queues side by side on this machine: python bench/compare.py [--rounds 3] ...

Builds .venv-bench, starts private servers, and lets the peers take turns at every measure (A B C,
C B A, ...), each in a process and a fresh database of its own. The rules: bench/measure.py.
Absolute figures say more about the machine than about the peers; look at the ratios of one run.
`--before REVISION` measures this project twice: as it is here, and as it was at that commit.
"""

import argparse
import contextlib
import importlib.metadata
import json
import math
import os
import platform
import shutil
import signal
import sqlite3
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__" and __package__ in {None, ""}:
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    from bench.bootstrap import run_in_environment

    run_in_environment("bench.compare", sys.argv[1:])

from bench.bootstrap import ROOT
from bench.catalog import CATALOG, OURS, Entry
from bench.harness import MEASURES
from bench.peer import NotMeasurableError
from bench.report import PeerReport, to_json, to_text
from bench.servers import POSTGRES_SETTINGS, REDIS_SETTINGS, Postgres, Redis


class Stores:
    """The servers of one comparison; each is started when a peer first asks for it."""

    def __init__(self, folder: Path, pg_binaries: Path | None, stack: contextlib.ExitStack) -> None:
        self._folder = folder
        self._stack = stack
        self._postgres = Postgres(folder, pg_binaries)
        self._redis = Redis(folder)
        self._count = 0

    @contextlib.contextmanager
    def fresh(self, store: str) -> Iterator[tuple[str, Path]]:
        """An empty store's address and a scratch folder; both are gone afterwards."""
        self._count += 1
        scratch = self._folder / f"run-{self._count}"
        scratch.mkdir()
        try:
            if store == "postgresql":
                yield self._postgres_started().fresh_database("bench"), scratch
                self._postgres.drop_database("bench")
            elif store == "redis":
                yield str(self._redis_started().socket), scratch
            else:
                yield str(scratch / "bench.db"), scratch
        finally:
            shutil.rmtree(scratch)

    def versions(self) -> dict[str, str]:
        """What the running servers say about themselves."""
        servers = {"postgresql": self._postgres, "redis": self._redis}
        found = {name: server.version() for name, server in servers.items() if server.running()}
        return {**found, "sqlite": sqlite3.sqlite_version}

    def _postgres_started(self) -> Postgres:
        if not self._postgres.running():
            self._stack.enter_context(self._postgres)
        return self._postgres

    def _redis_started(self) -> Redis:
        if not self._redis.running():
            self._stack.enter_context(self._redis)
        return self._redis


@dataclass(frozen=True)
class Contender:
    """A peer with its figures. `sources` holds its program; None means the one installed."""

    entry: Entry
    report: PeerReport
    sources: Path | None = None


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # servers end, too
    arguments = _parser().parse_args()
    names = arguments.peers.split(",")
    unknown = set(names) - set(CATALOG)
    if unknown:
        raise SystemExit(f"no such peer: {', '.join(sorted(unknown))}; known: {', '.join(CATALOG)}")
    contenders = [Contender(CATALOG[name], _empty_report(CATALOG[name])) for name in names]
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=arguments.data)))
        folder.chmod(0o755)  # PostgreSQL runs as another user when we are root
        if arguments.before:
            sources = _extract(arguments.before, folder)
            contenders = _with_earlier(contenders, arguments.before, sources)
        reports = [each.report for each in contenders]
        stores = Stores(folder, arguments.pg_bin, stack)
        load_before = os.getloadavg()[0]
        try:
            for number in range(1, arguments.rounds + 1):
                _say(f"round {number}/{arguments.rounds}")
                _round(contenders, stores, arguments, number)
        except (KeyboardInterrupt, SystemExit):
            _say("interrupted: what follows is incomplete")
        machine = {
            **_machine(folder),
            "servers": stores.versions(),
            "rounds": arguments.rounds,
            "tasks": arguments.tasks,
            "load_before": load_before,
        }
    print(to_text(reports, machine))
    if arguments.json:
        document = json.dumps(to_json(reports, machine), indent=2)
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(document + "\n")


def _extract(revision: str, folder: Path) -> Path:
    """Write the sources of a commit below the folder; returns the folder to import from."""
    archive, earlier = folder / "earlier.tar", folder / "earlier"
    git = ["git", "-C", str(ROOT), "archive", "--format=tar", f"--output={archive}"]
    if subprocess.run([*git, revision, "src"], check=False).returncode:
        raise SystemExit(f"no such commit in {ROOT}: {revision}")
    with tarfile.open(archive) as packed:
        packed.extractall(earlier, filter="data")
    archive.unlink()
    return earlier / "src"


def _with_earlier(contenders: list[Contender], revision: str, sources: Path) -> list[Contender]:
    """Put the program of the commit behind the present one, for each store."""
    every = []
    for each in contenders:
        every.append(each)
        if each.entry.name in OURS:
            report = PeerReport(f"{each.entry.name}@{revision}", each.entry.store, {})
            every.append(Contender(each.entry, report, sources))
    return every


def _round(
    contenders: list[Contender], stores: Stores, arguments: argparse.Namespace, number: int
) -> None:
    """Lets everybody take each measure, one after the other; every second round in reverse."""
    for measure in _measures(arguments, number):
        for each in contenders if number % 2 else reversed(contenders):
            if each.report.applies(measure):
                _measure(each, measure, stores, arguments, number)


def _measures(arguments: argparse.Namespace, number: int) -> list[str]:
    """The measures of this round; recovery takes minutes where it fails, so it is done once."""
    wanted = set(arguments.measures.split(","))
    if arguments.recovery and number == 1:
        wanted.add("recovery")
    return [measure for measure in MEASURES if measure in wanted]


def _measure(
    contender: Contender, measure: str, stores: Stores, arguments: argparse.Namespace, number: int
) -> None:
    """Adds one measure of one peer to its report."""
    entry, report = contender.entry, contender.report
    try:
        with stores.fresh(entry.store) as (target, scratch):
            command = _command(entry, measure, target, scratch, arguments)
            status = _collect(contender, command, number)
    except NotMeasurableError as error:
        _say(f"  not measured: {error}")
        report.not_measured = str(error)
    else:
        if status:
            text = f"the adapter ended with {status}"
            report.add({"measure": measure, "value": None, "unit": "", "text": text}, number)


def _collect(contender: Contender, command: list[str], number: int) -> int:
    """Runs an adapter, adds each line it prints to the report, and returns its exit status."""
    environment = dict(os.environ)
    if contender.sources is not None:  # found before what is installed
        environment["PYTHONPATH"] = f"{contender.sources}{os.pathsep}{ROOT}"
    name = contender.report.name
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                _say(f"  {name} {line.strip()}")
                contender.report.add(json.loads(line), number)
        except BaseException:
            process.terminate()
            raise
    return process.returncode


def _command(
    entry: Entry, measure: str, target: str, scratch: Path, arguments: argparse.Namespace
) -> list[str]:
    command = [sys.executable, "-m", entry.module, "measure", entry.name, "--target", target]
    command += ["--scratch", str(scratch), "--measures", measure]
    command += ["--tasks", str(arguments.tasks), "--submits", str(arguments.submits)]
    command += ["--probes", str(arguments.probes)]
    command += ["--recovery-limit", str(arguments.recovery_limit)]
    command += ["--calm-us", str(arguments.calm_us)]
    for option in arguments.option:
        peer, _, pair = option.partition(".")
        if peer == entry.name:
            command += ["--option", pair]
    return command


def _empty_report(entry: Entry) -> PeerReport:
    versions = {}
    for package in entry.packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return PeerReport(entry.name, entry.store, versions)


def _machine(folder: Path) -> dict[str, Any]:
    """What a reader needs to judge whether two runs can be compared at all."""
    kind = _file_system(folder)
    if kind == "tmpfs":
        _say("the data folder is in memory, where syncing costs nothing: choose one with --data")
    return {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "file_system": kind,
        "settings": {"postgresql": POSTGRES_SETTINGS, "redis": REDIS_SETTINGS},
    }


def _file_system(folder: Path) -> str:
    """The kind of file system that holds the folder; empty where that cannot be told."""
    best = ("", "")
    with contextlib.suppress(OSError):
        for line in Path("/proc/mounts").read_text().splitlines():
            _, mount, kind, *_ = line.split()
            if folder.is_relative_to(mount) and len(mount) >= len(best[0]):
                best = (mount, kind)
    return best[1]


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    everyday = [measure for measure in MEASURES if measure != "recovery"]
    parser = argparse.ArgumentParser(prog="bench/compare.py", description=__doc__)
    parser.add_argument("--peers", default=",".join(CATALOG), help="names, with commas between")
    parser.add_argument("--tasks", type=int, default=20_000, help="tasks to drain")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there as well")
    parser.add_argument("--recovery", action="store_true", help="kill workers, too; takes minutes")
    parser.add_argument("--recovery-limit", type=float, default=120.0, metavar="SECONDS")
    parser.add_argument("--measures", default=",".join(everyday), help="some of them only")
    parser.add_argument("--submits", type=int, default=2_000, help="tasks submitted one by one")
    parser.add_argument("--probes", type=int, default=200, help="submits to an idle worker")
    parser.add_argument(
        "--option", action="append", default=[], metavar="PEER.NAME=VALUE", help="try a setting"
    )
    parser.add_argument(
        "--calm-us",
        type=float,
        default=math.inf,
        metavar="US",
        help="before each measure wait, up to a minute, for a disk that syncs in less",
    )
    parser.add_argument("--before", metavar="REVISION", help="a commit to measure, too")
    parser.add_argument("--data", type=Path, help="where the temporary folder is made")
    parser.add_argument("--pg-bin", type=Path, help="folder with PostgreSQL's programs")
    return parser


if __name__ == "__main__":
    main()
