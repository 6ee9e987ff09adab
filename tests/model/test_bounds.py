"""Bounds: values that cannot be stored are refused, and all others are stored unchanged."""

import decimal
import json
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenuto.model import bounds
from tenuto.model.errors import Invalid
from tenuto.model.flows import definition, progress
from tenuto.model.flows.definition import Approval, Foreach, GroupSpec, check_group
from tenuto.model.flows.plan import Spec, build_plan
from tenuto.model.flows.progress import ControlTaskFailed, foreach_items
from tenuto.model.limits import concurrency
from tenuto.model.limits.budgets import Budget
from tenuto.model.limits.concurrency import Concurrency
from tenuto.model.tasks.commands import Escalation
from tenuto.model.tasks.fingerprint import fingerprint
from tenuto.model.tasks.retry import RetryPolicy
from tenuto.model.tasks.submission import NewTask, check, is_same_lane, requirements
from tenuto.model.tenancy.secrets import check_value, extract_secrets

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), max_size=9),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text("abcé", max_size=3), inner, max_size=4)
    ),
    max_leaves=20,
)
ANY_TEXT = st.text(st.characters(exclude_categories=[]), max_size=30)


class Wrapped(float):
    """As a number of another library is."""


class Name(str):
    __slots__ = ()


class Count(int):
    pass


def code_of(call: Any, *arguments: Any) -> str:
    with pytest.raises(Invalid) as caught:
        call(*arguments)
    return caught.value.code


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


@given(JSON)
def test_storable_json_survives_a_round_trip(value: Any) -> None:
    text = bounds.to_json_text("input", value)
    if value is None:
        assert text is None
    else:
        assert text is not None
        assert msgspec.json.decode(text) == value
        assert json.loads(text) == value


@given(ANY_TEXT)
def test_storable_text_is_utf8_without_nul(value: str) -> None:
    try:
        value.encode()
    except UnicodeEncodeError:
        fits = False
    else:
        fits = "\x00" not in value
    assert bounds.is_storable(value) == fits
    cleaned = bounds.make_storable(value, 10)
    assert bounds.is_storable(cleaned)
    assert len(cleaned) <= 10
    if fits and len(value) <= 10:
        assert cleaned == value


def test_text_length_is_bounded() -> None:
    assert bounds.check_text("f", "x" * 10, 10) == "x" * 10
    assert code_of(bounds.check_text, "f", "x" * 11, 10) == "too_large"
    assert code_of(bounds.check_text, "f", "a\x00b", 10) == "text_invalid"
    assert code_of(bounds.check_text, "f", "a\udc00b", 10) == "text_invalid"
    for empty in ("", "  ", "\t\n", "\u2003"):
        with pytest.raises(Invalid, match="empty") as caught:
            bounds.check_text("f", empty, 10, empty=False)
        assert caught.value.details == {"field": "f"}


@pytest.mark.parametrize(
    ("value", "code"),
    [
        (float("nan"), "invalid_json"),
        (float("inf"), "invalid_json"),
        (float("-inf"), "invalid_json"),
        (2**64, "invalid_json"),
        (-(2**63) - 1, "invalid_json"),
        (10**400, "invalid_json"),
        (object(), "invalid_json"),
        (b"bytes", "invalid_json"),
        ({1: 2}, "invalid_json"),
        ({None: 2}, "invalid_json"),
        ({"a": {1, 2}}, "invalid_json"),
        (decimal.Decimal(1), "invalid_json"),
        (datetime(2030, 1, 1, tzinfo=UTC), "invalid_json"),
        (UUID(int=1), "invalid_json"),
        (1j, "invalid_json"),
        (range(3), "invalid_json"),
        ("a\x00", "text_invalid"),
        ({"a": [{"b": "\ud800"}]}, "text_invalid"),
        ({"k\x00": 1}, "text_invalid"),
        ({"\udfff": 1}, "text_invalid"),
        (nested(65), "too_deep"),
        (nested(100_000), "too_deep"),
        ("x" * (1024 * 1024), "too_large"),
        ([0] * (1024 * 1024), "too_large"),
    ],
    ids=lambda value: str(type(value).__name__) if not isinstance(value, str) else value[:12],
)
def test_value_that_is_not_small_plain_json_is_refused(value: Any, code: str) -> None:
    assert code_of(bounds.to_json_text, "input", value) == code
    assert code_of(bounds.to_json_text, "input", {"deep": [value]}) == code


def test_self_containing_value_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    assert code_of(bounds.to_json_text, "input", loop) == "too_deep"


@pytest.mark.parametrize("value", [Wrapped(1.5), Name("x"), Count(3), {"a": [Wrapped(2)]}])
def test_number_of_another_library_is_converted_or_refused(value: Any) -> None:
    try:
        text = bounds.to_json_text("input", value)
    except Invalid as error:
        assert error.code == "invalid_json"  # noqa: PT017  either answer will do
    else:
        assert text is not None
        assert json.loads(text) == value


def test_limits_are_inclusive() -> None:
    assert bounds.to_json_text("input", nested(64)) is not None
    assert bounds.to_json_text("input", "x" * (bounds.MAX_JSON - 2)) is not None
    assert bounds.to_json_text("input", [2**64 - 1, -(2**63)]) is not None


@pytest.mark.parametrize(
    ("source", "code"),
    [
        ("[" * 100_000 + "]" * 100_000, "too_deep"),
        ('{"a":' * 100_000 + "1" + "}" * 100_000, "too_deep"),
        ("", "invalid_json"),
        ("{", "invalid_json"),
        ("nope", "invalid_json"),
        ("NaN", "invalid_json"),
        ("Infinity", "invalid_json"),
        ("1e999", "invalid_json"),
        ("[1,]", "invalid_json"),
        ('"\\ud800"', "invalid_json"),
        ("\ud800", "invalid_json"),
        (b"\xff\xfe", "invalid_json"),
        (b'"\xff"', "invalid_json"),
    ],
    ids=lambda value: repr(value)[:14],
)
def test_untrusted_json_text_is_refused_if_invalid(source: str | bytes, code: str) -> None:
    assert code_of(bounds.parse_json, "body", source) == code


def test_untrusted_json_text_is_decoded() -> None:
    assert bounds.parse_json("body", ' {"a": [1, 2.5, null, "\\u00e9"]} ') == {
        "a": [1, 2.5, None, "é"]
    }
    assert code_of(bounds.to_json_text, "body", bounds.parse_json("body", '"\\u0000"')) == (
        "text_invalid"
    )
    big = bounds.parse_json("body", "1" + "0" * 40)
    assert code_of(bounds.to_json_text, "body", big) == "invalid_json"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1, 11, 10**100])
def test_number_is_bounded(value: float) -> None:
    assert code_of(bounds.check_number, "f", value, 0, 10) == "invalid_value"


FIELDS: dict[str, Any] = {
    "title": "other",
    "description": "d",
    "prompt": "p",
    "task_type": "t",
    "priority": 6,
    "tags": ["x"],
    "task_tags": ["x"],
    "capabilities": ["x"],
    "command": ["x"],
    "env": {"A": "1"},
    "max_attempts": 4,
    "retry": RetryPolicy(base_s=1),
    "timeout_s": 1,
    "run_at": datetime(2030, 1, 1, tzinfo=UTC),
    "input": {"a": 1},
    "metadata": {"a": 1},
    "parent": UUID(int=1),
    "idempotency_key": "k",
    "system_prompt": "s",
    "model": "m",
    "max_turns": 1,
    "conversation": "c",
    "agent_type": "a",
    "target_agent": UUID(int=1),
    "runtime": "preset",
    "cwd": "/x",
    "container": "c",
    "region": "r",
    "estimate_minutes": 1,
    "queue_ttl_s": 1,
    "lease_s": 1,
    "trace_id": "t",
    "source": "s",
    "key": "k",
    "depends_on": ["a"],
    "blocks": ["a"],
    "on_dependency_failure": "run",
    "next": "n",
    "group": "g",
    "control": Approval(),
    "complexity": "Low",
    "escalation": Escalation("why", "what"),
    "concurrency": Concurrency("k"),
    "budget": Budget(tokens=1),
}


def test_fingerprint_covers_every_field() -> None:
    assert FIELDS.keys() == set(NewTask.__struct_fields__) - {"id"}
    plain = NewTask(title="a task")
    prints = {fingerprint(plain)}
    for name, value in FIELDS.items():
        prints.add(fingerprint(msgspec.structs.replace(plain, **{name: value})))
    assert len(prints) == len(FIELDS) + 1
    assert fingerprint(msgspec.structs.replace(plain, id=UUID(int=1))) == fingerprint(plain)


def test_tasks_of_one_lane_have_equal_requirements() -> None:
    plain, workspace = NewTask(title="a task"), UUID(int=1)
    for name, value in FIELDS.items():
        other = msgspec.structs.replace(plain, **{name: value})
        same = requirements(other, workspace) == requirements(plain, workspace)
        assert same or not is_same_lane(plain, other), name


def test_fingerprint_ignores_explicit_defaults() -> None:
    """A value decoded from a request equals the default but is another object."""
    output = (
        b'{"title": "t", "task_type": "default", "priority": 5, "max_attempts": 3, "tags": [],'
        b' "description": null}'
    )
    assert fingerprint(msgspec.json.decode(output, type=NewTask)) == fingerprint(NewTask(title="t"))
    policy = b'{"title": "t", "retry": {"base_s": 5.0, "cap_s": 900.0}}'
    same = NewTask(title="t", retry=RetryPolicy())
    assert fingerprint(msgspec.json.decode(policy, type=NewTask)) == fingerprint(same)


def test_fingerprint_ignores_the_order_of_keys() -> None:
    one = NewTask(title="t", input={"a": 1, "b": {"c": 1, "d": 2}})
    two = NewTask(title="t", input={"b": {"d": 2, "c": 1}, "a": 1})
    assert fingerprint(one) == fingerprint(two)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"command": []}, "command must not be empty"),
        ({"runtime": "command"}, "command is required"),
        ({"command": ["x"], "runtime": "preset"}, "runtime must be .command. or empty"),
        ({"command": ["x"], "env": {"A=B": "1"}}, "="),
        ({"env": {"A=B": "1"}}, "="),
        ({"env": {"": "1"}}, "empty"),
        ({"run_at": datetime(2030, 1, 1)}, "time zone"),  # noqa: DTZ001  that is the point
        ({"retry": RetryPolicy(jitter=1.5)}, "retry.jitter"),
        ({"retry": RetryPolicy(multiplier=0.5)}, "retry.multiplier"),
        ({"retry": RetryPolicy(base_s=-1)}, "retry.base_s"),
        ({"retry": RetryPolicy(cap_s=float("nan"))}, "retry.cap_s"),
        ({"lease_s": 0}, "lease_s"),
        ({"queue_ttl_s": -5}, "queue_ttl_s"),
        ({"estimate_minutes": 0}, "estimate_minutes"),
        ({"max_turns": 0}, "max_turns"),
        ({"tags": "red"}, "tags must be a list of texts"),
        ({"depends_on": "first"}, "depends_on must be a list of texts"),
    ],
)
def test_invalid_task_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(Invalid, match=message):
        check(NewTask(title="t", **fields))


def test_empty_list_equals_no_list() -> None:
    assert check(NewTask(title="t", tags=[], depends_on=[]))
    assert not check(NewTask(title="t", tags=["red"]))


EDGES: dict[str, tuple[int, Callable[[int], dict[str, Any]]]] = {
    "title": (bounds.MAX_TITLE, lambda n: {"title": "x" * n}),
    "task_type": (bounds.MAX_NAME, lambda n: {"task_type": "x" * n}),
    "prompt": (bounds.MAX_TEXT, lambda n: {"prompt": "x" * n}),
    "description": (bounds.MAX_TEXT, lambda n: {"description": "x" * n}),
    "idempotency_key": (bounds.MAX_NAME, lambda n: {"idempotency_key": "x" * n}),
    "key": (bounds.MAX_NAME, lambda n: {"key": "x" * n}),
    "priority": (10, lambda n: {"priority": n}),
    "max_attempts": (bounds.MAX_ATTEMPTS, lambda n: {"max_attempts": n}),
    "max_turns": (1_000_000, lambda n: {"max_turns": n}),
    "estimate_minutes": (bounds.MAX_SECONDS // 60, lambda n: {"estimate_minutes": n}),
    "timeout_s": (bounds.MAX_SECONDS, lambda n: {"timeout_s": n}),
    "queue_ttl_s": (bounds.MAX_SECONDS, lambda n: {"queue_ttl_s": n}),
    "lease_s": (bounds.MAX_SECONDS, lambda n: {"lease_s": n}),
    "retry.base_s": (bounds.MAX_SECONDS, lambda n: {"retry": RetryPolicy(base_s=n)}),
    "retry.multiplier": (100, lambda n: {"retry": RetryPolicy(multiplier=n)}),
    "retry.jitter": (1, lambda n: {"retry": RetryPolicy(jitter=n)}),
    "tags": (bounds.MAX_TAGS, lambda n: {"tags": ["x"] * n}),
    "a tag": (bounds.MAX_NAME, lambda n: {"tags": ["x" * n]}),
    "task_tags": (bounds.MAX_TAGS, lambda n: {"task_tags": ["x"] * n}),
    "capabilities": (bounds.MAX_TAGS, lambda n: {"capabilities": ["x"] * n}),
    "depends_on": (bounds.MAX_DEPENDENCIES, lambda n: {"depends_on": ["x"] * n}),
    "blocks": (bounds.MAX_DEPENDENCIES, lambda n: {"blocks": ["x"] * n}),
    "a word of a command": (bounds.MAX_TEXT, lambda n: {"command": ["x" * n]}),
    "a name in env": (bounds.MAX_NAME, lambda n: {"env": {"X" * n: "x"}}),
    "a value in env": (bounds.MAX_TEXT, lambda n: {"env": {"X": "x" * n}}),
    "escalation.reason": (
        bounds.MAX_ERROR,
        lambda n: {"escalation": Escalation(reason="x" * n, prompt="p")},
    ),
    "budget.tokens": (bounds.MAX_COUNT, lambda n: {"budget": Budget(tokens=n)}),
    "concurrency.key": (bounds.MAX_NAME, lambda n: {"concurrency": Concurrency("x" * n)}),
    "concurrency.limit": (
        concurrency.MAX_LIMIT,
        lambda n: {"concurrency": Concurrency("x", limit=n)},
    ),
    "items": (
        definition.MAX_ITEMS,
        lambda n: {"control": Foreach(items=[1] * n, template="t")},
    ),
}


@pytest.mark.parametrize("name", EDGES)
def test_value_at_the_limit_is_accepted_and_beyond_refused(name: str) -> None:
    maximum, fields = EDGES[name]
    check(NewTask(**{"title": "t"} | fields(maximum)))
    assert code_of(check, NewTask(**{"title": "t"} | fields(maximum + 1))) in (
        "too_large",
        "invalid_value",
        "key_invalid",
    )


@pytest.mark.parametrize("name", ["priority", "max_attempts", "max_turns", "timeout_s"])
def test_one_is_accepted_and_zero_refused(name: str) -> None:
    fields = EDGES[name][1]
    check(NewTask(**{"title": "t"} | fields(1)))
    assert code_of(check, NewTask(**{"title": "t"} | fields(0))) == "invalid_value"


def test_secrets_up_to_the_limits_are_accepted() -> None:
    for at, over in (
        ("x" * bounds.MAX_SECRET, "x" * (bounds.MAX_SECRET + 1)),
        ("é" * (bounds.MAX_SECRET // 2), "é" * (bounds.MAX_SECRET // 2) + "x"),
        ("x\n" * bounds.MAX_SECRET_LINES, "x\n" * (bounds.MAX_SECRET_LINES + 1)),
    ):
        check_value("value", at)
        assert code_of(check_value, "value", over) == "too_large"
    named = {f"n{n}": "a value" for n in range(bounds.MAX_SECRETS)}
    assert extract_secrets({"secrets": named})[1] == named
    assert code_of(extract_secrets, {"secrets": named | {"more": "a value"}}) == "too_large"


def test_foreach_items_up_to_the_limit_are_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Items in another task's result are counted when the result is stored."""
    monkeypatch.setattr(progress, "MAX_ITEMS", 3)
    foreach = Foreach(items={"$from": "w"}, template="t")
    assert foreach_items(foreach, {"w": [1, 2, 3]}) == [1, 2, 3]
    with pytest.raises(ControlTaskFailed, match="at most 3"):
        foreach_items(foreach, {"w": [1, 2, 3, 4]})


def test_groups_and_plans_up_to_the_limits_are_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(definition, "MAX_CHILDREN", 3)
    monkeypatch.setattr("tenuto.model.flows.plan.MAX_PLAN", 4)
    for n in (3, 4):
        keys = tuple(f"k{number}" for number in range(n))
        group = GroupSpec(title="g", key="g", children=keys)
        existing: dict[str, Spec] = {key: NewTask(title=key, key=key) for key in keys}
        existing["g"] = group
        if n == 3:
            check_group(group)
            assert len(build_plan("g", existing.get).tasks) == 3
        else:
            assert code_of(check_group, group) == "too_large"
            assert code_of(build_plan, "g", existing.get) == "too_large"
