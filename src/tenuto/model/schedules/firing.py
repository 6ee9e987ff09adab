"""Decides which due times of a schedule start, queue or are skipped. Pure."""

from datetime import UTC, datetime, timedelta

import msgspec

from tenuto.model.schedules.schedule import (
    GRACE,
    ScheduleSpec,
    add_jitter,
    due_times,
    next_times,
    overlap_action,
)

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
MAX_QUEUED = 1_000
"""Due times that may wait for a running start to finish; further ones are skipped."""


class ScheduleState(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a schedule that a decision reads."""

    last: datetime
    """All times up to this one are handled."""
    queued: tuple[datetime, ...] = ()
    """Due times that wait for a running start to finish, earliest first."""
    running: int = 0
    """Number of starts that have not finished."""


class FiringDecision(msgspec.Struct, frozen=True, kw_only=True):
    """What a schedule does now, and its state afterwards."""

    start: datetime | None = None
    """The time that starts. At most one starts: another one would overlap it."""
    cancel: bool = False
    """True if the running start must be cancelled first."""
    skipped: tuple[datetime, ...] = ()
    queued: tuple[datetime, ...] = ()
    waiting: tuple[datetime, ...] = ()
    """The queued times that this decision added."""
    missed: int = 0
    last: datetime
    next: datetime | None
    """When to poll the schedule again; `None` if only queued times remain."""


def initial_cursor(spec: ScheduleSpec, now: datetime) -> datetime:
    """Returns the time up to which a schedule created now counts as handled.

    A fixed time means "not before", so a fixed time that has already passed still starts.
    """
    return EPOCH if spec.kind == "datetime-event" else now


def next_poll_at(spec: ScheduleSpec, last: datetime, roll: float) -> datetime | None:
    """Returns when the first time after `last` starts, with jitter; `None` if no time is left.

    `roll` in [0, 1) spreads the start over the jitter.
    """
    times = next_times(spec, last, 1)
    if not times:
        return None
    jittered = add_jitter(spec, times[0], roll)
    # The end of a range is the last moment to start, so the jitter must not postpone beyond it.
    return jittered if due_times(spec, last, jittered, _grace_period(spec)).fire else times[0]


def decide_firing(
    spec: ScheduleSpec, state: ScheduleState, now: datetime, roll: float
) -> FiringDecision:
    """Returns which times start, queue or are skipped now, and the schedule's new state."""
    due = due_times(spec, state.last, now, _grace_period(spec))
    start: datetime | None = None
    cancel = False
    running, queue, skipped = state.running, list(state.queued), list[datetime]()
    if queue and not running:
        start, running = queue.pop(0), 1
    queued_before = len(queue)
    for time in due.fire:
        action = overlap_action(spec.overlap, running)
        if action == "start":
            start, running = time, 1
        elif action == "cancel_previous":
            skipped += [] if start is None else [start]
            start, cancel = time, state.running > 0
        elif action == "queue" and len(queue) < MAX_QUEUED:
            queue.append(time)
        else:
            skipped.append(time)
    return FiringDecision(
        start=start,
        cancel=cancel,
        skipped=tuple(skipped),
        queued=tuple(queue),
        waiting=tuple(queue[queued_before:]),
        missed=due.missed,
        last=due.last,
        next=next_poll_at(spec, due.last, roll),
    )


def _grace_period(spec: ScheduleSpec) -> timedelta:
    """Returns the grace period, in which a start counts as on time: longer by the jitter."""
    return GRACE + timedelta(seconds=spec.jitter_s)
