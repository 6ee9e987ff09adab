"""What order costs: fan-outs and chains beside as many tasks that know nothing of each other.

All are run the same way: one worker process and a coordinator are up, tasks are handed in, and the
time until the last has ended counts. Fan-outs have all slots of a worker; chains and the tasks
beside them have one, because one task at a time is what a chain is.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from tenuto import app
from tenuto.bench.measures import SLOTS, Bench, Figures, new
from tenuto.coordinator.coordinator import Coordinator
from tenuto.model.bounds import MAX_BULK
from tenuto.model.flows.definition import GroupSpec, Order
from tenuto.model.flows.plan import Plan, Spec, plan_for
from tenuto.model.tasks.submission import NewTask
from tenuto.settings import Settings

HandIn = Callable[[Bench, int], Awaitable[object]]
EVERY_S = 0.05
LOOK = 0.03
"""How long to wait between looks, as a share of the time so far: counting takes time, too."""
WARM = 20


def _task(number: int, **fields: Any) -> NewTask:
    return new(key=f"t{number}", **fields)


async def _independent(bench: Bench, n: int) -> None:
    await bench.fill(n)


async def _dependents(bench: Bench, n: int) -> None:
    """All but one wait for that one."""
    waiting = [_task(number, depends_on=["t0"]) for number in range(1, n)]
    await bench.engine.submit_many([_task(0), *waiting])


async def _waiting(bench: Bench, n: int) -> None:
    """Each waits for the one before."""
    later = [_task(number, depends_on=[f"t{number - 1}"]) for number in range(1, n)]
    await bench.engine.submit_many([_task(0), *later])


async def _parallel(bench: Bench, n: int) -> None:
    await bench.engine.flows.start_plan(_group(n, "parallel"))


async def _sequential(bench: Bench, n: int) -> None:
    await bench.engine.flows.start_plan(_group(n, "sequential"))


async def _next(bench: Bench, n: int) -> None:
    """Each names the one after."""
    tasks = {f"t{number}": _task(number, next=f"t{number + 1}") for number in range(n - 1)}
    tasks[f"t{n - 1}"] = _task(n - 1)
    await bench.engine.flows.start_plan(plan_for("t0", tasks.get))


def _group(n: int, order: Order) -> Plan:
    keys = tuple(f"t{number}" for number in range(n))
    group = GroupSpec(title="bench", key="all", order=order, children=keys)
    specs: dict[str, Spec] = {key: _task(number) for number, key in enumerate(keys)}
    specs["all"] = group
    return plan_for("all", specs.get)


FANS: dict[str, HandIn] = {"group of n": _parallel, "n waiting for one": _dependents}
CHAINS: dict[str, HandIn] = {
    "sequence of n": _sequential,
    "n waiting in a row": _waiting,
    "n named in a row": _next,
}


async def take(bench: Bench) -> Figures:
    """Milliseconds a task, and the ratio to independent tasks."""
    n = min(bench.tasks, MAX_BULK)
    figures = await _beside(bench, "fan-out", n, SLOTS, FANS)
    return figures | await _beside(bench, "chain", n, 1, CHAINS)


async def _beside(
    bench: Bench, title: str, n: int, slots: int, shapes: dict[str, HandIn]
) -> Figures:
    async with _staff(bench, slots):
        plain = await _ms(bench, n, _independent)
        figures = {f"{title}: independent, ms": plain}
        for name, hand_in in shapes.items():
            spent = await _ms(bench, n, hand_in)
            figures[f"{title}: {name}, ms"] = spent
            figures[f"{title}: {name}, times independent"] = spent / plain
    return figures


@asynccontextmanager
async def _staff(bench: Bench, slots: int) -> AsyncIterator[None]:
    """A worker and a coordinator, at work."""
    stop = asyncio.Event()
    settings = Settings(database=bench.url)
    async with app.connect(settings, actor="bench", listen=True) as engine:
        coordinator = Coordinator(engine, settings, name="bench")
        running = asyncio.get_running_loop().create_task(coordinator.run(stop))
        await bench.start_worker(slots)
        try:
            await _ms(bench, WARM, _independent)
            yield
        finally:
            stop.set()
            await running
            await bench.kill_workers()


async def _ms(bench: Bench, n: int, hand_in: HandIn) -> float:
    """Milliseconds a task from handing in n tasks to the end of the last."""
    before = await bench.completed()
    start = bench.elapsed()
    await hand_in(bench, n)
    while await bench.completed() < before + n:
        await bench.pause(max(EVERY_S, LOOK * (bench.elapsed() - start)))
    return 1000 * (bench.elapsed() - start) / n
