"""The command line of every adapter: `measure` prints one JSON line a figure, `work` is a worker.

compare.py starts `python -m bench.peers.<module> measure ...`; that process is the producer, and
starts `python -m bench.peers.<module> work ...` for each worker it needs.
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

from bench.crew import wait_at_the_gate
from bench.measure import Bench, Plan, Result
from bench.peer import Mode, NotMeasurableError, Peer
from bench.workload import Journal

#: In this order; the memory of an idle worker comes with `idle_latency`.
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
    """Measures, or works for, one of the peers this module adapts."""
    arguments = _parser(peers).parse_args()
    options = dict(pair.split("=", 1) for pair in arguments.option)
    try:
        peer = peers[arguments.peer](arguments.target, options)
    except (NotMeasurableError, ImportError) as error:
        _print({"peer": arguments.peer, "not_measured": str(error)})
        raise SystemExit(0 if arguments.role == "measure" else 1) from None
    if arguments.role == "work":
        journal = Journal(arguments.journal)
        wait_at_the_gate()
        peer.work(Mode(arguments.mode), journal)
    else:
        run_async(_measure(peer, arguments))


def run_async(main_coroutine: object) -> None:
    """Runs a coroutine on uvloop where it is installed."""
    assert asyncio.iscoroutine(main_coroutine)
    try:
        import uvloop
    except ImportError:
        asyncio.run(main_coroutine)
    else:
        uvloop.run(main_coroutine)


async def _measure(peer: Peer, arguments: argparse.Namespace) -> None:
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    about = {"peer": arguments.peer, "notes": peer.notes, "options": peer.options}
    _print({**about, "share": peer.share, "measures": sorted(peer.measures)})
    bench = Bench(peer, _plan(peer, arguments))
    await peer.connect()
    for measure in arguments.measures.split(","):
        if measure in peer.measures:
            _print({"peer": arguments.peer, **asdict(await bench.calm_disk())})
            await _report(bench, measure, arguments.peer)
    await peer.close()


async def _report(bench: Bench, measure: str, peer: str) -> None:
    """Prints a measure's figures, or why there are none: one failure must not hide the others."""
    try:
        async for result in bench.run(measure):
            _print({"peer": peer, **asdict(result)})
    except Exception as error:  # noqa: BLE001
        text = f"{type(error).__name__}: {error}"
        _print({"peer": peer, **asdict(Result(measure, None, "", text))})


def _plan(peer: Peer, arguments: argparse.Namespace) -> Plan:
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


def _parser(peers: Mapping[str, type[Peer]]) -> argparse.ArgumentParser:
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


def _print(line: Mapping[str, object]) -> None:
    print(json.dumps(line), flush=True)
