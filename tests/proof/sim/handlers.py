"""What the tasks of a run do: a list of small deeds in their input, made up from the seed."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

from tests.proof.sim.clock import START
from tests.proof.sim.loop import Process
from tests.proof.sim.plan import Faults
from tests.proof.sim.recorder import Handling, Recorder

from tenuto.model.errors import TenutoError, Unavailable
from tenuto.model.tasks.commands import Failure
from tenuto.model.tasks.retry import ErrorClass, RetryPolicy
from tenuto.model.tasks.submission import NewTask
from tenuto.worker.context import Context
from tenuto.worker.runtime.protocol import AttemptFailed

T = TypeVar("T")

FAILS: dict[str, type[Exception]] = {
    "error": ValueError,
    "connection": ConnectionError,
    "syntax": SyntaxError,
    "memory": MemoryError,
    "timeout": TimeoutError,
}


def make_deeds(rng: random.Random, *, child: bool = False) -> list[list[Any]]:
    """A short list of what a handler is to do."""
    deeds: list[list[Any]] = []
    for number in range(rng.randint(0, 3)):
        kind = rng.choice(["sleep", "sleep", "save", "step", "step", "log", "progress", "spawn"])
        if kind == "sleep":
            deeds.append([kind, round(rng.choice([0.1, 1.0, 4.0]) * rng.random(), 3)])
        elif kind == "spawn" and not child:
            deeds.append([kind, f"child {number}", make_deeds(rng, child=True)])
        elif kind == "step":
            deeds.append([kind, f"step {rng.randint(0, 1)}"])
        elif kind != "spawn":
            deeds.append([kind])
    deeds += waits(deeds)
    if rng.random() < 0.3:
        mode = rng.choice([*FAILS, "quota", "quota"]) if rng.random() < 0.97 else "rate limit"
        deeds.append(["fail", mode, rng.choice([1, 1, 2, 9])])
    if rng.random() < 0.3:
        deeds.append(["grind", rng.randint(1, 5), round(rng.uniform(0.5, 2.5), 3)])
    if rng.random() < 0.4:
        deeds.append(["long", round(rng.uniform(2, 10), 3)])
    if rng.random() < 0.06:
        deeds.append(["deaf", rng.uniform(3, 25)])
    return deeds


def waits(deeds: list[list[Any]]) -> list[list[Any]]:
    """A wait for the children that were made before, if any were.

    Nothing is drawn for it: seeds stand for the same runs as without it.
    """
    created = [deed for deed in deeds if deed[0] == "spawn"]
    return [["wait", None if len(created[0][2]) % 2 else 6.0]] if created else []


def make_task(rng: random.Random, title: str, now: float) -> NewTask:
    """A task to submit."""
    new = NewTask(
        title=title,
        task_type=rng.choice(["a", "b"]),
        priority=rng.randint(1, 10),
        input={"deeds": make_deeds(rng)},
        max_attempts=rng.choice([1, 2, 3, 3, 5]),
        retry=RetryPolicy(base_s=rng.choice([0.1, 1.0]), cap_s=3.0),
    )
    if rng.random() < 0.2:
        new.run_at = START + timedelta(seconds=round(now + rng.uniform(0.1, 8), 3))
    if rng.random() < 0.2:
        new.timeout_s = rng.randint(1, 4)
    if rng.random() < 0.3:
        new.lease_s = rng.randint(1, 6)
    if rng.random() < 0.1:
        new.queue_ttl_s = rng.randint(2, 15)
    return new


class Handlers:
    """The handler of one worker process."""

    def __init__(self, process: Process, recorder: Recorder, faults: Faults) -> None:
        self._process = process
        self._recorder = recorder
        self._faults = faults
        self._made = 0

    async def handle(self, context: Context) -> Any:
        """Do the task's deeds; the output says which attempt made it."""
        loop = asyncio.get_running_loop()
        me = Handling(self._process, context.task_id, context.attempt, loop.time())
        self._recorder.handling.append(me)
        created: dict[str, Any] = {"attempt": context.attempt, "by": self._process.name}
        try:
            for deed, *details in context.input["deeds"]:
                self._recorder.note(self._process.name, f"{deed} {context.work.title}")
                created |= await getattr(self, f"_{deed}")(context, me, *details) or {}
            return created
        finally:
            self._recorder.handling.remove(me)

    async def _retry(self, subject: Callable[[], Awaitable[T]]) -> T | None:
        """The answer, or nothing: a stubborn handler asks twice and then goes on without."""
        if not self._faults.plan.stubborn:
            return await subject()
        for _ in range(2):
            try:
                return await subject()
            except Unavailable:
                continue
        return None

    def _nonce(self, context: Context) -> list[Any]:
        self._made += 1
        return [context.attempt, self._process.name, self._made]

    async def _tell(self, _context: Context, _me: Handling, subject: dict[str, Any]) -> Any:
        """Says so in the output."""
        return subject

    async def _count(self, context: Context, _me: Handling) -> Any:
        """One more than the task before it in its flow said."""
        before = context.work.previous
        return {"round": (before or {}).get("round", 0) + 1}

    async def _sleep(self, _context: Context, _me: Handling, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def _long(self, context: Context, _me: Handling, seconds: float) -> None:
        """Takes longer when tried again, so that an attempt before can come to its end first."""
        await asyncio.sleep(seconds * min(context.attempt, 2))

    async def _grind(self, context: Context, me: Handling, times: int, seconds: float) -> None:
        """Long work as it should be: a checkpoint after every part of it."""
        for _ in range(times):
            await asyncio.sleep(seconds)
            await self._save(context, me)

    async def _deaf(self, context: Context, me: Handling, seconds: float) -> None:
        """Does not hear that it is to stop; once is enough for one task."""
        if context.attempt > 1:
            return
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        me.deaf = True
        while (rest := until - loop.time()) > 0:
            try:
                await asyncio.sleep(rest)
            except asyncio.CancelledError:
                continue
        me.deaf = False
        self._recorder.last_deaf[self._process.name] = loop.time()

    async def _save(self, context: Context, _me: Handling) -> None:
        await self._retry(lambda: context.save(self._nonce(context)))

    async def _log(self, context: Context, _me: Handling) -> None:
        context.log("said")

    async def _progress(self, context: Context, _me: Handling) -> None:
        await self._retry(lambda: context.progress(50, "half"))

    async def _step(self, context: Context, _me: Handling, key: str) -> None:
        value = await self._retry(lambda: context.step(key, lambda: self._nonce(context)))
        if value is not None:
            self._recorder.stepped(context.task_id, key, value)
        if self._faults.plan.stubborn:
            with suppress(TenutoError):  # as an agent may that keeps no record of its own
                await context._engine.record_step(context.work.fence, key, self._nonce(context))

    async def _spawn(self, context: Context, _me: Handling, key: str, deeds: list[Any]) -> None:
        new = NewTask(
            title=f"{context.work.title} {key}",
            task_type="a",
            input={"deeds": deeds},
            retry=RetryPolicy(base_s=0.5, cap_s=3.0),
        )
        await self._retry(lambda: context.spawn(key, new))

    async def _wait(self, context: Context, _me: Handling, timeout_s: float | None) -> None:
        """Waits for its children without a slot, for so long or until they have ended."""
        result = await self._retry(lambda: context.wait_all(timeout_s))
        if result is None:
            return
        self._faults.happened["waited"] += 1
        for child in result:
            self._recorder.waited(context.task_id, child, timeout_s)

    async def _fail(self, context: Context, _me: Handling, mode: str, maximum: int) -> None:
        """Fails in the first attempts, in the way it is told."""
        if context.attempt > maximum:
            return
        self._faults.happened["handler failed"] += 1
        if mode in FAILS:
            raise FAILS[mode]
        if context.attempt > 2:
            return  # such ends are free, so they are kept few
        failure = Failure(message="slow down", error_class=ErrorClass.RATE_LIMIT)
        now = START + timedelta(seconds=asyncio.get_running_loop().time())
        raise AttemptFailed(failure, now + timedelta(seconds=2) if mode == "quota" else None)
