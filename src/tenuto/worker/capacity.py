"""Limits sessions to the number that the machine can start.

Each session needs file descriptors, whose number per process is limited, and memory and processes,
whose limits are unknown until a start fails.
"""

import os
import resource
from collections.abc import Callable

from tenuto.clock import boot_time

_FDS_PER_SESSION = 5
"""Descriptors of one session: its control socket and four pipes."""
_RESERVED_FDS = 48
"""Descriptors for all else: connections to the store, the heartbeat's own, a start in progress."""
_ASSUMED_OPEN_FDS = 64
"""Open descriptors to assume where the system cannot list them."""
_FIRST_PAUSE_S = 1.0
_MAX_PAUSE_S = 60.0


class SessionCapacity:
    """Counts the sessions that can still be started.

    After a start that failed because of the machine, only one session is tried at a time, after
    pauses that grow while starts fail: a machine that can start none must not use up its tasks.
    """

    def __init__(self, now: Callable[[], float] = boot_time) -> None:
        self._now = now
        self._max_sessions: int | None = None
        self._pause_s = 0.0
        self._next_trial_at = 0.0
        self._trial_allowed = False
        """True if a trial start was allowed since the last failed start."""

    @property
    def max_sessions(self) -> int:
        """The number of concurrent sessions that the limit of open files allows; at least one."""
        if self._max_sessions is None:
            limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            free = limit - _count_open_files() - _RESERVED_FDS
            self._max_sessions = (
                2**31 if limit == resource.RLIM_INFINITY else max(1, free // _FDS_PER_SESSION)
            )
        return self._max_sessions

    def free_sessions(self, busy: int) -> int:
        """Returns how many sessions can start beside `busy`: 0 or 1, reserved, after a failure."""
        free = max(0, self.max_sessions - busy)
        if not self._pause_s:
            return free
        now = self._now()
        if now < self._next_trial_at or not free:
            return 0
        self._trial_allowed = True
        self._next_trial_at = now + self._pause_s
        return 1

    def on_start_failed(self) -> None:
        """Pauses starts after the machine refused one; then `free_sessions` allows one trial."""
        if self._pause_s and not self._trial_allowed:
            return  # a session that was started together with the first that failed
        self._trial_allowed = False
        self._pause_s = min(max(_FIRST_PAUSE_S, 2 * self._pause_s), _MAX_PAUSE_S)
        self._next_trial_at = self._now() + self._pause_s

    def release_reservation(self) -> None:
        """Releases a trial for which no task was claimed: the next trial may start at once."""
        if self._trial_allowed:
            self._trial_allowed = False
            self._next_trial_at = self._now()

    def on_started(self) -> None:
        """Records that a session was started, which ends the trials and pauses of failed starts."""
        self._pause_s = 0.0


def _count_open_files() -> int:
    """Returns the number of open descriptors of this process; assumes 64 if it is unknown."""
    try:
        return len(os.listdir("/dev/fd"))  # noqa: PTH208  names alone
    except OSError:
        return _ASSUMED_OPEN_FDS
