"""What a worker holds. Shared by the worker's loop and its heart, which may be another thread."""

import math
from collections.abc import Callable
from typing import Literal
from uuid import UUID

import msgspec

from tenuto.model.tasks.task import Fence

Reason = Literal["cancel", "pause", "lost", "timeout", "drain"]


def _nobody() -> None:
    """Warns a session that has ended."""


class HeldLease(msgspec.Struct, eq=False):
    """One running attempt: its fence, and why and since when it has to stop."""

    fence: Fence
    stop: Callable[[Reason], None]
    reason: Reason | None = None
    asked_at: float = 0.0
    longest_grace_s: float = math.inf
    """Seconds at most that it has to stop."""
    looks: int = 0
    """How often the heart has found it still running since it was asked to stop."""
    ended: bool = False
    """The session is over; only its outcome is still to be told."""
    warn: Callable[[], None] = _nobody
    """Tells the session, from whatever thread, that it seems to hang."""
    warned: bool = False


class HeldLeases:
    """The attempts a worker runs, by task. Single operations on it are atomic between threads."""

    def __init__(self) -> None:
        self._held: dict[int, tuple[HeldLease, ...]] = {}

    def add(self, held: HeldLease) -> None:
        """Hold an attempt; earlier ones of the same task are lost, though they were ours."""
        task = held.fence.task.int
        before = self._held.get(task, ())
        self._held[task] = (*before, held)
        for each in before:
            each.stop("lost")

    def remove(self, held: HeldLease) -> None:
        task = held.fence.task.int
        mine = self._held.get(task, ())
        if mine == (held,):
            del self._held[task]
        elif mine:
            self._held[task] = tuple(each for each in mine if each is not held)

    def holds(self, held: HeldLease) -> bool:
        return held in self._held.get(held.fence.task.int, ())

    def runs(self, task: UUID) -> bool:
        """Whether any attempt of the task is held."""
        return task.int in self._held

    def all(self) -> list[HeldLease]:
        return [held for attempts in list(self._held.values()) for held in attempts]

    def __len__(self) -> int:
        return len(self._held)
