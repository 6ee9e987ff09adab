"""Spending: what attempts say they used, and the budgets that stop a tree of tasks."""

from collections import defaultdict
from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any
from uuid import UUID

import msgspec

from tenuto.clock import Clock
from tenuto.engine.limits.rate_limits import charge
from tenuto.model.errors import Conflict
from tenuto.model.limits.budgets import (
    AT_END,
    HOLD,
    NO_MODEL,
    Budget,
    Usage,
    UsageTotal,
    check_usage,
    format_usage,
    is_over,
    raised_budget,
)
from tenuto.model.printable import printable
from tenuto.model.tasks import commands
from tenuto.model.tasks.commands import Command
from tenuto.model.tasks.decide import token_hash
from tenuto.model.tasks.task import LEASED, Fence, Task
from tenuto.store.protocol import Row, Script, Statement

if TYPE_CHECKING:
    from tenuto.engine.core import Core
    from tenuto.engine.flows.advance import Cascade

DEEPEST = 1_000
"""Levels of tasks above one in which a budget is looked for."""
MOST_HELD = 1_000
"""Tasks that go on in one transaction when a budget is raised; the next ones follow in another."""
_STOPPING_S = 2.0
"""Seconds until somebody looks again at tasks that are still being stopped."""
MODELS = 100
"""Models that are counted by name; the others are `other`."""
_named: set[str] = set()


class UsageStats(msgspec.Struct, frozen=True, rename="camel"):
    """What a workspace used: since midnight UTC, and ever."""

    tokens_today: int
    cost_usd_today: float
    input_tokens: int
    output_tokens: int
    cost_usd: float


def spend(
    core: "Core", workspace: UUID, fence: Fence, usage: Usage, *, at_end: bool = False
) -> Script[Row | None]:
    """Add what an attempt used; nothing where its fence is not current or it was counted before.

    `at_end`: it comes with the attempt's end, which may be refused and told again.
    """
    now = core.now()
    model = usage.model or NO_MODEL
    rows = yield Statement(
        "spend",
        {
            **fenced(workspace, fence),
            "model": model,
            "input_tokens": usage.input_tokens,
            "output_tokens": usage.output_tokens,
            "cost_usd": float(usage.cost_usd),
            "number": usage.number or (AT_END if at_end else 0),
            "now": now,
        },
    )
    if not rows:
        return None
    row = rows[0]
    tokens = usage.input_tokens + usage.output_tokens
    yield from charge(core, workspace, row["agent"], usage.model, tokens, now)
    return row


def fenced(workspace: UUID, fence: Fence) -> dict[str, Any]:
    """The parameters by which a statement finds the task of an attempt that owns it."""
    return {
        "workspace": workspace,
        "task": fence.task,
        "attempt": fence.attempt,
        "token": token_hash(fence.token),
    }


def spend_owner(workspace: UUID, fence: Fence) -> Statement:
    """The statement that finds the task of an attempt, if its fence is current."""
    return Statement("spend_owner", fenced(workspace, fence))


def spent_by_attempt(rows: Sequence[Row]) -> defaultdict[int, dict[str, Any]]:
    """What each attempt of a task used, over all models."""
    used: defaultdict[int, dict[str, Any]] = defaultdict(dict)
    for row in rows:
        mine = used[row["attempt"]]
        for name in UsageTotal.__struct_fields__:
            mine[name] = mine.get(name, 0) + row[name]
    return used


def counted(usage: Usage) -> None:
    """Count a report in this process's metrics."""
    from tenuto.metrics import OTHER, PROCESS_METRICS  # noqa: PLC0415  short commands do without

    model = printable(usage.model or NO_MODEL)
    if model not in _named and len(_named) >= MODELS:
        model = OTHER
    _named.add(model)
    PROCESS_METRICS.count("tenuto_tokens_total", model, by=usage.input_tokens + usage.output_tokens)
    PROCESS_METRICS.count("tenuto_cost_usd_total", by=usage.cost_usd)


def used(
    core: "Core", cascade: "Cascade", workspace: UUID, fence: Fence, usage: Usage
) -> Script[bool]:
    """Count a report; where it goes over a budget, ask the attempt to stop and people to decide.

    Answers whether it was counted now; raises `Conflict` for an attempt that owns nothing.
    """
    row = yield from spend(core, workspace, fence, usage)
    if row is None:
        if not (yield spend_owner(workspace, fence)):
            raise Conflict(f"attempt {fence.attempt} no longer owns the task", "lease_lost")
        return False
    over = yield from _held(fence.task, workspace)
    if over is not None:
        yield from _stop(core.clock, cascade, workspace, fence.task, over)
    return True


class _ExceededBudget(msgspec.Struct, frozen=True):
    """A budget that is used up, whose it is, and what was used."""

    task: UUID
    title: str
    budget: Budget
    spent: UsageTotal

    @property
    def hold(self) -> str:
        return f"{HOLD}:{self.task}"


def _held(task: UUID, workspace: UUID) -> Script[_ExceededBudget | None]:
    """The budget that is used up, its task held: who answers for it sees all that waits for it."""
    held: set[UUID] = set()
    while True:
        over = yield from _exceeded(task, workspace)
        if over is None or over.task in held:
            return over
        held |= {over.task, task}
        yield Statement("tasks_locked", {"ids": sorted(held)})


def _exceeded(task: UUID, workspace: UUID) -> Script[_ExceededBudget | None]:
    params = {"task": task, "workspace": workspace, "most": DEEPEST}
    rows = yield Statement("budgets_above", params)
    for row in rows:
        budget = msgspec.json.decode(row["budget"], type=Budget)
        spent = yield from _tree_spent(row["id"], workspace)
        if is_over(budget, spent):
            return _ExceededBudget(row["id"], row["title"], budget, spent)
    return None


def _tree_spent(task: UUID, workspace: UUID) -> Script[UsageTotal]:
    rows = yield Statement("tree_spent", {"task": task, "workspace": workspace})
    row = rows[0]
    return UsageTotal(
        input_tokens=row["input_tokens"],
        output_tokens=row["output_tokens"],
        cost_usd=row["cost_usd"],
    )


def _stop(
    clock: Clock, cascade: "Cascade", workspace: UUID, task: UUID, over: _ExceededBudget
) -> Script[None]:
    why = f"the budget of {over.title!r} is used up: {format_usage(over.spent)}"
    asked = commands.PauseForBudget(hold=over.hold, reason=why)
    changed = yield from cascade.apply_to_each([task], lambda found: _unless_asked(found, asked))
    if not changed:
        return
    known = yield Statement("budget_asked", {"task": over.task, "workspace": workspace})
    if known:
        return
    body = {"reason": why, "budget": over.budget, "spent": over.spent, "stopped": task}
    yield Statement(
        "inbox_put",
        {
            "id": clock.new_id(),
            "workspace": workspace,
            "task": over.task,
            "kind": HOLD,
            "title": f"{over.title}: its budget is used up",
            "body": msgspec.json.encode(body).decode(),
            "expires_at": None,
            "now": clock.now(),
        },
    )


def _unless_asked(task: Task, command: Command) -> Command | None:
    """One request is enough, whoever made it."""
    asked = task.pause_requested_at is not None and (task.hold or "").startswith(HOLD)
    return None if asked or task.status not in LEASED else command


def answer(
    cascade: "Cascade", workspace: UUID, task: UUID, *, approve: bool, wanted: Budget | None
) -> Script[Budget | None]:
    """Raise a budget and let what waits for it go on, or cancel that; answers the new budget."""
    above = {"task": task, "workspace": workspace, "most": 0}
    rows = yield Statement("budgets_above", above)
    if not rows:
        raise Conflict("the task has no budget any more")
    budget = None
    if approve:
        spent = yield from _tree_spent(task, workspace)
        old = msgspec.json.decode(rows[0]["budget"], type=Budget)
        budget = raised_budget(old, spent, wanted)
        text = msgspec.json.encode(budget).decode()
        yield Statement("budget_set", {"task": task, "workspace": workspace, "budget": text})
    hold = f"{HOLD}:{task}"
    ids = yield from _waiting(task, workspace)
    if approve and len(ids) == MOST_HELD:
        cascade.defer(HOLD, task, workspace)
    if not approve:
        ids.add(task)  # and all below it, as with any cancel
    yield from cascade.apply_to_each(
        sorted(ids), lambda found: _answered(found, hold, approve=approve)
    )
    return budget


def _waiting(task: UUID, workspace: UUID) -> Script[set[UUID]]:
    """The tasks that wait for a task's budget, up to MOST_HELD of them."""
    params = {"task": task, "workspace": workspace, "hold": f"{HOLD}:{task}", "most": MOST_HELD}
    rows = yield Statement("tree_held", params)
    return {row["id"] for row in rows}


def go_on(cascade: "Cascade", work: Row) -> Script[None]:
    """A piece of work: let more of those go on that waited for a budget which was raised."""
    task, workspace = work["subject"], work["workspace"]
    if (yield from _held(task, workspace)) is not None:
        return  # it is used up again: the next answer is for them, too
    ids = yield from _waiting(task, workspace)
    stopping = False

    def freed(found: Task) -> Command | None:
        nonlocal stopping
        stopping = stopping or found.status in LEASED
        return None if found.status in LEASED else commands.ClearHold()

    yield from cascade.apply_to_each(sorted(ids), freed)
    if stopping or len(ids) == MOST_HELD:
        cascade.defer(HOLD, task, workspace, wait_s=_STOPPING_S if stopping else 0)


def _answered(task: Task, hold: str, *, approve: bool) -> Command | None:
    if not approve:
        return commands.Cancel(reason="its budget is used up, and a person said no to more")
    if task.hold != hold:
        return None
    if task.status in LEASED:
        raise Conflict(f"task {task.id} is still being stopped; answer in a moment")
    return commands.ClearHold()


class UsageRecorder:
    """What one workspace's attempts use."""

    def __init__(self, core: "Core", workspace: UUID) -> None:
        self._core = core
        self._workspace = workspace

    async def used(self, fence: Fence, usage: Usage, actor: str | None) -> None:
        """Count what an attempt used since its last report."""

        def script(cascade: "Cascade") -> Script[bool]:
            return (yield from used(self._core, cascade, self._workspace, fence, usage))

        check_usage(usage)
        if await self._core.run_with_cascade(script, actor):
            counted(usage)

    async def stats(self, now: datetime) -> UsageStats:
        """What the workspace used."""
        since = now.replace(hour=0, minute=0, second=0, microsecond=0)
        params = {"workspace": self._workspace, "since": since}
        row = (await self._core.store.fetch(Statement("spending_stats", params)))[0]
        return UsageStats(
            row["tokens_since"],
            row["cost_since"],
            row["input_tokens"],
            row["output_tokens"],
            row["cost_usd"],
        )
