"""PostgreSQL behind a pooler in transaction mode, such as PgBouncer 1.21 or newer."""

import asyncio
import os
from typing import Any

import asyncpg
import msgspec

from tenuto.model.errors import Incompatible
from tenuto.store.postgres.connector import Connector
from tenuto.store.postgres.errors import meant
from tenuto.store.postgres.sessions import NAMED

_PROBE = "select pg_backend_pid() + $1::int"
_OTHER_PROBE = "select $1::text"
_NAME = f"tenuto_probe_{os.getpid()}"
_CHECK_S = 5.0
_ALONE_S = 1.0
"""Seconds after which the pooler seems to have no second connection for a login."""


class Pooler(msgspec.Struct, frozen=True):
    """The addresses beside the one of the system's login."""

    runtime: str
    """Where tenants connect, with the login whose role is theirs."""
    direct: str = ""
    """The server itself, for hints and migrations; empty: no hints, no migrations."""


async def check_pooler(connector: Connector) -> None:
    """Refuse a pooler that leaves prepared statements behind on the connection that has them."""
    clients: list[Any] = []
    try:
        for _ in range(2):
            clients.append(await connector.connect(NAMED))
        async with asyncio.timeout(_CHECK_S):
            loses = await _loses_statements(*clients)
    except Exception as error:
        if (said := meant(error)) is not error:
            raise said from error
        raise
    finally:
        for each in clients:
            each.terminate()
    if loses:
        raise Incompatible(
            "the pooler loses prepared statements between transactions; use PgBouncer 1.21 or"
            " newer with max_prepared_statements above 0",
            "pooler_unsuitable",
        )


async def _loses_statements(preparer: Any, occupant: Any) -> bool:
    """True if a statement that one client prepared stays with the server's connection.

    One client prepares a statement. Another, in a transaction, prepares a different one of the same
    name: if it got the first one's connection, that name is taken there. Then the first executes
    its own: on another connection it is not known. If it has to wait, both share one connection,
    which knows both. Where the pooler gives each client its connection again, nothing is proven.
    """
    try:
        first = await preparer.prepare(_PROBE, name=_NAME)
        await first.fetchval(0)
        await occupant.execute("begin")
        second = await occupant.prepare(_OTHER_PROBE, name=_NAME)
        await second.fetchval("")
        async with asyncio.timeout(_ALONE_S):
            await first.fetchval(0)
    except (asyncpg.InvalidSQLStatementNameError, asyncpg.DuplicatePreparedStatementError):
        return True
    except TimeoutError:
        return False
    return False
