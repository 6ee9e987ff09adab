"""The clock of a PostgreSQL database, carried forward between readings."""

from datetime import UTC, datetime
from uuid import UUID

from asyncpg.pgproto import pgproto

from tenuto.clock import Clock, to_micros

_MAX_READING_S = 1.0
"""A clock reading that took longer is not used if there was one before."""


class DatabaseClock(Clock):
    """The database's clock, so that hosts with wrong clocks agree.

    It is read every 15 s and extrapolated with the machine's own elapsed time in between.
    """

    def __init__(self) -> None:
        super().__init__()
        self._offset: float | None = None
        self._read_at = 0.0

    def is_stale(self) -> bool:
        """True if the database's clock was not read in the last 15 seconds."""
        return self._offset is None or self.elapsed() - self._read_at > 15

    def store_reading(self, database_now: datetime, before: float, after: float) -> None:
        """Stores a clock reading made between two instants, unless it took too long."""
        if self._offset is None or after - before < _MAX_READING_S:
            self._offset = to_micros(database_now) / 1e6 - (before + after) / 2
            self._read_at = after

    def now(self) -> datetime:
        """Returns the database's time; the machine's before the first reading."""
        if self._offset is None:
            return super().now()
        return datetime.fromtimestamp(self._offset + self.elapsed(), UTC)

    def _as_id(self, value: int) -> UUID:
        """Returns the number as a UUID of the driver's class."""
        # The driver's own UUID class: created and sent in a fifth of the time.
        new_id: UUID = pgproto.UUID(value.to_bytes(16, "big"))
        return new_id
