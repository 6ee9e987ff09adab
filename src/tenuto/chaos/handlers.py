"""What the tasks of a run do, and how they tell the recorder: for `orchestrate worker --app`."""

import os
import signal
import threading
from typing import Any

from tenuto.chaos.recorder import note
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


async def _pause(seconds: float) -> None:
    await wait_first_event([], seconds, _CLOCK)


def _start(ctx: Any) -> None:
    note(f"start {ctx.task_id} {ctx.attempt} {ctx.checkpoint or 0}")


def _end(ctx: Any) -> dict[str, int]:
    """Tell the recorder; the result names its attempt, so that a foreign one is known."""
    note(f"end {ctx.task_id} {ctx.attempt}")
    return {"attempt": ctx.attempt}


async def short(ctx: Any) -> dict[str, int]:
    _start(ctx)
    await _pause(0.05)
    return _end(ctx)


async def long(ctx: Any) -> dict[str, int]:
    """Longer than a lease: somebody is at it when its first owner wakes up."""
    _start(ctx)
    await _pause(LONG_S)
    return _end(ctx)


def thread(ctx: Any) -> dict[str, int]:
    _start(ctx)
    threading.Event().wait(0.2)
    return _end(ctx)


async def saving(ctx: Any) -> dict[str, int]:
    """Goes on where an earlier attempt has saved."""
    _start(ctx)
    for number in range(ctx.checkpoint or 0, SAVES):
        await _pause(0.1)
        await ctx.save(number + 1)
        note(f"save {ctx.task_id} {ctx.attempt} {number + 1}")
    return _end(ctx)


async def failing(ctx: Any) -> None:
    """Fails whenever it is tried."""
    _start(ctx)
    raise RuntimeError("as planned")


async def poison(ctx: Any) -> None:
    """Kills its worker whenever it is tried."""
    _start(ctx)
    os.kill(os.getpid(), signal.SIGKILL)


handlers = {each.__name__: each for each in (short, long, thread, saving, failing, poison)}
