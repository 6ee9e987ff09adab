"""What all use cases share: the store, group commit, hints, the lanes, and load-decide-write."""

from collections.abc import Callable, Iterable
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, TypeVar
from uuid import UUID

import msgspec

from tenuto.broker.protocol import Wakeups
from tenuto.clock import Clock
from tenuto.crash_points import crash_point
from tenuto.engine.agents.escalation import escalate, lost
from tenuto.engine.agents.lanes import LaneCache
from tenuto.engine.agents.subtask_tree import SpawnLimits, close_forsaken, closed, is_cancel
from tenuto.engine.flows.advance import Cascade
from tenuto.engine.flows.chains import ChainedCompletion, ClaimSnapshot, plan_chained_completion
from tenuto.engine.flows.outcomes import FinishedTask
from tenuto.engine.flows.plans import PlanCache
from tenuto.engine.flows.rows import RANKS_FAR
from tenuto.engine.rows import CorruptRow, task_of, write_changes
from tenuto.model.errors import Conflict, NotFound, TenutoError
from tenuto.model.limits.budgets import HOLD as BUDGET
from tenuto.model.limits.concurrency import needs_permit, steps_aside
from tenuto.model.tasks.commands import Command, DecisionContext, Retry, SetPriority
from tenuto.model.tasks.decide import decide
from tenuto.model.tasks.task import TERMINAL, Status, Task, TaskChange
from tenuto.model.tasks.transcript import MOST_KB
from tenuto.store.batching import Answers, Batcher, WriteKind
from tenuto.store.protocol import Row, Script, Statement, Store

if TYPE_CHECKING:
    from tenuto.encryption_keys import KeyRing

    Keys = KeyRing | Callable[[], KeyRing] | None
    """A vault, or how to open it."""

T = TypeVar("T")
_LONGEST_CLOSED = timedelta(days=7)
"""The longest that providers take to reset a limit."""
FLOW_WORK = "flow"
"""The topic of hints that something of a flow was left to do."""
Decided = TaskChange | TenutoError | None
"""A change, a refusal, or `None` for a repeated message."""


class QueuedCommand(msgspec.Struct, frozen=True):
    """A command for one task, as it waits for its batch."""

    task: UUID
    workspace: UUID | None
    command: Command
    actor: str | None
    first: Callable[[], Script[object]] | None = None
    """What is written before, in the same transaction, whatever becomes of the command."""


class CommandResult(msgspec.Struct, frozen=True):
    """What an order came to; one of those that share a transaction tells what followed."""

    change: TaskChange | None
    cascade: Cascade | None = None


class ClaimSnapshotCache:
    """How the last so many tasks stand; a forgotten one costs a look at the row."""

    def __init__(self, most: int = 20_000) -> None:
        self._most = most
        self._known: dict[int, ClaimSnapshot] = {}

    def add(self, task: UUID, standing: ClaimSnapshot) -> None:
        self._known[task.int] = standing
        if len(self._known) > self._most:
            del self._known[next(iter(self._known))]

    def take(self, task: UUID) -> ClaimSnapshot | None:
        """How the task stands, if it is among them; it is forgotten."""
        return self._known.pop(task.int, None) if self._known else None


class Core:
    """One engine's means. Everything in a process may share it."""

    def __init__(self, store: Store, wakeups: Wakeups, vault: "Keys" = None) -> None:
        self.store = store
        self.wakeups = wakeups
        self._vault = vault
        self.batcher = Batcher(store)
        self.lanes = LaneCache(store)
        self.plans = PlanCache()
        self.watched = ClaimSnapshotCache()
        """Tasks that were claimed here and whose ends are watched: worth knowing beforehand."""
        self.tree = SpawnLimits()
        """How many tasks attempts may make, and how deep."""
        self.transcript_kb = MOST_KB
        """How much of what an attempt says is kept."""
        self._orders = WriteKind("orders", self._order_script)

    @property
    def clock(self) -> Clock:
        return self.store.clock

    @property
    def vault(self) -> "KeyRing | None":
        """The keys of secrets, opened when they are first needed."""
        if callable(self._vault):
            self._vault = self._vault()
        return self._vault

    def now(self) -> datetime:
        return self.clock.now()

    def moment(self, actor: str | None = None) -> DecisionContext:
        return DecisionContext(self.clock.now(), self.clock.random(), actor)

    async def apply_command(
        self,
        task: UUID,
        command: Command,
        *,
        workspace: UUID | None = None,
        actor: str | None = None,
        first: Callable[[], Script[object]] | None = None,
    ) -> TaskChange | None:
        """Apply a command to a task: load, decide, write, in a shared transaction."""
        item = QueuedCommand(task, workspace, command, actor, first)
        done: CommandResult = await self.batcher.submit(self._orders, item, key=task.int)
        self.send_hints([done.change])
        if done.cascade is not None:
            self.announce_cascade(done.cascade)
        return done.change

    def cascade(self, actor: str | None, *, strict: bool = False) -> Cascade:
        """What follows from ends, for one transaction."""
        return Cascade(self.clock, self.plans, actor, self.lanes.is_fresh, strict=strict)

    def link(self, task: UUID, at: ClaimSnapshot, actor: str | None) -> ChainedCompletion | None:
        """What plainly follows from a task's completion, if anything does."""
        return plan_chained_completion(task, at, self.clock, self.plans, self.lanes.is_fresh, actor)

    async def run_with_cascade(
        self, script: Callable[[Cascade], Script[T]], actor: str | None
    ) -> T:
        """Run a script and all that follows from it, then hint at what came of it."""

        def whole() -> Script[tuple[T, Cascade]]:
            cascade = self.cascade(actor)
            answer = yield from script(cascade)
            yield from cascade.run()
            return answer, cascade

        crash_point("flow.before_commit")
        answer, cascade = await self.store.transact(whole)
        crash_point("flow.committed")
        self.announce_cascade(cascade)
        return answer

    async def read(self, script: Script[T]) -> T:
        """Run a script that only reads, each statement in a snapshot of its own."""
        try:
            statement = next(script)
            while True:
                statement = script.send(await self.store.fetch(statement))
        except StopIteration as stop:
            result: T = stop.value
            return result

    def announce_cascade(self, cascade: Cascade) -> None:
        """Hint at what a cascade made claimable, asked of workers, or left to do."""
        self.send_hints(cascade.changes)
        self.lanes.mark_used(cascade.touched, self.now())
        topics = {f"lane:{lane}" for lane in cascade.lanes}
        if cascade.unfinished:
            topics.add(FLOW_WORK)
        if topics:
            self.wakeups.announce(topics)

    def _order_script(self, orders: list[QueuedCommand]) -> Script[Answers]:
        for order in orders:
            if order.first is not None:
                yield from order.first()
        ids = sorted({order.task for order in orders})
        rows = yield Statement("tasks_locked", {"ids": ids})
        found = {row["id"]: row for row in rows}
        answers: dict[int, Decided] = {}
        decided: list[tuple[TaskChange, Command]] = []
        ended: list[FinishedTask] = []
        for index, order in enumerate(orders):
            row = found.get(order.task)
            if row is None or order.workspace not in (None, row["workspace"]):
                answers[index] = NotFound(f"no task {order.task}")
                continue
            try:
                answers[index] = self.try_decide(row, order.command, order.actor)
            except CorruptRow as error:
                yield self.quarantine(error)
                answers[index] = Conflict(f"the row of task {order.task} is unreadable", "corrupt")
                continue
            change = answers[index]
            if isinstance(change, TaskChange):
                decided.append((change, order.command))
                if row["watched"] and change.task.status in TERMINAL:
                    ended.append(FinishedTask(order.task, row["workspace"], change.task.status))
        cascade = yield from self.write_with_cascade(decided, ended, orders[0].actor)
        return _told([answers[index] for index in range(len(orders))], cascade)

    def write_with_cascade(
        self,
        decided: list[tuple[TaskChange, Command]],
        ended: list[FinishedTask],
        actor: str | None,
    ) -> Script[Cascade | None]:
        """Write changes and whatever goes with them; what follows from ends, if anything does."""
        if decided:
            yield write_changes(decided)
        for change, _ in decided:
            if change.task.hold == "quota" and change.task.resume_at is not None:
                yield _close_lane(change)
        pulled = [
            (change.task.id, change.task.rank)
            for change, command in decided
            if isinstance(command, SetPriority) and change.task.unmet > 0
        ]
        if pulled:
            yield Statement("inherit_rank", {"most": RANKS_FAR}, {"eager": sorted(pulled)})
        if bad := lost(decided):
            yield from escalate(self.clock, bad)
        yield from close_forsaken([change for change, _ in decided], self.now(), actor)
        # Whoever retries a task has seen to what was put to people for it.
        for task in [change.task.id for change, each in decided if isinstance(each, Retry)]:
            yield closed(task, self.now(), actor, kept=BUDGET)
        acts = [change.task for change, _ in decided if _acts(change.task)]
        gone = [change.task for change, _ in decided if is_cancel(change) and change.end is None]
        turning = [change for change, _ in decided if needs_permit(change) or steps_aside(change)]
        if not (ended or acts or gone or turning):
            return None
        cascade = self.cascade(actor)
        cascade.turns.note(turning)
        cascade.cancel_subtasks((task.id, task.workspace) for task in gone)
        cascade.act((task.id, task.workspace) for task in acts)
        yield from cascade.run(ended)
        return cascade

    def try_decide(self, row: Row, command: Command, actor: str | None) -> Decided:
        """What the model makes of a command on a row; a refusal is an answer here."""
        task = task_of(row)
        try:
            return decide(task, command, self.moment(actor))
        except TenutoError as error:
            return error
        except (TypeError, ValueError, OverflowError) as error:
            raise CorruptRow(task.id, f"unreadable row: {error!r}") from error

    def quarantine(self, corrupt: CorruptRow) -> Statement:
        return Statement(
            "quarantine",
            {"id": corrupt.task, "message": str(corrupt), "now": self.now(), "actor": "engine"},
        )

    def send_hints(self, changes: Iterable[TaskChange | None]) -> None:
        """Hint at what the changes made claimable, or asked of a worker."""
        topics = set()
        for change in changes:
            if change is None:
                continue
            if change.task.status is Status.PENDING:
                topics.add(f"lane:{change.task.lane}")
            elif change.event.kind in ("cancel_requested", "pause_requested", "hung_warned"):
                topics.add(f"worker:{change.task.worker}")
        if topics:
            self.wakeups.announce(topics)


def _told(answers: list[Decided], cascade: Cascade | None) -> Answers:
    """What each caller hears; one of those that were not refused tells what followed."""
    told: list[Any] = []
    for answer in answers:
        if isinstance(answer, TenutoError):
            told.append(answer)
        else:
            told.append(CommandResult(answer, cascade))
            cascade = None
    return told


def _acts(task: Task) -> bool:
    """Whether nothing but the engine's own deed is left to wait for."""
    return task.status is Status.WAITING and task.hold == "act" and task.unmet == 0


def _close_lane(change: TaskChange) -> Statement:
    """A provider's limit holds for every task of the lane, until its reset.

    What one attempt says of a time far ahead holds for its own task alone.
    """
    task, why = change.task, f"provider limit: {change.event.message}"
    assert task.resume_at is not None
    until = min(task.resume_at, task.updated_at + _LONGEST_CLOSED)
    return Statement("lane_close", {"lane": task.lane, "until": until, "why": why})
