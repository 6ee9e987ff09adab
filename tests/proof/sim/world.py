"""One run: faults first, then everything is healed and has to end; then the oracles look."""

import asyncio
import hashlib
import logging
import os
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest.mock import patch
from uuid import UUID

import msgspec
from tests.proof.sim.actors import Harm, Operator, Scene, keep
from tests.proof.sim.checkers import Broken, Oracle, check
from tests.proof.sim.clock import SimClock
from tests.proof.sim.loop import Stalled, VirtualLoop, discard
from tests.proof.sim.plan import Plan, make_plan
from tests.proof.sim.probe import Probe
from tests.proof.sim.recorder import Recorder
from tests.proof.sim.store import database

from tenuto.model.tasks.task import TERMINAL

WAIT_S = 90.0
"""Healed, something has to happen within: a lost answer to a cancel, a lease, a run, a backoff."""
AT_MOST_S = 900.0
EVERYTHING = """select id, status, version, 'task' from task
  union all select id, status, version, 'group' from task_group
  union all select id, status, version, 'flow' from flow"""
QUIT_S = 60.0


class Result(msgspec.Struct, frozen=True):
    """What a run came to."""

    seed: int
    broken: list[Broken]
    happened: Counter[str]
    planned: Counter[str]
    turns: int
    seconds: float
    tasks: int
    trace: list[tuple[float, str, str]]

    def digest(self) -> str:
        """The same for the same run."""
        text = "\n".join(f"{at:.6f} {caller} {subject}" for at, caller, subject in self.trace)
        return hashlib.sha256(text.encode()).hexdigest()

    def missed(self) -> Counter[str]:
        """Planned faults that never happened: with any of them, the run proves nothing."""
        return self.planned - self.happened

    def kinds(self) -> set[str]:
        """The invariants that were broken."""
        return {invariant for invariant, _ in self.broken}


class Story(msgspec.Struct, frozen=True):
    """Who asks for what in a run, and who looks at it besides the oracles of every run."""

    operator: Callable[[Scene], Operator] = Operator
    oracles: tuple[Oracle, ...] = ()


def simulate(seed: int, plan: Plan | None = None, story: Story = Story()) -> Result:  # noqa: B008
    """Play a seed to its end, under its own plan or another."""
    base = database()
    base.reset()
    loop = VirtualLoop()
    base.store.clock = SimClock(loop, "audit")
    scene = Scene(plan or make_plan(seed), loop, base)
    loop.set_exception_handler(lambda _loop, context: _unhandled(scene.recorder, context))
    listener = _Listener(scene.recorder)
    log = logging.getLogger("tenuto")
    before = (log.level, log.propagate)
    log.addHandler(listener)
    log.setLevel(logging.ERROR)
    log.propagate = False
    try:
        with patch.object(os, "kill", scene.kill):
            loop.run_until_complete(_play(scene, story))
    except Stalled as error:
        scene.recorder.wrong("I24", str(error))
    finally:
        log.removeHandler(listener)
        log.setLevel(before[0])  # by name: loggers below remember what is on
        log.propagate = before[1]
        _clear(loop, scene.recorder)
    broken = scene.recorder.broken + check(scene.recorder, base, story.oracles)
    planned: Counter[str] = Counter(moment.act for moment in scene.plan.moments)
    for task, seq, kind, at in base.rows("select task, seq, kind, at from event order by position"):
        scene.recorder.trace.append((loop.time(), "trail", f"{task} {seq} {kind} {at}"))
    tasks = base.rows("select count(*) from task")[0][0]
    return Result(
        seed,
        broken,
        scene.faults.happened,
        planned,
        loop.turns,
        loop.time(),
        tasks,
        scene.recorder.trace,
    )


async def _play(scene: Scene, story: Story) -> None:
    loop, plan = scene.loop, scene.plan
    operator = story.operator(scene)
    keepers = [loop.create_task(keep(scene, "worker", slot)) for slot in range(plan.workers)]
    keepers += [
        loop.create_task(keep(scene, "coordinator", slot)) for slot in range(plan.coordinators)
    ]
    probe = Probe(scene)
    watching = loop.create_task(probe.run())
    people = loop.create_task(operator.run(), context=operator.process.context)
    await asyncio.gather(people, Harm(scene).run())
    scene.faults.on = False
    probe.healed_at = scene.recorder.healed_at = loop.time()
    scene.recorder.note("world", "healed")
    await loop.create_task(operator.carry_on(), context=operator.process.context)
    await _ended(scene, operator)
    scene.closing = True
    scene.recorder.closed_at = loop.time()
    for process in scene.alive("worker") + scene.alive("coordinator"):
        process.healthy = True
        process.stop.set()
    await asyncio.wait(keepers, timeout=QUIT_S)
    for process in scene.processes:
        if process.state in ("running", "stopped") and process.kind != "operator":
            scene.recorder.wrong("leak", f"{process.name} does not end")
    for task, owner in loop.made:
        if owner is not None and owner.state == "ended" and owner.healthy and not task.done():
            scene.recorder.wrong("leak", f"{owner.name} left {task.get_coro()} behind")
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)


async def _ended(scene: Scene, operator: Operator) -> None:
    """Wait until everything ended and every event was relayed, or nothing moves any more."""
    began = moved = scene.loop.time()
    last: Any = None
    while True:
        rows = scene.database.rows(EVERYTHING)
        open_ones = [row for row in rows if row[1] not in TERMINAL]
        events = sum(row[2] for row in rows)
        if not open_ones and len(set(scene.recorder.delivered)) >= events:
            return
        now = scene.loop.time()
        if last != (events, len(scene.recorder.delivered)):
            moved, last = now, (events, len(scene.recorder.delivered))
        if now - moved > WAIT_S or now - began > AT_MOST_S:
            stuck = [f"{kind} {one} {status}" for one, status, _, kind in open_ones]
            scene.recorder.wrong("I24", f"nothing moves any more: {stuck}")
            return
        if held := [(row[3], UUID(row[0])) for row in open_ones if row[1] == "PAUSED"]:
            await scene.loop.create_task(
                operator.resume_all(held), context=operator.process.context
            )
        await asyncio.sleep(1.0)


def _unhandled(recorder: Recorder, context: dict[str, Any]) -> None:
    recorder.wrong("task", f"{context.get('message')}: {context.get('exception')!r}")


class _Listener(logging.Handler):
    """Hears of exceptions that the program caught and did not expect."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__(logging.ERROR)
        self._recorder = recorder

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info:
            self._recorder.wrong("log", f"{record.getMessage()} {record.exc_info[1]!r}")


def _clear(loop: VirtualLoop, recorder: Recorder) -> None:
    """Look at how every task ended, then let go of those whose process was killed."""
    loop.set_exception_handler(lambda _loop, _context: None)
    for task, owner in loop.made:
        if not task.done():
            discard(task)
        elif not task.cancelled() and (error := task.exception()) is not None:
            expected = owner is not None and owner.state == "dead"
            if not expected:
                recorder.wrong("task", f"{owner and owner.name}: {error!r}")
    loop.made.clear()
    loop.close()
