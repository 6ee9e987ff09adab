"""Expressions: the subset gives CEL's answers, errors say where, and no text costs too much."""

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tenuto.model.errors import Invalid
from tenuto.model.flows.expressions.operators import ERROR_STEPS, MAX_STEPS, Evaluation
from tenuto.model.flows.expressions.parser import (
    MAX_EXPRESSION,
    MAX_NESTING,
    MAX_PATTERNS,
    compile_expression,
)

NAMES = frozenset({"result", "task", "input"})
VARIABLES: dict[str, Any] = {
    "result": {
        "score": 0.75,
        "count": 3,
        "ok": True,
        "name": "Ünicode",
        "none": None,
        "tags": ["red", "green"],
        "numbers": [1, 2, 3],
        "items": [{"id": 1, "price": 10}, {"id": 2, "price": 2.5}],
        "a-b": {"in": 1},
        "huge": 2**70,
        "unsigned": 2**64 - 1,
    },
    "task": {"type": "review", "attempt": 1},
    "input": [],
}

TRUE = r"""
true
!false
1 == 1.0
1.0 == 1
1 != 2
1 < 1.5
- 1 == -1
--1 == 1
1 + 2 * 3 == 7
(1 + 2) * 3 == 9
7 - 2 - 1 == 4
7 / 2 == 3
-7 / 2 == -3
7 % 3 == 1
-7 % 3 == -1
7.0 / 2.0 == 3.5
1.0 / 0.0 > 1e300
0.1 + 0.2 != 0.3
.5 == 0.5
1e3 == 1000
0x1F == 31
-0x10 == -16
-9223372036854775808 < 9223372036854775807
result.unsigned > 9223372036854775807
result.count * 0.5 == 1.5
'a' + 'b' == "ab"
[1] + [2, 3] == [1, 2, 3]
[1, 2,] == [1.0, 2.0]
{'a': 1, 'b': [2]} == {'b': [2.0], 'a': 1}
{'a': 1,}['a'] == 1
{} == {}
'a' < 'b'
'B' < 'a'
false < true
null == null
result.none == null
'1' != 1
true != 1
null != false
[] != {}
[1, [2, {'a': null}]] == [1, [2, {'a': null}]]
1 in [3, 2, 1]
1.0 in [1]
!(true in [1])
'red' in result.tags
'score' in result
!('x' in result)
!(1 in result)
has(result.score)
has((result.score))
!has(result.nothing)
has(result.none)
!has(result.items[0].weight)
size('Ünicode') == 7
result.name.size() == 7
'\U0001F600'.size() == 1
size(result.tags) == 2 && result.tags.size() == 2
size({}) == 0
result.name.startsWith('Ün')
result.name.endsWith('code')
result.name.contains('nico')
'abc'.contains('')
'foo1'.matches('^[a-z]+[0-9]$')
'xfoo1y'.matches('o.?1')
!'foo'.matches('^o')
matches('Ünicode', r'^\pL+$')
'a\nb'.matches(r'a\sb')
true ? true : false
false ? 1 / 0 == 1 : true
(1 == 1 ? 'x' : 'y') == 'x'
false ? false : true ? true : false
true || false && false
true || 1 / 0 == 1
1 / 0 == 1 || true
result.nothing == 1 || result.ok
!(result.nothing == 1 && false)
result.items[0].id == 1
result['items'][1]['price'] == 2.5
result.numbers[1.0] == 2
result['a-b'].size() == 1
[[1, 2], [3]][0][1] == 2
result.numbers.all(n, n > 0)
result.numbers.exists(n, n == 2)
result.numbers.exists_one(n, n > 2)
!result.numbers.exists_one(n, n > 1)
result.numbers.map(n, n * 2) == [2, 4, 6]
result.numbers.map(n, n > 1, n * 2) == [4, 6]
result.numbers.filter(n, n % 2 == 1) == [1, 3]
[].all(n, false)
![].exists(n, true)
{'a': 1, 'b': 2}.all(k, k < 'c')
{'a': 1}.map(k, k) == ['a']
result.items.all(i, result.numbers.exists(n, n == i.id))
[1].all(task, task == 1) && task.attempt == 1
[1, 'a'].exists(x, x == 'a' || x < 0)
['a', 1].exists(x, x > 0)
![1, 'a'].all(x, x > 1)
int('42') == 42 && int(3.9) == 3 && int(-3.9) == -3
double('2.5') == 2.5 && double(2) == 2.0
string(7) == '7' && string(true) == 'true' && string('x') == 'x'
"it's" == 'it\'s'
'''a
b''' == 'a\nb'
r'\d' == '\\d'
'\x41\u0042\103' == 'ABC'
task.attempt == 1 // the rest is for people
"""

FALSE = r"""
false
1 == 2
1 == '1'
true == 1
result.score > 0.9
task.type == 'build'
false && 1 / 0 == 1
1 / 0 == 1 && false
result.numbers.all(n, n > 1)
[1, 2].exists(x, x == 3)
0.0 / 0.0 == 0.0 / 0.0
"""

INVALID = [
    ("", "is empty", None),
    (" \n\t", "is empty", None),
    ("// nothing", "ends too early", (1, 11)),
    ("true" + " " * MAX_EXPRESSION, "at most 4,096", None),
    ("'\x00' == ''", "NUL", None),
    ("'\ud800' == ''", "surrogate", None),
    ("1 +", "ends too early", (1, 4)),
    ("true &&\n  ) ", 'unexpected ")"', (2, 3)),
    ("(true", "ends too early", (1, 6)),
    ("true true", 'unexpected "true"', (1, 6)),
    ("a = 1", "unexpected character", (1, 3)),
    ("'abc", "a string does not end", (1, 1)),
    ("'a\nb' == ''", "a string does not end", (1, 1)),
    ("é", "unexpected character", (1, 1)),
    (r"'\q' == ''", "unknown escape", (1, 1)),
    (r"'\ud800' == ''", "escape that is no character", (1, 1)),
    (r"'\UFFFFFFFF' == ''", "escape that is no character", (1, 1)),
    ("b'a' == b'a'", "not supported", (1, 1)),
    ("1u == 1u", "not supported", (1, 1)),
    ("9223372036854775808 > 0", "beyond 64 bits", (1, 1)),
    ("-9223372036854775809 < 0", "beyond 64 bits", (1, 2)),
    ("9" * 4_000 + " > 0", "beyond 64 bits", (1, 1)),
    ("1e999 > 0", "too large", (1, 1)),
    ("nobody == 1", 'no variable "nobody"; there are: input, result, task', (1, 1)),
    ("result.all(x, y)", 'no variable "y"', (1, 15)),
    ("[1].all(x, true) && x == 1", 'no variable "x"', (1, 21)),
    ("__import__('os')", "no function", (1, 1)),
    ("result.run()", "no method", (1, 7)),
    ("size()", "1 argument", (1, 1)),
    ("'a'.contains()", "1 argument", (1, 4)),
    ("has(result)", "takes a field", (1, 1)),
    ("has(result['score'])", "takes a field", (1, 1)),
    ("result.all(1, true)", 'unexpected "1"', (1, 12)),
    ("result.all(x)", 'unexpected ")"', (1, 13)),
    ("result.all(x, x, x)", "a variable and an expression", (1, 7)),
    ("result.all(for, true)", "reserved word", (1, 7)),
    ("result.in", 'unexpected "in"', (1, 8)),
    ("size(result,)", 'unexpected ")"', (1, 13)),
    ("'a'.matches('(')", "missing )", (1, 4)),
    (r"'a'.matches(r'(a)\1')", "invalid escape sequence", (1, 4)),
    (r"'a'.matches(r'\pL{900}')", "too large", (1, 4)),
    ("'a'.matches(task.type)", "string literal", (1, 4)),
    ("'a'.matches('a' + 'b')", "string literal", (1, 4)),
    ("||".join(["''.matches('')"] * (MAX_PATTERNS + 1)), "more than 16 patterns", (1, 259)),
]

FAILED = [
    ("result.nothing == 1", 'no field "nothing"', (1, 7)),
    ("true &&\n result.nothing == 1", 'no field "nothing"', (2, 8)),
    ("result.none.deep == 1", 'null has no field "deep"', (1, 12)),
    ("has(result.nothing.deep)", 'no field "nothing"', (1, 11)),
    ("has(task.type.deep)", "string has no field", (1, 1)),
    ("result['nothing'] == 1", 'no field "nothing"', (1, 7)),
    ("input[0] == 1", "no element 0 in a list of 0", (1, 6)),
    ("result.numbers[-1] == 1", "no element -1", (1, 15)),
    ("result.numbers[0.5] == 1", "cannot be applied to list and double", (1, 15)),
    ("result[1] == 1", "cannot be applied to map and int", (1, 7)),
    ("'abc'[0] == 'a'", "cannot be applied to string and int", (1, 6)),
    ("'a' < 1", '"<" cannot be applied to string and int', (1, 5)),
    ("null < 1", "null and int", (1, 6)),
    ("true < 1", "bool and int", (1, 6)),
    ("1 + 'a' == 1", "int and string", (1, 3)),
    ("5.0 % 2.0 == 1.0", "double and double", (1, 5)),
    ("-'a' == 1", "applied to string", (1, 1)),
    ("!1", "applied to int", (1, 1)),
    ("1 in 'a'", "int and string", (1, 3)),
    ("1 / 0 == 1", "division by zero", (1, 3)),
    ("1 % 0 == 1", "division by zero", (1, 3)),
    ("9223372036854775807 + 1 > 0", "beyond 64 bits", (1, 21)),
    ("-9223372036854775808 / -1 > 0", "beyond 64 bits", (1, 22)),
    ("-(-9223372036854775808) > 0", "beyond 64 bits", (1, 1)),
    ("result.huge > 0", "beyond 64 bits", (1, 13)),
    ("[result.huge] == [1]", "beyond 64 bits", (1, 15)),
    ("1", "the expression has the type int", None),
    ("result", "the expression has the type map", None),
    ("1 && true", "a condition has the type int", (1, 3)),
    ("true && 1", "a condition has the type int", (1, 6)),
    ("1 ? true : false", "has the type int", (1, 3)),
    ("[1].all(x, x)", "a condition has the type int", (1, 4)),
    ("[1].filter(x, x) == []", "a condition has the type int", (1, 4)),
    ("['a', 1].exists_one(x, x > 0)", "string and int", (1, 26)),
    ("1.all(x, true)", "int has no elements", (1, 2)),
    ("size(1) == 1", "applied to int", (1, 1)),
    ("1.contains('a')", "int and string", (1, 2)),
    ("1.matches('a')", "applied to int", (1, 2)),
    ("int('x') == 1", '"x" is not an int', (1, 1)),
    ("int('99999999999999999999') == 1", "is not an int", (1, 1)),
    ("int(1e300) == 1", "is not an int", (1, 1)),
    ("double('nan') == 1.0", "is not a double", (1, 1)),
    ("string(1.5) == '1.5'", "applied to double", (1, 1)),
    ("{1: 2} == {}", "is int, not string", (1, 1)),
    ("{'a': 1, 'a': 2} == {}", "is twice in a map", (1, 1)),
]

LONG = {"a": list(range(20_000)), "s": "a" * 1_000_000, "t": "ab" * 10_000}
PAIRS = ".map(x, [x, x])" * 12
COSTLY = {
    "nested loops": "a.all(x, a.all(y, a.all(z, a.all(w, x + y + z + w >= 0))))",
    "empty loops": "a.all(x, a.all(y, true))",
    "loops with errors": "a.all(x, a.all(y, y.z || true))",
    "doubled strings": "[s]" + ".map(x, x + x)" * 26 + " == []",
    "doubled lists": "[a]" + ".map(x, x + x)" * 26 + " == []",
    "shared trees": f"[a]{PAIRS} == [a]{PAIRS}",
    "many copies": "a.map(x, s + t).size() == 0",
    "lists of copies": "a.map(x, a.map(y, y)).size() == 0",
    "comparing lists": "a.all(x, a == a)",
    "comparing strings": "a.all(x, s == s)",
    "ordering strings": "a.all(x, s <= s)",
    "searching lists": "a.all(x, !(-1 in a))",
    "searching strings": "a.all(x, !t.contains('" + "ab" * 49 + "c'))",
    "beginnings": "a.all(x, s.startsWith(s))",
    "catastrophic pattern": "a.all(x, !s.matches('(a+a+)+b'))",
    "wide pattern": "a.all(x, !t.matches('b[ab]{900}c'))",
}
DEEP = {
    "parentheses": "(" * 2_000 + "true" + ")" * 2_000,
    "brackets": "[" * 2_000 + "]" * 2_000,
    "braces": "{'a':" * 500 + "1" + "}" * 500,
    "indexes": "a" + "[0]" * 1_300,
    "fields": "a" + ".b" * 2_000,
    "nots": "!" * 4_000 + "true",
    "minuses": "-" * 4_000 + "a",
    "sums": "1" + "+1" * 2_000,
    "comparisons": "1" + "<1" * 2_000,
    "choices": "true?true:" * 400 + "true",
    "calls": "size(" * 600 + "a" + ")" * 600,
    "loops": "a.all(x," * 400 + "true" + ")" * 400,
    "chains": "a" + ".map(x,x)" * 400,
    "unclosed": "(" * 4_096,
}

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["score", "items", "id", "x"]), inner, max_size=4)
    ),
    max_leaves=20,
)
WORDS = st.sampled_from(
    "result task input x 1 2.5 -1 'a' 'b+' true false null [ ] ( ) { } . , : ? && || ! == != < >="
    " + - * / % in has( size( .size() .all(x, .exists(x, .map(x, .matches( .score .items [0]"
    " .contains( 9223372036854775807 // \\ ' \" int( string(".split(" ")
)


def lines(text: str) -> list[str]:
    """The expressions of a table; one that spans lines is put together again."""
    return text.strip().replace("'''a\nb'''", "'''a\x01b'''").splitlines()


def holds(text: str, variables: Mapping[str, Any] = VARIABLES) -> bool:
    names = NAMES | variables.keys()
    return compile_expression(text.replace("\x01", "\n"), frozenset(names)).holds(variables)


def refused(text: str, variables: Mapping[str, Any] = VARIABLES) -> Invalid:
    with pytest.raises(Invalid) as caught:
        holds(text, variables)
    return caught.value


def position(error: Invalid) -> tuple[int, int] | None:
    return (error.details["line"], error.details["column"]) if error.details else None


@pytest.mark.parametrize("text", lines(TRUE))
def test_expression_is_true(text: str) -> None:
    assert holds(text) is True


@pytest.mark.parametrize("text", lines(FALSE))
def test_expression_is_false(text: str) -> None:
    assert holds(text) is False


@pytest.mark.parametrize(("text", "reported", "where"), INVALID, ids=range(len(INVALID)))
def test_invalid_expression_is_refused(
    text: str, reported: str, where: tuple[int, int] | None
) -> None:
    with pytest.raises(Invalid) as caught:
        compile_expression(text, NAMES)
    assert caught.value.code == "expression_invalid"
    assert reported in caught.value.message
    assert position(caught.value) == where


@pytest.mark.parametrize(("text", "reported", "where"), FAILED, ids=range(len(FAILED)))
def test_expression_without_a_value_fails(
    text: str, reported: str, where: tuple[int, int] | None
) -> None:
    error = refused(text)
    assert error.code == "expression_failed"
    assert reported in error.message
    assert position(error) == where


def test_error_position_is_shown_to_users() -> None:
    reported = 'there is no field "nothing" (line 2, column 7)'
    assert refused("true &&\nresult.nothing").message == reported


def test_missing_variable_is_an_error() -> None:
    condition = compile_expression("task.attempt == 1", NAMES)
    assert condition.holds({"task": {"attempt": 1}})
    with pytest.raises(Invalid, match='"task" is missing') as caught:
        condition.holds({"result": 1})
    assert caught.value.code == "expression_failed"


@pytest.mark.parametrize("value", [object(), (1,), {1}, b"a", 1j])
def test_value_that_is_not_json_is_an_error(value: object) -> None:
    error = refused("result == 1", {"result": value})
    assert (error.code, "is not JSON" in error.message) == ("expression_failed", True)


def test_text_that_is_not_unicode_is_refused_by_patterns() -> None:
    assert "surrogate" in refused("result.matches('a')", {"result": "\ud800"}).message


def test_error_messages_are_short_and_on_one_line() -> None:
    key = "\n\x00\ud800" + "k" * 1_000_000
    message = refused("result[task]", {"result": {}, "task": key}).message
    assert message.isprintable()
    assert len(message) < 100


def test_operands_of_one_operator_are_not_nested() -> None:
    assert holds(" && ".join(["true"] * 500))
    assert holds(" || ".join(["false"] * 400) + " || true")


def test_nesting_up_to_the_limit_is_accepted() -> None:
    maximum = MAX_NESTING - 1
    assert holds("(" * maximum + "true" + ")" * maximum)
    assert holds("1" + " + 1" * (maximum - 1) + f" == {maximum}")
    assert holds("!" * maximum + "false")


@pytest.mark.parametrize("text", DEEP.values(), ids=DEEP)
def test_deep_nesting_is_refused(text: str) -> None:
    with pytest.raises(Invalid, match=f"nested deeper than {MAX_NESTING}") as caught:
        compile_expression(text, frozenset({"a"}))
    assert caught.value.code == "expression_invalid"


def test_depth_of_a_variable_does_not_count() -> None:
    value: Any = 1
    for _ in range(20_000):
        value = [value]
    assert holds("result == task", {"result": value, "task": value})
    assert holds("result != task", {"result": value, "task": [value]})


def calls_of(text: str) -> int:
    """Returns how many functions were called until the result, including Python's own."""
    counted = 0

    def count(_frame: object, event: str, _argument: object) -> None:
        nonlocal counted
        counted += event in {"call", "c_call"}

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        error = refused(text, LONG)
    finally:
        sys.setprofile(before)
    assert (error.code, "steps" in error.message) == ("expression_failed", True)
    return counted


@pytest.mark.parametrize("text", COSTLY.values(), ids=COSTLY)
def test_expensive_expression_stops_within_the_step_limit(text: str) -> None:
    assert calls_of(text) < 20 * MAX_STEPS


@pytest.mark.parametrize(
    ("text", "minimum"),
    [
        ("s == s", 10_000),
        ("a == a", 40_000),
        ("a + a == []", 40_000),
        ("t.contains('" + "ab" * 50 + "')", 2_000),
        ("1 / 0 == 1 || true", ERROR_STEPS),
    ],
)
def test_large_values_count_against_the_step_limit(text: str, minimum: int) -> None:
    condition = compile_expression(text, frozenset(LONG))
    run = Evaluation([LONG[name] for name in condition.names])
    condition.step(run)
    assert minimum <= MAX_STEPS - run.remaining_steps < minimum + 1_000


GUARDED = """
import json, resource, sys
resource.setrlimit(resource.RLIMIT_AS, (2**29, 2**29))
resource.setrlimit(resource.RLIMIT_CPU, (60, 60))
from tenuto.model.errors import Invalid
from tenuto.model.flows.expressions.parser import compile_expression

codes, (variables, texts) = [], json.load(sys.stdin)
for text in texts:
    try:
        codes.append(compile_expression(text, frozenset(variables)).holds(variables))
    except Invalid as error:
        codes.append(error.code)
print(json.dumps(codes))
"""


def test_hostile_expression_does_not_harm_the_process() -> None:
    """Half a gigabyte and a minute of processor time are enough for all of them together."""
    done = subprocess.run(
        [sys.executable, "-c", GUARDED],
        input=json.dumps([LONG, [*COSTLY.values(), *DEEP.values()]]),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    expected = ["expression_failed"] * len(COSTLY) + ["expression_invalid"] * len(DEEP)
    assert json.loads(done.stdout) == expected


def test_loops_over_long_lists_stay_within_the_step_limit() -> None:
    long = {"result": [{"id": n, "name": f"name {n}"} for n in range(5_000)]}
    assert holds("!result.exists(x, x.name == 'nobody' && x.id > 7)", long)
    assert holds("result.filter(x, x.id % 2 == 0).size() == 2500", long)


def test_long_text_can_be_searched() -> None:
    long = {"result": "lorem ipsum " * 80_000 + "the end"}
    assert holds("result.contains('the end') && result.endsWith('end')", long)
    assert holds("result.matches('the end$')", long)


def test_step_limit_is_not_shared() -> None:
    condition = compile_expression("a.all(x, x >= 0)", frozenset({"a"}))
    for _ in range(3):
        assert condition.holds({"a": list(range(15_000))})


def test_pattern_library_is_loaded_only_when_needed() -> None:
    program = (
        "import sys; from tenuto.model.flows.expressions.parser import compile_expression as c\n"
        "c('true', frozenset()); assert 're2' not in sys.modules\n"
        "c('\"\".matches(\"\")', frozenset()); assert 're2' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def answer(text: str, variables: Mapping[str, Any]) -> bool | str:
    """Yes, no or the code of `Invalid`; anything else is a fault."""
    try:
        result: bool | str = compile_expression(text, frozenset(variables)).holds(variables)
    except Invalid as error:
        result = error.code
    assert result in {True, False, "expression_invalid", "expression_failed"}
    return result


@given(st.text(st.characters(exclude_categories=[]), max_size=60))
@example("'\ud800'")
@example("\x00")
def test_any_text_parses_or_is_refused(text: str) -> None:
    answer(text, VARIABLES)


@settings(max_examples=500)
@given(st.lists(WORDS, max_size=25).map(" ".join))
def test_any_tokens_parse_or_are_refused(text: str) -> None:
    answer(text, VARIABLES)


@given(st.sampled_from(lines(TRUE)), JSON, JSON, JSON)
def test_any_json_evaluates_or_fails(text: str, result: Any, task: Any, given_input: Any) -> None:
    variables = {"result": result, "task": task, "input": given_input}
    assert answer(text.replace("\x01", "\n"), variables) != "expression_invalid"


@given(JSON, JSON)
def test_equality_is_symmetric(left: Any, right: Any) -> None:
    sides = {"result": left, "task": right}
    assert answer("result == task", sides) == answer("task == result", sides)
    copy = {"result": left, "task": json.loads(json.dumps(left))}
    assert answer("result == task || result != result", copy) in {True, "expression_failed"}


def test_expression_page_lists_the_limits() -> None:
    page = (Path(__file__).parents[3] / "docs" / "expressions.md").read_text()
    for limit in (MAX_EXPRESSION, MAX_NESTING, MAX_STEPS, MAX_PATTERNS):
        assert f"{limit:,}" in page
