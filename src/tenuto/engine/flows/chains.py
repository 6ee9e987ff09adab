"""Chained completions: one statement completes a task and writes all its follow-ups.

A chained completion is a guess from the data read when the task was claimed. The statement compares
it with the rows and writes all or nothing. If it writes nothing, a cascade writes the follow-ups.
"""

from typing import Any
from uuid import UUID

import msgspec

from tenuto.clock import Clock
from tenuto.engine.flows.activation import ActivationBatch, IsFreshLane
from tenuto.engine.flows.activation_rows import ActivationRequest
from tenuto.engine.flows.plans import PlanCache
from tenuto.engine.flows.rows import context_of
from tenuto.engine.rows import LANE_COLUMN, STATUS_COLUMN, Rows, insert_statement
from tenuto.model.flows.plan import Plan
from tenuto.model.flows.progress import is_next_child
from tenuto.model.tasks.task import Status
from tenuto.store.protocol import Row, Statement


class ClaimSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The flow position and dependents of a watched task, as its claim read them."""

    awaited: int
    """How many tasks depend on it."""
    plain: int
    """1 for a plain task: no control task, no subtask, no concurrency key. Else 0."""
    group: UUID | None = None
    slot: int | None = None
    next: str | None = None
    flow: UUID | None = None
    key: str | None = None
    context: str | None = None


def claim_snapshot(row: Row) -> ClaimSnapshot:
    """Returns the snapshot in the row of a claimed task."""
    snapshot = msgspec.json.decode(row["standing"], type=ClaimSnapshot)
    return msgspec.structs.replace(
        snapshot, flow=row["flow"], key=row["key"], context=row["context"]
    )


class ChainedCompletion(msgspec.Struct, frozen=True):
    """The statement to try, without the result, and the lanes it adds claimable tasks to."""

    query: str
    params: dict[str, Any]
    rows: Rows
    lanes: set[int]

    def statement(self, params: dict[str, Any], result: list[tuple[Any, ...]]) -> Statement:
        """Returns the complete statement with the task's result."""
        return Statement(self.query, self.params | params, self.rows | {"result": result})


def plan_chained_completion(
    task: UUID,
    snapshot: ClaimSnapshot,
    clock: Clock,
    plans: PlanCache,
    is_fresh: IsFreshLane,
    actor: str | None,
) -> ChainedCompletion | None:
    """Returns the chained completion of a task; `None` if a cascade has to write the follow-ups."""
    if not snapshot.plain:
        return None
    if snapshot.flow is None:
        return (
            ChainedCompletion("complete_and_unblock", {"actor": actor}, {}, set())
            if snapshot.awaited
            else None
        )
    plan = plans.cached_plan(snapshot.flow)
    if snapshot.awaited or plan is None:
        return None
    groups = context_of(snapshot.context).groups
    parent_key = groups[-1] if groups else None
    if snapshot.next is not None and not is_next_child(
        plan, parent_key, snapshot.key or "", snapshot.next
    ):
        batch = ActivationBatch(clock, plans, actor, clock.now(), is_fresh)
        return (
            None
            if snapshot.group is not None
            else _chain_to_next_task(task, snapshot, plan, batch, clock)
        )
    spec = plan.groups.get(parent_key or "")
    if snapshot.group is None or spec is None or spec.order != "sequential":
        return None
    params = {"parent": snapshot.group, "slot": snapshot.slot, "actor": actor}
    return ChainedCompletion("complete_and_pass_turn", params, {}, set())


def _chain_to_next_task(
    task: UUID, snapshot: ClaimSnapshot, plan: Plan, batch: ActivationBatch, clock: Clock
) -> ChainedCompletion | None:
    """Returns the completion that also activates the task's `next`; `None` if a cascade must."""
    assert snapshot.flow is not None, "the task must be in a flow"
    assert snapshot.next is not None, "the task must have a next"
    request = ActivationRequest(
        flow=snapshot.flow,
        group=None,
        slot=snapshot.slot or 0,
        key=snapshot.next,
        predecessor_key=snapshot.key,
        follows=task,
    )
    rows = batch.first_task_rows(plan, request)
    if rows is None:
        return None
    row = rows["hot"][0]
    lanes = {row[LANE_COLUMN]} if row[STATUS_COLUMN] is Status.PENDING else set()
    statement = insert_statement("complete_and_activate", rows, clock.now())
    params = {"flow": snapshot.flow, "key": snapshot.next, "born": row[0]}
    return ChainedCompletion(statement.query, statement.params | params, rows, lanes)
