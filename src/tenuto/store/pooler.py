"""PostgreSQL behind a pooler in transaction mode, such as PgBouncer 1.21 or newer."""

from typing import Any

import asyncpg
import msgspec

from tenuto.model.errors import Incompatible
from tenuto.store.connector import Connector
from tenuto.store.postgres_errors import meant
from tenuto.store.sessions import NAMED

_PROBE = "select pg_backend_pid() + $1::int"
_ALONE_S = 2.0


class Pooler(msgspec.Struct, frozen=True):
    """The addresses beside the one of the system's login."""

    runtime: str
    """Where tenants connect, with the login whose role is theirs."""
    direct: str = ""
    """The server itself, for hints and migrations; empty: no hints, no migrations."""


async def check_pooler(connector: Connector) -> None:
    """Refuse a pooler that leaves prepared statements behind on the connection that has them.

    One client prepares a statement, another occupies the connection, the first executes it again.
    Where the pooler gives the first one the same connection nevertheless, nothing is proven.
    """
    clients: list[Any] = []
    try:
        for _ in range(2):
            clients.append(await connector.connect(NAMED))
        preparer, occupant = clients
        await preparer.fetchval(_PROBE, 0, timeout=_ALONE_S)
        await occupant.execute("begin", timeout=_ALONE_S)
        await preparer.fetchval(_PROBE, 0, timeout=_ALONE_S)
    except (asyncpg.InvalidSQLStatementNameError, asyncpg.DuplicatePreparedStatementError):
        raise Incompatible(
            "the pooler loses prepared statements between transactions; use PgBouncer 1.21 or"
            " newer with max_prepared_statements above 0",
            "pooler_unsuitable",
        ) from None
    except TimeoutError as error:
        if len(clients) < 2:
            raise meant(error) from error
        # The pooler has one connection for this login: all statements are there.
    except Exception as error:
        if (said := meant(error)) is not error:
            raise said from error
        raise
    finally:
        for each in clients:
            each.terminate()
