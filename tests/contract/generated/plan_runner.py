"""Runs a drawn plan on an engine, with disturbances on the way."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Literal, NamedTuple, get_args
from unittest.mock import patch
from uuid import UUID

import msgspec
from hypothesis import note
from hypothesis import strategies as st
from tests.contract.conftest import ManualClock, failure, opened, profile
from tests.contract.flows.helpers import WORKER, flow_status, start, statuses
from tests.contract.generated.plan_interpreter import Forecast, Job, Node, specs, steps

from tenuto.engine.agents import subtask_tree
from tenuto.engine.engine import Engine
from tenuto.engine.flows import activation, added_children, advance, deferred
from tenuto.engine.tasks import retry
from tenuto.engine.tasks.claim import ClaimedTask
from tenuto.model.errors import Conflict
from tenuto.model.tasks.task import TERMINAL
from tenuto.store.protocol import Row, Rows, Statement

TURNS = 3000
"""A plan that is not over after so many is stuck."""
OPEN = frozenset({"WAITING", "PENDING", "RETRY_WAIT", "PAUSED"})

Control = Callable[[UUID], Awaitable[None]]

Kind = Literal[
    "lose the lease",
    "fail and try again",
    "give back",
    "pause a task",
    "pause while it runs",
    "pause a group",
    "pause the flow",
    "resume all",
    "leave the rest for later",
    "cancel a task",
    "cancel a group",
]


class Trouble(msgspec.Struct, frozen=True):
    """Something that happens before a turn, to one of those that it can happen to."""

    turn: int
    kind: Kind
    which: int


class Played(NamedTuple):
    """What became of a plan."""

    ran: list[str]
    statuses: dict[str, list[str]]
    end: str
    cancelled: set[str]
    """The steps that were cancelled one by one."""


def troubles(*, cancels: bool = True) -> st.SearchStrategy[list[Trouble]]:
    turn, which = st.integers(0, 12), st.integers(0, 20)
    kinds = [get_arg for get_arg in get_args(Kind) if cancels or not get_arg.startswith("cancel")]
    kind = st.sampled_from(kinds)
    return st.lists(st.builds(Trouble, turn, kind, which), max_size=8)


@contextmanager
def bounded(rows: int) -> Iterator[None]:
    """Lets one transaction change so few rows that plans go beyond it."""
    with ExitStack() as stack:
        for module in (activation, advance, deferred, added_children, retry, subtask_tree):
            stack.enter_context(patch.object(module, "MAX_CASCADE_ROWS", rows))
        yield


class Here:
    """An engine for all plans of a test."""

    def __init__(self, url: str) -> None:
        self._runner = asyncio.Runner()
        self._opened = opened(url, ManualClock())
        self.engine = Engine(self._runner.run(self._opened.__aenter__()))

    def close(self) -> None:
        assert self._runner.run(self.engine.maintenance.audit()) == []
        self._runner.run(self._opened.__aexit__(None, None, None))
        self._runner.close()

    def run(self, node: Node, play: Callable[["Play"], Awaitable[Any]], seed: int = 0) -> Played:
        """Start the plan, and let `play` bring it to its end."""

        async def all_of_it() -> Played:
            flow = await start(self.engine, node.key, *specs(node))
            created = Play(self.engine, flow, node, seed)
            note(f"{node}")
            try:
                await play(created)
            except BaseException:
                await created.abandon()
                raise
            result = await statuses(self.engine, flow)
            return Played(
                created.ran, result, await flow_status(self.engine, flow), created.cancelled
            )

        return self._runner.run(all_of_it())


class Play:
    """One flow under way, and all who work on it."""

    def __init__(self, engine: Engine, flow: UUID, node: Node, seed: int = 0) -> None:
        self.engine = engine
        self.flow = flow
        self.ran: list[str] = []
        """The keys that were finished, in their order."""
        self.succeeded: list[str] = []
        self.healed = False
        """Everything works from now on."""
        self._works = {step.key: step.works for step in steps(node) if isinstance(step, Job)}
        self._random = random.Random(seed)
        self._paused: list[Callable[[], Awaitable[None]]] = []
        self._waits = False
        self.cancelled: set[str] = set()
        forecast = Forecast(node)
        jobs = forecast.runs + forecast.may
        groups = {key for key, ends in forecast.groups.items() if len(ends) == 1}
        self._once = groups | {key for key in self._works if jobs[key] == 1}
        """The steps that run no more than once."""

    async def go_on(self, event_name: list[Trouble] | None = None, turns: int = TURNS) -> None:
        """Work until nothing is left to do, or for so many turns; raises if it never ends."""
        for turn in range(turns):
            for item in event_name or []:
                if item.turn == turn:
                    await self._meet(item)
            if not await self._turn() and not await self._heal():
                return
        assert turns < TURNS, await statuses(self.engine, self.flow)

    async def _turn(self) -> int:
        """Some work by everybody; answers how much."""
        done = int(self._waits) or await self.engine.flows.run_deferred_once()
        self._waits = False
        done += await self._answer()
        claimed = await self._claimed(self._random.randint(1, 3))
        for work in claimed:
            await self._finish(work)
        return done + len(claimed)

    async def _answer(self) -> int:
        """Answer what people are asked; nobody can where it is paused, and it stays."""
        done = 0
        asked = await self.engine.inbox.list()
        own = {row["id"] for row in await self._nodes()} if asked else set()
        for item in asked:
            if item.kind != "approval" or item.task not in own:
                continue
            good = self.healed or self._works[item.title]
            try:
                await self.engine.inbox.answer(item.id, approve=good)
            except Conflict:
                await self._check_refused(item.id, item.task)
                continue
            self._note(item.title, good=good)
            done += 1
        return done

    async def _check_refused(self, item: UUID, task: UUID | None) -> None:
        """Asserts that an unanswered item is closed, or open while its task is paused."""
        assert task is not None
        is_open = (await self.engine.inbox.show(item)).status == "OPEN"
        status = (await self.engine.show(task)).status
        assert status == "PAUSED" if is_open else status in TERMINAL

    async def _claimed(self, maximum: int = 1) -> list[ClaimedTask]:
        return await self.engine.claim(profile(), WORKER, maximum)

    async def _finish(self, work: ClaimedTask) -> None:
        existing = self._works.get(work.key or "")
        good = self.healed or bool(work.input["item"] if existing is None else existing)
        try:
            if good:
                await self.engine.complete(work.fence, {"key": work.key})
            else:
                await self.engine.fail(work.fence, failure("syntax"))
        except Conflict:  # only a cancel can have come in between
            await self.engine.confirm_cancel(work.fence, {"state": "killed"})
        else:
            self._note(work.key or "", good=good)

    def _note(self, key: str, *, good: bool) -> None:
        self.ran.append(key)
        self.succeeded += [key] if good else []

    async def _heal(self) -> bool:
        """End all pauses and let time pass; answers whether that can have changed anything."""
        paused, self._paused = self._paused, []
        for resume in paused:
            await _unless_over(resume())
        waiting = [row for row in await self._nodes() if row["status"] == "RETRY_WAIT"]
        self._pass_time(3600)
        await self.engine.maintenance.expire_once("reaper")
        done = await self.engine.maintenance.promote_once("promoter")
        return bool(await self.engine.flows.run_deferred_once() + done or paused or waiting)

    def _pass_time(self, seconds: float) -> None:
        clock = self.engine.clock
        assert isinstance(clock, ManualClock)
        clock.advance(seconds)

    async def _meet(self, trouble: Trouble) -> None:
        if trouble.kind == "resume all":
            await self._heal()
        elif trouble.kind == "leave the rest for later":
            self._waits = True
        elif trouble.kind in ("pause a task", "pause a group", "pause the flow"):
            await self._hold(trouble)
        elif trouble.kind in ("cancel a task", "cancel a group"):
            await self._cancel_one(trouble)
        else:
            for work in await self._claimed():
                await self._interrupt(trouble.kind, work)

    async def _interrupt(self, kind: Kind, work: ClaimedTask) -> None:
        """End an attempt without an end of its task."""
        if kind == "lose the lease":
            self._pass_time(3600)
            assert await self.engine.maintenance.expire_once("reaper") == 1
        elif kind == "fail and try again":
            await self.engine.fail(work.fence, failure())
        elif kind == "give back":
            await self.engine.release(work.fence)
        else:
            await self.engine.pause(work.fence.task)
            await self.engine.confirm_pause(work.fence, {"state": "killed"})
            self._paused.append(partial(self.engine.resume, work.fence.task))

    async def _hold(self, trouble: Trouble) -> None:
        """Pause something that is open, if anything is."""
        flows, nodes = self.engine.flows, await self._nodes()
        pause: Control = flows.pause
        resume: Control = flows.resume
        existing = [self.flow]
        if trouble.kind == "pause a group":
            pause, resume = flows.pause_group, flows.resume_group
            existing = [
                row["id"] for row in nodes if _is_group(row) and row["status"] not in TERMINAL
            ]
        elif trouble.kind == "pause a task":
            pause, resume = self.engine.pause, self.engine.resume
            existing = [row["id"] for row in nodes if not _is_group(row) and row["status"] in OPEN]
        if existing:
            one = existing[trouble.which % len(existing)]
            if await _unless_over(pause(one)):
                self._paused.append(partial(resume, one))

    async def _cancel_one(self, trouble: Trouble) -> None:
        """Cancel something that has its turn, and of which there is no other run."""
        nodes = [row for row in await self._nodes() if row["key"] in self._once]
        cancel: Control = self.engine.cancel
        existing = [row for row in nodes if not _is_group(row) and row["status"] == "PENDING"]
        if trouble.kind == "cancel a group":
            cancel = self.engine.flows.cancel_group
            existing = [row for row in nodes if _is_group(row) and row["status"] == "RUNNING"]
        if existing:
            one = existing[trouble.which % len(existing)]
            if await _unless_over(cancel(one["id"])):
                self.cancelled.add(one["key"])

    async def _nodes(self) -> Rows:
        workspace = self.engine.workspace
        params = {"flow": self.flow, "workspace": workspace, "most": 100_000}
        return await self.engine.core.store.fetch(Statement("flow_nodes", params))

    async def cancel(self) -> bool:
        """Cancels the flow; True if it had not finished.

        What the cancel left to later transactions is done, too: until then a worker may still
        claim a task of the flow.
        """
        cancelled = await _unless_over(self.engine.flows.cancel(self.flow))
        while await self.engine.flows.run_deferred_once():
            pass
        return cancelled

    async def revive(self) -> bool:
        """Go on from what failed; whether the flow is not COMPLETED."""
        return await _unless_over(self.engine.flows.revive(self.flow))

    async def abandon(self) -> None:
        """End it, so that nothing of it is there for the next plan."""
        await _unless_over(self.engine.flows.cancel(self.flow))
        while await self.engine.flows.run_deferred_once():
            pass
        self._pass_time(3600)
        await self.engine.maintenance.expire_once("reaper")


def _is_group(row: Row) -> bool:
    return row["total"] is not None


async def _unless_over(call: Awaitable[object]) -> bool:
    """True if the call was not too late."""
    try:
        await call
    except Conflict:
        return False
    return True
