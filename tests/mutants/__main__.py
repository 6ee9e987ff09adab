"""`make mutants [AREA=name]`: plants each fault in a copy of the tree, and runs the tests for it.

Prints the rate by area and what no test noticed; the exit code is 1 if that was anything without a
reason. `--only NAME` plants one fault; `--tests REVISION` runs the tests of an earlier commit, to
show what tests that were added since are worth.
"""

import argparse
import os
import queue
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from tests.mutants.copy import check_tests, is_noticed, make_copy
from tests.mutants.faults import Fault, areas


class Planted(NamedTuple):
    """A fault, and what became of it."""

    area: str
    name: str
    fault: Fault
    result: str
    """noticed, survived, or why its tests could not be run."""


def plant_all(
    chosen: Iterable[tuple[str, str, Fault]], jobs: int, tests: str | None
) -> list[Planted]:
    """Plants the faults, as many at a time as there are copies."""
    with tempfile.TemporaryDirectory(prefix="tenuto-mutants-") as position:
        copies: queue.Queue[Path] = queue.Queue()
        passed: set[tuple[str, ...]] = set()
        for number in range(jobs):
            make_copy(folder := Path(position) / str(number), tests)
            copies.put(folder)

        def plant(one: tuple[str, str, Fault]) -> Planted:
            area, name, fault = one
            folder = copies.get()
            began = time.monotonic()
            try:
                if (key := (*fault.tests, fault.only)) not in passed:
                    check_tests(folder, fault, earlier=tests is not None)
                    passed.add(key)
                result = "noticed" if is_noticed(folder, fault) else "survived"
            except (RuntimeError, ValueError, OSError) as error:
                result = str(error) or "error"
            finally:
                copies.put(folder)
            reported, _, _ = result.partition("\n")
            took = time.monotonic() - began
            sys.stdout.write(f"{area:14} {name:44} {reported:9} {took:6.1f} s\n")
            sys.stdout.flush()
            return Planted(area, name, fault, result)

        with ThreadPoolExecutor(jobs) as pool:
            return list(pool.map(plant, chosen))


def report(done: list[Planted]) -> int:
    """Prints the rates; returns the exit code."""
    for area in dict.fromkeys(item.area for item in done):
        own = [item for item in done if item.area == area]
        noticed = sum(item.result == "noticed" for item in own)
        sys.stdout.write(f"{area:14} {noticed:4} of {len(own)} noticed\n")
    noticed = sum(item.result == "noticed" for item in done)
    rate = noticed / len(done) * 100 if done else 0.0
    sys.stdout.write(f"{'all':14} {noticed:4} of {len(done)} noticed: {rate:.0f} %\n")
    left = [item for item in done if item.result != "noticed"]
    for item in left:
        reason = item.fault.survives or item.result
        sys.stdout.write(f"not noticed: {item.area}.{item.name}: {reason}\n")
    return 1 if any(item.result != "survived" or not item.fault.survives for item in left) else 0


def main() -> int:
    existing = areas()
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("areas", nargs="*", help=f"some of: {', '.join(existing)}")
    parser.add_argument("--only", metavar="NAME", help="plant this fault alone")
    parser.add_argument("--tests", metavar="REVISION", help="run the tests of this commit")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="copies of the tree")
    values = parser.parse_args()
    if unknown := set(values.areas) - existing.keys():
        parser.error(f"no such area: {', '.join(sorted(unknown))}; known: {', '.join(existing)}")
    chosen = [
        (area, name, fault)
        for area in values.areas or existing
        for name, fault in existing[area].items()
        if values.only in (None, name)
    ]
    return report(plant_all(chosen, min(values.jobs, max(len(chosen), 1)), values.tests))


if __name__ == "__main__":
    sys.exit(main())
