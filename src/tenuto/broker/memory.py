"""Hints within one process."""

from collections.abc import Callable, Iterable

from tenuto.broker.protocol import BrokerContext, Listener


class MemoryWakeups:
    """Calls the listeners of this process directly in `notify`."""

    def __init__(self) -> None:
        self._listeners: list[Listener] = []

    async def open(self) -> None:
        """Does nothing: there are no other processes."""

    async def close(self) -> None:
        """Removes all listeners."""
        self._listeners.clear()

    def notify(self, topics: Iterable[str]) -> None:
        """Calls all listeners of this process with each topic, at once."""
        for topic in topics:
            self.deliver(topic)

    def deliver(self, topic: str) -> None:
        """Calls all listeners of this process with one topic, at once."""
        for listener in list(self._listeners):
            listener(topic)

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Calls `listener` with each topic; returns a function that unsubscribes it."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener) if listener in self._listeners else None


def create(context: BrokerContext) -> MemoryWakeups:
    """Creates a broker for this process only."""
    del context
    return MemoryWakeups()
