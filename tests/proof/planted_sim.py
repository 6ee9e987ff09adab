"""Faults put into the program on purpose: the simulation must find each of them.

Every plant is a patch of production code or SQL that somebody could write by mistake, and the names
of the oracles that have to see it. A check that never failed proves nothing.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any
from unittest.mock import patch
from uuid import UUID

import msgspec
from tests.proof.sim.store import database

from tenuto.engine import core, rows
from tenuto.engine.rows import parse_task
from tenuto.engine.tasks import maintenance, report, submit
from tenuto.engine.tasks.claim import TaskClaimer
from tenuto.model.errors import Conflict, TenutoError
from tenuto.model.tasks import attempts, changes, commands, decide
from tenuto.model.tasks.submission import NewTask
from tenuto.model.tasks.task import LEASED, Fence, Status, Task, TaskChange, next_due_at
from tenuto.periodic import wait_first_event
from tenuto.store import sql
from tenuto.store.dialects import SQLITE
from tenuto.store.protocol import Script, Statement
from tenuto.worker import heartbeat, worker

PLANTS: dict[str, "Plant"] = {}


class Plant(msgspec.Struct, frozen=True):
    """A fault, and who has to find it."""

    apply: Callable[[ExitStack], None]
    seen_by: frozenset[str]
    harsh: bool
    """Only what an attempt does after its lease shows it, so there have to be many of those."""
    near: int = 0
    """The seed to begin with, for a fault that few find: a change of the program moves them."""

    @contextmanager
    def planted(self) -> Iterator[None]:
        """The program with the fault in it."""
        with ExitStack() as stack:
            self.apply(stack)
            database.cache_clear()
            stack.callback(database.cache_clear)
            yield


def plant(
    *seen_by: str, harsh: bool = False, near: int = 0
) -> Callable[[Callable[[ExitStack], None]], Callable[[ExitStack], None]]:
    """Register a fault under its function's name."""

    def register(apply: Callable[[ExitStack], None]) -> Callable[[ExitStack], None]:
        PLANTS[apply.__name__] = Plant(apply, frozenset(seen_by), harsh, near)
        return apply

    return register


def rewrite(stack: ExitStack, query: str, old: str, new: str) -> None:
    """One query with another text in all its steps that have the old one."""
    queries = sql.load(SQLITE)
    before = queries[query]
    steps = tuple(
        msgspec.structs.replace(step, text=step.text.replace(old, new)) for step in before.steps
    )
    assert steps != before.steps, f"{query} does not say {old!r}"
    stack.enter_context(patch.dict(queries, {query: msgspec.structs.replace(before, steps=steps)}))


def swap(stack: ExitStack, owner: Any, name: str, value: Any) -> None:
    stack.enter_context(patch.object(owner, name, value))


FENCE = "where task.id = done.id and task.attempt = done.attempt and task.lease_token = done.token"


@plant("I5", harsh=True, near=45)
def complete_guarded_by_status(stack: ExitStack) -> None:
    """As River does: whoever comes first finishes the task, whichever attempt it is."""
    rewrite(
        stack,
        "complete_if_owned",
        FENCE,
        "where task.id = done.id and done.attempt > 0 and done.token <> ''",
    )


@plant("I5", harsh=True, near=45)
def complete_guarded_by_owner(stack: ExitStack) -> None:
    """The right agent is enough, though it may be its attempt before."""
    same = (
        "where task.id = done.id and done.token <> ''"
        " and task.agent = coalesce((select a.agent from attempt a where a.task = done.id"
        " and a.attempt = done.attempt), task.agent)"
    )
    rewrite(stack, "complete_if_owned", FENCE, same)


@plant("I5", harsh=True, near=45)
def reports_not_fenced(stack: ExitStack) -> None:
    """Failures, releases and confirmations are taken from anybody."""
    swap(stack, decide, "is_current_fence", lambda _task, _command: True)


@plant("I16")
def complete_after_a_cancel(stack: ExitStack) -> None:
    """A result is accepted though a cancel was acknowledged."""
    rewrite(stack, "complete_if_owned", "and task.cancel_requested_at is null", "")


@plant("I16")
def pause_overrules_a_cancel(stack: ExitStack) -> None:
    """Confirms a pause without the check for a later cancel."""
    check = decide._check_fence

    def careless(task: Task, command: commands.AttemptCommand) -> None:
        if isinstance(command, commands.ConfirmPause) and task.pause_requested_at is not None:
            task = changes.replace_fields(task, cancel_requested_at=None)
        check(task, command)

    swap(stack, decide, "_check_fence", careless)


@plant("I7")
def heartbeat_renews_expired_leases(stack: ExitStack) -> None:
    """A reaped lease comes back to life when its owner beats again."""
    rewrite(
        stack,
        "heartbeat",
        "case when task.status in ('ASSIGNED', 'RUNNING') then",
        "case when true then",
    )


@plant("I7")
def expiry_keeps_the_lease(stack: ExitStack) -> None:
    """A task goes back to the queue under the lease it lost."""
    stack.enter_context(patch.dict(changes.OWNER_CLEARED))
    del changes.OWNER_CLEARED["lease_until"]


@plant("I7")
def capacity_not_counted(stack: ExitStack) -> None:
    """An agent gets what it asks for, whatever it has already."""

    def all_of_it(_claiming: TaskClaimer, concurrency: Any) -> Script[int]:
        yield from ()
        return int(concurrency.params["n"])

    swap(stack, TaskClaimer, "_lock_free_capacity", all_of_it)


@plant("I8")
def claim_takes_more(stack: ExitStack) -> None:
    """One more than asked for."""
    rewrite(stack, "claim", "limit :n", "limit :n + 1")
    rewrite(stack, "claim_lane", "limit :n", "limit :n + 1")


@plant("I15")
def reaper_without_a_cap(stack: ExitStack) -> None:
    """A task is queued again though it has no try left."""
    swap(stack, changes, "has_no_try_left", lambda _task, _tries: False)


@plant("I15")
def release_costs_a_try(stack: ExitStack) -> None:
    """A drained worker's tasks come back with one try less."""
    before = changes.without_counting_try
    swap(stack, attempts, "without_counting_try", lambda task: before(task) | {"tries": task.tries})


@plant("I13")
def expiry_not_audited(stack: ExitStack) -> None:
    """The reaper's changes leave no event."""
    write = rows.changes_statement

    def silent(decided: Sequence[tuple[TaskChange, commands.Command]]) -> Statement:
        created = write(decided)
        return msgspec.structs.replace(created, rows={**created.rows, "noted": []})

    swap(stack, maintenance, "changes_statement", silent)


@plant("I13")
def audit_in_a_second_transaction(stack: ExitStack) -> None:
    """Writes the change first and its event in a later transaction."""
    queries = sql.load(SQLITE)
    change = queries["tasks_update"]
    event_step = next(step for step in change.steps if step.text.startswith("insert into event"))
    alone = msgspec.structs.replace(event_step, text=event_step.text.replace(" of moved", ""))
    later = msgspec.structs.replace(change, steps=(alone,), answer=alone.label, columns=())
    stack.enter_context(patch.dict(queries, {"note_later": later}))
    caller = [name for name, _ in change.rows["noted"]].index("actor")
    write, decide_each = rows.changes_statement, maintenance.TaskMaintenance._apply_to_each
    reported: dict[Any, list[Any]] = {}

    def half(decided: Sequence[tuple[TaskChange, commands.Command]]) -> Statement:
        created = write(decided)
        for row in created.rows["noted"]:
            reported.setdefault(row[caller], []).append(row)
        return msgspec.structs.replace(created, rows={**created.rows, "noted": []})

    async def in_two(
        self: maintenance.TaskMaintenance, result: Statement, actor: str, choose: Any
    ) -> int:
        reported.pop(actor, None)
        done = await decide_each(self, result, actor, choose)
        if rows := reported.pop(actor, []):

            def script() -> Script[None]:
                yield Statement("note_later", rows={"noted": rows})

            await self._core.store.transact(script)
        return done

    swap(stack, maintenance, "changes_statement", half)
    swap(stack, maintenance.TaskMaintenance, "_apply_to_each", in_two)


@plant("I24")
def timer_in_memory(stack: ExitStack) -> None:
    """The process that saw an attempt fail keeps the time until the next one itself."""
    announce = core.Core.send_hints

    def no_column(task: Task) -> Any:
        return None if task.status is Status.RETRY_WAIT else next_due_at(task)

    async def fire(self: core.Core, task: UUID) -> None:
        with suppress(TenutoError):
            await self.apply_command(task, commands.RetryDue())

    def start(self: core.Core, task: UUID) -> None:
        asyncio.get_running_loop().create_task(fire(self, task))

    def remember(self: core.Core, created: Any) -> None:
        result = list(created)
        for item in result:
            if item is not None and item.task.status is Status.RETRY_WAIT:
                delay = (item.task.next_attempt_at - self.now()).total_seconds()
                asyncio.get_running_loop().call_later(delay, start, self, item.task.id)
        announce(self, result)

    swap(stack, changes, "next_due_at", no_column)
    swap(stack, core.Core, "send_hints", remember)


@plant("I19")
def cursor_before_the_sink(stack: ExitStack) -> None:
    """The relay notes events as delivered, then delivers them."""
    relay = maintenance.TaskMaintenance.relay_once

    async def hasty(
        self: maintenance.TaskMaintenance,
        subscriber: str,
        sink: maintenance.Sink,
        *args: Any,
        **kwargs: Any,
    ) -> int:
        stored: list[Any] = []

        async def keep(events: Sequence[Any]) -> None:
            stored.extend(events)

        done = await relay(self, subscriber, keep, *args, **kwargs)
        if stored:
            await sink(stored)
        return done

    swap(stack, maintenance.TaskMaintenance, "relay_once", hasty)


@plant("I1")
def acknowledged_before_the_commit(stack: ExitStack) -> None:
    """A submit is answered when its batch is under way."""

    async def eager(
        self: submit.TaskSubmitter, draft: submit.PreparedSubmit, workspace: UUID
    ) -> list[submit.Submitted]:
        del workspace

        async def commit() -> None:
            with suppress(TenutoError):
                await self._core.batcher.submit(self._plain_kind, draft.rows)

        asyncio.get_running_loop().create_task(commit())
        return [submit.Submitted(item) for item in draft.ids]

    swap(stack, submit.TaskSubmitter, "_insert_plain", eager)


@plant("I2")
def idempotency_key_dropped(stack: ExitStack) -> None:
    """A repeated submit makes the task again."""
    many = submit.TaskSubmitter.submit_many

    async def forgetful(
        self: submit.TaskSubmitter, new_tasks: Sequence[NewTask], *args: Any, **kwargs: Any
    ) -> list[submit.Submitted]:
        stripped = [msgspec.structs.replace(new, idempotency_key=None) for new in new_tasks]
        return await many(self, stripped, *args, **kwargs)

    swap(stack, submit.TaskSubmitter, "submit_many", forgetful)


@plant("I2")
def bulk_in_parts(stack: ExitStack) -> None:
    """A submit of many is many submits."""
    many = submit.TaskSubmitter.submit_many

    async def one_by_one(
        self: submit.TaskSubmitter, new_tasks: Sequence[NewTask], *args: Any, **kwargs: Any
    ) -> list[submit.Submitted]:
        done = []
        for new in new_tasks:
            done += await many(self, [new], *args, **kwargs)
        return done

    swap(stack, submit.TaskSubmitter, "submit_many", one_by_one)


@plant("I3", "I5", harsh=True, near=568)
def checkpoint_not_fenced(stack: ExitStack) -> None:
    """Any attempt may save as long as the task runs."""
    owned = report.AttemptReporter.lock_owned_task

    def lenient(
        self: report.AttemptReporter, fence: Fence, *, allow_pausing: bool = False
    ) -> Script[Task]:
        if not allow_pausing:
            return (yield from owned(self, fence))
        result = yield Statement("tasks_locked", {"ids": [fence.task]})
        task = parse_task(result[0])
        if task.status not in LEASED:
            raise Conflict("nobody runs the task", "lease_lost")
        return task

    swap(stack, report.AttemptReporter, "lock_owned_task", lenient)


@plant("step", harsh=True)
def step_recorded_again(stack: ExitStack) -> None:
    """The last value of a step wins, though the first was used."""
    again = "do update set value = excluded.value"
    rewrite(stack, "step_record", "do nothing", again)


@plant("spawn")
def spawn_without_a_key(stack: ExitStack) -> None:
    """Every repetition of a handler makes another child."""

    async def spawn(
        self: report.AttemptReporter,
        fence: Fence,
        workspace: UUID,
        key: str,
        new: NewTask,
        actor: str,
    ) -> UUID:
        del key
        born = msgspec.structs.replace(new, parent=fence.task)
        return (await self._submitter.submit_many([born], workspace, actor))[0].id

    swap(stack, report.AttemptReporter, "spawn", spawn)


@plant("healthy")
def reaper_without_a_clock(stack: ExitStack) -> None:
    """The reaper takes every lease it finds for an expired one."""
    rewrite(stack, "leases_expired", "and task.lease_until < :now", "and :now > 0")


@plant("I24")
def hints_trusted(stack: ExitStack) -> None:
    """A worker looks for tasks only when it is told that there are some."""

    async def for_ever(events: list[asyncio.Event], _seconds: float, clock: Any) -> bool:
        return await wait_first_event(events, 1e9, clock)

    swap(stack, worker, "wait_first_event", for_ever)


@plant("zombie", harsh=True, near=224)
def lost_lease_not_reported(stack: ExitStack) -> None:
    """A handler goes on though its lease was lost."""
    ask = heartbeat.HeartbeatLoop._request_stop

    def quiet(self: heartbeat.HeartbeatLoop, held: Any, reason: Any) -> None:
        if reason != "lost":
            ask(self, held, reason)

    swap(stack, heartbeat.HeartbeatLoop, "_request_stop", quiet)
