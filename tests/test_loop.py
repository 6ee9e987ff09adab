"""Ids of the clock, and the loop of periodic work."""

import asyncio

from tests.contract.conftest import ManualClock

from tenuto.clock import Clock
from tenuto.periodic import run_periodically


def test_ids_follow_the_order_of_their_creation() -> None:
    clock = ManualClock()
    ids = [clock.new_id() for _ in range(100)]
    ids += clock.new_ids(100)
    clock.advance(-1)
    ids += [clock.new_id() for _ in range(100)]
    assert ids == sorted(set(ids))
    assert {item.version for item in ids} == {7}


async def test_poll_requested_during_a_poll_runs_again() -> None:
    stop, poke, looks = asyncio.Event(), asyncio.Event(), list[int]()

    async def look() -> None:
        looks.append(1)
        (poke if len(looks) == 1 else stop).set()

    async with asyncio.timeout(5):
        await run_periodically(look, lambda: 3600.0, stop, Clock(), poke)
    assert len(looks) == 2
    assert not poke.is_set()
