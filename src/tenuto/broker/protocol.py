"""The interface of hints.

A topic is `lane:<id>` (a task became claimable) or `worker:<id>` (a cancel or pause was requested
for a task of that worker). A hint never carries data: its receiver reads the store.
"""

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import msgspec

from tenuto.clock import Clock

Listener = Callable[[str], None]
ALL_TOPICS = "*"
"""The topic that is delivered when hints may have been lost: look for any work."""


class Wakeups(Protocol):
    """Publishes and receives hints."""

    async def open(self) -> None:
        """Starts to receive hints of other processes."""

    async def close(self) -> None:
        """Stops receiving hints."""

    def notify(self, topics: Iterable[str]) -> None:
        """Publishes topics to all processes, soon; never waits and never fails."""

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Calls `listener` with each received topic; returns a function that unsubscribes it."""


class BrokerContext(msgspec.Struct, frozen=True, kw_only=True):
    """What a broker is created with."""

    url: str
    """The setting `broker`; if that is empty, the URL of the database."""
    name: str
    """The name of this process, which is unique."""
    clock: Clock
    listen: bool
    """False if the process only sends hints: `open` is not called then."""
    store: Any
    """The store, for a broker that uses its database."""
