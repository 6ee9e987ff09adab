"""Hints within one process."""

from collections.abc import Callable, Iterable

from tenuto.broker.protocol import BrokerContext, Listener


class MemoryWakeups:
    """Calls the listeners of this process directly in `notify`."""

    def __init__(self) -> None:
        self._listeners: list[Listener] = []

    async def open(self) -> None:
        pass

    async def close(self) -> None:
        self._listeners.clear()

    def notify(self, topics: Iterable[str]) -> None:
        for topic in topics:
            self.deliver(topic)

    def deliver(self, topic: str) -> None:
        """Calls all listeners with one topic."""
        for listener in list(self._listeners):
            listener(topic)

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener) if listener in self._listeners else None


def create(context: BrokerContext) -> MemoryWakeups:
    """Creates a broker for this process only."""
    del context
    return MemoryWakeups()
