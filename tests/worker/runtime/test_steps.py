"""Steps in handlers: run once, with the same value in every attempt."""

import asyncio
from typing import Any

from tests.proof.crash.inside import working

from tenuto.model.tasks.submission import NewTask


async def test_step_returns_the_same_value_in_every_attempt(database_url: str) -> None:
    seen: list[Any] = []

    async def awaiting(ctx: Any) -> Any:
        seen.append(await ctx.step("pair", lambda: (1, {"two": (3,)})))
        if ctx.attempt == 1:
            raise ConnectionError("again")

    def plain(ctx: Any) -> Any:
        seen.append(ctx.step("pair", lambda: (1, {"two": (3,)})))
        if ctx.attempt == 1:
            raise ConnectionError("again")

    async with working(database_url, {"async": awaiting, "plain": plain}) as inside:
        for kind in ("async", "plain"):
            view = await inside.ended(await inside.submit(task_type=kind))
            assert view.status == "COMPLETED"
    assert seen == [[1, {"two": [3]}]] * 4


async def test_concurrent_calls_of_a_step_run_it_once(database_url: str) -> None:
    done: list[int] = []

    async def work() -> int:
        done.append(1)
        await asyncio.Event().wait() if len(done) > 1 else None
        return len(done)

    async def handler(ctx: Any) -> Any:
        return await asyncio.gather(ctx.step("one", work), ctx.step("one", work))

    async with working(database_url, {None: handler}) as inside:
        view = await inside.ended(await inside.submit())
        assert (view.output, done) == ([1, 1], [1])


async def test_subtask_key_is_not_a_step_key(database_url: str) -> None:
    async def awaiting(ctx: Any) -> Any:
        await ctx.spawn("part", NewTask(title="part", task_type="nobody's"))
        return await ctx.step("part", lambda: "never")

    def plain(ctx: Any) -> Any:
        ctx.spawn("part", NewTask(title="part", task_type="nobody's"))
        return ctx.step("part", lambda: "never")

    async with working(database_url, {"async": awaiting, "plain": plain}) as inside:
        for kind in ("async", "plain"):
            task = await inside.submit(task_type=kind, max_attempts=1)
            assert (await inside.ended(task)).status == "DEAD"
            assert "belongs to a child task" in str((await inside.last(task)).message)
