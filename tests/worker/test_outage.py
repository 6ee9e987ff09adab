"""Attempts during an outage of the store, a suspension, or an error of a runtime."""

import asyncio
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.proof.crash.inside import WAIT_S, Handlers, working
from tests.proof.crash.system import frozen, system
from tests.services.postgres import PostgresServer
from tests.waiting import eventually

from tenuto.model.agents.matching import AgentProfile
from tenuto.worker.context import Context


class Away:
    """Handlers that report while the store is away."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.gone = threading.Event()

    def handlers(self) -> Handlers:
        return {"plain": self.plain, "async": self.awaiting}

    async def awaiting(self, ctx: Any) -> Any:
        self.begun.set()
        await asyncio.to_thread(self.gone.wait, WAIT_S)
        ctx.log("while it was away")
        await ctx.progress(50, "half")
        await ctx.save({"half": True})
        return await ctx.step("once", lambda: "made")

    def plain(self, ctx: Any) -> Any:
        self.begun.set()
        self.gone.wait(WAIT_S)
        ctx.log("while it was away")
        ctx.progress(50, "half")
        ctx.save({"half": True})
        return ctx.step("once", lambda: "made")


@pytest.mark.parametrize("kind", ["plain", "async"])
async def test_handler_reports_during_an_outage_are_stored_later(
    postgres_url: str, postgres: PostgresServer, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    away = Away()
    async with working(postgres_url, away.handlers(), lease_s=60) as inside:
        task = await inside.submit(task_type=kind)
        await eventually(away.begun.is_set, WAIT_S)
        await asyncio.to_thread(postgres.stop)
        try:
            away.gone.set()
            await eventually(lambda: "not stored yet" in caplog.text, WAIT_S)
        finally:
            await asyncio.to_thread(postgres.start)
        view = await inside.ended(task)
        assert (view.status, view.output, view.current_step) == ("COMPLETED", "made", "half")
        assert await inside.outcomes(task) == ["COMPLETED"]
        assert await inside.transcript(task) == ["while it was away"]


async def test_time_of_a_suspension_does_not_count(sqlite_url: str, tmp_path: Path) -> None:
    async with system(sqlite_url, tmp_path) as world:
        worker = world.worker(lease_s=600)
        done = tmp_path / "done"
        script = f"until [ -e '{done}' ]; do sleep 0.05; done"
        [task] = await world.submit(world.task(script, timeout_s=4))
        await world.in_status([task], "RUNNING")
        started = (await world.engine.show(task)).started_at
        assert started is not None
        with frozen(worker.pid):
            limit = started + timedelta(seconds=8)
            await eventually(lambda: world.engine.clock.now() > limit, WAIT_S)
        done.touch()
        await world.in_status([task], "COMPLETED")
        assert await world.outcomes(task) == ["COMPLETED"]


class Broken:
    """A runtime with a fault of its own."""

    name = "broken"
    task_types: tuple[str, ...] | None = None

    def free_sessions(self, busy: int) -> int | None:
        del busy
        return None

    def release_reservation(self) -> None:
        pass

    async def run(self, context: Context, grace_s: float, receipt: dict[str, Any]) -> Any:
        raise AssertionError("never mind")


async def test_internal_error_of_a_runtime_ends_its_attempt(sqlite_url: str) -> None:
    async with working(sqlite_url, {"other": print}, faulty=True) as inside:
        engine = inside.engine
        profile = AgentProfile(
            id=engine.clock.new_id(),
            workspace=engine.workspace,
            name="broken",
            runtimes=("broken",),
        )
        await inside.worker.host(profile, Broken())
        task = await inside.submit(max_attempts=1)
        assert (await inside.ended(task)).status == "DEAD"
        assert (
            await inside.last(task)
        ).message == "internal error of the worker: AssertionError('never mind')"
