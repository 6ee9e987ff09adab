"""The context that a handler receives: its input, and calls to report, checkpoint and wait."""

import asyncio
import math
import threading
from collections import defaultdict
from collections.abc import Awaitable, Callable
from functools import cached_property
from inspect import isawaitable
from typing import Any, TypeVar
from uuid import UUID

import msgspec

from tenuto.crash_points import crash_point
from tenuto.engine.agents.subtasks import AskResult, Question
from tenuto.engine.tasks.claim import ClaimedTask
from tenuto.model.errors import Conflict
from tenuto.model.limits.budgets import Usage
from tenuto.model.tasks.submission import NewTask
from tenuto.model.tenancy.redact import Redactor
from tenuto.worker.engine_protocol import WorkerEngine
from tenuto.worker.handler_waits import Child, Decision, Names, Parked, WaitKeys, parse_decision
from tenuto.worker.retry_store import RETRYABLE_ERRORS, retry_delays
from tenuto.worker.transcript import Transcript

T = TypeVar("T")


class Context:
    """The context of one attempt, for an async handler."""

    def __init__(
        self, engine: WorkerEngine, work: ClaimedTask, transcript_kb: int, redactor: Redactor
    ) -> None:
        self._engine = engine
        self._work = work
        self._transcript_kb = transcript_kb
        self.redactor = redactor
        self.transcript: Transcript | None = None
        """The attempt's transcript; `None` before its first line."""
        self._steps: dict[str, tuple[Any, UUID | None]] | None = None
        self._checkpoint_seq = work.checkpoint_seq
        self._usage_reports = 0
        self.checkpoint: Any = work.checkpoint
        self.warned = False
        """True if the attempt is far past its estimate: aborted unless it reports progress."""
        self.parked = False
        """True if the attempt is over because the task waits for something."""
        self.stopping = False
        """True if the attempt has to stop; a long handler on a thread checks this now and then."""
        self.longest_grace_s = math.inf
        """Maximum seconds between asking the session to stop and killing it."""

    @cached_property
    def _usage_lock(self) -> asyncio.Lock:
        """Held while a usage report is sent: they are numbered and must arrive in order."""
        return asyncio.Lock()

    @cached_property
    def _step_locks(self) -> defaultdict[str, asyncio.Lock]:
        """One lock per step key: a step that is requested twice at the same time runs once."""
        return defaultdict(asyncio.Lock)

    @cached_property
    def _wait_keys(self) -> WaitKeys:
        """The generator of keys for this attempt's waits."""
        return WaitKeys()

    @property
    def task_id(self) -> UUID:
        """The id of the task."""
        return self._work.fence.task

    @property
    def attempt(self) -> int:
        """The number of this attempt."""
        return self._work.fence.attempt

    @property
    def input(self) -> Any:
        """The input of the task."""
        return self._work.input

    @property
    def key(self) -> str | None:
        """The task's key in its flow; `None` outside a flow."""
        return self._work.key

    @property
    def previous(self) -> Any:
        """The output of the previous task in the flow; `None` if there is no such task."""
        return self._work.previous

    @property
    def work(self) -> ClaimedTask:
        """The claimed task: title, prompt, metadata and more."""
        return self._work

    @property
    def idempotency_key(self) -> str:
        """The task's id: pass it, in every attempt, to external systems that must act only once."""
        return str(self._work.fence.task)

    @property
    def is_full(self) -> bool:
        """True if the attempt's transcript has reached its size limit."""
        return self.transcript is not None and self.transcript.is_full

    def log(self, text: str, level: str = "INFO") -> None:
        """Adds text to the attempt's transcript, which is stored in the background."""
        if self.transcript is None:
            self.transcript = Transcript(
                self._engine, self._work.fence, self._transcript_kb, self.redactor
            )
        self.transcript.add(level, text)

    async def flush(self) -> None:
        """Stores all transcript lines so far; drops those that the store refuses."""
        if self.transcript is not None:
            await self.transcript.flush()

    async def progress(self, percent: float | None = None, step: str | None = None) -> None:
        """Reports progress; `None` keeps a value. Raises `Conflict` if the lease is lost."""
        await self._retry_while_unavailable(
            lambda: self._engine.progress(self._work.fence, percent, step)
        )

    async def used(
        self,
        *,
        input_tokens: int = 0,
        output_tokens: int = 0,
        cost_usd: float = 0.0,
        model: str | None = None,
    ) -> None:
        """Reports usage since the last report, for budgets; `model` is the task's by default."""
        async with self._usage_lock:
            # Numbered, and sent one by one: a report whose reply is lost is not counted twice.
            self._usage_reports += 1
            usage = Usage(
                model=model or self._work.model,
                input_tokens=input_tokens,
                output_tokens=output_tokens,
                cost_usd=cost_usd,
                number=self._usage_reports,
            )
            await self._retry_while_unavailable(lambda: self._engine.used(self._work.fence, usage))

    async def save(self, checkpoint: Any) -> None:
        """Stores a checkpoint as JSON for the next attempt; `Conflict` if the lease is lost."""
        crash_point("worker.before_checkpoint")
        # Numbered here: of two saves whose replies are lost, the later one must win in any order.
        self._checkpoint_seq += 1
        number = self._checkpoint_seq
        await self._retry_while_unavailable(
            lambda: self._engine.checkpoint(self._work.fence, checkpoint, number)
        )
        self.checkpoint = checkpoint
        crash_point("worker.checkpoint_saved")

    async def step(self, key: str, work: Callable[[], Awaitable[T] | T]) -> T:
        """Returns the value stored under the key; if there is none, runs `work` and stores it.

        The value is stored as JSON and is returned as JSON decodes it, also in later attempts.
        Raises `Conflict` if the key belongs to a child task.
        """
        async with self._step_locks[key]:
            steps = await self._load_steps()
            if not self._is_recorded(steps, key):
                result = work()
                output = await result if isawaitable(result) else result
                await self._retry_while_unavailable(
                    lambda: self._engine.record_step(self._work.fence, key, output)
                )
                steps[key] = (msgspec.json.decode(msgspec.json.encode(output)), None)
            value: T = steps[key][0]
            return value

    @staticmethod
    def _is_recorded(steps: dict[str, tuple[Any, UUID | None]], key: str) -> bool:
        """True if the step is recorded; raises `Conflict` if a child task has that key."""
        if key in steps and steps[key][1] is not None:
            raise Conflict(
                f"key {key!r} belongs to a child task; use another key for the step",
                "step_conflict",
            )
        return key in steps

    async def spawn(self, key: str, new: NewTask) -> UUID:
        """Creates a subtask once per key and returns its id; later attempts get the same one."""
        steps = await self._load_steps()
        if key in steps and steps[key][1] is not None:
            return steps[key][1]  # type: ignore[return-value]  # checked on the line above
        child = await self._retry_while_unavailable(
            lambda: self._engine.spawn(self._work.fence, key, new)
        )
        steps[key] = (None, child)
        return child

    async def wait(
        self,
        children: Names,
        timeout: float | None = None,  # noqa: ASYNC109  the task waits, not the call
    ) -> list[Child]:
        """Returns these children's results (ids or keys), in order; `Parked` if one is unfinished.

        The task then waits, and this attempt is over. After `timeout` seconds, unfinished children
        are returned with their current status.
        """
        return await self._wait_for(list(children), timeout)

    async def wait_all(
        self,
        timeout: float | None = None,  # noqa: ASYNC109  the task waits, not the call
    ) -> list[Child]:
        """Returns the results of all children spawned so far; `Parked` if one is unfinished.

        After `timeout` seconds, unfinished children are returned with their current status.
        """
        return await self._wait_for(None, timeout)

    async def approve(
        self,
        key: str,
        title: str,
        body: Any = None,
        timeout: float | None = None,  # noqa: ASYNC109  the task waits, not the call
        *,
        default: bool = False,
    ) -> Decision:
        """Asks a person once per key to approve; raises `Parked` until there is a decision.

        The task then waits, and this attempt is over. After `timeout` seconds, `default` decides.
        """
        question = Question(
            kind="approval", title=title, body=body, timeout_s=timeout, default=default
        )
        return parse_decision(await self._ask_person(key, question))

    async def ask(
        self,
        key: str,
        question: str,
        body: Any = None,
        timeout: float | None = None,  # noqa: ASYNC109  the task waits, not the call
        default: Any = None,
    ) -> Any:
        """Asks a person once per key and returns the answer; raises `Parked` until there is one.

        The task then waits, and this attempt is over. After `timeout` seconds, `default` is the
        answer.
        """
        request = Question(
            kind="question", title=question, body=body, timeout_s=timeout, default=default
        )
        return (await self._ask_person(key, request))["answer"]

    async def _wait_for(
        self, children: list[UUID | str] | None, seconds: float | None
    ) -> list[Child]:
        """Returns the results of these children, or of all; raises `Parked` if the task waits."""
        name = self._wait_keys.next_key(children)
        await self.flush()  # nothing more is stored of an attempt that is over
        fence = self._work.fence
        result = await self._retry_while_unavailable(
            lambda: self._engine.wait(fence, children, seconds, name)
        )
        self._raise_if_parked(result.parked)
        return result.children

    async def _ask_person(self, key: str, question: Question) -> Any:
        """Returns the answer to the question; raises `Parked` if the task waits for one."""
        await self.flush()
        fence = self._work.fence
        result: AskResult = await self._retry_while_unavailable(
            lambda: self._engine.ask(fence, key, question)
        )
        self._raise_if_parked(result.parked)
        return result.answer

    def _raise_if_parked(self, parked: bool) -> None:
        """Raises `Parked`, and records that the attempt is over, if the task now waits."""
        if parked:
            self.parked = True
            raise Parked

    async def _load_steps(self) -> dict[str, tuple[Any, UUID | None]]:
        """Returns recorded steps by key, cached: (value, id of the subtask or `None`)."""
        if self._steps is None:
            self._steps = await self._retry_while_unavailable(
                lambda: self._engine.steps(self._work.fence.task)
            )
        return self._steps

    async def _retry_while_unavailable(self, call: Callable[[], Awaitable[T]]) -> T:
        """Returns the result of `call`; retries outages until the attempt is asked to stop.

        An outage must not make a handler run again. Every report of an attempt can be repeated: its
        fence, number or key identifies it.
        """
        delays = retry_delays()
        while True:
            try:
                return await call()
            except RETRYABLE_ERRORS:
                if self.stopping:
                    raise
                await self._engine.clock.sleep(next(delays))


class SyncContext:
    """The context for a handler that is a plain function and runs on a thread.

    On the event loop's own thread it acts as the async `Context`: a plain function may return a
    coroutine, as most decorators do, and that coroutine was passed this object.
    """

    def __init__(self, context: Context, loop: asyncio.AbstractEventLoop) -> None:
        self._context = context
        self._loop = loop
        self._loop_thread = threading.get_ident()

    def __getattribute__(self, name: str) -> Any:
        """Returns the async context's attribute on the event loop's thread, else this object's."""
        if not name.startswith("_") and threading.get_ident() == self._loop_thread:
            return getattr(self._context, name)
        return super().__getattribute__(name)

    def __getattr__(self, name: str) -> Any:
        """Returns an attribute that only the async context has."""
        return getattr(self._context, name)

    @property
    def stopping(self) -> bool:
        """True if the attempt has to stop; a long handler checks this now and then."""
        return self._context.stopping

    @stopping.setter
    def stopping(self, value: bool) -> None:
        self._context.stopping = value

    def log(self, text: str, level: str = "INFO") -> None:
        """Schedules text for the attempt's transcript, without waiting; drops it if full."""
        if not self._context.is_full:
            self._loop.call_soon_threadsafe(self._context.log, text, level)

    def progress(self, percent: float | None = None, step: str | None = None) -> None:
        """Reports the attempt's progress, and waits until it is stored; `None` keeps a value."""
        self._run_on_loop(self._context.progress(percent, step))

    def used(self, **usage: Any) -> None:
        """Reports a model's usage since the last report, and waits until it is stored."""
        self._run_on_loop(self._context.used(**usage))

    def save(self, checkpoint: Any) -> None:
        """Stores a checkpoint as JSON for the next attempt; waits until it is stored."""
        self._run_on_loop(self._context.save(checkpoint))

    def step(self, key: str, work: Callable[[], T]) -> T:
        """Returns the value stored under the key; without one, runs `work` on this thread first."""
        steps = self._run_on_loop(self._context._load_steps())  # noqa: SLF001  two forms of it
        output = None if self._context._is_recorded(steps, key) else work()  # noqa: SLF001  the same
        value: T = self._run_on_loop(self._context.step(key, lambda: output))
        return value

    def spawn(self, key: str, new: NewTask) -> UUID:
        """Creates a child task once per key and returns its id."""
        child: UUID = self._run_on_loop(self._context.spawn(key, new))
        return child

    def wait(self, children: Names, timeout: float | None = None) -> list[Child]:
        """Returns these children's results, in order; raises `Parked` if one is unfinished."""
        results: list[Child] = self._run_on_loop(self._context.wait(children, timeout))
        return results

    def wait_all(self, timeout: float | None = None) -> list[Child]:
        """Returns the results of all children spawned so far; `Parked` if one is unfinished."""
        results: list[Child] = self._run_on_loop(self._context.wait_all(timeout))
        return results

    def approve(
        self,
        key: str,
        title: str,
        body: Any = None,
        timeout: float | None = None,
        *,
        default: bool = False,
    ) -> Decision:
        """Asks a person once per key to approve; raises `Parked` until there is a decision."""
        pending = self._context.approve(key, title, body, timeout, default=default)
        decision: Decision = self._run_on_loop(pending)
        return decision

    def ask(
        self,
        key: str,
        question: str,
        body: Any = None,
        timeout: float | None = None,
        default: Any = None,
    ) -> Any:
        """Asks a person once per key and returns the answer; raises `Parked` until there is one."""
        return self._run_on_loop(self._context.ask(key, question, body, timeout, default))

    def _run_on_loop(self, work: Any) -> Any:
        """Runs a coroutine on the event loop and returns its result; blocks this thread."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()
