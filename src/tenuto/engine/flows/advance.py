"""What follows in the same transaction when tasks end: dependents, joins, successors.

A cascade lives as long as its transaction. Rows are locked in one order: tasks, groups, flows, each
by id. What goes beyond a bound is kept as `flow_work` and done by whoever comes next.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any
from uuid import UUID

import msgspec

from tenuto.clock import Clock
from tenuto.engine.agents.subtask_tree import (
    BELOW,
    cancel_subtasks,
    close_forsaken,
    closed,
    is_cancel,
    wake_parents,
)
from tenuto.engine.flows import added_children
from tenuto.engine.flows.activation import ActivationBatch, ActivationResult, Fresh
from tenuto.engine.flows.activation_rows import ActivationRequest
from tenuto.engine.flows.outcomes import (
    FinishedTask,
    SlotOutcome,
    birth,
    cancelled,
    command_for_dependent,
    end_of_group,
    group_birth,
    group_next,
    handed_on,
    is_met,
    is_plain_success,
    place_of_turn,
    skipped,
    start_on_turn,
)
from tenuto.engine.flows.plans import PlanCache
from tenuto.engine.flows.routing import next_step, question
from tenuto.engine.flows.rows import (
    AuditNote,
    control_of,
    flow_of,
    flow_statement,
    group_of,
    group_statement,
)
from tenuto.engine.limits.concurrency import PermitChanges
from tenuto.engine.rows import CorruptRow, task_of, write_changes
from tenuto.model.agents.matching import Requirements
from tenuto.model.errors import TenutoError
from tenuto.model.flows.definition import Approval
from tenuto.model.flows.progress import (
    CASCADE,
    FLOW_OPEN,
    GROUP_OPEN,
    ControlTaskFailed,
    Flow,
    FlowStatus,
    Group,
    GroupStatus,
    NextStep,
    SlotResult,
    end_of,
    flow_end,
    join_status,
    with_ended_slots,
)
from tenuto.model.tasks import commands
from tenuto.model.tasks.commands import Command, DecisionContext
from tenuto.model.tasks.decide import decide
from tenuto.model.tasks.submission import NewTask
from tenuto.model.tasks.task import TERMINAL, Status, Task, TaskChange
from tenuto.store.protocol import Row, Script, Statement


class Cascade:
    """One transaction's consequences. Its public methods are scripts."""

    def __init__(
        self,
        clock: Clock,
        plans: PlanCache,
        actor: str | None,
        is_fresh: Fresh,
        *,
        strict: bool = False,
    ) -> None:
        self._strict = strict
        """Whether a control task that turns out unfit may still be failed by the caller."""
        self._clock = clock
        self._plans = plans
        self._actor = actor
        self._now = clock.now()
        self._births = ActivationBatch(clock, plans, actor, self._now, is_fresh)
        self._ended: list[FinishedTask] = []
        self._steps: dict[UUID, NextStep | None] = {}
        self._slots: list[SlotOutcome] = []
        self._acts: list[tuple[UUID, UUID]] = []
        self._rest: list[tuple[Group, bool]] = []
        self._below: list[tuple[UUID, UUID]] = []
        self._work: list[tuple[Any, ...]] = []
        self.turns = PermitChanges()
        """Who of those with a concurrency key came and went."""
        self.spent = 0
        self.changes: list[TaskChange] = []
        """Changes that workers are to be told of once they are durable."""
        self.lanes: set[int] = set()
        """Lanes in which something became claimable."""
        self.unfinished = False
        """Whether something was left for later."""

    def run(self, ended: Iterable[FinishedTask] = ()) -> Script[None]:
        """Everything that follows from these ends, and from what was begun before."""
        self._ended += ended
        yield from self._consequences()
        if self.turns.waiting:
            yield from self._update_permits()
        if self._work:
            self.unfinished = True
            work, self._work = self._work, []
            yield Statement("work_put", rows={"work": work})

    def _update_permits(self) -> Script[None]:
        """Give places under concurrency keys; from then on no other row is waited for."""
        yield from self.turns.supersede(self)
        yield from self._consequences()
        yield from self.turns.grant_free_permits(self)
        for each in self._ended:
            self.defer("ended", each.id, each.workspace)
        for task, workspace in self._below:
            self.defer(BELOW, task, workspace)
        self._ended, self._below = [], []

    def _consequences(self) -> Script[None]:
        while self._births.waiting or any(
            (self._ended, self._below, self._slots, self._acts, self._rest)
        ):
            if self._below:
                parents, self._below = self._below, []
                yield from cancel_subtasks(self, parents)
            if self._ended:
                yield from self._process_finished_tasks()
            if self._slots:
                yield from self._close_slots()
            if self._rest:
                yield from self._end_rest()
            if self._births.waiting:
                yield from self._bear()
            if self._acts:
                yield from self._run_control_tasks()

    def request_activation(self, birth: ActivationRequest) -> None:
        """Have something made."""
        self._births.add(birth)

    def join(self, group: Group, new: NewTask) -> Script[UUID]:
        """One more child for a group that has not ended, after all others."""
        child = yield from self._births.joined(group, new, self)
        turn = child.slot if group.kind == "sequential" and child.mine else group.turn
        yield self.group_change(msgspec.structs.replace(group, open=group.open + 1, turn=turn))
        self.lanes |= child.lanes
        self._acts += child.acts
        return child.id

    def grow(self, group: Group) -> None:
        """Go on making a group's children."""
        self._births.continue_group(group)

    def act(self, tasks: Iterable[tuple[UUID, UUID]]) -> None:
        """Have control tasks, by id and workspace, do what they are for."""
        self._acts += tasks

    def end_rest(self, group: Group, *, cancel: bool) -> None:
        """End whatever of a group has not ended, by cancelling or by skipping it."""
        self._rest.append((group, cancel))

    def cancel_subtasks(self, parents: Iterable[tuple[UUID, UUID]]) -> None:
        """Cancel what these tasks, by id and workspace, have made: they are cancelled."""
        self._below += parents

    def defer(
        self, kind: str, subject: UUID, workspace: UUID, data: Any = None, wait_s: float = 0
    ) -> None:
        """Leave something for a transaction of its own, not before so many seconds have passed."""
        text = None if data is None else msgspec.json.encode(data).decode()
        due = self._now + timedelta(seconds=wait_s)
        self._work.append((self._clock.new_id(), workspace, kind, subject, text, due))

    @property
    def touched(self) -> list[Requirements]:
        """The lanes that were marked as used."""
        return self._births.touched

    def moment(self) -> DecisionContext:
        return DecisionContext(self._now, self._clock.random(), self._actor)

    # Tasks that ended: whoever waits for them, and what takes their place.

    def _process_finished_tasks(self) -> Script[None]:
        batch, self._ended = self._ended, []
        if self.spent >= CASCADE:
            for each in batch:
                self.defer("ended", each.id, each.workspace)
            return
        yield from self.notify_dependents(batch)
        yield from self._activate_successors(batch)

    def notify_dependents(self, batch: Sequence[FinishedTask]) -> Script[None]:
        """Tell those who wait for these tasks."""
        ends = {each.id: each for each in batch if each.awaited}
        if not ends:
            return
        rows = yield Statement("dependents", {"ids": sorted(ends), "most": CASCADE})
        if len(rows) == CASCADE:
            for each in ends.values():
                self.defer("dependents", each.id, each.workspace)
        if not rows:
            return
        self.spent += len(rows)
        special = {row["id"] for row in rows if not is_plain_success(row, ends)}
        hits = Counter(row["id"] for row in rows if row["id"] not in special)
        pairs = [(row["id"], row["needs"], is_met(row, ends)) for row in rows]
        if not hits:
            yield Statement("dependency_settle", rows={"pair": pairs})
        else:
            params = {"now": self._now, "actor": self._actor}
            hit = sorted(hits.items())
            moved = yield Statement("unblock", params, {"pair": pairs, "hit": hit})
            self.lanes |= {row["lane"] for row in moved if row["status"] == Status.PENDING}
        if special:
            yield from self._released_singly([row for row in rows if row["id"] in special], ends)

    def _released_singly(self, rows: list[Row], ends: dict[UUID, FinishedTask]) -> Script[None]:
        waits: defaultdict[UUID, list[Row]] = defaultdict(list)
        for row in rows:
            waits[row["id"]].append(row)
        yield from self.apply_to_each(
            sorted(waits), lambda task: command_for_dependent(task, waits[task.id], ends), acts=True
        )

    def apply_to_each(
        self,
        ids: list[UUID],
        choose: Callable[[Task], Command | None],
        *,
        acts: bool = False,
        ended: bool = False,
    ) -> Script[list[TaskChange]]:
        """Decide a command for each of the tasks and write what comes of it.

        Tasks that have ended are left alone unless `ended` says otherwise; `acts` has the engine do
        those that nobody else does.
        """
        rows = yield Statement("tasks_locked", {"ids": ids})
        decided: list[tuple[TaskChange, Command]] = []
        for row in rows:
            try:
                task = task_of(row)
            except CorruptRow:
                continue  # its own turn puts it out of circulation
            command = None if task.status in TERMINAL and not ended else choose(task)
            if command is None:
                continue
            try:
                made = decide(task, command, self.moment())
            except TenutoError:
                continue  # it cannot be asked that in its present status
            if made is not None:
                decided.append((made, command))
                self._note(task, made)
        if decided:
            yield write_changes(decided)
            self.spent += len(decided)
        yield from close_forsaken([change for change, _ in decided], self._now, self._actor)
        if acts:
            self._acts += [
                (change.task.id, change.task.workspace)
                for change, _ in decided
                if change.task.hold == "act" and change.task.unmet == 0
            ]
        return [change for change, _ in decided]

    def _note(self, before: Task, change: TaskChange) -> None:
        after = change.task
        self.changes.append(change)
        self.turns.note([change])
        if after.status in TERMINAL and before.watched:
            self._ended.append(FinishedTask(after.id, after.workspace, after.status))
        if is_cancel(change):
            self._below.append((after.id, after.workspace))

    def _activate_successors(self, batch: Sequence[FinishedTask]) -> Script[None]:
        rows = [each.place for each in batch if each.place is not None]
        wanted = [(each.id, each.workspace) for each in batch if each.place is None]
        if wanted:
            rows += yield Statement("places", rows={"wanted": wanted})
        statuses = {each.id: each.status for each in batch}
        if children := sorted(row["id"] for row in rows if row["parent"] is not None):
            yield from wake_parents(self, children)
        self.turns.leave_all(rows)
        for row in rows:
            if row["kind"] == "approval":
                yield closed(row["id"], self._now, self._actor)
            if row["flow"] is None:
                continue
            status = statuses[row["id"]]
            step = None
            end = end_of(status)
            if status is Status.COMPLETED:
                try:
                    step = yield from self._step(row)
                except ControlTaskFailed:
                    if self._strict:
                        raise
                    end = SlotResult.FAILURE
            if step is None:
                last = handed_on(row)
                self._slots.append(
                    SlotOutcome(row["flow"], row["group_id"], row["slot"], end, last)
                )
            else:
                self.request_activation(birth(row, step))

    def _step(self, row: Row) -> Script[NextStep | None]:
        if row["id"] in self._steps:
            return self._steps[row["id"]]
        return (yield from next_step(self._plans, row))

    # Slots that ended: joins, turns, and the ends of flows.

    def _close_slots(self) -> Script[None]:
        slots, self._slots = self._slots, []
        by_group: defaultdict[UUID, list[SlotOutcome]] = defaultdict(list)
        by_flow: defaultdict[UUID, list[SlotOutcome]] = defaultdict(list)
        for each in slots:
            if each.group is None:
                by_flow[each.flow].append(each)
            else:
                by_group[each.group].append(each)
        if by_group:
            rows = yield Statement("groups_locked", {"ids": sorted(by_group)})
            for row in rows:
                yield from self._group_closed(group_of(row), by_group[row["id"]])
        if by_flow:
            yield from self._flows_closed(by_flow)

    def _group_closed(self, group: Group, ends: list[SlotOutcome]) -> Script[None]:
        if group.status not in GROUP_OPEN:
            return
        after = with_ended_slots(group, [each.end for each in ends])
        if after.kind == "sequential":
            after = msgspec.structs.replace(after, follows=ends[-1].last)
        status = join_status(after)
        if status is not None:
            yield from self.finish(after, status)
            return
        if after.kind == "sequential" and after.turn in {each.slot for each in ends}:
            if (yield from self._pass_plainly(after)):
                return
            after = yield from self.give_turn_to_next(after)
        yield self.group_change(after)

    def _pass_plainly(self, group: Group) -> Script[bool]:
        """Whether the next child is a task that waits for its turn alone: then it has it now."""
        params = place_of_turn(group) | {
            "open": group.open,
            "succeeded": group.succeeded,
            "failed": group.failed,
            "follows": group.follows,
            "now": self._now,
            "actor": self._actor,
        }
        rows = yield Statement("turn_pass", params)
        self.lanes |= {row["lane"] for row in rows}
        self.spent += len(rows)
        return bool(rows)

    def give_turn_to_next(self, group: Group) -> Script[Group]:
        """The group with the turn given to its next child, if that is made already."""
        rows = yield Statement("next_in_turn", place_of_turn(group))
        if not rows:
            # The turn waits where it is for the child that is still to be made.
            return msgspec.structs.replace(group, turn=None)
        row = rows[0]
        if row["is_group"]:
            found = yield Statement("groups_locked", {"ids": [row["id"]]})
            child = group_of(found[0])
            if child.status is GroupStatus.WAITING:
                child = msgspec.structs.replace(child, follows=group.follows)
                yield from self.start_group(child)
        else:
            params = {"id": row["id"], "workspace": group.workspace, "follows": group.follows}
            yield Statement("follow_on", params)
            yield from self.give_turn(row["id"])
        return msgspec.structs.replace(group, turn=row["slot"])

    def give_turn(self, task: UUID) -> Script[None]:
        """Let a child of a sequence run."""
        yield from self.apply_to_each([task], start_on_turn)
        self._acts += [
            (change.task.id, change.task.workspace)
            for change in self.changes
            if change.task.id == task and change.task.hold == "act" and change.task.unmet == 0
        ]

    def start_group(self, group: Group) -> Script[None]:
        """Let a waiting group run, with those that joined it while it waited."""
        running = msgspec.structs.replace(group, status=GroupStatus.RUNNING)
        if group.kind == "parallel" or group.total == 0:
            running = yield from self._admit(running)
        yield self.group_change(running, "group_started")
        self._births.continue_group(msgspec.structs.replace(running, version=group.version + 1))

    def _admit(self, group: Group) -> Script[Group]:
        """The group, none of whose own children are made, with the turn given to latecomers."""
        if group.open == group.total:
            return group
        if group.kind == "sequential":
            return (yield from self.give_turn_to_next(group))
        yield from added_children.start_added_children(self, group)
        return group

    def finish(self, group: Group, status: GroupStatus) -> Script[None]:
        """End a group; what takes its place, or the end of its own slot, follows."""
        done = msgspec.structs.replace(group, status=status, finished_at=self._now, turn=None)
        failed = status is GroupStatus.FAILED
        yield self.group_change(done, f"group_{status.lower()}", "ERROR" if failed else "INFO")
        if done.open > 0:
            self.end_rest(done, cancel=group.join_policy == "first_succeeded")
        step = None
        if status is GroupStatus.COMPLETED:
            plan = yield from self._plans.plan(group.flow)
            step = group_next(plan, group)
        if step is None:
            self._slots.append(end_of_group(group, status))
        else:
            self.request_activation(group_birth(group, step))

    def group_change(
        self, group: Group, kind: str | None = None, level: str = "INFO", message: str | None = None
    ) -> Statement:
        """The statement that writes a group, and tells of it where it has a new status."""
        return group_statement(group, AuditNote(kind, level, message), self._now, self._actor)

    def _flows_closed(self, by_flow: dict[UUID, list[SlotOutcome]]) -> Script[None]:
        rows = yield Statement("flows_locked", {"ids": sorted(by_flow)})
        for row in rows:
            flow = flow_of(row)
            if flow.status not in FLOW_OPEN:
                continue
            ends = by_flow[flow.id]
            bad = sum(each.end is SlotResult.FAILURE for each in ends)
            after = msgspec.structs.replace(
                flow, open=flow.open - len(ends), failed=flow.failed + bad
            )
            status = flow_end(after)
            if status is None:
                yield self.flow_change(after)
            else:
                done = msgspec.structs.replace(after, status=status, finished_at=self._now)
                level = "ERROR" if status is FlowStatus.FAILED else "INFO"
                yield self.flow_change(done, f"flow_{status.lower()}", level)

    def flow_change(
        self, flow: Flow, kind: str | None = None, level: str = "INFO", message: str | None = None
    ) -> Statement:
        """The statement that writes a flow, and tells of it where there is something to tell."""
        return flow_statement(flow, AuditNote(kind, level, message), self._now, self._actor)

    # What a group that has ended leaves behind.

    def _end_rest(self) -> Script[None]:
        rest, self._rest = self._rest, []
        for group, cancel in rest:
            if self.spent >= CASCADE:
                self.defer("rest", group.id, group.workspace, {"cancel": cancel})
                continue
            params = {"parent": group.id, "workspace": group.workspace, "most": CASCADE}
            rows = yield Statement("children_open", params)
            if len(rows) == CASCADE:
                self.defer("rest", group.id, group.workspace, {"cancel": cancel})
            tasks = sorted(row["id"] for row in rows if not row["is_group"])
            if tasks:
                yield from self.apply_to_each(tasks, cancelled if cancel else skipped)
            yield from self.end_groups([r["id"] for r in rows if r["is_group"]], cancel=cancel)

    def end_groups(self, ids: list[UUID], *, cancel: bool) -> Script[None]:
        """End groups from outside, by cancelling or by skipping them."""
        if not ids:
            return
        rows = yield Statement("groups_locked", {"ids": sorted(ids)})
        for row in rows:
            group = group_of(row)
            if group.status in GROUP_OPEN:
                status = GroupStatus.CANCELLED if cancel else GroupStatus.SKIPPED
                yield from self.end_group(group, status)

    def end_group(
        self, group: Group, status: GroupStatus, reason: str | None = None
    ) -> Script[None]:
        """End a group from outside, with all that is open in it."""
        done = msgspec.structs.replace(group, status=status, finished_at=self._now, turn=None)
        yield self.group_change(done, f"group_{status.lower()}", message=reason)
        self.end_rest(done, cancel=status is GroupStatus.CANCELLED)
        self._slots.append(end_of_group(group, status))

    # What begins.

    def _bear(self) -> Script[None]:
        grown: ActivationResult = yield from self._births.run(self)
        self.lanes |= grown.lanes
        self._acts += grown.acts
        for place in grown.refused:
            self._slots.append(
                SlotOutcome(place.flow, place.group, place.slot, SlotResult.FAILURE, None)
            )
        for group in grown.empty:
            status = join_status(group)
            if status is not None:  # else only latecomers are in it
                yield from self.finish(group, status)

    def _run_control_tasks(self) -> Script[None]:
        """Do what control tasks without a prompt are for."""
        acts, self._acts = self._acts, []
        rows = yield Statement("places", rows={"wanted": acts})
        known = {row["id"]: row for row in rows}
        orders: dict[UUID, Command] = {}
        for task, _ in acts:
            row = known[task]
            if row["kind"] == "approval":
                orders[task] = yield from self._ask(row)
            else:
                orders[task] = yield from self._decision(row)
        yield from self.apply_to_each(sorted(orders), lambda task: orders[task.id])

    def _decision(self, row: Row) -> Script[Command]:
        try:
            self._steps[row["id"]] = step = yield from self._step(row)
        except ControlTaskFailed as error:
            return commands.Resolve(status=Status.FAILED, message=error.message, code=error.code)
        said: dict[str, Any] = {"next": None if step is None else step.key}
        if step is not None and step.items is not None:
            said["items"] = len(step.items)
        output = msgspec.json.encode(said).decode()
        return commands.Resolve(status=Status.COMPLETED, output=output)

    def _ask(self, row: Row) -> Script[Command]:
        """Put the question to people; the task waits for their answer."""
        control = control_of(row)
        assert isinstance(control, Approval)
        command = commands.AwaitAnswer(
            hold=control.hold(), timeout_s=control.timeout_s, message=control.message
        )
        until = None if control.timeout_s is None else command.until(self._now)
        yield question(self._clock.new_id(), row, control.message, until, self._now)
        return command
