"""The leases of a worker. Shared by its event loop and its heartbeat, which may be a thread."""

import math
from collections.abc import Callable
from typing import Literal
from uuid import UUID

import msgspec

from tenuto.model.tasks.task import Fence
from tenuto.settings import Settings

StopReason = Literal["cancel", "pause", "lost", "timeout", "drain"]


def _ignore_warning() -> None:
    """Does nothing: the session has ended or accepts no warning."""


def lease_seconds(settings: Settings) -> int:
    """Returns the length of a lease: whole seconds, at least three heartbeats."""
    return max(settings.lease_s, math.ceil(3 * settings.heartbeat_s))


class HeldLease(msgspec.Struct, eq=False):
    """The lease of one running attempt, and why and since when the attempt has to stop."""

    fence: Fence
    stop: Callable[[StopReason], None]
    reason: StopReason | None = None
    stop_requested_at: float = 0.0
    longest_grace_s: float = math.inf
    """Maximum seconds that the attempt has to stop."""
    checks: int = 0
    """Heartbeats at which the attempt was still running after it was asked to stop."""
    ended: bool = False
    """True if the session has ended and only its outcome must still be reported."""
    warn: Callable[[], None] = _ignore_warning
    """Warns the session, from any thread, that it seems to hang."""
    warned: bool = False


class HeldLeases:
    """The leases of a worker, by task. Each single operation is thread-safe."""

    def __init__(self) -> None:
        self._by_task: dict[int, tuple[HeldLease, ...]] = {}

    def add(self, lease: HeldLease) -> None:
        """Adds a lease and stops older attempts at the same task in this worker as lost."""
        task = lease.fence.task.int
        older = self._by_task.get(task, ())
        self._by_task[task] = (*older, lease)
        for older_lease in older:
            older_lease.stop("lost")

    def remove(self, lease: HeldLease) -> None:
        """Removes this attempt's lease; leases of other attempts at the task stay."""
        task = lease.fence.task.int
        attempts = self._by_task.get(task, ())
        if attempts == (lease,):
            del self._by_task[task]
        elif attempts:
            self._by_task[task] = tuple(attempt for attempt in attempts if attempt is not lease)

    def holds(self, lease: HeldLease) -> bool:
        """True if this lease was added and not removed."""
        return lease in self._by_task.get(lease.fence.task.int, ())

    def is_running(self, task: UUID) -> bool:
        """True if an attempt at the task is running here, or its outcome is not reported yet."""
        return task.int in self._by_task

    def all(self) -> list[HeldLease]:
        """Returns all leases, in a new list, also those of ended sessions still to be reported."""
        return [lease for attempts in list(self._by_task.values()) for lease in attempts]

    def __len__(self) -> int:
        """Returns the number of tasks with a lease."""
        return len(self._by_task)
