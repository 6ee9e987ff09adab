"""What the driver's errors mean: whom they concern, and whether the connection is lost."""

import asyncpg

from tenuto.model.errors import Conflict, Incompatible, Invalid, TenutoError, Unavailable

AGAIN = (asyncpg.DeadlockDetectedError, asyncpg.SerializationError)
"""The same transaction may succeed when it is run again."""
CUT = (OSError, TimeoutError, asyncpg.InterfaceError, asyncpg.InternalClientError)
"""Nobody knows what the connection says next."""
LEAVING = (
    asyncpg.ReadOnlySQLTransactionError,
    asyncpg.AdminShutdownError,
    asyncpg.CrashShutdownError,
    asyncpg.CannotConnectNowError,
)
"""The server shuts down, starts, or is a standby now: its connections are worth nothing.

Of a shutdown the driver mostly tells as of a connection that was lost (`GONE`).
"""
GONE = (
    ConnectionError,
    asyncpg.ConnectionDoesNotExistError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,
    *LEAVING,
)
"""The connection is lost; a read may be asked again on another."""
_SWITCHING = (*LEAVING, asyncpg.TargetServerAttributeNotMatched)
_BROKEN = (
    asyncpg.ConnectionDoesNotExistError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,
)
"""The driver tells these in words about its own inside."""
_LOST = (
    OSError,
    TimeoutError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,
    asyncpg.PostgresConnectionError,
    asyncpg.InsufficientResourcesError,
    asyncpg.OperatorInterventionError,
    asyncpg.PostgresSystemError,
    asyncpg.LockNotAvailableError,
    asyncpg.IdleInTransactionSessionTimeoutError,
    asyncpg.TransactionTimeoutError,
    asyncpg.ReadOnlySQLTransactionError,
    asyncpg.InvalidCatalogNameError,
    asyncpg.InvalidAuthorizationSpecificationError,
    asyncpg.InsufficientPrivilegeError,
    asyncpg.UndefinedTableError,
)
"""What no caller is guilty of: the server, its operator or its machine, which time may mend.

A table that is not there is about to be restored: every program looks when it opens the database.
"""


_STATEMENTS = (asyncpg.InvalidSQLStatementNameError, asyncpg.DuplicatePreparedStatementError)


def meant(error: Exception) -> Exception:
    """What the engine should hear of an error of the driver; others, also ours, as they are."""
    if isinstance(error, asyncpg.DiskFullError):
        return Unavailable(f"the database has no room left: {error}", "storage_full")
    if isinstance(error, asyncpg.UniqueViolationError):
        return Conflict("something with that id exists already", "idempotency_conflict")
    if isinstance(error, asyncpg.DataError) and isinstance(error.__cause__, OverflowError):
        return Invalid("a number is beyond 64 bits")
    if isinstance(error, asyncpg.ClientConfigurationError):
        return Invalid(f"the database address is wrong: {error}", "database_invalid")
    return _of_statements(error) or unavailable(error) or error


def _of_statements(error: Exception) -> TenutoError | None:
    """What a pooler or a migration does to prepared statements and settings; else `None`."""
    if isinstance(error, asyncpg.InvalidCachedStatementError):
        return Unavailable(
            "the schema changed below statements that were prepared before; try again, and behind a"
            " pooler run RECONNECT there",
            "database_switching",
        )
    if isinstance(error, _STATEMENTS):
        return Unavailable(
            "the pooler loses prepared statements; set its max_prepared_statements above 0",
            "pooler_unsuitable",
        )
    if isinstance(error, asyncpg.PostgresError) and "startup parameter" in str(error):
        return Incompatible(
            f"a pooler before the database does not take our settings: {first_line(error)};"
            " set pooler=transaction",
            "pooler_unsuitable",
        )
    return None


def unavailable(error: Exception) -> TenutoError | None:
    """The outage that an error tells of, in words for users; `None` if it tells of none."""
    if isinstance(error, AGAIN) or not isinstance(error, _LOST):
        return None
    if isinstance(error, _SWITCHING):
        return Unavailable(
            "the database is being switched over; try again in a few seconds", "database_switching"
        )
    if isinstance(error, _BROKEN):
        return Unavailable("the database does not answer: the connection was lost")
    if isinstance(error, asyncpg.InsufficientPrivilegeError):
        return Unavailable(f"the login may not do this in the database: {first_line(error)}")
    if isinstance(error, TimeoutError) and not str(error):
        return Unavailable("the database does not answer in time")
    return Unavailable(f"the database does not answer: {first_line(error)}")


def first_line(error: BaseException) -> str:
    text = str(error) or type(error).__name__
    return text.splitlines()[0]
