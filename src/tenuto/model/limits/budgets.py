"""What attempts use of their models, and the budgets that bound it. Pure."""

import math
from typing import Any

import msgspec

from tenuto.model import bounds
from tenuto.model.errors import Invalid

HOLD = "budget"
"""What a task waits for whose budget, or that of one above it, is used up; then the task's id."""
MOST_USD = 1e9
NO_MODEL = "unknown"
"""Stands for the model where a report names none."""
AT_END = bounds.MAX_COUNT + 1
"""The number of a report that has none and comes with its attempt's end: no other follows it."""


class Usage(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """What an attempt used since its last report.

    `number` counts an attempt's reports: one that comes again is not counted again.
    """

    model: str | None = None
    input_tokens: int = 0
    output_tokens: int = 0
    cost_usd: float = 0.0
    number: int | None = None


class Budget(msgspec.Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """What a task may use, together with all that it spawns."""

    tokens: int | None = None
    cost_usd: float | None = None


class UsageTotal(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """What was used."""

    input_tokens: int = 0
    output_tokens: int = 0
    cost_usd: float = 0.0

    @property
    def tokens(self) -> int:
        return self.input_tokens + self.output_tokens


def check_usage(usage: Usage) -> None:
    """Raise `Invalid` unless a report can be counted."""
    if usage.model is not None:
        bounds.text("usage.model", usage.model, bounds.MAX_NAME, empty=False)
    for name in ("input_tokens", "output_tokens"):
        _count(f"usage.{name}", getattr(usage, name))
    _dollars("usage.cost_usd", usage.cost_usd)
    if usage.number is not None:
        bounds.number("usage.number", usage.number, 1, bounds.MAX_COUNT)


def check_budget(budget: Budget) -> None:
    """Raise `Invalid` unless a budget bounds something."""
    if budget.tokens is None and budget.cost_usd is None:
        raise Invalid("budget names neither tokens nor costUsd", field="budget")
    if budget.tokens is not None:
        bounds.number("budget.tokens", budget.tokens, 1, bounds.MAX_COUNT)
    if budget.cost_usd is not None:
        _dollars("budget.cost_usd", budget.cost_usd)


def is_over(budget: Budget, spent: UsageTotal) -> bool:
    """Whether more was used than the budget has."""
    tokens = budget.tokens is not None and spent.tokens > budget.tokens
    return tokens or (budget.cost_usd is not None and spent.cost_usd > budget.cost_usd)


def raised_budget(budget: Budget, spent: UsageTotal, wanted: Budget | None) -> Budget:
    """The budget a person allows instead: the wanted one, else twice what there was or is used.

    Raises `Invalid` where the wanted one is used up already.
    """
    if wanted is not None:
        check_budget(wanted)
        if is_over(wanted, spent):
            raise Invalid(f"that is used up already: {format_usage(spent)}", "budget_too_small")
        return wanted
    tokens = None if budget.tokens is None else 2 * max(budget.tokens, spent.tokens)
    cost = None if budget.cost_usd is None else 2 * max(budget.cost_usd, spent.cost_usd)
    return Budget(tokens=tokens, cost_usd=cost)


def format_usage(spent: UsageTotal) -> str:
    """What was used, for people."""
    return f"{spent.tokens:,} tokens, {spent.cost_usd:.4f} USD"


def _count(field: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise Invalid(f"{field} must be a whole number", field=field)
    bounds.number(field, value, 0, 10**12)


def _dollars(field: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise Invalid(f"{field} must be a number", field=field)
    bounds.number(field, value, 0, MOST_USD)
