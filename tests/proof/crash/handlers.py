"""Handlers that do what handlers should not: for `orchestrate worker --app`."""

import asyncio
import sys
import threading
from contextlib import suppress
from typing import Any

from tenuto.clock import boot_time

TICK_S = 0.2


async def deaf(ctx: Any) -> None:
    """Will not be cancelled."""
    ctx.log("up")
    while True:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ctx.log("not me")


def deaf_thread(ctx: Any) -> None:
    """Will not be interrupted: never between two steps of the interpreter."""
    ctx.log("up")
    threading.Event().wait()


async def busy(ctx: Any) -> None:
    """Keeps the event loop to itself."""
    ctx.log("up")
    await ctx.flush()
    threading.Event().wait()


def calm(ctx: Any) -> Any:
    """Runs until a later attempt."""
    if ctx.attempt > 1:
        return "later"
    ctx.log("up")
    while not ctx.stopping:
        threading.Event().wait(0.02)
    return "stopped"


async def leave(ctx: Any) -> str:
    """Asks the interpreter to exit."""
    if ctx.attempt == 1:
        sys.exit(3)
    return "second"


def leave_thread(ctx: Any) -> str:
    if ctx.attempt == 1:
        sys.exit(3)
    return "second"


async def interrupt(ctx: Any) -> str:
    """Raises what Ctrl-C raises."""
    if ctx.attempt == 1:
        raise KeyboardInterrupt
    return "second"


def interrupt_thread(ctx: Any) -> str:
    if ctx.attempt == 1:
        raise KeyboardInterrupt
    return "second"


async def together(ctx: Any) -> None:
    """Ends at the same moment as all others that run now, in whatever process."""
    del ctx
    with suppress(TimeoutError):
        async with asyncio.timeout(TICK_S - boot_time() % TICK_S):
            await asyncio.Event().wait()


handlers = {
    item.__name__: item
    for item in (
        deaf,
        deaf_thread,
        busy,
        calm,
        leave,
        leave_thread,
        interrupt,
        interrupt_thread,
        together,
    )
}
