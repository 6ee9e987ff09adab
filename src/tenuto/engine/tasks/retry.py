"""Retries a finished task, and reopens the tasks, groups and flow that failed because of it.

The task's slot in its group or flow is open again. A group that failed because of the task runs
again, and its children that were skipped before their turn wait for their turn again. So tasks that
wait for the group's join get its outcome once, at the end.
"""

from datetime import datetime
from typing import Any
from uuid import UUID

import msgspec

from tenuto.engine.agents.subtask_tree import close_inbox_statement
from tenuto.engine.flows import groups
from tenuto.engine.flows.advance import Cascade
from tenuto.engine.flows.outcomes import next_child_params, pause_command
from tenuto.engine.flows.rows import flow_of, group_of, is_by_engine, is_paused
from tenuto.model.errors import Conflict
from tenuto.model.flows.groups import GROUP_OPEN, Group, GroupStatus
from tenuto.model.flows.progress import FLOW_OPEN, MAX_CASCADE_ROWS, Flow, FlowStatus
from tenuto.model.limits.budgets import HOLD as BUDGET
from tenuto.model.limits.concurrency import HOLD
from tenuto.model.tasks import commands
from tenuto.model.tasks.task import PRUNED, TERMINAL, Status, Task
from tenuto.store.protocol import Row, Script, Statement

PAGE_ROWS = 5_000
"""Rows of a group that one statement reads."""
_RETRY_LATER_S = 2.0
"""Seconds until the next check of tasks that wait for tasks with a deferred retry."""
_RETRYABLE = frozenset({Status.FAILED, Status.DEAD, Status.CANCELLED})
_REOPENABLE = frozenset({Status.FAILED, Status.SKIPPED})
_UNSUCCESSFUL = TERMINAL - {Status.COMPLETED}


class _RetryPosition(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a retried task's position in its flow."""

    is_counted: bool
    """True if the outcome of the task counts for its group or flow."""
    has_turn_ahead: bool = False
    """True if the task must wait for its turn, in a sequence or with its group."""
    is_paused: bool = False

    @property
    def hold(self) -> str | None:
        """The hold that the reopened task gets, `turn` or `paused`; `None` for neither."""
        return "turn" if self.has_turn_ahead else "paused" if self.is_paused else None


_NO_POSITION = _RetryPosition(is_counted=False)


class TaskRetry:
    """One retry within a cascade's transaction. The methods run in it (scripts).

    With `with_dependents`, also reopens what failed or was skipped because of the task.
    """

    def __init__(self, cascade: Cascade, workspace: UUID, *, with_dependents: bool) -> None:
        self._cascade = cascade
        self._workspace = workspace
        self._with_dependents = with_dependents
        self.reopened = 0
        self.has_deferred = False
        """True if some dependents will be reopened by deferred work."""

    def retry(self, task: UUID) -> Script[None]:
        """Retries a FAILED, DEAD or CANCELLED task with all its tries; `Conflict` for others.

        Raises `Conflict` also if the task waits for a task that failed. Reopens its dependents if
        `with_dependents`.
        """
        deferred_outcomes = yield Statement("deferred_outcomes_delete", {"ids": [task]})
        position = yield from self._reopen_slot(task, was_counted=not deferred_outcomes)
        unmet = yield from self._reopen_dependencies(task)
        waiters = yield Statement("tasks_with_waiters", {"ids": [task]})
        by_engine = yield from self._is_control(task)
        permit_rows = yield Statement("permit_requests", rows={"wanted": [(task, self._workspace)]})

        def choose(current: Task) -> commands.Command | None:
            if current.status not in _RETRYABLE:
                return None
            if by_engine:
                hold = "act" if position.hold is None else f"{position.hold}:act"
                return commands.Reopen(hold=hold, unmet=unmet)
            watched = position.is_counted or bool(waiters or permit_rows) or self._with_dependents
            return commands.Retry(
                watched=watched, unmet=unmet, hold=HOLD if permit_rows else position.hold
            )

        changed = yield from self._cascade.apply_to_each(
            [task], choose, queue_controls=True, include_finished=True
        )
        if not changed:
            raise Conflict("only a FAILED, DEAD or CANCELLED task can be retried")
        self.reopened += 1
        # As in `Core`: a retry closes the inbox entries of the task.
        context = self._cascade.decision_context()
        yield close_inbox_statement(task, context.now, context.actor, kept=BUDGET)
        if position.is_paused:
            yield from self._cascade.apply_to_each([task], pause_command)
        if self._with_dependents:
            yield from self._retry_dependents([task])

    def _reopen_dependencies(self, task: UUID) -> Script[int]:
        """Makes a task wait for open dependencies, returns how many; `Conflict` if one failed."""
        rows = yield Statement("dependencies_locked", {"task": task})
        unmet = [row for row in rows if not row["met"]]
        completed = [row["id"] for row in unmet if row["status"] == Status.COMPLETED]
        unfinished = [row["id"] for row in unmet if Status(row["status"]) not in TERMINAL]
        for row in unmet:
            if row["id"] not in completed and row["id"] not in unfinished:
                raise Conflict(
                    f"the task depends on task {row['id']}, which is {row['status']};"
                    f" retry task {row['id']} with its dependents (--cascade)"
                )
        if completed:
            pairs_met = [(task, need, True) for need in completed]
            yield Statement("dependency_resolve", rows={"pair": pairs_met})
        if unfinished:
            pairs = [(task, need) for need in unfinished]
            yield Statement("dependency_reopen", rows={"pair": pairs})
            yield Statement("mark_watched", {"ids": unfinished})
        return len(unfinished)

    def _is_control(self, task: UUID) -> Script[bool]:
        """Returns True if the engine runs the task itself (a control task)."""
        rows = yield Statement("flow_positions", rows={"wanted": [(task, self._workspace)]})
        return bool(rows) and is_by_engine(rows[0])

    def retry_dependents(self, cause: UUID, *, completed: bool) -> Script[None]:
        """Reopens the tasks that failed or were skipped because of `cause`, and their dependents.

        `completed` is True if `cause` has completed in the meantime. The caller has locked the
        row of `cause`.
        """
        yield from self._retry_dependents([cause], completed=completed)

    def _retry_dependents(self, causes: list[UUID], *, completed: bool = False) -> Script[None]:
        """Reopens dependents level by level; beyond `MAX_CASCADE_ROWS` the rest is deferred."""
        while causes:
            if self._cascade.rows_written >= MAX_CASCADE_ROWS:
                self._defer_rest(causes)
                return
            params = {"ids": sorted(causes), "most": MAX_CASCADE_ROWS}
            rows = yield Statement("failed_dependents", params)
            if len(rows) == MAX_CASCADE_ROWS:
                self._defer_rest(causes)
            pairs = sorted({(row["id"], row["needs"]) for row in rows})
            if not pairs:
                return
            if completed:  # its completion was applied before they waited for it again
                met = [(task, need, True) for task, need in pairs]
                yield Statement("dependency_resolve", rows={"pair": met})
                completed = False
            else:
                yield Statement("dependency_reopen", rows={"pair": pairs})
            tasks = {task for task, _ in pairs}
            unmet_rows = yield Statement("unmet_counts", {"ids": sorted(tasks)})
            unmet = {row["id"]: row["n"] for row in unmet_rows}
            # A task that also waits for another failed task would wait forever.
            causes = sorted(tasks - {row["id"] for row in unmet_rows if row["failed"]})
            rows = yield Statement("deferred_outcomes_delete", {"ids": causes})
            uncounted = {row["id"] for row in rows}
            positions = {}
            for task in causes:
                positions[task] = yield from self._reopen_slot(
                    task, was_counted=task not in uncounted
                )
            yield from self._reopen_tasks(causes, unmet, positions)

    def _defer_rest(self, causes: list[UUID]) -> None:
        """Leaves the dependents of these tasks to deferred work."""
        self.has_deferred = True
        for cause in causes:
            self._cascade.defer("revive", cause, self._workspace)

    def _reopen_tasks(
        self, ids: list[UUID], unmet: dict[UUID, int], positions: dict[UUID, _RetryPosition]
    ) -> Script[None]:
        """Reopens the FAILED and SKIPPED tasks among `ids` at their positions."""

        def choose(task: Task) -> commands.Command | None:
            if task.status not in _REOPENABLE or task.current_step == PRUNED:
                return None
            hold = HOLD if task.hold == HOLD else positions[task.id].hold
            if (task.hold or "").endswith("act"):
                hold = "act" if hold is None else f"{hold}:act"
            return commands.Reopen(hold=hold, unmet=unmet.get(task.id, 0))

        changed = yield from self._cascade.apply_to_each(
            ids, choose, queue_controls=True, include_finished=True
        )
        self.reopened += len(changed)
        if paused := [task for task in ids if positions[task].is_paused]:
            yield from self._cascade.apply_to_each(paused, pause_command)

    def _reopen_slot(self, task: UUID, *, was_counted: bool) -> Script[_RetryPosition]:
        """Counts the task's slot as open again, and returns its position; see `_reopen_group`.

        `was_counted` is False if the outcome is still deferred, so that the counters lack it.
        """
        rows = yield Statement("flow_positions", rows={"wanted": [(task, self._workspace)]})
        if not rows or rows[0]["flow"] is None:
            return _NO_POSITION
        status_rows = yield Statement("task_statuses", {"ids": [task]})
        was_failure = status_rows[0]["status"] != Status.SKIPPED
        row = rows[0]
        if row["group_id"] is None:
            return (
                yield from self._reopen_flow(
                    row["flow"], was_failure=was_failure, was_counted=was_counted
                )
            )
        return (
            yield from self._reopen_group(
                row["group_id"], row["slot"], was_failure=was_failure, was_counted=was_counted
            )
        )

    def _reopen_group(
        self, group_id: UUID, slot: int, *, was_failure: bool = True, was_counted: bool = True
    ) -> Script[_RetryPosition]:
        """Counts one slot of the group as open again and returns the position of the slot.

        Reopens a FAILED group if `with_dependents`. Any other finished group stays unchanged and
        gives `_NO_POSITION`. `was_failure`: the slot counted as failed.
        """
        rows = yield Statement("groups_locked", {"ids": [group_id]})
        group = group_of(rows[0])
        if group.status in GROUP_OPEN:
            is_waiting = group.status is GroupStatus.WAITING
            is_sequence_running = group.kind == "sequential" and not is_waiting
            has_turn_ahead = is_waiting or (
                is_sequence_running and group.turn is not None and group.turn < slot
            )
            if was_counted:
                turn = slot if is_sequence_running and group.turn is None else group.turn
                yield from self._cascade.write_group(
                    _with_open_slot(group, turn, was_failure=was_failure)
                )
            paused = yield from is_paused(group)
            return _RetryPosition(is_counted=True, has_turn_ahead=has_turn_ahead, is_paused=paused)
        if not self._with_dependents or group.status is not GroupStatus.FAILED:
            return _NO_POSITION  # ended from outside: other open tasks ended with it, too
        parent = yield from self._reopen_parent(group)
        if not parent.is_counted:
            return _NO_POSITION
        waiting_children = yield from self._reopen_skipped(group, paused=parent.is_paused)
        yield from self._watch_open_tasks(group)
        reopened = yield from self._recount(group, slot)
        if group.kind == "sequential":
            reopened = yield from self._restart_sequence(reopened, waiting_children)
        yield from self._cascade.write_group(reopened, "group_reopened")
        if reopened.made < reopened.total:
            self._cascade.defer("expand", group.id, group.workspace)
        has_turn_ahead = reopened.turn is not None and reopened.turn < slot
        # A reopened group runs at once, even in a sequence; only turns within it are respected.
        return _RetryPosition(
            is_counted=True, has_turn_ahead=has_turn_ahead, is_paused=parent.is_paused
        )

    def _restart_sequence(self, group: Group, waiting_children: set[UUID]) -> Script[Group]:
        """Returns the sequence with the turn at its first open child.

        Gives the turn to this child if it waits for its turn.
        """
        from_start = msgspec.structs.replace(group, turn=None)
        rows = yield Statement("next_in_turn", next_child_params(from_start))
        if not rows or group.turn is None or rows[0]["slot"] >= group.turn:
            return group
        if rows[0]["id"] in waiting_children:
            with_turn = yield from groups.give_turn_to_next(self._cascade, from_start)
            return msgspec.structs.replace(group, turn=with_turn.turn)
        return msgspec.structs.replace(group, turn=rows[0]["slot"])

    def _watch_open_tasks(self, group: Group) -> Script[None]:
        """Marks the group's open tasks as watched, so that their outcomes count again.

        These tasks were retried earlier, when their outcome no longer counted for the group.
        """
        params = {"group_id": group.id, "workspace": group.workspace}
        rows = yield from _fetch_all("group_tasks_open", params)
        ids = [row["id"] for row in rows]
        if ids:
            yield Statement("tasks_locked", {"ids": ids})
            yield Statement("mark_watched", {"ids": ids})

    def _recount(self, group: Group, slot: int | None) -> Script[Group]:
        """Returns the group as RUNNING, with counters from its children's rows.

        The child at `slot` counts as open.
        """
        params = {"parent": group.id, "workspace": group.workspace}
        rows = yield Statement("slot_outcomes", params)
        finished = [row for row in rows if not row["open"] and row["slot"] != slot]
        failed = sum(row["bad"] for row in finished)
        skipped = sum(row["skipped"] and not row["bad"] for row in finished)
        not_activated = group.total - group.made
        return msgspec.structs.replace(
            group,
            status=GroupStatus.RUNNING,
            finished_at=None,
            turn=slot if group.kind == "sequential" else None,
            open=len(rows) + not_activated - len(finished),
            succeeded=len(finished) - failed - skipped,
            failed=failed,
        )

    def _reopen_parent(self, group: Group) -> Script[_RetryPosition]:
        """Reopens the group's slot in its parent; `_NO_POSITION` if the parent stays finished."""
        if group.parent is None:
            return (yield from self._reopen_flow(group.flow))
        return (yield from self._reopen_group(group.parent, group.slot))

    def _reopen_skipped(self, group: Group, *, paused: bool) -> Script[set[UUID]]:
        """Reopens children that were skipped before their turn, to wait for it; returns their ids.

        The ids are those of tasks and groups. A task with another failed dependency stays skipped.
        """
        params = {"parent": group.id, "workspace": group.workspace}
        rows = yield from _fetch_all("children_skipped", params)
        tasks = yield from self._reopen_inner_dependencies(
            {row["id"] for row in rows if not row["is_group"]}
        )
        if tasks:
            yield Statement("deferred_outcomes_delete", {"ids": tasks})
            unmet_rows = yield Statement("unmet_counts", {"ids": tasks})
            unmet = {row["id"]: row["n"] for row in unmet_rows}
            position = _RetryPosition(is_counted=True, has_turn_ahead=True, is_paused=paused)
            yield from self._reopen_tasks(tasks, unmet, dict.fromkeys(tasks, position))
        group_ids = sorted(row["id"] for row in rows if row["is_group"])
        if group_ids:
            group_rows = yield Statement("groups_locked", {"ids": group_ids})
            for row in group_rows:
                child = group_of(row)
                # Children that were added to the group while it waited.
                yield from self._reopen_skipped(child, paused=paused)
                counted = yield from self._recount(child, None)
                waiting = msgspec.structs.replace(counted, status=GroupStatus.WAITING)
                yield from self._cascade.write_group(waiting, "group_reopened")
        return {*tasks, *group_ids}

    def _reopen_inner_dependencies(self, tasks: set[UUID]) -> Script[list[UUID]]:
        """Reopens failed dependencies among the tasks; returns tasks without other failed ones."""
        unmet_rows = yield Statement("dependencies_unmet", {"ids": sorted(tasks)})
        failed_rows = [row for row in unmet_rows if row["failed"]]
        remaining = set(tasks)
        while (
            blocked := {row["id"] for row in failed_rows if row["needs"] not in remaining}
            & remaining
        ):
            remaining -= blocked
        pairs = [(row["id"], row["needs"]) for row in failed_rows if row["id"] in remaining]
        if pairs:
            yield Statement("dependency_reopen", rows={"pair": pairs})
        return sorted(remaining)

    def _reopen_flow(
        self, flow_id: UUID, *, was_failure: bool = True, was_counted: bool = True
    ) -> Script[_RetryPosition]:
        """Counts one slot of the flow as open again, like `_reopen_group`."""
        rows = yield Statement("flows_locked", {"ids": [flow_id]})
        flow = flow_of(rows[0])
        failed = max(flow.failed - was_failure, 0)
        after = msgspec.structs.replace(flow, open=flow.open + 1, failed=failed)
        if flow.status in FLOW_OPEN:
            if was_counted:
                yield from self._cascade.write_flow(after)
            return _RetryPosition(is_counted=True, is_paused=flow.status is FlowStatus.PAUSED)
        if not self._with_dependents or flow.status is not FlowStatus.FAILED:
            return _NO_POSITION
        reopened = msgspec.structs.replace(after, status=FlowStatus.RUNNING, finished_at=None)
        yield from self._cascade.write_flow(reopened, "flow_reopened")
        return _RetryPosition(is_counted=True)


def _fetch_all(query: str, params: dict[str, Any]) -> Script[list[Row]]:
    """Returns all rows of a query, in pages: a group without some rows would finish too early."""
    page = yield Statement(query, params | {"most": PAGE_ROWS})
    rows = list(page)
    while len(page) == PAGE_ROWS:
        page = yield Statement(query, params | {"most": PAGE_ROWS, "after": page[-1]["id"]})
        rows += page
    return rows


def _with_open_slot(group: Group, turn: int | None, *, was_failure: bool) -> Group:
    """Returns the group with one more open slot, and one failure less if it was one."""
    failed = max(group.failed - was_failure, 0)
    return msgspec.structs.replace(group, open=group.open + 1, failed=failed, turn=turn)


def retry_failed(
    cascade: Cascade, flow: Flow, before: datetime, *, strict: bool = True
) -> Script[int]:
    """Retries the tasks of a flow that failed up to a time; returns how many were reopened.

    Tasks beyond `MAX_CASCADE_ROWS` are deferred. A task that waits for a task which stays failed is
    not retried; with `strict` it raises `Conflict`, unless it is deferred.
    """
    params = {
        "flow": flow.id,
        "workspace": flow.workspace,
        "before": before,
        "most": MAX_CASCADE_ROWS,
    }
    rows = yield Statement("flow_failed_tasks", params)
    remaining = [row["id"] for row in rows]
    has_more = len(remaining) == MAX_CASCADE_ROWS
    task_retry = TaskRetry(cascade, flow.workspace, with_dependents=True)
    while ready := (yield from _in_dependency_order(remaining)):
        for task in ready:
            yield from task_retry.retry(task)
        # Dependents of these tasks are open again, and further tasks may have waited for them.
        remaining = [task for task in remaining if task not in ready]
    if task_retry.reopened and (has_more or (remaining and task_retry.has_deferred)):
        cascade.defer("again", flow.id, flow.workspace, {"before": before})
    elif remaining and strict:
        yield from task_retry.retry(remaining[0])  # raises `Conflict` with the failed dependency
    elif remaining and (
        yield Statement("deferred_exists", {"workspace": flow.workspace, "kind": "revive"})
    ):
        cascade.defer("again", flow.id, flow.workspace, {"before": before}, _RETRY_LATER_S)
    return task_retry.reopened


def _in_dependency_order(ids: list[UUID]) -> Script[dict[UUID, None]]:
    """Returns the tasks whose failed dependencies are all among these tasks, in retry order.

    Each task comes after its dependencies, which must be open before the task is retried.
    """
    rows = yield Statement("dependencies_unmet", {"ids": sorted(ids)})
    causes: dict[UUID, set[UUID]] = {task: set() for task in ids}
    for row in rows:
        if row["status"] in _UNSUCCESSFUL:
            causes[row["id"]].add(row["needs"])
    ordered: dict[UUID, None] = {}
    while ready := [task for task in causes if causes[task] <= ordered.keys()]:
        ordered |= dict.fromkeys(ready)
        for task in ready:
            del causes[task]
    return ordered


class _RetryFailedWork(msgspec.Struct):
    """The data of deferred work of kind `again`."""

    before: datetime


def run_retry_failed_work(cascade: Cascade, work: Row) -> Script[None]:
    """Runs deferred work: retries more failed tasks of a flow, unless the flow was ended since.

    A flow that was cancelled before the retry stays CANCELLED; only its retried tasks run.
    """
    rows = yield Statement("flows_locked", {"ids": [work["subject"]]})
    flow = flow_of(rows[0])
    before = msgspec.json.decode(work["data"], type=_RetryFailedWork).before
    cancelled_since = flow.finished_at is not None and flow.finished_at > before
    if flow.status is FlowStatus.COMPLETED or (
        flow.status is FlowStatus.CANCELLED and cancelled_since
    ):
        return
    yield from retry_failed(cascade, flow, before, strict=False)


def run_retry_dependents_work(cascade: Cascade, work: Row) -> Script[None]:
    """Runs deferred work: reopens further dependents of a task, unless the task failed again."""
    rows = yield Statement("tasks_locked", {"ids": [work["subject"]]})
    status = Status(rows[0]["status"]) if rows else None
    if status in _UNSUCCESSFUL:
        return  # it has failed again in the meantime
    task_retry = TaskRetry(cascade, work["workspace"], with_dependents=True)
    yield from task_retry.retry_dependents(work["subject"], completed=status is Status.COMPLETED)
