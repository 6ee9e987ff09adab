"""Races of a worker: a hint during a claim, a cancel during the confirmation of a pause."""

import asyncio
from typing import Any

import pytest
from tests.proof.crash.inside import working

from tenuto.engine.engine import Engine
from tenuto.model.tasks.submission import NewTask
from tenuto.model.tasks.task import Fence


async def test_agent_at_its_limit_claims_when_an_attempt_ends(sqlite_url: str) -> None:
    async def handler(_ctx: Any) -> None:
        pass

    async with working(sqlite_url, {}, poll_s=600) as inside:
        await inside.worker.host_functions("few", {None: handler}, max_concurrent=1)
        submitted = await inside.engine.submit_many([NewTask(title="test") for _ in range(3)])
        for item in submitted:
            assert (await inside.ended(item.id)).status == "COMPLETED"


async def test_hint_during_a_claim_leads_to_another_claim(
    sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim, empty, go_on = Engine.claim, asyncio.Event(), asyncio.Event()

    async def slow(self: Engine, *args: Any) -> Any:
        claimed = await claim(self, *args)
        empty.set()
        await go_on.wait()
        return claimed

    async def handler(_ctx: Any) -> None:
        pass

    monkeypatch.setattr(Engine, "claim", slow)
    async with working(sqlite_url, {None: handler}, poll_s=600) as inside:
        await empty.wait()
        task = await inside.submit()
        go_on.set()
        assert (await inside.ended(task)).status == "COMPLETED"


async def test_cancel_during_the_confirmation_of_a_pause_is_confirmed(
    sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    running, confirm = asyncio.Event(), Engine.confirm_pause

    async def late(self: Engine, fence: Fence, receipt: dict[str, Any]) -> None:
        await self.cancel(fence.task)
        await confirm(self, fence, receipt)

    async def handler(_ctx: Any) -> None:
        running.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(Engine, "confirm_pause", late)
    async with working(sqlite_url, {None: handler}, lease_s=60) as inside:
        task = await inside.submit()
        await running.wait()
        await inside.engine.pause(task)
        await inside.until(task, "CANCELLED", limit=10)
        attempt = await inside.last(task)
        assert (attempt.outcome, attempt.unconfirmed) == ("CANCELLED", False)


async def test_line_logged_during_a_transcript_write_is_stored(
    sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    append, contexts = Engine.append, list[Any]()

    async def slow(self: Engine, *args: Any) -> None:
        await append(self, *args)
        if contexts:
            contexts.pop().log("two")

    async def handler(ctx: Any) -> None:
        contexts.append(ctx)
        ctx.log("one")

    monkeypatch.setattr(Engine, "append", slow)
    async with working(sqlite_url, {None: handler}) as inside:
        task = await inside.submit()
        await inside.ended(task)
        assert await inside.transcript(task) == ["one", "two"]
