"""The program's only loop function: everything periodic is a bounded `once` that it calls."""

import asyncio
from collections.abc import Awaitable, Callable, Generator

from tenuto.clock import Clock

MAX_BATCHES = 20
"""How often a duty is repeated in a row while it returns full batches."""


class NextTick:
    """Waits one event-loop tick: all callbacks that are ready now run first."""

    def __await__(self) -> Generator[None, None, None]:
        yield


async def run_periodically(
    once: Callable[[], Awaitable[object]],
    delay_s: Callable[[], float],
    stop: asyncio.Event,
    clock: Clock,
    wake: asyncio.Event | None = None,
) -> None:
    """Calls `once` until `stop` or an error; waits `delay_s()` seconds or for `wake` in between."""
    while not stop.is_set():
        await once()
        await wait_first_event(
            [event for event in (stop, wake) if event is not None], delay_s(), clock
        )
        if wake is not None:
            wake.clear()


async def repeat_while_full(
    once: Callable[[], Awaitable[int]], batch_size: int, max_batches: int = MAX_BATCHES
) -> int:
    """Repeats `once` until it returns less than a full batch, or `max_batches`; returns the sum."""
    total = 0
    for _ in range(max_batches):
        done = await once()
        total += done
        if done < batch_size:
            break
    return total


async def wait_first_event(events: list[asyncio.Event], seconds: float, clock: Clock) -> bool:
    """Waits until one of the events is set or the time is over; returns True if one is set."""
    if any(event.is_set() for event in events):
        return True
    loop = asyncio.get_running_loop()
    waits: list[asyncio.Task[object]] = [loop.create_task(event.wait()) for event in events]
    waits.append(loop.create_task(clock.sleep(seconds)))
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
    return any(event.is_set() for event in events)
