"""Detects removed and replaced files by a stamp of their folder, without listing the folder."""

import os
from pathlib import Path

from tenuto.clock import Clock

Stamp = tuple[int, int]
_TICK_NS = 100_000_000
"""A folder may change twice within one tick of its modification time; this is longer than any."""


def folder_stamp(path: str, clock: Clock) -> Stamp | None:
    """Returns a stamp that changes with the names in a folder, or `None` just after it did.

    Makes one system call, and none on the files: reading the times of a file makes the next write
    to the file, and its sync, slower. Raises `OSError` if there is no such folder.
    """
    status = os.stat(path)  # noqa: PTH116  at every transaction: the plain call
    is_settled = clock.now().timestamp() * 1e9 - status.st_mtime_ns > _TICK_NS
    return (status.st_ino, status.st_mtime_ns) if is_settled else None


class WatchedFiles:
    """Detects that one of some files, as they were found first, was removed or replaced."""

    def __init__(self, *paths: str, clock: Clock) -> None:
        self._seen: dict[str, tuple[int, int] | None] = dict.fromkeys(paths)
        self._folders = {str(Path(path).parent) for path in paths}
        self._clock = clock
        self._checked_stamps: list[Stamp | None] = [None]
        """Stamps of their folders at the last check that found the files unchanged."""

    def are_unchanged(self) -> bool:
        """True if none of the files was removed or replaced since it was first seen."""
        try:
            stamps = [folder_stamp(folder, self._clock) for folder in self._folders]
        except OSError:
            stamps = [None]
        if stamps == self._checked_stamps and None not in stamps:
            return True
        unchanged = self._compare_files()
        self._checked_stamps = stamps if unchanged else [None]
        return unchanged

    def _compare_files(self) -> bool:
        """True if all files are those seen first; a new file is recorded."""
        for path, before in self._seen.items():
            try:
                stat = Path(path).stat()
            except FileNotFoundError:
                if before is not None:
                    return False
                continue
            now = (stat.st_dev, stat.st_ino)
            if before is None:
                self._seen[path] = now
            elif before != now:
                return False
        return True
