"""Handlers in the worker's process: their context, and isolation from each other."""

import asyncio
import signal
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from contextvars import ContextVar
from datetime import datetime
from itertools import count
from pathlib import Path
from queue import SimpleQueue
from time import monotonic
from typing import Any, Self
from uuid import UUID

import pytest
from tests.proof.crash.inside import Inside, working
from tests.proof.crash.system import System, system
from tests.waiting import eventually

from tenuto import app
from tenuto.engine.engine import Engine
from tenuto.engine.tasks.report import HeartbeatResult
from tenuto.model.tasks.commands import Failure
from tenuto.model.tasks.retry import ErrorClass
from tenuto.model.tasks.submission import NewTask
from tenuto.model.tasks.task import Fence
from tenuto.settings import Settings
from tenuto.worker.runtime.function import AttemptStopped, FunctionRuntime
from tenuto.worker.runtime.protocol import AttemptFailed


async def test_handler_can_be_a_coroutine_or_a_function(database_url: str) -> None:
    async def later(ctx: Any) -> Any:
        ctx.log("from a coroutine")
        return {"got": ctx.input, "attempt": ctx.attempt}

    def now(ctx: Any) -> Any:
        ctx.log("from a function", "WARN")
        return [ctx.input, threading.current_thread() is not threading.main_thread()]

    async with working(database_url, {"later": later, "now": now}) as inside:
        first = await inside.submit(task_type="later", input=[1, None])
        second = await inside.submit(task_type="now", input={"é": 1})
        assert (await inside.ended(first)).output == {"got": [1, None], "attempt": 1}
        assert (await inside.ended(second)).output == [{"é": 1}, True]
        assert await inside.transcript(first) == ["from a coroutine"]
        [line] = await inside.engine.query.transcript(second, inside.engine.workspace)
        assert (line.level, line.text) == ("WARN", "from a function")


def repeating(kind: str, done: Counter[str], children: list[UUID]) -> Any:
    """A handler that fails once after everything it may do only once."""

    def count() -> int:
        done["step"] += 1
        return done["step"]

    async def later(ctx: Any) -> Any:
        number = await ctx.step("count", count)
        nothing = await ctx.step("nothing", lambda: None)
        children.append(await ctx.spawn("child", NewTask(title="child", task_type="child")))
        await ctx.progress(50, "half")
        before = ctx.checkpoint
        await ctx.save({"attempt": ctx.attempt})
        if ctx.attempt == 1:
            raise ConnectionError("again")
        return [number, nothing, before]

    def now(ctx: Any) -> Any:
        number = ctx.step("count", count)
        nothing = ctx.step("nothing", lambda: None)
        children.append(ctx.spawn("child", NewTask(title="child", task_type="child")))
        ctx.progress(50, "half")
        before = ctx.checkpoint
        ctx.save({"attempt": ctx.attempt})
        if ctx.attempt == 1:
            raise ConnectionError("again")
        return [number, nothing, before]

    called: Any = type("Called", (), {"__call__": staticmethod(later)})()
    return {"later": later, "now": now, "object": called}[kind]


async def test_subtask_inherits_no_context_variable(database_url: str) -> None:
    user: ContextVar[str] = ContextVar("user", default="nobody")

    async def parent(ctx: Any) -> str:
        user.set("the parent's")
        return str(await ctx.spawn("child", NewTask(title="child", task_type="child")))

    async def child(_ctx: Any) -> str:
        return user.get()

    async with working(database_url, {"default": parent, "child": child}) as inside:
        view = await inside.ended(await inside.submit())
        assert (await inside.ended(UUID(view.output))).output == "nobody"


@pytest.mark.parametrize("kind", ["later", "now", "object"])
async def test_second_attempt_repeats_no_step_and_no_spawn(database_url: str, kind: str) -> None:
    done: Counter[str] = Counter()
    children: list[UUID] = []
    handlers = {None: repeating(kind, done, children), "child": lambda _ctx: "child"}
    async with working(database_url, handlers) as inside:
        task = await inside.submit()
        view = await inside.ended(task)
        assert view.output == [1, None, {"attempt": 1}]
        assert (view.checkpoint, view.progress_percent) == ({"attempt": 2}, 50)
        assert done == {"step": 1}
        assert children[0] == children[1]
        child = await inside.ended(children[0])
        assert (child.parent, child.output) == (task, "child")
        assert await inside.outcomes(task) == ["FAILED", "COMPLETED"]
        assert len((await inside.engine.list()).tasks) == 2


def spin(seconds: float) -> None:
    """Keep the interpreter busy."""
    end = monotonic() + seconds
    while monotonic() < end:
        pass


@pytest.mark.parametrize("kind", ["later", "now"])
async def test_busy_handler_keeps_its_lease(database_url: str, kind: str) -> None:
    async def later(_ctx: Any) -> None:
        spin(3)

    handler: Any = later if kind == "later" else lambda _ctx: spin(3)
    async with working(database_url, {None: handler}, lease_s=2) as inside:
        task = await inside.submit()
        async with reaping(database_url):
            view = await inside.ended(task)
        assert view.status == "COMPLETED"
        assert await inside.outcomes(task) == ["COMPLETED"]


class reaping:  # noqa: N801  reads as a verb where it is used
    """Another process's reaper, in a thread, whose own work nothing here can hold up for long."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._stop = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._reap()), daemon=True)

    async def __aenter__(self) -> Self:
        self._thread.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stop.set()
        await asyncio.to_thread(self._thread.join)

    async def _reap(self) -> None:
        async with app.connect(Settings(database=self._url)) as engine:
            while not self._stop.is_set():
                await engine.maintenance.expire_once("reaper")
                await asyncio.to_thread(self._stop.wait, 0.1)


async def test_heartbeat_loop_survives_an_error(
    sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    heartbeats = 0
    heartbeat = Engine.heartbeat

    async def faulty(self: Engine, fences: Sequence[Fence], lease_s: int) -> HeartbeatResult:
        nonlocal heartbeats
        heartbeats += 1
        if heartbeats < 3:
            raise ValueError("a fault of ours")
        return await heartbeat(self, fences, lease_s)

    async def handler(_ctx: Any) -> None:
        await eventually(lambda: heartbeats > 10, 20)

    monkeypatch.setattr(Engine, "heartbeat", faulty)
    async with working(sqlite_url, {None: handler}, faulty=True) as inside:
        task = await inside.submit()
        assert (await inside.ended(task)).status == "COMPLETED"
        assert await inside.outcomes(task) == ["COMPLETED"]


@pytest.mark.parametrize("level", ["loud", "", "\x00", 5, None])
async def test_invalid_log_level_does_not_fail_the_attempt(database_url: str, level: Any) -> None:
    async def handler(ctx: Any) -> str:
        ctx.log("text", level)
        return "done"

    async with working(database_url, {None: handler}) as inside:
        task = await inside.submit()
        assert (await inside.ended(task)).output == "done"
        assert await inside.transcript(task) == ["text"]


class Peak:
    """How many are inside at once; the first ones wait until so many are."""

    def __init__(self, expected: int) -> None:
        self.now = self.most = 0
        self.full = threading.Event()
        self._expected = expected
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        with self._lock:
            self.now += 1
            self.most = max(self.most, self.now)
            if self.now >= self._expected:
                self.full.set()

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self.now -= 1


async def test_running_attempts_never_exceed_the_slots(database_url: str) -> None:
    peak = Peak(4)

    async def later(_ctx: Any) -> None:
        with peak:
            await eventually(peak.full.is_set)

    def now(_ctx: Any) -> None:
        with peak:
            peak.full.wait(10)

    async with working(database_url, {"later": later, "now": now}, slots=4) as inside:
        tasks = [await inside.submit(task_type=("later", "now")[n % 2]) for n in range(40)]
        for task in tasks:
            assert (await inside.ended(task)).status == "COMPLETED"
    assert peak.most == 4


async def test_agent_limit_is_never_exceeded(database_url: str) -> None:
    peak = Peak(2)

    async def handler(_ctx: Any) -> None:
        with peak:
            await eventually(peak.full.is_set)

    async with working(database_url, {}, slots=10) as inside:
        await inside.worker.host_functions("few", {None: handler}, max_concurrent=2)
        tasks = [await inside.submit() for n in range(20)]
        for task in tasks:
            assert (await inside.ended(task)).status == "COMPLETED"
    assert peak.most == 2


async def test_handler_without_memory_fails_as_out_of_memory(database_url: str) -> None:
    async def handler(_ctx: Any) -> None:
        raise MemoryError("no room")

    async with working(database_url, {None: handler}) as inside:
        task = await inside.submit()
        view = await inside.ended(task)
        assert (view.status, view.error_class) == ("FAILED", "out_of_memory")
        assert await inside.outcomes(task) == ["FAILED"]
        event = (await inside.engine.events(task))[-1]
        assert (event.event, event.level) == ("failed", "CRITICAL")
        assert "MemoryError: no room" in (event.stack_trace or "")


@pytest.mark.parametrize(
    "until",
    [datetime(2030, 1, 1), "2030-01-01T00:00:00Z", 5],  # noqa: DTZ001  the point of it
    ids=["no zone", "text", "number"],
)
async def test_rate_limit_with_an_invalid_reset_is_a_plain_failure(
    database_url: str, until: Any
) -> None:
    async def handler(_ctx: Any) -> str:
        raise AttemptFailed(Failure(message="429", error_class=ErrorClass.RATE_LIMIT), until)

    async with working(database_url, {None: handler}, lease_s=60) as inside:
        task = await inside.submit()
        await inside.until(task, "RETRY_WAIT", "WAITING", "FAILED", "DEAD", limit=10)
        assert (await inside.last(task)).outcome in ("FAILED", "PARKED")
        await inside.engine.cancel(task)


LOOP: list[Any] = []
LOOP.append(LOOP)


@pytest.mark.parametrize(
    "result",
    [object(), {1, 2}, b"bytes", {1: 2}, float("nan"), "\x00", "\ud800", LOOP, 2**70, "x" * 2**21],
    ids=str.split("object set bytes keys nan nul surrogate loop big long"),
)
@pytest.mark.parametrize("kind", ["later", "now"])
async def test_result_that_is_not_json_fails_the_attempt(
    sqlite_url: str, result: Any, kind: str
) -> None:
    async def later(_ctx: Any) -> Any:
        return result

    handler: Any = later if kind == "later" else lambda _ctx: result
    async with working(sqlite_url, {None: handler}) as inside:
        task = await inside.submit()
        view = await inside.ended(task)
        assert view.status == "FAILED"
        assert (view.last_error or "").startswith("the result is refused: output ")
        assert await inside.outcomes(task) == ["FAILED"]


class Odd(BaseException):
    """What is no Exception."""


ODD = {
    "generator": GeneratorExit(),
    "iteration": StopIteration(),
    "cancelled": asyncio.CancelledError(),
    "base": Odd("odd"),
    "stopped": AttemptStopped(),
    "unprintable": type("Unprintable", (Exception,), {"__str__": lambda _self: 1 / 0})(),
    "surrogate": ValueError("\ud800\x00"),
}


@pytest.mark.parametrize("subject", ODD)
@pytest.mark.parametrize("kind", ["later", "now"])
async def test_any_exception_of_a_handler_fails_only_its_attempt(
    sqlite_url: str, subject: str, kind: str
) -> None:
    def now(ctx: Any) -> Any:
        if ctx.attempt == 1:
            raise ODD[subject]
        return "second"

    async def later(ctx: Any) -> Any:
        return now(ctx)

    handler: Any = later if kind == "later" else now
    async with working(sqlite_url, {None: handler}) as inside:
        task = await inside.submit()
        view = await inside.ended(task)
        assert (view.status, view.output) == ("COMPLETED", "second")
        assert await inside.outcomes(task) == ["FAILED", "COMPLETED"]


@pytest.mark.parametrize("kind", ["later", "now", "stubborn", "returning"])
async def test_cancelled_handler_is_stopped_and_confirmed(database_url: str, kind: str) -> None:
    running = threading.Event()

    async def later(_ctx: Any) -> None:
        running.set()
        await asyncio.Event().wait()

    def now(_ctx: Any) -> None:
        running.set()
        while True:
            threading.Event().wait(0.01)

    def stubborn(ctx: Any) -> None:
        running.set()
        while not ctx.stopping:
            threading.Event().wait(0.01)

    async def returning(_ctx: Any) -> str:
        running.set()
        with suppress(asyncio.CancelledError):  # instead of raising it again
            await asyncio.Event().wait()
        return "tidied up"

    handler: Any = {"later": later, "now": now, "stubborn": stubborn, "returning": returning}[kind]
    async with working(database_url, {None: handler}, lease_s=30) as inside:
        task = await inside.submit()
        await eventually(running.is_set)
        await inside.engine.cancel(task)
        await inside.until(task, "CANCELLED", limit=10)
        attempt = await inside.last(task)
        assert (attempt.outcome, attempt.unconfirmed) == ("CANCELLED", False)
        assert attempt.receipt
        assert not inside.worker.holds(task)


def on_thread(ctx: Any, plain: Callable[[Any], Any]) -> "asyncio.Task[Any]":
    runtime = FunctionRuntime({None: plain})
    return asyncio.create_task(runtime.run(ctx, 1, {}))


async def test_cancel_stops_only_the_thread_of_its_handler(sqlite_url: str) -> None:
    """The system gives the ident of a thread that has ended to the next one."""
    threads: list[threading.Thread] = []
    results: SimpleQueue[str] = SimpleQueue()

    def plain(_ctx: Any) -> str:
        threads.append(threading.current_thread())
        return results.get(timeout=10)

    async def handler(ctx: Any) -> Any:
        first = on_thread(ctx, plain)
        await eventually(lambda: threads)
        results.put("first")
        threads[0].join()  # keeps the loop from hearing of the end before the cancel
        second = on_thread(ctx, plain)
        first.cancel()
        await asyncio.wait([first])
        results.put("second")
        return await second

    async with working(sqlite_url, {None: handler}) as inside:
        assert (await inside.ended(await inside.submit())).output == "second"


async def test_handler_can_be_interrupted_anywhere(sqlite_url: str, request: Any) -> None:
    request.addfinalizer(lambda: threading.setprofile(None))

    async def stopped_at(ctx: Any, position: int) -> bool:
        loop, raised, events = asyncio.get_running_loop(), threading.Event(), count()

        def event(*_: Any) -> None:
            if threading.current_thread().name.startswith("task") and next(events) == position:
                loop.call_soon_threadsafe(running.cancel)
                loop.call_soon_threadsafe(loop.call_soon, raised.set)
                raised.wait(0.1)  # in vain where the interrupt has to wait for the thread

        threading.setprofile(event)
        running = on_thread(ctx, lambda _ctx: None)
        await eventually(running.done)
        return running.cancelled()

    async def handler(ctx: Any) -> int:
        return sum([await stopped_at(ctx, number) for number in range(50)])

    async with working(sqlite_url, {None: handler}) as inside:
        assert (await inside.ended(await inside.submit(max_attempts=1))).output > 10


async def test_attempt_replaced_in_the_same_worker_is_stopped(
    database_url: str,
) -> None:
    """The next attempt may be claimed before a heartbeat says that the first is lost."""
    stopped: list[int] = []
    running: list[int] = []

    async def handler(ctx: Any) -> int:
        running.append(ctx.attempt)
        try:
            if ctx.attempt == 1:
                await asyncio.Event().wait()
        except asyncio.CancelledError:
            stopped.append(ctx.attempt)
            raise
        return int(ctx.attempt)

    async with working(database_url, {None: handler}, heartbeat_s=60, lease_s=600) as inside:
        task = await inside.submit()
        await eventually(lambda: running == [1])
        await lose(inside)
        view = await inside.ended(task)
        assert view.output == 2
        await eventually(lambda: stopped == [1], 5)
        assert not inside.worker.holds(task)


async def lose(inside: Inside) -> None:
    """Expire what the worker holds, as after a stop of its process past the lease."""
    assert await inside.engine.maintenance.expire_worker(inside.worker.id, "reaper") == 1
    await inside.engine.maintenance.promote_once("promoter")


async def test_late_result_of_a_lost_attempt_is_refused(database_url: str) -> None:
    gate = asyncio.Event()

    async def handler(ctx: Any) -> int:
        if ctx.attempt == 1:
            await gate.wait()
        return int(ctx.attempt)

    async with working(database_url, {None: handler}, heartbeat_s=60, lease_s=600) as inside:
        task = await inside.submit()
        await eventually(lambda: inside.worker.holds(task))
        held = next(lease for lease in inside.worker._leases.all() if lease.fence.task == task)
        held.stop = lambda _reason: None  # nobody tells it
        await lose(inside)
        view = await inside.ended(task)
        gate.set()
        await eventually(lambda: not inside.worker._running)
        after = await inside.engine.show(task)
        assert (view.output, after.output) == (2, 2)
        assert await inside.outcomes(task) == ["STALLED", "COMPLETED"]


@pytest.fixture
async def world(database_url: str, tmp_path: Path) -> AsyncIterator[System]:
    async with system(database_url, tmp_path) as created:
        yield created


APP = ("--app", "tests.proof.crash.handlers")


async def test_exit_raised_by_a_handler_does_not_end_the_worker(world: System) -> None:
    worker = world.worker(*APP)
    names = ("leave", "leave_thread", "interrupt", "interrupt_thread")
    tasks = await world.submit(*(world.handled(name) for name in names))
    world.coordinator()
    await world.check(tasks)
    assert worker.code is None, worker.text()
    for name, task in zip(names, tasks, strict=True):
        assert await world.outcomes(task) == ["FAILED", "COMPLETED"], name


@pytest.mark.parametrize("handler", ["deaf", "deaf_thread"])
async def test_handler_that_does_not_stop_ends_only_its_worker(world: System, handler: str) -> None:
    worker = world.worker(*APP)
    stuck, other = await world.submit(world.handled(handler), world.handled("calm"))
    await world.logged(stuck, "up")
    await world.logged(other, "up")
    await world.engine.cancel(stuck)
    assert await worker.ended() == 70, worker.text()
    view = await world.engine.show(stuck)
    [attempt] = await world.attempts(stuck)
    assert (view.status, attempt.outcome, attempt.unconfirmed) == ("CANCELLED", "CANCELLED", False)
    assert attempt.receipt is not None
    assert attempt.receipt["how"] == "the worker process ended itself"
    view = await world.engine.show(other)
    assert (view.status, view.tries, view.last_outcome) == ("PENDING", 0, "RELEASED")
    world.worker(*APP)
    await world.check([other])


@pytest.mark.parametrize("handler", ["deaf", "deaf_thread"])
async def test_worker_drains_despite_a_handler_that_does_not_stop(
    world: System, handler: str
) -> None:
    worker = world.worker(*APP, drain_s=0.1)
    [task] = await world.submit(world.handled(handler))
    await world.logged(task, "up")
    worker.signal(signal.SIGTERM)
    await worker.ended(20)
    view = await world.engine.show(task)
    assert (view.status, view.tries, view.last_outcome) == ("PENDING", 0, "RELEASED")
