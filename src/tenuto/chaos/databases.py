"""The database of a run: a SQLite file, a database on the user's server, or a private server.

It is created for the run and deleted afterwards. Nothing else on a server is touched.
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
from tenuto.settings import sqlite_path
from tenuto.store.postgres.address import Host, parse

DEFAULT_PORT = 5432


class Database:
    """The database of a run."""

    def __init__(self, name: str, url: str, process_url: str | None = None) -> None:
        self.name = name
        self.url = url
        """Direct address, for the checker."""
        self.process_url = process_url or url
        """Address for the tested processes; it may go through the proxy."""
        self.proxy: CommitProxy | None = None
        self.server: Server | None = None

    def is_unlocked(self) -> bool:
        """True unless a process is in a SQLite write transaction, which would block all others."""
        path = sqlite_path(self.url)
        if path is None:
            return True
        with Path(f"{path}-lock").open("a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
        return True

    async def cut_connections(self) -> int:
        """Terminates all other connections to the run's database; returns how many."""
        from tenuto.store.postgres.admin import terminate_connections  # noqa: PLC0415  only when used

        return await terminate_connections(self.url)


@asynccontextmanager
async def open_database(plan: ChaosPlan, folder: Path, clock: Clock) -> AsyncIterator[Database]:
    """Context with the run's new, migrated database; at its end, drops it or stops its server."""
    address = plan.database or "sqlite:"
    if address.startswith("sqlite:"):
        yield await _migrate(Database("SQLite", f"sqlite:///{folder}/chaos.db"))
    elif address == OWN_SERVER:
        server = Server(folder, clock)
        try:
            await server.create()
            async with _create_on_server(
                server.url("postgres"), clock, "a private PostgreSQL"
            ) as database:
                database.server = server
                yield database
        finally:
            await server.stop()
    else:
        async with _create_on_server(address, clock, "PostgreSQL") as database:
            yield database


@asynccontextmanager
async def _create_on_server(address: str, clock: Clock, name: str) -> AsyncIterator[Database]:
    """Context with a new database on a server, reached through the proxy; drops it at the end."""
    from tenuto.store.postgres.admin import create_database, drop_database  # noqa: PLC0415  only when used

    name_on_server = f"tenuto_chaos_{clock.new_id().hex[-12:]}"
    url = await create_database(address, name_on_server)
    host, port = _server_address(url)
    proxy = CommitProxy(host, port)
    try:
        await proxy.open()
        database = Database(name, url, _proxied_url(url, proxy.port))
        database.proxy = proxy
        yield await _migrate(database)
    finally:
        await proxy.close()
        with suppress(TenutoError):
            await drop_database(address, name_on_server)


async def _migrate(database: Database) -> Database:
    """Migrates the database and returns it; raises `Unavailable` if the proxy cannot connect."""
    store = app.create_store(database.url)
    try:
        await store.migrate()
    finally:
        await store.close()
    if database.process_url != database.url:
        store = app.create_store(database.process_url)
        try:
            await store.schema()
        except Unavailable as error:
            raise Unavailable(
                f"the chaos proxy needs a connection without TLS: {error.message}"
            ) from error
        finally:
            await store.close()
    return database


def _server_address(url: str) -> Host:
    """Returns the server's host and port: the first in the URL, or localhost."""
    return next(iter(parse(url, os.environ).hosts), Host("localhost", DEFAULT_PORT))


def _proxied_url(url: str, port: int) -> str:
    """Returns the URL of the same database through the proxy's local port, without TLS."""
    parts = urlsplit(url)
    rest = [pair for pair in parse_qsl(parts.query) if pair[0] not in ("host", "port", "sslmode")]
    user = parts.netloc.rpartition("@")[0]
    netloc = f"{user}@127.0.0.1:{port}" if user else f"127.0.0.1:{port}"
    query = urlencode([*rest, ("sslmode", "disable")], quote_via=quote)
    return urlunsplit((parts.scheme, netloc, parts.path, query, ""))
