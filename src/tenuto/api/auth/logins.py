"""Limits login tries. Wrong passwords slow down only the user and address that sent them."""

from collections import OrderedDict
from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager
from typing import Generic, TypeVar

import msgspec

from tenuto.api.edge.forwarded import address_key
from tenuto.api.edge.rotation import FairQueue
from tenuto.clock import Clock
from tenuto.model.errors import TooMany

MAX_ENTRIES = 10_000
"""Maximum entries of each kind; the one set longest ago is dropped."""
FREE_TRIES = 5
"""Failed tries in a row of one user from one address before tries have to wait."""
WAIT_S = 5.0
"""Seconds between tries after `FREE_TRIES` failures."""
BURST = 60
"""Size of the token bucket of an address, or of a user known there, in tries."""
REFILL_PER_S = 1.0
MAX_CONCURRENT_CHECKS = 2
"""Passwords verified at the same time; each takes a CPU core and 64 MB for a moment."""
RETRY_S = 5.0
MAX_WAITING_PER_HOLDER = 5
"""Tries of one address, or of one user known there, that may wait for verification."""
MAX_WAITING = 60
"""Tries that may wait in total, not counting users known at their addresses."""
MAX_NAME_LENGTH = 200

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class LoginSource(msgspec.Struct, frozen=True):
    """User name and client address of a login try."""

    address: str
    name: str
    workspace: str = ""
    """As sent by the client: name, id or empty."""


class _BoundedDict(OrderedDict[K, V], Generic[K, V]):
    """A dictionary of at most `MAX_ENTRIES` entries; drops the one set longest ago."""

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        if len(self) > MAX_ENTRIES:
            self.popitem(last=False)


class _TryCount(msgspec.Struct):
    """Number and time of tries for one name from one address."""

    count: int
    last: float


class _Bucket(msgspec.Struct):
    """A token bucket: its level, and when that was computed, in monotonic seconds."""

    level: float
    at: float


class LoginThrottle:
    """Decides whether a login try is allowed now. Counts wrong passwords per address and name.

    The workspace is not part of that key, because it can be given in several ways: by name, by id
    or not at all. A user who logged in before from the address, with the same workspace text, has
    an own bucket: wrong passwords from other addresses, or for other users at the address, cannot
    lock that user out.
    """

    def __init__(self) -> None:
        self._tries: _BoundedDict[tuple[str, str], _TryCount] = _BoundedDict()
        self._known: _BoundedDict[LoginSource, bool] = _BoundedDict()
        self._buckets: _BoundedDict[str | LoginSource, _Bucket] = _BoundedDict()

    def count_try(self, source: LoginSource, now: float) -> None:
        """Counts a try; raises `TooMany` if it must wait. `now` is monotonic, in seconds."""
        if source in self._known:
            self._use_bucket(source, now)
            return
        key = (source.address, source.name)
        tries = self._tries.get(key) or _TryCount(0, now)
        wait = tries.last + WAIT_S - now
        if tries.count >= FREE_TRIES and wait > 0:
            raise TooMany("too many wrong passwords; wait before the next try", retry_after=wait)
        self._use_bucket(source.address, now)
        # Counted before the password is verified, so that concurrent tries count, too.
        self._tries[key] = _TryCount(tries.count + 1, now)

    def is_known(self, source: LoginSource) -> bool:
        """True if the user has logged in from the address before."""
        return source in self._known

    def record_success(self, source: LoginSource) -> None:
        """Marks the user as known at the address, and subtracts this try from the count.

        Earlier tries still count: they may have been for a user of the same name in another
        workspace.
        """
        tries = self._tries.get((source.address, source.name))
        if tries is not None and source not in self._known:
            tries.count -= 1
        self._known[source] = True

    def _use_bucket(self, key: str | LoginSource, now: float) -> None:
        """Takes one login from the bucket; raises `TooMany` if it is empty."""
        bucket = self._buckets.get(key) or _Bucket(BURST, now)
        level = min(BURST, bucket.level + (now - bucket.at) * REFILL_PER_S)
        if level < 1:
            raise TooMany(
                "too many logins from this address", retry_after=(1 - level) / REFILL_PER_S
            )
        self._buckets[key] = _Bucket(level - 1, now)


class LoginLimiter:
    """Admits login tries: few at the same time, and none that the throttle refuses."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._throttle = LoginThrottle()
        self._queue = FairQueue(MAX_CONCURRENT_CHECKS)

    @asynccontextmanager
    async def admit(
        self, address: str, name: str, workspace: str | None = None
    ) -> AsyncIterator[None]:
        """Runs the block in turn, or raises `TooMany`; a block without exception is a success.

        The block verifies the password and raises `Unauthenticated` if it is wrong. After a
        success, the user is known at the address.
        """
        workspace_name = (workspace or "")[:MAX_NAME_LENGTH]
        source = LoginSource(address_key(address), name[:MAX_NAME_LENGTH], workspace_name)
        is_known = self._throttle.is_known(source)
        holder = source if is_known else source.address
        self._check_queue(holder, is_known=is_known)
        self._throttle.count_try(source, self._clock.elapsed())
        async with self._queue.acquire(holder, preferred=is_known):
            yield
        self._throttle.record_success(source)

    def _check_queue(self, holder: Hashable, *, is_known: bool) -> None:
        """Raises `TooMany` if too many tries wait already: the queue must be bounded.

        Addresses are served in rotation, so that a flood from one address delays a try from
        another one by one verification at a time.
        """
        if self._queue.waiting_count(holder) >= MAX_WAITING_PER_HOLDER:
            raise TooMany(
                "too many logins from this address at once; try again later", retry_after=1.0
            )
        if not is_known and self._queue.total_waiting() >= MAX_WAITING:
            raise TooMany("too many logins are waiting; try again later", retry_after=RETRY_S)
