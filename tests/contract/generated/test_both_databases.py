"""The same calls on SQLite and PostgreSQL return the same results and leave the same tasks."""

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import Any
from uuid import UUID

import msgspec
import pytest
from hypothesis import HealthCheck, assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    multiple,
    rule,
    run_state_machine_as_test,
)
from tests.contract.conftest import WORKER, ManualClock, Raw, failure, new, profile

from tenuto.engine.engine import Engine
from tenuto.model.agents.matching import AgentProfile
from tenuto.model.errors import TenutoError
from tenuto.model.tasks.retry import ErrorClass, RetryPolicy
from tenuto.model.tasks.submission import Filter
from tenuto.model.tasks.task import Fence
from tenuto.model.tasks.transcript import Line
from tenuto.store.postgres.store import PostgresStore
from tenuto.store.protocol import Row
from tenuto.store.sqlite.store import SqliteStore

Call = Callable[[Engine], Awaitable[Any]]
WORDS = ("queued", "running", "archived", "stalled", "failed", "bogus")
ACTIONS = ("cancel", "pause", "pause", "resume", "resume", "retry", "archive")
KILLED = {"state": "killed"}
TYPES = ("default", "build", "review")
EMPTY = (
    "truncate task, task_body, task_output, checkpoint, task_label, task_tag, task_capability,"
    " task_step, attempt, transcript, event, lane, agent, worker, cursor, leader, inbox_item,"
    " message, task_dependency, child_wait, flow_work, spending"
)


class Ground:
    """An event loop and a PostgreSQL store for all examples; SQLite is made anew for each."""

    def __init__(self, url: str) -> None:
        self.runner = asyncio.Runner()
        self.raw = Raw(url)
        self.post_clock = ManualClock()
        self.post = PostgresStore(url, self.post_clock)
        self.run(self.post.migrate())
        self.run(self.post.open())

    def run(self, work: Any) -> Any:
        return self.runner.run(work)

    def engines(self) -> tuple[Engine, Engine, SqliteStore]:
        self.run(self.raw.execute(EMPTY))
        self.run(self.raw.execute("update workspace set lanes_version = 1"))
        lite = SqliteStore(":memory:", ManualClock())
        self.run(lite.migrate())
        self.post.clock = ManualClock()
        return Engine(lite, actor="tester"), Engine(self.post, actor="tester"), lite

    def close(self) -> None:
        self.run(self.post.close())
        self.runner.close()


@pytest.fixture
def ground(postgres_url: str) -> Iterator[Ground]:
    ground = Ground(postgres_url)
    yield ground
    ground.close()


seconds = st.sampled_from([1, 5, 30, 400])
options = st.fixed_dictionaries(
    {},
    optional={
        "priority": st.integers(1, 10),
        "task_type": st.sampled_from(TYPES),
        "max_attempts": st.integers(1, 3),
        "timeout_s": st.sampled_from([1, 60]),
        "estimate_minutes": st.just(1),
        "queue_ttl_s": st.sampled_from([10, 600]),
        "lease_s": st.sampled_from([5, 90]),
        "tags": st.lists(st.sampled_from(["x", "y"]), max_size=2),
        "retry": st.just(RetryPolicy(base_s=1, multiplier=3, jitter=0)),
        "input": st.sampled_from([{"a": [1, None]}, "ünï", 1.5]),
    },
)


class SameAnswers(RuleBasedStateMachine):
    """Drives both engines; `both` demands equal answers at every step."""

    tasks: Bundle[UUID] = Bundle("tasks")
    fences: Bundle[Fence] = Bundle("fences")

    def __init__(self, ground: Ground) -> None:
        super().__init__()
        self.ground = ground
        self.lite, self.post, self.memory = ground.engines()
        self.known: list[UUID] = []
        self.agent = self.both(lambda engine: engine.register_agent(profile()))

    def both(self, call: Call) -> Any:
        """The answer of both engines; `None` for a call that both refused alike."""
        answers = [self.ground.run(self._answer(engine, call)) for engine in self.engines]
        assert answers[0] == answers[1]
        return (
            None if isinstance(answers[0], tuple) and answers[0][:1] == ("refused",) else answers[0]
        )

    @property
    def engines(self) -> tuple[Engine, Engine]:
        return self.lite, self.post

    async def _answer(self, engine: Engine, call: Call) -> Any:
        try:
            return await call(engine)
        except TenutoError as error:
            return ("refused", type(error).__name__, error.code)

    def now(self, offset: float | None) -> Any:
        return None if offset is None else self.lite.clock.now() + timedelta(seconds=offset)

    @initialize(target=fences, options=st.lists(options, min_size=3, max_size=5))
    def start(self, options: list[dict[str, Any]]) -> Any:
        self.submit_many(options)
        return self.claim(3, None, None)

    @rule(target=fences, options=options)
    def submit_and_claim(self, options: dict[str, Any]) -> Any:
        self.submit(options, None, None)
        return self.claim(2, None, None)

    @rule(
        target=tasks,
        options=options,
        later=st.none() | seconds,
        key=st.sampled_from([None, None, "k", "l"]),
    )
    def submit(self, options: dict[str, Any], later: float | None, key: str | None) -> Any:
        expected = new(run_at=self.now(later), idempotency_key=key, **options)
        done = self.both(lambda engine: engine.submit(expected))
        if done is None:
            return multiple()
        self.known.append(done.id)
        return done.id

    @rule(target=tasks, bulk=st.lists(options, min_size=2, max_size=4))
    def submit_many(self, bulk: list[dict[str, Any]]) -> Any:
        expected = [new(**item) for item in bulk]
        done = self.both(lambda engine: engine.submit_many(expected)) or []
        self.known += [item.id for item in done]
        return multiple(*{item.id for item in done})

    @rule(
        target=fences,
        n=st.integers(1, 4),
        types=st.none() | st.sets(st.sampled_from(TYPES), min_size=1),
        limit=st.sampled_from([None, None, 2]),
    )
    def claim(self, n: int, types: set[str] | None, limit: int | None) -> Any:
        chosen = None if types is None else tuple(sorted(types))
        agent: AgentProfile = msgspec.structs.replace(
            self.agent, task_types=chosen, max_concurrent=limit, version=hash((chosen, limit))
        )

        async def claim(engine: Engine) -> Any:
            claimed = await engine.claim(agent, WORKER, n)
            return sorted(claimed, key=lambda work: work.fence.task)

        return multiple(*(work.fence for work in self.both(claim) or []))

    @rule(fence=fences, output=st.sampled_from([None, 1, {"a": "b"}]))
    def complete(self, fence: Fence, output: Any) -> None:
        self.both(lambda engine: engine.complete(fence, output, "done"))

    @rule(one=fences, other=fences, outputs=st.sampled_from([(None, 1), (1, None), (1, 2)]))
    def complete_together(self, one: Fence, other: Fence, outputs: tuple[Any, Any]) -> None:
        assume(one.task != other.task)  # of one task's two ends, either may come first

        async def complete(engine: Engine) -> list[str]:
            ends = engine.complete(one, outputs[0]), engine.complete(other, outputs[1])
            return [repr(result) for result in await asyncio.gather(*ends, return_exceptions=True)]

        self.both(complete)

    @rule(
        fence=fences,
        error_class=st.sampled_from(ErrorClass),
        retryable=st.sampled_from([None, None, True, False]),
        later=st.none() | seconds,
    )
    def fail(
        self, fence: Fence, error_class: str, retryable: bool | None, later: float | None
    ) -> None:
        reason = failure(error_class, retryable=retryable, stack="s", exit_code=1)
        self.both(lambda engine: engine.fail(fence, reason, self.now(later)))

    @rule(fence=fences, later=st.none() | seconds, until=st.none() | seconds)
    def park(self, fence: Fence, later: float | None, until: float | None) -> None:
        at, limit = self.now(later), self.now(until)
        self.both(lambda engine: engine.park(fence, "input", at, limit))

    @rule(fence=fences, outcome=st.sampled_from(["release", "not_started", "time_out", "begin"]))
    def end(self, fence: Fence, outcome: str) -> None:
        calls: dict[str, Call] = {
            "release": lambda engine: engine.release(fence),
            "not_started": lambda engine: engine.not_started(fence, failure()),
            "time_out": lambda engine: engine.time_out(fence, KILLED),
            "begin": lambda engine: engine.begin(fence, "session"),
        }
        self.both(calls[outcome])

    @rule(fence=fences, asked=st.sampled_from(["cancel", "pause"]))
    def confirm(self, fence: Fence, asked: str) -> None:
        self.both(lambda engine: getattr(engine, f"confirm_{asked}")(fence, KILLED))

    @rule(held=st.lists(fences, min_size=1, max_size=3, unique_by=lambda fence: fence.task))
    def heartbeat(self, held: list[Fence]) -> None:
        self.both(lambda engine: engine.heartbeat(held, 30))

    @rule(fence=fences, seq=st.none() | st.integers(0, 4))
    def checkpoint(self, fence: Fence, seq: int | None) -> None:
        self.both(lambda engine: engine.checkpoint(fence, {"at": seq}, seq))

    @rule(fence=fences, kind=st.sampled_from(["progress", "step", "line", "steps"]))
    def report(self, fence: Fence, kind: str) -> None:
        calls: dict[str, Call] = {
            "progress": lambda engine: engine.progress(fence, 50, "half", self.now(9)),
            "step": lambda engine: engine.record_step(fence, "key", [1]),
            "line": lambda engine: engine.append(fence, [Line(1, "INFO", "ü")]),
            "steps": lambda engine: engine.steps(fence.task),
        }
        self.both(calls[kind])

    @rule(target=tasks, fence=fences, key=st.sampled_from(["a", "b"]))
    def spawn(self, fence: Fence, key: str) -> Any:
        child = self.both(lambda engine: engine.spawn(fence, key, new(f"child {key}")))
        if child is None:
            return multiple()
        self.known.append(child)
        return child

    @rule(fence=fences, attempt=st.integers(-1, 1), token=st.sampled_from(["", "forged"]))
    def forge(self, fence: Fence, attempt: int, token: str) -> None:
        forged = Fence(fence.task, fence.attempt + attempt, token or fence.token)
        self.both(lambda engine: engine.complete(forged, "forged"))
        self.both(lambda engine: engine.progress(forged, 99))

    @rule(task=tasks, action=st.sampled_from(ACTIONS))
    def ask(self, task: UUID, action: str) -> None:
        self.both(lambda engine: getattr(engine, action)(task))

    @rule(fence=fences, action=st.sampled_from(ACTIONS))
    def ask_of_claimed(self, fence: Fence, action: str) -> None:
        self.ask(fence.task, action)

    @rule(task=tasks, priority=st.integers(0, 11))
    def reprioritise(self, task: UUID, priority: int) -> None:
        self.both(lambda engine: engine.reprioritise(task, priority))

    @rule(target=tasks, task=tasks)
    def rerun(self, task: UUID) -> Any:
        created = self.both(lambda engine: engine.rerun(task))
        if created is None:
            return multiple()  # what it asked for was pruned
        self.known.append(created.id)
        return created.id

    @rule(by=st.sampled_from([0.5, 5, 21, 31, 120, 700, 2500, 90_000, 3_000_000]))
    def advance(self, by: float) -> None:
        for engine in self.engines:
            assert isinstance(engine.clock, ManualClock)
            engine.clock.advance(by)
        self.both(lambda engine: engine.maintenance.expire_once("reaper"))
        self.both(lambda engine: engine.maintenance.promote_once("promoter"))
        if by > 86_400:
            self.both(lambda engine: engine.maintenance.archive_once("archiver"))
            self.both(lambda engine: engine.maintenance.prune_once())

    @rule(words=st.lists(st.sampled_from(WORDS), max_size=2), tags=st.sets(st.sampled_from("xy")))
    def read(self, words: list[str], tags: set[str]) -> None:
        where = Filter(status=tuple(words), tags=tuple(tags), min_priority=3, text="a")
        self.both(lambda engine: engine.list(where, 3))
        self.both(_relayed)

    def teardown(self) -> None:
        try:
            for task in dict.fromkeys(self.known):
                for read in ("show", "attempts", "steps", "explain", "logs"):
                    self.both(partial(_read, read, task))
            self.both(lambda engine: engine.query.counts(engine.workspace))
            assert self.both(lambda engine: engine.maintenance.audit()) == []
        finally:
            self.ground.run(self.memory.close())


async def _read(name: str, task: UUID, engine: Engine) -> Any:
    return await getattr(engine, name)(task)


async def _relayed(engine: Engine) -> list[Any]:
    """Returns the next events of a subscriber; the order among tasks depends on the database."""
    seen: list[Any] = []

    async def sink(events: Sequence[Row]) -> None:
        seen.extend((str(event["task"]), event["seq"], event["kind"]) for event in events)

    await engine.maintenance.relay_once("sink", sink, 10_000)
    return sorted(seen)


SETTINGS = settings(
    deadline=None,
    derandomize="CI" in os.environ,
    max_examples=int(os.environ.get("TENUTO_EXAMPLES", "25")),
    stateful_step_count=40,
    suppress_health_check=list(HealthCheck),
)


def test_both_databases_return_the_same_results(ground: Ground) -> None:
    class Here(SameAnswers):
        def __init__(self) -> None:
            super().__init__(ground)

    run_state_machine_as_test(Here, settings=SETTINGS)
