"""The stamp of a folder: equal while the same names are in it."""

import os
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from tenuto.clock import Clock
from tenuto.folder_stamp import folder_stamp


class Later(Clock):
    """A clock for which everything on disk is long settled."""

    def now(self) -> datetime:
        return super().now() + timedelta(minutes=1)


def test_stamp_is_equal_while_files_are_only_written(tmp_path: Path) -> None:
    file = tmp_path / "a"
    file.touch()
    before = folder_stamp(str(tmp_path), Later())
    file.write_text("more")
    assert before is not None
    assert folder_stamp(str(tmp_path), Later()) == before


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: (folder / "new").touch(),
        lambda folder: (folder / "old").rename(folder / "new"),
        lambda folder: (folder / "old").unlink(),
    ],
)
def test_stamp_differs_after_a_name_was_added_renamed_or_removed(
    tmp_path: Path, change: Callable[[Path], None]
) -> None:
    (tmp_path / "old").touch()
    os.utime(tmp_path, (0, 0))
    before = folder_stamp(str(tmp_path), Later())
    change(tmp_path)
    assert folder_stamp(str(tmp_path), Later()) != before


def test_stamp_of_a_new_folder_with_the_same_name_differs(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    before = folder_stamp(str(folder), Later())
    folder.rename(tmp_path / "gone")
    with pytest.raises(FileNotFoundError):
        folder_stamp(str(folder), Later())
    folder.mkdir()
    assert folder_stamp(str(folder), Later()) != before


def test_stamp_of_a_just_changed_folder_is_none(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    assert folder_stamp(str(tmp_path), Clock()) is None
