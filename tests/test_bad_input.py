"""Bad input: refused with a stable code and one sentence, and nothing is written."""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import pytest
from tests.contract.conftest import (
    WORKER,
    ManualClock,
    Raw,
    claim_one,
    failure,
    new,
    opened,
    profile,
    running,
)

from tenuto.engine.engine import Engine
from tenuto.engine.tasks.report import WorkerInfo
from tenuto.model.errors import CODES, TenutoError
from tenuto.model.tasks.retry import RetryPolicy
from tenuto.model.tasks.submission import Filter
from tenuto.model.tasks.task import Fence
from tenuto.model.tasks.transcript import Line

NUL, HALF = "a\x00b", "a\ud800b"
MEGABYTE = "x" * (1024 * 1024 + 1)
NAIVE = datetime(2030, 1, 1)  # noqa: DTZ001  that is the point
Call = Callable[[Engine, Fence, Any], Awaitable[Any]]


@pytest.fixture
def raw(database_url: str) -> Raw:
    return Raw(database_url)


@pytest.fixture
async def engine(database_url: str) -> AsyncIterator[Engine]:
    async with opened(database_url, ManualClock()) as store:
        yield Engine(store, actor="tester")


@pytest.fixture
async def fence(engine: Engine) -> Fence:
    """A running attempt; its lane is there already."""
    return await running(engine)


async def answer(call: Awaitable[Any]) -> str:
    """The code of a refusal in one sentence, `accepted`, or the name of a fault."""
    try:
        await call
    except TenutoError as error:
        lines, size = len(error.message.splitlines()), len(error.message)
        fits = error.code in CODES and lines == 1 and size < 400
        return error.code if fits else f"fault: {error.code} in {size} characters"
    except Exception as error:  # noqa: BLE001  a fault is what these tests look for
        return f"fault: {type(error).__name__}"
    return "accepted"


def listed(wrong: dict[str, str]) -> str:
    return "\n" + "\n".join(f"{name}: {reported}" for name, reported in wrong.items())


async def check(
    engine: Engine, fence: Fence, raw: Raw, calls: dict[str, Call], bad: Any, expected: set[str]
) -> None:
    """Every call with the bad value is refused as wanted, and no row is written."""
    before = await raw.counts()
    matches = {name: await answer(call(engine, fence, bad)) for name, call in calls.items()}
    wrong = {name: reported for name, reported in matches.items() if reported not in expected}
    assert not wrong, listed(wrong)
    after = await raw.counts()
    assert after == before | {"lane": after["lane"]}
    assert (await engine.submit(new("work goes on"))).created


def submitting(**fields: Any) -> Call:
    """Submit with the bad value where a field's maker puts it."""

    def call(engine: Engine, fence: Fence, bad: Any) -> Awaitable[Any]:
        values = {name: make(bad) for name, make in fields.items()}
        return engine.submit(new(**({"title": "t"} | values)))

    return call


def itself(bad: Any) -> Any:
    return bad


def constant(value: Any) -> Callable[[Any], Any]:
    return lambda _: value


TEXT_FIELDS = (
    "title description prompt system_prompt model conversation task_type agent_type runtime cwd"
    " container region idempotency_key trace_id source"
).split()
SUBMITTED_TEXT: dict[str, Call] = {
    **{name: submitting(**{name: itself}) for name in TEXT_FIELDS},
    **{
        name: submitting(**{name: lambda bad: ["fine", bad]})
        for name in ("tags", "task_tags", "capabilities", "command")
    },
    "env name": submitting(command=constant(["x"]), env=lambda bad: {bad: "1"}),
    "env value": submitting(command=constant(["x"]), env=lambda bad: {"A": bad}),
    "env without command": submitting(env=lambda bad: {"A": bad}),
    "input": submitting(input=itself),
    "deep input": submitting(input=lambda bad: {"a": [{"b": (1, bad)}]}),
    "input key": submitting(input=lambda bad: [{bad: 1}]),
    "metadata": submitting(metadata=lambda bad: {"a": bad}),
    "input under a key": submitting(input=itself, idempotency_key=constant("k")),
    "title under a key": submitting(title=itself, idempotency_key=constant("k")),
    "input under an id": submitting(input=itself, id=constant(UUID(int=1))),
}
REPORTED_TEXT: dict[str, Call] = {
    "cancel": lambda e, f, bad: e.cancel(f.task, bad),
    "pause": lambda e, f, bad: e.pause(f.task, bad),
    "output": lambda e, f, bad: e.complete(f, {"a": [bad]}),
    "summary": lambda e, f, bad: e.complete(f, 1, bad),
    "checkpoint": lambda e, f, bad: e.checkpoint(f, [bad]),
    "progress": lambda e, f, bad: e.progress(f, 1, bad),
    "step key": lambda e, f, bad: e.record_step(f, bad, 1),
    "step value": lambda e, f, bad: e.record_step(f, "k", {"a": bad}),
    "spawn key": lambda e, f, bad: e.spawn(f, bad, new()),
    "spawn title": lambda e, f, bad: e.spawn(f, "k", new(bad)),
    "spawn input": lambda e, f, bad: e.spawn(f, "k", new(input=bad)),
    "filter text": lambda e, f, bad: e.list(Filter(text=bad)),
    "filter tag": lambda e, f, bad: e.list(Filter(tags=(bad,))),
    "filter type": lambda e, f, bad: e.list(Filter(task_type=bad)),
}
WORDS_OF_AN_ATTEMPT: dict[str, Call] = {
    "fail": lambda e, f, bad: e.fail(f, failure(message=bad)),
    "stack": lambda e, f, bad: e.fail(f, failure(stack=bad)),
    "not_started": lambda e, f, bad: e.not_started(f, failure(message=bad)),
    "park": lambda e, f, bad: e.park(f, bad),
    "time_out": lambda e, f, bad: e.time_out(f, {"how": bad}),
    "append": lambda e, f, bad: e.append(f, [Line(1, "INFO", bad)]),
    "level": lambda e, f, bad: e.append(f, [Line(1, bad, "text")]),
    "agent": lambda e, f, bad: e.register_agent(profile(name=bad)),
    "worker": lambda e, f, bad: e.record_worker(WorkerInfo(bad, "host", 1, ["a"], 1, "RUNNING")),
    "status of a worker": lambda e, f, bad: e.record_worker(
        WorkerInfo("w", "host", 1, ["a"], 1, bad)
    ),
    "worker of a claim": lambda e, f, bad: e.claim(profile(), bad, 1),
    "find": lambda e, f, bad: e.find(bad),
    "filter status": lambda e, f, bad: e.list(Filter(status=(bad,))),
    "log level": lambda e, f, bad: e.logs(f.task, bad),
}


TURNS = ("get", "pause", "resume", "delete")


def naming(part: str, method: str) -> Call:
    """Look for something of a part of the engine by the bad value."""
    return lambda engine, fence, bad: getattr(getattr(engine, part), method)(bad)


LOOKED_UP: dict[str, Call] = {
    "definition": lambda e, f, bad: e.definitions.get(bad),
    "definition to delete": lambda e, f, bad: e.definitions.delete(bad),
    "definitions to export": lambda e, f, bad: e.definitions.export(["fine", bad]),
    "definition to start": lambda e, f, bad: e.flows.start(bad),
    "running group": lambda e, f, bad: e.flows.find_open_group(bad),
    **{f"schedule to {item}": naming("schedules", item) for item in (*TURNS, "next")},
    **{f"trigger to {item}": naming("triggers", item) for item in TURNS},
    "rate limit": lambda e, f, bad: e.rate_limits.delete(bad),
    "gate": lambda e, f, bad: e.gates.open("agent", bad),
}


@pytest.mark.parametrize("bad", [NUL, HALF], ids=["nul", "surrogate"])
async def test_text_that_cannot_be_stored_is_refused(
    engine: Engine, fence: Fence, raw: Raw, bad: str
) -> None:
    calls = SUBMITTED_TEXT | REPORTED_TEXT | LOOKED_UP
    await check(engine, fence, raw, calls, bad, {"text_invalid"})


async def test_odd_text_of_an_attempt_is_stored_escaped(engine: Engine) -> None:
    wrong = {}
    for name, call in WORDS_OF_AN_ATTEMPT.items():
        for kind, bad in {"nul": NUL, "surrogate": HALF, "long": MEGABYTE}.items():
            fence = await running(engine)
            reported = await answer(call(engine, fence, bad))
            if reported.startswith("fault") or reported == "database_unreachable":
                wrong[f"{name}, {kind}"] = reported
            await engine.show(fence.task)
            await engine.logs(fence.task)
            await clear(engine)
    assert not wrong, listed(wrong)


async def clear(engine: Engine) -> None:
    """Leave nothing to claim, whatever the last call did."""
    await engine.act("cancel", Filter(status=("pending",)))


async def test_too_long_text_is_refused(engine: Engine, fence: Fence, raw: Raw) -> None:
    calls = {n: c for n, c in (SUBMITTED_TEXT | REPORTED_TEXT).items() if n != "filter type"}
    await check(engine, fence, raw, calls, MEGABYTE, {"too_large"})


async def test_empty_text_is_refused(engine: Engine, fence: Fence, raw: Raw) -> None:
    fields = ("title", "task_type", "idempotency_key", "tags", "task_tags", "capabilities")
    calls = {name: SUBMITTED_TEXT[name] for name in fields}
    calls |= {name: REPORTED_TEXT[name] for name in ("step key", "spawn key")}
    for empty in ("", "   "):
        await check(engine, fence, raw, calls, empty, {"invalid_value"})


NUMBERS: dict[str, tuple[Call, list[Any]]] = {
    "priority": (submitting(priority=itself), [0, 11, -1, 2**70, 5.5, True]),
    "max_attempts": (submitting(max_attempts=itself), [0, 1_000_000, -1, 2**70, 2.5]),
    "timeout_s": (submitting(timeout_s=itself), [0, -1, 2**70, 1.5]),
    "queue_ttl_s": (submitting(queue_ttl_s=itself), [0, -1, 2**70]),
    "lease_s": (submitting(lease_s=itself), [0, -1, 2**70]),
    "estimate": (submitting(estimate_minutes=itself), [0, 2**70]),
    "max_turns": (submitting(max_turns=itself), [0, 2**70]),
    "base_s": (
        submitting(retry=lambda bad: RetryPolicy(base_s=bad)),
        [-1, float("nan"), float("inf"), 1e300],
    ),
    "jitter": (submitting(retry=lambda bad: RetryPolicy(jitter=bad)), [-0.1, 1.1, float("nan")]),
    "reprioritise": (lambda e, f, bad: e.reprioritise(f.task, bad), [0, 11, 2**70]),
    "percent": (lambda e, f, bad: e.progress(f, bad), [-1, 101, 2**70]),
    "page": (lambda e, f, bad: e.list(limit=bad), [0, -1, 1001, 2**70]),
    "events": (lambda e, f, bad: e.events(f.task, limit=bad), [0, -1, 2**70]),
    "transcript": (lambda e, f, bad: e.transcript(f.task, limit=bad), [0, -1, 2**70]),
    "logs": (lambda e, f, bad: e.logs(f.task, limit=bad), [0, -1, 2**70]),
    "action": (lambda e, f, bad: e.act("cancel", Filter(), limit=bad), [0, 10_001, 2**70]),
    "checkpoint": (lambda e, f, bad: e.checkpoint(f, 1, bad), [-1, 2**63, 2**70]),
    "min_priority": (lambda e, f, bad: e.list(Filter(min_priority=bad)), [2**63, 2**70]),
    "line": (lambda e, f, bad: e.append(f, [Line(bad, "INFO", "x")]), [2**63, 2**70]),
    "exit code": (lambda e, f, bad: e.fail(f, failure(exit_code=bad)), [2**63, 2**70]),
    "heartbeat": (lambda e, f, bad: e.heartbeat([f], bad), [2**40, 2**63, 2**70]),
    "claim": (lambda e, f, bad: e.claim(profile(), WORKER, 1, bad), [2**40, 2**63, 2**70]),
    "claim n": (lambda e, f, bad: e.claim(profile(), WORKER, bad), [2**63, 2**70]),
    "naive run_at": (submitting(run_at=itself), [NAIVE]),
    "naive resume_at": (lambda e, f, bad: e.park(f, "quota", bad), [NAIVE]),
    "naive wait_until": (lambda e, f, bad: e.park(f, "quota", None, bad), [NAIVE]),
    "naive reset": (lambda e, f, bad: e.fail(f, failure("rate_limit"), bad), [NAIVE]),
    "naive finish": (lambda e, f, bad: e.progress(f, 1, None, bad), [NAIVE]),
    "naive since": (lambda e, f, bad: e.list(Filter(since=bad)), [NAIVE]),
    "naive until": (lambda e, f, bad: e.list(Filter(until=bad)), [NAIVE]),
}


async def test_numbers_and_times_out_of_range_are_refused(engine: Engine, raw: Raw) -> None:
    wrong = {}
    for name, (call, values) in NUMBERS.items():
        for bad in values:
            fence = await running(engine)
            if name == "claim":
                await engine.submit(new())
            before = await raw.counts()
            reported = await answer(call(engine, fence, bad))
            if reported not in ("invalid_value", "checkpoint_stale", "lease_lost"):
                wrong[f"{name} {bad}"] = reported
            elif await raw.counts() != before:
                wrong[f"{name} {bad}"] = "refused, and written all the same"
            await clear(engine)
    assert not wrong, listed(wrong)


async def test_invented_fence_is_refused(engine: Engine, fence: Fence, raw: Raw) -> None:
    calls: dict[str, Call] = {
        "complete": lambda e, f, bad: e.complete(bad),
        "release": lambda e, f, bad: e.release(bad),
        "progress": lambda e, f, bad: e.progress(bad, 1),
        "checkpoint": lambda e, f, bad: e.checkpoint(bad, 1),
    }
    numbers, tokens = ((-1, ""), (2**63, "x"), (2**70, "x")), (MEGABYTE, NUL, HALF)
    for attempt, token in (*numbers, *((1, token) for token in tokens)):
        bad = Fence(fence.task, attempt, token)
        await check(engine, fence, raw, calls, bad, {"lease_lost", "invalid_value"})
    with suppress(TenutoError):
        assert (await engine.heartbeat([Fence(fence.task, 2**70, "x")])).held == {}
    heartbeat = await engine.heartbeat([Fence(fence.task, fence.attempt, HALF), fence])
    assert list(heartbeat.held) == [fence.task]


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = {"a": [value]}
    return value


def not_json() -> Iterator[tuple[str, Any]]:
    yield "invalid_json", float("nan")
    yield "invalid_json", float("inf")
    yield "invalid_json", 2**64
    yield "invalid_json", -(2**63) - 1
    yield "invalid_json", object()
    yield "invalid_json", b"bytes"
    yield "invalid_json", {1: "key"}
    yield "invalid_json", {"a", "set"}
    yield "invalid_json", UUID(int=1)
    yield "too_deep", nested(100_000)
    yield "too_large", [MEGABYTE]


async def test_values_that_are_not_json_are_refused(engine: Engine, fence: Fence, raw: Raw) -> None:
    names = ("input", "deep input", "metadata", "input under a key", "input under an id")
    calls = {name: SUBMITTED_TEXT[name] for name in names}
    calls |= {n: REPORTED_TEXT[n] for n in ("output", "checkpoint", "step value", "spawn input")}
    wrong: dict[str, str] = {}
    before = await raw.counts()
    for code, bad in not_json():
        for name, call in calls.items():
            reported = await answer(call(engine, fence, bad))
            if reported != code:
                wrong[f"{name} of {type(bad).__name__}"] = reported
    assert not wrong, listed(wrong)
    assert await raw.counts() == before


async def test_receipts_that_are_not_json_are_refused(engine: Engine, fence: Fence) -> None:
    matches = []
    for bad in ({"a": object()}, {"a": nested(5_000)}, {"a": float("nan")}):
        matches.append(await answer(engine.time_out(fence, bad)))
    assert [item for item in matches if item.startswith("fault")] == []


async def test_too_long_lists_are_refused(engine: Engine, fence: Fence, raw: Raw) -> None:
    words = [f"w{n}" for n in range(51)]
    calls = {name: submitting(**{name: itself}) for name in ("tags", "task_tags", "capabilities")}
    await check(engine, fence, raw, calls, words, {"too_large"})
    await check(
        engine,
        fence,
        raw,
        {"command": submitting(command=itself)},
        ["x" * 9] * 200_000,
        {"too_large"},
    )
    environment = {f"NAME_{n}": "x" * 100 for n in range(20_000)}
    calls = {"env": submitting(command=constant(["x"]), env=itself)}
    await check(engine, fence, raw, calls, environment, {"too_large"})


async def test_too_many_items_at_once_are_refused(engine: Engine, fence: Fence, raw: Raw) -> None:
    calls: dict[str, Call] = {"bulk": lambda e, f, bad: e.submit_many(bad)}
    await check(engine, fence, raw, calls, [new()] * 10_001, {"bulk_too_large"})


async def test_earliest_and_latest_times_are_accepted(engine: Engine) -> None:
    for at in (datetime.max.replace(tzinfo=UTC), datetime.min.replace(tzinfo=UTC)):
        reported = await answer(engine.submit(new(run_at=at, queue_ttl_s=10)))
        assert reported in ("accepted", "invalid_value")
    await engine.submit(new())
    await engine.maintenance.promote_once("promoter")
    await claim_one(engine)


async def test_refused_task_creates_no_lane(engine: Engine, raw: Raw) -> None:
    before = await raw.counts()
    for index in range(5):
        assert await answer(engine.submit(new(task_type=f"type{index}", input=object()))) != ""
    assert await raw.counts() == before
