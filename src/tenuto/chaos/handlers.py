"""The task handlers of a run, for `orchestrate worker --app`; they write to the recorder."""

import os
import signal
import threading
from typing import Any

from tenuto.chaos.recorder import append_lines
from tenuto.clock import Clock
from tenuto.periodic import wait_first_event

_CLOCK = Clock()
SAVES = 3
LONG_S = 2.5
COMMAND = (
    'echo "start $TENUTO_TASK_ID $TENUTO_ATTEMPT 0" >>"$1"; sleep 0.3;'
    ' echo "end $TENUTO_TASK_ID $TENUTO_ATTEMPT" >>"$1";'
    ' echo "{\\"output\\": {\\"attempt\\": $TENUTO_ATTEMPT}}" >&3'
)


async def _wait(seconds: float) -> None:
    """Waits that many seconds without blocking the event loop."""
    await wait_first_event([], seconds, _CLOCK)


def _record_start(ctx: Any) -> None:
    """Records the start, with the checkpoint that the attempt begins with."""
    append_lines(f"start {ctx.task_id} {ctx.attempt} {ctx.checkpoint or 0}")


def _record_end(ctx: Any) -> dict[str, int]:
    """Records the end; the result contains the attempt number, so that the checker can compare."""
    append_lines(f"end {ctx.task_id} {ctx.attempt}")
    return {"attempt": ctx.attempt}


async def short(ctx: Any) -> dict[str, int]:
    """Finishes quickly."""
    _record_start(ctx)
    await _wait(0.05)
    return _record_end(ctx)


async def long(ctx: Any) -> dict[str, int]:
    """Runs longer than a lease: another worker runs the task when a stopped one continues."""
    _record_start(ctx)
    await _wait(LONG_S)
    return _record_end(ctx)


def thread(ctx: Any) -> dict[str, int]:
    """Runs on a thread, because it is not a coroutine."""
    _record_start(ctx)
    threading.Event().wait(0.2)
    return _record_end(ctx)


async def saving(ctx: Any) -> dict[str, int]:
    """Saves checkpoints up to the third, continuing earlier ones; returns the attempt number."""
    _record_start(ctx)
    for number in range(ctx.checkpoint or 0, SAVES):
        await _wait(0.1)
        await ctx.save(number + 1)
        append_lines(f"save {ctx.task_id} {ctx.attempt} {number + 1}")
    return _record_end(ctx)


async def failing(ctx: Any) -> None:
    """Fails in every attempt."""
    _record_start(ctx)
    raise RuntimeError("fails on purpose")


async def poison(ctx: Any) -> None:
    """Kills its worker in every attempt."""
    _record_start(ctx)
    os.kill(os.getpid(), signal.SIGKILL)


handlers = {
    function.__name__: function for function in (short, long, thread, saving, failing, poison)
}
