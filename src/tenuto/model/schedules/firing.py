"""What a schedule does at one look: which of its times starts, waits or is left out. Pure."""

from datetime import UTC, datetime, timedelta

import msgspec

from tenuto.model.schedules.schedule import (
    GRACE,
    ScheduleSpec,
    due,
    following,
    jittered,
    overlap_action,
)

LONG_AGO = datetime(1970, 1, 1, tzinfo=UTC)
MAX_QUEUED = 1_000
"""Times that wait for a start before to end; what comes on top of these is skipped."""


class ScheduleState(msgspec.Struct, frozen=True, kw_only=True):
    """What a decision is made on."""

    last: datetime
    """Up to here every time is handled."""
    queued: tuple[datetime, ...] = ()
    """Times that wait for a start before to end, earliest first."""
    running: int = 0
    """Starts that have not ended."""


class FiringDecision(msgspec.Struct, frozen=True, kw_only=True):
    """What to do now, and how the schedule stands then."""

    start: datetime | None = None
    """The one time that starts: any other would overlap it."""
    cancel: bool = False
    """Whether what runs is to be cancelled first."""
    skipped: tuple[datetime, ...] = ()
    queued: tuple[datetime, ...] = ()
    waiting: tuple[datetime, ...] = ()
    """Which of the queued times are new there."""
    missed: int = 0
    last: datetime
    next: datetime | None
    """When to look again for a time of the schedule; without one, only what is queued is left."""


def initial_cursor(spec: ScheduleSpec, now: datetime) -> datetime:
    """Up to where the times of a schedule that is made now are handled.

    A fixed time means "not before", so one that has passed already still starts.
    """
    return LONG_AGO if spec.kind == "datetime-event" else now


def next_poll_at(spec: ScheduleSpec, last: datetime, roll: float) -> datetime | None:
    """When the first time after `last` starts; `roll` in [0, 1) spreads it over the jitter."""
    times = following(spec, last, 1)
    if not times:
        return None
    late = jittered(spec, times[0], roll)
    # The end of a range is the last moment to start, so nothing may be put off beyond it.
    return late if due(spec, last, late, _grace(spec)).fire else times[0]


def decide_firing(
    spec: ScheduleSpec, standing: ScheduleState, now: datetime, roll: float
) -> FiringDecision:
    """What a schedule asks for now."""
    found = due(spec, standing.last, now, _grace(spec))
    start: datetime | None = None
    cancel = False
    running, line, skipped = standing.running, list(standing.queued), list[datetime]()
    if line and not running:
        start, running = line.pop(0), 1
    before = len(line)
    for time in found.fire:
        action = overlap_action(spec.overlap, running)
        if action == "start":
            start, running = time, 1
        elif action == "cancel_previous":
            skipped += [] if start is None else [start]
            start, cancel = time, standing.running > 0
        elif action == "queue" and len(line) < MAX_QUEUED:
            line.append(time)
        else:
            skipped.append(time)
    return FiringDecision(
        start=start,
        cancel=cancel,
        skipped=tuple(skipped),
        queued=tuple(line),
        waiting=tuple(line[before:]),
        missed=found.missed,
        last=found.last,
        next=next_poll_at(spec, found.last, roll),
    )


def _grace(spec: ScheduleSpec) -> timedelta:
    """What was put off by the jitter is still on time."""
    return GRACE + timedelta(seconds=spec.jitter_s)
