"""Upkeep: what a coordinator repairs and promotes. Bounded, repeatable, safe in any number."""

from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid5

import msgspec

from tenuto.clock import EPOCH
from tenuto.crash_points import crash_point
from tenuto.engine.agents.escalation import escalate, lost
from tenuto.engine.agents.subtask_tree import close_forsaken
from tenuto.engine.agents.subtasks import lapsed
from tenuto.engine.core import Core
from tenuto.engine.flows.advance import Cascade
from tenuto.engine.flows.outcomes import FinishedTask
from tenuto.engine.rows import CorruptRow, task_of, write_changes
from tenuto.model import bounds
from tenuto.model.errors import TenutoError
from tenuto.model.tasks import commands
from tenuto.model.tasks.commands import Command, DecisionContext
from tenuto.model.tasks.decide import decide, on_due
from tenuto.model.tasks.task import TERMINAL, Task, TaskChange, due_at
from tenuto.store.protocol import Row, Rows, Script, Statement

BATCH = 500
LOOK_AGAIN = timedelta(seconds=10)
ARCHIVE_AFTER = timedelta(days=7)
PAYLOAD_AFTER = timedelta(days=30)
AUDIT_AFTER = timedelta(days=365)
DELIVERY_AFTER = timedelta(days=30)
LANE_AFTER = timedelta(days=1)
ANSWER_AFTER = timedelta(days=1)
WORKER_LOST_AFTER = timedelta(minutes=2)
WORKER_FORGET_AFTER = timedelta(days=1)

STANDBY_S = 90.0
"""How long somebody who said to stand by is believed."""
APART = UUID(int=0)
"""The workspace of what belongs to no tenant: the events of coordinators themselves."""

Sink = Callable[[Sequence[Row]], Awaitable[int | None]]
"""A subscriber: answers how many of the events, from the first, it has taken; nothing means all."""


class CycleReport(msgspec.Struct, frozen=True, kw_only=True):
    """How a leader's last cycle went: seconds, in all and by duty, what it did, what failed."""

    seconds: float
    duties: dict[str, float] = {}
    counts: dict[str, int] = {}
    error: str | None = None


class Leadership(msgspec.Struct, frozen=True):
    """Who leads since when, the how-manieth leader it is, and how its last cycle went."""

    holder: str
    epoch: int
    until: datetime
    cycles: int = 0
    seen_at: datetime | None = None
    since: datetime | None = None
    cycle: CycleReport | None = None


class LeaseExemption(msgspec.Struct, frozen=True):
    """Leases that end in a span of time: their owners, perhaps alive, could not renew them.

    None of them is ended, for its own end or by a timer. What comes after the span does not count
    yet, so that whoever stands still between asking for it and using it ends nothing by that.
    """

    since: datetime
    until: datetime


EVERY_LEASE = LeaseExemption(EPOCH, datetime.max.replace(tzinfo=UTC))


class TaskMaintenance:
    """The upkeep family. Each `*_once` answers how many rows it changed."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._turn: UUID | None = None

    async def expire_once(
        self, actor: str, workspace: UUID | None = None, *, spared: LeaseExemption | None = None
    ) -> int:
        """End the attempts whose lease ran out, of one workspace or of all."""
        params = {"now": self._expiry_cutoff(spared), "workspace": workspace, "most": BATCH}
        return await self._expire(Statement("leases_expired", params), actor)

    async def expire_fairly(self, actor: str, *, spared: LeaseExemption | None = None) -> int:
        """The same for all, as many of each workspace as of any other."""
        params = {"now": self._expiry_cutoff(spared), "most": BATCH}
        return await self._expire(Statement("leases_expired_in_turns", params), actor)

    def _expiry_cutoff(self, spared: LeaseExemption | None) -> datetime:
        """The instant before which a lease must have ended to be taken for lost."""
        now = self._core.now()
        return now if spared is None else min(now, spared.since)

    async def _expire(self, found: Statement, actor: str) -> int:
        return await self._decide_each(found, actor, lambda _task, _now: commands.Expire())

    async def expire_worker(self, worker: str, actor: str) -> int:
        """End all attempts of a worker that was seen to die, at once, a batch at a time."""
        found = Statement("leases_of_worker", {"worker": worker, "most": BATCH})
        ended = 0
        # The dead claim nothing, so each batch leaves less.
        while done := await self._decide_each(
            found, actor, lambda _task, _now: commands.Expire(seen_dead=True)
        ):
            ended += done
        return ended

    async def promote_once(
        self, actor: str, workspace: UUID | None = None, *, spared: LeaseExemption | None = None
    ) -> int:
        """Do what tasks' timers call for: retries, schedules, TTLs, hung and overdue runs."""
        params = self._due(spared) | {"workspace": workspace, "most": BATCH}
        return await self._decide_each(Statement("tasks_due", params), actor, on_due)

    async def promote_in_turns(self, actor: str, *, spared: LeaseExemption | None = None) -> int:
        """The same, as many of each workspace as of any other.

        The first of each workspace are found by an index of its own, whatever waits in others; so
        a share costs a probe per workspace, which is why a batch by time is tried before.
        """
        due = self._due(spared)
        params = due | {"after": self._turn, "most": BATCH}
        rows = await self._core.store.fetch(Statement("workspaces_due", params))
        # More than have room in one batch: the others are next.
        self._turn = rows[-1]["id"] if len(rows) == BATCH else None
        if not rows:
            return 0
        share = due | {"each": max(1, BATCH // len(rows))}
        found = Statement("tasks_due_shared", share, {"share": [(row["id"],) for row in rows]})
        return await self._decide_each(found, actor, on_due)

    def _due(self, spared: LeaseExemption | None) -> dict[str, Any]:
        """By when a timer must have come, and whose timers do not count."""
        now = self._core.now()
        if spared is None:
            return {"now": now, "spared_from": None, "spared_to": None}
        span = {"spared_from": spared.since, "spared_to": spared.until}
        return {"now": min(now, spared.until)} | span

    async def _decide_each(
        self,
        found: Statement,
        actor: str,
        choose: Callable[[Task, DecisionContext], Command | None],
    ) -> int:
        def script() -> Script[tuple[list[TaskChange], Cascade]]:
            rows = yield found
            decided: list[tuple[TaskChange, Command]] = []
            ended: list[FinishedTask] = []
            timers: list[tuple[UUID, datetime | None]] = []
            for row in rows:
                try:
                    change = self._consider(row, actor, choose)
                except CorruptRow as error:
                    yield self._core.quarantine(error)
                    continue
                if change is None:
                    timers.append((row["id"], self._look_again(task_of(row))))
                else:
                    decided.append(change)
                    after = change[0].task
                    if row["watched"] and after.status in TERMINAL:
                        ended.append(FinishedTask(after.id, after.workspace, after.status))
            if decided:
                yield write_changes(decided)
            if timers:
                yield Statement("timer_set", rows={"timer": timers})
            if bad := lost(decided):
                yield from escalate(self._core.clock, bad)
            gone = [change for change, _ in decided]
            yield from close_forsaken(gone, self._core.now(), actor)
            if woken := [change.task for change, command in decided if _woke(command)]:
                yield from lapsed(self._core, woken)
            cascade = self._core.cascade(actor)
            yield from cascade.run(ended)
            return [change for change, _ in decided], cascade

        changes, cascade = await self._core.store.transact(script)
        self._core.send_hints(changes)
        self._core.announce_cascade(cascade)
        return len(changes)

    def _consider(
        self, row: Row, actor: str, choose: Callable[[Task, DecisionContext], Command | None]
    ) -> tuple[TaskChange, Command] | None:
        task = task_of(row)
        moment = self._core.moment(actor)
        try:
            command = choose(task, moment)
            if command is None:
                return None
            change = decide(task, command, moment)
        except TenutoError:
            return None
        except (TypeError, ValueError, OverflowError) as error:
            raise CorruptRow(task.id, f"unreadable row: {error!r}") from error
        return None if change is None else (change, command)

    def _look_again(self, task: Task) -> datetime | None:
        """When to look at a task whose timer called for nothing: never again at once."""
        timer = due_at(task)
        return None if timer is None else max(timer, self._core.now() + LOOK_AGAIN)

    async def archive_once(self, actor: str) -> int:
        """Put away what ended long ago."""
        before = self._core.now() - ARCHIVE_AFTER
        rows = await self._core.store.fetch(
            Statement("archivable", {"before": before, "most": BATCH})
        )
        done = 0
        for row in rows:
            try:
                await self._core.apply_command(row["id"], commands.Archive(), actor=actor)
            except TenutoError:
                continue
            done += 1
        return done

    async def prune_once(self) -> int:
        """Remove payloads, audit rows, deliveries and lanes that are past their age."""
        now = self._core.now()
        statements = [
            Statement("prune_payload", {"before": now - PAYLOAD_AFTER, "most": BATCH}),
            Statement("prune_events", {"before": now - AUDIT_AFTER, "most": BATCH}),
            Statement("prune_other", {"before": now - AUDIT_AFTER, "most": BATCH}),
            Statement("deliveries_prune", {"before": now - DELIVERY_AFTER, "most": BATCH}),
            Statement("lane_prune", {"before": now - LANE_AFTER, "most": BATCH}),
            Statement("idempotency_prune", {"before": now - ANSWER_AFTER}),
            Statement("worker_lost", {"before": now - WORKER_LOST_AFTER}),
            Statement("worker_forget", {"before": now - WORKER_FORGET_AFTER}),
        ]

        def script() -> Script[int]:
            n = 0
            for statement in statements:
                n += len((yield statement))
            return n

        return await self._core.store.unhurried().transact(script)

    async def sweep_once(self, worker: str, host: str, runs: Callable[[str, UUID], bool]) -> int:
        """Confirm the unconfirmed ends of a worker and its host of which nothing runs any more.

        `runs` says whether a worker may still run a session of a task.
        """
        params = {"worker": worker, "prefix": f"{host}:", "most": BATCH}
        rows = await self._core.store.fetch(Statement("unconfirmed", params))
        gone = [(row["id"], row["attempt"]) for row in rows if not runs(row["worker"], row["id"])]
        if not gone:
            return 0
        receipt = {"state": "swept", "how": "nothing of it runs on its host"}
        return await self.confirm_gone(gone, receipt, worker)

    async def confirm_gone(
        self, gone: Sequence[tuple[UUID, int]], receipt: dict[str, Any], actor: str | None
    ) -> int:
        """Note that the sessions of unconfirmed ends, by task and attempt, are gone after all."""
        params = {
            "receipt": bounds.json_text("receipt", receipt),
            "actor": actor,
            "now": self._core.now(),
        }

        def script() -> Script[Rows]:
            found: Rows = yield Statement("confirm_swept", params, {"swept": gone})
            return found

        return len(await self._core.store.once(script))

    async def relay_once(
        self, subscriber: str, sink: Sink, limit: int = BATCH, *, errors: bool = False
    ) -> int:
        """Hand the next events to a subscriber, then move its cursor. At least once, in order.

        With `errors`, a subscriber gets only events of level ERROR and above, by their own index.
        """
        params: dict[str, Any] = {"name": subscriber, "now": self._core.now()}

        def place() -> Script[Row]:
            rows = yield Statement("cursor_lock", {"name": subscriber})
            if not rows:
                yield Statement("cursor_make", params)
                rows = yield Statement("cursor_lock", {"name": subscriber})
            return rows[0]

        here = await self._core.store.transact(place)
        events = await self._core.store.fetch(
            Statement(
                "events_after",
                {
                    "xid": here["xid"],
                    "position": here["position"],
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

        def move() -> Script[None]:
            rows = yield Statement("cursor_lock", {"name": subscriber})
            if (rows[0]["xid"], rows[0]["position"]) == (here["xid"], here["position"]):
                yield Statement("cursor_move", params | last)

        await self._core.store.transact(move)
        crash_point("relay.moved")
        return len(events)

    async def acquire_leadership(
        self, name: str, holder: str, seconds: float, cycle: CycleReport | None = None
    ) -> Leadership | None:
        """Become or stay the leader for so long; `None` when another one is.

        `cycle` is how the last one went; it is kept for whoever asks.
        """
        now = self._core.now()
        params = {
            "name": name,
            "holder": holder,
            "now": now,
            "until": now + timedelta(seconds=seconds),
            "data": None if cycle is None else msgspec.json.encode(cycle).decode(),
            "trail": uuid5(APART, name),
            "apart": APART,
        }

        def script() -> Script[Rows]:
            rows: Rows = yield Statement("leader_take", params)
            return rows

        rows = await self._core.store.once(script)
        if not rows:
            return None
        found = rows[0]
        return Leadership(holder, found["epoch"], found["until"], since=found["led_at"])

    async def resign(self, name: str, holder: str) -> None:
        """Let somebody else lead at once."""
        params = {"name": name, "holder": holder, "now": self._core.now()}
        await self._write(Statement("leader_resign", params | {"standby": f"standby:{holder}"}))

    async def leader(self, name: str) -> Leadership | None:
        """Who leads, or led last."""
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
        """Say that somebody would lead if nobody else did."""
        now = self._core.now()
        until = now + timedelta(seconds=STANDBY_S)
        params = {"name": f"standby:{holder}", "holder": holder, "now": now, "until": until}
        await self._write(Statement("standby_note", params))

    async def standbys(self, leader: str) -> list[str]:
        """Who would lead if the leader did not."""
        wanted = Statement("standbys", {"leader": leader, "now": self._core.now()})
        return [row["holder"] for row in await self._core.store.fetch(wanted)]

    async def note(self, kind: str, level: str, message: str, actor: str, data: Any = None) -> None:
        """Add an event of a coordinator itself to the trail that belongs to no tenant."""
        params = {
            "id": self._core.clock.new_id(),
            "apart": APART,
            "kind": kind,
            "level": level,
            "message": bounds.clean(message, bounds.MAX_ERROR),
            "actor": actor,
            "data": bounds.json_text("data", data),
            "now": self._core.now(),
        }
        await self._write(Statement("coordinator_note", params))

    async def _write(self, statement: Statement) -> None:
        def script() -> Script[None]:
            yield statement

        await self._core.store.once(script)

    async def renumber_events(self) -> bool:
        """Make events readable that were restored from another server; answers whether any were.

        For a database that nobody else uses meanwhile. Subscribers may get events again.
        """
        store = self._core.store.unhurried()
        if not await store.fetch(Statement("events_ahead")):
            return False

        def script() -> Script[None]:
            yield Statement("restamp")

        await store.once(script)
        return True

    async def audit(self, limit: int = 100) -> list[str]:
        """Where a row disagrees with its trail or with its own status: nowhere, but for a fault."""
        found = []
        store = self._core.store.unhurried()
        params: dict[str, Any] = {"most": limit}
        since = {"before": self._core.now() - AUDIT_AFTER}
        for row in await store.fetch(Statement("audit_mismatches", params | since)):
            found.append(f"task {row['id']}: row at version {row['version']}, trail differs")
        for row in await store.fetch(Statement("unsound_tasks", params)):
            found.append(f"task {row['id']}: {row['status']} without what belongs to it")
        for row in await store.fetch(Statement("chain_breaks", params)):
            found.append(
                f"task {row['id']}: event {row['seq']} does not follow from the one before"
            )
        return found


def _woke(command: Command) -> bool:
    """Whether a handler's wait was too long."""
    return isinstance(command, commands.Unpark)
