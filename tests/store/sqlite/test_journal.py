"""Preallocation of SQLite's journal by a process that writes."""

import resource
import shutil
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.contract.conftest import new

from tenuto.engine.engine import Engine
from tenuto.store.sqlite.store import (
    _CHECK_JOURNAL_EVERY,
    _JOURNAL_BYTES,
    SqliteStore,
    _extend_file,
)


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SqliteStore]:
    created = SqliteStore(str(tmp_path / "t.db"))
    await created.migrate()
    yield created
    await created.close()


def journal(store: SqliteStore) -> int:
    return Path(f"{store.path}-wal").stat().st_size


async def written(store: SqliteStore, count: int) -> None:
    engine = Engine(store)
    for _ in range(count):
        await engine.submit(new())
    await store.schema()  # behind whatever the thread was sent


async def test_few_writes_leave_the_journal_unchanged(store: SqliteStore) -> None:
    await written(store, 2)
    assert journal(store) < _JOURNAL_BYTES


async def test_rows_in_a_preallocated_journal_survive_a_crash(
    store: SqliteStore, tmp_path: Path
) -> None:
    await written(store, _CHECK_JOURNAL_EVERY)
    assert journal(store) == _JOURNAL_BYTES
    await written(store, 10)
    assert journal(store) == _JOURNAL_BYTES
    for name in ("t.db", "t.db-wal"):  # without its index, as after a power cut
        shutil.copy(tmp_path / name, tmp_path / f"copy-{name}")
    copy = sqlite3.connect(tmp_path / "copy-t.db")
    assert copy.execute("pragma integrity_check").fetchone() == ("ok",)
    assert copy.execute("select count(*) from task").fetchone() == (_CHECK_JOURNAL_EVERY + 10,)
    copy.close()


async def test_preallocation_keeps_what_other_processes_wrote(
    store: SqliteStore, tmp_path: Path
) -> None:
    await written(store, _CHECK_JOURNAL_EVERY - 1)
    other = SqliteStore(store.path)
    await written(other, 3)
    await written(store, _CHECK_JOURNAL_EVERY)
    await written(other, 3)
    await other.close()
    reader = sqlite3.connect(store.path)
    assert reader.execute("select count(*) from task").fetchone() == (2 * _CHECK_JOURNAL_EVERY + 5,)
    reader.close()


def test_preallocation_on_a_full_disk_leaves_the_file_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"held")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            _extend_file(path, 4 << 20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert path.read_bytes() == b"held"


async def test_failed_preallocation_stops_no_writer(store: SqliteStore) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (_JOURNAL_BYTES // 2, before[1]))
    try:
        await written(store, 3 * _CHECK_JOURNAL_EVERY)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert 0 < journal(store) < _JOURNAL_BYTES
    await written(store, _CHECK_JOURNAL_EVERY)
    assert journal(store) < _JOURNAL_BYTES
