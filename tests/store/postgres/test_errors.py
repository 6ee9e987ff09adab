"""Messages for errors of the driver."""

import asyncpg
import pytest

from tenuto.model.errors import Conflict, Incompatible, NotFound, TenutoError, Unavailable
from tenuto.store.postgres.errors import map_driver_error


@pytest.mark.parametrize(
    ("error", "kind", "code", "output"),
    [
        (
            asyncpg.InvalidCachedStatementError("cached statement plan is invalid"),
            *(Unavailable, "database_switching", "run RECONNECT there"),
        ),
        (
            asyncpg.InvalidSQLStatementNameError('prepared statement "s" does not exist'),
            *(Unavailable, "pooler_unsuitable", "max_prepared_statements"),
        ),
        (
            asyncpg.DuplicatePreparedStatementError('prepared statement "s" already exists'),
            *(Unavailable, "pooler_unsuitable", "max_prepared_statements"),
        ),
        (
            asyncpg.ProtocolViolationError("unsupported startup parameter: tcp_keepalives_idle"),
            *(Incompatible, "pooler_unsuitable", "set pooler=transaction"),
        ),
        (
            asyncpg.InsufficientPrivilegeError("permission denied for schema public"),
            *(Unavailable, "database_unreachable", "the database login lacks a privilege"),
        ),
        (TimeoutError(), Unavailable, "database_unreachable", "does not answer in time"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_driver_error_names_the_remedy(
    error: Exception, kind: type[TenutoError], code: str, output: str
) -> None:
    result = map_driver_error(error)
    assert isinstance(result, TenutoError)
    assert (type(result), result.code) == (kind, code)
    assert output in result.message


@pytest.mark.parametrize(
    "error",
    [
        NotFound("there is no agent 'startup parameter'"),
        Conflict("'startup parameter' is taken"),
        ValueError("startup parameter"),
    ],
)
def test_own_error_is_unchanged_whatever_it_quotes(error: Exception) -> None:
    assert map_driver_error(error) is error
