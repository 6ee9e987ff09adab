"""Who may try to log in: wrong passwords slow down whoever gives them, and nobody else."""

from collections import OrderedDict
from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager
from typing import Generic, TypeVar

import msgspec

from tenuto.api.edge.forwarded import place_of
from tenuto.api.edge.rotation import Turns
from tenuto.clock import Clock
from tenuto.model.errors import TooMany

KEPT = 10_000
"""Entries of each kind that are remembered; the one used longest ago is forgotten."""
FREE_TRIES = 5
"""Failures in a row of one user from one address before its tries have to wait."""
WAIT_S = 5.0
AT_ONCE = 60
PER_S = 1.0
VERIFIED_AT_ONCE = 2
"""Passwords that are verified at the same time: each takes a core and 64 MB for a moment."""
RETRY_S = 5.0
WAITING_OF_HOLDER = 5
"""Tries of one address, or of one user known there, that may wait to be verified."""
WAITING = 60
"""Tries that may wait in all, but for those of users who are known at their addresses."""
LONGEST_NAME = 200

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Who(msgspec.Struct, frozen=True):
    """Who is to log in, and from where."""

    place: str
    name: str
    workspace: str = ""
    """As it is spelled: by name, by id or not at all."""


class _Recent(OrderedDict[K, V], Generic[K, V]):
    """A dictionary that forgets the entry set longest ago when it has `KEPT`."""

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        if len(self) > KEPT:
            self.popitem(last=False)


class _Tries(msgspec.Struct):
    """Tries for one name from one address."""

    count: int
    last: float


class _Bucket(msgspec.Struct):
    level: float
    at: float


class Tries:
    """Decides whether a try may be made now. Counts wrong passwords by address and name together.

    The workspace does not count there: it can be spelled in several ways. Who has logged in before,
    with this spelling, has a bucket of their own: wrong passwords from elsewhere, or for other
    users at the address, cannot shut them out.
    """

    def __init__(self) -> None:
        self._tries: _Recent[tuple[str, str], _Tries] = _Recent()
        self._known: _Recent[Who, bool] = _Recent()
        self._buckets: _Recent[str | Who, _Bucket] = _Recent()

    def begin(self, who: Who, now: float) -> None:
        """Counts a try; raises `TooMany` when it has to wait."""
        if who in self._known:
            self._take(who, now)
            return
        key = (who.place, who.name)
        tries = self._tries.get(key) or _Tries(0, now)
        wait = tries.last + WAIT_S - now
        if tries.count >= FREE_TRIES and wait > 0:
            raise TooMany("too many wrong passwords; wait", retry_after=wait)
        self._take(who.place, now)
        # Counted before the password is verified: tries that come together count, too.
        self._tries[key] = _Tries(tries.count + 1, now)

    def is_known(self, who: Who) -> bool:
        """Whether the user has logged in from the address before."""
        return who in self._known

    def succeed(self, who: Who) -> None:
        """Notes that the password was right: the user is known there from now on.

        That one does not count, wrong ones before it do: they may have been for somebody of that
        name in another workspace.
        """
        tries = self._tries.get((who.place, who.name))
        if tries is not None and who not in self._known:
            tries.count -= 1
        self._known[who] = True

    def _take(self, key: str | Who, now: float) -> None:
        bucket = self._buckets.get(key) or _Bucket(AT_ONCE, now)
        level = min(AT_ONCE, bucket.level + (now - bucket.at) * PER_S)
        if level < 1:
            raise TooMany("too many logins from this address", retry_after=(1 - level) / PER_S)
        self._buckets[key] = _Bucket(level - 1, now)


class Logins:
    """Lets few logins at once through, and those that may not be made now not at all."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._tries = Tries()
        self._turns = Turns(VERIFIED_AT_ONCE)

    @asynccontextmanager
    async def trying(
        self, address: str, name: str, workspace: str | None = None
    ) -> AsyncIterator[None]:
        """Verify the password in the block, which raises `Unauthenticated` if it is wrong."""
        named = (workspace or "")[:LONGEST_NAME]
        who = Who(place_of(address), name[:LONGEST_NAME], named)
        known = self._tries.is_known(who)
        holder = who if known else who.place
        self._check_room(holder, known=known)
        self._tries.begin(who, self._clock.elapsed())
        async with self._turns.turn(holder, preferred=known):
            yield
        self._tries.succeed(who)

    def _check_room(self, holder: Hashable, *, known: bool) -> None:
        """Raises `TooMany` if others wait already: a queue without an end would hold up everybody.

        Addresses take turns, so a flood from one makes another wait for one try at a time.
        """
        if self._turns.waiting(holder) >= WAITING_OF_HOLDER:
            raise TooMany("too many logins from this address at once; try again", retry_after=1.0)
        if not known and self._turns.waiting_in_all() >= WAITING:
            raise TooMany("too many logins wait; try again", retry_after=RETRY_S)
