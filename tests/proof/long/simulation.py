"""Simulation: thousands of small worlds with faults, each of which has to come out right.

`TENUTO_PROOF_SEEDS=20000` plays more of them. Each processor plays a part.
"""

import os
from collections import Counter
from concurrent.futures import ProcessPoolExecutor

import pytest
from tests.proof import test_flow_simulation, test_simulation
from tests.proof.sim.plan import HAPPENS

SEEDS = int(os.environ.get("TENUTO_PROOF_SEEDS", "2000"))
CHUNK = 50
pytestmark = pytest.mark.timeout(0)


def tasks_from(first: int) -> Counter[str]:
    """Plays the seeds of one chunk; counts what happened in them."""
    return sum((test_simulation.play(seed) for seed in range(first, first + CHUNK)), Counter())


def harsh_from(first: int) -> Counter[str]:
    for seed in range(first, first + CHUNK):
        test_simulation.play_harsh(seed)
    return Counter(played=CHUNK)


def flows_from(first: int) -> Counter[str]:
    return Counter(test_flow_simulation.play(seed) for seed in range(first, first + CHUNK))


def test_every_task_finishes_once_under_faults() -> None:
    with ProcessPoolExecutor() as pool:
        happened = sum(pool.map(tasks_from, range(0, SEEDS, CHUNK)), Counter[str]())
    print("".join(f"\n{happened[item]:>9}  {item}" for item in HAPPENS))
    assert [item for item in HAPPENS if not happened[item]] == []


def test_attempts_that_outlive_their_leases_change_nothing() -> None:
    with ProcessPoolExecutor() as pool:
        played = sum(pool.map(harsh_from, range(0, SEEDS // 10, CHUNK)), Counter[str]())
    assert played.total() >= SEEDS // 10


def test_flow_takes_every_step_once_under_faults() -> None:
    with ProcessPoolExecutor() as pool:
        ended = sum(pool.map(flows_from, range(0, SEEDS // 4, CHUNK)), Counter[str]())
    print(f"\n{dict(ended)}")
    assert ended.total() >= SEEDS // 4
