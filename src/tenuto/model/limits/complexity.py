"""Complexity of a task, by its estimate, and the capability that a complex task requires."""

from typing import Literal

import msgspec

from tenuto.model import bounds
from tenuto.model.errors import Invalid
from tenuto.model.tasks.submission import Complexity, NewTask

CALLS_SUBAGENTS = "call_subagent"
_HARD_LEVELS = frozenset({"Hard", "ExtremHard"})


class ComplexityRules(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"
):
    """A workspace's limits between complexity levels, and its policy for hard tasks.

    With policy `require`, only agents with the capability `call_subagent` can claim hard tasks.
    `warn` only reports them. `off` does nothing.
    """

    low_minutes: int = 30
    middle_minutes: int = 60
    policy: Literal["require", "warn", "off"] = "warn"


DEFAULT = ComplexityRules()


def check(rules: ComplexityRules) -> None:
    """Raises `Invalid` unless the limits are in range and in order."""
    bounds.check_number("lowMinutes", rules.low_minutes, 1, bounds.MAX_SECONDS // 60)
    bounds.check_number("middleMinutes", rules.middle_minutes, 1, bounds.MAX_SECONDS // 60)
    if rules.low_minutes >= rules.middle_minutes:
        raise Invalid(
            f"lowMinutes ({rules.low_minutes}) must be less than middleMinutes"
            f" ({rules.middle_minutes})",
            field="lowMinutes",
        )


def complexity_of_estimate(
    estimate_minutes: int | None, rules: ComplexityRules = DEFAULT
) -> Complexity:
    """Returns the complexity level of an estimate; `ExtremHard` if there is no estimate."""
    if estimate_minutes is None:
        return "ExtremHard"
    if estimate_minutes <= rules.low_minutes:
        return "Low"
    return "Middle" if estimate_minutes <= rules.middle_minutes else "Hard"


def is_hard(new: NewTask, rules: ComplexityRules) -> bool:
    """True if the task's complexity, or else its estimate, is hard; False if it has neither."""
    if new.complexity is not None:
        return new.complexity in _HARD_LEVELS
    return (
        new.estimate_minutes is not None
        and complexity_of_estimate(new.estimate_minutes, rules) in _HARD_LEVELS
    )


def with_required_capability(new: NewTask, rules: ComplexityRules) -> NewTask:
    """Returns the task, with `call_subagent` required if it is hard and the policy is `require`."""
    if rules.policy != "require" or not is_hard(new, rules):
        return new
    return with_subagent_capability(new)


def with_subagent_capability(new: NewTask) -> NewTask:
    """Returns the task with `call_subagent` among its required capabilities."""
    if CALLS_SUBAGENTS in new.capabilities:
        return new
    return msgspec.structs.replace(new, capabilities=[*new.capabilities, CALLS_SUBAGENTS])
