"""Agent life cycle in the model: staleness, and settings of users and workers."""

from datetime import UTC, datetime, timedelta
from uuid import UUID

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenuto.model.agents import lifecycle
from tenuto.model.agents.lifecycle import (
    RECHECK_AFTER,
    AgentTransition,
    claimable_types,
    current_status,
    merge_user_profile,
    merge_worker_profile,
    parse_rules,
    transition_when_due,
)
from tenuto.model.agents.matching import AgentProfile, SupportedWork
from tenuto.model.errors import Invalid

NOW = datetime(2030, 1, 1, tzinfo=UTC)
AGAIN = NOW + RECHECK_AFTER
PLAIN = AgentProfile(id=UUID(int=1), workspace=UUID(int=2), name="a")
STATUSES = ("IDLE", "WORKING", "DRAINING", "STALE", "ERROR", "TERMINATED")


@pytest.mark.parametrize(
    ("status", "running", "lost", "expected"),
    [
        ("IDLE", 0, False, AgentTransition("STALE", "agent_stale", "WARN")),
        ("IDLE", 2, False, AgentTransition("STALE", "agent_stale", "WARN", AGAIN)),
        ("WORKING", 2, True, AgentTransition("STALE", "agent_stale", "WARN", AGAIN)),
        ("IDLE", 0, True, AgentTransition("ERROR", "agent_error", "ERROR")),
        ("STALE", 1, True, AgentTransition("STALE", due_at=AGAIN)),
        ("STALE", 0, True, AgentTransition("ERROR", "agent_error", "ERROR")),
        ("STALE", 0, False, AgentTransition("STALE")),
        ("DRAINING", 1, True, AgentTransition("DRAINING", due_at=AGAIN)),
        ("DRAINING", 0, True, AgentTransition("TERMINATED", "agent_terminated")),
        ("ERROR", 1, True, AgentTransition("ERROR")),
        ("TERMINATED", 1, False, AgentTransition("TERMINATED")),
    ],
)
def test_agent_status_changes_at_its_deadline(
    status: str, running: int, lost: bool, expected: AgentTransition
) -> None:
    assert transition_when_due(status, running, NOW, lost_tasks=lost) == expected


@given(st.sampled_from(STATUSES), st.integers(0, 3), st.booleans())
def test_agent_transition_is_recorded_only_for_a_new_status(
    status: str, running: int, lost: bool
) -> None:
    verdict = transition_when_due(status, running, NOW, lost_tasks=lost)
    assert (verdict.kind is not None) == (verdict.status != status)
    again = transition_when_due(verdict.status, running, NOW, lost_tasks=lost)
    assert again.kind is None or verdict.status != status  # nothing is noted for ever


def test_agent_is_working_or_stale() -> None:
    late = NOW - timedelta(seconds=1)
    assert current_status("IDLE", 0, None, NOW) == "IDLE"
    assert current_status("IDLE", 1, NOW, NOW) == "WORKING"
    assert current_status("WORKING", 1, late, NOW) == "STALE"
    assert current_status("DRAINING", 1, late, NOW) == "DRAINING"


def test_worker_profile_sets_runtimes_but_not_types() -> None:
    stored = msgspec.structs.replace(
        PLAIN, runtimes=("http",), task_types=("x", "y"), max_concurrent=1, capabilities=("git",)
    )
    brought = AgentProfile(
        id=UUID(int=9),
        workspace=UUID(int=2),
        name="a",
        runtimes=("function",),
        task_types=("y", "z"),
        max_concurrent=None,
        capabilities=("root",),
        accept_commands=True,
    )
    result = merge_worker_profile(stored, brought.with_supported_work())
    means = SupportedWork(("function",), ("y", "z"), accept_commands=True)
    assert result == msgspec.structs.replace(stored, runtimes=("function",), means=means)
    assert claimable_types(result) == ("y",)
    assert claimable_types(merge_worker_profile(result, brought.with_supported_work())) == (
        "y",
    )  # nothing is forgotten by telling
    more = msgspec.structs.replace(brought, task_types=("x", "y"))
    assert claimable_types(merge_worker_profile(result, more.with_supported_work())) == ("x", "y")


def test_types_left_unchanged_are_not_user_settings() -> None:
    worker = msgspec.structs.replace(
        PLAIN, runtimes=("function",), task_types=("x",)
    ).with_supported_work()
    people = msgspec.structs.replace(PLAIN, runtimes=("function",), max_concurrent=2)
    shown = msgspec.structs.replace(people, task_types=claimable_types(worker))
    stored = merge_user_profile(worker, shown, managed=False)
    assert (stored.task_types, claimable_types(stored), stored.max_concurrent) == (None, ("x",), 2)
    narrow = merge_user_profile(
        stored, msgspec.structs.replace(people, task_types=("y",)), managed=True
    )
    assert (narrow.task_types, claimable_types(narrow)) == (("y",), ())
    assert (
        merge_user_profile(narrow, msgspec.structs.replace(narrow, task_types=()), managed=True)
        == narrow
    )


def test_supported_work_of_a_worker_does_not_restrict_a_pull_agent() -> None:
    fetched = msgspec.structs.replace(PLAIN, runtimes=("http",), task_types=("x", "y"))
    both = merge_worker_profile(
        fetched, msgspec.structs.replace(PLAIN, runtimes=()).with_supported_work()
    )
    assert both.runtimes == ("http",)
    assert both.means == SupportedWork()
    assert claimable_types(both) == ("x", "y")


@pytest.mark.parametrize("runtime", ["http", "gateway"])
@pytest.mark.parametrize("before", ["http", "gateway", "function"])
def test_types_of_a_pull_agent_stay_unchanged(before: str, runtime: str) -> None:
    stored = msgspec.structs.replace(
        PLAIN, runtimes=(before,), task_types=("x",)
    ).with_supported_work()
    asked = msgspec.structs.replace(PLAIN, runtimes=(runtime,), task_types=claimable_types(stored))
    for managed in (False, True):
        assert claimable_types(merge_user_profile(stored, asked, managed=managed)) == ("x",)


def test_choose_rules_are_parsed_by_name() -> None:
    assert parse_rules(["all", "exact", "superset"]) == ("superset", "exact")
    for bad in ([], ["some"]):
        with pytest.raises(Invalid):
            parse_rules(bad)


def test_invalid_agent_profile_is_refused() -> None:
    for change in (
        {"name": " "},
        {"task_tags": ("x" * 300,)},
        {"skills": ("a",) * 1001},
        {"max_concurrent": 0},
        {"region": "\x00"},
    ):
        with pytest.raises(Invalid):
            lifecycle.validate_profile(msgspec.structs.replace(PLAIN, **change))
