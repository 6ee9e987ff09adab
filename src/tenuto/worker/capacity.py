"""How many sessions a machine can start.

Each takes descriptors, of which a process may have only so many, and memory and processes, of which
nobody knows how many there are until a start fails.
"""

import os
import resource
from collections.abc import Callable

from tenuto.clock import boot_time

_EACH = 5
"""Descriptors that a session takes: its control socket and four pipes."""
_RESERVE = 48
"""Descriptors for everything else: connections to the store, the heart's own, a start under way."""
_UNKNOWN = 64
"""Descriptors taken to be open where the system does not say."""
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 60.0


class SessionCapacity:
    """What is left for sessions.

    After a start that failed for the machine's sake only one is tried at a time, after pauses that
    grow as long as it fails: a task is not to be used up by a machine that can start none.
    """

    def __init__(self, now: Callable[[], float] = boot_time) -> None:
        self._now = now
        self._most: int | None = None
        self._pause = 0.0
        self._next = 0.0
        self._tried = False
        """Whether one was let through since the last that failed."""

    @property
    def most(self) -> int:
        """Sessions at once that the limit of open files allows: one, however low it is."""
        if self._most is None:
            limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            free = limit - _open_files() - _RESERVE
            self._most = 2**31 if limit == resource.RLIM_INFINITY else max(1, free // _EACH)
        return self._most

    def left(self, busy: int) -> int:
        """Sessions that may be started now beside so many; who asks is taken to start them."""
        left = max(0, self.most - busy)
        if not self._pause:
            return left
        now = self._now()
        if now < self._next or not left:
            return 0
        self._tried = True
        self._next = now + self._pause
        return 1

    def failed(self) -> None:
        """A session could not be started though nothing is wrong with it."""
        if self._pause and not self._tried:
            return  # of those that were started together with the first that failed
        self._tried = False
        self._pause = min(max(_FIRST_PAUSE_S, 2 * self._pause), _LONGEST_PAUSE_S)
        self._next = self._now() + self._pause

    def release_reservation(self) -> None:
        """Who was let through found nothing to start: the next one may try at once."""
        if self._tried:
            self._tried = False
            self._next = self._now()

    def started(self) -> None:
        """A session was started."""
        self._pause = 0.0


def _open_files() -> int:
    try:
        return len(os.listdir("/dev/fd"))  # noqa: PTH208  names alone
    except OSError:
        return _UNKNOWN
