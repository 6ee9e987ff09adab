"""The port through which hints travel.

A topic is `lane:<id>` (a task became claimable) or `worker:<id>` (somebody asked something of what
that worker runs). A hint never carries truth: whoever hears it asks the store.
"""

from collections.abc import Callable, Iterable
from typing import Protocol

Listener = Callable[[str], None]
EVERYTHING = "*"
"""Heard when hints may have been missed: look for everything."""


class Wakeups(Protocol):
    async def open(self) -> None:
        """Start to hear what other processes announce."""

    async def close(self) -> None:
        """Stop hearing."""

    def announce(self, topics: Iterable[str]) -> None:
        """Tell everybody, soon; never waits and never fails."""

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Call `listener` with each topic heard; answers what ends the subscription."""
