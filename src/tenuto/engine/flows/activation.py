"""Activation: tasks and runs of groups are made in their flow, within a cascade."""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any
from uuid import UUID, uuid5

import msgspec

from tenuto.clock import Clock
from tenuto.engine.flows.activation_rows import (
    ActivationRequest,
    context_text,
    for_item,
    hold_of,
    named,
    new_group,
)
from tenuto.engine.flows.outcomes import hold_if_paused
from tenuto.engine.flows.plans import PlanCache
from tenuto.engine.flows.rows import awaiting, context_of, flow_of, group_of, is_paused
from tenuto.engine.rows import (
    STATUS,
    FlowPosition,
    Rows,
    add_labels,
    body_row,
    decode,
    hot_row,
    insert,
    no_rows,
)
from tenuto.model.agents.matching import Requirements, lane_id
from tenuto.model.bounds import MAX_LANES
from tenuto.model.flows.definition import Foreach
from tenuto.model.flows.plan import Plan
from tenuto.model.flows.progress import (
    CASCADE,
    FLOW_OPEN,
    GROUP_OPEN,
    ActivationContext,
    Flow,
    FlowStatus,
    Group,
    GroupStatus,
)
from tenuto.model.tasks.fingerprint import fingerprint
from tenuto.model.tasks.submission import NewTask, requirements
from tenuto.model.tasks.task import TERMINAL, Status
from tenuto.store.protocol import Row, Script, Statement

if TYPE_CHECKING:
    from tenuto.engine.flows.advance import Cascade

Fresh = Callable[[Requirements, datetime], bool]
"""Whether a lane was seen to exist so lately that it still does."""
LATECOMERS = 1_000_000
"""Slots from here on are of children that joined a run."""


class ActivationResult(msgspec.Struct):
    """What came of births."""

    lanes: set[int]
    acts: list[tuple[UUID, UUID]]
    """Control tasks that nobody but the engine does, and their workspaces."""
    refused: list[ActivationRequest]
    empty: list[Group]


class AddedChild(msgspec.Struct, frozen=True):
    """A child that was added to a group under way."""

    id: UUID
    slot: int
    mine: bool
    """Whether it runs at once, as nobody else is in its way."""
    lanes: set[int]
    acts: list[tuple[UUID, UUID]]


class _NewChild(msgspec.Struct, frozen=True, kw_only=True):
    """A task to be made."""

    new: NewTask
    id: UUID
    place: FlowPosition
    hold: str | None
    needs: tuple[tuple[UUID, bool], ...] = ()
    """What it waits for, and whether that has ended well already."""
    print: str | None = None
    """By what a repeated submit of it is known."""


class ActivationBatch:
    """What is to begin. `run` is a script."""

    def __init__(
        self,
        clock: Clock,
        plans: PlanCache,
        actor: str | None,
        now: datetime,
        is_fresh: Fresh,
    ) -> None:
        self._is_fresh = is_fresh
        self.touched: list[Requirements] = []
        """The lanes that were marked as used."""
        self._clock = clock
        self._plans = plans
        self._actor = actor
        self._now = now
        self._births: list[ActivationRequest] = []
        self._growing: list[Group] = []
        self._paused: set[UUID | None] = set()
        """Groups concerned that are paused, or around which one is."""

    @property
    def waiting(self) -> bool:
        return bool(self._births or self._growing)

    def add(self, birth: ActivationRequest) -> None:
        self._births.append(birth)

    def continue_group(self, group: Group) -> None:
        """Make the children of a group that are still to be made."""
        self._growing.append(group)

    def run(self, cascade: "Cascade") -> Script[ActivationResult]:
        """Make what is waiting to begin."""
        grown = ActivationResult(set(), [], [], [])
        births, self._births = self._births, []
        growing, self._growing = self._growing, []
        groups = yield from self._groups(births, growing)
        by_flow: defaultdict[UUID, list[ActivationRequest]] = defaultdict(list)
        for birth in births:
            if birth.group is None or groups[birth.group].status in GROUP_OPEN:
                by_flow[birth.flow].append(birth)
        flows = yield from self._flows({*by_flow, *(group.flow for group in growing)})
        for flow, wanted in by_flow.items():
            yield from self._activate(flows[flow], wanted, cascade, grown)
        for group in growing:
            yield from self._expand_group(flows[group.flow], groups[group.id], cascade, grown)
        return grown

    def _groups(
        self, births: list[ActivationRequest], growing: list[Group]
    ) -> Script[dict[UUID, Group]]:
        """The groups concerned as they are now: in one that has ended, nothing begins."""
        ids = {each.group for each in births if each.group is not None}
        ids |= {group.id for group in growing}
        if not ids:
            return {}
        rows = yield Statement("groups_locked", {"ids": sorted(ids)})
        groups = {row["id"]: group_of(row) for row in rows}
        yield from self._note_paused(groups)
        return groups

    def _note_paused(self, groups: dict[UUID, Group]) -> Script[None]:
        """Note which of the groups are paused, or inside of one that is."""
        known = dict(groups)
        for group in groups.values():
            around = group
            while around.status is not GroupStatus.PAUSED and around.parent is not None:
                if around.parent not in known:
                    rows = yield Statement("groups_locked", {"ids": [around.parent]})
                    known[around.parent] = group_of(rows[0])
                around = known[around.parent]
            if around.status is GroupStatus.PAUSED:
                self._paused.add(group.id)

    def _flows(self, ids: set[UUID]) -> Script[dict[UUID, Flow]]:
        rows = yield Statement("flows_locked", {"ids": sorted(ids)})
        return {row["id"]: flow_of(row) for row in rows}

    def _activate(
        self,
        flow: Flow,
        births: list[ActivationRequest],
        cascade: "Cascade",
        grown: ActivationResult,
    ) -> Script[None]:
        if flow.status not in FLOW_OPEN:
            return
        plan = yield from self._plans.plan(flow.id)
        jumps = sum(birth.jump for birth in births)
        if jumps:
            flow = yield from self._charge_step_budget(flow, births, cascade, grown)
        keys = [birth.of or birth.key if birth.foreach else birth.key for birth in births]
        counts = yield from self._activations(flow.id, keys)
        children = []
        for birth in births:
            if birth in grown.refused:
                continue
            if birth.foreach is not None or birth.key in plan.groups:
                yield from self._group(flow, plan, birth, counts)
            else:
                children.append(self._task(flow, plan, birth, counts))
        yield from self._insert(flow, children, cascade, grown)

    def _charge_step_budget(
        self,
        flow: Flow,
        births: list[ActivationRequest],
        cascade: "Cascade",
        grown: ActivationResult,
    ) -> Script[Flow]:
        """Count the jumps against the flow's budget; those beyond it are refused."""
        jumps = [birth for birth in births if birth.jump]
        refused = jumps[flow.steps_left :]
        grown.refused += refused
        after = msgspec.structs.replace(flow, steps_left=max(flow.steps_left - len(jumps), 0))
        if refused:
            why = f"{refused[0].of!r} would jump once more, and the flow has no jump left"
            yield cascade.flow_change(after, "step_budget", "ERROR", why)
            return msgspec.structs.replace(after, version=after.version + 1)
        yield cascade.flow_change(after)
        return after

    def _activations(self, flow: UUID, keys: Sequence[str]) -> Script[dict[str, int]]:
        counts: defaultdict[str, int] = defaultdict(int)
        rows = yield Statement("activations", {"flow": flow, "keys": sorted(set(keys))})
        counts |= {row["key"]: row["activation"] for row in rows}
        return counts

    def _task(
        self, flow: Flow, plan: Plan, birth: ActivationRequest, counts: dict[str, int]
    ) -> _NewChild:
        counts[birth.key] += 1
        prompts = () if birth.prompt is None else (birth.prompt,)
        context = ActivationContext(groups=birth.groups, prompts=prompts)
        new = msgspec.structs.replace(plan.tasks[birth.key], depends_on=[])
        new = named(new, birth.key, flow)
        return _NewChild(
            new=new,
            id=birth.id or self._clock.new_id(),
            place=FlowPosition(
                flow=flow.id,
                group=birth.group,
                slot=birth.slot,
                activation=counts[birth.key],
                follows=birth.follows,
                context=context_text(context),
            ),
            hold=hold_of(new, "paused" if self._is_paused(flow, birth.group) else None),
        )

    def _is_paused(self, flow: Flow, group: UUID | None) -> bool:
        """Whether what begins there waits for the end of a pause."""
        return flow.status is FlowStatus.PAUSED or group in self._paused

    def first(self, plan: Plan, birth: ActivationRequest) -> Rows | None:
        """The rows of a key's first task in a flow that runs; `None` where more has to be done."""
        known = self._plans.running(birth.flow)
        if known is None or birth.key not in plan.tasks:
            return None
        flow, given = known
        child = self._task(flow, plan, birth, defaultdict(int))
        if child.hold is not None:
            return None
        rows, lanes = no_rows(), dict[Requirements, int]()
        self._build_rows(flow, child, rows, lanes, given)
        return rows if all(self._is_fresh(needs, self._now) for needs in lanes) else None

    def _group(
        self, flow: Flow, plan: Plan, birth: ActivationRequest, counts: dict[str, int]
    ) -> Script[None]:
        key = (birth.of or birth.key) if birth.foreach is not None else birth.key
        counts[key] += 1
        group, row = new_group(self._clock.new_id(), flow, plan, birth, key, counts[key], self._now)
        params = {"now": self._now, "actor": self._actor}
        yield Statement("group_insert", params, {"born": [row]})
        self._growing.append(group)

    # The children of groups.

    def _expand_group(
        self, flow: Flow, group: Group, cascade: "Cascade", grown: ActivationResult
    ) -> Script[None]:
        if flow.status not in FLOW_OPEN or group.status not in GROUP_OPEN:
            return
        if group.total == 0:
            grown.empty.append(group)
            return
        room = CASCADE - cascade.spent
        if room <= 0:
            cascade.defer("expand", group.id, group.workspace)
            return
        end = min(group.total, group.made + room)
        turn = group.turn
        if group.kind == "sequential" and turn is None:
            turn = group.made
        yield from self._make(flow, group, range(group.made, end), turn, cascade, grown)
        yield cascade.group_change(msgspec.structs.replace(group, made=end, turn=turn))
        if end < group.total:
            cascade.defer("expand", group.id, group.workspace)

    def _make(
        self,
        flow: Flow,
        group: Group,
        slots: range,
        turn: int | None,
        cascade: "Cascade",
        grown: ActivationResult,
    ) -> Script[None]:
        """Make the children of these slots; in a sequence only the one whose turn it is can run."""
        plan = yield from self._plans.plan(flow.id)
        specs = yield from self._specs(plan, group, slots)
        counts = yield from self._activations(flow.id, [key for key, _, _ in specs])
        deps = yield from self._needs(plan, group, slots)
        children: list[_NewChild] = []
        nested: list[tuple[Any, ...]] = []
        groups = (*context_of(group.context).groups, group.key)
        for slot, (key, new, item) in zip(slots, specs, strict=True):
            counts[key] += 1
            mine = group.kind == "parallel" or slot == turn
            if new is None:
                birth = ActivationRequest(
                    flow=flow.id, group=group.id, slot=slot, key=key, groups=groups
                )
                nested.append(self._nested(flow, plan, birth, counts[key], mine=mine))
            else:
                child = self._child(
                    flow, group, slot, key, new, item, counts[key], deps, groups, mine=mine
                )
                children.append(child)
        if nested:
            params = {"now": self._now, "actor": self._actor}
            yield Statement("group_insert", params, {"born": nested})
            cascade.spent += len(nested)
        yield from self._insert(flow, children, cascade, grown)
        yield from self._add_dependencies(flow, children, deps["found"], cascade)
        if self._is_paused(flow, group.id):
            yield from cascade.apply_to_each([child.id for child in children], hold_if_paused)

    def _add_dependencies(
        self, flow: Flow, children: list[_NewChild], found: dict[UUID, Row], cascade: "Cascade"
    ) -> Script[None]:
        """Count the children with those that they wait for and that were there before."""
        counts = Counter(need for child in children for need, _ in child.needs if need in found)
        if not counts:
            return
        yield awaiting(counts, found)
        missed = {need for child in children for need, met in child.needs if not met}
        for need in sorted(missed & counts.keys()):
            if Status(found[need]["status"]) in TERMINAL:
                cascade.defer("dependents", need, flow.workspace)  # it ended badly before they came

    def _nested(
        self, flow: Flow, plan: Plan, birth: ActivationRequest, activation: int, *, mine: bool
    ) -> tuple[Any, ...]:
        """The row of a group in a group; it runs at once when that is its turn."""
        status = GroupStatus.RUNNING if mine else GroupStatus.WAITING
        born, row = new_group(
            self._clock.new_id(), flow, plan, birth, birth.key, activation, self._now, status
        )
        if mine:
            self._growing.append(born)
        return row

    def joined(self, group: Group, new: NewTask, cascade: "Cascade") -> Script["AddedChild"]:
        """A child that the plan does not know of; its slot is after those of the plan."""
        paused = yield from is_paused(group)
        if paused:
            self._paused.add(group.id)
        flows = yield Statement("flows_locked", {"ids": [group.flow]})
        flow = flow_of(flows[0])
        rows = yield Statement("last_slot", {"parent": group.id, "workspace": group.workspace})
        slot = max(rows[0]["slot"] or 0, LATECOMERS) + 1
        key = new.key or f"joined-{slot - LATECOMERS}"
        counts = yield from self._activations(flow.id, [key])
        groups = (*context_of(group.context).groups, group.key)
        mine = group.status is not GroupStatus.WAITING and (
            group.kind == "parallel" or (group.turn is None and group.made == group.total)
        )
        own = new.id or self._clock.new_id()
        nobody: dict[str, Any] = {"ids": {slot: own}, "needs": {}, "found": {}}
        plain = msgspec.structs.replace(new, depends_on=[])
        child = self._child(
            flow, group, slot, key, plain, None, counts[key] + 1, nobody, groups, mine=mine
        )
        child = msgspec.structs.replace(child, print=fingerprint(new))
        grown = ActivationResult(set(), [], [], [])
        yield from self._insert(flow, [child], cascade, grown)
        if paused:
            yield from cascade.apply_to_each([child.id], hold_if_paused)
        return AddedChild(child.id, slot, mine, grown.lanes, grown.acts)

    def _specs(
        self, plan: Plan, group: Group, slots: range
    ) -> Script[list[tuple[str, NewTask | None, tuple[Any, int] | None]]]:
        """The children's keys, definitions where they are tasks, and items where they have any."""
        spec = plan.groups.get(group.key)
        if spec is not None:
            keys = spec.children[slots.start : slots.stop]
            return [(key, plan.tasks.get(key), None) for key in keys]
        control = plan.tasks[group.key].control
        assert isinstance(control, Foreach)
        rows = yield Statement("group_items", {"id": group.id})
        template = plan.tasks[control.template]
        items: list[Any] = decode(rows[0]["items"])
        return [(control.template, template, (items[index], index)) for index in slots]

    def _child(
        self,
        flow: Flow,
        group: Group,
        slot: int,
        key: str,
        new: NewTask,
        item: tuple[Any, int] | None,
        activation: int,
        deps: dict[str, Any],
        groups: tuple[str, ...],
        *,
        mine: bool,
    ) -> _NewChild:
        context = ActivationContext(groups=groups)
        if item is not None:
            context = ActivationContext(groups=groups, item=item[0], index=item[1])
            new = for_item(new, *item)
        paused = self._is_paused(flow, group.id)
        first = "turn" if not mine else ("paused" if paused else None)
        new = named(new, key, flow)
        needs = tuple(deps["needs"][name] for name in new.depends_on)
        return _NewChild(
            new=new,
            id=deps["ids"][slot],
            place=FlowPosition(
                flow=flow.id,
                group=group.id,
                slot=slot,
                activation=activation,
                follows=group.follows,
                context=context_text(context),
            ),
            hold=hold_of(new, first),
            needs=needs,
        )

    def _needs(self, plan: Plan, group: Group, slots: range) -> Script[dict[str, Any]]:
        """The children's ids, and where they wait for each other how those needed stand."""
        spec = plan.groups.get(group.key)
        if spec is None or group.key not in (yield from self._plans.tied(group.flow)):
            fresh = zip(slots, self._clock.new_ids(len(slots)), strict=True)
            return {"ids": dict(fresh), "needs": {}, "found": {}}
        ids = {slot: uuid5(group.id, str(slot)) for slot in range(group.total)}
        by_key = {key: ids[slot] for slot, key in enumerate(spec.children)}
        earlier = sorted(ids[slot] for slot in range(slots.start))
        found: dict[UUID, Row] = {}
        if earlier:
            params = {"workspace": group.workspace, "ids": earlier}
            rows = yield Statement("needed", params)
            found = {row["id"]: row for row in rows}
        needs = {
            key: (task, task in found and found[task]["status"] == Status.COMPLETED)
            for key, task in by_key.items()
        }
        return {"ids": ids, "needs": needs, "found": found}

    def _insert(
        self, flow: Flow, children: list[_NewChild], cascade: "Cascade", grown: ActivationResult
    ) -> Script[None]:
        if not children:
            return
        rows = no_rows()
        lanes: dict[Requirements, int] = {}
        given = yield from self._plans.input(flow.id)
        counts = Counter(need for child in children for need, _ in child.needs)
        for child in children:
            self._build_rows(flow, child, rows, lanes, given, counts[child.id] or None)
            hot = rows["hot"][-1]
            if hot[STATUS] is Status.PENDING:
                grown.lanes.add(hot[2])
            elif child.hold == "act" and all(met for _, met in child.needs):
                grown.acts.append((child.id, flow.workspace))
        stale = {n: lane for n, lane in lanes.items() if not self._is_fresh(n, self._now)}
        if stale:
            params = {"now": self._now, "most": MAX_LANES}
            wanted = sorted((lane, flow.workspace, needs.key()) for needs, lane in stale.items())
            yield Statement("lane_touch", params, {"wanted": wanted})
            self.touched += stale
        yield insert("submit_new", rows, self._now)
        cascade.spent += len(children)

    def _build_rows(
        self,
        flow: Flow,
        child: _NewChild,
        rows: Rows,
        lanes: dict[Requirements, int],
        given: Any,
        awaited: int | None = None,
    ) -> None:
        new = child.new
        if new.input is None:
            new = msgspec.structs.replace(new, input=given)
        needs = requirements(new, flow.workspace)
        lane = lanes.get(needs)
        if lane is None:
            lane = lanes[needs] = lane_id(needs.key())
        unmet = sum(not met for _, met in child.needs)
        rows["body"].append(
            body_row(
                new,
                child.id,
                flow.workspace,
                child.print,
                self._actor,
                None,
                flow.trace_id,
                child.place,
            )
        )
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
                awaited=awaited,
            )
        )
        add_labels(rows, new, child.id, flow.workspace)
        rows["dependency"] += [
            (child.id, need, flow.workspace, met, False) for need, met in child.needs
        ]
