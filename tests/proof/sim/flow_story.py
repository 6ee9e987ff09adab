"""A run about flows: one of every kind of step, tasks that wait for tasks, and people at work.

The flow: a list is made; fifty children run side by side, one of them a sequence, one a condition
and one with a successor; then a task per item of the list; a loop of three rounds; an approval; a
condition; and a last task. `EXPECTED` says how often each of its keys runs when nobody interferes.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch
from uuid import UUID

import msgspec
from tests.proof.sim import flow_checkers
from tests.proof.sim.actors import SETTLED_S, Operator, Scene
from tests.proof.sim.plan import LEASE_S, Moment, Plan, make_plan
from tests.proof.sim.recorder import Control, Submit
from tests.proof.sim.world import Result, Story, simulate

from tenuto.engine.flows import activation, advance
from tenuto.engine.tasks import retry
from tenuto.model.errors import Conflict, Unavailable
from tenuto.model.flows.definition import Approval, Condition, Foreach, Goto, GroupSpec
from tenuto.model.flows.plan import Plan as FlowPlan
from tenuto.model.flows.plan import Spec, build_plan
from tenuto.model.tasks.retry import RetryPolicy
from tenuto.model.tasks.submission import NewTask

CHILDREN = 50
ITEMS = 200
ROUNDS = 3
STEPS = 10
TRIES = 60
"""Nothing dies of lost leases here; what that looks like, the other story shows."""


class Twist(msgspec.Struct, frozen=True, kw_only=True):
    """What a seed adds to the plan of the world."""

    bound: int
    """Rows of one cascade, so small that most of them leave something for later."""
    go: bool
    """Which way the last condition goes."""
    sequential: bool
    """Whether the items are taken one by one; then there are few."""
    cancels: int
    pauses: int
    holds: int
    """How often a group or the flow is paused and resumed."""
    stops: bool
    """Whether the flow is cancelled as a whole."""
    echoes: int
    """Results that arrive once more."""
    dependents: int
    revives: int
    """How often something that ended badly is tried again, with what ended because of it."""

    @property
    def items(self) -> int:
        return 12 if self.sequential else ITEMS


def make_twist(seed: int) -> Twist:
    rng = random.Random(f"twist {seed}")
    meddled = rng.random() < 0.4
    return Twist(
        bound=rng.choice([5, 23, 60, 500]),
        go=rng.random() < 0.5,
        sequential=rng.random() < 0.15,
        cancels=rng.randint(1, 4) if meddled and rng.random() < 0.5 else 0,
        pauses=rng.randint(1, 8) if meddled else 0,
        holds=rng.randint(1, 3) if meddled and rng.random() < 0.6 else 0,
        stops=meddled and rng.random() < 0.1,
        echoes=rng.choice([0, 20, 60]),
        dependents=rng.choice([0, 8, 40]),
        revives=rng.choice([0, 3, 6]),
    )


def make_flow_plan(seed: int) -> Plan:
    """The seed's world with enough hands for hundreds of tasks, and its faults spread over them."""
    rng = random.Random(f"flow plan {seed}")
    plan = make_plan(seed)
    stretch = rng.uniform(1.0, 2.0)
    return msgspec.structs.replace(
        plan,
        settings=msgspec.structs.replace(plan.settings, slots=rng.choice([8, 20, 40])),
        max_concurrent=None,
        duration=plan.duration * stretch,
        moments=(
            *(msgspec.structs.replace(moment, at=moment.at * stretch) for moment in plan.moments),
            Moment(rng.uniform(1, 12), "kill coordinator", LEASE_S, rng.randint(1, 60)),
        ),
    )


def _task(rng: random.Random, key: str, *deeds: list[Any], **fields: Any) -> NewTask:
    """A task that takes a moment, and fails now and then the first time."""
    all_deeds = [["sleep", round(rng.random() * rng.random(), 3)], *deeds]
    if rng.random() < 0.1:
        all_deeds.append(["fail", "connection", 1])
    return NewTask(
        title=key,
        key=key,
        task_type="a",
        input={"deeds": all_deeds},
        max_attempts=TRIES,
        retry=RetryPolicy(base_s=0.1, cap_s=2.0),
        **fields,
    )


def make_flow(seed: int, twist: Twist) -> FlowPlan:
    """The flow of the story."""
    rng = random.Random(f"flow {seed}")
    plain = [f"p{number}" for number in range(CHILDREN - 3)]
    children = (*plain, "seq", "even", "q")
    order: Any = "sequential" if twist.sequential else "parallel"
    items = Foreach(items={"$from": "list", "path": "items"}, template="item", order=order)
    template = _task(rng, "item")
    template.input = {"deeds": [["sleep", 0.2]], "item": {"$item": None}}
    listing = ["tell", {"items": list(range(twist.items)), "go": twist.go}]
    again = Condition(expression=f"result.round >= {ROUNDS}", on_true="ok", on_false="again")
    specs: list[Spec] = [
        _task(rng, "list", listing, next="fan"),
        GroupSpec(title="fan", key="fan", order="parallel", children=children, next="each"),
        GroupSpec(title="seq", key="seq", children=("s0", "s1", "s2")),
        *(_task(rng, key) for key in (*plain, "s0", "s1", "s2", "q2", "odd", "yes2", "final")),
        _engine("even", Condition(expression="1 > 2", on_true="q2", on_false="odd")),
        _task(rng, "q", next="q3"),
        _task(rng, "q3"),
        _engine("each", items, next="work"),
        template,
        _task(rng, "work", ["count"], next="enough"),
        _engine("enough", again),
        _engine("again", Goto(target="work", prompt="Once more.")),
        _engine("ok", Approval(message="Go on?"), next="if"),
        _engine("if", Condition(expression="input.go", on_true="yes", on_false="no")),
        _task(rng, "yes", next="yes2"),
        _task(rng, "no", next="final"),
    ]
    existing = {spec.key or "": spec for spec in specs}
    existing["yes2"] = msgspec.structs.replace(existing["yes2"], next="final")
    return build_plan("list", existing.get)


def _engine(key: str, control: Any, **fields: Any) -> NewTask:
    """A step that the engine itself takes."""
    return NewTask(title=key, key=key, control=control, **fields)


def expected(twist: Twist) -> Counter[str]:
    """Returns how often each key runs without interference; a foreach is a task and a group."""
    counts = Counter({f"p{number}": 1 for number in range(CHILDREN - 3)})
    counts.update("list fan seq s0 s1 s2 even odd q q3 each each ok if final".split())
    counts["item"] = twist.items
    counts.update({"work": ROUNDS, "enough": ROUNDS, "again": ROUNDS - 1})
    counts.update("yes yes2".split() if twist.go else ["no"])
    return counts


class FlowOperator(Operator):
    """Starts the flow, answers for people, and meddles as far as the seed says."""

    def __init__(self, scene: Scene) -> None:
        super().__init__(scene)
        self.twist = make_twist(scene.plan.seed)
        self._plan = make_flow(scene.plan.seed, self.twist)
        self._second = scene.engine(self.process)
        self.answered: Counter[UUID] = Counter()
        self._held: set[UUID] = set()
        scene.recorder.seen["twist"] = self.twist
        scene.recorder.seen["answered"] = self.answered

    async def run(self) -> None:
        plan, rng, twist = self._scene.plan, self._rng, self.twist
        person = self._scene.loop.create_task(self._answer_all())
        acts: list[tuple[float, Callable[[], Awaitable[None]]]] = [(0.0, self._start)]
        acts.append((0.1, self._hub))
        for times, deed in (
            (twist.cancels, self._cancel_one),
            (twist.pauses, self._pause_one),
            (twist.holds, self._hold),
            (twist.revives if twist.cancels else 0, self._revive),
            (twist.echoes, self._echo),
            (int(twist.stops), self._stop),
            (twist.dependents // 4, self._late_dependents),
        ):
            acts += [(rng.uniform(1, plan.duration), deed) for _ in range(times)]
        under_way = []
        for at, act in sorted(acts, key=lambda item: item[0]):
            await asyncio.sleep(max(0.0, at - self._scene.loop.time()))
            under_way.append(self._scene.loop.create_task(_run(act)))
        await asyncio.gather(*under_way)
        self._person = person

    async def carry_on(self) -> None:
        await asyncio.sleep(SETTLED_S)

    async def _retry(self, call: Callable[[], Awaitable[Any]]) -> Any:
        while True:
            try:
                return await call()
            except Unavailable:
                await asyncio.sleep(0.3)

    async def _start(self) -> None:
        values = {"go": self.twist.go}
        await self._retry(
            lambda: self._engine.flows.start_plan(
                self._plan, values, steps=STEPS, fire_key="the flow"
            )
        )

    async def resume_all(self, held: list[tuple[str, UUID]]) -> None:
        """Flows, groups, and the tasks that were held one by one; the others go on with those."""
        own = [item for item in held if item[0] != "task" or item[1] in self._held]
        await super().resume_all(own)

    # Tasks that wait for tasks.

    async def _hub(self) -> None:
        if not self.twist.dependents:
            return
        hub = _task(self._rng, "hub")
        leaves = [
            _task(self._rng, f"leaf-{number}", depends_on=["hub"])
            for number in range(self.twist.dependents)
        ]
        last = _task(self._rng, "last", depends_on=["hub", *(leave.key or "" for leave in leaves)])
        lone = [_task(self._rng, f"lone-{number}", ["sleep", 5.0]) for number in range(4)]
        await self._submit_once([hub, *leaves, last])
        await self._submit_once(lone)

    async def _late_dependents(self) -> None:
        """More of them while what they wait for may be ending, watched by nobody so far."""
        result = "select task from task_body where key = 'hub' or key like 'lone-%' order by task"
        if (needs := self._some(result)) is None:
            return
        number = self._rng.randrange(10**9)
        late = [
            _task(self._rng, f"late-{number}-{item}", depends_on=[str(needs)]) for item in range(3)
        ]
        await self._submit_once(late)

    async def _submit_once(self, new_tasks: list[NewTask]) -> None:
        submit = Submit([new.title for new in new_tasks], new_tasks[0].title)
        self._scene.recorder.submits.append(submit)
        for new in new_tasks:
            new.idempotency_key = new.title
        done = await self._retry(lambda: self._engine.submit_many(new_tasks))
        submit.answers = [[item.id for item in done]]

    # People.

    async def _answer_all(self) -> None:
        """Approve what is asked, sometimes with two clicks at once."""
        while not self._scene.closing:
            await asyncio.sleep(self._rng.uniform(0.5, 3))
            rows = self._scene.database.rows("select id from inbox_item where status = 'OPEN'")
            for (item,) in rows:
                engines = [self._engine, self._second][: self._rng.choice([1, 2])]
                calls = (self._answer(engine, UUID(item)) for engine in engines)
                await asyncio.gather(*calls)

    async def _answer(self, engine: Any, item: UUID) -> None:
        try:
            await engine.inbox.answer(item, approve=True, comment=f"by {self._rng.random()}")
        except (Unavailable, Conflict):
            return
        self.answered[item] += 1

    def _some(self, subject: str) -> UUID | None:
        rows = self._scene.database.rows(subject)
        return UUID(self._rng.choice(rows)[0]) if rows else None

    async def _cancel_one(self) -> None:
        await self._order_some("cancel")

    async def _pause_one(self) -> None:
        await self._order_some("pause")
        await asyncio.sleep(self._rng.uniform(0, 4))
        if (held := self._some("select id from task where status = 'PAUSED' order by id")) is None:
            return
        await self._engine.resume(held)

    async def _order_some(self, action: str) -> None:
        alive = (
            "select id from task join task_body on task = id where finished_at is null"
            " and key <> 'list' order by id"
        )
        if (task := self._some(alive)) is None:
            return
        self._orders += 1
        reason = f"order {self._orders}"
        self._held.add(task)
        await getattr(self._engine, action)(task, reason)
        recorder = self._scene.recorder
        recorder.note("operator", f"{action} {task} as {reason}")
        recorder.controls.append(Control(action, task, reason, recorder.tick()))

    async def _hold(self) -> None:
        """Pause a group or the flow for a while."""
        groups = self._some("select id from task_group where status = 'RUNNING' order by id")
        flow = self._some("select id from flow where status = 'RUNNING'")
        calls = self._engine.flows
        if groups is not None and self._rng.random() < 0.6:
            await calls.pause_group(groups)
            await asyncio.sleep(self._rng.uniform(0, 5))
            await self._retry(lambda: calls.resume_group(groups))
        elif flow is not None:
            await calls.pause(flow)
            await asyncio.sleep(self._rng.uniform(0, 5))
            await self._retry(lambda: calls.resume(flow))

    async def _revive(self) -> None:
        ended = "select id from task where status in ('FAILED', 'DEAD', 'CANCELLED') order by id"
        if (task := self._some(ended)) is not None:
            await self._engine.retry(task, cascade=self._rng.random() < 0.7)

    async def _stop(self) -> None:
        if (flow := self._some("select id from flow where status = 'RUNNING'")) is not None:
            await self._engine.flows.cancel(flow)

    async def _echo(self) -> None:
        """A result that was told already arrives once more."""
        reported = sorted(self._scene.recorder.outputs)
        if not reported:
            return
        task, attempt = self._rng.choice(reported)
        output = self._scene.recorder.outputs[task, attempt]
        fences = [work.fence for work, _ in self._scene.recorder.works[task]]
        for fence in fences:
            if fence.attempt == attempt:
                await self._engine.complete(fence, output)


async def _run(act: Callable[[], Awaitable[None]]) -> None:
    """An act that may be refused, or not be heard."""
    try:
        await act()
    except (Conflict, Unavailable):
        return


@contextmanager
def bounded(bound: int) -> Iterator[None]:
    """Cascades of so many rows."""
    with ExitStack() as stack:
        for module in (activation, advance, retry):
            stack.enter_context(patch.object(module, "MAX_CASCADE_ROWS", bound))
        yield


STORY = Story(FlowOperator, flow_checkers.ORACLES)


def simulate_flow(seed: int) -> Result:
    """Play the story under a seed's faults."""
    with bounded(make_twist(seed).bound):
        return simulate(seed, make_flow_plan(seed), STORY)
