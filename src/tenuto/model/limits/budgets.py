"""Model usage of attempts (tokens and cost), and the budgets that limit it. Pure."""

import math
from typing import Any

import msgspec

from tenuto.model import bounds
from tenuto.model.errors import Invalid

HOLD = "budget"
"""Hold of a task whose budget, or an ancestor's, is used up: `budget:`, the id of that task."""
MAX_USD = 1e9
NO_MODEL = "unknown"
"""The model name for reports that name no model."""
FINAL_REPORT_NUMBER = bounds.MAX_COUNT + 1
"""The number of the report that comes with an attempt's end and has no number of its own.

It is the last one.
"""


class Usage(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """What an attempt used since its last report.

    `number` counts the attempt's reports: a repeated report is not counted again.
    """

    model: str | None = None
    input_tokens: int = 0
    output_tokens: int = 0
    cost_usd: float = 0.0
    number: int | None = None


class Budget(msgspec.Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """A cap on the tokens or the cost of a task with all its subtasks."""

    tokens: int | None = None
    cost_usd: float | None = None


class UsageTotal(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """The tokens and the cost used."""

    input_tokens: int = 0
    output_tokens: int = 0
    cost_usd: float = 0.0

    @property
    def tokens(self) -> int:
        return self.input_tokens + self.output_tokens


def check_usage(usage: Usage) -> None:
    """Raises `Invalid` unless all values of the usage report are in range."""
    if usage.model is not None:
        bounds.check_text("usage.model", usage.model, bounds.MAX_NAME, empty=False)
    for name in ("input_tokens", "output_tokens"):
        _check_count(f"usage.{name}", getattr(usage, name))
    _check_dollars("usage.cost_usd", usage.cost_usd)
    if usage.number is not None:
        bounds.check_number("usage.number", usage.number, 1, bounds.MAX_COUNT)


def check_budget(budget: Budget) -> None:
    """Raises `Invalid` unless the budget limits tokens or cost, by numbers in range."""
    if budget.tokens is None and budget.cost_usd is None:
        raise Invalid("budget needs tokens or costUsd", field="budget")
    if budget.tokens is not None:
        bounds.check_number("budget.tokens", budget.tokens, 1, bounds.MAX_COUNT)
    if budget.cost_usd is not None:
        _check_dollars("budget.cost_usd", budget.cost_usd)


def is_exceeded(budget: Budget, used: UsageTotal) -> bool:
    """True if more was used than the budget allows."""
    exceeds_tokens = budget.tokens is not None and used.tokens > budget.tokens
    return exceeds_tokens or (budget.cost_usd is not None and used.cost_usd > budget.cost_usd)


def higher_budget(budget: Budget, used: UsageTotal, requested: Budget | None) -> Budget:
    """Returns the requested budget, else a doubled one; `Invalid` if the requested one is used up.

    Each cap is doubled or, if more was used, becomes twice the usage.
    """
    if requested is not None:
        check_budget(requested)
        if is_exceeded(requested, used):
            raise Invalid(
                f"the requested budget is already used up: {format_usage(used)} used; request more",
                "budget_too_small",
            )
        return requested
    tokens = None if budget.tokens is None else 2 * max(budget.tokens, used.tokens)
    cost = None if budget.cost_usd is None else 2 * max(budget.cost_usd, used.cost_usd)
    return Budget(tokens=tokens, cost_usd=cost)


def format_usage(used: UsageTotal) -> str:
    """Returns the usage as text for people."""
    return f"{used.tokens:,} tokens, {used.cost_usd:.4f} USD"


def _check_count(field: str, value: Any) -> None:
    """Raises `Invalid` unless the value is a whole number in range."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise Invalid(f"{field} must be a whole number", field=field)
    bounds.check_number(field, value, 0, 10**12)


def _check_dollars(field: str, value: Any) -> None:
    """Raises `Invalid` unless the value is a finite number in range."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise Invalid(f"{field} must be a number", field=field)
    bounds.check_number(field, value, 0, MAX_USD)
