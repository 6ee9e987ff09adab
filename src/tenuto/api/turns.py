"""Gives turns to holders in rotation: nobody who wants many makes another wait for all of them."""

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager


class Turns:
    """Lets so many in at once, one of each holder, and the next one of whoever waited longest."""

    def __init__(self, most: int) -> None:
        self._free = most
        self._inside: set[Hashable] = set()
        # Holders in the order of their next turn, each with those that wait for it.
        self._waiting: OrderedDict[Hashable, deque[asyncio.Future[None]]] = OrderedDict()

    @asynccontextmanager
    async def turn(self, holder: Hashable) -> AsyncIterator[None]:
        """Runs the block when it is the holder's turn."""
        if self._free and holder not in self._inside:
            self._enter(holder)
        else:
            await self._wait(holder)
        try:
            yield
        finally:
            self._leave(holder)

    async def _wait(self, holder: Hashable) -> None:
        mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(holder, deque()).append(mine)
        try:
            await mine
        except asyncio.CancelledError:
            if mine.done() and not mine.cancelled():
                self._leave(holder)  # it was let in at the same moment
            raise

    def _enter(self, holder: Hashable) -> None:
        self._free -= 1
        self._inside.add(holder)

    def _leave(self, holder: Hashable) -> None:
        self._free += 1
        self._inside.discard(holder)
        if holder in self._waiting:
            self._waiting.move_to_end(holder)
        for each in list(self._waiting):
            if not self._free:
                return
            if each not in self._inside:
                self._let_in(each)

    def _let_in(self, holder: Hashable) -> None:
        """Lets in the first of a holder who still waits; those behind wait for their next turn."""
        waiting = self._waiting.pop(holder)
        while waiting:
            first = waiting.popleft()
            if not first.done():
                self._enter(holder)
                first.set_result(None)
                break
        if waiting:
            self._waiting[holder] = waiting
