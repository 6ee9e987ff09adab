"""Helpers for tests of random sequences: steps drawn from a seed, and an engine to run them on.

A test plays each sequence on the real engine and on a small interpreter of its own, which knows the
rules from the documents, and compares the two after every step.
"""

import asyncio
import os
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple, Protocol
from uuid import UUID

from tests.contract.conftest import (
    ManualClock,
    Raw,
    check_attempts,
    check_awaited,
    check_timers,
    check_trail,
    check_whole,
    opened,
)

from tenuto.engine.engine import Engine
from tenuto.engine.rows import parse_task
from tenuto.model.errors import TenutoError
from tenuto.model.tasks.task import Task
from tenuto.store.protocol import Script, Statement

KILLED = {"state": "killed"}
MOST_REPLAYS = 400
"""How often a sequence that fails is played again to find a shorter one."""


class Step(NamedTuple):
    """Something that is done: `which` and `how` choose among what there is at that moment."""

    kind: str
    which: int
    how: int


class World(Protocol):
    """An engine and what is expected of it, in a workspace of its own."""

    async def do(self, step: Step) -> None: ...

    async def check(self) -> None: ...

    async def finish(self) -> None: ...


Make = Callable[[Engine, Raw], World]


def drawn(seed: int, kinds: Sequence[str], fewest: int, maximum: int) -> list[Step]:
    """A random sequence of steps of most of the kinds: without the others it gets further."""
    chance = random.Random(seed)
    left = {kind for kind in sorted(set(kinds)) if chance.random() < 0.2} - {kinds[0]}
    kinds = [kind for kind in kinds if kind not in left]
    return [
        Step(chance.choice(kinds), chance.randrange(1000), chance.randrange(1000))
        for _ in range(chance.randint(fewest, maximum))
    ]


def seeds(variable: str, few: Sequence[int]) -> Sequence[int]:
    """As many seeds as the environment asks for, or the few."""
    if variable not in os.environ:
        return few
    first = 0 if "CI" in os.environ else random.randrange(2**32)
    return range(first, first + int(os.environ[variable]))


class Ground:
    """A database and a clock for all sequences of a test, each in a workspace of its own."""

    def __init__(self, url: str) -> None:
        self._raw = Raw(url)
        self._runner = asyncio.Runner()
        self._opened = opened(url, ManualClock())
        self._store = self._runner.run(self._opened.__aenter__())
        self._made = 1000

    def close(self) -> None:
        self._runner.run(self._opened.__aexit__(None, None, None))
        self._runner.close()

    def play_all(
        self,
        variable: str,
        few: Sequence[int],
        kinds: Sequence[str],
        make: Make,
        fewest: int,
        maximum: int,
    ) -> None:
        """Play as many random sequences as the variable says; the shortest that fails is told.

        Without it the few are played, and half of them on PostgreSQL, where each costs more.
        """
        on_sqlite = self._raw.path is not None
        for seed in seeds(variable, few if on_sqlite else few[::2]):
            steps = drawn(seed, kinds, fewest, maximum)
            failed = self._failure(steps, make)
            if failed is None:
                continue
            if variable in os.environ:
                steps, failed = self._shortened(steps, failed, make)
            shown = ", ".join(f"{step.kind} {step.which} {step.how}" for step in steps)
            failed.add_note(f"seed {seed}: {shown}")
            raise failed
        self._runner.run(self._check())

    def play(self, steps: Sequence[Step], make: Make) -> None:
        self._runner.run(self._play(steps, make))

    async def _play(self, steps: Sequence[Step], make: Make) -> None:
        self._made += 1
        workspace = await self._raw.workspace(self._made)
        world = make(Engine(self._store, workspace=workspace, actor="tester"), self._raw)
        for step in steps:
            await world.do(step)
            await world.check()
        await world.finish()

    def _shortened(
        self, steps: list[Step], failed: Exception, make: Make
    ) -> tuple[list[Step], Exception]:
        """A shorter sequence that fails as well, and how it does."""
        size, replays = max(len(steps) // 2, 1), 0
        while size and replays < MOST_REPLAYS:
            start = 0
            while start < len(steps):
                fewer = steps[:start] + steps[start + size :]
                replays += 1
                result = self._failure(fewer, make)
                if result is None:
                    start += size
                else:
                    steps, failed = fewer, result
            size //= 2
        return steps, failed

    def _failure(self, steps: Sequence[Step], make: Make) -> Exception | None:
        try:
            self.play(steps, make)
        except Exception as error:  # noqa: BLE001  whatever it is, it is to be told
            return error
        return None

    async def _check(self) -> None:
        """The oracles of every test, for all sequences at once."""
        engine = Engine(self._store, actor="tester")
        assert await engine.maintenance.audit() == []
        await check_trail(self._raw)
        await check_attempts(self._raw)
        await check_awaited(self._raw)
        await check_timers(engine, self._raw)
        await check_whole(self._raw)


async def rows_of(engine: Engine, ids: Sequence[UUID]) -> dict[UUID, Task]:
    """The hot rows of tasks."""

    def script() -> Script[list[Task]]:
        rows = yield Statement("tasks_locked", {"ids": sorted(ids)})
        return [parse_task(row) for row in rows]

    return {task.id: task for task in await engine.core.store.transact(script)}


async def code_of(call: Awaitable[Any]) -> str | None:
    """The code of the refusal, if the call is refused."""
    try:
        await call
    except TenutoError as error:
        return error.code
    return None


async def do_rest(engine: Engine) -> None:
    """Do what cascades left to do, until nothing is left."""
    while await engine.flows.run_deferred_once():
        pass


async def pass_time(engine: Engine) -> None:
    """Let every lease run out, and every time come that tasks wait for."""
    clock = engine.clock
    assert isinstance(clock, ManualClock)
    clock.advance(3600)
    while await engine.maintenance.expire_once("reaper"):
        pass
    clock.advance(3600)
    while await engine.maintenance.promote_once("promoter"):
        pass
