"""Whether names have come to a folder, or gone from it, without looking at what is in it."""

import os

from tenuto.clock import Clock

Stamp = tuple[int, int]
_TICK_NS = 100_000_000
"""A folder may change twice within a tick of its time of change; this is longer than any."""


def folder_stamp(path: str, clock: Clock) -> Stamp | None:
    """What is equal as long as a folder holds the same names; `None` while it has just changed.

    One question to the system, and none about the files: whoever asks for the times of a file makes
    the next write to it, and its sync, slower. `OSError` if there is no such folder.
    """
    found = os.stat(path)  # noqa: PTH116  at every transaction: the plain call
    settled = clock.now().timestamp() * 1e9 - found.st_mtime_ns > _TICK_NS
    return (found.st_ino, found.st_mtime_ns) if settled else None
