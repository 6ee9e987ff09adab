"""The one loop of the program: everything periodic is a bounded `once` called by it."""

import asyncio
from collections.abc import Awaitable, Callable, Generator

from tenuto.clock import Clock


class NextTick:
    """Over when everybody who could speak at this turn of the loop has spoken."""

    def __await__(self) -> Generator[None, None, None]:
        yield


async def run_periodically(
    once: Callable[[], Awaitable[object]],
    pause: Callable[[], float],
    stop: asyncio.Event,
    clock: Clock,
    poke: asyncio.Event | None = None,
) -> None:
    """Call `once` until `stop`, with a pause in between that `poke` cuts short."""
    while not stop.is_set():
        await once()
        await wait_first_event(
            [event for event in (stop, poke) if event is not None], pause(), clock
        )
        if poke is not None:
            poke.clear()


async def wait_first_event(events: list[asyncio.Event], seconds: float, clock: Clock) -> bool:
    """Return when one of the events is set or the time is over; answers whether one is set."""
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
