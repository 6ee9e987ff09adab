"""Every interleaving of a small world, breadth first, over the functions that decide in production.

The world: tasks as stored, workers whose messages arrive late, twice or never, coordinators, an
operator, and time in steps. What decides is handed in as `Rules`. Each step is checked against the
invariants of the design, and from every stored task a world without further faults must end it.

Time is relative: the clock stands still and a step moves every instant of a row into the past, so
that states which differ only by when they happened are one state.
"""

from collections import deque
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from functools import cache, partial
from typing import Literal, TypeVar
from uuid import UUID

import msgspec

from tenuto.model import commands as c
from tenuto.model import decide as production
from tenuto.model.changes import altered
from tenuto.model.commands import Command, Failure, Fenced, Moment
from tenuto.model.decide import token_hash
from tenuto.model.errors import Conflict
from tenuto.model.retry import ATTEMPT_CAP, FREE_ENDS, ErrorClass
from tenuto.model.task import (
    LEASED,
    TERMINAL,
    TRANSITIONS,
    Change,
    Fence,
    Outcome,
    Status,
    Task,
    due_at,
)

T = TypeVar("T")

NOW = datetime(2030, 1, 1, tzinfo=UTC)
MOMENT = Moment(NOW)
STEP = timedelta(seconds=20)
LEASE_S = 30
TASKS = {UUID(int=1): 0, UUID(int=2): 1}
"""The ids in use, and where their rows stand in a world."""
HEALED_WITHIN = 60

INVARIANTS = {
    "I3": "checkpoints are monotone and fenced",
    "I5": "one result per task, and only the current attempt is heard",
    "I6": "every attempt ends once, and answers say how",
    "I7": "one live lease per task, honoured while it lasts",
    "I11": "only legal transitions",
    "I12": "terminal is final but for an operator's retry",
    "I13": "one audit event per version, gap free, which replays to the status",
    "I15": "tries, attempts and free ends are bounded, and what is queued can be claimed",
    "I16": "after a cancel request nothing but the end by cancelling is accepted",
    "I24": "once faults stop, every task ends",
}


class Violation(Exception):
    """A broken invariant; `assert` stands for a failed assertion in what was checked."""

    def __init__(self, invariant: str, what: str) -> None:
        super().__init__(f"{invariant}: {what}")
        self.invariant = invariant


def demand(holds: bool, invariant: str, what: str) -> None:
    if not holds:
        raise Violation(invariant, what)


class Row(msgspec.Struct, frozen=True, cache_hash=True):
    """A task as stored, and what the checker itself has seen of it."""

    task: Task
    seq: int
    told: Status
    """Number and new status of the latest audit event."""
    owner: Fence | None = None
    """The fence of the latest claim."""
    ended: tuple[int, Outcome] | None = None
    """The latest attempt that ended, and how."""
    results: int = 0
    free: int = 0
    mark: int = 0
    """Ends in a row that cost no try, and the checkpoint at the last of them."""
    cancelled: bool = False
    """A cancel of the present attempt was accepted."""


class Worker(msgspec.Struct, frozen=True, cache_hash=True):
    """`asking`: its claim's answer was lost. `sent`: it waits for the answer to a message."""

    phase: Literal["idle", "asking", "held", "sent"] = "idle"
    fence: Fence | None = None
    life: int = 0


class Message(msgspec.Struct, frozen=True, cache_hash=True):
    """What an attempt says; it may arrive at any later time."""

    kind: str
    fence: Fence


class World(msgspec.Struct, frozen=True, cache_hash=True, kw_only=True):
    """One state. `faults` and `orders`: what may still go wrong, and be asked by the operator."""

    rows: tuple[Row, ...]
    workers: tuple[Worker, ...] = (Worker(), Worker(), Worker())
    mail: frozenset[Message] = frozenset()
    reads: tuple[Task | None, ...] = (None, None)
    faults: int = 0
    orders: int = 0


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """Where to begin, and what the actors of this world can do."""

    start: World
    messages: tuple[str, ...] = ("complete",)
    operator: tuple[str, ...] = ()
    push: bool = False
    checkpoints: int = 0


def claim(task: Task, agent: UUID, worker: str, token: str, status: Status) -> Task | None:
    """As the statement `claim`."""
    if task.status is not Status.PENDING:
        return None
    if task.tries >= task.max_attempts or task.attempt >= ATTEMPT_CAP:
        return None
    return altered(
        task,
        status=status,
        version=task.version + 1,
        attempt=task.attempt + 1,
        tries=task.tries + 1,
        agent=agent,
        worker=worker,
        lease_token=token_hash(token),
        session_key=None,
        lease_until=NOW + timedelta(seconds=max(task.lease_s or 0, LEASE_S)),
        started_at=NOW if status is Status.RUNNING else None,
        due_at=None if task.watch_s is None else NOW + timedelta(seconds=task.watch_s),
        progress_at=None,
    )


def _owns(task: Task, fence: Fence) -> bool:
    held = task.attempt == fence.attempt and task.lease_token == token_hash(fence.token)
    return held and task.status in LEASED


def heartbeat(task: Task, fence: Fence) -> Task | None:
    """As the statement `heartbeat`: the task with its lease renewed, or `None` when it is lost."""
    if not _owns(task, fence):
        return None
    return altered(task, lease_until=NOW + timedelta(seconds=max(task.lease_s or 0, LEASE_S)))


def checkpoint(task: Task, fence: Fence) -> Task | None:
    """As `Reporting.checkpoint`: saved with the next number, or refused."""
    if not _owns(task, fence) or task.cancel_requested_at is not None:
        return None
    return altered(task, checkpoint_seq=task.checkpoint_seq + 1)


def same_lease(read: Task, now: Task) -> bool:
    """Compare-and-set for a coordinator without a lock; heartbeats do not raise the version."""
    return (read.version, read.lease_until) == (now.version, now.lease_until)


class Rules(msgspec.Struct, frozen=True, kw_only=True):
    """What decides in a world. As it stands: production."""

    decide: Callable[[Task, Command, Moment], Change | None] = production.decide
    on_due: Callable[[Task, Moment], Command | None] = production.on_due
    claim: Callable[[Task, UUID, str, str, Status], Task | None] = claim
    heartbeat: Callable[[Task, Fence], Task | None] = heartbeat
    checkpoint: Callable[[Task, Fence], Task | None] = checkpoint
    audited: Callable[[Change], bool] = lambda _change: True
    locked: bool = True
    """Coordinators read and write under one lock, else in two steps with `unchanged` between."""
    unchanged: Callable[[Task, Task], bool] = same_lease


_ERROR = Failure(message="broke")
_SAYS: dict[str, Callable[[Fence], Fenced]] = {
    "begin": lambda fence: c.Begin(fence=fence, session_key="s"),
    "complete": lambda fence: c.Complete(fence=fence),
    "fail": lambda fence: c.Fail(fence=fence, failure=_ERROR),
    "fail for good": lambda fence: c.Fail(
        fence=fence, failure=Failure(message="bad", error_class=ErrorClass.SYNTAX)
    ),
    "rate limit": lambda fence: c.Fail(
        fence=fence, failure=Failure(message="slow down", error_class=ErrorClass.RATE_LIMIT)
    ),
    "not started": lambda fence: c.NotStarted(fence=fence, failure=_ERROR),
    "time out": lambda fence: c.TimedOut(fence=fence),
    "park": lambda fence: c.Park(fence=fence, hold="quota", resume_at=NOW + STEP),
    "park with a limit": lambda fence: c.Park(
        fence=fence, hold="children", wait_until=NOW + STEP
    ),
    "release": lambda fence: c.Release(fence=fence),
    "confirm cancel": lambda fence: c.ConfirmCancel(fence=fence, receipt={"state": "killed"}),
    "confirm pause": lambda fence: c.ConfirmPause(fence=fence, receipt={"state": "killed"}),
}
_ENDS_AS: dict[type[Command], set[Outcome]] = {
    c.Complete: {Outcome.COMPLETED},
    c.Fail: {Outcome.FAILED, Outcome.PARKED, Outcome.TIMED_OUT},
    c.NotStarted: {Outcome.NOT_STARTED},
    c.TimedOut: {Outcome.TIMED_OUT},
    c.Park: {Outcome.PARKED},
    c.Release: {Outcome.RELEASED},
    c.ConfirmCancel: {Outcome.CANCELLED},
    c.ConfirmPause: {Outcome.PAUSED},
}
_ASKS: dict[str, Command] = {
    "cancel": c.Cancel(),
    "pause": c.Pause(),
    "resume": c.Resume(),
    "retry": c.Retry(),
}
_STAYS = (c.Cancel, c.Pause, c.WarnHung)
"""Commands that may leave a leased task leased."""


def check_change(row: Row, command: Command, made: Change) -> None:
    """What must hold of every accepted command; raises `Violation`."""
    before, after, end = row.task, made.task, made.end
    was_leased, is_leased = before.status in LEASED, after.status in LEASED
    moved = (before.status, after.status) in TRANSITIONS[command.name]
    if before.status in TERMINAL and after.status is not before.status:
        demand(isinstance(command, c.Retry), "I12", f"{before.status} became {after.status}")
    if isinstance(command, c.Complete):
        demand(row.results == 0, "I5", "a second result was accepted")
    if isinstance(command, Fenced):
        demand(was_leased and command.fence == row.owner, "I5", "heard an attempt without lease")
        allowed = not row.cancelled or isinstance(command, c.ConfirmCancel)
        demand(allowed, "I16", f"{command.name} accepted after the cancel request")
    if row.cancelled and not is_leased:
        demand(after.status is Status.CANCELLED, "I16", f"cancel ended as {after.status}")
    stays = after.status is before.status and was_leased and isinstance(command, _STAYS)
    demand(moved or stays, "I11", f"{command.name}: {before.status} to {after.status}")
    demand(after.version == before.version + 1, "I13", "the version did not rise by one")
    told = (made.event.previous, made.event.new)
    demand(told == (row.told, after.status), "I13", "the event tells another story")
    demand((end is not None) == (was_leased and not is_leased), "I6", "an attempt's end is amiss")
    demand(after.attempt == before.attempt, "I15", "the attempt number changed without a claim")
    if end is not None:
        fresh = row.ended is None or row.ended[0] < end.attempt
        demand(fresh and end.attempt == before.attempt, "I6", "an attempt ended twice")
        done = (end.outcome is Outcome.COMPLETED, after.status is Status.COMPLETED)
        demand(done[0] == done[1], "I6", f"{end.outcome} left the task {after.status}")


def check_row(row: Row) -> None:
    """What must hold of every stored task; raises `Violation`."""
    task, owner = row.task, row.owner
    demand((row.seq, row.told) == (task.version, task.status), "I13", "the trail misses the row")
    if task.status in LEASED:
        mine = owner is not None and _owns(task, owner) and task.agent is not None
        demand(mine and task.lease_until is not None, "I7", "leased to nobody")
    else:
        demand(task.lease_until is None, "I7", f"{task.status} with a lease")
        closed = owner is None or (row.ended is not None and row.ended[0] == owner.attempt)
        demand(closed, "I6", "the latest attempt never ended")
    demand((task.finished_at is not None) == (task.status in TERMINAL), "I11", "finished_at")
    demand(0 <= task.tries <= task.max_attempts, "I15", f"{task.tries} tries")
    demand(task.attempt <= ATTEMPT_CAP and row.free <= FREE_ENDS, "I15", "a loop is free")
    if task.status is Status.PENDING:
        claimable = task.tries < task.max_attempts and task.attempt < ATTEMPT_CAP
        demand(claimable, "I15", "queued though no try is left")


def booked(row: Row, command: Command, made: Change, *, audited: bool) -> Row:
    """The row after the statement `change`, with the checker's own books kept."""
    task = altered(made.task, last_error=None, error_class=None)
    end = made.end
    asked = isinstance(command, c.Cancel) and task.status in LEASED
    free, mark = row.free, row.mark
    if end is not None and end.outcome is not Outcome.PAUSED:
        given_back = task.tries < row.task.tries
        in_a_row = 1 if task.checkpoint_seq > mark else free + 1
        free, mark = (in_a_row if given_back else 0), task.checkpoint_seq
    return Row(
        task=task,
        seq=row.seq + audited,
        told=made.event.new or row.told if audited else row.told,
        owner=row.owner,
        ended=row.ended if end is None else (end.attempt, end.outcome),
        results=row.results + isinstance(command, c.Complete),
        free=0 if isinstance(command, c.Retry) else free,
        mark=mark,
        cancelled=(row.cancelled or asked) and task.status in LEASED,
    )


_PASSES = (
    "lease_until next_attempt_at resume_at wait_until run_at due_at cancel_requested_at"
    " pause_requested_at hung_warned_at progress_at"
).split()
_LONG_AGO = NOW - 3 * STEP


def aged(task: Task) -> Task:
    """The task one step later. What is long past is all equally past."""
    if task.status in TERMINAL:
        return task
    names = _PASSES + ["started_at"] * (task.watch_s is not None)
    names += ["created_at"] * (task.queue_ttl_s is not None)
    times = [(name, getattr(task, name)) for name in names]
    return altered(task, **{name: max(at - STEP, _LONG_AGO) for name, at in times if at})


def put(items: tuple[T, ...], index: int, item: T) -> tuple[T, ...]:
    return (*items[:index], item, *items[index + 1 :])


Label = tuple[str, ...]
Move = tuple[Label, Callable[[], World]]


class Checker:
    """The moves of a setup under some rules. Rows are shared, and each is checked once."""

    def __init__(self, setup: Setup, rules: Rules) -> None:
        self.setup = setup
        self.rules = rules
        self.apply = cache(self._apply)
        self.claimed = cache(self._claimed)
        self.promoted = cache(self._promoted)
        self.later = cache(self._later)
        self.check_ends = cache(self._check_ends)

    def moves(self, world: World) -> Iterator[Move]:
        """Everything that can happen next."""
        yield ("time passes",), partial(self._tick, world)
        for index, worker in enumerate(world.workers):
            yield from self._worker_moves(world, index, worker)
        for message in world.mail:
            yield from self._mail_moves(world, message)
        for index, row in enumerate(world.rows):
            yield from self._row_moves(world, index, row)
        for index, read in enumerate(world.reads):
            if read is not None:
                label = (f"c{index + 1}", "writes", "expire", _name(read))
                yield label, partial(self._write, world, index, read)

    def _worker_moves(self, world: World, index: int, worker: Worker) -> Iterator[Move]:
        name, fence = f"w{index + 1}", worker.fence
        if fence is None:
            yield from self._claim_moves(world, index, name)
            return
        task = world.rows[TASKS[fence.task]].task
        if worker.phase == "asking":
            yield (name, "asks what it claimed"), partial(self._recover, world, index, task)
        else:
            yield (name, "heartbeats", _name(fence)), partial(self._beat, world, index, fence)
        if worker.phase == "held":
            for kind in self._sayable(task):
                said = Message(kind, fence)
                yield (name, "sends", kind, _name(fence)), partial(self._send, world, index, said)
            if task.checkpoint_seq < self.setup.checkpoints:
                yield (name, "saves", _name(fence)), partial(self._save, world, fence)
        if world.faults:
            yield (name, "crashes"), partial(self._crash, world, index)

    def _claim_moves(self, world: World, index: int, name: str) -> Iterator[Move]:
        for place, row in enumerate(world.rows):
            if row.task.status is not Status.PENDING:
                continue
            for status in (Status.RUNNING, Status.ASSIGNED)[: 1 + self.setup.push]:
                for lost in range(1 + (world.faults > 0)):
                    label = (name, "claims", _name(row.task), status, "unheard" * lost)
                    yield label, partial(self._claim, world, index, place, status, lost)

    def _sayable(self, task: Task) -> Iterator[str]:
        yield from self.setup.messages
        if task.status is Status.ASSIGNED:
            yield "begin"
        if task.cancel_requested_at is not None:
            yield "confirm cancel"
        if task.pause_requested_at is not None:
            yield "confirm pause"

    def _mail_moves(self, world: World, message: Message) -> Iterator[Move]:
        label = (message.kind, _name(message.fence), "arrives")
        yield label, partial(self._arrive, world, message, 0)
        if world.faults and any(worker.fence == message.fence for worker in world.workers):
            yield (*label, "unheard"), partial(self._arrive, world, message, 1)

    def _row_moves(self, world: World, index: int, row: Row) -> Iterator[Move]:
        task = row.task
        if world.orders:
            for name in self.setup.operator:
                label = ("operator", name, _name(task))
                yield label, partial(self._order, world, index, _ASKS[name])
        if task.due_at is not None and task.due_at <= NOW:
            yield ("c1", "promotes", _name(task)), partial(self._promote, world, index)
        if task.status not in LEASED:
            return
        if task.worker not in map(_process, range(len(world.workers)), world.workers):
            label = ("supervisor", "expires", _name(task))
            yield label, partial(self._ask, world, index, c.Expire(seen_dead=True))
        if task.lease_until is not None and task.lease_until < NOW:
            yield from self._reaper_moves(world, index, task)
        if world.faults and row.owner is not None:
            for fence in (
                Fence(task.id, row.owner.attempt, "guessed"),
                Fence(task.id, row.owner.attempt - 1, row.owner.token),
            ):
                label = ("forged complete", _name(fence), "arrives")
                yield label, partial(self._forge, world, Message("complete", fence))

    def _reaper_moves(self, world: World, index: int, task: Task) -> Iterator[Move]:
        if self.rules.locked:
            yield ("c1", "expires", _name(task)), partial(self._ask, world, index, c.Expire())
            return
        for place, read in enumerate(world.reads):
            if read is None:
                label = (f"c{place + 1}", "reads", _name(task))
                yield label, partial(_with, world, reads=put(world.reads, place, task))

    def _tick(self, world: World) -> World:
        rows = tuple(map(self.later, world.rows))
        return _with(world, rows=rows, reads=tuple(read and aged(read) for read in world.reads))

    def _claim(self, world: World, index: int, place: int, status: Status, lost: int) -> World:
        process = _process(index, world.workers[index])
        row = self.claimed(world.rows[place], UUID(int=100 + index), process, status)
        if row is world.rows[place]:
            return world
        worker = _with(world.workers[index], phase="asking" if lost else "held", fence=row.owner)
        return _with(
            world,
            rows=put(world.rows, place, row),
            workers=put(world.workers, index, worker),
            faults=world.faults - lost,
        )

    def _recover(self, world: World, index: int, task: Task) -> World:
        fence = world.workers[index].fence
        held = fence is not None and _owns(task, fence)
        return self._turned(world, index, "held" if held else "idle")

    def _turned(self, world: World, index: int, phase: str) -> World:
        worker = world.workers[index]
        fence = None if phase == "idle" else worker.fence
        after = _with(worker, phase=phase, fence=fence)
        return _with(world, workers=put(world.workers, index, after))

    def _send(self, world: World, index: int, message: Message) -> World:
        return _with(self._turned(world, index, "sent"), mail=world.mail | {message})

    def _beat(self, world: World, index: int, fence: Fence) -> World:
        place = TASKS[fence.task]
        row = world.rows[place]
        renewed = self.rules.heartbeat(row.task, fence)
        if renewed is None:
            return self._turned(world, index, "idle")
        mine = row.task.status in LEASED and fence == row.owner
        demand(mine, "I7", "a heartbeat renewed a lease that was lost")
        return _with(world, rows=put(world.rows, place, _with(row, task=renewed)))

    def _save(self, world: World, fence: Fence) -> World:
        place = TASKS[fence.task]
        row = world.rows[place]
        saved = self.rules.checkpoint(row.task, fence)
        if saved is None:
            return world
        demand(row.task.status in LEASED and fence == row.owner, "I3", "a stale checkpoint")
        demand(saved.checkpoint_seq > row.task.checkpoint_seq, "I3", "a checkpoint went back")
        demand(not row.cancelled, "I16", "a checkpoint after the cancel request")
        return _with(world, rows=put(world.rows, place, _with(row, task=saved)))

    def _crash(self, world: World, index: int) -> World:
        fresh = Worker(life=world.workers[index].life + 1)
        return _with(world, workers=put(world.workers, index, fresh), faults=world.faults - 1)

    def _arrive(self, world: World, message: Message, lost: int) -> World:
        place = TASKS[message.fence.task]
        row, answer = self.apply(world.rows[place], message)
        after = _with(world, rows=put(world.rows, place, row), faults=world.faults - lost)
        if lost:
            return after
        after = _with(after, mail=world.mail - {message})
        for index, worker in enumerate(world.workers):
            if worker.fence == message.fence and worker.phase == "sent":
                over = answer in ("accepted", "repeated", "lease_lost")
                goes_on = message.kind == "begin" and answer != "lease_lost"
                return self._turned(after, index, "idle" if over and not goes_on else "held")
        return after

    def _forge(self, world: World, message: Message) -> World:
        return self._arrive(_with(world, faults=world.faults - 1), message, 0)

    def _ask(self, world: World, index: int, command: Command) -> World:
        row, _ = self.apply(world.rows[index], command)
        return _with(world, rows=put(world.rows, index, row))

    def _order(self, world: World, index: int, command: Command) -> World:
        return self._ask(_with(world, orders=world.orders - 1), index, command)

    def _promote(self, world: World, index: int) -> World:
        return _with(world, rows=put(world.rows, index, self.promoted(world.rows[index])))

    def _write(self, world: World, index: int, read: Task) -> World:
        place = TASKS[read.id]
        row = world.rows[place]
        after = _with(world, reads=put(world.reads, index, None))
        if not self.rules.unchanged(read, row.task):
            return after
        live = row.task.lease_until is not None and row.task.lease_until >= NOW
        demand(not live, "I7", "a lease was reaped after its renewal")
        row, _ = self._decided(row, c.Expire(), read)
        return _with(after, rows=put(world.rows, place, row))

    def _apply(self, row: Row, asked: Message | Command) -> tuple[Row, str]:
        """The row after a command, and the answer to it."""
        command = _SAYS[asked.kind](asked.fence) if isinstance(asked, Message) else asked
        return self._decided(row, command, row.task)

    def _decided(self, row: Row, command: Command, task: Task) -> tuple[Row, str]:
        try:
            made = self.rules.decide(task, command, MOMENT)
        except Conflict as refusal:
            return row, refusal.code
        if made is None:
            self._check_repeated(row, command)
            return row, "repeated"
        check_change(row, command, made)
        after = booked(row, command, made, audited=self.rules.audited(made))
        check_row(after)
        return after, "accepted"

    def _check_repeated(self, row: Row, command: Command) -> None:
        assert isinstance(command, Fenced)
        demand(command.fence == row.owner, "I6", "a stranger was answered like the owner")
        if not isinstance(command, c.Begin):
            so = row.ended is not None and row.ended[0] == command.fence.attempt
            so = so and row.ended is not None and row.ended[1] in _ENDS_AS[type(command)]
            demand(so, "I6", f"{command.name} was answered as accepted, which it was not")

    def _claimed(self, row: Row, agent: UUID, process: str, status: Status) -> Row:
        token = f"{process}.{row.task.version}"
        task = self.rules.claim(row.task, agent, process, token, status)
        if task is None:
            return row
        demand(row.task.status is Status.PENDING, "I11", f"claimed from {row.task.status}")
        demand(task.attempt == row.task.attempt + 1, "I15", "a claim without a new number")
        owner = Fence(task.id, task.attempt, token)
        after = _with(row, task=task, seq=row.seq + 1, told=status, owner=owner)
        check_row(after)
        return after

    def _promoted(self, row: Row) -> Row:
        command = self.rules.on_due(row.task, MOMENT)
        after = row if command is None else self.apply(row, command)[0]
        if after is not row:
            return after
        return _with(row, task=altered(row.task, due_at=due_at(row.task)))

    def _later(self, row: Row) -> Row:
        return _with(row, task=aged(row.task))

    def _check_ends(self, row: Row) -> None:
        """Without further faults, with its worker gone, the task ends."""
        start = row.task.status
        for _ in range(HEALED_WITHIN):
            if row.task.status in TERMINAL:
                return
            row = self._healthier(row)
        raise Violation("I24", f"{start} never ends, at last {row.task.status}")

    def _healthier(self, row: Row) -> Row:
        task = row.task
        if task.status is Status.PAUSED:
            return self.apply(row, c.Resume())[0]
        if task.status is Status.PENDING:
            taken = self.claimed(row, UUID(int=99), "healer", Status.RUNNING)
            if taken is row or taken.owner is None:
                return row
            return self.apply(taken, Message("complete", taken.owner))[0]
        if task.status in LEASED and task.lease_until is not None and task.lease_until < NOW:
            return self.apply(row, c.Expire())[0]
        due = task.due_at is not None and task.due_at <= NOW
        promoted = self.promoted(row) if due else row
        return self.later(row) if promoted.task.status is task.status else promoted


def _with(item: T, **changes: object) -> T:
    return msgspec.structs.replace(item, **changes)


def _name(thing: Task | Fence) -> str:
    letter = "ab"[TASKS[thing.id if isinstance(thing, Task) else thing.task]]
    return f"{letter}/{thing.attempt}"


def _process(index: int, worker: Worker) -> str:
    return f"w{index + 1}.{worker.life}"


class Report(msgspec.Struct, frozen=True):
    """What an exploration saw, and the shortest way to the first violation, if there is one."""

    states: int
    steps: int
    violation: Violation | None = None
    trace: tuple[str, ...] = ()


def explore(setup: Setup, rules: Rules | None = None) -> Report:
    """Visit every state that can be reached, nearest first, up to the first violation."""
    checker = Checker(setup, rules or Rules())
    came: dict[World, tuple[World, Label] | None] = {setup.start: None}
    queue = deque([setup.start])
    steps = 0
    while queue:
        world = queue.popleft()
        for label, effect in checker.moves(world):
            steps += 1
            try:
                after = effect()
                if after in came:
                    continue
                for row in after.rows:
                    checker.check_ends(row)
            except (Violation, AssertionError) as error:
                broken = error if isinstance(error, Violation) else Violation("assert", repr(error))
                return Report(len(came), steps, broken, _trace(came, world, label))
            came[after] = (world, label)
            queue.append(after)
    return Report(len(came), steps)


def _trace(
    came: dict[World, tuple[World, Label] | None], world: World, last: Label
) -> tuple[str, ...]:
    labels = [last]
    before = came[world]
    while before is not None:
        world, label = before
        labels.append(label)
        before = came[world]
    return tuple(" ".join(filter(None, label)) for label in reversed(labels))
