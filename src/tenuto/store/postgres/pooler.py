"""PostgreSQL behind a pooler in transaction mode, such as PgBouncer 1.21 or newer."""

import asyncio
import os
from typing import Any

import asyncpg
import msgspec

from tenuto.model.errors import Incompatible
from tenuto.store.postgres.connector import Connector
from tenuto.store.postgres.errors import map_driver_error
from tenuto.store.postgres.sessions import APPLICATION

_PROBE = "select pg_backend_pid() + $1::int"
_OTHER_PROBE = "select $1::text"
_STATEMENT_NAME = f"tenuto_probe_{os.getpid()}"
_CHECK_S = 5.0
_SHARED_S = 1.0
"""Seconds after which the pooler seems to have only one server connection for a login."""


class Pooler(msgspec.Struct, frozen=True):
    """The addresses used in addition to the address of the system's login."""

    runtime: str
    """The address for tenants, with the login that has the tenants' role."""
    direct: str = ""
    """The address of the server itself, for hints and migrations; empty: none of these."""


async def check_pooler(connector: Connector) -> None:
    """Raises `Incompatible` if the pooler loses prepared statements between transactions."""
    clients: list[Any] = []
    try:
        for _ in range(2):
            clients.append(await connector.connect(APPLICATION))
        async with asyncio.timeout(_CHECK_S):
            loses = await _loses_statements(*clients)
    except Exception as error:
        if (mapped := map_driver_error(error)) is not error:
            raise mapped from error
        raise
    finally:
        for client in clients:
            client.terminate()
    if loses:
        raise Incompatible(
            "the pooler loses prepared statements between transactions; use PgBouncer 1.21 or"
            " newer with max_prepared_statements above 0",
            "pooler_unsuitable",
        )


async def _loses_statements(preparer: Any, occupant: Any) -> bool:
    """True if the pooler moves a client to a server connection without its prepared statements.

    One client prepares a statement. Another one, in a transaction, prepares a different statement
    of the same name: if it got the same server connection, that name is taken there. Then the first
    executes its statement: on another server connection it is unknown. If it has to wait, both
    share one server connection, which knows both statements. If the pooler gives each client its
    previous connection again, the check proves nothing.
    """
    try:
        first = await preparer.prepare(_PROBE, name=_STATEMENT_NAME)
        await first.fetchval(0)
        await occupant.execute("begin")
        second = await occupant.prepare(_OTHER_PROBE, name=_STATEMENT_NAME)
        await second.fetchval("")
        async with asyncio.timeout(_SHARED_S):
            await first.fetchval(0)
    except (asyncpg.InvalidSQLStatementNameError, asyncpg.DuplicatePreparedStatementError):
        return True
    except TimeoutError:
        return False
    return False
