"""The duties of a coordinator: expire, promote, archive, prune, relay, elect.

Each duty is bounded and idempotent, and any number of coordinators can run it at the same time.
"""

from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid5

import msgspec

from tenuto.clock import EPOCH
from tenuto.crash_points import crash_point
from tenuto.engine.agents.escalation import escalate, failed_for_good
from tenuto.engine.agents.subtask_tree import close_open_questions
from tenuto.engine.agents.subtasks import store_default_answers
from tenuto.engine.core import Core
from tenuto.engine.flows.advance import Cascade
from tenuto.engine.flows.outcomes import FinishedTask
from tenuto.engine.rows import CorruptRow, changes_statement, parse_task
from tenuto.model import bounds
from tenuto.model.errors import TenutoError
from tenuto.model.tasks import commands
from tenuto.model.tasks.commands import Command, DecisionContext
from tenuto.model.tasks.decide import decide, due_command
from tenuto.model.tasks.task import TERMINAL, Task, TaskChange, next_due_at
from tenuto.store.protocol import Row, Rows, Script, Statement

BATCH = 500
RECHECK_AFTER = timedelta(seconds=10)
ARCHIVE_AFTER = timedelta(days=7)
PAYLOAD_AFTER = timedelta(days=30)
AUDIT_AFTER = timedelta(days=365)
DELIVERY_AFTER = timedelta(days=30)
LANE_AFTER = timedelta(days=1)
STORED_RESPONSE_AFTER = timedelta(days=1)
WORKER_LOST_AFTER = timedelta(minutes=2)
WORKER_DELETE_AFTER = timedelta(days=1)

STANDBY_S = 90.0
"""Seconds for which a standby counts as alive after its last report."""
SYSTEM_WORKSPACE = UUID(int=0)
"""The workspace of data without a tenant: the events of coordinators."""

Sink = Callable[[Sequence[Row]], Awaitable[int | None]]
"""A subscriber. Returns how many of the events, from the first, it accepted; `None` means all."""


class CycleReport(msgspec.Struct, frozen=True, kw_only=True):
    """The report of a leader's last cycle: seconds, total and by duty, counts per duty, error."""

    seconds: float
    duties: dict[str, float] = {}
    counts: dict[str, int] = {}
    error: str | None = None


class Leadership(msgspec.Struct, frozen=True):
    """The current or last leader: holder, epoch, lease, and the report of its last cycle."""

    holder: str
    epoch: int
    until: datetime
    cycles: int = 0
    seen_at: datetime | None = None
    since: datetime | None = None
    cycle: CycleReport | None = None


class LeaseExemption(msgspec.Struct, frozen=True):
    """Time range in which expired leases are kept: live workers could not renew them.

    An attempt whose lease expires in the range is ended neither by expiry nor by a timer. Times
    after the range do not count yet, so a process that is suspended between reading the range and
    using it ends no attempt by mistake.
    """

    since: datetime
    until: datetime


EVERY_LEASE = LeaseExemption(EPOCH, datetime.max.replace(tzinfo=UTC))


class TaskMaintenance:
    """Runs a coordinator's duties. Each `*_once` runs one batch and returns its number of rows."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._next_workspace: UUID | None = None

    async def expire_once(
        self, actor: str, workspace: UUID | None = None, *, exempt: LeaseExemption | None = None
    ) -> int:
        """Ends up to `BATCH` attempts with an expired lease, except in `exempt`; returns how many.

        Without `workspace`, of all workspaces.
        """
        params = {"now": self._expiry_cutoff(exempt), "workspace": workspace, "most": BATCH}
        return await self._expire(Statement("leases_expired", params), actor)

    async def expire_shared(self, actor: str, *, exempt: LeaseExemption | None = None) -> int:
        """Ends attempts with an expired lease, an equal number per workspace; returns how many."""
        params = {"now": self._expiry_cutoff(exempt), "most": BATCH}
        return await self._expire(Statement("leases_expired_by_workspace", params), actor)

    def _expiry_cutoff(self, exempt: LeaseExemption | None) -> datetime:
        """Returns now, or `exempt.since` if earlier: leases expired before it count as lost."""
        now = self._core.now()
        return now if exempt is None else min(now, exempt.since)

    async def _expire(self, query: Statement, actor: str) -> int:
        """Ends the attempts of the tasks that the query returns; returns how many."""
        return await self._apply_to_each(query, actor, lambda _task, _now: commands.Expire())

    async def expire_worker(self, worker: str, actor: str) -> int:
        """Ends all attempts of a dead worker without waiting for their leases; returns how many."""
        leases = Statement("leases_of_worker", {"worker": worker, "most": BATCH})
        ended = 0
        # A dead worker claims no tasks, so each batch leaves fewer leases.
        while n := await self._apply_to_each(
            leases, actor, lambda _task, _now: commands.Expire(seen_dead=True)
        ):
            ended += n
        return ended

    async def promote_once(
        self, actor: str, workspace: UUID | None = None, *, exempt: LeaseExemption | None = None
    ) -> int:
        """Applies due timers (retry, start, TTL, hung) of a batch; returns tasks changed."""
        params = self._timer_params(exempt) | {"workspace": workspace, "most": BATCH}
        return await self._apply_to_each(Statement("tasks_due", params), actor, due_command)

    async def promote_shared(self, actor: str, *, exempt: LeaseExemption | None = None) -> int:
        """Applies due timers, an equal share of a batch per workspace; returns tasks changed.

        An index finds the first due tasks of each workspace, however many are due in others. This
        costs one index probe per workspace, so callers try a batch by time (`promote_once`) first.
        """
        timers = self._timer_params(exempt)
        workspace_params = timers | {"after": self._next_workspace, "most": BATCH}
        rows = await self._core.store.fetch(Statement("workspaces_due", workspace_params))
        # More workspaces than one batch can hold: the next call continues after this one.
        self._next_workspace = rows[-1]["id"] if len(rows) == BATCH else None
        if not rows:
            return 0
        params = timers | {"each": max(1, BATCH // len(rows))}
        due_tasks = Statement(
            "tasks_due_by_workspace", params, {"share": [(row["id"],) for row in rows]}
        )
        return await self._apply_to_each(due_tasks, actor, due_command)

    def _timer_params(self, exempt: LeaseExemption | None) -> dict[str, Any]:
        """Returns the query parameters: the time of due timers, and the exempt range of leases."""
        now = self._core.now()
        if exempt is None:
            return {"now": now, "spared_from": None, "spared_to": None}
        exempt_range = {"spared_from": exempt.since, "spared_to": exempt.until}
        return {"now": min(now, exempt.until)} | exempt_range

    async def _apply_to_each(
        self,
        query: Statement,
        actor: str,
        choose: Callable[[Task, DecisionContext], Command | None],
    ) -> int:
        """Applies chosen commands to a query's locked rows, sets later timers of the others.

        Runs in one transaction. Tasks without a command get a later timer; invalid rows are
        quarantined.
        """

        def script() -> Script[tuple[list[TaskChange], Cascade]]:
            rows = yield query
            decided: list[tuple[TaskChange, Command]] = []
            finished: list[FinishedTask] = []
            timers: list[tuple[UUID, datetime | None]] = []
            for row in rows:
                try:
                    change = self._decide(row, actor, choose)
                except CorruptRow as error:
                    yield self._core.quarantine_statement(error)
                    continue
                if change is None:
                    timers.append((row["id"], self._recheck_at(parse_task(row))))
                else:
                    decided.append(change)
                    task = change[0].task
                    if row["watched"] and task.status in TERMINAL:
                        finished.append(FinishedTask(task.id, task.workspace, task.status))
            if decided:
                yield changes_statement(decided)
            if timers:
                yield Statement("timer_set", rows={"timer": timers})
            if failed := failed_for_good(decided):
                yield from escalate(self._core.clock, failed)
            task_changes = [change for change, _ in decided]
            yield from close_open_questions(task_changes, self._core.now(), actor)
            if woken := [change.task for change, command in decided if _is_wait_timeout(command)]:
                yield from store_default_answers(self._core, woken)
            cascade = self._core.new_cascade(actor)
            yield from cascade.run(finished)
            return [change for change, _ in decided], cascade

        changes, cascade = await self._core.store.transact(script)
        self._core.send_hints(changes)
        self._core.send_cascade_hints(cascade)
        return len(changes)

    def _decide(
        self, row: Row, actor: str, choose: Callable[[Task, DecisionContext], Command | None]
    ) -> tuple[TaskChange, Command] | None:
        """Returns the decided change; `None` if `choose` has no command or the model refuses it."""
        task = parse_task(row)
        context = self._core.decision_context(actor)
        try:
            command = choose(task, context)
            if command is None:
                return None
            change = decide(task, command, context)
        except TenutoError:
            return None
        except (TypeError, ValueError, OverflowError) as error:
            raise CorruptRow(task.id, f"invalid row: {error!r}") from error
        return None if change is None else (change, command)

    def _recheck_at(self, task: Task) -> datetime | None:
        """Returns the task's next timer, or `RECHECK_AFTER` from now if later; `None` for none."""
        timer = next_due_at(task)
        return None if timer is None else max(timer, self._core.now() + RECHECK_AFTER)

    async def archive_once(self, actor: str) -> int:
        """Archives a batch of tasks that finished over `ARCHIVE_AFTER` ago; returns how many."""
        before = self._core.now() - ARCHIVE_AFTER
        rows = await self._core.store.fetch(
            Statement("archivable", {"before": before, "most": BATCH})
        )
        archived = 0
        for row in rows:
            try:
                await self._core.apply_command(row["id"], commands.Archive(), actor=actor)
            except TenutoError:
                continue
            archived += 1
        return archived

    async def prune_once(self) -> int:
        """Deletes old payloads, events and so on; marks stale workers LOST; returns how many."""
        now = self._core.now()
        statements = [
            Statement("prune_payload", {"before": now - PAYLOAD_AFTER, "most": BATCH}),
            Statement("prune_events", {"before": now - AUDIT_AFTER, "most": BATCH}),
            Statement("prune_other_events", {"before": now - AUDIT_AFTER, "most": BATCH}),
            Statement("deliveries_prune", {"before": now - DELIVERY_AFTER, "most": BATCH}),
            Statement("lane_prune", {"before": now - LANE_AFTER, "most": BATCH}),
            Statement("idempotency_prune", {"before": now - STORED_RESPONSE_AFTER}),
            Statement("workers_stale", {"before": now - WORKER_LOST_AFTER}),
            Statement("workers_prune", {"before": now - WORKER_DELETE_AFTER}),
        ]

        def script() -> Script[int]:
            n = 0
            for statement in statements:
                n += len((yield statement))
            return n

        return await self._core.store.for_maintenance().transact(script)

    async def confirm_gone_on_host(
        self, worker: str, host: str, may_run: Callable[[str, UUID], bool]
    ) -> int:
        """Records that sessions of unconfirmed attempts on this host are gone; returns how many.

        `may_run(worker, task)` returns True if a session of the task may still run.
        """
        params = {"worker": worker, "prefix": f"{host}:", "most": BATCH}
        rows = await self._core.store.fetch(Statement("attempts_unconfirmed", params))
        attempts = [
            (row["id"], row["attempt"]) for row in rows if not may_run(row["worker"], row["id"])
        ]
        if not attempts:
            return 0
        receipt = {"state": "swept", "how": "nothing of it runs on its host"}
        return await self.confirm_gone(attempts, receipt, worker)

    async def confirm_gone(
        self, attempts: Sequence[tuple[UUID, int]], receipt: dict[str, Any], actor: str | None
    ) -> int:
        """Records unconfirmed attempts among these (task, number) as gone; returns how many."""
        params = {
            "receipt": bounds.to_json_text("receipt", receipt),
            "actor": actor,
            "now": self._core.now(),
        }

        def script() -> Script[Rows]:
            rows: Rows = yield Statement("attempts_confirm_gone", params, {"swept": attempts})
            return rows

        return len(await self._core.store.transact_one(script))

    async def relay_once(
        self, subscriber: str, sink: Sink, limit: int = BATCH, *, errors: bool = False
    ) -> int:
        """Passes the next events to `sink`, at least once, in order; returns how many it accepted.

        Then moves the subscriber's cursor. With `errors`, the subscriber gets only events of level
        ERROR and above, from their own index.
        """
        params: dict[str, Any] = {"name": subscriber, "now": self._core.now()}

        def lock_cursor() -> Script[Row]:
            """Locks the subscriber's cursor, creates it if missing, and returns it."""
            rows = yield Statement("cursor_lock", {"name": subscriber})
            if not rows:
                yield Statement("cursor_insert", params)
                rows = yield Statement("cursor_lock", {"name": subscriber})
            return rows[0]

        cursor = await self._core.store.transact(lock_cursor)
        events = await self._core.store.fetch(
            Statement(
                "events_after",
                {
                    "xid": cursor["xid"],
                    "position": cursor["position"],
                    "most": limit,
                    "errors": errors or None,
                },
            )
        )
        if not events:
            return 0
        crash_point("relay.before_publish")
        events = events[: await sink(events)]
        crash_point("relay.published")
        last = {"xid": events[-1]["xid"], "position": events[-1]["position"]}

        def move_cursor() -> Script[None]:
            """Moves the cursor, unless another process has moved it meanwhile."""
            rows = yield Statement("cursor_lock", {"name": subscriber})
            if (rows[0]["xid"], rows[0]["position"]) == (cursor["xid"], cursor["position"]):
                yield Statement("cursor_move", params | last)

        await self._core.store.transact(move_cursor)
        crash_point("relay.moved")
        return len(events)

    async def acquire_leadership(
        self, name: str, holder: str, seconds: float, cycle: CycleReport | None = None
    ) -> Leadership | None:
        """Becomes or stays the leader for `seconds`; returns `None` if another process leads.

        `cycle` is the report of the last cycle; it is stored for status queries.
        """
        now = self._core.now()
        params = {
            "name": name,
            "holder": holder,
            "now": now,
            "until": now + timedelta(seconds=seconds),
            "data": None if cycle is None else msgspec.json.encode(cycle).decode(),
            "trail": uuid5(SYSTEM_WORKSPACE, name),
            "apart": SYSTEM_WORKSPACE,
        }

        def script() -> Script[Rows]:
            rows: Rows = yield Statement("leader_acquire", params)
            return rows

        rows = await self._core.store.transact_one(script)
        if not rows:
            return None
        row = rows[0]
        return Leadership(holder, row["epoch"], row["until"], since=row["led_at"])

    async def resign(self, name: str, holder: str) -> None:
        """Gives up leadership and the standby entry, so that a standby can lead at once."""
        params = {"name": name, "holder": holder, "now": self._core.now()}
        await self._execute(Statement("leader_resign", params | {"standby": f"standby:{holder}"}))

    async def leader(self, name: str) -> Leadership | None:
        """Returns the current or last holder of the leadership `name`; `None` if there was none."""
        rows = await self._core.store.fetch(Statement("leader", {"name": name}))
        if not rows:
            return None
        row = rows[0]
        return Leadership(
            row["holder"],
            row["epoch"],
            row["until"],
            cycles=row["cycles"],
            seen_at=row["seen_at"],
            since=row["led_at"],
            cycle=None
            if row["data"] is None
            else msgspec.json.decode(row["data"], type=CycleReport),
        )

    async def record_standby(self, holder: str) -> None:
        """Records that a process is ready to lead (a standby), for `STANDBY_S` seconds."""
        now = self._core.now()
        until = now + timedelta(seconds=STANDBY_S)
        params = {"name": f"standby:{holder}", "holder": holder, "now": now, "until": until}
        await self._execute(Statement("standby_record", params))

    async def standbys(self, name: str) -> list[str]:
        """Returns the live standbys that do not hold the leadership `name`."""
        query = Statement("standbys", {"leader": name, "now": self._core.now()})
        return [row["holder"] for row in await self._core.store.fetch(query)]

    async def record_event(
        self, kind: str, level: str, message: str, actor: str, data: Any = None
    ) -> None:
        """Adds an event of a coordinator to the audit trail of `SYSTEM_WORKSPACE`."""
        params = {
            "id": self._core.clock.new_id(),
            "apart": SYSTEM_WORKSPACE,
            "kind": kind,
            "level": level,
            "message": bounds.make_storable(message, bounds.MAX_ERROR),
            "actor": actor,
            "data": bounds.to_json_text("data", data),
            "now": self._core.now(),
        }
        await self._execute(Statement("coordinator_event_add", params))

    async def _execute(self, statement: Statement) -> None:
        """Runs one statement in a transaction of its own."""

        def script() -> Script[None]:
            yield statement

        await self._core.store.transact_one(script)

    async def renumber_events(self) -> bool:
        """Makes restored events readable while nothing else runs; True if there were any.

        No other process may use the database meanwhile. Subscribers may get events again.
        """
        store = self._core.store.for_maintenance()
        if not await store.fetch(Statement("events_with_future_xid")):
            return False

        def script() -> Script[None]:
            yield Statement("renumber_events")

        await store.transact_one(script)
        return True

    async def audit(self, limit: int = 100) -> list[str]:
        """Returns up to `limit` findings per check; an empty list unless there is a bug.

        Checks that each task's row agrees with its audit trail and with its own status.
        """
        problems = []
        store = self._core.store.for_maintenance()
        params: dict[str, Any] = {"most": limit}
        age = {"before": self._core.now() - AUDIT_AFTER}
        for row in await store.fetch(Statement("audit_mismatches", params | age)):
            problems.append(
                f"task {row['id']}: row at version {row['version']}, audit trail differs"
            )
        for row in await store.fetch(Statement("inconsistent_tasks", params)):
            problems.append(
                f"task {row['id']}: {row['status']}, but columns of this status are missing"
            )
        for row in await store.fetch(Statement("chain_breaks", params)):
            problems.append(
                f"task {row['id']}: event {row['seq']} does not continue the previous event"
            )
        return problems


def _is_wait_timeout(command: Command) -> bool:
    """True if the command ends a handler's wait because of its timeout."""
    return isinstance(command, commands.Unpark)
