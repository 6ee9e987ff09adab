"""Reads lists page by page."""

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Protocol, TypeVar
from uuid import UUID

PAGE_SIZE = 500


class _Page(Protocol):
    @property
    def next_cursor(self) -> UUID | None: ...


P = TypeVar("P", bound=_Page)
T = TypeVar("T")


async def iterate_pages(
    read: Callable[[int, UUID | None], Awaitable[P]],
    items_of: Callable[[P], Sequence[T]],
    limit: int | None = None,
    cursor: UUID | None = None,
) -> AsyncGenerator[T, None]:
    """Yields the items of all pages after a cursor, at most `limit` items.

    `read` returns the page of a size after a cursor.
    """
    remaining = limit
    while remaining is None or remaining > 0:
        size = PAGE_SIZE if remaining is None else min(remaining, PAGE_SIZE)
        page = await read(size, cursor)
        items = items_of(page)
        for item in items:
            yield item
        remaining = None if remaining is None else remaining - len(items)
        if (cursor := page.next_cursor) is None:
            return
