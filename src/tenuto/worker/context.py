"""What a handler gets: its input, and the means to report, checkpoint, and do things once."""

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
from tenuto.worker.handler_waits import Child, Decision, Names, Parked, WaitKeys, decision_of
from tenuto.worker.retry_store import LATER, retry_delays
from tenuto.worker.transcript import Transcript

T = TypeVar("T")


class Context:
    """One attempt, as an async handler sees it."""

    def __init__(
        self, engine: WorkerEngine, work: ClaimedTask, room: int, redactor: Redactor
    ) -> None:
        self._engine = engine
        self._work = work
        self._room = room
        self.redactor = redactor
        self.said: Transcript | None = None
        """What the attempt has told its transcript, if anything."""
        self._steps: dict[str, tuple[Any, UUID | None]] | None = None
        self._saves = work.checkpoint_seq
        self._reports = 0
        self.checkpoint: Any = work.checkpoint
        self.warned = False
        """Whether it runs far past its estimate: it is aborted unless it reports progress."""
        self.parked = False
        """Whether the attempt is over because the task waits for something."""
        self.stopping = False
        """Whether the attempt has to end; a long handler on a thread looks at it now and then."""
        self.longest_grace_s = math.inf
        """Seconds at most between asking the session to end and killing it."""

    @cached_property
    def _using(self) -> asyncio.Lock:
        return asyncio.Lock()

    @cached_property
    def _step_locks(self) -> defaultdict[str, asyncio.Lock]:
        """Steps by key: one that is asked for twice at once is done once."""
        return defaultdict(asyncio.Lock)

    @cached_property
    def _calls(self) -> WaitKeys:
        return WaitKeys()

    @property
    def task_id(self) -> UUID:
        return self._work.fence.task

    @property
    def attempt(self) -> int:
        return self._work.fence.attempt

    @property
    def input(self) -> Any:
        return self._work.input

    @property
    def key(self) -> str | None:
        """The name that the task has in its flow."""
        return self._work.key

    @property
    def previous(self) -> Any:
        """What the task before it in its flow has made."""
        return self._work.previous

    @property
    def work(self) -> ClaimedTask:
        """Everything the claim brought: title, prompt, metadata and more."""
        return self._work

    @property
    def idempotency_key(self) -> str:
        """The same in every attempt: hand it to whatever must happen once outside."""
        return str(self._work.fence.task)

    @property
    def is_full(self) -> bool:
        """Whether the attempt's transcript takes no more."""
        return self.said is not None and self.said.full

    def log(self, text: str, level: str = "INFO") -> None:
        """Add to the attempt's transcript."""
        if self.said is None:
            self.said = Transcript(self._engine, self._work.fence, self._room, self.redactor)
        self.said.add(level, text)

    async def flush(self) -> None:
        """Everything said so far is stored, unless the store refuses."""
        if self.said is not None:
            await self.said.close()

    async def progress(self, percent: float | None = None, step: str | None = None) -> None:
        """Say how far the attempt is."""
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
        """Say what a model used since the last time; it is counted once, and against budgets."""
        async with self._using:
            # Numbered, and one after the other: a report whose answer is lost is not counted twice.
            self._reports += 1
            usage = Usage(
                model=model or self._work.model,
                input_tokens=input_tokens,
                output_tokens=output_tokens,
                cost_usd=cost_usd,
                number=self._reports,
            )
            await self._retry_while_unavailable(lambda: self._engine.used(self._work.fence, usage))

    async def save(self, checkpoint: Any) -> None:
        """Keep a checkpoint; the next attempt starts with it."""
        crash_point("worker.before_checkpoint")
        # Numbered here: of two saves whose answers are lost, the later one must win in any order.
        self._saves += 1
        number = self._saves
        await self._retry_while_unavailable(
            lambda: self._engine.checkpoint(self._work.fence, checkpoint, number)
        )
        self.checkpoint = checkpoint
        crash_point("worker.checkpoint_saved")

    async def step(self, key: str, work: Callable[[], Awaitable[T] | T]) -> T:
        """The value of `work`, done once per key, as JSON has it: every attempt gets the same."""
        async with self._step_locks[key]:
            steps = await self._recorded()
            if not self._is_done(steps, key):
                result = work()
                done = await result if isawaitable(result) else result
                await self._retry_while_unavailable(
                    lambda: self._engine.record_step(self._work.fence, key, done)
                )
                steps[key] = (msgspec.json.decode(msgspec.json.encode(done)), None)
            value: T = steps[key][0]
            return value

    @staticmethod
    def _is_done(steps: dict[str, tuple[Any, UUID | None]], key: str) -> bool:
        """Whether the step is recorded; raises `Conflict` if a child has that key."""
        if key in steps and steps[key][1] is not None:
            raise Conflict(f"step {key!r} is a child", "step_conflict")
        return key in steps

    async def spawn(self, key: str, new: NewTask) -> UUID:
        """A child task, made once per key; a later attempt gets the same child."""
        steps = await self._recorded()
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
        """How these children ended, by id or key, in order. Until all have, the attempt is over.

        With a timeout in seconds those that have not ended by then come with the status they have.
        """
        return await self._wait_for(list(children), timeout)

    async def wait_all(
        self,
        timeout: float | None = None,  # noqa: ASYNC109  the task waits, not the call
    ) -> list[Child]:
        """The same for every child that was spawned so far."""
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
        """A person's yes or no, asked for once per key; `default` when none comes in time."""
        question = Question(
            kind="approval", title=title, body=body, timeout_s=timeout, default=default
        )
        return decision_of(await self._answer(key, question))

    async def ask(
        self,
        key: str,
        question: str,
        body: Any = None,
        timeout: float | None = None,  # noqa: ASYNC109  the task waits, not the call
        default: Any = None,
    ) -> Any:
        """A person's answer, asked for once per key; `default` when none comes in time."""
        asked = Question(
            kind="question", title=question, body=body, timeout_s=timeout, default=default
        )
        return (await self._answer(key, asked))["answer"]

    async def _wait_for(
        self, children: list[UUID | str] | None, seconds: float | None
    ) -> list[Child]:
        name = self._calls.name(children)
        await self.flush()  # nothing more is heard of an attempt that is over
        fence = self._work.fence
        waited = await self._retry_while_unavailable(
            lambda: self._engine.wait(fence, children, seconds, name)
        )
        self._raise_if_parked(waited.parked)
        return waited.children

    async def _answer(self, key: str, question: Question) -> Any:
        await self.flush()
        fence = self._work.fence
        asked: AskResult = await self._retry_while_unavailable(
            lambda: self._engine.ask(fence, key, question)
        )
        self._raise_if_parked(asked.parked)
        return asked.answer

    def _raise_if_parked(self, parked: bool) -> None:
        if parked:
            self.parked = True
            raise Parked

    async def _recorded(self) -> dict[str, tuple[Any, UUID | None]]:
        if self._steps is None:
            self._steps = await self._retry_while_unavailable(
                lambda: self._engine.steps(self._work.fence.task)
            )
        return self._steps

    async def _retry_while_unavailable(self, call: Callable[[], Awaitable[T]]) -> T:
        """The store's answer, however long it is away: a handler is not to run again for that.

        Whatever an attempt says can be said twice: it is known by its fence, number or key.
        """
        pauses = retry_delays()
        while True:
            try:
                return await call()
            except LATER:
                if self.stopping:
                    raise
                await self._engine.clock.sleep(next(pauses))


class SyncContext:
    """The same for a handler that is a plain function and runs on a thread.

    To the loop's own thread it is the context of a coroutine: a plain function may make one, as
    most decorators do, and it was handed this.
    """

    def __init__(self, context: Context, loop: asyncio.AbstractEventLoop) -> None:
        self._context = context
        self._loop = loop
        self._home = threading.get_ident()

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("_") and threading.get_ident() == self._home:
            return getattr(self._context, name)
        return super().__getattribute__(name)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    @property
    def stopping(self) -> bool:
        """Whether the attempt has to end; a long handler looks at it now and then."""
        return self._context.stopping

    @stopping.setter
    def stopping(self, value: bool) -> None:
        self._context.stopping = value

    def log(self, text: str, level: str = "INFO") -> None:
        if not self._context.is_full:
            self._loop.call_soon_threadsafe(self._context.log, text, level)

    def progress(self, percent: float | None = None, step: str | None = None) -> None:
        self._wait(self._context.progress(percent, step))

    def used(self, **usage: Any) -> None:
        self._wait(self._context.used(**usage))

    def save(self, checkpoint: Any) -> None:
        self._wait(self._context.save(checkpoint))

    def step(self, key: str, work: Callable[[], T]) -> T:
        steps = self._wait(self._context._recorded())  # noqa: SLF001  one class in two dresses
        done = None if self._context._is_done(steps, key) else work()  # noqa: SLF001  the same
        value: T = self._wait(self._context.step(key, lambda: done))
        return value

    def spawn(self, key: str, new: NewTask) -> UUID:
        child: UUID = self._wait(self._context.spawn(key, new))
        return child

    def wait(self, children: Names, timeout: float | None = None) -> list[Child]:
        ended: list[Child] = self._wait(self._context.wait(children, timeout))
        return ended

    def wait_all(self, timeout: float | None = None) -> list[Child]:
        ended: list[Child] = self._wait(self._context.wait_all(timeout))
        return ended

    def approve(
        self,
        key: str,
        title: str,
        body: Any = None,
        timeout: float | None = None,
        *,
        default: bool = False,
    ) -> Decision:
        made = self._context.approve(key, title, body, timeout, default=default)
        decision: Decision = self._wait(made)
        return decision

    def ask(
        self,
        key: str,
        question: str,
        body: Any = None,
        timeout: float | None = None,
        default: Any = None,
    ) -> Any:
        return self._wait(self._context.ask(key, question, body, timeout, default))

    def _wait(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()
