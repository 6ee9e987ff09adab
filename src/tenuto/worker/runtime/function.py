"""Handlers in this process: coroutines on the event loop, plain functions on threads."""

import asyncio
import ctypes
import threading
import traceback
from collections.abc import Callable
from contextvars import copy_context
from inspect import isawaitable, iscoroutine, iscoroutinefunction
from typing import Any

from tenuto.model.tasks.commands import Failure
from tenuto.model.tasks.retry import ErrorClass
from tenuto.worker.context import Context, SyncContext
from tenuto.worker.handler_waits import Parked
from tenuto.worker.runtime.protocol import AttemptFailed

Handler = Callable[[Any], Any]


class AttemptStopped(BaseException):
    """Raised inside a plain function whose attempt has to end."""


class _HandlerError(Exception):
    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error


class FunctionRuntime:
    """Handlers by task type; the one under `None` takes every other type."""

    name = "function"

    def __init__(self) -> None:
        self.handlers: dict[str | None, Handler] = {}
        self._async: dict[str, tuple[Handler, bool]] = {}

    def free_sessions(self, busy: int) -> int | None:
        del busy
        return None

    def release_reservation(self) -> None:
        pass

    async def run(self, context: Context, grace_s: float, receipt: dict[str, Any]) -> Any:
        handler = self.handlers.get(context.work.task_type) or self.handlers[None]
        try:
            if self._is_async(context.work.task_type, handler):
                return await handler(context)
            made = await _on_thread(handler, context, grace_s)
            return await made if isawaitable(made) else made
        except asyncio.CancelledError:
            receipt |= {"state": "ended", "how": "handler cancelled"}
            raise
        except (AttemptFailed, Parked):
            raise
        except BaseException as error:
            # Whatever a handler raises, exit() included, ends its attempt and not the worker.
            raise AttemptFailed(failure_of(error)) from error

    def _is_async(self, task_type: str, handler: Handler) -> bool:
        known = self._async.get(task_type)
        if known is None or known[0] is not handler:
            called = type(handler).__call__  # an object's, which may be a coroutine, too
            awaited = iscoroutinefunction(handler) or iscoroutinefunction(called)
            known = self._async[task_type] = (handler, awaited)
        return known[1]


def failure_of(error: BaseException) -> Failure:
    """What an exception of a handler means for the retry policy."""
    kinds: list[tuple[type[BaseException], ErrorClass]] = [
        (MemoryError, ErrorClass.OUT_OF_MEMORY),
        (SyntaxError, ErrorClass.SYNTAX),
        (TimeoutError, ErrorClass.TIMEOUT),
        (ConnectionError, ErrorClass.CONNECTION),
    ]
    found = (kind for cls, kind in kinds if isinstance(error, cls))
    kind = next(found, ErrorClass.ERROR)
    try:
        said = str(error)
        stack = "".join(traceback.format_exception(error))
    except Exception:  # noqa: BLE001  an exception that cannot even be printed
        return Failure(message=type(error).__name__, error_class=kind)
    text = f"{type(error).__name__}: {said}" if said else type(error).__name__
    return Failure(message=text, error_class=kind, stack=stack)


async def _on_thread(handler: Handler, context: Context, grace_s: float) -> Any:
    """The function's result, from a thread of its own; a cancel reaches it as `Stopped`."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()
    outside = SyncContext(context, loop)
    call = _ThreadCall(
        lambda: handler(outside),
        lambda result, error: loop.call_soon_threadsafe(_settle, future, result, error),
    )
    name, run = f"task {context.task_id}", copy_context().run
    threading.Thread(target=run, args=(call.make,), name=name, daemon=True).start()
    try:
        return await asyncio.shield(future)
    except _HandlerError as raised:
        if isinstance(raised.error, AttemptFailed | Parked):
            raise raised.error from None
        raise AttemptFailed(failure_of(raised.error)) from raised.error
    except asyncio.CancelledError:
        outside.stopping = True
        call.interrupt()
        # A thread cannot be killed. If it goes on for longer, the heart ends the worker.
        await asyncio.wait([future], timeout=grace_s + 3600)
        if future.done() and future.exception() is None and iscoroutine(future.result()):
            future.result().close()  # made too late to begin
        raise


class _ThreadCall:
    """A handler's call on a thread, interrupted at most once, and only while it is under way.

    The system gives the ident of a thread that has ended to the next one, and what is raised in a
    thread from outside comes up a little later: neither may hit anything but the handler.
    """

    def __init__(
        self, call: Callable[[], Any], tell: Callable[[Any, BaseException | None], object]
    ) -> None:
        self._call = call
        self._tell = tell
        # Reentrant: what comes up right behind an acquire may keep its owner from the release.
        self._lock = threading.RLock()
        self._asked = False
        self._ident: int | None = None
        """The thread, while it may be interrupted."""

    def make(self) -> None:
        """Call the handler and tell its outcome, wherever an interrupt comes up."""
        outcome: tuple[Any, BaseException | None] = None, AttemptStopped()
        try:
            outcome = self._outcome()
            self._close()
            self._tell(*outcome)
        except BaseException:  # noqa: BLE001  the interrupt, beside the handler: there is no second
            self._close()
            self._tell(*outcome)  # perhaps again: what is told first counts

    def interrupt(self) -> None:
        """Raise `Stopped` in the handler unless it has ended; one not begun yet never begins."""
        with self._lock:
            self._asked = True
            if self._ident is not None:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(self._ident), ctypes.py_object(AttemptStopped)
                )

    def _outcome(self) -> tuple[Any, BaseException | None]:
        with self._lock:
            if self._asked:
                return None, AttemptStopped()
            self._ident = threading.get_ident()
        try:
            return self._call(), None
        except BaseException as error:  # noqa: BLE001  handed to the attempt
            return None, error

    def _close(self) -> None:
        """From here on nothing is raised in the thread."""
        with self._lock:
            self._ident = None


def _settle(future: "asyncio.Future[Any]", result: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if error is not None:
        # Wrapped: a future takes no StopIteration, and a loop would end itself by a SystemExit.
        future.set_exception(_HandlerError(error))
        future.exception()  # looked at: a cancelled attempt may leave it behind
    else:
        future.set_result(result)
