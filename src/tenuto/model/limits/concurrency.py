"""Concurrency keys: of the tasks with one key only so many have a place at once. Pure."""

from collections.abc import Iterable, Sequence
from typing import Literal
from uuid import UUID

import msgspec

from tenuto.model import bounds
from tenuto.model.tasks.task import Status, TaskChange

HOLD = "concurrency"
"""What a task waits for that has no place yet."""
MOST = 1_000
"""Places that a key may have."""

Policy = Literal["queue", "cancel_old", "cancel_new"]


class Concurrency(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """With whom a task shares its places, how many there are, and what to do when all are taken."""

    key: str
    limit: int = 1
    policy: Policy = "queue"


def check(wish: Concurrency) -> None:
    """Raise `Invalid` unless the key can be stored and the limit is one."""
    bounds.text("concurrency.key", wish.key, bounds.MAX_NAME, empty=False)
    bounds.number("concurrency.limit", wish.limit, 1, MOST)


def needs_permit(change: TaskChange) -> bool:
    """Whether a task asks for a place from now on: nothing else is in its way."""
    task, event = change.task, change.event
    waits = task.status is Status.WAITING and task.hold == HOLD and task.unmet == 0
    return waits and (event.previous is not Status.WAITING or event.kind == "unblocked")


def steps_aside(change: TaskChange) -> bool:
    """Whether a task that stood in line is passed by from now on: those behind it may have more."""
    task, event = change.task, change.event
    stood = event.previous is Status.WAITING and task.hold == HOLD
    return stood and (task.status is Status.PAUSED or event.kind == "blocked")


def grant_order(line: Iterable[tuple[UUID, int]], held: int) -> list[UUID]:
    """Those of the line, each with its own limit, that get a place now: in order, none passed."""
    lucky = []
    for task, most in line:
        if held >= most:
            break
        lucky.append(task)
        held += 1
    return lucky


def tasks_to_cancel(before: Sequence[UUID], limit: int) -> list[UUID]:
    """Those of the older ones, oldest first, that a new one with that limit takes the place of."""
    return list(before[: max(len(before) - limit + 1, 0)])
