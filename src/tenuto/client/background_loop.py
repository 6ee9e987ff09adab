"""A loop in a thread of its own, for programs that do not await."""

import asyncio
import threading
from collections.abc import AsyncGenerator, Awaitable, Generator
from typing import Generic, TypeVar

T = TypeVar("T")
G = TypeVar("G")


class BackgroundLoop:
    """An event loop in a thread of its own, until `end`."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="tenuto-client", daemon=True
        )
        self._thread.start()

    @property
    def ended(self) -> bool:
        return self._loop.is_closed()

    def wait(self, work: Awaitable[T]) -> T:
        """What the work answers there."""
        return asyncio.run_coroutine_threadsafe(_awaited(work), self._loop).result()

    def each(self, items: AsyncGenerator[T, None]) -> Generator[T, None, None]:
        """The items, one by one; left off early, they are closed there."""
        try:
            while True:
                try:
                    yield self.wait(anext(items))
                except StopAsyncIteration:
                    return
        finally:
            if not self.ended:
                self.wait(items.aclose())

    def end(self) -> None:
        """Let go of the thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _awaited(work: Awaitable[T]) -> T:
    return await work


class BlockingResource(Generic[G]):
    """Methods that wait for those of an awaited group."""

    def __init__(self, waiter: BackgroundLoop, awaited: G) -> None:
        self._wait = waiter.wait
        self._each = waiter.each
        self._awaited = awaited
