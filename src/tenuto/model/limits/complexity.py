"""How complex a task is, by its estimate, and what that asks of the agent that takes it."""

from typing import Literal

import msgspec

from tenuto.model import bounds
from tenuto.model.errors import Invalid
from tenuto.model.tasks.submission import Complexity, NewTask

CALLS_SUBAGENTS = "call_subagent"
_SPLIT = frozenset({"Hard", "ExtremHard"})


class ComplexityRules(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"
):
    """Where a workspace draws the lines, and whether hard tasks need an agent that splits them.

    `require` sends them only to agents with the capability `call_subagent`; `warn` says so and
    does nothing; `off` says nothing.
    """

    low_minutes: int = 30
    middle_minutes: int = 60
    policy: Literal["require", "warn", "off"] = "warn"


DEFAULT = ComplexityRules()


def check(rules: ComplexityRules) -> None:
    """Raise `Invalid` unless the lines are in order."""
    bounds.number("lowMinutes", rules.low_minutes, 1, bounds.MAX_SECONDS // 60)
    bounds.number("middleMinutes", rules.middle_minutes, 1, bounds.MAX_SECONDS // 60)
    if rules.low_minutes >= rules.middle_minutes:
        raise Invalid("lowMinutes must be less than middleMinutes", field="lowMinutes")


def level(estimate_minutes: int | None, rules: ComplexityRules = DEFAULT) -> Complexity:
    """The level that follows from an estimate; without one nobody knows how hard it is."""
    if estimate_minutes is None:
        return "ExtremHard"
    if estimate_minutes <= rules.low_minutes:
        return "Low"
    return "Middle" if estimate_minutes <= rules.middle_minutes else "Hard"


def is_hard(new: NewTask, rules: ComplexityRules) -> bool:
    """Whether the task is to be split; one that says nothing of its size is taken as it is."""
    if new.complexity is not None:
        return new.complexity in _SPLIT
    return new.estimate_minutes is not None and level(new.estimate_minutes, rules) in _SPLIT


def gated(new: NewTask, rules: ComplexityRules) -> NewTask:
    """The task with what its complexity requires of an agent."""
    if rules.policy != "require" or not is_hard(new, rules):
        return new
    return require_subagents(new)


def require_subagents(new: NewTask) -> NewTask:
    """Returns the task with the capability to call sub-agents among those it requires."""
    if CALLS_SUBAGENTS in new.capabilities:
        return new
    return msgspec.structs.replace(new, capabilities=[*new.capabilities, CALLS_SUBAGENTS])
