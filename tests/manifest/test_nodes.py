"""YAML text: its values, their locations, and what is refused."""

from typing import Any

import pytest

from tenuto.manifest.yaml_nodes import (
    MAX_BYTES,
    MAX_NODES,
    Composer,
    YamlError,
    decode_text,
    node_of,
)

BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 10)}]\n"
    for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)


def documents(text: str | bytes) -> list[Any]:
    return [node.plain() for node in Composer().documents("f.yaml", decode_text("f.yaml", text))]


def refusal(text: str | bytes) -> tuple[str, int, int, str]:
    with pytest.raises(YamlError) as caught:
        documents(text)
    position = caught.value.location
    return caught.value.reason, position.line, position.column, caught.value.code


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("", None),
        ("~", None),
        ("null", None),
        ("no", "no"),
        ("on", "on"),
        ("y", "y"),
        ("true", True),
        ("FALSE", False),
        ("12", 12),
        ("-3", -3),
        ("010", 10),
        ("0o17", 15),
        ("0xff", 255),
        ("1_000", "1_000"),
        ("12:30", "12:30"),
        ("1.5", 1.5),
        ("1e3", 1000.0),
        (".5", 0.5),
        ("1.2.3", "1.2.3"),
        ("python:3.11", "python:3.11"),
        ("2026-04-01", "2026-04-01"),
        ("2026-04-01T09:00:00Z", "2026-04-01T09:00:00Z"),
        ('"12"', "12"),
        ("'true'", "true"),
        ("!!str 12", "12"),
        ("! 12", "12"),
        ("|\n  a\n  b\n", "a\nb\n"),
        ("*", None),
    ],
)
def test_scalar_follows_the_core_schema(text: str, value: Any) -> None:
    if text == "*":
        assert refusal(f"a: {text}")[3] == "yaml_invalid"
    else:
        assert documents(f"a: {text}") == [{"a": value}]


def test_infinity_is_parsed_and_refused_by_the_model() -> None:
    assert documents("[.inf, -.inf]") == [[float("inf"), float("-inf")]]
    assert str(documents(".nan")) == "[nan]"


def test_documents_are_yielded_with_locations() -> None:
    first, second = Composer().documents("f", "a:\n  - x\n---\nb: {c: 1}\n")
    assert first.value["a"].node.value[0].location == type(first.location)("f", 2, 5)
    inner = second.value["b"].node.value["c"]
    assert (inner.location.line, inner.location.column) == (4, 5)
    assert (inner.node.location.line, inner.node.location.column) == (4, 8)


def test_anchors_are_expanded() -> None:
    assert documents("a: &x {b: [1]}\nc: *x\nd: [*x]\n&k e: 1") == [
        {"a": {"b": [1]}, "c": {"b": [1]}, "d": [{"b": [1]}], "e": 1}
    ]
    assert documents("a: &n name\n*n : 1") == [{"a": "name", "name": 1}]


@pytest.mark.parametrize(
    ("text", "line", "column", "output"),
    [
        ("a: 1\nb: 2\na: 3", 3, 1, "'a' is defined twice, first in line 1"),
        ("a: !!python/object/apply:os.system [x]", 1, 4, "!!python/object/apply:os.system"),
        ("a: 1\nb: !!python/name:os.system", 2, 4, "!!python/name:os.system"),
        ("!!binary aGk=", 1, 1, "!!binary"),
        ("a: !custom 1", 1, 4, "!custom"),
        ("a: !!timestamp 2026-01-01", 1, 4, "!!timestamp"),
        ("a: !!set {x}", 1, 4, "!!set"),
        ("%TAG ! tag:evil,2000:\n---\na: !x 1", 3, 4, "tag:evil,2000:x"),
        ("a: &x [*x]", 1, 8, "alias *x is inside the value that it refers to"),
        ("a: *x", 1, 4, "no anchor &x"),
        ("a: &x 1\n---\nb: *x", 3, 4, "no anchor &x"),
        ("[a]: 1", 1, 1, "a field name must be text"),
        ("a: &l [1]\n*l : 1", 2, 1, "a field name must be text"),
        ("a: {b: 1}\n<<: {c: 1}", 2, 1, "merging"),
        ("a: [1", 2, 1, "did not find"),
        ("a: b: c", 1, 5, "mapping values are not allowed"),
        ('a: "\\z"', 1, 5, "unknown escape"),
        ("a: " + "9" * 5000, 1, 4, "digits; put text in quotes"),
        ("a: \x07", 1, 4, "control characters"),
    ],
)
def test_invalid_yaml_is_refused_with_its_location(
    text: str, line: int, column: int, output: str
) -> None:
    reason, *position, code = refusal(text)
    assert output in reason
    if output != "control characters":
        assert position == [line, column]
    assert code == "yaml_invalid"


@pytest.mark.parametrize(
    ("content", "line", "column"),
    [
        (b"a: 1\nb: \xff", 2, 4),
        ("a: x".encode("utf-16"), 1, 1),
        (b"a: 1\nb: x\x00y", 2, 5),
        ("a: \ud800", 1, 4),
    ],
)
def test_bytes_that_are_not_text_are_refused(content: str | bytes, line: int, column: int) -> None:
    assert refusal(content)[1:] == (line, column, "text_invalid")


def test_byte_order_mark_is_ignored() -> None:
    assert documents(b"\xef\xbb\xbfa: 1") == [{"a": 1}]


def test_sizes_and_depths_are_limited() -> None:
    assert refusal("x" * (MAX_BYTES + 1))[3] == "too_large"
    assert documents("a: " + "[" * 63 + "]" * 63)
    assert refusal("a: " + "[" * 64 + "]" * 64)[3] == "too_deep"
    assert refusal("[" * 1_000_000)[3] == "too_deep"
    assert refusal("- " * 1_000_000)[3] == "too_deep"
    assert refusal("{a: " * 1_000_000)[3] == "too_deep"
    chain = "a0: &a0 []\n" + "".join(f"a{n + 1}: &a{n + 1} [*a{n}]\n" for n in range(70))
    assert refusal(chain)[3] == "too_deep"
    deep: Any = []
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(YamlError):
        node_of(deep)


def test_entity_bomb_is_refused() -> None:
    assert refusal(BOMB)[3] == "too_large"
    assert refusal("[" + "x," * MAX_NODES + "]")[3] == "too_large"


def test_sizes_of_all_files_count_together() -> None:
    composer = Composer()
    half = "[" + "x," * (MAX_NODES // 2) + "]"
    assert len(list(composer.documents("a", half))) == 1
    with pytest.raises(YamlError) as caught:
        list(composer.documents("b", half))
    assert (caught.value.code, caught.value.location.file) == ("too_large", "b")


def test_python_parser_gives_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    import yaml

    text = "a: &x {b: [1, no]}\nc: *x\nd: |\n  t\n"
    quick = documents(text)
    monkeypatch.setattr("tenuto.manifest.yaml_nodes._LOADER", yaml.SafeLoader)
    assert documents(text) == quick
    assert refusal("[" * 100_000)[3] == "too_deep"
    assert refusal(BOMB)[3] == "too_large"
