"""Event names: the names of system events, names that users may publish, patterns of triggers.

A name has parts with dots between them. Names of system events begin with `task.`, `flow.`,
`group.`, `schedule.`, `trigger.` or `agent.`, or are listed below. Users may publish events with
any other name.
"""

import re
from collections.abc import Sequence

from tenuto.model.errors import Invalid

PUBLISHED = "event"
"""The kind of a published event; its name is in `message`."""
MAX_DATA = 64 * 1024
MAX_DEPTH = 10
"""Longest chain of triggers: an event starts a flow, whose event starts the next flow, ..."""
MAX_CAUSED_FLOWS = 1_000
"""Flows that one outside event may trigger, directly or through further events."""

_NAME = re.compile(r"[A-Za-z0-9._-]{1,100}")
_PATTERN = re.compile(r"[A-Za-z0-9._-]{1,100}\*?|\*")
_RESERVED_PREFIXES = ("task.", "flow.", "group.", "schedule.", "trigger.", "agent.")
_FLOW_END_NAMES = {
    "flow_completed": ("all.finished", "all.succeeded"),
    "flow_failed": ("all.finished", "any.failed"),
    "flow_cancelled": ("all.finished",),
}
"""Further names of the event that a flow finished, by kind."""
_RESERVED_NAMES = frozenset(name for names in _FLOW_END_NAMES.values() for name in names)
_SOURCE = re.compile(r"trigger:[0-9a-f-]{36}:([0-9]{1,9})")


def event_names(
    kind: str, previous: str | None = None, new: str | None = None, message: str | None = None
) -> tuple[str, ...]:
    """Returns the event names of an audit row, the main name first; none for events of triggers.

    With a name, the events of a trigger that always fails would trigger it again.
    """
    if kind == PUBLISHED:
        return () if message is None else (message,)
    if new is not None:
        if previous == new:
            return (f"task.{kind}",)
        names = (f"task.{new.lower()}", "task.status_changed")
        return ("task.submitted", *names) if previous is None else names
    subject, _, action = kind.partition("_")
    if subject not in ("flow", "group", "schedule", "agent") or not action:
        return ()
    return (f"{subject}.{action}", *_FLOW_END_NAMES.get(kind, ()))


def matching_name(pattern: str, names: Sequence[str]) -> str | None:
    """Returns the first name that matches a trigger's pattern, or `None`."""
    if pattern.endswith("*"):
        return next((name for name in names if name.startswith(pattern[:-1])), None)
    return pattern if pattern in names else None


def check_name(name: str) -> None:
    """Raises `Invalid` unless users may publish events with this name."""
    if not _NAME.fullmatch(name):
        raise Invalid(
            "an event name must have 1 to 100 letters, digits, '.', '_' or '-'", field="name"
        )
    if name.startswith(_RESERVED_PREFIXES) or name in _RESERVED_NAMES:
        raise Invalid(
            f"event name {name!r} is reserved for system events; choose another name"
            f" that does not begin with {', '.join(_RESERVED_PREFIXES)}",
            field="name",
        )


def check_pattern(pattern: str) -> None:
    """Raises `Invalid` unless the pattern is an event name, or the beginning of one and `*`."""
    if not _PATTERN.fullmatch(pattern):
        raise Invalid(
            "event must be a name of 1 to 100 letters, digits, '.', '_' or '-',"
            " or the beginning of a name and *",
            field="event",
        )


def build_source(trigger: str, depth: int) -> str:
    """Returns the `source` of a flow that a trigger started as number `depth` of a chain."""
    return f"trigger:{trigger}:{depth}"


def trigger_depth(source: str | None) -> int:
    """Returns the number of chained triggers that led to a flow with this source, 0 if none."""
    match = _SOURCE.fullmatch(source or "")
    return 0 if match is None else int(match[1])
