"""Measures scale: 1000 agents with heartbeats, tasks in 200 lanes, and coordinator cycle times.

Every agent has a running task and renews its lease like a worker, from this process. Coordinators
and workers are separate processes:

    python -m tenuto.bench.scale

runs a coordinator on the database of the settings until it is stopped, and prints the durations of
its cycles.
"""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec

from tenuto import app
from tenuto.bench.measures import BULK, SLOTS, Bench, Figures, new_task
from tenuto.bench.noop import noop
from tenuto.coordinator.coordinator import Coordinator
from tenuto.engine.tasks.report import WorkerInfo
from tenuto.model.agents.matching import AgentProfile
from tenuto.model.tasks.task import Fence
from tenuto.periodic import run_periodically, wait_first_event
from tenuto.settings import Settings, environment_without_settings, load

AGENTS = 1000
LANES = 200
PENDING_PER_TASK = 10
"""Pending tasks per task of other measurements: 100,000 by default."""
COORDINATORS = 3
WORKERS = 4
PROBES = 300
SETTLE_S = 15.0
"""Seconds with only heartbeats and coordinator cycles."""
TYPES = [f"lane-{number}" for number in range(LANES)]
handlers = dict.fromkeys(TYPES, noop)


class HeartbeatLoad:
    """Sends the heartbeats of all agents and records their durations."""

    def __init__(self, bench: Bench) -> None:
        self._engine = bench.engine
        self._settings = Settings()
        self.durations: list[float] = []

    async def register(self) -> list[tuple[AgentProfile, Fence]]:
        """Registers the agents, claims a task for each, and returns agents with their fences."""
        agents = []
        for number in range(AGENTS):
            profile = AgentProfile(
                id=self._engine.clock.new_id(),
                workspace=self._engine.workspace,
                name=f"agent-{number}",
                task_types=(TYPES[number % LANES],),
                runtimes=("function",),
            )
            agent = await self._engine.register_agent(profile)
            [claimed] = await self._engine.claim(agent, f"worker-{number}", 1)
            agents.append((agent, claimed.fence))
        return agents

    async def send_heartbeats(self, number: int, fence: Fence, stop: asyncio.Event) -> None:
        """Sends one agent's heartbeats until `stop`, at its own offset; adds to `durations`."""
        clock, every = self._engine.clock, self._settings.heartbeat_s
        worker = WorkerInfo(f"worker-{number}", "bench", number, [f"agent-{number}"], 1)

        async def once() -> None:
            start = clock.elapsed()
            await self._engine.worker_heartbeat(worker, [fence], self._settings.lease_s)
            self.durations.append(clock.elapsed() - start)
            await self._engine.record_worker(worker)

        if not await wait_first_event([stop], every * number / AGENTS, clock):
            await run_periodically(once, lambda: every, stop, clock)


async def measure(bench: Bench) -> Figures:
    """Measures cycles, claims and heartbeats with all tasks pending, then the drain."""
    for start in range(0, PENDING_PER_TASK * bench.tasks + AGENTS, BULK):
        new_tasks = [new_task(TYPES[(start + number) % LANES]) for number in range(BULK)]
        await bench.engine.submit_many(new_tasks)
    heartbeats, stop = HeartbeatLoad(bench), asyncio.Event()
    agents = await heartbeats.register()
    async with _running_coordinators(bench.url) as cycles, asyncio.TaskGroup() as group:
        for number, (_, fence) in enumerate(agents):
            group.create_task(heartbeats.send_heartbeats(number, fence, stop))
        try:
            figures = await _measure(bench, heartbeats, [agent for agent, _ in agents])
        finally:
            stop.set()
    cycles.sort()
    return figures | {
        "scale: cycles": len(cycles),
        "scale: cycle p50 ms": 1000 * _percentile(cycles, 0.5),
        "scale: cycle p99 ms": 1000 * _percentile(cycles, 0.99),
        "scale: heartbeat p99 ms": 1000 * _percentile(sorted(heartbeats.durations), 0.99),
    }


async def _measure(bench: Bench, heartbeats: HeartbeatLoad, agents: list[AgentProfile]) -> Figures:
    """Measures claims while `heartbeats` runs; then starts workers and measures the drain."""
    first, pending = bench.elapsed(), PENDING_PER_TASK * bench.tasks
    await bench.pause(SETTLE_S)
    claims = await _claim_durations(bench, agents)
    rate = len(heartbeats.durations) / (bench.elapsed() - first)
    before, start = await bench.count_completed(), bench.elapsed()
    for _ in range(WORKERS):
        await bench.start_worker(SLOTS, "--app", "tenuto.bench.scale:handlers")
    probing = asyncio.get_running_loop().create_task(_claim_durations(bench, agents))
    remaining = pending - 2 * PROBES
    while await bench.count_completed() < before + remaining:
        await bench.pause(1.0)
    drained = remaining / (bench.elapsed() - start)
    claims_while_busy = await probing
    await bench.kill_workers()
    return {
        "scale: heartbeats /s": rate,
        f"scale: claim p50 ms, {pending:,} pending": 1000 * _percentile(claims, 0.5),
        f"scale: claim p99 ms, {pending:,} pending": 1000 * _percentile(claims, 0.99),
        "scale: claim p50 ms, workers busy": 1000 * _percentile(claims_while_busy, 0.5),
        "scale: claim p99 ms, workers busy": 1000 * _percentile(claims_while_busy, 0.99),
        f"scale: drain, {WORKERS} workers from their start /s": drained,
    }


async def _claim_durations(bench: Bench, agents: list[AgentProfile]) -> list[float]:
    """Claims and completes tasks, each by another agent; returns the sorted claim seconds."""
    durations = []
    for number in range(PROBES):
        agent = agents[number * len(agents) // PROBES]
        start = bench.elapsed()
        claimed = await bench.engine.claim(agent, "prober", 1)
        durations.append(bench.elapsed() - start)
        for task in claimed:
            await bench.engine.complete(task.fence)
    return sorted(durations)


def _percentile(values: list[float], share: float) -> float:
    """Returns the value at that share (0 to 1) of the sorted values."""
    return values[min(len(values) - 1, int(share * len(values)))]


@asynccontextmanager
async def _running_coordinators(url: str) -> AsyncIterator[list[float]]:
    """Context with coordinator processes; at its end the list holds their cycle durations."""
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
            output, _ = await process.communicate(b"")
            cycles += msgspec.json.decode(output, type=list[float])


async def _run_coordinator() -> None:
    """Runs a coordinator until stopped; prints the durations of its cycles as leader."""
    stop = app.stop_on_signals()
    settings = load()
    durations: list[float] = []
    async with app.connect(settings) as engine:
        coordinator = Coordinator(engine, settings, name=app.process_name(engine.clock))

        async def once() -> None:
            start = engine.clock.elapsed()
            if (await coordinator.cycle_once()).leading:
                durations.append(engine.clock.elapsed() - start)

        await run_periodically(once, lambda: settings.tick_s, stop, engine.clock)
    print(msgspec.json.encode(durations).decode())


if __name__ == "__main__":
    app.run(_run_coordinator())
