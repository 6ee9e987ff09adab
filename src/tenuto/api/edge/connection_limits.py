"""Which connections a server keeps, and how long clients may take. Pure: no socket, no clock."""

from collections import Counter
from typing import Generic, Literal, TypeVar

import msgspec

K = TypeVar("K")


class Deadlines(msgspec.Struct, frozen=True):
    """How long a client may take, in seconds, and how slow it may be."""

    head_s: float = 10.0
    """From a request's first byte, or a connection's start, to the end of the headers."""
    body_s: float = 60.0
    """From the end of the headers to the end of the body, for a body of no bytes."""
    body_rate: float = 16 * 1024
    """Bytes a second that a longer body must keep up."""
    body_still_s: float = 10.0
    """How long no byte of a body may come, whatever its rate was before."""
    write_s: float = 60.0
    """How long answers may wait for a client that reads less than `write_least` of them."""
    write_least: int = 64 * 1024
    sweep_s: float = 1.0
    """Seconds between looks at all connections."""
    linger_s: float = 2.0
    """How long a refused client may go on sending, so that it can read why."""

    def body_by(self, begun: float, received: int, heard: float) -> float:
        """When a body of which so many bytes have come, the last at `heard`, is late."""
        return min(begun + self.body_s + received / self.body_rate, heard + self.body_still_s)


class Reading:
    """Whether a client reads what it is sent."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._goal = 0

    def is_too_slow(self, now: float, written: int, unsent: int, deadlines: Deadlines) -> bool:
        """True if for `write_s` neither `write_least` was read nor all that waited before.

        `written` counts all bytes of answers so far, `unsent` those that still wait. New answers
        may keep something waiting all the time: what counts is what has left.
        """
        sent = written - unsent
        if not unsent:
            self._since = None
            return False
        if self._since is None or sent >= self._goal:
            self._since, self._goal = now, sent + min(unsent, deadlines.write_least)
        return now - self._since >= deadlines.write_s


class Decision(msgspec.Struct, Generic[K], frozen=True):
    """What happens to a new connection, and which other one is closed for it."""

    accepted: bool
    closed: K | None = None


class ConnectionTable(Generic[K]):
    """Counts connections, in all and per address, and chooses which one is closed for a new one."""

    def __init__(self, most: int, per_address: int) -> None:
        self.most = most
        self.per_address = per_address
        self._addresses: dict[K, str | None] = {}
        self._counts: Counter[str] = Counter()
        # Ordered by when they began to wait: the first has waited longest.
        self._waiting: dict[K, Literal[True]] = {}

    def __len__(self) -> int:
        return len(self._addresses)

    def count(self, address: str) -> int:
        """How many connections the address has."""
        return self._counts[address]

    def add(self, key: K, address: str | None) -> Decision[K]:
        """Decides about a new connection; one without an address counts for the total alone."""
        if address is not None and self._counts[address] >= self.per_address:
            return Decision(accepted=False)
        closed = None
        if len(self._addresses) >= self.most:
            closed = next(iter(self._waiting), None)
            if closed is None:
                return Decision(accepted=False)
            self.remove(closed)
        self._addresses[key] = address
        self._waiting[key] = True
        if address is not None:
            self._counts[address] += 1
        return Decision(True, closed)

    def serve(self, key: K) -> None:
        """Notes that the connection is being served: it is not closed for another."""
        self._waiting.pop(key, None)

    def wait(self, key: K) -> None:
        """Notes that the connection may be closed for another; a place in the queue stays."""
        if key in self._addresses:
            self._waiting[key] = True

    def remove(self, key: K) -> None:
        """Forgets a connection that has ended."""
        if key not in self._addresses:
            return
        address = self._addresses.pop(key)
        self._waiting.pop(key, None)
        if address is not None:
            self._counts[address] -= 1
            if not self._counts[address]:
                del self._counts[address]
