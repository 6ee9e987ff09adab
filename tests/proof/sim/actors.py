"""Who acts in a run: worker and coordinator processes, an operator, and one who does harm."""

import asyncio
import random
import socket
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any
from uuid import UUID

from tests.proof.sim.clock import SimClock
from tests.proof.sim.handlers import Handlers, make_task
from tests.proof.sim.hints import Broker, SimWakeups
from tests.proof.sim.loop import Process, VirtualLoop, later
from tests.proof.sim.plan import Faults, Moment, Plan
from tests.proof.sim.recorder import Control, Recorder, Submit, Watched
from tests.proof.sim.store import Database, SimStore

from tenuto.coordinator.coordinator import Coordinator
from tenuto.engine.tasks.maintenance import Sink
from tenuto.model.errors import Conflict, NotFound, TenutoError, Unavailable
from tenuto.model.tasks.submission import NewTask
from tenuto.store.protocol import Row
from tenuto.worker.worker import Worker

RELAYED = "observer"
ACTIONS = ("cancel", "cancel", "pause", "pause", "pause", "resume", "retry", "archive")
FIRST_PID = 100_000_000
"""Beyond what any system hands out: a simulated process is never mistaken for a real one."""
BUSY_WITHIN_S = 6.0
SETTLED_S = 6.5
"""So long after the last fault nothing of it is under way any more."""


class Scene:
    """What all actors share."""

    def __init__(self, plan: Plan, loop: VirtualLoop, database: Database) -> None:
        self.plan = plan
        self.loop = loop
        self.database = database
        self.faults = Faults(plan)
        self.recorder = Recorder(loop)
        self.broker = Broker(self.faults)
        self.processes: list[Process] = []
        self.closing = False

    def enter(self, name: str, kind: str) -> Process:
        process = Process(name, kind, FIRST_PID + len(self.processes))
        self.processes.append(process)
        self.recorder.note(name, "starts")
        return process

    def engine(self, process: Process) -> Watched:
        """An engine of the process, over its own way to the database."""
        clock = SimClock(self.loop, f"{self.plan.seed} {process.name}")
        store = SimStore(self.database, process, clock, self.faults, self.recorder)
        engine = Watched(store, SimWakeups(self.broker, process), actor=process.name)
        engine.recorder = self.recorder
        return engine

    def kill(self, pid: int, signal: int) -> None:
        """As `os.kill`, which says whether a process is there."""
        assert signal == 0
        if self.processes[pid - FIRST_PID].state not in ("running", "stopped"):
            raise ProcessLookupError(pid)

    def alive(self, kind: str) -> list[Process]:
        return [
            process
            for process in self.processes
            if process.kind == kind and process.state == "running"
        ]


async def until_answered(call: Callable[[], Coroutine[Any, Any, Any]]) -> None:
    """Call again until the store answers."""
    while True:
        try:
            await call()
        except Unavailable:
            await asyncio.sleep(0.5)
        else:
            return


def worker_id(process: Process) -> str:
    """Returns the id of a worker."""
    return f"{socket.gethostname()}:{process.pid}:{process.name}"


async def work(scene: Scene, process: Process, slot: int) -> None:
    """The main coroutine of a worker process."""

    def die() -> None:
        scene.faults.happened["worker ended itself"] += 1
        scene.recorder.suicides += not scene.faults.on
        if not scene.recorder.stuck(process):
            scene.recorder.wrong("stuck", f"{process.name} ended itself though nothing was stuck")
        process.kill()

    plan = scene.plan
    worker = Worker(scene.engine(process), plan.settings, name=worker_id(process), exit_process=die)
    handlers = Handlers(process, scene.recorder, scene.faults)
    await until_answered(
        lambda: worker.host_functions(
            "agent" if plan.shared_agent else f"agent {slot}",
            {None: handlers.handle},
            max_concurrent=plan.max_concurrent,
        )
    )
    await worker.run(process.stop)


async def coordinate(scene: Scene, process: Process) -> None:
    """The main coroutine of a coordinator process."""

    async def sink(events: Sequence[Row]) -> None:
        await asyncio.sleep(scene.faults.rng.random() * scene.plan.latency)
        if scene.faults.happens(scene.plan.sink_fails, "sink failed"):
            scene.recorder.deliver(events[: scene.faults.rng.randint(0, len(events))])
            raise Unavailable("the subscriber does not answer")
        scene.recorder.deliver(events)

    async def dead_sink(_events: Sequence[Row]) -> None:
        scene.faults.happened["sink dead"] += 1
        raise Unavailable("nobody is there")

    sinks: dict[str, Sink] = {"nobody": dead_sink} if scene.plan.dead_sink else {}
    sinks[RELAYED] = sink
    coordinator = Coordinator(scene.engine(process), scene.plan.settings, sinks, process.name)
    await coordinator.run(process.stop)


async def keep(scene: Scene, kind: str, slot: int) -> None:
    """Start a process again whenever it ends, until the scene closes."""
    rng = random.Random(f"keeper {scene.plan.seed} {kind} {slot}")
    life = 0
    while not scene.closing:
        life += 1
        process = scene.enter(f"{kind}{slot}.{life}", kind)
        run = work(scene, process, slot) if kind == "worker" else coordinate(scene, process)
        main = scene.loop.create_task(run, context=process.context)
        main.add_done_callback(partial(_soon_over, scene.loop, process))
        await process.gone.wait()
        scene.recorder.note(process.name, process.state)
        if process.state == "dead" and kind == "worker" and rng.random() < scene.plan.deaths_seen:
            parent = next(item for item in scene.processes if item.kind == "operator")
            scene.loop.create_task(see_death(scene, parent, process), context=parent.context)
        if not scene.closing:
            await asyncio.sleep(rng.uniform(0.1, 3))


def _soon_over(loop: VirtualLoop, process: Process, _main: "asyncio.Task[None]") -> None:
    """Waits a moment until the last cancelled task has finished."""
    later(loop, 0.01, process.end)


async def see_death(scene: Scene, parent: Process, dead: Process) -> None:
    """As the parent of worker processes does."""
    engine = scene.engine(parent)
    try:
        await engine.maintenance.expire_worker(worker_id(dead), "parent")
        await engine.maintenance.promote_once("parent")
    except Unavailable:
        return
    scene.faults.happened["death seen"] += 1


class Operator:
    """Submits tasks and interferes with them, and does not always get an answer."""

    def __init__(self, scene: Scene) -> None:
        self.process = scene.enter("operator", "operator")
        self._scene = scene
        self._engine = scene.engine(self.process)
        self._rng = random.Random(f"operator {scene.plan.seed}")
        self._known: list[UUID] = []
        self._keyed: list[tuple[Submit, list[NewTask]]] = []
        self._orders = 0

    async def run(self) -> None:
        """Everything that the plan has in store, spread over its duration."""
        plan, rng = self._scene.plan, self._rng
        acts = [(rng.uniform(0, plan.duration * 0.5), self._submit) for _ in range(plan.submits)]
        acts += [(rng.uniform(1, plan.duration), self._control) for _ in range(plan.controls)]
        acts += [(rng.uniform(1, plan.duration), self._submit_again) for _ in range(2)]
        under_way = []
        for at, act in sorted(acts, key=lambda item: item[0]):
            await asyncio.sleep(max(0.0, at - self._scene.loop.time()))
            under_way.append(self._scene.loop.create_task(act()))
        await asyncio.gather(*under_way)

    async def _submit(self) -> None:
        rng, recorder = self._rng, self._scene.recorder
        name = f"t{len(recorder.submits)}"
        count = rng.choice([1, 1, 1, 1, 3])
        keyed = rng.random() < 0.4
        titles = [name] if count == 1 else [f"{name}.{number}" for number in range(count)]
        new_tasks = [make_task(rng, title, self._scene.loop.time()) for title in titles]
        submit = Submit(titles, name if keyed else None)
        recorder.submits.append(submit)
        if keyed:
            for new in new_tasks:
                new.idempotency_key = f"key {new.title}"
            self._keyed.append((submit, new_tasks))
        await self._send(submit, new_tasks, times=5 if keyed else 1)

    async def _send(self, submit: Submit, new_tasks: list[NewTask], times: int) -> None:
        for _ in range(times):
            try:
                done = await self._engine.submit_many(new_tasks)
            except Unavailable:
                await asyncio.sleep(0.1)
                continue
            submit.answers = [*submit.answers, [item.id for item in done]]
            self._known += [item.id for item in done if item.id not in self._known]
            return

    async def _submit_again(self) -> None:
        """The same once more, or another body under a key that is taken."""
        if not self._keyed:
            return
        submit, new_tasks = self._rng.choice(self._keyed)
        if self._rng.random() < 0.6 or not submit.answers:
            await self._send(submit, new_tasks, times=5)
            return
        other = NewTask(title="an impostor", idempotency_key=new_tasks[0].idempotency_key)
        try:
            await self._engine.submit(other)
        except (Conflict, Unavailable):
            return
        submit.keyed_conflict = True

    async def carry_on(self) -> None:
        """Some more of the same when everything is healthy again."""
        await asyncio.sleep(SETTLED_S)
        under_way = [self._scene.loop.create_task(self._submit()) for _ in range(2)]
        for _ in range(self._scene.plan.controls // 4):
            await asyncio.sleep(self._rng.uniform(0, 2))
            under_way.append(self._scene.loop.create_task(self._control()))
        await asyncio.gather(*under_way)

    async def _control(self) -> None:
        """Something is asked of a task, of a running one by preference; sometimes two things."""
        leased = "select id from task where status in ('ASSIGNED', 'RUNNING') order by id"
        running = [UUID(row[0]) for row in self._scene.database.rows(leased)]
        if not (candidates := running if self._rng.random() < 0.7 and running else self._known):
            return
        task = self._rng.choice(candidates)
        action = self._rng.choice(ACTIONS)
        await self._order(action, task)
        if self._rng.random() < 0.4:
            await asyncio.sleep(self._rng.random() * self._rng.random())
            await self._order("cancel" if action == "pause" else self._rng.choice(ACTIONS), task)

    async def _order(self, action: str, task: UUID) -> None:
        self._orders += 1
        reason = f"order {self._orders}"
        try:
            if action in ("cancel", "pause"):
                await getattr(self._engine, action)(task, reason)
            else:
                await getattr(self._engine, action)(task)
        except (Unavailable, Conflict):
            return
        except NotFound:
            self._scene.recorder.wrong("I1", f"acknowledged task {task} is not found")
            return
        recorder = self._scene.recorder
        recorder.note("operator", f"{action} {task} as {reason}")
        recorder.controls.append(Control(action, task, reason, recorder.tick()))

    async def resume_all(self, held: list[tuple[str, UUID]]) -> None:
        """Let everything that is held go on: tasks, groups and flows."""
        flows = self._engine.flows
        calls = {"task": self._engine.resume, "group": flows.resume_group, "flow": flows.resume}
        for kind, one in held:
            try:
                await calls[kind](one)
            except TenutoError:
                continue


class Harm:
    """Does to the processes what the plan says, and sees to it that it was done."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self._rng = random.Random(f"harm {scene.plan.seed}")

    async def run(self) -> None:
        await asyncio.gather(*(self._at(moment) for moment in self._scene.plan.moments))

    async def _at(self, moment: Moment) -> None:
        await asyncio.sleep(moment.at)
        verb, _, kind = moment.act.partition(" ")
        if moment.act == "wipe hints":
            self._scene.broker.wipe()
        elif moment.act == "close lid":
            await self._close_lid(moment.seconds)
        elif moment.act == "cut heart off":
            target = await self._target("worker")
            target.heartless_until = self._scene.loop.time() + moment.seconds
            await asyncio.sleep(moment.seconds)
        elif moment.act == "cut off":
            target = await self._target(self._rng.choice(["worker", "worker", "coordinator"]))
            target.unreachable_until = self._scene.loop.time() + moment.seconds
            await asyncio.sleep(moment.seconds)
        elif verb == "kill":
            await self._kill(kind, moment.fuse)
        elif verb == "stop":
            await self._stop(await self._target(kind), moment.seconds)
        else:
            (await self._target(kind)).stop.set()
        self._scene.faults.happened[moment.act] += 1

    async def _target(self, kind: str) -> Process:
        """One of that kind; a worker that is busy, if there is one before long."""
        waited = 0.0
        while True:
            matches = [item for item in self._scene.alive(kind) if item.fuse is None]
            busy = [item.process for item in self._scene.recorder.handling]
            if preferred := [item for item in matches if item in busy or kind != "worker"]:
                matches = preferred
                break
            if matches and waited > BUSY_WITHIN_S:
                break
            await asyncio.sleep(0.3)
            waited += 0.3
        target = self._rng.choice(matches)
        self._scene.recorder.note(target.name, "harmed")
        return target

    async def _kill(self, kind: str, fuse: int) -> None:
        while True:
            target = await self._target(kind)
            target.fuse = fuse
            await target.gone.wait()
            if target.fuse <= 0:
                return

    async def _stop(self, target: Process, seconds: float) -> None:
        target.state = "stopped"
        await asyncio.sleep(seconds)
        self._scene.recorder.note(target.name, "goes on")
        self._scene.loop.resume(target)

    async def _close_lid(self, seconds: float) -> None:
        """Everything stands still, but for time."""
        targets = [process for process in self._scene.processes if process.state == "running"]
        await asyncio.gather(*(self._stop(target, seconds) for target in targets))
