"""Writes all follow-ups of finished tasks in the same transaction: dependents, joins, successors.

A cascade lives as long as its transaction. It locks rows in one order: tasks, groups, flows, each
by id. Work beyond `MAX_CASCADE_ROWS` is stored as `flow_work` rows and runs in later transactions.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any
from uuid import UUID

import msgspec

from tenuto.clock import Clock
from tenuto.engine.agents.subtask_tree import (
    CANCEL_BELOW,
    cancel_subtasks,
    close_inbox_statement,
    close_open_questions,
    is_cancel,
    wake_parents,
)
from tenuto.engine.flows import groups
from tenuto.engine.flows.activation import ActivationBatch, IsFreshLane
from tenuto.engine.flows.activation_rows import ActivationRequest, ActivationResult
from tenuto.engine.flows.outcomes import (
    FinishedTask,
    SlotOutcome,
    activation_request,
    cancel_command,
    command_for_dependent,
    is_met,
    is_plain_success,
    result_source,
    skip_command,
)
from tenuto.engine.flows.plans import PlanCache
from tenuto.engine.flows.routing import ask_for_approval, find_next_step
from tenuto.engine.flows.rows import AuditNote, flow_of, flow_statement, group_of, group_statement
from tenuto.engine.limits.concurrency import PermitChanges
from tenuto.engine.rows import CorruptRow, changes_statement, parse_task
from tenuto.model.agents.matching import Requirements
from tenuto.model.errors import TenutoError
from tenuto.model.flows.groups import Group, SlotResult, join_status, slot_result
from tenuto.model.flows.progress import (
    FLOW_OPEN,
    MAX_CASCADE_ROWS,
    ControlTaskFailed,
    Flow,
    FlowStatus,
    NextStep,
    flow_end_status,
)
from tenuto.model.tasks import commands
from tenuto.model.tasks.commands import Command, DecisionContext
from tenuto.model.tasks.decide import decide
from tenuto.model.tasks.submission import NewTask
from tenuto.model.tasks.task import TERMINAL, Status, Task, TaskChange
from tenuto.store.protocol import Row, Script, Statement


class Cascade:
    """Collects and writes the follow-ups of one transaction. Methods that write are scripts."""

    def __init__(
        self,
        clock: Clock,
        plans: PlanCache,
        actor: str | None,
        is_fresh: IsFreshLane,
        *,
        strict: bool = False,
    ) -> None:
        self._strict = strict
        """True if `ControlTaskFailed` is raised to the caller, who can still fail the task."""
        self._clock = clock
        self.plans = plans
        self.actor = actor
        self.now = clock.now()
        """The time of all changes of the transaction."""
        self._activations = ActivationBatch(clock, plans, actor, self.now, is_fresh)
        self._finished: list[FinishedTask] = []
        self._next_steps: dict[UUID, NextStep | None] = {}
        """What follows control tasks that were resolved in this cascade, by task id."""
        self._outcomes: list[SlotOutcome] = []
        self._control_tasks: list[tuple[UUID, UUID]] = []
        self._stopping: list[tuple[Group, bool]] = []
        self._cancelled_parents: list[tuple[UUID, UUID]] = []
        self._deferred: list[tuple[Any, ...]] = []
        self.permits = PermitChanges()
        """Requests and releases of concurrency permits."""
        self.rows_written = 0
        """Rows counted against `MAX_CASCADE_ROWS`."""
        self.changes: list[TaskChange] = []
        """Task changes to notify workers of after the commit."""
        self.lanes: set[int] = set()
        """Ids of lanes in which a task became claimable."""
        self.has_deferred_work = False
        """True if work was deferred to a later transaction."""

    def run(self, finished: Iterable[FinishedTask] = ()) -> Script[None]:
        """Writes the follow-ups of finished tasks and of queued requests; defers a large rest.

        Above `MAX_CASCADE_ROWS`, it writes rows of deferred work instead. The caller has written
        that the tasks have finished.
        """
        self._finished += finished
        yield from self._run_follow_ups()
        if self.permits.has_work:
            yield from self._update_permits()
        if self._deferred:
            self.has_deferred_work = True
            deferred, self._deferred = self._deferred, []
            yield Statement("deferred_add", rows={"work": deferred})

    def _update_permits(self) -> Script[None]:
        """Cancels superseded tasks and grants free permits; defers the follow-ups of the grants."""
        yield from self.permits.cancel_superseded(self)
        yield from self._run_follow_ups()
        yield from self.permits.grant_free_permits(self)
        for finished in self._finished:
            self.defer("ended", finished.id, finished.workspace)
        for task, workspace in self._cancelled_parents:
            self.defer(CANCEL_BELOW, task, workspace)
        self._finished, self._cancelled_parents = [], []

    def _run_follow_ups(self) -> Script[None]:
        """Writes the queued follow-ups, and those they lead to, until nothing is queued."""
        while self._activations.has_work or any(
            (
                self._finished,
                self._cancelled_parents,
                self._outcomes,
                self._control_tasks,
                self._stopping,
            )
        ):
            if self._cancelled_parents:
                parents, self._cancelled_parents = self._cancelled_parents, []
                yield from cancel_subtasks(self, parents)
            if self._finished:
                yield from self._process_finished_tasks()
            if self._outcomes:
                yield from self._count_ended_slots()
            if self._stopping:
                yield from self._stop_children()
            if self._activations.has_work:
                yield from self._activate_requested()
            if self._control_tasks:
                yield from self._run_control_tasks()

    def request_activation(self, request: ActivationRequest) -> None:
        """Queues the activation of a task or group."""
        self._activations.add_request(request)

    def add_child(self, group: Group, new: NewTask) -> Script[UUID]:
        """Inserts a task as last child of a locked, open group and counts it; returns its id."""
        child = yield from self._activations.add_child(group, new, self)
        turn = child.slot if group.kind == "sequential" and child.has_turn else group.turn
        yield from self.write_group(msgspec.structs.replace(group, open=group.open + 1, turn=turn))
        self.lanes |= child.lanes
        self._control_tasks += child.control_tasks
        return child.id

    def queue_group_children(self, group: Group) -> None:
        """Queues the creation of a group's children that are not created yet."""
        self._activations.add_group(group)

    def queue_control_tasks(self, tasks: Iterable[tuple[UUID, UUID]]) -> None:
        """Queues control tasks to run in this cascade, as (id, workspace) pairs."""
        self._control_tasks += tasks

    def queue_stop_of_children(self, group: Group, *, cancel: bool) -> None:
        """Queues the stop of a group's open children: cancel if `cancel` or started, else skip."""
        self._stopping.append((group, cancel))

    def queue_outcome(self, outcome: SlotOutcome) -> None:
        """Queues the outcome of a slot, to be counted in its group or flow."""
        self._outcomes.append(outcome)

    def queue_cancel_of_subtasks(self, parents: Iterable[tuple[UUID, UUID]]) -> None:
        """Queues the cancel of the open subtasks of `parents`, which are (id, workspace) pairs."""
        self._cancelled_parents += parents

    def defer(
        self, kind: str, subject: UUID, workspace: UUID, data: Any = None, wait_s: float = 0
    ) -> None:
        """Queues a `flow_work` row, which runs in its own transaction, after `wait_s` seconds."""
        text = None if data is None else msgspec.json.encode(data).decode()
        due = self.now + timedelta(seconds=wait_s)
        self._deferred.append((self._clock.new_id(), workspace, kind, subject, text, due))

    @property
    def touched_lanes(self) -> list[Requirements]:
        """The lanes whose last use this transaction recorded."""
        return self._activations.touched_lanes

    def decision_context(self) -> DecisionContext:
        """Returns the time, a random number and the actor for a decision."""
        return DecisionContext(self.now, self._clock.random(), self.actor)

    def _process_finished_tasks(self) -> Script[None]:
        """Runs the follow-ups of finished tasks, or defers them if the limit of rows is reached."""
        finished, self._finished = self._finished, []
        if self.rows_written >= MAX_CASCADE_ROWS:
            for task in finished:
                self.defer("ended", task.id, task.workspace)
            return
        yield from self.notify_dependents(finished)
        yield from self._queue_follow_ups(finished)

    def notify_dependents(self, finished: Sequence[FinishedTask]) -> Script[None]:
        """Unblocks, fails or skips dependents of these tasks, up to a limit; defers the others.

        A dependent that waits for other tasks too only counts a completed one. Locks dependents.
        """
        by_id = {task.id: task for task in finished if task.awaited}
        if not by_id:
            return
        rows = yield Statement("dependents", {"ids": sorted(by_id), "most": MAX_CASCADE_ROWS})
        if len(rows) == MAX_CASCADE_ROWS:
            for task in by_id.values():
                self.defer("dependents", task.id, task.workspace)
        if not rows:
            return
        self.rows_written += len(rows)
        individual = {row["id"] for row in rows if not is_plain_success(row, by_id)}
        met_counts = Counter(row["id"] for row in rows if row["id"] not in individual)
        pairs = [(row["id"], row["needs"], is_met(row, by_id)) for row in rows]
        if not met_counts:
            yield Statement("dependency_resolve", rows={"pair": pairs})
        else:
            params = {"now": self.now, "actor": self.actor}
            met = sorted(met_counts.items())
            unblocked = yield Statement("unblock", params, {"pair": pairs, "hit": met})
            self.lanes |= {row["lane"] for row in unblocked if row["status"] == Status.PENDING}
        if individual:
            yield from self._notify_individually(
                [row for row in rows if row["id"] in individual], by_id
            )

    def _notify_individually(
        self, rows: list[Row], by_id: dict[UUID, FinishedTask]
    ) -> Script[None]:
        """Counts, fails or skips each dependent; `rows` has a row per dependent and dependency."""
        rows_by_task: defaultdict[UUID, list[Row]] = defaultdict(list)
        for row in rows:
            rows_by_task[row["id"]].append(row)
        yield from self.apply_to_each(
            sorted(rows_by_task),
            lambda task: command_for_dependent(task, rows_by_task[task.id], by_id),
            queue_controls=True,
        )

    def apply_to_each(
        self,
        ids: list[UUID],
        choose_command: Callable[[Task], Command | None],
        *,
        queue_controls: bool = False,
        include_finished: bool = False,
    ) -> Script[list[TaskChange]]:
        """Applies each chosen command that is allowed, queues follow-ups; returns the changes.

        Locks the tasks. Leaves out those without a command, those whose status does not allow it,
        invalid rows, and finished tasks unless `include_finished`. `queue_controls`: queues control
        tasks that became ready.
        """
        rows = yield Statement("tasks_locked", {"ids": ids})
        decided: list[tuple[TaskChange, Command]] = []
        for row in rows:
            try:
                task = parse_task(row)
            except CorruptRow:
                continue  # it is quarantined when it is processed by itself
            if task.status in TERMINAL and not include_finished:
                continue
            command = choose_command(task)
            if command is None:
                continue
            try:
                change = decide(task, command, self.decision_context())
            except TenutoError:
                continue  # the command is not possible in its present status
            if change is not None:
                decided.append((change, command))
                self._queue_change(task, change)
        if decided:
            yield changes_statement(decided)
            self.rows_written += len(decided)
        yield from close_open_questions([change for change, _ in decided], self.now, self.actor)
        if queue_controls:
            self._control_tasks += [
                (change.task.id, change.task.workspace)
                for change, _ in decided
                if change.task.hold == "act" and change.task.unmet == 0
            ]
        return [change for change, _ in decided]

    def _queue_change(self, before: Task, change: TaskChange) -> None:
        """Queues the follow-ups of one changed task: notices, permits, its end, its subtasks."""
        after = change.task
        self.changes.append(change)
        self.permits.record([change])
        if after.status in TERMINAL and before.watched:
            self._finished.append(FinishedTask(after.id, after.workspace, after.status))
        if is_cancel(change):
            self._cancelled_parents.append((after.id, after.workspace))

    def _queue_follow_ups(self, finished: Sequence[FinishedTask]) -> Script[None]:
        """Wakes parents, closes approvals' inbox items, queues permits, successors, ended slots."""
        rows = [task.position for task in finished if task.position is not None]
        unread = [(task.id, task.workspace) for task in finished if task.position is None]
        if unread:
            rows += yield Statement("flow_positions", rows={"wanted": unread})
        statuses = {task.id: task.status for task in finished}
        if children := sorted(row["id"] for row in rows if row["parent"] is not None):
            yield from wake_parents(self, children)
        self.permits.record_finished(rows)
        for row in rows:
            if row["kind"] == "approval":
                yield close_inbox_statement(row["id"], self.now, self.actor)
            if row["flow"] is None:
                continue
            status = statuses[row["id"]]
            step = None
            result = slot_result(status)
            if status is Status.COMPLETED:
                try:
                    step = yield from self._find_next_step(row)
                except ControlTaskFailed:
                    if self._strict:
                        raise
                    result = SlotResult.FAILURE
            if step is None:
                source = result_source(row)
                self._outcomes.append(
                    SlotOutcome(row["flow"], row["group_id"], row["slot"], result, source)
                )
            else:
                self.request_activation(activation_request(row, step))

    def _find_next_step(self, row: Row) -> Script[NextStep | None]:
        """Returns a completed task's next step, remembered or computed; `None` if its slot ends."""
        if row["id"] in self._next_steps:
            return self._next_steps[row["id"]]
        return (yield from find_next_step(self.plans, row))

    def _count_ended_slots(self) -> Script[None]:
        """Counts ended slots in groups and flows, which it locks; finishes these or gives turns."""
        outcomes, self._outcomes = self._outcomes, []
        by_group: defaultdict[UUID, list[SlotOutcome]] = defaultdict(list)
        by_flow: defaultdict[UUID, list[SlotOutcome]] = defaultdict(list)
        for outcome in outcomes:
            if outcome.group is None:
                by_flow[outcome.flow].append(outcome)
            else:
                by_group[outcome.group].append(outcome)
        if by_group:
            rows = yield Statement("groups_locked", {"ids": sorted(by_group)})
            for row in rows:
                group_outcomes = by_group[row["id"]]
                yield from groups.count_ended_slots(self, group_of(row), group_outcomes)
        if by_flow:
            yield from self._count_flow_slots(by_flow)

    def _count_flow_slots(self, by_flow: dict[UUID, list[SlotOutcome]]) -> Script[None]:
        """Counts ended slots, by flow id, in open flows; finishes flows without open slots."""
        rows = yield Statement("flows_locked", {"ids": sorted(by_flow)})
        for flow in map(flow_of, rows):
            if flow.status not in FLOW_OPEN:
                continue
            outcomes = by_flow[flow.id]
            failures = sum(outcome.result is SlotResult.FAILURE for outcome in outcomes)
            after = msgspec.structs.replace(
                flow, open=flow.open - len(outcomes), failed=flow.failed + failures
            )
            status = flow_end_status(after)
            if status is None:
                yield from self.write_flow(after)
            else:
                done = msgspec.structs.replace(after, status=status, finished_at=self.now)
                level = "ERROR" if status is FlowStatus.FAILED else "INFO"
                yield from self.write_flow(done, f"flow_{status.lower()}", level)

    def write_group(
        self, group: Group, kind: str | None = None, level: str = "INFO", message: str | None = None
    ) -> Script[None]:
        """Writes a locked group's fields, and an audit event if `kind` is given."""
        yield group_statement(group, AuditNote(kind, level, message), self.now, self.actor)

    def write_flow(
        self, flow: Flow, kind: str | None = None, level: str = "INFO", message: str | None = None
    ) -> Script[None]:
        """Writes a locked flow's fields, and an audit event if `kind` is given."""
        yield flow_statement(flow, AuditNote(kind, level, message), self.now, self.actor)

    def _stop_children(self) -> Script[None]:
        """Cancels or skips the open children of queued groups; defers those above the limit."""
        stopping, self._stopping = self._stopping, []
        for group, cancel in stopping:
            if self.rows_written >= MAX_CASCADE_ROWS:
                self.defer("rest", group.id, group.workspace, {"cancel": cancel})
                continue
            params = {"parent": group.id, "workspace": group.workspace, "most": MAX_CASCADE_ROWS}
            rows = yield Statement("children_open", params)
            if len(rows) == MAX_CASCADE_ROWS:
                self.defer("rest", group.id, group.workspace, {"cancel": cancel})
            tasks = sorted(row["id"] for row in rows if not row["is_group"])
            if tasks:
                yield from self.apply_to_each(tasks, cancel_command if cancel else skip_command)
            nested = [row["id"] for row in rows if row["is_group"]]
            yield from groups.stop_groups(self, nested, cancel=cancel)

    def _activate_requested(self) -> Script[None]:
        """Runs queued activations; fails the slots of refused jumps and finishes empty groups."""
        result: ActivationResult = yield from self._activations.run(self)
        self.lanes |= result.lanes
        self._control_tasks += result.control_tasks
        for request in result.refused:
            self._outcomes.append(
                SlotOutcome(request.flow, request.group, request.slot, SlotResult.FAILURE, None)
            )
        for group in result.empty_groups:
            status = join_status(group)
            if status is not None:  # else added children are still open
                yield from groups.finish_group(self, group, status)

    def _run_control_tasks(self) -> Script[None]:
        """Runs queued control tasks: creates the inbox items of approvals, resolves the others."""
        control_tasks, self._control_tasks = self._control_tasks, []
        rows = yield Statement("flow_positions", rows={"wanted": control_tasks})
        by_id = {row["id"]: row for row in rows}
        decisions: dict[UUID, Command] = {}
        for task, _ in control_tasks:
            row = by_id[task]
            if row["kind"] == "approval":
                item_id = self._clock.new_id()
                decisions[task] = yield from ask_for_approval(item_id, row, self.now)
            else:
                decisions[task] = yield from self._resolve_control_task(row)
        yield from self.apply_to_each(sorted(decisions), lambda task: decisions[task.id])

    def _resolve_control_task(self, row: Row) -> Script[Command]:
        """Remembers a control task's next step; returns the command to complete or fail it."""
        try:
            self._next_steps[row["id"]] = step = yield from self._find_next_step(row)
        except ControlTaskFailed as error:
            return commands.Resolve(status=Status.FAILED, message=error.message, code=error.code)
        outcome: dict[str, Any] = {"next": None if step is None else step.key}
        if step is not None and step.items is not None:
            outcome["items"] = len(step.items)
        output = msgspec.json.encode(outcome).decode()
        return commands.Resolve(status=Status.COMPLETED, output=output)
