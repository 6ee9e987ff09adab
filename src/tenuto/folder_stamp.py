"""Detects that names were added to a folder or removed from it, without listing the folder."""

import os

from tenuto.clock import Clock

Stamp = tuple[int, int]
_TICK_NS = 100_000_000
"""A folder may change twice within one tick of its modification time; this is longer than any."""


def folder_stamp(path: str, clock: Clock) -> Stamp | None:
    """Returns a value that is equal while a folder has the same names; `None` just after a change.

    Makes one system call, and none on the files: reading the times of a file makes the next write
    to the file, and its sync, slower. Raises `OSError` if there is no such folder.
    """
    status = os.stat(path)  # noqa: PTH116  at every transaction: the plain call
    is_settled = clock.now().timestamp() * 1e9 - status.st_mtime_ns > _TICK_NS
    return (status.st_ino, status.st_mtime_ns) if is_settled else None
