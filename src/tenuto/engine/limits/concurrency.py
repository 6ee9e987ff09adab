"""Grants permits of concurrency keys to tasks in queue order, and releases them.

A key's row is locked while its permits are granted. The transaction that has the lock waits for no
task's row: a task that another transaction has locked gets its permit later, as deferred work. So
granting is the last step of a transaction, and no deadlock is possible.
"""

import logging
from collections import defaultdict
from collections.abc import Iterable
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING
from uuid import UUID

import msgspec

from tenuto.engine.rows import CorruptRow, changes_statement, parse_task
from tenuto.model.errors import Invalid, TenutoError
from tenuto.model.limits.concurrency import (
    HOLD,
    MAX_LIMIT,
    Concurrency,
    grant_order,
    leaves_queue,
    needs_permit,
    tasks_to_cancel,
)
from tenuto.model.tasks import commands
from tenuto.model.tasks.commands import Command
from tenuto.model.tasks.decide import decide
from tenuto.model.tasks.task import TERMINAL, Status, Task, TaskChange
from tenuto.store.protocol import Row, Rows, Script, Statement

if TYPE_CHECKING:
    from tenuto.engine.core import Core
    from tenuto.engine.flows.advance import Cascade

log = logging.getLogger("tenuto.engine")

MAX_GRANTS = 200
"""Permits granted per key and transaction; later transactions grant the rest."""
AFTER_ALL = 2**53
"""A queue number above all that a queue can contain."""
MAX_REPAIRS = 100
MAX_LEVELS = 1_000
"""How many levels of parents are searched for a concurrency key."""
SETTLED_AFTER = timedelta(minutes=1)
"""A permit counts as miscounted only if nothing changed for this long."""

Key = tuple[UUID, str]
"""Workspace and concurrency key."""


def parse_concurrency(text: str) -> Concurrency:
    """Returns a task's concurrency settings from stored JSON."""
    return msgspec.json.decode(text, type=Concurrency)


class PermitChanges:
    """The permit requests and releases of a transaction; `grant_free_permits` applies them last."""

    def __init__(self) -> None:
        self._requested: dict[UUID, UUID] = {}
        self._left_queue: dict[UUID, UUID] = {}
        self._released: defaultdict[Key, list[UUID]] = defaultdict(list)
        self.is_repair = False
        """True if permits are granted now that should have been granted before."""

    @property
    def has_work(self) -> bool:
        """True if a request, a release, a task that left the queue, or a key is recorded."""
        return bool(self._requested or self._left_queue or self._released)

    def record(self, changes: Iterable[TaskChange]) -> None:
        """Records the changed tasks that request a permit, and those that leave the queue."""
        for change in changes:
            if needs_permit(change):
                self.record_request(change.task.id, change.task.workspace)
            if leaves_queue(change):
                self._left_queue[change.task.id] = change.task.workspace

    def record_request(self, task: UUID, workspace: UUID) -> None:
        """Records that a task requests a permit."""
        self._requested[task] = workspace

    def record_finished(self, rows: Iterable[Row]) -> None:
        """Records that the permits of these finished tasks are free; skips rows without a key."""
        for row in rows:
            if row["concurrency"] is not None:
                self.record_release(
                    row["id"], row["workspace"], parse_concurrency(row["concurrency"]).key
                )

    def record_release(self, task: UUID, workspace: UUID, key: str) -> None:
        """Records that the permit of a finished task is free."""
        self._released[workspace, key].append(task)

    def add_key(self, workspace: UUID, key: str) -> None:
        """Records a key, so that its free permits are granted though no task released one."""
        _ = self._released[workspace, key]

    def cancel_superseded(self, cascade: "Cascade") -> Script[None]:
        """Cancels older tasks that new `cancel_old` tasks replace. Call before locking any key."""
        rows = yield from _load_requests(self._requested)
        for row in rows:
            request = parse_concurrency(row["concurrency"])
            if request.policy == "cancel_old":
                params = {"task": row["id"], "workspace": row["workspace"], "most": 1}
                position = yield Statement("permit_queue_position", params)
                number = (
                    position[0]["number"] if position and not position[0]["held"] else AFTER_ALL
                )
                yield from cancel_older(cascade, row["id"], row["workspace"], request, number)

    def grant_free_permits(self, cascade: "Cascade") -> Script[None]:
        """Releases, enqueues, grants permits of locked keys; cancels refused `cancel_new` tasks."""
        rows = yield from _load_requests(self._requested | self._left_queue)
        rows_by_task = {row["id"]: row for row in rows}
        for task in self._left_queue:
            if task in rows_by_task:
                self.add_key(
                    rows_by_task[task]["workspace"],
                    parse_concurrency(rows_by_task[task]["concurrency"]).key,
                )
        newcomers: defaultdict[Key, list[tuple[UUID, Concurrency]]] = defaultdict(list)
        for task in self._requested:
            if task in rows_by_task:
                request = parse_concurrency(rows_by_task[task]["concurrency"])
                newcomers[rows_by_task[task]["workspace"], request.key].append((task, request))
        released = dict(self._released)
        self._requested, self._left_queue, self._released = {}, {}, defaultdict(list)
        keys = sorted({*released, *newcomers})
        if not keys:
            return
        key_rows = [(*key, len(newcomers.get(key, ()))) for key in keys]
        locked = yield Statement("permit_keys_locked", rows={"wanted": key_rows})
        last_numbers = {(row["workspace"], row["key"]): row["last"] for row in locked}
        if finished := sorted(task for tasks in released.values() for task in tasks):
            yield Statement("permit_release", {"ids": finished})
        for key in keys:
            yield from self._grant_for_key(cascade, key, newcomers.get(key, []), last_numbers[key])

    def _grant_for_key(
        self,
        cascade: "Cascade",
        key: Key,
        newcomers: list[tuple[UUID, Concurrency]],
        last_number: int,
    ) -> Script[None]:
        """Enqueues tasks (numbers end at `last_number`), starts granted, cancels by policy."""
        first = last_number - len(newcomers) + 1
        numbers = {task: first + index for index, (task, _) in enumerate(newcomers)}
        if newcomers:
            entries = [(task, *key, numbers[task], request.limit) for task, request in newcomers]
            entered = yield Statement("permit_enqueue", rows={"asked": entries})
            numbers |= {row["id"]: row["number"] for row in entered}
        params = {"workspace": key[0], "key": key[1]}
        # Before a `cancel_new` task is cancelled, all free permits must have been granted.
        has_cancel_new = any(request.policy == "cancel_new" for _, request in newcomers)
        max_grants = MAX_LIMIT if has_cancel_new else MAX_GRANTS
        queue = yield Statement("permit_queue", {**params, "most": max_grants})
        if not queue:
            yield Statement("permit_key_delete", params)
            return
        granted = grant_order([(row["id"], row["most"]) for row in queue], queue[0]["places"])
        started = yield from self._start_tasks(cascade, granted)
        if len(started) < len(granted) or len(granted) == max_grants:
            cascade.defer("turn", granted[0], key[0], {"key": key[1]})
        for task, request in newcomers:
            if request.policy == "cancel_new" and task not in started:
                yield from self._cancel_new_task(cascade, task, request)
            elif request.policy == "cancel_old":
                older = yield _older_tasks_statement(key[0], request, numbers[task])
                if tasks_to_cancel([row["id"] for row in older], request.limit):
                    data = {"concurrency": request, "number": numbers[task]}
                    cascade.defer("supersede", task, key[0], data)

    def _start_tasks(self, cascade: "Cascade", granted: list[UUID]) -> Script[set[UUID]]:
        """Clears holds, stores permits, returns the started ids; skips tasks locked or not waiting.

        Tasks with an invalid row are quarantined.
        """
        if not granted:
            return set()
        rows = yield Statement("permit_candidates", {"ids": sorted(granted)})
        decided: list[tuple[TaskChange, Command]] = []
        for row in rows:
            try:
                change = self._clear_hold_change(parse_task(row), cascade)
            except CorruptRow as error:
                yield _quarantine_statement(error, cascade)
                continue
            if change is not None:
                decided.append((change, commands.ClearHold()))
        if decided:
            yield changes_statement(decided)
            yield Statement("permit_grant", {"ids": [change.task.id for change, _ in decided]})
            cascade.changes += [change for change, _ in decided]
        return {change.task.id for change, _ in decided}

    def _clear_hold_change(self, task: Task, cascade: "Cascade") -> TaskChange | None:
        """Returns the change that clears the hold; `None` unless only a permit is missing."""
        if task.status is not Status.WAITING or task.hold != HOLD or task.unmet > 0:
            return None
        try:
            change = decide(task, commands.ClearHold(), cascade.decision_context())
        except TenutoError:
            return None
        if change is None or not self.is_repair:
            return change
        message = "repaired: a permit was free earlier, but was not granted"
        event = msgspec.structs.replace(change.event, level="ERROR", message=message)
        return msgspec.structs.replace(change, event=event)

    def _cancel_new_task(
        self, cascade: "Cascade", task: UUID, concurrency: Concurrency
    ) -> Script[None]:
        """Cancels a new task without a permit and removes it from the queue; its row is locked."""
        reason = f"no permit is free for the concurrency key {concurrency.key!r}"
        yield from cascade.apply_to_each([task], lambda _: commands.Cancel(reason=reason))
        yield Statement("permit_release", {"ids": [task]})


def _load_requests(tasks: dict[UUID, UUID]) -> Script[Rows]:
    """Reads the rows (id, workspace, settings) of those tasks (id to workspace) with a key."""
    if not tasks:
        return []
    rows = yield Statement("permit_requests", rows={"wanted": sorted(tasks.items())})
    return rows


def check_ancestors(parent: Task, concurrency: Concurrency) -> Script[None]:
    """Raises `Invalid` if a task above the subtask has its key: each could wait for the other."""
    params = {"task": parent.id, "workspace": parent.workspace, "most": MAX_LEVELS}
    rows = yield Statement("permit_requests_above", params)
    if any(parse_concurrency(row["concurrency"]).key == concurrency.key for row in rows):
        raise Invalid(
            f"a parent task has the concurrency key {concurrency.key!r} and keeps its permit"
            " meanwhile; choose another key",
            field="concurrency",
        )


def _quarantine_statement(corrupt: CorruptRow, cascade: "Cascade") -> Statement:
    """Returns the statement that takes an invalid row out of the queue."""
    params = {"id": corrupt.task, "message": str(corrupt), "now": cascade.now}
    return Statement("quarantine", {**params, "actor": "engine"})


def _older_tasks_statement(workspace: UUID, concurrency: Concurrency, number: int) -> Statement:
    """Returns the statement that reads a key's unfinished tasks before `number`, oldest first."""
    params = {
        "workspace": workspace,
        "key": concurrency.key,
        "number": number,
        "most": MAX_GRANTS + concurrency.limit,
    }
    return Statement("permit_older_tasks", params)


def cancel_older(
    cascade: "Cascade", task: UUID, workspace: UUID, concurrency: Concurrency, number: int
) -> Script[None]:
    """Cancels the oldest tasks of the key before `number` until `task` fits; may defer a rest."""
    rows = yield _older_tasks_statement(workspace, concurrency, number)
    ids = tasks_to_cancel([row["id"] for row in rows], concurrency.limit)
    if len(ids) > MAX_GRANTS and number != AFTER_ALL:
        data = {"concurrency": concurrency, "number": number}
        cascade.defer("supersede", task, workspace, data)
    if ids:
        reason = f"a newer task has the concurrency key {concurrency.key!r}"
        yield from cascade.apply_to_each(sorted(ids), lambda _: commands.Cancel(reason=reason))


class _SupersedeWork(msgspec.Struct):
    concurrency: Concurrency
    number: int


class _GrantPermitsWork(msgspec.Struct):
    key: str


def run_deferred_grants(cascade: "Cascade", work: Row) -> Script[None]:
    """Runs deferred work: records a key; its free permits are granted at the cascade's end."""
    cascade.permits.add_key(
        work["workspace"], msgspec.json.decode(work["data"], type=_GrantPermitsWork).key
    )
    yield from ()


def run_deferred_supersede(cascade: "Cascade", work: Row) -> Script[None]:
    """Runs deferred work: cancels what an unfinished `cancel_old` task replaces."""
    rows = yield Statement("task_statuses", {"ids": [work["subject"]]})
    if not rows or Status(rows[0]["status"]) in TERMINAL:
        return
    data = msgspec.json.decode(work["data"], type=_SupersedeWork)
    concurrency, workspace = data.concurrency, work["workspace"]
    yield from cancel_older(cascade, work["subject"], workspace, concurrency, data.number)


async def describe_position(core: "Core", task: UUID, workspace: UUID) -> str:
    """Returns the queue position of a task that waits for a permit, as text for `explain`."""
    params = {"task": task, "workspace": workspace, "most": 100_000}
    rows = await core.store.fetch(Statement("permit_queue_position", params))
    if not rows:
        return "joins the queue of its concurrency key when nothing else blocks it"
    row = rows[0]
    return (
        f"waits for a permit of the concurrency key {row['key']!r}:"
        f" {row['places']:,} of {row['most']:,} in use, {row['ahead']:,} before it in the queue"
    )


class PermitRepair:
    """Coordinator duty that repairs permits. Each `*_once` returns the number of repairs."""

    def __init__(self, core: "Core") -> None:
        self._core = core

    async def recount_once(self, actor: str) -> int:
        """Grants or releases missed permits, logs each as an error, and returns how many."""
        params = {"before": self._core.now() - SETTLED_AFTER, "most": MAX_REPAIRS}
        rows = await self._core.store.fetch(Statement("permits_miscounted", params))
        repaired = 0
        for row in rows:
            repaired += await self._core.run_with_cascade(partial(_repair_permit, row), actor)
        return repaired


def _repair_permit(row: Row, cascade: "Cascade") -> Script[int]:
    """Requests or releases a task's permit and logs an error; returns 0 if the task changed."""
    rows = yield Statement("task_statuses", {"ids": [row["id"]]})
    if not rows or rows[0]["status"] != row["status"]:
        return 0  # the task changed since it was read
    log.error("task %s (%s): a permit change was missed; repairing", row["id"], row["status"])
    cascade.permits.is_repair = True
    if Status(row["status"]) in TERMINAL:
        cascade.permits.record_release(row["id"], row["workspace"], row["key"])
    else:
        cascade.permits.record_request(row["id"], row["workspace"])
    return 1
