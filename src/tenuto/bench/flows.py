"""Measures the cost of order: fan-outs and chains compared with as many independent tasks.

All workloads run the same way: one worker process and a coordinator are running, tasks are
submitted, and the time until the last one has finished is measured. Fan-outs use all slots of the
worker. Chains, and the independent tasks compared with them, use one slot, because a chain runs one
task at a time.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from tenuto import app
from tenuto.bench.measures import SLOTS, Bench, Figures, new_task
from tenuto.coordinator.coordinator import Coordinator
from tenuto.model.bounds import MAX_BULK
from tenuto.model.flows.definition import GroupSpec, Order
from tenuto.model.flows.plan import Plan, Spec, build_plan
from tenuto.model.tasks.submission import NewTask
from tenuto.settings import Settings

SubmitWorkload = Callable[[Bench, int], Awaitable[object]]
MIN_POLL_S = 0.05
POLL_SHARE = 0.03
"""Pause between polls as a share of the elapsed time, because counting tasks takes time, too."""
WARMUP_TASKS = 20


def _task(number: int, **fields: Any) -> NewTask:
    """Builds a task with its number in its key (`t0`, `t1`, ...)."""
    return new_task(key=f"t{number}", **fields)


async def _submit_independent(bench: Bench, n: int) -> None:
    """Submits `n` tasks without dependencies."""
    await bench.submit_tasks(n)


async def _submit_fan_out(bench: Bench, n: int) -> None:
    """Submits `n` tasks of which all but the first depend on the first."""
    waiting = [_task(number, depends_on=["t0"]) for number in range(1, n)]
    await bench.engine.submit_many([_task(0), *waiting])


async def _submit_chain(bench: Bench, n: int) -> None:
    """Submits `n` tasks of which each depends on the previous one."""
    dependents = [_task(number, depends_on=[f"t{number - 1}"]) for number in range(1, n)]
    await bench.engine.submit_many([_task(0), *dependents])


async def _start_parallel_group(bench: Bench, n: int) -> None:
    """Starts a flow with a parallel group of `n` tasks."""
    await bench.engine.flows.start_plan(_group_plan(n, "parallel"))


async def _start_sequential_group(bench: Bench, n: int) -> None:
    """Starts a flow with a sequential group of `n` tasks."""
    await bench.engine.flows.start_plan(_group_plan(n, "sequential"))


async def _start_next_chain(bench: Bench, n: int) -> None:
    """Starts a flow of `n` tasks of which each names its successor as `next`."""
    tasks = {f"t{number}": _task(number, next=f"t{number + 1}") for number in range(n - 1)}
    tasks[f"t{n - 1}"] = _task(n - 1)
    await bench.engine.flows.start_plan(build_plan("t0", tasks.get))


def _group_plan(n: int, order: Order) -> Plan:
    """Returns the plan of a group with `n` tasks."""
    keys = tuple(f"t{number}" for number in range(n))
    group = GroupSpec(title="bench", key="all", order=order, children=keys)
    specs: dict[str, Spec] = {key: _task(number) for number, key in enumerate(keys)}
    specs["all"] = group
    return build_plan("all", specs.get)


FAN_OUTS: dict[str, SubmitWorkload] = {
    "group of n": _start_parallel_group,
    "n waiting for one": _submit_fan_out,
}
CHAINS: dict[str, SubmitWorkload] = {
    "sequence of n": _start_sequential_group,
    "n waiting in a row": _submit_chain,
    "n named in a row": _start_next_chain,
}


async def measure(bench: Bench) -> Figures:
    """Measures milliseconds per task of fan-outs and chains, and the ratio to independent tasks."""
    n = min(bench.tasks, MAX_BULK)
    figures = await _compare(bench, "fan-out", n, SLOTS, FAN_OUTS)
    return figures | await _compare(bench, "chain", n, 1, CHAINS)


async def _compare(
    bench: Bench, title: str, n: int, slots: int, workloads: dict[str, SubmitWorkload]
) -> Figures:
    """Measures independent tasks, then each workload, on one worker with `slots` slots."""
    async with _running_services(bench, slots):
        independent_ms = await _ms_per_task(bench, n, _submit_independent)
        figures = {f"{title}: independent, ms": independent_ms}
        for name, submit in workloads.items():
            ms = await _ms_per_task(bench, n, submit)
            figures[f"{title}: {name}, ms"] = ms
            figures[f"{title}: {name}, times independent"] = ms / independent_ms
    return figures


@asynccontextmanager
async def _running_services(bench: Bench, slots: int) -> AsyncIterator[None]:
    """Context with a running worker and coordinator, warmed up."""
    stop = asyncio.Event()
    settings = Settings(database=bench.url)
    async with app.connect(settings, actor="bench", listen=True) as engine:
        coordinator = Coordinator(engine, settings, name="bench")
        coordinating = asyncio.get_running_loop().create_task(coordinator.run(stop))
        await bench.start_worker(slots)
        try:
            await _ms_per_task(bench, WARMUP_TASKS, _submit_independent)
            yield
        finally:
            stop.set()
            await coordinating
            await bench.kill_workers()


async def _ms_per_task(bench: Bench, n: int, submit: SubmitWorkload) -> float:
    """Returns milliseconds per task, from the submit of `n` tasks to the finish of the last."""
    before = await bench.count_completed()
    start = bench.elapsed()
    await submit(bench, n)
    while await bench.count_completed() < before + n:
        await bench.pause(max(MIN_POLL_S, POLL_SHARE * (bench.elapsed() - start)))
    return 1000 * (bench.elapsed() - start) / n
