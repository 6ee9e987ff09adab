"""Engines with encryption keys, on each kind of database, and the whole database as text."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.contract.conftest import (
    AnyStore,
    ManualClock,
    Raw,
    check_attempts,
    check_trail,
    opened,
)

from tenuto.encryption_keys import KeyRing
from tenuto.engine.engine import Engine

OLD = {"old": bytes(range(32))}
NEW = {"new": bytes(range(32, 64))}


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def raw(database_url: str) -> Raw:
    return Raw(database_url)


@pytest.fixture
async def store(database_url: str, clock: ManualClock) -> AsyncIterator[AnyStore]:
    async with opened(database_url, clock) as store:
        yield store


@pytest.fixture
async def engine(store: AnyStore, raw: Raw) -> AsyncIterator[Engine]:
    """An engine with one key, which also sees to it that rows and trail agree in the end."""
    engine = Engine(store, actor="tester", key_ring=KeyRing(OLD))
    yield engine
    assert await engine.maintenance.audit() == []
    await check_trail(raw)
    await check_attempts(raw)


async def dump(raw: Raw) -> str:
    """Every row of every table as text."""
    matches = []
    for table in await raw.counts():
        rows = await raw.fetch(f"select * from {table}")
        matches += [f"{table}: {row}" for row in rows]
    return "\n".join(matches)


def stored_bytes(raw: Raw) -> bytes:
    """Returns a SQLite database's bytes on disk: the file and its write-ahead log."""
    if raw.path is None:
        return b""
    files = Path(raw.path).parent.glob(f"{Path(raw.path).name}*")
    return b"".join(path.read_bytes() for path in files)
