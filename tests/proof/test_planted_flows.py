"""The checks of flows find what was broken in them on purpose."""

import asyncio
import sys
from contextlib import AsyncExitStack
from unittest.mock import patch

import msgspec
import pytest
from tests.contract.conftest import ManualClock, Raw, claim_all, opened
from tests.contract.flows.helpers import group, start, task
from tests.proof.planted_flows import PLANTS
from tests.proof.sim.flow_story import simulate_flow

from tenuto.engine.engine import Engine
from tenuto.model.flows.plan import Spec
from tenuto.store import sql
from tenuto.store.dialects import POSTGRES

WITHIN = 60
"""Seeds. Most need one or two."""
CHILDREN = 12
RACES = 20
JOINED = "select count(*) from event where kind = 'group_completed'"


@pytest.mark.parametrize("name", PLANTS)
def test_planted_flow_fault_is_detected(name: str) -> None:
    plant = PLANTS[name]
    with plant.planted():
        result = next(
            (seed for seed in range(WITHIN) if simulate_flow(seed).kinds() & plant.seen_by), None
        )
    assert result is not None, f"{name} was not seen by {set(plant.seen_by)}"
    sys.stdout.write(f"{name}: found by {sorted(plant.seen_by)} after {result + 1} seeds\n")
    assert simulate_flow(result).broken == [], "the program itself is broken"


async def races(url: str, seeds: range) -> int:
    """Let children of a group end at once in three processes; the races until a join went wrong."""
    keys = [f"c{number}" for number in range(CHILDREN)]
    specs: list[Spec] = [group("g", *keys, order="parallel"), *(task(key) for key in keys)]
    async with AsyncExitStack() as stack:
        engines = [
            Engine(await stack.enter_async_context(opened(url, ManualClock(seed))))
            for seed in seeds
        ]
        before = await Raw(url).value(JOINED)
        for race in range(RACES):
            await start(engines[0], "g", *specs)
            claimed = await claim_all(engines[0])
            await asyncio.gather(
                *(engines[n % 3].complete(work.fence) for n, work in enumerate(claimed))
            )
            if await Raw(url).value(JOINED) != before + race + 1:
                return race
    return RACES


async def test_join_without_its_lock_is_detected(postgres_url: str) -> None:
    """Only a database with several writers can show this fault."""
    assert await races(postgres_url, range(3)) == RACES
    queries = sql.load(POSTGRES)
    before = queries["groups_locked"]
    steps = tuple(
        msgspec.structs.replace(step, text=step.text.replace("for update", ""))
        for step in before.steps
    )
    assert steps != before.steps
    bare = msgspec.structs.replace(before, steps=steps)
    with patch.dict(queries, {"groups_locked": bare}):
        assert await races(postgres_url, range(3, 6)) < RACES
