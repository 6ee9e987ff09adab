"""Shared by all use cases: store, group commit, hints, lanes; applies one command to a task."""

from collections.abc import Callable, Iterable
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, TypeVar
from uuid import UUID

import msgspec

from tenuto.broker.protocol import Wakeups
from tenuto.clock import Clock
from tenuto.crash_points import crash_point
from tenuto.engine.agents.escalation import escalate, failed_for_good
from tenuto.engine.agents.lanes import LaneCache
from tenuto.engine.agents.subtask_tree import (
    SpawnLimits,
    close_inbox_statement,
    close_open_questions,
    is_cancel,
)
from tenuto.engine.flows.advance import Cascade
from tenuto.engine.flows.chains import ChainedCompletion, ClaimSnapshot, plan_chained_completion
from tenuto.engine.flows.outcomes import FinishedTask
from tenuto.engine.flows.plans import PlanCache
from tenuto.engine.flows.rows import MAX_RANK_STEPS
from tenuto.engine.rows import CorruptRow, changes_statement, parse_task
from tenuto.model.errors import Conflict, NotFound, TenutoError
from tenuto.model.limits.budgets import HOLD as BUDGET
from tenuto.model.limits.concurrency import leaves_queue, needs_permit
from tenuto.model.tasks.commands import Command, DecisionContext, Retry, SetPriority
from tenuto.model.tasks.decide import decide
from tenuto.model.tasks.task import TERMINAL, Fence, Status, Task, TaskChange
from tenuto.model.tasks.transcript import MAX_KB
from tenuto.model.tenancy.redact import Redactor
from tenuto.store.batching import Answers, Batcher, WriteKind
from tenuto.store.protocol import Row, Script, Statement, Store

if TYPE_CHECKING:
    from tenuto.encryption_keys import KeyRing

    Keys = KeyRing | Callable[[], KeyRing] | None
    """A key ring, or a function that opens it."""

T = TypeVar("T")
_MAX_LANE_CLOSED = timedelta(days=7)
"""The longest time that providers take to reset a limit."""
FLOW_WORK_TOPIC = "flow"
"""The topic of hints about new deferred work of a flow."""
Decided = TaskChange | TenutoError | None
"""A change, a refusal, or `None` for a repeated message."""


class QueuedCommand(msgspec.Struct, frozen=True):
    """A command for one task, as it waits for its batch."""

    task: UUID
    workspace: UUID | None
    command: Command
    actor: str | None
    first: Callable[[], Script[object]] | None = None
    """Runs before the command in the same transaction, even if the command is refused."""


class CommandResult(msgspec.Struct, frozen=True):
    """The result of a command; one of the commands in a transaction has the cascade of all."""

    change: TaskChange | None
    cascade: Cascade | None = None


class KnownAttempt(msgspec.Struct):
    """What the claim of an attempt has read and its reports need."""

    number: int
    redactor: Redactor | None
    """Redacts the secrets that the attempt received; `None` if it received none."""
    snapshot: ClaimSnapshot | None = None
    """The row of a watched task until its completion; `None` for other tasks."""


class KnownAttempts:
    """Caches the attempts that this process claimed: the last `max_size`, one per task.

    Completing an attempt that is not cached costs one more read of the store.
    """

    def __init__(self, max_size: int = 20_000) -> None:
        self._max_size = max_size
        self._by_task: dict[int, KnownAttempt] = {}

    def add(self, task: UUID, attempt: KnownAttempt) -> None:
        """Caches an attempt unless the cached one is newer; evicts the oldest beyond the limit."""
        cached = self._by_task.get(task.int)
        if cached is not None and cached.number > attempt.number:
            return
        self._by_task[task.int] = attempt
        if len(self._by_task) > self._max_size:
            del self._by_task[next(iter(self._by_task))]

    def find(self, fence: Fence) -> KnownAttempt | None:
        """Returns the cached attempt of the fence's task and number, or `None`; no token check."""
        attempt = self._by_task.get(fence.task.int)
        return attempt if attempt is not None and attempt.number == fence.attempt else None

    def pop_snapshot(self, task: UUID) -> ClaimSnapshot | None:
        """Removes and returns the snapshot of the task's attempt; `None` if none is cached."""
        attempt = self._by_task.get(task.int)
        if attempt is None:
            return None
        snapshot, attempt.snapshot = attempt.snapshot, None
        return snapshot

    def evict(self, task: UUID) -> None:
        """Drops the task's attempt, if it is cached."""
        self._by_task.pop(task.int, None)


class Core:
    """The shared dependencies of an engine's use cases. A whole process can share one."""

    def __init__(self, store: Store, wakeups: Wakeups, key_ring: "Keys" = None) -> None:
        self.store = store
        self.clock: Clock = store.clock
        self.wakeups = wakeups
        self._key_ring = key_ring
        self.batcher = Batcher(store)
        self.lanes = LaneCache(store)
        self.plans = PlanCache()
        self.known_attempts = KnownAttempts()
        self.spawn_limits = SpawnLimits()
        """Limits of number and depth of subtasks."""
        self.transcript_kb = MAX_KB
        """Size limit of an attempt's transcript in KB."""
        self._command_kind = WriteKind("orders", self._command_script)

    @property
    def key_ring(self) -> "KeyRing | None":
        """The encryption keys, opened at first use; `None` if none are configured."""
        if callable(self._key_ring):
            self._key_ring = self._key_ring()
        return self._key_ring

    def now(self) -> datetime:
        """Returns the current time of the store's clock."""
        return self.clock.now()

    def decision_context(self, actor: str | None = None) -> DecisionContext:
        """Returns time, random number and actor for one decision of the model."""
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
        """Applies a command; returns the change, `None` for a repeat; a refusal keeps `first`.

        Runs with the follow-ups in a transaction that callers share, then sends hints. `first` runs
        before the command in the same transaction, even if the command is refused.
        """
        queued = QueuedCommand(task, workspace, command, actor, first)
        result: CommandResult = await self.batcher.submit(self._command_kind, queued, key=task.int)
        self.send_hints([result.change])
        if result.cascade is not None:
            self.send_cascade_hints(result.cascade)
        return result.change

    def new_cascade(self, actor: str | None, *, strict: bool = False) -> Cascade:
        """Returns an empty cascade, to collect and write the follow-ups of one transaction.

        If `strict`, a failed control task raises `ControlTaskFailed`.
        """
        return Cascade(self.clock, self.plans, actor, self.lanes.is_confirmed, strict=strict)

    def chained_completion(
        self, task: UUID, snapshot: ClaimSnapshot, actor: str | None
    ) -> ChainedCompletion | None:
        """Plans completion and next activation as one statement; `None` if a cascade is needed."""
        return plan_chained_completion(
            task, snapshot, self.clock, self.plans, self.lanes.is_confirmed, actor
        )

    async def run_with_cascade(
        self, script: Callable[[Cascade], Script[T]], actor: str | None
    ) -> T:
        """Runs a script and its follow-ups in one transaction, sends hints, returns its result."""

        def script_with_cascade() -> Script[tuple[T, Cascade]]:
            cascade = self.new_cascade(actor)
            result = yield from script(cascade)
            yield from cascade.run()
            return result, cascade

        crash_point("flow.before_commit")
        result, cascade = await self.store.transact(script_with_cascade)
        crash_point("flow.committed")
        self.send_cascade_hints(cascade)
        return result

    async def read(self, script: Script[T]) -> T:
        """Runs a read-only script, each statement in its own snapshot, and returns its result."""
        try:
            statement = next(script)
            while True:
                statement = script.send(await self.store.fetch(statement))
        except StopIteration as stop:
            result: T = stop.value
            return result

    def send_cascade_hints(self, cascade: Cascade) -> None:
        """Sends the hints of a committed cascade, and marks its lanes as confirmed in the cache."""
        self.send_hints(cascade.changes)
        self.lanes.mark_used(cascade.touched_lanes, self.now())
        topics = {f"lane:{lane}" for lane in cascade.lanes}
        if cascade.has_deferred_work:
            topics.add(FLOW_WORK_TOPIC)
        if topics:
            self.wakeups.notify(topics)

    def _command_script(self, queued: list[QueuedCommand]) -> Script[Answers]:
        """Decides the commands on locked tasks, writes changes; returns a result or error each."""
        for item in queued:
            if item.first is not None:
                yield from item.first()
        ids = sorted({item.task for item in queued})
        rows = yield Statement("tasks_locked", {"ids": ids})
        rows_by_id = {row["id"]: row for row in rows}
        answers: dict[int, Decided] = {}
        decided: list[tuple[TaskChange, Command]] = []
        finished: list[FinishedTask] = []
        for index, item in enumerate(queued):
            row = rows_by_id.get(item.task)
            if row is None or item.workspace not in (None, row["workspace"]):
                answers[index] = NotFound(f"no task {item.task}")
                continue
            try:
                answers[index] = self.try_decide(row, item.command, item.actor)
            except CorruptRow as error:
                yield self.quarantine_statement(error)
                text = (
                    f"task {item.task} has an invalid database row and was quarantined;"
                    ' see "orchestrate db check"'
                )
                answers[index] = Conflict(text, "corrupt")
                continue
            change = answers[index]
            if isinstance(change, TaskChange):
                decided.append((change, item.command))
                if row["watched"] and change.task.status in TERMINAL:
                    finished.append(FinishedTask(item.task, row["workspace"], change.task.status))
        cascade = yield from self.write_with_cascade(decided, finished, queued[0].actor)
        return _command_results([answers[index] for index in range(len(queued))], cascade)

    def write_with_cascade(
        self,
        decided: list[tuple[TaskChange, Command]],
        finished: list[FinishedTask],
        actor: str | None,
    ) -> Script[Cascade | None]:
        """Writes changes of locked tasks and follow-ups; returns the cascade, `None` if none ran.

        `finished` has the watched tasks that finished.
        """
        if decided:
            yield changes_statement(decided)
        for change, _ in decided:
            if change.task.hold == "quota" and change.task.resume_at is not None:
                yield _close_lane_statement(change)
        raised = [
            (change.task.id, change.task.rank)
            for change, command in decided
            if isinstance(command, SetPriority) and change.task.unmet > 0
        ]
        if raised:
            yield Statement("inherit_rank", {"most": MAX_RANK_STEPS}, {"eager": sorted(raised)})
        if failed := failed_for_good(decided):
            yield from escalate(self.clock, failed)
        yield from close_open_questions([change for change, _ in decided], self.now(), actor)
        # A retry closes the inbox entries of the task: the user has decided.
        for task in [change.task.id for change, command in decided if isinstance(command, Retry)]:
            yield close_inbox_statement(task, self.now(), actor, kept=BUDGET)
        engine_acts = [change.task for change, _ in decided if _awaits_engine(change.task)]
        cancelled = [
            change.task for change, _ in decided if is_cancel(change) and change.end is None
        ]
        permit_changes = [
            change for change, _ in decided if needs_permit(change) or leaves_queue(change)
        ]
        if not (finished or engine_acts or cancelled or permit_changes):
            return None
        cascade = self.new_cascade(actor)
        cascade.permits.record(permit_changes)
        cascade.queue_cancel_of_subtasks((task.id, task.workspace) for task in cancelled)
        cascade.queue_control_tasks((task.id, task.workspace) for task in engine_acts)
        yield from cascade.run(finished)
        return cascade

    def try_decide(self, row: Row, command: Command, actor: str | None) -> Decided:
        """Returns the change, `None` for a repeat, or a refusal; raises only `CorruptRow`."""
        task = parse_task(row)
        try:
            return decide(task, command, self.decision_context(actor))
        except TenutoError as error:
            return error
        except (TypeError, ValueError, OverflowError) as error:
            raise CorruptRow(task.id, f"invalid row: {error!r}") from error

    def quarantine_statement(self, corrupt: CorruptRow) -> Statement:
        """Returns the statement that quarantines a task with an invalid row."""
        return Statement(
            "quarantine",
            {"id": corrupt.task, "message": str(corrupt), "now": self.now(), "actor": "engine"},
        )

    def send_hints(self, changes: Iterable[TaskChange | None]) -> None:
        """Sends hints about tasks that became claimable, and about requests to workers."""
        topics = set()
        for change in changes:
            if change is None:
                continue
            if change.task.status is Status.PENDING:
                topics.add(f"lane:{change.task.lane}")
            elif change.event.kind in ("cancel_requested", "pause_requested", "hung_warned"):
                topics.add(f"worker:{change.task.worker}")
        if topics:
            self.wakeups.notify(topics)


def _command_results(answers: list[Decided], cascade: Cascade | None) -> Answers:
    """Returns a result or error per answer, in order; the first without error has the cascade."""
    results: list[Any] = []
    for answer in answers:
        if isinstance(answer, TenutoError):
            results.append(answer)
        else:
            results.append(CommandResult(answer, cascade))
            cascade = None
    return results


def _awaits_engine(task: Task) -> bool:
    """True if the task is a control task that the engine can run now."""
    return task.status is Status.WAITING and task.hold == "act" and task.unmet == 0


def _close_lane_statement(change: TaskChange) -> Statement:
    """Returns the statement that closes the task's lane until a provider's limit is reset.

    The lane is closed for at most `_MAX_LANE_CLOSED`; only the reporting task waits for a later
    time.
    """
    task, reason = change.task, f"provider limit: {change.event.message}"
    assert task.resume_at is not None
    until = min(task.resume_at, task.updated_at + _MAX_LANE_CLOSED)
    return Statement("lane_close", {"lane": task.lane, "until": until, "why": reason})
