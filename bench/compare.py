"""Compares job queues side by side on this machine: python bench/compare.py [--rounds 3] ...

Builds .venv-bench, starts private servers, and alternates the peers within every measure (A B C,
C B A, ...), each in its own process and a new database. bench/measure.py lists the rules.
Absolute figures depend mostly on the machine: compare only the ratios within one run.
`--before REVISION` measures this project twice: in this working tree and at that commit.
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
    """The servers of one comparison; each is started before the first peer that needs it."""

    def __init__(self, folder: Path, pg_binaries: Path | None, stack: contextlib.ExitStack) -> None:
        self._folder = folder
        self._stack = stack
        self._postgres = Postgres(folder, pg_binaries)
        self._redis = Redis(folder)
        self._count = 0

    @contextlib.contextmanager
    def create(self, store: str) -> Iterator[tuple[str, Path]]:
        """Yields the address of an empty store and a scratch folder; removes both afterwards."""
        self._count += 1
        scratch = self._folder / f"run-{self._count}"
        scratch.mkdir()
        try:
            if store == "postgresql":
                yield self._start_postgres().create_database("bench"), scratch
                self._postgres.drop_database("bench")
            elif store == "redis":
                yield str(self._start_redis().socket), scratch
            else:
                yield str(scratch / "bench.db"), scratch
        finally:
            shutil.rmtree(scratch)

    def read_versions(self) -> dict[str, str]:
        """Returns the versions of SQLite and of the running servers."""
        servers = {"postgresql": self._postgres, "redis": self._redis}
        running = {name: server for name, server in servers.items() if server.is_running()}
        versions = {name: server.read_version() for name, server in running.items()}
        return {**versions, "sqlite": sqlite3.sqlite_version}

    def _start_postgres(self) -> Postgres:
        if not self._postgres.is_running():
            self._stack.enter_context(self._postgres)
        return self._postgres

    def _start_redis(self) -> Redis:
        if not self._redis.is_running():
            self._stack.enter_context(self._redis)
        return self._redis


@dataclass(frozen=True)
class Contender:
    """A peer with its report. `sources` has the program to import; None means the installed one."""

    entry: Entry
    report: PeerReport
    sources: Path | None = None


def main() -> None:
    # The exception also stops the servers.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped by SIGTERM"))
    arguments = _build_parser().parse_args()
    names = arguments.peers.split(",")
    unknown = set(names) - set(CATALOG)
    if unknown:
        raise SystemExit(
            f"no such peer: {', '.join(sorted(unknown))}; choose from {', '.join(CATALOG)}"
        )
    contenders = [Contender(CATALOG[name], _create_report(CATALOG[name])) for name in names]
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=arguments.data)))
        folder.chmod(0o755)  # PostgreSQL runs as another user if we are root
        if arguments.before:
            sources = _extract(arguments.before, folder)
            contenders = _add_earlier(contenders, arguments.before, sources)
        reports = [contender.report for contender in contenders]
        stores = Stores(folder, arguments.pg_bin, stack)
        load_before = os.getloadavg()[0]
        try:
            for round_number in range(1, arguments.rounds + 1):
                _log(f"round {round_number}/{arguments.rounds}")
                _run_round(contenders, stores, arguments, round_number)
        except (KeyboardInterrupt, SystemExit):
            _log("interrupted: the tables are incomplete")
        machine = {
            **_describe_machine(folder),
            "servers": stores.read_versions(),
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
    """Writes the sources of a commit below the folder; returns the folder to import from."""
    archive, earlier = folder / "earlier.tar", folder / "earlier"
    git = ["git", "-C", str(ROOT), "archive", "--format=tar", f"--output={archive}"]
    if subprocess.run([*git, revision, "src"], check=False).returncode:
        raise SystemExit(f"no such commit in {ROOT}: {revision}")
    with tarfile.open(archive) as packed:
        packed.extractall(earlier, filter="data")
    archive.unlink()
    return earlier / "src"


def _add_earlier(contenders: list[Contender], revision: str, sources: Path) -> list[Contender]:
    """Adds the program of the commit after the present one, for each store."""
    result = []
    for contender in contenders:
        result.append(contender)
        if contender.entry.name in OURS:
            report = PeerReport(f"{contender.entry.name}@{revision}", contender.entry.store, {})
            result.append(Contender(contender.entry, report, sources))
    return result


def _run_round(
    contenders: list[Contender], stores: Stores, arguments: argparse.Namespace, round_number: int
) -> None:
    """Measures all peers, one measure after the other; every second round in reverse."""
    for measure in _select_measures(arguments, round_number):
        for contender in contenders if round_number % 2 else reversed(contenders):
            if contender.report.applies(measure):
                _measure_peer(contender, measure, stores, arguments, round_number)


def _select_measures(arguments: argparse.Namespace, round_number: int) -> list[str]:
    """Returns the measures of this round.

    Recovery is measured in the first round only: it takes minutes if it fails.
    """
    requested = set(arguments.measures.split(","))
    if arguments.recovery and round_number == 1:
        requested.add("recovery")
    return [measure for measure in MEASURES if measure in requested]


def _measure_peer(
    contender: Contender,
    measure: str,
    stores: Stores,
    arguments: argparse.Namespace,
    round_number: int,
) -> None:
    """Adds one measure of one peer to its report."""
    entry, report = contender.entry, contender.report
    try:
        with stores.create(entry.store) as (target, scratch):
            command = _build_command(entry, measure, target, scratch, arguments)
            status = _collect(contender, command, round_number)
    except NotMeasurableError as error:
        _log(f"  not measured: {error}")
        report.not_measured = str(error)
    else:
        if status:
            text = f"the adapter exited with status {status}"
            report.add({"measure": measure, "value": None, "unit": "", "text": text}, round_number)


def _collect(contender: Contender, command: list[str], round_number: int) -> int:
    """Runs an adapter, adds each line it prints to the report, and returns its exit status."""
    environment = dict(os.environ)
    if contender.sources is not None:  # comes before the installed package
        environment["PYTHONPATH"] = f"{contender.sources}{os.pathsep}{ROOT}"
    name = contender.report.name
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                _log(f"  {name} {line.strip()}")
                contender.report.add(json.loads(line), round_number)
        except BaseException:
            process.terminate()
            raise
    return process.returncode


def _build_command(
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


def _create_report(entry: Entry) -> PeerReport:
    versions = {}
    for package in entry.packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return PeerReport(entry.name, entry.store, versions)


def _describe_machine(folder: Path) -> dict[str, Any]:
    """Returns the facts that decide whether two runs can be compared."""
    kind = _find_file_system(folder)
    if kind == "tmpfs":
        _log(
            "the data folder is in memory, where syncing costs nothing: set another one with --data"
        )
    return {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "file_system": kind,
        "settings": {"postgresql": POSTGRES_SETTINGS, "redis": REDIS_SETTINGS},
    }


def _find_file_system(folder: Path) -> str:
    """Returns the type of the folder's file system; empty if it is unknown."""
    best = ("", "")
    with contextlib.suppress(OSError):
        for line in Path("/proc/mounts").read_text().splitlines():
            _, mount, kind, *_ = line.split()
            if folder.is_relative_to(mount) and len(mount) >= len(best[0]):
                best = (mount, kind)
    return best[1]


def _log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _build_parser() -> argparse.ArgumentParser:
    default_measures = [measure for measure in MEASURES if measure != "recovery"]
    parser = argparse.ArgumentParser(prog="bench/compare.py", description=__doc__)
    parser.add_argument("--peers", default=",".join(CATALOG), help="names, separated by commas")
    parser.add_argument("--tasks", type=int, default=20_000, help="tasks to drain")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="also write all figures to this file"
    )
    parser.add_argument("--recovery", action="store_true", help="also kill workers; takes minutes")
    parser.add_argument("--recovery-limit", type=float, default=120.0, metavar="SECONDS")
    parser.add_argument(
        "--measures", default=",".join(default_measures), help="only these, separated by commas"
    )
    parser.add_argument("--submits", type=int, default=2_000, help="tasks submitted one by one")
    parser.add_argument("--probes", type=int, default=200, help="submits to an idle worker")
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="PEER.NAME=VALUE",
        help="set an option of a peer",
    )
    parser.add_argument(
        "--calm-us",
        type=float,
        default=math.inf,
        metavar="US",
        help="before each measure, wait up to a minute until the disk syncs in less",
    )
    parser.add_argument("--before", metavar="REVISION", help="also measure this commit")
    parser.add_argument("--data", type=Path, help="folder for the temporary folder")
    parser.add_argument("--pg-bin", type=Path, help="folder with PostgreSQL's programs")
    return parser


if __name__ == "__main__":
    main()
