"""Long polls: a claim waits for a task while somebody waits for the claim."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from litestar import Request

from tenuto.api.service import AtDesk
from tenuto.engine.claim import Work
from tenuto.loop import wait_any

Take = Callable[[], Awaitable[list[Work]]]


class Poll:
    """One request that waits: `heard` is set by a hint, `left` by the end of its connection."""

    def __init__(self, desk: AtDesk) -> None:
        self._desk = desk
        self.heard = asyncio.Event()
        self.left = asyncio.Event()

    async def until(self, wait_s: float, take: Take) -> list[Work]:
        """What `take` finds, tried with each hint until the time is up or the caller has left."""
        service = self._desk.service
        until = service.clock.elapsed() + wait_s
        while not self.left.is_set():
            self.heard.clear()
            found = await take()
            pause = min(until - service.clock.elapsed(), service.settings.poll_s)
            if found or pause <= 0 or service.stopping.is_set():
                return found
            await wait_any([self.heard, self.left, service.stopping], pause, service.clock)
        return []


@asynccontextmanager
async def polling(desk: AtDesk, request: Request[Any, Any, Any]) -> AsyncIterator[Poll]:
    """A poll that hears of hints and of the end of the connection while the block runs."""
    poll = Poll(desk)

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        poll.left.set()

    watching = asyncio.create_task(watch())
    unsubscribe = desk.engine.subscribe(lambda _topic: poll.heard.set())
    try:
        yield poll
    finally:
        unsubscribe()
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
