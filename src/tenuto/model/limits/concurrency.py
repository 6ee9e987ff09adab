"""Concurrency keys: at most `limit` tasks with the same key hold a permit at a time. Pure."""

from collections.abc import Iterable, Sequence
from typing import Literal
from uuid import UUID

import msgspec

from tenuto.model import bounds
from tenuto.model.tasks.task import Status, TaskChange

HOLD = "concurrency"
"""Hold of a task that has no permit yet."""
MAX_LIMIT = 1_000
"""The highest limit of a key."""

Policy = Literal["queue", "cancel_old", "cancel_new"]


class Concurrency(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A task's concurrency key, the number of permits, and the policy if none is free."""

    key: str
    limit: int = 1
    policy: Policy = "queue"


def check(concurrency: Concurrency) -> None:
    """Raises `Invalid` unless the key can be stored and the limit is in range."""
    bounds.check_text("concurrency.key", concurrency.key, bounds.MAX_NAME, empty=False)
    bounds.check_number("concurrency.limit", concurrency.limit, 1, MAX_LIMIT)


def needs_permit(change: TaskChange) -> bool:
    """True if the task needs a permit from this change on: it waits for nothing else."""
    task, event = change.task, change.event
    is_waiting = task.status is Status.WAITING and task.hold == HOLD and task.unmet == 0
    return is_waiting and (event.previous is not Status.WAITING or event.kind == "unblocked")


def leaves_queue(change: TaskChange) -> bool:
    """True if a queued task is skipped from this change on, so that later ones may get a permit."""
    task, event = change.task, change.event
    was_queued = event.previous is Status.WAITING and task.hold == HOLD
    return was_queued and (task.status is Status.PAUSED or event.kind == "blocked")


def grant_order(queue: Iterable[tuple[UUID, int]], active: int) -> list[UUID]:
    """Returns the queued tasks that get a permit now: in queue order, without skipping any.

    `queue` has the id and the limit of each task; `active` is the number of permits held.
    """
    granted = []
    for task, limit in queue:
        if active >= limit:
            break
        granted.append(task)
        active += 1
    return granted


def tasks_to_cancel(older: Sequence[UUID], limit: int) -> list[UUID]:
    """Returns the oldest tasks that a new `cancel_old` task with this limit replaces."""
    return list(older[: max(len(older) - limit + 1, 0)])
