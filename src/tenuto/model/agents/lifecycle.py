"""Agent lifecycle: status, staleness, and merging of the settings of users and workers."""

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta

import msgspec

from tenuto.model import bounds
from tenuto.model.agents.matching import WORKERLESS_RUNTIMES, AgentProfile, Rule, SupportedWork
from tenuto.model.errors import Forbidden, Invalid

STALE_AFTER_S = 90
"""Seconds without a heartbeat until an agent is stale, unless it has a threshold of its own."""
RECHECK_AFTER = timedelta(seconds=2)
"""Delay until an agent that still runs tasks is checked again."""
ALIVE = frozenset({"IDLE", "WORKING"})
ENDING = frozenset({"DRAINING", "TERMINATED"})
RULES: Mapping[str, Rule] = {
    "superset": "superset",
    "all": "superset",
    "single": "single",
    "exact": "exact",
}
"""The names of choose rules, with their aliases."""
MAX_LIST_ITEMS = 1_000
_MATCHING_LISTS = (
    "task_types",
    "task_tags",
    "capabilities",
    "choose_rules",
    "runtimes",
    "containers",
)
_OTHER_LISTS = ("models", "skills", "tags")


def current_status(stored: str, running: int, due_at: datetime | None, now: datetime) -> str:
    """Returns the agent's status now: WORKING and STALE are computed, the others are stored."""
    if stored not in ALIVE:
        return stored
    if due_at is not None and due_at < now:
        return "STALE"
    return "WORKING" if running else "IDLE"


class AgentTransition(msgspec.Struct, frozen=True):
    """A change of an agent: its status, the event to record if it changed, and the next check."""

    status: str
    kind: str | None = None
    level: str = "INFO"
    due_at: datetime | None = None


def transition_when_due(
    status: str, running: int, now: datetime, *, lost_tasks: bool
) -> AgentTransition:
    """Returns the change of a due agent: to STALE, ERROR or TERMINATED, or only the next check.

    An agent without heartbeats becomes STALE. It becomes ERROR when none of its tasks is running
    any more and it lost tasks because of the missing heartbeats; otherwise it stays STALE. A
    draining agent is terminated when its last task has ended.
    """
    recheck_at = now + RECHECK_AFTER if running else None
    if status == "DRAINING":
        if running:
            return AgentTransition(status, due_at=recheck_at)
        return AgentTransition("TERMINATED", "agent_terminated")
    if status in ALIVE | {"STALE"} and lost_tasks and not running:
        return AgentTransition("ERROR", "agent_error", "ERROR")
    if status in ALIVE:
        return AgentTransition("STALE", "agent_stale", "WARN", recheck_at)
    return AgentTransition(status, due_at=recheck_at if status == "STALE" else None)


def drain_or_terminate(running: int, now: datetime) -> AgentTransition:
    """Returns the change to DRAINING while tasks run, else to TERMINATED."""
    if running:
        return AgentTransition("DRAINING", "agent_draining", due_at=now + RECHECK_AFTER)
    return AgentTransition("TERMINATED", "agent_terminated")


def claim_refusal(status: str) -> Forbidden:
    """Returns the error for a claim by a draining or terminated agent."""
    if status == "DRAINING":
        return Forbidden("the agent is draining and accepts no more tasks", "agent_draining")
    return Forbidden("the agent was terminated; delete it to reuse its name", "agent_terminated")


def claim_blockers(
    status: str, running: int, max_concurrent: int | None, unconfirmed: int, silent_s: float | None
) -> list[str]:
    """Returns why the agent cannot claim any task now; empty if it can."""
    blockers = []
    if status == "DRAINING":
        blockers.append(f"is draining and ends when its {running:,} running tasks have ended")
    elif status == "TERMINATED":
        blockers.append("was terminated")
    elif status in ("STALE", "ERROR"):
        blockers.append(_format_last_seen(silent_s))
    if max_concurrent is not None and running + unconfirmed >= max_concurrent:
        suffix = f", {unconfirmed:,} kills not confirmed" if unconfirmed else ""
        blockers.append(f"runs {running:,} of at most {max_concurrent:,} tasks{suffix}")
    return blockers


def _format_last_seen(seconds: float | None) -> str:
    return "was never seen" if seconds is None else f"was last seen {int(seconds):,} s ago"


def merge_worker_profile(stored: AgentProfile, reported: AgentProfile) -> AgentProfile:
    """Returns the profile of a user-managed agent after its worker registered it.

    Users decide what the agent may do. Only the worker knows how it runs tasks: a worker that
    handles only some types, or accepts no commands, gets no other tasks even if users allow them.
    """
    return msgspec.structs.replace(
        stored,
        runtimes=reported.runtimes or stored.runtimes,
        containers=reported.containers if stored.containers is None else stored.containers,
        means=reported.means,
    )


def merge_user_profile(
    stored: AgentProfile, requested: AgentProfile, *, managed: bool
) -> AgentProfile:
    """Returns the profile of an agent after a user changed it.

    `managed` is true if a user changed the agent before. If the request repeats the task types as
    they were shown, and the worker's supported types limit the agent, then the types do not count
    as set by the user.
    """
    merged = msgspec.structs.replace(requested, means=stored.means)
    if effective_support(merged) is None or requested.task_types != claimable_types(stored):
        return merged
    return msgspec.structs.replace(merged, task_types=stored.task_types if managed else None)


def claimable_types(profile: AgentProfile) -> tuple[str, ...] | None:
    """Returns the task types that worker and users let the agent claim; `None` means all types."""
    means = effective_support(profile)
    if means is None or means.task_types is None:
        return profile.task_types
    allowed = profile.task_types
    return tuple(
        task_type for task_type in means.task_types if allowed is None or task_type in allowed
    )


def effective_support(profile: AgentProfile) -> SupportedWork | None:
    """Returns the worker's supported work if it limits the agent's claims, else `None`.

    It limits no agent that fetches tasks over HTTP or gets them pushed.
    """
    return None if WORKERLESS_RUNTIMES.intersection(profile.runtimes) else profile.means


def validate_profile(profile: AgentProfile) -> AgentProfile:
    """Returns the profile with canonical choose rules; raises `Invalid` if a field is invalid."""
    bounds.check_text("name", profile.name, bounds.MAX_NAME, empty=False)
    for field in _MATCHING_LISTS + _OTHER_LISTS:
        _check_list(field, getattr(profile, field))
    if profile.means is not None:
        _check_list("runtimes", profile.means.runtimes)
        _check_list("task_types", profile.means.task_types)
    for field in ("agent_type", "region", "model", "account", "gateway"):
        bounds.check_text(field, getattr(profile, field) or "", bounds.MAX_TITLE)
    minimums = {"max_concurrent": 1, "heartbeat_interval_s": 1, "stale_threshold_s": 0}
    for field, minimum in minimums.items():  # threshold 0 means the default
        if (value := getattr(profile, field)) is not None:
            bounds.check_number(field, value, minimum, bounds.MAX_SECONDS)
    return msgspec.structs.replace(
        profile, choose_rules=parse_rules(profile.choose_rules), gateway=profile.gateway or None
    )


def _check_list(field: str, items: Sequence[str] | None) -> None:
    """Raises `Invalid` for too many items, or an empty or too long one."""
    bounds.check_number(f"the number of {field}", len(items or ()), 0, MAX_LIST_ITEMS)
    for item in items or ():
        bounds.check_text(field, item, bounds.MAX_TITLE, empty=False)


def parse_rules(names: Sequence[str]) -> tuple[Rule, ...]:
    """Returns the choose rules with these names; raises `Invalid` for an unknown name or none."""
    rules = []
    for name in names:
        if name not in RULES:
            known = ", ".join(RULES)
            raise Invalid(
                f"unknown choose rule {name[:60]!r}; use one of {known}", field="choose_rules"
            )
        rules.append(RULES[name])
    if not rules:
        raise Invalid("an agent needs at least one choose rule", field="choose_rules")
    return tuple(dict.fromkeys(rules))
