"""A fair queue: holders are served in rotation, so that one with many waiters delays no other."""

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager


class FairQueue:
    """Admits at most `max_active` at once, at most one per holder.

    The next one admitted is of the holder that has waited longest since its last turn.
    """

    def __init__(self, max_active: int) -> None:
        self._free = max_active
        self._active: set[Hashable] = set()
        # Holders in the order of their next turn, each with its waiters.
        self._waiting: OrderedDict[Hashable, deque[asyncio.Future[None]]] = OrderedDict()
        self._preferred: set[Hashable] = set()

    def waiting_count(self, holder: Hashable) -> int:
        """Returns how many waiters the holder has."""
        return len(self._waiting.get(holder, ()))

    def total_waiting(self) -> int:
        """Returns how many waiters there are, not counting preferred holders."""
        return sum(
            len(waiters)
            for holder, waiters in self._waiting.items()
            if holder not in self._preferred
        )

    @asynccontextmanager
    async def acquire(self, holder: Hashable, *, preferred: bool = False) -> AsyncIterator[None]:
        """Waits for the holder's turn, then runs the block; preferred holders go first."""
        if self._free and holder not in self._active:
            self._occupy(holder)
        else:
            if preferred:
                self._preferred.add(holder)
            await self._wait(holder)
        try:
            yield
        finally:
            self._release(holder)

    async def _wait(self, holder: Hashable) -> None:
        """Waits until `_release` admits this caller."""
        own_turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(holder, deque()).append(own_turn)
        try:
            await own_turn
        except asyncio.CancelledError:
            if own_turn.done() and not own_turn.cancelled():
                self._release(holder)  # it was admitted at the same moment
            elif own_turn in self._waiting.get(holder, ()):
                self._waiting[holder].remove(own_turn)
                self._drop_if_empty(holder)
            raise

    def _occupy(self, holder: Hashable) -> None:
        """Makes the holder active. The caller has checked that a place is free."""
        self._free -= 1
        self._active.add(holder)

    def _release(self, holder: Hashable) -> None:
        """Frees the holder's place and admits waiting callers, one per holder in rotation."""
        self._free += 1
        self._active.discard(holder)
        if holder in self._waiting:
            self._waiting.move_to_end(holder)
        for candidate in sorted(
            self._waiting, key=lambda candidate: candidate not in self._preferred
        ):
            if not self._free:
                return
            if candidate not in self._active:
                self._admit_next(candidate)

    def _admit_next(self, holder: Hashable) -> None:
        """Admits the holder's first waiter, skipping cancelled ones, unless it is active."""
        while holder in self._waiting and holder not in self._active:
            first = self._waiting[holder].popleft()
            self._drop_if_empty(holder)
            if not first.done():  # otherwise it was cancelled and will notice later
                self._occupy(holder)
                first.set_result(None)

    def _drop_if_empty(self, holder: Hashable) -> None:
        """Removes the holder's queue and preference if no caller waits in it."""
        if not self._waiting[holder]:
            del self._waiting[holder]
            self._preferred.discard(holder)
