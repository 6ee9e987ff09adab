"""Rotation: one turn per holder at once, passed on when a waiter leaves."""

import asyncio

from tenuto.api.edge.rotation import FairQueue


class Crowd:
    """Those who ask for turns, and the order in which they get them."""

    def __init__(self, maximum: int) -> None:
        self.turns = FairQueue(maximum)
        self.seen: list[str] = []
        self._ends: dict[str, asyncio.Event] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def ask(self, *names: str) -> None:
        """Each name asks in turn; its first letter is the holder."""
        for name in names:
            self._ends[name] = asyncio.Event()
            self._tasks[name] = asyncio.create_task(self._run(name))
            await settle()

    async def _run(self, name: str) -> None:
        async with self.turns.acquire(name[0]):
            self.seen.append(name)
            await self._ends[name].wait()

    async def end(self, name: str) -> None:
        self._ends[name].set()
        await self._tasks[name]
        await settle()

    async def leave(self, name: str) -> None:
        """The name gives up, inside or while it waits."""
        self._tasks[name].cancel()
        await asyncio.gather(self._tasks[name], return_exceptions=True)
        await settle()


async def settle() -> None:
    """Let everybody run who can."""
    for _ in range(5):
        await asyncio.get_running_loop().run_in_executor(None, int)


async def test_holder_has_one_turn_at_once_and_delays_no_other_holder() -> None:
    crowd = Crowd(2)
    await crowd.ask("a1", "a2", "a3", "b1", "b2", "c1")
    assert crowd.seen == ["a1", "b1"]
    for name in ("a1", "c1", "b1", "a2", "b2", "a3"):
        await crowd.end(name)
    assert crowd.seen == ["a1", "b1", "c1", "a2", "b2", "a3"]
    assert (crowd.turns._free, crowd.turns._active, crowd.turns._waiting) == (2, set(), {})


async def test_waiter_that_leaves_passes_its_turn_on() -> None:
    crowd = Crowd(1)
    await crowd.ask("a1", "b1", "b2", "c1")
    await crowd.leave("b1")
    await crowd.leave("a1")
    assert crowd.seen == ["a1", "b2"]
    crowd._tasks["c1"].cancel()  # at the moment of its turn
    await crowd.end("b2")
    await crowd.ask("d1")
    assert crowd.seen == ["a1", "b2", "d1"]
    await crowd.end("d1")
    assert crowd.turns._free == 1


async def test_waiter_cancelled_as_it_is_admitted_passes_its_turn_on() -> None:
    turns = FairQueue(1)
    inside = turns.acquire("a")
    await inside.__aenter__()

    async def other() -> None:
        async with turns.acquire("b"):
            raise AssertionError("was cancelled before")

    task = asyncio.create_task(other())
    await settle()
    await inside.__aexit__(None, None, None)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert task.cancelled()
    assert (turns._free, turns._active) == (1, set())
