"""An interpreter that predicts the usage of a tree of tasks and the effect of its budgets.

It knows the rules from docs/cost.md, not from the code.
"""

from collections.abc import Iterator

import msgspec

from tenuto.model.limits.budgets import Budget, Usage

OVER = frozenset({"COMPLETED", "FAILED", "CANCELLED"})


class Item(msgspec.Struct, eq=False, kw_only=True):
    """A task, as it is expected to be."""

    number: int
    parent: int | None = None
    budget: Budget | None = None
    status: str = "PENDING"
    stopped_by: int | None = None
    """The task whose budget it waits for, or is being stopped by."""
    is_asked: bool = False
    """Whether there is an open question about its budget."""
    to_pause: bool = False
    to_cancel: bool = False
    told: dict[str, int] = {}
    """The number of the last report about each model, in this attempt."""
    input_tokens: int = 0
    output_tokens: int = 0
    cost_usd: float = 0.0
    due: int = 0

    @property
    def is_over(self) -> bool:
        return self.status in OVER


class Budgets:
    """All tasks of a workspace. Its methods answer whether the engine should do as it is asked."""

    def __init__(self) -> None:
        self.items: list[Item] = []
        self.period = 0

    # What was used, by whom and below whom.

    def below(self, item: Item) -> Iterator[Item]:
        """A task and all that it made, near and far."""
        yield item
        for entry in self.items:
            if entry.parent == item.number:
                yield from self.below(entry)

    def spent(self, item: Item) -> tuple[int, int, float]:
        tree = list(self.below(item))
        return (
            sum(entry.input_tokens for entry in tree),
            sum(entry.output_tokens for entry in tree),
            sum(entry.cost_usd for entry in tree),
        )

    def is_used_up(self, item: Item, budget: Budget | None) -> bool:
        inputs, outputs, cost = self.spent(item)
        if budget is None:
            return False
        if budget.tokens is not None and inputs + outputs > budget.tokens:
            return True
        return budget.cost_usd is not None and cost > budget.cost_usd

    def _used_up_above(self, item: Item | None) -> Item | None:
        """The nearest whose budget is used up."""
        while item is not None and not self.is_used_up(item, item.budget):
            item = None if item.parent is None else self.items[item.parent]
        return item

    # What attempts say.

    def used(self, item: Item, usage: Usage) -> None:
        if not self._count(item, usage, usage.number):
            return
        over = self._used_up_above(item)
        stops = item.to_pause and item.stopped_by is not None
        if over is None or item.to_cancel or stops:
            return
        item.to_pause, item.stopped_by = True, over.number
        over.is_asked = True

    def _count(self, item: Item, usage: Usage, number: int | None) -> bool:
        model = usage.model or "unknown"
        if number is not None and number <= item.told.get(model, 0):
            return False
        item.told = {**item.told, model: number or item.told.get(model, 0)}
        item.input_tokens += usage.input_tokens
        item.output_tokens += usage.output_tokens
        item.cost_usd += usage.cost_usd
        return True

    def claim(self, item: Item) -> None:
        assert item.status == "PENDING", item
        item.status, item.told = "RUNNING", {}

    def end(self, item: Item, mode: str, usage: Usage | None) -> bool:
        """An attempt tells its end; what it used counts once, whatever becomes of the end."""
        if usage is not None:
            self._count(item, usage, usage.number or 10**9)
        if item.to_cancel or item.to_pause:
            return False
        item.status = {"complete": "COMPLETED", "fail": "FAILED"}.get(mode, "RETRY_WAIT")
        item.due = self.period + 1
        return True

    def stop(self, item: Item) -> None:
        """The attempt that was asked to stop has stopped."""
        if item.to_cancel:
            item.status = "CANCELLED"
            self._forget(item)
        else:
            item.status = "PAUSED" if item.stopped_by is None else "WAITING"
        item.to_cancel = item.to_pause = False
        item.due = 0

    def _forget(self, item: Item) -> None:
        """One that ended while it waited for a budget is not asked about any more."""
        if item.stopped_by is not None:
            item.is_asked = False

    def pass_time(self) -> None:
        """Leases run out, and all times come."""
        self.period += 2
        for item in self.items:
            if item.status == "RUNNING":
                if item.to_cancel or item.to_pause:
                    self.stop(item)
                else:
                    item.status = "PENDING"
            elif item.status == "RETRY_WAIT":
                item.status = "PENDING"

    # What people say.

    def approve(self, item: Item, expected: Budget | None) -> bool:
        waiting = [entry for entry in self.below(item) if self._waits_for(entry, item)]
        if expected is not None and self.is_used_up(item, expected):
            return False
        if any(entry.status == "RUNNING" for entry in waiting):
            return False
        item.budget = expected or self._doubled(item)
        for entry in waiting:
            entry.stopped_by = None
            if entry.status == "WAITING":
                entry.status = "PENDING"
        item.is_asked = False
        return True

    def _doubled(self, item: Item) -> Budget:
        assert item.budget is not None
        inputs, outputs, cost = self.spent(item)
        tokens, usd = item.budget.tokens, item.budget.cost_usd
        return Budget(
            tokens=None if tokens is None else 2 * max(tokens, inputs + outputs),
            cost_usd=None if usd is None else 2 * max(usd, cost),
        )

    def reject(self, item: Item) -> None:
        for entry in list(self.below(item)):
            if entry is item or self._waits_for(entry, item):
                self.cancel(entry)
        item.is_asked = False

    def _waits_for(self, item: Item, owner: Item) -> bool:
        return item.stopped_by == owner.number and not item.is_over

    def cancel(self, item: Item) -> bool:
        if item.is_over:
            return False
        if item.status == "RUNNING":
            item.to_cancel = True
        else:
            item.status = "CANCELLED"
            self._forget(item)
        for entry in self.items:
            if entry.parent == item.number:
                self.cancel(entry)
        return True

    def pause(self, item: Item) -> bool:
        if item.is_over or item.status == "PAUSED" or item.to_cancel:
            return False
        if item.status == "RUNNING":
            item.to_pause = True
        else:
            item.status = "PAUSED"
        return True

    def resume(self, item: Item) -> bool:
        if item.status != "PAUSED":
            return False
        if item.stopped_by is not None:
            item.status = "WAITING"
        else:
            item.status = "RETRY_WAIT" if item.due > self.period else "PENDING"
        return True

    def retry(self, item: Item) -> bool:
        if item.status not in ("FAILED", "CANCELLED"):
            return False
        item.status, item.stopped_by, item.due = "PENDING", None, 0
        return True
