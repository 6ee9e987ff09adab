"""Links of a chain: ends that one statement can write together with all that follows from them.

A link is a guess, made of what was known when the task was claimed. The statement holds it against
the rows and writes all or nothing; where it writes nothing, a cascade finds out what follows.
"""

from typing import Any
from uuid import UUID

import msgspec

from tenuto.clock import Clock
from tenuto.engine.flows.activation import ActivationBatch, Fresh
from tenuto.engine.flows.activation_rows import ActivationRequest
from tenuto.engine.flows.plans import PlanCache
from tenuto.engine.flows.rows import context_of
from tenuto.engine.rows import STATUS, Rows, insert
from tenuto.model.flows.plan import Plan
from tenuto.model.flows.progress import is_next_child
from tenuto.model.tasks.task import Status
from tenuto.store.protocol import Row, Statement


class ClaimSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """Where a task stands whose end is watched, as its claim found it."""

    awaited: int
    plain: int
    """Whether it is an agent's own task: no control task, no child of another, without a key."""
    group: UUID | None = None
    slot: int | None = None
    next: str | None = None
    flow: UUID | None = None
    key: str | None = None
    context: str | None = None


def claim_snapshot(row: Row) -> ClaimSnapshot:
    """The standing in a claim's row."""
    known = msgspec.json.decode(row["standing"], type=ClaimSnapshot)
    return msgspec.structs.replace(known, flow=row["flow"], key=row["key"], context=row["context"])


class ChainedCompletion(msgspec.Struct, frozen=True):
    """The statement to try, but for the end itself, and the lanes that it fills besides."""

    query: str
    params: dict[str, Any]
    rows: Rows
    lanes: set[int]

    def statement(self, params: dict[str, Any], result: list[tuple[Any, ...]]) -> Statement:
        """With the end."""
        return Statement(self.query, self.params | params, self.rows | {"result": result})


def plan_chained_completion(
    task: UUID,
    at: ClaimSnapshot,
    clock: Clock,
    plans: PlanCache,
    is_fresh: Fresh,
    actor: str | None,
) -> ChainedCompletion | None:
    """What plainly follows from the end of a task, if anything does."""
    if not at.plain:
        return None
    if at.flow is None:
        return (
            ChainedCompletion("complete_awaited", {"actor": actor}, {}, set())
            if at.awaited
            else None
        )
    plan = plans.known(at.flow)
    if at.awaited or plan is None:
        return None
    groups = context_of(at.context).groups
    around = groups[-1] if groups else None
    if at.next is not None and not is_next_child(plan, around, at.key or "", at.next):
        births = ActivationBatch(clock, plans, actor, clock.now(), is_fresh)
        return None if at.group is not None else _chain_to_next_task(task, at, plan, births, clock)
    spec = plan.groups.get(around or "")
    if at.group is None or spec is None or spec.order != "sequential":
        return None
    place = {"parent": at.group, "slot": at.slot, "actor": actor}
    return ChainedCompletion("complete_in_turn", place, {}, set())


def _chain_to_next_task(
    task: UUID, at: ClaimSnapshot, plan: Plan, births: ActivationBatch, clock: Clock
) -> ChainedCompletion | None:
    """The link to a task that takes this one's place in the flow."""
    assert at.flow is not None, "only a flow has a next"
    assert at.next is not None, "only what has a next has a place to be taken"
    birth = ActivationRequest(
        flow=at.flow, group=None, slot=at.slot or 0, key=at.next, of=at.key, follows=task
    )
    rows = births.first(plan, birth)
    if rows is None:
        return None
    new = rows["hot"][0]
    lanes = {new[2]} if new[STATUS] is Status.PENDING else set()
    spelled = insert("complete_before", rows, clock.now())
    place = {"flow": at.flow, "key": at.next, "born": new[0]}
    return ChainedCompletion(spelled.query, spelled.params | place, rows, lanes)
