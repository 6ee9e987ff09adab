"""Many at once: a thousand agents that beat, tasks over two hundred lanes, and what a cycle takes.

Every agent holds a task and renews its lease as its worker would, from this process. Coordinators
and workers are processes of their own:

    python -m tenuto.bench.scale

coordinates the database of the settings until it is told to stop, and prints what its cycles took.
"""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec

from tenuto import app
from tenuto.bench.measures import BULK, SLOTS, Bench, Figures, new
from tenuto.bench.noop import noop
from tenuto.coordinator.coordinator import Coordinator
from tenuto.engine.tasks.report import WorkerInfo
from tenuto.model.agents.matching import AgentProfile
from tenuto.model.tasks.task import Fence
from tenuto.periodic import run_periodically, wait_first_event
from tenuto.settings import Settings, environment_without_settings, load

AGENTS = 1000
LANES = 200
PER_TASK = 10
"""Pending tasks for each that other measurements take: 100,000 if nothing is said."""
COORDINATORS = 3
WORKERS = 4
PROBES = 300
SETTLE_S = 15.0
"""Seconds of nothing but heartbeats and cycles."""
TYPES = [f"lane-{number}" for number in range(LANES)]
handlers = dict.fromkeys(TYPES, noop)


class HeartbeatLoad:
    """All agents' heartbeats."""

    def __init__(self, bench: Bench) -> None:
        self._engine = bench.engine
        self._settings = Settings()
        self.took: list[float] = []

    async def register(self) -> list[tuple[AgentProfile, Fence]]:
        """Agents, five to a lane, each with a task of its own."""
        made = []
        for number in range(AGENTS):
            profile = AgentProfile(
                id=self._engine.clock.new_id(),
                workspace=self._engine.workspace,
                name=f"agent-{number}",
                task_types=(TYPES[number % LANES],),
                runtimes=("function",),
            )
            agent = await self._engine.register_agent(profile)
            [work] = await self._engine.claim(agent, f"worker-{number}", 1)
            made.append((agent, work.fence))
        return made

    async def beat(self, number: int, fence: Fence, stop: asyncio.Event) -> None:
        """One agent's heart, out of step with the others."""
        clock, every = self._engine.clock, self._settings.heartbeat_s
        who = WorkerInfo(f"worker-{number}", "bench", number, [f"agent-{number}"], 1)

        async def once() -> None:
            begun = clock.elapsed()
            await self._engine.worker_heartbeat(who, [fence], self._settings.lease_s)
            self.took.append(clock.elapsed() - begun)
            await self._engine.record_worker(who)

        if not await wait_first_event([stop], every * number / AGENTS, clock):
            await run_periodically(once, lambda: every, stop, clock)


async def take(bench: Bench) -> Figures:
    """Cycles, claims and heartbeats with everything pending, then the drain."""
    for start in range(0, PER_TASK * bench.tasks + AGENTS, BULK):
        news = [new(TYPES[(start + number) % LANES]) for number in range(BULK)]
        await bench.engine.submit_many(news)
    hearts, stop = HeartbeatLoad(bench), asyncio.Event()
    agents = await hearts.register()
    async with _coordinators(bench.url) as cycles, asyncio.TaskGroup() as group:
        for number, (_, fence) in enumerate(agents):
            group.create_task(hearts.beat(number, fence, stop))
        try:
            figures = await _measure(bench, hearts, [agent for agent, _ in agents])
        finally:
            stop.set()
    cycles.sort()
    return figures | {
        "scale: cycles": len(cycles),
        "scale: cycle p50 ms": 1000 * _at(cycles, 0.5),
        "scale: cycle p99 ms": 1000 * _at(cycles, 0.99),
        "scale: heartbeat p99 ms": 1000 * _at(sorted(hearts.took), 0.99),
    }


async def _measure(bench: Bench, hearts: HeartbeatLoad, agents: list[AgentProfile]) -> Figures:
    begun, pending = bench.elapsed(), PER_TASK * bench.tasks
    await bench.pause(SETTLE_S)
    claims = await _claims(bench, agents)
    rate = len(hearts.took) / (bench.elapsed() - begun)
    before, start = await bench.completed(), bench.elapsed()
    for _ in range(WORKERS):
        await bench.start_worker(SLOTS, "--app", "tenuto.bench.scale:handlers")
    probing = asyncio.get_running_loop().create_task(_claims(bench, agents))
    left = pending - 2 * PROBES
    while await bench.completed() < before + left:
        await bench.pause(1.0)
    drained = left / (bench.elapsed() - start)
    busy = await probing
    await bench.kill_workers()
    return {
        "scale: heartbeats /s": rate,
        f"scale: claim p50 ms, {pending:,} pending": 1000 * _at(claims, 0.5),
        f"scale: claim p99 ms, {pending:,} pending": 1000 * _at(claims, 0.99),
        "scale: claim p50 ms, workers busy": 1000 * _at(busy, 0.5),
        "scale: claim p99 ms, workers busy": 1000 * _at(busy, 0.99),
        f"scale: drain, {WORKERS} workers from their start /s": drained,
    }


async def _claims(bench: Bench, agents: list[AgentProfile]) -> list[float]:
    """How long claims of one task take, each by another agent."""
    took = []
    for number in range(PROBES):
        agent = agents[number * len(agents) // PROBES]
        start = bench.elapsed()
        works = await bench.engine.claim(agent, "prober", 1)
        took.append(bench.elapsed() - start)
        for work in works:
            await bench.engine.complete(work.fence)
    return sorted(took)


def _at(values: list[float], share: float) -> float:
    return values[min(len(values) - 1, int(share * len(values)))]


@asynccontextmanager
async def _coordinators(url: str) -> AsyncIterator[list[float]]:
    """Coordinators in processes of their own; the list has what their cycles took at the end."""
    cycles: list[float] = []
    running = [
        await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tenuto.bench.scale"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=environment_without_settings() | {"TENUTO_DATABASE": url, app.PARENT_PIPE: "1"},
        )
        for _ in range(COORDINATORS)
    ]
    try:
        yield cycles
    finally:
        for process in running:
            told, _ = await process.communicate(b"")
            cycles += msgspec.json.decode(told, type=list[float])


async def _coordinate() -> None:
    stop = app.stop_on_signals()
    settings = load()
    took: list[float] = []
    async with app.connect(settings) as engine:
        coordinator = Coordinator(engine, settings, name=app.process_name(engine.clock))

        async def once() -> None:
            begun = engine.clock.elapsed()
            if (await coordinator.cycle_once()).leading:
                took.append(engine.clock.elapsed() - begun)

        await run_periodically(once, lambda: settings.tick_s, stop, engine.clock)
    print(msgspec.json.encode(took).decode())


if __name__ == "__main__":
    app.run(_coordinate())
