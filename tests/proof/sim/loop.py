"""An event loop in virtual time, every callback of which belongs to a simulated process.

A callback carries its owner in its context, as do all callbacks and tasks that follow from it. So a
process is killed by never running its callbacks again, and stopped (SIGSTOP) by putting them aside
until it is continued: between any two awaits, whatever the code in between believes.
"""

import asyncio
import heapq
from asyncio import base_events
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context, ContextVar, copy_context
from typing import Any, Literal, TypeVar

T = TypeVar("T")

State = Literal["running", "stopped", "dead", "ended"]
OWNER: ContextVar["Process | None"] = ContextVar("owner", default=None)
MOST_AT_ONE_INSTANT = 100_000
"""Callbacks without time passing after which the program is taken to run in circles."""


class Stalled(Exception):
    """Nothing will ever happen again, or time does not pass any more."""


class Process:
    """A group of callbacks that lives, stops and dies as one."""

    def __init__(self, name: str, kind: str, pid: int) -> None:
        self.name = name
        self.kind = kind
        self.pid = pid
        self.state: State = "running"
        self.fuse: int | None = None
        """Callbacks left until it is killed, if it is to be."""
        self.parked: list[asyncio.Handle] = []
        self.unreachable_until = 0.0
        """Until when the store does not answer this process."""
        self.heartless_until = 0.0
        """Until when it does not answer its heartbeats."""
        self.healthy = False
        """Asked to end when nothing was wrong any more: it has to leave nothing behind."""
        self.gone = asyncio.Event()
        self.stop = asyncio.Event()
        self.context = copy_context()
        self.context.run(OWNER.set, self)

    def kill(self) -> None:
        """No callback of it runs any more."""
        if self.state in ("running", "stopped"):
            self.state = "dead"
            self.parked.clear()
            self.gone.set()

    def end(self) -> None:
        """Ends the process after its main coroutine: all that it left is dropped, as at an exit."""
        if self.state in ("running", "stopped"):
            self.state = "ended"
            self.parked.clear()
            self.gone.set()


class VirtualLoop(base_events.BaseEventLoop):
    """Runs what is ready; when nothing is, the clock jumps to the next timer."""

    _ready: deque[Any]
    _scheduled: list[Any]

    def __init__(self) -> None:
        super().__init__()
        self._at = 0.0
        self._here = 0
        self.turns = 0
        """Callbacks of processes that ran so far."""
        self.made: list[tuple[asyncio.Task[Any], Process | None]] = []
        """Every task, with its owner."""

    def time(self) -> float:
        return self._at

    def create_task(  # type: ignore[override]  # names are of no use here
        self,
        coro: Coroutine[Any, Any, T],
        *,
        name: str | None = None,
        context: Context | None = None,
    ) -> asyncio.Task[T]:
        task = super().create_task(coro, context=context)
        self.made.append((task, OWNER.get() if context is None else context.get(OWNER)))
        return task

    def resume(self, process: Process) -> None:
        """Run what was put aside while the process was stopped."""
        if process.state == "stopped":
            process.state = "running"
            self._ready.extend(process.parked)
            process.parked.clear()

    def _write_to_self(self) -> None:
        """There is no selector to wake."""

    def _run_once(self) -> None:
        ready, timers = self._ready, self._scheduled
        if not ready:
            while timers and timers[0]._cancelled:
                heapq.heappop(timers)
            if not timers:
                raise Stalled("nothing is left that could happen")
            if timers[0]._when > self._at:
                self._at = timers[0]._when
                self._here = 0
        while timers and timers[0]._when <= self._at:
            timer = heapq.heappop(timers)
            timer._scheduled = False
            ready.append(timer)
        self._here += len(ready)
        if self._here > MOST_AT_ONE_INSTANT:
            raise Stalled(f"time stands still at {self._at:.3f}")
        for _ in range(len(ready)):
            handle = ready.popleft()
            if not handle._cancelled and self._may_run(handle):
                handle._run()

    def _may_run(self, handle: asyncio.Handle) -> bool:
        owner: Process | None = handle._context.get(OWNER)  # type: ignore[attr-defined]
        if owner is None:
            return True
        if owner.state == "running":
            self.turns += 1
            if owner.fuse is not None:
                owner.fuse -= 1
                if owner.fuse <= 0:
                    owner.kill()
                    return False
            return True
        if owner.state == "stopped":
            owner.parked.append(handle)
        return False


def run_now(coroutine: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that never waits."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    raise AssertionError("it waited")


def discard(task: "asyncio.Task[Any]") -> None:
    """Let go of a task that will never run again, without a word in any log."""
    task._log_destroy_pending = False  # type: ignore[attr-defined]
    coroutine = task.get_coro()
    for _ in range(100):
        try:
            coroutine.close()
        except RuntimeError:
            continue  # a `finally` waits for something: break that off as well
        return


def later(
    loop: asyncio.AbstractEventLoop, seconds: float, subject: Callable[..., object], *args: Any
) -> None:
    """Call something that belongs to no process after that time."""
    loop.call_later(seconds, subject, *args, context=OUTSIDE)


OUTSIDE = Context()
