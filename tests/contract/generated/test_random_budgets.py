"""Random usage reports have the effect on budgets that the interpreter predicts."""

from collections.abc import Callable, Iterator
from typing import Any
from uuid import UUID

import pytest
from tests.contract.conftest import LEASE_S, WORKER, Raw, failure, new, profile
from tests.contract.generated.budget_interpreter import Budgets, Item
from tests.contract.generated.sequences import (
    KILLED,
    Ground,
    Step,
    code_of,
    do_rest,
    pass_time,
    rows_of,
)

from tenuto.engine.engine import Engine
from tenuto.model.limits.budgets import HOLD, Budget, Usage
from tenuto.model.tasks.task import Fence
from tenuto.store.protocol import Statement

KINDS = (
    *("submit", "claim", "claim", "spawn", "spawn", "spawn", "used", "used", "used", "used"),
    *("used", "used", "repeat", "repeat", "end", "end", "stop", "stop", "approve", "approve"),
    *("approve", "reject", "cancel", "pause", "resume", "resume", "retry", "retry", "time"),
)
SEEDS = (*range(8), 12, 13, 25)
"""Between them they notice the faults in tests/mutants/areas/generated.toml."""
MODELS = (None, "m1", "m2")
STATUSES = ("WAITING", "PENDING", "RUNNING", "PAUSED", "RETRY_WAIT")


class TasksWithBudgets:
    """Trees of tasks on an engine, and what is expected of them."""

    def __init__(self, engine: Engine, raw: Raw) -> None:
        self._engine = engine
        self._raw = raw
        self._budgets = Budgets()
        self._ids: list[UUID] = []
        self._fences: dict[int, Fence] = {}
        self._told: dict[int, list[Usage]] = {}
        """The reports with numbers of each attempt that runs."""

    async def do(self, step: Step) -> None:
        await getattr(self, f"_{self._possible(step.kind)}")(step)
        await do_rest(self._engine)

    def _possible(self, kind: str) -> str:
        """Returns the action that replaces one without a possible subject."""
        items = self._budgets.items
        if kind in ("approve", "reject") and not any(item.is_asked for item in items):
            kind = "used"
        if kind == "stop" and not any(item.to_cancel or item.to_pause for item in items):
            kind = "used"
        free = [item for item in items if item.status == "RUNNING" and not item.to_cancel]
        if kind in ("used", "spawn", "end", "repeat") and not free:
            kind = "claim"
        ready = any(item.status == "PENDING" for item in items)
        return kind if ready or kind != "claim" else "submit"

    def _chosen(self, step: Step, expected: Callable[[Item], Any]) -> Iterator[Item]:
        matches = [item for item in self._budgets.items if expected(item)]
        if matches:
            yield matches[step.which % len(matches)]

    def _running(self, step: Step) -> Iterator[Item]:
        yield from self._chosen(step, lambda item: item.status == "RUNNING")

    # What is there to do.

    def _added(self, item: Item, task: UUID) -> None:
        self._budgets.items.append(item)
        self._ids.append(task)

    async def _submit(self, step: Step) -> None:
        item = Item(number=len(self._ids), budget=_budget(step.how, 20))
        asked = new(f"task {item.number}", budget=item.budget, max_attempts=100)
        self._added(item, (await self._engine.submit(asked)).id)

    async def _spawn(self, step: Step) -> None:
        for parent in self._running(step):
            budget = _budget(step.how, 8) if step.how % 3 == 0 else None
            item = Item(number=len(self._ids), parent=parent.number, budget=budget)
            asked = new(f"task {item.number}", budget=budget, max_attempts=100)
            created: list[UUID] = []

            async def spawn(parent: Item, item: Item, asked: Any, created: list[UUID]) -> None:
                fence = self._fences[parent.number]
                created.append(await self._engine.spawn(fence, f"child {item.number}", asked))

            refused = await code_of(spawn(parent, item, asked, created))
            if parent.to_cancel or parent.to_pause:
                assert refused in ("cancel_requested", "pause_requested")
            else:
                assert refused is None
                self._added(item, created[0])

    async def _claim(self, step: Step) -> None:
        await self._claim_some(1 + step.how % 3)

    async def _claim_some(self, n: int) -> int:
        agent = profile(workspace=self._engine.workspace)
        claimed = await self._engine.claim(agent, WORKER, n, LEASE_S)
        ready = [item for item in self._budgets.items if item.status == "PENDING"]
        assert len(claimed) == min(n, len(ready))
        for work in claimed:
            number = self._ids.index(work.fence.task)
            self._budgets.claim(self._budgets.items[number])
            self._fences[number], self._told[number] = work.fence, []
        return len(claimed)

    # What attempts say.

    def _usage(self, item: Item, mode: int) -> Usage:
        usage = Usage(
            model=MODELS[mode % 3],
            input_tokens=mode // 3 % 7,
            output_tokens=mode // 21 % 5,
            cost_usd=mode // 105 % 4 / 4,
            number=len(self._told[item.number]) + 1 if mode % 4 else None,
        )
        if usage.number is not None:
            self._told[item.number].append(usage)
        return usage

    async def _used(self, step: Step) -> None:
        for item in self._running(step):
            usage = self._usage(item, step.how)
            await self._engine.used(self._fences[item.number], usage)
            self._budgets.used(item, usage)

    async def _repeat(self, step: Step) -> None:
        """A report that comes again is not counted again."""
        for item in self._running(step):
            for usage in self._told[item.number][-2:]:
                await self._engine.used(self._fences[item.number], usage)

    async def _end(self, step: Step) -> None:
        for item in self._running(step):
            mode = ("complete", "fail", "retry")[step.how % 3]
            usage = self._usage(item, step.how) if step.how % 5 else None
            fence = self._fences[item.number]
            refused = await code_of(self._reported_end(fence, mode, usage))
            assert (refused is None) == self._budgets.end(item, mode, usage)
            if refused is None and usage is not None:
                assert await code_of(self._engine.used(fence, usage)) == "lease_lost"
            again = await code_of(self._reported_end(fence, mode, usage))
            assert again == refused

    async def _reported_end(self, fence: Fence, mode: str, usage: Usage | None) -> None:
        if mode == "complete":
            await self._engine.complete(fence, usage=usage)
        else:
            reason = failure("syntax" if mode == "fail" else "error")
            await self._engine.fail(fence, reason, usage=usage)

    async def _stop(self, step: Step) -> None:
        for item in self._chosen(step, lambda item: item.to_cancel or item.to_pause):
            fence = self._fences[item.number]
            if item.to_cancel:
                await self._engine.confirm_cancel(fence, KILLED)
            else:
                await self._engine.confirm_pause(fence, KILLED)
            self._budgets.stop(item)

    async def _time(self, step: Step) -> None:
        await pass_time(self._engine)
        self._budgets.pass_time()

    # What people say.

    async def _asked(self) -> dict[int, UUID]:
        """The open questions about budgets, by whose budget it is."""
        asked = [item for item in await self._engine.inbox.list() if item.kind == HOLD]
        matches = {self._ids.index(item.task): item.id for item in asked if item.task is not None}
        assert len(matches) == len(asked)
        return matches

    async def _approve(self, step: Step) -> None:
        for item in self._chosen(step, lambda item: item.is_asked):
            expected = _budget(step.how, 60) if step.how % 2 else None
            asked = await self._asked()
            answer = self._engine.inbox.answer(asked[item.number], approve=True, budget=expected)
            refused = await code_of(answer)
            assert (refused is None) == self._budgets.approve(item, expected), (item, refused)

    async def _reject(self, step: Step) -> None:
        for item in self._chosen(step, lambda item: item.is_asked):
            asked = await self._asked()
            await self._engine.inbox.answer(asked[item.number], approve=False)
            self._budgets.reject(item)

    async def _ask(self, step: Step, *statuses: str) -> None:
        for item in self._chosen(step, lambda item: item.status in statuses):
            call = getattr(self._engine, step.kind)(self._ids[item.number])
            refused = await code_of(call)
            expected = getattr(self._budgets, step.kind)(item)
            assert (refused is None) == expected, (step.kind, item, refused)

    async def _cancel(self, step: Step) -> None:
        await self._ask(step, *STATUSES)

    async def _pause(self, step: Step) -> None:
        await self._ask(step, *STATUSES)

    async def _resume(self, step: Step) -> None:
        await self._ask(step, "PAUSED")

    async def _retry(self, step: Step) -> None:
        await self._ask(step, "FAILED", "CANCELLED", "COMPLETED")

    # What is compared.

    async def check(self) -> None:
        rows = await rows_of(self._engine, self._ids)
        for item, task in zip(self._budgets.items, self._ids, strict=True):
            row = rows[task]
            assert row.status == item.status, f"{item} is {row.status}, {row.hold}"
            assert (row.cancel_requested_at is not None) == item.to_cancel, item
            assert (row.pause_requested_at is not None) == item.to_pause, item
            waits = None if item.stopped_by is None else f"{HOLD}:{self._ids[item.stopped_by]}"
            assert item.is_over or row.hold == waits, f"{item} has {row.hold}"
        await self._check_sums()
        asked = {item.number for item in self._budgets.items if item.is_asked}
        assert (await self._asked()).keys() == asked

    async def _check_sums(self) -> None:
        for item, task in zip(self._budgets.items, self._ids, strict=True):
            if item.parent is None or item.budget is not None:
                params = {"task": task, "workspace": self._engine.workspace}
                [row] = await self._engine.core.store.fetch(Statement("tree_usage", params))
                result = row["input_tokens"], row["output_tokens"], row["cost_usd"]
                assert result == self._budgets.spent(item), item

    async def finish(self) -> None:
        for item, task in zip(self._budgets.items, self._ids, strict=True):
            view = await self._engine.show(task)
            budget = item.budget
            shown = budget and {"tokens": budget.tokens, "costUsd": budget.cost_usd}
            assert view.budget == shown
            reported = view.input_tokens, view.output_tokens, view.cost_usd
            assert reported == (item.input_tokens, item.output_tokens, item.cost_usd)
        for item, task in zip(self._budgets.items, self._ids, strict=True):
            if self._budgets.cancel(item):
                await self._engine.cancel(task)
        await self.do(Step("time", 0, 0))
        await self.check()


def _budget(mode: int, tokens: int) -> Budget:
    """Up to so many tokens, or as many quarters of a tenth of that in dollars, or both."""
    maximum, dollars = tokens * (1 + mode % 5) // 5, (1 + mode % 7) * tokens / 40
    return Budget(
        tokens=None if mode % 4 == 0 else maximum,
        cost_usd=None if mode % 4 in (1, 2) else dollars,
    )


@pytest.fixture
def ground(database_url: str) -> Iterator[Ground]:
    created = Ground(database_url)
    yield created
    created.close()


def test_random_usage_reports_match_the_budget_interpreter(ground: Ground) -> None:
    ground.play_all("TENUTO_BUDGETS", SEEDS, KINDS, TasksWithBudgets, 30, 60)
