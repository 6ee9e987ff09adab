"""What every runtime does. A new one gets a line in `RUNTIMES`, and its program per behaviour."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from datetime import datetime, timedelta
from typing import Any, NamedTuple
from uuid import UUID

import pytest
from tests.proof.crash.inside import Inside, working
from tests.waiting import eventually

from tenuto import AttemptFailed, Context, ErrorClass, Failure
from tenuto.model.agents.matching import AgentProfile
from tenuto.registry import RUNTIMES
from tenuto.worker.runtime.protocol import Runtime, RuntimeContext
from tenuto.worker.session import Supervisor


def report(**fields: Any) -> str:
    """The shell command that says this over the report pipe."""
    return f"echo '{json.dumps(fields)}' >&3; "


def lines_of(name: str) -> str:
    """The shell command that reports a variable as the output."""
    return f'echo "{{\\"output\\": ${name}}}" >&3; '


AGAIN = 'if [ "$TENUTO_ATTEMPT" -gt 1 ]; then '


async def answer(ctx: Context) -> Any:
    return ctx.input


async def speak(ctx: Context) -> None:
    ctx.log("first")
    ctx.log("second")
    await ctx.progress(40, "compiling")
    await hang(ctx)


async def hang(ctx: Context) -> None:
    ctx.log("up")
    await asyncio.Event().wait()


async def fail(_ctx: Context) -> None:
    raise AttemptFailed(Failure(message="boom"))


async def fail_for_good(_ctx: Context) -> None:
    raise AttemptFailed(Failure(message="boom", retryable=False))


async def fail_by_syntax(_ctx: Context) -> None:
    raise AttemptFailed(Failure(message="boom", error_class=ErrorClass.SYNTAX))


async def meet_limit(ctx: Context) -> str:
    if ctx.attempt > 1:
        return "went on"
    failure = Failure(message="429", error_class=ErrorClass.RATE_LIMIT)
    raise AttemptFailed(failure, datetime.fromisoformat(ctx.input))


async def save(ctx: Context) -> Any:
    if ctx.attempt > 1:
        return ctx.checkpoint
    await ctx.save({"page": 1})
    await ctx.save({"page": 2})
    raise AttemptFailed(Failure(message="boom"))


async def go_on(ctx: Context) -> Any:
    if ctx.attempt > 1:
        return ctx.checkpoint
    await ctx.save({"at": 7})
    await hang(ctx)
    return None


LIMIT = {"message": "429", "class": "rate_limit"}
SCRIPTS: dict[Callable[..., Any], Callable[[Any], str]] = {
    answer: lambda _: lines_of("TENUTO_INPUT"),
    speak: lambda _: (
        report(log="first")
        + report(log="second")
        + report(progress=40, step="compiling")
        + "sleep 100"
    ),
    hang: lambda _: "echo up; sleep 100",
    fail: lambda _: report(error="boom"),
    fail_for_good: lambda _: report(error={"message": "boom", "retryable": False}),
    fail_by_syntax: lambda _: report(error={"message": "boom", "class": "syntax"}),
    meet_limit: lambda until: (
        AGAIN
        + report(output="went on")
        + "exit 0; fi; "
        + report(error={**LIMIT, "resume_at": until})
    ),
    save: lambda _: (
        AGAIN
        + lines_of("TENUTO_CHECKPOINT")
        + "exit 0; fi; "
        + report(checkpoint={"page": 1})
        + report(checkpoint={"page": 2})
        + "echo up; sleep 0.3; kill -9 $$"
    ),
    go_on: lambda _: (
        AGAIN
        + lines_of("TENUTO_CHECKPOINT")
        + "exit 0; fi; "
        + report(checkpoint={"at": 7})
        + "echo up; sleep 100"
    ),
}
"""What each behaviour is as a shell script, for a given input."""


class Adapter(NamedTuple):
    """How the tests use a runtime: what starts a worker, and what submits a behaviour."""

    working: Callable[..., AbstractAsyncContextManager[Inside]]
    options: Callable[[Callable[..., Any], Any], dict[str, Any]]


def functions(url: str, **changes: Any) -> AbstractAsyncContextManager[Inside]:
    return working(url, {behaviour.__name__: behaviour for behaviour in SCRIPTS}, **changes)


ADAPTERS = {
    "function": Adapter(
        functions, lambda behaviour, value: {"task_type": behaviour.__name__, "input": value}
    ),
    "command": Adapter(
        working,
        lambda behaviour, value: {
            "command": ["sh", "-c", SCRIPTS[behaviour](value)],
            "input": value,
        },
    ),
}


class Stage:
    """A worker with the runtime."""

    def __init__(self, adapter: Adapter, inside: Inside) -> None:
        self.adapter = adapter
        self.inside = inside

    async def submit(
        self, behaviour: Callable[..., Any], value: Any = None, **options: Any
    ) -> UUID:
        return await self.inside.submit(**self.adapter.options(behaviour, value), **options)


Start = Callable[..., AbstractAsyncContextManager[Stage]]


@pytest.fixture(params=ADAPTERS)
def started(request: pytest.FixtureRequest, database_url: str) -> Start:
    adapter = ADAPTERS[request.param]

    @asynccontextmanager
    async def start(**changes: Any) -> AsyncIterator[Stage]:
        async with adapter.working(database_url, **changes) as inside:
            yield Stage(adapter, inside)

    return start


@pytest.mark.parametrize("value", [{"answer": 42}, [1, None, "é"], 0, "text"])
async def test_it_gets_the_input_and_its_output_is_the_result(started: Start, value: Any) -> None:
    async with started() as stage:
        task = await stage.submit(answer, value)
        view = await stage.inside.ended(task)
        assert (view.status, view.output) == ("COMPLETED", value)
        assert await stage.inside.outcomes(task) == ["COMPLETED"]


async def test_lines_and_progress_are_stored_while_it_runs(started: Start) -> None:
    async with started() as stage:
        task = await stage.submit(speak)

        async def there() -> bool:
            view = await stage.inside.engine.show(task)
            return (view.progress_percent, view.current_step) == (40, "compiling")

        await eventually(there)
        await stage.inside.engine.cancel(task)
        await stage.inside.until(task, "CANCELLED")
        lines = await stage.inside.engine.query.transcript(task, stage.inside.engine.workspace)
        assert [(line.text, line.level) for line in lines][:2] == [
            ("first", "INFO"),
            ("second", "INFO"),
        ]


@pytest.mark.parametrize(
    ("behaviour", "status", "error_class", "outcomes"),
    [
        (fail, "DEAD", "error", ["FAILED", "FAILED"]),
        (fail_for_good, "FAILED", "error", ["FAILED"]),
        (fail_by_syntax, "FAILED", "syntax", ["FAILED"]),
    ],
)
async def test_a_reported_failure_decides_about_the_retry(
    started: Start,
    behaviour: Callable[..., Any],
    status: str,
    error_class: str,
    outcomes: list[str],
) -> None:
    async with started() as stage:
        task = await stage.submit(behaviour, max_attempts=2)
        view = await stage.inside.ended(task)
        assert (view.status, view.error_class) == (status, error_class)
        assert "boom" in (view.last_error or "")
        assert await stage.inside.outcomes(task) == outcomes


async def test_a_rate_limit_with_a_known_end_parks_the_task(started: Start) -> None:
    async with started() as stage:
        until = stage.inside.engine.clock.now() + timedelta(seconds=1)
        task = await stage.submit(meet_limit, until.isoformat(), max_attempts=1)
        view = await stage.inside.until(task, "WAITING")
        assert (view.hold, view.waiting_for, view.tries) == ("quota", "quota", 0)
        assert view.resume_at is not None
        assert (await stage.inside.ended(task)).output == "went on"
        assert await stage.inside.outcomes(task) == ["PARKED", "COMPLETED"]


async def test_a_checkpoint_is_handed_to_the_next_attempt(started: Start) -> None:
    async with started() as stage:
        task = await stage.submit(save)
        view = await stage.inside.ended(task)
        assert (view.status, view.checkpoint_seq) == ("COMPLETED", 2)
        assert await stage.inside.outcomes(task) == ["FAILED", "COMPLETED"]
        assert view.output == {"page": 2}


async def test_a_cancel_is_confirmed_with_a_receipt(started: Start) -> None:
    async with started(lease_s=30) as stage:
        task = await stage.submit(hang)
        await stage.inside.logged(task, "up")
        await stage.inside.engine.cancel(task, "enough")
        await stage.inside.until(task, "CANCELLED")
        attempt = await stage.inside.last(task)
        assert (attempt.outcome, attempt.unconfirmed) == ("CANCELLED", False)
        assert attempt.receipt is not None
        assert attempt.receipt["state"] in ("ended", "killed")
        assert attempt.receipt["how"]
        assert not stage.inside.worker.holds(task)


async def test_a_pause_ends_the_attempt_and_resume_goes_on_from_the_checkpoint(
    started: Start,
) -> None:
    async with started() as stage:
        task = await stage.submit(go_on)
        await stage.inside.logged(task, "up")
        await stage.inside.engine.pause(task)
        view = await stage.inside.until(task, "PAUSED")
        assert (view.tries, view.checkpoint) == (0, {"at": 7})
        receipt = (await stage.inside.last(task)).receipt
        assert receipt is not None
        assert receipt["state"] in ("ended", "killed")
        await stage.inside.engine.resume(task)
        view = await stage.inside.ended(task)
        assert (view.status, view.tries, view.output) == ("COMPLETED", 1, {"at": 7})
        assert await stage.inside.outcomes(task) == ["PAUSED", "COMPLETED"]


async def test_a_run_that_takes_too_long_is_ended_and_gets_more_time(started: Start) -> None:
    async with started() as stage:
        task = await stage.submit(hang, timeout_s=1, max_attempts=2)
        view = await stage.inside.ended(task)
        assert (view.status, view.error_class, view.timeout_s) == ("DEAD", "timeout", 4)
        attempts = await stage.inside.engine.attempts(task)
        assert [attempt.outcome for attempt in attempts] == ["TIMED_OUT", "TIMED_OUT"]
        assert attempts[0].receipt is not None
        assert "timeout of 1 s" in (attempts[0].message or "")


async def test_a_drained_worker_gives_the_task_back(started: Start) -> None:
    async with started(drain_s=0.1) as stage:
        task = await stage.submit(hang)
        await stage.inside.logged(task, "up")
        stage.inside.worker._drain_requested.set()
        view = await stage.inside.until(task, "PENDING")
        assert (view.tries, await stage.inside.outcomes(task)) == (0, ["RELEASED"])


async def test_the_contexts_of_the_registry_are_enough(sqlite_url: str) -> None:
    async with working(sqlite_url, {"other": print}) as inside:
        supervisor = Supervisor()
        for name in ADAPTERS:
            context = RuntimeContext(inside.worker.settings, supervisor, ("true",), {"t": answer})
            runtime: Runtime = RUNTIMES.load(name)(context)
            assert runtime.name == name
            free = runtime.free_sessions(0)
            assert free is None or free > 0
            runtime.release_reservation()
            types = runtime.task_types
            profile = AgentProfile(
                id=inside.engine.clock.new_id(),
                workspace=inside.engine.workspace,
                name=name,
                task_types=types,
                runtimes=(name,),
            )
            await inside.worker.host(profile, runtime)
        task = await inside.submit(task_type="t", runtime="function", input="hello")
        assert (await inside.ended(task)).output == "hello"
        await supervisor.close()
