"""Which connections a server keeps, and deadlines of clients. Pure: no socket, no clock."""

from collections import Counter
from typing import Generic, Literal, TypeVar

import msgspec

K = TypeVar("K")


class Deadlines(msgspec.Struct, frozen=True):
    """Time limits of a client, in seconds, and minimum rates."""

    head_s: float = 10.0
    """From the start of the connection or a request's first byte to the end of the headers."""
    body_s: float = 60.0
    """From the end of the headers to the end of the body; each byte adds time, see `body_rate`."""
    body_rate: float = 16 * 1024
    """Minimum bytes per second of a longer body."""
    body_idle_s: float = 10.0
    """Maximum time without a byte of the body, whatever its rate was before."""
    write_s: float = 60.0
    """Maximum time that responses wait for a client that reads less than `min_read_bytes`."""
    min_read_bytes: int = 64 * 1024
    """Bytes that a client must read within `write_s`, if so many wait for it."""
    sweep_s: float = 1.0
    """Time between checks of all connections."""
    linger_s: float = 2.0
    """Time that a refused client may go on sending, so that it can read the refusal."""

    def body_deadline(self, started: float, received: int, last_data_at: float) -> float:
        """Returns when a body is overdue: too slow as a whole, or no byte for too long.

        `started` is the end of the headers, `received` the number of bytes so far.
        """
        return min(
            started + self.body_s + received / self.body_rate, last_data_at + self.body_idle_s
        )


class ReadProgress:
    """Tracks how much of its responses a client reads."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._goal = 0

    def is_too_slow(self, now: float, written: int, unsent: int, deadlines: Deadlines) -> bool:
        """True if the client read too little for `write_s`; stores the progress for the next call.

        Too little: neither `min_read_bytes` nor all bytes that waited. `written` counts all bytes
        of responses so far, `unsent` those still in the buffer. New responses may keep the buffer
        filled all the time, so the bytes that left it are counted.
        """
        sent = written - unsent
        if not unsent:
            self._since = None
            return False
        if self._since is None or sent >= self._goal:
            self._since, self._goal = now, sent + min(unsent, deadlines.min_read_bytes)
        return now - self._since >= deadlines.write_s


class Decision(msgspec.Struct, Generic[K], frozen=True):
    """Whether a new connection is accepted, and the connection to close for it, if any."""

    accepted: bool
    closed: K | None = None


class ConnectionTable(Generic[K]):
    """Counts connections, in total and per address, and chooses which to close for a new one."""

    def __init__(self, max_total: int, max_per_address: int) -> None:
        self.max_total = max_total
        self.max_per_address = max_per_address
        self._addresses: dict[K, str | None] = {}
        self._counts: Counter[str] = Counter()
        # Ordered by time: the first has been closable longest.
        self._closable: dict[K, Literal[True]] = {}

    def __len__(self) -> int:
        return len(self._addresses)

    def count(self, address: str) -> int:
        """Returns how many connections the address has."""
        return self._counts[address]

    def add(self, key: K, address: str | None) -> Decision[K]:
        """Adds a closable connection if limits allow it; may remove the one closable longest.

        The decision names the removed connection, for closing; it is removed only if the total is
        reached. A connection without an address counts only for the total.
        """
        if address is not None and self._counts[address] >= self.max_per_address:
            return Decision(accepted=False)
        closed = None
        if len(self._addresses) >= self.max_total:
            closed = next(iter(self._closable), None)
            if closed is None:
                return Decision(accepted=False)
            self.remove(closed)
        self._addresses[key] = address
        self._closable[key] = True
        if address is not None:
            self._counts[address] += 1
        return Decision(True, closed)

    def mark_served(self, key: K) -> None:
        """Marks the connection as served: it is not closed for another one."""
        self._closable.pop(key, None)

    def mark_closable(self, key: K) -> None:
        """Marks the connection as closable for another one; a marked one keeps its position."""
        if key in self._addresses:
            self._closable[key] = True

    def remove(self, key: K) -> None:
        """Removes a connection that has ended; does nothing if it is not in the table."""
        if key not in self._addresses:
            return
        address = self._addresses.pop(key)
        self._closable.pop(key, None)
        if address is not None:
            self._counts[address] -= 1
            if not self._counts[address]:
                del self._counts[address]
