"""Faults put into flows on purpose: the story about flows must find each of them."""

from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from uuid import UUID

import msgspec
from tests.proof.planted_sim import Plant, rewrite, swap

from tenuto.coordinator import coordinator
from tenuto.coordinator.duties import Duty
from tenuto.engine.agents.inbox import Inbox
from tenuto.engine.core import FLOW_WORK_TOPIC
from tenuto.engine.flows import deferred, groups, start
from tenuto.engine.flows.activation import ActivationBatch
from tenuto.engine.flows.activation_rows import ActivationRequest
from tenuto.engine.flows.advance import Cascade
from tenuto.engine.flows.outcomes import FinishedTask
from tenuto.engine.flows.plans import PlanCache
from tenuto.engine.tasks.dependencies import SubmitDependencies
from tenuto.engine.tasks.finish import AttemptFinisher, _CompletionResult
from tenuto.model.flows.groups import Group
from tenuto.model.flows.progress import Flow
from tenuto.model.tasks import commands
from tenuto.model.tasks.task import Status
from tenuto.store.batching import Answers
from tenuto.store.protocol import Rows, Script, Statement

PLANTS: dict[str, Plant] = {}
_Apply = Callable[[ExitStack], None]


def plant(*seen_by: str) -> Callable[[_Apply], _Apply]:
    """Register a fault under its function's name, with the oracles that have to see it."""

    def register(apply: _Apply) -> _Apply:
        PLANTS[apply.__name__] = Plant(apply, frozenset(seen_by), harsh=False)
        return apply

    return register


@plant("I18", "I24")
def join_read_then_write(stack: ExitStack) -> None:
    """A process counts on from what it read before, whoever has counted since."""
    count = groups.count_ended_slots
    read: dict[tuple[PlanCache, UUID], Group] = {}

    def stale(cascade: Cascade, group: Group, ends: Any) -> Script[None]:
        existing = read.setdefault((cascade.plans, group.id), group)
        counts = {name: getattr(existing, name) for name in ("open", "succeeded", "failed")}
        own = msgspec.structs.replace(group, **counts)
        after = msgspec.structs.replace(own, open=own.open - len(ends))
        read[cascade.plans, group.id] = after
        yield from count(cascade, own, ends)

    swap(stack, groups, "count_ended_slots", stale)


@plant("I18")
def slot_counted_twice(stack: ExitStack) -> None:
    """Every message that a task is complete ends its slot, the repeated one, too."""

    def eager(self: AttemptFinisher, results: list[Any]) -> Script[Answers]:
        rows = yield self._completion_statement("complete_watched", results)
        moved = {row["id"] for row in rows}
        asked = sorted(result.command.fence.task for result in results)
        states = yield Statement("task_statuses", {"ids": asked})
        done = [row for row in states if row["status"] == "COMPLETED"]
        cascade = self._core.new_cascade(results[0].actor)
        yield from cascade.run(
            [FinishedTask(row["id"], row["workspace"], Status.COMPLETED) for row in done]
        )
        return _followed(results, moved)

    swap(stack, AttemptFinisher, "_complete_watched_script", eager)


def _followed(results: list[Any], moved: set[UUID]) -> list[Any]:
    return [_CompletionResult(result.command.fence.task in moved) for result in results]


@plant("I18")
def chunk_of_items_made_twice(stack: ExitStack) -> None:
    """A process makes the next items after those it knows of itself."""
    lock, grow = ActivationBatch._lock_groups, ActivationBatch._expand_group
    existing: dict[tuple[PlanCache, UUID], int] = {}

    def remembered(
        self: ActivationBatch, activations: Any, growing: Any
    ) -> Script[dict[UUID, Group]]:
        result = yield from lock(self, activations, growing)
        return {
            id_: msgspec.structs.replace(
                definition, made=existing.get((self._plans, id_), definition.made)
            )
            for id_, definition in result.items()
        }

    def noted(
        self: ActivationBatch, flow: Flow, group: Group, cascade: Cascade, grown: Any
    ) -> Script[None]:
        before = cascade.rows_written
        yield from grow(self, flow, group, cascade, grown)
        existing[self._plans, group.id] = group.made + cascade.rows_written - before

    swap(stack, ActivationBatch, "_lock_groups", remembered)
    swap(stack, ActivationBatch, "_expand_group", noted)


@plant("I17")
def dependents_released_before_the_end(stack: ExitStack) -> None:
    """Releases dependents first and records the result afterwards, if at all."""
    complete = AttemptFinisher._complete_with_cascade

    async def hasty(self: AttemptFinisher, result: Any) -> None:
        task = result.command.fence.task

        def script(cascade: Cascade) -> Script[None]:
            yield from cascade.notify_dependents(
                [FinishedTask(task, result.workspace, Status.COMPLETED)]
            )

        await self._core.run_with_cascade(script, None)
        await complete(self, result)

    swap(stack, AttemptFinisher, "_complete_with_cascade", hasty)


@plant("I17", "I24")
def watcher_not_noted(stack: ExitStack) -> None:
    """A task that somebody comes to wait for ends as if nobody did."""
    rewrite(
        stack, "add_waiters", "then true else task.watched", "then task.watched else task.watched"
    )


@plant("I17", "I24")
def waiter_not_counted(stack: ExitStack) -> None:
    """A task that somebody comes to wait for ends as if there was nobody to look for."""
    rewrite(stack, "add_waiters", "task.awaited + needed.n", "task.awaited")


@plant("I17", "I24")
def watcher_too_late(stack: ExitStack) -> None:
    """A task that waits for what has ended already is never told."""
    swap(stack, SubmitDependencies, "_is_met", lambda _self, _task, _need: False)
    swap(stack, SubmitDependencies, "_fail_waiters", lambda _self, _cascade, _hot: iter(()))


@plant("I18")
def jumps_not_counted(stack: ExitStack) -> None:
    """A flow may jump for ever."""

    def free(
        self: ActivationBatch, flow: Flow, activations: list[ActivationRequest], *rest: Any
    ) -> Script[Flow]:
        del self, activations, rest
        yield Statement("flows_locked", {"ids": [flow.id]})
        return flow

    swap(stack, ActivationBatch, "_charge_step_budget", free)


@plant("I18", "I24")
def leftovers_forgotten(stack: ExitStack) -> None:
    """Does not store the work that a cascade deferred."""
    swap(stack, Cascade, "defer", lambda *_args, **_kwargs: None)


@plant("I24")
def leftovers_done_first(stack: ExitStack) -> None:
    """A piece of what is left is forgotten in a transaction of its own, and then done."""

    async def in_two(self: start.Flows, work: UUID) -> int:
        def forget() -> Script[Rows]:
            rows = yield Statement("deferred_lock", {"id": work})
            yield Statement("deferred_delete", {"ids": [work]})
            return rows

        stored = await self._core.store.transact(forget)

        def script(cascade: Cascade) -> Script[int]:
            for row in stored:
                yield from deferred.RUNNERS[row["kind"]](cascade, row)
            return len(stored)

        return await self._run(script)

    swap(stack, start.Flows, "_run_deferred", in_two)


@plant("approval")
def approval_decided_twice(stack: ExitStack) -> None:
    """Does not check again that an item was answered."""

    async def again(self: Inbox, item: UUID, *, approve: bool, comment: str | None = None) -> None:
        del approve, comment

        def script(cascade: Cascade) -> Script[None]:
            params = {"id": item, "workspace": self._workspace}
            rows = yield Statement("inbox_locked", params)
            yes = commands.Resolve(status=Status.COMPLETED, output="{}")
            yield from cascade.apply_to_each([rows[0]["task"]], lambda _: yes)
            yield self._decide_statement(item, "APPROVED", "{}")

        await self._core.run_with_cascade(script, self._actor)

    swap(stack, Inbox, "answer", again)


@plant("I24", "I18")
def cascade_in_a_second_transaction(stack: ExitStack) -> None:
    """A result is recorded first; what follows from it is done when there is time."""

    def only(self: AttemptFinisher, results: list[Any]) -> Script[Answers]:
        rows = yield self._completion_statement("complete_watched", results)
        return _followed(results, {row["id"] for row in rows})

    complete = AttemptFinisher._complete_with_cascade

    async def then(self: AttemptFinisher, result: Any) -> None:
        await complete(self, result)
        ended = FinishedTask(result.command.fence.task, result.workspace, Status.COMPLETED)

        def script(cascade: Cascade) -> Script[None]:
            yield from cascade.run([ended])

        await self._core.run_with_cascade(script, None)

    swap(stack, AttemptFinisher, "_complete_watched_script", only)
    swap(stack, AttemptFinisher, "_complete_with_cascade", then)


@plant("I18")
def sequence_without_turns(stack: ExitStack) -> None:
    """The children of a sequence run as soon as they are made."""
    make = ActivationBatch._group_child

    def at_once(self: ActivationBatch, *args: Any, has_turn: bool) -> Any:
        del has_turn
        return make(self, *args, has_turn=True)

    swap(stack, ActivationBatch, "_group_child", at_once)


@plant("I18", "I24")
def turn_kept(stack: ExitStack) -> None:
    """The turn does not go on to the next child."""

    def keep(cascade: Cascade, group: Group) -> Script[Group]:
        del cascade
        yield Statement("groups_locked", {"ids": [group.id]})
        return group

    def no_short_way(cascade: Cascade, group: Group) -> Script[bool]:
        del cascade, group
        yield from ()
        return False

    swap(stack, groups, "_try_pass_turn", no_short_way)
    swap(stack, groups, "give_turn_to_next", keep)


@plant("I24")
def hints_are_the_only_way(stack: ExitStack) -> None:
    """Coordinators look for what is left only when they are told of it."""
    received: defaultdict[Any, bool] = defaultdict(bool)
    is_due, run = coordinator.Coordinator._is_due, coordinator.Coordinator.run

    def when_notified(self: coordinator.Coordinator, duty: Duty) -> bool:
        if duty.name != "flow":
            return is_due(self, duty)
        notified, received[self] = received[self], False
        return notified

    async def listening(self: coordinator.Coordinator, stop: Any) -> None:
        def on_topic(topic: str) -> None:
            received[self] = received[self] or topic == FLOW_WORK_TOPIC

        self.engine.subscribe(on_topic)
        await run(self, stop)

    swap(stack, coordinator.Coordinator, "_is_due", when_notified)
    swap(stack, coordinator.Coordinator, "run", listening)
