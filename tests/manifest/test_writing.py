"""Written manifests load back to the same; differences are reported by field."""

from typing import Any
from uuid import UUID

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.manifest.examples import FLOW, S2

from tenuto.engine.flows.definitions import encode_spec
from tenuto.manifest.diff import FieldChange, field_changes, is_same
from tenuto.manifest.documents import parse_files, parse_spec
from tenuto.manifest.export import dump, kind_of, to_camel_names, to_plain, to_snake_names, to_yaml
from tenuto.manifest.manifest import read_manifest
from tenuto.manifest.tasks import RUN_ONLY_FIELDS
from tenuto.model.flows.definition import Approval, Condition, Foreach, Goto, GroupSpec
from tenuto.model.flows.plan import Spec
from tenuto.model.limits.budgets import Budget
from tenuto.model.printable import printable
from tenuto.model.tasks.commands import Escalation
from tenuto.model.tasks.retry import RetryPolicy
from tenuto.model.tasks.submission import NewTask

EVERYTHING = NewTask(
    key="every/thing:1",
    title="Everything",
    description="all fields",
    prompt="do it\nnow\n",
    system_prompt="be brief",
    model="m",
    max_turns=3,
    conversation="c",
    task_type="build",
    agent_type="coder",
    target_agent=UUID(int=7),
    command=["echo", "a b", "12"],
    cwd="/tmp",
    env={"A": "true", "B": {"$secret": "b"}},
    priority=8,
    tags=["x", "1"],
    task_tags=["python"],
    capabilities=["git"],
    container="box:1.0",
    region="eu",
    estimate_minutes=5,
    max_attempts=7,
    retry=RetryPolicy(base_s=2.0, multiplier=3.0, cap_s=60.0, jitter=0.1),
    timeout_s=60,
    queue_ttl_s=3600,
    lease_s=30,
    input={"a": [1, None, "1", 1.0, True, "no", "2026-01-01"], "b": {}},
    metadata={"k": True, "tools": ["python:3.11"], "deep": {"a": None}},
    source="s",
    depends_on=["a", "b"],
    on_dependency_failure="skip",
    next="n",
    complexity="Hard",
    escalation=Escalation("why", "what"),
    budget=Budget(tokens=1000, cost_usd=2.5),
)
SPECS: list[Spec] = [
    EVERYTHING,
    NewTask(title="t", key="bare"),
    NewTask(title="t", key="retries", retry=RetryPolicy()),
    NewTask(title="t", key="odd", metadata={"tools": [1]}, input=0),
    NewTask(title="t", key="empty", metadata={}, env={}, input="", description=""),
    NewTask(title="t", key="tools", metadata={"tools": []}),
    NewTask(title="t", key="each", control=Foreach(items=[], template="bare")),
    NewTask(
        title="t",
        key="from",
        control=Foreach(items={"$from": "a"}, template="bare", order="parallel", join="any_failed"),
    ),
    NewTask(title="t", key="goto", control=Goto(target="bare", prompt="")),
    NewTask(title="t", key="if", control=Condition(expression="result > 1", on_true="bare")),
    NewTask(title="t", key="ask", control=Approval()),
    NewTask(
        title="t", key="wait", control=Approval(message="m", timeout_s=9, on_timeout="approve")
    ),
    GroupSpec(title="g", key="group"),
    GroupSpec(
        title="g",
        key="full",
        order="parallel",
        children=("bare", "1"),
        next="goto",
        join="all_done",
        prompt="p",
        metadata={"a": 1},
    ),
]


def loaded(text: str) -> dict[str, Spec]:
    """The definitions of a text, without asking what they refer to."""
    return parse_files({"f": text}).specs


def test_export_table_has_every_field() -> None:
    plain = NewTask(title="")
    set_ = {
        name
        for spec in SPECS
        if isinstance(spec, NewTask)
        for name in NewTask.__struct_fields__
        if getattr(spec, name) != getattr(plain, name)
    }
    assert set(NewTask.__struct_fields__) - set_ == {*RUN_ONLY_FIELDS, "runtime"}


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.key)
def test_written_manifest_loads_back(spec: Spec) -> None:
    [back] = loaded(dump([spec])).values()
    assert is_same(back, spec)
    far = msgspec.json.decode(msgspec.json.encode(to_camel_names(to_plain(spec))))
    assert is_same(parse_spec(kind_of(spec), to_snake_names(far)), spec)
    assert is_same(msgspec.json.decode(encode_spec(spec), type=type(spec)), spec)


def test_many_definitions_are_written_together() -> None:
    assert loaded(dump(SPECS)) == {spec.key: spec for spec in SPECS}
    assert dump([]) == ""
    for text in (S2, FLOW):
        result = read_manifest({"f": text})
        again = read_manifest({"f": dump(result.specs.values())})
        assert again.specs == result.specs


texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), max_size=60)
ODD = "1e3 0o17 0x1f ~ null yes on 12:30 1_000 .inf - {a [b &x *x !y %z @q `r ' | > << = é😀"
SPACED = (
    '"|- a|a: b|# c| a|a |a\n|\n||a\n b\n|\t|\x07|a\r\nb|\x85|a\u2028b|\ufeff|\u202e|\U000e0041'
)
odd = st.sampled_from([*ODD.split(), *SPACED.split("|")])
numbers = st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False, allow_infinity=False)
scalars: st.SearchStrategy[Any] = st.none() | st.booleans() | numbers | odd | texts
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(odd | texts, inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=300, deadline=None)
@given(values)
def test_any_written_value_loads_back(value: Any) -> None:
    text = to_yaml({"id": "a", "metadata": {"v": value, "w": [value]}})
    [spec] = loaded(text).values()
    expected = NewTask(title="a", key="a", metadata={"v": value, "w": [value]})
    assert is_same(spec, expected), text
    assert printable(text, lines=True) == text


@settings(max_examples=100, deadline=None)
@given(texts.filter(str.strip) | odd.filter(str.strip), texts | odd)
def test_any_written_text_loads_back(title: str, prompt: str) -> None:
    spec = NewTask(title=title, key="a", prompt=prompt)
    [back] = loaded(dump([spec])).values()
    assert back == spec


def test_difference_is_reported_by_field() -> None:
    before = NewTask(title="t", key="a", priority=5, metadata={"x": 1, "y": {"z": 1}}, tags=["a"])
    after = NewTask(title="t", key="a", priority=8, metadata={"x": True, "y": {}}, prompt="p")
    assert sorted(field_changes(before, after), key=lambda item: item.field) == [
        FieldChange("metadata.x", 1, True),
        FieldChange("metadata.y.z", 1, None),
        FieldChange("priority", None, 8),
        FieldChange("prompt", None, "p"),
        FieldChange("tags", ["a"], None),
    ]
    assert field_changes(before, before) == []
    assert [
        field_change.field for field_change in field_changes(None, NewTask(title="t", key="a"))
    ] == [
        "id",
        "name",
    ]
    assert not is_same(before, GroupSpec(title="t", key="a"))
    null = NewTask(title="t", key="a", metadata={"x": None})
    assert field_changes(NewTask(title="t", key="a", metadata={}), null) == [
        FieldChange("metadata.x", None, None)
    ]
