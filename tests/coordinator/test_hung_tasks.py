"""Tasks far past their estimate: the session is warned, then aborted without progress."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from tests.contract.conftest import (
    ManualClock,
    Raw,
    check_attempts,
    check_trail,
    opened,
    row_of,
    running,
)
from tests.proof.crash.inside import Inside, working
from tests.waiting import eventually

from tenuto.coordinator.coordinator import Coordinator
from tenuto.engine.engine import Engine
from tenuto.model.tasks.attempts import HUNG_WARNING
from tenuto.model.tasks.task import AGING_MS, Fence
from tenuto.settings import Settings

ESTIMATE = 10
TICK_S = 30
SETTINGS = Settings(heartbeat_s=5, tick_s=TICK_S)


class Stage:
    """A task with an estimate that runs and beats, and a coordinator."""

    def __init__(self, engine: Engine, clock: ManualClock, fence: Fence) -> None:
        self.engine = engine
        self.clock = clock
        self.fence = fence
        self.coordinator = Coordinator(engine, SETTINGS, {}, "one")

    async def minutes(self, n: float) -> None:
        """Let so much time pass, with heartbeats and cycles."""
        for _ in range(int(n * 60 / TICK_S)):
            heartbeat = await self.engine.heartbeat([self.fence], 120)
            self.hung = self.fence.task in self.warned(heartbeat)
            self.clock.advance(TICK_S)
            await self.coordinator.cycle_once()

    @staticmethod
    def warned(heartbeat: Any) -> list[UUID]:
        return [task for task, lease_status in heartbeat.held.items() if lease_status.hung]

    async def kinds(self) -> list[str | None]:
        return [event.event for event in await self.engine.events(self.fence.task)]


@pytest.fixture
async def stage(database_url: str) -> AsyncIterator[Stage]:
    clock, raw = ManualClock(), Raw(database_url)
    async with opened(database_url, clock) as store:
        engine = Engine(store, actor="test")
        yield Stage(engine, clock, await running(engine, estimate_minutes=ESTIMATE))
        assert await engine.maintenance.audit() == []
        await check_trail(raw)
        await check_attempts(raw)


async def test_hung_task_is_warned_half_an_hour_past_its_estimate(stage: Stage) -> None:
    await stage.minutes(ESTIMATE + 29)
    assert "hung_warned" not in await stage.kinds()
    await stage.minutes(2)
    assert (await stage.kinds()).count("hung_warned") == 1
    assert stage.hung


async def test_progress_after_the_warning_prevents_the_abort(stage: Stage) -> None:
    await stage.minutes(ESTIMATE + 31)
    for percent in (10, 20, 30):
        await stage.minutes(8)
        await stage.engine.progress(stage.fence, percent)
    assert (await stage.engine.show(stage.fence.task)).status == "RUNNING"
    assert (await stage.kinds()).count("hung_warned") == 1
    await stage.engine.complete(stage.fence, "done")
    assert (await stage.engine.show(stage.fence.task)).status == "COMPLETED"


async def test_hung_task_without_progress_is_aborted_and_queued_with_higher_priority(
    stage: Stage,
) -> None:
    before = await row_of(stage.engine, stage.fence.task)
    await stage.minutes(ESTIMATE + 31)
    await stage.minutes(8)
    assert (await stage.engine.show(stage.fence.task)).status == "RUNNING"
    await stage.minutes(2)
    after = await row_of(stage.engine, stage.fence.task)
    assert (after.status, after.last_outcome) == ("PENDING", "ABORTED")
    assert after.rank == before.rank - AGING_MS
    [attempt] = await stage.engine.attempts(stage.fence.task)
    assert (attempt.outcome, attempt.error_class) == ("ABORTED", "timeout")
    heartbeat = await stage.engine.heartbeat([stage.fence])
    assert heartbeat.lost == [stage.fence]


async def past(inside: Inside, raw: Raw, task: UUID, column: str, minutes: int) -> None:
    """Make a moment of a task so much older, and its timer due."""
    if raw.path is not None:
        earlier, now = f"{column} - {minutes * 60_000_000}", "1"
    else:
        earlier, now = f"{column} - interval '{minutes} minutes'", "to_timestamp(1)"
    await raw.execute(f"update task set {column} = {earlier}, due_at = {now} where id = '{task}'")
    del inside


async def test_worker_warns_its_session_and_stops_an_aborted_one(database_url: str) -> None:
    raw = Raw(database_url)
    ended: list[tuple[int, bool]] = []

    async def slow(ctx: Any) -> str:
        if ctx.attempt > 1:
            return "second"
        try:
            await asyncio.Event().wait()
        finally:
            ended.append((ctx.attempt, ctx.warned))
        return "never"

    async with working(database_url, {None: slow}) as inside:
        task = await inside.submit(estimate_minutes=ESTIMATE)
        await inside.until(task, "RUNNING")
        await past(inside, raw, task, "started_at", ESTIMATE + 31)
        await inside.logged(task, HUNG_WARNING)
        assert ended == []
        await past(inside, raw, task, "hung_warned_at", 11)
        assert (await inside.ended(task)).output == "second"
        await eventually(lambda: ended == [(1, True)])
        assert await inside.outcomes(task) == ["ABORTED", "COMPLETED"]
        lines = await inside.engine.query.transcript(task, inside.engine.workspace)
        assert [(line.level, line.text, line.attempt) for line in lines] == [
            ("WARN", HUNG_WARNING, 1)
        ]


async def test_plain_function_sees_the_warning_and_continues(database_url: str) -> None:
    raw = Raw(database_url)
    seen = asyncio.Event()
    loop = asyncio.get_running_loop()

    def heedful(ctx: Any) -> str:
        while not ctx.warned:
            ctx.progress(1)
        loop.call_soon_threadsafe(seen.set)
        ctx.progress(50, "going on")
        return "done"

    async with working(database_url, {None: heedful}) as inside:
        task = await inside.submit(estimate_minutes=ESTIMATE)
        await inside.until(task, "RUNNING")
        await past(inside, raw, task, "started_at", ESTIMATE + 31)
        assert (await inside.ended(task)).output == "done"
        assert seen.is_set()
        assert await inside.outcomes(task) == ["COMPLETED"]


async def test_command_transcript_has_the_warning_and_its_processes_end(
    database_url: str,
) -> None:
    raw = Raw(database_url)
    async with working(database_url) as inside:
        task = await inside.shell(
            "[ $TENUTO_ATTEMPT -gt 1 ] && exit 0; echo up $$; sleep 100", estimate_minutes=ESTIMATE
        )
        await inside.logged(task, "up ")
        session = Path("/proc") / (await inside.transcript(task))[0].removeprefix("up ")
        assert session.exists()
        await past(inside, raw, task, "started_at", ESTIMATE + 31)
        await inside.logged(task, HUNG_WARNING)
        await past(inside, raw, task, "hung_warned_at", 11)
        await inside.ended(task)
        [aborted, done] = await inside.engine.attempts(task)
        assert (aborted.outcome, done.outcome) == ("ABORTED", "COMPLETED")
        await eventually(lambda: not session.exists())
