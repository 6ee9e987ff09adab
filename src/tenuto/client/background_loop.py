"""An event loop in a thread of its own; the blocking client runs its async calls on it."""

import asyncio
import threading
from collections.abc import AsyncGenerator, Awaitable, Generator
from typing import Generic, TypeVar

T = TypeVar("T")
G = TypeVar("G")


class BackgroundLoop:
    """An event loop that runs in its own thread until `close`."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="tenuto-client", daemon=True
        )
        self._thread.start()

    @property
    def is_closed(self) -> bool:
        return self._loop.is_closed()

    def wait(self, awaitable: Awaitable[T]) -> T:
        """Runs an awaitable on the loop; returns its result or raises its exception."""
        return asyncio.run_coroutine_threadsafe(_await(awaitable), self._loop).result()

    def iterate(self, items: AsyncGenerator[T, None]) -> Generator[T, None, None]:
        """Yields the items of an async generator; closes it if the iteration stops early."""
        try:
            while True:
                try:
                    yield self.wait(anext(items))
                except StopAsyncIteration:
                    return
        finally:
            if not self.is_closed:
                self.wait(items.aclose())

    def close(self) -> None:
        """Stops the loop and ends the thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _await(awaitable: Awaitable[T]) -> T:
    return await awaitable


class BlockingResource(Generic[G]):
    """Base of the blocking resources: each method waits for that of an async resource."""

    def __init__(self, loop: BackgroundLoop, resource: G) -> None:
        self._wait = loop.wait
        self._iterate = loop.iterate
        self._resource = resource
