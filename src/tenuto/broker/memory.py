"""Hints inside one process."""

from collections.abc import Callable, Iterable

from tenuto.broker.protocol import Listener


class MemoryWakeups:
    """Listeners of this process, called where `announce` is called."""

    def __init__(self) -> None:
        self._listeners: list[Listener] = []

    async def open(self) -> None:
        pass

    async def close(self) -> None:
        self._listeners.clear()

    def announce(self, topics: Iterable[str]) -> None:
        for topic in topics:
            self.hear(topic)

    def hear(self, topic: str) -> None:
        for listener in list(self._listeners):
            listener(topic)

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener) if listener in self._listeners else None
