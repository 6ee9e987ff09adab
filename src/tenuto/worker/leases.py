"""What a worker holds. Shared by the worker's loop and its heart, which may be another thread."""

from collections.abc import Callable
from typing import Literal
from uuid import UUID

import msgspec

from tenuto.model.task import Fence

Reason = Literal["cancel", "pause", "lost", "timeout", "drain"]


class Held(msgspec.Struct, eq=False):
    """One running attempt: its fence, and why and since when it has to stop."""

    fence: Fence
    stop: Callable[[Reason], None]
    reason: Reason | None = None
    asked_at: float = 0.0
    ended: bool = False
    """The session is over; only its outcome is still to be told."""


class Leases:
    """The attempts a worker runs, by task. Single operations on it are atomic between threads."""

    def __init__(self) -> None:
        self._held: dict[UUID, Held] = {}

    def add(self, held: Held) -> None:
        """Hold an attempt; an earlier one of the same task is lost, though it was ours."""
        before = self._held.get(held.fence.task)
        self._held[held.fence.task] = held
        if before is not None:
            before.stop("lost")

    def remove(self, fence: Fence) -> None:
        held = self._held.get(fence.task)
        if held is not None and held.fence.attempt == fence.attempt:
            del self._held[fence.task]

    def get(self, task: UUID) -> Held | None:
        return self._held.get(task)

    def all(self) -> list[Held]:
        return list(self._held.values())

    def __len__(self) -> int:
        return len(self._held)
