"""The simulation finds what was broken on purpose, and nothing in what was not."""

import sys

import pytest
from tests.proof.planted_sim import PLANTS
from tests.proof.sim.world import simulate


@pytest.mark.parametrize("name", PLANTS)
def test_a_planted_fault_is_found(name: str) -> None:
    plant = PLANTS[name]
    with plant.planted():
        found = next(
            (seed for seed in range(plant.within) if simulate(seed).kinds() & plant.seen_by), None
        )
    assert found is not None, f"{name} was not seen by {set(plant.seen_by)} in {plant.within} seeds"
    sys.stdout.write(f"{name}: found by {sorted(plant.seen_by)} after {found + 1} seeds\n")
    assert simulate(found).broken == [], "the program itself is broken"
