"""Usage reports of handlers, and the stop when a budget is exceeded."""

import asyncio
from typing import Any

import pytest
from tests.proof.crash.inside import working
from tests.waiting import eventually

from tenuto.engine.engine import Engine
from tenuto.model.errors import Unavailable
from tenuto.model.limits.budgets import Budget


@pytest.mark.parametrize("kind", ["later", "now"])
async def test_handler_reports_its_usage(database_url: str, kind: str) -> None:
    async def later(ctx: Any) -> None:
        await ctx.used(input_tokens=10, output_tokens=5, cost_usd=0.25, model="m")
        await ctx.used(output_tokens=5)

    def now(ctx: Any) -> None:
        ctx.used(input_tokens=10, output_tokens=5, cost_usd=0.25, model="m")
        ctx.used(output_tokens=5)

    async with working(database_url, {"later": later, "now": now}) as inside:
        view = await inside.ended(await inside.submit(task_type=kind))
    assert (view.input_tokens, view.output_tokens, view.cost_usd) == (10, 10, 0.25)


async def test_concurrent_usage_reports_count_fully_after_an_outage(
    sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    used, faults = Engine.used, [Unavailable("away")]

    async def flaky(self: Engine, *args: Any) -> None:
        if faults:
            raise faults.pop()
        await used(self, *args)

    async def handler(ctx: Any) -> None:
        await asyncio.gather(ctx.used(input_tokens=1), ctx.used(input_tokens=10))

    monkeypatch.setattr(Engine, "used", flaky)
    async with working(sqlite_url, {None: handler}) as inside:
        view = await inside.ended(await inside.submit())
    assert (faults, view.input_tokens) == ([], 11)


async def test_command_reports_its_usage(database_url: str) -> None:
    report = 'echo "{\\"usage\\": {\\"inputTokens\\": 7, \\"costUsd\\": 0.5}}" >&3;'
    async with working(database_url) as inside:
        view = await inside.ended(await inside.shell(report * 2 + 'echo "{\\"usage\\": 1}" >&3'))
        lines = await inside.transcript(view.id)
    assert (view.status, view.input_tokens, view.cost_usd) == ("COMPLETED", 14, 1.0)
    assert any("unreadable report" in line for line in lines)


async def test_handler_over_its_budget_is_stopped_and_continues_later(database_url: str) -> None:
    async def handler(ctx: Any) -> Any:
        page = ctx.checkpoint or 0
        while page < 5:
            page += 1
            await ctx.save(page)
            await ctx.used(cost_usd=1.0)
            if page == 3 and ctx.attempt == 1:
                await asyncio.Event().wait()  # until it is stopped
        return [page, ctx.attempt]

    async with working(database_url, {"default": handler}) as inside:
        task = await inside.submit(budget=Budget(cost_usd=2.5))

        async def held() -> bool:
            return (await inside.engine.show(task)).waiting_for == "budget"

        await eventually(held)
        [item] = await inside.engine.inbox.list()
        await inside.engine.inbox.answer(item.id, approve=True, budget=Budget(cost_usd=50.0))
        view = await inside.ended(task)
    assert view.output == [5, 2]
    assert (view.cost_usd, view.tries) == (5.0, 1)
