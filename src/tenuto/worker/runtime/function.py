"""Runs handlers in this process: coroutines on the event loop, plain functions on threads."""

import asyncio
import ctypes
import threading
import traceback
from collections.abc import Callable, Mapping
from contextvars import copy_context
from inspect import isawaitable, iscoroutine, iscoroutinefunction
from typing import Any

from tenuto.model.errors import Invalid
from tenuto.model.tasks.commands import Failure
from tenuto.model.tasks.retry import ErrorClass
from tenuto.worker.context import Context, SyncContext
from tenuto.worker.handler_waits import Parked
from tenuto.worker.runtime.protocol import AttemptFailed, Handler, RuntimeContext


class AttemptStopped(BaseException):
    """Raised inside a plain function whose attempt has to stop."""


class _HandlerError(Exception):
    """Wraps an exception of a handler on a thread."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error


class FunctionRuntime:
    """Runs handlers by task type; the one under `None` runs every other type."""

    name = "function"

    def __init__(self, handlers: Mapping[str | None, Handler]) -> None:
        self.handlers = dict(handlers)
        types = tuple(sorted(str(task_type) for task_type in handlers))
        self.task_types = None if None in handlers else types
        self._async: dict[str, tuple[Handler, bool]] = {}

    def free_sessions(self, busy: int) -> int | None:
        """Returns `None`: only the slots limit handlers in this process."""
        del busy
        return None

    def release_reservation(self) -> None:
        """Does nothing: `free_sessions` reserves nothing."""

    async def run(self, context: Context, grace_s: float, receipt: dict[str, Any]) -> Any:
        """Returns the result of the task type's handler, or `None`'s; raises `AttemptFailed`."""
        handler = self.handlers.get(context.work.task_type) or self.handlers[None]
        try:
            if self._is_async(context.work.task_type, handler):
                return await handler(context)
            result = await _run_on_thread(handler, context, grace_s)
            return await result if isawaitable(result) else result
        except asyncio.CancelledError:
            receipt |= {"state": "ended", "how": "handler cancelled"}
            raise
        except (AttemptFailed, Parked):
            raise
        except BaseException as error:
            # Whatever a handler raises, even exit(), ends its attempt and not the worker.
            raise AttemptFailed(failure_from_exception(error)) from error

    def _is_async(self, task_type: str, handler: Handler) -> bool:
        """True if the handler is a coroutine function; cached by task type."""
        cached = self._async.get(task_type)
        if cached is None or cached[0] is not handler:
            # A handler may be an object whose `__call__` is a coroutine function.
            call_method = type(handler).__call__
            is_coroutine = iscoroutinefunction(handler) or iscoroutinefunction(call_method)
            cached = self._async[task_type] = (handler, is_coroutine)
        return cached[1]


def create(context: RuntimeContext) -> FunctionRuntime:
    """Creates the runtime of the agent's handlers; raises `Invalid` if there are none."""
    if context.handlers is None:
        raise Invalid("the runtime function needs handlers; use --app")
    return FunctionRuntime(context.handlers)


def failure_from_exception(error: BaseException) -> Failure:
    """Converts a handler's exception to a failure with message, error class and stack."""
    known_classes: list[tuple[type[BaseException], ErrorClass]] = [
        (MemoryError, ErrorClass.OUT_OF_MEMORY),
        (SyntaxError, ErrorClass.SYNTAX),
        (TimeoutError, ErrorClass.TIMEOUT),
        (ConnectionError, ErrorClass.CONNECTION),
    ]
    matches = (error_class for cls, error_class in known_classes if isinstance(error, cls))
    error_class = next(matches, ErrorClass.ERROR)
    try:
        message = str(error)
        stack = "".join(traceback.format_exception(error))
    except Exception:  # noqa: BLE001  an exception that cannot even be printed
        return Failure(message=type(error).__name__, error_class=error_class)
    text = f"{type(error).__name__}: {message}" if message else type(error).__name__
    return Failure(message=text, error_class=error_class, stack=stack)


async def _run_on_thread(handler: Handler, context: Context, grace_s: float) -> Any:
    """Runs the function on a new thread and returns its result.

    If cancelled: raises `AttemptStopped` in the function, then waits up to `grace_s` plus an hour.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()
    sync_context = SyncContext(context, loop)
    call = _ThreadCall(
        lambda: handler(sync_context),
        lambda result, error: loop.call_soon_threadsafe(_resolve_future, future, result, error),
    )
    name, run = f"task {context.task_id}", copy_context().run
    threading.Thread(target=run, args=(call.run,), name=name, daemon=True).start()
    try:
        return await asyncio.shield(future)
    except _HandlerError as wrapped:
        if isinstance(wrapped.error, AttemptFailed | Parked):
            raise wrapped.error from None
        raise AttemptFailed(failure_from_exception(wrapped.error)) from wrapped.error
    except asyncio.CancelledError:
        sync_context.stopping = True
        call.interrupt()
        # A thread cannot be killed. If it continues, the heartbeat ends the worker.
        await asyncio.wait([future], timeout=grace_s + 3600)
        if future.done() and future.exception() is None and iscoroutine(future.result()):
            future.result().close()  # created too late to start
        raise


class _ThreadCall:
    """A handler's call on a thread, interrupted at most once, and only while it is running.

    The system reuses the id of an ended thread for the next one, and an exception raised in a
    thread from outside arrives a little later: in both cases it may only reach the handler.
    """

    def __init__(
        self, call: Callable[[], Any], set_outcome: Callable[[Any, BaseException | None], object]
    ) -> None:
        self._handler_call = call
        self._set_outcome = set_outcome
        # Reentrant: an interrupt right after an acquire may keep the owner from the release.
        self._lock = threading.RLock()
        self._interrupt_requested = False
        self._thread_id: int | None = None
        """The id of the thread while it may be interrupted."""

    def run(self) -> None:
        """Calls the handler and sets its outcome, wherever an interrupt arrives."""
        outcome: tuple[Any, BaseException | None] = None, AttemptStopped()
        try:
            outcome = self._call_handler()
            self._disallow_interrupt()
            self._set_outcome(*outcome)
        except BaseException:  # noqa: BLE001  an interrupt outside the handler: there is only one
            self._disallow_interrupt()
            self._set_outcome(*outcome)  # perhaps again: the first outcome counts

    def interrupt(self) -> None:
        """Raises `AttemptStopped` in the handler; prevents its start if it has not started.

        Does nothing if the handler has ended.
        """
        with self._lock:
            self._interrupt_requested = True
            if self._thread_id is not None:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(self._thread_id), ctypes.py_object(AttemptStopped)
                )

    def _call_handler(self) -> tuple[Any, BaseException | None]:
        """Calls the handler unless interrupted; returns (result, `None`) or (`None`, exception)."""
        with self._lock:
            if self._interrupt_requested:
                return None, AttemptStopped()
            self._thread_id = threading.get_ident()
        try:
            return self._handler_call(), None
        except BaseException as error:  # noqa: BLE001  passed to the attempt
            return None, error

    def _disallow_interrupt(self) -> None:
        """Makes later interrupts do nothing."""
        with self._lock:
            self._thread_id = None


def _resolve_future(
    future: "asyncio.Future[Any]", result: Any, error: BaseException | None
) -> None:
    """Sets the result or the exception of the future, unless it is already done."""
    if future.done():
        return
    if error is not None:
        # Wrapped: a future rejects StopIteration, and a SystemExit would end the event loop.
        future.set_exception(_HandlerError(error))
        future.exception()  # marks it as retrieved: a cancelled attempt may never read it
    else:
        future.set_result(result)
