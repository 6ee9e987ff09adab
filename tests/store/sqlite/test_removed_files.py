"""Database files removed below a running process: no write is acknowledged."""

import asyncio
import os
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from tests.contract.conftest import ManualClock, new, refusal

from tenuto.engine.engine import Engine
from tenuto.store.sqlite.store import SqliteStore


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[Engine]:
    store = SqliteStore(str(tmp_path / "t.db"))
    await store.migrate()
    created = Engine(store)
    await created.submit(new())
    yield created
    await store.close()


def remove(path: Path) -> None:
    path.unlink()


def move(path: Path) -> None:
    path.rename(path.with_suffix(".moved"))


def put_back(path: Path) -> None:
    path.with_suffix(".moved").rename(path)


def occupy(path: Path) -> None:
    path.touch()


def restore(path: Path) -> None:
    """As a copy is put in place: in one step."""
    shutil.copy(path, path.with_suffix(".copy"))
    path.with_suffix(".copy").replace(path)


def remove_journal(path: Path) -> None:
    Path(f"{path}-wal").unlink()


@pytest.mark.parametrize("take", [remove, move, restore, remove_journal])
async def test_write_to_a_removed_file_is_refused(
    engine: Engine, tmp_path: Path, take: Callable[[Path], None]
) -> None:
    task = (await engine.list()).tasks[0].id
    take(tmp_path / "t.db")
    for call in (engine.submit(new()), engine.cancel(task), engine.list(), engine.show(task)):
        assert await refusal(call) == "database_unreachable"


async def test_removed_file_is_refused_every_time(tmp_path: Path) -> None:
    store = SqliteStore(str(tmp_path / "t.db"), ManualClock())  # its folder has settled long ago
    await store.migrate()
    engine = Engine(store)
    os.utime(tmp_path, (0, 0))
    await engine.submit(new())
    remove(tmp_path / "t.db")
    for _ in range(3):
        assert await refusal(engine.submit(new())) == "database_unreachable"
    await store.close()


async def test_journal_is_beside_the_target_of_a_symbolic_link(tmp_path: Path) -> None:
    link = tmp_path / "link.db"
    link.symlink_to(tmp_path / "t.db")
    store = SqliteStore(str(link))
    await store.migrate()
    engine = Engine(store)
    await engine.submit(new())
    remove_journal(tmp_path / "t.db")
    assert await refusal(engine.submit(new())) == "database_unreachable"
    await store.close()


async def test_folder_replaced_by_a_file_is_refused(engine: Engine, tmp_path: Path) -> None:
    move(tmp_path)
    occupy(tmp_path)
    for call in (engine.submit(new()), engine.list()):
        assert await refusal(call) == "database_unreachable"
    remove(tmp_path)
    put_back(tmp_path)
    await engine.submit(new())


async def test_writer_survives_a_missing_file(engine: Engine, tmp_path: Path) -> None:
    path = tmp_path / "t.db"
    move(path)
    for _ in range(40):  # the journal has to be lengthened every so often
        assert await refusal(engine.submit(new())) == "database_unreachable"
    put_back(path)
    async with asyncio.timeout(10):
        assert (await engine.core.store.schema()).schema > 0


async def test_file_that_is_put_back_is_accepted(engine: Engine, tmp_path: Path) -> None:
    path = tmp_path / "t.db"
    move(path)
    assert await refusal(engine.submit(new())) == "database_unreachable"
    put_back(path)
    await engine.submit(new())
    assert len((await engine.list()).tasks) == 2


async def test_process_can_change_its_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    store = SqliteStore("t.db")
    await store.migrate()
    engine = Engine(store)
    await engine.submit(new())
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    await engine.submit(new())
    assert len((await engine.list()).tasks) == 2
    await store.close()
    assert os.listdir(elsewhere) == []  # noqa: PTH208  nothing waits here
