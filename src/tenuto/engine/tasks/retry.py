"""Retry: an ended task is tried again, and with it what ended because of it.

A slot of a group or flow that ended badly is open again; a group that failed for it runs again, and
what never had its turn waits for it again. So whatever waits for the join gets it once, in the end.
"""

from datetime import datetime
from typing import Any
from uuid import UUID

import msgspec

from tenuto.engine.agents.subtask_tree import closed
from tenuto.engine.flows.advance import Cascade
from tenuto.engine.flows.outcomes import hold_if_paused, place_of_turn
from tenuto.engine.flows.rows import flow_of, group_of, is_by_engine, is_paused
from tenuto.model.errors import Conflict
from tenuto.model.flows.progress import (
    CASCADE,
    FLOW_OPEN,
    GROUP_OPEN,
    Flow,
    FlowStatus,
    Group,
    GroupStatus,
)
from tenuto.model.limits.budgets import HOLD as BUDGET
from tenuto.model.limits.concurrency import HOLD
from tenuto.model.tasks import commands
from tenuto.model.tasks.task import PRUNED, TERMINAL, Status, Task
from tenuto.store.protocol import Row, Script, Statement

PAGE = 5_000
"""Rows of a group that one statement reads."""
_REVIVING_S = 2.0
"""How long until somebody looks again at what waits for tasks that are still to be revived."""
_RETRIED = frozenset({Status.FAILED, Status.DEAD, Status.CANCELLED})
_REVIVED = frozenset({Status.FAILED, Status.SKIPPED})
_ENDED_BADLY = TERMINAL - {Status.COMPLETED}


class _RetryPosition(msgspec.Struct, frozen=True, kw_only=True):
    """Where a task is tried again: whether its end matters, and what it has to wait for there."""

    counts: bool
    to_come: bool = False
    """Whether its turn is still to come, in a sequence or with its group."""
    paused: bool = False

    @property
    def hold(self) -> str | None:
        return "turn" if self.to_come else "paused" if self.paused else None


_NOWHERE = _RetryPosition(counts=False)


class TaskRetry:
    """One retry within a cascade's transaction. Its methods are scripts."""

    def __init__(self, cascade: Cascade, workspace: UUID, *, deep: bool) -> None:
        self._cascade = cascade
        self._workspace = workspace
        self._deep = deep
        self.revived = 0
        self.unfinished = False
        """Whether something that ended because of others was left for later."""

    def retry(self, task: UUID) -> Script[None]:
        """Give an ended task its tries again; deep, also what ended because of it."""
        untold = yield Statement("work_forget", {"ids": [task]})
        place = yield from self._reopen_slot(task, told=not untold)
        unmet = yield from self._needs(task)
        waited = yield Statement("waited_for", {"ids": [task]})
        by_engine = yield from self._is_control(task)
        keyed = yield Statement("turn_wishes", rows={"wanted": [(task, self._workspace)]})

        def again(found: Task) -> commands.Command | None:
            if found.status not in _RETRIED:
                return None
            if by_engine:
                hold = "act" if place.hold is None else f"{place.hold}:act"
                return commands.Reopen(hold=hold, unmet=unmet)
            watched = place.counts or bool(waited or keyed) or self._deep
            return commands.Retry(watched=watched, unmet=unmet, hold=HOLD if keyed else place.hold)

        changed = yield from self._cascade.apply_to_each([task], again, acts=True, ended=True)
        if not changed:
            raise Conflict("only a task that failed, died or was cancelled can be retried")
        self.revived += 1
        # As in `Core`: whoever retries a task has seen to what was put to people for it.
        moment = self._cascade.moment()
        yield closed(task, moment.now, moment.actor, kept=BUDGET)
        if place.paused:
            yield from self._cascade.apply_to_each([task], hold_if_paused)
        if self._deep:
            yield from self._victims([task])

    def _needs(self, task: UUID) -> Script[int]:
        """How much of what the task waits for has not ended; raises where some ended badly."""
        rows = yield Statement("needs_locked", {"task": task})
        left = [row for row in rows if not row["met"]]
        done = [row["id"] for row in left if row["status"] == Status.COMPLETED]
        alive = [row["id"] for row in left if Status(row["status"]) not in TERMINAL]
        for row in left:
            if row["id"] not in done and row["id"] not in alive:
                raise Conflict(
                    f"the task waits for {row['id']}, which is {row['status']}; retry that one,"
                    " with what ended because of it"
                )
        if done:
            settled = [(task, need, True) for need in done]
            yield Statement("dependency_settle", rows={"pair": settled})
        if alive:
            pairs = [(task, need) for need in alive]
            yield Statement("dependency_reopen", rows={"pair": pairs})
            yield Statement("watch", {"ids": alive})
        return len(alive)

    def _is_control(self, task: UUID) -> Script[bool]:
        rows = yield Statement("places", rows={"wanted": [(task, self._workspace)]})
        return bool(rows) and is_by_engine(rows[0])

    def retry_dependents(self, cause: UUID, *, completed: bool) -> Script[None]:
        """Go on reviving what ended because of this one, which may have COMPLETED meanwhile.

        The caller holds its row.
        """
        yield from self._victims([cause], completed=completed)

    def _victims(self, causes: list[UUID], *, completed: bool = False) -> Script[None]:
        while causes:
            if self._cascade.spent >= CASCADE:
                self._defer_rest(causes)
                return
            params = {"ids": sorted(causes), "most": CASCADE}
            rows = yield Statement("victims", params)
            if len(rows) == CASCADE:
                self._defer_rest(causes)
            pairs = sorted({(row["id"], row["needs"]) for row in rows})
            if not pairs:
                return
            if completed:  # its end was told before they waited for it again
                settled = [(task, need, True) for task, need in pairs]
                yield Statement("dependency_settle", rows={"pair": settled})
                completed = False
            else:
                yield Statement("dependency_reopen", rows={"pair": pairs})
            tasks = {task for task, _ in pairs}
            unmet = yield Statement("unmet", {"ids": sorted(tasks)})
            left = {row["id"]: row["n"] for row in unmet}
            # Who waits for something else that failed would wait for ever.
            causes = sorted(tasks - {row["id"] for row in unmet if row["failed"]})
            rows = yield Statement("work_forget", {"ids": causes})
            untold = {row["id"] for row in rows}
            places = {}
            for task in causes:
                places[task] = yield from self._reopen_slot(task, told=task not in untold)
            yield from self._revive(causes, left, places)

    def _defer_rest(self, causes: list[UUID]) -> None:
        self.unfinished = True
        for cause in causes:
            self._cascade.defer("revive", cause, self._workspace)

    def _revive(
        self, ids: list[UUID], unmet: dict[UUID, int], places: dict[UUID, _RetryPosition]
    ) -> Script[None]:
        def again(task: Task) -> commands.Command | None:
            if task.status not in _REVIVED or task.current_step == PRUNED:
                return None
            hold = HOLD if task.hold == HOLD else places[task.id].hold
            if (task.hold or "").endswith("act"):
                hold = "act" if hold is None else f"{hold}:act"
            return commands.Reopen(hold=hold, unmet=unmet.get(task.id, 0))

        changed = yield from self._cascade.apply_to_each(ids, again, acts=True, ended=True)
        self.revived += len(changed)
        if paused := [task for task in ids if places[task].paused]:
            yield from self._cascade.apply_to_each(paused, hold_if_paused)

    # Where the task stands.

    def _reopen_slot(self, task: UUID, *, told: bool) -> Script[_RetryPosition]:
        """Count the task's slot as open again, where its end will matter to somebody.

        An end that was not `told` yet was not counted either.
        """
        rows = yield Statement("places", rows={"wanted": [(task, self._workspace)]})
        if not rows or rows[0]["flow"] is None:
            return _NOWHERE
        states = yield Statement("task_state", {"ids": [task]})
        bad = states[0]["status"] != Status.SKIPPED
        row = rows[0]
        if row["group_id"] is None:
            return (yield from self._reopen_flow(row["flow"], bad=bad, told=told))
        return (yield from self._reopen_group(row["group_id"], row["slot"], bad=bad, told=told))

    def _reopen_group(
        self, group_id: UUID, slot: int, *, bad: bool = True, told: bool = True
    ) -> Script[_RetryPosition]:
        rows = yield Statement("groups_locked", {"ids": [group_id]})
        group = group_of(rows[0])
        if group.status in GROUP_OPEN:
            waits = group.status is GroupStatus.WAITING
            in_turn = group.kind == "sequential" and not waits
            to_come = waits or (in_turn and group.turn is not None and group.turn < slot)
            if told:
                turn = slot if in_turn and group.turn is None else group.turn
                yield self._cascade.group_change(_with_slot(group, turn, bad=bad))
            paused = yield from is_paused(group)
            return _RetryPosition(counts=True, to_come=to_come, paused=paused)
        if not self._deep or group.status is not GroupStatus.FAILED:
            return _NOWHERE  # ended from outside, it has left more behind than this one
        above = yield from self._reopen_above(group)
        if not above.counts:
            return _NOWHERE
        waiting = yield from self._revive_turns(group, paused=above.paused)
        yield from self._watch_open(group)
        again = yield from self._recounted(group, slot)
        if group.kind == "sequential":
            again = yield from self._restart_sequence(again, waiting)
        yield self._cascade.group_change(again, "group_reopened")
        if again.made < again.total:
            self._cascade.defer("expand", group.id, group.workspace)
        to_come = again.turn is not None and again.turn < slot
        # A group that runs again does so at once, in a sequence, too: only its own turns are kept.
        return _RetryPosition(counts=True, to_come=to_come, paused=above.paused)

    def _restart_sequence(self, group: Group, waiting: set[UUID]) -> Script[Group]:
        """The sequence with the turn at its first open child, which has it if it waits for it."""
        before_all = msgspec.structs.replace(group, turn=None)
        rows = yield Statement("next_in_turn", place_of_turn(before_all))
        if not rows or group.turn is None or rows[0]["slot"] >= group.turn:
            return group
        if rows[0]["id"] in waiting:
            again = yield from self._cascade.give_turn_to_next(before_all)
            return msgspec.structs.replace(group, turn=again.turn)
        return msgspec.structs.replace(group, turn=rows[0]["slot"])

    def _watch_open(self, group: Group) -> Script[None]:
        """What was tried again before, when its end did not matter, counts from now on."""
        where = {"group_id": group.id, "workspace": group.workspace}
        rows = yield from _all("group_tasks_open", where)
        ids = [row["id"] for row in rows]
        if ids:
            yield Statement("tasks_locked", {"ids": ids})
            yield Statement("watch", {"ids": ids})

    def _recounted(self, group: Group, slot: int | None) -> Script[Group]:
        """The group, running, as its children's rows have it, with this slot open if any."""
        params = {"parent": group.id, "workspace": group.workspace}
        rows = yield Statement("slot_ends", params)
        ended = [row for row in rows if not row["open"] and row["slot"] != slot]
        bad = sum(row["bad"] for row in ended)
        skipped = sum(row["skipped"] and not row["bad"] for row in ended)
        unmade = group.total - group.made
        return msgspec.structs.replace(
            group,
            status=GroupStatus.RUNNING,
            finished_at=None,
            turn=slot if group.kind == "sequential" else None,
            open=len(rows) + unmade - len(ended),
            succeeded=len(ended) - bad - skipped,
            failed=bad,
        )

    def _reopen_above(self, group: Group) -> Script[_RetryPosition]:
        if group.parent is None:
            return (yield from self._reopen_flow(group.flow))
        return (yield from self._reopen_group(group.parent, group.slot))

    def _revive_turns(self, group: Group, *, paused: bool) -> Script[set[UUID]]:
        """Let what never had its turn wait for it again; the ids of all that does."""
        where = {"parent": group.id, "workspace": group.workspace}
        rows = yield from _all("skipped_in_turn", where)
        tasks = yield from self._retryable_together(
            {row["id"] for row in rows if not row["is_group"]}
        )
        if tasks:
            yield Statement("work_forget", {"ids": tasks})
            unmet = yield Statement("unmet", {"ids": tasks})
            left = {row["id"]: row["n"] for row in unmet}
            in_turn = _RetryPosition(counts=True, to_come=True, paused=paused)
            yield from self._revive(tasks, left, dict.fromkeys(tasks, in_turn))
        groups = sorted(row["id"] for row in rows if row["is_group"])
        if groups:
            found = yield Statement("groups_locked", {"ids": groups})
            for row in found:
                child = group_of(row)
                # Those that joined it while it waited.
                yield from self._revive_turns(child, paused=paused)
                counted = yield from self._recounted(child, None)
                waiting = msgspec.structs.replace(counted, status=GroupStatus.WAITING)
                yield self._cascade.group_change(waiting, "group_reopened")
        return {*tasks, *groups}

    def _retryable_together(self, tasks: set[UUID]) -> Script[list[UUID]]:
        """Those of the tasks that wait for nothing that ended badly but for each other."""
        found = yield Statement("needs_unmet", {"ids": sorted(tasks)})
        rows = [row for row in found if row["failed"]]
        left = set(tasks)
        while lost := {row["id"] for row in rows if row["needs"] not in left} & left:
            left -= lost
        pairs = [(row["id"], row["needs"]) for row in rows if row["id"] in left]
        if pairs:
            yield Statement("dependency_reopen", rows={"pair": pairs})
        return sorted(left)

    def _reopen_flow(
        self, flow_id: UUID, *, bad: bool = True, told: bool = True
    ) -> Script[_RetryPosition]:
        rows = yield Statement("flows_locked", {"ids": [flow_id]})
        flow = flow_of(rows[0])
        failed = max(flow.failed - bad, 0)
        after = msgspec.structs.replace(flow, open=flow.open + 1, failed=failed)
        if flow.status in FLOW_OPEN:
            if told:
                yield self._cascade.flow_change(after)
            return _RetryPosition(counts=True, paused=flow.status is FlowStatus.PAUSED)
        if not self._deep or flow.status is not FlowStatus.FAILED:
            return _NOWHERE
        again = msgspec.structs.replace(after, status=FlowStatus.RUNNING, finished_at=None)
        yield self._cascade.flow_change(again, "flow_reopened")
        return _RetryPosition(counts=True)


def _all(query: str, where: dict[str, Any]) -> Script[list[Row]]:
    """What a query finds, however much that is: a group without the rest would end too early."""
    found = yield Statement(query, where | {"most": PAGE})
    rows = list(found)
    while len(found) == PAGE:
        found = yield Statement(query, where | {"most": PAGE, "after": found[-1]["id"]})
        rows += found
    return rows


def _with_slot(group: Group, turn: int | None, *, bad: bool) -> Group:
    failed = max(group.failed - bad, 0)
    return msgspec.structs.replace(group, open=group.open + 1, failed=failed, turn=turn)


def from_failed(
    cascade: Cascade, flow: Flow, before: datetime, *, asked: bool = True
) -> Script[int]:
    """Try again what had failed in a flow by an instant; answers of how many that is true now.

    Beyond a bound the rest is left for later. What waits for something that stays as it ended is
    left alone; to who `asked` it is a `Conflict`, unless it is left for later.
    """
    params = {"flow": flow.id, "workspace": flow.workspace, "before": before, "most": CASCADE}
    rows = yield Statement("flow_failed", params)
    left = [row["id"] for row in rows]
    more = len(left) == CASCADE
    again = TaskRetry(cascade, flow.workspace, deep=True)
    while found := (yield from _in_dependency_order(left)):
        for task in found:
            yield from again.retry(task)
        # What ended because of these lives again, and others may have waited for that.
        left = [task for task in left if task not in found]
    if again.revived and (more or (left and again.unfinished)):
        cascade.defer("again", flow.id, flow.workspace, {"before": before})
    elif left and asked:
        yield from again.retry(left[0])  # it says what it waits for
    elif left and (yield Statement("work_left", {"workspace": flow.workspace, "kind": "revive"})):
        cascade.defer("again", flow.id, flow.workspace, {"before": before}, _REVIVING_S)
    return again.revived


def _in_dependency_order(ids: list[UUID]) -> Script[dict[UUID, None]]:
    """Those of the tasks that wait for nothing that ended badly but for each other, in order.

    None is before what it waits for: that has to be alive when it is tried again.
    """
    rows = yield Statement("needs_unmet", {"ids": sorted(ids)})
    causes: dict[UUID, set[UUID]] = {task: set() for task in ids}
    for row in rows:
        if row["status"] in _ENDED_BADLY:
            causes[row["id"]].add(row["needs"])
    found: dict[UUID, None] = {}
    while free := [task for task in causes if causes[task] <= found.keys()]:
        found |= dict.fromkeys(free)
        for task in free:
            del causes[task]
    return found


class _RetryFailedWork(msgspec.Struct):
    before: datetime


def go_on_from_failed(cascade: Cascade, work: Row) -> Script[None]:
    """A piece of work: try more of a flow again, unless it was ended meanwhile.

    One that had been cancelled before stays so, but for those of its tasks that are tried again.
    """
    rows = yield Statement("flows_locked", {"ids": [work["subject"]]})
    flow = flow_of(rows[0])
    before = msgspec.json.decode(work["data"], type=_RetryFailedWork).before
    ended = flow.finished_at is not None and flow.finished_at > before
    if flow.status is FlowStatus.COMPLETED or (flow.status is FlowStatus.CANCELLED and ended):
        return
    yield from from_failed(cascade, flow, before, asked=False)


def go_on(cascade: Cascade, work: Row) -> Script[None]:
    """A piece of work: revive what is left of what ended because of a task."""
    rows = yield Statement("tasks_locked", {"ids": [work["subject"]]})
    status = Status(rows[0]["status"]) if rows else None
    if status in _ENDED_BADLY:
        return  # it has failed again meanwhile
    again = TaskRetry(cascade, work["workspace"], deep=True)
    yield from again.retry_dependents(work["subject"], completed=status is Status.COMPLETED)
