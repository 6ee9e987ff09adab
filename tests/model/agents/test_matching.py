"""Matching: lanes are canonical, and rules accept what they say."""

from typing import Any
from uuid import UUID

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenuto.model.agents.matching import (
    AgentProfile,
    Requirements,
    Rule,
    find_mismatches,
    is_eligible,
    lane_id,
)

WORKSPACE, AGENT = UUID(int=1), UUID(int=2)
NAMES = st.sampled_from(["a", "b", "c", "d"])
TAGS = st.lists(NAMES, max_size=5)
RULES: st.SearchStrategy[Rule] = st.sampled_from(["superset", "single", "exact"])


def lane(**needs: Any) -> Requirements:
    return Requirements(workspace=WORKSPACE, **needs)


def agent(**changes: Any) -> AgentProfile:
    plain = AgentProfile(id=AGENT, workspace=WORKSPACE, name="n", runtimes=("function",))
    return msgspec.structs.replace(plain, **changes)


@given(tags=TAGS, capabilities=TAGS, data=st.data())
def test_equal_requirements_in_any_order_are_one_lane(
    tags: list[str], capabilities: list[str], data: st.DataObject
) -> None:
    shuffled = data.draw(st.permutations(tags)), data.draw(st.permutations(capabilities))
    one = lane(task_tags=tuple(tags), capabilities=tuple(capabilities))
    two = lane(task_tags=(*shuffled[0], *tags[:2]), capabilities=(*shuffled[1], *capabilities))
    assert one.key() == two.key()
    assert lane_id(one.key()) == lane_id(two.key())


@given(one=TAGS, two=TAGS)
def test_other_requirements_are_another_lane(one: list[str], two: list[str]) -> None:
    first, second = lane(task_tags=tuple(one)), lane(task_tags=tuple(two))
    assert (first.key() == second.key()) == (set(one) == set(two))
    assert lane(task_tags=("a",)).key() != lane(capabilities=("a",)).key()


def test_explicit_default_is_the_same_lane() -> None:
    """A word read from a request or a row is equal to the default, never the same object."""
    output = msgspec.json.decode(b'{"task_type": "default", "needs_subagents": false}')
    assert lane(**output).key() == lane().key()


def test_every_requirement_is_part_of_the_lane_key() -> None:
    needs: dict[str, Any] = {
        "task_type": "t",
        "agent_type": "a",
        "target_agent": AGENT,
        "runtime": "r",
        "task_tags": ("x",),
        "capabilities": ("x",),
        "container": "c",
        "region": "r",
        "model": "m",
        "needs_subagents": True,
    }
    assert needs.keys() | {"workspace"} == set(Requirements.__struct_fields__)
    keys = {lane(**{name: value}).key() for name, value in needs.items()}
    keys |= {lane().key(), Requirements(workspace=UUID(int=9)).key()}
    assert len(keys) == len(needs) + 2


@given(st.text(max_size=40))
def test_lane_id_fits_every_database(key: str) -> None:
    assert 0 <= lane_id(key) < 2**63
    assert lane_id(key) == lane_id(key)


@given(owned=TAGS, required=TAGS, rules=st.lists(RULES, min_size=1, max_size=3))
def test_task_tags_are_accepted_by_any_matching_rule(
    owned: list[str], required: list[str], rules: list[Rule]
) -> None:
    have, want = set(owned), set(required)
    by_rule = {
        "superset": all(tag in have for tag in want),
        "single": len(want) == 1 and next(iter(want)) in have,
        "exact": have == want,
    }
    result = is_eligible(
        agent(task_tags=tuple(owned), choose_rules=tuple(rules)), lane(task_tags=tuple(required))
    )
    assert result == any(by_rule[rule] for rule in rules)


@given(owned=TAGS, required=TAGS)
def test_capabilities_must_all_be_present(owned: list[str], required: list[str]) -> None:
    result = is_eligible(agent(capabilities=tuple(owned)), lane(capabilities=tuple(required)))
    assert result == (set(required) <= set(owned))


@pytest.mark.parametrize(
    ("own", "needs", "reason"),
    [
        ({}, {}, []),
        ({"workspace": UUID(int=7)}, {}, ["another workspace"]),
        ({}, {"target_agent": UUID(int=7)}, ["meant for another agent"]),
        ({}, {"target_agent": AGENT}, []),
        ({}, {"agent_type": "coder"}, ["needs an agent of type coder"]),
        ({"agent_type": "coder"}, {}, []),
        ({}, {"runtime": "preset"}, ["needs runtime preset"]),
        ({}, {"runtime": "command"}, ["does not accept commands from tasks"]),
        ({"accept_commands": True, "task_types": ("x",)}, {"runtime": "command"}, []),
        (
            {"accept_commands": True, "runtimes": ()},
            {},
            ["has no runtime of its own; it only accepts tasks with a command"],
        ),
        ({"task_types": ("x",)}, {}, ["does not handle type default"]),
        ({}, {"container": "box"}, ["needs container box"]),
        ({"containers": ("box",)}, {"container": "box"}, []),
        ({}, {"region": "eu"}, ["needs region eu"]),
        ({"region": "eu"}, {}, []),
        ({"models": ("m",)}, {"model": "n"}, ["needs model n"]),
        ({"models": ("m",)}, {}, []),
        ({}, {"needs_subagents": True}, ["needs an agent that can call sub-agents"]),
        ({"capabilities": ("call_subagent",)}, {"needs_subagents": True}, []),
        ({}, {"task_tags": ("x",)}, ["its choose rules superset reject the task tags"]),
    ],
)
def test_mismatch_is_named(own: dict[str, Any], needs: dict[str, Any], reason: list[str]) -> None:
    assert find_mismatches(agent(**own), lane(**needs)) == reason
    assert is_eligible(agent(**own), lane(**needs)) == (not reason)
