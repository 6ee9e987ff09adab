"""Makes folders and files that only their owner may use, whatever the umask is."""

import os
import stat
from pathlib import Path

FOLDER = 0o700
FILE = 0o600
_OTHERS = 0o077


def make_folder(path: Path) -> None:
    """Make a folder and the parents that are missing; those that exist keep their modes."""
    for missing in reversed([each for each in path.parents if not each.exists()]):
        missing.mkdir(FOLDER, exist_ok=True)
    path.mkdir(FOLDER, exist_ok=True)


def opener(path: str, flags: int) -> int:
    """For `open`: a file that it makes is private."""
    return os.open(path, flags, FILE)


def exposed(path: Path) -> str | None:
    """What others may do to a file or folder: its mode, as `0644`; `None` if nothing."""
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
    except OSError:
        return None
    return f"{mode:04o}" if mode & _OTHERS else None


def fault_of(folder: Path, owners: set[int]) -> str | None:
    """Why a folder is not private to one of these users; `None` if it is."""
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode):
        return "it is a link or a file, not a folder"
    if found.st_uid not in owners:
        return f"it belongs to user {found.st_uid}"
    if found.st_mode & _OTHERS:
        return f"its mode {stat.S_IMODE(found.st_mode):04o} lets others in"
    return None
