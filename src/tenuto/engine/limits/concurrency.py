"""Turns: tasks with one concurrency key get their places in order, as many as there are.

A key's row is locked while its places are given. Whoever holds it waits for no task's row: a task
that somebody else holds at that moment gets its place by a piece of work, a little later. So it is
the last thing that a transaction does, and nobody waits in a circle.
"""

import logging
from collections import defaultdict
from collections.abc import Iterable
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING
from uuid import UUID

import msgspec

from tenuto.engine.rows import CorruptRow, task_of, write_changes
from tenuto.model.errors import Invalid, TenutoError
from tenuto.model.limits.concurrency import (
    HOLD,
    MOST,
    Concurrency,
    grant_order,
    needs_permit,
    steps_aside,
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

GIVEN = 200
"""Places given in one transaction; the next ones follow in another."""
LAST = 2**53
"""A number after all that a line may have."""
ADRIFT = 100
DEEPEST = 1_000
"""Levels of tasks above one in which its key is looked for."""
SETTLED_AFTER = timedelta(minutes=1)
"""How long nothing must have changed before a place is taken to be forgotten."""

Key = tuple[UUID, str]


def parse_concurrency(text: str) -> Concurrency:
    """What a task said about its concurrency, as the store keeps it."""
    return msgspec.json.decode(text, type=Concurrency)


class PermitChanges:
    """What one transaction does to concurrency keys. `settle` is its last script."""

    def __init__(self) -> None:
        self._asked: dict[UUID, UUID] = {}
        self._aside: dict[UUID, UUID] = {}
        self._left: defaultdict[Key, list[UUID]] = defaultdict(list)
        self.missed = False
        """Whether places are given that should have been given before."""

    @property
    def waiting(self) -> bool:
        """Whether there is something to settle."""
        return bool(self._asked or self._aside or self._left)

    def note(self, changes: Iterable[TaskChange]) -> None:
        """Those of the tasks that ask for a place, and those that are passed by from now on."""
        for change in changes:
            if needs_permit(change):
                self.request_permit(change.task.id, change.task.workspace)
            if steps_aside(change):
                self._aside[change.task.id] = change.task.workspace

    def request_permit(self, task: UUID, workspace: UUID) -> None:
        """A task wants a place."""
        self._asked[task] = workspace

    def leave_all(self, rows: Iterable[Row]) -> None:
        """Those of the tasks that have keys have ended."""
        for row in rows:
            if row["concurrency"] is not None:
                self.release_permit(
                    row["id"], row["workspace"], parse_concurrency(row["concurrency"]).key
                )

    def release_permit(self, task: UUID, workspace: UUID, key: str) -> None:
        """A task with a key has ended."""
        self._left[workspace, key].append(task)

    def look(self, workspace: UUID, key: str) -> None:
        """Give what places a key has, whoever left them."""
        _ = self._left[workspace, key]

    def supersede(self, cascade: "Cascade") -> Script[None]:
        """Cancel what those take the place of who want that, before any key is held."""
        rows = yield from _wishes(self._asked)
        for row in rows:
            wish = parse_concurrency(row["concurrency"])
            if wish.policy == "cancel_old":
                params = {"task": row["id"], "workspace": row["workspace"], "most": 1}
                mine = yield Statement("turn_show", params)
                number = mine[0]["number"] if mine and not mine[0]["held"] else LAST
                yield from cancel_before(cascade, row["id"], row["workspace"], wish, number)

    def grant_free_permits(self, cascade: "Cascade") -> Script[None]:
        """Give the places that are free to those who come next."""
        rows = yield from _wishes(self._asked | self._aside)
        found = {row["id"]: row for row in rows}
        for task in self._aside:
            if task in found:
                self.look(
                    found[task]["workspace"], parse_concurrency(found[task]["concurrency"]).key
                )
        newcomers: defaultdict[Key, list[tuple[UUID, Concurrency]]] = defaultdict(list)
        for task in self._asked:
            if task in found:
                wish = parse_concurrency(found[task]["concurrency"])
                newcomers[found[task]["workspace"], wish.key].append((task, wish))
        left = dict(self._left)
        self._asked, self._aside, self._left = {}, {}, defaultdict(list)
        keys = sorted({*left, *newcomers})
        if not keys:
            return
        wanted = [(*key, len(newcomers.get(key, ()))) for key in keys]
        locked = yield Statement("turn_keys_locked", rows={"wanted": wanted})
        last = {(row["workspace"], row["key"]): row["last"] for row in locked}
        if gone := sorted(task for tasks in left.values() for task in tasks):
            yield Statement("turn_leave", {"ids": gone})
        for key in keys:
            yield from self._settle_key(cascade, key, newcomers.get(key, []), last[key])

    def _settle_key(
        self,
        cascade: "Cascade",
        key: Key,
        newcomers: list[tuple[UUID, Concurrency]],
        last: int,
    ) -> Script[None]:
        first = last - len(newcomers) + 1
        numbers = {task: first + place for place, (task, _) in enumerate(newcomers)}
        if newcomers:
            asked = [(task, *key, numbers[task], wish.limit) for task, wish in newcomers]
            entered = yield Statement("turn_enter", rows={"asked": asked})
            numbers |= {row["id"]: row["number"] for row in entered}
        params = {"workspace": key[0], "key": key[1]}
        # Whoever would be turned away must have all the places there are.
        hurried = any(wish.policy == "cancel_new" for _, wish in newcomers)
        most = MOST if hurried else GIVEN
        line = yield Statement("turn_line", {**params, "most": most})
        if not line:
            yield Statement("turn_key_drop", params)
            return
        chosen = grant_order([(row["id"], row["most"]) for row in line], line[0]["places"])
        moved = yield from self._start_tasks(cascade, chosen)
        if len(moved) < len(chosen) or len(chosen) == most:
            cascade.defer("turn", chosen[0], key[0], {"key": key[1]})
        for task, wish in newcomers:
            if wish.policy == "cancel_new" and task not in moved:
                yield from self._cancel_new_task(cascade, task, wish)
            elif wish.policy == "cancel_old":
                older = yield _before(key[0], wish, numbers[task])
                if tasks_to_cancel([row["id"] for row in older], wish.limit):
                    data = {"concurrency": wish, "number": numbers[task]}
                    cascade.defer("supersede", task, key[0], data)

    def _start_tasks(self, cascade: "Cascade", chosen: list[UUID]) -> Script[set[UUID]]:
        """Let tasks run that are still as they were seen and that nobody else holds."""
        if not chosen:
            return set()
        rows = yield Statement("turn_candidates", {"ids": sorted(chosen)})
        decided: list[tuple[TaskChange, Command]] = []
        for row in rows:
            try:
                change = self._turned(task_of(row), cascade)
            except CorruptRow as error:
                yield _quarantine(error, cascade)
                continue
            if change is not None:
                decided.append((change, commands.ClearHold()))
        if decided:
            yield write_changes(decided)
            yield Statement("turn_take", {"ids": [change.task.id for change, _ in decided]})
            cascade.changes += [change for change, _ in decided]
        return {change.task.id for change, _ in decided}

    def _turned(self, task: Task, cascade: "Cascade") -> TaskChange | None:
        if task.status is not Status.WAITING or task.hold != HOLD or task.unmet > 0:
            return None
        try:
            change = decide(task, commands.ClearHold(), cascade.moment())
        except TenutoError:
            return None
        if change is None or not self.missed:
            return change
        why = "its turn had come before, and nobody had told it"
        event = msgspec.structs.replace(change.event, level="ERROR", message=why)
        return msgspec.structs.replace(change, event=event)

    def _cancel_new_task(self, cascade: "Cascade", task: UUID, wish: Concurrency) -> Script[None]:
        """End a newcomer for whom there is no place. Its row is this transaction's own."""
        why = f"no place is free for the concurrency key {wish.key!r}"
        yield from cascade.apply_to_each([task], lambda _: commands.Cancel(reason=why))
        yield Statement("turn_leave", {"ids": [task]})


def _wishes(tasks: dict[UUID, UUID]) -> Script[Rows]:
    if not tasks:
        return []
    rows = yield Statement("turn_wishes", rows={"wanted": sorted(tasks.items())})
    return rows


def check_above(parent: Task, wish: Concurrency) -> Script[None]:
    """Raise `Invalid` for a child whose key one above it has: each could wait for the other."""
    params = {"task": parent.id, "workspace": parent.workspace, "most": DEEPEST}
    rows = yield Statement("turns_above", params)
    if any(parse_concurrency(row["concurrency"]).key == wish.key for row in rows):
        raise Invalid(
            f"a task above it has the concurrency key {wish.key!r}, and keeps its place meanwhile",
            field="concurrency",
        )


def _quarantine(corrupt: CorruptRow, cascade: "Cascade") -> Statement:
    params = {"id": corrupt.task, "message": str(corrupt), "now": cascade.moment().now}
    return Statement("quarantine", {**params, "actor": "engine"})


def _before(workspace: UUID, wish: Concurrency, number: int) -> Statement:
    params = {"workspace": workspace, "key": wish.key, "number": number, "most": GIVEN + wish.limit}
    return Statement("turn_before", params)


def cancel_before(
    cascade: "Cascade", task: UUID, workspace: UUID, wish: Concurrency, number: int
) -> Script[None]:
    """Cancel as many of a key's older tasks as it takes for this one, which has that number."""
    rows = yield _before(workspace, wish, number)
    ids = tasks_to_cancel([row["id"] for row in rows], wish.limit)
    if len(ids) > GIVEN and number != LAST:
        data = {"concurrency": wish, "number": number}
        cascade.defer("supersede", task, workspace, data)
    if ids:
        why = f"a newer task has the concurrency key {wish.key!r}"
        yield from cascade.apply_to_each(sorted(ids), lambda _: commands.Cancel(reason=why))


class _SupersedeWork(msgspec.Struct):
    concurrency: Concurrency
    number: int


class _GrantPermitsWork(msgspec.Struct):
    key: str


def go_on(cascade: "Cascade", work: Row) -> Script[None]:
    """A piece of work: give the places of a key."""
    cascade.turns.look(
        work["workspace"], msgspec.json.decode(work["data"], type=_GrantPermitsWork).key
    )
    yield from ()


def go_on_superseding(cascade: "Cascade", work: Row) -> Script[None]:
    """A piece of work: cancel what came before a task while nobody saw it."""
    rows = yield Statement("task_state", {"ids": [work["subject"]]})
    if not rows or Status(rows[0]["status"]) in TERMINAL:
        return
    said = msgspec.json.decode(work["data"], type=_SupersedeWork)
    wish, workspace = said.concurrency, work["workspace"]
    yield from cancel_before(cascade, work["subject"], workspace, wish, said.number)


async def standing(core: "Core", task: UUID, workspace: UUID) -> str:
    """Where a task stands that waits for a place, in words."""
    params = {"task": task, "workspace": workspace, "most": 100_000}
    rows = await core.store.fetch(Statement("turn_show", params))
    if not rows:
        return "waits for a place under its concurrency key once nothing else is in its way"
    row = rows[0]
    return (
        f"waits for a place under the concurrency key {row['key']!r}:"
        f" {row['places']:,} of {row['most']:,} taken, {row['ahead']:,} before it in line"
    )


class PermitRepair:
    """What a coordinator mends of concurrency keys. Each `*_once` answers how many it mended."""

    def __init__(self, core: "Core") -> None:
        self._core = core

    async def recount_once(self, actor: str) -> int:
        """Give places that were forgotten. A repair is a fault of ours: it is told."""
        params = {"before": self._core.now() - SETTLED_AFTER, "most": ADRIFT}
        rows = await self._core.store.fetch(Statement("turns_adrift", params))
        mended = 0
        for row in rows:
            mended += await self._core.run_with_cascade(partial(_mended, row), actor)
        return mended


def _mended(found: Row, cascade: "Cascade") -> Script[int]:
    rows = yield Statement("task_state", {"ids": [found["id"]]})
    if not rows or rows[0]["status"] != found["status"]:
        return 0  # it has moved on
    log.error("task %s (%s) was forgotten by its concurrency key", found["id"], found["status"])
    cascade.turns.missed = True
    if Status(found["status"]) in TERMINAL:
        cascade.turns.release_permit(found["id"], found["workspace"], found["key"])
    else:
        cascade.turns.request_permit(found["id"], found["workspace"])
    return 1
