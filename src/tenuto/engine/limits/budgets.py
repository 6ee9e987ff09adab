"""Records the usage that attempts report; enforces the budgets of task trees."""

from collections import defaultdict
from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any
from uuid import UUID

import msgspec

from tenuto.clock import Clock
from tenuto.engine.limits.rate_limits import charge_tokens
from tenuto.model.errors import Conflict
from tenuto.model.limits.budgets import (
    FINAL_REPORT_NUMBER,
    HOLD,
    NO_MODEL,
    Budget,
    Usage,
    UsageTotal,
    check_usage,
    format_usage,
    higher_budget,
    is_exceeded,
)
from tenuto.model.printable import printable
from tenuto.model.tasks import commands
from tenuto.model.tasks.commands import Command
from tenuto.model.tasks.task import LEASED, Fence, Task, token_hash
from tenuto.store.protocol import Row, Script, Statement

if TYPE_CHECKING:
    from tenuto.engine.core import Core
    from tenuto.engine.flows.advance import Cascade

MAX_LEVELS = 1_000
"""How many levels of parents are searched for budgets."""
MAX_RESUMED = 1_000
"""Tasks resumed per transaction when a budget is raised; later transactions resume the rest."""
_STOP_POLL_S = 2.0
"""Seconds until tasks that are still being stopped are checked again."""
MAX_MODELS = 100
"""Models that metrics count by name; all others are counted as `other`."""
_named_models: set[str] = set()
"""The models that this process counts by name."""


class UsageStats(msgspec.Struct, frozen=True, rename="camel"):
    """The usage of a workspace: since midnight UTC, and in total."""

    tokens_today: int
    cost_usd_today: float
    input_tokens: int
    output_tokens: int
    cost_usd: float


def record_usage(
    core: "Core", workspace: UUID, fence: Fence, usage: Usage, *, at_end: bool = False
) -> Script[Row | None]:
    """Adds an attempt's usage and charges rate limits; `None`: fence outdated, or counted before.

    Otherwise returns the ids of the attempt's task, workspace and agent.
    `at_end`: the report comes with the attempt's outcome, which can be refused and reported again.
    """
    now = core.now()
    model = usage.model or NO_MODEL
    rows = yield Statement(
        "usage_add",
        {
            **fence_params(workspace, fence),
            "model": model,
            "input_tokens": usage.input_tokens,
            "output_tokens": usage.output_tokens,
            "cost_usd": float(usage.cost_usd),
            "number": usage.number or (FINAL_REPORT_NUMBER if at_end else 0),
            "now": now,
        },
    )
    if not rows:
        return None
    row = rows[0]
    tokens = usage.input_tokens + usage.output_tokens
    yield from charge_tokens(workspace, row["agent"], usage.model, tokens, now)
    return row


def fence_params(workspace: UUID, fence: Fence) -> dict[str, Any]:
    """Returns the query parameters that find a task only while the attempt owns it."""
    return {
        "workspace": workspace,
        "task": fence.task,
        "attempt": fence.attempt,
        "token": token_hash(fence.token),
    }


def usage_task_statement(workspace: UUID, fence: Fence) -> Statement:
    """Returns the statement that finds the task of an attempt, if its fence is current."""
    return Statement("usage_task", fence_params(workspace, fence))


def usage_by_attempt(rows: Sequence[Row]) -> defaultdict[int, dict[str, Any]]:
    """Returns token counts and cost by attempt number, each the sum over all models."""
    totals: defaultdict[int, dict[str, Any]] = defaultdict(dict)
    for row in rows:
        attempt_totals = totals[row["attempt"]]
        for name in UsageTotal.__struct_fields__:
            attempt_totals[name] = attempt_totals.get(name, 0) + row[name]
    return totals


def count_in_metrics(usage: Usage) -> None:
    """Counts tokens and cost in this process's metrics; models after the first 100 as `other`."""
    from tenuto.metrics import OTHER, PROCESS_METRICS  # noqa: PLC0415  short commands do without

    model = printable(usage.model or NO_MODEL)
    if model not in _named_models and len(_named_models) >= MAX_MODELS:
        model = OTHER
    _named_models.add(model)
    PROCESS_METRICS.count("tenuto_tokens_total", model, by=usage.input_tokens + usage.output_tokens)
    PROCESS_METRICS.count("tenuto_cost_usd_total", by=usage.cost_usd)


def record_and_enforce(
    core: "Core", cascade: "Cascade", workspace: UUID, fence: Fence, usage: Usage
) -> Script[bool]:
    """Records usage; pauses the attempt over a budget. False: counted before. Raises `Conflict`.

    With the pause, an inbox item asks for a higher budget. `Conflict`: not the owner of the task.
    """
    row = yield from record_usage(core, workspace, fence, usage)
    if row is None:
        if not (yield usage_task_statement(workspace, fence)):
            raise Conflict(f"attempt {fence.attempt} no longer owns the task", "lease_lost")
        return False
    exceeded = yield from _lock_exceeded(fence.task, workspace)
    if exceeded is not None:
        yield from _request_pause(core.clock, cascade, workspace, fence.task, exceeded)
    return True


class _ExceededBudget(msgspec.Struct, frozen=True):
    """An exceeded budget, its task, and the usage of that task and its subtasks."""

    task: UUID
    title: str
    budget: Budget
    spent: UsageTotal

    @property
    def hold(self) -> str:
        """The hold of tasks that wait for this budget."""
        return f"{HOLD}:{self.task}"


def _lock_exceeded(task: UUID, workspace: UUID) -> Script[_ExceededBudget | None]:
    """Returns the nearest exceeded budget and locks its task and the given one; `None`: none is.

    The lock makes sure that an answer to the budget sees all tasks that wait for it.
    """
    locked: set[UUID] = set()
    while True:
        exceeded = yield from _find_exceeded(task, workspace)
        if exceeded is None or exceeded.task in locked:
            return exceeded
        locked |= {exceeded.task, task}
        yield Statement("tasks_locked", {"ids": sorted(locked)})


def _find_exceeded(task: UUID, workspace: UUID) -> Script[_ExceededBudget | None]:
    """Returns the nearest exceeded budget of a task and its parents; `None` if there is none."""
    params = {"task": task, "workspace": workspace, "most": MAX_LEVELS}
    rows = yield Statement("budgets_above", params)
    for row in rows:
        budget = msgspec.json.decode(row["budget"], type=Budget)
        spent = yield from _tree_usage(row["id"], workspace)
        if is_exceeded(budget, spent):
            return _ExceededBudget(row["id"], row["title"], budget, spent)
    return None


def _tree_usage(task: UUID, workspace: UUID) -> Script[UsageTotal]:
    """Returns the usage of a task with all its subtasks."""
    rows = yield Statement("tree_usage", {"task": task, "workspace": workspace})
    row = rows[0]
    return UsageTotal(
        input_tokens=row["input_tokens"],
        output_tokens=row["output_tokens"],
        cost_usd=row["cost_usd"],
    )


def _request_pause(
    clock: Clock, cascade: "Cascade", workspace: UUID, task: UUID, exceeded: _ExceededBudget
) -> Script[None]:
    """Requests a leased task's pause if not done before; asks in the inbox unless already asked."""
    reason = f"the budget of {exceeded.title!r} is used up: {format_usage(exceeded.spent)}"
    command = commands.PauseForBudget(hold=exceeded.hold, reason=reason)
    changed = yield from cascade.apply_to_each(
        [task], lambda current: _unless_pause_requested(current, command)
    )
    if not changed:
        return
    existing = yield Statement("budget_question", {"task": exceeded.task, "workspace": workspace})
    if existing:
        return
    body = {"reason": reason, "budget": exceeded.budget, "spent": exceeded.spent, "stopped": task}
    yield Statement(
        "inbox_put",
        {
            "id": clock.new_id(),
            "workspace": workspace,
            "task": exceeded.task,
            "kind": HOLD,
            "title": f"{exceeded.title}: its budget is used up",
            "body": msgspec.json.encode(body).decode(),
            "expires_at": None,
            "now": clock.now(),
        },
    )


def _unless_pause_requested(task: Task, command: Command) -> Command | None:
    """Returns the command; `None` if the task is not leased, or a budget pause is requested."""
    already_requested = task.pause_requested_at is not None and (task.hold or "").startswith(HOLD)
    return None if already_requested or task.status not in LEASED else command


def apply_answer(
    cascade: "Cascade", workspace: UUID, task: UUID, *, approve: bool, requested: Budget | None
) -> Script[Budget | None]:
    """Increases a task's budget and resumes tasks waiting for it; if not approved, cancels all.

    Returns the new budget; without approval `None`, and `task` is cancelled, too. Raises `Conflict`
    if the task has no budget, or if a waiting task is still stopping.
    """
    params = {"task": task, "workspace": workspace, "most": 0}
    rows = yield Statement("budgets_above", params)
    if not rows:
        raise Conflict(f"task {task} has no budget any more")
    budget = None
    if approve:
        spent = yield from _tree_usage(task, workspace)
        old = msgspec.json.decode(rows[0]["budget"], type=Budget)
        budget = higher_budget(old, spent, requested)
        text = msgspec.json.encode(budget).decode()
        yield Statement("budget_set", {"task": task, "workspace": workspace, "budget": text})
    hold = f"{HOLD}:{task}"
    ids = yield from _tasks_waiting_for(task, workspace)
    if approve and len(ids) == MAX_RESUMED:
        cascade.defer(HOLD, task, workspace)
    if not approve:
        ids.add(task)  # its subtasks are cancelled with it
    yield from cascade.apply_to_each(
        sorted(ids), lambda waiting: _command_for_answer(waiting, hold, approve=approve)
    )
    return budget


def _tasks_waiting_for(task: UUID, workspace: UUID) -> Script[set[UUID]]:
    """Returns the ids of tasks that wait for a task's budget, at most `MAX_RESUMED`."""
    params = {"task": task, "workspace": workspace, "hold": f"{HOLD}:{task}", "most": MAX_RESUMED}
    rows = yield Statement("tree_waiting_for_budget", params)
    return {row["id"] for row in rows}


def run_deferred(cascade: "Cascade", work: Row) -> Script[None]:
    """Runs deferred work: unless a budget is exceeded, resumes waiting tasks; defers the rest."""
    task, workspace = work["subject"], work["workspace"]
    if (yield from _lock_exceeded(task, workspace)) is not None:
        return  # used up again: the next answer decides for these tasks, too
    ids = yield from _tasks_waiting_for(task, workspace)
    stopping = False

    def resume_command(waiting: Task) -> Command | None:
        """Returns the command that resumes a task; `None`, and notes it, while it is stopping."""
        nonlocal stopping
        stopping = stopping or waiting.status in LEASED
        return None if waiting.status in LEASED else commands.ClearHold()

    yield from cascade.apply_to_each(sorted(ids), resume_command)
    if stopping or len(ids) == MAX_RESUMED:
        cascade.defer(HOLD, task, workspace, wait_s=_STOP_POLL_S if stopping else 0)


def _command_for_answer(task: Task, hold: str, *, approve: bool) -> Command | None:
    """Returns a cancel, or on approval a resume (`None`: other hold; `Conflict`: is stopping)."""
    if not approve:
        return commands.Cancel(reason="its budget is used up and was not raised")
    if task.hold != hold:
        return None
    if task.status in LEASED:
        raise Conflict(f"task {task.id} is still being stopped; answer in a moment")
    return commands.ClearHold()


class UsageRecorder:
    """Records the usage of one workspace's attempts."""

    def __init__(self, core: "Core", workspace: UUID) -> None:
        self._core = core
        self._workspace = workspace

    async def used(self, fence: Fence, usage: Usage, actor: str | None) -> None:
        """Records an attempt's new usage, once; pauses it over a budget. Raises `Conflict`."""

        def script(cascade: "Cascade") -> Script[bool]:
            return (
                yield from record_and_enforce(self._core, cascade, self._workspace, fence, usage)
            )

        check_usage(usage)
        if await self._core.run_with_cascade(script, actor):
            count_in_metrics(usage)

    async def stats(self, now: datetime) -> UsageStats:
        """Returns the workspace's usage: in total, and since midnight UTC of the day of `now`."""
        since = now.replace(hour=0, minute=0, second=0, microsecond=0)
        params = {"workspace": self._workspace, "since": since}
        row = (await self._core.store.fetch(Statement("usage_stats", params)))[0]
        return UsageStats(
            row["tokens_since"],
            row["cost_since"],
            row["input_tokens"],
            row["output_tokens"],
            row["cost_usd"],
        )
