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
from tenuto.engine.flows import added_children
from tenuto.engine.flows.activation import ActivationBatch, IsFreshLane
from tenuto.engine.flows.activation_rows import ActivationRequest, ActivationResult
from tenuto.engine.flows.outcomes import (
    FinishedTask,
    SlotOutcome,
    activation_request,
    cancel_child,
    command_for_dependent,
    group_activation_request,
    group_outcome,
    group_successor,
    is_met,
    is_plain_success,
    next_child_params,
    result_source,
    skip_child,
    start_on_turn,
)
from tenuto.engine.flows.plans import PlanCache
from tenuto.engine.flows.routing import ask_for_approval, next_step
from tenuto.engine.flows.rows import AuditNote, flow_of, flow_statement, group_of, group_statement
from tenuto.engine.limits.concurrency import PermitChanges
from tenuto.engine.rows import CorruptRow, changes_statement, parse_task
from tenuto.model.agents.matching import Requirements
from tenuto.model.errors import TenutoError
from tenuto.model.flows.progress import (
    FLOW_OPEN,
    GROUP_OPEN,
    MAX_CASCADE_ROWS,
    ControlTaskFailed,
    Flow,
    FlowStatus,
    Group,
    GroupStatus,
    NextStep,
    SlotResult,
    flow_end_status,
    join_status,
    slot_result,
    with_ended_slots,
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
        self._plans = plans
        self._actor = actor
        self._now = clock.now()
        self._activation = ActivationBatch(clock, plans, actor, self._now, is_fresh)
        self._finished: list[FinishedTask] = []
        self._next_steps: dict[UUID, NextStep | None] = {}
        self._outcomes: list[SlotOutcome] = []
        self._controls: list[tuple[UUID, UUID]] = []
        self._closing: list[tuple[Group, bool]] = []
        self._cancelled: list[tuple[UUID, UUID]] = []
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
        """Writes everything that follows from these tasks and from all queued requests."""
        self._finished += finished
        yield from self._run_follow_ups()
        if self.permits.has_work:
            yield from self._update_permits()
        if self._deferred:
            self.has_deferred_work = True
            deferred, self._deferred = self._deferred, []
            yield Statement("deferred_add", rows={"work": deferred})

    def _update_permits(self) -> Script[None]:
        """Cancels superseded tasks, grants permits, and defers what follows."""
        yield from self.permits.cancel_superseded(self)
        yield from self._run_follow_ups()
        yield from self.permits.grant_free_permits(self)
        for finished in self._finished:
            self.defer("ended", finished.id, finished.workspace)
        for task, workspace in self._cancelled:
            self.defer(CANCEL_BELOW, task, workspace)
        self._finished, self._cancelled = [], []

    def _run_follow_ups(self) -> Script[None]:
        """Repeats all steps until none has work left."""
        while self._activation.has_work or any(
            (
                self._finished,
                self._cancelled,
                self._outcomes,
                self._controls,
                self._closing,
            )
        ):
            if self._cancelled:
                parents, self._cancelled = self._cancelled, []
                yield from cancel_subtasks(self, parents)
            if self._finished:
                yield from self._process_finished_tasks()
            if self._outcomes:
                yield from self._close_slots()
            if self._closing:
                yield from self._finish_children()
            if self._activation.has_work:
                yield from self._activate_requested()
            if self._controls:
                yield from self._run_control_tasks()

    def request_activation(self, request: ActivationRequest) -> None:
        """Queues the activation of a task or group."""
        self._activation.add(request)

    def add_child(self, group: Group, new: NewTask) -> Script[UUID]:
        """Adds a task after all children of an open group and returns its id."""
        child = yield from self._activation.add_child(group, new, self)
        turn = child.slot if group.kind == "sequential" and child.mine else group.turn
        yield self.group_change(msgspec.structs.replace(group, open=group.open + 1, turn=turn))
        self.lanes |= child.lanes
        self._controls += child.acts
        return child.id

    def continue_group(self, group: Group) -> None:
        """Queues the creation of a group's remaining children."""
        self._activation.continue_group(group)

    def queue_control_tasks(self, tasks: Iterable[tuple[UUID, UUID]]) -> None:
        """Queues control tasks to run in this cascade, as (id, workspace) pairs."""
        self._controls += tasks

    def finish_children(self, group: Group, *, cancel: bool) -> None:
        """Queues a finished group's open children: to be cancelled if `cancel`, else skipped."""
        self._closing.append((group, cancel))

    def cancel_subtasks(self, parents: Iterable[tuple[UUID, UUID]]) -> None:
        """Queues the subtasks of cancelled tasks to be cancelled; (id, workspace) pairs."""
        self._cancelled += parents

    def defer(
        self, kind: str, subject: UUID, workspace: UUID, data: Any = None, wait_s: float = 0
    ) -> None:
        """Stores a `flow_work` row to run in its own transaction, at the earliest in `wait_s`."""
        text = None if data is None else msgspec.json.encode(data).decode()
        due = self._now + timedelta(seconds=wait_s)
        self._deferred.append((self._clock.new_id(), workspace, kind, subject, text, due))

    @property
    def touched_lanes(self) -> list[Requirements]:
        """The lanes whose last use was recorded."""
        return self._activation.touched_lanes

    def decision_context(self) -> DecisionContext:
        """Returns the time, a random number and the actor for a decision."""
        return DecisionContext(self._now, self._clock.random(), self._actor)

    def _process_finished_tasks(self) -> Script[None]:
        """Notifies the dependents of finished tasks and activates successors, up to the limit."""
        finished, self._finished = self._finished, []
        if self.rows_written >= MAX_CASCADE_ROWS:
            for task in finished:
                self.defer("ended", task.id, task.workspace)
            return
        yield from self.notify_dependents(finished)
        yield from self._activate_successors(finished)

    def notify_dependents(self, finished: Sequence[FinishedTask]) -> Script[None]:
        """Unblocks, fails or skips the tasks that depend on these finished tasks."""
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
            params = {"now": self._now, "actor": self._actor}
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
        """Applies a command to each dependent; used unless all dependencies simply completed."""
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
        choose: Callable[[Task], Command | None],
        *,
        queue_controls: bool = False,
        include_finished: bool = False,
    ) -> Script[list[TaskChange]]:
        """Locks the tasks, applies the command chosen for each and returns the changes.

        Finished tasks are skipped unless `include_finished`. `queue_controls`: queue control tasks
        that became ready, as no agent runs them.
        """
        rows = yield Statement("tasks_locked", {"ids": ids})
        decided: list[tuple[TaskChange, Command]] = []
        for row in rows:
            try:
                task = parse_task(row)
            except CorruptRow:
                continue  # it is quarantined when it is processed by itself
            command = None if task.status in TERMINAL and not include_finished else choose(task)
            if command is None:
                continue
            try:
                change = decide(task, command, self.decision_context())
            except TenutoError:
                continue  # the command is not possible in its present status
            if change is not None:
                decided.append((change, command))
                self._record_change(task, change)
        if decided:
            yield changes_statement(decided)
            self.rows_written += len(decided)
        yield from close_open_questions([change for change, _ in decided], self._now, self._actor)
        if queue_controls:
            self._controls += [
                (change.task.id, change.task.workspace)
                for change, _ in decided
                if change.task.hold == "act" and change.task.unmet == 0
            ]
        return [change for change, _ in decided]

    def _record_change(self, before: Task, change: TaskChange) -> None:
        """Queues the follow-ups of one changed task."""
        after = change.task
        self.changes.append(change)
        self.permits.record([change])
        if after.status in TERMINAL and before.watched:
            self._finished.append(FinishedTask(after.id, after.workspace, after.status))
        if is_cancel(change):
            self._cancelled.append((after.id, after.workspace))

    def _activate_successors(self, finished: Sequence[FinishedTask]) -> Script[None]:
        """Queues what follows finished tasks: parents, permits, successors, ended slots."""
        rows = [task.place for task in finished if task.place is not None]
        unread = [(task.id, task.workspace) for task in finished if task.place is None]
        if unread:
            rows += yield Statement("flow_positions", rows={"wanted": unread})
        statuses = {task.id: task.status for task in finished}
        if children := sorted(row["id"] for row in rows if row["parent"] is not None):
            yield from wake_parents(self, children)
        self.permits.record_finished(rows)
        for row in rows:
            if row["kind"] == "approval":
                yield close_inbox_statement(row["id"], self._now, self._actor)
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
        if row["id"] in self._next_steps:
            return self._next_steps[row["id"]]
        return (yield from next_step(self._plans, row))

    def _close_slots(self) -> Script[None]:
        """Counts ended slots in their groups and flows, and finishes those that are complete."""
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
                yield from self._close_group_slots(group_of(row), by_group[row["id"]])
        if by_flow:
            yield from self._close_flow_slots(by_flow)

    def _close_group_slots(self, group: Group, outcomes: list[SlotOutcome]) -> Script[None]:
        """Counts ended slots of a group; finishes it, or gives its turn to the next child."""
        if group.status not in GROUP_OPEN:
            return
        after = with_ended_slots(group, [outcome.end for outcome in outcomes])
        if after.kind == "sequential":
            after = msgspec.structs.replace(after, follows=outcomes[-1].last)
        status = join_status(after)
        if status is not None:
            yield from self.finish_group(after, status)
            return
        if after.kind == "sequential" and after.turn in {outcome.slot for outcome in outcomes}:
            if (yield from self._try_pass_turn(after)):
                return
            after = yield from self.give_turn_to_next(after)
        yield self.group_change(after)

    def _try_pass_turn(self, group: Group) -> Script[bool]:
        """Starts the next child if it is a task that waits only for its turn; True if it did."""
        params = next_child_params(group) | {
            "open": group.open,
            "succeeded": group.succeeded,
            "failed": group.failed,
            "follows": group.follows,
            "now": self._now,
            "actor": self._actor,
        }
        rows = yield Statement("give_turn_to_next", params)
        self.lanes |= {row["lane"] for row in rows}
        self.rows_written += len(rows)
        return bool(rows)

    def give_turn_to_next(self, group: Group) -> Script[Group]:
        """Returns the group after giving the turn to its next child, if that exists already."""
        rows = yield Statement("next_in_turn", next_child_params(group))
        if not rows:
            # No child has the turn until the next one is created.
            return msgspec.structs.replace(group, turn=None)
        row = rows[0]
        if row["is_group"]:
            child_rows = yield Statement("groups_locked", {"ids": [row["id"]]})
            child = group_of(child_rows[0])
            if child.status is GroupStatus.WAITING:
                child = msgspec.structs.replace(child, follows=group.follows)
                yield from self.start_group(child)
        else:
            params = {"id": row["id"], "workspace": group.workspace, "follows": group.follows}
            yield Statement("set_predecessor", params)
            yield from self.give_turn(row["id"])
        return msgspec.structs.replace(group, turn=row["slot"])

    def give_turn(self, task: UUID) -> Script[None]:
        """Starts a task of a sequential group."""
        yield from self.apply_to_each([task], start_on_turn)
        self._controls += [
            (change.task.id, change.task.workspace)
            for change in self.changes
            if change.task.id == task and change.task.hold == "act" and change.task.unmet == 0
        ]

    def start_group(self, group: Group) -> Script[None]:
        """Starts a waiting group: queues its children, starts added ones that need not wait."""
        running = msgspec.structs.replace(group, status=GroupStatus.RUNNING)
        if group.kind == "parallel" or group.total == 0:
            running = yield from self._start_added_children(running)
        yield self.group_change(running, "group_started")
        self._activation.continue_group(msgspec.structs.replace(running, version=group.version + 1))

    def _start_added_children(self, group: Group) -> Script[Group]:
        """Starts children added before the group's own children exist; returns the group."""
        if group.open == group.total:
            return group
        if group.kind == "sequential":
            return (yield from self.give_turn_to_next(group))
        yield from added_children.start_added_children(self, group)
        return group

    def finish_group(self, group: Group, status: GroupStatus) -> Script[None]:
        """Finishes a group with this status, ends its open children, and queues what follows it."""
        done = msgspec.structs.replace(group, status=status, finished_at=self._now, turn=None)
        failed = status is GroupStatus.FAILED
        yield self.group_change(done, f"group_{status.lower()}", "ERROR" if failed else "INFO")
        if done.open > 0:
            self.finish_children(done, cancel=group.join_policy == "first_succeeded")
        step = None
        if status is GroupStatus.COMPLETED:
            plan = yield from self._plans.load_plan(group.flow)
            step = group_successor(plan, group)
        if step is None:
            self._outcomes.append(group_outcome(group, status))
        else:
            self.request_activation(group_activation_request(group, step))

    def group_change(
        self, group: Group, kind: str | None = None, level: str = "INFO", message: str | None = None
    ) -> Statement:
        """Returns the statement that writes a group, with an event if `kind` is given."""
        return group_statement(group, AuditNote(kind, level, message), self._now, self._actor)

    def _close_flow_slots(self, by_flow: dict[UUID, list[SlotOutcome]]) -> Script[None]:
        """Counts ended slots at the top of flows, by flow id; finishes flows with none open."""
        rows = yield Statement("flows_locked", {"ids": sorted(by_flow)})
        for flow in map(flow_of, rows):
            if flow.status not in FLOW_OPEN:
                continue
            outcomes = by_flow[flow.id]
            failures = sum(outcome.end is SlotResult.FAILURE for outcome in outcomes)
            after = msgspec.structs.replace(
                flow, open=flow.open - len(outcomes), failed=flow.failed + failures
            )
            status = flow_end_status(after)
            if status is None:
                yield self.flow_change(after)
            else:
                done = msgspec.structs.replace(after, status=status, finished_at=self._now)
                level = "ERROR" if status is FlowStatus.FAILED else "INFO"
                yield self.flow_change(done, f"flow_{status.lower()}", level)

    def flow_change(
        self, flow: Flow, kind: str | None = None, level: str = "INFO", message: str | None = None
    ) -> Statement:
        """Returns the statement that writes a flow, with an event if `kind` is given."""
        return flow_statement(flow, AuditNote(kind, level, message), self._now, self._actor)

    def _finish_children(self) -> Script[None]:
        """Cancels or skips the open children of finished groups; defers those above the limit."""
        groups, self._closing = self._closing, []
        for group, cancel in groups:
            if self.rows_written >= MAX_CASCADE_ROWS:
                self.defer("rest", group.id, group.workspace, {"cancel": cancel})
                continue
            params = {"parent": group.id, "workspace": group.workspace, "most": MAX_CASCADE_ROWS}
            rows = yield Statement("children_open", params)
            if len(rows) == MAX_CASCADE_ROWS:
                self.defer("rest", group.id, group.workspace, {"cancel": cancel})
            tasks = sorted(row["id"] for row in rows if not row["is_group"])
            if tasks:
                yield from self.apply_to_each(tasks, cancel_child if cancel else skip_child)
            yield from self.stop_groups([r["id"] for r in rows if r["is_group"]], cancel=cancel)

    def stop_groups(self, ids: list[UUID], *, cancel: bool) -> Script[None]:
        """Cancels groups if `cancel`, else skips them, with their open children."""
        if not ids:
            return
        rows = yield Statement("groups_locked", {"ids": sorted(ids)})
        for row in rows:
            group = group_of(row)
            if group.status in GROUP_OPEN:
                status = GroupStatus.CANCELLED if cancel else GroupStatus.SKIPPED
                yield from self.stop_group(group, status)

    def stop_group(
        self, group: Group, status: GroupStatus, reason: str | None = None
    ) -> Script[None]:
        """Cancels or skips an open group, with its open children."""
        done = msgspec.structs.replace(group, status=status, finished_at=self._now, turn=None)
        yield self.group_change(done, f"group_{status.lower()}", message=reason)
        self.finish_children(done, cancel=status is GroupStatus.CANCELLED)
        self._outcomes.append(group_outcome(group, status))

    def _activate_requested(self) -> Script[None]:
        """Runs queued activations; ends the slots of refused jumps and finishes empty groups."""
        result: ActivationResult = yield from self._activation.run(self)
        self.lanes |= result.lanes
        self._controls += result.acts
        for request in result.refused:
            self._outcomes.append(
                SlotOutcome(request.flow, request.group, request.slot, SlotResult.FAILURE, None)
            )
        for group in result.empty:
            status = join_status(group)
            if status is not None:  # else added children are still open
                yield from self.finish_group(group, status)

    def _run_control_tasks(self) -> Script[None]:
        """Runs control tasks that have no prompt: asks for approval, or resolves them."""
        control_tasks, self._controls = self._controls, []
        rows = yield Statement("flow_positions", rows={"wanted": control_tasks})
        by_id = {row["id"]: row for row in rows}
        decisions: dict[UUID, Command] = {}
        for task, _ in control_tasks:
            row = by_id[task]
            if row["kind"] == "approval":
                question = ask_for_approval(self._clock.new_id(), row, self._now)
                decisions[task] = yield from question
            else:
                decisions[task] = yield from self._resolve_control_task(row)
        yield from self.apply_to_each(sorted(decisions), lambda task: decisions[task.id])

    def _resolve_control_task(self, row: Row) -> Script[Command]:
        """Finds the next step of a control task; returns the command that completes or fails it."""
        try:
            self._next_steps[row["id"]] = step = yield from self._find_next_step(row)
        except ControlTaskFailed as error:
            return commands.Resolve(status=Status.FAILED, message=error.message, code=error.code)
        outcome: dict[str, Any] = {"next": None if step is None else step.key}
        if step is not None and step.items is not None:
            outcome["items"] = len(step.items)
        output = msgspec.json.encode(outcome).decode()
        return commands.Resolve(status=Status.COMPLETED, output=output)
