"""Small worlds with faults, each of which has to come out right.

`make proof AREA=simulation` plays thousands.
"""

import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import msgspec
import pytest
from tests.proof.sim.plan import HAPPENS, Moment, Plan, make_harsh_plan, make_plan
from tests.proof.sim.store import database
from tests.proof.sim.world import Result, simulate

ROOT = Path(__file__).resolve().parents[2]
REGRESSIONS = Path(__file__).parent / "sim" / "regressions.txt"
CHUNKS, SIZE = 2, 50


def regressions() -> list[int]:
    """The seeds that found a fault once."""
    lines = (line.partition("#")[0].strip() for line in REGRESSIONS.read_text().splitlines())
    return [int(line) for line in lines if line]


def complaint(result: Result) -> str:
    """Returns the failure, and how to repeat it."""
    matches = "\n".join(f"  {invariant}: {subject}" for invariant, subject in result.broken[:20])
    again = f"python -m tests.proof.sim --seed {result.seed} --verbose"
    return f"seed {result.seed} broke\n{matches}\nagain: {again}\n"


def play(seed: int) -> Counter[str]:
    """Play one seed; what happened to it."""
    result = simulate(seed)
    assert not result.broken, complaint(result)
    assert not result.missed(), f"seed {seed}: planned and never happened: {result.missed()}"
    return result.happened


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_every_task_finishes_once_under_faults(chunk: int) -> None:
    happened: Counter[str] = Counter()
    for seed in range(chunk * SIZE, (chunk + 1) * SIZE):
        happened += play(seed)
    sys.stdout.write("".join(f"{happened[item]:>7}  {item}\n" for item in HAPPENS))
    assert [item for item in HAPPENS if not happened[item]] == []


def play_harsh(seed: int) -> None:
    """Play one seed whose attempts often outlive their leases."""
    result = simulate(seed, make_harsh_plan(seed))
    assert not result.broken, complaint(result)
    assert not result.missed()


def test_attempts_that_outlive_their_leases_change_nothing() -> None:
    for seed in range(25):
        play_harsh(seed)


@pytest.mark.parametrize("seed", regressions())
def test_former_failing_seeds_pass(seed: int) -> None:
    play(seed)


@pytest.mark.parametrize("seed", [7, 11, 13])
def test_same_seed_gives_the_same_run(seed: int) -> None:
    first = simulate(seed)
    simulate(seed + 1)
    assert simulate(seed).digest() == first.digest()


def test_run_does_not_depend_on_the_interpreter() -> None:
    """Sets of text are in another order in every Python process; nothing may follow from that."""
    code = "from tests.proof.sim.world import simulate; print(simulate(3).digest())"
    result = os.pathsep.join(sys.path)
    runs = {
        subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": result},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for hash_seed in ("1", "2")
    }
    assert runs == {simulate(3).digest()}


def calm(seed: int, *moments: Moment) -> Plan:
    """The seed's plan without any fault but these."""
    return msgspec.structs.replace(
        make_plan(seed),
        refused=0.0,
        lost=0.0,
        late=0.0,
        slow=0.0,
        hint_drop=0.0,
        hint_double=0.0,
        hints_off=False,
        dead_sink=False,
        sink_fails=0.0,
        moments=moments,
    )


def test_run_without_faults_loses_no_attempt() -> None:
    for seed in range(10):
        result = simulate(seed, calm(seed))
        assert not result.broken, complaint(result)
        if not result.happened["worker ended itself"]:
            assert lost() == []


def test_suspension_of_the_world_runs_no_task_again() -> None:
    """A closed lid, a stopped virtual machine: every owner is still there when it goes on."""
    for seed in range(20):
        rng = random.Random(f"lid {seed}")
        plan = calm(seed, Moment(rng.uniform(2, 8), "close lid", rng.uniform(20, 600), 1))
        led = msgspec.structs.replace(plan.settings, leader=True)
        slow = msgspec.structs.replace(plan, latency=0.3, controls=0, coordinators=1, settings=led)
        result = simulate(seed, slow)
        assert not result.broken, complaint(result)
        if not result.happened["worker ended itself"]:
            assert lost() == [], f"seed {seed}"


def lost() -> list[tuple[str, int]]:
    """The attempts of the last run that were taken to be gone."""
    result = database().rows("select task, attempt from attempt where outcome = 'STALLED'")
    return [(task, attempt) for task, attempt in result]
