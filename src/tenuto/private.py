"""Creates folders and files that only their owner can access, whatever the umask is."""

import os
import stat
from pathlib import Path

FOLDER_MODE = 0o700
FILE_MODE = 0o600
_OTHERS_MODE_BITS = 0o077


def make_folder(path: Path) -> None:
    """Creates a private folder and its missing parents; existing folders keep their modes."""
    for missing in reversed([parent for parent in path.parents if not parent.exists()]):
        missing.mkdir(FOLDER_MODE, exist_ok=True)
    path.mkdir(FOLDER_MODE, exist_ok=True)


def opener(path: str, flags: int) -> int:
    """Opener for `open`: a file that `open` creates is private."""
    return os.open(path, flags, FILE_MODE)


def mode_if_exposed(path: Path) -> str | None:
    """Returns the mode, as `0644`, of a path open to other users; `None` if private or missing."""
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
    except OSError:
        return None
    return f"{mode:04o}" if mode & _OTHERS_MODE_BITS else None


def privacy_problem(folder: Path, owners: set[int]) -> str | None:
    """Returns why a folder is not private to these user ids, or `None`; `OSError` if missing."""
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode):
        return "it is a link or a file, not a folder"
    if status.st_uid not in owners:
        return f"it belongs to user {status.st_uid}"
    if status.st_mode & _OTHERS_MODE_BITS:
        return f"its mode {stat.S_IMODE(status.st_mode):04o} gives other users access"
    return None
