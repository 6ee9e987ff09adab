"""The database of a run: a file, a database on the user's server, or a server of its own.

Whatever it is, it is new, and gone when the run is over. Nothing else on a server is touched.
"""

import fcntl
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from urllib.parse import parse_qsl, quote, urlencode, urlsplit, urlunsplit

from tenuto import app
from tenuto.chaos.plan import OWN_SERVER, ChaosPlan
from tenuto.chaos.proxy import CommitProxy
from tenuto.chaos.server import Server
from tenuto.clock import Clock
from tenuto.model.errors import TenutoError, Unavailable
from tenuto.store.postgres.address import Host, parse

DEFAULT_PORT = 5432


class Database:
    """Where a run's tasks are."""

    def __init__(self, name: str, url: str, way: str | None = None) -> None:
        self.name = name
        self.url = url
        """For the checker, who wants to be sure."""
        self.way = way or url
        """For the processes that are tried."""
        self.proxy: CommitProxy | None = None
        self.server: Server | None = None

    def free(self) -> bool:
        """Whether nobody is inside a write transaction of SQLite, where all would wait for it."""
        path = app.sqlite_path(self.url)
        if path is None:
            return True
        with Path(f"{path}-lock").open("a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
        return True

    async def cut(self) -> int:
        """End all connections to the run's own database but the one that asks; how many."""
        from tenuto.store.postgres.admin import end_connections  # noqa: PLC0415  only when used

        return await end_connections(self.url)


@asynccontextmanager
async def made(plan: ChaosPlan, folder: Path, clock: Clock) -> AsyncIterator[Database]:
    """The run's database, migrated."""
    address = plan.database or "sqlite:"
    if address.startswith("sqlite:"):
        yield await _migrated(Database("SQLite", f"sqlite:///{folder}/chaos.db"))
    elif address == OWN_SERVER:
        server = Server(folder, clock)
        try:
            await server.create()
            async with _on_server(server.url("postgres"), clock, "a private PostgreSQL") as found:
                found.server = server
                yield found
        finally:
            await server.stop()
    else:
        async with _on_server(address, clock, "PostgreSQL") as found:
            yield found


@asynccontextmanager
async def _on_server(address: str, clock: Clock, name: str) -> AsyncIterator[Database]:
    from tenuto.store.postgres.admin import drop_database, make_database  # noqa: PLC0415  only when used

    title = f"tenuto_chaos_{clock.new_id().hex[-12:]}"
    url = await make_database(address, title)
    host, port = _place(url)
    proxy = CommitProxy(host, port)
    try:
        await proxy.open()
        found = Database(name, url, _through(url, proxy.port))
        found.proxy = proxy
        yield await _migrated(found)
    finally:
        await proxy.close()
        with suppress(TenutoError):
            await drop_database(address, title)


async def _migrated(database: Database) -> Database:
    store = app.open_store(database.url)
    try:
        await store.migrate()
    finally:
        await store.close()
    if database.way != database.url:
        store = app.open_store(database.way)
        try:
            await store.schema()
        except Unavailable as error:
            raise Unavailable(
                f"the run needs connections without TLS to listen in on them: {error.message}"
            ) from error
        finally:
            await store.close()
    return database


def _place(url: str) -> Host:
    """Where the server is, the first one if there are several: a run has one server."""
    return next(iter(parse(url, os.environ).hosts), Host("localhost", DEFAULT_PORT))


def _through(url: str, port: int) -> str:
    """The same database through a port of this machine, readable to who listens in."""
    parts = urlsplit(url)
    rest = [pair for pair in parse_qsl(parts.query) if pair[0] not in ("host", "port", "sslmode")]
    user = parts.netloc.rpartition("@")[0]
    place = f"{user}@127.0.0.1:{port}" if user else f"127.0.0.1:{port}"
    query = urlencode([*rest, ("sslmode", "disable")], quote_via=quote)
    return urlunsplit((parts.scheme, place, parts.path, query, ""))
