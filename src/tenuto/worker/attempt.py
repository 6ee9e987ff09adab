"""Runs one attempt: prepares and starts the session, and reports the outcome."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from datetime import datetime
from typing import Any

from tenuto import tracing
from tenuto.crash_points import crash_point
from tenuto.engine.tasks.claim import ClaimedTask
from tenuto.logs import TASK
from tenuto.model.bounds import MAX_ERROR, MAX_STACK, make_storable
from tenuto.model.errors import Conflict, Invalid
from tenuto.model.tasks.attempts import HUNG_WARNING
from tenuto.model.tasks.commands import Failure
from tenuto.model.tasks.task import TIMEOUT_SLACK_S
from tenuto.model.tenancy.redact import NO_SECRETS, Redactor
from tenuto.settings import Settings
from tenuto.worker.context import Context
from tenuto.worker.engine_protocol import WorkerEngine
from tenuto.worker.handler_waits import Parked
from tenuto.worker.leases import HeldLease, HeldLeases, StopReason
from tenuto.worker.retry_store import RETRYABLE_ERRORS, retry_delays
from tenuto.worker.runtime.protocol import AttemptFailed, CannotStart, Runtime

log = logging.getLogger("tenuto.worker")

ReportOutcome = Callable[[], Awaitable[None]]
OnEnded = Callable[["asyncio.Task[None] | None"], None]
"""Called when the attempt is over, with its asyncio task; `None` if only `run` was called."""
TIMEOUT_GRACE_S = TIMEOUT_SLACK_S - 10.0
"""Maximum seconds that a session which timed out has to stop.

Soon after, the coordinator ends the attempt; the task must not run again beside its old session.
"""
_SUSPENDED_S = 1.0
"""A timer that fires this much too late was suspended, with the whole process."""


class AttemptRunner:
    """Runs one claimed task until its outcome is stored or its lease is lost."""

    def __init__(
        self,
        engine: WorkerEngine,
        work: ClaimedTask,
        runtime: Runtime,
        leases: HeldLeases,
        settings: Settings,
        on_session_ended: Callable[[], None] = lambda: None,
        on_ended: OnEnded = lambda _: None,
    ) -> None:
        self._engine = engine
        self._work = work
        self._runtime = runtime
        self._leases = leases
        self._settings = settings
        self._on_session_ended = on_session_ended
        self._on_ended = on_ended
        # The engine redacts all that is stored. The worker redacts texts that it cuts first: the
        # parts of a cut secret could not be recognised.
        self._redactor = Redactor(work.secrets) if work.secrets else NO_SECRETS
        self._lease = HeldLease(work.fence, self.stop, warn=self.warn)
        self._task: asyncio.Task[None] | None = None
        self._running: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._was_timer_extended = False
        """True if the timer was extended once by the time that the process was suspended."""
        self._stopping = False
        self._reports_result = False
        """True if the outcome that is being reported is a result."""
        self._receipt: dict[str, Any] = {}
        self._context = Context(engine, work, settings.transcript_kb, self._redactor)

    def start(self, loop: asyncio.AbstractEventLoop) -> asyncio.Task[None]:
        """Starts `run` in a new asyncio task and returns that task."""
        task = self._task = loop.create_task(self.run())
        return task

    def stop(self, reason: StopReason) -> None:
        """Requests the session's stop, without waiting; later, only lost or cancel changes why."""
        if self._lease.reason is None or reason in ("lost", "cancel"):
            self._lease.stop_requested_at = self._engine.clock.elapsed()
            self._lease.reason = reason
        if reason == "timeout":
            self._lease.longest_grace_s = self._context.longest_grace_s = TIMEOUT_GRACE_S
        if self._running is not None and not self._stopping:
            # Once: a second cancel would interrupt the kill and report the end too early.
            self._stopping = True
            self._running.cancel()

    def warn(self) -> None:
        """Schedules the warning that the session seems to hang. Callable from any thread."""
        running = self._running
        if running is not None:
            with suppress(RuntimeError):  # the loop is closed, and the session has ended
                running.get_loop().call_soon_threadsafe(self._warn)

    def _warn(self) -> None:
        """Sets `warned` and adds a warning to the transcript, unless the session has ended."""
        if not self._lease.ended:
            self._context.warned = True
            self._context.log(HUNG_WARNING, "WARN")

    async def run(self) -> None:
        """Runs the session and reports its outcome; raises only if the worker is being cancelled.

        All logs and spans of the attempt carry the task's id.
        """
        TASK.set(self._work.fence.task)
        self._leases.add(self._lease)
        try:
            with tracing.span("run", self._work.trace_id, self._work.fence.task):
                try:
                    report = await self._run_session()
                finally:
                    self._on_session_ended()
                self._lease.ended = True
                if self._context.transcript is not None:
                    await self._context.flush()
                if not self._context.parked:  # a parked attempt is already stored
                    await self._report_until_stored(report)
        except Exception:
            log.exception(
                "internal error in attempt %d at task %s",
                self._work.fence.attempt,
                self._work.fence.task,
            )
        finally:
            self._leases.remove(self._lease)
            # Called here, not as a callback of the task, which would take another tick of the loop.
            self._on_ended(self._task)
            # No reference cycles: an ended attempt is freed at once, not by the garbage collector.
            self._lease.stop = _ignore_stop
            self._lease.warn = _ignore_warning
            self._task = None

    async def _run_session(self) -> ReportOutcome:
        """Runs the session, up to its timeout; returns the function that reports its outcome."""
        crash_point("worker.before_start")
        self._running = self._task
        if self._work.timeout_s is not None:
            self._start_timer(self._work.timeout_s)
        try:
            crash_point("worker.running")
            grace_s, receipt = self._settings.grace_s, self._receipt
            output = await self._runtime.run(self._context, grace_s, receipt)
            return lambda: self._complete(output)
        except asyncio.CancelledError:
            if self._lease.reason is not None:
                return self._report_stopped
            if _is_cancelled_by_worker():
                raise
            attempt_failed = AttemptFailed(Failure(message="the handler cancelled itself"))
        except CannotStart as error:
            failure = self._make_storable_failure(error.failure)
            return lambda: self._engine.not_started(self._work.fence, failure)
        except Parked:
            return _report_nothing
        except AttemptFailed as error:
            attempt_failed = error
        except Exception as error:
            log.exception("internal error of the runtime ends attempt %d", self._work.fence.attempt)
            attempt_failed = AttemptFailed(
                Failure(message=f"internal error of the worker: {error!r}")
            )
        finally:
            self._running = None
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
        return lambda: self._fail(attempt_failed)

    def _start_timer(self, seconds: float) -> None:
        """Starts the timer that stops the session after `seconds`; cancels no earlier timer."""
        loop = asyncio.get_running_loop()
        due = self._engine.clock.elapsed() + seconds
        self._timer = loop.call_later(seconds, self._on_timer, due)

    def _on_timer(self, due: float) -> None:
        """Stops the session, or restarts the timer once for the time the process was suspended."""
        late_s = self._engine.clock.elapsed() - due
        if late_s < _SUSPENDED_S or self._was_timer_extended:
            self.stop("timeout")
        else:
            self._was_timer_extended = True
            self._start_timer(late_s)

    def _complete(self, output: Any) -> Awaitable[None]:
        """Returns the awaitable that sends `output` to the engine once, as the attempt's result."""
        crash_point("worker.before_complete")
        self._reports_result = True
        return self._engine.complete(self._work.fence, output)

    async def _fail(self, error: AttemptFailed) -> None:
        """Sends the failure to the engine once; ignores a `resume_at` without a time zone."""
        crash_point("worker.before_fail")
        failure = self._make_storable_failure(error.failure)
        at = error.resume_at
        resume_at = at if isinstance(at, datetime) and at.tzinfo is not None else None
        await self._engine.fail(self._work.fence, failure, resume_at)

    def _make_storable_failure(self, failure: Failure) -> Failure:
        """Returns a copy of the failure, redacted and cut to the size limits."""
        redact = self._redactor.redact_text
        return Failure(
            message=make_storable(redact(failure.message), MAX_ERROR),
            error_class=failure.error_class,
            retryable=failure.retryable,
            stack=(
                None if failure.stack is None else make_storable(redact(failure.stack), MAX_STACK)
            ),
            exit_code=failure.exit_code,
        )

    async def _report_stopped(self) -> None:
        """Reports the stop by its reason, as cancelled, paused, timed out, released or gone."""
        self._reports_result = False
        fence = self._work.fence
        match self._lease.reason:
            case "cancel":
                await self._engine.confirm_cancel(fence, self._receipt)
            case "pause":
                await self._engine.confirm_pause(fence, self._receipt)
            case "timeout":
                await self._engine.time_out(fence, self._receipt)
            case "drain":
                await self._engine.release(fence)
                crash_point("worker.released")
            case _:
                log.warning(
                    "attempt %d at task %s lost its lease and was stopped",
                    fence.attempt,
                    fence.task,
                )
                await self._engine.confirm_gone(fence, self._receipt or {"state": "ended"})

    async def _report_until_stored(self, report: ReportOutcome) -> None:  # noqa: C901  one branch per kind of error
        """Reports until stored or refused, despite outages; a stop or error replaces the outcome.

        If the lease is lost, reports only that the session has stopped.
        """
        delays: Iterator[float] | None = None
        is_plain_failure = False
        while True:
            if self._lease.reason == "lost":
                report = self._report_stopped
            reason = self._lease.reason
            try:
                await report()
            except RETRYABLE_ERRORS as error:
                log.warning(
                    "outcome of task %s is not stored yet and is retried: %s",
                    self._work.fence.task,
                    error,
                )
                delays = delays or retry_delays()
                await self._engine.clock.sleep(next(delays))
            except Conflict as error:
                # The heartbeat may have received another request during this report.
                if not self._adopt_stop_request(error) or (
                    report == self._report_stopped and reason == self._lease.reason
                ):
                    log.warning("outcome of task %s was refused: %s", self._work.fence.task, error)
                    return
                report = self._report_stopped
            except asyncio.CancelledError:
                if _is_cancelled_by_worker() and self._lease.reason is None:
                    raise  # else: asked to stop during the report; the report decides
            except Exception as error:  # refused, or an internal error: waiting helps neither
                if is_plain_failure:
                    log.exception("outcome of task %s was refused", self._work.fence.task)
                    return
                is_plain_failure = not self._reports_result
                report = self._build_failure_report(error)
            else:
                if self._reports_result:
                    crash_point("worker.complete_answered")
                return

    def _build_failure_report(self, error: Exception) -> ReportOutcome:
        """Returns the function that reports a failure, without a retry if a result is invalid.

        A result that cannot be stored would be refused again.
        """
        is_permanent = self._reports_result and isinstance(error, Invalid)
        subject = "the result" if is_permanent else "what the attempt reported"
        self._reports_result = False
        message = make_storable(
            self._redactor.redact_text(f"{subject} is refused: {error}"), MAX_ERROR
        )
        failure = Failure(message=message, retryable=False if is_permanent else None)
        return lambda: self._engine.fail(self._work.fence, failure)

    def _adopt_stop_request(self, error: Conflict) -> bool:
        """True if a cancel or pause request caused the error; records it as the stop reason."""
        reasons: dict[str, StopReason] = {"cancel_requested": "cancel", "pause_requested": "pause"}
        reason = reasons.get(error.code)
        if reason is None:
            return False
        self._lease.reason = reason
        self._receipt = self._receipt or {"state": "ended", "how": "finished by itself"}
        return True


async def _report_nothing() -> None:
    """Reports nothing: the store already has the outcome of the attempt."""


def _ignore_stop(_reason: StopReason) -> None:
    """Does nothing: the attempt has ended already."""


def _ignore_warning() -> None:
    """Does nothing: the attempt has ended already."""


def _is_cancelled_by_worker() -> bool:
    """True if the current asyncio task is being cancelled, because the worker is stopping."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
