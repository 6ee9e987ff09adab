"""The measurements, the same for every store."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from uuid import UUID

import msgspec

from tenuto import app
from tenuto.coordinator.coordinator import Coordinator
from tenuto.engine.engine import Engine
from tenuto.model.agents.matching import AgentProfile
from tenuto.model.tasks.submission import NewTask
from tenuto.periodic import wait_first_event
from tenuto.settings import Settings, environment_without_settings

Figures = dict[str, float]
"""Measured value by name; the name contains the unit."""

PAYLOAD = {"payload": "x" * 186}
"""200 bytes of JSON."""
BULK = 1000
CALLERS = 64
SLOTS = 400
KEPT_ROWS = 1_000_000
IDLE_S = 5.0
SETTLE_S = 20.0


def new_task(task_type: str = "noop", **options: Any) -> NewTask:
    """Returns a task with 200 bytes of input."""
    return NewTask(title="bench", task_type=task_type, input=PAYLOAD, **options)


class Bench:
    """One empty database with an engine and worker processes."""

    def __init__(self, engine: Engine, url: str, tasks: int) -> None:
        self.engine = engine
        self.url = url
        self.tasks = tasks
        self._workers: list[asyncio.subprocess.Process] = []

    @classmethod
    @asynccontextmanager
    async def open(cls, url: str, tasks: int) -> AsyncIterator["Bench"]:
        """Context with the migrated database and its engine; kills the workers at the end."""
        store = app.create_store(url)
        await store.migrate()
        await store.close()
        async with app.connect(Settings(database=url), actor="bench") as engine:
            bench = cls(engine, url, tasks)
            try:
                yield bench
            finally:
                await bench.kill_workers()

    def elapsed(self) -> float:
        """Returns the seconds of a monotonic clock."""
        return self.engine.clock.elapsed()

    async def pause(self, seconds: float) -> None:
        """Waits that many seconds."""
        await wait_first_event([], seconds, self.engine.clock)

    async def submit_tasks(self, n: int, task_type: str = "noop") -> list[UUID]:
        """Submits `n` tasks and returns their ids in queue order."""
        ids: list[UUID] = []
        for start in range(0, n, BULK):
            new_tasks = [new_task(task_type) for _ in range(min(BULK, n - start))]
            ids += [task.id for task in await self.engine.submit_many(new_tasks)]
        return ids

    async def start_worker(self, slots: int = SLOTS, *extra: str) -> asyncio.subprocess.Process:
        """Starts a worker process; `extra` replaces the option that loads the noop handlers."""
        env = environment_without_settings()
        env |= {"TENUTO_DATABASE": self.url, app.PARENT_PIPE: "1"}
        options = extra or ("--app", "tenuto.bench.noop:handlers")
        worker = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tenuto.cli.main", "worker", "--agent", "bench"),
            *("--slots", str(slots), *options),
            stdin=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env=env,
            start_new_session=True,
        )
        self._workers.append(worker)
        return worker

    async def kill_workers(self) -> None:
        """Kills all worker processes and waits until they have exited."""
        for worker in self._workers:
            if worker.returncode is None:
                worker.kill()
            await worker.wait()
        self._workers.clear()

    async def count_completed(self) -> int:
        """Returns the number of COMPLETED tasks."""
        return (await self.engine.query.counts(self.engine.workspace))["COMPLETED"]

    async def register_agent(self, *types: str) -> AgentProfile:
        """Registers the agent `prober` for only these task types and returns its profile."""
        profile = AgentProfile(
            id=self.engine.clock.new_id(),
            workspace=self.engine.workspace,
            name="prober",
            task_types=types,
            runtimes=("function",),
        )
        return await self.engine.register_agent(profile)


async def submit_one(bench: Bench) -> Figures:
    """Measures tasks per second of submits one after the other."""
    await bench.engine.submit(new_task())
    n = max(bench.tasks // 10, 100)
    start = bench.elapsed()
    for _ in range(n):
        await bench.engine.submit(new_task())
    return {"submit one by one /s": n / (bench.elapsed() - start)}


async def submit_64(bench: Bench) -> Figures:
    """Measures tasks per second of 64 callers that submit at the same time."""
    await bench.engine.submit(new_task())
    per_caller = max(bench.tasks // CALLERS, 10)

    async def caller() -> None:
        for _ in range(per_caller):
            await bench.engine.submit(new_task())

    start = bench.elapsed()
    await asyncio.gather(*(caller() for _ in range(CALLERS)))
    return {"submit, 64 callers /s": CALLERS * per_caller / (bench.elapsed() - start)}


async def submit_bulk(bench: Bench) -> Figures:
    """Measures tasks per second of submits in lists of 1,000 tasks."""
    await bench.engine.submit(new_task())
    start = bench.elapsed()
    await bench.submit_tasks(bench.tasks)
    return {"submit in bulk /s": bench.tasks / (bench.elapsed() - start)}


async def _drain_rate(bench: Bench, workers: int) -> float:
    """Runs new tasks on new workers, which stay; returns tasks/s, first start to last finish."""
    ids = await bench.submit_tasks(bench.tasks)
    before = await bench.count_completed()
    for _ in range(workers):
        await bench.start_worker()
    while (await bench.engine.show(ids[-1])).finished_at is None:
        await bench.pause(0.05)
    while await bench.count_completed() < before + bench.tasks:  # reads every row: only at the end
        await bench.pause(0.05)
    views = [await bench.engine.show(task) for task in (*ids[:200], *ids[-1000:])]
    first = min(view.started_at for view in views if view.started_at is not None)
    last = max(view.finished_at for view in views if view.finished_at is not None)
    return bench.tasks / (last - first).total_seconds()


async def drain_1(bench: Bench) -> Figures:
    """Measures the drain rate of one worker."""
    return {"drain, 1 worker /s": await _drain_rate(bench, 1)}


async def drain_2(bench: Bench) -> Figures:
    """Measures the drain rate of two workers."""
    return {"drain, 2 workers /s": await _drain_rate(bench, 2)}


async def drain_with_kept_rows(bench: Bench) -> Figures:
    """Measures the drain rate with few finished tasks in the database, then with a million."""
    figures = {"drain, few rows kept /s": await _median_drain_rate(bench)}
    while (done := await bench.count_completed()) < KEPT_ROWS:
        await bench.submit_tasks(min(50_000, KEPT_ROWS - done))
        await bench.start_worker()
        while await bench.count_completed() < min(done + 50_000, KEPT_ROWS):
            await bench.pause(0.5)
        await bench.kill_workers()
    return figures | {f"drain, {KEPT_ROWS:,} rows kept /s": await _median_drain_rate(bench)}


async def _median_drain_rate(bench: Bench) -> float:
    """Returns the median of three drains, after a pause in which the database catches up."""
    await bench.pause(SETTLE_S)
    rates = []
    for _ in range(3):
        rates.append(await _drain_rate(bench, 1))
        await bench.kill_workers()
    return sorted(rates)[1]


async def idle(bench: Bench) -> Figures:
    """Measures latency from submit to start on an idle worker; on Linux also its memory and CPU."""
    worker = await bench.start_worker(10)
    waits = []
    for number in range(105):
        start = bench.elapsed()
        task = (await bench.engine.submit(new_task("when"))).id
        while (view := await bench.engine.show(task)).output is None:
            await bench.pause(0.002)
        if number >= 5:
            waits.append(1000 * (view.output - start))
    waits.sort()
    figures = {"idle latency p50 ms": waits[50], "idle latency p99 ms": waits[98]}
    if sys.platform != "linux":
        return figures
    before = _cpu_s(worker.pid)
    await bench.pause(IDLE_S)
    busy = 100 * (_cpu_s(worker.pid) - before) / IDLE_S
    return figures | {"idle worker MB": _memory_mb(worker.pid), "idle worker, % of a core": busy}


def _memory_mb(pid: int) -> float:
    """Returns the process's resident memory in MiB."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS")).split()[1]) / 1024


def _cpu_s(pid: int) -> float:
    """Returns the CPU seconds that the process has used since its start."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def recovery(bench: Bench) -> Figures:
    """Measures seconds from SIGKILL of a worker with 20 running tasks until all are completed."""
    command = ["sleep", "1"]
    for _ in range(20):
        await bench.engine.submit(NewTask(title="bench", command=command))
    first = await bench.start_worker(20, "--accept-commands")
    while (await bench.engine.query.counts(bench.engine.workspace))["RUNNING"] < 20:
        await bench.pause(0.05)
    first.send_signal(signal.SIGKILL)
    start = bench.elapsed()
    await bench.start_worker(20, "--accept-commands")
    stop = asyncio.Event()
    coordinator = Coordinator(bench.engine, Settings(), name="bench")
    coordinating = asyncio.get_running_loop().create_task(coordinator.run(stop))
    while await bench.count_completed() < 20:
        await bench.pause(0.1)
    took = bench.elapsed() - start
    stop.set()
    await coordinating
    return {"recovery of 20 after kill -9, s": took}


async def _median_claim_ms(bench: Bench, agent: AgentProfile) -> float:
    """Claims and completes 200 single tasks; returns the median claim in milliseconds."""
    times = []
    for _ in range(200):
        start = bench.elapsed()
        claimed = await bench.engine.claim(agent, "prober", 1)
        times.append(1000 * (bench.elapsed() - start))
        for task in claimed:
            await bench.engine.complete(task.fence)
    return sorted(times)[len(times) // 2]


async def _measure_claims(bench: Bench, n: int) -> Figures:
    """Measures a claim on an empty table, beside `n` pending tasks of others, and of `n` own."""
    agent = await bench.register_agent("mine")
    await bench.submit_tasks(1000, "mine")
    figures = {"claim, empty table, ms": await _median_claim_ms(bench, agent)}
    await bench.submit_tasks(n, "foreign")
    await bench.submit_tasks(1000, "mine")
    figures[f"claim, {n:,} foreign pending, ms"] = await _median_claim_ms(bench, agent)
    await bench.submit_tasks(n, "mine")
    figures[f"claim, {n:,} own pending, ms"] = await _median_claim_ms(bench, agent)
    return figures


async def claim(bench: Bench) -> Figures:
    """Measures claims with 10,000 pending tasks."""
    return await _measure_claims(bench, 10_000)


async def claim_large(bench: Bench) -> Figures:
    """Measures claims with a million pending tasks."""
    return await _measure_claims(bench, 1_000_000)


async def lanes(bench: Bench) -> Figures:
    """Measures tasks per second, claimed in hundreds and completed, over 1 to 256 lanes."""
    figures = {}
    for n in (1, 16, 64, 256):
        types = [f"lane-{n}-{number}" for number in range(n)]
        for start in range(0, 5120, 1024):
            new_tasks = [new_task(types[(start + number) % n]) for number in range(1024)]
            await bench.engine.submit_many(new_tasks)
        agent = await bench.register_agent(*types)
        started_at, done = bench.elapsed(), 0
        while claimed := await bench.engine.claim(agent, "prober", 100):
            await asyncio.gather(*(bench.engine.complete(task.fence) for task in claimed))
            done += len(claimed)
        figures[f"claim + complete over {n} lanes /s"] = done / (bench.elapsed() - started_at)
    return figures


async def help_time(bench: Bench) -> Figures:
    """Measures the median duration of `orchestrate --help`."""
    times = []
    for _ in range(5):
        start = bench.elapsed()
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tenuto.cli.main", "--help"),
            stdout=asyncio.subprocess.DEVNULL,
        )
        await process.wait()
        times.append(1000 * (bench.elapsed() - start))
    return {"orchestrate --help, ms": sorted(times)[2]}


class Measure(msgspec.Struct, frozen=True):
    """One measurement; those with `usual=False` take minutes and run only if named."""

    run: Callable[[Bench], Awaitable[Figures]]
    """Runs the measurement on an empty database."""
    usual: bool = True


async def api(bench: Bench) -> Figures:
    """Measures the API (`bench/api.py`)."""
    from tenuto.bench import api as module  # noqa: PLC0415  loads the server

    return await module.measure(bench)


async def flows(bench: Bench) -> Figures:
    """Measures groups and chains (`bench/flows.py`)."""
    from tenuto.bench import flows as module  # noqa: PLC0415  it imports this module

    return await module.measure(bench)


async def scale(bench: Bench) -> Figures:
    """Measures many agents and lanes (`bench/scale.py`)."""
    from tenuto.bench import scale as module  # noqa: PLC0415  it imports this module

    return await module.measure(bench)


MEASURES = {
    "submit": Measure(submit_one),
    "callers": Measure(submit_64),
    "bulk": Measure(submit_bulk),
    "drain-1": Measure(drain_1),
    "drain-2": Measure(drain_2),
    "kept": Measure(drain_with_kept_rows, usual=False),
    "idle": Measure(idle),
    "claim": Measure(claim),
    "claim-large": Measure(claim_large, usual=False),
    "lanes": Measure(lanes),
    "recovery": Measure(recovery, usual=False),
    "help": Measure(help_time),
    "api": Measure(api, usual=False),
    "flows": Measure(flows, usual=False),
    "scale": Measure(scale, usual=False),
}
