"""Every interleaving of a small world, breadth first, over the functions that decide in production.

The world: tasks as stored, workers whose messages arrive late, twice or never, coordinators, an
operator, and time in steps. What decides is handed in as `Rules`. Each step is checked against the
invariants of the design, and from every stored task a world without further faults must end it.

Time is relative: the clock stands still and a step moves every instant of a row into the past, so
that states which differ only by when they happened are one state.
"""

from collections import deque
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import cache, partial
from itertools import compress, product
from typing import Any, Literal, TypeVar
from uuid import UUID

import msgspec
from tests.proof.planted_model import NOW, Rules, Write, owns

from tenuto.engine.tasks.maintenance import RECHECK_AFTER
from tenuto.model.errors import Conflict
from tenuto.model.tasks import commands as c
from tenuto.model.tasks.changes import replace_fields
from tenuto.model.tasks.commands import AttemptCommand, Command, DecisionContext, Failure
from tenuto.model.tasks.retry import ATTEMPT_CAP, FREE_ENDS, ErrorClass
from tenuto.model.tasks.task import (
    LEASED,
    TERMINAL,
    TRANSITIONS,
    Fence,
    Outcome,
    Status,
    Task,
    TaskChange,
)
from tenuto.model.tasks.task import next_due_at as timer_of

T = TypeVar("T")
S = TypeVar("S", bound=msgspec.Struct)

MOMENT = DecisionContext(NOW)
STEP = timedelta(seconds=20)
LONG_AGO = NOW - timedelta(hours=1)
TASKS = {UUID(int=1): 0, UUID(int=2): 1}
"""The ids in use, and where their rows stand in a world."""
HEALED_WITHIN = 60

INVARIANTS = {
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

    def __init__(self, invariant: str, subject: str) -> None:
        super().__init__(f"{invariant}: {subject}")
        self.invariant = invariant


def demand(holds: bool, invariant: str, subject: str) -> None:
    if not holds:
        raise Violation(invariant, subject)


class Row(msgspec.Struct, frozen=True, cache_hash=True):
    """A task as stored, and what the checker itself has seen of it.

    `told`: number and new status of the latest audit event. `owner`: the fence of the latest claim.
    `ended`: the latest attempt that ended, and how. `free`: ends in a row that cost no try, and the
    checkpoint at the last of them. `cancelled`: a cancel of the present attempt was accepted.
    """

    task: Task
    told: tuple[int, Status]
    owner: Fence | None = None
    ended: tuple[int, Outcome] | None = None
    results: int = 0
    free: tuple[int, int] = (0, 0)
    cancelled: bool = False


class Worker(msgspec.Struct, frozen=True, cache_hash=True):
    """`asking`: its claim's answer was lost. `sent`: it waits for the answer to a message."""

    phase: Literal["idle", "asking", "held", "sent"] = "idle"
    fence: Fence | None = None
    life: int = 0


Message = tuple[str, Fence]
"""What an attempt says; it may arrive at any later time."""


class World(msgspec.Struct, frozen=True, cache_hash=True, kw_only=True):
    """One state. `faults` and `orders`: what may still go wrong, and be asked by the operator.

    The last four never change: what attempts say, what the operator asks, whether tasks are also
    pushed, how many checkpoints a task gets.
    """

    rows: tuple[Row, ...]
    workers: tuple[Worker, ...] = (Worker(), Worker(), Worker())
    mail: tuple[Message, ...] = ()
    reads: tuple[Task | None, ...] = (None, None)
    """What each coordinator has read and not yet acted on; nothing when it holds a lock."""
    faults: int = 0
    orders: int = 0
    messages: tuple[str, ...] = ("complete",)
    operator: tuple[str, ...] = ()
    push: bool = False
    checkpoints: int = 0


_REPORTS: dict[str, Callable[..., AttemptCommand]] = {
    "begin": partial(c.Begin, session_key="s"),
    "complete": c.Complete,
    "fail": partial(c.Fail, failure=Failure(message="broke")),
    "fail for good": partial(c.Fail, failure=Failure(message="", error_class=ErrorClass.SYNTAX)),
    "rate limit": partial(c.Fail, failure=Failure(message="", error_class=ErrorClass.RATE_LIMIT)),
    "not started": partial(c.NotStarted, failure=Failure(message="no room")),
    "time out": c.TimedOut,
    "park": partial(c.Park, hold="quota", resume_at=NOW + STEP),
    "park with a limit": partial(c.Park, hold="children", wait_until=NOW + STEP),
    "release": c.Release,
    "confirm cancel": partial(c.ConfirmCancel, receipt={"state": "killed"}),
    "confirm pause": partial(c.ConfirmPause, receipt={"state": "killed"}),
}
_ASKS = {command.name: command for command in (c.Cancel(), c.Pause(), c.Resume(), c.Retry())}
_ENDS_AS = (
    {"fail": "FAILED PARKED TIMED_OUT", "complete": "COMPLETED", "park": "PARKED"}
    | {"not_started": "NOT_STARTED", "time_out": "TIMED_OUT", "release": "RELEASED"}
    | {"cancel": "CANCELLED", "pause": "PAUSED"}
)


def check_change(row: Row, command: Command, created: TaskChange) -> None:
    """Checks an accepted command; raises `Violation`."""
    before, after, end, name = row.task, created.task, created.end, command.name
    was_leased, is_leased = before.status in LEASED, after.status in LEASED
    if isinstance(command, c.Complete):
        demand(row.results == 0, "I5", "a second result was accepted")
    final = before.status in TERMINAL and not isinstance(command, c.Retry)
    demand(not final, "I12", f"{name} changed a task that is {before.status}")
    if isinstance(command, AttemptCommand):
        own = was_leased and command.fence == row.owner
        demand(own, "I5", f"{name} accepted from attempt {command.fence.attempt} without lease")
        allowed = not row.cancelled or isinstance(command, c.ConfirmCancel)
        demand(allowed, "I16", f"{name} accepted after the cancel request")
    if row.cancelled and not is_leased:
        demand(after.status is Status.CANCELLED, "I16", f"{name} made a cancel {after.status}")
    stays = was_leased and isinstance(command, c.Cancel | c.Pause | c.WarnHung)
    moved = (before.status, after.status) in TRANSITIONS[name]
    legal = stays if after.status is before.status else moved
    demand(legal, "I11", f"{name}: {before.status} to {after.status}")
    demand(after.version == before.version + 1, "I13", f"{name} did not raise the version by one")
    reported = (created.event.previous, created.event.new)
    demand(reported == (row.told[1], after.status), "I13", f"the event of {name} tells otherwise")
    demand(after.attempt == before.attempt, "I15", f"{name} changed the attempt's number")
    demand((end is not None) == (was_leased and not is_leased), "I6", f"{name}: no or a false end")
    if end is not None:
        fresh = row.ended is None or row.ended[0] < end.attempt
        demand(fresh and end.attempt == before.attempt, "I6", f"{name} ended another attempt")
        done = (end.outcome is Outcome.COMPLETED, after.status is Status.COMPLETED)
        demand(done[0] == done[1], "I6", f"{end.outcome} left the task {after.status}")


def check_row(row: Row) -> None:
    """Checks a stored task; raises `Violation`."""
    task, owner, status = row.task, row.owner, row.task.status
    demand(row.told == (task.version, status), "I13", f"the trail misses that it is {status}")
    if status in LEASED:
        own = owner is not None and owns(task, owner) and task.agent is not None
        demand(own and task.lease_until is not None, "I7", f"{status} under nobody's lease")
    else:
        demand(task.lease_until is None, "I7", f"{status} with a lease")
        closed = owner is None or (row.ended is not None and row.ended[0] == owner.attempt)
        demand(closed, "I6", f"{status} though the latest attempt never ended")
    demand((task.finished_at is not None) == (status in TERMINAL), "I11", f"{status}: finished_at")
    demand(0 <= task.tries <= task.max_attempts, "I15", f"{task.tries} tries")
    demand(task.attempt <= ATTEMPT_CAP, "I15", f"{task.attempt} attempts")
    demand(row.free[0] <= FREE_ENDS, "I15", f"{row.free[0]} free ends in a row")
    spent = task.tries >= task.max_attempts or task.attempt >= ATTEMPT_CAP
    demand(status is not Status.PENDING or not spent, "I15", "queued though no try is left")


def check_repeated(row: Row, command: Command) -> None:
    """Checks a command that is answered like an accepted one; raises `Violation`."""
    own = isinstance(command, AttemptCommand) and command.fence == row.owner
    demand(own, "I6", f"a stranger's {command.name} was answered like the owner's")
    outcome = row.ended[1] if row.ended and row.ended[0] == row.task.attempt else "none yet"
    so = isinstance(command, c.Begin) or outcome in _ENDS_AS[command.name].split()
    demand(so, "I6", f"{command.name} was answered as accepted, the end was {outcome}")


def booked(row: Row, command: Command, created: TaskChange, *, audited: bool) -> Row:
    """The row after the statement `change`, with the checker's own books kept."""
    task = replace_fields(created.task, last_error=None, error_class=None)
    end, leased = created.end, created.task.status in LEASED
    free = (0, 0) if isinstance(command, c.Retry) else row.free
    if end is not None and end.outcome is not Outcome.PAUSED:
        in_a_row = 1 if task.checkpoint_seq > free[1] else free[0] + 1
        free = (in_a_row if task.tries < row.task.tries else 0, task.checkpoint_seq)
    return Row(
        task=task,
        told=(row.told[0] + 1, created.event.new or row.told[1]) if audited else row.told,
        owner=row.owner,
        ended=row.ended if end is None else (end.attempt, end.outcome),
        results=row.results + isinstance(command, c.Complete),
        free=free,
        cancelled=leased and (row.cancelled or isinstance(command, c.Cancel)),
    )


_DEADLINES = "lease_until next_attempt_at resume_at wait_until due_at".split()
_STARTS = "run_at cancel_requested_at pause_requested_at hung_warned_at progress_at".split()
_RECENT = dict.fromkeys(_DEADLINES, NOW) | dict.fromkeys(_STARTS, NOW - 3 * STEP)
"""Down to when an instant matters; before, it is just long ago."""


def aged(task: Task) -> Task:
    """The task one step later."""
    if task.status in TERMINAL:
        return task
    since = {"started_at": task.watch_s, "created_at": task.queue_ttl_s}
    recent = _RECENT | {name: NOW - 3 * STEP for name, so in since.items() if so is not None}
    times = [(name, at) for name in recent if (at := getattr(task, name))]
    return replace_fields(task, **{n: at - STEP if at > recent[n] else LONG_AGO for n, at in times})


def changed(item: S, **changes: Any) -> S:
    return msgspec.structs.replace(item, **changes)


def put(items: tuple[T, ...], index: int, item: T) -> tuple[T, ...]:
    return (*items[:index], item, *items[index + 1 :])


def stored(world: World, row: Row, **changes: Any) -> World:
    return changed(world, rows=put(world.rows, TASKS[row.task.id], row), **changes)


def turned(world: World, index: int, phase: str, fence: Fence | None) -> World:
    """The world with one worker in another phase, in which it holds the fence unless idle."""
    held = None if phase == "idle" else fence
    worker = changed(world.workers[index], phase=phase, fence=held)
    return changed(world, workers=put(world.workers, index, worker))


def answers_of(task: Task) -> tuple[str, ...]:
    """Returns the reports that a task's owner can send besides the outcome of its run."""
    asked = (task.status is Status.ASSIGNED, task.cancel_requested_at, task.pause_requested_at)
    return tuple(compress(("begin", "confirm cancel", "confirm pause"), asked))


def process_of(index: int, worker: Worker) -> str:
    return f"w{index + 1}.{worker.life}"


def name_of(item: Task | Fence) -> str:
    return f"{'ab'[TASKS[item.id if isinstance(item, Task) else item.task]]}/{item.attempt}"


Move = tuple[str, World]


class Checker:
    """The moves of a world under some rules. What becomes of a row is worked out once."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.answers: set[str] = set()
        self.apply = cache(self._apply)
        self.claimed = cache(self._claimed)
        self.promoted = cache(self._promoted)
        self.later = cache(lambda row: changed(row, task=aged(row.task)))
        self.check_ends = cache(self._check_ends)

    def moves(self, world: World) -> Iterator[Move]:
        """Everything that can happen next."""
        reads = tuple(read and aged(read) for read in world.reads)
        yield "time passes", changed(world, rows=tuple(map(self.later, world.rows)), reads=reads)
        for index, worker in enumerate(world.workers):
            if worker.fence is None:
                yield from self._claims(world, index, worker)
            else:
                yield from self._works(world, index, worker, worker.fence)
        for message in world.mail:
            yield from self._arrivals(world, message)
        for row in world.rows:
            yield from self._controls(world, row)
            if row.task.status in LEASED:
                yield from self._expiries(world, row)
        for index, read in enumerate(world.reads):
            if read is not None:
                yield f"c{index + 1} writes to {name_of(read)}", self._write(world, index, read)

    def _claims(self, world: World, index: int, worker: Worker) -> Iterator[Move]:
        statuses = (Status.RUNNING, Status.ASSIGNED)[: 1 + world.push]
        losses = range(1 + (world.faults > 0))
        for row, status, lost in product(world.rows, statuses, losses):
            taken = self.claimed(row, index, process_of(index, worker), status)
            if taken == row:
                continue
            label = f"w{index + 1} claims {name_of(taken.task)} {status}" + " unheard" * lost
            after = stored(world, taken, faults=world.faults - lost)
            yield label, turned(after, index, "asking" if lost else "held", taken.owner)

    def _works(self, world: World, index: int, worker: Worker, fence: Fence) -> Iterator[Move]:
        name, row = f"w{index + 1}", world.rows[TASKS[fence.task]]
        if worker.phase == "asking":
            phase = "held" if owns(row.task, fence) else "idle"
            yield f"{name} asks again what it claimed", turned(world, index, phase, fence)
        else:
            beaten = self._touched(row, fence, self.rules.heartbeat)
            after = stored(world, beaten) if beaten else turned(world, index, "idle", fence)
            yield f"{name} heartbeats for {name_of(fence)}", after
        if worker.phase == "held":
            for kind in world.messages + answers_of(row.task):
                mail = {*world.mail, (kind, fence)}
                order = sorted(mail, key=lambda output: (output[0], name_of(output[1])))
                after = changed(turned(world, index, "sent", fence), mail=tuple(order))
                yield f"{name} sends {kind} of {name_of(fence)}", after
            if row.task.checkpoint_seq < world.checkpoints:
                saved = self._touched(row, fence, self.rules.checkpoint) or row
                yield f"{name} saves a checkpoint of {name_of(fence)}", stored(world, saved)
        if world.faults:
            workers = put(world.workers, index, Worker(life=worker.life + 1))
            yield f"{name} crashes", changed(world, workers=workers, faults=world.faults - 1)

    def _arrivals(self, world: World, message: Message) -> Iterator[Move]:
        kind, fence = message
        row, answer = self.apply(world.rows[TASKS[fence.task]], message)
        label = f"{kind} of {name_of(fence)} arrives"
        over = answer == "lease_lost" or (answer in ("accepted", "repeated") and kind != "begin")
        after = stored(world, row, mail=tuple(item for item in world.mail if item != message))
        for index, worker in enumerate(world.workers):
            if worker.fence == fence:
                after = turned(after, index, "idle" if over else "held", fence)
                if world.faults:
                    yield f"{label} unheard", stored(world, row, faults=world.faults - 1)
        yield label, after

    def _controls(self, world: World, row: Row) -> Iterator[Move]:
        task = row.task
        for name in world.operator if world.orders else ():
            asked = self.apply(row, _ASKS[name])[0]
            yield f"operator: {name} {name_of(task)}", stored(world, asked, orders=world.orders - 1)
        if task.due_at is not None and task.due_at <= NOW:
            yield f"c1 promotes {name_of(task)}", stored(world, self.promoted(row))

    def _expiries(self, world: World, row: Row) -> Iterator[Move]:
        task, owner = row.task, row.owner
        if task.worker not in [process_of(*item) for item in enumerate(world.workers)]:
            gone = self.apply(row, c.Expire(seen_dead=True))[0]
            yield f"supervisor saw the owner of {name_of(task)} die", stored(world, gone)
        if task.lease_until is not None and task.lease_until < NOW:
            if self.rules.locked:
                gone = self.apply(row, c.Expire())[0]
                yield f"c1 expires {name_of(task)}", stored(world, gone)
            for index, read in enumerate(() if self.rules.locked else world.reads):
                if read is None:
                    reads = put(world.reads, index, task)
                    yield f"c{index + 1} reads {name_of(task)}", changed(world, reads=reads)
        if world.faults and owner is not None:
            guessed = Fence(task.id, owner.attempt, "guessed")
            for fence in (guessed, Fence(task.id, owner.attempt - 1, owner.token)):
                forged = self.apply(row, ("complete", fence))[0]
                after = stored(world, forged, faults=world.faults - 1)
                yield f"forged complete of {name_of(fence)} arrives", after

    def _write(self, world: World, index: int, read: Task) -> World:
        row = world.rows[TASKS[read.id]]
        after = changed(world, reads=put(world.reads, index, None))
        if not self.rules.unchanged(read, row.task):
            return after
        live = row.task.lease_until is not None and row.task.lease_until >= NOW
        demand(not live, "I7", "a coordinator expired a lease after its renewal")
        return stored(after, self._decided(row, c.Expire(), read)[0])

    def _touched(self, row: Row, fence: Fence, write: Write) -> Row | None:
        """The row after a fenced write that is no transition, if it is accepted."""
        task = write(row.task, fence)
        if task is None:
            return None
        own = row.task.status in LEASED and fence == row.owner
        demand(own, "I5", f"a heartbeat or checkpoint of {name_of(fence)} without lease")
        saved = task.checkpoint_seq > row.task.checkpoint_seq
        demand(not (saved and row.cancelled), "I16", "a checkpoint after the cancel request")
        return changed(row, task=task)

    def _apply(self, row: Row, asked: Message | Command) -> tuple[Row, str]:
        """The row after a command, and the answer to it."""
        command = asked if isinstance(asked, Command) else _REPORTS[asked[0]](fence=asked[1])
        after, answer = self._decided(row, command, row.task)
        self.answers.add(f"{command.name} {answer}")
        return after, answer

    def _decided(self, row: Row, command: Command, task: Task) -> tuple[Row, str]:
        try:
            created = self.rules.decide(task, command, MOMENT)
        except Conflict as refusal:
            return row, refusal.code
        if created is None:
            check_repeated(row, command)
            return row, "repeated"
        check_change(row, command, created)
        after = booked(row, command, created, audited=self.rules.audited(created))
        check_row(after)
        return after, "accepted"

    def _claimed(self, row: Row, index: int, process: str, status: Status) -> Row:
        token = f"{process}.{row.task.version}"
        task = self.rules.claim(row.task, UUID(int=100 + index), process, token, status)
        if task is None:
            return row
        demand(row.task.status is Status.PENDING, "I11", f"claimed from {row.task.status}")
        counted = (task.attempt, task.tries) == (row.task.attempt + 1, row.task.tries + 1)
        demand(counted, "I15", "a claim without a new number or try")
        reported = (row.told[0] + 1, status)
        after = changed(row, task=task, told=reported, owner=Fence(task.id, task.attempt, token))
        check_row(after)
        return after

    def _promoted(self, row: Row) -> Row:
        command = self.rules.on_due(row.task, MOMENT)
        after = row if command is None else self.apply(row, command)[0]
        if after != row:
            return after
        timer = timer_of(row.task)
        due_at = None if timer is None else max(timer, NOW + RECHECK_AFTER)
        return changed(row, task=replace_fields(row.task, due_at=due_at))

    def _check_ends(self, row: Row) -> None:
        """Without further faults, and with its worker gone, the task ends; else `Violation`."""
        start = row.task.status
        for _ in range(HEALED_WITHIN):
            if row.task.status in TERMINAL:
                return
            row = self._healthier(row)
        raise Violation("I24", f"by repairs alone {start} never ends, at last {row.task.status}")

    def _healthier(self, row: Row) -> Row:
        task = row.task
        if task.status is Status.PAUSED:
            resumed, answer = self.apply(row, c.Resume())
            return self.apply(row, c.Cancel())[0] if answer == "attempts_used_up" else resumed
        if task.status is Status.PENDING:
            taken = self.claimed(row, 9, "healer", Status.RUNNING)
            if taken.owner is None or taken == row:
                return row
            return self.apply(taken, ("complete", taken.owner))[0]
        if task.status in LEASED and task.lease_until is not None and task.lease_until < NOW:
            return self.apply(row, c.Expire())[0]
        due = task.due_at is not None and task.due_at <= NOW
        promoted = self.promoted(row) if due else row
        return self.later(row) if promoted.task.status is task.status else promoted


class Report(msgspec.Struct, frozen=True):
    """What an exploration saw, and the shortest way to the first violation, if there is one."""

    states: int
    steps: int
    answers: frozenset[str]
    """Each command with each answer it got."""
    violation: Violation | None
    trace: tuple[str, ...]


def explore(start: World, rules: Rules | None = None) -> Report:
    """Visit every state that can be reached, nearest first, then demand that each can end well."""
    checker = Checker(rules or Rules())
    came: dict[World, Move | None] = {start: None}
    queue, world, steps = deque([start]), start, 0
    broken = None
    try:
        while queue:
            world = queue.popleft()
            for label, after in checker.moves(world):
                steps += 1
                if after not in came:
                    came[after] = (label, world)
                    queue.append(after)
        for world in came:
            for row in world.rows:
                checker.check_ends(row)
    except (Violation, AssertionError) as error:
        broken = error if isinstance(error, Violation) else Violation("assert", repr(error))
    trace = (*_path(came, world), str(broken)) if broken else ()
    return Report(len(came), steps, frozenset(checker.answers), broken, trace)


def _path(came: dict[World, Move | None], world: World) -> list[str]:
    labels = []
    while (before := came[world]) is not None:
        labels.append(before[0])
        world = before[1]
    return labels[::-1]
