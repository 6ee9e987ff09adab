"""Puts the parts together: the only module that knows every concrete class."""

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

from tenuto.broker.local import LocalWakeups
from tenuto.broker.memory import MemoryWakeups
from tenuto.broker.protocol import Wakeups
from tenuto.clock import Clock
from tenuto.engine.engine import Engine
from tenuto.model.errors import Invalid, Unavailable
from tenuto.settings import Settings
from tenuto.store.protocol import Store
from tenuto.store.schema import NEEDS
from tenuto.store.sqlite import SqliteStore

T = TypeVar("T")


def run(main: Coroutine[Any, Any, T]) -> T:
    """The coroutine's result, on the fastest event loop that is installed."""
    try:
        import uvloop  # noqa: PLC0415  optional
    except ImportError:
        return asyncio.run(main)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)


def process_name(clock: Clock) -> str:
    """`{host}:{pid}:{uuid}`: this process among all."""
    return f"{socket.gethostname()}:{os.getpid()}:{clock.new_id()}"


def sqlite_path(url: str) -> str | None:
    """The file of a SQLite address, `None` for another kind of database.

    `sqlite:///t.db` is relative to here, `sqlite:////var/t.db` absolute.
    """
    if not url.startswith("sqlite:"):
        return None
    path = url.removeprefix("sqlite:///")
    if path == url or not path.strip("/"):
        raise Invalid(f"{url!r} names no file; use sqlite:///path", "database_invalid")
    return path


def open_store(url: str) -> Store:
    """The store for an address; nothing is connected yet."""
    path = sqlite_path(url)
    if path is not None:
        if path != ":memory:":
            try:
                Path(path).parent.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise Unavailable(f"cannot make a folder for {path}: {error}") from error
        return SqliteStore(path)
    if url.startswith(("postgresql://", "postgres://")):
        from tenuto.store.postgres import PostgresStore  # noqa: PLC0415  asyncpg only when used

        return PostgresStore(url)
    raise Invalid(
        f"{url!r} is not a database address; use sqlite:///path or postgresql://...",
        "database_invalid",
    )


def open_wakeups(url: str, store: Store, name: str, *, listen: bool) -> Wakeups:
    """The hints that go with a store."""
    path = sqlite_path(url)
    if path == ":memory:":
        return MemoryWakeups()
    if path is not None:
        return LocalWakeups(path, name[-20:])
    from tenuto.broker.postgres import PostgresWakeups  # noqa: PLC0415  asyncpg only when used

    return PostgresWakeups(url, store.clock, listen=listen)


@asynccontextmanager
async def connect(
    settings: Settings, *, actor: str | None = None, listen: bool = False
) -> AsyncIterator[Engine]:
    """An engine on the settings' database. An embedded database is made and migrated by itself."""
    url = settings.url()
    store = open_store(url)
    try:
        if isinstance(store, SqliteStore) and (await store.schema()).schema < NEEDS:
            await store.migrate()
        await store.open()
        name = process_name(store.clock)
        wakeups = open_wakeups(url, store, name, listen=listen)
        if listen:
            await wakeups.open()
        try:
            yield Engine(store, wakeups, actor=actor)
        finally:
            await wakeups.close()
    finally:
        await store.close()
