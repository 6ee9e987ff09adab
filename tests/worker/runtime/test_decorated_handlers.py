"""Handlers wrapped in a plain function, as decorators create them."""

import asyncio
import threading
from typing import Any

from tests.proof.crash.inside import working
from tests.waiting import eventually


def decorated(handler: Any) -> Any:
    """A handler behind a plain function, as most decorators make it."""

    def plain(ctx: Any) -> Any:
        ctx.progress(10, "on a thread")
        return handler(ctx)

    return plain


async def test_coroutine_returned_by_a_plain_function_is_awaited(database_url: str) -> None:
    stopped = asyncio.Event()

    async def later(ctx: Any) -> Any:
        number = await ctx.step("number", lambda: 7)
        ctx.log("from a coroutine")
        await ctx.save(number)
        await ctx.progress(50, "half")
        return [ctx.input, number, threading.current_thread() is threading.main_thread()]

    async def hangs(ctx: Any) -> None:
        await ctx.progress(50, "hangs")
        try:
            await asyncio.Event().wait()
        finally:
            stopped.set()

    handlers: dict[str | None, Any] = {"later": decorated(later), "hangs": decorated(hangs)}
    async with working(database_url, handlers) as inside:
        task = await inside.submit(task_type="later", input=1)
        view = await inside.ended(task)
        assert (view.status, view.output) == ("COMPLETED", [1, 7, True])
        assert (view.checkpoint, view.progress_percent, view.attempt) == (7, 50, 1)
        assert await inside.transcript(task) == ["from a coroutine"]
        task = await inside.submit(task_type="hangs")

        async def half() -> bool:
            return (await inside.engine.show(task)).progress_percent == 50

        await eventually(half)
        await inside.engine.cancel(task)
        assert (await inside.ended(task)).status == "CANCELLED"
        assert stopped.is_set()
