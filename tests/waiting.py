"""Waits until a condition is true; the only place where tests pass time."""

# ruff: noqa: ASYNC109 - the caller names the limit, because it is part of the failure

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar, overload

T = TypeVar("T")


@overload
async def eventually(
    check: Callable[[], Awaitable[T | None]], timeout: float = ..., every: float = ...
) -> T: ...
@overload
async def eventually(
    check: Callable[[], T | None], timeout: float = ..., every: float = ...
) -> T: ...
async def eventually(
    check: Callable[[], Awaitable[T | None] | T | None],
    timeout: float = 10.0,
    every: float = 0.01,
) -> T:
    """The first truthy result of `check`, plain or awaited; AssertionError after `timeout`."""
    last: T | None = None
    try:
        async with asyncio.timeout(timeout) as limit:
            while True:
                result = check()
                last = await result if isinstance(result, Awaitable) else result
                if last:
                    return last
                await asyncio.sleep(every)
    except TimeoutError:
        if not limit.expired():
            raise
        raise AssertionError(_failure(check, timeout, last)) from None


def eventually_sync(check: Callable[[], T | None], timeout: float = 10.0, every: float = 0.01) -> T:
    """The first truthy result of `check`; AssertionError after `timeout`."""
    deadline = time.monotonic() + timeout
    while not (last := check()):
        if time.monotonic() >= deadline:
            raise AssertionError(_failure(check, timeout, last))
        time.sleep(every)
    return last


def _failure(check: Callable[[], object], timeout: float, last: object) -> str:
    name = getattr(check, "__qualname__", repr(check))
    code = getattr(check, "__code__", None)
    where = f" ({code.co_filename}:{code.co_firstlineno})" if code else ""
    return f"not true within {timeout} s: {name}{where}; last result: {last!r}"
