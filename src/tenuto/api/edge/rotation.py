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
        self._preferred: set[Hashable] = set()

    def waiting(self, holder: Hashable) -> int:
        """How many wait for a turn of the holder."""
        return len(self._waiting.get(holder, ()))

    def waiting_in_all(self) -> int:
        """How many wait for a turn, but for those who are preferred."""
        return sum(len(each) for key, each in self._waiting.items() if key not in self._preferred)

    @asynccontextmanager
    async def turn(self, holder: Hashable, *, preferred: bool = False) -> AsyncIterator[None]:
        """Runs the block when it is the holder's turn; those who are preferred go first."""
        if self._free and holder not in self._inside:
            self._enter(holder)
        else:
            if preferred:
                self._preferred.add(holder)
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
            elif mine in self._waiting.get(holder, ()):
                self._waiting[holder].remove(mine)
                self._forget_if_empty(holder)
            raise

    def _enter(self, holder: Hashable) -> None:
        self._free -= 1
        self._inside.add(holder)

    def _leave(self, holder: Hashable) -> None:
        self._free += 1
        self._inside.discard(holder)
        if holder in self._waiting:
            self._waiting.move_to_end(holder)
        for each in sorted(self._waiting, key=lambda each: each not in self._preferred):
            if not self._free:
                return
            if each not in self._inside:
                self._let_in(each)

    def _let_in(self, holder: Hashable) -> None:
        """Lets in the first of a holder; those behind wait for the holder's next turn."""
        while holder in self._waiting and holder not in self._inside:
            first = self._waiting[holder].popleft()
            self._forget_if_empty(holder)
            if not first.done():  # else it is cancelled, and does not know yet
                self._enter(holder)
                first.set_result(None)

    def _forget_if_empty(self, holder: Hashable) -> None:
        if not self._waiting[holder]:
            del self._waiting[holder]
            self._preferred.discard(holder)
