"""Creates and drops databases and schemas for test and chaos runs."""

from typing import Any
from urllib.parse import urlsplit, urlunsplit

import asyncpg

from tenuto.model.errors import Unavailable
from tenuto.store.postgres.connector import Connector
from tenuto.store.postgres.errors import first_line

_TIMEOUT_S = 60


async def create_schema(url: str, name: str) -> str:
    """Creates an empty schema; returns the URL with it as `search_path`. Raises `Unavailable`."""
    await _run_on_server(url, f'create schema "{name}"')
    return f"{url}{'&' if '?' in url else '?'}search_path={name}"


async def drop_schema(url: str, name: str) -> None:
    """Drops a schema, if it exists, with everything in it."""
    await _run_on_server(url, f'drop schema if exists "{name}" cascade')


async def create_database(url: str, name: str) -> str:
    """Creates an empty database on the server; returns its URL. Raises `Unavailable`."""
    await _run_on_server(url, f'create database "{name}"')
    parts = urlsplit(url)
    return urlunsplit(parts._replace(path=f"/{name}"))


async def drop_database(url: str, name: str) -> None:
    """Drops a database, if it exists, even if clients are connected to it."""
    await _run_on_server(url, f'drop database if exists "{name}" with (force)')


async def terminate_connections(url: str) -> int:
    """Terminates all other connections to the database; returns their number."""
    terminate = "select count(pg_terminate_backend(pid)) from pg_stat_activity"
    return int(
        await _run_on_server(
            url, f"{terminate} where datname = current_database() and pid <> pg_backend_pid()"
        )
    )


async def _run_on_server(url: str, statement: str) -> Any:
    """Runs one statement on a new connection; returns its first value; raises `Unavailable`."""
    try:
        connection = await Connector(url).connect({}, command_timeout=_TIMEOUT_S)
        try:
            return await connection.fetchval(statement)
        finally:
            await connection.close(timeout=5)
    except (asyncpg.PostgresError, asyncpg.InterfaceError, OSError, TimeoutError) as error:
        raise Unavailable(f"the database server failed: {first_line(error)}") from error
