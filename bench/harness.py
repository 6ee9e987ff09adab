"""The command line of every adapter: `measure` prints a JSON line per figure, `work` runs a worker.

compare.py starts `python -m bench.peers.<module> measure ...`; that process is the producer, and
starts `python -m bench.peers.<module> work ...` for each worker.
"""

import argparse
import asyncio
import json
import math
import signal
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from bench.measure import Bench, Plan, Result
from bench.peer import Mode, NotMeasurableError, Peer
from bench.worker_group import wait_for_start
from bench.workload import Journal

#: In the order of measuring; `idle_latency` also measures the memory of an idle worker.
MEASURES = (
    "submit_one",
    "submit_bulk",
    "drain_1",
    "drain_2",
    "idle_latency",
    "recovery",
    "help",
)


def main(peers: Mapping[str, type[Peer]]) -> None:
    """Measures one of the peers of an adapter, or runs a worker of it."""
    arguments = _build_parser(peers).parse_args()
    options = dict(pair.split("=", 1) for pair in arguments.option)
    try:
        peer = peers[arguments.peer](arguments.target, options)
    except (NotMeasurableError, ImportError) as error:
        _print_json({"peer": arguments.peer, "not_measured": str(error)})
        raise SystemExit(0 if arguments.role == "measure" else 1) from None
    if arguments.role == "work":
        journal = Journal(arguments.journal)
        wait_for_start()
        peer.run_worker(Mode(arguments.mode), journal)
    else:
        run_async(_run_measures(peer, arguments))


def run_async(coroutine: object) -> None:
    """Runs a coroutine, on uvloop if it is installed."""
    assert asyncio.iscoroutine(coroutine)
    try:
        import uvloop
    except ImportError:
        asyncio.run(coroutine)
    else:
        uvloop.run(coroutine)


async def _run_measures(peer: Peer, arguments: argparse.Namespace) -> None:
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    description = {"peer": arguments.peer, "notes": peer.notes, "options": peer.options}
    _print_json({**description, "share": peer.share, "measures": sorted(peer.measures)})
    bench = Bench(peer, _build_plan(peer, arguments))
    await peer.connect()
    for measure in arguments.measures.split(","):
        if measure in peer.measures:
            _print_json({"peer": arguments.peer, **asdict(await bench.wait_for_calm_disk())})
            await _report_measure(bench, measure, arguments.peer)
    await peer.close()


async def _report_measure(bench: Bench, measure: str, peer: str) -> None:
    """Prints the figures of a measure, or its error: the other measures still run."""
    try:
        async for result in bench.run(measure):
            _print_json({"peer": peer, **asdict(result)})
    except Exception as error:  # noqa: BLE001
        text = f"{type(error).__name__}: {error}"
        _print_json({"peer": peer, **asdict(Result(measure, None, "", text))})


def _build_plan(peer: Peer, arguments: argparse.Namespace) -> Plan:
    module = sys.modules["__main__"].__spec__
    assert module is not None
    command = [sys.executable, "-m", module.name, "work", arguments.peer]
    command += ["--target", peer.target]
    for pair in arguments.option:
        command += ["--option", pair]
    return Plan(
        tasks=arguments.tasks,
        submits=arguments.submits,
        probes=arguments.probes,
        recovery_limit_s=arguments.recovery_limit,
        calm_us=arguments.calm_us,
        scratch=arguments.scratch,
        worker_command=command,
    )


def _build_parser(peers: Mapping[str, type[Peer]]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("role", choices=("measure", "work"))
    parser.add_argument("peer", choices=sorted(peers))
    parser.add_argument("--target", required=True, help="URL of a database, or a file")
    parser.add_argument("--option", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--measures", default=",".join(MEASURES))
    parser.add_argument("--tasks", type=int, default=20_000)
    parser.add_argument("--submits", type=int, default=2_000)
    parser.add_argument("--probes", type=int, default=200)
    parser.add_argument("--recovery-limit", type=float, default=120.0)
    parser.add_argument("--calm-us", type=float, default=math.inf)
    parser.add_argument("--scratch", type=Path, default=Path())
    parser.add_argument("--mode", choices=[mode.value for mode in Mode])
    parser.add_argument("--journal", type=Path)
    return parser


def _print_json(line: Mapping[str, object]) -> None:
    print(json.dumps(line), flush=True)
