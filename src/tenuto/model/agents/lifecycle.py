"""Agents over time: what they are seen to be, what silence leads to, whose word on them holds."""

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta

import msgspec

from tenuto.model import bounds
from tenuto.model.agents.matching import FETCHES, AgentProfile, Rule, SupportedWork
from tenuto.model.errors import Forbidden, Invalid

STALE_AFTER_S = 90
"""Seconds of silence after which an agent without a threshold of its own counts as stale."""
LOOK_AGAIN = timedelta(seconds=2)
"""Until an agent that still holds tasks is looked at again."""
LIVING = frozenset({"IDLE", "WORKING"})
ENDING = frozenset({"DRAINING", "TERMINATED"})
RULES: Mapping[str, Rule] = {
    "superset": "superset",
    "all": "superset",
    "single": "single",
    "exact": "exact",
}
"""The words for rules of choice."""
MAX_WORDS = 1_000
_LISTS = ("task_types", "task_tags", "capabilities", "choose_rules", "runtimes", "containers")
_MORE_LISTS = ("models", "skills", "tags")


def current_status(stored: str, running: int, due_at: datetime | None, now: datetime) -> str:
    """What the agent is now: working and stale are seen, the rest is stored."""
    if stored not in LIVING:
        return stored
    if due_at is not None and due_at < now:
        return "STALE"
    return "WORKING" if running else "IDLE"


class AgentTransition(msgspec.Struct, frozen=True):
    """What becomes of an agent: its status, the event to note if that is new, the next look."""

    status: str
    kind: str | None = None
    level: str = "INFO"
    due_at: datetime | None = None


def on_due(status: str, running: int, now: datetime, *, lost: bool) -> AgentTransition:
    """What is to become of an agent whose time has come.

    A silent one is STALE while it may still hold tasks, and ERROR once it lost some by its silence;
    one that lost nothing stays STALE. One that is to end does so when its last task has ended.
    """
    again = now + LOOK_AGAIN if running else None
    if status == "DRAINING":
        if running:
            return AgentTransition(status, due_at=again)
        return AgentTransition("TERMINATED", "agent_terminated")
    if status in LIVING | {"STALE"} and lost and not running:
        return AgentTransition("ERROR", "agent_error", "ERROR")
    if status in LIVING:
        return AgentTransition("STALE", "agent_stale", "WARN", again)
    return AgentTransition(status, due_at=again if status == "STALE" else None)


def ended(running: int, now: datetime) -> AgentTransition:
    """What becomes at once of an agent that is to take no more tasks."""
    if running:
        return AgentTransition("DRAINING", "agent_draining", due_at=now + LOOK_AGAIN)
    return AgentTransition("TERMINATED", "agent_terminated")


def refusal(status: str) -> Forbidden:
    """Why an agent that is to end, or has, is given no task."""
    if status == "DRAINING":
        return Forbidden("the agent is to end and takes no more tasks", "agent_draining")
    return Forbidden(
        "the agent was terminated; delete it to use its name again", "agent_terminated"
    )


def claim_blockers(
    status: str, running: int, most: int | None, unconfirmed: int, silent_s: float | None
) -> list[str]:
    """Why an agent takes nothing now, whatever it could take."""
    found = []
    if status == "DRAINING":
        found.append(f"is to end, once its {running:,} running tasks have ended")
    elif status == "TERMINATED":
        found.append("was terminated")
    elif status in ("STALE", "ERROR"):
        found.append("was last heard of " + _ago(silent_s))
    if most is not None and running + unconfirmed >= most:
        kills = f", {unconfirmed:,} kills not confirmed" if unconfirmed else ""
        found.append(f"runs {running:,} of at most {most:,} tasks{kills}")
    return found


def _ago(seconds: float | None) -> str:
    return "never" if seconds is None else f"{int(seconds):,} s ago"


def merge_worker_profile(kept: AgentProfile, brought: AgentProfile) -> AgentProfile:
    """What is known of an agent that people manage, after its worker has told of it.

    People say what it may do. How it runs tasks only its worker knows: a worker that handles some
    types alone, or accepts no commands, takes no others, whatever people allow.
    """
    return msgspec.structs.replace(
        kept,
        runtimes=brought.runtimes or kept.runtimes,
        containers=brought.containers if kept.containers is None else kept.containers,
        means=brought.means,
    )


def merge_user_profile(kept: AgentProfile, asked: AgentProfile, *, managed: bool) -> AgentProfile:
    """What is known of an agent, `managed` already or not, after people have told of it.

    Types that they leave as they were shown are not their word where a worker's means bind: those
    of the worker stay its own.
    """
    new = msgspec.structs.replace(asked, means=kept.means)
    if means_of(new) is None or asked.task_types != types_of(kept):
        return new
    return msgspec.structs.replace(new, task_types=kept.task_types if managed else None)


def types_of(profile: AgentProfile) -> tuple[str, ...] | None:
    """The types that an agent takes: those that people allow, of those that its worker handles."""
    means = means_of(profile)
    if means is None or means.task_types is None:
        return profile.task_types
    allowed = profile.task_types
    return tuple(each for each in means.task_types if allowed is None or each in allowed)


def means_of(profile: AgentProfile) -> SupportedWork | None:
    """What binds a claim for the agent: a worker's means, unless tasks are fetched or pushed."""
    return None if FETCHES.intersection(profile.runtimes) else profile.means


def checked(profile: AgentProfile) -> AgentProfile:
    """The profile with its rules in their own words, or `Invalid` when no agent can be so."""
    bounds.text("name", profile.name, bounds.MAX_NAME, empty=False)
    for field in _LISTS + _MORE_LISTS:
        _check_words(field, getattr(profile, field))
    if profile.means is not None:
        _check_words("runtimes", profile.means.runtimes)
        _check_words("task_types", profile.means.task_types)
    for field in ("agent_type", "region", "model", "account", "gateway"):
        bounds.text(field, getattr(profile, field) or "", bounds.MAX_TITLE)
    least = {"max_concurrent": 1, "heartbeat_interval_s": 1, "stale_threshold_s": 0}
    for field, low in least.items():  # a threshold of 0 is none of its own
        if (value := getattr(profile, field)) is not None:
            bounds.number(field, value, low, bounds.MAX_SECONDS)
    return msgspec.structs.replace(
        profile, choose_rules=rules_of(profile.choose_rules), gateway=profile.gateway or None
    )


def _check_words(field: str, words: Sequence[str] | None) -> None:
    bounds.number(f"the number of {field}", len(words or ()), 0, MAX_WORDS)
    for word in words or ():
        bounds.text(field, word, bounds.MAX_TITLE, empty=False)


def rules_of(words: Sequence[str]) -> tuple[Rule, ...]:
    """The rules of choice that words mean; `Invalid` when one means none."""
    rules = []
    for word in words:
        if word not in RULES:
            known = ", ".join(RULES)
            raise Invalid(f"no rule {word[:60]!r}; known are {known}", field="choose_rules")
        rules.append(RULES[word])
    if not rules:
        raise Invalid("an agent has at least one rule of choice", field="choose_rules")
    return tuple(dict.fromkeys(rules))
