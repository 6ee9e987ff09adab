"""One attempt as a pipeline: prepare, start, run, tell the outcome."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import datetime
from typing import Any

from tenuto import tracing
from tenuto.crash_points import crash_point
from tenuto.engine.tasks.claim import ClaimedTask
from tenuto.logs import TASK
from tenuto.model.bounds import MAX_ERROR, MAX_STACK, clean
from tenuto.model.errors import Conflict, Invalid
from tenuto.model.tasks.attempts import HUNG
from tenuto.model.tasks.commands import Failure
from tenuto.model.tasks.task import TIMEOUT_SLACK_S
from tenuto.model.tenancy.redact import NOTHING, Redactor
from tenuto.settings import Settings
from tenuto.worker.context import Context
from tenuto.worker.engine_protocol import WorkerEngine
from tenuto.worker.handler_waits import Parked
from tenuto.worker.leases import HeldLease, HeldLeases, Reason
from tenuto.worker.retry_store import LATER, retry_delays
from tenuto.worker.runtime.protocol import AttemptFailed, CannotStart, Runtime

log = logging.getLogger("tenuto.worker")

Tell = Callable[[], Awaitable[None]]
Ended = Callable[["asyncio.Task[None] | None"], None]
"""Hears of an attempt's task, when all is told."""
TIMEOUT_GRACE_S = TIMEOUT_SLACK_S - 10.0
"""Seconds at most that a session which ran too long has to end.

Soon after them the coordinator takes the task away, and it must not start again beside itself.
"""
_LATE_S = 1.0
"""A timer that comes so much later than it should stood still with the whole process."""


class AttemptRunner:
    """Runs one claimed task to an outcome that the store knows, or until it is not ours."""

    def __init__(
        self,
        engine: WorkerEngine,
        work: ClaimedTask,
        runtime: Runtime,
        leases: HeldLeases,
        settings: Settings,
        session_ended: Callable[[], None] = lambda: None,
        ended: Ended = lambda _: None,
    ) -> None:
        self._engine = engine
        self._work = work
        self._runtime = runtime
        self._leases = leases
        self._settings = settings
        self._session_ended = session_ended
        self._ended = ended
        # The engine strikes secrets from all that is stored. Struck here is what the worker cuts
        # into pieces first, in which nobody would know a secret again.
        self._redactor = Redactor(work.secrets) if work.secrets else NOTHING
        self._held = HeldLease(work.fence, self.stop, warn=self.warn)
        self._task: asyncio.Task[None] | None = None
        self._running: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._waited = False
        """Whether time that was missed was given again."""
        self._stopping = False
        self._completing = False
        """Whether it is a result that is told."""
        self._receipt: dict[str, Any] = {}
        self._context = Context(engine, work, settings.transcript_kb, self._redactor)

    def start(self, loop: asyncio.AbstractEventLoop) -> asyncio.Task[None]:
        """Run the attempt in a task of its own."""
        task = self._task = loop.create_task(self.run())
        return task

    def stop(self, reason: Reason) -> None:
        """End the session; the outcome follows from the reason."""
        if self._held.reason is None or reason in ("lost", "cancel"):
            self._held.asked_at = self._engine.clock.elapsed()
            self._held.reason = reason
        if reason == "timeout":
            self._held.longest_grace_s = self._context.longest_grace_s = TIMEOUT_GRACE_S
        if self._running is not None and not self._stopping:
            # Once: a second cancel would cut the killing short and tell of an end too early.
            self._stopping = True
            self._running.cancel()

    def warn(self) -> None:
        """Tell the session that it seems to hang. For any thread."""
        running = self._running
        if running is not None:
            with suppress(RuntimeError):  # the loop is gone, and the session with it
                running.get_loop().call_soon_threadsafe(self._warn)

    def _warn(self) -> None:
        if not self._held.ended:
            self._context.warned = True
            self._context.log(HUNG, "WARN")

    async def run(self) -> None:
        """The whole pipeline. Never raises but for a worker that is being torn down.

        What it logs and traces is known to be the task's.
        """
        TASK.set(self._work.fence.task)
        self._leases.add(self._held)
        try:
            with tracing.span("run", self._work.trace_id, self._work.fence.task):
                try:
                    tell = await self._session()
                finally:
                    self._session_ended()
                self._held.ended = True
                if self._context.said is not None:
                    await self._context.flush()
                if not self._context.parked:  # else the store has heard all there is
                    await self._report_until_stored(tell)
        except Exception:
            log.exception("an attempt ended in a fault")
        finally:
            self._leases.remove(self._held)
            # Told here, not by a callback of the task, which would take another turn of the loop.
            self._ended(self._task)
            # Nothing may refer to itself: what is over is freed at once, not by the collector.
            self._held.stop = _over
            self._held.warn = _silent
            self._task = None

    async def _session(self) -> Tell:
        """Run to the end of the session; answers how to tell its outcome."""
        crash_point("worker.before_start")
        self._running = self._task
        if self._work.timeout_s is not None:
            self._time(self._work.timeout_s)
        try:
            crash_point("worker.running")
            grace_s, receipt = self._settings.grace_s, self._receipt
            output = await self._runtime.run(self._context, grace_s, receipt)
            return lambda: self._complete(output)
        except asyncio.CancelledError:
            if self._held.reason is not None:
                return self._stopped
            if _is_cancelled_by_worker():
                raise
            failed = AttemptFailed(Failure(message="the handler cancelled itself"))
        except CannotStart as error:
            failure = self._storable_failure(error.failure)
            return lambda: self._engine.not_started(self._work.fence, failure)
        except Parked:
            return _nothing
        except AttemptFailed as error:
            failed = error
        except Exception as error:
            log.exception("a fault of the runtime ends attempt %d", self._work.fence.attempt)
            failed = AttemptFailed(Failure(message=f"a fault of the worker: {error!r}"))
        finally:
            self._running = None
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
        return lambda: self._fail(failed)

    def _time(self, seconds: float) -> None:
        """End the session after so many seconds; those in which nothing could run come again."""
        loop = asyncio.get_running_loop()
        due = self._engine.clock.elapsed() + seconds
        self._timer = loop.call_later(seconds, self._time_over, due)

    def _time_over(self, due: float) -> None:
        late = self._engine.clock.elapsed() - due
        if late < _LATE_S or self._waited:
            self.stop("timeout")
        else:
            self._waited = True
            self._time(late)

    def _complete(self, output: Any) -> Awaitable[None]:
        crash_point("worker.before_complete")
        self._completing = True
        return self._engine.complete(self._work.fence, output)

    async def _fail(self, error: AttemptFailed) -> None:
        crash_point("worker.before_fail")
        failure = self._storable_failure(error.failure)
        at = error.resume_at
        known = at if isinstance(at, datetime) and at.tzinfo is not None else None
        await self._engine.fail(self._work.fence, failure, known)

    def _storable_failure(self, told: Failure) -> Failure:
        """A failure as the store takes it: struck, and no longer than may be."""
        struck = self._redactor.text
        return Failure(
            message=clean(struck(told.message), MAX_ERROR),
            error_class=told.error_class,
            retryable=told.retryable,
            stack=None if told.stack is None else clean(struck(told.stack), MAX_STACK),
            exit_code=told.exit_code,
        )

    async def _stopped(self) -> None:
        """Tell the store that the session is gone, in the way that was asked for."""
        self._completing = False
        fence = self._work.fence
        match self._held.reason:
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
                log.warning("attempt %d of %s was lost", fence.attempt, fence.task)
                await self._engine.confirm_gone(fence, self._receipt or {"state": "ended"})

    async def _report_until_stored(self, tell: Tell) -> None:  # noqa: C901  one answer per kind of refusal
        """Tell until the store has heard, or says that the task is no longer ours.

        Of a lost attempt only the end of its session is told.
        """
        pauses = retry_delays()
        told_plainly = False
        while True:
            if self._held.reason == "lost":
                tell = self._stopped
            told = self._held.reason
            try:
                await tell()
            except LATER as error:
                log.warning("outcome of %s not stored yet: %s", self._work.fence.task, error)
                await self._engine.clock.sleep(next(pauses))
            except Conflict as error:
                # The heart may have heard of another wish while this end was being told.
                if not self._asked(error) or (tell == self._stopped and told == self._held.reason):
                    log.warning("%s: %s", self._work.fence.task, error)
                    return
                tell = self._stopped
            except asyncio.CancelledError:
                if _is_cancelled_by_worker() and self._held.reason is None:
                    raise  # else: asked to stop while telling, and what is told decides
            except Exception as error:  # refused, or a fault: neither gets better by waiting
                if told_plainly:
                    log.exception("outcome of %s refused", self._work.fence.task)
                    return
                told_plainly = not self._completing
                tell = self._report_invalid_outcome(error)
            else:
                if self._completing:
                    crash_point("worker.complete_answered")
                return

    def _report_invalid_outcome(self, error: Exception) -> Tell:
        """What cannot be stored as it was told is told as a plain failure.

        A result that nobody can store is no better the next time.
        """
        hopeless = self._completing and isinstance(error, Invalid)
        what = "the result" if hopeless else "what the attempt reported"
        self._completing = False
        message = clean(self._redactor.text(f"{what} is refused: {error}"), MAX_ERROR)
        failure = Failure(message=message, retryable=False if hopeless else None)
        return lambda: self._engine.fail(self._work.fence, failure)

    def _asked(self, error: Conflict) -> bool:
        """Whether somebody asked for an end first; that end is what the store wants to hear."""
        reasons: dict[str, Reason] = {"cancel_requested": "cancel", "pause_requested": "pause"}
        reason = reasons.get(error.code)
        if reason is None:
            return False
        self._held.reason = reason
        self._receipt = self._receipt or {"state": "ended", "how": "finished by itself"}
        return True


async def _nothing() -> None:
    """Tells of an attempt of which the store has heard all there is."""


def _over(_reason: Reason) -> None:
    """Stops an attempt that has ended already."""


def _silent() -> None:
    """Warns an attempt that has ended already."""


def _is_cancelled_by_worker() -> bool:
    """Whether this very task is being cancelled, by whoever ends the worker."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
