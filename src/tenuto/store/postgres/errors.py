"""Maps the driver's errors to errors of the engine, and tells whether the connection is lost."""

import asyncpg

from tenuto.model.errors import Conflict, Incompatible, Invalid, TenutoError, Unavailable
from tenuto.store.schema import missing_column_error

RETRYABLE = (asyncpg.DeadlockDetectedError, asyncpg.SerializationError)
"""The same transaction may succeed when it is run again."""
UNUSABLE = (OSError, TimeoutError, asyncpg.InterfaceError, asyncpg.InternalClientError)
"""The state of the connection is unknown: it must be closed."""
SERVER_LEAVING = (
    asyncpg.ReadOnlySQLTransactionError,
    asyncpg.AdminShutdownError,
    asyncpg.CrashShutdownError,
    asyncpg.CannotConnectNowError,
)
"""The server shuts down, starts, or is a standby now: its connections are useless.

The driver mostly reports a shutdown as a lost connection (`CONNECTION_LOST`).
"""
CONNECTION_LOST = (
    ConnectionError,
    asyncpg.ConnectionDoesNotExistError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,
    *SERVER_LEAVING,
)
"""The connection is lost; a read can be repeated on another one."""
_SWITCHOVER = (*SERVER_LEAVING, asyncpg.TargetServerAttributeNotMatched)
_DRIVER_INTERNAL = (
    asyncpg.ConnectionDoesNotExistError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,
)
"""Errors whose texts describe internals of the driver."""
_OUTAGE = (
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
"""Errors that no caller caused, but the server, its operator or its machine: they may pass.

A missing table is about to be restored: every program checks the schema when it opens the database.
"""


_LOST_STATEMENTS = (asyncpg.InvalidSQLStatementNameError, asyncpg.DuplicatePreparedStatementError)


def map_driver_error(error: Exception) -> Exception:
    """Returns the engine's error for an error of the driver; other errors unchanged."""
    if isinstance(error, asyncpg.DiskFullError):
        return Unavailable(f"the disk of the database is full: {error}", "storage_full")
    if isinstance(error, asyncpg.UniqueViolationError):
        return Conflict("a row with this id or unique key exists already", "idempotency_conflict")
    if isinstance(error, asyncpg.UndefinedColumnError):
        return missing_column_error(error)
    if isinstance(error, asyncpg.DataError) and isinstance(error.__cause__, OverflowError):
        return Invalid("a number does not fit into 64 bits")
    if isinstance(error, asyncpg.ClientConfigurationError):
        return Invalid(f"the database address is invalid: {error}", "database_invalid")
    return _map_pooler_error(error) or map_outage(error) or error


def _map_pooler_error(error: Exception) -> TenutoError | None:
    """Returns the error for statements or settings lost to a pooler or migration, or `None`."""
    if isinstance(error, asyncpg.InvalidCachedStatementError):
        return Unavailable(
            "the schema changed after statements were prepared; try again, and behind a pooler run"
            " RECONNECT there",
            "database_switching",
        )
    if isinstance(error, _LOST_STATEMENTS):
        return Unavailable(
            "the pooler loses prepared statements; set its max_prepared_statements above 0",
            "pooler_unsuitable",
        )
    if isinstance(error, asyncpg.PostgresError) and "startup parameter" in str(error):
        return Incompatible(
            f"a pooler rejects the connection settings: {first_line(error)};"
            " set pooler=transaction",
            "pooler_unsuitable",
        )
    return None


def map_outage(error: Exception) -> TenutoError | None:
    """Returns `Unavailable` with a text for users if the error is an outage, else `None`."""
    if isinstance(error, RETRYABLE) or not isinstance(error, _OUTAGE):
        return None
    if isinstance(error, _SWITCHOVER):
        return Unavailable(
            "the database is being switched over; try again in a few seconds", "database_switching"
        )
    if isinstance(error, _DRIVER_INTERNAL):
        return Unavailable("the database does not answer: the connection was lost")
    if isinstance(error, asyncpg.InsufficientPrivilegeError):
        return Unavailable(f"the database login lacks a privilege: {first_line(error)}")
    if isinstance(error, TimeoutError) and not str(error):
        return Unavailable("the database does not answer in time")
    return Unavailable(f"the database does not answer: {first_line(error)}")


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's text, or the name of its class."""
    text = str(error) or type(error).__name__
    return text.splitlines()[0]
