"""The simulation finds what was broken on purpose, and nothing in what was not."""

import sys

import pytest
from tests.proof.planted_sim import PLANTS
from tests.proof.sim.plan import make_harsh_plan, make_plan
from tests.proof.sim.world import simulate

WITHIN = 600
"""Seeds. Most need a handful; which ones find it shifts with every change of the program."""


@pytest.mark.parametrize("name", PLANTS)
def test_planted_simulation_fault_is_detected(name: str) -> None:
    plant = PLANTS[name]
    plan = make_harsh_plan if plant.harsh else make_plan
    seeds = [*range(plant.near, WITHIN), *range(plant.near)]
    with plant.planted():
        result = next(
            (seed for seed in seeds if simulate(seed, plan(seed)).kinds() & plant.seen_by), None
        )
    assert result is not None, f"{name} was not seen by {set(plant.seen_by)}"
    sys.stdout.write(f"{name}: found by {sorted(plant.seen_by)} with seed {result}\n")
    assert simulate(result, plan(result)).broken == [], "the program itself is broken"
