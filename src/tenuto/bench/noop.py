"""The handlers that the benchmark's worker processes host."""

from typing import Any

from tenuto.clock import boot_time


async def noop(ctx: Any) -> None:
    """Do nothing."""


async def when(ctx: Any) -> float:
    """Answer when it started, on the machine's own time scale."""
    del ctx
    return boot_time()


handlers = {"noop": noop, "when": when}
