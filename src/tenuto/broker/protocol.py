"""The interface of hints.

A topic is `lane:<id>` (a task became claimable) or `worker:<id>` (a cancel or pause was requested
for a task of that worker). A hint never carries data: its receiver reads the store.
"""

from collections.abc import Callable, Iterable
from typing import Protocol

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
