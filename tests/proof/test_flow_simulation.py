"""The story about flows under many seeds, each of which has to come out right.

`make proof AREA=simulation` plays hundreds, `python -m tests.proof.sim --flows --seeds 0-999` as
many as it is told.
"""

from collections import Counter

from tests.proof.sim.flow_story import make_twist, simulate_flow
from tests.proof.sim.store import database
from tests.proof.test_simulation import complaint

SEEDS = 30


def play(seed: int) -> str:
    """Play one seed; how its flow ended."""
    result = simulate_flow(seed)
    assert not result.broken, complaint(result).replace("sim ", "sim --flows ")
    assert not result.missed(), f"seed {seed}: planned and never happened: {result.missed()}"
    return str(database().rows("select status from flow")[0][0])


def test_flow_takes_every_step_once_under_faults() -> None:
    seen: Counter[str] = Counter()
    for seed in range(SEEDS):
        twist, status = make_twist(seed), play(seed)
        seen[status] += 1
        seen[f"{status} {'one' if twist.go else 'other'} way"] += 1
        seen["meddled"] += bool(twist.pauses)
        seen["in parts"] += twist.bound < 100
    for subject in ("COMPLETED one way", "COMPLETED other way", "FAILED", "meddled", "in parts"):
        assert seen[subject], f"{subject} never happened: {seen}"


def test_same_seed_gives_the_same_flow_run() -> None:
    first = simulate_flow(3)
    simulate_flow(4)
    assert simulate_flow(3).digest() == first.digest()
