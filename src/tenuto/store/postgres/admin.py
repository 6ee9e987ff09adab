"""Databases and schemas that a run makes for itself on a server, and removes at its end."""

from typing import Any
from urllib.parse import urlsplit, urlunsplit

import asyncpg

from tenuto.model.errors import Unavailable
from tenuto.store.postgres.connector import Connector
from tenuto.store.postgres.errors import first_line

_ANSWER_S = 60


async def make_scratch(url: str, name: str) -> str:
    """A schema of that name in the database, empty and apart from everything else; its address."""
    await _on_server(url, f'create schema "{name}"')
    return f"{url}{'&' if '?' in url else '?'}search_path={name}"


async def drop_scratch(url: str, name: str) -> None:
    """Remove such a schema with all it holds."""
    await _on_server(url, f'drop schema if exists "{name}" cascade')


async def make_database(url: str, name: str) -> str:
    """An empty database of that name on the server behind the address; its own address."""
    await _on_server(url, f'create database "{name}"')
    parts = urlsplit(url)
    return urlunsplit(parts._replace(path=f"/{name}"))


async def drop_database(url: str, name: str) -> None:
    """Remove such a database, whoever is still connected to it."""
    await _on_server(url, f'drop database if exists "{name}" with (force)')


async def end_connections(url: str) -> int:
    """End every other connection to the address's own database; how many there were."""
    ended = "select count(pg_terminate_backend(pid)) from pg_stat_activity"
    return int(
        await _on_server(
            url, f"{ended} where datname = current_database() and pid <> pg_backend_pid()"
        )
    )


async def _on_server(url: str, statement: str) -> Any:
    """What one statement answers, on a connection of its own and in no role."""
    try:
        connection = await Connector(url).connect({}, command_timeout=_ANSWER_S)
        try:
            return await connection.fetchval(statement)
        finally:
            await connection.close(timeout=5)
    except (asyncpg.PostgresError, asyncpg.InterfaceError, OSError, TimeoutError) as error:
        raise Unavailable(f"the database server: {first_line(error)}") from error
