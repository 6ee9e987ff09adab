"""Handlers of the benchmark's worker processes."""

from typing import Any

from tenuto.clock import boot_time


async def noop(ctx: Any) -> None:
    """Does nothing."""


async def when(ctx: Any) -> float:
    """Returns its own start time: seconds since the machine booted."""
    del ctx
    return boot_time()


handlers = {"noop": noop, "when": when}
