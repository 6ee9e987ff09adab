"""`python -m tests.proof.sim [--flows] --seed N [--verbose]`: play one seed again, or many."""

import argparse
import sys
import time
from collections import Counter

from tests.proof.sim.flow_story import simulate_flow
from tests.proof.sim.plan import HAPPENS
from tests.proof.sim.world import simulate


def main() -> int:
    """The exit code: 0 when no invariant was broken."""
    parser = argparse.ArgumentParser(prog="python -m tests.proof.sim", description=__doc__)
    parser.add_argument("--seed", type=int, help="play this one")
    parser.add_argument("--seeds", default="0-100", help="play these: first-last")
    parser.add_argument("--flows", action="store_true", help="play the story about flows")
    parser.add_argument("--verbose", action="store_true", help="print the trace")
    asked = parser.parse_args()
    first, _, last = asked.seeds.partition("-")
    seeds = [asked.seed] if asked.seed is not None else range(int(first), int(last or first) + 1)
    happened: Counter[str] = Counter()
    failed = 0
    began = time.perf_counter()
    for seed in seeds:
        result = simulate_flow(seed) if asked.flows else simulate(seed)
        happened += result.happened
        if asked.verbose:
            for at, caller, subject in result.trace:
                sys.stdout.write(f"{at:9.3f}  {caller:<16} {subject}\n")
        for invariant, subject in result.broken:
            sys.stdout.write(f"seed {seed}: {invariant}: {subject}\n")
        failed += bool(result.broken)
    spent = time.perf_counter() - began
    mean_ms = spent / len(seeds) * 1000
    sys.stdout.write(f"{len(seeds)} seeds, {failed} failed, {mean_ms:.1f} ms each\n")
    for subject in HAPPENS:
        sys.stdout.write(f"  {happened[subject]:>7}  {subject}\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
