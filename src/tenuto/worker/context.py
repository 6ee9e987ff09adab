"""What a handler gets: its input, and the means to report, checkpoint, and do things once."""

import asyncio
from collections.abc import Awaitable, Callable
from inspect import isawaitable
from typing import Any, TypeVar
from uuid import UUID

from tenuto.crash import crash_point
from tenuto.engine.claim import Work
from tenuto.model.redact import Redactor
from tenuto.model.submission import NewTask
from tenuto.worker.port import WorkEngine
from tenuto.worker.transcript import Transcript

T = TypeVar("T")


class Context:
    """One attempt, as an async handler sees it."""

    def __init__(
        self, engine: WorkEngine, work: Work, transcript: Transcript, redactor: Redactor
    ) -> None:
        self._engine = engine
        self._work = work
        self._transcript = transcript
        self.redactor = redactor
        self._steps: dict[str, tuple[Any, UUID | None]] | None = None
        self._saves = work.checkpoint_seq
        self.checkpoint: Any = work.checkpoint

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
    def work(self) -> Work:
        """Everything the claim brought: title, prompt, metadata and more."""
        return self._work

    @property
    def idempotency_key(self) -> str:
        """The same in every attempt: hand it to whatever must happen once outside."""
        return str(self._work.fence.task)

    @property
    def full(self) -> bool:
        """Whether the attempt's transcript takes no more."""
        return self._transcript.full

    def log(self, text: str, level: str = "INFO") -> None:
        """Add to the attempt's transcript."""
        self._transcript.add(level, text)

    async def progress(self, percent: float | None = None, step: str | None = None) -> None:
        """Say how far the attempt is."""
        await self._engine.progress(self._work.fence, percent, step)

    async def save(self, checkpoint: Any) -> None:
        """Keep a checkpoint; the next attempt starts with it."""
        crash_point("worker.before_checkpoint")
        # Numbered here: of two saves whose answers are lost, the later one must win in any order.
        self._saves += 1
        await self._engine.checkpoint(self._work.fence, checkpoint, self._saves)
        self.checkpoint = checkpoint
        crash_point("worker.checkpoint_saved")

    async def step(self, key: str, work: Callable[[], Awaitable[T] | T]) -> T:
        """The value of `work`, done once per key: a later attempt gets the recorded value."""
        steps = await self._recorded()
        if key in steps:
            value: T = steps[key][0]
            return value
        result = work()
        done: T = await result if isawaitable(result) else result
        await self._engine.record_step(self._work.fence, key, done)
        steps[key] = (done, None)
        return done

    async def spawn(self, key: str, new: NewTask) -> UUID:
        """A child task, made once per key; a later attempt gets the same child."""
        steps = await self._recorded()
        if key in steps and steps[key][1] is not None:
            return steps[key][1]  # type: ignore[return-value]  # checked on the line above
        child = await self._engine.spawn(self._work.fence, key, new)
        steps[key] = (None, child)
        return child

    async def _recorded(self) -> dict[str, tuple[Any, UUID | None]]:
        if self._steps is None:
            self._steps = await self._engine.steps(self._work.fence.task)
        return self._steps


class SyncContext:
    """The same for a handler that is a plain function and runs on a thread."""

    def __init__(self, context: Context, loop: asyncio.AbstractEventLoop) -> None:
        self._context = context
        self._loop = loop
        self.stopping = False
        """Set when the attempt has to end; a long handler looks at it now and then."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def log(self, text: str, level: str = "INFO") -> None:
        self._loop.call_soon_threadsafe(self._context.log, text, level)

    def progress(self, percent: float | None = None, step: str | None = None) -> None:
        self._wait(self._context.progress(percent, step))

    def save(self, checkpoint: Any) -> None:
        self._wait(self._context.save(checkpoint))

    def step(self, key: str, work: Callable[[], T]) -> T:
        steps = self._wait(self._context._recorded())  # noqa: SLF001  one class in two dresses
        if key in steps:
            value: T = steps[key][0]
            return value
        done = work()
        self._wait(self._context.step(key, lambda: done))
        return done

    def spawn(self, key: str, new: NewTask) -> UUID:
        child: UUID = self._wait(self._context.spawn(key, new))
        return child

    def _wait(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()
