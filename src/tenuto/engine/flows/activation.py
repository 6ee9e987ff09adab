"""Activation: creates tasks and runs of groups in a flow, within a cascade."""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any
from uuid import UUID, uuid5

import msgspec

from tenuto.clock import Clock
from tenuto.engine.flows.activation_rows import (
    ActivationRequest,
    ActivationResult,
    AddedChild,
    NewChild,
    Siblings,
    encode_context,
    initial_hold,
    new_group,
    task_for_item,
    with_flow_settings,
)
from tenuto.engine.flows.outcomes import pause_command
from tenuto.engine.flows.plans import PlanCache
from tenuto.engine.flows.rows import add_waiters_statement, context_of, flow_of, group_of, is_paused
from tenuto.engine.rows import (
    LANE_COLUMN,
    STATUS_COLUMN,
    FlowPosition,
    Rows,
    add_labels,
    body_row,
    decode_json,
    empty_rows,
    hot_row,
    insert_statement,
)
from tenuto.model.agents.matching import Requirements, lane_id
from tenuto.model.bounds import MAX_LANES
from tenuto.model.flows.definition import Foreach
from tenuto.model.flows.groups import GROUP_OPEN, Group, GroupStatus
from tenuto.model.flows.plan import Plan
from tenuto.model.flows.progress import (
    FLOW_OPEN,
    MAX_CASCADE_ROWS,
    ActivationContext,
    Flow,
    FlowStatus,
)
from tenuto.model.tasks.fingerprint import fingerprint
from tenuto.model.tasks.submission import NewTask, requirements
from tenuto.model.tasks.task import TERMINAL, Status
from tenuto.store.protocol import Row, Script, Statement

if TYPE_CHECKING:
    from tenuto.engine.flows.advance import Cascade

IsFreshLane = Callable[[Requirements, datetime], bool]
"""True if the lane was confirmed recently enough that it cannot have been pruned since."""
ADDED_SLOT_BASE = 1_000_000
"""Children that were added to a group have slots above this number."""


class ActivationBatch:
    """Activation requests of one transaction. `run` is a script."""

    def __init__(
        self,
        clock: Clock,
        plans: PlanCache,
        actor: str | None,
        now: datetime,
        is_fresh: IsFreshLane,
    ) -> None:
        self._is_fresh = is_fresh
        self.touched_lanes: list[Requirements] = []
        """The lanes whose last use was recorded."""
        self._clock = clock
        self._plans = plans
        self._actor = actor
        self._now = now
        self._requests: list[ActivationRequest] = []
        self._groups: list[Group] = []
        self._paused_groups: set[UUID | None] = set()
        """Ids of groups that are paused or inside a paused group."""

    @property
    def has_work(self) -> bool:
        """True if activations or children of groups are queued."""
        return bool(self._requests or self._groups)

    def add_request(self, request: ActivationRequest) -> None:
        """Queues the activation of a task or group."""
        self._requests.append(request)

    def add_group(self, group: Group) -> None:
        """Queues the creation of a group's children that are not created yet."""
        self._groups.append(group)

    def run(self, cascade: "Cascade") -> Script[ActivationResult]:
        """Creates queued tasks and groups, but not in finished flows or groups; returns follow-ups.

        Defers a group's children beyond `MAX_CASCADE_ROWS`. Locks the groups, then the flows.
        """
        result = ActivationResult(set(), [], [], [])
        requests, self._requests = self._requests, []
        expanding, self._groups = self._groups, []
        groups = yield from self._lock_groups(requests, expanding)
        by_flow: defaultdict[UUID, list[ActivationRequest]] = defaultdict(list)
        for request in requests:
            if request.group is None or groups[request.group].status in GROUP_OPEN:
                by_flow[request.flow].append(request)
        flows = yield from self._lock_flows({*by_flow, *(group.flow for group in expanding)})
        for flow, flow_requests in by_flow.items():
            yield from self._activate(flows[flow], flow_requests, cascade, result)
        for group in expanding:
            yield from self._expand_group(flows[group.flow], groups[group.id], cascade, result)
        return result

    def _lock_groups(
        self, requests: list[ActivationRequest], expanding: list[Group]
    ) -> Script[dict[UUID, Group]]:
        """Locks the groups of requests and `expanding`, marks paused ones; returns them by id."""
        ids = {request.group for request in requests if request.group is not None}
        ids |= {group.id for group in expanding}
        if not ids:
            return {}
        rows = yield Statement("groups_locked", {"ids": sorted(ids)})
        groups = {row["id"]: group_of(row) for row in rows}
        yield from self._mark_paused_groups(groups)
        return groups

    def _mark_paused_groups(self, groups: dict[UUID, Group]) -> Script[None]:
        """Adds paused groups and those inside one to `_paused_groups`; locks the ancestors."""
        by_id = dict(groups)
        for group in groups.values():
            ancestor = group
            while ancestor.status is not GroupStatus.PAUSED and ancestor.parent is not None:
                if ancestor.parent not in by_id:
                    rows = yield Statement("groups_locked", {"ids": [ancestor.parent]})
                    by_id[ancestor.parent] = group_of(rows[0])
                ancestor = by_id[ancestor.parent]
            if ancestor.status is GroupStatus.PAUSED:
                self._paused_groups.add(group.id)

    def _lock_flows(self, ids: set[UUID]) -> Script[dict[UUID, Flow]]:
        """Locks and returns the flows by id."""
        rows = yield Statement("flows_locked", {"ids": sorted(ids)})
        return {row["id"]: flow_of(row) for row in rows}

    def _activate(
        self,
        flow: Flow,
        requests: list[ActivationRequest],
        cascade: "Cascade",
        result: ActivationResult,
    ) -> Script[None]:
        """Creates requested tasks and groups of a locked, open flow, except refused jumps."""
        if flow.status not in FLOW_OPEN:
            return
        plan = yield from self._plans.load_plan(flow.id)
        jumps = sum(request.jump for request in requests)
        if jumps:
            flow = yield from self._charge_step_budget(flow, requests, cascade, result)
        keys = [request.run_key for request in requests]
        counts = yield from self._load_activation_counts(flow.id, keys)
        children = []
        for request in requests:
            if request in result.refused:
                continue
            if request.foreach is not None or request.key in plan.groups:
                yield from self._insert_group(flow, plan, request, counts)
            else:
                children.append(self._child_for_request(flow, plan, request, counts))
        yield from self._insert_children(flow, children, cascade, result)

    def _charge_step_budget(
        self,
        flow: Flow,
        requests: list[ActivationRequest],
        cascade: "Cascade",
        result: ActivationResult,
    ) -> Script[Flow]:
        """Takes a step per jump, writes and returns the flow; adds jumps beyond to `result`."""
        jumps = [request for request in requests if request.jump]
        refused = jumps[flow.steps_left :]
        result.refused += refused
        charged = msgspec.structs.replace(flow, steps_left=max(flow.steps_left - len(jumps), 0))
        if refused:
            source = refused[0].predecessor_key
            message = f"{source!r} cannot jump: the step budget of the flow is used up"
            yield from cascade.write_flow(charged, "step_budget", "ERROR", message)
            return msgspec.structs.replace(charged, version=charged.version + 1)
        yield from cascade.write_flow(charged)
        return charged

    def _load_activation_counts(self, flow: UUID, keys: Sequence[str]) -> Script[dict[str, int]]:
        """Returns how often each key was activated in the flow, by key; 0 for others."""
        counts: defaultdict[str, int] = defaultdict(int)
        rows = yield Statement("activations", {"flow": flow, "keys": sorted(set(keys))})
        counts |= {row["key"]: row["activation"] for row in rows}
        return counts

    def _child_for_request(
        self, flow: Flow, plan: Plan, request: ActivationRequest, counts: dict[str, int]
    ) -> NewChild:
        """Returns the task of a request, not inserted yet; counts its activation in `counts`."""
        counts[request.key] += 1
        prompts = () if request.prompt is None else (request.prompt,)
        context = ActivationContext(groups=request.groups, prompts=prompts)
        new = msgspec.structs.replace(plan.tasks[request.key], depends_on=[])
        new = with_flow_settings(new, request.key, flow)
        return NewChild(
            new=new,
            id=request.id or self._clock.new_id(),
            position=FlowPosition(
                flow=flow.id,
                group=request.group,
                slot=request.slot,
                activation=counts[request.key],
                follows=request.follows,
                context=encode_context(context),
            ),
            hold=initial_hold(new, "paused" if self._is_paused(flow, request.group) else None),
        )

    def _is_paused(self, flow: Flow, group: UUID | None) -> bool:
        """True if the flow is paused, or if the group was marked as paused when it was locked."""
        return flow.status is FlowStatus.PAUSED or group in self._paused_groups

    def first_task_rows(self, plan: Plan, request: ActivationRequest) -> Rows | None:
        """Returns the rows of a key's first task, from caches; `None` if more has to be read."""
        cached = self._plans.cached_flow(request.flow)
        if cached is None or request.key not in plan.tasks:
            return None
        flow, flow_input = cached
        child = self._child_for_request(flow, plan, request, defaultdict(int))
        if child.hold is not None:
            return None
        rows, lanes = empty_rows(), dict[Requirements, int]()
        self._build_rows(flow, child, rows, lanes, flow_input)
        return rows if all(self._is_fresh(reqs, self._now) for reqs in lanes) else None

    def _insert_group(
        self, flow: Flow, plan: Plan, request: ActivationRequest, counts: dict[str, int]
    ) -> Script[None]:
        """Inserts a requested group run, counts it in `counts`, and queues its children."""
        key = request.run_key
        counts[key] += 1
        group, row = new_group(
            self._clock.new_id(), flow, plan, request, key, counts[key], self._now
        )
        params = {"now": self._now, "actor": self._actor}
        yield Statement("group_insert", params, {"born": [row]})
        self._groups.append(group)

    def _expand_group(
        self, flow: Flow, group: Group, cascade: "Cascade", result: ActivationResult
    ) -> Script[None]:
        """Creates an open group's next children, up to the limit of rows, and defers the others.

        Adds a group without children to `result.empty_groups`.
        """
        if flow.status not in FLOW_OPEN or group.status not in GROUP_OPEN:
            return
        if group.total == 0:
            result.empty_groups.append(group)
            return
        rows_left = MAX_CASCADE_ROWS - cascade.rows_written
        if rows_left <= 0:
            cascade.defer("expand", group.id, group.workspace)
            return
        end = min(group.total, group.made + rows_left)
        turn = group.turn
        if group.kind == "sequential" and turn is None:
            turn = group.made
        yield from self._create_children(flow, group, range(group.made, end), turn, cascade, result)
        yield from cascade.write_group(msgspec.structs.replace(group, made=end, turn=turn))
        if end < group.total:
            cascade.defer("expand", group.id, group.workspace)

    def _create_children(
        self,
        flow: Flow,
        group: Group,
        slots: range,
        turn: int | None,
        cascade: "Cascade",
        result: ActivationResult,
    ) -> Script[None]:
        """Creates the children in these slots; in a sequence only the child at `turn` can run."""
        plan = yield from self._plans.load_plan(flow.id)
        specs = yield from self._load_child_specs(plan, group, slots)
        counts = yield from self._load_activation_counts(flow.id, [key for key, _, _ in specs])
        siblings = yield from self._load_siblings(plan, group, slots)
        children: list[NewChild] = []
        nested: list[tuple[Any, ...]] = []
        groups = (*context_of(group.context).groups, group.key)
        for slot, (key, new, item) in zip(slots, specs, strict=True):
            counts[key] += 1
            has_turn = group.kind == "parallel" or slot == turn
            if new is None:
                request = ActivationRequest(
                    flow=flow.id, group=group.id, slot=slot, key=key, groups=groups
                )
                nested.append(
                    self._nested_group_row(flow, plan, request, counts[key], has_turn=has_turn)
                )
                continue
            child = self._group_child(
                flow, group, slot, key, new, item, counts[key], siblings, groups, has_turn=has_turn
            )
            children.append(child)
        if nested:
            params = {"now": self._now, "actor": self._actor}
            yield Statement("group_insert", params, {"born": nested})
            cascade.rows_written += len(nested)
        yield from self._insert_children(flow, children, cascade, result)
        yield from self._add_dependencies(flow, children, siblings.existing, cascade)
        if self._is_paused(flow, group.id):
            yield from cascade.apply_to_each([child.id for child in children], pause_command)

    def _add_dependencies(
        self, flow: Flow, children: list[NewChild], existing: dict[UUID, Row], cascade: "Cascade"
    ) -> Script[None]:
        """Counts children as dependents of existing siblings; defers notices of failed siblings."""
        counts = Counter(
            dep for child in children for dep, _ in child.dependencies if dep in existing
        )
        if not counts:
            return
        yield add_waiters_statement(counts, existing)
        unmet = {dep for child in children for dep, met in child.dependencies if not met}
        for dep in sorted(unmet & counts.keys()):
            if Status(existing[dep]["status"]) in TERMINAL:
                cascade.defer("dependents", dep, flow.workspace)

    def _nested_group_row(
        self, flow: Flow, plan: Plan, request: ActivationRequest, activation: int, *, has_turn: bool
    ) -> tuple[Any, ...]:
        """Returns the row of a nested group, to insert; with its turn, also queues its children."""
        status = GroupStatus.RUNNING if has_turn else GroupStatus.WAITING
        group, row = new_group(
            self._clock.new_id(), flow, plan, request, request.key, activation, self._now, status
        )
        if has_turn:
            self._groups.append(group)
        return row

    def add_child(self, group: Group, new: NewTask, cascade: "Cascade") -> Script["AddedChild"]:
        """Inserts a task outside the plan as last child of a locked group; returns id, slot, lanes.

        The caller writes the group's counters.
        """
        paused = yield from is_paused(group)
        if paused:
            self._paused_groups.add(group.id)
        flows = yield Statement("flows_locked", {"ids": [group.flow]})
        flow = flow_of(flows[0])
        rows = yield Statement("last_slot", {"parent": group.id, "workspace": group.workspace})
        slot = max(rows[0]["slot"] or 0, ADDED_SLOT_BASE) + 1
        key = new.key or f"joined-{slot - ADDED_SLOT_BASE}"
        counts = yield from self._load_activation_counts(flow.id, [key])
        groups = (*context_of(group.context).groups, group.key)
        has_turn = group.status is not GroupStatus.WAITING and (
            group.kind == "parallel" or (group.turn is None and group.made == group.total)
        )
        task_id = new.id or self._clock.new_id()
        siblings = Siblings({slot: task_id})
        independent = msgspec.structs.replace(new, depends_on=[])
        child = self._group_child(
            flow,
            group,
            slot,
            key,
            independent,
            None,
            counts[key] + 1,
            siblings,
            groups,
            has_turn=has_turn,
        )
        child = msgspec.structs.replace(child, fingerprint=fingerprint(new))
        result = ActivationResult(set(), [], [], [])
        yield from self._insert_children(flow, [child], cascade, result)
        if paused:
            yield from cascade.apply_to_each([child.id], pause_command)
        return AddedChild(child.id, slot, has_turn, result.lanes, result.control_tasks)

    def _load_child_specs(
        self, plan: Plan, group: Group, slots: range
    ) -> Script[list[tuple[str, NewTask | None, tuple[Any, int] | None]]]:
        """Returns (key, definition or `None` for a group, a foreach's (item, index)) per slot."""
        spec = plan.groups.get(group.key)
        if spec is not None:
            keys = spec.children[slots.start : slots.stop]
            return [(key, plan.tasks.get(key), None) for key in keys]
        control = plan.tasks[group.key].control
        assert isinstance(control, Foreach)
        rows = yield Statement("group_items", {"id": group.id})
        template = plan.tasks[control.template]
        items: list[Any] = decode_json(rows[0]["items"])
        return [(control.template, template, (items[index], index)) for index in slots]

    def _group_child(
        self,
        flow: Flow,
        group: Group,
        slot: int,
        key: str,
        new: NewTask,
        item: tuple[Any, int] | None,
        activation: int,
        siblings: Siblings,
        groups: tuple[str, ...],
        *,
        has_turn: bool,
    ) -> NewChild:
        """Returns a group's task to insert in a slot; on hold without a turn or in a pause."""
        context = ActivationContext(groups=groups)
        if item is not None:
            context = ActivationContext(groups=groups, item=item[0], index=item[1])
            new = task_for_item(new, *item)
        paused = self._is_paused(flow, group.id)
        base_hold = "turn" if not has_turn else ("paused" if paused else None)
        new = with_flow_settings(new, key, flow)
        dependencies = tuple(siblings.dependencies[name] for name in new.depends_on)
        return NewChild(
            new=new,
            id=siblings.ids[slot],
            position=FlowPosition(
                flow=flow.id,
                group=group.id,
                slot=slot,
                activation=activation,
                follows=group.follows,
                context=encode_context(context),
            ),
            hold=initial_hold(new, base_hold),
            dependencies=dependencies,
        )

    def _load_siblings(self, plan: Plan, group: Group, slots: range) -> Script[Siblings]:
        """Returns ids for new children in these slots, and earlier siblings, locked if needed.

        If children of the group depend on each other, locks the tasks of all earlier slots.
        """
        spec = plan.groups.get(group.key)
        if spec is None or group.key not in (
            yield from self._plans.load_dependent_groups(group.flow)
        ):
            new_ids = zip(slots, self._clock.new_ids(len(slots)), strict=True)
            return Siblings(dict(new_ids))
        ids = {slot: uuid5(group.id, str(slot)) for slot in range(group.total)}
        by_key = {key: ids[slot] for slot, key in enumerate(spec.children)}
        earlier_ids = sorted(ids[slot] for slot in range(slots.start))
        existing: dict[UUID, Row] = {}
        if earlier_ids:
            params = {"workspace": group.workspace, "ids": earlier_ids}
            rows = yield Statement("dependency_targets_locked", params)
            existing = {row["id"]: row for row in rows}
        dependencies = {
            key: (task, task in existing and existing[task]["status"] == Status.COMPLETED)
            for key, task in by_key.items()
        }
        return Siblings(ids, dependencies, existing)

    def _insert_children(
        self, flow: Flow, children: list[NewChild], cascade: "Cascade", result: ActivationResult
    ) -> Script[None]:
        """Inserts tasks, records lane use; adds claimable lanes and control tasks to `result`."""
        if not children:
            return
        rows = empty_rows()
        lanes: dict[Requirements, int] = {}
        flow_input = yield from self._plans.load_input(flow.id)
        counts = Counter(dep for child in children for dep, _ in child.dependencies)
        for child in children:
            self._build_rows(flow, child, rows, lanes, flow_input, counts[child.id] or None)
            row = rows["hot"][-1]
            if row[STATUS_COLUMN] is Status.PENDING:
                result.lanes.add(row[LANE_COLUMN])
            elif child.hold == "act" and all(met for _, met in child.dependencies):
                result.control_tasks.append((child.id, flow.workspace))
        stale = {reqs: lane for reqs, lane in lanes.items() if not self._is_fresh(reqs, self._now)}
        if stale:
            params = {"now": self._now, "most": MAX_LANES}
            lane_rows = sorted((lane, flow.workspace, reqs.key()) for reqs, lane in stale.items())
            yield Statement("lane_touch", params, {"wanted": lane_rows})
            self.touched_lanes += stale
        yield insert_statement("submit_new", rows, self._now)
        cascade.rows_written += len(children)

    def _build_rows(
        self,
        flow: Flow,
        child: NewChild,
        rows: Rows,
        lanes: dict[Requirements, int],
        flow_input: Any,
        waiter_count: int | None = None,
    ) -> None:
        """Adds a task's rows and lane to `rows` and `lanes`; its default input is `flow_input`."""
        new = child.new
        if new.input is None:
            new = msgspec.structs.replace(new, input=flow_input)
        reqs = requirements(new, flow.workspace)
        lane = lanes.get(reqs)
        if lane is None:
            lane = lanes[reqs] = lane_id(reqs.key())
        unmet = sum(not met for _, met in child.dependencies)
        trace, position = flow.trace_id, child.position
        identity = (child.id, flow.workspace, child.fingerprint, self._actor)
        rows["body"].append(body_row(new, *identity, None, trace, position))
        rows["hot"].append(
            hot_row(
                new,
                child.id,
                flow.workspace,
                lane,
                self._actor,
                self._now,
                hold=child.hold,
                unmet=unmet or None,
                watched=True,
                waiter_count=waiter_count,
            )
        )
        add_labels(rows, new, child.id, flow.workspace)
        rows["dependency"] += [
            (child.id, dep, flow.workspace, met, False) for dep, met in child.dependencies
        ]
