"""Events by name: what the trail's rows are called, which names people may use, who is meant.

A name has parts with dots between them. What happens to tasks, flows, groups, schedules and agents
has the names below; everything else is free for events that people publish.
"""

import re
from collections.abc import Sequence

from tenuto.model.errors import Invalid

PUBLISHED = "event"
"""The kind of an event that somebody published; its message is its name."""
MAX_DATA = 64 * 1024
MAX_DEPTH = 10
"""How far triggers may follow from each other: an event, its flow, that flow's events, ..."""
MAX_CAUSED = 1_000
"""Flows that may follow from one event of the world outside, near and far."""

_NAME = re.compile(r"[A-Za-z0-9._-]{1,100}")
_PATTERN = re.compile(r"[A-Za-z0-9._-]{1,100}\*?|\*")
_OURS = ("task.", "flow.", "group.", "schedule.", "trigger.", "agent.")
_ENDS = {
    "flow_completed": ("all.finished", "all.succeeded"),
    "flow_failed": ("all.finished", "any.failed"),
    "flow_cancelled": ("all.finished",),
}
"""What the end of a flow says of all its tasks."""
_RESERVED = frozenset(name for names in _ENDS.values() for name in names)
_SOURCE = re.compile(r"trigger:[0-9a-f-]{36}:([0-9]{1,9})")


def names_of(
    kind: str, previous: str | None = None, new: str | None = None, message: str | None = None
) -> tuple[str, ...]:
    """The names of a row of the trail, the one that it is known by first.

    What triggers do has none: a trigger that fails at everything would follow from itself.
    """
    if kind == PUBLISHED:
        return () if message is None else (message,)
    if new is not None:
        if previous == new:
            return (f"task.{kind}",)
        names = (f"task.{new.lower()}", "task.status_changed")
        return ("task.submitted", *names) if previous is None else names
    subject, _, what = kind.partition("_")
    if subject not in ("flow", "group", "schedule", "agent") or not what:
        return ()
    return (f"{subject}.{what}", *_ENDS.get(kind, ()))


def matching_name(pattern: str, names: Sequence[str]) -> str | None:
    """The first of the names that a trigger's pattern means, if any."""
    if pattern.endswith("*"):
        return next((name for name in names if name.startswith(pattern[:-1])), None)
    return pattern if pattern in names else None


def check_name(name: str) -> None:
    """Raise `Invalid` unless somebody may publish an event of that name."""
    if not _NAME.fullmatch(name):
        raise Invalid("an event's name has 1 to 100 letters, digits, '.', '_' or '-'", field="name")
    if name.startswith(_OURS) or name in _RESERVED:
        raise Invalid(f"{name!r} is the name of something that happens by itself", field="name")


def check_pattern(pattern: str) -> None:
    """Raise `Invalid` unless events may be meant by the pattern."""
    if not _PATTERN.fullmatch(pattern):
        raise Invalid(
            "event is a name of 1 to 100 letters, digits, '.', '_' or '-', or its beginning and *",
            field="event",
        )


def source_of(trigger: str, depth: int) -> str:
    """What a flow says of the trigger that started it, the how-manieth in a row."""
    return f"trigger:{trigger}:{depth}"


def depth_of(source: str | None) -> int:
    """How many triggers in a row led to a flow with that source; 0 when none did."""
    found = _SOURCE.fullmatch(source or "")
    return 0 if found is None else int(found[1])
